"""Consumers of one group as processes on a real Kafka, their load, and the records afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from confluent_kafka import IsolationLevel, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import OffsetSpec

from tests.faults.consuming.found import uncleared
from tests.faults.consuming.instance import COMMIT_S, Exact, Given
from tests.faults.consuming.judge import (
    ATTEMPTS_MAX,
    History,
    Judge,
    Rec,
    Rules,
    Stored,
    Topics,
    Violation,
    read_history,
)
from tests.faults.consuming.judge import position as read_position
from tests.faults.consuming.tables import ERRORS
from tests.faults.processes import Instance, Processes
from tests.kit.topic_reader import admin_of, create_topic, read_topics
from tests.kit.until import until
from txbroker.config.settings import load_kafka_access
from txbroker.core.consuming.aside import release_record
from txbroker.core.consuming.copies import GroupTopics, MessageSource
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.consuming import KafkaConsumingDoor

PARTITIONS = 4
KEYS = 60
DELAYS_S = (0.2, 0.3, *(0.4,) * 14)
SESSION_S, LEASE_S, HEARTBEAT_S = 6.0, 3.0, 0.5
SETTLE_S = 90.0
"""How long nothing may change, before all is done."""
LOOK_S = 10.0
MANY, MANY_ASIDE = 4000, 2400
"""Keys that fail: in each partition fewer than a consumer sets aside."""
KEYS_FAIL, SESSIONS_CHANGED = "keys fail", "sessions changed"
"""Kinds of load."""
MANY_TIMES, GOOD_SHARE, SLOWLY_S = 3.0, 0.25, 0.2
"""While keys fail: how many more messages there are, the share of good ones, and how long a failing
one takes where there is no transaction."""
LAG_S = 3.0
"""How long a commit may take after its interval, on a busy machine."""


class Case(NamedTuple):
    """A consumer: its order, failure policy and mode; static members keep their instance ids.

    Attributes:
        store: exactly once: `sqlite`, `postgresql`, `mariadb` or `kafka`; "": at least once.
        batch: messages of a call; 0: one.
        later: number of later stages.
        coroutine: the handler is one.
    """

    order: str
    on_failure: str | None
    static: bool = False
    store: str = ""
    batch: int = 0
    later: int = 0
    coroutine: bool = False

    @property
    def name(self) -> str:
        words = [self.store, self.order, self.on_failure or "at-most-once"]
        words += ["static"] * self.static + ["batch"] * bool(self.batch)
        words += ["stages"] * bool(self.later) + ["coroutine"] * self.coroutine
        return "-".join(filter(None, words))

    def options(self) -> dict[str, Any]:
        """Return options of `Consumer`."""
        if self.on_failure is None:
            return {"order": self.order, "mode": "at-most-once", "in_flight_max": 16}
        return {
            "order": self.order,
            "on_failure": self.on_failure,
            "retry_interval_s": 0.05,
            "local_attempts_max": ATTEMPTS_MAX,
            "in_flight_max": 16,
        }


class Timing(NamedTuple):
    """Of the members, seconds."""

    session_s: float = SESSION_S
    lease_s: float = LEASE_S
    heartbeat_s: float = HEARTBEAT_S


class Fleet(Processes):
    """One group of consumers.

    Args:
        folder: for the history and the logs.
        size: number of instances.
        rate: messages a second.
    """

    module = "tests.faults.consuming.instance"

    def __init__(
        self,
        bootstrap: str,
        case: Case,
        folder: Path,
        seed: int,
        *,
        size: int = 3,
        rate: float = 150.0,
    ) -> None:
        super().__init__(folder)
        self.bootstrap = bootstrap
        self.case = case
        self.fate = random.Random(f"{seed}/{case.name}")
        self.size = size
        self.timing = Timing()
        self.group = f"faults-{case.name}-{os.getpid()}-{seed}"
        self.topic = f"{self.group}.source"
        self.sources = [self.topic]
        self.topics = GroupTopics.of("txbroker", self.group)
        self.produced = 0
        self._seed = seed
        self._rate = rate
        self._history = folder / "history.jsonl"
        self._healed = folder / "healed"
        self.slowed = folder / "slowed"
        self.slow_s = 0.0
        self._stored: list[Stored] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._loading = self._watching = True
        self.load = ""
        self.load_until = 0.0
        self.many = 0

    # --- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Create the topic, and start the instances and the load."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for topic in self.sources:
            await self.answered(create_topic, self.bootstrap, topic, PARTITIONS)
        for slot in range(self.size):
            await self.launch(slot)
        self._tasks = [
            asyncio.create_task(self._load()),
            asyncio.create_task(self._watch()),
        ]

    async def launch(
        self,
        slot: int,
        point: str = "",
        skip: int = 0,
        *,
        stops: bool = False,
        deaf: bool = False,
    ) -> Instance:
        """Start an instance, which may kill or stop itself at a moment; see `Given`."""
        name = f"c{next(self._numbers)}"
        options = {
            **self.case.options(),
            **self.timing._asdict(),
            "group": self.group,
            "topics": self.sources,
            "drain_s": 2.0,
            **({"instance": f"slot-{slot}"} if self.case.static else {}),
        }
        given = Given(
            bootstrap=self.bootstrap,
            name=name,
            history=str(self._history),
            healed=str(self._healed),
            slowed=str(self.slowed),
            slow_s=self.slow_s,
            seed=self._seed,
            options=options,
            delays=list(DELAYS_S),
            point=point,
            skip=skip,
            stops=stops,
            exact=self._exact(),
            deaf=deaf,
        )
        return await self.spawn(name, given, slot)

    def _exact(self) -> Exact | None:
        """Return how instances store results."""
        return None

    def note(self, what: str, instance: str, begin: float, end: float) -> None:
        """Write a fault to the history."""
        line = {"event": "fault", "what": what, "instance": instance, "at": begin, "until": end}
        with self._history.open("a") as file:
            file.write(json.dumps(line) + "\n")

    async def ready(self, instance: Instance, within_s: float) -> bool:
        """Wait until an instance has joined the group, or has ended; return whether it has joined
        and runs."""
        file = self._folder / f"{instance.name}.ready"
        with contextlib.suppress(AssertionError):
            await until(lambda: file.exists() or not instance.running, within_s)
        return file.exists() and instance.running

    async def begun(self, instance: Instance, within_s: float) -> bool:
        """Wait until an instance has called its handler; return whether it has."""
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s and instance.running:
            await asyncio.sleep(0.3)
            lines = self._history.open() if self._history.exists() else ()
            for line in lines:
                if f'"instance": "{instance.name}"' in line and '"begin"' in line:
                    return True
        return False

    async def kill(self, instance: Instance) -> None:
        """End an instance as by kill -9."""
        now = time.monotonic()
        self.note("killed", instance.name, now, now)
        await super().kill(instance)

    def free_slot(self) -> int:
        """Return the lowest slot without an instance."""
        taken = {instance.slot for instance in self.instances}
        return next(slot for slot in itertools.count() if slot not in taken)

    async def fill_up(self) -> None:
        """Replace instances that are missing."""
        for instance in list(self.instances):
            if not instance.running:
                await self.buried(instance)
        while len(self.instances) < self.size:
            await self.launch(self.free_slot())

    # --- load --------------------------------------------------------------------------------

    async def _load(self) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap, "log_level": 0, "linger.ms": 5})
        due, at = 0.0, time.monotonic()
        while self._loading:
            before, at = at, time.monotonic()
            due += (at - before) * self._rate * (MANY_TIMES if self.load == KEYS_FAIL else 1.0)
            while self.produced < due and not self._full():
                key, value = self._message()
                topic = self.fate.choice(self.sources) if self.sources[1:] else self.topic
                producer.produce(topic, json.dumps(value), key)
                self.produced += 1
            producer.poll(0)
            await asyncio.sleep(0.02)
        assert await asyncio.to_thread(producer.flush, 60) == 0

    def _full(self) -> bool:
        """Whether consumers are too far behind."""
        return False

    def _message(self) -> tuple[str, dict[str, Any]]:
        fate = self.fate
        number = fate.randrange(KEYS)
        draw = fate.random()
        value: dict[str, Any] = {"n": self.produced}
        if self.load == KEYS_FAIL:
            return self._of_many(value)
        if number % 20 == 0:
            # A key that fails: for a moment, or until everything is healed.
            waits = self.case.on_failure == "wait"
            for_ever = not waits and fate.random() < 0.5
            seconds = 1e6 if for_ever else fate.uniform(0.1, 0.6 if waits else 3.0)
            value["fails_until"] = time.time() + seconds
        elif draw < 0.03:
            value["flaky"] = True
        elif draw < 0.04:
            value["reject"] = True
        elif draw < 0.06:
            value["later_s"] = fate.uniform(0.05, 0.5)
        elif draw < 0.12:
            value["takes_s"] = fate.uniform(0.005, 0.03)
        elif draw < 0.123:
            value["takes_s"] = 1.0
        return f"key-{number}", value

    def _of_many(self, value: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Give a message its own key, which fails or is good."""
        aside = self.case.on_failure == "aside"
        if self.fate.random() < GOOD_SHARE or self.many >= (MANY_ASIDE if aside else MANY):
            return f"good-{self.produced}", {**value, "at": time.monotonic()}
        self.many += 1
        slow = {} if self.case.store else {"takes_s": SLOWLY_S}
        return f"bad-{self.produced}", {**value, **slow, "fails_until": self.load_until}

    async def _watch(self) -> None:
        while self._watching:
            await asyncio.sleep(0.5)
            with contextlib.suppress(KafkaError, OSError):
                self._stored.append(await self._look())

    async def _look(self) -> Stored:
        # Not librdkafka's client: it returns metadata whose memory is free already. This one may
        # wait for ever for brokers that were restarted.
        async with asyncio.timeout(LOOK_S):
            admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
            try:
                await admin.start()  # type: ignore[no-untyped-call]
                found = await admin.list_consumer_group_offsets(self.group)
            finally:
                await admin.close()  # type: ignore[no-untyped-call]
        offsets = {
            (at.topic, at.partition): (each.offset, each.metadata)
            for at, each in found.items()
            if each.offset >= 0
        }
        return Stored(time.monotonic(), offsets)

    # --- the end -----------------------------------------------------------------------------

    async def settle(self) -> None:
        """End the load, heal everything, and wait until all is done, waiting or set aside."""
        self._loading = False
        await self._tasks[0]
        self._healed.touch()
        await self.fill_up()
        left, since_s = [""], time.monotonic()
        while left:
            await self.fill_up()
            await asyncio.sleep(0.3)
            if self.case.on_failure == "aside":
                await self.release()
            before = left
            try:
                left = await self._open()
            except (KafkaException, KafkaError, AssertionError, *ERRORS) as error:
                left = [str(error)]
            if left != before:
                since_s = time.monotonic()
            elif time.monotonic() - since_s > SETTLE_S:
                self.wrong.append(f"not settled: {left[:20]}")
                return

    async def _open(self) -> list[str]:
        """Return the names of messages that are not done."""
        stored = (await self._look()).offsets
        left = await asyncio.to_thread(self._in_transactions)
        sources, retries, asides = [
            await asyncio.to_thread(self._read, *names) for names in self._names()[:3]
        ]
        for record in (*sources, *retries):
            low, _ranges = read_position(*stored.get((record.topic, record.partition), (0, "")))
            if record.offset >= low:
                left.append(f"{record.topic}-{record.partition}@{record.offset}")
        return left or [f"key {key} of {place}" for place, key in uncleared(asides)]

    def _in_transactions(self) -> list[str]:
        """Return the partitions with an open transaction: what follows in them is not read."""
        admin = admin_of(self.bootstrap)
        known = admin.list_topics(timeout=10).topics
        places = [
            TopicPartition(name, number)
            for name in itertools.chain(*self._names())
            if name in known
            for number in known[name].partitions
        ]
        ends = []
        for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED):
            asked = {place: OffsetSpec.latest() for place in places}
            found = admin.list_offsets(asked, isolation_level=level)
            ends.append([found[place].result(10).offset for place in places])
        return [
            f"transaction in {place.topic}-{place.partition}"
            for place, stable, end in zip(places, *ends, strict=True)
            if stable < end
        ]

    def _names(self) -> list[list[str]]:
        """Return the names of the sources, and of the topics for retries, set-aside messages and
        dead letters."""
        own = self.topics
        return [self.sources, [own.retry], [own.aside], [own.dead]]

    def _read(self, *topics: str) -> list[Rec]:
        known = admin_of(self.bootstrap).list_topics(timeout=10).topics
        if not all(topic in known for topic in topics):
            return []
        return [
            Rec(
                record.topic,
                record.partition,
                record.offset,
                record.key.decode() if record.key is not None else None,
                tuple((name, (value or b"").decode()) for name, value in record.headers),
                (record.value or b"").decode(),
            )
            for record in read_topics(self.bootstrap, topics)
        ]

    async def release(self) -> None:
        """Release all set-aside keys, as an operator, if Kafka answers."""
        access = load_kafka_access(self.bootstrap, None)
        door = KafkaConsumingDoor(KafkaSettings.from_access(access, "operator"))
        with contextlib.suppress(KafkaException, KafkaUnavailable, AssertionError):
            keys = uncleared(await asyncio.to_thread(self._read, self.topics.aside))
            await door.start()
            for (source, number), key in keys.items():
                record = release_record(
                    MessageSource(*source), key.encode() if key else None, "healed"
                )
                await door.append(self.topics.aside, number, [record])
        await door.close()

    async def close(self) -> None:
        """End all instances, and read everything."""
        # Not by cancellation, which aiokafka's admin client may swallow.
        self._loading = self._watching = False
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self.stop(instance) for instance in list(self.instances)))
        self._stored.append(await self.awaited(self._look))

    async def _found(self) -> tuple[History, Topics]:
        """Read the history and all records."""
        source, retry, aside, dead, *output = [
            await self.answered(self._read, *names) for names in self._names()
        ]
        history = read_history([json.loads(line) for line in self._history.open()])
        return history, Topics(source, retry, dead, aside, self._stored, *output)

    async def judged(self) -> tuple[History, Topics, list[Violation]]:
        """Read everything and judge it."""
        history, topics = await self._found()
        most_once = self.case.on_failure is None
        faults = len(history.faults) + 2
        rules = Rules(
            self.case.order,
            aside=self.case.on_failure == "aside",
            at_most_once=most_once,
            lost_max=200 * 2 * PARTITIONS * faults,
            commit_s=COMMIT_S + LAG_S,
        )
        judge = Judge(history, topics, rules)
        return history, topics, await asyncio.to_thread(judge.judge)
