"""Verify that earlier transactions of our producers have ended in a partition.

A coordinator that reports a transaction as complete may have skipped a partition: Kafka 4.3.1 drops
the end marker for a partition without leader (KAFKA-20734). The next marker of that producer id
then ends the records left open, together with those of a later transaction: aborted records become
visible, or committed ones are lost. So nothing is written to a partition before its leader has
confirmed that none of our producer ids has a transaction open there.

After InitProducerId that confirmation is final: every marker has been written or never will be, and
the brokers refuse what a fenced producer still sends unless its transaction is open already.

An end marker can also get lost between two transactions of one claim: see `UnconfirmedWrites`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from txbroker.core.records import Cause, Partition
from txbroker.door.writing import Unknown
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client, KafkaRefused
from txbroker.kafka.client.leaders import confirm_leaders
from txbroker.kafka.client.producer import Producer
from txbroker.kafka.client.reader import READ_COMMITTED, READ_UNCOMMITTED, end_offsets
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.kafka.protocol.codes import LEADER_MOVED, Code, describe
from txbroker.kafka.protocol.schemas import describe_producers
from txbroker.kafka.protocol.transactions import by_topic
from txbroker.net.timers import Backoff, grown_pause_s

HANGING = "hanging"
"""The code of a cause that ends only by an operator's action."""

_STABLE_S, _PAUSE_S, _PAUSE_MAX_S = 0.2, 0.005, 0.05
"""Other clients' transactions usually end within this time."""
_REQUEST_TIMEOUT_S = 2.0
"""Short, because the partition's owner plans nothing meanwhile."""
_PARTITIONS_PER_REQUEST = 8
"""A leader returns every producer of a day, and decoding a long answer blocks the event loop."""
_VISIBLE_S, _VISIBLE_MAX_S = 0.02, 0.1
"""Transactions usually become visible within this time. Leaders are asked only after it, and again
after twice the time."""


class ProducerState(NamedTuple):
    """Our producers' state in a partition, from its leader.

    Attributes:
        code: Kafka's error code.
        first: the first offset of our open transaction, -1 if none is open.
        leader: the broker that answered, -1 if none did.
        epoch: the newest epoch in which one of our producers wrote there, -1 if unknown.
    """

    code: int
    first: int = -1
    leader: int = -1
    epoch: int = -1

    @property
    def ended(self) -> bool:
        """Whether the leader confirms that no transaction of ours is open."""
        return self.code == Code.NONE and self.first < 0


