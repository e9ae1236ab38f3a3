"""A message that ends its process fails like any other; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from tests.kit.consumer_world import World, text
from tests.simulator.sim_loop import Life, Process, SimLoop, simulated_machine
from txbroker.consumer import Consumer, ReceivedMessage
from txbroker.core.consuming.position import NO_STARTS

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")


class Fleet:
    """Processes one after another.

    Args:
        kill: values of messages whose handler ends the process.
        fail: values of messages whose handler raises.
        how: messages are handled.
        takes_s: the time of a call.
    """

    def __init__(
        self,
        *kill: str,
        fail: Collection[str] = (),
        how: str = "one",
        takes_s: float = 0.1,
        **options: Any,
    ) -> None:
        self.world = World(partitions=1)
        self.world.kafka.create_topic("more", 1)
        self.kill, self.fail, self.how, self.options = kill, fail, how, options
        self.takes_s = takes_s
        self.done: list[str] = []
        self.calls: list[tuple[str, int]] = []
        self.process: Process
        self.stopped = asyncio.Event()
        self.exited = False

    async def handle(self, given: ReceivedMessage | Sequence[ReceivedMessage]) -> None:
        for message in [given] if isinstance(given, ReceivedMessage) else given:
            self.calls.append((text(message), message.attempt))
            if text(message) in self.kill:
                if self.how == "exit":
                    raise SystemExit(1)
                self.process.life = Life.DEAD
                await asyncio.Event().wait()
            await asyncio.sleep(self.takes_s)
            if text(message) in self.fail:
                raise ValueError("bug")
            self.done.append(text(message))

    async def _live(self) -> None:
        consumer = self.world.consumer(instance="one", topics=["orders", "more"], **self.options)
        async with consumer:
            if self.how == "pull":
                run = asyncio.create_task(self._pull(consumer))
            else:
                batch = 4 if self.how == "batch" else 0
                run = asyncio.create_task(self._run(consumer, batch))
            await self.stopped.wait()
            consumer.stop()
            await run

    async def _run(self, consumer: Consumer, batch: int) -> None:
        try:
            await consumer.run(self.handle, batch=batch)
        except SystemExit:
            self.exited = True

    async def _pull(self, consumer: Consumer) -> None:
        async for message in consumer:
            try:
                await self.handle(message)
                message.done()
            except ValueError as error:
                message.failed(error)

    async def start(self, seconds: float, *, killed: bool = False) -> bool:
        """Run a process for some time; return whether it did not end before.

        Args:
            killed: it is killed then, otherwise stopped.
        """
        self.process, self.stopped = Process("consumer", "1"), asyncio.Event()
        loop, mine = asyncio.get_running_loop(), self.process
        task = loop.create_task(self._live(), context=mine.context)
        ends_s = loop.time() + seconds
        self.exited = False
        while loop.time() < ends_s and mine.life is Life.RUNS and not self.exited:
            await asyncio.sleep(0.05)
        if mine.life is Life.DEAD:
            return False
        if killed:
            mine.life = Life.DEAD
        else:
            self.stopped.set()
            await task
        return not self.exited

    async def until_it_lives(self) -> int:
        """Start processes until one goes on; return the number."""
        for number in range(1, 20):
            if await self.start(15.0):
                return number
        raise AssertionError("each process ended")


def simulated(main: Any) -> Any:
    with simulated_machine():
        return SimLoop().run(main, Process("test", "1"))


MANY = [f"k{number % 7}={number}" for number in range(40)]
AT = 11


@pytest.mark.rule(37)
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"order": "partition", "on_failure": "skip"}, "dead"),
        ({"order": "key", "on_failure": "skip"}, "dead"),
        ({"order": "key", "on_failure": "skip", "how": "batch"}, "dead"),
        ({"order": "key", "on_failure": "skip", "how": "pull"}, "dead"),
        ({"order": "key", "on_failure": "skip", "how": "exit"}, "dead"),
        ({"order": "key", "on_failure": "aside"}, "aside"),
        ({"order": "none"}, "dead"),
    ],
)
def test_message_that_ends_its_process_fails(options: dict[str, Any], kind: str) -> None:
    fleet = Fleet(str(AT), in_flight_max=8, **options)
    fleet.world.produce(*MANY)
    assert simulated(fleet.until_it_lives()) <= 6
    attempts = [attempt for value, attempt in fleet.calls if value == str(AT)]
    assert attempts[-4:] == [1, 1, 2, 3], "beside others, then local_attempts_max times alone"
    later = {str(number) for number in range(AT, 40) if number % 7 == AT % 7}
    lost = later if kind == "aside" else {str(AT)}
    assert set(fleet.done) == {str(number) for number in range(40)} - lost
    assert set(fleet.world.values(kind)) == lost
    assert "ProcessEnded" in fleet.world.copies(kind)[0][1].cause
    assert fleet.world.committed()[1].starts == NO_STARTS


def test_messages_of_two_partitions_that_end_the_process() -> None:
    fleet = Fleet("11", "12", order="key", on_failure="skip")
    fleet.world.produce(*MANY[:12])
    fleet.world.produce(*MANY[12:], topic="more")
    assert simulated(fleet.until_it_lives()) <= 12
    assert sorted(fleet.world.values("dead")) == ["11", "12"]
    assert len(set(fleet.done)) == 38


@pytest.mark.parametrize("order", ["partition", "key"])
def test_waiting_message_that_ends_its_process_lets_others_go_on(order: str) -> None:
    fleet = Fleet(str(AT), order=order, on_failure="wait", retry_interval_s=1.0)
    fleet.world.produce(*MANY)

    async def main() -> None:
        for _ in range(7):
            assert not await fleet.start(60.0)

    simulated(main())
    attempts = [attempt for value, attempt in fleet.calls if value == str(AT)]
    assert attempts == sorted(attempts)
    assert attempts[-1] >= 5
    before = AT if order == "partition" else 40 - len(range(AT, 40, 7))
    assert len(set(fleet.done)) == before


def test_kills_count_against_no_message_while_others_are_done() -> None:
    """A key that waits holds the low-water mark."""
    fleet = Fleet(fail=["3"], order="key", on_failure="wait", in_flight_max=2)

    async def main() -> None:
        for number in range(12):
            fleet.world.produce(*(f"k{at % 7}={at}" for at in range(number * 10, number * 10 + 10)))
            assert await fleet.start(1.0, killed=True)
        assert await fleet.start(15.0)

    simulated(main())
    waiting = set(range(3, 120, 7)) | {10}
    assert {int(value) for value in fleet.done} == set(range(120)) - waiting
    attempts = [attempt for value, attempt in fleet.calls if value != "3"]
    assert set(attempts) == {1}, "no other message failed"


@pytest.mark.rule(37)
@pytest.mark.parametrize("progress", [True, False])
def test_stopped_consumers_count_no_start(progress: bool) -> None:
    fleet = Fleet(order="partition", drain_s=0.0, takes_s=0.1 if progress else 0.5)
    fleet.world.produce(*MANY[:20])

    async def main() -> None:
        for _ in range(6):
            assert await fleet.start(0.25)
            assert fleet.calls
            assert fleet.world.committed()[1].starts == NO_STARTS
        assert await fleet.start(15.0)

    simulated(main())
    assert set(fleet.done) == set(map(str, range(20)))
