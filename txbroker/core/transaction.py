"""One transaction as an owner's ledger knows it, and the rules of its checks.

A transaction is a function of its half message and of its markers in the order of their offsets;
nothing else goes into it, so every replay comes to the same one.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter

from msgspec import Struct, structs

from txbroker.core.alike import intern
from txbroker.core.encoding import bytes_in_batch
from txbroker.core.lifecycle import TRANSITIONS, IllegalStep, Step
from txbroker.core.records import (
    Attempt,
    Cause,
    CheckReason,
    Decision,
    Half,
    Marker,
    Message,
    ParkedCopy,
    Place,
    Source,
    State,
    bounded_later_s,
)
from txbroker.core.trace_context import HEADERS as TRACE_HEADERS

ASK_SPACING_MS = 1000
"""Attempts that were asked for are not closer than this to the last one."""
ATTEMPTS_KEPT = 16
"""Attempts remembered for show. "Not yet" can be answered for ever, so the list is bounded."""


class Checks(Struct, gc=False):
    """The attempts of a transaction; made with the first marker of one.

    Attributes:
        round: attempts are numbered anew in each.
        round_started_ms: when this round of attempts began.
        number: of the last attempt in this round.
        counted_ms: append times of this round's attempts that count.
        last_check_ms: append time of the last attempt in this round, counting or not; 0 if none.
        not_before_ms: a deliberate "not yet" holds until then.
        attempts: the newest ones, for show.
    """

    round: int
    round_started_ms: int
    number: int = 0
    counted_ms: tuple[int, ...] = ()
    last_check_ms: int = 0
    not_before_ms: int = 0
    attempts: tuple[Attempt, ...] = ()


_NEVER_CHECKED = Checks(1, 0)


class Verdict(Struct, gc=False):
    """The decision of a transaction, and who made it.

    Attributes:
        op_offset: where its marker is, -1 if that fell to retention.
        at_ms: the marker's append time.
        contents_fingerprint: of the messages that replaced the prepared ones; empty without.
    """

    decision: Decision
    op_offset: int = -1
    at_ms: int = 0
    source: Source | None = None
    by: str = ""
    reason: str = ""
    contents_fingerprint: bytes = b""


class Transaction(Struct, gc=False):
    """A transaction and how it came to stand where it stands.

    There may be a million of them, so what few have is in parts of its own, and messages that are
    not in memory are *bare*: topic and partition only, shared by all that go to the same place.

    Attributes:
        half: the half message; its messages are bare where `has_bodies` is False.
        offset: where its first record is in the half topic.
        prepared_at_ms: the log clock of the half topic when it was appended.
        fingerprint: of its prepared content and group; of one that was settled longer ago only
            the start is remembered.
        places: where its messages go, and how large they are as they will be promoted.
        order: the hash of what keeps its order; None: nothing does.
        contents: the messages that replaced the prepared ones at commit, while in memory.
        instance: the SDK process that prepared it, as far as this owner saw it.
        kept: whether a copy lies in the parked topic.
        kept_at: the offsets of the copy's records there, as far as known.
        lost: its messages are gone for good, wherever they were.
        offsets: where its messages are in their targets, once promoted by this owner.
        promoted_at_ms: when this owner saw it visible, by its log time; 0 if it did not.
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
    checks: Checks | None = None
    verdict: Verdict | None = None
    contents: tuple[Message, ...] | None = None
    kept_at: tuple[int, ...] = ()
    instance: str = ""
    cause: Cause | None = None
    offsets: tuple[int, ...] = ()
    promoted_at_ms: int = 0

    @property
    def id(self) -> str:
        """The transaction id."""
        return self.half.id

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages as they will be promoted; bare where `has_bodies` is False."""
        return self.half.messages if self.contents is None else self.contents

    # --- parts that few have -----------------------------------------------------------------

    @property
    def decision(self) -> Decision | None:
        """What was decided; None while undecided."""
        return None if self.verdict is None else self.verdict.decision

    @property
    def op_offset(self) -> int:
        """Where the deciding marker is; -1 while undecided."""
        return -1 if self.verdict is None else self.verdict.op_offset

    @property
    def decided_at_ms(self) -> int:
        """Append time of the deciding marker; 0 while undecided."""
        return 0 if self.verdict is None else self.verdict.at_ms

    @property
    def source(self) -> Source | None:
        """Who decided; None while undecided."""
        return None if self.verdict is None else self.verdict.source

    @property
    def by(self) -> str:
        """Who exactly decided."""
        return "" if self.verdict is None else self.verdict.by

    @property
    def reason(self) -> str:
        """Why it was decided so, as far as somebody said."""
        return "" if self.verdict is None else self.verdict.reason

    @property
    def contents_fingerprint(self) -> bytes:
        """Of the messages that replaced the prepared ones; empty without."""
        return b"" if self.verdict is None else self.verdict.contents_fingerprint

    @property
    def round(self) -> int:
        """The round of attempts, from 1."""
        return 1 if self.checks is None else self.checks.round

    @property
    def round_started_ms(self) -> int:
        """When this round of attempts began."""
        return self.prepared_at_ms if self.checks is None else self.checks.round_started_ms

    @property
    def number(self) -> int:
        """The number of the last attempt in this round; 0 before the first."""
        return 0 if self.checks is None else self.checks.number

    @property
    def counted_ms(self) -> tuple[int, ...]:
        """Append times of this round's attempts that count."""
        return () if self.checks is None else self.checks.counted_ms

    @property
    def last_check_ms(self) -> int:
        """Append time of the last attempt in this round, counting or not; 0 if none."""
        return 0 if self.checks is None else self.checks.last_check_ms

    @property
    def not_before_ms(self) -> int:
        """A deliberate "not yet" holds until then; 0 without."""
        return 0 if self.checks is None else self.checks.not_before_ms

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The newest attempts, for show."""
        return () if self.checks is None else self.checks.attempts

    def _checked(self) -> Checks:
        if self.checks is None:
            self.checks = Checks(1, self.prepared_at_ms)
        return self.checks

    # --- messages ----------------------------------------------------------------------------

    @property
    def body_bytes(self) -> int:
        """What its messages take while they are in memory, bytes; 0 while they are not."""
        if not self.has_bodies:
            return 0
        places = self.places
        return places[0].size if len(places) == 1 else sum([place.size for place in places])

    def evict(self) -> int:
        """Drop the messages' keys, values and headers, if they are in memory; where they go stays
        known. Returns what they took, bytes."""
        if not self.has_bodies:
            return 0
        self.half = structs.replace(self.half, messages=bare(self.half.messages))
        self.contents = None
        self.has_bodies = False
        return sum(map(_size, self.places))

    def fill(self, messages: tuple[Message, ...]) -> None:
        """Put messages back that were read again.

        Raises:
            ValueError: they are not those of this transaction.
        """
        mark = self.contents_fingerprint
        found = fingerprint(messages) if mark else fingerprint(messages, self.half.group)
        if not found.startswith(mark or self.fingerprint):
            raise ValueError(f"the messages are not those of {self.id}")
        if mark:
            self.contents = messages
        else:
            self.half = structs.replace(self.half, messages=messages)
        self.has_bodies = True

    # --- steps -------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        """Change the state by the table.

        Raises:
            IllegalStep: nothing was changed.
        """
        after = TRANSITIONS[self.state].get(step)
        if after is None:
            raise IllegalStep(self.state, step)
        self.state = after

    def decide(self, marker: Marker, offset: int, at_ms: int, decision: Decision) -> None:
        """Apply a deciding marker. The first one wins: in a decided state this raises.

        Raises:
            IllegalStep: nothing was changed.
        """
        after = _AFTER[decision].get(self.state)
        if after is None:
            raise IllegalStep(self.state, _DECIDING[decision])
        self.state = after
        self.verdict = Verdict(decision, offset, at_ms, marker.source, marker.by, marker.reason)

    def replace(self, contents: tuple[Message, ...]) -> None:
        """Take the messages that came with the commit instead of the prepared ones."""
        assert self.verdict is not None
        self.verdict.contents_fingerprint = fingerprint(contents)
        self.half = structs.replace(self.half, messages=bare(self.half.messages))
        self.contents = contents
        self.places = places(contents)
        self.has_bodies, self.lost = True, False

    def check(self, marker: Marker, at_ms: int) -> None:
        """Apply an attempt's marker.

        Raises:
            IllegalStep: it is not the next number of this round, comes before its time, or would
                be one attempt too many.
        """
        why = self._no_check(marker, at_ms)
        if why:
            raise IllegalStep(self.state, Step.CHECK, why)
        self.take(Step.CHECK)
        checks = self._checked()
        checks.number = marker.number
        checks.counted_ms += (at_ms,)
        checks.last_check_ms = at_ms
        checks.not_before_ms = 0
        if marker.previous:
            self.note_outcome(marker.previous)
        reason = CheckReason(marker.reason)
        attempt = Attempt(checks.round, marker.number, at_ms, reason, intern(marker.endpoint))
        checks.attempts = (*checks.attempts[1 - ATTEMPTS_KEPT :], attempt)

    def _no_check(self, marker: Marker, at_ms: int) -> str:
        checks = self.checks or _NEVER_CHECKED
        made, allowed = len(checks.counted_ms), self.half.policy.attempts_max
        number = checks.number + 1
        if marker.round != checks.round or marker.number != number:
            return f"attempt {marker.round}.{marker.number} is not {checks.round}.{number}"
        if made >= allowed:
            return f"{made} attempts were made already"
        if marker.reason == CheckReason.ASKED:
            if made + 1 >= allowed:
                return "the last attempt of a round is never pulled forward"
            if at_ms < checks.last_check_ms + ASK_SPACING_MS:
                return "less than a second after the last attempt"
        elif marker.reason != CheckReason.DUE:
            return f"unknown reason {marker.reason!r}"
        elif at_ms < self.next_check_ms():
            return f"{self.next_check_ms() - at_ms} ms before its time"
        return ""

    def next_check_ms(self) -> int:
        """Return the append time from which the next attempt is accepted, ms."""
        policy, checks = self.half.policy, self.checks
        if checks is None:
            return self.prepared_at_ms + round(policy.after_s * 1000)
        if checks.not_before_ms:
            return checks.not_before_ms
        if checks.counted_ms:
            return checks.counted_ms[-1] + round(policy.interval_s * 1000)
        return checks.round_started_ms + round(policy.after_s * 1000)

    def give_back(self, marker: Marker, at_ms: int, step: Step) -> None:
        """Apply a `returned` or `later` marker: the last attempt does not count.

        Raises:
            IllegalStep: it names another attempt than the last, or that was given back already.
        """
        last = self.attempts[-1] if self.attempts else None
        if (
            last is None
            or not last.counts
            or (marker.round, marker.number) != (self.round, self.number)
            or last.round != self.round
        ):
            raise IllegalStep(
                self.state, step, f"attempt {marker.round}.{marker.number} cannot be given back"
            )
        self.take(step)
        checks = self._checked()
        checks.counted_ms = checks.counted_ms[:-1]
        given_back = structs.replace(last, counts=False, outcome=marker.previous)
        checks.attempts = (*checks.attempts[:-1], given_back)
        if step is Step.LATER:
            delay_s = bounded_later_s(marker.later_s)
            checks.not_before_ms = at_ms + round(delay_s * 1000)

    def park_ms(self) -> int | None:
        """Return the append time from which parking is accepted, None while attempts are left."""
        policy, checks = self.half.policy, self.checks
        if checks is None or len(checks.counted_ms) < policy.attempts_max:
            return None
        return checks.counted_ms[-1] + round(policy.timeout_s * 1000)

    def park(self, marker: Marker, at_ms: int) -> None:
        """Apply a `park` marker.

        Raises:
            IllegalStep: attempts are left, the last may still be answered, or another round.
        """
        from_ms = self.park_ms()
        if marker.round != self.round or from_ms is None or at_ms < from_ms:
            raise IllegalStep(self.state, Step.PARK, "the last attempt is not over")
        self.take(Step.PARK)

    def revive(self, marker: Marker, at_ms: int) -> None:
        """Apply a `revive` marker: a new round for a parked one, nothing for a refused one.

        Raises:
            IllegalStep: the state is another, or the marker names another round.
        """
        if marker.round != self.round:
            raise IllegalStep(self.state, Step.REVIVE, f"round {marker.round} is not {self.round}")
        was = self.state
        self.take(Step.REVIVE)
        if was is State.PARKED:
            self.checks = Checks(self.round + 1, at_ms, attempts=self.attempts)

    def note_outcome(self, detail: str) -> None:
        """Remember what came back from the last attempt; the next marker will carry it."""
        checks = self.checks
        if checks is not None and checks.attempts and not checks.attempts[-1].outcome:
            last = structs.replace(checks.attempts[-1], outcome=intern(detail))
            checks.attempts = (*checks.attempts[:-1], last)

    def copy(self, state: State, cause: Cause | None) -> ParkedCopy:
        """Return what the parked topic keeps, with the messages as they would be promoted.

        The copy may outlive half message and markers, so it tells whatever promotion needs.
        """
        half = structs.replace(self.half, messages=self.messages)
        return ParkedCopy(half, self.offset, self.prepared_at_ms, state, cause, self.decided_at_ms)


_CACHED_MAX = 10_000
_place = attrgetter("topic", "partition")
_size = attrgetter("size")
_places: dict[tuple[tuple[str, int | None, int], ...], tuple[Place, ...]] = {}


def bare(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages without key, value and headers; equal ones are the same object."""
    return _bare[tuple(map(_place, messages))]


