"""Figures of a consumer, and their export to Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from txbroker.consumer.engine import Engine
from txbroker.consumer.partition import due_ms
from txbroker.door.consuming import Partition


class Statistics(Struct, frozen=True):
    """Figures of a consumer at one moment.

    Attributes:
        lag: offsets of each partition that are not done.
        oldest_unfinished_s: age of the oldest message that is not done, seconds; 0 without one.
        in_flight: messages that are being handled.
        buffered_bytes: memory of messages.
        aside_keys: set-aside keys.
        overflow: done offsets that the last commits could not store; a crash repeats them.
        counts: events since the start by name, see `Engine.counts`.
    """

    lag: Mapping[Partition, int]
    oldest_unfinished_s: float
    in_flight: int
    buffered_bytes: int
    aside_keys: int
    overflow: int
    counts: Mapping[str, int]


def statistics(engine: Engine) -> Statistics:
    """Return the figures of an engine."""
    works = [work for work in engine.works if work.owner is work]
    oldest_ms = _oldest_ms(engine)
    age_s = 0.0 if oldest_ms is None else max(0.0, time.time() - oldest_ms / 1000)
    return Statistics(
        {work.place: work.lag for work in works},
        age_s,
        len(engine.in_flight),
        sum(work.bytes for work in works),
        sum(work.aside_count for work in works),
        sum(work.overflow for work in works),
        {"handled": engine.handled, **engine.counts},
    )


def _oldest_ms(engine: Engine) -> int | None:
    """Return the timestamp of the oldest message that is not done, as far as it has arrived."""
    times = [message.timestamp_ms for message in engine.in_flight]
    for work in engine.works:
        heads = work.queue.heads()
        if work.gate and due_ms(work.gate[0]) <= time.time() * 1000:
            heads.append(work.gate[0])
        times += [message.timestamp_ms for message in heads]
    return min(times, default=None)


class ConsumerCollector:
    """Metrics of a consumer: `prometheus_client.REGISTRY.register(consumer.collector())`."""

    def __init__(self, group: str, engine: Engine) -> None:
        self._group = group
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        now = statistics(self._engine)
        lag = GaugeMetricFamily(
            "txbroker_consumer_lag",
            "Offsets that are not done.",
            labels=["group", "topic", "partition"],
        )
        for (topic, number), value in now.lag.items():
            lag.add_metric([self._group, topic, str(number)], value)
        yield lag
        figures: tuple[tuple[str, str, float], ...] = (
            (
                "oldest_unfinished_seconds",
                "Age of the oldest message that is not done.",
                now.oldest_unfinished_s,
            ),
            ("in_flight", "Messages that are being handled.", now.in_flight),
            ("buffered_bytes", "Memory of messages.", now.buffered_bytes),
            ("aside_keys", "Set-aside keys.", now.aside_keys),
            ("overflow", "Done offsets that a crash would repeat.", now.overflow),
        )
        for name, help_, figure in figures:
            gauge = GaugeMetricFamily(f"txbroker_consumer_{name}", help_, labels=["group"])
            gauge.add_metric([self._group], figure)
            yield gauge
        yield from _counters(self._group, now.counts)


def _counters(group: str, counts: Mapping[str, int]) -> Iterable[Metric]:
    events = CounterMetricFamily(
        "txbroker_consumer_messages", "Messages by result.", labels=["group", "result"]
    )
    retries = CounterMetricFamily(
        "txbroker_consumer_retries", "Copies to the retry topic by step.", labels=["group", "step"]
    )
    for name, value in counts.items():
        kind, _, step = name.partition("_")
        if kind == "retry":
            retries.add_metric([group, step], value)
        else:
            events.add_metric([group, name], value)
    yield events
    yield retries
