"""Random faults: members come, go, fall silent and are killed, answers are lost, Kafka is down."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.kit.consumer_world import TIMING, World, text
from tests.kit.until import until
from txbroker.consumer import CommitPolicy, Later, ReceivedMessage, Reject
from txbroker.core.consuming.aside import AsideKeys
from txbroker.errors import KafkaUnavailable
from txbroker.testing.topics import LostReply

PARTITIONS, KEYS, STEPS = 4, 5, 40


class Storm:
    """Consumers of one group under random faults, and what their handlers did."""

    def __init__(self, world: World, seed: int, **options: Any) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.options = options
        self.total = 0
        self.live: dict[str, tuple[asyncio.Event, asyncio.Task[None]]] = {}
        self.silent: set[str] = set()
        self.names = iter(range(1000))
        self.done: dict[tuple[int, bytes | None], list[int]] = {}
        self.tokens: dict[int, int] = {}
        self.bad = {str(number) for number in range(10_000) if self.rng.random() < 0.03}
        self.active: set[tuple[int, bytes | None]] = set()
        self.started: list[tuple[int, int]] = []
        self.ordered = True

    async def handle(self, message: ReceivedMessage) -> None:
        lane = (message.partition, message.key)
        assert not self.ordered or lane not in self.active, "one at a time"
        self.active.add(lane)
        self.started.append((message.partition, message.offset))
        try:
            assert message.token >= self.tokens.get(message.partition, 0), "tokens never decrease"
            self.tokens[message.partition] = message.token
            await asyncio.sleep(self.rng.choice((0, 0, 0.001, 0.005)))
            luck = self.rng.random()
            if luck < 0.05:
                raise ValueError("bug")
            if luck < 0.08:
                raise Later(0.01)
            if text(message) in self.bad:
                raise Reject("bad")
            self.done.setdefault(lane, []).append(message.offset)
        finally:
            self.active.discard(lane)

    async def begin(self) -> None:
        name = f"c{next(self.names)}"
        options: dict[str, Any] = dict(
            instance=name,
            commit=CommitPolicy(max_batch=20, max_interval_s=0.01),
            in_flight_max=8,
            **TIMING | {"session_s": 0.8, "lease_s": 0.4} | {"drain_s": 0.2} | self.options,
        )
        stop = asyncio.Event()
        self.live[name] = stop, asyncio.create_task(self._run(stop, options))

    async def _run(self, stop: asyncio.Event, options: dict[str, Any]) -> None:
        while not stop.is_set():
            consumer = self.world.consumer(**options)
            try:
                await consumer.start()
            except KafkaUnavailable:
                await asyncio.sleep(0.01)
                continue
            run = asyncio.create_task(consumer.run(self.handle))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({run, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            consumer.stop()
            await consumer.aclose()
            await run

    async def end(self) -> None:
        name = self.rng.choice(list(self.live))
        stop, task = self.live.pop(name)
        stop.set()
        await asyncio.wait_for(task, 30)

    async def step(self) -> None:
        group, kafka, luck = self.world.group, self.world.kafka, self.rng.randrange(11)
        if luck < 4:
            partition = self.rng.randrange(PARTITIONS)
            values = [f"{self.rng.randrange(KEYS)}={self.total + n}" for n in range(10)]
            self.total += 10
            self.world.produce(*values, partition=partition)
        elif luck == 4 and len(self.live) < 3:
            await self.begin()
        elif luck == 5 and len(self.live) > 1 and not self.silent:
            await self.end()
        elif luck == 6 and not self.silent:
            if there := [name for name in self.live if name in group.seats]:
                self.silent.add(self.rng.choice(there))
                group.silence(*self.silent)
        elif luck == 7 and self.silent:
            group.reconnect(self.silent.pop())
        elif luck == 8:
            for number, key in self.set_aside()[:2]:
                self.world.release(key, partition=number)
        elif luck == 9:
            group.lose_answer_of_next_commit(self.rng.choice(list(LostReply)))
        else:
            kafka.go_down()
            await asyncio.sleep(self.rng.random() * 0.05)
            kafka.come_up()
        await asyncio.sleep(self.rng.random() * 0.05)

    def set_aside(self) -> list[tuple[int, bytes]]:
        """The set-aside keys, from the records of the aside topic."""
        found = []
        for number in range(PARTITIONS):
            keys = AsideKeys(("orders", number))
            for record in self.world.records("aside"):
                keys.note(record)
            found += [(number, key) for key in keys.keys if isinstance(key, bytes)]
        return found

    def check(self, world: World) -> None:
        """Everything is done or a dead letter, in order, and each copy exists once."""
        for number in range(PARTITIONS):
            for key in range(KEYS):
                name = str(key).encode()
                expected = [
                    record.offset
                    for record in world.kafka.visible("orders", number)
                    if record.key == name and (record.value or b"").decode() not in self.bad
                ]
                first = list(dict.fromkeys(self.done.get((number, name), [])))
                assert sorted(first) == expected, "everything is done"
                assert not self.ordered or first == expected, "in order"
        dead = world.values("dead")
        assert set(dead) == {str(number) for number in range(self.total)} & self.bad
        aside = [failed.source for _record, failed in world.copies("aside")]
        for copies in (dead, aside):
            assert len(copies) == len(set(copies)), "each copy once"

    def committed(self) -> bool:
        offsets = self.world.group.offsets
        return all(
            offsets.get(("orders", number), (0,))[0]
            == self.world.kafka.partition("orders", number).end
            for number in range(PARTITIONS)
        )


MODES: dict[str, dict[str, Any]] = {
    "key": {"order": "key", "on_failure": "wait"},
    "none": {"order": "none", "on_failure": "wait"},
    "aside": {"order": "key", "on_failure": "aside", "local_attempts_max": 1},
    "at most once": {"order": "key", "mode": "at-most-once"},
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", MODES)
async def test_storm(world: World, seed: int, mode: str) -> None:
    world.kafka.add_partitions("orders", PARTITIONS)
    storm = Storm(world, seed, **MODES[mode])
    storm.ordered = mode != "none"
    await storm.begin()
    for _ in range(STEPS):
        await storm.step()
        failed = [task for _consumer, task in storm.live.values() if task.done()]
        assert not failed, failed[0].exception()
    if storm.silent:
        world.group.reconnect(storm.silent.pop())
    if not storm.live:
        await storm.begin()
    await until(storm.committed)
    while keys := storm.set_aside():
        for number, key in keys:
            world.release(key, partition=number)
        await asyncio.sleep(0.05)
    while storm.live:
        await storm.end()
    if mode == "at most once":
        assert len(storm.started) == len(set(storm.started)), "each at most once"
        assert len(storm.started) > storm.total / 2
    else:
        storm.check(world)
