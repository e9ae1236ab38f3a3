"""A real Prometheus scrapes a real proxy: alerts fire on planted trouble, and end with it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from tests.alerts.prometheus import DASHBOARD, RULES, Prometheus, prometheus, quicker
from tests.kit.memory import MemoryHarness
from tests.kit.service import FakeEndpoint, Json, Service
from tests.kit.until import until
from txbroker.checkers import runner
from txbroker.contract.audit import AuditNews, encode_news
from txbroker.core.records import Message
from txbroker.proxy.partition import owner

pytestmark = pytest.mark.needs_tool("prometheus")

COMMIT: Json = {"decision": "commit"}
UNKNOWN: Json = {"decision": "unknown"}
CLOSED = "http://127.0.0.1:9/"
NEVER_S = 3600
DAY_S = 86_400
# Ages and numbers, as small as the times are short.
SMALL = {"_age_seconds) > 900": "_age_seconds) > 4", "_age_seconds) > 60": "_age_seconds) > 0.5"}
SMALL |= {"(txbroker_pending) > 1000": "(txbroker_pending) > 20"}

Mend = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Plant:
    """A proxy on which trouble is planted; each kind returns what mends it."""

    service: Service
    world: MemoryHarness
    prometheus: Prometheus

    async def fires(self, name: str, **labels: str) -> None:
        alert = await self.prometheus.fires(name, **labels)
        texts = alert["annotations"]
        assert "error expanding" not in texts["description"] + texts["summary"], texts
        assert texts["runbook_url"].endswith(f"/{name}.md")

    async def pending(self, group: str, count: int = 1) -> list[str]:
        topic = await self.service.topic()
        return [await self.service.prepare(Message(topic, b"k"), group=group) for _ in range(count)]

    async def parked(self) -> None:
        group = await self.service.group(UNKNOWN, attempts_max=1, timeout_s=0.5)
        (id,) = await self.pending(group)
        await self.fires("TxBrokerParking", group=group)
        await self.service.act(id, "commit", reason="it is in the database")
        await self.prometheus.is_over("TxBrokerParking", group=group)

    async def checks_that_fail(self) -> None:
        group = await self.service.group(UNKNOWN, attempts_max=100, check_interval_s=0.2)
        await self.pending(group)
        await self.fires("TxBrokerChecksFailing", group=group)
        self.service.desk.answers[group] = [COMMIT]
        await self.prometheus.is_over("TxBrokerChecksFailing", group=group)

    async def unreachable_group(self) -> None:
        group = await self.service.group(COMMIT, check_url=CLOSED)
        (id,) = await self.pending(group)
        await self.fires("TxBrokerGroupUnreachable", group=group)
        await self.fires("TxBrokerPendingTooOld", group=group)
        url = f"{self.service.desk.url}/check/{group}"
        await self.service.call("PUT", f"/v1/groups/{group}", {"check_url": url})
        await self.service.reaches(id, "promoted")
        await self.prometheus.is_over("TxBrokerPendingTooOld", group=group)
        await self.prometheus.is_over("TxBrokerGroupUnreachable", group=group)

    async def more_and_more(self) -> None:
        group = await self.service.group(COMMIT, check_after_s=NEVER_S)
        ids = await self.pending(group, 20)

        async def one_more_until_it_fires() -> bool:
            ids.extend(await self.pending(group))
            firing = (await self.prometheus.alerts()).get("TxBrokerPendingGrowing", [])
            return any(alert["labels"]["group"] == group for alert in firing)

        await until(one_more_until_it_fires)
        await self.fires("TxBrokerPendingGrowing", group=group)
        for id in ids:
            await self.service.act(id, "rollback")
        await self.prometheus.is_over("TxBrokerPendingGrowing", group=group)

    async def no_topic(self) -> None:
        topic = await self.service.topic()
        id = await self.service.prepare(Message(topic, b"k"))
        await self.service.delete_topic(topic)
        assert (await self.service.commit(id))["state"] == "refused"
        await self.fires("TxBrokerRefusing", topic=topic)
        await self.service.create_again(topic)
        await self.service.reaches(id, "promoted")
        await self.prometheus.is_over("TxBrokerRefusing", topic=topic)

    async def hanging_target(self) -> None:
        topic = await self.service.topic()
        end = await self.world.hang(topic, 0)
        id = await self.service.prepare(Message(topic, b"k"))
        await self.service.act(id, "commit")
        await self.fires("TxBrokerPromotionStalled")
        await end()
        await self.service.reaches(id, "promoted")
        await self.prometheus.is_over("TxBrokerPromotionStalled")

    async def old_audit_with_drift(self) -> None:
        await self.world.write_audit("batch", audit(time.time() - 3 * DAY_S, lost=2))
        await self.fires("TxBrokerAuditDrift", kind="lost")
        await self.fires("TxBrokerAuditStale", mode="batch")
        await self.world.write_audit("batch", audit(time.time(), lost=0))
        await self.prometheus.is_over("TxBrokerAuditDrift")
        await self.prometheus.is_over("TxBrokerAuditStale")


def audit(ended_s: float, **drift: int) -> bytes:
    return encode_news(
        AuditNews(
            run="r",
            mode="full",
            started_ms=0,
            ended_ms=round(ended_s * 1000),
            transactions=5,
            states={},
            drift=drift,
        )
    )


async def not_on_the_dashboard(prometheus: Prometheus) -> set[tuple[str, str]]:
    """Return panel and legend of each query of the dashboard that has found nothing of late."""
    nothing = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"].replace("$__rate_interval", "1m")
            if not await prometheus.of_late(re.sub(r"\$\w+", ".*", query)):
                nothing.add((panel["title"], target["legendFormat"]))
    return nothing


@pytest.fixture(scope="module")
async def plant(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Plant]:
    """A proxy that keeps no bodies in memory, and a Prometheus that has scraped it."""
    world = MemoryHarness()
    async with AsyncExitStack() as stack:
        # Groups that are away are asked, and the logs' edges looked at, as often as the rules'
        # times are short.
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(runner, "BACK_OFF_FIRST_S", 0.1)
        patch.setattr(runner, "BACK_OFF_MAX_S", 0.2)
        patch.setattr(owner, "EDGES_S", 0.5)
        stack.push_async_callback(world.close)
        desk = await stack.enter_async_context(FakeEndpoint().serve())
        service = Service(world, desk, bodies_bytes_max=1)
        await service.start()
        stack.push_async_callback(service.stop)
        target = service.proxy.url.removeprefix("http://")
        rules = quicker(RULES.read_text(), SMALL)
        folder = tmp_path_factory.mktemp("prometheus")
        running = await stack.enter_async_context(prometheus(target, rules, folder))
        await until(lambda: running.value("txbroker_ready == 1"))
        yield Plant(service, world, running)


async def test_alerts_fire_on_faults_and_resolve(plant: Plant) -> None:
    await plant.prometheus.is_over("TxBrokerNotReady")
    assert await plant.prometheus.alerts() == {}
    await asyncio.gather(
        plant.parked(),
        plant.checks_that_fail(),
        plant.unreachable_group(),
        plant.more_and_more(),
        plant.no_topic(),
        plant.hanging_target(),
        plant.old_audit_with_drift(),
    )
    assert await plant.prometheus.alerts() == {}
    # And all that it was is on the dashboard; the rest has not happened.
    assert await not_on_the_dashboard(plant.prometheus) == {
        ("Turned away", "{{operation}}"),
        ("Errors of Kafka", "{{operation}}"),
        ("Errors of Kafka", "foreign in {{topic}}"),
        ("Failed checks", "{{check}}"),
        ("Acknowledged findings", "{{kind}}"),
        ("Lag of the streaming audit", "lag"),
        ("Lag of the streaming audit", "batch"),
        ("Load of the streaming audit", "unread records"),
        ("Load of the streaming audit", "{{state}}"),
        ("State of the streaming audit", "files"),
        ("Topics and files", "{{setting}} not read"),
        ("Groups", "sessions"),
        ("Sessions", "{{group}}"),
    }


async def test_lost_or_suspended_proxy_fires_alert(plant: Plant) -> None:
    group = plant.world.kafka.coordinator("test")
    group.silence(plant.service.instance)
    await plant.fires("TxBrokerNotReady", scope="proxy")
    await plant.fires("TxBrokerNotReady", scope="partitions")
    group.let_back(plant.service.instance)
    await plant.prometheus.is_over("TxBrokerNotReady")
    await plant.service.stop()
    await plant.fires("TxBrokerNotReady", scope="installation")
    await plant.service.start()
    await plant.prometheus.is_over("TxBrokerNotReady")


async def test_messages_near_retention_fire_alert(plant: Plant) -> None:
    kafka, parked = plant.world.kafka, plant.world.name("parked")
    message = Message(await plant.service.topic(), b"k")
    id = await plant.service.prepare(message)
    kafka.set_leaderless(parked, 0, 1)
    kafka.clock.advance(9 * DAY_S)
    # A record stored next to it advances the owner's clock.
    later = await plant.service.prepare(message)
    await plant.fires("TxBrokerHalfRetentionAtRisk")
    kafka.set_leaderless(parked)
    await plant.prometheus.is_over("TxBrokerHalfRetentionAtRisk")
    for each in (id, later):
        assert (await plant.service.act(each, "rollback"))["state"] == "rolled_back"


async def test_lost_messages_fire_alert(plant: Plant) -> None:
    (id,) = await plant.pending("careless", 1)
    half = plant.world.name("half")
    for number, partition in enumerate(plant.world.kafka.topics[half].partitions):
        await plant.world.truncate(half, number, before=partition.end)
    await plant.fires("TxBrokerUndecidedLost")
    assert await plant.service.state(id) == "pending"
