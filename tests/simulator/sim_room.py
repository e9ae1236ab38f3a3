"""A room of the simulator: what runs in it, on the same loop, brokers, network and faults as the
others; and one run of it, which is healed, comes to rest, and is judged."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from msgspec import Struct, field

from tests.simulator.sim_faults import Faults, Shape
from tests.simulator.sim_kafka import Cluster
from tests.simulator.sim_loop import START_S, Process, SimLoop, Stuck
from tests.simulator.sim_network import Network

QUIET_S = 150.0
"""Time limit for coming to rest after healing, virtual seconds."""
COLLECT_EVERY = 10
"""Runs after which garbage is collected."""


class Report(Struct):
    """How a run ended.

    Attributes:
        work: transactions or messages.
    """

    room: str
    seed: int
    shape: Shape
    violations: list[str] = field(default_factory=list)
    work: int = 0
    faults: list[str] = field(default_factory=list)
    steps: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether something that must hold did not."""
        return bool(self.violations)


class Room:
    """All that takes part in one run.

    Attributes:
        name: of the room.
        kinds: of faults that a run can have.
        faults: made by a subclass.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    clusters: ClassVar[type[Cluster]] = Cluster
    faults: Faults

    def __init__(self, seed: int, shape: Shape, note: Callable[[str], None] | None) -> None:
        self.shape = shape
        self.random = random.Random(f"faults {seed}")
        self.loop = SimLoop()
        brokers = Process("brokers", f"{seed}/brokers")
        self.skew_ms = [self.random.randint(-300, 300) for _ in range(3)]
        self.cluster = self.clusters(self.loop, brokers, self._broker_ms)
        # Drawn separately, so that half of all seeds keep their events with version 1.
        self.cluster.second = random.Random(f"kafka {seed}").random() < 0.5
        self.network = Network(self.loop, self.cluster)
        if note is not None:
            self.network.note = self.cluster.note = note
        self.main = Process("main", f"{seed}/main")
        self._limits: list[tuple[Any, str, Any]] = []

    @classmethod
    def of(cls, seed: int, without: frozenset[str], note: Callable[[str], None] | None) -> Room:
        """Return the room of a seed, without some kinds of faults."""
        raise NotImplementedError

    def _broker_ms(self, node: int) -> int:
        return int((START_S + self.loop.time()) * 1000) + self.skew_ms[node]

    def now_s(self) -> float:
        """Return the time for the history, seconds since 1970."""
        return START_S + self.loop.time()

    async def run(self) -> list[str]:
        """Run to the end; return what did not hold."""
        raise NotImplementedError

    def work(self) -> int:
        """Return how many transactions or messages there were."""
        raise NotImplementedError

    def limit(self, name: str, value: Any, of: str = "txbroker.") -> None:
        """Give a constant another value until `close`: in each module of txbroker that knows it."""
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith(of) and hasattr(module, name):
                self._limits.append((module, name, getattr(module, name)))
                setattr(module, name, value)

    def close(self) -> None:
        """Undo changes outside of this run."""
        for module, name, value in self._limits:
            setattr(module, name, value)

    def unrest(self) -> list[str]:
        """Return the work that is left."""
        raise NotImplementedError

    async def settle(self) -> list[str]:
        """Wait until nothing is left to do; return the rest on timeout."""
        until_s = self.loop.time() + QUIET_S
        quiet = False
        while True:
            left = self.unrest()
            if not left and quiet:
                self.faults.note("quiet")
                return []
            # Twice: requests in flight at the first check have arrived at the second.
            quiet = not left
            if self.loop.time() > until_s:
                return [f"I12: {QUIET_S:g} s after all was healed: {each}" for each in left]
            await asyncio.sleep(1.0)

    def open_transactions(self) -> Iterator[str]:
        """Yield the partitions of which readers do not see the end."""
        for name, log in self.cluster.logs.items():
            if log.stable_end < log.end:
                yield f"{name[0]}-{name[1]}: a transaction is open at {log.stable_end}"

    def records(self, topic: str, *, committed: bool) -> Iterator[tuple[int, Any]]:
        """Yield the records of a topic with their partitions."""
        for (name, number), log in self.cluster.logs.items():
            if name == topic:
                yield from ((number, record) for record in log.records(committed=committed))


def run_seed(
    room: type[Room],
    seed: int,
    *,
    without: frozenset[str] = frozenset(),
    log: list[str] | None = None,
) -> Report:
    """Run one seed of a room inside `simulated_machine`.

    Args:
        without: kinds of faults that are left out, to see which ones matter.
        log: gets every event of the run, one line each.
    """
    world: Room

    def note(line: str) -> None:
        assert log is not None
        log.append(f"{world.loop.time():10.4f} {line}")

    began_s = time.process_time()
    world = room.of(seed, without, None if log is None else note)
    report = Report(room.name, seed, world.shape)
    try:
        report.violations = world.loop.run(world.run(), world.main)
    except Stuck as error:
        report.violations = [f"I12: {error}"]
    report.work = world.work()
    report.faults = world.faults.made
    report.steps = world.loop.steps
    report.virtual_s = world.loop.time()
    world.close()
    if seed % COLLECT_EVERY == 0:
        gc.collect()
    report.cpu_s = time.process_time() - began_s
    return report
