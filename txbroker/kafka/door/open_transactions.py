"""Whether earlier transactions of our producers have ended in a partition.

A coordinator that calls a transaction over may have left a partition out: Kafka 4.3.1 drops the
end of a transaction for a partition without leader (KAFKA-20734). Records that stayed open are then
ended by the next marker of their producer id, together with the records of a later transaction:
what was aborted becomes visible, or what was committed is taken back. So nothing is written to a
partition before its leader has said that none of our producer ids has a transaction open there.

Asked behind InitProducerId, the answer holds: every marker has been written by then or never will
be, and whatever a fenced producer still sends is refused unless its transaction is open already.

An end marker can also get lost between two transactions of one claim: see `UnconfirmedWrites`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from txbroker.core.records import Cause
from txbroker.door.protocols import PromotionTxnLost
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client, KafkaRefused
from txbroker.kafka.client.leaders import confirm_leaders
from txbroker.kafka.client.offsets import READ_COMMITTED, READ_UNCOMMITTED, ends
from txbroker.kafka.client.producer import Producer
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.kafka.protocol.codes import LEADER_MOVED, Code, describe
from txbroker.kafka.protocol.schemas import ProducersRequest
from txbroker.kafka.protocol.transactions import Partition
from txbroker.net.backoff import Backoff

HANGING = "hanging"
"""The code of the cause that only somebody's doing ends; all others pass."""

_STABLE_S, _PAUSE_S, _PAUSE_MAX_S = 0.2, 0.005, 0.05
"""Transactions of others take so long to end as a rule; nothing is planned meanwhile."""
_ANSWER_S = 2.0
"""A leader that takes longer to answer has not, seconds: nothing is planned meanwhile."""
_TOGETHER = 8
"""Partitions asked about in one request: a leader tells of every producer of a day, and a long
answer holds up the event loop while it is read."""
_SEEN_S, _SEEN_MAX_S = 0.02, 0.1
"""Readers come past a turn within so long as a rule, seconds: only then leaders are asked, and
again after twice the time."""


class ProducerState(NamedTuple):
    """What a leader says of a partition: an error code, where a transaction of ours that is open
    begins, -1 where none is, who says so, -1 if nobody does, and the newest epoch in which one of
    ours has written there, -1 where it knows none."""

    code: int
    first: int = -1
    leader: int = -1
    epoch: int = -1


