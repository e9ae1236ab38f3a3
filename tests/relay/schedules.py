"""Random schedules of relays: real pumps and sources step by step, on SQL and Kafka in memory.

Each statement of a source that reads, each of its transactions, and each call of Kafka is a step. A
schedule draws which relay does its next one, and what else happens meanwhile: transactions of a
business begin, write and end in any order; relays start, crash, or do nothing for long; answers of
the database and of Kafka are lost; topics appear late. `World.judge` compares rows and records.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, TypeVar, cast

from msgspec import structs

from txbroker.core.records import Cause
from txbroker.databases.database import DatabaseUnavailable, steps_in_transaction
from txbroker.databases.dialect import SQLITE
from txbroker.databases.outbox.leases import Leases, rows_of_shard
from txbroker.databases.outbox.table import outbox_tables
from txbroker.databases.outbox.waiting import Group, WaitingRows
from txbroker.databases.sessions import DriverSession
from txbroker.databases.steps import Query, Steps, run
from txbroker.databases.tables import create
from txbroker.door.owners import unknown_target
from txbroker.door.writing import Fenced, PositionRecord
from txbroker.errors import KafkaUnavailable
from txbroker.relay.outbox_source import OutboxSource, Retries
from txbroker.relay.pump import Pump, PumpEvents
from txbroker.relay.sessions import DatabaseThread, RowsLocked
from txbroker.relay.sink import RelaySink
from txbroker.testing.memory import MemoryKafka
from txbroker.testing.topics import KafkaTransaction, LostReply
from txbroker.testing.writer import MemoryWriter

T = TypeVar("T")
_SERVER = structs.replace(SQLITE, name="server")
"""A database whose transactions draw positions in turn, as on SQLite none can, and units, which
order them."""
_numbers = count(1)
POSITIONS = "txbroker.relay"
TOPICS = {"ready": 2, "late": 1, "small": 1}
"""Their partitions. One does not exist at first, and one takes no large records."""
SMALL_BYTES, LARGE = 500, b"x" * 600
KEYS = (b"a", b"b", b"c", None)
RETRIES = Retries(3, (0.05, 0.2))
STEPS, SETTLED_STEPS, AFTER_STEPS = 80, 3000, 20
WRONG_MAX = 3
_LOST, _CRASH, _START, _LATE, _DENIED = 0.03, 0.02, 0.15, 0.01, 0.01
_PAUSE = 0.5
_LOCKED = 0.3
"""Of changes of rows: how often other transactions have locked them."""
_STAYS = (0.5, 0.8, 0.95)
"""Of a schedule: how likely the same relay does the next step."""
_REFUSING = (("ready",), ("ready", "ready", "ready", "late", "small"), ("ready", "late", "small"))
"""Of a schedule: the topics of its rows."""
_OPEN_MAX, _ROWS_MAX = 4, 9
_RELAYS_MAX = (2, 3)
"""Of a schedule: how many relays run at the same time."""
_TURNS = ((0, 4), (1, 3), (0, 10))
"""Of a takeover: how much the new relay writes first, its predecessor then, and the new one again;
lowest number, and that above the highest."""


class Row(NamedTuple):
    """A row that a transaction writes."""

    position: int
    id: str
    topic: str
    key: bytes | None
    value: bytes
    shard: int
    timeout_ms: int | None


@dataclass
class Business:
    """A transaction of the business; times are numbers of steps."""

    unit: str
    began: int
    rows: list[Row] = field(default_factory=list)
    committed: int | None = None


class Seen(NamedTuple):
    """Where a record is: in which Kafka transaction, by the step that committed it, and where."""

    transaction: int
    partition: tuple[str, int]
    offset: int


class _Rows(WaitingRows):
    """Rows of which others have locked some, whenever they are in the way."""

    fate: random.Random

    def locked(
        self, positions: Iterable[int], among: Iterable[int] | None = None
    ) -> Steps[set[Group]]:
        """See `WaitingRows.locked`."""
        groups = yield from self._groups(positions if among is None else among)
        return {group for group in groups.values() if self.fate.random() < 0.5}


class Relay:
    """One relay of one shard; it waits before each step until `World.step` lets it go on."""

    def __init__(self, world: World, shard: int) -> None:
        self.shard = shard
        self.pauses_to = 0
        self.writes = 0
        self._world = world
        self._next: asyncio.Future[None] | None = None
        self.crashed = self._over = False
        id = f"outbox/{shard}"
        self._writer = MemoryWriter(self, world.kafka, id, PositionRecord(POSITIONS, id))
        named = world.named
        of_shard = rows_of_shard(shard, world.shards)
        rows = _Rows(world.dialect, of_shard, keep=world.keep)
        rows.fate = world.fate
        leases = Leases(SQLITE, f"relay {next(_numbers)}", 10)
        world.take(leases.owner, shard)
        thread = cast(DatabaseThread, self)
        source = OutboxSource(
            named,
            rows,
            thread,
            cast(Any, self),
            RETRIES,
            lambda: leases.owned(shard),
            lambda _error: None,
        )
        sink = RelaySink(cast(Any, world), self._writer, "txbroker")
        self.task = asyncio.ensure_future(self._run(Pump("outbox", source, sink, PumpEvents())))

    async def _run(self, pump: Pump) -> None:
        try:
            await pump.run()
        except Fenced:
            pass
        finally:
            self._over = True
            self._world.arrived()

    @property
    def ready(self) -> bool:
        """Whether it waits for its next step."""
        return self._next is not None

    async def _gate(self) -> None:
        if self.crashed:
            raise KafkaUnavailable("nothing more is sent")
        self._next = asyncio.get_running_loop().create_future()
        self._world.arrived()
        await self._next

    def go(self) -> None:
        """Let it do its next step."""
        assert self._next is not None
        self._next.set_result(None)
        self._next = None

    # --- its database --------------------------------------------------------------------------

    async def transaction(self, steps: Callable[[], Steps[T]]) -> T:
        """See `DatabaseThread.transaction`."""
        await self._gate()
        self.writes += 1
        self._world.may_fail(DatabaseUnavailable)
        result = steps_in_transaction(steps(), self._world.session)
        self._world.may_fail(DatabaseUnavailable)
        return result

    async def attempt(self, steps: Callable[[], Steps[T]]) -> T:
        """See `DatabaseThread.attempt`."""
        self._world.may_fail(RowsLocked, _LOCKED)
        return await self.transaction(steps)

    async def read(self, steps: Callable[[], Steps[T]]) -> T:
        """See `DatabaseThread.read`."""
        running, result = steps(), None
        while True:
            try:
                query = running.send(cast(Any, result))
            except StopIteration as end:
                return cast(T, end.value)
            await self._gate()
            self._world.may_fail(DatabaseUnavailable)
            result = self._world.session.execute(query)

    # --- its Kafka -----------------------------------------------------------------------------

    async def run(self, call: Callable[[], T]) -> T:
        """See `Home.run`."""
        await self._gate()
        self.writes += 1
        self._world.may_fail(KafkaUnavailable)
        self._writer.lost = self._world.lost_reply()
        try:
            return call()
        finally:
            self._world.look()
            self.pauses_to = self._world.pause()

    # --- its wakeups ---------------------------------------------------------------------------

    async def found(self) -> None:
        """See `Wakeups.found`."""

    def reset(self) -> None:
        """See `Wakeups.reset`."""

    async def wait(self) -> None:
        """See `Wakeups.wait`."""
        await self._gate()
        self.writes += 1  # there is nothing to write

    def is_second(self) -> bool:
        """See `Wakeups.is_second`: time does not pass in a schedule."""
        return True


class World:
    """One schedule."""

    def __init__(self, database: OutboxInMemory, seed: int) -> None:
        self.fate = random.Random(seed)
        self.kafka = MemoryKafka()
        self.kafka.create_topic(POSITIONS, 1)
        self.shards = self.fate.choice((1, 1, 2))
        self._stay = self.fate.choice(_STAYS)
        self._relays_max = self.fate.choice(_RELAYS_MAX)
        self._topics = self.fate.choice(_REFUSING)
        self._serial = self.fate.random() < 0.2
        self.dialect = SQLITE if self._serial else _SERVER
        self.keep = self.fate.random() < 0.7
        self.session = database.session
        self.named = database.named
        self.business: list[Business] = []
        self.relays: list[Relay] = []
        self.seen: dict[str, list[Seen]] = {}
        self.parts: list[str] = []
        self._database = database
        self._faults = True
        self._denied: set[str] = set()
        self._position = 0
        self._step = 0
        self._transactions: dict[KafkaTransaction, int] = {}
        self._ends: dict[tuple[str, int], int] = {}
        self._arrival: asyncio.Future[None] | None = None
        self._current: Relay | None = None
        self._turns: deque[tuple[Relay, int]] = deque()
        """Relays that are next, and when their turn ends, by `writes`."""
        database.clear(self.shards)
        self._create_topic("ready")
        self._create_topic("small")
        self.kafka.set_message_bytes_max("small", SMALL_BYTES)

    def take(self, owner: str, shard: int) -> None:
        """Let a relay take the lease of a shard from any other."""
        self.session.execute(
            Query("UPDATE txbroker_relay SET owner = ? WHERE shard = ?", (owner, shard))
        )

    # --- what relays ask -----------------------------------------------------------------------

    async def target(self, topic: str, _prefix: str) -> int | Cause:
        """See `ConsumingDoor.target`."""
        if topic in self._denied or topic not in self.kafka.topics:
            return unknown_target(topic)
        return len(self.kafka.topics[topic].partitions)

    def may_fail(self, error: type[Exception], often: float = _LOST) -> None:
        """Raise an error now and then."""
        if self._faults and self.fate.random() < often:
            raise error("no answer")

    def pause(self) -> int:
        """Return until which step a relay does nothing, after it has called Kafka."""
        long = self._faults and self.fate.random() < _PAUSE
        return self._step + self.fate.randrange(40) if long else 0

    def lost_reply(self) -> LostReply | None:
        """Return what happens to the next commit if its answer is lost."""
        if not self._faults or self.fate.random() > 2 * _LOST:
            return None
        return self.fate.choice((LostReply.DONE, LostReply.NOT_DONE))

    def arrived(self) -> None:
        """A relay waits for its next step, or has ended."""
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    # --- the schedule --------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the schedule to its end, when everything is settled."""
        fate = self.fate
        for _ in range(STEPS):
            if fate.random() < 0.3:
                self._do_business()
            if fate.random() < _LATE:
                self._create_topic("late")
            if fate.random() < _DENIED:
                self._denied ^= {fate.choice(list(TOPICS))}
            if len(self.relays) < self._relays_max and (not self.relays or fate.random() < _START):
                await self._start()
            if fate.random() < _CRASH:
                await self._crash()
            await self._any_step()
        await self._settle()

    async def _settle(self) -> None:
        self._faults = False
        self._denied.clear()
        self._create_topic("late")
        for each in self.business:
            if each.committed is None and each.rows is not None:
                self._end(each)
        for _ in range(SETTLED_STEPS):
            if not self._waiting():
                break
            for shard in range(self.shards):
                if not any(relay.shard == shard for relay in self.relays):
                    await self._start(shard)
            await self._any_step()
        else:
            raise AssertionError(f"{self._waiting()} rows still wait")
        for _ in range(AFTER_STEPS):  # those who did nothing for long find that everything is done
            await self._any_step()
        while self.relays:
            await self._crash()

    async def _any_step(self) -> None:
        """Let one relay do a step, mostly the same one for a while: the others pause."""
        self._database.now_ms += self.fate.randrange(40)
        current = self._in_turn() or self._chosen()
        if current is not None:
            self._current = current
            await self._wait_after(current.go)

    def _in_turn(self) -> Relay | None:
        while self._turns:
            relay, end = self._turns[0]
            if relay in self.relays and relay.writes < end:
                return relay
            self._turns.popleft()
        return None

    def _chosen(self) -> Relay | None:
        current = self._current
        awake = [relay for relay in self.relays if relay.pauses_to <= self._step] or self.relays
        if current not in awake or self.fate.random() > self._stay:
            current = self.fate.choice(awake) if awake else None
        return current

    async def _wait_after(self, call: Callable[[], Any]) -> None:
        self._step += 1
        self._arrival = asyncio.get_running_loop().create_future()
        call()
        await self._arrival
        for relay in [relay for relay in self.relays if not relay.ready]:
            self.relays.remove(relay)
            await relay.task

    async def _start(self, shard: int | None = None) -> None:
        number = self.fate.randrange(self.shards) if shard is None else shard
        new = Relay(self, number)
        before = [relay for relay in self.relays if relay.shard == number][-1:]
        await self._wait_after(lambda: self.relays.append(new))
        self._turns.clear()
        for old in before:  # each does something between steps of the other
            first, between, more = (self.fate.randrange(*bounds) for bounds in _TURNS)
            self._turns.append((new, first))
            self._turns.append((old, old.writes + between))
            self._turns.append((new, first + more))

    async def _crash(self) -> None:
        if self.relays:
            relay = self.relays.pop(self.fate.randrange(len(self.relays)))
            relay.crashed = True
            relay.task.cancel()
            await asyncio.gather(relay.task, return_exceptions=True)

    def _create_topic(self, name: str) -> None:
        if name not in self.kafka.topics:
            self.kafka.create_topic(name, TOPICS[name])

    # --- the business --------------------------------------------------------------------------

    def _do_business(self) -> None:
        fate = self.fate
        running = [each for each in self.business if each.committed is None]
        if len(running) < _OPEN_MAX and fate.random() < 0.3:
            self.business.append(Business(f"u{len(self.business)}", self._step))
        elif running:
            each = fate.choice(running)
            if len(each.rows) < _ROWS_MAX and fate.random() < 0.75:
                each.rows.append(self._row())
            else:
                self._end(each)

    def _row(self) -> Row:
        """Draw a row; its position is drawn now, and others may commit before it."""
        fate = self.fate
        self._position += fate.choice((1, 1, 2))
        number = self._position
        key = fate.choice(KEYS)
        large = fate.random() < 0.1
        return Row(
            number,
            f"row{number}",
            fate.choice(self._topics),
            key,
            LARGE if large else b"v%d" % number,
            sum(key or b"") % 2,
            self._database.now_ms + fate.randrange(1, 1500) if fate.random() < 0.05 else None,
        )

    def _end(self, each: Business) -> None:
        each.committed = -1
        if each.rows and self.fate.random() < 0.85:
            each.committed = self._step
            if self._serial:
                each.rows = [self._drawn(row) for row in each.rows]
                unit = each.unit if len(each.rows) > 1 else ""
            else:
                unit = f"{each.rows[0].position:020}"
            self._database.insert(unit, each.rows)

    def _drawn(self, row: Row) -> Row:
        """Return a row whose position is drawn at its commit."""
        self._position += 1
        return row._replace(position=self._position)

    # --- the judgement -------------------------------------------------------------------------

    def look(self) -> None:
        """Note what the last step has committed, also where an open transaction still hides it."""
        for topic in TOPICS.keys() & self.kafka.topics.keys():
            for number, log in enumerate(self.kafka.topics[topic].partitions):
                at, begin = (topic, number), self._ends.get((topic, number), 0)
                if begin == log.end:
                    continue
                for offset, (record, transaction) in enumerate(log._entries[begin:], begin):
                    if transaction is None or not transaction.committed:
                        continue
                    place = Seen(self._transactions.setdefault(transaction, self._step), at, offset)
                    id = (dict(record.headers)["txb-id"] or b"").decode()
                    places = self.seen.setdefault(id, [])
                    if place not in places:
                        places.append(place)
                self._ends[at] = log.stable_end

    def _waiting(self) -> int:
        found = self.session.execute(
            Query("SELECT COUNT(*) FROM txbroker_outbox WHERE state = 'LOCAL_COMMIT'")
        )
        return int(found.rows[0][0])

    def judge(self) -> Iterator[str]:
        """Yield broken invariants."""
        states: dict[str, str] = {
            row[0]: row[1]
            for row in self.session.execute(Query("SELECT id, state FROM txbroker_outbox")).rows
        }
        committed = {row.id for each in self._committed() for row in each.rows}
        for id, places in self.seen.items():
            if id not in committed:
                yield f"{id} is visible, and was not committed"
            elif len(places) > 1:
                yield f"{id} is visible {len(places)} times: {places}"
        for id in committed:
            done = states.get(id) == "GLOBAL_COMMIT" if self.keep else id not in states
            if done != (id in self.seen):
                yield f"{id} is {states.get(id, 'deleted')}, visible: {id in self.seen}"
        yield from self._whole()
        yield from self._ordered()

    def _committed(self) -> list[Business]:
        return [each for each in self.business if (each.committed or -1) > 0]

    def _whole(self) -> Iterator[str]:
        for each in self._committed():
            for shard in range(self.shards):
                found = {
                    self.seen[row.id][0].transaction
                    for row in each.rows
                    if row.shard % self.shards == shard and row.id in self.seen
                }
                if len(found) > 1:
                    yield f"{each.unit} became visible in {len(found)} parts"

    def _ordered(self) -> Iterator[str]:
        """Each key's rows, by the order of their transactions, and within one by position."""
        for key in KEYS[:-1]:
            lane = [
                (each, row, self.seen[row.id][0])
                for each in self._committed()
                for row in each.rows
                if row.key == key and row.id in self.seen
            ]
            for first, row, place in lane:
                for second, later, late_place in lane:
                    before = (first.committed or 0) < second.began or (
                        first is second and row.position < later.position
                    )
                    if before and not _precedes(place, late_place):
                        yield f"{later.id} of key {key!r} is visible before {row.id}"


