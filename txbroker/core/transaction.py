"""One transaction as an owner's ledger holds it. Its states and steps are in `core.lifecycle`."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter

from msgspec import Struct, structs

from txbroker.core.encoding import bytes_in_batch
from txbroker.core.records import (
    NO_CHECKS,
    TRACE_HEADERS,
    Cause,
    Checks,
    Decision,
    Half,
    Message,
    ParkedCopy,
    Place,
    Source,
    State,
    intern,
)

ATTEMPTS_KEPT = 16
"""Attempts remembered for display. "Not yet" can be answered for ever, so the list is bounded."""


class Verdict(Struct, frozen=True, gc=False):
    """The decision of a transaction and its origin.

    Attributes:
        decision: None while undecided.
        op_offset: the offset of the deciding marker; -1 if retention has deleted it.
        at_ms: the marker's append time.
        source, by, reason: who decided, and why.
        contents_fingerprint: of the messages that replaced the prepared ones; empty without.
    """

    decision: Decision | None = None
    op_offset: int = -1
    at_ms: int = 0
    source: Source | None = None
    by: str = ""
    reason: str = ""
    contents_fingerprint: bytes = b""


NO_VERDICT = Verdict()
"""Shared by all transactions without a decision, as `NO_CHECKS`: a million take no memory."""


GROUP_OF = attrgetter("half.group")
"""Returns the group of a transaction, without a Python call."""


class Transaction(Struct, gc=False):
    """A transaction and its history.

    A million may be in memory, so rare facts are in separate structs, and messages that are not
    in memory are *bare*: topic and partition only, shared by all with the same targets.

    Attributes:
        half: the half message; its messages are bare where `has_bodies` is False.
        offset: its first record in the half topic.
        prepared_at_ms: the half topic's log clock when it was appended.
        fingerprint: of its prepared content and group; of one settled long ago only the start.
        places: its target partitions, and the sizes of its messages once promoted.
        order: the hash of its order key; None: it has no order to keep.
        checks: `NO_CHECKS` before the first marker of an attempt.
        verdict: `NO_VERDICT` while undecided.
        contents: the messages that replaced the prepared ones at commit, while in memory.
        instance: the SDK process that prepared it, if this owner saw it.
        kept: whether the parked topic holds a copy.
        kept_at: the offsets of the copy's records there, as far as known.
        lost: its messages were deleted and cannot be read again.
        offsets: of its messages in their targets, if this owner promoted it.
        promoted_at_ms: when this owner saw it visible, by its log time; 0 if it did not.
        keys: the marks of its messages' keys; 0 if it comes from a snapshot.
    """

    half: Half
    offset: int
    prepared_at_ms: int
    fingerprint: bytes
    places: tuple[Place, ...]
    order: int | None
    state: State = State.PENDING
    has_bodies: bool = True
    kept: bool = False
    lost: bool = False
    checks: Checks = NO_CHECKS
    verdict: Verdict = NO_VERDICT
    contents: tuple[Message, ...] | None = None
    kept_at: tuple[int, ...] = ()
    instance: str = ""
    cause: Cause | None = None
    offsets: tuple[int, ...] = ()
    promoted_at_ms: int = 0
    keys: int = 0

    @property
    def id(self) -> str:
        """The transaction id."""
        return self.half.id

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages as they will be promoted; bare where `has_bodies` is False."""
        return self.half.messages if self.contents is None else self.contents

    # --- messages in memory ------------------------------------------------------------------

    @property
    def body_bytes(self) -> int:
        """The memory that its messages take, bytes; 0 without them."""
        if not self.has_bodies:
            return 0
        places = self.places
        return places[0].size if len(places) == 1 else sum([place.size for place in places])

    def evict(self) -> int:
        """Drop keys, values and headers of the messages from memory; return the bytes freed."""
        if not self.has_bodies:
            return 0
        self.half = structs.replace(self.half, messages=bare(self.half.messages))
        self.contents = None
        self.has_bodies = False
        return sum(map(_size, self.places))

    def fill(self, messages: tuple[Message, ...]) -> None:
        """Put messages back that were read again; raise ValueError if they are another
        transaction's."""
        mark = self.verdict.contents_fingerprint
        read = fingerprint(messages) if mark else fingerprint(messages, self.half.group)
        if not read.startswith(mark or self.fingerprint):
            raise ValueError(f"the messages are not those of {self.id}")
        if mark:
            self.contents = messages
        else:
            self.half = structs.replace(self.half, messages=messages)
        self.has_bodies = True

    # --- checks ------------------------------------------------------------------------------

    def next_check_ms(self) -> int:
        """Return the append time from which the next attempt is accepted, ms."""
        policy, checks = self.half.policy, self.checks
        if checks is NO_CHECKS:
            return self.prepared_at_ms + round(policy.after_s * 1000)
        if checks.not_before_ms:
            return checks.not_before_ms
        if checks.counted_ms:
            return checks.counted_ms[-1] + round(policy.interval_s * 1000)
        return checks.round_started_ms + round(policy.after_s * 1000)

    def park_ms(self) -> int | None:
        """Return the append time from which parking is accepted; None while attempts are left."""
        policy, counted_ms = self.half.policy, self.checks.counted_ms
        if len(counted_ms) < policy.attempts_max:
            return None
        return counted_ms[-1] + round(policy.timeout_s * 1000)

    def note_outcome(self, detail: str) -> None:
        """Record the answer to the last attempt; the next marker stores it."""
        attempts = self.checks.attempts
        if attempts and not attempts[-1].outcome:
            last = structs.replace(attempts[-1], outcome=intern(detail))
            self.checks = structs.replace(self.checks, attempts=(*attempts[:-1], last))

    @property
    def last_answer(self) -> str:
        """The last answer of a check that is known, "" without one."""
        return next((a.outcome for a in reversed(self.checks.attempts) if a.outcome), "")

    # --- the parked topic --------------------------------------------------------------------

    def copy(self, state: State, cause: Cause | None) -> ParkedCopy:
        """Return the copy for the parked topic, with the messages as they would be promoted.

        It may outlive half message and markers, so it holds everything that promotion needs.
        """
        half = structs.replace(self.half, messages=self.messages)
        return ParkedCopy(
            half,
            self.offset,
            self.prepared_at_ms,
            state,
            cause,
            self.verdict.at_ms,
            checks=self.checks,
        )


