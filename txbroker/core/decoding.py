"""Decoding of the records that `core.encoding` writes.

An invalid record raises `Malformed`, one of a newer version of txbroker `NewerVersion`.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, cast

import msgspec

from txbroker.core.encoding import (
    ATTRIBUTE_HEADERS,
    CLAIM_KEY,
    FIXED_HEADERS,
    ID_HEADER,
    INSTALLATION_HEADER,
    PROGRESS_KEY,
    SEQUENCE_HEADER,
    VERSION_HEADER,
    KeptFacts,
    check_policy,
    digest,
)
from txbroker.core.records import (
    NO_ATTRIBUTES,
    RECORD_VERSION,
    Attributes,
    Checkpoint,
    CheckPolicy,
    Claim,
    Half,
    Header,
    Marker,
    MarkerKind,
    Message,
    Record,
    Skip,
)

_marker_decoder = msgspec.json.Decoder(Marker)
UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)
"""What msgspec raises on invalid bytes; deep nesting is a RecursionError."""


class _Versioned(msgspec.Struct):
    v: int


_decode_version = msgspec.json.Decoder(_Versioned).decode


class Malformed(ValueError):
    """A record of another client, or a damaged one."""


class NewerVersion(ValueError):
    """A record of a newer version of txbroker: it must be kept, never dropped."""


def version_of(value: bytes) -> int:
    """Return the version of a record in JSON; raise ValueError or RecursionError without one."""
    return _decode_version(value).v


class HalfPart(msgspec.Struct, frozen=True):
    """One record of a half message: message `sequence` of the `count` of its transaction."""

    id: str
    group: str
    message: Message
    sequence: int
    count: int
    policy: CheckPolicy
    attributes: Attributes


# --- half messages -------------------------------------------------------------------------------


def decode_half(record: Record) -> HalfPart:
    """Return the contents of a record of the half topic."""
    part, _ = _decode_part(record)
    return part


def _decode_part(record: Record) -> tuple[HalfPart, dict[str, bytes]]:
    headers = tuple(record.headers)
    if not headers or headers[0][0] != VERSION_HEADER:
        raise Malformed(f"the first header is not {VERSION_HEADER}")
    try:
        names = _header_names(headers[0][1] or b"")
        ours = len(names) + 1
        fields = dict(headers[1:ours])
        if list(fields) != names or None in fields.values():
            raise Malformed(f"the headers are not {', '.join(names)}, each with a value")
        values = cast(dict[str, bytes], fields)
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
            attributes=_decode_attributes(values),
        )
    except (NewerVersion, Malformed):
        raise
    except ValueError as error:
        raise Malformed(f"a txb header is invalid: {error}") from None
    return part, values


# Few of these exist, in very many records: each is decoded once, and the result is shared.


@lru_cache(maxsize=1000)
def _header_names(first: bytes) -> list[str]:
    """Return the names of our headers after the first one, which lists them."""
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
    """Return the number of a message in its transaction, and the count of messages."""
    first, _, second = text.decode().partition("/")
    sequence, count = _natural(first), _natural(second)
    if sequence >= count:
        raise Malformed(f"sequence {sequence} of {count}")
    return sequence, count


def _decode_attributes(values: dict[str, bytes]) -> Attributes:
    texts = [values.get("txb-" + name) for name in ATTRIBUTE_HEADERS]
    if texts.count(None) == len(texts):
        return NO_ATTRIBUTES
    return Attributes(*[None if text is None else text.decode() for text in texts])


def _natural(text: str) -> int:
    """Return a natural number from decimal digits; int() accepts `+1`, ` 1` and `1_0` too."""
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
    """Return whether `part` is the next message after `parts` of one half message."""
    if not parts or len(parts) != part.sequence:
        return False
    first = parts[0]
    return (first.id, first.group, first.count) == (part.id, part.group, part.count)


def join_parts(parts: list[HalfPart]) -> Half:
    """Return the half message of these records, all of one transaction, in order."""
    first = parts[0]
    return Half(
        first.id,
        first.group,
        tuple([part.message for part in parts]),
        first.attributes,
        first.policy,
    )


# --- promoted messages ---------------------------------------------------------------------------


class Promoted(NamedTuple):
    """The place of a promoted record in its transaction, and the user's headers."""

    id: str
    sequence: int
    headers: tuple[Header, ...]


