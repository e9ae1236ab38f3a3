"""Audits while a proxy works, is killed and starts again: nothing is ever found. Half an hour."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit.proxies import ProxyProcess
from tests.kit.topic_reader import read_topics
from tests.kit.until import until
from tests.kit.workload import LocalFailure, Recorder, Shop, answering
from tests.spark.audit_tables import audited, valid
from tests.spark.planting import Planting, access_to
from tests.spark.stream_world import StreamWorld, confirmed, judged, reached
from txbroker.contract.audit import STREAM_KEY, decode_news
from txbroker.embedded import EmbeddedKafka
from txbroker.errors import RequestError
from txbroker.sdk import Limits, Message, Rollback, TransactionalProducer
from txbroker.spark.run import AuditSettings
from txbroker.spark.schema import RunSummary, Terms, TopicNames
from txbroker.spark.stream.stream import StreamSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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


SEED_VARIABLE = "TXBROKER_TEST_SEED"
AUDITS = 20
RATE = 500.0
LIVES_S = (0.5, 20.0)
FULL = (0, 4, 12)
BETWEEN = 1000
"""Transactions from one audit to the next."""
TERMS = Terms(0, late_after_ms=30_000)


class Reader:
    def __init__(self, spark: SparkSession, world: ProxyProcess, folder: Path) -> None:
        self.spark, self.world, self.folder = spark, world, folder

    def audit(self, mode: str) -> RunSummary:
        prefix, folder = self.world.prefix, self.folder
        names = TopicNames.of(prefix)
        settings = AuditSettings(self.out, folder, names, TERMS, mode)  # type: ignore[arg-type]
        access = access_to(self.world.bootstrap, prefix)
        self.last = audited(self.spark, access, settings)
        return self.last.summary

    @property
    def out(self) -> str:
        return str(self.folder / "out")

    def states(self) -> dict[str, str]:
        return {row["id"]: row["state"] for row in self._verdicts().collect()}

    def business(self, ids: Sequence[str], summary: RunSummary) -> dict[str, int]:
        """Compare with rows that were read after the topics; a decision may be ever so young."""
        from txbroker.spark.business import BusinessTable, compare

        rows = self.folder / f"{summary.run}.rows.parquet"
        pq.write_table(pa.table({"id": pa.array(ids, pa.string())}), rows)
        terms = Terms(summary.started_ms, late_after_ms=-3_600_000)
        source = BusinessTable(f"parquet:{rows}", "", "id", groups=("orders", "bills"))
        return compare(self.spark, self._verdicts(), source, terms)[1]

    def _verdicts(self) -> Any:
        return valid(self.spark, self.out, self.last)


@pytest.fixture
async def world(kafka: EmbeddedKafka) -> AsyncIterator[ProxyProcess]:
    """A proxy that checks back soon."""
    async with ProxyProcess(kafka.bootstrap, check_after_s=1.0, check_interval_s=1.0) as made:
        yield made


def output(summary: RunSummary) -> str:
    return f"{summary.mode} {summary.run}: {summary.drift} {summary.examples[:5]}"


async def listed(world: ProxyProcess) -> dict[str, str]:
    """Return what `txbroker tx list` says is not settled."""
    process = await asyncio.create_subprocess_exec(
        *(*world.program, "tx", "list", "--all", "-o", "json", "--url", world.url),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    found = json.loads(printed)
    rows = found["transactions"] if isinstance(found, dict) else found
    return {row["id"]: row["state"] for row in rows}


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_audits_of_a_proxy_that_works_and_is_killed_find_nothing(
    spark: SparkSession, world: ProxyProcess, tmp_path: Path
) -> None:
    seed = int(os.environ.get(SEED_VARIABLE, random.randrange(1 << 32)))
    print(f"{SEED_VARIABLE}={seed}")
    shop = Shop(tmp_path / "shop.db")
    topics = [await world.topic(3), await world.topic(1)]
    stamped = await world.topic(1, message_timestamp_type="LogAppendTime")
    reader = Reader(spark, world, tmp_path)
    judged = 0
    began_s = time.monotonic()
    async with Load(world, shop, [*topics, stamped], RATE, LIVES_S).running(seed) as load:
        for number in range(AUDITS):
            await load.reached(load.finished + BETWEEN)
            # The history gets long at this rate.
            mode = "full" if number in FULL else "incremental"
            summary = await asyncio.to_thread(reader.audit, mode)
            print(f"{number} {mode}: {summary.took_s:.0f} s, {load.finished} finished", flush=True)
            assert not summary.has_drift, output(summary)
            assert summary.quarantined == 0
            assert summary.taken == {}
            judged += summary.transactions
            counts = await asyncio.to_thread(reader.business, shop.rows(), summary)
            assert counts["message_without_row"] == counts["row_without_message"] == 0, counts
        kills, rate = load.kills, load.finished / (time.monotonic() - began_s)
    print(f"{rate:.0f} transactions a second, {kills} kills")
    assert rate > 0.95 * RATE
    assert kills >= AUDITS // 3
    assert judged > AUDITS * BETWEEN

    message = {"topic": topics[0], "value": "waits"}
    waiting = [await world.prepare(message, group="slow", check_after_s=600) for _ in range(5)]
    summary = await asyncio.to_thread(reader.audit, "incremental")
    assert not summary.has_drift, output(summary)
    states = await asyncio.to_thread(reader.states)
    unsettled = {
        id: state for id, state in states.items() if state not in ("promoted", "rolled_back")
    }
    assert unsettled == await listed(world)
    assert set(waiting) <= unsettled.keys()
    assert set(shop.rows()) <= {id for id, state in states.items() if state == "promoted"}
    counts = await asyncio.to_thread(reader.business, shop.rows(), summary)
    assert counts["message_without_row"] == counts["row_without_message"] == 0, counts
    assert counts["rows"] == len(shop.rows())
    shop.close()


# --- a stream ------------------------------------------------------------------------------------

LIVE, LIVE_RATE, LIVE_LIVES_S = 300, 30.0, (1.0, 6.0)
PROMISED_MS = 60_000


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_drift_is_reported_within_a_minute_of_its_deadline(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    async with Planting(kafka.bootstrap) as planting:
        terms = Terms(0, late_after_ms=5_000)
        world = StreamWorld(spark, kafka.bootstrap, planting.prefix, tmp_path, terms)
        usual = StreamSettings(world.settings.checkpoint, world.names)
        stream = await world.start(
            every_s=usual.every_s,
            tick_s=usual.tick_s,
            summary_s=usual.summary_s,
        )
        try:
            await judged(stream, 0)
            # All is well meanwhile, and one is not.
            await planting.fill_clean(2000)
            lost = await planting.prepare()
            deadline_ms = await planting.commit(lost) + terms.late_after_ms
            await planting.fill_clean(2000)
            await reached(stream, lambda: bool(stream.summary().drift))
            reported_after_ms = time.time() * 1000 - deadline_ms
            assert await world.kinds() == {(lost.id, "late")}
            while not await metric(world):
                assert time.time() * 1000 - deadline_ms < PROMISED_MS
            shown_after_ms = time.time() * 1000 - deadline_ms
        finally:
            await asyncio.to_thread(stream.stop)
    print(f"reported after {reported_after_ms:.0f} ms, shown after {shown_after_ms:.0f} ms")
    assert reported_after_ms < PROMISED_MS
    assert shown_after_ms < PROMISED_MS


async def metric(world: StreamWorld) -> int:
    records = await asyncio.to_thread(read_topics, world.bootstrap, [world.names.audit])
    news = [decode_news(each.value or b"") for each in records if each.key == STREAM_KEY.encode()]
    return news[-1].drift["late"] if news else 0


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_proxy_at_work_is_followed_without_an_alarm(
    spark: SparkSession, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    installation = ProxyProcess(kafka.bootstrap, check_after_s=1.0, check_interval_s=1.0)
    try:
        await installation.start()
        topics = [await installation.topic(3), await installation.topic(1)]
        terms = Terms(0, late_after_ms=30_000)
        world = StreamWorld(spark, kafka.bootstrap, installation.prefix, tmp_path, terms)
        stream = await world.start()
        try:
            shop = Shop(tmp_path / "shop.db")
            async with Load(installation, shop, topics, LIVE_RATE, LIVE_LIVES_S).running(
                seed
            ) as load:
                await judged(stream, 0)
                # While it is down the topics go on; then it catches up, in several batches.
                await asyncio.to_thread(stream.stop)
                await load.reached(load.finished + LIVE)
                stream = await world.start(records_max=500)
                await confirmed(stream)
            await confirmed(stream)
        finally:
            await asyncio.to_thread(stream.stop)
        assert await world.reported() == []
        summary = stream.summary()
        assert summary.drift == {}
        assert summary.quarantined == 0
        assert summary.transactions >= LIVE
        assert summary.states["promoted"] > LIVE // 2
    finally:
        await installation.close()
