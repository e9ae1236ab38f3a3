"""A proxy process on a real Kafka: start, kill, call and read it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import aiohttp

from tests.faults.judge import Rec
from tests.kit.http_calls import HttpCalls, Json
from tests.kit.topic_reader import create_topic, delete_topic, read_topics
from tests.kit.until import DEADLINE_S, free_ports, unique, until

HERE = Path(__file__).parent
RUBBISH = ("Traceback", "Task was destroyed", "never retrieved", "never awaited")
"""Texts that must never appear in the output of a proxy."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class ProxyProcess(HttpCalls):
    """One installation of txbroker on a Kafka: its proxy, its topics, the calls of a test.

    `program` and `environment` select the build: by default the installed one.

    Args:
        bootstrap: of the Kafka.
        command: `proxy`, or `dev`, which brings its own Kafka.
        settings: changes to the proxy's settings.
    """

    program: Sequence[str] = (str(Path(sys.executable).with_name("txbroker")),)
    environment: Mapping[str, str] = MappingProxyType({})

    def __init__(self, bootstrap: str, *, command: str = "proxy", **settings: Any) -> None:
        self._command = command
        self._given = settings
        self.bootstrap = bootstrap
        self.prefix = str(settings.get("topic_prefix") or unique("e2e"))
        self.url = f"http://127.0.0.1:{free_ports(1)[0]}"
        # Proxies of different tests may have one name, as on different machines.
        folder = tempfile.mkdtemp(prefix="txbroker-data-")
        weakref.finalize(self, shutil.rmtree, folder, True)
        self._settings = {
            **({"kafka": bootstrap} if bootstrap else {}),
            "listen": self.url.removeprefix("http://"),
            "instance": "one",
            "data_dir": folder,
            "topic_prefix": self.prefix,
            "partitions": 4,
            "check_timeout_s": 2.0,
            "log_format": "console",
            **settings,
        }
        self._process: asyncio.subprocess.Process | None = None
        self._reading: list[asyncio.Task[None]] = []
        self.stdout: list[str] = []
        self.stderr: list[str] = []

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def twin(self) -> ProxyProcess:
        """Return another proxy with the same settings, not started yet, at another URL."""
        return ProxyProcess(
            self.bootstrap, command=self._command, **{**self._given, "topic_prefix": self.prefix}
        )

    # --- life ----------------------------------------------------------------------------

    async def launch(self) -> None:
        """Start the proxy's process, without waiting for anything."""
        assert self._process is None
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TXBROKER_")}
        given = {f"TXBROKER_{k.upper()}": str(v) for k, v in self._settings.items()}
        process = await self._spawn({**inherited, **given, **self.environment})
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        self._reading = [
            asyncio.create_task(_collect(process.stdout, self.stdout)),
            asyncio.create_task(_collect(process.stderr, self.stderr)),
        ]

    async def _spawn(self, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self.program,
            self._command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 22,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )

    async def start(self) -> None:
        await self.launch()
        await self.ready()

    async def ready(self) -> None:
        await until(self.is_ready)

    async def is_ready(self) -> bool:
        """Return whether the proxy is ready; its process must be alive."""
        return await self._answers_ok("/readyz")

    async def is_alive(self) -> bool:
        """Return whether the proxy answers, ready or not."""
        return await self._answers_ok("/healthz")

    async def _answers_ok(self, path: str) -> bool:
        assert self._process is not None
        assert self._process.returncode is None, "\n".join(self.stderr[-20:])
        try:
            status, _ = await self.request("GET", path)
        except aiohttp.ClientError:
            return False
        return status == 200

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def again(self) -> None:
        """Restart the proxy, in any state."""
        await self.kill()
        await self.launch()

    def pause(self) -> None:
        """Let the proxy hang, as a machine does that swaps or migrates."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    async def stop(self) -> int:
        """End the proxy in an orderly way; return its exit code."""
        return await self._end(signal.SIGTERM)

    async def ended(self) -> int:
        assert self._process is not None
        code = await asyncio.wait_for(self._process.wait(), DEADLINE_S)
        await self._end(signal.SIGKILL)
        return code

    async def _end(self, how: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(how)
            process.send_signal(signal.SIGCONT)
        try:
            code = await asyncio.wait_for(process.wait(), DEADLINE_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        await asyncio.gather(*self._reading)
        return code

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the process if it runs; its output must be clean."""
        # Shown where the test fails.
        print(f"--- {self.url}", *self.stderr[-200:], sep="\n")
        code = await self.stop()
        output = "\n".join(self.stderr)
        assert code == 0, f"exit code {code}\n{output}"
        for word in RUBBISH:
            assert word not in output, output

    # --- calls ---------------------------------------------------------------------------

    async def request(
        self, method: str, path: str, body: Any = None, **options: Any
    ) -> tuple[int, Json]:
        """Return status and answer, of errors too."""
        if body is not None:
            options["json"] = body
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.request(method, self.url + path, **options) as response,
        ):
            return response.status, await response.json()

    async def text(self, path: str) -> str:
        """Return the answer to a GET that is no JSON."""
        async with aiohttp.ClientSession() as http, http.get(self.url + path) as response:
            assert response.status == 200
            return await response.text()

    async def call(self, method: str, path: str, body: Any = None) -> Json:
        """Return the answer to a call that succeeds; see `checked`."""
        return (await self.checked(method, path, body))[1]

    async def prepare(self, *messages: Json, group: str = "orders", **fields: Any) -> str:
        body = {"group": group, "messages": list(messages), **fields}
        return str((await self.call("POST", "/v1/transactions", body))["id"])

    async def unsettled(self, group: str = "") -> list[Json]:
        """Return (the first thousand of) the transactions that are not settled."""
        query = "limit=1000" + (f"&group={group}" if group else "")
        return list((await self.call("GET", f"/v1/transactions?{query}"))["transactions"])

    async def all_settled(self, group: str = "") -> None:
        """Wait until nothing is pending or being promoted."""

        async def nothing() -> bool:
            left = await self.unsettled(group)
            return not [t for t in left if t["state"] not in ("parked", "refused")]

        await until(nothing)

    # --- topics --------------------------------------------------------------------------

    async def topic(self, partitions: int = 1, **configs: str) -> str:
        """Create a topic of the test's own."""
        name = unique("topic")
        # Kafka's retention goes by the timestamps that producers set.
        configs = {"retention_ms": "-1", **configs}
        return await asyncio.to_thread(create_topic, self.bootstrap, name, partitions, **configs)

    async def create_again(self, name: str) -> None:
        await asyncio.to_thread(create_topic, self.bootstrap, name)

    async def delete_topic(self, name: str) -> None:
        await asyncio.to_thread(delete_topic, self.bootstrap, name)

    async def visible(self, *names: str) -> list[Rec]:
        """Return what a read_committed consumer sees of topics."""
        return await asyncio.to_thread(read_topics, self.bootstrap, names)

    async def own(self, name: str) -> list[Rec]:
        names = [f"{self.prefix}.{name}"]
        return await asyncio.to_thread(read_topics, self.bootstrap, names, committed=False)


def die_with_parent() -> None:
    """Be killed when the tests' process ends, however that happens."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def _collect(stream: asyncio.StreamReader, lines: list[str]) -> None:
    async for line in stream:
        lines.append(line.decode(errors="replace").rstrip())
