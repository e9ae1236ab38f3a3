"""Waiting for last stable offsets, on a client that answers as a test says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from txbroker.kafka.client import Client
from txbroker.kafka.visible import StableEnds


class Moved:
    """A client whose leaders have to be looked up, until the gate is open."""

    def __init__(self, ends: dict[tuple[str, int], int]) -> None:
        self.asked, self.found = asyncio.Event(), asyncio.Event()
        self._ends = ends

    async def leader(self, topic: str, partition: int) -> int:
        """Look the leader up."""
        self.asked.set()
        await self.found.wait()
        return 1

    async def ask(self, node: int, request: object, lane: str) -> Any:
        """Say where everything ends."""
        topics = [(topic, [(number, 0, -1, end)]) for (topic, number), end in self._ends.items()]
        return SimpleNamespace(topics=topics)


async def test_turns_that_come_while_a_leader_is_looked_up_are_seen_with_the_others() -> None:
    client = Moved({("t", 0): 10, ("t", 1): 10, ("t", 2): 10})
    stable = StableEnds(cast(Client, client))
    first = asyncio.create_task(stable.pass_by({("t", 0): 9, ("t", 1): 9}, 60.0))
    await client.asked.wait()
    second = asyncio.create_task(stable.pass_by({("t", 2): 9}, 60.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    client.found.set()
    async with asyncio.timeout(2.0):
        await asyncio.gather(first, second)
