"""Proxies that start in no time: forks of a process that has imported everything.

`forks.py` is that process: each connection to its socket asks for one fork, gets the fork's process
id at once and its exit code when it ends. `Forge` is the other end.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_REQUEST_BYTES_MAX = 1 << 20


class Fork:
    """A fork, with what `asyncio.subprocess.Process` has and the tests need."""

    def __init__(
        self,
        pid: int,
        line: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        *outputs: asyncio.StreamReader,
    ) -> None:
        self.pid = pid
        self._line = line  # kept, as the connection ends with it
        self.returncode: int | None = None
        self.stdout, self.stderr = outputs
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        line = await self._line[0].readline()
        # Without a line the parent of all forks is gone, and this one with it.
        self.returncode = int(line) if line else -signal.SIGKILL
        self._line[1].close()

    async def wait(self) -> int:
        await asyncio.shield(self._watching)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal.

        Raises:
            ProcessLookupError: it has ended.
        """
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forge:
    """The process that forks are made of; ends with this one.

    Args:
        folder: where its socket is.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "forge"
        self._path.unlink(missing_ok=True)
        self._parent = subprocess.Popen([sys.executable, "-m", __spec__.name, str(self._path)])

    def close(self) -> None:
        self._parent.kill()
        self._parent.wait()

    async def fork(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Fork:
        """Run `patched_proxy.py` with these arguments, nothing else in its environment."""
        asking = await self._connected()
        pipes = [os.pipe(), os.pipe()]
        request = json.dumps([list(arguments), dict(environment)]).encode()
        socket.send_fds(asking, [request + b"\n"], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        line = await asyncio.open_connection(sock=asking)
        pid = int(await line[0].readline())
        return Fork(pid, line, *[await _reading(read) for read, _ in pipes])

    async def _connected(self) -> socket.socket:
        while True:
            asking = socket.socket(socket.AF_UNIX)
            try:
                asking.connect(str(self._path))
            except (FileNotFoundError, ConnectionRefusedError):
                asking.close()
                assert self._parent.poll() is None, "nothing to fork"
                await asyncio.sleep(0.05)
            else:
                return asking


async def _reading(pipe: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 22)
    loop = asyncio.get_running_loop()
    file = os.fdopen(pipe, "rb", buffering=0)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    return reader


# --- the process that forks ------------------------------------------------------------------


def main(path: str) -> None:
    """Fork whenever asked, for as long as the parent lives."""
    from tests.faults import patched_proxy

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    patched_proxy.import_all()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    children: dict[int, socket.socket] = {}
    # Nothing of Python's may run in a thread here: only the main one forks.
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap(children))
    assert threading.active_count() == 1
    while True:
        asking, _ = listening.accept()
        request, files, _, _ = socket.recv_fds(asking, _REQUEST_BYTES_MAX, 2)
        while not request.endswith(b"\n"):
            request += asking.recv(_REQUEST_BYTES_MAX)
        arguments, environment = json.loads(request)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid == 0:
            listening.close()
            for other in (asking, *children.values()):
                other.close()
            _become(arguments, environment, files)
        children[pid] = asking
        asking.send(b"%d\n" % pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        for file in files:
            os.close(file)


def _reap(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with children.pop(pid) as channel:
            try:
                channel.send(b"%d\n" % os.waitstatus_to_exitcode(status))
            except OSError:
                continue


def _become(arguments: list[str], environment: dict[str, str], files: list[int]) -> None:
    """Be a proxy, and end with its exit code."""
    from tests.faults import patched_proxy

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for file, number in zip(files, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    code: object = 1
    try:
        patched_proxy.run(arguments)
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    main(sys.argv[1])
