"""The cache of facts about target topics."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from txbroker.door.protocols import TargetFacts
from txbroker.kafka.client.client import PartitionFacts, TopicFacts
from txbroker.kafka.door.targets import KafkaTargets


class SlowAdmin:
    """Answers when it is let; counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers = [asyncio.Event(), asyncio.Event()]

    async def topics(self, topics: list[str]) -> dict[str, TopicFacts]:
        self.asked += 1
        partitions = self.asked
        await self.answers[self.asked - 1].wait()
        return {
            t: TopicFacts(0, {p: PartitionFacts(1, 1, 1) for p in range(partitions)})
            for t in topics
        }

    async def configs(self, topics: list[str]) -> dict[str, dict[str, str]]:
        return {}


def targets(admin: SlowAdmin) -> KafkaTargets:
    client: Any = SimpleNamespace(settings=SimpleNamespace(facts_ttl_s=60.0))
    kafka: Any = admin
    return KafkaTargets(client, kafka)


async def test_concurrent_examinations_share_one_request() -> None:
    admin = SlowAdmin()
    facts = targets(admin)
    crowd = [asyncio.ensure_future(facts.examine("orders")) for _ in range(50)]
    await asyncio.sleep(0)
    crowd[0].cancel()
    admin.answers[0].set()
    found = await asyncio.gather(*crowd, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(each, TargetFacts) for each in found[1:])
    assert admin.asked == 1
    assert facts.known("orders") == found[1]


async def test_request_before_change_does_not_answer_later_calls() -> None:
    admin = SlowAdmin()
    facts = targets(admin)
    before = asyncio.ensure_future(facts.examine("orders"))
    while admin.asked < 1:
        await asyncio.sleep(0)
    facts.forget("orders")
    after = asyncio.ensure_future(facts.examine("orders"))
    while admin.asked < 2:
        await asyncio.sleep(0)
    admin.answers[1].set()
    newer = await after
    admin.answers[0].set()
    older = await before
    assert [each.partitions for each in (older, newer) if isinstance(each, TargetFacts)] == [1, 2]
    assert facts.known("orders") == newer
