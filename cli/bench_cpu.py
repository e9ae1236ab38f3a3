"""CPU time and memory of the process of this machine that listens at an address. Linux only."""

import contextlib
import os
import socket
from pathlib import Path

_LISTEN = "0A"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_PROC = Path("/proc")


class Listener:
    """Whoever listens at an address of this machine; knows nothing of one elsewhere, or of one
    whose owner lets nobody look."""

    def __init__(self, host: str, port: int) -> None:
        self._process = _process_at(port) if _is_here(host) else None

    def cpu_s(self) -> float | None:
        """Return the seconds of CPU that the process has taken, None where nobody knows."""
        if self._process is None:
            return None
        with contextlib.suppress(OSError, ValueError, IndexError):
            # Behind the name, which may hold spaces: times of user and system are fields 14, 15.
            fields = (self._process / "stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) * _TICK_S
        return None

    def memory_mib(self) -> float | None:
        """Return how much memory the process has in use, None where nobody knows."""
        if self._process is None:
            return None
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = int((self._process / "statm").read_text().split()[1])
            return round(pages * _PAGE_BYTES / 2**20, 1)
        return None


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
    for process in _PROC.glob("[0-9]*"):
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
