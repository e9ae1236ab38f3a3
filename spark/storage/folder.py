"""The data folder of audits: their journal, the note of a running one, and two locks.

In a local folder, locks end with their process. On an object store they are leases, and the journal
is a file that is replaced as a whole.
"""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from txbroker.errors import ConfigurationError
from txbroker.spark.storage.hadoop import HadoopStorage
from txbroker.spark.storage.lease import POLL_S, LockLost, NumberedFiles, StoreLock
from txbroker.spark.storage.local import LocalStorage, local_path
from txbroker.spark.storage.storage import storage_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JOURNAL_FILE = "audit.db"
_RUN_LOCK, _TABLES_LOCK, _JOURNAL_LOCK = "audit", "tables", "journal"


class KeptFile(Protocol):
    """A file that is read and changed as a local one.

    Attributes:
        path: where it is kept.
    """

    path: Path | str

    def read(self) -> AbstractContextManager[Path | None]:
        """Yield the file, or a copy; None where it does not exist."""

    def changed(self) -> AbstractContextManager[Path]:
        """Yield the file, or a copy that takes its place at the end of the block, unless that
        raises. It need not exist."""


class DataFolder(Protocol):
    """The data folder of audits; made by `data_folder`.

    Every method raises a `ConfigurationError` where the folder cannot be used.

    Attributes:
        path: a path or URI.
        journal: the journal's file.
    """

    path: str
    journal: KeptFile

    def alone(self) -> AbstractContextManager[None]:
        """Lock the folder for an audit during the block; refuse where another audit holds it."""

    def tables_locked(self) -> AbstractContextManager[None]:
        """Lock the tables during the block; wait for another process that changes them.

        Only a change holds it, not the whole audit, so tables can be compacted beside one.
        """

    def check(self) -> None:
        """Raise a `LockLost` where another process has taken over a lock that this one holds, and
        was paused."""

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None where it does not exist."""

    def write(self, name: str, content: bytes) -> None:
        """Replace a small file."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""


def data_folder(path: "Path | str | DataFolder", spark: "SparkSession | None" = None) -> DataFolder:
    """Return a data folder; one that was opened before as it is. `spark`: needed for a URI.

    Raises:
        ConfigurationError: the session cannot reach it.
    """
    if not isinstance(path, Path | str):
        return path
    where = path if isinstance(path, Path) else local_path(path)
    if where is not None:
        return LocalFolder(where)
    if spark is None:
        raise ConfigurationError(f"{path} can only be used by a command that runs Spark")
    storage = storage_of(spark, str(path))
    assert isinstance(storage, HadoopStorage)
    return StoreFolder(storage, str(path).rstrip("/"))


def _running(path: str, by: str, more: str = "") -> ConfigurationError:
    return ConfigurationError(
        f"another audit ({by}) is running on {path}: wait for its end, or name another "
        f"--data-dir{more}"
    )


# --- on this machine -------------------------------------------------------------------------


class LocalFile:
    """A local file; see `KeptFile`."""

    def __init__(self, path: Path) -> None:
        self.path: Path | str = path
        self._path = path

    @contextmanager
    def read(self) -> Iterator[Path | None]:
        """Yield the file."""
        yield self._path if self._path.exists() else None

    @contextmanager
    def changed(self) -> Iterator[Path]:
        """Yield the file; its folder exists."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"the journal {self.path} cannot be opened: {error}") from None
        yield self._path


class LocalFolder:
    """A local data folder; see `DataFolder`."""

    def __init__(self, path: Path) -> None:
        self.path, self._path = str(path), path
        self.journal: KeptFile = LocalFile(path / JOURNAL_FILE)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold a file's lock."""
        with self._opened(_RUN_LOCK) as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                by = os.pread(handle, 20, 0).decode(errors="replace").strip() or "unknown"
                raise _running(self.path, f"process {by}") from None
            with suppress(OSError):  # a full disk: the number is for a message only
                os.ftruncate(handle, 0)
                os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            yield

    @contextmanager
    def tables_locked(self) -> Iterator[None]:
        """Hold a file's lock."""
        with self._opened(_TABLES_LOCK) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def check(self) -> None:
        """Do nothing: no lock of a living process is taken over."""

    def read(self, name: str) -> bytes | None:
        """Read a file."""
        return LocalStorage().read(f"{self._path}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Replace a file, which only this user may read."""
        LocalStorage().write(f"{self._path}/{name}", content, 0o600)

    def remove(self, name: str) -> None:
        """Remove a file."""
        LocalStorage().remove(f"{self._path}/{name}")

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._path / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"the data folder {self.path} cannot be used: {error}"
            ) from None
        try:
            yield handle
        finally:
            os.close(handle)  # releases the lock, as the death of this process would


