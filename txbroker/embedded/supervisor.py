"""Run Kafka as the child of a small process that ends it when the parent has died.

Started by path, with only the standard library, so that it is up in milliseconds. Its stdin is a
pipe
from the parent: the line `stop` stops Kafka gracefully; `kill`, or the end of the pipe after the
parent's death, kills it. Its stdout is one line with Java's process id. It also polls its parent's
process id, because a forked sibling may keep the pipe open. If it is killed, the kernel kills Java.

Arguments: the parent's process id, the lock's file descriptor or -1, the log file, the folder to
remove at the end or an empty string, then the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from types import FrameType

_POLL_S = 0.25
_PR_SET_PDEATHSIG = 1


def _die_with_supervisor() -> None:
    # Linux only; elsewhere a killed supervisor leaves Kafka running until the next start.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Supervisor:
    def __init__(self, parent: int, java: subprocess.Popen[bytes]) -> None:
        self._parent = parent
        self._java = java
        self.orphaned = False

    def run(self) -> int:
        """Execute the parent's commands until Java has ended; return its exit code."""
        while self._java.poll() is None and not self.orphaned:
            ready, _, _ = select.select([0], [], [], _POLL_S)
            if ready:
                self._execute(os.read(0, 64))
            if os.getppid() != self._parent:
                self.orphaned = True
        if self.orphaned:
            self._java.kill()
        return self._java.wait()

    def _execute(self, command: bytes) -> None:
        if not command:
            self.orphaned = True
        elif b"kill" in command:
            self._java.kill()
            self._java.wait()
        elif b"stop" in command:
            self._java.terminate()

    def on_terminate(self, _signal: int, _frame: FrameType | None) -> None:
        """Forward a service manager's SIGTERM."""
        self._java.terminate()


def main(arguments: list[str]) -> int:
    """Start and supervise the command; return its exit code."""
    parent, lock, log_path, remove, *command = arguments
    lock_fds = [int(lock)] if int(lock) >= 0 else []
    with open(log_path, "ab") as log:
        # Java inherits the lock, so the folder is free only after Java has ended.
        java = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=lock_fds,
            preexec_fn=_die_with_supervisor,
        )
    supervisor = _Supervisor(int(parent), java)
    signal.signal(signal.SIGTERM, supervisor.on_terminate)
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{java.pid}\n".encode())
    code = supervisor.run()
    if supervisor.orphaned and remove:
        shutil.rmtree(remove, ignore_errors=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
