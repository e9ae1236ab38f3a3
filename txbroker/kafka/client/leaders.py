"""Confirm a partition's leader by the newest leader epoch among a majority of its replicas.

A broker that is cut off keeps leading by its own metadata, and reports an end of the log that lacks
records which its successor acknowledged. No request detects that at this broker alone.

But every acknowledged record was fetched by all in-sync replicas, and a follower needs the leader's
epoch to fetch. With `min.insync.replicas` over half of the replicas, as in txbroker's topics, any
majority holds one of these. So the newest epoch that a majority knows is at least that of every
record acknowledged before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any, NamedTuple

from txbroker.core.records import Partition
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client, KafkaRefused, NotSent
from txbroker.kafka.protocol.codes import Code
from txbroker.kafka.protocol.schemas import metadata

_CHANNEL = "leaders"
_REQUEST_TIMEOUT_S = 2.0
"""Short, because the caller plans nothing meanwhile."""
_TIMEOUT_S = 5.0
"""Maximum time for a quorum."""
_FEW = 2
"""With this few replicas one may be the only one in sync. Then any replica that answers counts:
with a majority of two, the loss of one broker would stop everything."""


class LeaderVote(NamedTuple):
    """A partition according to one broker."""

    epoch: int
    leader: int
    replicas: tuple[int, ...]
    code: int


async def confirm_leader(client: Client, topic: str, partition: int) -> int:
    """Return the broker that leads a partition according to a majority of replicas; cache it.

    Raises:
        KafkaRefused: the partition is unknown, or has no leader.
    """
    leader = (await confirm_leaders(client, [(topic, partition)]))[topic, partition]
    if isinstance(leader, KafkaUnavailable):
        raise leader
    return leader


async def confirm_leaders(
    client: Client, partitions: Collection[Partition]
) -> dict[Partition, int | KafkaUnavailable]:
    """Return the leaders of partitions according to majorities of replicas; cache them.

    The votes are no older than this call: records acknowledged before it are in the leaders' logs.

    Returns:
        For each partition its leader, or the error that `confirm_leader` would raise.
    """
    if not partitions:
        return {}
    quorum = LeaderQuorum(client, partitions)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await quorum.run()
    except KafkaUnavailable as error:
        return dict.fromkeys(partitions, error)
    except TimeoutError:
        pass  # the votes so far may suffice
    return {partition: quorum.leader(partition) for partition in partitions}


class LeaderQuorum:
    """Collects votes on the leaders of partitions, with one request to each broker."""

    def __init__(self, client: Client, partitions: Collection[Partition]) -> None:
        self._client = client
        self._timeout_s = min(_REQUEST_TIMEOUT_S, client.settings.request_timeout_s)
        self._partitions = partitions
        self._request = metadata(sorted({topic for topic, _ in partitions}))
        self._newest = {
            partition: LeaderVote(-2, -1, replicas, Code.NONE)
            for partition in partitions
            if (replicas := client.known_replicas(*partition))
        }
        self._asked: dict[int, asyncio.Task[Any]] = {}
        self._answered: set[int] = set()
        self._last: KafkaUnavailable = NotSent("too few replicas answer")

    async def run(self) -> None:
        """Ask until every partition has a majority, or no replica is left to ask."""
        replicas_known = len(self._newest) == len(self._partitions)
        if not replicas_known:
            await self._find_replicas()
        while open_votes := [v for v in self._newest.values() if not self._has_majority(v)]:
            for node in {
                node for vote in open_votes for node in vote.replicas
            } - self._asked.keys():
                request = self._client.ask(node, self._request, _CHANNEL, self._timeout_s)
                self._asked[node] = _uncancelled(request)
            in_flight = [task for task in self._asked.values() if not task.done()]
            if not in_flight:
                if not replicas_known:
                    return
                # The cached replicas may be outdated.
                replicas_known = False
                await self._find_replicas()
                continue
            await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
            for node, task in self._asked.items():
                if task.done() and node not in self._answered:
                    self._take_result(node, task)

    async def _find_replicas(self) -> None:
        """Ask any broker for the replicas. Its answer alone is no vote."""
        self._take(await self._client.ask_any(self._request, _CHANNEL, self._timeout_s))

    def leader(self, partition: Partition) -> int | KafkaUnavailable:
        """Return a partition's leader, or the reason why there is none."""
        vote = self._newest.get(partition)
        if vote is None or not vote.replicas:
            code = Code.NONE if vote is None else vote.code
            return KafkaRefused(code or Code.UNKNOWN_TOPIC_OR_PARTITION)
        answered = self._answered.intersection(vote.replicas)
        if not self._has_majority(vote) and not (answered and len(vote.replicas) <= _FEW):
            return self._last
        self._client.remember_leader(*partition, vote.leader, vote.replicas)
        return vote.leader if vote.leader >= 0 else KafkaRefused(Code.LEADER_NOT_AVAILABLE)

    def _has_majority(self, vote: LeaderVote) -> bool:
        answered = len(self._answered.intersection(vote.replicas))
        return answered > len(vote.replicas) // 2 or not vote.replicas

    def _take_result(self, node: int, task: asyncio.Task[Any]) -> None:
        try:
            self._take(task.result())
        except KafkaUnavailable as error:
            self._last = error
        else:
            self._answered.add(node)

    def _take(self, answer: Any) -> None:
        """Keep the newest vote on each partition."""
        votes: dict[Partition, LeaderVote] = {}
        errors: dict[str, int] = {}
        for error, topic, _id, _internal, partitions, *_ in answer.topics:
            errors[topic] = error
            for code, number, leader, epoch, replicas, *_ in partitions:
                votes[topic, number] = LeaderVote(epoch, leader, tuple(replicas), error or code)
        for partition in self._partitions:
            absent = LeaderVote(-1, -1, (), errors.get(partition[0], Code.NONE))
            vote = votes.get(partition, absent)
            newest = self._newest.get(partition)
            if newest is None or vote.epoch > newest.epoch:
                self._newest[partition] = vote


_running: set[asyncio.Task[Any]] = set()


def _uncancelled(request: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Let a request finish after the quorum is reached.

    Cancelled requests would pile up on the connection to a broker that hangs.
    """
    task = asyncio.create_task(request)
    _running.add(task)
    task.add_done_callback(_retrieve)
    return task


def _retrieve(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()
