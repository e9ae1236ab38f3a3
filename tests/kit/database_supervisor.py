"""Run a database server for a test process, and end it with all its processes after that one.

Started by path, with only the standard library. Its stdin is a pipe from its parent: each line is a
command (`start`, `stop`, `kill`, `pause`, `resume`, `status`), and is answered by a line: the
server's process id, or 0 if it does not run. At the end of the pipe, or after the parent's death,
it kills the server and removes the folder. It also polls its parent's process id, because a forked
sibling may keep the pipe open. Orphans of the server become its children, so it finds also those.
If it is killed, the kernel kills the server.

Arguments: the parent's process id, the server's user or an empty string, the folder with the log
`log`, the name of the signal that shuts the server down, then the command.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.25
_STOP_S = 20.0
_ORPHANED_S = 1.0
_STEP_S = 0.005
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


def _die_with_supervisor() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _stat(pid: int | str) -> tuple[str, int]:
    """Return a process's state and its parent's id, ("", 0) if it is gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "", 0
    return state, int(parent)


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of all processes below one, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            children.setdefault(_stat(name)[1], []).append(int(name))
    parents = [pid]
    while parents:
        found = children.get(parents.pop(0), [])
        yield from found
        parents += found


class _Supervisor:
    def __init__(self, parent: int, user: str, folder: str, end: str, command: list[str]) -> None:
        self._parent = parent
        self._user = user
        self._folder = folder
        self._end = signal.Signals[end]
        self._command = command
        self._pid = 0

    def run(self) -> None:
        """Execute the parent's commands until it has ended."""
        while os.getppid() == self._parent:
            ready, _, _ = select.select([0], [], [], _POLL_S)
            if ready:
                line = os.read(0, 64)
                if not line:
                    return
                getattr(self, f"_{line.decode().strip()}")()
                self._reap()
                os.write(1, f"{self._pid}\n".encode())

    def close(self) -> None:
        """End everything, and remove the folder."""
        # A server that ends itself frees its System V memory, which the kernel would keep.
        self._shut_down(_ORPHANED_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        # The parent's user has the rights to drop only as root.
        drop = {"user": self._user, "group": os.stat(self._folder).st_gid, "extra_groups": []}
        with open(f"{self._folder}/log", "ab") as log:
            self._pid = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env={"PATH": os.defpath, "LC_ALL": "C", "HOME": self._folder},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_supervisor,
                **(drop if self._user else {}),
            ).pid

    def _stop(self) -> None:
        self._shut_down(_STOP_S)

    def _shut_down(self, limit_s: float) -> None:
        self._resume()
        if self._pid:
            os.kill(self._pid, self._end)
        deadline = time.monotonic() + limit_s
        while self._pid and time.monotonic() < deadline:
            time.sleep(_STEP_S)
            self._reap()
        self._kill()

    def _kill(self) -> None:
        # A stopped server starts no further process.
        self._pause()
        while True:
            self._signal(signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        self._pid = 0

    def _pause(self) -> None:
        while any(_stat(pid)[0] not in ("T", "Z", "X", "") for pid in descendants(os.getpid())):
            self._signal(signal.SIGSTOP)
            time.sleep(_STEP_S)

    def _resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _status(self) -> None:
        """Answer only."""

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if ended == self._pid:
                    self._pid = 0

    def _signal(self, what: signal.Signals) -> None:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, what)


def main(arguments: list[str]) -> None:
    """Supervise the server until the parent has ended."""
    parent, user, folder, end, *command = arguments
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor = _Supervisor(int(parent), user, folder, end, command)
    try:
        supervisor.run()
    finally:
        supervisor.close()


if __name__ == "__main__":
    main(sys.argv[1:])
