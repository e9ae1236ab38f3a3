"""A group of consumers in memory, as its coordinator and leader see it.

The proxies' coordinator (`txbroker.testing.members`) shares no code with it: it moves numbered
partitions at once, since a claim fences the previous owner, whereas here a partition moves only
after its owner has released it, and each commit is fenced by membership.

All of it runs in the event loop of the `MemoryKafka`; members live in their users' loops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

from txbroker.core.consuming.assignment import Subscription, assign
from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Partition
from txbroker.door.consuming import GroupDescription
from txbroker.door.writing import Fenced, GroupOffsets
from txbroker.errors import ConfigurationError, InvariantBroken, KafkaUnavailable
from txbroker.testing.topics import LostReply, MemoryTopics

METADATA_CHARACTERS_MAX = 4096
"""Kafka's own default of `offset.metadata.max.bytes`, which counts characters."""
REMOVED = "the group's coordinator has removed this member"
REPLACED = "another process uses this instance id: give each one its own"


class Notices(Protocol):
    """What the coordinator sends a member. Called in the coordinator's loop."""

    def prepare(self, seat: Seat) -> None:
        """A new generation begins: answer with `MemoryGroup.join`."""

    def begin(self, seat: Seat, generation: int) -> None:
        """A generation has begun, with `Seat.share`."""

    def end(self, seat: Seat, why: str) -> None:
        """The membership has ended."""

    def admit(self, seat: Seat) -> None:
        """A member whose membership has ended may enter again."""


class Seat:
    """One membership, from entering the group until it ends.

    Attributes:
        name: the instance id, or a name for this membership only.
        share: the partitions assigned in the last generation.
        counts: the topics subscribed to, and their partitions in the last generation.
        silent: nothing reaches the member, and its heartbeats do not reach the coordinator.
        closed: the process has ended without leaving.
    """

    def __init__(self, name: str, notices: Notices, session_s: float, *, static: bool) -> None:
        self.name = name
        self.notices = notices
        self.session_s = session_s
        self.static = static
        self.subscription: Subscription | None = None
        self.share: frozenset[Partition] = frozenset()
        self.counts: dict[str, int | None] = {}
        self.silent = False
        self.closed = False
        self.session: asyncio.TimerHandle | None = None

    def end_session_timer(self) -> None:
        if self.session is not None:
            self.session.cancel()
            self.session = None


_UNAUTHORIZED = "not authorized to use the consumer group: grant Read on it to this user"


class GroupRefused(KafkaUnavailable):
    """The group may not be used."""

    lasting = True


