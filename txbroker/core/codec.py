"""How transactions, markers and progress are written as Kafka records.

Our text headers come first, in fixed order, and the user's follow unchanged, even when their
names look like ours: the first header, `txb-v`, holds the version and the names of the optional
headers that are there (`1 ts order`), so a reader knows where ours end.
"""

import hashlib
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import cast

import msgspec

from txbroker.core.headers import (
    Encoded,
    Header,
    encode_field,
    encode_fields,
    varint,
)
from txbroker.core.records import (
    LOG_VERSION,
    RECORD_VERSION,
    Cause,
    CheckPolicy,
    Claim,
    Half,
    Kept,
    Marker,
    MarkerKind,
    Message,
    Progress,
    Record,
    Skip,
    State,
)

VERSION_HEADER = "txb-v"
ID_HEADER = "txb-id"
SEQUENCE_HEADER = "txb-seq"
INSTALLATION_HEADER = "txb-installation"
DEFAULT_PREFIX = "txbroker"
"""What the names of an installation's own topics begin with, unless it is told another prefix."""
OWN_TOPICS = ("half", "op", "checkpoint", "parked", "groups", "audit", "audit.drift")
"""What the names of an installation's own topics end with, behind the prefix and a dot."""
_FIXED = ("txb-id", "txb-group", "txb-topic", "txb-part", "txb-seq")
DURATION_MAX_S = 1e9
"""The longest duration of a check policy, seconds: thirty years, far from any overflow."""

CLAIM_KEY = b"claim"
PROGRESS_KEY = b"progress"
SKIPS = b"skip/"
"""What the keys of operators' decisions begin with."""

_encode_json = msgspec.json.Encoder().encode
_marker_decoder = msgspec.json.Decoder(Marker)


# What msgspec raises on bytes that are not what is asked for; deep nesting is a RecursionError.
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)


class _Versioned(msgspec.Struct):
    v: int


_version_decoder = msgspec.json.Decoder(_Versioned)


class Malformed(ValueError):
    """A record that is not one of ours, or is damaged."""


class NewerVersion(ValueError):
    """A record of a newer version of txbroker: to be kept, never to be dropped."""


class HalfPart(msgspec.Struct, frozen=True):
    """One record of a half message: message `sequence` of the `count` of its transaction."""

    id: str
    group: str
    message: Message
    sequence: int
    count: int
    policy: CheckPolicy
    order_key: str | None
    dedup_key: str | None


# --- half messages ---------------------------------------------------------------------------


def encode_half(
    half: Half,
    version: int = LOG_VERSION,
    extra: Sequence[Sequence[tuple[str, bytes]]] = (),
) -> tuple[Record, ...]:
    """Return the records of a half message; they belong into one batch.

    Args:
        extra: what the headers of ours say besides, by message.

    Raises:
        ValueError: a message has no partition yet, or a number is one that cannot be read back.
    """
    records = []
    messages, order_key, dedup_key = half.messages, half.order_key, half.dedup_key
    count = len(messages)
    id = encode_field(ID_HEADER, half.id.encode())
    for sequence, message in enumerate(messages):
        partition, stamp, theirs = message.partition, message.timestamp_ms, message.headers
        if partition is None or partition < 0:
            raise ValueError(f"{half.id}: message {sequence} has no partition")
        names: tuple[str, ...] = ()
        optional = b""
        if stamp is not None:
            if stamp < 0:
                raise ValueError(f"{half.id}: message {sequence} is from before 1970")
            names += ("ts",)
            optional += encode_field("txb-ts", b"%d" % stamp)
        if sequence == 0:
            names += ("check",)
            optional += _encode_policy(half.policy)
            if order_key is not None:
                names += ("order",)
                optional += encode_field("txb-order", order_key.encode())
            if dedup_key is not None:
                names += ("dedup",)
                optional += encode_field("txb-dedup", dedup_key.encode())
        for name, value in extra[sequence] if extra else ():
            names += (name,)
            optional += encode_field("txb-" + name, value)
        data = _encode_names(version, names, len(theirs)) + id
        data += _encode_place(half.group, message.topic, partition, sequence, count) + optional
        if theirs:
            data += encode_fields(theirs)
        records.append(Record(message.key, message.value, Encoded(data)))
    return tuple(records)


def encode_contents(
    half: Half, messages: Sequence[Message], version: int = LOG_VERSION
) -> tuple[Record, ...]:
    """Return the records that follow a commit marker whose messages replace the prepared ones."""
    replaced = msgspec.structs.replace(half, messages=tuple(messages))
    return encode_half(replaced, version)


# Of these there are few, in very many records: each is encoded once.