def decode_promoted(record: Record) -> Promoted | None:
    """Return the txbroker headers of a record in a target; None without them.

    Only the first headers count: the same names elsewhere are the user's.
    """
    headers = tuple(record.headers)
    if headers and headers[0][0] == INSTALLATION_HEADER:
        headers = headers[1:]
    if not headers or headers[0][0] != ID_HEADER:
        return None
    id, sequence = (headers[0][1] or b"").decode(errors="replace"), 0
    if len(headers) == 1 or headers[1][0] != SEQUENCE_HEADER:
        return Promoted(id, sequence, headers[1:])
    with suppress(ValueError):
        sequence, _ = _sequence(headers[1][1] or b"")
    return Promoted(id, sequence, headers[2:])


# --- markers -------------------------------------------------------------------------------------


def is_content(record: Record) -> bool:
    """Return whether a record of the operation topic is a replacing message, not a marker."""
    return bool(record.headers) and record.headers[0][0] == VERSION_HEADER


def decode_log(log: str, record: Record) -> HalfPart | Marker:
    """Return the contents of a record of a log, `half` or `op`."""
    return decode_half(record) if log == "half" or is_content(record) else decode_marker(record)


def decode_marker(record: Record) -> Marker:
    """Return the marker of a record of the operation topic."""
    if record.value is None:
        raise Malformed("a marker without a value")
    try:
        marker = _marker_decoder.decode(record.value)
    except UNREADABLE as error:
        _check_newer(record.value, "marker")
        raise Malformed(f"not a marker: {error}") from None
    if marker.v > RECORD_VERSION:
        raise NewerVersion(f"marker of version {marker.v}")
    if record.key != marker.id.encode():
        raise Malformed("the key of a marker is its transaction's id")
    if marker.contents and (marker.contents < 0 or marker.kind is not MarkerKind.COMMIT):
        raise Malformed(f"{marker.contents} replaced messages with a {marker.kind}")
    return marker


def _check_newer(value: bytes, what: str) -> None:
    """Raise NewerVersion if an undecodable record has a newer version."""
    try:
        version = version_of(value)
    except UNREADABLE:
        return
    if version > RECORD_VERSION:
        raise NewerVersion(f"{what} of version {version}")


# --- checkpoint ----------------------------------------------------------------------------------


def decode_checkpoint(record: Record) -> Claim | Checkpoint:
    """Return the contents of a record of the checkpoint topic."""
    kind: type[Claim] | type[Checkpoint]
    if record.key == CLAIM_KEY:
        kind = Claim
    elif record.key == PROGRESS_KEY:
        kind = Checkpoint
    else:
        raise Malformed(f"unknown key {record.key!r}")
    try:
        if version_of(record.value or b"") > RECORD_VERSION:
            raise NewerVersion("checkpoint record of a newer version")
        return msgspec.json.decode(record.value or b"", type=kind)
    except NewerVersion:
        raise
    except UNREADABLE as error:
        raise Malformed(f"invalid checkpoint record: {error}") from None


def decode_skip(record: Record) -> Skip:
    """Return an operator's decision to skip a record."""
    try:
        return msgspec.json.decode(record.value or b"", type=Skip)
    except UNREADABLE as error:
        raise Malformed(f"not a decision to skip a record: {error}") from None


def passed_over(skips: Collection[Skip], log: str, record: Record) -> Skip | None:
    """Return the decision to skip a record, None without one."""
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
    """Return the contents of a record of the parked topic."""
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
    except UNREADABLE as error:
        raise Malformed(f"an invalid parked copy: {error}") from None
    if (part.id, part.sequence) != (id, number):
        raise Malformed(f"{part.id}/{part.sequence} under the key {record.key!r}")
    return KeptPart(id, number, msgspec.structs.replace(part, message=message), facts)
