"""When a run counts, and what a dead one has left.

A run counts once its entry is in the journal. Before it writes anything it stores a note of its
folders in the data folder. The next run completes one that counts, and removes one that does not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from msgspec import Struct, structs
from pyspark.sql import SparkSession

from txbroker.spark.folders import Folders
from txbroker.spark.journal import Journal
from txbroker.spark.launch.failures import in_words
from txbroker.spark.schema import RunSummary
from txbroker.spark.storage.folder import DataFolder
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


def note_down(data_dir: DataFolder, note: RunNote) -> None:
    """Store the folders that a run will write or remove, in place of any earlier note."""
    data_dir.check()
    data_dir.write(_NOTE, msgspec.json.encode(note))


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


@in_words(None)
def tidy_up(spark: SparkSession, data_dir: DataFolder, journal: Journal) -> str:
    """Complete the last run; return its name if it died before it counted, else an empty text.

    A run in the journal gets its rows into the tables, and loses the folders that it made obsolete.
    One that is not in the journal loses all its folders.
    """
    data_dir.check()  # else the note may be that of another run
    content = data_dir.read(_NOTE)
    if content is None:
        return ""
    try:
        note = msgspec.json.decode(content, type=RunNote)
    except msgspec.MsgspecError:
        data_dir.remove(_NOTE)  # it died before it wrote anything
        return ""
    counts = journal.get(note.run) is not None
    store = open_store(spark, note.out)
    with data_dir.tables_locked():
        if counts:
            settle(store, journal)
        else:
            store.discard(note.run)
    for folder in note.stale if counts else Folders(note.out).all_of(note.run):
        storage_of(spark, folder).remove(folder)
    data_dir.remove(_NOTE)
    return "" if counts else note.run


@contextmanager
def settled(data_dir: DataFolder, store: TableStore, journal: Journal) -> Iterator[None]:
    """Lock the tables during the block, with all rows of earlier runs in them."""
    with data_dir.tables_locked():
        settle(store, journal)
        yield


def settle(store: TableStore, journal: Journal) -> None:
    """Apply the staged changes that count, and remove others, which died runs and the series of
    audits before this one have left; the caller holds `DataFolder.tables_locked`."""
    series = journal.series()
    if store.series not in (None, series):
        return  # another series has taken the tables over
    for run in store.staged_runs():
        if store.is_concluded(run) or journal.get(run) is not None:
            store.apply(run)
        elif store.series == series:
            store.discard(run)
