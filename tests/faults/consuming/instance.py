"""One consumer as a separate process, for `tests.faults.consuming.fleet`.

Its argument is `Given` as JSON. It writes a line to its history before and after each call of the
handler. Signals: SIGTERM ends it in order, SIGUSR1 lets it lose Kafka's answers for a moment,
SIGUSR2 cuts it off from Kafka, and the next one ends that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tests.kafka.relay import (
    ADD_OFFSETS,
    END_TXN,
    HEARTBEAT,
    INIT_PRODUCER_ID,
    JOIN_GROUP,
    OFFSET_COMMIT,
    PRODUCE,
    SYNC_GROUP,
    TXN_OFFSET_COMMIT,
    Fate,
    Relay,
)
from txbroker import failpoints
from txbroker.config.settings import load_kafka_access
from txbroker.consumer import CommitPolicy, Consumer, Later, ReceivedMessage, Reject
from txbroker.core.consuming import failure
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.consuming import KafkaConsumingDoor

_LOSABLE = frozenset(
    (
        *(OFFSET_COMMIT, PRODUCE, INIT_PRODUCER_ID, END_TXN, TXN_OFFSET_COMMIT, ADD_OFFSETS),
        *(JOIN_GROUP, HEARTBEAT, SYNC_GROUP),
    )
)
LOSE_S, LOSE_SHARE = 1.5, 0.5
COMMIT_S = 0.5
NO_KAFKA = 3
"""Exit code: Kafka did not answer at the start."""


class Given(msgspec.Struct, kw_only=True):
    """What an instance is started with.

    Attributes:
        history: the file of its history.
        healed: a file; once it exists, no message fails any more.
        options: of `Consumer`.
        delays: of the retry topic, seconds.
        point, skip: the moment at which it kills itself, "" for none, and how often it passes it.
    """

    bootstrap: str
    name: str
    history: str
    healed: str
    seed: int
    options: dict[str, Any]
    delays: list[float]
    point: str = ""
    skip: int = 0


class Losing:
    """A door to Kafka whose answers are lost, and whose requests are late, on demand."""

    def __init__(self, bootstrap: str, fate: random.Random) -> None:
        self._bootstrap = bootstrap
        self._fate = fate
        self._until_s = 0.0
        self._cut = False
        self.relay = Relay(self._decide)

    def lose(self) -> None:
        self._until_s = time.monotonic() + LOSE_S

    def cut(self) -> None:
        """Hold all requests, or let those that are held arrive, also those of connections that this
        process gave up long since."""
        self._cut = not self._cut
        if not self._cut:
            for held in self.relay.held:
                held.send()
            self.relay.held.clear()

    def _decide(self, key: int) -> Fate:
        if self._cut:
            return Fate.HOLD
        losing = key in _LOSABLE and time.monotonic() < self._until_s
        return Fate.LOSE_ANSWER if losing and self._fate.random() < LOSE_SHARE else Fate.PASS

    def consuming_door(self) -> KafkaConsumingDoor:
        """Return the door, see `Consumer`."""
        settings = KafkaSettings.from_access(load_kafka_access(self._bootstrap, None), "fault-run")
        return KafkaConsumingDoor(settings, self.relay.open)


class Handling:
    """The handler: what the message's value says, once it is not healed.

    Args:
        write: writes a line to the history.
    """

    def __init__(self, given: Given, write: Callable[..., None]) -> None:
        self._given = given
        self._write = write
        self._calls = itertools.count()
        self._healed = False

    async def __call__(self, message: ReceivedMessage) -> None:
        call = next(self._calls)
        self._write(
            "begin",
            call=call,
            topic=message.topic,
            partition=message.partition,
            offset=message.offset,
            key=message.key.decode() if message.key is not None else None,
            place=message.work.owner.place,
            token=message.token,
            attempt=message.attempt,
        )
        result = "cancelled"
        try:
            await self._act(message)
            result = "ok"
        except Later:
            result = "later"
            raise
        except Reject:
            result = "reject"
            raise
        except ValueError:
            result = "error"
            raise
        finally:
            self._write("end", call=call, result=result)

    async def _act(self, message: ReceivedMessage) -> None:
        what = json.loads(message.value or b"{}")
        if seconds := what.get("takes_s"):
            await asyncio.sleep(seconds)
        if not self._healed:
            self._healed = os.path.exists(self._given.healed)
        if what.get("reject"):
            raise Reject("never")
        if self._healed:
            return
        if what.get("fails_until", 0.0) > time.time():
            raise ValueError("not yet")
        if what.get("flaky") and message.attempt == 1:
            raise ValueError("once")
        if (seconds := what.get("later_s")) and message.attempt == 1:
            raise Later(seconds)


def arm(given: Given, write: Callable[..., None]) -> None:
    """Kill this process at the moment that was chosen."""
    left = given.skip

    def reached(name: str) -> None:
        nonlocal left
        if name != given.point:
            return
        if left:
            left -= 1
            return
        now = time.monotonic()
        write("fault", what=f"killed at {name}", until=now)
        os.kill(os.getpid(), signal.SIGKILL)

    if given.point:
        failpoints.hook = reached


def ready_file(given: Given) -> Path:
    """Return the file that shows that an instance has joined its group."""
    return Path(given.history).with_name(f"{given.name}.ready")


async def main(given: Given) -> None:
    """Consume until SIGTERM."""
    file = os.open(given.history, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(event: str, **fields: Any) -> None:
        line = {"event": event, "at": time.monotonic(), "instance": given.name, **fields}
        os.write(file, json.dumps(line).encode() + b"\n")

    failure.DELAYS_S = tuple(given.delays)
    arm(given, write)
    losing = Losing(given.bootstrap, random.Random(f"{given.seed}/{given.name}"))
    consumer = Consumer(
        losing,
        **given.options,
        commit=CommitPolicy(max_batch=200, max_interval_s=COMMIT_S),
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, consumer.stop)
    loop.add_signal_handler(signal.SIGUSR1, losing.lose)
    loop.add_signal_handler(signal.SIGUSR2, losing.cut)
    try:
        await consumer.start()
    except KafkaUnavailable:
        sys.exit(NO_KAFKA)
    async with contextlib.aclosing(consumer):
        write("started")
        ready_file(given).touch()
        try:
            await consumer.run(Handling(given, write))
        finally:
            counts = consumer.statistics()
            write("counts", **{**counts.counts, "overflow_now": counts.overflow})
    await losing.relay.close()
    write("stopped")


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Given)))
