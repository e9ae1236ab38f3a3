"""Breaks brokers, proxies and the links between them: several things at once, drawn from a seed,
drawn again every 5 to 30 s, or less, and for a quarter of the time nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaException

from tests.faults.cluster.linked_fleet import LinkedFleet, PlacedProxy
from tests.faults.cluster.links import Ends, Link
from tests.faults.cluster.services import MortalProducer
from tests.faults.cluster.three_nodes import NODES, ThreeNodes
from tests.kit.proxies import ProxyProcess
from tests.kit.topic_reader import Along
from tests.kit.workload import Recorder

HOLD_MIN_S, HOLD_MAX_S = 5.0, 30.0
"""Duration of a fault, seconds; short ones are more likely."""
NONE_SHARE = 0.25
OVER = "over: "
"""What the note begins with that a fault is over."""
AT_ONCE_MAX = 4
SLOW_S = 0.15
_DISK_PATIENCE_S = 5.0


class Field:
    """All that can be broken.

    Args:
        topics: targets of which records may be deleted.
        mortals: producers that may be killed.
    """

    def __init__(
        self,
        kafka: ThreeNodes,
        fleet: LinkedFleet,
        recorder: Recorder,
        along: Along,
        topics: Sequence[str],
        mortals: Sequence[MortalProducer],
    ) -> None:
        self.kafka = kafka
        self.fleet = fleet
        self.recorder = recorder
        self.along = along
        self.topics = list(topics)
        self.mortals = list(mortals)
        self.deleted: dict[tuple[str, int], int] = {}
        """Up to where records were deleted, by target partition."""
        self.wrong: list[str] = []
        """Failures without an injected fault."""

    def name(self, proxy: ProxyProcess) -> str:
        """What a proxy, and the source of its links, is called."""
        return f"proxy-{self.fleet.proxies.index(proxy)}"


async def _nothing() -> None:
    return


@dataclass(frozen=True)
class Fault:
    """One thing that breaks.

    Attributes:
        who: the broken component, for the history.
        needs: components that no other fault may break at the same time.
    """

    who: str
    needs: frozenset[str]
    inject: Callable[[], Awaitable[None]]
    heal: Callable[[], Awaitable[None]] = _nothing


Draw = Callable[[Field, random.Random], Fault | None]


# --- proxies ----------------------------------------------------------------------------------


def _one_proxy(field: Field, fate: random.Random) -> list[ProxyProcess]:
    return [fate.choice(field.fleet.proxies)]


def _two_proxies(field: Field, fate: random.Random) -> list[ProxyProcess]:
    return fate.sample(field.fleet.proxies, 2)


def _all_proxies(field: Field, fate: random.Random) -> list[ProxyProcess]:
    return field.fleet.proxies


def _proxies(choose: Callable[..., list[ProxyProcess]], inject: str, heal: str) -> Draw:
    """Faults of proxies by the methods that begin and end each."""

    def draw(field: Field, fate: random.Random) -> Fault:
        proxies = choose(field, fate)
        names = [field.name(proxy) for proxy in proxies]

        async def all_of_them(what: str) -> None:
            for proxy in proxies:
                # One that has just ended because Kafka was away can neither hang nor wake up.
                with contextlib.suppress(ProcessLookupError):
                    await _call(proxy, what)

        return Fault(
            " ".join(names),
            frozenset(names),
            lambda: all_of_them(inject),
            lambda: all_of_them(heal),
        )

    return draw


async def _call(what: object, method: str) -> None:
    done = getattr(what, method)()
    if done is not None:
        await done


def _proxy_stopped(field: Field, fate: random.Random) -> Fault:
    proxy = fate.choice(field.fleet.placed)
    name = field.name(proxy)
    return Fault(name, frozenset([name]), lambda: _stop(field, proxy), proxy.launch)


async def _stop(field: Field, proxy: PlacedProxy) -> None:
    """Ask a proxy to end; it must, under any other fault."""
    if proxy.found_no_kafka:
        await proxy.kill()
        return
    began = time.monotonic()
    code: int | None = None
    with contextlib.suppress(TimeoutError):
        code = await proxy.stop()
    if code is None or not proxy.stopped_well(code):
        took_s = time.monotonic() - began
        field.wrong.append(f"{field.name(proxy)} was asked to end: {code} after {took_s:.0f} s")


def _proxy_bounced(field: Field, fate: random.Random) -> Fault:
    """It is killed and there again at once, several times."""
    proxy = fate.choice(field.fleet.proxies)
    times = fate.randint(1, 3)
    pause_s = fate.uniform(0, 4)

    async def bounce() -> None:
        for _ in range(times):
            await proxy.kill()
            await proxy.launch()
            await asyncio.sleep(pause_s)

    name = field.name(proxy)
    return Fault(name, frozenset([name]), bounce)


def _rolling_restart(field: Field, fate: random.Random) -> Fault:
    async def roll() -> None:
        for proxy in field.fleet.placed:
            await _stop(field, proxy)
            await proxy.launch()
            await asyncio.sleep(1)

    names = [field.name(proxy) for proxy in field.fleet.proxies]
    return Fault("all proxies", frozenset(names), roll)


# --- brokers ----------------------------------------------------------------------------------


def _one(fate: random.Random) -> Sequence[int]:
    return [fate.choice(NODES)]


def _nodes(choose: Callable[[random.Random], Sequence[int]], inject: str, heal: str) -> Draw:
    """Faults of brokers by the methods that begin and end each."""

    def draw(field: Field, fate: random.Random) -> Fault:
        numbers = choose(fate)
        nodes = [field.kafka.nodes[number] for number in numbers]

        async def broken() -> None:
            for node in nodes:
                await _call(node, inject)

        async def healed() -> None:
            for node in nodes:
                await _call(node, heal)
            for node in nodes:
                await node.ready()

        names = [f"node-{number}" for number in numbers]
        return Fault(" ".join(names), frozenset(names), broken, healed)

    return draw


def _disk_full(field: Field, fate: random.Random) -> Fault | None:
    kafka, number = field.kafka, NODES[-1]
    if not kafka.disk.mounted:
        return None
    node = kafka.nodes[number]

    async def fill() -> None:
        await asyncio.to_thread(kafka.disk.fill)

    async def empty() -> None:
        kafka.disk.empty()
        # A broker that has met the full disk ends; it may just be about to.
        if await node.ended(_DISK_PATIENCE_S):
            await node.launch()
        await node.ready()

    return Fault(f"node-{number}", frozenset([f"node-{number}"]), fill, empty)


def _coordinator_killed(field: Field, fate: random.Random) -> Fault:
    """The broker that leads what the proxies' transactions or the last half depend on."""
    topic, partition = fate.choice(
        [
            ("__transaction_state", fate.randrange(4)),
            ("__consumer_offsets", fate.randrange(4)),
            (f"{field.fleet.proxies[0].prefix}.half", fate.randrange(4)),
            (f"{field.fleet.proxies[0].prefix}.op", fate.randrange(4)),
            (field.topics[0], 0),
        ]
    )

    async def kill() -> None:
        with contextlib.suppress(KafkaException, KeyError):
            found = await asyncio.to_thread(field.kafka.leader, topic, partition)
            if found in field.kafka.nodes:
                await field.kafka.nodes[found].kill()

    async def launch() -> None:
        for node in field.kafka.nodes.values():
            if not node.running:
                await node.launch()
        for node in field.kafka.nodes.values():
            await node.ready()

    needs = frozenset(f"node-{number}" for number in NODES)
    return Fault(f"leader of {topic}-{partition}", needs, kill, launch)


