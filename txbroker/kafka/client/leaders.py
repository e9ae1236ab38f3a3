"""Who leads partitions, by the word of most of their replicas.

A broker that is cut off from the others goes on leading what it led, as far as it knows: it tells
so to whoever asks it, and says where its log ends, which is not where the leader after it has
acknowledged records. No request of Kafka's protocol finds that out at the broker itself.

What all in-sync replicas have acknowledged, though, is known to brokers that know the epoch of the
leader it was written to: each follower needs that epoch to fetch. Where more replicas have to be in
sync than may be missing (`min.insync.replicas` is over half of the replicas, as in the topics that
txbroker makes), any majority of the replicas holds one of them. So a majority is asked, and the
newest epoch that one of it tells is at least that of every record acknowledged before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any, NamedTuple

from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client, KafkaRefused, NotSent
from txbroker.kafka.protocol.codes import Code
from txbroker.kafka.protocol.schemas import RightsRequest
from txbroker.kafka.protocol.transactions import Partition

_LANE = "leaders"
_ANSWER_S = 2.0
"""A broker that takes longer to answer has not, seconds: nothing is planned meanwhile."""
_ALL_S = 5.0
"""So long it takes at most until it is known, or known that nobody tells, seconds."""
_FEW = 2
"""Of so few replicas one alone may be in sync while the others are away: then who answers counts,
or the loss of any broker would stop everything."""


class LeadersRequest(RightsRequest):
    """Metadata of topics with the epochs of leaders, without rights; creates none."""

    def build(self, request_struct_class: Any) -> Any:
        """Return the request as it is written."""
        return request_struct_class(self._topics, False, False, False)


class LeaderVote(NamedTuple):
    """What a broker says of a partition."""

    epoch: int
    leader: int
    replicas: tuple[int, ...]
    code: int


async def confirm_leader(client: Client, topic: str, partition: int) -> int:
    """Return the broker that leads a partition as most of its replicas know it, and remember it.

    Raises:
        KafkaRefused: the partition is unknown, or has no leader.
        KafkaUnavailable: too few replicas answer.
    """
    leader = (await confirm_leaders(client, [(topic, partition)]))[topic, partition]
    if isinstance(leader, KafkaUnavailable):
        raise leader
    return leader


async def confirm_leaders(
    client: Client, partitions: Collection[Partition]
) -> dict[Partition, int | KafkaUnavailable]:
    """Return the brokers that lead partitions as most of their replicas know it, and remember them.

    The answer is no older than this call: what was acknowledged before is in those brokers' logs.

    Returns:
        Of each its leader, or why there is none: as `confirm_leader` raises it.
    """
    if not partitions:
        return {}
    asking = LeaderQuorum(client, partitions)
    try:
        async with asyncio.timeout(_ALL_S):
            await asking.run()
    except KafkaUnavailable as error:
        return dict.fromkeys(partitions, error)
    except TimeoutError:
        pass  # What is known by now may do.
    return {partition: asking.found(partition) for partition in partitions}


class LeaderQuorum:
    """One question to the replicas of some partitions, each broker asked once about all."""

    def __init__(self, client: Client, partitions: Collection[Partition]) -> None:
        self._client = client
        self._answer_s = min(_ANSWER_S, client.settings.request_timeout_s)
        self._partitions = partitions
        self._request = LeadersRequest(sorted({topic for topic, _ in partitions}))
        self._newest = {
            partition: LeaderVote(-2, -1, replicas, Code.NONE)
            for partition in partitions
            if (replicas := client.known_replicas(*partition))
        }
        self._asked: dict[int, asyncio.Task[Any]] = {}
        self._answered: set[int] = set()
        self._last: KafkaUnavailable = NotSent("too few replicas answer")

    async def run(self) -> None:
        """Ask until most replicas of all partitions have answered, or none is left to ask."""
        whoever = len(self._newest) < len(self._partitions)
        if whoever:
            await self._ask_whoever()
        while unsure := [p for p, word in self._newest.items() if not self._is_sure(word)]:
            for partition in unsure:
                for node in self._newest[partition].replicas:
                    if node not in self._asked:
                        asked = self._client.ask(node, self._request, _LANE, self._answer_s)
                        self._asked[node] = _in_its_own_time(asked)
            open_ = [task for task in self._asked.values() if not task.done()]
            if not open_:
                if whoever:
                    return
                # Other brokers may hold them by now than when they were remembered.
                whoever = True
                await self._ask_whoever()
                continue
            await asyncio.wait(open_, return_when=asyncio.FIRST_COMPLETED)
            for node, task in self._asked.items():
                if task.done() and node not in self._answered:
                    self._note(node, task)

    async def _ask_whoever(self) -> None:
        """Hear from any broker which the replicas are; its word alone counts for nothing."""
        self._take(await self._client.ask_any(self._request, _LANE, self._answer_s))

    def found(self, partition: Partition) -> int | KafkaUnavailable:
        """Return a partition's leader, or why there is none."""
        word = self._newest.get(partition)
        if word is None or not word.replicas:
            code = Code.NONE if word is None else word.code
            return KafkaRefused(code or Code.UNKNOWN_TOPIC_OR_PARTITION)
        answered = self._answered.intersection(word.replicas)
        if not self._is_sure(word) and not (answered and len(word.replicas) <= _FEW):
            return self._last
        self._client.remember_leader(*partition, word.leader, word.replicas)
        return word.leader if word.leader >= 0 else KafkaRefused(Code.LEADER_NOT_AVAILABLE)

    def _is_sure(self, word: LeaderVote) -> bool:
        return len(self._answered.intersection(word.replicas)) > len(word.replicas) // 2 or not (
            word.replicas
        )

    def _note(self, node: int, task: asyncio.Task[Any]) -> None:
        try:
            self._take(task.result())
        except KafkaUnavailable as error:
            self._last = error
        else:
            self._answered.add(node)

    def _take(self, answer: Any) -> None:
        """Keep the newest word of each partition."""
        told: dict[Partition, LeaderVote] = {}
        refused: dict[str, int] = {}
        for error, topic, _internal, partitions, *_ in answer.topics:
            refused[topic] = error
            for code, number, leader, epoch, replicas, *_ in partitions:
                told[topic, number] = LeaderVote(epoch, leader, tuple(replicas), error or code)
        for partition in self._partitions:
            word = told.get(partition, LeaderVote(-1, -1, (), refused.get(partition[0], Code.NONE)))
            newest = self._newest.get(partition)
            if newest is None or word.epoch > newest.epoch:
                self._newest[partition] = word


_late: set[asyncio.Task[Any]] = set()


def _in_its_own_time(asked: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Let a question go on behind the answer of others: one that is cut short would leave a
    connection on which a broker that hangs is asked more and more."""
    task = asyncio.create_task(asked)
    _late.add(task)
    task.add_done_callback(_over)
    return task


def _over(task: asyncio.Task[Any]) -> None:
    _late.discard(task)
    if not task.cancelled():
        task.exception()
