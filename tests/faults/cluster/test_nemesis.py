"""What the fault runs break is drawn as it should be: from a seed, several things at once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from types import SimpleNamespace
from typing import cast

from tests.faults.cluster.linked_fleet import LinkedFleet, PlacedProxy
from tests.faults.cluster.links import Link
from tests.faults.cluster.nemesis import FAULTS, NONE_SHARE, Fault, Field, Nemesis
from tests.faults.cluster.three_nodes import NODES

_DRAWS = 3000


class Kafka:
    """Three nodes that are only names."""

    def __init__(self) -> None:
        self.disk = SimpleNamespace(mounted=True)
        self.nodes = {number: SimpleNamespace(number=number) for number in NODES}
        sources = ["proxy-0", "proxy-1", "proxy-2", *map(str, NODES)]
        self.links = {
            (source, number): Link(f"{source}>{number}", random.Random(1))
            for source in sources
            for number in NODES
        }

    def links_of(self, source: str) -> list[Link]:
        return [self.links[source, number] for number in NODES if str(number) != source]

    def links_to(self, number: int) -> list[Link]:
        return [self.links[str(other), number] for other in NODES if other != number]


def field() -> Field:
    proxies = [SimpleNamespace(prefix="txbroker", launch=None) for _ in range(3)]
    made = SimpleNamespace(
        kafka=Kafka(),
        fleet=SimpleNamespace(proxies=proxies, placed=proxies),
        topics=["one", "two"],
        mortals=[SimpleNamespace(name="mortal-0", kill=None, launch=None)],
    )
    made.name = lambda proxy: f"proxy-{proxies.index(proxy)}"
    return cast(Field, made)


def draws(seed: int) -> list[list[tuple[str, Fault]]]:
    nemesis = Nemesis(field(), seed, list(FAULTS))
    return [nemesis.draw() for _ in range(_DRAWS)]


def test_seed_reproduces_the_faults() -> None:
    one, again, other = (
        [[(kind, fault.who) for kind, fault in drawn] for drawn in draws(seed)]
        for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other


def test_component_has_one_fault_at_a_time() -> None:
    for drawn in draws(1):
        needs = [need for _, fault in drawn for need in fault.needs]
        assert len(needs) == len(set(needs))


def test_all_kinds_occur_alone_and_together() -> None:
    found = draws(1)
    kinds = Counter(kind for drawn in found for kind, _ in drawn)
    assert set(kinds) == set(FAULTS)
    assert len(FAULTS) >= 15
    counts = Counter(len(drawn) for drawn in found)
    assert abs(counts[0] / _DRAWS - NONE_SHARE) < 0.05
    assert counts[2] + counts[3] > _DRAWS / 4


def test_full_disk_needs_a_small_disk() -> None:
    bare = field()
    bare.kafka.disk.mounted = False
    nemesis = Nemesis(bare, 1, ["disk full"])
    assert not any(nemesis.draw() for _ in range(50))


async def test_healing_restores_links() -> None:
    over = field()
    for kind in ("link cut", "broker cut off from brokers", "end of a turn late", "link slow"):
        fault = FAULTS[kind](over, random.Random(1))
        assert fault is not None
        broken = [link for link in over.kafka.links.values() if link.name in fault.needs]
        await fault.inject()
        assert broken
        assert not any(_whole(link) for link in broken), kind
        await fault.heal()
        assert all(_whole(link) for link in broken), kind
        await asyncio.wait_for(broken[0].requests_pass(), 10)


def _whole(link: Link) -> bool:
    fresh = Link("", random.Random(1))
    return link.state() == fresh.state()


async def test_supervisor_restarts_and_reports() -> None:
    fleet = LinkedFleet.__new__(LinkedFleet)
    fleet.placed = [Ended(None), Ended(1, "Error: no connection to Kafka at a:1"), Ended(1, "bug")]
    assert await fleet.supervise() == ["proxy-2 ended unexpectedly: 1: bug"]
    assert [cast(Ended, proxy).started for proxy in fleet.placed] == [0, 1, 1]


class Ended(PlacedProxy):
    """A proxy that has ended, or has not."""

    def __init__(self, code: int | None, *errors: str) -> None:
        super().__init__("", 1)
        self.code = code
        self.stderr = list(errors)
        self.started = 0

    @property
    def died(self) -> int | None:
        return self.code

    async def again(self) -> None:
        self.started += 1


def test_starting_proxy_may_fail() -> None:
    proxy = PlacedProxy("", 1)
    assert proxy.stopped_well(0)
    assert proxy.stopped_well(-15)
    assert not proxy.stopped_well(1)
    for error in ("no connection to Kafka at a:1", "broker 2 did not answer (TimeoutError())"):
        proxy.stderr.append(f"Error: {error}")
        assert proxy.stopped_well(1)
    proxy.stderr.append("Error: the handler is closed (RuntimeError); `txbroker --debug ...` shows")
    assert not proxy.stopped_well(1)
    proxy.stderr.append("Error: no connection to Kafka at a:1")
    proxy.stdout.append("ready http://127.0.0.1:1 kafka a:1")
    assert [proxy.stopped_well(code) for code in (0, -15, 1)] == [True, False, False]
