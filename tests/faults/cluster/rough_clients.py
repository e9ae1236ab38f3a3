"""Clients over plain HTTP that repeat calls ten times, contradict themselves and send poison."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from tests.kit.http_calls import error_of
from tests.kit.workload import Recorder
from txbroker.errors import AlreadyDecided, RequestError
from txbroker.sdk import Message

CALL_S = 3.0
GIVE_UP_S = 90.0
_PAUSE_S = 0.2
TIMES = 10
SMALL_BYTES = 20_000
"""The largest message that the small topic takes."""

Json = dict[str, Any]


class Caller:
    """Sends calls to any proxy, and writes each of them down.

    Args:
        fate: which proxy is called.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        urls: Sequence[str],
        recorder: Recorder,
        fate: random.Random,
    ) -> None:
        self._http = http
        self._urls = list(urls)
        self._recorder = recorder
        self._fate = fate

    async def prepare(
        self, token: str, group: str, *topics: str, value: str = "", **fields: Any
    ) -> str:
        """Prepare a message for each topic, asking until it is answered; return the id, "" where
        it was refused or not answered."""
        messages = [
            Message(topic, token.encode(), (value or token).encode(), (("token", token.encode()),))
            for topic in topics
        ]
        self._recorder.means(token, messages, business=False)
        sent = [
            {"topic": m.topic, "key": token, "value": value or token, "headers": {"token": token}}
            for m in messages
        ]
        body = {"group": group, "messages": sent, "dedup_key": token, **fields}
        answer = await self._until_answered("prepare", token, "", body)
        return str(answer["id"]) if answer else ""

    async def decide(self, decision: str, token: str, id: str, group: str) -> None:
        """Repeat a call until it is answered."""
        await self._until_answered(decision, token, id, {"group": group})

    async def _until_answered(self, what: str, token: str, id: str, body: Json) -> Json | None:
        end = time.monotonic() + GIVE_UP_S
        while time.monotonic() < end:
            try:
                return await self.once(what, token, id, body)
            except RequestError as error:
                if not error.retryable:
                    return None
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(_PAUSE_S)
        return None

    async def once(self, what: str, token: str, id: str, body: Json) -> Json:
        """Send a call once.

        Raises:
            RequestError: that was the answer.
            ClientError, TimeoutError: there was none.
        """
        path = f"/v1/transactions/{id}/{what}" if id else "/v1/transactions"
        with self._recorder.call(what, token, id) as call:
            async with self._http.post(self._fate.choice(self._urls) + path, json=body) as response:
                answer = await response.json()
                if "error" in answer:
                    raise error_of(response.status, answer)
                call.id, call.state = str(answer["id"]), str(answer["state"])
                return dict(answer)


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
        """Run until stopped."""
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
        if id := await self._caller.prepare(token, "rough", self._topic):
            decision = self._fate.choice(["commit", "rollback"])
            await asyncio.gather(*[self._decide(decision, token, id) for _ in range(TIMES)])
            await self._caller.decide(decision, token, id, "rough")

    async def _both_at_once(self, token: str) -> None:
        if id := await self._caller.prepare(token, "rough", self._topic, self._small):
            both = self._fate.sample(["commit", "rollback"], 2)
            await asyncio.gather(*[self._decide(decision, token, id) for decision in both])
            await self._caller.decide(both[0], token, id, "rough")

    async def _the_contrary(self, token: str) -> None:
        if id := await self._caller.prepare(token, "rough", self._topic):
            first, second = self._fate.sample(["commit", "rollback"], 2)
            await self._caller.decide(first, token, id, "rough")
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
        """A topic that is not there."""
        await self._commit(token, (f"{self._topic}-not-there",), "lost")

    async def _commit(self, token: str, topics: Sequence[str], value: str) -> None:
        if id := await self._caller.prepare(token, "rough", *topics, value=value):
            await self._caller.decide("commit", token, id, "rough")

    async def _decide(self, decision: str, token: str, id: str) -> None:
        """Send a decision once, with any answer."""
        try:
            await self._caller.once(decision, token, id, {"group": "rough"})
        except (AlreadyDecided, aiohttp.ClientError, TimeoutError):
            pass
        except RequestError as error:
            if not error.retryable:
                raise
