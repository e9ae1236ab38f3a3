"""Where many partitions end, asked with one request per leader."""

import asyncio
from collections.abc import Iterable

from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client, NotSent, Unanswered
from txbroker.kafka.protocol.codes import LEADER_MOVED, Code
from txbroker.kafka.protocol.packed import ListOffsetsV3
from txbroker.kafka.protocol.transactions import Partition

_LATEST = -1
READ_UNCOMMITTED, READ_COMMITTED = 0, 1


async def ends(
    client: Client, partitions: Iterable[Partition], isolation: int, lane: str
) -> dict[Partition, int]:
    """Return where partitions end: the high watermark or, READ_COMMITTED, the last stable offset.

    Partitions that do not answer at the moment are left out.
    """
    by_leader: dict[int, list[Partition]] = {}
    # As they are now: what is asked for may change while leaders are looked up.
    for partition in list(partitions):
        try:
            by_leader.setdefault(await client.leader(*partition), []).append(partition)
        except KafkaUnavailable:
            continue
    if len(by_leader) == 1:  # as a rule: no task has to be made for it
        ((leader, part),) = by_leader.items()
        return await _ask(client, leader, part, isolation, lane)
    answers = await asyncio.gather(
        *(_ask(client, leader, part, isolation, lane) for leader, part in by_leader.items())
    )
    return {partition: end for answer in answers for partition, end in answer.items()}


async def _ask(
    client: Client, leader: int, partitions: list[Partition], isolation: int, lane: str
) -> dict[Partition, int]:
    topics: dict[str, list[tuple[int, int]]] = {}
    for topic, number in partitions:
        topics.setdefault(topic, []).append((number, _LATEST))
    request = ListOffsetsV3(isolation, list(topics.items()))
    try:
        answer = await client.ask(leader, request, lane)
    except (NotSent, Unanswered):
        for partition in partitions:
            client.forget_leader(*partition)
        return {}
    found = {}
    for topic, entries in answer.topics:
        for number, code, _timestamp, offset in entries:
            if code == Code.NONE:
                found[topic, number] = offset
            elif code in LEADER_MOVED:
                client.forget_leader(topic, number)
    return found
