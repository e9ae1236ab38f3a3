"""Several proxy processes on one Kafka under load, and the judge at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiohttp

from tests.faults.judge import Judge
from tests.kit.http_calls import error_of
from tests.kit.proxies import ProxyProcess
from tests.kit.readers import Along
from tests.kit.topic_reader import read_all
from tests.kit.until import DEADLINE_S, unique, until
from tests.kit.workload import Recorder, Shop, answering, work
from txbroker.errors import RequestError
from txbroker.sdk import Limits, Message, TransactionalProducer

PARTITIONS = 4
SESSION_S = 6.0
"""The shortest session timeout that brokers allow by default, seconds."""
SEED_VARIABLE = "TXBROKER_TEST_SEED"
WEB_LANES = 6

Disturb = Callable[["Fleet", Recorder, random.Random], Coroutine[Any, Any, None]]


class Fleet:
    """Several proxies of one installation."""

    def __init__(self, bootstrap: str, count: int, **settings: Any) -> None:
        prefix = unique("fleet")
        self.proxies = [
            ProxyProcess(
                bootstrap,
                instance=f"proxy-{number}",
                topic_prefix=prefix,
                partitions=PARTITIONS,
                session_timeout_s=SESSION_S,
                check_after_s=1.0,
                check_interval_s=1.0,
                **settings,
            )
            for number in range(count)
        ]

    @property
    def urls(self) -> list[str]:
        """Where they are."""
        return [proxy.url for proxy in self.proxies]

    async def start(self) -> None:
        """Start all of them and wait until every partition has an owner."""
        for proxy in self.proxies:
            await proxy.launch()
        await self.whole(self.proxies)

    async def whole(self, proxies: Sequence[ProxyProcess]) -> None:
        """Wait until these proxies are ready and own all partitions."""

        async def owned() -> bool:
            states = [await owned_by(proxy) for proxy in proxies]
            return all(await asyncio.gather(*[p.is_ready() for p in proxies])) and sorted(
                number for state in states for number in state
            ) == list(range(PARTITIONS))

        await until(owned)

    async def close(self) -> None:
        """Stop all of them, even if one fails; their output must be clean."""
        wrong: list[BaseException] = []
        for proxy in self.proxies:
            try:
                await proxy.close()
            except (AssertionError, TimeoutError) as error:
                wrong.append(error)
        if wrong:
            raise wrong[0]


async def owned_by(proxy: ProxyProcess) -> list[int]:
    """Return the partitions that a proxy owns; none if it does not answer."""
    try:
        _, answer = await proxy.request("GET", "/readyz")
    except (aiohttp.ClientError, TimeoutError):
        return []
    return [int(number) for number, text in answer["partitions"].items() if text == "owned"]


# --- load over plain HTTP --------------------------------------------------------------------


class Web:
    """A service without the SDK: each call goes to any proxy, and is retried until answered."""

    def __init__(self, name: str, urls: Sequence[str], topic: str, recorder: Recorder) -> None:
        self._name = name
        self._urls = urls
        self._topic = topic
        self._recorder = recorder

    async def run(self, count: int, fate: random.Random) -> None:
        """Run a number of transactions."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
            for number in range(count):
                with contextlib.suppress(RequestError):
                    await self._one(http, f"{self._name}/{number}", fate)

    async def _one(self, http: aiohttp.ClientSession, token: str, fate: random.Random) -> None:
        message = Message(
            self._topic, self._name.encode(), token.encode(), (("token", token.encode()),)
        )
        self._recorder.means(token, [message], business=False)
        body: dict[str, Any] = {
            "group": "web",
            "messages": [
                {
                    "topic": self._topic,
                    "key": self._name,
                    "value": token,
                    "headers": {"token": token},
                }
            ],
            "check_after_s": 600,
        }
        with self._recorder.call("prepare", token) as call:
            answer = await self._answer(http, "", body, fate)
            call.id = str(answer["id"])
        what = "rollback" if fate.random() < 0.2 else "commit"
        with self._recorder.call(what, token, call.id):
            await self._answer(http, f"/{call.id}/{what}", {"group": "web"}, fate)

    async def _answer(
        self, http: aiohttp.ClientSession, path: str, body: dict[str, Any], fate: random.Random
    ) -> dict[str, Any]:
        """Send a call to any proxy until one answers; the 503 of a prepare has its id."""
        end = time.monotonic() + DEADLINE_S
        while True:
            status, answer = 0, {}
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                url = f"{fate.choice(self._urls)}/v1/transactions{path}"
                async with http.post(url, json=body) as response:
                    status, answer = response.status, await response.json()
            if status in (200, 201):
                return dict(answer)
            if status:
                error = error_of(status, answer)
                if not error.retryable or time.monotonic() > end:
                    raise error
                if not path and "id" in error.details:
                    body["id"] = error.details["id"]
            await asyncio.sleep(0.05)


