"""What a scrape shows of the partitions that a proxy owns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from prometheus_client.parser import text_string_to_metric_families

from txbroker.contract.service import Readiness
from txbroker.core.records import Decision
from txbroker.core.transaction import Transaction, Verdict
from txbroker.proxy.observe.metrics import Metrics
from txbroker.proxy.observe.partition_gauges import LOOKED_AT_MAX, PartitionGauges

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000
Labels = tuple[tuple[str, str], ...]


@dataclass(eq=False)
class Held:
    """A transaction, as far as a scrape looks at it."""

    offset: int
    prepared_at_ms: int
    kept: bool = False
    lost: bool = False
    decided_at_ms: int = 0
    copying: bool = False

    @property
    def verdict(self) -> Verdict:
        return Verdict(Decision.COMMIT, at_ms=self.decided_at_ms)

    @property
    def kept_at(self) -> tuple[int, ...]:
        return (self.offset,) if self.kept and not self.copying else ()


@dataclass
class HeldLedger:
    """A ledger's counters, and its transactions by offset."""

    pending_by_group: dict[str, int] = field(default_factory=dict)
    parked_by_group: dict[str, int] = field(default_factory=dict)
    refused_by_topic: dict[str, int] = field(default_factory=dict)
    oldest: dict[str, int] = field(default_factory=dict)
    committed: list[Held] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    looked_at: int = 0

    @property
    def index(self) -> HeldLedger:
        """The fake is its own index, also by offset."""
        return self

    by_offset = index

    @property
    def ready(self) -> dict[str, Transaction]:
        return {str(one.offset): cast(Transaction, one) for one in self.committed}

    def oldest_pending_ms(self, group: str) -> int | None:
        return self.oldest.get(group)

    def after(self, after_offset: int, count: int) -> Sequence[Transaction]:
        found = [one for one in self.held if one.offset > after_offset][:count]
        self.looked_at += len(found)
        return cast(Sequence[Transaction], found)


@dataclass(eq=False)
class HeldOwner:
    """An owner that reports its ledger."""

    ledger: HeldLedger = field(default_factory=HeldLedger)

    def now_ms(self) -> int:
        return NOW_MS