@lru_cache(maxsize=1000)
def _encode_names(version: int, optional: tuple[str, ...], theirs: int) -> bytes:
    """Return the number of all headers, and our first, which tells the optional ones."""
    first = encode_field(VERSION_HEADER, " ".join((str(version), *optional)).encode())
    return varint(1 + len(_FIXED) + len(optional) + theirs) + first


@lru_cache(maxsize=10_000)
def _encode_place(group: str, topic: str, partition: int, sequence: int, count: int) -> bytes:
    """Return our headers behind the id that every record has."""
    values = group.encode(), topic.encode(), b"%d" % partition, b"%d/%d" % (sequence, count)
    return encode_fields(zip(_FIXED[1:], values, strict=True))


def decode_half(record: Record) -> HalfPart:
    """Return what a record of the half topic says.

    Raises:
        NewerVersion: a newer version wrote it.
        Malformed: it is not a half message.
    """
    part, _ = _decode_part(record)
    return part


def _decode_part(record: Record) -> tuple[HalfPart, dict[str, bytes]]:
    headers = tuple(record.headers)
    if not headers or headers[0][0] != VERSION_HEADER:
        raise Malformed(f"the first header is not {VERSION_HEADER}")
    try:
        names = _header_names(headers[0][1] or b"")
        ours = len(names) + 1
        found = dict(headers[1:ours])
        if list(found) != names or None in found.values():
            raise Malformed(f"the headers are not {', '.join(names)}, each with a value")
        values = cast(dict[str, bytes], found)
        sequence, count = _sequence(values["txb-seq"])
        timestamp = values.get("txb-ts")
        message = Message(
            topic=_shared(values["txb-topic"]),
            key=record.key,
            value=record.value,
            headers=headers[ours:],
            partition=_number(values["txb-part"]),
            timestamp_ms=None if timestamp is None else _natural(timestamp.decode()),
        )
        part = HalfPart(
            id=values["txb-id"].decode(),
            group=_shared(values["txb-group"]),
            message=message,
            sequence=sequence,
            count=count,
            policy=_decode_policy(values.get("txb-check")),
            order_key=_optional_text(values, "txb-order"),
            dedup_key=_optional_text(values, "txb-dedup"),
        )
    except (NewerVersion, Malformed):
        raise
    except ValueError as error:
        raise Malformed(f"a header of ours does not read: {error}") from None
    return part, values


# Of these there are few, in very many records: each is read once, and all share what came of it.


@lru_cache(maxsize=1000)
def _header_names(first: bytes) -> list[str]:
    """Return the names of our headers behind the first, which tells them."""
    version, *optional = first.decode().split(" ")
    if _natural(version) > RECORD_VERSION:
        raise NewerVersion(f"half record of version {version}")
    names = [*_FIXED, *(f"txb-{name}" for name in optional)]
    if len({VERSION_HEADER, *names}) <= len(names):
        raise Malformed(f"a header twice among {', '.join(names)}")
    return names


@lru_cache(maxsize=10_000)
def _shared(text: bytes) -> str:
    """Return the name of a group or topic."""
    return text.decode()


@lru_cache(maxsize=10_000)
def _number(text: bytes) -> int:
    return _natural(text.decode())


@lru_cache(maxsize=10_000)
def _sequence(text: bytes) -> tuple[int, int]:
    """Return the number of a message among those of its transaction, and how many there are."""
    first, _, second = text.decode().partition("/")
    sequence, count = _natural(first), _natural(second)
    if sequence >= count:
        raise Malformed(f"sequence {sequence} of {count}")
    return sequence, count


def _optional_text(values: dict[str, bytes], name: str) -> str | None:
    value = values.get(name)
    return None if value is None else value.decode()


def _natural(text: str) -> int:
    """Return the number that decimal digits say; int() would take `+1`, ` 1` and `1_0` too."""
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"{text[:40]!r} is not a whole number")
    return int(text)


@lru_cache(maxsize=1000)
def _encode_policy(policy: CheckPolicy) -> bytes:
    _check_policy(policy)
    after, interval, timeout = (
        # The shortest text that reads back as the same number.
        f"{seconds:g}" if float(f"{seconds:g}") == seconds else repr(seconds)
        for seconds in (policy.after_s, policy.interval_s, policy.timeout_s)
    )
    text = f"{after}/{interval}/{policy.attempts_max}/{timeout}"
    return encode_field("txb-check", text.encode())


def _check_policy(policy: CheckPolicy) -> CheckPolicy:
    for seconds in (policy.after_s, policy.interval_s, policy.timeout_s):
        # Written so that not-a-number fails too.
        if not 0 <= seconds <= DURATION_MAX_S:
            raise ValueError(f"a check policy of {seconds} s")
    if policy.attempts_max < 1:
        raise ValueError(f"a check policy of {policy.attempts_max} attempts")
    return policy