class MemoryGroup:
    """Shares partitions among members in two phases, and keeps the group's offsets.

    Attributes:
        offsets: the committed ones.
        lost_commit: what happens to the next commit, whose answer is lost.
        authorized: False refuses the group: members cannot start, nor store offsets.
        seats: the members by name.
    """

    def __init__(self, kafka: MemoryTopics) -> None:
        self.offsets: dict[Partition, StoredOffset] = {}
        self.authorized = True
        self.seats: dict[str, Seat] = {}
        self._kafka = kafka
        self._generation = 0
        self._preparing = False
        self._replaced: dict[str, list[Seat]] = {}
        self._silenced: dict[str, Seat] = {}
        self.lost_commit: LostReply | None = None
        kafka.watch(self._proceed)

    # --- faults ------------------------------------------------------------------------------

    def silence(self, name: str) -> None:
        """Cut a member off: its lease runs out, then its session, and its partitions move on."""
        self._silenced[name] = self.seats[name]
        self._silenced[name].silent = True

    def expire(self, name: str) -> None:
        """Remove a member, as Kafka does after the session: the others get its partitions. It
        learns so from its next heartbeat, unless it is silent, and joins again."""
        seat = self.seats.pop(name)
        seat.end_session_timer()
        self._rebalance()
        for waiting in self._replaced.pop(name, []):
            waiting.notices.admit(waiting)

    def reconnect(self, name: str) -> None:
        """End the silence of a member. If its session has ended, it learns so and joins again."""
        seat = self._silenced.pop(name)
        seat.silent = False
        if not self.holds(seat):
            self._send_away(seat)
            return
        self._extend_session(seat)
        if self._preparing:
            seat.notices.prepare(seat)

    def lose_answer_of_next_commit(self, outcome: LostReply) -> None:
        """Do not answer the next commit of a member."""
        self.lost_commit = outcome

    # --- members -----------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Check that the group can be used.

        Raises:
            ConfigurationError: it cannot.
            KafkaUnavailable: the broker is down.
        """
        self._kafka.require_up()
        if not self.authorized:
            raise ConfigurationError(_UNAUTHORIZED)

    def enter(self, seat: Seat, topics: frozenset[str]) -> None:
        """Admit a member. A static one replaces one of the same name and gets its share."""
        before = self.seats.get(seat.name)
        self.seats[seat.name] = seat
        self._extend_session(seat)
        if before is not None:
            before.end_session_timer()
            if not before.closed:
                self._replaced.setdefault(seat.name, []).append(before)
                before.notices.end(before, REPLACED)
            if before.counts.keys() == topics and not self._preparing:
                seat.share, seat.counts = before.share, before.counts
                seat.notices.begin(seat, self._generation)
                return
        self._rebalance()

    def holds(self, seat: Seat) -> bool:
        """Return True if a membership has not ended."""
        return self.seats.get(seat.name) is seat

    def beat(self, seat: Seat) -> bool:
        """Return True if a heartbeat is confirmed. A member that was removed learns so."""
        if seat.silent or not self._up():
            return False
        if not self.holds(seat) and seat not in self._replaced.get(seat.name, ()):
            self._send_away(seat)
        if not self.holds(seat):
            return False
        self._extend_session(seat)
        return True

    def _send_away(self, seat: Seat) -> None:
        seat.notices.end(seat, REMOVED)
        seat.notices.admit(seat)

    def rejoin(self, seat: Seat) -> None:
        """Begin a new generation for a member."""
        if self.holds(seat):
            self._rebalance()

    def subscribe(self, seat: Seat, topics: frozenset[str]) -> None:
        """Begin a new generation if a member's topics have changed, or their partitions."""
        if self.holds(seat) and self._counts(topics) != seat.counts:
            self._rebalance()

    def join(self, seat: Seat, subscription: Subscription) -> None:
        """Take part in the generation that is prepared."""
        if self.holds(seat) and self._preparing and not seat.silent:
            seat.subscription = subscription
            self._proceed()

    def leave(self, seat: Seat) -> None:
        """Take a member out; a static one keeps its share for the length of the session."""
        seat.closed = True
        waiting = self._replaced.get(seat.name, [])
        if seat in waiting:
            waiting.remove(seat)
        if not self.holds(seat):
            return
        if seat.static:
            seat.silent = True
        else:
            seat.end_session_timer()
            del self.seats[seat.name]
            self._rebalance()

    def _extend_session(self, seat: Seat) -> None:
        seat.end_session_timer()
        loop = asyncio.get_running_loop()
        seat.session = loop.call_later(seat.session_s, self._end_session, seat)

    def _end_session(self, seat: Seat) -> None:
        if not self.holds(seat):
            return
        if self._up():
            self.expire(seat.name)
        else:
            self._extend_session(seat)  # a coordinator that starts begins all sessions again

    # --- generations -------------------------------------------------------------------------

    def _rebalance(self) -> None:
        """Ask all members to join a new generation; those asked before answer once more."""
        self._preparing = True
        for seat in self.seats.values():
            seat.subscription = None
            if not seat.silent:
                seat.notices.prepare(seat)
        self._proceed()

    def _proceed(self) -> None:
        """Begin the new generation if every member has joined."""
        joined = {
            name: seat.subscription
            for name, seat in self.seats.items()
            if seat.subscription is not None and not seat.silent
        }
        if not self._preparing or len(joined) < len(self.seats) or not self._up():
            return
        self._preparing = False
        self._generation += 1
        wanted = frozenset[str]().union(*(one.topics for one in joined.values()))
        counts = {name: count for name, count in self._counts(wanted).items() if count is not None}
        for name, share in assign(joined, counts).items():
            seat = self.seats[name]
            seat.share, seat.counts = share, self._counts(joined[name].topics)
            seat.notices.begin(seat, self._generation)

    def _counts(self, topics: Collection[str]) -> dict[str, int | None]:
        known = self._kafka.topics
        return {name: len(known[name].partitions) if name in known else None for name in topics}

    def _up(self) -> bool:
        try:
            self._kafka.require_up()
        except KafkaUnavailable:
            return False
        return True

    # --- offsets -----------------------------------------------------------------------------

    def load(self, partitions: Sequence[Partition]) -> dict[Partition, StoredOffset]:
        """Return committed offsets.

        Raises:
            KafkaUnavailable: the broker is down.
        """
        self._kafka.require_up()
        return {at: self.offsets[at] for at in partitions if at in self.offsets}

    def check(self, stored: GroupOffsets) -> None:
        """Raise an error if offsets may not be stored; see `Writer.commit`."""
        seat: object = stored.member
        if isinstance(seat, Seat) and not self.holds(seat):
            raise Fenced(f"{seat.name} is no member of the group any more: nothing is stored")
        if not self.authorized:
            raise GroupRefused(_UNAUTHORIZED)
        for partition, (_offset, metadata) in stored.offsets.items():
            self._kafka.partition(*partition)
            if len(metadata) > METADATA_CHARACTERS_MAX:
                raise InvariantBroken(
                    f"the metadata of {partition[0]}-{partition[1]} has {len(metadata)} "
                    f"characters, Kafka takes {METADATA_CHARACTERS_MAX}"
                )

    def store(self, stored: GroupOffsets) -> None:
        """Store offsets that were checked."""
        self.offsets.update({at: StoredOffset(*each) for at, each in stored.offsets.items()})

    @property
    def exists(self) -> bool:
        """Whether the group has members or offsets."""
        return bool(self.seats or self.offsets)

    def describe(self) -> GroupDescription:
        """Return the group as operators see it."""
        state = "PreparingRebalance" if self._preparing else "Stable"
        return GroupDescription(
            state if self.seats else "Empty" if self.offsets else "Dead",
            tuple((name, "in memory", seat.share) for name, seat in self.seats.items()),
        )
