"""Faults of a fleet of consumers: one after the other, drawn from a seed."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.faults.consuming.fleet import Fleet, Instance
from tests.faults.consuming.instance import LOSE_S
from txbroker.failpoints import POINTS

MOMENTS = tuple(name for name in POINTS if name.startswith("consumer."))
_COPIES = frozenset(("consumer.copied", "consumer.ending"))
_RELEASES = frozenset(("consumer.drained", "consumer.flushed", "consumer.released"))
MOMENT_S = 12.0
"""How long a moment is waited for."""
_BACKOFF_S = 6.0
"""The longest pause before a commit is repeated."""

Broken = Callable[[], Awaitable[None]]
"""Restarts the brokers."""


class Nemesis:
    """Breaks one fleet.

    Args:
        restart: restarts the brokers; None: they are never.
        stops_s: durations of SIGSTOP, and of links that are cut.
    """

    def __init__(
        self, fleet: Fleet, restart: Broken | None = None, stops_s: tuple[float, ...] = (4.0, 9.0)
    ) -> None:
        self._fleet = fleet
        self._restart = restart
        self._stops_s = stops_s
        self.counts: Counter[str] = Counter()

    def kinds(self) -> list[str]:
        """Return the names of all faults that this fleet can have."""
        failure = self._fleet.case.on_failure
        moments = [
            name
            for name in MOMENTS
            if (name not in _COPIES or failure not in (None, "wait"))
            and (name != "consumer.key_handled" or failure == "aside")
        ]
        others = ["killed", "left and joined", "answers lost", "rebalances"]
        ways = ("stopped", "cut off")
        stops = [f"{way} {seconds:g} s" for way in ways for seconds in self._stops_s]
        return [*moments, *others, *stops, *(["brokers restarted"] if self._restart else [])]

    async def run(self, kinds: list[str]) -> None:
        """Inject these faults in turn."""
        for kind in kinds:
            await self._inject(kind)
            self.counts[kind] += 1
            await self._fleet.fill_up()
            await asyncio.sleep(self._fleet.fate.uniform(0.2, 1.5))

    async def _inject(self, kind: str) -> None:
        if kind in MOMENTS:
            await self._at(kind)
        elif kind == "killed":
            await self._fleet.kill(self._any())
        elif kind == "left and joined":
            await self._fleet.stop(self._any())
        elif kind == "answers lost":
            await self._lose()
        elif kind == "rebalances":
            await self._rebalances()
        elif kind == "brokers restarted":
            await self._brokers()
        elif kind.startswith("stopped"):
            await self._stopped(float(kind.split()[-2]))
        else:
            await self._cut_off(float(kind.split()[-2]))

    def _any(self) -> Instance:
        return self._fleet.fate.choice([each for each in self._fleet.instances if each.running])

    async def _at(self, point: str) -> None:
        """Kill a new instance at a moment."""
        fleet = self._fleet
        often = point in ("consumer.committing", "consumer.committed", *_COPIES)
        skip = fleet.fate.randrange(4) if often else 0
        armed = await fleet.launch(fleet.free_slot(), point, skip)
        if point in _RELEASES or point == "consumer.key_handled":
            await fleet.ready(armed, MOMENT_S)
        if point in _RELEASES:
            # Further instances take some of its partitions, of which it has one or two.
            await fleet.launch(fleet.free_slot())
            await fleet.launch(fleet.free_slot())
        if point == "consumer.key_handled":
            await fleet.release()
        try:
            await asyncio.wait_for(armed.process.wait(), MOMENT_S)
            await fleet.buried(armed)
        except TimeoutError:
            self.counts["moment not reached"] += 1
            await fleet.kill(armed)
        await self._shrink()

    async def _shrink(self) -> None:
        while len(self._fleet.instances) > self._fleet.size:
            await self._fleet.stop(self._any())

    async def _lose(self) -> None:
        now = time.monotonic()
        for instance in self._fleet.instances:
            instance.signal(signal.SIGUSR1)
            self._fleet.note("answers lost", instance.name, now, now + LOSE_S + _BACKOFF_S)
        await asyncio.sleep(LOSE_S)

    async def _rebalances(self) -> None:
        """Instances join and leave every two seconds."""
        for _ in range(2):
            extra = await self._fleet.launch(self._fleet.free_slot())
            await asyncio.sleep(2)
            await self._fleet.stop(extra)

    async def _stopped(self, seconds: float) -> None:
        instance = self._any()
        instance.signal(signal.SIGSTOP)
        begin = time.monotonic()
        await asyncio.sleep(seconds)
        self._fleet.note("stopped", instance.name, begin, time.monotonic())
        instance.signal(signal.SIGCONT)
        await asyncio.sleep(1)

    async def _cut_off(self, seconds: float) -> None:
        """Requests of this time arrive after it, when others own the partitions."""
        instance = self._any()
        if not await self._fleet.ready(instance, MOMENT_S):
            self.counts["moment not reached"] += 1
            return
        instance.signal(signal.SIGUSR2)
        begin = time.monotonic()
        await asyncio.sleep(seconds)
        self._fleet.note("cut off", instance.name, begin, time.monotonic() + _BACKOFF_S)
        instance.signal(signal.SIGUSR2)
        await asyncio.sleep(1)

    async def _brokers(self) -> None:
        assert self._restart is not None
        begin = time.monotonic()
        await self._restart()
        self._fleet.note("brokers restarted", "", begin, time.monotonic() + _BACKOFF_S)
        await asyncio.sleep(2)
