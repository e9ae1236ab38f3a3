"""Relays of one outbox as processes on a real Kafka, their load, faults, and the judgement."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import KafkaException

from tests.faults.consuming.fleet import RUBBISH, Instance
from tests.faults.consuming.instance import LOSE_S, NO_KAFKA
from tests.faults.consuming.tables import ERRORS, MARIADB, POSTGRESQL, Tables
from tests.faults.relays.instance import Given
from tests.faults.relays.judge import Found, Judge, Rec, Sample, Violation
from tests.faults.relays.shop import Shop
from tests.kit.database_servers import DatabaseServer
from tests.kit.topic_reader import create_topic, read_topics
from tests.kit.until import until
from txbroker.failpoints import POINTS
from txbroker.relay.capture.plan import open_capture

MOMENTS = tuple(name for name in POINTS if name.startswith("relay."))
STOPS = ("relay.resumed", "relay.written", "relay.ending", "relay.ended", "relay.committed")
PARTITIONS = 3
LEASE_S = 1.0
TAKEN_OVER = "another process has taken over capture"
"""How a capture ends that was stopped meanwhile."""
SETTLE_S = 90.0
MOMENT_S = 30.0
HANG_S = 2.5
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Case(NamedTuple):
    """What delivers the rows of which kind of database."""

    database: str
    relays: int = 1
    shards: int = 1
    captured: bool = False

    @property
    def name(self) -> str:
        several = f"-{self.relays}-relays-{self.shards}-shards" if self.relays > 1 else ""
        return f"{'capture' if self.captured else 'outbox'}-{self.database}{several}"


class Fleet:
    """The relays of one outbox.

    Args:
        url: of an empty database.
        server: of the database; None: it is a file.
        kafka_pid: of the broker, which is paused.
    """

    def __init__(
        self,
        bootstrap: str,
        case: Case,
        url: str,
        folder: Path,
        seed: int,
        *,
        server: DatabaseServer | None = None,
        kafka_pid: int = 0,
        rate: float = 60.0,
    ) -> None:
        self.case = case
        self.server = server
        self.wrong: list[str] = []
        self.fate = random.Random(f"{seed}/{case.name}")
        self._bootstrap = bootstrap
        self._folder = folder
        self._seed = seed
        self._kafka_pid = kafka_pid
        self.name = f"f{os.getpid()}-{seed}"
        self._prefix = f"relays-{case.name}-{os.getpid()}-{seed}"
        self.shop = Shop(
            case.database,
            url,
            f"{self._prefix}.orders",
            queued=not case.captured,
            seed=seed,
            rate=rate,
        )
        self._mapping = folder / "capture.toml"
        self._samples: list[Sample] = []
        self._watch: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._instances: list[Instance] = []

    # --- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Create everything, and begin."""
        self._folder.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(create_topic, self._bootstrap, self.shop.topic, PARTITIONS)
        await asyncio.to_thread(self.shop.create)
        if self.case.captured:
            await self._capture()
        self.shop.open(3)
        await self._fill_up()

    async def close(self) -> None:
        """End the load and all relays."""
        await asyncio.to_thread(self.shop.close)
        await asyncio.gather(*(self._stop(each) for each in list(self._instances)))
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self.case.captured:
            await open_capture(str(self._mapping)).remove()

    async def _capture(self) -> None:
        """Prepare the database for a capture."""
        assert self.server is not None
        grant = "ALTER ROLE txbroker REPLICATION"
        if self.case.database == MARIADB:
            grant = "GRANT REPLICATION SLAVE ON *.* TO `txbroker`@`127.0.0.1`"
        await asyncio.to_thread(Tables(self.case.database, self.server.admin_url).run, grant)
        self._mapping.write_text(
            f'name = "{self.name}"\ndatabase = "{self.shop.url}"\n'
            f'topic_prefix = "{self._prefix}"\n'
            f'[[tables]]\ntable = "orders"\ntopic = "{self.shop.topic}"\nkey = "message_key"\n'
            'column = "value"\noperations = ["insert"]\n'
        )
        await open_capture(str(self._mapping)).apply()
        if self.case.database == POSTGRESQL:
            self._watch = asyncio.create_task(self._sample())

    async def _sample(self) -> None:
        """Compare what the database may forget with the position in Kafka, again and again."""
        while True:
            # A KeyError before the first capture has created the topic.
            with contextlib.suppress(KafkaException, KeyError, AssertionError, *ERRORS):
                forgotten = await asyncio.to_thread(
                    self.shop.forgotten, f"txbroker_{self.name.replace('-', '_')}"
                )
                positions, _records = await asyncio.to_thread(self._read)
                if forgotten is not None and positions:
                    high, low = json.loads(positions[-1])["lsn"].split("/")
                    at = (int(high, 16) << 32) + int(low, 16)
                    self._samples.append(Sample(forgotten, at))
            await asyncio.sleep(1)

    async def settle(self) -> None:
        """End the load, and wait until everything is delivered."""
        await asyncio.to_thread(self.shop.close)
        await self._fill_up()
        await self._caught_up(SETTLE_S)

    async def launch(self, point: str = "", skip: int = 0, *, stops: bool = False) -> Instance:
        """Start a relay, which may kill or stop itself at a moment."""
        name = f"r{next(self._numbers)}"
        options: dict[str, Any] = {
            "topic_prefix": self._prefix,
        }
        if not self.case.captured:
            options |= {"lease_s": LEASE_S, "shards": self.case.shards}
        given = Given(
            bootstrap=self._bootstrap,
            url="" if self.case.captured else self.shop.url,
            mapping=str(self._mapping),
            name=name,
            ready=str(self._folder / f"{name}.ready"),
            options=options,
            seed=self._seed,
            point=point,
            skip=skip,
            stops=stops,
        )
        log = self._folder / f"{name}.log"
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tests.faults.relays.instance", msgspec.json.encode(given).decode()),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        instance = Instance(name, 0, process, log)
        self._instances.append(instance)
        return instance

    async def _fill_up(self) -> None:
        for instance in [each for each in self._instances if not each.running]:
            await self._buried(instance)
        while len(self._instances) < self.case.relays:
            await self.launch()

    async def _buried(self, instance: Instance) -> None:
        self._instances.remove(instance)
        self._check(instance, await instance.process.wait())

    async def _stop(self, instance: Instance) -> None:
        instance.signal(signal.SIGTERM)
        try:
            code = await asyncio.wait_for(instance.process.wait(), 30)
        except TimeoutError:
            self.wrong.append(f"{instance.name} does not end")
            instance.signal(signal.SIGKILL)
            code = -signal.SIGKILL
        self._instances.remove(instance)
        self._check(instance, code)

    def _check(self, instance: Instance, code: int) -> None:
        # A signal that comes before its handler ends a process.
        if code in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGUSR1, NO_KAFKA):
            return
        text = instance.log.read_text(errors="replace")
        if TAKEN_OVER in text:
            return
        if code != 0 or any(word in text for word in RUBBISH):
            self.wrong.append(f"{instance.name} ended with {code}: {text[-1500:]}")

    # --- faults ------------------------------------------------------------------------------

    def kinds(self) -> list[str]:
        """Return the names of all faults that this fleet can have."""
        found = [*(f"killed at {point}" for point in MOMENTS), "killed", "answers lost"]
        if self.server is not None:  # a process that is stopped may have a file's only lock
            found += [f"stopped at {point}" for point in STOPS]
            found += ["database killed", "database restarted", "database paused"]
        return [*found, *(["kafka paused"] if self._kafka_pid else [])]

    async def inject(self, kind: str) -> None:
        """Inject a fault, and wait until all that committed before its end is delivered."""
        if kind.startswith(("killed at ", "stopped at ")):
            way, point = kind.split(" at ")
            await self._at(point, stops=way == "stopped")
        elif kind == "killed":
            for instance in self._instances:
                instance.signal(signal.SIGKILL)
        elif kind == "answers lost":
            for instance in self._instances:
                instance.signal(signal.SIGUSR1)
            await asyncio.sleep(LOSE_S)
        elif kind == "kafka paused":
            os.kill(self._kafka_pid, signal.SIGSTOP)
            await asyncio.sleep(HANG_S)
            os.kill(self._kafka_pid, signal.SIGCONT)
        else:
            await self._break_database(kind)
        await self._fill_up()
        await self._caught_up(SETTLE_S)

    async def _at(self, point: str, *, stops: bool) -> None:
        """A relay that has all rows kills or stops itself at a moment."""
        await asyncio.gather(*(self._stop(each) for each in list(self._instances)))
        skip = 0 if point in ("relay.fenced", "relay.claimed", "relay.resumed") else 2
        armed = await self.launch(point, self.fate.randrange(skip + 1), stops=stops)
        try:
            await until(lambda: armed.stopped or not armed.running, MOMENT_S)
        except AssertionError:
            self.wrong.append(
                f"{armed.name} does not reach {point}: {armed.log.read_text()[-500:]}"
            )
        if armed.stopped:
            await self.launch()
            await self._caught_up(SETTLE_S)
            armed.signal(signal.SIGCONT)
            await self._caught_up(SETTLE_S)
            await self._stop(armed)

    async def _break_database(self, kind: str) -> None:
        server = self.server
        assert server is not None
        if kind == "database paused":
            await asyncio.to_thread(server.pause)
            await asyncio.sleep(HANG_S)
            await asyncio.to_thread(server.resume)
            return
        await asyncio.to_thread(server.kill if kind == "database killed" else server.stop)
        await asyncio.to_thread(server.start)

    async def _caught_up(self, within_s: float) -> None:
        """Wait until all that is committed now is visible."""
        count = await self._answered(self.shop.count)
        until_s = time.monotonic() + within_s
        while await self._answered(self._visible) < count:
            await self._fill_up_running()
            if time.monotonic() > until_s:
                self.wrong.append(f"not delivered within {within_s:g} s: of {count} rows")
                return
            await asyncio.sleep(0.5)

    async def _fill_up_running(self) -> None:
        """Replace relays that found no database or Kafka at their start."""
        if not any(each.running and not each.stopped for each in self._instances):
            await self._fill_up()

    async def _answered(self, ask: Callable[[], Any]) -> Any:
        while True:
            try:
                return await asyncio.to_thread(ask)
            except (KafkaException, AssertionError, *ERRORS):
                await asyncio.sleep(0.3)

    def _visible(self) -> int:
        """Return the number of rows that are delivered: marked, or else in the topic."""
        if not self.case.captured:
            return self.shop.delivered()
        return len(read_topics(self._bootstrap, [self.shop.topic]))

    # --- the judgement -----------------------------------------------------------------------

    async def judged(self) -> tuple[int, list[Violation]]:
        """Return the number of committed rows, and all broken rules."""
        changes = await self._answered(self.shop.changes)
        queued = await self._answered(self.shop.queued)
        positions, records = await self._answered(self._read)
        found = Found(
            changes, self.shop.txns, records, queued, positions, self.case.shards, self._samples
        )
        if self._watch is not None and not self._samples:
            self.wrong.append("no instance looked at the slot")
        return len(changes), await asyncio.to_thread(Judge(found).judge)

    def _read(self) -> tuple[list[str], list[Rec]]:
        positions = [
            (each.value or b"").decode()
            for each in read_topics(self._bootstrap, [f"{self._prefix}.relay"])
            if not (each.key or b"").endswith(b"/owner")
        ]
        records = [
            Rec(
                each.topic,
                each.partition,
                each.offset,
                each.key.decode() if each.key is not None else None,
                (each.value or b"").decode(),
                {name: (value or b"").decode() for name, value in each.headers},
            )
            for each in read_topics(self._bootstrap, [self.shop.topic])
        ]
        return positions, records


async def run_case(fleet: Fleet, kinds: list[str]) -> tuple[int, list[str]]:
    """Run a fleet with these faults; return the number of rows, and all faults found."""
    await fleet.start()
    try:
        for kind in kinds:
            await fleet.inject(kind)
        await fleet.settle()
    finally:
        await fleet.close()
    count, violations = await fleet.judged()
    return count, [*map(str, violations), *fleet.wrong]


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
