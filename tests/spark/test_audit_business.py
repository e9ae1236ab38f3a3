"""Messages against the rows of a business: in Parquet, and in a database through JDBC."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from txbroker.core.routing import make_id
from txbroker.errors import ConfigurationError
from txbroker.spark.business import BusinessTable, compare, id_ranges
from txbroker.spark.schema import Terms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


NOW_MS = 1_800_000_000_000
OLD_MS = NOW_MS - 3_600_000
TERMS = Terms(NOW_MS)
COLUMNS = """
    run string, id string, state string, grp string, findings array<string>,
    places array<struct<topic: string, partition: int, offset: bigint, seq: int>>,
    prepared_at_ms bigint, decided_at_ms bigint
"""
_PLACE = [("orders", 0, 7, 0)]


def id_of(number: int, time_ms: int = OLD_MS) -> str:
    """Return an id of half partition 0, 1 or 2."""
    return make_id(number % 3, time_ms, number)


def verdict(
    id: str, state: str, *findings: str, visible: bool = False, at_ms: int | None = OLD_MS,
    group: str = "shop", run: str = "1",
) -> tuple[Any, ...]:  # fmt: skip
    return run, id, state, group, list(findings), _PLACE if visible else [], OLD_MS, at_ms


def verdicts(spark: SparkSession, rows: Iterable[tuple[Any, ...]]) -> DataFrame:
    return spark.createDataFrame(list(rows), COLUMNS)


def written(spark: SparkSession, folder: Path, ids: Iterable[str | None]) -> BusinessTable:
    path = folder / "rows"
    spark.createDataFrame([(id, 1) for id in ids], "tx string, amount int").write.parquet(str(path))
    return BusinessTable(f"parquet:{folder}", "rows", "tx")


def found(result: tuple[DataFrame, dict[str, int]]) -> dict[str, str]:
    """Return the kinds by id; each id is named once."""
    rows = result[0].collect()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["kind"] for row in rows}


def test_every_end_is_compared_with_its_row(spark: SparkSession, tmp_path: Path) -> None:
    def rows_of(state: str, count: int, **fields: Any) -> list[tuple[Any, ...]]:
        first = len(reported)
        reported.extend(verdict(id_of(first + n), state, **fields) for n in range(count))
        return reported[first:]

    reported: list[tuple[Any, ...]] = []
    right = rows_of("promoted", 3, visible=True)
    silent = rows_of("promoted", 2, visible=True)
    back = rows_of("rolled_back", 2)
    back_with_row = rows_of("rolled_back", 1)
    still_open = [rows_of(state, 1)[0] for state in ("pending", "committed", "parked", "refused")]
    gone = rows_of("gone", 1)
    void = rows_of("void", 1)
    lost = verdict(id_of(900), "committed", "lost", "contrary_markers")
    late = verdict(id_of(901), "committed", "late")
    unknown = id_of(902)
    with_row = [row[1] for row in (*right, *back_with_row, *still_open, *gone, *void, lost, late)]
    business = written(spark, tmp_path, [*with_row, unknown, right[0][1], None, None, "no id"])

    result = compare(spark, verdicts(spark, [*reported, lost, late]), business, TERMS)

    expected = {row[1]: "message_without_row" for row in silent}
    for row in (*back_with_row, *void, lost, late):
        expected[row[1]] = "row_without_message"
    expected[unknown] = "row_without_message"
    assert found(result) == expected
    assert back[0][1] not in expected
    assert result[1] == {
        "message_without_row": 2,
        "row_without_message": 5,
        "rows": len(with_row) + 5,
        "rows_open": 4,
        "rows_gone": 1,
        "rows_without_id": 3,
    }


def test_young_transactions_have_no_findings(spark: SparkSession, tmp_path: Path) -> None:
    """Rows are read after the topics: a row may be younger than all that was read of them."""
    young_ms = NOW_MS - TERMS.late_after_ms + 1
    reported = [
        verdict(id_of(1), "promoted", visible=True, at_ms=young_ms),
        verdict(id_of(2), "rolled_back", at_ms=young_ms),
        verdict(id_of(3, NOW_MS - 1000), "void", at_ms=None),
    ]
    after_cut = id_of(4, NOW_MS + 5000)
    still_counts = id_of(5, NOW_MS - TERMS.dedup_window_ms)
    business = written(spark, tmp_path, [id_of(2), reported[2][1], after_cut, still_counts])

    result = compare(spark, verdicts(spark, reported), business, TERMS)

    assert found(result) == {}
    assert result[1]["rows_young"] == 4


def test_ages_of_decision_and_id_count_to_the_millisecond(
    spark: SparkSession, tmp_path: Path
) -> None:
    at_ms = NOW_MS - TERMS.late_after_ms
    reported = [
        verdict(id_of(1), "promoted", visible=True, at_ms=at_ms),
        verdict(id_of(2), "rolled_back", at_ms=at_ms),
    ]
    unknown = id_of(3, NOW_MS - TERMS.dedup_window_ms - 1)
    business = written(spark, tmp_path, [id_of(2), unknown])

    assert found(compare(spark, verdicts(spark, reported), business, TERMS)) == {
        id_of(1): "message_without_row",
        id_of(2): "row_without_message",
        unknown: "row_without_message",
    }


def test_only_groups_that_write_rows_need_them(spark: SparkSession, tmp_path: Path) -> None:
    reported = [
        verdict(id_of(n), "promoted", visible=True, group=group)
        for n, group in enumerate(("shop", "mail", "bills"))
    ]
    business = written(spark, tmp_path, [])
    both = BusinessTable(business.source, business.table, "tx", groups=("shop", "bills"))

    assert set(found(compare(spark, verdicts(spark, reported), both, TERMS))) == {
        id_of(0),
        id_of(2),
    }


def test_rows_from_before_the_logs_begin_are_not_judged(
    spark: SparkSession, tmp_path: Path
) -> None:
    before, after = id_of(1, OLD_MS), id_of(2, OLD_MS + 1)
    business = written(spark, tmp_path, [before, after])

    result = compare(
        spark, verdicts(spark, []), business, TERMS, unknown_to_ms={1: OLD_MS + 9, 2: OLD_MS}
    )

    assert found(result) == {after: "row_without_message"}
    assert result[1]["rows_gone"] == 1


def test_every_row_is_in_one_range() -> None:
    with sqlite3.connect(":memory:") as base:
        base.execute("CREATE TABLE rows (id TEXT)")
        ids: list[str | None] = [make_id(p, OLD_MS, p) for p in range(6)]
        ids += [make_id(2, 0, 0), "", "zzz", "0", None]
        base.executemany("INSERT INTO rows VALUES (?)", [(id,) for id in ids])
        for parts in (1, 2, 3, 5):
            ranges = id_ranges("id", parts)
            read = [row for at in ranges for row in base.execute(f"SELECT id FROM rows WHERE {at}")]
            assert len(ranges) == parts
            assert sorted(map(str, read)) == sorted(str((id,)) for id in ids)


# --- a database ------------------------------------------------------------------------------


@pytest.fixture
def database(spark: SparkSession) -> Iterator[str]:
    """A Derby in memory, whose driver Spark brings, with one table."""
    url = "jdbc:derby:memory:shop"
    manager: Any = spark.sparkContext._jvm.java.sql.DriverManager  # type: ignore[union-attr]
    connection = manager.getConnection(f"{url};create=true")
    statement = connection.createStatement()
    statement.execute('CREATE TABLE orders ("Tx Id" CHAR(30), amount INT)')
    for number in (*range(7), 70):
        statement.execute(f"INSERT INTO orders VALUES ('{id_of(number)}', 1)")
    statement.execute("INSERT INTO orders VALUES (NULL, 1)")
    yield url
    statement.execute("DROP TABLE orders")
    connection.close()


def test_a_table_of_a_database_is_read_in_parts(spark: SparkSession, database: str) -> None:
    reported = [verdict(id_of(n), "promoted", visible=True) for n in range(8)]
    business = BusinessTable(database, "orders", "tx id")

    result = compare(spark, verdicts(spark, reported), business, TERMS, half_partitions=3)

    assert found(result) == {id_of(7): "message_without_row", id_of(70): "row_without_message"}
    assert result[1]["rows"] == 9
    assert result[1]["rows_without_id"] == 1


def test_a_missing_table_of_a_database(spark: SparkSession, database: str) -> None:
    with pytest.raises(ConfigurationError, match=r"table bills of jdbc:derby:.* cannot be read"):
        compare(spark, verdicts(spark, []), BusinessTable(database, "bills", "id"), TERMS)


@pytest.mark.parametrize(
    ("business", "output"),
    [
        (BusinessTable("mysql://x", "t", "id"), "must be jdbc:URL or parquet:PATH"),
        (BusinessTable("jdbc:nothing:x", "", "id"), "--table"),
        (BusinessTable("jdbc:nothing:x", "t", ""), "--id-column"),
        (BusinessTable("jdbc:nothing://u:secret@h/x", "t", "id"), "spark.jars.packages"),
        (
            BusinessTable("parquet:/does/not/exist", "rows", "id"),
            "/does/not/exist/rows does not exist",
        ),
    ],
)
def test_unreadable_business_is_one_sentence(
    spark: SparkSession, business: BusinessTable, output: str
) -> None:
    with pytest.raises(ConfigurationError, match=output) as refused:
        compare(spark, verdicts(spark, []), business, TERMS)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_missing_column_is_named_with_those_that_are_there(
    spark: SparkSession, tmp_path: Path
) -> None:
    business = written(spark, tmp_path, [])
    wrong = BusinessTable(business.source, business.table, "order_id")
    with pytest.raises(ConfigurationError, match=r"no column order_id; it has tx, amount"):
        compare(spark, verdicts(spark, []), wrong, TERMS)


# --- a driver from Maven Central -----------------------------------------------------------------


DRIVER = "org.xerial:sqlite-jdbc:3.46.1.3"
PROGRAM = Path(__file__).with_name("driver_main.py")
IDS = [make_id(number % 3, 1_700_000_000_000, number) for number in range(5)]


def run(database: Path, packages: str) -> subprocess.CompletedProcess[str]:
    """Compare in a separate process: Spark loads packages only when it starts."""
    command = [sys.executable, str(PROGRAM), str(database), packages, *IDS[:4]]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture
def shop_db(tmp_path: Path) -> Path:
    """The rows of all messages but the first, and one more."""
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE orders (id TEXT PRIMARY KEY)")
        base.executemany("INSERT INTO orders VALUES (?)", [(id,) for id in IDS[1:]])
    base.close()
    return path


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_driver_is_fetched_as_a_package(shop_db: Path) -> None:
    done = run(shop_db, DRIVER)
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)
    assert reported["found"] == {IDS[0]: "message_without_row", IDS[4]: "row_without_message"}
    assert reported["counts"]["rows"] == 4


@pytest.mark.long
@pytest.mark.timeout(300)
def test_missing_jdbc_driver_names_the_next_step(shop_db: Path) -> None:
    done = run(shop_db, "")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "no JDBC driver" in last
    assert "spark.jars.packages" in last