# --- links ------------------------------------------------------------------------------------


def _one_link(field: Field, fate: random.Random) -> list[Link]:
    """From one proxy to one broker."""
    proxy = field.name(fate.choice(field.fleet.proxies))
    return [fate.choice(field.kafka.links_of(proxy))]


def _all_links(field: Field, fate: random.Random) -> list[Link]:
    """From one proxy to all brokers."""
    return field.kafka.links_of(field.name(fate.choice(field.fleet.proxies)))


def _some_links(field: Field, fate: random.Random) -> list[Link]:
    return fate.choice([_one_link, _all_links])(field, fate)


def _links_of_proxies(field: Field, fate: random.Random) -> list[Link]:
    """Of all proxies: each ends few transactions before it has to claim again."""
    names = [field.name(proxy) for proxy in field.fleet.proxies]
    return [link for name in names for link in field.kafka.links_of(name)]


def _broker_cut_off(field: Field, fate: random.Random) -> list[Link]:
    """From the majority, not from the proxies."""
    number = fate.choice(NODES)
    return [*field.kafka.links_of(str(number)), *field.kafka.links_to(number)]


def _to_one_broker(field: Field, fate: random.Random) -> list[Link]:
    """It reaches the others; none reaches it."""
    return field.kafka.links_to(fate.choice(NODES))


def _between_two_brokers(field: Field, fate: random.Random) -> list[Link]:
    """Two cannot see each other, the third sees both."""
    one, other = fate.sample(NODES, 2)
    links = field.kafka.links
    return [links[str(one), other], links[str(other), one]]


def _links(choose: Callable[..., list[Link]], breaks: Callable[[Link], None]) -> Draw:
    def draw(field: Field, fate: random.Random) -> Fault:
        links = choose(field, fate)

        async def broken() -> None:
            for link in links:
                breaks(link)

        async def healed() -> None:
            for link in links:
                link.heal()

        names = [link.name for link in links]
        return Fault(" ".join(names), frozenset(names), broken, healed)

    return draw


def _slow(link: Link) -> None:
    link.delay_s = SLOW_S


def _ends(how: Ends) -> Draw:
    def meet(link: Link) -> None:
        link.ends = how

    return _links(_links_of_proxies, meet)


# --- producers, records -----------------------------------------------------------------------


def _producer_killed(field: Field, fate: random.Random) -> Fault:
    """Between its local commit and its decision, or at any other point."""
    mortal = fate.choice(field.mortals)
    return Fault(mortal.name, frozenset([mortal.name]), mortal.kill, mortal.launch)


