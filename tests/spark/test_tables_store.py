"""Tables of Parquet files: staged, applied, killed in between, of earlier releases, and unfit."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from tests.kit.until import until
from tests.spark import released_tables
from tests.spark.released_tables import DAY, INSTALLATION, ROWS
from tests.spark.stores import LOCAL, STORE
from txbroker.errors import ConfigurationError, TxbrokerError
from txbroker.spark.launch.failures import in_words
from txbroker.spark.storage.hadoop import HadoopStorage
from txbroker.spark.storage.local import LocalStorage
from txbroker.spark.tables.layout import DRIFT, TABLES, TRANSACTIONS, Table
from txbroker.spark.tables.manifest import check_local
from txbroker.spark.tables.store import TableStore, open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NEXT_DAY = date(2026, 1, 3)
OLD_ROWS = {"a": "run1", "b": "run1"}
NEW_ROWS = {"a": "run1", "b": "run2", "c": "run2", "d": "run2"}


def rows(spark: SparkSession, run: str, *ids: str, day: date = DAY) -> DataFrame:
    made = [{"id": id, "day": day, "run": run} for id in ids]
    return spark.createDataFrame(made, TRANSACTIONS.ddl)


def runs_of(store: TableStore) -> dict[str, str]:
    """Return the run of each transaction; none is there twice."""
    found = store.read(TRANSACTIONS).select("id", "run").collect()
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row["run"] for row in found}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Return a folder with the tables of the first release: transactions `a` and `b`."""
    folder = tmp_path / "a b" / "ü"
    shutil.copytree(released_tables.FOLDER, folder)
    return folder


def stage(spark: SparkSession, out: Path) -> TableStore:
    """Stage a run that replaces `b`, removes a finding, and adds transactions of two days."""
    store = open_store(spark, str(out), INSTALLATION)
    new = rows(spark, "run2", "b", "c").union(rows(spark, "run2", "d", day=NEXT_DAY))
    store.stage("run2", TRANSACTIONS, new, rows(spark, "", "b", "c").select("day", "id"))
    store.stage("run2", DRIFT, store.read(DRIFT).limit(0), store.read(DRIFT))
    return store


def test_staged_rows_replace_known_ones_once_applied(spark: SparkSession, out: Path) -> None:
    store = stage(spark, out)
    assert runs_of(store) == OLD_ROWS
    store.discard("run2")
    assert not list((out / "staged").iterdir())
    store = stage(spark, out)
    assert store.staged_runs() == ["run2"]
    store.apply("run2")
    assert runs_of(store) == NEW_ROWS
    assert store.read(DRIFT).isEmpty()
    assert store.staged_runs() == []
    store.apply("run2")
    assert runs_of(open_store(spark, str(out))) == NEW_ROWS
    # Spark's default, INT96, is deprecated and has no statistics.
    for file in (out / "transactions").rglob("*.parquet"):
        kinds = {column.path: column.physical_type for column in pq.ParquetFile(file).schema}
        assert kinds["prepared_at"] == "INT64"


class Killed(BaseException):
    """The process was killed."""


