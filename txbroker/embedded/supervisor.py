"""Runs Kafka as the child of a small process that ends it when their parent is gone.

Started by path, with nothing but the standard library, so it is up in a few milliseconds. Its
stdin is a pipe from the parent: a line `stop` asks Kafka to end well, `kill` and the end of the
pipe (the parent died, however) end it at once. Its stdout tells the process id of Java in one
line. A parent's death is also seen by the parent's process id, because a forked brother may
keep the pipe open; and the kernel kills Java should this process itself be killed.

Arguments: parent's process id, the lock's file descriptor or -1, log file, folder to remove
at the end or an empty string, then the command.
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
    # Only Linux has it; elsewhere a killed supervisor leaves Kafka to the next start.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class _Supervisor:
    def __init__(self, parent: int, java: subprocess.Popen[bytes]) -> None:
        self._parent = parent
        self._java = java
        self.orphaned = False

    def run(self) -> int:
        """Carry out the parent's orders until Java has ended; returns Java's exit code."""
        while self._java.poll() is None and not self.orphaned:
            ready, _, _ = select.select([0], [], [], _POLL_S)
            if ready:
                self._obey(os.read(0, 64))
            if os.getppid() != self._parent:
                self.orphaned = True
        if self.orphaned:
            self._java.kill()
        return self._java.wait()

    def _obey(self, order: bytes) -> None:
        if not order:
            self.orphaned = True
        elif b"kill" in order:
            self._java.kill()
            self._java.wait()
        elif b"stop" in order:
            self._java.terminate()

    def on_terminate(self, _signal: int, _frame: FrameType | None) -> None:
        """Pass a service manager's SIGTERM on."""
        self._java.terminate()


def main(arguments: list[str]) -> int:
    """Start the command and watch over it; returns its exit code."""
    parent, lock, log_path, remove, *command = arguments
    lock_fds = [int(lock)] if int(lock) >= 0 else []
    with open(log_path, "ab") as log:
        # Java inherits the lock, so the folder is free only when Java really is gone.
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
