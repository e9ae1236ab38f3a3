"""Encoding of transactions, markers and checkpoints as Kafka records; `core.decoding` reads them.

Our text headers come first, in fixed order, and the user's follow unchanged, even if their names
look like ours: the first header, `txb-v`, holds the version and the names of the optional headers
that follow (`1 ts order`), so that a reader knows where ours end.

Headers are encoded once, when a record is made, in the format of record batches
(`kafka/protocol/batch.py`): their number, then name and value of each after its length. Parts that
many records share are encoded once and joined.

A *row* is what one operation writes to one log: records of one batch, and the values encoded in
them, so that the ledger need not decode what this proxy has just encoded.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from txbroker.core.records import (
    ATTRIBUTES,
    LOG_VERSION,
    NO_ATTRIBUTES,
    NO_CHECKS,
    Cause,
    Checkpoint,
    CheckPolicy,
    Checks,
    Claim,
    Encoded,
    Half,
    Header,
    Headers,
    Marker,
    Message,
    ParkedCopy,
    Place,
    Record,
    Skip,
    State,
)

VERSION_HEADER = "txb-v"
ID_HEADER = "txb-id"
SEQUENCE_HEADER = "txb-seq"
INSTALLATION_HEADER = "txb-installation"
DEFAULT_PREFIX = "txbroker"
"""The default prefix of an installation's own topics."""
OWN_TOPICS = ("half", "op", "checkpoint", "parked", "groups", "audit", "audit.drift")
"""The names of an installation's own topics after the prefix and a dot."""
FIXED_HEADERS = ("txb-id", "txb-group", "txb-topic", "txb-part", "txb-seq")
ATTRIBUTE_HEADERS = tuple([name.removesuffix("_key") for name in ATTRIBUTES])
"""The names of the headers of attributes after `txb-`, in their order."""
DURATION_MAX_S = 1e9
"""The longest duration of a check policy, seconds: thirty years, far from any overflow."""
CLAIM_KEY = b"claim"
PROGRESS_KEY = b"progress"
SKIPS = b"skip/"
"""The prefix of the keys of operators' decisions."""
RECORD_OVERHEAD_BYTES = 96
"""An upper bound of a record in a batch without its key, value and headers."""
HEADER_OVERHEAD_BYTES = 10
"""An upper bound of a header without its name and value."""
BATCH_OVERHEAD_BYTES = 61
"""The header of a record batch."""
_encode_json = msgspec.json.Encoder().encode


# --- headers -------------------------------------------------------------------------------------


_NAME_BYTES_MAX, _NAMES_MAX = 64, 1024


def varint(number: int) -> bytes:
    """Return a zigzag varint: the sign in the lowest bit, seven bits a byte."""
    rest = number << 1 if number >= 0 else (-number << 1) - 1
    encoded = bytearray()
    while rest > 0x7F:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


SMALL = tuple(map(varint, range(1 << 13)))
"""Varints of small numbers, by number."""
NULL = varint(-1)
"""The length of None."""


class _Names(dict[str, bytes]):
    """A cache of encoded header names: length, then name."""

    def __missing__(self, name: str) -> bytes:
        plain = name.encode()
        encoded = varint(len(plain)) + plain
        if len(encoded) <= _NAME_BYTES_MAX:
            if len(self) >= _NAMES_MAX:
                self.clear()
            self[name] = encoded
        return encoded


_names = _Names()


def encode_field(name: str, value: bytes) -> bytes:
    """Return one encoded header."""
    n = len(value)
    return _names[name] + (SMALL[n] if n < len(SMALL) else varint(n)) + value


def encode_fields(headers: Iterable[Header]) -> bytes:
    """Return encoded headers without their number."""
    small, bound, names = SMALL, len(SMALL), _names
    fields: list[bytes] = []
    for name, value in headers:
        if value is None:
            fields += names[name], NULL
        else:
            n = len(value)
            fields += names[name], small[n] if n < bound else varint(n), value
    return b"".join(fields)


def encode_headers(headers: Headers) -> Encoded:
    """Return headers encoded."""
    if isinstance(headers, Encoded):
        return headers
    return Encoded(varint(len(headers)) + encode_fields(headers))


# --- sizes ---------------------------------------------------------------------------------------


