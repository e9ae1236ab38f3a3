"""What consumers export for Prometheus."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.consumer_world import Handler, World
from tests.kit.processing import Doors
from tests.kit.until import until
from txbroker.consumer import Consumer, ReceivedMessage, Reject
from txbroker.consumer.statistics import METRICS
from txbroker.core.records import Record


async def fail_some(message: ReceivedMessage) -> None:
    if message.key == b"reject":
        raise Reject("never")
    if message.key == b"bad":
        raise ValueError("no stock")


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Return values by name and labels, without the group."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for name, labels, value, *_more in family.samples:
            shown = "/".join(labels[label] for label in labels if label != "group")
            found[f"{labels['group']}: {name.removeprefix('txbroker_consumer_')} {shown}"] = value
    return found


async def test_metrics_of_two_consumers_of_a_process(world: World) -> None:
    world.kafka.write("orders", 0, [Record(key, b"") for key in (b"bad", b"reject", b"good")], None)
    registry = CollectorRegistry(auto_describe=True)
    one = Consumer(
        Doors.to(world.kafka), group="one", topics=["orders"], order="key", on_failure="aside",
        local_attempts_max=1, heartbeat_s=0.05, lease_s=1.0,
    )  # fmt: skip
    two = Consumer(
        Doors.to(world.kafka), group="two", topics=["orders"], order="none", local_attempts_max=1,
        heartbeat_s=0.05, lease_s=1.0,
    )  # fmt: skip
    async with one, two:
        for consumer in (one, two):
            registry.register(consumer.collector())
        assert samples(registry)["one: messages_total aside_full"] == 0
        running = [asyncio.create_task(each.run(fail_some)) for each in (one, two)]
        expected = {
            "one: messages_total handled": 1,
            "one: messages_total failed": 2,
            "one: messages_total dead": 1,
            "one: messages_total aside": 1,
            "one: aside_keys ": 1,
            "one: lag 0/orders": 0,
            "one: oldest_unfinished_seconds ": 0,
            "one: in_flight ": 0,
            "one: fenced_total ": 0,
            "one: overflow ": 0,
            "two: retries_total 0": 1,
            "two: messages_total dead": 1,
            "two: aside_keys ": 0,
        }
        await until(lambda: expected.items() <= samples(registry).items())
        shown = {name.split()[1] for name in samples(registry)}
        one.stop()
        two.stop()
        await asyncio.gather(*running)
    assert shown == {metric.name.removeprefix("txbroker_consumer_") for metric in METRICS}


@pytest.mark.parametrize("order", ["none", "key"])
async def test_message_that_is_tried_again_later_is_the_oldest(world: World, order: str) -> None:
    """Those after it are done, and do not count."""
    world.produce("a=bad", "b=1", "c=2", timestamp_ms=1)
    handler = Handler(bad=ValueError("no stock"))
    async with world.running(
        handler, order=order, on_failure="wait", retry_interval_s=30
    ) as consumer:
        await handler.does("1", "2")
        await until(lambda: "bad" in handler.seen and not consumer.statistics().in_flight)
        now = consumer.statistics()
    assert now.oldest_unfinished_s > 1000
    assert now.lag["orders", 0] == 1
