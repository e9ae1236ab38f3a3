"""Kafka hangs, or is killed, under load and comes back: nothing lost, nothing doubled."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.judged_load import judged_load
from tests.faults.judge import Body, History
from tests.kit.proxies import ProxyProcess
from tests.kit.until import until
from tests.kit.workload import Recorder, Shop
from txbroker.embedded import EmbeddedKafka
from txbroker.errors import OwnerUnavailable
from txbroker.sdk import Limits

GONE_S = 60.0 if os.environ.get("TXBROKER_TEST_LONG") else 15.0
"""How long Kafka hangs: longer than a session, and than a write is tried, so that calls do fail."""
TRANSACTIONS = 900


@pytest.fixture(scope="module")
def own_kafka() -> Iterator[EmbeddedKafka]:
    """A Kafka that may be stopped: the shared one serves other tests."""
    with EmbeddedKafka() as server:
        yield server


@pytest.fixture
async def world(own_kafka: EmbeddedKafka) -> AsyncIterator[ProxyProcess]:
    async with ProxyProcess(own_kafka.bootstrap, check_after_s=2.0, check_interval_s=2.0) as made:
        yield made


@contextmanager
def stopped(kafka: EmbeddedKafka) -> Iterator[None]:
    """Stop Kafka's process, as a machine that hangs does."""
    assert kafka.pid is not None
    os.kill(kafka.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(kafka.pid, signal.SIGCONT)


async def http_calls(world: ProxyProcess, topic: str, recorder: Recorder) -> None:
    """Prepare and commit over plain HTTP, one after the other, each repeated until it works."""
    for number in itertools.count():
        if recorder.finished == TRANSACTIONS:
            return
        token = f"http/{number}"
        body = Body(topic, None, token.encode(), (("token", token.encode()),))
        recorder.history.sent[token] = (body,)
        message = {"topic": topic, "value": token, "headers": {"token": token}}
        id: str | None = None
        while True:
            given = {} if id is None else {"id": id}
            try:
                with recorder.call("prepare", token) as call:
                    call.id = id = await world.prepare(message, group="plain", **given)
            except OwnerUnavailable as error:
                # With the same id it counts once, stored before or not.
                id = error.details.get("id", id)
            else:
                break
        while True:
            with suppress(OwnerUnavailable), recorder.call("commit", token, id):
                await world.act(id, "commit", group="plain")
                break


async def work_through(
    world: ProxyProcess, shop: Shop, trouble: Callable[[], Coroutine[Any, Any, None]]
) -> History:
    """Work, run into `trouble` in the middle of it, work on to the end, and be judged."""
    plain = await world.topic()

    async def disturb(recorder: Recorder) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(http_calls(world, plain, recorder))
            await until(lambda: recorder.finished > TRANSACTIONS // 5)
            await trouble()
            await world.ready()

    recorder, _read = await judged_load(
        world,
        shop,
        disturb,
        groups=("orders", "bills"),
        seed=1,
        lanes=30,
        transactions=TRANSACTIONS,
        limits=Limits(retry_s=20.0 + 2 * GONE_S),
        plain_topic=plain,
    )
    codes = {call.code for call in recorder.history.calls}
    assert codes <= {"", "owner_unavailable", "overloaded", "already_decided"}
    return recorder.history


async def test_kafka_hang_under_load_loses_nothing(
    world: ProxyProcess, own_kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    async def hang() -> None:
        with stopped(own_kafka):
            # How long is what this test is about.
            await asyncio.sleep(GONE_S)
            status, _ = await world.request("GET", "/healthz")
            assert status == 200

    history = await work_through(world, Shop(tmp_path / "shop.db"), hang)
    assert "owner_unavailable" in {call.code for call in history.calls}


async def test_kafka_killed_under_load_restarts_without_loss(
    world: ProxyProcess, own_kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    before = own_kafka.bootstrap

    async def die() -> None:
        await asyncio.to_thread(own_kafka.kill)
        try:
            await until(lambda: not own_kafka.running)
        finally:
            await asyncio.to_thread(own_kafka.start)
        assert own_kafka.bootstrap == before

    await work_through(world, Shop(tmp_path / "shop.db"), die)


async def test_proxy_without_kafka_reports_it_and_exits() -> None:
    world = ProxyProcess("127.0.0.1:1", wait_for_kafka_s=0)
    await world.launch()
    code = await world.ended()
    output = "\n".join(world.stderr)
    assert code == 1
    assert "Error: no connection to Kafka at 127.0.0.1:1 (" in output
    assert "check that it is running" in output
    assert "Traceback" not in output
    assert world.stdout == []


async def test_proxy_exits_in_bounded_time_while_kafka_hangs(
    world: ProxyProcess, own_kafka: EmbeddedKafka
) -> None:
    """A running proxy exits on SIGTERM; a starting one reports the error and exits."""
    topic = await world.topic()
    id = await world.prepare({"topic": topic, "value": "x"})
    starting = ProxyProcess(own_kafka.bootstrap, wait_for_kafka_s=1)
    with stopped(own_kafka):
        committing = asyncio.create_task(world.act(id, "commit"))
        await starting.launch()
        assert await world.stop() == 0
        with pytest.raises((OwnerUnavailable, aiohttp.ClientError)):
            await committing
        assert await starting.ended() == 1
    assert "Kafka" in starting.stderr[-1]
    assert "Traceback" not in "\n".join(starting.stderr)
    await world.start()
    assert (await world.act(id, "commit", wait="promoted"))["state"] == "promoted"
    assert [record.value for record in await world.visible(topic)] == [b"x"]
