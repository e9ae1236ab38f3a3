"""How tables behave in every format: called by tests, and as a program where Spark has packages."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd  # type: ignore[import-untyped]
import pyspark
import pytest

from txbroker.errors import ConfigurationError
from txbroker.spark.commit import settle
from txbroker.spark.journal import Journal
from txbroker.spark.schema import RunSummary
from txbroker.spark.storage.folder import JOURNAL_FILE, data_folder
from txbroker.spark.tables.layout import DRIFT, RUNS, TABLES, TRANSACTIONS, Table
from txbroker.spark.tables.store import TableStore, open_store
from txbroker.spark.tables.upkeep import compact, expire

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FIRST, SECOND, NEWEST = (date(2026, 1, day) for day in (1, 2, 30))


def rows_of(spark: SparkSession, table: Table, *values: dict[str, Any]) -> DataFrame:
    """Return rows of a table; columns that are not given are null."""
    return spark.createDataFrame(list(values), table.ddl)


def settled(id: str, day: date, run: str) -> dict[str, Any]:
    return {"id": id, "day": day, "run": run, "state": "promoted"}


def found(id: str, day: date, state: str) -> dict[str, Any]:
    return {"id": id, "kind": "late", "day": day, "state": state}


def transactions(store: TableStore) -> list[tuple[str, date, str]]:
    return sorted((r.id, r.day, r.run) for r in store.read(TRANSACTIONS).collect())


def known(store: TableStore, *ids: str) -> DataFrame:
    table = store.read(TRANSACTIONS)
    return table.where(table.id.isin(*ids)).select("day", "id")


def add(store: TableStore, spark: SparkSession, run: str, *values: dict[str, Any]) -> None:
    store.stage(run, TRANSACTIONS, rows_of(spark, TRANSACTIONS, *values))
    store.apply(run)


def a_run_replaces_rows(spark: SparkSession, store: TableStore) -> None:
    """A row with the same keys, also on another day; one that is only known is removed."""
    assert transactions(store) == []
    add(store, spark, "1", *(settled(id, FIRST, "1") for id in "abc"))
    new = rows_of(spark, TRANSACTIONS, settled("a", SECOND, "2"), settled("d", FIRST, "2"))
    store.stage("2", TRANSACTIONS, new, known(store, "a", "b"))
    assert transactions(store) == [(id, FIRST, "1") for id in "abc"]
    store.apply("2")
    assert transactions(store) == [("a", SECOND, "2"), ("c", FIRST, "1"), ("d", FIRST, "2")]
    assert store.staged_runs() == []


def an_application_can_be_repeated(spark: SparkSession, store: TableStore) -> None:
    """As the next run does where this one was killed before it removed what it had staged."""
    add(store, spark, "1", *(settled(id, FIRST, "1") for id in "ab"))
    new = rows_of(spark, TRANSACTIONS, settled("a", FIRST, "2"), settled("c", SECOND, "2"))
    store.stage("2", TRANSACTIONS, new, known(store, "a"))
    staged, copy = Path(store.out, "staged/run=2"), Path(store.out, "copy")
    shutil.copytree(staged, copy)
    for _ in range(2):
        store.apply("2")
        assert transactions(store) == [("a", FIRST, "2"), ("b", FIRST, "1"), ("c", SECOND, "2")]
        if store.manifest.format == "parquet":
            # Renamed files are staged no longer; all others still are.
            shutil.rmtree(copy / "transactions/rows", ignore_errors=True)
        shutil.copytree(copy, staged, dirs_exist_ok=True)


def what_is_discarded_changes_nothing(spark: SparkSession, store: TableStore) -> None:
    add(store, spark, "1", settled("a", FIRST, "1"))
    store.stage("2", TRANSACTIONS, rows_of(spark, TRANSACTIONS, settled("b", FIRST, "2")))
    store.discard("2")
    store.apply("2")
    assert transactions(store) == [("a", FIRST, "1")]


def tables_without_rows_exist(spark: SparkSession, store: TableStore) -> None:
    """For other programs too: from the first run on, and after their rows were removed."""
    add(store, spark, "1", settled("a", FIRST, "1"))
    store.stage("2", TRANSACTIONS, rows_of(spark, TRANSACTIONS), known(store, "a"))
    store.apply("2")
    assert not any(compact(spark, store.out, Path(store.out).parent).values())
    for table in TABLES:
        assert store.read(table).isEmpty()
        declared = dict(store.read(table).dtypes)
        folder = f"{store.out}/{table.name}"
        found = spark.read.format(store.manifest.format).load(folder)
        assert (dict(found.dtypes), found.isEmpty()) == (declared, True)
        if store.manifest.format == "parquet":
            frame = pd.read_parquet(folder)
            assert ({*frame.columns}, frame.empty) == ({*declared}, True)


def older_tables_gain_columns(spark: SparkSession, store: TableStore) -> None:
    older = TRANSACTIONS._replace(ddl="day date, id string")
    engine, staged = store._engine, f"{store.out}/older"
    engine.stage(staged, older, rows_of(spark, older, {"day": FIRST, "id": "a"}), None)
    engine.create(f"{staged}/empty", older)
    engine.apply(staged, older)
    (row,) = store.read(TRANSACTIONS).collect()
    assert (row.id, row.run, row.places) == ("a", None, None)
    add(store, spark, "2", settled("b", FIRST, "2"))
    assert [(r.id, r.run) for r in store.read(TRANSACTIONS).sort("id").collect()] == [
        ("a", None),
        ("b", "2"),
    ]


def compaction_joins_files(spark: SparkSession, store: TableStore) -> None:
    for run in "123":
        add(store, spark, run, settled(run, FIRST, run), settled(f"{run}b", SECOND, run))
    store.stage("4", DRIFT, rows_of(spark, DRIFT, found("a", FIRST, "open")))
    store.apply("4")
    before = transactions(store)
    out, data_dir = store.out, Path(store.out).parent
    assert compact(spark, out, data_dir)["transactions"] == 6
    assert transactions(store) == before
    assert files(store) == {FIRST: 1, SECOND: 1}
    assert not any(compact(spark, out, data_dir).values())
    assert store.read(DRIFT).count() == 1


def files(store: TableStore) -> dict[date, int]:
    """Return the number of files of `transactions` with rows, by day."""
    named = store.read(TRANSACTIONS).selectExpr("day", "input_file_name() AS file").distinct()
    return {row["day"]: row["count"] for row in named.groupBy("day").count().collect()}


def expiry_keeps_open_findings(spark: SparkSession, store: TableStore) -> None:
    out, data_dir = store.out, Path(store.out).parent
    add(store, spark, "1", settled("a", FIRST, "1"), settled("b", NEWEST, "1"))
    assert expire(spark, out, data_dir, 1) is None  # there is no run
    rows = (found("a", FIRST, "open"), found("b", FIRST, "healed"), found("c", NEWEST, "healed"))
    store.stage("2", DRIFT, rows_of(spark, DRIFT, *rows))
    runs = ({"day": FIRST, "run": "1"}, {"day": NEWEST, "run": "2"})
    store.stage("2", RUNS, rows_of(spark, RUNS, *runs))
    store.apply("2")
    assert expire(spark, out, data_dir, 28) == SECOND
    assert transactions(store) == [("b", NEWEST, "1")]
    assert sorted(r.id for r in store.read(DRIFT).collect()) == ["a", "c"]
    assert [r.run for r in store.read(RUNS).collect()] == ["2"]
    assert open_store(spark, out).manifest.expired_before == "2026-01-02"
    expire(spark, out, data_dir, 1000)
    assert open_store(spark, out).manifest.expired_before == "2026-01-02"


def upkeep_completes_earlier_changes(spark: SparkSession, store: TableStore) -> None:
    """Of a run in the journal, and of an upkeep that counts; all others are removed."""
    out, data_dir = store.out, Path(store.out).parent
    add(store, spark, "1", settled("a", FIRST, "1"))
    store.stage("2", TRANSACTIONS, rows_of(spark, TRANSACTIONS, settled("b", FIRST, "2")))
    Journal(data_dir / JOURNAL_FILE).add(RunSummary("2", "full", 0, 0.0, None, {}, 1, {}, {}))
    no_rows = rows_of(spark, TRANSACTIONS)
    store.stage("upkeep", TRANSACTIONS, no_rows, known(store, "a"))
    compact(spark, out, data_dir)
    assert transactions(store) == [("a", FIRST, "1"), ("b", FIRST, "2")]
    store.stage("upkeep", TRANSACTIONS, no_rows, known(store, "a"))
    store.conclude("upkeep")
    compact(spark, out, data_dir)
    assert transactions(store) == [("b", FIRST, "2")]
    assert store.staged_runs() == []


def compaction_waits_for_runs(spark: SparkSession, store: TableStore) -> None:
    """Runs change the tables, as an audit does, while another thread compacts them."""
    data_dir = data_folder(Path(store.out).parent)
    journal = Journal(data_dir.journal)

    def change(run: str) -> None:
        with data_dir.tables_locked():
            settle(store, journal)
            new = rows_of(spark, TRANSACTIONS, settled("a", FIRST, run), settled(run, FIRST, run))
            store.stage(run, TRANSACTIONS, new, known(store, "a"))
            journal.add(RunSummary(run, "full", 0, 0.0, None, {}, 1, {}, {}))
        with data_dir.tables_locked():
            settle(store, journal)

    change("1")
    with ThreadPoolExecutor() as pool:
        runs = pool.submit(lambda: [change(run) for run in "23"])
        while not runs.done():
            compact(spark, store.out, data_dir)
        runs.result()
    assert transactions(store) == [*((run, FIRST, run) for run in "123"), ("a", FIRST, "3")]


def tables_belong_to_one_series(spark: SparkSession, store: TableStore) -> None:
    """Other audits neither change nor compact them, until a full run takes them over."""
    out, kind = store.out, store.manifest.format
    store.belong_to("ours")
    add(store, spark, "1", settled("a", FIRST, "1"))
    open_store(spark, out, "shop", kind, "ours")
    theirs = "belong to audits with another data folder"
    with pytest.raises(ConfigurationError, match=theirs):
        compact(spark, out, Path(out).parent)
    store.stage("9", TRANSACTIONS, rows_of(spark, TRANSACTIONS, settled("z", FIRST, "9")))
    journal = Journal(Path(out).parent / JOURNAL_FILE)
    taken = open_store(spark, out, "shop", kind)
    taken.belong_to(journal.series())
    add(taken, spark, "2", settled("b", FIRST, "2"))
    settle(taken, journal)
    assert taken.staged_runs() == []
    assert transactions(store) == [("a", FIRST, "1"), ("b", FIRST, "2")]
    with pytest.raises(ConfigurationError, match=theirs):
        open_store(spark, out, "shop", kind, "ours")


def a_broken_table_is_named(spark: SparkSession, store: TableStore) -> None:
    add(store, spark, "1", settled("a", FIRST, "1"))
    folder = Path(store.out, "transactions")
    for log in ("_delta_log", "metadata"):
        shutil.rmtree(folder / log, ignore_errors=True)
    with pytest.raises(ConfigurationError, match=f"{folder} cannot be read as "):
        open_store(spark, store.out).read(TRANSACTIONS)


Case = Callable[["SparkSession", TableStore], None]
CASES: tuple[Case, ...] = (
    a_run_replaces_rows,
    an_application_can_be_repeated,
    what_is_discarded_changes_nothing,
    tables_without_rows_exist,
    older_tables_gain_columns,
    compaction_joins_files,
    expiry_keeps_open_findings,
    upkeep_completes_earlier_changes,
    compaction_waits_for_runs,
    tables_belong_to_one_series,
)
MERGED_CASES = (*CASES, a_broken_table_is_named)


def new_store(spark: SparkSession, folder: Path, table_format: str) -> TableStore:
    return open_store(spark, str(folder / "out"), "shop", table_format)


def main(table_format: str, folder: Path) -> None:
    """Run every case in a Spark with the format's package."""
    from tests.spark.conftest import SPARK_CONF
    from txbroker.spark.launch.versions import series
    from txbroker.spark.session import SparkSettings, spark_session
    from txbroker.spark.tables.formats import MERGED

    package = MERGED[table_format].packages[series(pyspark.__version__)]
    packages = {"spark.jars.packages": package}
    with spark_session(SparkSettings("local[2]", SPARK_CONF | packages)) as spark:
        for case in MERGED_CASES:
            case(spark, new_store(spark, folder / case.__name__, table_format))
            print(case.__name__, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