class OpenTransactionGuard:
    """Finds partitions in which earlier producers with our ids have left nothing open."""

    def __init__(self, client: Client, channel: str, producers: Sequence[Producer]) -> None:
        self._client = client
        self._channel = channel
        self._producers = producers
        self._verified: set[Partition] = set()
        # A deposed leader may have answered: only the one that did may receive the next batch.
        self._vouching_leader: dict[Partition, int] = {}
        for producer in producers:
            producer.vouching_leader = self._vouching_leader
        # The first known ends of partitions whose producers we may not describe.
        self._ends: dict[Partition, int] = {}

    def unverified(self, partitions: Iterable[Partition]) -> list[Partition]:
        """Return the partitions that are not verified, or have another leader since."""
        return [p for p in dict.fromkeys(partitions) if not self._is_verified(p)]

    def _is_verified(self, partition: Partition) -> bool:
        leader = self._vouching_leader.get(partition)
        return partition in self._verified and (
            leader is None or leader == self._client.known_leader(*partition)
        )

    async def left_open(
        self, producer: Producer, epochs: Mapping[Partition, int]
    ) -> dict[Partition, Cause]:
        """Check partitions between two transactions of one producer; return why it must not write.

        Args:
            epochs: the epoch of the producer's last write to each partition. A leader that does not
                know of it was deposed before that write, so its answer is outdated.
        """
        causes = {}
        for partition, state in (await self._describe(epochs, {producer.id})).items():
            if state.ended and state.epoch < epochs[partition]:
                state = state._replace(code=Code.NOT_LEADER)
                self._client.forget_leader(*partition)
            if state.ended:
                self._vouching_leader[partition] = state.leader
            else:
                causes[partition] = _cause(partition, state)
        return causes

    async def verify_no_open_txn(self, partitions: Iterable[Partition]) -> list[Cause]:
        """Verify partitions; return why some must not be written now.

        Once is enough for each: only our own writes follow.
        """
        ours = {producer.id for producer in self._producers}
        states = await self._describe(self.unverified(partitions), ours)
        forbidden = {
            partition: state
            for partition, state in states.items()
            if state.code == Code.TOPIC_AUTHORIZATION_FAILED
        }
        stable = await self._stable(forbidden)
        causes = []
        for partition, state in states.items():
            if state.ended or partition in stable:
                self._verified.add(partition)
                self._vouching_leader[partition] = state.leader
            else:
                causes.append(_cause(partition, state))
        return causes

    async def _describe(
        self, partitions: Iterable[Partition], ours: Collection[int]
    ) -> dict[Partition, ProducerState]:
        states: dict[Partition, ProducerState] = {}
        by_leader: dict[int, list[Partition]] = {}
        # A deposed leader lacks the later transactions, so each leader is confirmed first.
        for partition, leader in (await confirm_leaders(self._client, list(partitions))).items():
            if isinstance(leader, KafkaRefused):
                states[partition] = ProducerState(leader.code)
            elif isinstance(leader, KafkaUnavailable):
                states[partition] = ProducerState(Code.NETWORK_EXCEPTION)
            else:
                by_leader.setdefault(leader, []).append(partition)
        for answer in await asyncio.gather(
            *(self._describe_at(leader, led, ours) for leader, led in by_leader.items())
        ):
            states.update(answer)
        return states

    async def _describe_at(
        self, leader: int, partitions: Sequence[Partition], ours: Collection[int]
    ) -> dict[Partition, ProducerState]:
        states: dict[Partition, ProducerState] = {}
        unresponsive = False
        for first in range(0, len(partitions), _PARTITIONS_PER_REQUEST):
            some = partitions[first : first + _PARTITIONS_PER_REQUEST]
            if unresponsive:
                # Every further request would take the full timeout, too.
                states.update(dict.fromkeys(some, ProducerState(Code.NETWORK_EXCEPTION)))
                continue
            answer = await self._request(leader, some, ours)
            unresponsive = answer[some[0]].code == Code.NETWORK_EXCEPTION
            states.update(answer)
        return states

    async def _request(
        self, leader: int, partitions: Sequence[Partition], ours: Collection[int]
    ) -> dict[Partition, ProducerState]:
        # A partition that is missing in the answer is not verified.
        states = dict.fromkeys(partitions, ProducerState(Code.UNKNOWN))
        try:
            answer = await self._client.ask(
                leader,
                describe_producers(by_topic(partitions)),
                f"{self._channel}/producers",
                _REQUEST_TIMEOUT_S,
            )
        except KafkaRefused as error:
            return dict.fromkeys(partitions, ProducerState(error.code))
        except KafkaUnavailable:
            for partition in partitions:
                self._client.forget_leader(*partition)
            return dict.fromkeys(partitions, ProducerState(Code.NETWORK_EXCEPTION))
        for topic, parts in answer.topics:
            for number, code, _message, producers in parts:
                if code in LEADER_MOVED:
                    self._client.forget_leader(topic, number)
                own = [producer for producer in producers or () if producer[0] in ours]
                open_at = [producer[5] for producer in own if producer[5] >= 0]
                epoch = max((producer[1] for producer in own), default=-1)
                states[topic, number] = ProducerState(code, min(open_at, default=-1), leader, epoch)
        return states

    async def _stable(self, forbidden: Mapping[Partition, ProducerState]) -> set[Partition]:
        """Return the partitions whose last stable offset has passed their first known end.

        No transaction from before is open there. This takes no right but Describe.
        """
        if forbidden:
            ends = await end_offsets(self._client, forbidden, READ_UNCOMMITTED, self._channel)
            # A topic that was deleted and created again ends earlier.
            self._ends |= {p: min(end, self._ends.get(p, end)) for p, end in ends.items()}
        left = {p: self._ends[p] for p in forbidden if p in self._ends}
        passed: set[Partition] = set()
        backoff = Backoff(_STABLE_S, _PAUSE_S, _PAUSE_MAX_S)
        while left:
            stable = await end_offsets(self._client, left, READ_COMMITTED, self._channel)
            passed.update(p for p, end in left.items() if stable.get(p, -1) >= end)
            left = {p: end for p, end in left.items() if p not in passed}
            if left and not await backoff.pause():
                break
        # Only from the leader that receives the first batch.
        return {p for p in passed if self._client.known_leader(*p) == forbidden[p].leader}