# --- messages that are not in memory ---------------------------------------------------------

_CACHED_MAX = 10_000
_place = attrgetter("topic", "partition")
_size = attrgetter("size")


def bare(messages: Sequence[Message] | Sequence[Place]) -> tuple[Message, ...]:
    """Return messages, or those for these places, without key, value and headers; cached."""
    return _bare(tuple(map(_place, messages)))


@lru_cache(maxsize=_CACHED_MAX)
def _bare(shape: tuple[tuple[str, int | None], ...]) -> tuple[Message, ...]:
    return tuple([Message(intern(topic), partition=at) for topic, at in shape])


def places(messages: Sequence[Message]) -> tuple[Place, ...]:
    """Return the places and sizes of messages; cached."""
    shape: tuple[tuple[str, int | None, int], ...] = ()
    for message in messages:
        shape += ((message.topic, message.partition, bytes_in_batch((message,))),)
    return places_of(shape)


@lru_cache(maxsize=_CACHED_MAX)
def places_of(shape: tuple[tuple[str, int | None, int], ...]) -> tuple[Place, ...]:
    """Return places by topic, partition and size in a batch."""
    return tuple([Place(intern(t), -1 if p is None else p, size) for t, p, size in shape])


# --- keys of messages ------------------------------------------------------------------------

_MARK_BITS = (1 << 60) - 1
"""A mark is a small Python integer: 32 bytes."""


def key_mark(topic: str, key: bytes | None) -> int:
    """Return about 15 of 60 bits for a message's topic and key, 0 without a key.

    The bits of a transaction's messages are joined: those of a key that is among them are all set.
    Others rarely are; the messages show it. Differs from process to process.

    Source: Bloom, Space/Time Trade-offs in Hash Coding with Allowable Errors (1970).
    """
    if key is None:
        return 0
    hashed = hash((topic, key))
    return hashed & hashed >> 7 & _MARK_BITS


# --- comparing content -----------------------------------------------------------------------

_NULL = b"\xff\xff\xff\xff\xff"


def fingerprint(messages: Sequence[Message], group: str = "") -> bytes:
    """Return 16 bytes by which to compare the content of two prepares.

    Partitions are left out: a keyless message gets one at its prepare, another one at a retry. So
    are trace contexts: a retry is another span, maybe of another trace.
    """
    parts = [_name(group)]
    for message in messages:
        key, value, stamp, headers = (
            message.key,
            message.value,
            message.timestamp_ms,
            message.headers,
        )
        # Each part after its length, inlined: this runs in every prepare.
        parts += (
            _name(message.topic),
            *((_NULL,) if key is None else (len(key).to_bytes(5, "big"), key)),
            *((_NULL,) if value is None else (len(value).to_bytes(5, "big"), value)),
            _NULL if stamp is None else _sized(b"%d" % stamp),
        )
        if not headers:
            parts.append(_NO_HEADERS)
            continue
        kept = [header for header in headers if header[0] not in TRACE_HEADERS]
        parts.append(_sized(b"%d" % len(kept)))
        for name, content in kept:
            parts += (_sized(name.encode()), _sized(content))
    return hashlib.blake2b(b"".join(parts), digest_size=16, person=b"txb-content").digest()


def _sized(part: bytes | None) -> bytes:
    """Return a part after its length, so that no two sequences of parts are the same bytes."""
    return _NULL if part is None else len(part).to_bytes(5, "big") + part


_NO_HEADERS = _sized(b"0")


@lru_cache(maxsize=10_000)
def _name(text: str) -> bytes:
    return _sized(text.encode())


def same_contents(transaction: Transaction, contents: Sequence[Message] | None) -> bool:
    """Return whether a repeated commit names the messages of the first one."""
    if contents is None:
        return True
    if mark := transaction.verdict.contents_fingerprint:
        return fingerprint(contents) == mark
    return fingerprint(contents, transaction.half.group).startswith(transaction.fingerprint)


def fits(half: Half, contents: Sequence[Message]) -> bool:
    """Return whether messages can replace the prepared ones: same topics, same partitions."""
    return [(m.topic, m.partition) for m in contents] == [
        (m.topic, m.partition) for m in half.messages
    ]
