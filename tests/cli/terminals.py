"""Commands on a terminal of any kind, and what they write to it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from typing import Protocol

from tests.kit.cli import TXBROKER


class Terminal:
    """A command on a terminal, and its output."""

    def __init__(self, pid: int, handle: int) -> None:
        self.pid, self._handle = pid, handle
        self.text = ""

    def until(self, what: str, deadline_s: float = 30.0) -> None:
        """Read until this was written."""
        deadline = time.monotonic() + deadline_s
        while what not in self.text:
            assert time.monotonic() < deadline, self.text
            self._read(0.05)

    @property
    def screen(self) -> list[str]:
        """The visible lines, with their colours."""
        lines, row = [""], 0
        for part in re.split(r"(\x1b\[[0-9;?]*[A-Zhl]|\r?\n|\r)", self.text):
            if part.endswith("\n"):
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif part == "\x1b[2K":
                lines[row] = ""
            elif part == "\x1b[1A":
                row -= 1
            elif not re.fullmatch(r"\x1b\[\?25[hl]|\r", part):
                lines[row] += part
        return lines

    def wait(self) -> None:
        """Read its output, for a moment."""
        self._read(0.2)

    def type(self, text: str) -> None:
        """Type it."""
        os.write(self._handle, text.encode())

    def end(self) -> int:
        """Read the remaining output; return the exit code."""
        while self._read(0.05):
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self, wait_s: float) -> bool:
        if not select.select([self._handle], [], [], wait_s)[0]:
            return True
        try:
            raw = os.read(self._handle, 1 << 16)
        except OSError:
            return False
        self.text += raw.decode(errors="replace")
        return bool(raw)


class Run(Protocol):
    """Runs the command on a terminal."""

    def __call__(
        self,
        *arguments: str,
        width: int = 100,
        environ: Mapping[str, str] | None = None,
    ) -> Terminal:
        """Return the terminal, of 20 lines."""


@contextmanager
def on_terminal(config: Path) -> Iterator[Run]:
    """Yield a function that runs commands on terminals; `config` is their config folder."""
    running: list[Terminal] = []

    def run(
        *arguments: str, width: int = 100, environ: Mapping[str, str] | None = None
    ) -> Terminal:
        pid, handle = pty.fork()
        if pid == 0:
            kept = {k: v for k, v in os.environ.items() if not k.startswith(("TXBROKER_", "LC_"))}
            for name in ("COLUMNS", "LINES", "CI", "NO_COLOR"):
                kept.pop(name, None)
            kept |= {"TERM": "xterm", "LANG": "C.UTF-8", "XDG_CONFIG_HOME": str(config)}
            ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 20, width, 0, 0))
            os.execve(TXBROKER, [str(TXBROKER), *arguments], {**kept, **(environ or {})})
        running.append(Terminal(pid, handle))
        return running[-1]

    try:
        yield run
    finally:
        for terminal in running:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(terminal.pid, signal.SIGKILL)
                os.waitpid(terminal.pid, 0)
