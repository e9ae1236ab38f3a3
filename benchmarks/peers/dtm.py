"""dtm, a transaction manager in Go: its two-phase message, by its built-in store, to an HTTP sink.

It has no broker: a message is an HTTP call that dtm repeats until it succeeds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast
from urllib.parse import parse_qs, urlsplit

import uvloop

from benchmarks.peers.base import (
    Figure,
    Missing,
    Plan,
    child,
    free_ports,
    run_lanes,
    times_of,
    wait_for_port,
)
from txbroker.cli.bench.http import BenchConnection
from txbroker.embedded.jars import cache_dir

MODULE, VERSION = "github.com/dtm-labs/dtm", "v1.19.0"
BUILD_S = 1800.0
START_S = 60.0
_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 24\r\n\r\n"
    b'{"dtm_result":"SUCCESS"}'
)


class Dtm:
    """dtm's two-phase message: prepare and submit over HTTP, then it calls the sink."""

    name = "dtm"
    title = f"dtm {VERSION.removeprefix('v')}"
    counts = (
        "prepare and submit of a two-phase message, both answered from its built-in store (bolt), "
        "which it means for development; delivered by an HTTP call to a sink, at least once"
    )

    def __init__(self) -> None:
        self._program = cache_dir() / "tools" / f"dtm-{VERSION}"

    def version(self) -> str:
        """Return name and version of the software; it is built the first time.

        Raises:
            Missing: there is no Go, or it does not build.
        """
        if not self._program.exists():
            _build(self._program)
        return f"{MODULE} {VERSION}"

    def turn(self, plan: Plan, folder: Path) -> Iterator[Figure]:
        http, grpc, rpc = free_ports(3)
        ports = f"HttpPort: {http}\nGrpcPort: {grpc}\nJsonRpcPort: {rpc}\n"
        (folder / "dtm.yml").write_text(f"{ports}LogLevel: error\n")
        command = [str(self._program), "-c", str(folder / "dtm.yml")]
        with child(command, folder, "dtm") as server:
            wait_for_port(http, lambda: server.poll() is None, START_S, "dtm")
            for in_flight in plan.in_flight:
                yield uvloop.run(_measure(f"http://127.0.0.1:{http}", plan, in_flight))


def _build(program: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise Missing("it takes Go to build it")
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="txbroker-dtm-") as folder:
        built = Path(folder) / "dtm"
        # A module that requires this exact version, verified by Go's checksum database.
        for arguments in (
            ("mod", "init", "txbroker.example/peers"),
            ("get", f"{MODULE}@{VERSION}"),
            ("build", "-o", str(built), MODULE),
        ):
            try:
                done = subprocess.run(
                    [go, *arguments],
                    cwd=folder,
                    env={**os.environ, "CGO_ENABLED": "0"},
                    capture_output=True,
                    text=True,
                    timeout=BUILD_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise Missing(
                    f"`go {arguments[0]}` took more than {BUILD_S / 60:.0f} min"
                ) from None
            if done.returncode != 0:
                last = (done.stderr.strip().splitlines() or ["without output"])[-1]
                raise Missing(f"`go {arguments[0]}` failed: {last.strip()}")
        shutil.move(built, program)


class Sink:
    """When each message began, and when its call came."""

    def __init__(self) -> None:
        self.began: dict[str, float] = {}
        self.times: list[tuple[float, float]] = []

    def note(self, target: str) -> None:
        """Note the call of a message, which names its transaction."""
        (gid,) = parse_qs(urlsplit(target).query).get("gid", [""])
        began = self.began.pop(gid, None)
        if began is not None:
            now = time.monotonic()
            self.times.append((now, now - began))


class SinkConnection(asyncio.Protocol):
    """Answers calls one after another, with as little work as can be."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._transport: asyncio.Transport | None = None
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to answer."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer every call that is whole by now."""
        assert self._transport is not None
        self._read += data
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            head = self._read[:end].decode("latin-1")
            length = re.search(r"content-length: *(\d+)", head, re.IGNORECASE)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self._read) < whole:
                return
            self._read = self._read[whole:]
            self._sink.note(head.split(maxsplit=2)[1])
            self._transport.write(_ANSWER)


@asynccontextmanager
async def _sink() -> AsyncIterator[tuple[Sink, str]]:
    sink = Sink()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: SinkConnection(sink), "127.0.0.1", 0)
    try:
        yield sink, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _measure(url: str, plan: Plan, in_flight: int) -> Figure:
    payload = json.dumps({"value": os.urandom(plan.size).hex()[: plan.size]})
    numbers = itertools.count()
    connections = [BenchConnection(url) for _ in range(in_flight)]
    async with _sink() as (sink, where):
        body = {
            "trans_type": "msg",
            "steps": [{"action": f"{where}/message"}],
            "payloads": [payload],
            "query_prepared": f"{where}/check",
        }

        async def message(lane: int) -> int:
            gid = f"{os.getpid()}-{in_flight}-{next(numbers)}"
            asked = {**body, "gid": gid}
            await connections[lane].post("/api/dtmsvr/prepare", asked)
            sink.began[gid] = time.monotonic()
            await connections[lane].post("/api/dtmsvr/submit", asked)
            return 1

        begin = time.monotonic() + plan.warmup_s
        per_s, times = await run_lanes(plan, in_flight, message)
        end = begin + plan.duration_s
        if not sink.times:
            raise Missing("it called the sink for no message")
        took = [seconds for at, seconds in sink.times if begin <= at <= end]
        for connection in connections:
            connection.close()
    return Figure(
        in_flight,
        round(min(per_s, len(took) / plan.duration_s), 1),
        times_of(times),
        times_of(took),
        {"submitted_per_s": round(per_s, 1)},
    )