def _precedes(first: Seen, second: Seen) -> bool:
    if first.partition == second.partition:
        return first.offset < second.offset
    return first.transaction <= second.transaction


class OutboxInMemory:
    """The tables of an outbox, with a separate clock."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000
        connection = sqlite3.connect(":memory:", isolation_level=None)
        # As days; see `Dialect.now_ms`.
        connection.create_function(
            "julianday", 1, lambda _now: 2440587.5 + self.now_ms / 86_400_000
        )
        self.session = DriverSession(connection, SQLITE, "qmark")
        run(create(SQLITE, "outbox", outbox_tables("outbox")), self.session.execute)
        self.named = run(Leases(SQLITE, "", 10).named(), self.session.execute)

    def clear(self, shards: int) -> None:
        """Delete all rows, and divide the outbox into shards."""
        self.session.execute(Query("DELETE FROM txbroker_outbox"))
        self.session.execute(Query("UPDATE txbroker_relay SET owner = ''"))
        run(Leases(SQLITE, "", 10).divide(shards), self.session.execute)

    def insert(self, unit: str, rows: list[Row]) -> None:
        """Commit rows of a transaction."""
        self.session.begin()
        for row in rows:
            self.session.execute(
                Query(
                    "INSERT INTO txbroker_outbox (position, id, unit, topic, message_key, "
                    "message_value, shard, timeout_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (row.position, row.id, unit, *row[2:]),
                )
            )
        self.session.commit()


async def run_schedules(seeds: range) -> dict[int, list[str]]:
    """Run schedules; return broken invariants of the first bad ones, by seed."""
    wrong: dict[int, list[str]] = {}
    database = OutboxInMemory()
    for seed in seeds:
        world = World(database, seed)
        try:
            await world.run()
            found = list(world.judge())
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
            while world.relays:
                await world._crash()
        if found:
            wrong[seed] = found
        if len(wrong) == WRONG_MAX:
            break
    return wrong
