"""Runs over tables without Kafka and files: verdicts made by hand, tables in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, cast

from msgspec import structs

from txbroker.core.routing import make_id
from txbroker.spark import schema
from txbroker.spark.schema import (
    Acknowledgement,
    RunSummary,
    SnapshotBounds,
    Terms,
    TopicNames,
    TopicRead,
)
from txbroker.spark.tables.layout import DRIFT, TABLES, TRANSACTIONS, Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from txbroker.spark.tables.judged import Replacement

NAMES = TopicNames.of("shop")
START_MS = 1_700_000_000_000
Row = dict[str, Any]


def time_of(at_ms: int) -> datetime:
    """Return a time as pyspark returns it: by this process's clock, without a zone."""
    return datetime.fromtimestamp(at_ms / 1000)


def now_ms(number: int) -> int:
    """Return the now of the run with a number."""
    return START_MS + number * 60_000


def id_at(number: int, at_ms: int = START_MS) -> str:
    return make_id(0, at_ms, number)


def verdict(id: str, state: str = "promoted", **fields: Any) -> Row:
    """Return a verdict as an audit writes it."""
    findings = fields.get("findings", [])
    settled = "settled" if state in ("promoted", "rolled_back") else state
    return {
        "id": id, "findings": [], "state": state, "grp": "g",
        "verdict": findings[0] if findings else settled, "decision": None, "source": None,
        "prepared_at_ms": None, "decided_at_ms": None, "visible_at_ms": None, "attempts": 0,
        "messages": 1, "topics": ["orders"], "half_partition": 0, "half_offset": None,
        "op_offset": None, "places": [], "why": "; ".join(findings) or None,
        "carry": state in ("pending", "parked", "committed", "refused"), **fields,
    }  # fmt: skip


class Tables:
    """The tables, changed by one run after the other."""

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        self.rows: dict[str, list[Row]] = {table.name: [] for table in TABLES}
        self.before: RunSummary | None = None
        self.reads = 0
        self._kept: list[DataFrame] = []

    def read(self, table: Table) -> DataFrame:
        self.reads += 1
        return self._make(self.rows[table.name], table.ddl)

    def run(
        self,
        number: int,
        verdicts: Sequence[Row],
        *,
        mode: str = "incremental",
        op: Iterable[Row] = (),
        broken: Sequence[Row] = (),
        missing: Sequence[Row] | None = None,
        business: Sequence[Row] | None = None,
        groups: Sequence[str] = (),
        unknown_to_ms: Mapping[int, int] | None = None,
        acknowledged: Sequence[Acknowledgement] = (),
        targets: Sequence[TopicRead] = (),
    ) -> Mapping[str, list[Row]]:
        """Apply a run; return the rows that it has changed, by table."""
        from txbroker.spark.tables.changes import changes
        from txbroker.spark.tables.findings import count_findings
        from txbroker.spark.tables.judged import FOUND, MISSING, JudgedRun

        make = self._make
        ids = {row["id"] for row in verdicts}
        held = [row for row in self.rows["transactions"] if row["id"] in ids]
        others = [row["kind"] for row in (*(missing or ()), *(business or ()))]
        others += ["unreadable" for row in broken if row["own"]]
        judged = JudgedRun(
            structs.replace(_summary(number, mode, verdicts, others), cut=_cut(targets)),
            NAMES,
            now_ms(number),
            make(verdicts, schema.VERDICT),
            make(op, schema.OP),
            make(held, TRANSACTIONS.ddl) if held else None,
            before=self.before,
            broken=make(broken, schema.BROKEN),
            missing=None if missing is None else make(missing, MISSING),
            business=None if business is None else make(business, FOUND),
            groups=groups,
            unknown_to_ms=unknown_to_ms or {},
            acknowledged=acknowledged,
            keep=self._keep,
            days=_days(verdicts),
            first=not any(self.rows.values()),
        )
        made = {change.table.name: change for change in changes(judged, self.read)}
        totals = count_findings(judged, made.get(DRIFT.name), self.read)
        found = {name: self._apply(change) for name, change in made.items()}
        while self._kept:
            self._kept.pop().unpersist()
        self.before = structs.replace(
            judged.summary,
            open_findings=totals.open,
            acknowledged=totals.acknowledged,
            changed_findings=totals.changed,
        )
        return found

    def _make(self, rows: Iterable[Row], ddl: str) -> DataFrame:
        """Return rows that Spark holds without a job."""
        import pyarrow as pa
        from pyspark.sql.types import StructType

        from txbroker.spark.schema import arrow_types

        kind = cast(StructType, StructType.fromDDL(ddl))
        values = [{name: row.get(name) for name in kind.names} for row in rows]
        table: Any = pa.Table.from_pylist(values, arrow_types(kind))
        return self.spark.createDataFrame(table, kind)

    def _keep(self, table: DataFrame) -> DataFrame:
        self._kept.append(table.persist())
        return table

    def _apply(self, change: Replacement) -> list[Row]:
        """Replace the known rows by the new ones, as a store does; return those."""
        table = change.table
        new = [row.asDict(recursive=True) for row in change.rows.collect()]
        known = set() if change.known is None else {tuple(row) for row in change.known.collect()}
        kept = [
            row
            for row in self.rows[table.name]
            if tuple(row[name] for name in ("day", *table.keys)) not in known
        ]
        self.rows[table.name] = kept + new
        keys = [tuple(row[name] for name in table.keys) for row in self.rows[table.name]]
        assert len(keys) == len(set(keys)), f"{table.name} holds rows twice"
        return new


def _days(verdicts: Sequence[Row]) -> frozenset[date]:
    """Return the days of all prepares, as a run's totals have them."""
    times_ms = [at for row in verdicts if (at := row["prepared_at_ms"]) is not None]
    return frozenset(datetime.fromtimestamp(at / 1000, UTC).date() for at in times_ms)


def _cut(targets: Sequence[TopicRead]) -> SnapshotBounds:
    own = TopicRead("own", (0,), (0,), (9,))
    return SnapshotBounds(own, own, own, tuple(targets), (), ())


def _summary(number: int, mode: str, verdicts: Sequence[Row], others: Iterable[str]) -> RunSummary:
    kinds = Counter(kind for row in verdicts for kind in row["findings"])
    kinds.update(others)
    states = Counter(row["state"] for row in verdicts)
    carried = sum(row["carry"] for row in verdicts)
    counts = ({}, len(verdicts), states, kinds, carried)
    return RunSummary(f"run{number}", mode, 0, 1.5, None, *counts, terms=Terms(now_ms(number)))
