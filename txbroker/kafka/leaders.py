"""Who leads a partition, by the word of most of its replicas.

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
from typing import Any, NamedTuple

from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client import Client, KafkaRefused, NotSent
from txbroker.kafka.codes import Code
from txbroker.kafka.wire import RightsRequest

_LANE = "leaders"


class LeadersRequest(RightsRequest):
    """Metadata of topics with the epochs of leaders, without rights; creates none."""

    def build(self, request_struct_class: Any) -> Any:
        """Return the request as it is written."""
        return request_struct_class(self._topics, False, False, False)


class _Word(NamedTuple):
    """What a broker says of a partition."""

    epoch: int
    leader: int
    replicas: tuple[int, ...]


async def confirm_leader(client: Client, topic: str, partition: int) -> int:
    """Return the broker that leads a partition as most of its replicas know it, and remember it.

    The answer is no older than this call: whatever was acknowledged before is in that broker's log.

    Raises:
        KafkaRefused: the partition is unknown, or has no leader.
        KafkaUnavailable: too few replicas answer.
    """
    newest = _word(await client.ask_any(LeadersRequest([topic]), _LANE), topic, partition)
    words: dict[int, _Word] = {}
    asked: dict[int, asyncio.Task[_Word]] = {}
    last: KafkaUnavailable = NotSent(f"too few replicas of {topic}-{partition} answer")
    try:
        while sum(node in words for node in newest.replicas) <= len(newest.replicas) // 2:
            for node in newest.replicas:
                if node not in asked:
                    asked[node] = asyncio.create_task(_ask(client, node, topic, partition))
            open_ = [task for node, task in asked.items() if not task.done()]
            if not open_:
                raise last
            await asyncio.wait(open_, return_when=asyncio.FIRST_COMPLETED)
            for node, task in asked.items():
                if not task.done() or node in words:
                    continue
                try:
                    words[node] = task.result()
                except KafkaUnavailable as error:
                    last = error
            newest = max([newest, *words.values()], key=lambda word: word.epoch)
    finally:
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)
    client.remember_leader(topic, partition, newest.leader)
    if newest.leader < 0:
        raise KafkaRefused(Code.LEADER_NOT_AVAILABLE)
    return newest.leader


async def _ask(client: Client, node: int, topic: str, partition: int) -> _Word:
    return _word(await client.ask(node, LeadersRequest([topic]), _LANE), topic, partition)


def _word(answer: Any, topic: str, partition: int) -> _Word:
    for error, name, _internal, partitions, *_ in answer.topics:
        if name != topic:
            continue
        for _error, number, leader, epoch, replicas, *_ in partitions:
            if number == partition:
                return _Word(epoch, leader, tuple(replicas))
        raise KafkaRefused(error or Code.UNKNOWN_TOPIC_OR_PARTITION)
    raise KafkaRefused(Code.UNKNOWN_TOPIC_OR_PARTITION)
