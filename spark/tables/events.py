"""Changes of findings as events of the drift topic, from batches and streams alike."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec
from msgspec import Struct
from pyspark.sql import DataFrame, Row

from txbroker.contract.drift import DriftEvent, DriftState
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.tools.audit_results import KafkaDrift
from txbroker.spark import expressions as F
from txbroker.spark.judge.kinds import ALL_KINDS
from txbroker.spark.schema import TEXT_MAX, RunSummary

_SEVERITIES = {kind.name: kind.severity for kind in ALL_KINDS}


class EvidencePlace(Struct, frozen=True):
    """The record that is the evidence of a finding; all None where there is none."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None


class Accepted(Struct, frozen=True):
    """Who has acknowledged a finding, why, and until when (ms since 1970)."""

    by: str
    why: str
    until_ms: int


def drift_event(
    state: DriftState,
    id: str,
    kind: str,
    *,
    group: str,
    place: EvidencePlace,
    why: str,
    at_ms: int,
    first_ms: int,
    last_ms: int,
    installation: str,
    source: str,
    accepted: Accepted | None = None,
) -> tuple[str, bytes]:
    """Return the key and the value of an event's record; see `DriftEvent`.

    `at_ms`, `first_ms`, `last_ms`: `at`, `first_seen` and `last_seen`, ms since 1970.
    """
    event = DriftEvent(
        event=f"{id}:{kind}",
        state=state,
        kind=kind,
        severity=_SEVERITIES[kind],
        id=id,
        group=group[:TEXT_MAX],
        topic=place.topic,
        partition=place.partition,
        offset=place.offset,
        why=why[:TEXT_MAX],
        at=_iso(at_ms),
        first_seen=_iso(first_ms),
        last_seen=_iso(last_ms),
        installation=installation,
        source=source,
        by=None if accepted is None else accepted.by,
        reason=None if accepted is None else accepted.why,
        until=None if accepted is None else _iso(accepted.until_ms),
    )
    return event.event, msgspec.json.encode(event)


def _iso(at_ms: int) -> str:
    moment = datetime.fromtimestamp(at_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- of batches ----------------------------------------------------------------------------------

_WRITER, _KEY = "batch", "batch-events"
_RUNS_MAX = 100
"""Runs of all series of batches that are remembered: far more than write at a time."""
_TIMES = ("opened_at", "seen_at", "closed_at", "acknowledged_at", "acknowledged_until")


class WrittenRuns(Struct, frozen=True):
    """The newest runs whose events are in the drift topic, stored with them in one Kafka
    transaction. `v`: version of this record."""

    runs: tuple[str, ...] = ()
    v: int = 1


async def write_events(
    settings: KafkaSettings, findings: DataFrame, runs: Iterable[RunSummary]
) -> None:
    """Write the events of runs, each run's once.

    Args:
        findings: the table `drift` with the rows of these runs.
        runs: in order; those whose events are there already are left out.

    Raises:
        ConfigurationError: a topic is missing or refuses a record; nothing was written.
        KafkaUnavailable: they may or may not be written; a repetition is safe.
    """
    async with KafkaDrift(settings, _WRITER) as kafka:
        value = await kafka.begin(_KEY)
        written = WrittenRuns() if value is None else msgspec.json.decode(value, type=WrittenRuns)
        left = [run for run in runs if run.run not in written.runs]
        if left:
            names = [*written.runs, *(run.run for run in left)]
            progress = WrittenRuns(tuple(names[-_RUNS_MAX:]))
            events = _events(findings, left)
            await kafka.write(events, _KEY, msgspec.json.encode(progress))


def _events(findings: DataFrame, runs: Sequence[RunSummary]) -> Iterator[tuple[str, bytes]]:
    names = [run.run for run in runs]
    changed = [
        F.col(f"{what}_run").isin(names) for what in ("opened", "seen", "closed", "acknowledged")
    ]
    rows = findings.where(changed[0] | changed[1] | changed[2] | changed[3])
    times = {name: F.unix_millis(name) for name in _TIMES}
    for row in rows.withColumns(times).toLocalIterator():
        for run in runs:
            at_ms = run.started_ms if run.terms is None else run.terms.now_ms
            for state in _states(row, run.run):
                yield _event(row, state, run.run, at_ms)


def _states(row: Row, run: str) -> Iterator[DriftState]:
    """Yield what a run has changed about a finding."""
    if row["opened_run"] == run:
        yield "opened"
    elif row["seen_run"] == run:
        yield "seen"
    if row["closed_run"] == run:
        yield row["state"]
    if row["acknowledged_run"] == run:
        yield "acknowledged"


def _event(row: Row, state: DriftState, run: str, at_ms: int) -> tuple[str, bytes]:
    accepted = None
    if state == "acknowledged":
        accepted = Accepted(
            row["acknowledged_by"], row["acknowledged_why"], row["acknowledged_until"]
        )
    return drift_event(
        state,
        row["id"],
        row["kind"],
        group=row["grp"] or "",
        place=EvidencePlace(row["topic"], row["partition"], row["offset"]),
        why=row["why"] or "",
        at_ms=at_ms,
        first_ms=row["opened_at"],
        last_ms=row["seen_at"],
        installation=row["installation"],
        source=run,
        accepted=accepted,
    )
