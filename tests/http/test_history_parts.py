"""The history of one proxy: bounded, sampled by the second; and histories of several joined."""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from txbroker import __version__
from txbroker.contract.service import (
    HISTORY_STEPS_S,
    CheckReport,
    History,
    HistoryEvent,
    HistoryPoint,
    HistoryRequest,
    OperatorAction,
    Readiness,
)
from txbroker.diagnosis.table import PROXY_WORDS
from txbroker.proxy.observe.counting import RateCounter
from txbroker.proxy.observe.history import (
    EVENTS_MAX,
    GROUPS_MAX,
    ProxyHistory,
    joined_history,
)
from txbroker.proxy.observe.observed import Observed

START_MS = 1_700_000_000_000
NAMES = tuple(f"group-{number}" for number in range(GROUPS_MAX + 50))


@dataclass
class Index:
    """The counts of a ledger that a sample reads."""

    pending_by_group: Counter[str] = field(default_factory=Counter)
    parked_by_group: Counter[str] = field(default_factory=Counter)

    def oldest_pending_ms(self, group: str) -> int | None:
        return START_MS if self.pending_by_group[group] else None


class Proxy(Observed):
    """A proxy with one half partition, whose numbers and clock a test sets."""

    def __init__(self) -> None:
        self.second = 0
        self.checked: dict[str, list[int]] = {}
        self.bounds, self.counts = (0.001, 0.01, 0.1), [0, 0, 0, 0]
        self.prepares = [0, 0, 0, 0]
        self.present: list[tuple[str, str]] = []
        self.index = Index()
        self.rates = RateCounter()
        self.silent_ms: int | None = None
        self.owner: Any = SimpleNamespace(
            partition=0, ledger=SimpleNamespace(index=self.index), rates=self.rates,
            suspended_since_ms=None, clock=SimpleNamespace(now_ms=self.now_ms),
            kafka=SimpleNamespace(silent_since_ms=lambda now_ms: self.silent_ms),
        )  # fmt: skip
        self.owners = [self.owner]
        self.half_partitions = 1
        partitions = SimpleNamespace(
            url="http://a:1",
            open=lambda: dict(enumerate(self.owners)),
            assigned=lambda: ("http://a:1",) * self.half_partitions,
        )
        self.broker: Any = SimpleNamespace(
            partitions=partitions, now_ms=self.now_ms, readiness=lambda: Readiness(True, {})
        )
        self.past = self.history = ProxyHistory(self)

    def now_ms(self) -> int:
        return START_MS + self.second * 1000

    def take_checks(self) -> dict[str, list[int]]:
        taken, self.checked = self.checked, {}
        return taken

    def latencies(self) -> dict[str, tuple[tuple[float, ...], list[int]]]:
        return {
            "prepare_latency_seconds": (self.bounds, self.prepares),
            "decision_latency_seconds": (self.bounds, self.counts),
            "promotion_latency_seconds": (self.bounds, [0, 0, 0, 0]),
        }

    def problems(self) -> list[tuple[str, str]]:
        return self.present

    def reports(self, group: str, now_ms: int) -> tuple[CheckReport, ...]:
        return (CheckReport("1", now_ms, "e", "commit", group),)

    def prepare(self, group: str, count: int = 1) -> None:
        self.rates.prepared_by.extend([group] * count)
        self.index.pending_by_group[group] += count

    def run(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.history.sample()
            self.second += 1

    def read(self, group: str = "", since_s: float = 300, step_s: float | None = None) -> History:
        # A step is complete once the next one has begun.
        self.history.sample()
        return self.history.read(HistoryRequest(group, since_s, step_s))


def points(history: History, name: str) -> list[Any]:
    return [getattr(point, name) for point in history.points]


def test_each_second_has_its_counts() -> None:
    proxy = Proxy()
    for count in (3, 0, 2):
        proxy.prepare("g", count)
        proxy.run()
    for part in ("", "g"):
        read = proxy.read(part)
        assert points(read, "prepared") == [3, 0, 2]
        assert points(read, "pending") == [3, 3, 5]
        assert points(read, "at_ms") == [START_MS + second * 1000 for second in range(3)]
        assert points(read, "oldest_pending_age_s") == [None, 1.0, 2.0]
    assert points(proxy.read("other"), "pending") == [0, 0, 0]


def test_longer_steps_reach_back_an_hour() -> None:
    proxy = Proxy()
    for _ in range(4000):
        proxy.prepare("g")
        proxy.run()
    for since_s, step_s, count in ((300, 1, 300), (900, 10, 90), (3600, 30, 120)):
        read = proxy.read("g", since_s)
        assert (read.step_s, len(read.points)) == (step_s, count)
        assert set(points(read, "prepared")) == {step_s}
        assert read.points[-1].pending is not None
        assert read.points[-1].pending >= 4000 - step_s
    assert proxy.read("g", 3600, 1).step_s == 1
    assert len(proxy.read("g", 3600, 1).points) == 300
    assert proxy.read("g", 60, 30).step_s == 30


def test_idle_group_is_known_to_be_idle() -> None:
    proxy = Proxy()
    proxy.prepare("g")
    proxy.run()
    proxy.index.pending_by_group.clear()
    proxy.run(60)
    read = proxy.read("g", 3600)
    assert points(read, "pending") == [0] * len(read.points)
    assert sum(points(read, "prepared")) == 1
    assert points(proxy.read("g"), "prepared") == [1] + [0] * 60


def test_what_is_now_is_unknown_while_kafka_is_silent() -> None:
    proxy = Proxy()
    proxy.prepare("g")
    proxy.run()
    proxy.silent_ms = 1
    proxy.run(2)
    proxy.silent_ms = None
    proxy.run()
    for group in ("", "g", "idle"):
        known = 0 if group == "idle" else 1
        assert points(proxy.read(group), "pending") == [known, None, None, known]
    proxy.owner.suspended_since_ms = 1
    proxy.run()
    assert points(proxy.read(), "pending")[-1] is None


def test_last_sample_of_an_idle_group_may_be_unknown() -> None:
    """A group is looked at for one longest step after it was busy; all groups always."""
    proxy = Proxy()
    proxy.prepare("g")
    proxy.run()
    proxy.index.pending_by_group.clear()
    longest_s = HISTORY_STEPS_S[-1]
    proxy.run(longest_s - 1)
    proxy.silent_ms = 1
    proxy.run(2)
    proxy.silent_ms = None
    proxy.run(900)
    assert None in points(proxy.read("g", 900, 10), "pending")
    assert None in points(proxy.read("g", 3600, longest_s), "pending")
    assert None not in points(proxy.read("", 3600, longest_s), "pending")
    assert proxy.history.growth_per_s("g") == 0


def test_time_without_samples_is_left_out() -> None:
    proxy = Proxy()
    proxy.run()
    proxy.second += 5
    proxy.run(2)
    assert points(proxy.read(), "at_ms") == [START_MS + n * 1000 for n in (0, 6, 7)]
    proxy.second = 0  # a broker's clock was put back
    proxy.run(2)
    assert points(proxy.read(), "at_ms")[:3] == [START_MS + n * 1000 for n in (0, 6, 7)]


def test_percentiles_are_those_of_the_buckets_of_all_proxies() -> None:
    one, other = Proxy(), Proxy()
    one.counts[1] += 98
    other.counts[3] += 2
    for proxy in (one, other):
        proxy.run()
    for group in ("", "idle"):
        parts = [one.read(group), other.read(group)]
        (point,) = joined_history(parts, complete=True).points
        latency = point.latency["decision"]
        assert (latency.count, latency.p99_s) == (100, 0.1)
        assert 0.001 < latency.p50_s < 0.01
        assert (point.buckets, point.proxies) == ({}, 2)
    one.run()
    assert joined_history([one.read()], complete=True).points[-1].latency == {}


def test_histories_are_summed_and_unknown_stays_unknown() -> None:
    first = HistoryPoint(1000, 1, 2, 3, 4, 5, 6.0)
    second = HistoryPoint(1000, 10, 20, 30, None, 50, 60.0)
    alone = HistoryPoint(2000, pending=7)
    parts = [History(1, (first, alone)), History(1, (second,))]
    # The newest step is of one proxy only, so it would look like a fall.
    (both,) = joined_history(parts, complete=True).points
    assert (both.prepared, both.decided, both.promoted) == (11, 22, 33)
    assert (both.pending, both.parked, both.oldest_pending_age_s) == (None, 55, 60.0)
    (partial,) = joined_history(parts, complete=False).points
    assert (partial.prepared, partial.pending, partial.parked) == (11, None, None)


@pytest.mark.parametrize("group", ["", "g", "idle"])
def test_pending_is_unknown_while_a_half_partition_has_no_owner(group: str) -> None:
    one, other = Proxy(), Proxy()
    for proxy in (one, other):
        proxy.half_partitions = 2
        proxy.prepare("g")
    owners = other.owners
    for owned in (owners, [], [], owners, [*owners, one.owner]):
        other.owners = owned
        for proxy in (one, other):
            proxy.run()
    known = 0 if group == "idle" else 2
    parts = [proxy.read(group) for proxy in (one, other)]
    joined = joined_history(parts, complete=True)
    # At the end, both have the same one.
    assert points(joined, "pending") == [known, None, None, known, None]
    assert points(joined, "parked") == [0, None, None, 0, None]
    ages = points(joined, "oldest_pending_age_s")
    assert ages == [None, None, None, 3.0 if known else None, None]
    assert points(joined, "observed") == [2, 1, 1, 2, 3]
    assert points(joined, "prepared") == [known, 0, 0, 0, 0]
    assert joined.half_partitions == 2
    assert set(points(joined_history(parts[:1], complete=True), "pending")) == {None}
    # A proxy of an older version does not tell what it observed.
    older = structs.replace(
        parts[1],
        half_partitions=0,
        points=tuple(structs.replace(point, observed=None) for point in parts[1].points),
    )
    mixed = points(joined_history([older, parts[0]], complete=True), "pending")
    assert mixed[:2] == [known, known // 2]


def test_last_sample_of_a_step_counts() -> None:
    proxy = Proxy()
    proxy.run(15)
    proxy.owners = []
    proxy.run(15)
    joined = joined_history([proxy.read(step_s=10)], complete=True)
    assert points(joined, "pending") == [0, None, None]


def test_actions_of_a_partition_that_moved_are_shown_once() -> None:
    seen = OperatorAction(5, "rollback", "Ada", "r", "g", "id", 3)
    again = OperatorAction(5, "rollback", "Ada", "r", "g", "id", 9)
    later = OperatorAction(6, "commit", "Ada", "r", "g", "id2")
    parts = [
        History(1, actions=(later, seen), actions_since_ms={0: 7, 1: 1}),
        History(1, actions=(again,), actions_since_ms={0: 3}),
    ]
    joined = joined_history(parts, complete=True)
    assert joined.actions == (later, again)
    assert joined.actions_since_ms == {0: 3, 1: 1}


def noted(proxy: Proxy) -> list[tuple[str, str, str]]:
    return [(event.kind, event.text, event.group) for event in proxy.read().events]


def test_events_begin_and_end() -> None:
    proxy = Proxy()
    proxy.run(6)
    proxy.present = [("Checks failing", "g"), ("Not ready", "")]
    proxy.run(6)
    proxy.present = [("Not ready", "")]
    proxy.run(6)
    proxy.owners = []
    proxy.run(6)
    assert noted(proxy) == [
        ("start", f"version {__version__}", ""),
        ("takeover", "half partition 0", ""),
        ("problem", "Checks failing", "g"),
        ("problem", "Not ready", ""),
        ("solved", "Checks failing", "g"),
        ("handover", "half partition 0", ""),
    ]
    assert {event.group for event in proxy.read("g").events} == {"", "g"}
    assert {event.group for event in proxy.read("h").events} == {""}
    assert proxy.read("g").checks[0].answer == "g"
    assert proxy.read().checks == ()


@pytest.mark.parametrize("idle_s", [0, 1, 7])
def test_what_moves_with_a_half_partition_has_neither_begun_nor_ended(idle_s: int) -> None:
    proxy = Proxy()
    owners, proxy.owners = proxy.owners, []
    proxy.run(idle_s)
    proxy.owners, proxy.present = owners, [("Parking", "g"), ("Not ready", "")]
    proxy.run(10)
    proxy.owners, proxy.present = [], []
    proxy.run(10)
    begun, *events = noted(proxy)
    assert begun[0] == "start"
    assert events == [
        ("takeover", "half partition 0", ""),
        ("problem", "Not ready", ""),
        ("handover", "half partition 0", ""),
        ("solved", "Not ready", ""),
    ]
    proxy.present = [("Parking", "g")]
    proxy.run(10)
    assert noted(proxy)[-1] == ("problem", "Parking", "g")


def test_problems_of_a_proxy_stay_when_half_partitions_move() -> None:
    assert {
        "Kafka does not answer", "Not ready", "File not read", "Prepare slow", "Undecided lost",
    } == PROXY_WORDS  # fmt: skip


def test_growth_is_that_of_the_alert() -> None:
    proxy = Proxy()
    for _ in range(900):
        proxy.prepare("g", 2)
        proxy.prepare("steady")
        proxy.index.pending_by_group["steady"] = 9
        proxy.run()
        if proxy.second == 300:
            assert proxy.history.growth_per_s("g") is None  # too short
    assert proxy.history.growth_per_s("g") == pytest.approx(2.0, rel=0.01)
    assert proxy.history.growth_per_s("steady") == pytest.approx(0.0)
    assert proxy.history.growth_per_s("unknown") is None
    # Transactions that came with a half partition are not new.
    proxy.owners = []
    proxy.run()
    assert proxy.history.growth_per_s("g") is None


def test_slow_prepares_of_five_minutes_are_known() -> None:
    proxy = Proxy()
    proxy.run(60)
    assert proxy.history.prepare_p99_s() is None
    proxy.prepares = [98, 0, 2, 0]
    proxy.run(60)
    assert proxy.history.prepare_p99_s() == pytest.approx(0.055)
    proxy.run(400)
    assert proxy.history.prepare_p99_s() is None


def test_lost_of_the_last_hour_are_counted() -> None:
    proxy = Proxy()
    proxy.rates.lost += 3
    proxy.run(60)
    assert proxy.history.lost() == 3
    proxy.second += 3700
    proxy.run(60)
    assert proxy.history.lost() == 0


def test_idle_groups_make_room_and_busy_ones_are_kept() -> None:
    proxy = Proxy()
    for name in NAMES[:GROUPS_MAX]:
        proxy.prepare(name)
    proxy.run(5)
    proxy.prepare(NAMES[-1])
    proxy.run(2)
    # It is not known what it did, which is not the same as nothing.
    assert points(proxy.read(NAMES[-1]), "pending") == []
    proxy.index.pending_by_group.clear()
    proxy.run(70)
    proxy.prepare(NAMES[-1])
    proxy.run(2)
    assert points(proxy.read(NAMES[-1]), "prepared") == [1, 0]


def busy(proxy: Proxy) -> None:
    """Let something happen in more groups than have a series."""
    for name in NAMES:
        proxy.prepare(name)
        proxy.checked[name] = [1, 0, 0, 2, 0, 0]
    proxy.counts[1] += 1
    proxy.present = [("x" * 1000 + str(proxy.second), NAMES[0])]


def test_an_hour_of_many_groups_fits_four_mebibytes() -> None:
    tracemalloc.start()
    proxy = Proxy()
    for proxy.second in range(0, 3700, 30):
        busy(proxy)
        proxy.present = [(f"{proxy.second} {n} {'x' * 1000}", NAMES[0]) for n in range(10)]
        proxy.history.sample()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 2 * 2**20 < proxy.history.nbytes < size < 4 * 2**20
    assert len(proxy.read(since_s=3600).events) == EVENTS_MAX


@pytest.mark.parametrize("groups", [GROUPS_MAX, 10_000])
def test_a_sample_takes_a_hundredth_of_a_second_at_most(groups: int) -> None:
    """Which is one per cent of a processor."""
    proxy = Proxy()
    for number in range(groups):
        proxy.prepare(f"waiting-{number}")
    took_s = []
    for proxy.second in range(50):
        busy(proxy)
        began_s = time.thread_time()
        proxy.history.sample()
        took_s.append(time.thread_time() - began_s)
    assert min(took_s) < 0.01
    assert proxy.read().points[-1].pending == groups + 49 * len(NAMES)


def test_old_events_are_left_out() -> None:
    proxy = Proxy()
    proxy.run(2)
    proxy.second += 400
    proxy.run()
    assert proxy.read().events == ()
    kinds = [event.kind for event in proxy.read(since_s=3600).events]
    assert kinds == ["start", "takeover"]
    shown = joined_history(
        [History(1, events=(HistoryEvent(9, "a", ""), HistoryEvent(1, "b", "")))], complete=True
    )
    assert [event.kind for event in shown.events] == ["b", "a"]
