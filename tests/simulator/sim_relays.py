"""The room of relays: relays of one outbox, or of a stream of changes, on the simulated Kafka and
a simulated database. The judge of the fault runs judges it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from tests.faults.relays.judge import Change, Found, Judge, Queued, Rec, Sample, Txn
from tests.simulator.sim_consumers import SimKafka, SimTables
from tests.simulator.sim_database import Databases, Server
from tests.simulator.sim_faults import Faults, Shape, some_of
from tests.simulator.sim_groups import GroupCluster
from tests.simulator.sim_loop import PROCESS, Life, Process
from tests.simulator.sim_network import Actor
from tests.simulator.sim_room import Room
from txbroker.core.encoding import ID_HEADER, INSTALLATION_HEADER
from txbroker.core.records import Message
from txbroker.databases import SQLite
from txbroker.databases.database import DatabaseUnavailable
from txbroker.door.placing import Refusal
from txbroker.errors import ConfigurationError, TxbrokerError
from txbroker.relay import Outbox, Relay
from txbroker.relay.capture.running import RunningCapture
from txbroker.relay.source import Delivery, DeliveryRefused

TOPIC, POSITIONS, FILE, NAME = "orders", "txbroker.relay", "outbox", "relays"
KEYS = 3
WORK_S = 30.0
LOOK_S = 0.2
LEASE_S = 2.0
PIECE, PAGE = 2, 3
"""Messages of a piece, and transactions of a delivery of a stream, at most."""
LIMITS = {"_ROWS": 4, "_PIECE_ROWS": 2, "_DELIVERY_BYTES": 1500}
"""In half of all runs: a transaction may be larger than a delivery."""
HELD_S = 3.0
"""How long a stream waits for a reader that is gone."""
KINDS = (
    *("kill", "kill at a step", "pause", "pause at a step", "stop all", "rolling restart"),
    "kill in a commit",
    *("replaced", "cut", "broker away", "leader moves", "leaderless", "coordinator moves"),
    *("weather", "late", "lost requests", "wall clock", "slow markers", "stranger hangs"),
    *("target refuses", "sessions end", "commits unanswered", "database away"),
)


class RelayShape(Shape, frozen=True, kw_only=True):
    """Relays, and how much they have to do.

    Attributes:
        store: `sqlite`, `server`, or `stream`: a capture.
    """

    store: str
    relays: int
    shards: int
    partitions: int
    transactions: int


def shape_of(seed: int, without: frozenset[str]) -> RelayShape:
    """Draw a run's shape."""
    draw = random.Random(f"relays {seed}")
    kinds = some_of(KINDS, draw, without)
    store = draw.choice(["sqlite", "server", "server", "stream", "stream"])
    captured = store == "stream"
    return RelayShape(
        kinds=kinds,
        faults=draw.randint(1, 7),
        store=store,
        relays=1 if captured else draw.choice([1, 2, 2, 3]),
        shards=1 if captured else draw.choice([1, 1, 2]),
        partitions=draw.choice([1, 2, 3]),
        transactions=draw.randint(5, 25),
    )


class SimRelay(Actor):
    """A process with a relay or a capture."""

    def __init__(self, name: str, room: Relays, seed: str) -> None:
        super().__init__(name, seed, room.network)
        self._room = room
        self._running: Relay | RunningCapture | None = None

    def start(self, wall_ahead_s: float = 0.0) -> None:
        self._running = None
        super().start(wall_ahead_s)

    def kill(self) -> None:
        super().kill()
        self._room.databases.end_of(self.process)

    def ending(self) -> Coroutine[Any, Any, None] | None:
        """See `Actor.ending`."""
        return None if self._running is None else self._running.close()

    async def _run(self) -> None:
        room, process, network = self._room, self.process, self._network
        while self.process is process:
            try:
                running = room.relay()
                await running.start()
                if self.process is process:  # otherwise it was replaced
                    self._running = running
                try:
                    await running.run()
                    return
                finally:
                    await running.close()
            except TxbrokerError as error:
                # As its supervisor restarts it.
                network.note(f"{self.name}: {type(error).__name__}: {error}")
                if isinstance(error, ConfigurationError) and not room.expects(error):
                    network.loop.troubles.append(f"{self.name}: {error!r}")
                await asyncio.sleep(1.0)
            except BaseException as error:
                network.loop.troubles.append(f"{self.name}: {error!r}")
                raise


