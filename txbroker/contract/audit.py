"""What an audit tells all proxies: one small record of the compacted audit topic for each mode."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from txbroker.core.decoding import Malformed, NewerVersion

BATCH_KEY, STREAM_KEY = "batch", "stream"
"""Under what the newest record of an audit of either sort stands."""
BATCH_TICK_KEY = "batch-tick"
"""Under what a batch audit writes a record to learn the brokers' time; its value says nothing."""

AUDIT_VERSION = 1
TAKEN_TOPICS_MAX = 50
"""Topics that a record names; an installation may have thousands."""

_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Kind = Annotated[str, Meta(pattern="^[a-z][a-z0-9_]{0,63}$")]
_Kinds = Annotated[dict[_Kind, _Count], Meta(max_length=64)]


class UnreadRecord(Struct, frozen=True):
    """A record that an audit could not read and set aside: where it is, and why."""

    topic: str
    partition: int
    offset: int
    why: str


class AuditNews(Struct, frozen=True, kw_only=True):
    """The end of one run, or how far a stream is.

    Attributes:
        v: version of this record.
        run: the run's name.
        mode: `full`, `incremental` or `stream`.
        started_ms, ended_ms: when, ms since 1970.
        transactions: how many were judged.
        states: how many transactions are in each state.
        drift: how many have each kind of finding, kinds that were not found included: so a reader
            needs no list of its own.
        carried: how many were not finished.
        quarantined: records that did not read.
        taken: records that retention took before they were read.
        taken_topics: the same by topic, the most first, a bounded number.
        business: rows of the business compared, where asked for.
        strangers: records that came when a stream had forgotten their transactions, not judged.
        set_aside: some of the records that did not read, a bounded number.
        missing_targets: topics that do not exist, with how many transactions were committed to
            each; a bounded number of topics.
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


class _Version(Struct):
    v: int


def encode_news(news: AuditNews) -> bytes:
    """Return a record's value."""
    return msgspec.json.encode(news)


def decode_news(value: bytes) -> AuditNews:
    """Return what a record of the audit topic says.

    Raises:
        NewerVersion: a newer version wrote it.
        Malformed: it is none.
    """
    try:
        version = msgspec.json.decode(value, type=_Version).v
        if version > AUDIT_VERSION:
            raise NewerVersion(f"an audit's record of version {version}")
        return msgspec.json.decode(value, type=AuditNews)
    # A value nested deep enough makes the decoder give up in its own way.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not what an audit tells: {error}") from None