class _Write(NamedTuple):
    """The last record of a transaction in a partition, and its producer."""

    offset: int
    producer_id: int
    epoch: int


class UnconfirmedWrites:
    """Tracks offsets that one producer wrote since the claim and that the last stable offset has
    not passed: their end marker may be missing.
    """

    def __init__(self, producer: Producer, guard: OpenTransactionGuard, stable: StableEnds) -> None:
        self._producer = producer
        self._guard = guard
        self._stable = stable
        self._last: dict[Partition, _Write] = {}

    def add(self, last: Mapping[Partition, int]) -> None:
        """Add a transaction that was written and not ended yet, by its last offsets."""
        id, epoch = self._producer.id, self._producer.epoch
        self._last |= {p: _Write(offset, id, epoch) for p, offset in last.items()}

    def confirm(self, last: Mapping[Partition, int]) -> None:
        """Remove a transaction that has become visible."""
        for partition, offset in last.items():
            write = self._last.get(partition)
            if write is not None and write.offset == offset:
                del self._last[partition]
        if not self._last:
            self._producer.note_visible()

    async def wait_until_ended(self, partitions: Collection[Partition], backoff: Backoff) -> None:
        """Wait until the producer's writes to partitions have ended; usually they have already.

        Called before its next transaction: the end of that one would end whatever is left open.

        Raises:
            Unknown: a transaction is still open, or may be. The next claim quarantines the
                targets concerned.
        """
        waits = 0
        while last := {p: self._last[p] for p in partitions if p in self._last}:
            offsets = {p: write.offset for p, write in last.items()}
            waits += 1
            pause_s = grown_pause_s(waits, _VISIBLE_S, _VISIBLE_MAX_S)
            wait_s = max(0.0, min(pause_s, backoff.left_s))
            left = await self._stable.left(offsets, wait_s, hurry=True)
            # Our markers do not end writes under an earlier producer id.
            id = self._producer.id
            epochs = {p: last[p].epoch for p in left if last[p].producer_id == id}
            causes = await self._guard.left_open(self._producer, epochs) if epochs else {}
            for partition in last.keys() - causes.keys():
                self._last.pop(partition, None)
            if causes and backoff.left_s <= 0:
                cause = next(iter(causes.values()))
                raise Unknown(cause.message, cause)


def _cause(partition: Partition, state: ProducerState) -> Cause:
    name = "{}-{}".format(*partition)
    if state.first >= 0:
        message = (
            f"{name} did not receive the end marker of an earlier promotion transaction: records "
            f"from offset {state.first} on are open and block read_committed consumers. Nothing is "
            "written there until they are ended: see docs/runbooks/TxBrokerPromotionStalled.md"
        )
        return Cause(HANGING, message, *partition, passing=True)
    if state.code == Code.TOPIC_AUTHORIZATION_FAILED:
        message = (
            f"a transaction is open in {name}, and this proxy may not ask whether it is an earlier "
            "promotion transaction: grant it Read on the topic, or wait until the transaction ends"
        )
        return Cause("not_known", message, *partition, passing=True)
    why = describe(state.code)
    if state.code == Code.UNSUPPORTED_VERSION:
        why = "this Kafka does not support DescribeProducers: upgrade to Kafka 2.8 or newer"
    message = f"cannot verify that earlier promotion transactions in {name} have ended: {why}"
    return Cause("no_answer", message, *partition, passing=True)