# --- on an object store ----------------------------------------------------------------------


class StoredFile:
    """A file on an object store; see `KeptFile`.

    A change creates the next version. So it fails where another process has changed the file since
    it was read, as after a takeover of a lock, whose new holder adds a version.
    """

    def __init__(self, folder: "StoreFolder", versions: NumberedFiles) -> None:
        self.path: Path | str = versions.folder
        self._folder, self._versions = folder, versions

    @contextmanager
    def read(self) -> Iterator[Path | None]:
        """Yield a copy of the newest version."""
        _, content = self._newest()
        if content is None:
            yield None
            return
        with _copy(content) as path:
            yield path

    @contextmanager
    def changed(self) -> Iterator[Path]:
        """Yield a copy of the newest version, and create the next one of it."""
        with self._folder.locked(_JOURNAL_LOCK):
            number, content = self._newest()
            with _copy(content) as path:
                yield path
                changed = path.read_bytes() if path.exists() else None
            if changed is None or changed == content:
                return
            self._folder.check()
            if not self._versions.add(number + 1, changed):
                raise LockLost(
                    f"another process has changed {self.path} at the same moment: run the command "
                    "again"
                )
            # A reader may have just found the last version.
            self._versions.remove_before(number)

    def fence(self) -> None:
        """Create the next version, without a change: a process that has read this one can no
        longer change it."""
        while True:
            number, content = self._newest()
            if content is None or self._versions.add(number + 1, content):
                return

    def _newest(self) -> tuple[int, bytes | None]:
        while True:
            number = self._versions.newest()
            content = self._versions.read(number) if number else None
            if content is not None or not number:
                return number, content


@contextmanager
def _copy(content: bytes | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="txbroker-audit-") as folder:
        path = Path(folder, JOURNAL_FILE)
        if content is not None:
            path.write_bytes(content)
        yield path


class StoreFolder:
    """A data folder on an object store; see `DataFolder`.

    journal/N.db        version N of the journal
    locks/LOCK/N        see `lease`
    """

    def __init__(self, storage: HadoopStorage, path: str) -> None:
        self.path, self._storage = path, storage
        self._held: list[StoreLock] = []
        self._file = StoredFile(self, NumberedFiles(storage, f"{path}/journal", ".db"))
        self.journal: KeptFile = self._file

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold a lease, unless another process does."""
        lease = self._lease(_RUN_LOCK)
        other = lease.take()
        if other is not None:
            by = f"process {other.holder.pid} on {other.holder.host}"
            ends = f". If it was killed, its lock ends in {other.left_s:.0f} s"
            raise _running(self.path, by, ends)
        with self._holding(lease):
            yield

    def tables_locked(self) -> AbstractContextManager[None]:
        """Hold a lease, when no other process does."""
        return self.locked(_TABLES_LOCK)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold a lease, when no other process does."""
        lease = self._lease(name)
        while lease.take() is not None:
            time.sleep(POLL_S)
        with self._holding(lease):
            yield

    def check(self) -> None:
        """Renew the leases."""
        for lease in self._held:
            lease.check()

    def read(self, name: str) -> bytes | None:
        """Read a file."""
        return self._storage.read(f"{self.path}/{name}")

    def write(self, name: str, content: bytes) -> None:
        """Replace a file."""
        self._storage.write(f"{self.path}/{name}", content)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._storage.remove(f"{self.path}/{name}")

    def _lease(self, name: str) -> StoreLock:
        return StoreLock(self._storage, f"{self.path}/locks/{name}")

    @contextmanager
    def _holding(self, lease: StoreLock) -> Iterator[None]:
        self._held.append(lease)
        try:
            with lease.held():
                if lease.taken_over:
                    self._file.fence()
                yield
        finally:
            self._held.remove(lease)
