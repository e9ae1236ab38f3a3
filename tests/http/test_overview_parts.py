"""Overviews merged from the reports of several proxies, and rates from counts."""

from __future__ import annotations

from typing import Any

import pytest

from txbroker.contract.service import (
    INSTANCES_SHOWN_MAX,
    OVERVIEW_GROUPS_MAX,
    UNREACHABLE,
    GroupOverview,
    Overview,
    PartitionOverview,
    ProxyOverview,
    Rates,
)
from txbroker.proxy.observe.counting import WINDOW_S, RateCounter
from txbroker.proxy.observe.overview import joined

A, B = "http://a:8470", "http://b:8470"


def reported(url: str, *partitions: PartitionOverview, **fields: Any) -> Overview:
    given = {"groups": (), "groups_left_off": 0, "refused_topics": {}, **fields}
    return Overview(1, True, (ProxyOverview(url),), partitions, **given)


def owned(number: int, url: str, pending: int = 0) -> PartitionOverview:
    return PartitionOverview(number, url, "owned", "", pending, 0, 0, 0)


def test_each_partition_is_reported_once_by_its_owner() -> None:
    moving = PartitionOverview(1, A, "suspended")
    overview = joined(
        [A, B], [reported(A, owned(0, A), moving), reported(B, owned(1, B, 7))], {}, 5
    )
    assert [(p.partition, p.owner, p.pending) for p in overview.partitions] == [
        (0, A, 0),
        (1, B, 7),
    ]
    assert overview.complete
    assert overview.at_ms == 5
    turned = joined([A, B], [reported(B, owned(1, B, 7)), reported(A, owned(0, A), moving)], {}, 5)
    assert turned.partitions == overview.partitions


def test_unreported_partition_makes_overview_incomplete() -> None:
    overview = joined([A, B, ""], [reported(A, owned(0, A))], {B: "gone"}, 5)
    assert [(p.state, p.pending) for p in overview.partitions] == [
        ("owned", 0),
        (UNREACHABLE, None),
        ("none", None),
    ]
    assert overview.partitions[1].why == "gone"
    assert [(p.url, p.reached, p.why) for p in overview.proxies] == [
        (A, True, ""),
        (B, False, "gone"),
    ]
    assert not overview.complete
    # It may have sessions, if nothing else.
    assert not joined([A], [reported(A, owned(0, A))], {B: "gone"}, 5).complete
    # An owner that answers, but has not opened it yet.
    assert joined([A], [reported(A)], {}, 5).partitions == (PartitionOverview(0, A, "none"),)


def test_group_is_summed_over_proxies() -> None:
    one = GroupOverview("g", 2, 1, 5.0, 2, ("x", "y"), 1000, "later")
    other = GroupOverview("g", 3, 0, 9.0, 2, ("y", "z"), 500, "refused")
    overview = joined([], [reported(A, groups=(one,)), reported(B, groups=(other,))], {}, 5)
    assert overview.groups == (GroupOverview("g", 5, 1, 9.0, 3, ("x", "y", "z"), 500, "refused"),)


def test_instance_count_is_at_least_one_proxys() -> None:
    names = tuple(f"i{number}" for number in range(INSTANCES_SHOWN_MAX))
    many = GroupOverview("g", sessions=500, instances=names)
    overview = joined([], [reported(A, groups=(many,)), reported(B, groups=(many,))], {}, 5)
    assert (overview.groups[0].sessions, overview.groups[0].instances) == (500, names)


def test_groups_that_need_attention_come_first() -> None:
    idle = [GroupOverview(f"idle-{n:05}") for n in range(OVERVIEW_GROUPS_MAX)]
    away = GroupOverview("z-away", unreachable_since_ms=1)
    parked = GroupOverview("y-parked", parked=1)
    old = GroupOverview("x-old", pending=1, oldest_pending_age_s=99.0)
    overview = joined(
        [], [reported(A, groups=(*idle, old, parked, away), groups_left_off=2)], {}, 5
    )
    assert [g.group for g in overview.groups[:4]] == ["z-away", "y-parked", "x-old", "idle-00000"]
    assert len(overview.groups) == OVERVIEW_GROUPS_MAX
    assert overview.groups_left_off == 5


def test_refused_are_summed_by_topic() -> None:
    parts = [reported(A, refused_topics={"t": 1, "u": 2}), reported(B, refused_topics={"t": 3})]
    assert joined([], parts, {}, 5).refused_topics == {"t": 4, "u": 2}


# --- rates -----------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_rates_are_those_of_the_last_seconds() -> None:
    clock = Clock()
    rates = RateCounter(clock)
    assert rates.per_second() == Rates()
    for _ in range(20):
        clock.now_s += 1
        rates.prepared += 5
        rates.decided += 1
        rates.promoted += 3
        rates.sample()
    counted = rates.per_second()
    assert counted.prepared_per_s == pytest.approx(5.0)
    assert counted.decided_per_s == pytest.approx(1.0)
    assert counted.promoted_per_s == pytest.approx(3.0)
    # Then nothing happens: the rate fades within the window, and is 0 after it.
    for _ in range(int(WINDOW_S) // 2):
        clock.now_s += 1
        rates.sample()
    assert rates.per_second().prepared_per_s == pytest.approx(2.5)
    for _ in range(int(WINDOW_S)):
        clock.now_s += 1
        rates.sample()
    assert rates.per_second() == Rates()


def test_late_samples_keep_rates_correct() -> None:
    clock = Clock()
    rates = RateCounter(clock)
    rates.promoted += 50
    clock.now_s += 1
    rates.sample()
    clock.now_s += 99  # Kafka did not answer meanwhile
    rates.promoted += 10
    assert rates.per_second().promoted_per_s == pytest.approx(10 / 99)


def test_few_samples_are_kept() -> None:
    clock = Clock()
    rates = RateCounter(clock)
    for _ in range(1000):
        clock.now_s += 1
        rates.sample()
    assert len(rates._samples) <= WINDOW_S + 2
