"""Columns as text mean what pyspark's own columns mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from txbroker.core.records import MarkerKind

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from tests.spark.calls import Calls

COLUMNS: dict[str, Callable[[Any], Column]] = {
    "arithmetic": lambda F: (F.col("n") + 1) * 2 - F.col("m") / 3 - (F.col("n") - F.col("m")),
    "backwards": lambda F: 7 - (2 + F.col("n")) - F.col("m"),
    "negative": lambda F: F.col("n") - F.lit(-5) * -F.col("m"),
    "long": lambda F: F.col("n") + F.lit(1 << 40),
    "double": lambda F: F.col("n") * F.lit(0.1) + F.lit(1e300),
    "bits": lambda F: (F.col("n") + 12).bitwiseAND(F.lit(6)) + 1,
    "logic": lambda F: ~(F.col("n") > 1) | ((F.col("m") == 2) & ~F.col("t").isNull()),
    "chain": lambda F: (F.col("n") < 2) & (F.col("m") != 5) & (F.col("n").isin(0, 1, 2)),
    "nested": lambda F: (F.col("n") < 2) == ((F.col("m") < 3) & (F.col("n") >= 0)),
    "null": lambda F: F.col("t").eqNullSafe(None) == F.col("t").isNull(),
    "null in": lambda F: F.col("t").isin("a", "b"),
    "none in": lambda F: F.col("t").isin(),
    "between": lambda F: F.col("n").between(1, F.col("m")) | (F.col("n") == 0),
    "texts": lambda F: F.concat(F.col("t"), F.lit('it\'s \\ a "%_\\n" \x01\n`tab\t` ü€')),
    "variables": lambda F: F.concat(F.lit("${env:HOME} ${system:user.home}"), F.col("t")),
    "bytes": lambda F: F.xxhash64(F.lit(b"\x00'\\"), F.lit("k"), "n"),
    "pattern": lambda F: F.concat(F.lit("a\\"), F.lit("b.")).rlike(r"\Aa\\[a-c]\.\z"),
    "long text": lambda F: F.length(F.lit("x" * 5000)) + F.col("n"),
    "enum": lambda F: F.lit(MarkerKind.COMMIT) == "commit",
    "case": lambda F: F.when(F.col("n") == 0, "a").when(F.col("n") == 1, F.lit("b")),
    "else": lambda F: F.when(F.col("n") == 0, F.col("m")).otherwise(-1) + 1,
    "long case": lambda F: (
        F.when(F.col("n") == 0, F.lit(None))
        .when(F.length(F.lit("x" * 5000)) == F.col("n"), "a")
        .when(F.col("n") == 1, F.lit("y" * 1001))
    ),
    "long else": lambda F: F.when(F.col("n") == 0, "a").otherwise(F.lit("y" * 1001)),
    "casts": lambda F: F.col("n").cast("string").try_cast("int") + F.lit("z").try_cast("int"),
    "struct": lambda F: F.struct("n", F.col("m").alias("o"), F.col("s")["a"])["o"],
    "fields": lambda F: F.concat(F.col("s.b"), F.col("s").getField("b"), F.get("a", F.lit(0))),
    "map": lambda F: F.create_map(F.lit(1), F.lit("x"), F.lit(2), F.lit("y"))[F.col("n")],
    "lambda": lambda F: F.transform("a", lambda e: F.concat(e, F.lit("!"), F.col("t"))),
    "lambdas": lambda F: F.filter(
        "a", lambda one: F.exists("a", lambda other: (other != one) & (other > "a"))
    ),
    "fold": lambda F: F.aggregate("a", F.lit(""), lambda so_far, each: F.concat(so_far, each)),
    "json": lambda F: F.from_json(F.lit('{"a": "1"}'), "a string", {"mode": "FAILFAST"})["a"],
    "split": lambda F: F.split(F.lit("1/2"), "/")[0],
    "parts": lambda F: F.substring_index(F.lit("1/2/3"), "/", -1),
    "log": lambda F: F.ceil(F.log(F.col("m") + 2)),
    "array": lambda F: F.array_contains(F.array(F.lit("a"), F.col("t")), "a"),
    "words": lambda F: F.concat_ws("\n", "t", F.lit("k")),
    "format": lambda F: F.format_string("%s-%d", "t", "n"),
    "date": lambda F: F.date_trunc("minute", F.timestamp_millis(F.col("n") * 100_000)),
}


@pytest.fixture
def rows(spark: SparkSession) -> DataFrame:
    return spark.sql(
        "SELECT id AS n, id * 3 + 2 AS m, IF(id = 1, NULL, 'a') AS t, array('a', 'b', 'c') AS a, "
        "named_struct('a', 1, 'b', 'x') AS s FROM range(0, 3, 1, 1)"
    )


def test_values_are_those_of_pyspark(rows: DataFrame) -> None:
    from pyspark.sql import functions

    from txbroker.spark import expressions

    expected = rows.select(*(make(functions).alias(name) for name, make in COLUMNS.items()))
    found = rows.select(*(make(expressions).alias(name) for name, make in COLUMNS.items()))
    assert found.dtypes == expected.dtypes
    named = zip(COLUMNS, zip(*found.collect(), strict=True), strict=True)
    for (name, values), wanted in zip(named, zip(*expected.collect(), strict=True), strict=True):
        assert values == wanted, name


def test_columns_without_text_mix_with_others(rows: DataFrame) -> None:
    from pyspark.sql import Window, functions

    from txbroker.spark import expressions as F

    number = F.row_number().over(Window.orderBy(F.col("n").desc()))
    both = F.coalesce(number + F.col("m"), F.lit(0)) * 2
    of_spark = F.when(functions.col("n") == 1, F.col("n")).otherwise(functions.lit(5))
    found = rows.select((both + of_spark).alias("x")).orderBy("x").collect()
    assert [row["x"] for row in found] == [15, 15, 23]


def test_a_table_of_columns_takes_few_calls(rows: DataFrame, calls: Calls) -> None:
    from txbroker.spark import expressions as F

    made = [(F.col("n") + n).alias(f"c{n}") for n in range(100)]
    assert not calls
    found = F.select(rows, "t", *made)
    more = F.with_columns(found, {"d": F.col("t").isNull()})
    made_by_us = calls.total() - calls["m"]  # Python releases earlier objects at any time
    assert made_by_us <= 30
    assert more.columns == ["t", *(f"c{n}" for n in range(100)), "d"]


def test_figures_are_seen_on_the_way(rows: DataFrame) -> None:
    from txbroker.spark import expressions as F

    seen = F.RowFigures({"rows": F.count("*"), "last": F.max("n"), "none": F.max(F.lit(None))})
    seen.of(rows).collect()
    assert seen.get() == {"rows": 3, "last": 2, "none": None}