class RelayFaults(Faults):
    """The faults of relays."""

    lost_shares = (0.1, 0.5, 1.0)
    never_hung = (POSITIONS,)


# --- a stream of changes -------------------------------------------------------------------------


class Commit(NamedTuple):
    """A transaction in the log of a database, at its end there."""

    at: int
    changes: Sequence[Change]


class Stream:
    """What a database keeps for a capture: its log, from where it may forget on. One reader at a
    time, as of a slot."""

    def __init__(self, room: Relays) -> None:
        self.room = room
        self.commits: list[Commit] = []
        self.confirmed = 0
        self.reader: StreamSource | None = None
        self.news = asyncio.Event()

    def add(self, changes: Sequence[Change]) -> None:
        """Commit a transaction."""
        last = self.commits[-1].at if self.commits else 0
        self.commits.append(Commit(last + 1 + len(changes), changes))
        self.news.set()
        self.news = asyncio.Event()

    def admit(self, reader: StreamSource) -> None:
        """Let a reader in once the one before is gone.

        Raises:
            DatabaseUnavailable
        """
        before, now_s = self.reader, self.room.loop.time()
        others = before is not None and before is not reader
        if others and before.process.life is not Life.DEAD and now_s - before.used_s < HELD_S:
            raise DatabaseUnavailable("another capture uses the slot")
        self.reader = reader


class StreamDelivery(Delivery):
    """Some whole transactions."""

    def __init__(self, commits: Sequence[Commit]) -> None:
        self.commits = commits

    @property
    def position(self) -> bytes:
        return json.dumps({"lsn": self.commits[-1].at}).encode()

    async def pieces(self) -> AsyncIterator[Sequence[Message]]:
        """See `Delivery.pieces`."""
        messages = [_message(change) for commit in self.commits for change in commit.changes]
        for at in range(0, len(messages), PIECE):
            yield messages[at : at + PIECE]


def _message(change: Change) -> Message:
    headers = ((INSTALLATION_HEADER, NAME.encode()), (ID_HEADER, change.id.encode()))
    key = None if change.key is None else change.key.encode()
    return Message(TOPIC, key, change.value.encode(), headers)


class StreamSource:
    """A `CaptureSource` of a simulated stream, which resumes at a position."""

    conversion: Any = SimpleNamespace(left_out=Counter(), accepted_gaps=0)

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._at = 0
        self.process: Process = PROCESS.get()
        self.used_s = 0.0

    async def _ask(self) -> None:
        """Reach the database.

        Raises:
            DatabaseUnavailable
        """
        databases, network = self._stream.room.databases, self._stream.room.network
        await network.pass_message()
        ends = databases.random.random() < databases.climate.ended * 3
        if databases.away or ends or (self._at and self._stream.reader is not self):
            raise DatabaseUnavailable("the stream has ended")
        self.used_s = databases.loop.time()

    async def resume(self, position: bytes | None) -> None:
        """See `Source.resume`."""
        stream, self._at = self._stream, 0
        await self._ask()
        stream.admit(self)
        begin = stream.confirmed if position is None else int(json.loads(position)["lsn"])
        if begin < stream.confirmed:
            raise ConfigurationError(f"{begin} is forgotten, the log begins at {stream.confirmed}")
        self._at = max(1, begin)

    async def next(self) -> StreamDelivery:
        """See `Source.next`."""
        while True:
            await self._ask()
            news = self._stream.news
            found = [each for each in self._stream.commits if each.at > self._at][:PAGE]
            if found:
                self._at = found[-1].at
                return StreamDelivery(found)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), 1.0)

    async def delivered(self, delivery: Any) -> None:
        """See `Source.delivered`."""
        await self._ask()
        if self._stream.room.databases.random.random() >= self._stream.room.databases.climate.lost:
            at = delivery.commits[-1].at
            self._stream.confirmed = max(self._stream.confirmed, at)

    async def refused(self, delivery: Any, refusals: Sequence[Refusal]) -> None:
        """See `Source.refused`."""
        raise DeliveryRefused(f"{len(refusals)} messages are refused")

    async def lag_bytes(self) -> int:
        """See `CaptureSource.lag_bytes`."""
        return 0

    async def close(self) -> None:
        """See `Source.close`."""
        if self._stream.reader is self:
            self._stream.reader = None


