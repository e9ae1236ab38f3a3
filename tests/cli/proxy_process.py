"""A `txbroker proxy` process, whose log lines a test waits for."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.kit.cli import TXBROKER

DEADLINE_S = 60.0


class ProxyProcess:
    """A running command; `lines` has the JSON lines of its log so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self.other: list[str] = []

    async def until(self, event: str) -> dict[str, Any]:
        """Return the next log line of an event."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = await self._line()
                assert found is not None, (event, self.lines, self.other)
                if found.get("event") == event:
                    return found

    async def ready(self) -> str:
        """Return the URL of its ready line."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            line = (await self.process.stdout.readline()).decode()
        assert line.startswith("ready "), (line, self.lines, self.other)
        return line.split()[1]

    async def ended(self) -> int:
        """Wait for its end, and return its exit code."""
        async with asyncio.timeout(DEADLINE_S):
            while await self._line() is not None:
                pass
            return await self.process.wait()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the log lines of an event read so far."""
        return [line for line in self.lines if line.get("event") == name]

    @property
    def error(self) -> str:
        """The sentence with which it ended."""
        return "".join(self.other)

    async def _line(self) -> dict[str, Any] | None:
        assert self.process.stderr is not None
        text = (await self.process.stderr.readline()).decode()
        if not text:
            return None
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError:
            self.other.append(text)
            return {}
        self.lines.append(found)
        return found


@asynccontextmanager
async def proxy_process(
    data_dir: Path, kafka: str, *words: object, environ: Mapping[str, str] | None = None
) -> AsyncIterator[ProxyProcess]:
    """Run `txbroker proxy` during the block, by default on a free port."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TXBROKER_")}
    process = await asyncio.create_subprocess_exec(
        str(TXBROKER),
        "proxy",
        *("--kafka", kafka, "--data-dir", str(data_dir), "--log-format", "json"),
        *("--listen", "127.0.0.1:0"),
        *map(str, words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1024 * 1024,
        env={**inherited, **(environ or {})},
    )
    try:
        yield ProxyProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def address_of(bound: socket.socket) -> str:
    return f"127.0.0.1:{bound.getsockname()[1]}"
