"""Whether earlier transactions of our producers have ended in a partition.

A coordinator that calls a transaction over may have left a partition out: Kafka 4.3.1 drops the
end of a transaction for a partition without leader (KAFKA-20734). Records that stayed open are then
ended by the next marker of their producer id, together with the records of a later transaction:
what was aborted becomes visible, or what was committed is taken back. So nothing is written to a
partition before its leader has said that none of our producer ids has a transaction open there.

Asked behind InitProducerId, the answer holds: every marker has been written by then or never will
be, and whatever a fenced producer still sends is refused unless its transaction is open already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from txbroker.core.records import Cause
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client import Client, KafkaRefused, Patience
from txbroker.kafka.codes import LEADER_MOVED, Code, describe
from txbroker.kafka.offsets import READ_COMMITTED, READ_UNCOMMITTED, ends
from txbroker.kafka.producer import Producer
from txbroker.kafka.transactions import Partition
from txbroker.kafka.wire import ProducersRequest

HANGING = "hanging"
"""The code of the cause that only somebody's doing ends; all others pass."""

_STABLE_S, _PAUSE_S, _PAUSE_MAX_S = 0.2, 0.005, 0.05
"""Transactions of others take so long to end as a rule; nothing is planned meanwhile."""


class _Told(NamedTuple):
    """What a leader says of a partition: an error code, where a transaction of ours that is open
    begins, -1 where none is, and who says so."""

    code: int
    first: int = -1
    leader: int = -1


class Ended:
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
        self._told_by: dict[Partition, int] = {}
        for producer in producers:
            producer.told_by = self._told_by
        # Where those ended that may not be asked about, when they were met first.
        self._ends: dict[Partition, int] = {}

    def unproved(self, partitions: Iterable[Partition]) -> list[Partition]:
        """Return those of which it is not known yet."""
        return [each for each in dict.fromkeys(partitions) if each not in self._proved]

    async def prove(self, partitions: Iterable[Partition]) -> list[Cause]:
        """Ask about partitions; return why some must not be written now. Each is asked about until
        it is proved once, as only our own writes come after that."""
        told = await self._told(self.unproved(partitions))
        forbidden = [
            each for each, said in told.items() if said.code == Code.TOPIC_AUTHORIZATION_FAILED
        ]
        stable = await self._stable(forbidden)
        causes = []
        for partition, said in told.items():
            if said.code == Code.NONE and said.first < 0:
                self._proved.add(partition)
                self._told_by[partition] = said.leader
            elif partition in stable:
                self._proved.add(partition)
            else:
                causes.append(_cause(partition, said))
        return causes

    async def _told(self, partitions: Iterable[Partition]) -> dict[Partition, _Told]:
        told: dict[Partition, _Told] = {}
        by_leader: dict[int, list[Partition]] = {}
        for partition in partitions:
            try:
                by_leader.setdefault(await self._client.leader(*partition), []).append(partition)
            except KafkaRefused as error:
                told[partition] = _Told(error.code)
            except KafkaUnavailable:
                told[partition] = _Told(Code.NETWORK_EXCEPTION)
        for answer in await asyncio.gather(
            *(self._ask(leader, led) for leader, led in by_leader.items())
        ):
            told.update(answer)
        return told

    async def _ask(self, leader: int, partitions: Sequence[Partition]) -> dict[Partition, _Told]:
        topics: dict[str, list[int]] = {}
        for topic, number in partitions:
            topics.setdefault(topic, []).append(number)
        # What the leader leaves out, it has not denied.
        told = dict.fromkeys(partitions, _Told(Code.UNKNOWN))
        try:
            answer = await self._client.ask(leader, ProducersRequest(topics), self._lane)
        except KafkaUnavailable:
            for partition in partitions:
                self._client.forget_leader(*partition)
            return dict.fromkeys(partitions, _Told(Code.NETWORK_EXCEPTION))
        ours = {producer.id for producer in self._producers}
        for topic, parts, _ in answer.topics:
            for number, code, _message, producers, _ in parts:
                if code in LEADER_MOVED:
                    self._client.forget_leader(topic, number)
                open_at = [one[5] for one in producers or () if one[0] in ours and one[5] >= 0]
                told[topic, number] = _Told(code, min(open_at, default=-1), leader)
        return told

    async def _stable(self, partitions: Sequence[Partition]) -> set[Partition]:
        """Return those whose end, as it was when first asked for, readers have come past: nobody's
        transaction from before is open there. That takes no right beyond Describe."""
        new = [each for each in partitions if each not in self._ends]
        if new:
            self._ends.update(await ends(self._client, new, READ_UNCOMMITTED, self._lane))
        left = {each: self._ends[each] for each in partitions if each in self._ends}
        passed: set[Partition] = set()
        patience = Patience(_STABLE_S, _PAUSE_S, _PAUSE_MAX_S)
        while left:
            found = await ends(self._client, left, READ_COMMITTED, self._lane)
            passed.update(each for each, end in left.items() if found.get(each, -1) >= end)
            left = {each: end for each, end in left.items() if each not in passed}
            if left and not await patience.pause():
                break
        return passed


def _cause(partition: Partition, said: _Told) -> Cause:
    topic, number = partition
    name = f"{topic}-{number}"
    if said.first >= 0:
        return Cause(
            HANGING,
            f"{name} was never told of the end of a turn that an earlier claim began: its records "
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
    sentence = f"{name} does not say whether earlier turns have ended: {describe(said.code)}"
    return Cause("no_answer", sentence, topic, number, passing=True)