def bare_of(places: Sequence[Place]) -> tuple[Message, ...]:
    """Return the bare messages that go to these places."""
    return _bare[tuple(map(_place, places))]


class _Bare(dict[tuple[tuple[str, int | None], ...], tuple[Message, ...]]):
    """Bare messages by where they go; made when they are asked for first."""

    def __missing__(self, shape: tuple[tuple[str, int | None], ...]) -> tuple[Message, ...]:
        if len(self) >= _CACHED_MAX:
            self.clear()
        made = self[shape] = tuple([Message(intern(topic), partition=at) for topic, at in shape])
        return made


_bare = _Bare()


def places(messages: Sequence[Message]) -> tuple[Place, ...]:
    """Return where messages go and how large they are; equal ones are the same object."""
    shape: tuple[tuple[str, int | None, int], ...] = ()
    for message in messages:
        shape += ((message.topic, message.partition, bytes_in_batch((message,))),)
    return places_of(shape)


def places_of(shape: tuple[tuple[str, int | None, int], ...]) -> tuple[Place, ...]:
    """Return places by topic, partition and size in a batch; equal ones are the same object."""
    found = _places.get(shape)
    if found is None:
        if len(_places) >= _CACHED_MAX:
            _places.clear()
        found = tuple([Place(intern(t), -1 if p is None else p, size) for t, p, size in shape])
        _places[shape] = found
    return found