@contextmanager
def killed_after(operations: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kill the process in the block after a number of calls of the file system; yield the calls."""
    made: list[str] = []

    def counted(located: Callable[[Any, str], AbstractContextManager[Any]]) -> Any:
        @contextmanager
        def located_until(self: Any, path: str) -> Iterator[Any]:
            if len(made) == operations:
                raise Killed
            made.append(path)
            with located(self, path) as found:
                yield found

        return located_until

    with monkeypatch.context() as patched:
        for storage in (LocalStorage, HadoopStorage):
            patched.setattr(storage, "_located", counted(storage._located))
        with contextlib.suppress(Killed):
            yield made


def files_below(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*.parquet")}


@pytest.mark.parametrize("prefix", [LOCAL, STORE])
def test_a_run_that_is_killed_while_it_is_applied_is_completed(
    spark: SparkSession, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    stage(spark, out)
    shutil.rmtree(out / "attempts")
    done, moved = tmp_path / "done", tmp_path / "moved"
    for folder in (done, moved):
        shutil.copytree(out, folder)
    with killed_after(1_000, monkeypatch) as calls:
        open_store(spark, prefix + str(done)).apply("run2")
    assert runs_of(open_store(spark, prefix + str(done))) == NEW_ROWS
    assert len(calls) > 10
    assert [path for path in files_below(done) if path.startswith("attempts")] == [
        "attempts/day=1969-12-31/no-rows.parquet"
    ]
    for operations in range(2, len(calls)):
        folder = tmp_path / f"{operations}"
        shutil.copytree(out, folder)
        with killed_after(operations, monkeypatch):
            open_store(spark, prefix + str(folder)).apply("run2")
        open_store(spark, prefix + str(folder)).apply("run2")
        assert files_below(folder) == files_below(done), operations
    # The files of a day are renamed one by one.
    first, *_ = sorted((moved / "staged/run=run2/transactions/rows").glob("day=*/*.parquet"))
    first.rename(moved / "transactions" / first.parent.name / first.name)
    open_store(spark, prefix + str(moved)).apply("run2")
    assert files_below(moved) == files_below(done)


@pytest.mark.needs_root
async def test_a_full_disk_loses_nothing(spark: SparkSession, out: Path) -> None:
    size = 1 << 20
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", out], check=True)
    try:
        shutil.copytree(released_tables.FOLDER, out, dirs_exist_ok=True)
        store = open_store(spark, str(out), INSTALLATION)
        random = "uuid()"
        many = rows(spark, "run2").unionByName(
            spark.range(100_000).selectExpr(f"{random} id", f"DATE'{DAY}' day", "'run2' run"),
            allowMissingColumns=True,
        )
        with pytest.raises(TxbrokerError, match="a disk is full"), in_words(None):
            store.stage("run2", TRANSACTIONS, many)
        store.discard("run2")
        await until(lambda: has_room(spark, out, size // 2))
        stage(spark, out)
        filler = out / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(4096))
        # A rename needs no room; the folder of a new day does.
        with contextlib.suppress(ConfigurationError):
            store.apply("run2")
        filler.unlink()
        open_store(spark, str(out)).apply("run2")
        assert runs_of(store) == NEW_ROWS
    finally:
        subprocess.run(["umount", out], check=True)


def has_room(spark: SparkSession, folder: Path, size: int) -> bool:
    """Return whether a disk has so much room, after Java has closed the files that Spark's failed
    tasks have left open."""
    jvm: Any = spark.sparkContext._jvm
    jvm.java.lang.System.gc()
    return shutil.disk_usage(folder).free > size


# --- other versions ------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_tables_of_the_last_release_are_read(spark: SparkSession, out: Path, table: Table) -> None:
    found = open_store(spark, str(out), INSTALLATION).read(table)
    whole = spark.createDataFrame(
        [{"day": DAY, "installation": INSTALLATION, **row} for row in ROWS[table.name]], table.ddl
    )
    assert found.schema == whole.schema
    assert sorted(map(str, found.collect())) == sorted(map(str, whole.collect()))
    # Columns of a release keep their names, types and order; new ones follow.
    released = spark.read.option("basePath", str(out / table.name)).parquet(str(out / table.name))
    names = [name for name in released.columns if name != "day"]
    assert found.columns[1 : len(names) + 1] == names
    assert {name: found.schema[name].dataType for name in names} == {
        name: released.schema[name].dataType for name in names
    }


def test_rows_of_the_last_release_are_replaced_by_rows_with_more_columns(
    spark: SparkSession, out: Path
) -> None:
    newer = TRANSACTIONS._replace(ddl=f"{TRANSACTIONS.ddl}, mood string")
    store = open_store(spark, str(out), INSTALLATION)
    new = rows(spark, "run2", "b", "c").selectExpr("*", "'glad' mood")
    store.stage("run2", newer, new, new.select("day", "id"))
    store.apply("run2")
    found = store.read(newer).orderBy("id").collect()
    assert [(row["id"], row["grp"], row["mood"]) for row in found] == [
        ("a", "orders", None), ("b", None, "glad"), ("c", None, "glad"),
    ]  # fmt: skip


UNFIT = {
    "newer": ('{"version": 2, "shape": 7}', "have version 2, .* install the newer txbroker"),
    "another's": ('{"version": 1, "installation": "x"}', "belong to the installation x, not shop"),
    "Delta": (
        '{"version": 1, "installation": "shop", "format": "delta"}',
        "have the format delta, not parquet: leave out --format",
    ),
    "another series": (
        '{"version": 1, "installation": "shop", "series": "theirs"}',
        "belong to audits with another data folder: name it with --data-dir; .* --full",
    ),
    "cut off": ('{"version": 1, "insta', r"tables\.json does not parse"),
    "empty": ("", r"tables\.json does not parse"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_unfit_tables_are_one_sentence_before_spark_starts_and_after(
    spark: SparkSession, tmp_path: Path, case: str
) -> None:
    content, words = UNFIT[case]
    (tmp_path / "tables.json").write_text(content)
    for text in (str(tmp_path), tmp_path.as_uri()):
        with pytest.raises(ConfigurationError, match=words):
            check_local(text, "shop", "parquet", "ours")
        with pytest.raises(ConfigurationError, match=words):
            open_store(spark, text, "shop", "parquet", "ours")


def test_unusable_output_folder_is_one_sentence_before_spark_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"output folder .*file cannot be used"):
        check_local(str(tmp_path / "file"), "shop", None, None)
    check_local(str(tmp_path / "new"), "shop", None, None)
    assert list(tmp_path.joinpath("new").iterdir()) == []
    check_local("s3a://nowhere/x", "shop", None, None)
