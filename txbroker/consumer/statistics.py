"""Figures of a consumer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeAlias

from msgspec import Struct

from txbroker.consumer.engine.loop import Engine
from txbroker.core.records import Partition
from txbroker.metrics import Collector, Described, Samples

ConsumerCollector: TypeAlias = Collector
_PREFIX = "txbroker_consumer_"
_RETRY = "retry_"
_RESULTS = (
    *("handled", "failed", "dropped", "dead", "aside"),
    *("aside_full", "copy_refused", "left_out", "gap"),
)


METRICS = tuple(
    Described(f"{_PREFIX}{name}", kind, ("group", *labels), text)
    for name, kind, labels, text in (
        ("aside_keys", "gauge", (), "Set-aside keys of its partitions."),
        ("buffered_bytes", "gauge", (), "Memory of messages."),
        (
            "fenced_total",
            "counter",
            (),
            "Commits that Kafka refused to a member that was replaced, leases that ended, and "
            "partitions that were lost.",
        ),
        ("in_flight", "gauge", (), "Messages that are being handled."),
        (
            "lag",
            "gauge",
            ("topic", "partition"),
            "Offsets that are not done, also in the retry topic.",
        ),
        (
            "messages_total",
            "counter",
            ("result",),
            "Messages by result: `handled`; `failed`, for each attempt; then `dropped`, `dead` or "
            "`aside`; `aside_full`, for each attempt that found 1,000 set-aside keys; "
            "`copy_refused`; `left_out`, of which a copy lacks the value; `gap`, deleted before "
            "they were read.",
        ),
        (
            "oldest_unfinished_seconds",
            "gauge",
            (),
            "Age of the oldest message that is not done, without those that wait for a retry.",
        ),
        (
            "overflow",
            "gauge",
            (),
            "Done offsets that a crash would repeat; exactly once in Kafka, of outputs that wait.",
        ),
        ("retries_total", "counter", ("step",), "Copies to the retry topic by step, 0 to 15."),
    )
)


class Statistics(Struct, frozen=True):
    """Figures of a consumer at one moment.

    Attributes:
        lag: offsets of each partition that are not done.
        oldest_unfinished_s: age of the oldest message that is not done, seconds; 0 without one.
        in_flight: messages that are being handled.
        buffered_bytes: memory of messages.
        aside_keys: set-aside keys.
        overflow: done offsets that the last commits could not store; a crash repeats them.
        counts: events since the start by name, see `Settlement.counts`.
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
    partitions = list(engine.partitions)
    oldest_ms = _oldest_ms(engine)
    age_s = 0.0 if oldest_ms is None else max(0.0, time.time() - oldest_ms / 1000)
    return Statistics(
        {each.place: each.progress.lag(each.end) for each in partitions},
        age_s,
        engine.calls,
        sum(each.bytes for each in partitions),
        sum(each.aside.count for each in partitions),
        sum(each.progress.overflow for each in partitions),
        {"handled": engine.settlement.handled, **engine.settlement.counts},
    )


def _oldest_ms(engine: Engine) -> int | None:
    """Return the timestamp of the oldest message that is not done, as far as it has arrived."""
    now_ms, messages = time.time() * 1000, engine.in_flight
    for partition in engine.partitions:
        for feed in partition.feeds:
            messages += feed.queue.heads()
        head = partition.gate[0] if partition.gate else None
        if head is not None and (head.failed_before is None or head.failed_before.due_ms <= now_ms):
            messages.append(head)
    times = [message.timestamp_ms for message in messages]
    return min(times, default=None)


def collector(group: str, engine: Engine) -> Collector:
    """Return the metrics of an engine, for Prometheus."""
    return Collector(group, _PREFIX, METRICS, lambda: _samples(engine))


def _samples(engine: Engine) -> Samples:
    # Registries are read in threads; positions change where they are read.
    now = engine.waiting.result_of(lambda: statistics(engine))
    counts = dict(now.counts)
    return {
        "lag": {(topic, str(number)): lag for (topic, number), lag in now.lag.items()},
        "oldest_unfinished_seconds": {(): now.oldest_unfinished_s},
        "in_flight": {(): now.in_flight},
        "buffered_bytes": {(): now.buffered_bytes},
        "aside_keys": {(): now.aside_keys},
        "overflow": {(): now.overflow},
        "fenced_total": {(): counts.pop("fenced", 0)},
        "retries_total": {
            (name.removeprefix(_RETRY),): counts.pop(name)
            for name in list(counts)
            if name.startswith(_RETRY)
        },
        # From the start, or the first increase could not be seen.
        "messages_total": {(name,): counts.get(name, 0) for name in (*_RESULTS, *counts)},
    }
