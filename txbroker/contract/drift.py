"""Events of the drift topic: changes in the life of a finding, as JSON.

Batch audits and streams write the same events. The record's key is `event`.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

DRIFT_VERSION = 2
"""Version 1 was written by streams only, and had no `state`."""

DriftState = Literal["opened", "seen", "healed", "expired", "acknowledged"]
Severity = Literal["critical", "error", "warning"]
_Version = Annotated[int, Meta(extra_json_schema={"const": DRIFT_VERSION})]
_Time = Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


class DriftEvent(Struct, frozen=True, kw_only=True):
    """A change in the life of a finding.

    Attributes:
        v: version of this record.
        event: `ID:KIND`, the finding; the record's key.
        state: what changed: `opened` (also: opened again), `seen` (a later run found it again),
            `healed` (judged again, and the fault is gone), `expired` (the topics no longer hold the
            evidence) or `acknowledged`.
        kind: of the finding.
        severity: of the kind: `critical`, `error` or `warning`.
        id: the transaction; of an unreadable record its position, `TOPIC-PARTITION@OFFSET`.
        group: the producer group; empty where it is unknown.
        topic, partition, offset: where the evidence is; null where there is no record.
        why: the evidence in a sentence.
        at: when this changed; first_seen, last_seen: when the finding was first and last found.
            ISO 8601, UTC, by the brokers' clocks.
        installation: the `topic_prefix`.
        source: the name of the run, or `stream-NAME`.
        by, reason, until: of an acknowledgement.
    """

    v: _Version = DRIFT_VERSION
    event: str
    state: DriftState
    kind: str
    severity: Severity
    id: str
    group: str
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    why: str
    at: _Time
    first_seen: _Time
    last_seen: _Time
    installation: str
    source: str
    by: str | None = None
    reason: str | None = None
    until: _Time | None = None