class _Capture:
    """What of a `Capture` one that runs uses."""

    mapping = SimpleNamespace(name=NAME, writers={})

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def source(self) -> StreamSource:
        """See `Capture.source`."""
        return StreamSource(self._stream)


# --- the room ------------------------------------------------------------------------------------


class Relays(Room):
    """All that takes part in one run."""

    name = "relays"
    kinds = KINDS
    clusters = GroupCluster
    shape: RelayShape

    def __init__(self, seed: int, shape: RelayShape, note: Callable[[str], None] | None) -> None:
        super().__init__(seed, shape, note)
        self.databases = Databases(self.loop, random.Random(f"databases {seed}"))
        self.databases.note = self.network.note
        self.stream = Stream(self) if shape.store == "stream" else None
        self.tables = SimTables(lambda: self.databases.quiet(FILE))
        self.changes: list[Change] = []
        self.txns: list[Txn] = []
        self.samples: list[Sample] = []
        self._draw = random.Random(f"business {seed}")
        if self._draw.random() < 0.5:
            for name, value in LIMITS.items():
                self.limit(name, value, "txbroker.relay.outbox_source")
        self._positions = itertools.count(1)
        self.cluster.create(TOPIC, shape.partitions, append_time=False)
        self.relays = [SimRelay(f"relay-{n}", self, str(seed)) for n in range(shape.relays)]
        self.faults = RelayFaults(
            shape, self.random, self.network, self.relays, self.main, (TOPIC,), lambda *_: None
        )
        self.faults.databases = self.databases

    @classmethod
    def of(cls, seed: int, without: frozenset[str], note: Callable[[str], None] | None) -> Relays:
        """See `Room.of`."""
        return cls(seed, shape_of(seed, without), note)

    def close(self) -> None:
        """See `Room.close`."""
        super().close()
        self.databases.close()

    def work(self) -> int:
        """See `Room.work`."""
        return len(self.changes)

    # --- relays ----------------------------------------------------------------------------------

    def relay(self) -> Relay | RunningCapture:
        """Return a relay, which has not started."""
        kafka = SimKafka(self.network)
        if self.stream is not None:
            capture = cast(Any, _Capture(self.stream))
            return RunningCapture(capture, cast(Any, kafka), topic_prefix="txbroker")
        return Relay(
            self._outbox(), kafka, lease_s=LEASE_S, shards=self.shape.shards, retries_max=10_000
        )

    def _outbox(self) -> Outbox:
        if self.shape.store == "sqlite":
            return Outbox(SQLite(FILE, create_tables=True), name=NAME)
        return Outbox(Server(self.databases, self.network, FILE), name=NAME)

    @staticmethod
    def expects(error: ConfigurationError) -> bool:
        """Return whether a relay may end with an error: a successor has taken its place."""
        return any(text in str(error) for text in ("has taken over", "shards, which running"))

    # --- the business ----------------------------------------------------------------------------

    async def _transact(self, number: int) -> None:
        """Write the rows of one transaction; others run meanwhile, but on SQLite."""
        draw, began = self._draw, self.loop.time()
        rows, places = [], []
        for each in range(draw.choice([1, 1, 2, 4, 7])):
            key = None if draw.random() < 0.1 else f"key-{draw.randrange(KEYS)}"
            id = f"{number}.{each}"
            rows.append(Change(id, number, each, key, f"{id}|{'v' * draw.choice([1, 200])}"))
            places.append(next(self._positions))
            if self.shape.store != "sqlite" and draw.random() < 0.5:
                await asyncio.sleep(draw.expovariate(1 / 0.2))
        committed = draw.random() < 0.9
        if committed and self.stream is not None:
            self.stream.add(rows)
        elif committed:
            await self._insert(rows, places)
        if committed:
            self.changes += rows
        self.txns.append(Txn(number, began, self.loop.time()))
        self.network.note(f"business: {number}, {len(rows)} rows, committed {committed}")

    async def _insert(self, rows: Sequence[Change], places: Sequence[int]) -> None:
        while True:
            with contextlib.suppress(sqlite3.OperationalError), self.tables.connection() as opened:
                opened.execute("BEGIN IMMEDIATE")
                if self.shape.store == "sqlite":
                    for row in rows:
                        message = Message(TOPIC, row.key and row.key.encode(), row.value.encode())
                        self._added.add(opened, message)
                else:
                    unit = f"{places[0]:020}"
                    opened.executemany(
                        "INSERT INTO txbroker_outbox (position, id, unit, topic, message_key, "
                        "message_value, shard) VALUES (?, ?, ?, ?, ?, ?, ?)",
                        [
                            (
                                *(place, f"row-{row.id}", unit, TOPIC),
                                *(row.key and row.key.encode(), row.value.encode()),
                                sum((row.key or "").encode()) % 16,
                            )
                            for place, row in zip(places, rows, strict=True)
                        ],
                    )
                opened.execute("COMMIT")
                return
            await asyncio.sleep(0.01)

    async def _do_business(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self.shape.transactions):
                transaction = group.create_task(self._transact(number))
                if self.shape.store == "sqlite":
                    await transaction
                await asyncio.sleep(self._draw.expovariate(1 / 0.4))

    # --- the run ---------------------------------------------------------------------------------

    async def run(self) -> list[str]:
        """See `Room.run`."""
        if self.stream is None:
            self._added = Outbox(SQLite(FILE, create_tables=True), name=NAME)
            self._added.create()
        for relay in self.relays:
            relay.start()
        faults = asyncio.create_task(self.faults.make())
        looking = asyncio.create_task(self._look_often())
        business = asyncio.create_task(self._do_business())
        await asyncio.wait([asyncio.gather(business, faults)], timeout=WORK_S)
        faults.cancel()
        self.faults.heal()
        await business
        rest = await self.settle()
        looking.cancel()
        troubles = [f"the relay itself: {each}" for each in self.loop.troubles]
        return troubles or rest or [str(each) for each in self._judge()]

    async def _look_often(self) -> None:
        """Compare what the database may forget with the position in Kafka."""
        while self.stream is not None:
            await asyncio.sleep(LOOK_S)
            forgotten = self.stream.confirmed
            decided = self.cluster.decided((POSITIONS, 0)) if forgotten else ()
            found = (record.value for record in decided if not record.key.endswith(b"/owner"))
            position = json.loads(next(found, b'{"lsn": 0}'))["lsn"]
            self.samples.append(Sample(forgotten, position))

    def unrest(self) -> list[str]:
        """See `Room.unrest`."""
        seen = {record.row for record in self._recs()}
        left = [f"{each.id} is not visible" for each in self.changes if each.id not in seen]
        with contextlib.suppress(sqlite3.OperationalError):
            left += [
                f"{row.id} is {row.state}"
                for row in self._queued() or ()
                if row.state != "GLOBAL_COMMIT"
            ]
        return left + list(self.open_transactions())

    # --- the judgement ---------------------------------------------------------------------------

    def _recs(self) -> Iterator[Rec]:
        for number, record in self.records(TOPIC, committed=True):
            headers = {name: (value or b"").decode() for name, value in record.headers}
            key = None if record.key is None else record.key.decode()
            value = (record.value or b"").decode()
            yield Rec(TOPIC, number, record.offset, key, value, headers)

    def _queued(self) -> list[Queued] | None:
        if self.stream is not None:
            return None
        with self.tables.connection() as connection:
            rows = connection.execute(
                "SELECT position, id, state, shard, message_value FROM txbroker_outbox"
            )
            return [
                Queued(at, id, state, shard, body.decode()) for at, id, state, shard, body in rows
            ]

    def _stored(self) -> Iterator[str]:
        """Yield the positions of relays; a claim may store the last one again."""
        last: dict[bytes, str] = {}
        for _number, record in self.records(POSITIONS, committed=True):
            text = (record.value or b"").decode()
            if not record.key.endswith(b"/owner") and last.get(record.key) != text:
                last[record.key] = text
                yield text

    def _judge(self) -> Sequence[Any]:
        found = Found(
            self.changes,
            self.txns,
            list(self._recs()),
            self._queued(),
            list(self._stored()),
            self.shape.shards,
            self.samples,
        )
        return Judge(found).judge()
