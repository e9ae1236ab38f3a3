"""When a run counts, and what a dead one has left.

A run counts once its entry is in the journal. Before it writes anything it stores a note of its
folders in the data folder. The next run completes one that counts, and removes one that does not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct, structs
from pyspark.sql import SparkSession

from txbroker.errors import ConfigurationError
from txbroker.spark.folders import Folders
from txbroker.spark.journal import Journal
from txbroker.spark.lock import tables_locked
from txbroker.spark.schema import RunSummary
from txbroker.spark.storage.storage import storage_of
from txbroker.spark.tables.changes import changes, count_reopened, run_row
from txbroker.spark.tables.findings import count_findings
from txbroker.spark.tables.judged import JudgedRun
from txbroker.spark.tables.layout import DRIFT, LATENCY
from txbroker.spark.tables.measures import check_run
from txbroker.spark.tables.store import TableStore, open_store

_NOTE = "audit.running"


class RunNote(Struct, frozen=True):
    """The name and output folder of a run, and folders to remove once it is in the journal."""

    run: str
    out: str
    stale: tuple[str, ...] = ()


def note_down(data_dir: Path, note: RunNote) -> None:
    """Store the folders that a run will write or remove, in place of any earlier note."""
    path = data_dir / _NOTE
    fresh = path.with_suffix(".new")
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(msgspec.json.encode(note))
        fresh.replace(path)
    except OSError as error:
        raise _unusable(data_dir, error) from None


def _unusable(data_dir: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"the data folder {data_dir} cannot be used: {error}")


def commit(
    journal: Journal,
    store: TableStore,
    judged: JudgedRun,
    ended: Callable[[RunSummary], RunSummary],
) -> RunSummary:
    """Stage the rows of a run, and enter it in the journal: from then on it counts. The caller
    holds `settled`.

    `ended`: adds the end of the run to its summary.
    """
    staged = {}
    for change in changes(judged, store.read):
        store.stage(judged.run, *change)
        staged[change.table] = change
    totals = count_findings(judged, staged.get(DRIFT), store.read)
    counted = structs.replace(
        judged.summary,
        open_findings=totals.open,
        acknowledged=totals.acknowledged,
        changed_findings=totals.changed,
        reopened=count_reopened(judged),
        checks=check_run(judged, staged.get(LATENCY), store.read),
    )
    summary = ended(counted)
    store.stage(judged.run, *run_row(judged, summary))
    journal.add(summary)
    return summary


def tidy_up(spark: SparkSession, data_dir: Path, journal: Journal) -> str:
    """Complete the last run; return its name if it died before it counted, else an empty text.

    A run in the journal gets its rows into the tables, and loses the folders that it made obsolete.
    One that is not in the journal loses all its folders.
    """
    path = data_dir / _NOTE
    try:
        note = msgspec.json.decode(path.read_bytes(), type=RunNote)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise _unusable(data_dir, error) from None
    except msgspec.MsgspecError:
        path.unlink()  # it died before it wrote anything
        return ""
    counts = journal.get(note.run) is not None
    store = open_store(spark, note.out)
    with tables_locked(data_dir):
        if counts:
            settle(store, journal)
        else:
            store.discard(note.run)
    for folder in note.stale if counts else Folders(note.out).all_of(note.run):
        storage_of(spark, folder).remove(folder)
    path.unlink()
    return "" if counts else note.run


@contextmanager
def settled(data_dir: Path, store: TableStore, journal: Journal) -> Iterator[None]:
    """Lock the tables during the block, with all rows of earlier runs in them."""
    with tables_locked(data_dir):
        settle(store, journal)
        yield


def settle(store: TableStore, journal: Journal) -> None:
    """Apply the staged changes that count, and remove others, which died runs and the series of
    audits before this one have left; the caller holds `tables_locked`."""
    series = journal.series()
    if store.series not in (None, series):
        return  # another series has taken the tables over
    for run in store.staged_runs():
        if store.is_concluded(run) or journal.get(run) is not None:
            store.apply(run)
        elif store.series == series:
            store.discard(run)