def bytes_in_batch(records: Iterable[Record | Message]) -> int:
    """Return an upper bound of records in a batch, or of messages once promoted, bytes.

    The header that names the installation of promoted records is not included.
    """
    size = 0
    for record in records:
        size += RECORD_OVERHEAD_BYTES + len(record.key or b"") + len(record.value or b"")
        headers = record.headers
        if isinstance(headers, Encoded):
            size += len(headers.data)
        elif headers:
            size += headers_bytes(headers)
    return size


def headers_bytes(headers: Iterable[Header]) -> int:
    """Return an upper bound of headers in a record, bytes."""
    size = 0
    for name, value in headers:
        name_bytes = len(name) if name.isascii() else len(name.encode())
        size += HEADER_OVERHEAD_BYTES + name_bytes + len(value or b"")
    return size


# --- half messages -------------------------------------------------------------------------------


def encode_half(
    half: Half, version: int = LOG_VERSION, extra: Sequence[Sequence[tuple[str, bytes]]] = ()
) -> tuple[Record, ...]:
    """Return the records of a half message, to be written in one batch.

    Args:
        extra: further headers of ours, by message.

    Raises:
        ValueError: a message has no partition, or a number cannot be decoded again.
    """
    records = []
    messages, attributes = half.messages, half.attributes
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
            if attributes != NO_ATTRIBUTES:
                for name, text in zip(ATTRIBUTE_HEADERS, astuple(attributes), strict=True):
                    if text is not None:
                        names += (name,)
                        optional += encode_field("txb-" + name, text.encode())
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
    """Return the records with replacing messages that follow a commit marker."""
    replaced = msgspec.structs.replace(half, messages=tuple(messages))
    return encode_half(replaced, version)


# Few of these exist, in very many records: each is encoded once.


@lru_cache(maxsize=1000)
def _encode_names(version: int, optional: tuple[str, ...], theirs: int) -> bytes:
    """Return the number of headers, and our first one, which names the optional ones."""
    first = encode_field(VERSION_HEADER, " ".join((str(version), *optional)).encode())
    return varint(1 + len(FIXED_HEADERS) + len(optional) + theirs) + first


@lru_cache(maxsize=10_000)
def _encode_place(group: str, topic: str, partition: int, sequence: int, count: int) -> bytes:
    """Return our fixed headers after the id."""
    values = group.encode(), topic.encode(), b"%d" % partition, b"%d/%d" % (sequence, count)
    return encode_fields(zip(FIXED_HEADERS[1:], values, strict=True))


@lru_cache(maxsize=1000)
def _encode_policy(policy: CheckPolicy) -> bytes:
    check_policy(policy)
    after, interval, timeout = (
        # The shortest text that decodes to the same number.
        f"{seconds:g}" if float(f"{seconds:g}") == seconds else repr(seconds)
        for seconds in (policy.after_s, policy.interval_s, policy.timeout_s)
    )
    text = f"{after}/{interval}/{policy.attempts_max}/{timeout}"
    return encode_field("txb-check", text.encode())


def check_policy(policy: CheckPolicy) -> CheckPolicy:
    """Return a valid check policy; raise ValueError if a number of it is out of range."""
    for seconds in (policy.after_s, policy.interval_s, policy.timeout_s):
        # NaN fails this comparison too.
        if not 0 <= seconds <= DURATION_MAX_S:
            raise ValueError(f"a check policy of {seconds} s")
    if policy.attempts_max < 1:
        raise ValueError(f"a check policy of {policy.attempts_max} attempts")
    return policy


# --- promoted messages ---------------------------------------------------------------------------


def installation_headers(prefix: str) -> tuple[Header, ...]:
    """Return the header by which promoted records name their installation, none for the default:
    several installations may write to the same targets."""
    return () if prefix == DEFAULT_PREFIX else ((INSTALLATION_HEADER, prefix.encode()),)


def promoted_headers(
    id: str, sequence: int, count: int, message: Message, installation: tuple[Header, ...] = ()
) -> Encoded:
    """Return the headers of a promoted record: `installation_headers`, ours, then the user's
    unchanged."""
    theirs = message.headers
    data = _encode_installation(installation, (count > 1) + len(theirs))
    data += encode_field(ID_HEADER, id.encode())
    if count > 1:
        data += encode_field(SEQUENCE_HEADER, b"%d/%d" % (sequence, count))
    if theirs:
        data += encode_fields(theirs)
    return Encoded(data)


