"""CPU time and memory of the process of this machine that listens at an address. Linux only.

The `--workers` of one `txbroker proxy` count together: they share the work of each transaction.
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
"""Where the parent's number and the times of user and system stand in what `_stat` returns."""


class ListeningProcess:
    """Whoever listens at an address of this machine; knows nothing of one elsewhere, or of one
    whose owner lets nobody look."""

    def __init__(self, host: str, port: int) -> None:
        found = _process_at(port) if _is_here(host) else None
        self._processes = [] if found is None else _with_other_workers(found)

    def cpu_s(self) -> float | None:
        """Return the seconds of CPU that it has taken, None where nobody knows."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            times = [_stat(process)[_USER : _SYSTEM + 1] for process in self._processes]
            return sum(int(ticks) for each in times for ticks in each) * _TICK_S if times else None
        return None

    def memory_mib(self) -> float | None:
        """Return how much memory it has in use, None where nobody knows."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = [int((each / "statm").read_text().split()[1]) for each in self._processes]
            return round(sum(pages) * _PAGE_BYTES / 2**20, 1) if pages else None
        return None


def _stat(process: Path) -> list[str]:
    """Return what the kernel says of a process, behind its name, which may hold spaces."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _with_other_workers(process: Path) -> list[Path]:
    """Return a process; a worker with its parent and the parent's other workers."""
    if not _is_worker(process):
        return [process]
    with contextlib.suppress(OSError, IndexError):
        parent = _stat(process)[_PARENT]
        return [_PROC / parent, *(each for each in _processes() if _child_of(parent, each))]
    return [process]


def _child_of(parent: str, process: Path) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return _stat(process)[_PARENT] == parent and _is_worker(process)
    return False


def _is_worker(process: Path) -> bool:
    with contextlib.suppress(OSError):
        return WORKER_MODULE.encode() in (process / "cmdline").read_bytes().split(b"\0")
    return False


def _processes() -> Iterator[Path]:
    return _PROC.glob("[0-9]*")


def _is_here(host: str) -> bool:
    """Whether an address is one of this machine's: only then a socket can be bound to it."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False


def _process_at(port: int) -> Path | None:
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    if not sockets:
        return None
    for process in _processes():
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) in sockets:
                        return process
    return None


def _inodes(port: int) -> set[str]:
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found
