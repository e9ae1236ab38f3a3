"""Steady load on a real proxy that is killed now and then, while an audit reads the topics."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence

from tests.kit.proxies import ProxyProcess
from tests.kit.until import until
from tests.kit.workload import LocalFailure, Recorder, Shop, answering
from txbroker.errors import RequestError
from txbroker.sdk import Limits, Message, Rollback, TransactionalProducer

LANES = 200
BEHIND_S = 15.0
"""A lane makes up for as much, so that the rate is kept though the proxy is away at times."""


class Load:
    """A business with a row for each transaction that it means to commit.

    Of twenty transactions two are rolled back, one fails before its row is written and one after:
    those two are left to check-backs.

    Args:
        world: the proxy.
        shop: the business database.
        topics: where messages go.
        rate: transactions a second.
        lives_s: for how long the proxy lives, from and to.

    Attributes:
        finished: transactions so far, without calls that failed.
        kills: of the proxy, so far.
    """

    def __init__(
        self, world: ProxyProcess, shop: Shop, topics: Sequence[str], rate: float,
        lives_s: tuple[float, float],
    ) -> None:  # fmt: skip
        self._world = world
        self._shop = shop
        self._topics = topics
        self._pause_s = LANES / rate
        self._lives_s = lives_s
        self._stopping = asyncio.Event()
        self.finished = 0
        self.kills = 0

    @contextlib.asynccontextmanager
    async def running(self, seed: int) -> AsyncIterator[Load]:
        """Keep the load up during the block; then let every lane finish."""
        limits = Limits(answer_timeout_s=3, heartbeat_s=3)
        check = answering(self._shop, Recorder())
        async with contextlib.AsyncExitStack() as stack:
            producers = [
                await stack.enter_async_context(
                    TransactionalProducer(
                        [self._world.url], group=group, check=check, limits=limits
                    )
                )
                for group in ("orders", "bills")
            ]
            async with asyncio.TaskGroup() as group:
                for number in range(LANES):
                    fate = random.Random(f"{seed}/{number}")
                    producer = producers[number % len(producers)]
                    group.create_task(self._lane(f"lane-{number}", producer, fate))
                group.create_task(self._kill_now_and_then(random.Random(seed)))
                try:
                    yield self
                finally:
                    self._stopping.set()
            await self._world.all_settled("orders")
            await self._world.all_settled("bills")

    async def reached(self, finished: int) -> None:
        """Wait until `count` transactions are finished."""

        async def enough() -> bool:
            return self.finished >= finished

        await until(enough)

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), max(seconds, 0.001))

    async def _kill_now_and_then(self, fate: random.Random) -> None:
        while not self._stopping.is_set():
            await self._rest(fate.uniform(*self._lives_s))
            await self._world.kill()
            await self._world.start()
            self.kills += 1

    async def _lane(self, name: str, producer: TransactionalProducer, fate: random.Random) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + fate.uniform(0, self._pause_s)
        while not self._stopping.is_set():
            try:
                # Results unknown here are known to the check.
                with contextlib.suppress(LocalFailure):
                    await self._one(name, producer, fate)
            except RequestError:
                await self._rest(self._pause_s)
                continue
            self.finished += 1
            due = max(due + self._pause_s, loop.time() - BEHIND_S)
            await self._rest(due - loop.time())

    async def _one(self, name: str, producer: TransactionalProducer, fate: random.Random) -> None:
        messages = [self._message(name, fate) for _ in range(fate.choice((1, 1, 1, 1, 3)))]
        order_key = f"order {name}" if fate.random() < 0.5 else None
        draw = fate.random()
        async with producer.transaction(*messages, order_key=order_key) as transaction:
            if draw < 0.1:
                raise Rollback("does not want it")
            if draw < 0.15:
                raise LocalFailure("before its local transaction")
            self._shop.place_order(transaction.id, name)
            if draw < 0.2:
                raise LocalFailure("after its local transaction")

    def _message(self, name: str, fate: random.Random) -> Message:
        return Message(
            fate.choice(self._topics),
            key=fate.choice([None, name.encode()]),
            value=None if fate.random() < 0.05 else fate.randbytes(fate.randint(0, 200)),
            headers=(("same", b"\x00\xff"), ("same", None)) if fate.random() < 0.2 else (),
            timestamp_ms=1_700_000_000_000 if fate.random() < 0.1 else None,
        )
