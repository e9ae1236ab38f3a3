"""The room of consumers: one group, or one consumer with a file, in any mode, on the simulated
Kafka and a simulated database. The judges of the fault runs judge it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sqlite3
from base64 import b64decode
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.faults.consuming.exact_judge import ExactJudge, Outcome, Sample
from tests.faults.consuming.found import (
    effects_in,
    kept_in,
    sample_of,
    sessions_of,
    stage_runs,
    uncleared,
)
from tests.faults.consuming.handling import ExactHandling, Handling, Plans
from tests.faults.consuming.judge import (
    ATTEMPTS_MAX,
    Judge,
    Place,
    Rec,
    Rules,
    Stored,
    Topics,
    Violation,
    read_history,
)
from tests.faults.consuming.judge import position as read_position
from tests.faults.consuming.tables import SQLITE, Tables
from tests.simulator.sim_database import SERVER, Databases, Server
from tests.simulator.sim_faults import Faults, Shape, some_of
from tests.simulator.sim_groups import OFFSETS, GroupCluster
from tests.simulator.sim_loop import Process
from tests.simulator.sim_network import Actor, Network
from tests.simulator.sim_room import Room
from txbroker.consumer import CommitPolicy, Consumer, InDatabase, InFile, InKafka
from txbroker.core.consuming.aside import release_record
from txbroker.core.consuming.copies import GroupTopics
from txbroker.core.consuming.copies import MessageSource as Origin
from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Partition, Record
from txbroker.databases import SQLite
from txbroker.databases.kept import KeptTable
from txbroker.databases.sessions import DriverSession
from txbroker.databases.steps import run
from txbroker.door.consuming import ConsumingDoor
from txbroker.door.writing import Copy
from txbroker.errors import ConfigurationError, TxbrokerError
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.consuming import KafkaConsumingDoor

GROUP, TOPIC, OUTPUT = "g", "orders", "results"
FILE = "positions"
KEYS = 5
DELAYS_S = (0.2, 0.3, *(0.4,) * 14)
COMMIT_S, LAG_S = 0.5, 3.0
AFTER_S = 16.0
"""How long a fault of brokers or databases is noticed after its end: requests time out."""
LOOK_S, RELEASE_S = 0.5, 4.0
WORK_S = 30.0
BATCH = 10
"""At most once: messages of a partition whose position is stored at once."""
TIMING = {"session_s": 6.0, "lease_s": 3.0, "heartbeat_s": 0.5}
FOR_EVER = 1e12
KINDS = (
    *("kill", "kill at a step", "pause", "pause at a step", "stop all", "rolling restart"),
    "kill in a commit",
    *("replaced", "cut", "broker away", "leader moves", "leaderless", "coordinator moves"),
    *("weather", "late", "lost requests", "wall clock", "slow markers", "stranger hangs"),
    *("sessions end", "commits unanswered", "database away"),
)


class ConsumerShape(Shape, frozen=True, kw_only=True):
    """A consumer, and how much it has to do.

    Attributes:
        store: "", `file`, `sqlite`, `server` or `kafka`.
        once: at most once.
        consumers: members of the group.
        batch: messages of a call; 0: one.
        later: number of later stages.
    """

    store: str
    once: bool
    order: str
    on_failure: str | None
    consumers: int
    static: bool
    partitions: int
    messages: int
    batch: int
    later: int
    in_flight: int

    @property
    def exact(self) -> bool:
        """Whether results are stored with positions."""
        return self.store in ("sqlite", "server", "kafka")

    @property
    def rows(self) -> bool:
        """Whether results are rows."""
        return self.store in ("sqlite", "server")

    @property
    def group(self) -> str | None:
        return None if self.store == "file" else GROUP


def shape_of(seed: int, without: frozenset[str]) -> ConsumerShape:
    """Draw a run's shape."""
    draw = random.Random(f"consumers {seed}")
    kinds = some_of(KINDS, draw, without)
    mode = draw.choice(["", "", "once", "file", "sqlite", "server", "server", "kafka", "kafka"])
    once, store = mode == "once", "" if mode == "once" else mode
    order = draw.choice(["none", "key", "partition"])
    failures, static = ["wait", "skip"], draw.random() < (0.6 if store else 0.3)
    rows = store in ("sqlite", "server")
    unfit = set()
    if store == "file" or (static and not (rows or store == "kafka")):
        unfit.add("replaced")  # a file is locked; and only tokens guard a name with two processes
    elif rows and static and draw.random() < 0.5:
        # Within its lease only its token stops the old process.
        kinds = tuple(each for each in ("replaced", *kinds[:1]) if each not in without)
    if rows:
        unfit.add("wall clock")  # a row waits for the time that its process took for right
    if store != "file" and order == "none":
        failures.append("retry")
    elif store != "file" and (
        order == "key" or mode == ""
    ):  # where a key is set aside, its partition has no order
        failures.append("aside")
    if not once and random.Random(f"refuses {seed}").random() < 0.25:
        kinds = (*kinds, "topic refuses")
    return ConsumerShape(
        kinds=tuple(kind for kind in kinds if kind not in {*unfit, *without}),
        faults=draw.randint(1, 7),
        store=store,
        once=once,
        order=order,
        on_failure=None if once else draw.choice(failures),
        consumers=1 if store == "file" else draw.choice([1, 2, 2, 3]),
        static=static,
        partitions=draw.choice([1, 2, 3]),
        messages=draw.randint(10, 40),
        batch=draw.choice([0, 0, 3]) if rows else 0,
        later=draw.choice([0, 0, 2]) if rows or store == "kafka" else 0,
        in_flight=draw.choice([1, 4, 16]),
    )


