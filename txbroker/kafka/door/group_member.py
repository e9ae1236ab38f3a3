"""A member of a consumer group, which receives partitions and gives them back in two phases."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from txbroker.core.consuming.assignment import Subscription, assign
from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Partition
from txbroker.door.consuming import MemberListener
from txbroker.door.protocols import TAKEN
from txbroker.door.writing import Copy, Fenced
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client, KafkaRefused
from txbroker.kafka.client.member import InstanceHolder, Member
from txbroker.kafka.client.member_loop import MemberLoop
from txbroker.kafka.door.group_offsets import CommittedOffsets
from txbroker.kafka.protocol.codes import RETRIABLE, Code
from txbroker.kafka.protocol.subscription import (
    AssignmentData,
    ConsumerAssignment,
    MemberData,
    decode_consumer_assignment,
    decode_subscription,
    encode_consumer_assignment,
    encode_subscription,
    process_of,
)

_PROTOCOL = "txbroker-cooperative"
_OTHER_CONSUMERS = "is used by other consumers: stop them, or use another group"
_PERMANENT = {
    Code.GROUP_AUTHORIZATION_FAILED: "may not be used by this consumer: grant it Read on the group",
    Code.INCONSISTENT_GROUP_PROTOCOL: _OTHER_CONSUMERS,
    Code.INVALID_GROUP_ID: "is no valid group id: use another group",
    Code.INVALID_SESSION_TIMEOUT: "cannot use a session of {session_s:g} s: set the brokers' "
    "group.min.session.timeout.ms and group.max.session.timeout.ms so that they allow it",
    Code.GROUP_MAX_SIZE_REACHED: "has no room for another consumer: raise the brokers' "
    "group.max.size",
}
"""Errors that a retry does not cure, so that the start fails."""

_JOINED_S = 1.0
"""How long a refused commit waits for the next generation, before the caller tries again."""
_OUT = "this consumer is out of its group"


class MemberTiming(NamedTuple):
    """Seconds: of a session, after which others get the partitions of a member that does not
    answer; between heartbeats; and of the lease that a heartbeat extends."""

    session_s: float = 60.0
    heartbeat_s: float = 3.0
    lease_s: float = 30.0


class ConsumerMember(Member[ConsumerAssignment]):
    """The requests of a consumer.

    Attributes:
        topics: the subscription.
        owned: the partitions in use.
    """

    def __init__(self, client: Client, group: str, instance: str | None, session_s: float) -> None:
        super().__init__(client, group, instance, session_s, _PROTOCOL)
        self.topics: frozenset[str] = frozenset()
        self.owned: set[Partition] = set()
        self._assigned: frozenset[Partition] = frozenset()
        self._since = -1
        self._process = f"process {os.getpid()} on {socket.gethostname()}"

    def lose(self) -> None:
        """Own nothing."""
        self.owned.clear()
        self._assigned, self._since = frozenset(), -1

    async def counts(self, topics: Collection[str]) -> dict[str, int]:
        """Return the number of partitions of topics, 0 if one does not exist.

        Raises:
            KafkaUnavailable
        """
        found = await self._client.refresh(topics) if topics else {}
        for facts in found.values():
            if facts.error in RETRIABLE and facts.error != Code.UNKNOWN_TOPIC_OR_PARTITION:
                raise KafkaRefused(facts.error)
        return {
            topic: len(found[topic].partitions) if topic in found else 0 for topic in sorted(topics)
        }

    def _metadata(self) -> bytes:
        # The caller may still prepare to use what it was assigned.
        owned = self._assigned.union(self.owned)
        return encode_subscription(
            Subscription(self.topics, owned, self._since),
            MemberData(self._process, self._rebalance_requests),
        )

    async def _assign(
        self, generation: int, members: list[tuple[str, str, bytes]]
    ) -> list[tuple[str, bytes]]:
        joined = {
            member: decode_subscription(metadata, generation)
            for member, _instance, metadata in members
        }
        partitions = await self.counts(
            frozenset[str]().union(*(member.topics for member in joined.values()))
        )
        shares = assign(joined, partitions)
        return [
            (
                name,
                encode_consumer_assignment(
                    shares[name],
                    AssignmentData(
                        {topic: partitions[topic] for topic in sorted(member.topics)},
                        release=not member.owned <= shares[name],
                    ),
                ),
            )
            for name, member in joined.items()
        ]

    def _began(self, generation: int) -> None:
        if self._instance is not None and -1 < self.generation < generation - 1:
            # A static member that does not rejoin in time stays in its group. What it got in its
            # newest generation is missing in the metadata that the leader has of it: others may
            # have got the same since.
            raise KafkaRefused(Code.UNKNOWN_MEMBER, "a generation began without this member")

    def _joined(self, generation: int, encoded: bytes) -> tuple[ConsumerAssignment, bool]:
        found = decode_consumer_assignment(encoded)
        if encoded and found.data is None:
            # A coordinator that assigns for itself, as for members of Kafka's newer protocol.
            raise KafkaRefused(Code.INCONSISTENT_GROUP_PROTOCOL, _OTHER_CONSUMERS)
        if found.data is None:
            return found, True
        self._assigned, self._since = found.partitions, generation
        # After a restart the assignment may be one that was made for the process before.
        nothing_to_release = self.owned <= found.partitions
        outdated = found.data.partitions.keys() != self.topics
        return found, outdated or (found.data.release and nothing_to_release)

    def _address(self, metadata: bytes) -> str:
        return process_of(metadata)


class KafkaGroupMember:
    """A `GroupMember` on a real Kafka."""

    def __init__(
        self,
        client: Client,
        group: str,
        instance: str | None,
        listener: MemberListener,
        timing: MemberTiming,
        *,
        exact: bool = False,
    ) -> None:
        self._instance = instance
        self._listener = listener
        self._lease_s = timing.lease_s
        self._member = ConsumerMember(client, group, instance, timing.session_s)
        self.owned = self._member.owned
        self._offsets = CommittedOffsets(client, group, self._member.identity, exact=exact)
        permanent = {
            code: f"group {group} {why.format(session_s=timing.session_s)}"
            for code, why in _PERMANENT.items()
        }
        self._loop = MemberLoop(self._member, timing.heartbeat_s, permanent, self)
        self._started = False
        self._looking: asyncio.Task[None] | None = None
        self._commits: set[asyncio.Timeout] = set()
        """Those in flight: a claim does not wait for a round."""

    @property
    def deadline_s(self) -> float:
        if self._loop.joined is None:
            return 0.0
        return self._loop.answered_at + self._lease_s

    async def start(self) -> None:
        """Join the group; return after the first assignment. See `GroupMember`."""
        self._started = True
        await self._loop.start()

    def subscribe(self, topics: Collection[str]) -> None:
        """Subscribe to these topics. If they changed, or their number of partitions did, rejoin."""
        wanted = frozenset(topics)
        if wanted != self._member.topics:
            self._member.topics = wanted
            if self._started:
                self._loop.rejoin()
        elif self._started and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look(), name="txbroker partition counts")

    async def _look(self) -> None:
        """Rejoin if the leader knew other numbers of partitions."""
        try:
            counts = await self._member.counts(self._member.topics)
        except KafkaUnavailable:
            return  # the caller subscribes again
        joined = self._loop.joined
        if joined is None or joined.assignment.data is None:
            return
        if joined.assignment.data.partitions != counts:
            self._loop.rejoin()

    def rejoin(self) -> None:
        """Begin a new generation, which distributes `owned`."""
        self._loop.rejoin()

    async def close(self) -> None:
        """Leave the group if this member is dynamic, and end."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._loop.close()
        await self._offsets.close()
        if self._instance is None:
            await self._member.leave()

    # --- offsets -----------------------------------------------------------------------------

    async def load(self, partitions: Collection[Partition]) -> dict[Partition, StoredOffset]:
        """Return the group's committed offsets; see `GroupMember`."""
        return await self._offsets.load(partitions)

    async def commit(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy] = ()
    ) -> None:
        """Store offsets and copies; see `GroupMember`.

        If a generation begins meanwhile, they are stored in that one: this member keeps what it
        owns. It does not wait for its assignment, which may take a session if another member has
        died.
        """
        try:
            # Once it has joined again, its generation would fence nothing of before.
            async with asyncio.timeout(None) as limit:
                self._commits.add(limit)
                try:
                    await self._commit(offsets, copies)
                finally:
                    self._commits.discard(limit)
        except TimeoutError:
            raise KafkaUnavailable(f"{_OUT}: whether the offsets are stored is unknown") from None

    async def _commit(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy]
    ) -> None:
        while True:
            if self._loop.joined is None:
                raise Fenced(f"{_OUT}: nothing is stored")
            generation = self._member.identity.generation
            try:
                return await self._offsets.commit(offsets, copies)
            except Fenced:
                if not await self._joins_after(generation):
                    raise

    async def _joins_after(self, generation: int) -> bool:
        """Return whether this member joins a newer generation soon."""
        soon_s = asyncio.get_running_loop().time() + _JOINED_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(min(self.deadline_s, soon_s)):
                await self._loop.confirm()
        return self._loop.joined is not None and self._member.identity.generation > generation

    # --- what happens to the member ----------------------------------------------------------

    def assigned(self, assignment: ConsumerAssignment) -> None:
        """Report the partitions of a generation."""
        if assignment.data is not None:  # otherwise it was left out, and joins again
            self._listener.assigned(assignment.partitions)

    def lost(self, why: str) -> None:
        """Report that the member is out of the group."""
        self._member.lose()
        while self._commits:
            self._commits.pop().reschedule(0.0)
        self._listener.lost(why)

    def replaced_by(self, holder: InstanceHolder) -> str:
        """Return the reason of a loss, for an instance id that another process uses."""
        return (
            f"{TAKEN}: {self._instance} is now {holder.address} ({holder.host}). This "
            "consumer stays out of the group until the other one ends: stop one of them, or "
            "give it another instance"
        )
