"""Messages that can be handled go on while others fail: in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from tests.kit.consumer_world import World, text
from tests.kit.processing import Doors
from tests.simulator.sim_loop import Process, SimLoop, simulated_machine
from txbroker.consumer import Consumer, Later, ReceivedMessage, Reject

GOOD, LATER_S, WITHIN_S = 100, 10.0, 4.0
BUG = KeyError("bug")


class Shop:
    """Messages of many keys that always fail, and good ones that arrive while they are retried.

    Args:
        bad: the number of messages that fail.
        takes_s: the time of a call that fails.
        error: raised by it.
        topic: of the good messages.
    """

    def __init__(
        self, topic: str, *, bad: int = 500, takes_s: float = 0.05, error: Exception = BUG
    ) -> None:
        self.world = World(partitions=1)
        self.world.kafka.create_topic("others", 1)
        self.world.produce(*(f"bad{number}=bad" for number in range(bad)))
        self.topic, self.takes_s, self.error = topic, takes_s, error
        self.left = GOOD
        self.last_s = 0.0
        self.consumer: Consumer

    async def handle(self, given: ReceivedMessage | Sequence[ReceivedMessage]) -> None:
        messages = [given] if isinstance(given, ReceivedMessage) else given
        if "bad" in map(text, messages):
            await asyncio.sleep(self.takes_s)
            raise self.error
        await asyncio.sleep(0.01)
        self.left -= len(messages)
        if not self.left:
            self.last_s = asyncio.get_running_loop().time()
            self.consumer.stop()

    async def run(self, run: dict[str, Any], **options: Any) -> None:
        values = [f"good{number % 10}=good" for number in range(GOOD)]
        loop = asyncio.get_running_loop()
        loop.call_later(LATER_S, lambda: self.world.produce(*values, topic=self.topic))
        given = {"group": "stock", "topics": ["orders", "others"], "drain_s": 0.1, **options}
        async with (
            Consumer(Doors.to(self.world.kafka), **given) as self.consumer,
            asyncio.timeout(60),
        ):
            await self.consumer.run(self.handle, **run)


def simulated(coroutine: Coroutine[Any, Any, None]) -> None:
    process, loop = Process("consumer", "1"), SimLoop()
    with simulated_machine():
        loop.run(coroutine, process)


@pytest.mark.rule(33)
@pytest.mark.parametrize("topic", ["orders", "others"])
@pytest.mark.parametrize(
    ("options", "shop", "run"),
    [
        ({"order": "key", "in_flight_max": 64}, {"bad": 2000}, {}),
        ({"order": "key"}, {"error": Later(0)}, {}),
        ({"order": "key"}, {"takes_s": 3.0, "bad": 40}, {}),
        ({"order": "key"}, {}, {"batch": 10}),
        ({"order": "key", "on_failure": "aside"}, {}, {}),
        ({"order": "key", "on_failure": "skip", "local_attempts_max": 1000}, {}, {}),
        ({"order": "none", "on_failure": "wait"}, {}, {}),
        ({"order": "none"}, {}, {}),
        ({"order": "none", "on_failure": "skip"}, {"error": Reject("bad"), "bad": 4000}, {}),
    ],
)
def test_good_messages_go_on(
    options: dict[str, Any], shop: dict[str, Any], run: dict[str, Any], topic: str
) -> None:
    made = Shop(topic, **shop)
    simulated(made.run(run, **{"in_flight_max": 16, **options}))
    assert made.last_s < LATER_S + WITHIN_S