class SimKafka:
    """What `Consumer` and `Relay` take in the place of an address: the real door to the simulated
    brokers."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def consuming_door(self) -> ConsumingDoor:
        """Return a door for one consumer or relay."""
        settings = KafkaSettings(
            bootstrap_servers=("broker:9000",),
            instance_id="simulated",
            transactions=2 if self._network.cluster.second else 1,
        )
        return KafkaConsumingDoor(settings, self._network.open)


class _Plans(Plans):
    """What messages ask for. Once all is healed, none fails."""

    def __init__(self, room: Consumers) -> None:
        super().__init__("")
        self._room = room

    @property
    def healed(self) -> bool:
        return self._room.faults.healed

    def takes_s(self, messages: Sequence[Any]) -> float:
        """Return how long a call takes: one in a single step takes no time."""
        return 0.0 if self._room.shape.store == "sqlite" else super().takes_s(messages)


class SimTables(Tables):
    """The tables of a run."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        super().__init__(SQLITE, "")
        self._connect = connect

    @contextlib.contextmanager
    def connection(self) -> Iterator[Any]:
        """Open a connection that no fault befalls."""
        with contextlib.closing(self._connect()) as opened:
            yield opened


class _File(InFile):
    """A file whose positions are seen as soon as they are stored."""

    def __init__(self, path: str, seen: Callable[[Mapping[Partition, StoredOffset]], None]) -> None:
        super().__init__(path)
        self._seen = seen

    async def commit(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy] = ()
    ) -> None:
        """See `InFile.commit`."""
        await super().commit(offsets, copies)
        self._seen(offsets)


class SimConsumer(Actor):
    """A process with a consumer."""

    def __init__(self, name: str, room: Consumers, seed: str) -> None:
        super().__init__(name, seed, room.network)
        self._room = room
        self._consumer: Consumer | None = None

    @property
    def instance(self) -> str:
        """The name of its life."""
        return f"{self.name}.{self.lives}"

    def start(self, wall_ahead_s: float = 0.0) -> None:
        self._consumer = None
        super().start(wall_ahead_s)

    def kill(self) -> None:
        super().kill()
        self._room.befell("killed", self.instance, 0.0)
        self._room.databases.end_of(self.process)

    def pause(self) -> None:
        super().pause()
        self._room.stopped[self.process] = (self.instance, self._network.loop.time())

    def wake(self, process: Process) -> None:
        """See `Actor.wake`."""
        super().wake(process)
        self._room.resumed(process)

    def ending(self) -> Coroutine[Any, Any, None] | None:
        """See `Actor.ending`."""
        consumer = self._consumer
        if consumer is None:
            return None
        self._room.befell("ended", self.instance, 0.0)
        self._room.ending.add(self.process)

        async def end() -> None:
            consumer.stop()

        return end()

    async def _run(self) -> None:
        room, instance, process = self._room, self.instance, self.process
        while True:
            try:
                consumer = room.consumer(self.name)
                async with consumer:
                    if self.process is process:  # otherwise it was replaced
                        self._consumer = consumer
                    handler, then = room.handling(instance)
                    await consumer.run(handler, then=then, batch=room.shape.batch)
                if process not in room.ending:
                    self._network.loop.troubles.append(f"{instance} has ended")
                return
            except TxbrokerError as error:
                # As its supervisor restarts it; but what it was given is right.
                if isinstance(error, ConfigurationError) and not room.databases.away:
                    self._network.loop.troubles.append(f"{instance}: {error!r}")
                self._network.note(f"{instance}: {type(error).__name__}: {error}")
                room.befell("ended", instance, 0.0)
                await asyncio.sleep(1.0)
            except BaseException as error:
                self._network.loop.troubles.append(f"{instance}: {error!r}")
                raise


