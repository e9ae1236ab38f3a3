"""Audit results for proxies: one small record of the compacted audit topic for each mode."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from txbroker.contract.drift import Severity
from txbroker.contract.service import AuditOverview
from txbroker.core.decoding import Malformed, NewerVersion, version_of

BATCH_KEY, STREAM_KEY = "batch", "stream"
"""The keys of the newest batch and stream audit results."""
BATCH_TICK_KEY = "batch-tick"
"""The key under which a batch audit writes a record to read the brokers' clock."""

AUDIT_VERSION = 1
TAKEN_TOPICS_MAX = 50
"""Topics in one record; an installation may have thousands."""

_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Kind = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]{0,63}$")]
_Name = Annotated[str, Meta(pattern="^[a-z][a-z0-9_-]{0,62}$")]
_Kinds = Annotated[dict[_Kind, _Count], Meta(max_length=64)]


class UnreadRecord(Struct, frozen=True):
    """A record that an audit could not read, and why."""

    topic: str
    partition: int
    offset: int
    why: str


class StreamFigures(Struct, frozen=True, kw_only=True):
    """Load and state of a stream.

    Attributes:
        unread: records in the topics that it has not read.
        open: transactions that can change.
        ended: ended transactions that it still recognises.
        state_bytes: size of its state's files.
        batch_ms: duration of the newest batch.
    """

    unread: _Count
    open: _Count
    ended: _Count
    state_bytes: _Count
    batch_ms: _Count


class CheckNews(Struct, frozen=True):
    """A check of a run; `ok` is false where it failed."""

    name: _Name
    severity: Severity
    ok: bool


class AuditNews(Struct, frozen=True, kw_only=True):
    """The result of one run, or the position of a stream.

    Attributes:
        v: version of this record.
        run: the run's name.
        mode: `full`, `incremental` or `stream`.
        started_ms, ended_ms: when, ms since 1970.
        transactions: how many were judged.
        states: how many transactions are in each state.
        drift: how many have each kind of finding, zeros included, so that a reader needs no list
            of kinds.
        carried: how many were not finished.
        quarantined: records that could not be read.
        taken: records that retention deleted before they were read.
        taken_topics: the same by topic, the most first, a bounded number.
        business: compared rows of the business, if requested.
        strangers: records of transactions that a stream had forgotten, not judged.
        set_aside: some of the unreadable records, a bounded number.
        missing_targets: topics that do not exist, with how many transactions were committed to
            each; a bounded number of topics.
        stream: of a stream; null in records of batches and of earlier versions.
        acknowledged: findings that an operator has acknowledged, not counted in `drift`.
        checks: the run compared with the limits of its file.
    """

    v: int = AUDIT_VERSION
    run: str
    mode: str
    started_ms: _Count
    ended_ms: _Count
    transactions: _Count
    states: _Kinds
    drift: _Kinds
    carried: _Count = 0
    quarantined: _Count = 0
    taken: _Count = 0
    taken_topics: dict[str, _Count] = {}
    business: dict[str, _Count] = {}
    strangers: _Count = 0
    set_aside: list[UnreadRecord] = []
    missing_targets: dict[str, _Count] = {}
    stream: StreamFigures | None = None
    acknowledged: _Kinds = {}
    checks: Annotated[list[CheckNews], Meta(max_length=64)] = []

    def overview(self, mode: str) -> AuditOverview:
        """Return the result for operators; `mode` is the key of its record."""
        drift = {kind: count for kind, count in self.drift.items() if count}
        failed: dict[str, str] = {one.name: one.severity for one in self.checks if not one.ok}
        return AuditOverview(mode, self.ended_ms, drift, failed)


def encode_news(news: AuditNews) -> bytes:
    """Return a record's value."""
    return msgspec.json.encode(news)


def decode_news(value: bytes) -> AuditNews:
    """Return the result in a record of the audit topic; raise NewerVersion or Malformed if it is
    none."""
    try:
        version = version_of(value)
        if version > AUDIT_VERSION:
            raise NewerVersion(f"an audit's record of version {version}")
        return msgspec.json.decode(value, type=AuditNews)
    # Deep nesting is a RecursionError.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not an audit result: {error}") from None
