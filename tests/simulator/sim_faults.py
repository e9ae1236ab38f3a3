"""What goes wrong in a run, and how large it is: all drawn from its seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from msgspec import Struct, structs

from tests.faults.judge import Note
from tests.simulator.sim_kafka import SWIFT_S, Cluster, Log
from tests.simulator.sim_loop import Process
from tests.simulator.sim_network import Network, Weather
from tests.simulator.sim_proxy import SimProxy
from tests.simulator.sim_shop import TOPICS, Shop

TARGET_BYTES_MAX = 1 << 20


class Shape(Struct, frozen=True):
    """How large a run is, and which faults it has, drawn from its seed."""

    proxies: int
    partitions: int
    lanes: int
    transactions: int
    hurry: float
    """The share of transactions that a client does not wait for before it begins the next."""
    kinds: tuple[str, ...]
    faults: int
    snapshot_records_min: int
    dedup_window_s: float
    settled_bytes_max: int
    half_retention_s: float
    restart: bool
    """Whether all proxies restart at the end, to compare their recovered ledgers."""


_DRAWN = (
    "kill",
    "kill at a step",
    "pause",
    "pause at a step",
    "cut",
    "broker away",
    "leader moves",
    "leaderless",
    "coordinator moves",
    "weather",
    "late",
    "lost requests",
    "wall clock",
    "services away",
    "slow markers",
    "stop all",
    "rolling restart",
    "target refuses",
    "stranger hangs",
    "aborts lost",
)
COMMITS_LOST = "commits lost"
DELETED = "records deleted"
_APART = {COMMITS_LOST: 0.15, DELETED: 0.1}
"""Drawn separately, so that most seeds keep their events."""
CHECKPOINT = "txbroker.checkpoint"
HALF = "txbroker.half"
SUCCESSION_S = 10.0
"""Maximum time until the partitions of killed proxies are claimed, seconds."""
KINDS = (*_DRAWN, *_APART)


def shape_of(seed: int, without: frozenset[str] = frozenset()) -> Shape:
    """Draw a run's shape. Of all kinds of faults each run has only some: together they would hide
    what a few do."""
    draw = random.Random(f"shape {seed}")
    kinds = [kind for kind in _DRAWN if draw.random() < 0.35]
    kinds += [kind for kind in _APART if random.Random(f"{kind} {seed}").random() < _APART[kind]]
    shape = Shape(
        proxies=draw.choice([1, 2, 2, 2, 3]),
        partitions=draw.choice([1, 1, 2]),
        lanes=draw.choice([2, 3]),
        transactions=draw.randint(2, 5),
        hurry=draw.choice([0.0, 0.4, 0.9]),
        kinds=tuple(kind for kind in kinds if kind not in without),
        faults=draw.randint(2, 7),
        snapshot_records_min=draw.choice([4, 15, 10_000]),
        dedup_window_s=(window_s := draw.choice([12.0, 120.0])),
        settled_bytes_max=4000 if window_s == 12.0 else 1 << 24,
        half_retention_s=draw.choice([25.0, 3600.0]) if window_s == 12.0 else 3600.0,
        restart=draw.random() < 0.4,
    )
    if {"aborts lost", COMMITS_LOST}.isdisjoint(shape.kinds):
        return shape
    # An own partition without end marker stays closed until an operator ends its transaction:
    # half messages have to be kept for longer.
    return structs.replace(shape, half_retention_s=3600.0)


class Faults:
    """Makes the faults of one run, each of which ends automatically or is healed with all others.

    Args:
        draw: the random numbers of the faults.
        operator: the process in which they run.
    """

    def __init__(
        self,
        shape: Shape,
        draw: random.Random,
        network: Network,
        shop: Shop,
        proxies: list[SimProxy],
        operator: Process,
    ) -> None:
        self.made: list[str] = []
        self.deleted: set[int] = set()
        """Half partitions with deleted records."""
        self.healed = False
        self._closed: list[tuple[SimProxy, int]] = []
        self._hanging: list[tuple[Log, int]] = []
        self._strangers = 0
        self._shape = shape
        self._random = draw
        self._network = network
        self._cluster: Cluster = network.cluster
        self._loop = network.loop
        self._shop = shop
        self._proxies = proxies
        self._operator = operator

    async def make(self) -> None:
        draw = self._random
        for _ in range(self._shape.faults if self._shape.kinds else 0):
            await asyncio.sleep(draw.expovariate(1 / 1.5))
            kind = draw.choice(self._shape.kinds)
            until_s = draw.choice([0.3, 1.5, 4.0, 9.0]) * (0.5 + draw.random())
            what = getattr(self, "_" + kind.replace(" ", "_"))(until_s)
            if what:
                self.made.append(kind)
                self.note(kind, f"{what}, {until_s:.2f} s")

    def note(self, what: str, who: str = "") -> None:
        self._shop.history.notes.append(Note(self._shop.now_s(), what, who))
        self._network.note(f"== {what}: {who}")

    def _later(self, seconds: float, undo: Callable[..., None], *args: Any) -> None:
        def unless_healed() -> None:
            if not self.healed:
                undo(*args)

        self._loop.call_later(seconds, unless_healed)

    def _some_proxy(self) -> SimProxy | None:
        up = [proxy for proxy in self._proxies if proxy.up]
        return self._random.choice(up) if up else None

    def _kill(self, until_s: float) -> str:
        return self._to_some_proxy(lambda proxy: self._kill_it(proxy, until_s))

    def _to_some_proxy(self, act: Callable[[SimProxy], None]) -> str:
        proxy = self._some_proxy()
        if proxy is None:
            return ""
        act(proxy)
        return proxy.name

    def _kill_it(self, proxy: SimProxy, until_s: float) -> None:
        proxy.kill()
        self._later(until_s, self._let_live, proxy)

    def _stop_all(self, until_s: float) -> str:
        for proxy in self._proxies:
            if proxy.up:
                self._kill_it(proxy, until_s * (0.5 + self._random.random()))
        return "all proxies killed"

    def _rolling_restart(self, until_s: float) -> str:
        proxy = self._some_proxy()
        if proxy is None or proxy.broker is None:
            return ""
        life = proxy.lives
        self._loop.create_task(proxy.broker.close(), context=proxy.process.context)

        def restart() -> None:
            if proxy.up and proxy.lives == life:
                proxy.kill()
            self._let_live(proxy)

        # If it has not stopped by then, it is killed.
        self._later(until_s + 0.5, restart)
        self._closed.append((proxy, life))
        return proxy.name

    def _kill_at_a_step(self, until_s: float) -> str:
        return self._at_a_step(lambda proxy: self._kill_it(proxy, until_s))

    def _pause_at_a_step(self, until_s: float) -> str:
        return self._at_a_step(lambda proxy: self._pause_it(proxy, until_s))

    def _at_a_step(self, act: Callable[[SimProxy], None]) -> str:
        proxy = self._some_proxy()
        if proxy is None:
            return ""
        process = proxy.process

        def at_fuse() -> None:
            # In the operator's context: the effects are not the proxy's.
            self._operator.context.copy().run(act, proxy)

        process.at_fuse = at_fuse
        process.fuse = int(self._random.expovariate(1 / 120))
        return f"{proxy.name} after {process.fuse} steps"

    def _pause(self, until_s: float) -> str:
        return self._to_some_proxy(lambda proxy: self._pause_it(proxy, until_s))

    def _pause_it(self, proxy: SimProxy, until_s: float) -> None:
        proxy.pause()
        self._later(until_s, proxy.resume)

    def _cut(self, until_s: float) -> str:
        proxy = self._random.choice(self._proxies)
        nodes = self._random.sample(range(3), self._random.choice([1, 1, 3]))
        pairs = {(proxy.name, node) for node in nodes}
        self._network.cuts |= pairs
        self._later(until_s, self._network.cuts.difference_update, pairs)
        return f"{sorted(pairs)}"

    def _broker_away(self, until_s: float) -> str:
        node = self._random.randrange(3)
        self._network.down.add(node)
        self._later(until_s, self._network.down.discard, node)
        if self._random.random() < 0.5:
            for log in self._cluster.logs.values():
                if log.leader == node:
                    self._cluster.lead(log, (node + 1) % 3, self._random.choice([0.0, 0.5]))
            for id, at in self._cluster.coordinators.items():
                if at == node:
                    self._cluster.coordinators[id] = (node + 1) % 3
        return f"broker {node}"

    def _leader_moves(self, _: float) -> str:
        name = self._random.choice(list(self._cluster.logs))
        learns_s = self._random.choice([0.0, 0.2, 2.0])
        self._cluster.lead(self._cluster.logs[name], self._random.randrange(3), learns_s)
        return f"{name}, knows its end after {learns_s:g} s"

    def _leaderless(self, until_s: float) -> str:
        name = self._random.choice(list(self._cluster.logs))
        log = self._cluster.logs[name]
        log.leader = -1
        draw = self._random
        self._later(
            until_s, lambda: self._cluster.lead(log, draw.randrange(3), draw.choice([0.0, 0.5]))
        )
        return f"{name}"

    def _coordinator_moves(self, until_s: float) -> str:
        if not self._cluster.coordinators:
            return ""
        id = self._random.choice(sorted(self._cluster.coordinators))
        self._cluster.coordinators[id] = -1

        def coordinate() -> None:
            self._cluster.coordinators[id] = self._random.randrange(3)

        self._later(min(until_s, 2.0), coordinate)
        return id

    def _weather(self, until_s: float) -> str:
        draw = self._random
        self._network.weather = Weather(
            delay_s=(0.0002, draw.choice([0.002, 0.02, 0.2])),
            slow=draw.choice([0.0, 0.05, 0.2]),
            lost=draw.choice([0.0, 0.02, 0.1]),
            unanswered=draw.choice([0.0, 0.02, 0.1]),
        )
        return self._for_a_while(until_s)

    def _lost_requests(self, until_s: float) -> str:
        self._network.weather = Weather(
            lost=self._random.choice([0.1, 0.5]),
            unanswered=self._random.choice([0.0, 0.3]),
            only=self._random.choice(["EndTxn", "EndTxn", "Produce", "AddPartitionsToTxn"]),
        )
        return self._for_a_while(until_s)

    def _late(self, until_s: float) -> str:
        only = self._random.choice(["", "EndTxn", "Produce", "Produce"])
        late = self._random.choice([0.03, 0.1, 0.3]) * (2 if only else 1)
        self._network.weather = Weather(
            late=late, late_s=self._random.choice([0.05, 1.0, 8.0]), only=only
        )
        return self._for_a_while(until_s)

    def _for_a_while(self, until_s: float) -> str:
        weather = self._network.weather

        def clear() -> None:
            if self._network.weather is weather:
                self._network.weather = Weather()

        self._later(until_s, clear)
        return f"{weather}"

    def _wall_clock(self, _: float) -> str:
        proxy = self._random.choice(self._proxies)
        proxy.process.wall_ahead_s = self._random.choice([3600.0, -3600.0, 7200.0, 1e9])
        return f"{proxy.name} {proxy.process.wall_ahead_s:+g} s"

    def _services_away(self, until_s: float) -> str:
        self._shop.reachable = False
        self._later(until_s, setattr, self._shop, "reachable", True)
        return "services"

    def _slow_markers(self, until_s: float) -> str:
        self._cluster.marker_s = (0.05, self._random.choice([0.5, 3.0]))
        self._later(until_s, setattr, self._cluster, "marker_s", SWIFT_S)
        return "markers"

    def _target_refuses(self, until_s: float) -> str:
        topic = self._random.choice(TOPICS)
        logs = [log for (name, _), log in self._cluster.logs.items() if name == topic]
        for log in logs:
            log.bytes_max = self._random.choice([150, 200])

        def take() -> None:
            for log in logs:
                log.bytes_max = TARGET_BYTES_MAX

        self._later(until_s, take)
        return topic

    def _records_deleted(self, until_s: float) -> str:
        names = [
            name
            for name, log in self._cluster.logs.items()
            if name[0] == HALF and log.begin < log.end
        ]
        if not names:
            return ""
        name = self._random.choice(names)
        log = self._cluster.logs[name]
        log.delete(below=self._random.choice([log.end, self._random.randint(log.begin, log.end)]))
        self.deleted.add(name[1])
        # Before or after an owner has noticed, copied its bodies and written a snapshot.
        kill = self._random.choice([self._stop_all, self._kill_at_a_step, self._kill_in_a_turn])
        self._later(self._random.choice([0.0, 0.5, 2.0, 12.0]), kill, until_s)
        return f"{name} begins at {log.begin}"

    def _stranger_hangs(self, until_s: float) -> str:
        logs = ("txbroker.half", "txbroker.op")
        names = [name for name in self._cluster.logs if name[0] not in logs]
        name = self._random.choice(names)
        self._strangers += 1
        log, stranger = self._cluster.logs[name], self._strangers
        log.hang(stranger)
        self._hanging.append((log, stranger))
        self._later(until_s, log.unhang, stranger)
        return f"in {name}"

    def _aborts_lost(self, until_s: float) -> str:
        # Until it is ended, transactions for such a partition wait: the others must continue.
        self._loop.call_later(0.0, self._kill_in_a_turn, until_s)
        return self._ends_lost(2 * until_s + SUCCESSION_S, 0.5, commit=False)

    def _kill_in_a_turn(self, until_s: float) -> None:
        """Kill all proxies during a promotion, which the next claim aborts: rare otherwise."""
        if self.healed:
            return
        if any(log.open for (name, _), log in self._cluster.logs.items() if name == CHECKPOINT):
            self._operator.context.copy().run(self._stop_all, until_s)
        else:
            self._loop.call_later(0.001, self._kill_in_a_turn, until_s)

    def _commits_lost(self, until_s: float) -> str:
        what = self._ends_lost(until_s, self._random.choice([0.1, 0.4]), commit=True)
        # Only a later abort takes a commit back, so one is made likely.
        abort = self._random.choice([self._target_refuses, self._kill_at_a_step])
        return f"{what}, {abort(until_s)}"

    def _ends_lost(self, until_s: float, share: float, *, commit: bool) -> str:
        self._cluster.lost[commit] = share
        self._later(until_s, self._cluster.lost.update, {commit: 0.0})
        return f"{share:g} of them"

    def heal(self) -> None:
        self.healed = True
        self.note("healed")
        self._network.weather = Weather()
        self._network.cuts.clear()
        self._network.down.clear()
        self._shop.reachable = True
        self._shop.trouble = False
        self._cluster.marker_s = SWIFT_S
        self._cluster.lost = {False: 0.0, True: 0.0}
        for log, producer, commit in self._cluster.left_open:
            if producer in log.open:
                # As an operator does, with the epoch that the broker names.
                epoch = log.producers[producer].epoch
                log.mark(producer, epoch, self._cluster.now_ms(0), commit=commit)
        for (topic, _), log in self._cluster.logs.items():
            log.learns = (0.0, 0)
            if log.leader < 0:
                log.leader = 0
            if topic in TOPICS:
                log.bytes_max = TARGET_BYTES_MAX
        for id, node in self._cluster.coordinators.items():
            if node < 0:
                self._cluster.coordinators[id] = 0
        for log, stranger in self._hanging:
            log.unhang(stranger)
        for proxy, life in self._closed:
            if proxy.up and proxy.lives == life:
                proxy.kill()
        for proxy in self._proxies:
            self._let_live(proxy)
            proxy.process.fuse = -1

    def _let_live(self, proxy: SimProxy) -> None:
        if proxy.up:
            proxy.resume()
        else:
            proxy.start(self.wall_ahead_s())

    def wall_ahead_s(self) -> float:
        """Draw how far the wall clock of a new proxy is off."""
        if "wall clock" not in self._shape.kinds:
            return 0.0
        return self._random.choice([0.0, 3600.0, -3600.0, 7200.0, -1e9])
