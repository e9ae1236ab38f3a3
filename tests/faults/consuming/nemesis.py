"""Faults of a fleet of consumers: one after the other, drawn from a seed."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.faults.consuming.exact_fleet import ExactFleet
from tests.faults.consuming.fleet import KEYS_FAIL, SESSIONS_CHANGED, Case, Fleet
from tests.faults.consuming.handling import HANDLER
from tests.faults.consuming.instance import LOSE_S
from tests.faults.consuming.tables import CHANGES, SQLITE
from tests.faults.processes import Instance
from txbroker.failpoints import POINTS

_COMMITS = ("consumer.result_committing", "consumer.result_committed")
_OUTPUTS = "consumer.outputs_collected"
_OF_RESULTS = (*_COMMITS, _OUTPUTS)
MOMENTS = tuple(name for name in POINTS if name.startswith("consumer.") and name not in _OF_RESULTS)
_COPIES = frozenset(("consumer.copied", "consumer.ending"))
_RELEASES = frozenset(("consumer.drained", "consumer.flushed", "consumer.released"))
MOMENT_SESSIONS = 2.0
"""How long a moment is waited for: a group may wait for a dead member for a session."""
_BACKOFF_S = 6.0
"""The longest pause before a commit is repeated."""

STOPS_S = (4.0, 9.0)
_IN_HANDLER, _IN_COMMIT = "stopped in the handler", "stopped in the commit"
_RACE = "owners race"
_DATABASE = (
    "database killed",
    "database restarted",
    "database paused",
    "database connections reset",
    "commit answers lost",
    "commits late",
)
_LOCKED = "database locked"
_LINK_S, _LATE_S = 2.0, 2.0
_LOADS_S, _WORKED_OFF_S = {KEYS_FAIL: 8.0, SESSIONS_CHANGED: 4.0}, 3.0
_BACKLOG_S = 3.0
"""How long a slow consumer gathers messages, before it works on them without Kafka."""

Broken = Callable[[], Awaitable[None]]
"""Restarts the brokers."""
Damage = Callable[[str], Awaitable[None]]
"""Breaks a database server, as a kind of fault says, and repairs it."""


def moments_of(case: Case) -> list[str]:
    """Return the moments that consumers of a case reach."""
    in_tables = case.store not in ("", "kafka")
    copies = case.on_failure not in (None, "wait") or case.store == "kafka"
    found = [
        name
        for name in MOMENTS
        if (name not in _COPIES or (copies and not in_tables))
        and (name != "consumer.key_handled" or case.on_failure == "aside")
    ]
    if case.store:
        found += [f"consumer.{HANDLER}", *(_COMMITS if in_tables else [_OUTPUTS])]
    return found


class Nemesis:
    """Breaks one fleet.

    Args:
        restart: restarts the brokers; None: they are never.
        damage: breaks the server of the fleet's database; None: it never is.
        stops_s: durations of SIGSTOP, and of links that are cut.
    """

    def __init__(
        self,
        fleet: Fleet,
        restart: Broken | None = None,
        stops_s: tuple[float, ...] = STOPS_S,
        damage: Damage | None = None,
    ) -> None:
        self._fleet = fleet
        self._restart = restart
        self._stops_s = stops_s
        self._damage = damage
        self.counts: Counter[str] = Counter()

    @property
    def _moment_s(self) -> float:
        return MOMENT_SESSIONS * self._fleet.timing.session_s

    def kinds(self) -> list[str]:
        """Return the names of all faults that this fleet can have."""
        case, longest_s = self._fleet.case, max(self._stops_s)
        ways = ["stopped", "cut off"]
        others = ["killed", "left and joined", "answers lost", "rebalances"]
        stops = [f"{way} {seconds:g} s" for way in ways for seconds in self._stops_s]
        if case.store:
            in_tables = case.store != "kafka"
            held = [_IN_HANDLER, *([_IN_COMMIT, _RACE] if in_tables else [])]
            stops += [f"{way} {longest_s:g} s" for way in held]
        if case.order != "partition":  # there a failing key holds the others up
            others += [KEYS_FAIL]
        if case.store in CHANGES:
            others += [SESSIONS_CHANGED]
        if case.store == SQLITE:
            others += [_LOCKED]
        if self._damage is not None:
            others += _DATABASE
        return [
            *moments_of(case),
            *others,
            *stops,
            *(["brokers restarted"] if self._restart else []),
        ]

    async def run(self, kinds: list[str]) -> None:
        """Inject these faults in turn."""
        for kind in kinds:
            await self._fleet.fill_up()
            await self._inject(kind)
            self.counts[kind] += 1
            await self._fleet.fill_up()
            await asyncio.sleep(self._fleet.fate.uniform(0.2, 1.5))

    async def _inject(self, kind: str) -> None:
        if kind.startswith("consumer."):
            await self._at(kind)
        elif kind.startswith((_IN_HANDLER, _IN_COMMIT)):
            await self._stopped_at(kind)
        elif kind.startswith(_RACE):
            await self._race(float(kind.split()[-2]))
        elif kind == _LOCKED or kind in _DATABASE:
            await self._break_database(kind)
        elif kind in (KEYS_FAIL, SESSIONS_CHANGED):
            await self._load(kind)
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

    async def _load(self, kind: str) -> None:
        """Let messages of a kind come, and wait until they are worked off."""
        for instance in self._fleet.instances:
            await self._fleet.ready(instance, self._moment_s)
        self._fleet.load, self._fleet.load_until = kind, time.time() + _LOADS_S[kind]
        await asyncio.sleep(_LOADS_S[kind])
        self._fleet.load = ""
        await asyncio.sleep(_WORKED_OFF_S)

    def _any(self) -> Instance:
        return self._fleet.fate.choice([each for each in self._fleet.instances if each.running])

    async def _at(self, point: str) -> None:
        """Kill a new instance at a moment."""
        fleet = self._fleet
        often = point in ("consumer.committing", "consumer.committed", *_COPIES)
        skip = fleet.fate.randrange(4) if often else 0
        if point in (*_OF_RESULTS, f"consumer.{HANDLER}"):
            skip = fleet.fate.randrange(30)
        point = point.removeprefix("consumer.") if point.endswith(HANDLER) else point
        armed = await fleet.launch(fleet.free_slot(), point, skip)
        if point in _RELEASES or point == "consumer.key_handled":
            await fleet.ready(armed, self._moment_s)
        if point in _RELEASES:
            # Further instances take some of its partitions, of which it has one or two.
            await fleet.launch(fleet.free_slot())
            await fleet.launch(fleet.free_slot())
        if point == "consumer.key_handled":
            await fleet.release()
        try:
            await asyncio.wait_for(armed.process.wait(), self._moment_s)
            await fleet.buried(armed)
        except TimeoutError:
            self.counts["moment not reached"] += 1
            await fleet.kill(armed)
        await self._shrink()

    async def _shrink(self) -> None:
        await self._fleet.fill_up()  # some may have ended, as one that found no Kafka
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
        if not await self._fleet.ready(instance, self._moment_s):
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

    # --- exactly once ------------------------------------------------------------------------

    async def _stopped_at(self, kind: str) -> None:
        """A new instance stops, its transaction open, until others have taken over."""
        fleet, seconds = self._fleet, float(kind.split()[-2])
        point = HANDLER if kind.startswith(_IN_HANDLER) else _COMMITS[0]
        skip = fleet.fate.randrange(30)
        armed = await fleet.launch(fleet.free_slot(), point, skip, stops=True)
        until_s = time.monotonic() + self._moment_s
        while armed.running and not armed.stopped and time.monotonic() < until_s:
            await asyncio.sleep(0.02)
        if armed.stopped:
            begin = time.monotonic()
            await asyncio.sleep(seconds)
            fleet.note("stopped", armed.name, begin, time.monotonic())
            armed.signal(signal.SIGCONT)
            await asyncio.sleep(1)
        else:
            self.counts["moment not reached"] += 1
            await fleet.kill(armed)
        await self._shrink()

    async def _race(self, seconds: float) -> None:
        """An owner is cut off from Kafka, not from the database, and its lease does not end: it
        works on what it has fetched, while others own the same partitions. All are slow, so that
        they come to the same messages."""
        fleet = self._fleet
        deaf = await fleet.launch(fleet.free_slot(), deaf=True)
        if await fleet.begun(deaf, 3 * self._moment_s):
            fleet.slowed.touch()
            await asyncio.sleep(_BACKLOG_S)
            deaf.signal(signal.SIGUSR2)
            begin = time.monotonic()
            await asyncio.sleep(seconds)
            fleet.note("cut off", deaf.name, begin, time.monotonic() + _BACKOFF_S)
            deaf.signal(signal.SIGUSR2)
            fleet.slowed.unlink()
            await asyncio.sleep(1)
        else:
            self.counts["moment not reached"] += 1
        if deaf in fleet.instances:
            await fleet.kill(deaf)

    async def _break_database(self, kind: str) -> None:
        fleet, begin = self._fleet, time.monotonic()
        assert isinstance(fleet, ExactFleet)
        if kind == _LOCKED:
            assert fleet.tables is not None
            await asyncio.to_thread(fleet.tables.lock, fleet.fate.choice((3.0, 12.0)))
        elif fleet.link is None:
            return
        elif kind == "commit answers lost":
            fleet.link.lose(_LINK_S)
            await asyncio.sleep(_LINK_S)
        elif kind == "commits late":
            fleet.link.delay(_LINK_S, _LATE_S)
            await asyncio.sleep(_LINK_S + _LATE_S)
        elif kind == "database connections reset":
            await fleet.link.reset()
        else:
            assert self._damage is not None
            await self._damage(kind)
        fleet.note(kind, "", begin, time.monotonic() + _BACKOFF_S)
        await asyncio.sleep(2)
