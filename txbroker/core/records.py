"""The values that travel: messages, half messages, markers and the records that hold them."""

from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from typing import TypeAlias, overload

from msgspec import Struct

RECORD_VERSION = 2
"""The newest version of records that this build understands. Proxies tell one another theirs, and
write nothing newer than the oldest of them understands."""
LOG_VERSION = 1
"""The version of all records that this build writes, but of segments (`core.segment`)."""

PARENT_HEADER, STATE_HEADER = "traceparent", "tracestate"
TRACE_HEADERS = frozenset({PARENT_HEADER, STATE_HEADER})
"""The headers of a W3C trace context; see `txbroker.tracing`."""

Header: TypeAlias = tuple[str, bytes | None]
"""A record header: its name and its bytes. Order and repeats are kept."""


@lru_cache(maxsize=10_000)
def intern(text: str) -> str:
    """Return one object for equal names: few groups, topics and endpoints are in very many records.

    Unlike `sys.intern`, which keeps a string for ever in Python 3.12, this is bounded.
    """
    return text


class Encoded(Struct, frozen=True, eq=False, gc=False):
    """Encoded headers of one record; to a reader the sequence of their names and values.

    Attributes:
        data: their number and the headers, as they stand in the record.
    """

    data: bytes

    def __iter__(self) -> Iterator[Header]:
        data = self.data
        count, at = _number(data, 0)
        for _ in range(count):
            size, at = _number(data, at)
            name, at = data[at : at + size].decode(), at + size
            size, at = _number(data, at)
            if size < 0:
                yield name, None
            else:
                yield name, data[at : at + size]
                at += size

    def __len__(self) -> int:
        return _number(self.data, 0)[0]

    @overload
    def __getitem__(self, at: int) -> Header: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Header, ...]: ...
    def __getitem__(self, at: int | slice) -> Header | tuple[Header, ...]:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Encoded):
            return self.data == other.data
        return tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins there, and where it ends."""
    rest = shift = 0
    while True:
        byte = data[at]
        rest |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return rest >> 1 ^ -(rest & 1), at


NO_HEADERS = Encoded(b"\0")
Headers: TypeAlias = tuple[Header, ...] | Encoded
"""The headers of a record, in order."""


class Record(Struct, frozen=True):
    """A record of a topic, as it is stored, or as it is to be.

    `offset` and `timestamp_ms` (the broker's append time) are -1 in a record not yet appended.
    """

    key: bytes | None
    value: bytes | None
    headers: Headers = NO_HEADERS
    timestamp_ms: int = -1
    offset: int = -1
    skipped: int = 0
    """How many offsets right before it were read and hold no record: the ends of Kafka
    transactions, and records of aborted ones. Known only to who reads a log from an offset on."""
    producer: int = -1
    """The producer id of the Kafka transaction that wrote it; -1 outside of transactions. Known
    only in the checkpoint topic."""


class Message(Struct, frozen=True, gc=False):
    """One message for one target topic.

    `value` None is a tombstone. `partition` None lets the key decide, as Kafka's Java client
    does; it is fixed when the transaction is prepared. `timestamp_ms` None becomes the append
    time of the deciding marker.
    """

    topic: str
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[Header, ...] = ()
    partition: int | None = None
    timestamp_ms: int | None = None


class Place(Struct, frozen=True, gc=False):
    """Where a message goes and how much room it takes in a batch, bytes: what planning needs."""

    topic: str
    partition: int
    size: int


class CheckPolicy(Struct, frozen=True, gc=False):
    """When a pending transaction is checked back, fixed when it is prepared.

    The first check comes `after_s` seconds after the half message was appended, each further one
    `interval_s` after the last; after `attempts_max` attempts and `timeout_s` more the
    transaction is parked.
    """

    after_s: float = 6.0
    interval_s: float = 30.0
    attempts_max: int = 15
    timeout_s: float = 5.0


class Half(Struct, frozen=True, gc=False):
    """A transaction as it is prepared: who sent it and the messages that it holds back."""

    id: str
    group: str
    messages: tuple[Message, ...]
    order_key: str | None = None
    dedup_key: str | None = None
    policy: CheckPolicy = CheckPolicy()


class Decision(StrEnum):
    """What a producer says of its transaction."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


class State(StrEnum):
    """Where a transaction stands.

    `committed` is decided but not yet visible; `parked` is undecided after the last attempt and
    kept whole; `refused` is committed, but a target does not take it. Where the messages of an
    undecided transaction were deleted before they were copied, it stays `pending` or `parked` with
    the cause `body_lost`: it can be read, rolled back, or committed with its messages; any other
    commit, and the same prepare again, gets `410 body_lost`.
    """

    PENDING = "pending"
    COMMITTED = "committed"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"
    PARKED = "parked"
    REFUSED = "refused"


LATER_S_MIN = 1.0
"""A deliberate "not yet" holds for at least this, seconds: no group is asked in a tight loop."""
LATER_S_MAX = 3600.0
"""A deliberate "not yet" holds for at most this, seconds."""


def bounded_later_s(seconds: float) -> float:
    """Return how long a "not yet" holds; NaN counts as the minimum, integers may be of any size."""
    if seconds > LATER_S_MAX:
        return LATER_S_MAX
    return float(seconds) if seconds > LATER_S_MIN else LATER_S_MIN


class MarkerKind(StrEnum):
    """What a record of the operation topic says of a transaction."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    CHECK = "check"
    """An attempt: somebody is about to be asked."""
    RETURNED = "returned"
    """The last attempt certainly reached nobody and does not count."""
    LATER = "later"
    """The last attempt was answered "not yet" on purpose and does not count."""
    PARK = "park"
    REVIVE = "revive"


class Source(StrEnum):
    """Who a decision came from."""

    PRODUCER = "producer"
    CHECK = "check"
    OPERATOR = "operator"
    SCHEDULE = "schedule"


class CheckReason(StrEnum):
    """Why an attempt is made: its time has come, or somebody asked for it."""

    DUE = "due"
    ASKED = "asked"


class Attempt(Struct, frozen=True, gc=False):
    """One check: when it was recorded, whom it asked and what came back so far."""

    round: int
    number: int
    at_ms: int
    reason: CheckReason
    endpoint: str
    outcome: str = ""
    """The answer in a few words; "" while it is still open or was lost with its owner."""
    counts: bool = True
    """False where it was given back: it reached nobody, or the answer was "not yet"."""


class Marker(Struct, frozen=True, omit_defaults=True):
    """A record of the operation topic.

    Attributes:
        half: offset of the half message's first record, where known.
        group: the producer group that decides; empty for an operator.
        by: who exactly: an SDK instance, a check's endpoint, an operator's name.
        round, number: of an attempt; numbers grow by one and start again with a round.
        claim: the owner's claim under which the marker was written.
        endpoint: whom a `check` asks.
        previous: the answer to the attempt before this one, where it did not decide.
        later_s: seconds from this marker's append time until the next attempt, for `later`.
        contents: how many records with replaced messages follow in the same batch.
    """

    v: int
    kind: MarkerKind
    id: str
    half: int = -1
    source: Source = Source.PRODUCER
    group: str = ""
    by: str = ""
    reason: str = ""
    round: int = 0
    number: int = 0
    claim: str = ""
    endpoint: str = ""
    previous: str = ""
    later_s: float = 0.0
    contents: int = 0


class Anchor(Struct, frozen=True, gc=False):
    """A record by which progress recognises the log that it was written against."""

    offset: int
    timestamp_ms: int


def anchor_of(record: Record) -> Anchor:
    """Return what tells a record from any other that could stand at its offset."""
    return Anchor(record.offset, record.timestamp_ms)


class Claim(Struct, frozen=True):
    """The first record of an owner: whoever reads it knows that all earlier owners are fenced."""

    v: int
    claim: str
    owner: str
    url: str


class Checkpoint(Struct, frozen=True):
    """How far promotion has come, written inside every turn.

    A committed transaction is done if its deciding marker lies below `op` and its half message
    below `half`, and it is neither in `deferred` nor refused.

    Attributes:
        refused: whether this turn or any before it has set a refused one aside: then the parked
            topic has had a record, unless it was made anew.
        accounted: the half offset below which every transaction is settled or kept as a copy; None
            where a proxy wrote this that did not say so.
    """

    v: int
    claim: str
    op: int
    half: int
    op_anchor: Anchor | None = None
    half_anchor: Anchor | None = None
    deferred: tuple[str, ...] = ()
    snapshot: str | None = None
    refused: bool = False
    accounted: int | None = None


class Cause(Struct, frozen=True, gc=False):
    """Why a target does not take a message, in a code and a sentence with what to do."""

    code: str
    message: str
    topic: str
    partition: int
    passing: bool = False
    """True where waiting can help: the same message is tried again by itself."""


class ParkedCopy(Struct, frozen=True):
    """A whole transaction as it is kept in the parked topic."""

    half: Half
    half_offset: int
    prepared_at_ms: int
    state: State
    cause: Cause | None = None
    decided_at_ms: int = 0
    """Append time of the commit marker of a refused one; 0 while undecided."""
    at: tuple[int, ...] = ()
    """Where its records are in the parked topic, as far as known."""


class Skip(Struct, frozen=True):
    """An operator's decision that a record which stops a partition is passed over. It stands in
    the checkpoint topic, in the partition that it is about.

    Attributes:
        v: the version of this record.
        log: `half`, `op` or `checkpoint`.
        offset: of the record.
        digest: of its key, value and headers: another record at that offset is never passed over.
        by: who decided.
        reason: why.
    """

    v: int
    log: str
    offset: int
    digest: str
    by: str
    reason: str
