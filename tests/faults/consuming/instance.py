"""One consumer as a separate process, for `tests.faults.consuming.fleet`.

Its argument is `Given` as JSON. It writes a line to its history before and after each call of the
handler. Signals: SIGTERM ends it in order, SIGUSR1 lets it lose Kafka's answers for a moment,
SIGUSR2 cuts it off from Kafka, and the next one ends that.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tests.faults.consuming.handling import ExactHandling, Handling, Plans
from tests.faults.consuming.tables import MARIADB, POSTGRESQL, SQLITE, Tables
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
from txbroker.consumer import (
    CommitPolicy,
    Consumer,
    InDatabase,
    InKafka,
    MessageLease,
)
from txbroker.core.consuming import failure
from txbroker.databases import MariaDB, Postgres, SQLite
from txbroker.databases.database import DatabaseUnavailable
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
HANG_S = 25.0
NO_KAFKA = 3
"""Exit code: Kafka did not answer at the start."""


class Exact(msgspec.Struct, kw_only=True):
    """How results are stored.

    Attributes:
        kind: `sqlite`, `postgresql`, `mariadb` or `kafka`.
        url: of the database, for the consumer.
        direct: the same, past any relay.
        output: the topic of what handlers send.
        later: number of later stages.
        batch: messages of a call; 0: one, not a list.
        coroutine: the handler is one.
    """

    kind: str
    url: str = ""
    direct: str = ""
    output: str = ""
    later: int = 0
    batch: int = 0
    coroutine: bool = False


class Given(msgspec.Struct, kw_only=True):
    """What an instance is started with.

    Attributes:
        history: the file of its history.
        healed: a file; once it exists, no message fails any more.
        slowed: a file; while it exists, calls take up to `slow_s` longer.
        options: of `Consumer`.
        delays: of the retry topic, seconds.
        point, skip: the moment at which it kills itself, "" for none, and how often it passes it.
        stops: it stops itself there instead, by SIGSTOP.
        exact: how results are stored; None: not with the position.
        deaf: its lease never ends, so that only its token is left.
    """

    bootstrap: str
    name: str
    history: str
    healed: str
    slowed: str = ""
    slow_s: float = 0.0
    seed: int
    options: dict[str, Any]
    delays: list[float]
    point: str = ""
    skip: int = 0
    stops: bool = False
    exact: Exact | None = None
    deaf: bool = False


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


class Armed(Protocol):
    """See `Given`."""

    point: str
    skip: int
    stops: bool


class Moment:
    """A moment at which this process ends or stops itself."""

    def __init__(self, given: Armed, write: Callable[..., None]) -> None:
        self._given = given
        self._write = write
        self._left = given.skip

    def reached(self, name: str) -> None:
        """Take note of a moment. In any thread."""
        given = self._given
        if name != given.point:
            return
        self._left -= 1
        if self._left == -1:
            if not given.stops:  # the fleet notes how long a stop takes
                self._write("fault", what=f"killed at {name}", until=time.monotonic())
            os.kill(os.getpid(), signal.SIGSTOP if given.stops else signal.SIGKILL)


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
    moment = Moment(given, write)
    if given.point:
        failpoints.hook = moment.reached
    if given.deaf:
        deafen()
    losing = Losing(given.bootstrap, random.Random(f"{given.seed}/{given.name}"))
    commit = CommitPolicy(max_batch=200, max_interval_s=COMMIT_S)
    options: dict[str, Any] = {**given.options, "commit": commit}
    if given.exact is not None:
        options |= {"mode": "exactly-once", "store": store_of(given.exact)}
    consumer = Consumer(losing, **options)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, consumer.stop)
    loop.add_signal_handler(signal.SIGUSR1, losing.lose)
    loop.add_signal_handler(signal.SIGUSR2, losing.cut)
    try:
        await consumer.start()
    except (KafkaUnavailable, DatabaseUnavailable):
        sys.exit(NO_KAFKA)
    async with contextlib.aclosing(consumer):
        write("started")
        ready_file(given).touch()
        try:
            await run(consumer, given, write, moment)
        finally:
            show_hang(loop)
            counts = consumer.statistics()
            write("counts", **{**counts.counts, "overflow_now": counts.overflow})
    await losing.relay.close()
    write("stopped")
    faulthandler.cancel_dump_traceback_later()


async def run(consumer: Consumer, given: Given, write: Callable[..., None], moment: Moment) -> None:
    """Handle messages as the instance is to."""
    plans, exact = Plans(given.healed, given.slowed, given.slow_s), given.exact
    if exact is None:
        await consumer.run(Handling(plans, write))
        return
    handling = ExactHandling(
        given.name,
        given.options["order"],
        Tables(exact.kind, exact.direct) if exact.url else None,
        exact.output,
        plans,
        write,
        moment.reached,
    )
    handler: Callable[..., Any] = handling.coroutine if exact.coroutine else handling.plain
    if not exact.url:
        handler = handling.sending
    await consumer.run(handler, then=handling.later(exact.later), batch=exact.batch)


def store_of(exact: Exact) -> InDatabase | InKafka:
    """Return where a consumer stores its results."""
    if exact.kind == SQLITE:
        return InDatabase(SQLite(exact.url, create_tables=True))
    if exact.kind == POSTGRESQL:
        return InDatabase(Postgres(exact.url, create_tables=True))
    if exact.kind == MARIADB:
        return InDatabase(MariaDB(exact.url, create_tables=True))
    return InKafka()


def show_hang(loop: asyncio.AbstractEventLoop) -> None:
    """Write to the log where this process is, if it does not end."""

    def show() -> None:
        for task in asyncio.all_tasks(loop):
            task.print_stack()

    loop.call_later(HANG_S, show)
    faulthandler.dump_traceback_later(HANG_S)


def deafen() -> None:
    """Let leases never end."""
    for name, value in (
        ("left_s", property(lambda _lease: math.inf)),
        ("ended", lambda _lease, _now_s: False),
    ):
        setattr(MessageLease, name, value)


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Given)))
