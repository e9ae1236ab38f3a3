"""A `txbroker dev` process, and results of commands."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

TXBROKER = Path(sys.executable).with_name("txbroker")
START_TIMEOUT_S = 90.0


class Result(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.out, self.err
        return json.loads(self.out)


Call = Callable[..., Result]


@contextlib.contextmanager
def running(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run a relay's command in a process, and wait until it runs."""
    command = [TXBROKER, *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "running" in process.stderr.readline()
            yield process
        finally:
            process.kill()


class Dev:
    """A `txbroker dev` process."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        self._command = [TXBROKER, "dev", "--data-dir", data_dir, "--listen", "127.0.0.1:0"]
        self._command += options
        self.data_dir = data_dir
        self._log = data_dir.with_suffix(".log")
        self.url = self.kafka = ""

    def launch(self) -> None:
        """Start it, without waiting for anything."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TXBROKER_")}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=inherited,
            )

    def start(self) -> None:
        self.launch()
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], START_TIMEOUT_S)
        line = self.process.stdout.readline().decode() if readable else ""
        match = re.fullmatch(r"ready (http://127\.0\.0\.1:\d+) kafka (127\.0\.0\.1:\d+)\n", line)
        assert match is not None, (line, self._log.read_text())
        self.url, self.kafka = match[1], match[2]

    @property
    def stderr(self) -> str:
        return self._log.read_text()

    def children(self) -> list[int]:
        return descendants(self.process.pid)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send it a signal; return its exit code and what else it wrote to stdout."""
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out.decode()


def descendants(pid: int, *, deep: bool = True) -> list[int]:
    """The children of a process and, if `deep`, theirs; those that end meanwhile are left out."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in list(Path(f"/proc/{pid}/task").iterdir()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for child in map(int, (thread / "children").read_text().split()):
                    found += [child, *(descendants(child) if deep else ())]
    return found


def until_gone(pids: list[int], deadline_s: float = 20.0) -> None:
    """Wait until none of these processes runs."""
    deadline = time.monotonic() + deadline_s
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
