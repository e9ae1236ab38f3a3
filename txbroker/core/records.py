"""The values that are stored: messages, half messages, markers, and the records that hold them."""

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias, overload

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

RECORD_VERSION = 2
"""The newest record version that this build reads. Proxies exchange theirs, and write no version
newer than all of them read."""
LOG_VERSION = 1
"""The version of all records that this build writes, except segments (`core.segment`)."""

PARENT_HEADER, STATE_HEADER = "traceparent", "tracestate"
TRACE_HEADERS = frozenset({PARENT_HEADER, STATE_HEADER})
"""The headers of a W3C trace context; see `txbroker.tracing`."""

Header: TypeAlias = tuple[str, bytes | None]
"""A record header: name and bytes. Order and repeats are kept."""
Partition: TypeAlias = tuple[str, int]
"""A topic and the number of one of its partitions."""


@lru_cache(maxsize=10_000)
def intern(text: str) -> str:
    """Return one object for equal names: few groups, topics and endpoints are in very many records.

    Unlike `sys.intern`, which keeps a string for ever in Python 3.12, this is bounded.
    """
    return text


class Encoded(Struct, frozen=True, eq=False, gc=False):
    """Encoded headers of one record, readable as a sequence of names and values.

    Attributes:
        data: the number of headers and the headers, as in a record batch.
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
    """Return the varint that begins there, and its end."""
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


class Record(Struct, frozen=True, gc=False):
    """A record of a topic.

    Attributes:
        timestamp_ms: the broker's append time; -1 before it is appended.
        offset: -1 before it is appended.
        skipped: how many offsets right before it were read and hold no record: ends of Kafka
            transactions, and records of aborted ones. Set only when a log is read in order.
        producer: the producer id of the Kafka transaction that wrote it; -1 outside of
            transactions. Known only in the checkpoint topic.
    """

    key: bytes | None
    value: bytes | None
    headers: Headers = NO_HEADERS
    timestamp_ms: int = -1
    offset: int = -1
    skipped: int = 0
    producer: int = -1


GivenBytes: TypeAlias = bytes | bytearray | memoryview | str | None
"""What a message's key, value or header may be given as; text becomes UTF-8."""
GivenHeaders: TypeAlias = Mapping[str, GivenBytes] | Iterable[tuple[str, GivenBytes]]


class Message(Struct, frozen=True, gc=False):
    """One message for one target topic.

    Key, value and headers may be given as text, which is encoded as UTF-8; headers as a mapping or
    as pairs. The attributes are bytes, and pairs.

    Attributes:
        value: None is a tombstone.
        partition: None is chosen by the key, as Kafka's Java client does, when the transaction is
            prepared.
        timestamp_ms: None becomes the append time of the deciding marker.

    Raises:
        TypeError: a field has a wrong type.
        ValueError: a text cannot be written as UTF-8.
    """

    topic: str
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[Header, ...] = ()
    partition: int | None = None
    timestamp_ms: int | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            topic: str,
            key: GivenBytes = None,
            value: GivenBytes = None,
            headers: GivenHeaders = (),
            partition: int | None = None,
            timestamp_ms: int | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.topic, str):
            raise _wrong_type("topic", "a str", self.topic)
        key, value, headers = self.key, self.value, self.headers
        if key is not None and type(key) is not bytes:
            force_setattr(self, "key", _to_bytes("key", key))
        if value is not None and type(value) is not bytes:
            force_setattr(self, "value", _to_bytes("value", value))
        if headers != () and not _are_headers(headers):
            force_setattr(self, "headers", _to_headers(headers))
        for name, number in (("partition", self.partition), ("timestamp_ms", self.timestamp_ms)):
            if number is not None and (not isinstance(number, int) or number is True):
                raise _wrong_type(name, "a whole number or None", number)

    @classmethod
    def json(
        cls,
        topic: str,
        value: object,
        *,
        key: GivenBytes = None,
        headers: GivenHeaders = (),
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> "Message":
        """Return a message whose value is `value` as JSON: dicts, lists, dataclasses, dates, UUIDs
        and the like.

        Raises:
            TypeError: JSON cannot hold `value`, or a field has a wrong type.
        """
        try:
            encoded = msgspec.json.encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"a message's value cannot be written as JSON: {error}") from None
        return cls(topic, key, encoded, headers, partition, timestamp_ms)