# --- load, trouble, judgement ----------------------------------------------------------------


async def reached(recorder: Recorder, finished: int) -> None:
    """Wait until a number of transactions are finished."""

    async def enough() -> bool:
        return recorder.finished >= finished

    await until(enough, 2 * DEADLINE_S)


async def judged(fleet: Fleet, shop: Shop, disturb: Disturb, transactions: int) -> Recorder:
    """Run load at all proxies during faults; the judge must find nothing, and all proxies must list
    the same transactions."""
    seed = int(os.environ.get(SEED_VARIABLE, random.randrange(1 << 32)))
    print(f"{SEED_VARIABLE}={seed}")
    first = fleet.proxies[0]
    topics = [await first.topic(3), await first.topic(1)]
    along = Along(first.bootstrap, topics)
    recorder = Recorder()
    check = answering(shop, recorder)
    limits = Limits(answer_timeout_s=3, heartbeat_s=3)
    async with contextlib.AsyncExitStack() as stack:
        producers = []
        for number, group in enumerate(("orders", "orders", "bills")):
            # Each begins at another proxy, and knows the others.
            urls = fleet.urls[number % len(fleet.urls) :] + fleet.urls
            producers.append(
                await stack.enter_async_context(
                    TransactionalProducer(
                        list(dict.fromkeys(urls)), group=group, check=check, limits=limits
                    )
                )
            )
        web = [
            Web(f"web-{number}", fleet.urls, topics[1], recorder).run(
                transactions // 20, random.Random(f"{seed}/web/{number}")
            )
            for number in range(WEB_LANES)
        ]
        disturbing = asyncio.create_task(disturb(fleet, recorder, random.Random(seed)))
        try:
            await asyncio.gather(
                work(
                    producers, shop, recorder, topics, seed=seed, lanes=40,
                    transactions=transactions,
                ),
                *web,
            )  # fmt: skip
            await disturbing
        finally:
            disturbing.cancel()
        await fleet.whole(fleet.proxies)
        await first.all_settled("orders")
        await first.all_settled("bills")
        # No client knows the id of a prepare stored without an answer. What is committed
        # is still on its way.
        for left in await first.unsettled("web"):
            if left["state"] != "committed":
                await first.act(left["id"], "rollback")
        await first.all_settled("web")
    lists = [sorted(t["id"] for t in await proxy.unsettled()) for proxy in fleet.proxies]
    assert all(found == lists[0] for found in lists)
    read = await asyncio.to_thread(read_all, first.bootstrap, first.prefix, topics)
    read.along = await asyncio.to_thread(along.end)
    judge = Judge(recorder.history, read, shop.rows())
    found = judge.judge()
    assert not found, "\n".join(map(str, found[:5]))
    assert lists[0] == sorted(judge.unsettled())
    assert recorder.finished == transactions
    assert len({record.header("txb-id") for record in read.targets}) > transactions / 2
    return recorder