@lru_cache(maxsize=1000)
def _decode_policy(text: bytes | None) -> CheckPolicy:
    if text is None:
        return CheckPolicy()
    after, interval, attempts, timeout = text.decode().split("/")
    return _check_policy(
        CheckPolicy(float(after), float(interval), _natural(attempts), float(timeout))
    )


def follows(parts: Sequence[HalfPart], part: HalfPart) -> bool:
    """Say whether `part` is the next message of the half message that `parts` begin."""
    if not parts or len(parts) != part.sequence:
        return False
    first = parts[0]
    return (first.id, first.group, first.count) == (part.id, part.group, part.count)


def join_parts(parts: list[HalfPart]) -> Half:
    """Return the half message whose records these are, all of one transaction, in order."""
    first = parts[0]
    return Half(
        first.id,
        first.group,
        tuple([part.message for part in parts]),
        first.order_key,
        first.dedup_key,
        first.policy,
    )


# --- promoted messages -----------------------------------------------------------------------


def installation_headers(prefix: str) -> tuple[Header, ...]:
    """Return what promoted records of an installation begin with: nothing of the default one.

    Installations may write to the same targets; by this one tells whose a record is.
    """
    return () if prefix == DEFAULT_PREFIX else ((INSTALLATION_HEADER, prefix.encode()),)


def promoted_headers(
    id: str,
    sequence: int,
    count: int,
    message: Message,
    installation: tuple[Header, ...] = (),
) -> Encoded:
    """Return the headers of a promoted record: ours first, then the user's as they came.

    Args:
        installation: as `installation_headers` gives them.
    """
    theirs = message.headers
    data = _encode_installation(installation, (count > 1) + len(theirs))
    data += encode_field(ID_HEADER, id.encode())
    if count > 1:
        data += encode_field(SEQUENCE_HEADER, b"%d/%d" % (sequence, count))
    if theirs:
        data += encode_fields(theirs)
    return Encoded(data)


@lru_cache(maxsize=1000)
def _encode_installation(installation: tuple[Header, ...], behind_id: int) -> bytes:
    """Return the number of all headers of a promoted record, and those that come before the id."""
    return varint(len(installation) + 1 + behind_id) + encode_fields(installation)


# --- markers ---------------------------------------------------------------------------------


def encode_marker(marker: Marker) -> Record:
    """Return the record of a marker: its transaction's id as key, JSON as value."""
    return Record(marker.id.encode(), _encode_json(marker))


def is_content(record: Record) -> bool:
    """Say whether a record of the operation topic holds a replaced message, not a marker."""
    return bool(record.headers) and record.headers[0][0] == VERSION_HEADER


def decode_log(log: str, record: Record) -> HalfPart | Marker:
    """Return what a record of a log says, `half` or `op`.

    Raises:
        NewerVersion: a newer version wrote it.
        Malformed: it is none of ours.
    """
    return decode_half(record) if log == "half" or is_content(record) else decode_marker(record)


def decode_marker(record: Record) -> Marker:
    """Return what a record of the operation topic says.

    Raises:
        NewerVersion: a newer version wrote it.
        Malformed: it is not a marker.
    """
    if record.value is None:
        raise Malformed("a marker without a value")
    try:
        marker = _marker_decoder.decode(record.value)
    except _UNREADABLE as error:
        _look_for_newer(record.value, "marker")
        raise Malformed(f"not a marker: {error}") from None
    if marker.v > RECORD_VERSION:
        raise NewerVersion(f"marker of version {marker.v}")
    if record.key != marker.id.encode():
        raise Malformed("the key of a marker is its transaction's id")
    if marker.contents and (marker.contents < 0 or marker.kind is not MarkerKind.COMMIT):
        raise Malformed(f"{marker.contents} replaced messages with a {marker.kind}")
    return marker


def _look_for_newer(value: bytes, what: str) -> None:
    """Raise NewerVersion where a record that does not read says that it is a newer version's."""
    try:
        version = _version_decoder.decode(value).v
    except _UNREADABLE:
        return
    if version > RECORD_VERSION:
        raise NewerVersion(f"{what} of version {version}")


# --- checkpoint ------------------------------------------------------------------------------


def encode_claim(claim: Claim) -> Record:
    """Return the record with which an owner begins."""
    return Record(CLAIM_KEY, _encode_json(claim))


def encode_progress(progress: Progress) -> Record:
    """Return the record that goes with every turn."""
    return Record(PROGRESS_KEY, _encode_json(progress))


