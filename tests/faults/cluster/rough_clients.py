"""Clients over plain HTTP that repeat calls ten times, contradict themselves and send poison."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence

import aiohttp

from tests.kit.http_calls import Caller, attempted
from txbroker.errors import AlreadyDecided, RequestError

CALL_S = 3.0
TIMES = 10
SMALL_BYTES = 20_000
"""The largest message that the small topic takes."""


class Rough:
    """One client that does all that a decent one does not.

    Args:
        topics: of the installation: an ordinary one, and one that takes only small messages.
    """

    def __init__(
        self, name: str, caller: Caller, topics: tuple[str, str], fate: random.Random
    ) -> None:
        self._name = name
        self._caller = caller
        self._topic, self._small = topics
        self._fate = fate

    async def run(self, over: asyncio.Event) -> None:
        ways = (
            self._ten_times,
            self._both_at_once,
            self._the_contrary,
            self._too_large,
            self._large_together,
            self._nowhere,
        )
        for number in itertools.count():
            if over.is_set():
                return
            await self._fate.choice(ways)(f"{self._name}/{number}")
            await asyncio.sleep(self._fate.uniform(0.05, 0.5))

    async def _ten_times(self, token: str) -> None:
        """The same decision from ten connections to all proxies."""
        if id := await self._prepare(token, self._topic):
            decision = self._fate.choice(["commit", "rollback"])
            await asyncio.gather(*[self._decide(decision, token, id) for _ in range(TIMES)])
            await self._settle(decision, token, id)

    async def _both_at_once(self, token: str) -> None:
        if id := await self._prepare(token, self._topic, self._small):
            both = self._fate.sample(["commit", "rollback"], 2)
            await asyncio.gather(*[self._decide(decision, token, id) for decision in both])
            await self._settle(both[0], token, id)

    async def _the_contrary(self, token: str) -> None:
        if id := await self._prepare(token, self._topic):
            first, second = self._fate.sample(["commit", "rollback"], 2)
            await self._settle(first, token, id)
            await self._decide(second, token, id)

    async def _too_large(self, token: str) -> None:
        """One message that its target takes not, with one that it would take, and a good one of
        the same key after it."""
        await self._commit(token, (self._small, self._topic), "x" * SMALL_BYTES)
        await self._commit(f"{token}/good", (self._small,), "good")

    async def _large_together(self, token: str) -> None:
        """Each message fits, all together do not, as one batch."""
        await self._commit(token, (self._small,) * 5, "x" * (SMALL_BYTES // 3))
        await self._commit(f"{token}/good", (self._small,), "good")

    async def _nowhere(self, token: str) -> None:
        await self._commit(token, (f"{self._topic}-not-there",), "lost")

    async def _commit(self, token: str, topics: Sequence[str], value: str) -> None:
        if id := await self._prepare(token, *topics, value=value):
            await self._settle("commit", token, id)

    async def _prepare(self, token: str, *topics: str, value: str = "") -> str | None:
        call = self._caller.prepare(token, "rough", *topics, value=value, dedup_key=token)
        return await attempted(call)

    async def _settle(self, decision: str, token: str, id: str) -> None:
        await attempted(self._caller.decide(decision, token, id, "rough"))

    async def _decide(self, decision: str, token: str, id: str) -> None:
        """Send a decision once, with any answer."""
        try:
            await self._caller.once(decision, token, id, {"group": "rough"})
        except (AlreadyDecided, aiohttp.ClientError, TimeoutError):
            pass
        except RequestError as error:
            if not error.retryable:
                raise
