"""CPU time and memory of the local process that listens at an address. Linux only.

The `--workers` of one `txbroker proxy` count together, because they share the work.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from txbroker.cli.proxy.lifeline import WORKER_MODULE

_LISTEN = "0A"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_PROC = Path("/proc")
_PARENT, _USER, _SYSTEM = 1, 11, 12
"""Positions in `_stat`: the parent's id, and user and system time."""
_ERRORS = (OSError, ValueError, IndexError)


class ListeningProcess:
    """The process that listens at an address; unknown on other machines, and for other users'
    processes."""

    def __init__(self, host: str, port: int) -> None:
        process = _process_at(port) if _is_local(host) else None
        self._processes = [] if process is None else _with_other_workers(process)

    def cpu_s(self) -> float | None:
        """Return its CPU time in seconds, None if unknown."""
        with contextlib.suppress(*_ERRORS):
            times = [_stat(process)[_USER : _SYSTEM + 1] for process in self._processes]
            return sum(int(ticks) for pair in times for ticks in pair) * _TICK_S if times else None
        return None

    def memory_mib(self) -> float | None:
        """Return its resident memory, None if unknown."""
        with contextlib.suppress(*_ERRORS):
            pages = [int((path / "statm").read_text().split()[1]) for path in self._processes]
            return round(sum(pages) * _PAGE_BYTES / 2**20, 1) if pages else None
        return None


def _stat(process: Path) -> list[str]:
    """Return the fields of `stat` after the process's name, which may contain spaces."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _with_other_workers(process: Path) -> list[Path]:
    """Return a process; for a worker its parent and the parent's workers."""
    parent = _parent_of_worker(process)
    if not parent:
        return [process]
    workers = [path for path in _PROC.glob("[0-9]*") if _parent_of_worker(path) == parent]
    return [_PROC / parent, *workers]


def _parent_of_worker(process: Path) -> str:
    """Return the id of a worker's parent, "" for another process."""
    with contextlib.suppress(*_ERRORS):
        if WORKER_MODULE.encode() in (process / "cmdline").read_bytes().split(b"\0"):
            return _stat(process)[_PARENT]
    return ""


def _is_local(host: str) -> bool:
    """Return True if a socket can be bound to the host's address."""
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.bind(address)
                return True
    return False


def _process_at(port: int) -> Path | None:
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for process in _PROC.glob("[0-9]*") if sockets else ():
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) in sockets:
                        return process
    return None


def _inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]
