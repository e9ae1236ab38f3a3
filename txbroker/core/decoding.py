"""How the records of our own topics are read: what `core.encoding` writes.

A record that does not read is `Malformed`, and one of a newer version of txbroker `NewerVersion`.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import cast

import msgspec

from txbroker.core.encoding import (
    CLAIM_KEY,
    FIXED_HEADERS,
    PROGRESS_KEY,
    VERSION_HEADER,
    KeptFacts,
    check_policy,
    digest,
)
from txbroker.core.records import (
    RECORD_VERSION,
    Checkpoint,
    CheckPolicy,
    Claim,
    Half,
    Marker,
    MarkerKind,
    Message,
    Record,
    Skip,
)

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


# --- half messages -------------------------------------------------------------------------------


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
    names = [*FIXED_HEADERS, *(f"txb-{name}" for name in optional)]
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
def _decode_policy(text: bytes | None) -> CheckPolicy:
    if text is None:
        return CheckPolicy()
    after, interval, attempts, timeout = text.decode().split("/")
    return check_policy(
        CheckPolicy(float(after), float(interval), _natural(attempts), float(timeout))
    )


def follows(parts: Sequence[HalfPart], part: HalfPart) -> bool:
    """Return whether `part` is the next message of the half message that `parts` begin."""
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


# --- markers -------------------------------------------------------------------------------------


def is_content(record: Record) -> bool:
    """Return whether a record of the operation topic holds a replaced message, not a marker."""
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


# --- checkpoint ----------------------------------------------------------------------------------


def decode_checkpoint(record: Record) -> Claim | Checkpoint:
    """Return what a record of the checkpoint topic says.

    Raises:
        NewerVersion: a newer version wrote it.
        Malformed: it is neither a claim nor progress.
    """
    kind: type[Claim] | type[Checkpoint]
    if record.key == CLAIM_KEY:
        kind = Claim
    elif record.key == PROGRESS_KEY:
        kind = Checkpoint
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
        if (skip.log, skip.offset) == (log, record.offset) and skip.digest == digest(record):
            return skip
    return None


# --- parked topic --------------------------------------------------------------------------------


class KeptPart(msgspec.Struct, frozen=True):
    """One record of the parked topic; `part` None is the tombstone of a settled transaction.

    `facts` are on the first record of a transaction.
    """

    id: str
    sequence: int
    part: HalfPart | None
    facts: KeptFacts | None


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
        facts = None if text is None else msgspec.json.decode(text, type=KeptFacts)
    except _UNREADABLE as error:
        raise Malformed(f"a kept transaction does not read: {error}") from None
    if (part.id, part.sequence) != (id, number):
        raise Malformed(f"{part.id}/{part.sequence} under the key {record.key!r}")
    return KeptPart(id, number, msgspec.structs.replace(part, message=message), facts)