class ConsumerFaults(Faults):
    """The faults of consumers."""

    lost_shares = (0.1, 0.5, 1.0)
    never_hung = (OFFSETS,)
    lost_kinds = (
        *("EndTxn", "EndTxn", "Produce", "OffsetCommit", "OffsetCommit", "TxnOffsetCommit"),
        *("AddOffsetsToTxn", "Heartbeat", "JoinGroup", "SyncGroup", "OffsetFetch"),
    )
    late_kinds = ("", "EndTxn", "EndTxn", "TxnOffsetCommit", "Produce")


class Consumers(Room):
    """All that takes part in one run."""

    name = "consumers"
    kinds = KINDS
    clusters = GroupCluster
    cluster: GroupCluster
    shape: ConsumerShape

    def __init__(self, seed: int, shape: ConsumerShape, note: Callable[[str], None] | None) -> None:
        super().__init__(seed, shape, note)
        # Within one generation Kafka stores the offset that arrives last, also an older one.
        self.network.prompt = frozenset({"OffsetCommit"})
        self.databases = Databases(self.loop, random.Random(f"databases {seed}"))
        self.databases.idle_s = TIMING["session_s"]
        self.databases.note = self.network.note
        self.topics = GroupTopics.of("txbroker", shape.group or "file")
        self.lines: list[dict[str, Any]] = []
        self.stored: list[Stored] = []
        self.samples: list[Sample] = []
        self.in_file: dict[Place, tuple[int, str]] = {}
        self.stopped: dict[Process, tuple[str, float]] = {}
        self.ending: set[Process] = set()
        """Processes that are to end in order."""
        self.tables = SimTables(lambda: self.databases.quiet("results")) if shape.rows else None
        self._draw = random.Random(f"messages {seed}")
        self.limit("DELAYS_S", DELAYS_S)
        self._produced = 0
        self.cluster.create(TOPIC, shape.partitions, append_time=False)
        self.cluster.create(OUTPUT, 2, append_time=False)
        self.consumers = [
            SimConsumer(f"consumer-{number}", self, str(seed)) for number in range(shape.consumers)
        ]
        self.faults = ConsumerFaults(
            shape, self.random, self.network, self.consumers, self.main, self.topics, self._note
        )
        self.faults.databases = self.databases

    @classmethod
    def of(
        cls, seed: int, without: frozenset[str], note: Callable[[str], None] | None
    ) -> Consumers:
        """See `Room.of`."""
        return cls(seed, shape_of(seed, without), note)

    def close(self) -> None:
        """See `Room.close`."""
        super().close()
        self.databases.close()

    def work(self) -> int:
        """See `Room.work`."""
        return self._produced

    # --- the history -----------------------------------------------------------------------------

    def write(self, event: str, instance: str, **fields: Any) -> None:
        """Write a line of the history."""
        # No two events are at the same time: the judge has only times to order them.
        at = self.loop.time() + len(self.lines) * 1e-9
        self.lines.append({"event": event, "at": at, "instance": instance, **fields})
        shown = " ".join(f"{name}={value}" for name, value in fields.items())
        self.network.note(f"{instance}: {event} {shown}")

    def befell(self, what: str, instance: str, seconds: float) -> None:
        """Write down a fault, which lasts from now on."""
        self.write("fault", instance, what=what, until=self.loop.time() + seconds)

    def resumed(self, process: Process) -> None:
        """Write down that a process was stopped."""
        if process in self.stopped:
            instance, since_s = self.stopped.pop(process)
            line = {"event": "fault", "what": "stopped", "instance": instance}
            self.lines.append({**line, "at": since_s, "until": self.loop.time()})

    def _note(self, what: str, who: str) -> None:
        if what in self.kinds:
            self.befell(what, "", self.faults.lasts_s + AFTER_S)

    # --- consumers -------------------------------------------------------------------------------

    def consumer(self, name: str) -> Consumer:
        """Return a consumer, which has not started."""
        shape = self.shape
        options: dict[str, Any] = {
            **TIMING,
            "group": shape.group,
            "topics": [TOPIC],
            "order": shape.order,
            "commit": CommitPolicy(max_batch=BATCH, max_interval_s=COMMIT_S),
            "drain_s": 2.0,
            "in_flight_max": shape.in_flight,
            "start": "earliest",
        }
        if shape.once:
            options |= {"mode": "at-most-once"}
        else:
            options |= {
                "on_failure": shape.on_failure,
                "retry_interval_s": 0.05,
                "local_attempts_max": ATTEMPTS_MAX,
            }
        if shape.exact:
            options |= {"mode": "exactly-once"}
        if shape.static and shape.group:
            options |= {"instance": name}
        if (store := self._store()) is not None:
            options |= {"store": store}
        return Consumer(SimKafka(self.network), **options)

    def _store(self) -> Any:
        match self.shape.store:
            case "file":
                return _File(FILE, self.in_file.update)
            case "sqlite":
                return InDatabase(SQLite("results", create_tables=True))
            case "server":
                return InDatabase(Server(self.databases, self.network, "results"))
            case "kafka":
                return InKafka()
        return None

    def handling(self, instance: str) -> tuple[Any, list[Any]]:
        """Return the handler of a process, and its later stages."""
        shape, plans = self.shape, _Plans(self)

        def write(event: str, **fields: Any) -> None:
            self.write(event, instance, **fields)

        if not shape.exact:
            return Handling(plans, write), []
        handling = ExactHandling(
            instance, shape.order, self.tables, OUTPUT, plans, write, lambda _: None
        )
        first = {
            "kafka": handling.sending,
            "server": handling.coroutine,
            "sqlite": handling.plain,
        }
        return first[shape.store], handling.later(shape.later)

    # --- messages --------------------------------------------------------------------------------

    async def _produce(self) -> None:
        draw = self._draw
        for number in range(self.shape.messages):
            key, value = self._message(number)
            partition = draw.randrange(self.shape.partitions)
            if draw.random() < 0.8:  # mostly a key has one partition
                partition = sum(key or b"") % self.shape.partitions
            self.append(TOPIC, partition, Record(key, json.dumps(value).encode()))
            self._produced += 1
            if draw.random() < 0.6:
                await asyncio.sleep(draw.expovariate(1 / 0.5))

    def append(self, topic: str, partition: int, record: Record) -> None:
        """Let another client write a record."""
        self.cluster.append_plainly((topic, partition), record)

    def _message(self, number: int) -> tuple[bytes | None, dict[str, Any]]:
        draw, shape = self._draw, self.shape
        value: dict[str, Any] = {"n": number}
        what = draw.random()
        if what < 0.05 and not shape.once:
            value["fails_until"] = FOR_EVER
        elif what < 0.15:
            value["flaky"] = True
        elif what < 0.2:
            value["reject"] = True
        elif what < 0.28:
            value["later_s"] = draw.uniform(0.05, 0.5)
        elif what < 0.6:
            value["takes_s"] = draw.choice([0.002, 0.02, 0.3, 1.5])
        if shape.rows:
            value["early"] = draw.random() < 0.5
        if shape.later and draw.random() < 0.1:
            value["stage"] = draw.randrange(2, 2 + shape.later)
        key = f"key-{draw.randrange(KEYS)}".encode()
        return None if draw.random() < 0.1 and not shape.exact else key, value

    # --- the run ---------------------------------------------------------------------------------

    async def run(self) -> list[str]:
        """See `Room.run`."""
        if self.tables is not None:
            self.tables.create()
        for consumer in self.consumers:
            consumer.start()
        faults = asyncio.create_task(self.faults.make())
        looking = asyncio.create_task(self._look_often())
        releasing = asyncio.create_task(self._release_often())
        producing = asyncio.create_task(self._produce())
        await asyncio.wait([asyncio.gather(producing, faults)], timeout=WORK_S)
        faults.cancel()
        self.faults.heal()
        for process in list(self.stopped):
            self.resumed(process)
        await producing
        rest = await self.settle()
        looking.cancel()
        releasing.cancel()
        self._look()
        for consumer in self.consumers:
            self.databases.end_of(consumer.process)
        troubles = [f"the consumer itself: {each}" for each in self.loop.troubles]
        return troubles or rest or [str(each) for each in self._judge()]

    async def _look_often(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()

    def _look(self) -> None:
        offsets = self._offsets()
        self.stored.append(Stored(self.loop.time(), dict(offsets)))
        sample = sample_of(self.stored[-1], [TOPIC])
        if self.tables is not None:
            try:
                table, serial = self.tables.positions(GROUP), self.tables.last_serial()
                sample = replace(sample, table=table, serial=serial)
            except sqlite3.Error:  # locked, or not created yet
                return
        self.samples.append(sample)

    def _offsets(self) -> Mapping[Place, tuple[int, str]]:
        if self.shape.store == "file":
            return self.in_file
        return self.cluster.offsets_of(GROUP).offsets

    async def _release_often(self) -> None:
        while True:
            await asyncio.sleep(1.0 if self.faults.healed else RELEASE_S)
            with contextlib.suppress(sqlite3.Error):
                self._release()

    def _release(self) -> None:
        """Release all set-aside keys, as an operator."""
        if self.tables is None:
            for (source, number), key in uncleared(self._recs(self.topics.aside)).items():
                record = release_record(Origin(*source), key.encode() if key else None, "healed")
                self.append(self.topics.aside, number, record)
            return
        table = KeptTable(SERVER, GROUP)
        with self.tables.connection() as connection:
            session = DriverSession(connection, SERVER, "qmark")
            for source, each in self.tables.kept(GROUP).items():
                if each.state == "aside":
                    key = each.key.encode() if each.key is not None else source[2]
                    run(table.release(source[:2], key, "healed"), session.execute)

    def unrest(self) -> list[str]:
        """See `Room.unrest`."""
        left = list(self.open_transactions())
        positions: Mapping[Place, tuple[int, Any]]
        positions = {at: read_position(*found) for at, found in self._offsets().items()}
        if self.tables is not None:
            try:
                table = self.tables.positions(GROUP)
                kept = self.tables.kept(GROUP)
            except sqlite3.Error as error:
                return [str(error)]
            positions = {place: (found.next, ()) for place, found in table.items()}
            left += [
                f"later stages of {place} are at {found.later[0]}"
                for place, found in table.items()
                if found.later is not None and found.later[0] < found.next
            ]
            left += [f"{source}: {each}" for source, each in kept.items() if each.waits]
        elif self.shape.later:
            found_ = sample_of(Stored(0.0, self._offsets()), [TOPIC]).table
            left += [
                f"later stages of {place} are at {found.later[0]}"
                for place, found in found_.items()
                if found.later is not None and found.later[0] < found.next
            ]
        for record in (*self._recs(TOPIC), *self._recs(self.topics.retry)):
            if record.offset >= positions.get((record.topic, record.partition), (0, ()))[0]:
                left.append(f"{record.topic}-{record.partition}@{record.offset} is not done")
        aside = uncleared(self._recs(self.topics.aside))
        left += [f"key {key} of {at}" for at, key in aside.items()]
        return left

    # --- the judgement ---------------------------------------------------------------------------

    def _recs(self, topic: str) -> list[Rec]:
        return [
            Rec(
                topic,
                number,
                record.offset,
                record.key.decode() if record.key is not None else None,
                tuple((name, (value or b"").decode()) for name, value in record.headers),
                (record.value or b"").decode(),
            )
            for number, record in self.records(topic, committed=True)
        ]

    def _judge(self) -> Collection[Violation]:
        shape, names = self.shape, self.topics
        history = read_history(self.lines)
        found = Topics(
            self._recs(TOPIC),
            self._recs(names.retry),
            self._in_the_file() if shape.store == "file" else self._recs(names.dead),
            self._recs(names.aside),
            self.stored,
            self._recs(OUTPUT),
        )
        if not shape.exact:
            lost = 2 * BATCH * shape.partitions * (len(history.faults) + 2)
            rules = Rules(
                shape.order,
                aside=shape.on_failure == "aside",
                at_most_once=shape.once,
                lost_max=lost,
                commit_s=COMMIT_S + LAG_S,
            )
            return Judge(history, found, rules).judge()
        if self.tables is not None:
            effects, kept = self.tables.effects(), self.tables.kept(GROUP)
        else:
            effects, kept = effects_in(found.output, shape.order), kept_in(found)
        outcome = Outcome(
            found.source,
            effects,
            stage_runs(self.lines),
            kept,
            self.samples,
            shape.later,
            mirrored=self.tables is not None,
            tries=history.tries,
            faults=history.faults,
            sessions=sessions_of(self.lines),
            waits=shape.on_failure == "wait",
            batches=bool(shape.batch),
        )
        return ExactJudge(outcome).judge()

    def _in_the_file(self) -> list[Rec]:
        """Return what failed for good, as dead letters."""
        with contextlib.closing(self.databases.quiet(FILE)) as connection:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            rows = connection.execute("SELECT id, topic, key, value, headers FROM failed")
            return [
                Rec(
                    topic,
                    0,
                    number,
                    None if key is None else key.decode(),
                    tuple((n, b64decode(text or "").decode()) for n, text in json.loads(headers)),
                    (body or b"").decode(),
                )
                for number, topic, key, body, headers in rows
            ]
