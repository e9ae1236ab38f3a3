"""Several proxy processes on one Kafka under load, and the judge at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from tests.faults.judge import Judge
from tests.kit.http_calls import Caller, attempted, calling
from tests.kit.proxies import ProxyProcess
from tests.kit.topic_reader import Along, read_all, read_topics
from tests.kit.until import DEADLINE_S, unique, until
from tests.kit.workload import Recorder, Shop, answering, work
from txbroker.errors import OwnerUnavailable
from txbroker.sdk import Limits, TransactionalProducer

PARTITIONS = 4
SESSION_S = 6.0
"""The shortest session timeout that brokers allow by default, seconds."""
SEED_VARIABLE = "TXBROKER_TEST_SEED"
WEB_LANES = 6
_PAGE = 37

Disturb = Callable[["Fleet", Recorder, random.Random], Coroutine[Any, Any, None]]


class Fleet:
    """Several proxies of one installation, which run inside `async with`; each reaches Kafka at
    `bootstrap` or at its own one of `addresses`."""

    def __init__(
        self, bootstrap: str, count: int, addresses: Sequence[str] = (), **settings: Any
    ) -> None:
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
                **({"kafka": addresses[number]} if addresses else {}),
                **settings,
            )
            for number in range(count)
        ]

    @property
    def urls(self) -> list[str]:
        return [proxy.url for proxy in self.proxies]

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
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

    async def taken_over(self, by: ProxyProcess) -> None:
        """Wait until a proxy owns all partitions."""

        async def taken() -> bool:
            return len(await owned_by(by)) == PARTITIONS

        await until(taken)

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


async def transact(caller: Caller, token: str, topic: str, key: str, fate: random.Random) -> None:
    id = await caller.prepare(token, "web", topic, key=key, check_after_s=600)
    await caller.decide("rollback" if fate.random() < 0.2 else "commit", token, id, "web")


async def web_load(
    name: str,
    urls: Sequence[str],
    topic: str,
    recorder: Recorder,
    fate: random.Random,
    *,
    count: int = sys.maxsize,
    over: asyncio.Event | None = None,
    timeout_s: float = 5.0,
) -> None:
    """Run a number of transactions over plain HTTP, one after the other, or until `over`."""
    async with calling(urls, recorder, fate, timeout_s) as caller:
        for number in range(count):
            if over is not None and over.is_set():
                return
            await attempted(transact(caller, f"{name}/{number}", topic, name, fate))


# --- load, trouble, judgement ----------------------------------------------------------------


async def reached(recorder: Recorder, finished: int) -> None:
    await until(lambda: recorder.finished >= finished, 2 * DEADLINE_S)


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
            web_load(
                f"web-{number}",
                fleet.urls,
                topics[1],
                recorder,
                random.Random(f"{seed}/web/{number}"),
                count=transactions // 20,
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


# --- the topics, compared with the answers of the proxies --------------------------------------


async def listed(proxy: ProxyProcess) -> dict[str, str]:
    """Return the state of everything that one proxy lists as not settled, page by page.

    A list that fails with `owner_unavailable` is read again: a shorter one is never an answer.
    """

    async def whole() -> list[dict[str, str]] | None:
        found: list[dict[str, str]] = []
        cursor = ""
        try:
            while True:
                page = await proxy.call("GET", f"/v1/transactions?limit={_PAGE}{cursor}")
                found.append({t["id"]: t["state"] for t in page["transactions"]})
                if page["next_cursor"] is None:
                    return found
                cursor = f"&cursor={quote(page['next_cursor'])}"
        except OwnerUnavailable:
            return None

    pages = await until(whole)
    together = {id: state for page in pages for id, state in page.items()}
    assert len(together) == sum(map(len, pages)), "listed twice"
    return together


async def claims(proxy: ProxyProcess) -> Counter[int]:
    """Return how often each partition was claimed so far, as far as compaction has left it."""
    names = [f"{proxy.prefix}.checkpoint"]
    found = await asyncio.to_thread(read_topics, proxy.bootstrap, names)
    return Counter(record.partition for record in found if record.key == b"claim")


async def convict(
    fleet: Fleet, recorder: Recorder, topics: Sequence[str], shop: Shop | None = None
) -> Judge:
    """Judge an installation at rest: only undecided transactions may be left, and every proxy must
    list exactly those in the topics."""
    first = fleet.proxies[0]
    read = await asyncio.to_thread(read_all, first.bootstrap, first.prefix, topics)
    judge = Judge(recorder.history, read, shop.rows() if shop else (), settled=False)
    found = judge.judge()
    assert not found, "\n".join(map(str, found[:5]))
    held = judge.unsettled()
    assert "committed" not in held.values(), "committed, neither visible nor refused"
    for proxy in fleet.proxies:
        assert await listed(proxy) == held
    return judge
