"""Locks in a data folder, which the system releases when their process dies. Needs no Spark."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from txbroker.errors import ConfigurationError

_RUN_LOCK, _TABLES_LOCK = "audit.lock", "tables.lock"


@contextmanager
def alone(data_dir: Path) -> Iterator[None]:
    """Lock a data folder for an audit during the block.

    Raises:
        ConfigurationError: another audit holds it, or the folder cannot be used.
    """
    with _opened(data_dir, _RUN_LOCK) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            by = os.pread(handle, 20, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigurationError(
                f"another audit (process {by}) is running on {data_dir}: wait for its end, or "
                "name another --data-dir"
            ) from None
        with suppress(OSError):  # a full disk: the number is for a message only
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield


@contextmanager
def tables_locked(data_dir: Path) -> Iterator[None]:
    """Lock the tables during the block; wait for another process that changes them.

    Only a change holds it, not the whole audit, so tables can be compacted beside one.
    """
    with _opened(data_dir, _TABLES_LOCK) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def _opened(data_dir: Path, name: str) -> Iterator[int]:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(data_dir / name, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigurationError(f"the data folder {data_dir} cannot be used: {error}") from None
    try:
        yield handle
    finally:
        os.close(handle)  # releases the lock, as the death of this process would
