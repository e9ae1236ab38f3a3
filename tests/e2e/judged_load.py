"""Transactions under load while something goes wrong, and the judge's verdict."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tests.faults.judge import Judge, Topics
from tests.kit.proxies import ProxyProcess
from tests.kit.topic_reader import Along, read_all
from tests.kit.workload import Recorder, Shop, answering, work
from txbroker.sdk import Limits, TransactionalProducer


async def judged_load(
    world: ProxyProcess,
    shop: Shop,
    disturb: Callable[[Recorder], Coroutine[Any, Any, None]],
    *,
    groups: Sequence[str],
    seed: int,
    lanes: int,
    transactions: int,
    limits: Limits,
    urls: Sequence[str] = (),
    plain_topic: str = "",
) -> tuple[Recorder, Topics]:
    """Work while `disturb` runs, until all is settled; the judge must find nothing.

    Args:
        world: the proxy.
        shop: the business database.
        disturb: runs beside the work, which must survive it.
        groups: of each producer.
        seed, lanes, transactions, limits: of the work.
        urls: of the proxies that producers use; the default is `world`.
        plain_topic: to judge, too.
    """
    topics = [await world.topic(3), await world.topic(1)]
    along = Along(world.bootstrap, topics)
    recorder = Recorder()
    check = answering(shop, recorder)
    async with contextlib.AsyncExitStack() as stack:
        producers = [
            await stack.enter_async_context(
                TransactionalProducer(
                    list(urls) or [world.url], group=group, check=check, limits=limits
                )
            )
            for group in groups
        ]
        disturbing = asyncio.create_task(disturb(recorder))
        try:
            await work(
                producers, shop, recorder, topics, seed=seed, lanes=lanes, transactions=transactions
            )
            await disturbing
        finally:
            disturbing.cancel()
        await world.all_settled()
    judged = [*topics, plain_topic] if plain_topic else topics
    read = await asyncio.to_thread(read_all, world.bootstrap, world.prefix, judged)
    read.along = await asyncio.to_thread(along.end)
    found = Judge(recorder.history, read, shop.rows()).judge()
    assert not found, "\n".join(map(str, found[:5]))
    assert recorder.finished == transactions
    return recorder, read