class OpenTransactionGuard:
    """Where nothing that earlier producers with our ids have written is open.

    Args:
        client: asks the leaders.
        lane: names the connections.
        producers: of this claim; with a producer id each.
    """

    def __init__(self, client: Client, lane: str, producers: Sequence[Producer]) -> None:
        self._client = client
        self._lane = lane
        self._producers = producers
        self._proved: set[Partition] = set()
        # Who answered may have been deposed and not know it: only it may take the first batch.
        self._vouching_leader: dict[Partition, int] = {}
        for producer in producers:
            producer.vouching_leader = self._vouching_leader
        # Where those ended that may not be asked about, when they were met first.
        self._ends: dict[Partition, int] = {}

    def unverified(self, partitions: Iterable[Partition]) -> list[Partition]:
        """Return those of which it is not known yet, or not of who leads them now."""
        return [each for each in dict.fromkeys(partitions) if not self._holds(each)]

    def _holds(self, partition: Partition) -> bool:
        vouching_leader = self._vouching_leader.get(partition)
        return partition in self._proved and (
            vouching_leader is None or vouching_leader == self._client.known_leader(*partition)
        )

    async def left_open(
        self, producer: Producer, epochs: Mapping[Partition, int]
    ) -> dict[Partition, Cause]:
        """Ask whether what one producer wrote to partitions has ended there, between two of its
        transactions; return why it must not write to some now.

        Args:
            epochs: in which epoch it has written to each. A leader that does not know of it lacks
                what was written: it was deposed, and what it says of open transactions is old.
        """
        causes = {}
        for partition, said in (await self._told(epochs, {producer.id})).items():
            if said.code == Code.NONE and said.first < 0 and said.epoch < epochs[partition]:
                said = said._replace(code=Code.NOT_LEADER)
                self._client.forget_leader(*partition)
            if said.code == Code.NONE and said.first < 0:
                self._vouching_leader[partition] = said.leader
            else:
                causes[partition] = _cause(partition, said)
        return causes

    async def verify_no_open_txn(self, partitions: Iterable[Partition]) -> list[Cause]:
        """Ask about partitions; return why some must not be written now. Each is asked about until
        it is proved once, as only our own writes come after that."""
        ours = {producer.id for producer in self._producers}
        told = await self._told(self.unverified(partitions), ours)
        forbidden = {
            each: said
            for each, said in told.items()
            if said.code == Code.TOPIC_AUTHORIZATION_FAILED
        }
        stable = await self._stable(forbidden)
        causes = []
        for partition, said in told.items():
            if (said.code == Code.NONE and said.first < 0) or partition in stable:
                self._proved.add(partition)
                self._vouching_leader[partition] = said.leader
            else:
                causes.append(_cause(partition, said))
        return causes

    async def _told(
        self, partitions: Iterable[Partition], ours: Collection[int]
    ) -> dict[Partition, ProducerState]:
        told: dict[Partition, ProducerState] = {}
        by_leader: dict[int, list[Partition]] = {}
        # One that was deposed and does not know it would know nothing of later turns, either.
        for partition, leader in (await confirm_leaders(self._client, list(partitions))).items():
            if isinstance(leader, KafkaRefused):
                told[partition] = ProducerState(leader.code)
            elif isinstance(leader, KafkaUnavailable):
                told[partition] = ProducerState(Code.NETWORK_EXCEPTION)
            else:
                by_leader.setdefault(leader, []).append(partition)
        for answer in await asyncio.gather(
            *(self._ask_all(leader, led, ours) for leader, led in by_leader.items())
        ):
            told.update(answer)
        return told

    async def _ask_all(
        self, leader: int, partitions: Sequence[Partition], ours: Collection[int]
    ) -> dict[Partition, ProducerState]:
        told: dict[Partition, ProducerState] = {}
        silent = False
        for first in range(0, len(partitions), _TOGETHER):
            some = partitions[first : first + _TOGETHER]
            if silent:
                # Each question would take as long again.
                told.update(dict.fromkeys(some, ProducerState(Code.NETWORK_EXCEPTION)))
                continue
            answer = await self._ask(leader, some, ours)
            silent = answer[some[0]].code == Code.NETWORK_EXCEPTION
            told.update(answer)
        return told

    async def _ask(
        self, leader: int, partitions: Sequence[Partition], ours: Collection[int]
    ) -> dict[Partition, ProducerState]:
        topics: dict[str, list[int]] = {}
        for topic, number in partitions:
            topics.setdefault(topic, []).append(number)
        # What the leader leaves out, it has not denied.
        told = dict.fromkeys(partitions, ProducerState(Code.UNKNOWN))
        try:
            answer = await self._client.ask(
                leader, ProducersRequest(topics), f"{self._lane}/told", _ANSWER_S
            )
        except KafkaRefused as error:
            return dict.fromkeys(partitions, ProducerState(error.code))
        except KafkaUnavailable:
            for partition in partitions:
                self._client.forget_leader(*partition)
            return dict.fromkeys(partitions, ProducerState(Code.NETWORK_EXCEPTION))
        for topic, parts, _ in answer.topics:
            for number, code, _message, producers, _ in parts:
                if code in LEADER_MOVED:
                    self._client.forget_leader(topic, number)
                known = [one for one in producers or () if one[0] in ours]
                open_at = [one[5] for one in known if one[5] >= 0]
                epoch = max((one[1] for one in known), default=-1)
                told[topic, number] = ProducerState(code, min(open_at, default=-1), leader, epoch)
        return told

    async def _stable(self, told: Mapping[Partition, ProducerState]) -> set[Partition]:
        """Return those whose end, as it was when first asked for, readers have come past: nobody's
        transaction from before is open there that was replicated. It takes no right but Describe.
        """
        if told:
            now = await ends(self._client, told, READ_UNCOMMITTED, self._lane)
            # A topic that was made anew ends sooner than the one that was met.
            self._ends |= {each: min(end, self._ends.get(each, end)) for each, end in now.items()}
        left = {each: self._ends[each] for each in told if each in self._ends}
        passed: set[Partition] = set()
        backoff = Backoff(_STABLE_S, _PAUSE_S, _PAUSE_MAX_S)
        while left:
            found = await ends(self._client, left, READ_COMMITTED, self._lane)
            passed.update(each for each, end in left.items() if found.get(each, -1) >= end)
            left = {each: end for each, end in left.items() if each not in passed}
            if left and not await backoff.pause():
                break
        # Only of the leader that takes the first batch.
        return {each for each in passed if self._client.known_leader(*each) == told[each].leader}