@dataclass
class HeldBroker:
    """A broker of these owners."""

    owners: list[HeldOwner]
    partitions: dict[int, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def ledgers(self) -> list[HeldOwner]:
        return self.owners

    def readiness(self) -> Readiness:
        return Readiness(True, self.partitions)

    def topic_problems(self) -> tuple[str, ...]:
        return self.problems


def watching(broker: HeldBroker) -> Metrics:
    metrics = Metrics()
    metrics.watch(PartitionGauges(broker, lambda: ["silent"], 14 * 86400.0).read)
    return metrics


def shown(metrics: Metrics) -> dict[tuple[str, Labels], float]:
    return {
        (sample.name.removeprefix("txbroker_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if sample.name.startswith("txbroker_")
    }


def test_counters_are_summed_and_the_oldest_counts() -> None:
    committed = [Held(n, 0, decided_at_ms=NOW_MS - 7000 + n) for n in range(2)]
    one = HeldLedger({"a": 1}, {"a": 2}, {"t": 1}, {"a": NOW_MS - 5000}, committed)
    two = HeldLedger({"a": 3, "b": 4}, {}, {"t": 2}, {"a": NOW_MS - 9000, "b": NOW_MS})
    two.committed = [Held(3, 0, decided_at_ms=NOW_MS + 500)]
    broker = HeldBroker(
        [HeldOwner(one), HeldOwner(two)],
        {0: "owned", 1: "owned", 2: "elsewhere", 3: "hanging: since 10:00"},
        ("txbroker.half has 5 partitions",),
    )
    metrics = watching(broker)
    found = shown(metrics)

    assert found["pending", (("group", "a"),)] == 4
    assert found["pending", (("group", "b"),)] == 4
    assert found["pending_oldest_age_seconds", (("group", "a"),)] == 9
    assert found["parked", (("group", "a"),)] == 2
    assert found["refused", (("topic", "t"),)] == 3
    assert found["promotion_lag_markers", ()] == 3
    assert found["promotion_oldest_age_seconds", ()] == 7
    assert found["half_retention_seconds", ()] == 14 * 86400
    assert found["owned_partitions", ()] == 2
    assert found["unreachable_groups", ()] == 1
    assert found["topic_problems", ()] == 1
    states = {
        labels[0][1]: value for (name, labels), value in found.items() if name == "partitions"
    }
    assert states == {"owned": 2, "elsewhere": 1, "hanging": 1}


def test_gauges_of_a_partition_vanish_when_it_moves() -> None:
    held = HeldLedger(
        {"a": 1}, {"a": 1}, {"t": 1}, {"a": NOW_MS}, [Held(1, NOW_MS)], held=[Held(0, NOW_MS)]
    )
    broker = HeldBroker([HeldOwner(held)])
    metrics = watching(broker)
    gone = {
        "pending",
        "parked",
        "refused",
        "pending_oldest_age_seconds",
        "promotion_oldest_age_seconds",
        "half_retention_headroom_seconds",
    }
    assert gone <= {name for name, _ in shown(metrics)}
    broker.owners = []
    found = shown(metrics)
    assert gone & {name for name, _ in found} == set()
    assert found["owned_partitions", ()] == 0
    assert found["promotion_lag_markers", ()] == 0


def test_headroom_is_that_of_the_oldest_without_a_copy() -> None:
    held = [Held(n, NOW_MS - (10 - n) * DAY_MS, kept=n < 4) for n in range(8)]
    owner, metrics = HeldOwner(HeldLedger(held=held)), Metrics()
    broker = HeldBroker([owner, HeldOwner()])
    metrics.watch(PartitionGauges(broker, list, 14 * 86400.0).read)

    def days() -> float:
        return shown(metrics)["half_retention_headroom_seconds", ()] / 86400

    assert days() == 14 - 6
    held[4].kept = True
    assert days() == 14 - 5
    del held[5]
    assert days() == 14 - 4
    for one in held:
        one.kept = True
    assert ("half_retention_headroom_seconds", ()) not in shown(metrics)
    held.append(Held(100, NOW_MS - DAY_MS))
    assert days() == 13


def test_copy_is_at_risk_until_its_transaction_commits() -> None:
    held = [Held(0, NOW_MS - 9 * DAY_MS), Held(1, NOW_MS - 3 * DAY_MS)]
    metrics = watching(HeldBroker([HeldOwner(HeldLedger(held=held))]))

    def days() -> float:
        return shown(metrics)["half_retention_headroom_seconds", ()] / 86400

    held[0].kept = held[0].copying = True
    assert days() == 5
    held[0].kept = held[0].copying = False  # The turn was lost.
    assert days() == 5
    held[0].kept = True
    assert days() == 11


def test_lost_body_is_not_at_risk_until_revived() -> None:
    held = [Held(0, NOW_MS - 20 * DAY_MS, lost=True), Held(1, NOW_MS - 3 * DAY_MS)]
    metrics = watching(HeldBroker([HeldOwner(HeldLedger(held=held))]))
    left_s = [shown(metrics)["half_retention_headroom_seconds", ()]]
    held[0].lost = False
    left_s.append(shown(metrics)["half_retention_headroom_seconds", ()])
    assert [each / 86400 for each in left_s] == [11, -6]


def test_headroom_is_never_overstated() -> None:
    copied = 3 * LOOKED_AT_MAX
    held = [Held(n, NOW_MS - 2 * DAY_MS + n, kept=n < copied) for n in range(copied + 10)]
    owner = HeldOwner(HeldLedger(held=held))
    metrics = watching(HeldBroker([owner]))
    true_s = 12 * 86400 + copied / 1000
    seen = [shown(metrics)["half_retention_headroom_seconds", ()] for _ in range(5)]
    assert seen == sorted(seen)
    assert seen[0] < true_s
    assert seen[-1] == true_s
    before = owner.ledger.looked_at
    shown(metrics)
    assert owner.ledger.looked_at - before == 10


def test_reports_of_owners_are_counted() -> None:
    metrics = Metrics()
    metrics.lost(3)
    metrics.snapshot_written(0.2, 1000)
    metrics.snapshot_written(0.3, 900)
    metrics.snapshot_failed()
    found = shown(metrics)
    assert found["lost_undecided_total", ()] == 3
    assert found["snapshot_seconds_count", ()] == 2
    assert found["snapshot_entries", ()] == 900
    assert found["snapshot_failed_total", ()] == 1


def test_scrape_time_is_independent_of_pending() -> None:
    pending = {f"g{n}": 1000 for n in range(1000)}
    ledgers = [HeldLedger(dict(pending), oldest=dict.fromkeys(pending, NOW_MS)) for _ in range(4)]
    metrics = watching(HeldBroker([HeldOwner(ledger) for ledger in ledgers]))
    took_s = min(_timed(metrics.text) for _ in range(3))
    assert took_s < 0.2
    text = shown(metrics)
    assert sum(value for (name, _), value in text.items() if name == "pending") == 4_000_000


def _timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