@lru_cache(maxsize=1000)
def _encode_installation(installation: tuple[Header, ...], after_id: int) -> bytes:
    """Return the number of headers of a promoted record, and those before the id."""
    return varint(len(installation) + 1 + after_id) + encode_fields(installation)


# --- markers -------------------------------------------------------------------------------------


def encode_marker(marker: Marker) -> Record:
    """Return the record of a marker: the transaction's id as key, JSON as value."""
    return Record(marker.id.encode(), _encode_json(marker))


# --- rows ----------------------------------------------------------------------------------------


class HalfRow(Struct, frozen=True, gc=False):
    """A half message and its records.

    Attributes:
        size: an upper bound of the records in a batch, bytes.
        fingerprint: of its messages and group.
        places: of its messages.
    """

    records: tuple[Record, ...]
    size: int
    half: Half
    fingerprint: bytes
    places: tuple[Place, ...]


class MarkerRow(Struct, frozen=True, gc=False):
    """A marker and its records.

    Attributes:
        size: an upper bound of the records in a batch, bytes.
        contents: the messages that replace the prepared ones, if any.
    """

    records: tuple[Record, ...]
    size: int
    marker: Marker
    contents: tuple[Message, ...] | None = None


Row: TypeAlias = HalfRow | MarkerRow


def half_row(half: Half, version: int, fingerprint: bytes, places: tuple[Place, ...]) -> HalfRow:
    """Return the row of a prepare with records of a version; raise ValueError as `encode_half`
    does."""
    records = encode_half(half, version)
    return HalfRow(records, bytes_in_batch(records), half, fingerprint, places)


def marker_row(
    marker: Marker, half: Half | None = None, contents: Sequence[Message] | None = None
) -> MarkerRow:
    """Return the row of a marker, with the messages that replace those of `half`, if any."""
    records: tuple[Record, ...] = (encode_marker(marker),)
    replaced = None
    if half is not None and contents is not None:
        replaced = tuple(contents)
        records += encode_contents(half, replaced, marker.v)
    return MarkerRow(records, bytes_in_batch(records), marker, replaced)


# --- checkpoint ----------------------------------------------------------------------------------


def encode_claim(claim: Claim) -> Record:
    """Return the claim record of an owner."""
    return Record(CLAIM_KEY, _encode_json(claim))


def encode_progress(progress: Checkpoint) -> Record:
    """Return the checkpoint record of a promotion transaction."""
    return Record(PROGRESS_KEY, _encode_json(progress))


def encode_skip(log: str, record: Record, by: str, reason: str) -> Record:
    """Return the record of an operator's decision to skip a record of a log."""
    skip = Skip(LOG_VERSION, log, record.offset, digest(record), by, reason)
    return Record(SKIPS + f"{log}/{record.offset}".encode(), _encode_json(skip))


def digest(record: Record) -> str:
    """Return a digest of a record's key, value and headers."""
    parts = msgspec.msgpack.encode((record.key, record.value, tuple(record.headers)))
    return hashlib.sha256(parts).hexdigest()


# --- parked topic --------------------------------------------------------------------------------


class KeptFacts(Struct, frozen=True, omit_defaults=True):
    """The facts in the first record of a parked copy besides its half message."""

    state: State
    half: int
    at_ms: int
    cause: Cause | None = None
    decided_ms: int = 0
    checks: Checks = NO_CHECKS


def kept_key(id: str, sequence: int) -> bytes:
    """Return the key by which the parked topic is compacted."""
    return f"{id}/{sequence}".encode()


def encode_kept(kept: ParkedCopy, version: int = LOG_VERSION) -> tuple[Record, ...]:
    """Return the records of a parked copy.

    Key and null value of the user's message move into headers, because the parked topic is
    compacted: its key is the transaction's, and null means settled.
    """
    facts = KeptFacts(
        kept.state,
        kept.half_offset,
        kept.prepared_at_ms,
        kept.cause,
        kept.decided_at_ms,
        kept.checks,
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
    """Return the tombstones of the parked copy of a settled transaction."""
    return tuple(Record(kept_key(id, sequence), None) for sequence in range(count))
