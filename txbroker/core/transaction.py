"""One transaction as an owner's ledger knows it, and the rules of its checks.

A transaction is a function of its half message and of its markers in the order of their offsets;
nothing else goes into it, so every replay comes to the same one.
"""

import hashlib
from collections.abc import Sequence

from msgspec import Struct, structs

from txbroker.core.records import (
    Attempt,
    Cause,
    CheckReason,
    Decision,
    Half,
    Kept,
    Marker,
    Message,
    Source,
    State,
)
from txbroker.core.states import IllegalStep, Step, follow

ASK_SPACING_MS = 1000
"""Attempts that were asked for are not closer than this to the last one."""
LATER_MAX_S = 3600.0
"""A deliberate "not yet" postpones the next attempt by no more than this, seconds."""
ATTEMPTS_KEPT = 64
"""Attempts remembered for show. "Not yet" can be answered for ever, so the list is bounded."""


class Transaction(Struct):
    """A transaction and how it came to stand where it stands.

    Attributes:
        half: the half message; without bodies once the transaction is settled.
        offset: where its first record is in the half topic.
        prepared_at_ms: the log clock of the half topic when it was appended.
        op_offset: where its deciding marker is, -1 while undecided.
        contents: the messages that replaced the prepared ones at commit.
        round_started_ms: when this round of attempts began.
        number: of the last attempt in this round.
        counted_ms: append times of this round's attempts that count.
        last_check_ms: append time of the last attempt in this round, counting or not; 0 if none.
        not_before_ms: a deliberate "not yet" holds until then.
        instance: the SDK process that prepared it, as far as this owner saw it.
        kept: whether a copy lies in the parked topic.
        offsets: where its messages are in their targets, once promoted by this owner.
        promoted_at_ms: when this owner saw it visible, by its log time; 0 if it did not.
    """

    half: Half
    offset: int
    prepared_at_ms: int
    fingerprint: bytes
    state: State = State.PENDING
    decision: Decision | None = None
    op_offset: int = -1
    decided_at_ms: int = 0
    source: Source | None = None
    by: str = ""
    reason: str = ""
    contents: tuple[Message, ...] | None = None
    contents_fingerprint: bytes = b""
    round: int = 1
    round_started_ms: int = 0
    number: int = 0
    counted_ms: list[int] = []
    last_check_ms: int = 0
    not_before_ms: int = 0
    attempts: list[Attempt] = []
    instance: str = ""
    kept: bool = False
    cause: Cause | None = None
    offsets: tuple[int, ...] = ()
    promoted_at_ms: int = 0

    @property
    def id(self) -> str:
        """The transaction id."""
        return self.half.id

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages as they will be promoted."""
        return self.half.messages if self.contents is None else self.contents

    def take(self, step: Step) -> None:
        """Change the state by the table.

        Raises:
            IllegalStep: nothing was changed.
        """
        self.state = follow(self.state, step)

    def decide(self, marker: Marker, offset: int, at_ms: int, decision: Decision) -> None:
        """Apply a deciding marker. The first one wins: in a decided state this raises.

        Raises:
            IllegalStep: nothing was changed.
        """
        self.take(Step(marker.kind))
        self.decision = decision
        self.op_offset = offset
        self.decided_at_ms = at_ms
        self.source, self.by, self.reason = marker.source, marker.by, marker.reason

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
        self.number = marker.number
        self.counted_ms.append(at_ms)
        self.last_check_ms = at_ms
        self.not_before_ms = 0
        if marker.previous:
            self.note_outcome(marker.previous)
        reason = CheckReason(marker.reason)
        self.attempts.append(Attempt(self.round, marker.number, at_ms, reason, marker.endpoint))
        del self.attempts[:-ATTEMPTS_KEPT]

    def _no_check(self, marker: Marker, at_ms: int) -> str:
        made, allowed = len(self.counted_ms), self.half.policy.attempts_max
        if marker.round != self.round or marker.number != self.number + 1:
            return f"attempt {marker.round}.{marker.number} is not {self.round}.{self.number + 1}"
        if made >= allowed:
            return f"{made} attempts were made already"
        if marker.reason == CheckReason.ASKED:
            if made + 1 >= allowed:
                return "the last attempt of a round is never pulled forward"
            if at_ms < self.last_check_ms + ASK_SPACING_MS:
                return "less than a second after the last attempt"
        elif marker.reason != CheckReason.DUE:
            return f"unknown reason {marker.reason!r}"
        elif at_ms < self.next_check_ms():
            return f"{self.next_check_ms() - at_ms} ms before its time"
        return ""

    def next_check_ms(self) -> int:
        """Return the append time from which the next attempt is accepted, ms."""
        policy = self.half.policy
        if self.not_before_ms:
            return self.not_before_ms
        if self.counted_ms:
            return self.counted_ms[-1] + round(policy.interval_s * 1000)
        return self.round_started_ms + round(policy.after_s * 1000)

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
        self.counted_ms.pop()
        self.attempts[-1] = structs.replace(last, counts=False, outcome=marker.previous)
        if step is Step.LATER:
            delay_s = min(max(marker.later_s, 1.0), LATER_MAX_S)
            self.not_before_ms = at_ms + round(delay_s * 1000)

    def park_ms(self) -> int | None:
        """Return the append time from which parking is accepted, None while attempts are left."""
        if len(self.counted_ms) < self.half.policy.attempts_max:
            return None
        return self.counted_ms[-1] + round(self.half.policy.timeout_s * 1000)

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
            self.round += 1
            self.round_started_ms = at_ms
            self.number = 0
            self.counted_ms = []
            self.last_check_ms = 0
            self.not_before_ms = 0

    def note_outcome(self, detail: str) -> None:
        """Remember what came back from the last attempt; the next marker will carry it."""
        if self.attempts and not self.attempts[-1].outcome:
            self.attempts[-1] = structs.replace(self.attempts[-1], outcome=detail)

    def copy(self, state: State, cause: Cause | None) -> Kept:
        """Return what the parked topic keeps, with the messages as they would be promoted.

        The copy may outlive half message and markers, so it tells whatever promotion needs.
        """
        half = structs.replace(self.half, messages=self.messages)
        return Kept(half, self.offset, self.prepared_at_ms, state, cause, self.decided_at_ms)

    def strip(self) -> None:
        """Drop the bodies: of a settled transaction nobody asks for them."""
        bare = tuple([Message(m.topic, partition=m.partition) for m in self.messages])
        self.half = structs.replace(self.half, messages=bare)
        self.contents = None


def fingerprint(messages: Sequence[Message], group: str = "") -> bytes:
    """Return 16 bytes that tell whether two prepares hold the same content.

    The target partitions stay out of it: a keyless message gets one when it is prepared, and the
    same prepare sent again would get another.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"txb-content")
    _feed(digest, group.encode())
    for message in messages:
        _feed(digest, message.topic.encode())
        _feed(digest, message.key)
        _feed(digest, message.value)
        stamp = message.timestamp_ms
        _feed(digest, None if stamp is None else str(stamp).encode())
        _feed(digest, str(len(message.headers)).encode())
        for name, value in message.headers:
            _feed(digest, name.encode())
            _feed(digest, value)
    return digest.digest()


def _feed(digest: "hashlib.blake2b", part: bytes | None) -> None:
    if part is None:
        digest.update(b"\xff\xff\xff\xff\xff")
    else:
        digest.update(len(part).to_bytes(5, "big"))
        digest.update(part)
