"""Locks on an object store: files that their holders renew.

    LOCK/N    the lock, held for the Nth time; the greatest N counts

A process takes a lock by creating the next file, which only one can, and removes the earlier ones.
A lock is free where its holder has released it or has not renewed it for `EXPIRY_S`, by the clock
of the store. A holder that was paused meanwhile finds a greater number than its own.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from msgspec import Struct, structs

from txbroker.errors import TxbrokerError
from txbroker.spark.storage.hadoop import HadoopStorage

EXPIRY_S = 60.0
RENEW_S = 15.0
"""A store that does not answer may cost two renewals."""
POLL_S = 1.0
SETTLE_S = 1.0
"""How long two processes that both find no file may take to create it."""


class LockLost(TxbrokerError):
    """Another process has taken over a lock: this one must not change anything more."""


class Holder(Struct, frozen=True):
    """Who holds a lock.

    Attributes:
        token: random, of this one time.
        pid, host: of the process.
        released: whether it has given the lock back.
    """

    token: str
    pid: int
    host: str
    released: bool = False


class HeldLock(Struct, frozen=True):
    """A lock that another process holds, and for how long if it was killed, seconds."""

    holder: Holder
    left_s: float


class NumberedFiles:
    """Files in a folder, named by numbers that grow by one; of several processes that add the same
    number, one succeeds. `suffix`: what follows the numbers."""

    def __init__(self, storage: HadoopStorage, folder: str, suffix: str = "") -> None:
        self.storage, self.folder, self._suffix = storage, folder, suffix

    def newest(self) -> int:
        """Return the greatest number; 0: there is no file."""
        return max(self._numbers(), default=0)

    def path(self, number: int) -> str:
        """Return the path of a file."""
        return f"{self.folder}/{number}{self._suffix}"

    def read(self, number: int) -> bytes | None:
        """Return the content of a file; None where it was removed."""
        return self.storage.read(self.path(number))

    def add(self, number: int, content: bytes) -> bool:
        """Create a file; return whether this process did. `content`: no other process has the
        same."""
        path = self.path(number)
        if not self.storage.create(path, content):
            return False
        if self.storage.creates_alone(path):
            return True
        time.sleep(SETTLE_S)
        return self.storage.read(path) == content

    def remove_before(self, number: int) -> None:
        """Remove the files with smaller numbers."""
        for each in self._numbers():
            if each < number:
                self.storage.remove(self.path(each))

    def _numbers(self) -> list[int]:
        names = (name.removesuffix(self._suffix) for name in self.storage.names(self.folder))
        return [int(name) for name in names if name.isdigit()]


class StoreLock:
    """A lock that this process holds or asks for.

    Attributes:
        taken_over: whether its last holder has not released it.
    """

    def __init__(self, storage: HadoopStorage, folder: str) -> None:
        self._files = NumberedFiles(storage, folder)
        self._holder = Holder(secrets.token_hex(8), os.getpid(), socket.gethostname())
        self._number = 0
        self._ended = threading.Event()
        self.taken_over = False

    def take(self) -> HeldLock | None:
        """Take the lock; return who holds it if it is not free."""
        while True:
            newest = self._files.newest()
            last = self._read(newest) if newest else None
            if newest and last is None:
                continue  # the next holder has just removed it
            if last is not None and not last.released:
                left_s = EXPIRY_S - self._age_s(newest)
                if left_s > 0:
                    return HeldLock(last, left_s)
            if self._files.add(newest + 1, msgspec.json.encode(self._holder)):
                self._number = newest + 1
                self.taken_over = last is not None and not last.released
                self._files.remove_before(self._number)
                return None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Renew the lock, which was taken, during the block; release it at the end."""
        renewing = threading.Thread(target=self._renew, name="lease", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            self._ended.set()
            renewing.join()
            # Otherwise it expires.
            with contextlib.suppress(TxbrokerError):
                self.check()
                released = structs.replace(self._holder, released=True)
                self._write(released)

    def check(self) -> None:
        """Renew the lock.

        Raises:
            LockLost: another process has taken it over.
        """
        newest = self._files.newest()
        if newest != self._number or self._read(newest) != self._holder:
            raise LockLost(
                f"another process has taken over the lock {self._files.folder}, which this one had "
                f"not renewed for {EXPIRY_S:g} s: run the command again"
            )
        self._write(self._holder)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            # Only a commit has to know.
            with contextlib.suppress(Exception):
                self.check()

    def _read(self, number: int) -> Holder | None:
        content = self._files.read(number)
        return None if content is None else msgspec.json.decode(content, type=Holder)

    def _write(self, holder: Holder) -> None:
        path = self._files.path(self._number)
        self._files.storage.write(path, msgspec.json.encode(holder))

    def _age_s(self, number: int) -> float:
        """Return how long ago a file was written, by the clock of the store."""
        storage, probe = self._files.storage, f"{self._files.folder}/now-{self._holder.token}"
        written_ms = storage.modified_ms(self._files.path(number))
        storage.write(probe, b"")
        try:
            return (storage.modified_ms(probe) - written_ms) / 1000
        finally:
            storage.remove(probe)