def _records_deleted(field: Field, fate: random.Random) -> Fault:
    """As a target's retention does it, up to what consumers have read."""
    topic = fate.choice(field.topics)

    async def delete() -> None:
        read_to = {
            place: int(to * 0.8) for place, to in field.along.read_to().items() if place[0] == topic
        }
        with contextlib.suppress(KafkaException):
            # Without an answer the deletion may have happened: the judge assumes that it did.
            for place, to in read_to.items():
                field.deleted[place] = max(to, field.deleted.get(place, 0))
            await asyncio.to_thread(field.kafka.delete_records, read_to)

    return Fault(topic, frozenset([topic]), delete)


FAULTS: dict[str, Draw] = {
    "proxy killed": _proxies(_one_proxy, "kill", "launch"),
    "all proxies killed": _proxies(_all_proxies, "kill", "launch"),
    # It wakes up when another one has its place: a zombie owner.
    "proxy hangs": _proxies(_one_proxy, "pause", "resume"),
    "two proxies hang": _proxies(_two_proxies, "pause", "resume"),
    "proxy stopped": _proxy_stopped,
    "proxy bounced": _proxy_bounced,
    "rolling restart": _rolling_restart,
    "broker killed": _nodes(_one, "kill", "launch"),
    "two brokers killed": _nodes(lambda fate: fate.sample(NODES, 2), "kill", "launch"),
    "all brokers killed": _nodes(lambda fate: NODES, "kill", "launch"),
    "coordinator or leader killed": _coordinator_killed,
    "broker hangs": _nodes(_one, "pause", "resume"),
    "broker stopped": _nodes(_one, "stop", "launch"),
    "disk full": _disk_full,
    "link cut": _links(_one_link, Link.cut),
    "proxy cut off": _links(_all_links, Link.cut),
    "requests held back": _links(_some_links, lambda link: link.cut(answers=False)),
    "answers held back": _links(_some_links, lambda link: link.cut(requests=False)),
    "link slow": _links(_some_links, _slow),
    "connections reset": _links(_some_links, Link.reset),
    "end of a turn late": _ends(Ends.LATE),
    "end of a turn late, connection reset": _ends(Ends.LATE_AND_RESET),
    "end of a turn unanswered": _ends(Ends.UNANSWERED),
    "broker cut off from brokers": _links(_broker_cut_off, Link.cut),
    "broker not reached by brokers": _links(_to_one_broker, Link.cut),
    "two brokers cut off from each other": _links(_between_two_brokers, Link.cut),
    "producer killed": _producer_killed,
    "target records deleted": _records_deleted,
}


class Nemesis:
    """Draws and carries out.

    Args:
        kinds: names in `FAULTS`.
        hold_max_s: for how long a draw lasts at most, seconds.

    Attributes:
        counts: how often each kind was injected.
    """

    def __init__(
        self, field: Field, seed: int, kinds: Sequence[str], hold_max_s: float = HOLD_MAX_S
    ) -> None:
        self._field = field
        self._hold_span_s = hold_max_s - HOLD_MIN_S
        self._fate = random.Random(f"{seed}/nemesis")
        self._kinds = list(kinds)
        self.counts: Counter[str] = Counter()

    async def run(self, end: float) -> None:
        """Break and heal until then, by the monotonic clock; leaves everything healed."""
        while (left := end - time.monotonic()) > HOLD_MIN_S:
            faults = self.draw()
            hold_s = min(left, HOLD_MIN_S + self._hold_span_s * self._fate.random() ** 2)
            try:
                for kind, fault in faults:
                    self.counts[kind] += 1
                    self._field.recorder.note(kind, fault.who)
                await asyncio.gather(*[fault.inject() for _, fault in faults])
                await asyncio.sleep(hold_s)
            finally:
                await asyncio.gather(*[fault.heal() for _, fault in faults])
                for kind, fault in faults:
                    self._field.recorder.note(OVER + kind, fault.who)
            await self._no_process_died()

    async def _no_process_died(self) -> None:
        """Report each process that ended without a fault, and restart it."""
        field = self._field
        field.wrong += await field.fleet.supervise()
        for number, node in field.kafka.nodes.items():
            if not node.running:
                field.wrong.append(f"node-{number} ended unexpectedly: {node.output()[-300:]}")
                await node.launch()
                await node.ready()

    def draw(self) -> list[tuple[str, Fault]]:
        """Draw what breaks next, by kind; often nothing."""
        if self._fate.random() < NONE_SHARE:
            return []
        drawn: list[tuple[str, Fault]] = []
        taken: set[str] = set()
        count = self._fate.randint(1, AT_ONCE_MAX)
        for kind in self._fate.sample(self._kinds, min(count, len(self._kinds))):
            fault = FAULTS[kind](self._field, self._fate)
            if fault is not None and not taken & fault.needs:
                taken |= fault.needs
                drawn.append((kind, fault))
        return drawn
