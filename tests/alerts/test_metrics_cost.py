"""Metrics cost next to nothing at full speed, and those of a partition move with it."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator
from typing import cast

import pytest

from tests.kit.cluster import Proxies
from tests.kit.memory import MemoryHarness
from tests.kit.service import FakeEndpoint
from tests.kit.until import unique, until
from txbroker.core.records import Decision, Half, Message, Place, Source
from txbroker.core.transaction import Transaction, Verdict
from txbroker.proxy.observe.metrics import Metrics

TRANSACTIONS = 20_000
COST_MAX_S = 15e-6
NEVER_S = 3600
GAUGES = ("pending", "pending_oldest_age_seconds", "parked")


class Settled:
    """A transaction, as far as counting it goes."""

    places = (Place("payments", 0, 100),)
    messages = (Message("payments"),)
    half = Half("", "orders", messages)
    verdict = Verdict(Decision.COMMIT, source=Source.PRODUCER)
    decided_at_ms, promoted_at_ms = 1_700_000_000_000, 1_700_000_000_005


def test_counting_a_transaction_takes_microseconds() -> None:
    metrics = Metrics()
    transaction = cast(Transaction, Settled())
    turn = [transaction] * 50

    def cost_s() -> float:
        gc.collect()
        begun_s = time.process_time()
        for number in range(TRANSACTIONS):
            metrics.prepared((transaction,))
            metrics.decided((transaction,))
            metrics.prepare_latency.add(0.001)
            metrics.decision_latency.add(0.001)
            if number % len(turn) == 0:
                metrics.promoted(turn)
        return (time.process_time() - begun_s) / TRANSACTIONS

    assert min(cost_s() for _ in range(3)) < COST_MAX_S
    text = metrics.text().decode()
    for line in (
        'txbroker_prepared_total{topic="payments"} ',
        'txbroker_decisions_total{decision="commit",group="orders",source="producer"} ',
        "txbroker_prepare_latency_seconds_count ",
        "txbroker_decision_latency_seconds_count ",
        'txbroker_promoted_total{topic="payments"} ',
        "txbroker_promotion_latency_seconds_count ",
    ):
        assert f"{line}{3.0 * TRANSACTIONS}" in text


@pytest.fixture
async def proxies() -> AsyncIterator[Proxies]:
    world = MemoryHarness()
    async with FakeEndpoint().serve() as desk:
        running = Proxies(world, desk)
        yield running
        await running.close()
        await world.close()


async def test_gauges_follow_partition_to_new_owner(proxies: Proxies) -> None:
    (one,) = await proxies.add("one")
    topic, waiting = await one.topic(), unique("waiting")
    asked = await one.group({"decision": "unknown"}, attempts_max=1, timeout_s=0.1)
    for number in range(proxies.partitions):
        await proxies.prepare_in(number, topic, one, group=waiting, check_after_s=NEVER_S)
        parked = await proxies.prepare_in(number, topic, one, group=asked)
        await one.reaches(parked, "parked")
    (two,) = await proxies.add("two")

    async def shown() -> list[tuple[float, float]]:
        return [
            (
                await service.metric("pending", group=waiting),
                await service.metric("parked", group=asked),
            )
            for service in (one, two)
        ]

    half = proxies.partitions / 2
    assert await shown() == [(half, half), (half, half)]
    assert await two.metric("pending_oldest_age_seconds", group=waiting) > 0
    await proxies.stop("one")

    async def taken_over() -> bool:
        return len(await two.owned()) == proxies.partitions

    await until(taken_over)
    assert await two.metric("pending", group=waiting) == proxies.partitions
    assert await two.metric("parked", group=asked) == proxies.partitions


async def test_suspended_proxy_shows_no_partition_gauges(
    proxies: Proxies,
) -> None:
    one, two = await proxies.add("one", "two")
    topic, group = await one.topic(), unique("waiting")
    mine = sorted(await one.owned())
    for number in range(proxies.partitions):
        await proxies.prepare_in(number, topic, one, group=group, check_after_s=NEVER_S)
    assert await one.metric("pending", group=group) == len(mine)
    world = proxies.world
    assert isinstance(world, MemoryHarness)
    coordinator = world.kafka.coordinator("test")
    coordinator.silence("one")
    coordinator.forget("one")

    async def taken_over() -> bool:
        return len(await two.owned()) == proxies.partitions

    await until(taken_over)
    # 0 is what `metric` returns of a series that is not there.
    assert [await one.metric(name, group=group) for name in GAUGES] == [0, 0, 0]
    assert await one.metric("owned_partitions") == await one.metric("ready") == 0
    assert await two.metric("pending", group=group) == proxies.partitions
    coordinator.let_back("one")
    await proxies.settled()