def decode_checkpoint(record: Record) -> Claim | Progress:
    """Return what a record of the checkpoint topic says.

    Raises:
        NewerVersion: a newer version wrote it.
        Malformed: it is neither a claim nor progress.
    """
    kind: type[Claim] | type[Progress]
    if record.key == CLAIM_KEY:
        kind = Claim
    elif record.key == PROGRESS_KEY:
        kind = Progress
    else:
        raise Malformed(f"unknown key {record.key!r}")
    try:
        if _version_decoder.decode(record.value or b"").v > RECORD_VERSION:
            raise NewerVersion("checkpoint record of a newer version")
        return msgspec.json.decode(record.value or b"", type=kind)
    except NewerVersion:
        raise
    except _UNREADABLE as error:
        raise Malformed(f"checkpoint record does not read: {error}") from None


def encode_skip(log: str, record: Record, by: str, reason: str) -> Record:
    """Return the record of an operator's decision to pass over a record of a log."""
    skip = Skip(LOG_VERSION, log, record.offset, _digest(record), by, reason)
    return Record(SKIPS + f"{log}/{record.offset}".encode(), _encode_json(skip))


def decode_skip(record: Record) -> Skip:
    """Return an operator's decision.

    Raises:
        Malformed: it is none.
    """
    try:
        return msgspec.json.decode(record.value or b"", type=Skip)
    except _UNREADABLE as error:
        raise Malformed(f"no decision: {error}") from None


def passed_over(skips: Collection[Skip], log: str, record: Record) -> Skip | None:
    """Return the decision by which a record is passed over, if there is one."""
    for skip in skips:
        if (skip.log, skip.offset) == (log, record.offset) and skip.digest == _digest(record):
            return skip
    return None


def _digest(record: Record) -> str:
    """Return what tells a record's key, value and headers from any other's."""
    parts = msgspec.msgpack.encode((record.key, record.value, tuple(record.headers)))
    return hashlib.sha256(parts).hexdigest()


# --- parked topic ----------------------------------------------------------------------------


class _KeptFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the first record of a kept transaction says beside its half message."""

    state: State
    half: int
    at_ms: int
    cause: Cause | None = None
    decided_ms: int = 0


class KeptPart(msgspec.Struct, frozen=True):
    """One record of the parked topic; `part` None is the tombstone of a settled transaction.

    `facts` are on the first record of a transaction.
    """

    id: str
    sequence: int
    part: HalfPart | None
    facts: _KeptFacts | None


def kept_key(id: str, sequence: int) -> bytes:
    """Return the key by which the parked topic is compacted."""
    return f"{id}/{sequence}".encode()


def encode_kept(kept: Kept, version: int = LOG_VERSION) -> tuple[Record, ...]:
    """Return the records that keep a whole transaction.

    Key and null value of the user's message move into headers, because the parked topic is
    compacted: there the key is the transaction's and null means settled.
    """
    facts = _KeptFacts(
        kept.state, kept.half_offset, kept.prepared_at_ms, kept.cause, kept.decided_at_ms
    )
    extra: list[list[tuple[str, bytes]]] = []
    for message in kept.half.messages:
        moved = [] if message.key is None else [("key", message.key)]
        if message.value is None:
            moved.append(("tombstone", b"1"))
        if not extra:
            moved.append(("kept", _encode_json(facts)))
        extra.append(moved)
    return tuple(
        msgspec.structs.replace(
            record, key=kept_key(kept.half.id, sequence), value=record.value or b""
        )
        for sequence, record in enumerate(encode_half(kept.half, version, extra))
    )


def kept_tombstones(id: str, count: int) -> tuple[Record, ...]:
    """Return the records that say that a kept transaction is settled."""
    return tuple(Record(kept_key(id, sequence), None) for sequence in range(count))


def decode_kept(record: Record) -> KeptPart:
    """Return what a record of the parked topic says.

    Raises:
        NewerVersion: a newer version wrote it.
        Malformed: it is not a kept transaction's.
    """
    try:
        id, _, sequence = (record.key or b"").decode().partition("/")
        number = _natural(sequence)
    except ValueError:
        raise Malformed(f"the key {record.key!r} is not id/sequence") from None
    if record.value is None:
        return KeptPart(id, number, None, None)
    part, values = _decode_part(record)
    try:
        message = msgspec.structs.replace(
            part.message,
            key=values.get("txb-key"),
            value=None if "txb-tombstone" in values else part.message.value,
        )
        text = values.get("txb-kept")
        facts = None if text is None else msgspec.json.decode(text, type=_KeptFacts)
    except _UNREADABLE as error:
        raise Malformed(f"a kept transaction does not read: {error}") from None
    if (part.id, part.sequence) != (id, number):
        raise Malformed(f"{part.id}/{part.sequence} under the key {record.key!r}")
    return KeptPart(id, number, msgspec.structs.replace(part, message=message), facts)