def _wrong_type(name: str, wanted: str, value: object) -> TypeError:
    return TypeError(f"a message's {name} is {wanted}, not {type(value).__name__}")


def _to_bytes(name: str, value: object) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"a message's {name} cannot be written as UTF-8") from None
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    raise _wrong_type(name, "bytes, str or None", value)


def _are_headers(headers: object) -> bool:
    """Return whether headers are what they become, as they are where they were decoded."""
    if type(headers) is not tuple:
        return False
    for header in headers:
        if type(header) is not tuple or len(header) != 2:
            return False
        name, value = header
        if type(name) is not str or not (value is None or type(value) is bytes):
            return False
    return True


def _to_headers(headers: object) -> tuple[Header, ...]:
    wanted = "a mapping, or pairs of a name and bytes, str or None"
    if isinstance(headers, Mapping):
        headers = headers.items()
    if isinstance(headers, (str, bytes)) or not isinstance(headers, Iterable):
        raise _wrong_type("headers", wanted, headers)
    result: list[Header] = []
    for header in headers:
        if not isinstance(header, (tuple, list)) or len(header) != 2:
            raise TypeError(f"a message's headers are {wanted}, not {header!r}")
        name, value = header
        if not isinstance(name, str):
            raise _wrong_type("header's name", "a str", name)
        result.append((name, _to_bytes(f"header {name!r}", value)))
    return tuple(result)


class Place(Struct, frozen=True, gc=False):
    """The target partition of a message, and its size in a batch, bytes."""

    topic: str
    partition: int
    size: int


class CheckPolicy(Struct, frozen=True, gc=False):
    """When a pending transaction is checked back, fixed when it is prepared.

    The first check is due `after_s` seconds after the half message was appended, each further one
    `interval_s` after the last; `timeout_s` after attempt `attempts_max` the transaction is parked.
    """

    after_s: float = 6.0
    interval_s: float = 30.0
    attempts_max: int = 15
    timeout_s: float = 5.0


class Attributes(Struct, frozen=True, gc=False):
    """The optional texts of a transaction, which are stored with it as they are given.

    What stores, copies and shows a transaction takes them from here. A further one is declared
    here, and where callers give it and see it: `PrepareRequest` and `TransactionView`, the frame
    `Prepare`, `PrepareBody`, and `TransactionOptions` of the SDK. Its header in a half message is
    `txb-` and its name without `_key`.
    """

    order_key: str | None = None
    dedup_key: str | None = None


ATTRIBUTES = Attributes.__struct_fields__
NO_ATTRIBUTES = Attributes()
"""Shared by all transactions without."""
attribute_values = attrgetter(*ATTRIBUTES)
"""Returns the values of fields of these names."""


def attributes_of(source: object) -> Attributes:
    """Return the attributes of an object that has fields of their names."""
    found = Attributes(*attribute_values(source))
    return NO_ATTRIBUTES if found == NO_ATTRIBUTES else found


class Half(Struct, frozen=True, gc=False):
    """A half message: a transaction as it is prepared, with the messages that it holds back."""

    id: str
    group: str
    messages: tuple[Message, ...]
    attributes: Attributes = NO_ATTRIBUTES
    policy: CheckPolicy = CheckPolicy()


