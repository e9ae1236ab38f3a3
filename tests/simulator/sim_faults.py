"""What goes wrong in a run of any room: all drawn from its seed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from tests.simulator.sim_database import Climate, Databases
from tests.simulator.sim_kafka import SWIFT_S, Cluster, Log
from tests.simulator.sim_loop import Life, Process
from tests.simulator.sim_network import Actor, Network, Weather

TARGET_BYTES_MAX = 1 << 20


class Shape(Struct, frozen=True, kw_only=True):
    """How large a run is, and which faults it has, drawn from its seed."""

    kinds: tuple[str, ...]
    faults: int


def some_of(kinds: Sequence[str], draw: random.Random, without: frozenset[str]) -> tuple[str, ...]:
    """Draw the kinds of faults of a run. Each run has only some: together they would hide what a
    few do."""
    drawn = [kind for kind in kinds if draw.random() < 0.35]
    return tuple(kind for kind in drawn if kind not in without)


class Faults:
    """Makes the faults of one run, each of which ends automatically or is healed with all others.

    Args:
        draw: the random numbers of the faults.
        actors: the processes that they befall.
        operator: the process in which they run.
        targets: the topics whose limit of sizes may fall.
        noted: called with what happens and to whom.
    """

    lost_kinds: tuple[str, ...] = ("EndTxn", "EndTxn", "Produce", "AddPartitionsToTxn")
    """Requests of which many are lost; those named twice more often."""
    lost_shares: tuple[float, ...] = (0.1, 0.5)
    late_kinds: tuple[str, ...] = ("", "EndTxn", "Produce", "Produce")
    never_hung: tuple[str, ...] = ()
    """Topics in which no stranger has a transaction."""

    def __init__(
        self,
        shape: Shape,
        draw: random.Random,
        network: Network,
        actors: Sequence[Actor],
        operator: Process,
        targets: Sequence[str],
        noted: Callable[[str, str], None],
    ) -> None:
        self.made: list[str] = []
        self.healed = False
        self.lasts_s = 0.0
        """How long the fault that is being made lasts."""
        self.databases: Databases | None = None
        self._zombies: list[Process] = []
        self._closed: list[tuple[Actor, int]] = []
        self._hanging: list[tuple[Log, int]] = []
        self._strangers = 0
        self._shape = shape
        self._random = draw
        self._network = network
        self._cluster: Cluster = network.cluster
        self._loop = network.loop
        self._actors = actors
        self._operator = operator
        self._targets = targets
        self._noted = noted

    async def make(self) -> None:
        draw = self._random
        for _ in range(self._shape.faults if self._shape.kinds else 0):
            await asyncio.sleep(draw.expovariate(1 / 1.5))
            kind = draw.choice(self._shape.kinds)
            until_s = draw.choice([0.3, 1.5, 4.0, 9.0]) * (0.5 + draw.random())
            self.lasts_s = until_s
            what = getattr(self, "_" + kind.replace(" ", "_"))(until_s)
            if what:
                self.made.append(kind)
                self.note(kind, f"{what}, {until_s:.2f} s")

    def note(self, what: str, who: str = "") -> None:
        self._noted(what, who)
        self._network.note(f"== {what}: {who}")

    def _later(self, seconds: float, undo: Callable[..., None], *args: Any) -> None:
        def unless_healed() -> None:
            if not self.healed:
                undo(*args)

        self._loop.call_later(seconds, unless_healed)

    def _some_actor(self) -> Actor | None:
        up = [actor for actor in self._actors if actor.up]
        return self._random.choice(up) if up else None

    def _kill(self, until_s: float) -> str:
        return self._to_some_actor(lambda actor: self._kill_it(actor, until_s))

    def _to_some_actor(self, act: Callable[[Actor], None]) -> str:
        actor = self._some_actor()
        if actor is None:
            return ""
        act(actor)
        return actor.name

    def _kill_it(self, actor: Actor, until_s: float) -> None:
        actor.kill()
        self._later(until_s, self._let_live, actor)

    def _stop_all(self, until_s: float) -> str:
        for actor in self._actors:
            if actor.up:
                self._kill_it(actor, until_s * (0.5 + self._random.random()))
        return "all killed"

    def _rolling_restart(self, until_s: float) -> str:
        actor = self._some_actor()
        end = None if actor is None else actor.ending()
        if actor is None or end is None:
            return ""
        life = actor.lives
        self._loop.create_task(end, context=actor.process.context)

        def restart() -> None:
            if actor.up and actor.lives == life:
                actor.kill()
            self._let_live(actor)

        # If it has not stopped by then, it is killed.
        self._later(until_s + 0.5, restart)
        self._closed.append((actor, life))
        return actor.name

    def _kill_at_a_step(self, until_s: float) -> str:
        return self._at_a_step(lambda actor: self._kill_it(actor, until_s))

    def _pause_at_a_step(self, until_s: float) -> str:
        return self._at_a_step(lambda actor: self._pause_it(actor, until_s))

    def _at_a_step(self, act: Callable[[Actor], None]) -> str:
        actor = self._some_actor()
        if actor is None:
            return ""
        process = actor.process

        def at_fuse() -> None:
            # In the operator's context: the effects are not the actor's.
            self._operator.context.copy().run(act, actor)

        process.at_fuse = at_fuse
        process.fuse = int(self._random.expovariate(1 / 120))
        return f"{actor.name} after {process.fuse} steps"

    def _pause(self, until_s: float) -> str:
        return self._to_some_actor(lambda actor: self._pause_it(actor, until_s))

    def _pause_it(self, actor: Actor, until_s: float) -> None:
        actor.pause()
        self._later(until_s, actor.resume)

    def _replaced(self, until_s: float) -> str:
        """Replace an actor soon, in the middle of a transaction of a database if there are any."""
        ends_s = self._loop.time() + 3.0

        def look() -> None:
            busy = [each for each in self._actors if each.up and self._in_transaction(each)]
            if self.healed:
                return
            if busy or self._loop.time() > ends_s:
                self._operator.context.copy().run(self._replace, busy, until_s)
            else:
                self._loop.call_later(0.1, look)

        self._loop.call_later(0.1, look)
        return "some actor"

    def _in_transaction(self, actor: Actor) -> bool:
        return self.databases is not None and self.databases.holds(actor.process)

    def _replace(self, busy: Sequence[Actor], until_s: float) -> None:
        """Start an actor's successor while the old one is stopped, or reaches databases only."""
        actor = self._random.choice(busy) if busy else self._some_actor()
        if actor is None or actor.process.life is Life.PAUSED:
            return
        old, asleep = actor.process, self._random.random() < 0.6
        if busy:  # mostly it goes on within its lease: its token alone stops it
            until_s = self._random.choice([1.0, 1.5, 2.0, until_s])
        if asleep:
            actor.pause()
        old.name = f"{actor.name}~"
        pairs = {(old.name, node) for node in self._cluster.nodes if not asleep}
        self._network.cuts |= pairs
        self._zombies.append(old)
        actor.start(self.wall_ahead_s())
        if asleep:
            self._later(until_s, actor.wake, old)
        else:
            self._later(until_s, self._network.cuts.difference_update, pairs)
        self.note(f"{actor.name} is replaced", "stopped" if asleep else "cut off")

    def _cut(self, until_s: float) -> str:
        actor = self._random.choice(self._actors)
        nodes = self._random.sample(range(3), self._random.choice([1, 1, 3]))
        pairs = {(actor.name, node) for node in nodes}
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
            lost=self._random.choice(self.lost_shares),
            unanswered=self._random.choice([0.0, 0.3]),
            only=self._random.choice(self.lost_kinds),
        )
        return self._for_a_while(until_s)

    def _late(self, until_s: float) -> str:
        only = self._random.choice(self.late_kinds)
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
        actor = self._random.choice(self._actors)
        actor.process.wall_ahead_s = self._random.choice([3600.0, -3600.0, 7200.0, 1e9])
        return f"{actor.name} {actor.process.wall_ahead_s:+g} s"

    def _slow_markers(self, until_s: float) -> str:
        self._cluster.marker_s = (0.05, self._random.choice([0.5, 3.0]))
        self._later(until_s, setattr, self._cluster, "marker_s", SWIFT_S)
        return "markers"

    def _kill_in_a_commit(self, until_s: float) -> str:
        """Kill while a transaction is decided and not visible yet; the successor comes soon."""
        self._cluster.marker_s = (0.05, self._random.choice([0.5, 2.0]))
        self._later(until_s, setattr, self._cluster, "marker_s", SWIFT_S)

        def look() -> None:
            if self.healed:
                return
            if any(each.state == "prepare commit" for each in self._cluster.ids.values()):
                soon_s = self._random.choice([0.02, 0.2])
                act = partial(self._to_some_actor, lambda actor: self._kill_it(actor, soon_s))
                self._operator.context.copy().run(act)
            else:
                self._loop.call_later(0.001, look)

        self._loop.call_later(self._random.random() * until_s / 2, look)
        return "some actor"

    def _target_refuses(self, until_s: float) -> str:
        topic = self._random.choice(self._targets)
        logs = [log for (name, _), log in self._cluster.logs.items() if name == topic]
        for log in logs:
            log.bytes_max = self._random.choice([150, 200])

        def take() -> None:
            for log in logs:
                log.bytes_max = TARGET_BYTES_MAX

        self._later(until_s, take)
        return topic

    def _topic_refuses(self, until_s: float) -> str:
        topic = self._random.choice(self._targets)
        for (name, _), log in self._cluster.logs.items():
            if name == topic:
                log.refuses = True
                self._later(until_s, setattr, log, "refuses", False)
        return topic

    def _stranger_hangs(self, until_s: float) -> str:
        names = [name for name in self._cluster.logs if name[0] not in self.never_hung]
        name = self._random.choice(names)
        self._strangers += 1
        log, stranger = self._cluster.logs[name], self._strangers
        log.hang(stranger)
        self._hanging.append((log, stranger))
        self._later(until_s, log.unhang, stranger)
        return f"in {name}"

    def _sessions_end(self, until_s: float) -> str:
        share = self._random.choice([0.01, 0.1])
        return self._climate(until_s, Climate(ended=share))

    def _commits_unanswered(self, until_s: float) -> str:
        return self._climate(until_s, Climate(lost=self._random.choice([0.2, 0.6])))

    def _climate(self, until_s: float, climate: Climate) -> str:
        databases = self.databases
        if databases is None:
            return ""
        databases.climate = climate
        self._later(until_s, setattr, databases, "climate", Climate())
        return f"{climate}"

    def _database_away(self, until_s: float) -> str:
        if self.databases is None:
            return ""
        self.databases.away = True
        self._later(until_s, setattr, self.databases, "away", False)
        return "databases"

    def heal(self) -> None:
        self.healed = True
        if self.databases is not None:
            self.databases.climate, self.databases.away = Climate(), False
        for process in self._zombies:
            process.life = Life.DEAD
            if self.databases is not None:
                self.databases.end_of(process)
        self.note("healed")
        self._network.weather = Weather()
        self._network.cuts.clear()
        self._network.down.clear()
        self._cluster.marker_s = SWIFT_S
        for (topic, _), log in self._cluster.logs.items():
            log.learns = (0.0, 0)
            log.refuses = False
            if log.leader < 0:
                log.leader = 0
            if topic in self._targets:
                log.bytes_max = TARGET_BYTES_MAX
        for id, node in self._cluster.coordinators.items():
            if node < 0:
                self._cluster.coordinators[id] = 0
        for log, stranger in self._hanging:
            log.unhang(stranger)
        for actor, life in self._closed:
            if actor.up and actor.lives == life:
                actor.kill()
        for actor in self._actors:
            self._let_live(actor)
            actor.process.fuse = -1

    def _let_live(self, actor: Actor) -> None:
        if actor.up:
            actor.resume()
        else:
            actor.start(self.wall_ahead_s())

    def wall_ahead_s(self) -> float:
        """Draw how far the wall clock of a new actor is off."""
        if "wall clock" not in self._shape.kinds:
            return 0.0
        return self._random.choice([0.0, 3600.0, -3600.0, 7200.0, -1e9])