class _Written(NamedTuple):
    """The last record of a turn in a partition, and who wrote it."""

    offset: int
    producer_id: int
    epoch: int


class UnconfirmedWrites:
    """Where one producer has written in this claim what readers were not seen to have come past:
    its end may have been lost there.

    Args:
        producer: of this claim.
        ended: asks the leaders.
        stable: waits for readers.
    """

    def __init__(self, producer: Producer, ended: OpenTransactionGuard, stable: StableEnds) -> None:
        self._producer = producer
        self._ended = ended
        self._stable = stable
        self._last: dict[Partition, _Written] = {}

    def wrote(self, last: Mapping[Partition, int]) -> None:
        """A turn was written and not ended yet; `last` has its last offset of each partition."""
        id, epoch = self._producer.id, self._producer.epoch
        self._last |= {each: _Written(offset, id, epoch) for each, offset in last.items()}

    def seen(self, last: Mapping[Partition, int]) -> None:
        """Readers have come past a turn."""
        for partition, offset in last.items():
            written = self._last.get(partition)
            if written is not None and written.offset == offset:
                del self._last[partition]
        if not self._last:
            self._producer.seen()

    async def over(self, partitions: Collection[Partition], backoff: Backoff) -> None:
        """Return once all that the producer wrote to partitions has ended there. As a rule it is
        known, and nothing is asked. Called before they are put into its next transaction: whatever
        becomes of that one would become of what is left open, too.

        Raises:
            PromotionTxnLost: it is open still, or not known; a claim keeps off what is open.
        """
        pause_s = _SEEN_S
        while last := {each: self._last[each] for each in partitions if each in self._last}:
            offsets = {each: written.offset for each, written in last.items()}
            wait_s = max(0.0, min(pause_s, backoff.left_s))
            left = await self._stable.left(offsets, wait_s, hurry=True)
            # No end of ours ends what was written under an earlier producer id.
            id = self._producer.id
            epochs = {each: last[each].epoch for each in left if last[each].producer_id == id}
            causes = await self._ended.left_open(self._producer, epochs) if epochs else {}
            for partition in last.keys() - causes.keys():
                self._last.pop(partition, None)
            if causes and backoff.left_s <= 0:
                cause = next(iter(causes.values()))
                raise PromotionTxnLost(cause.message, cause)
            pause_s = min(pause_s * 2, _SEEN_MAX_S)


def _cause(partition: Partition, said: ProducerState) -> Cause:
    topic, number = partition
    name = f"{topic}-{number}"
    if said.first >= 0:
        return Cause(
            HANGING,
            f"{name} was never told of the end of an earlier turn: its records "
            f"from offset {said.first} on are open, and keep read_committed consumers waiting. "
            "Nothing is written there until they are ended: see docs/runbooks/"
            "TxBrokerPromotionStalled.md",
            topic,
            number,
            passing=True,
        )
    if said.code == Code.TOPIC_AUTHORIZATION_FAILED:
        return Cause(
            "not_known",
            f"somebody's transaction is open in {name}, and whether it is an earlier turn of ours "
            "this proxy may not ask: grant it Read on the topic, or wait until it ends",
            topic,
            number,
            passing=True,
        )
    why = describe(said.code)
    if said.code == Code.UNSUPPORTED_VERSION:
        why = "this Kafka does not tell of producers (DescribeProducers), as Kafka has since 2.8"
    sentence = f"{name} does not say whether earlier turns have ended: {why}"
    return Cause("no_answer", sentence, topic, number, passing=True)
