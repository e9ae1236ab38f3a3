"""A run as the tables see it, and what the functions that change them share."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from functools import reduce
from typing import Any, NamedTuple

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession

from txbroker.spark import expressions as F
from txbroker.spark.schema import Acknowledgement, Check, RunSummary, TopicNames, types_of
from txbroker.spark.tables.layout import Table


class JudgedRun(NamedTuple):
    """A run whose verdicts are stored.

    Attributes:
        summary: of the run, without its end.
        names: the installation's topics.
        now_ms: the run's now, by the brokers' clocks.
        verdicts: of this run, as `schema.VERDICT`.
        op: the markers of at least the transactions that ended, as `schema.OP`.
        earlier: the rows of `transactions` whose ids this run has judged again; None: there are
            none.
        keep: caches a table until the tables were written.
        before: the summary of the run before; None where the tables have changed since, which
            costs some jobs.
        last: the summary of the last run that judged all transactions.
        broken: the unreadable records of this run, as `schema.BROKEN`.
        missing: transactions committed to topics that do not exist, as `MISSING`; None: no target
            is missing.
        business: findings of the comparison with the business, as `FOUND`; None: not compared.
        groups: those whose transactions were compared with it; none: all.
        unknown_to_ms: the last time in ids of transactions that may be unknown because retention or
            expiry removed them, by half partition, where there are any.
        acknowledged: all acknowledgements of findings; one that the table has and that is missing
            here was withdrawn.
        checks: limits to compare the run with.
        days: of the prepares of `verdicts`.
        checked: whether `op` may hold check-backs.
        first: whether the tables hold nothing yet.
    """

    summary: RunSummary
    names: TopicNames
    now_ms: int
    verdicts: DataFrame
    op: DataFrame
    earlier: DataFrame | None = None
    keep: Callable[[DataFrame], DataFrame] = DataFrame.persist
    before: RunSummary | None = None
    last: RunSummary | None = None
    broken: DataFrame | None = None
    missing: DataFrame | None = None
    business: DataFrame | None = None
    groups: Sequence[str] = ()
    unknown_to_ms: Mapping[int, int] = {}
    acknowledged: Sequence[Acknowledgement] = ()
    checks: Sequence[Check] = ()
    days: frozenset[date] = frozenset()
    checked: bool = True
    first: bool = False

    @property
    def run(self) -> str:
        """The run's name."""
        return self.summary.run

    @property
    def is_part(self) -> bool:
        """Whether it has judged some transactions only, not all that are open."""
        return self.summary.part is not None

    @property
    def is_full(self) -> bool:
        """Whether it has read everything that the topics hold."""
        return self.summary.mode == "full"

    @property
    def records_vanished(self) -> bool:
        """Whether targets may not hold what earlier runs have read there."""
        cut, before = self.summary.cut, self.last
        if cut is None or before is None or before.cut is None or before.reopened:
            return True
        starts = {target.topic: target.starts for target in before.cut.targets}
        return any(
            target.since or target.compacted or target.starts != starts.get(target.topic)
            for target in cut.targets
        )


_YEAR_10000_MS = 253_402_300_800_000

FOUND = "id string, kind string, grp string, topic string, partition int, offset bigint, why string"
"""A finding: which, where the evidence is, and the evidence in a sentence."""
FOUND_COLUMNS = tuple(column.split()[0] for column in FOUND.split(", "))
MISSING = f"{FOUND}, kept boolean"
"""The same for a transaction committed to a missing target. `kept`: its half message is still
there, so that it is a finding."""


class Replacement(NamedTuple):
    """Rows that replace those with the same keys. `known`: `day` and keys of rows that the table
    may hold, each once; None: it holds none of them."""

    table: Table
    rows: DataFrame
    known: DataFrame | None = None


def known_keys(table: Table) -> list[str]:
    """Return the columns that find a row: its partition, and its keys."""
    return ["day", *table.keys]


def same_keys(keys: Iterable[str], one: DataFrame, other: DataFrame) -> Column:
    """Return whether rows of two tables have the same keys, null or not."""
    return reduce(operator.and_, (one[key].eqNullSafe(other[key]) for key in keys))


def shaped(table: Table, rows: DataFrame) -> DataFrame:
    """Return the columns of a table, in its order and types."""
    fields = types_of(table.ddl)
    return F.select(
        rows, *(F.col(field.name).cast(field.dataType).alias(field.name) for field in fields)
    )


def local_rows(spark: SparkSession, rows: Sequence[dict[str, Any]], ddl: str) -> DataFrame:
    """Return a few rows as a table, without a job and without Python's serializer.

    Times are ISO 8601 in UTC.
    """
    text = msgspec.json.encode(rows).decode()
    kind = types_of(ddl)
    parsed = F.from_json(F.lit(text), f"array<{kind.simpleString()}>", {"mode": "FAILFAST"})
    return spark.range(1).select(F.inline(parsed))


def moment(at_ms: int | Column) -> Column:
    """Return a time as a timestamp; null for null, and outside the years that other tools read."""
    at = F.lit(at_ms).cast("bigint") if isinstance(at_ms, int) else at_ms
    return F.when(at.between(0, _YEAR_10000_MS - 1), F.timestamp_millis(at))