class Decision(StrEnum):
    """A producer's answer about its transaction."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


class State(StrEnum):
    """The state of a transaction.

    `committed` is decided but not yet visible; `parked` is undecided after the last attempt and
    kept whole; `refused` is committed, but a target refuses it. If the messages of an undecided
    transaction were deleted before they were copied, it stays `pending` or `parked` with the cause
    `body_lost`: it can be read, rolled back, or committed with its messages; any other commit, and
    a repeated prepare, returns `410 body_lost`.
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
    """The kind of a record of the operation topic."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    CHECK = "check"
    """An attempt: an endpoint is about to be asked."""
    RETURNED = "returned"
    """The last attempt reached no endpoint and does not count."""
    LATER = "later"
    """The last attempt was answered with a deliberate "not yet" and does not count."""
    PARK = "park"
    REVIVE = "revive"


class Source(StrEnum):
    """The origin of a decision."""

    PRODUCER = "producer"
    CHECK = "check"
    OPERATOR = "operator"
    SCHEDULE = "schedule"


class CheckReason(StrEnum):
    """Why an attempt is made: it is due, or a client asked for it."""

    DUE = "due"
    ASKED = "asked"


class Attempt(Struct, frozen=True, gc=False):
    """One check attempt: when it was recorded, the endpoint, and the answer so far."""

    round: int
    number: int
    at_ms: int
    reason: CheckReason
    endpoint: str
    outcome: str = ""
    """The answer in a few words; "" while it is open, or if it was lost with its owner."""
    counts: bool = True
    """False if it was given back: it reached no endpoint, or the answer was "not yet"."""


class Checks(Struct, frozen=True, omit_defaults=True, gc=False):
    """The check attempts of a transaction.

    Attributes:
        round: the round of attempts, from 1; each numbers its attempts from 1.
        round_started_ms: when this round began.
        number: the last attempt of this round; 0 before the first.
        counted_ms: append times of this round's attempts that count.
        last_check_ms: append time of the last attempt of this round, counting or not; 0 if none.
        not_before_ms: the end of a deliberate "not yet"; 0 without one.
        attempts: the newest attempts, for display.
    """

    round: int = 1
    round_started_ms: int = 0
    number: int = 0
    counted_ms: tuple[int, ...] = ()
    last_check_ms: int = 0
    not_before_ms: int = 0
    attempts: tuple[Attempt, ...] = ()


NO_CHECKS = Checks()
"""Shared by all transactions without an attempt: a million take no memory."""


class Marker(Struct, frozen=True, omit_defaults=True):
    """A record of the operation topic.

    Attributes:
        half: offset of the half message's first record, if known.
        group: the producer group that decides; empty for an operator.
        by: the SDK instance, endpoint or operator.
        round, number: of an attempt; numbers grow by one within a round.
        claim: the owner's claim under which the marker was written.
        endpoint: the endpoint that a `check` asks.
        previous: the answer to the previous attempt, if it did not decide.
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
    """A record that identifies the log against which a checkpoint was written."""

    offset: int
    timestamp_ms: int

    def matches(self, record: "Record | None") -> bool:
        """Return whether the record at this offset is the one that it was."""
        return record is not None and record.timestamp_ms == self.timestamp_ms


def anchor_of(record: Record) -> Anchor:
    """Return the anchor of a record."""
    return Anchor(record.offset, record.timestamp_ms)


class Claim(Struct, frozen=True):
    """The first record of an owner: once it is readable, all earlier owners are fenced.

    Attributes:
        producers: ids of the owner's producers, which the door fills in.
    """

    v: int
    claim: str
    owner: str
    url: str
    producers: tuple[int, ...] = ()


class Checkpoint(Struct, frozen=True):
    """The position of promotion, written in every promotion transaction.

    A committed transaction is promoted if its deciding marker lies below `op` and its half message
    below `half`, and it is neither in `deferred` nor refused.

    Attributes:
        refused: whether this or any earlier one has refused a transaction: then the parked topic
            has had a record, unless it was recreated.
        accounted: the half offset below which every transaction is settled or has a parked copy;
            None if written by an older proxy.
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
    """Why a target refuses a message: a code, and a sentence with the next step."""

    code: str
    message: str
    topic: str
    partition: int
    passing: bool = False
    """True if waiting can help: the message is retried automatically."""


class ParkedCopy(Struct, frozen=True):
    """A whole transaction as kept in the parked topic."""

    half: Half
    half_offset: int
    prepared_at_ms: int
    state: State
    cause: Cause | None = None
    decided_at_ms: int = 0
    """Append time of the commit marker of a refused one; 0 while undecided."""
    at: tuple[int, ...] = ()
    """The offsets of its records in the parked topic, as far as known."""
    checks: Checks = NO_CHECKS
    """Its attempts so far: markers of a next round count by their round."""


class Skip(Struct, frozen=True):
    """An operator's decision to skip a record that stops a partition.

    It is stored in that partition of the checkpoint topic.

    Attributes:
        v: the version of this record.
        log: `half`, `op` or `checkpoint`.
        offset: of the record.
        digest: of its key, value and headers: no other record at that offset is skipped.
        by: the operator.
        reason: why.
    """

    v: int
    log: str
    offset: int
    digest: str
    by: str
    reason: str