_DECIDING = {Decision.COMMIT: Step.COMMIT, Decision.ROLLBACK: Step.ROLLBACK}
_AFTER = {
    decision: {state: steps[step] for state, steps in TRANSITIONS.items() if step in steps}
    for decision, step in _DECIDING.items()
}
"""The table's columns of the deciding steps: every transaction comes through one of them."""
_NULL = b"\xff\xff\xff\xff\xff"


def fingerprint(messages: Sequence[Message], group: str = "") -> bytes:
    """Return 16 bytes that tell whether two prepares hold the same content.

    The target partitions stay out of it: a keyless message gets one when it is prepared, and the
    same prepare sent again would get another. So do trace contexts: whoever repeats a prepare does
    it in another step of a trace, or in another trace.
    """
    told_apart = [_name(group)]
    for message in messages:
        key, value, stamp, headers = (
            message.key,
            message.value,
            message.timestamp_ms,
            message.headers,
        )
        # Each part behind its length, in line: every prepare comes through here.
        told_apart += (
            _name(message.topic),
            *((_NULL,) if key is None else (len(key).to_bytes(5, "big"), key)),
            *((_NULL,) if value is None else (len(value).to_bytes(5, "big"), value)),
            _NULL if stamp is None else _sized(b"%d" % stamp),
        )
        if not headers:
            told_apart.append(_NO_HEADERS)
            continue
        kept = [header for header in headers if header[0] not in TRACE_HEADERS]
        told_apart.append(_sized(b"%d" % len(kept)))
        for name, content in kept:
            told_apart += (_sized(name.encode()), _sized(content))
    whole = b"".join(told_apart)
    return hashlib.blake2b(whole, digest_size=16, person=b"txb-content").digest()


def _sized(part: bytes | None) -> bytes:
    """Return what is told apart from any other wherever it stands."""
    return _NULL if part is None else len(part).to_bytes(5, "big") + part


_NO_HEADERS = _sized(b"0")


@lru_cache(maxsize=10_000)
def _name(text: str) -> bytes:
    return _sized(text.encode())


def same_contents(transaction: Transaction, contents: Sequence[Message] | None) -> bool:
    """Say whether a repeated commit means the messages that stand."""
    if contents is None:
        return True
    if transaction.contents_fingerprint:
        return fingerprint(contents) == transaction.contents_fingerprint
    return fingerprint(contents, transaction.half.group).startswith(transaction.fingerprint)


def fits(half: Half, contents: Sequence[Message]) -> bool:
    """Say whether messages can replace the prepared ones: same topics, same partitions."""
    return [(m.topic, m.partition) for m in contents] == [
        (m.topic, m.partition) for m in half.messages
    ]
