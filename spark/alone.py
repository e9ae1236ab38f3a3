"""One audit at a time on a data folder, and nothing left over of one that died.

Before a run writes anything it notes down what it will write. Whoever runs next finds the note, and
removes those folders if the journal knows nothing of that run.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from txbroker.errors import ConfigurationError
from txbroker.spark.folders import Folders, remove
from txbroker.spark.journal import Journal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LOCK, _NOTE = "audit.lock", "audit.running"


class Note(Struct, frozen=True):
    """What a run writes, and what nobody needs once it counts.

    Attributes:
        run: its name.
        out: its output folder.
        stale: folders that are to be removed when it is in the journal.
    """

    run: str
    out: str
    stale: tuple[str, ...] = ()


@contextlib.contextmanager
def alone(data_dir: Path) -> Iterator[None]:
    """Hold a data folder until the end of the block.

    Raises:
        ConfigurationError: another audit holds it, or it cannot be written.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(data_dir / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigurationError(f"the data folder {data_dir} cannot be used: {error}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            by = os.pread(handle, 20, 0).decode(errors="replace").strip() or "unknown"
            raise ConfigurationError(
                f"another audit (process {by}) is running on {data_dir}: wait until it has ended, "
                "or give this one a data folder of its own"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)  # which gives the lock back; the system does so too if this process dies


def note_down(data_dir: Path, note: Note) -> None:
    """Say what a run is going to write or remove; replaces what was said before."""
    path = data_dir / _NOTE
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(note))
    fresh.replace(path)


def tidy_up(spark: "SparkSession", data_dir: Path, journal: Journal) -> str:
    """Finish what the last run has left undone; return the name of one that died, else nothing.

    What it wrote is removed if it is not in the journal, else what it has made superfluous.

    Raises:
        ConfigurationError: the output folder does not let itself be changed.
    """
    path = data_dir / _NOTE
    try:
        note = msgspec.json.decode(path.read_bytes(), type=Note)
    except FileNotFoundError:
        return ""
    except msgspec.MsgspecError:
        path.unlink()  # it died before it wrote anything
        return ""
    counts = journal.get(note.run) is not None
    for folder in note.stale if counts else Folders(note.out).all_of(note.run):
        remove(spark, folder)
    path.unlink()
    return "" if counts else note.run
