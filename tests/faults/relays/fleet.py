"""Relays of one outbox as processes on a real Kafka, their load, faults, and the judgement."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import KafkaException, Producer

from tests.faults.consuming.instance import LOSE_S, NO_KAFKA
from tests.faults.consuming.tables import ERRORS, MARIADB, POSTGRESQL, Tables
from tests.faults.processes import Instance, Processes
from tests.faults.relays.instance import Given
from tests.faults.relays.judge import ID, Change, Found, Judge, Key, Rec, Sample, Violation
from tests.faults.relays.shop import MIRRORED, Shop
from tests.kit.database_servers import DatabaseServer
from tests.kit.topic_reader import create_topic, read_topics
from tests.kit.until import unique, until
from txbroker.failpoints import POINTS
from txbroker.relay.capture.plan import open_capture
from txbroker.relay.capture.setup import refusals
from txbroker.relay.outbox_source import OutboxPosition, Page

MOMENTS = tuple(name for name in POINTS if name.startswith("relay."))
STOPS = ("relay.resumed", "relay.written", "relay.ending", "relay.ended", "relay.committed")
PARTITIONS = 3
LEASE_S = 1.0
TAKEN_OVER = "another process has taken over capture"
"""How a capture ends that was stopped meanwhile."""
SETTLE_S = 90.0
MOMENT_S = 30.0
HANG_S = 2.5
UNDONE_S = 3.0
"""Between the copy of a server's data and the moment that it is put back."""
WAITING_S = 1.5
REFUSED_S = 80.0
"""PostgreSQL's catalogs are compared each minute."""
MORE: Mapping[str, Any] = {}
ACCEPTED = "capture accepts a gap"
FORGED = " "
"""The end of positions that others than relays write."""
ADD_SLICE = {
    POSTGRESQL: "CREATE TABLE part_{n} PARTITION OF parts FOR VALUES IN ({n})",
    MARIADB: "ALTER TABLE parts ADD PARTITION (PARTITION part_{n} VALUES IN ({n}))",
}
APART = "CREATE TABLE apart_{n} (id BIGINT, slice BIGINT, PRIMARY KEY (id, slice))"
SLICES: dict[str, list[list[str]]] = {
    POSTGRESQL: [
        ["DROP TABLE part_{n}"],
        ["ALTER TABLE parts DETACH PARTITION part_{n}"],
        [
            "CREATE TABLE apart_{n} (LIKE parts INCLUDING ALL)",
            "INSERT INTO apart_{n} VALUES ({n}9, -{n})",
            "ALTER TABLE parts ATTACH PARTITION apart_{n} FOR VALUES IN (-{n})",
        ],
    ],
    MARIADB: [
        ["ALTER TABLE parts DROP PARTITION part_{n}"],
        ["ALTER TABLE parts TRUNCATE PARTITION part_{n}"],
        [
            APART,
            "INSERT INTO apart_{n} VALUES ({n}9, {n})",
            "ALTER TABLE parts EXCHANGE PARTITION part_{n} WITH TABLE apart_{n}",
        ],
    ],
}
"""What changes rows of partitions without the log's showing it. PostgreSQL's log lacks TRUNCATE of
one partition without a trace, as `docs/operate/known-limits.md` has it."""
ADD_KEY = (
    "ALTER TABLE items ADD CONSTRAINT owned FOREIGN KEY (parent) REFERENCES parents (id) "
    "ON DELETE CASCADE"
)
DROP_KEY = {
    POSTGRESQL: "ALTER TABLE items DROP CONSTRAINT owned",
    MARIADB: "ALTER TABLE items DROP FOREIGN KEY owned",
}


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


class Fleet(Processes):
    """The relays of one outbox.

    Args:
        url: of an empty database.
        server: of the database; None: it is a file.
        kafka_pid: of the broker, which is paused.
    """

    module = "tests.faults.relays.instance"
    expected = (TAKEN_OVER,)

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
        super().__init__(folder)
        self.case = case
        self.server = server
        self.fate = random.Random(f"{seed}/{case.name}")
        self._bootstrap = bootstrap
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
        self._mirror = f"{self._prefix}.mirror"
        self._slices = itertools.count(1)
        self._undone: dict[str, Change] = {}
        self._settled: set[str] = set()
        self._unshown: set[Key] = set()
        self._names = [""]
        """Of the relay; "" is the one that its database gave it."""
        self._first = 0
        """The first position that is judged."""
        self._samples: list[Sample] = []
        self._watch: asyncio.Task[None] | None = None

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
        await self._stop_all()
        if self._watch is not None:
            await self._unwatch()
        if self.case.captured:
            await open_capture(str(self._mapping)).remove()

    async def _capture(self) -> None:
        """Prepare the database for a capture."""
        assert self.server is not None
        grant = "ALTER ROLE txbroker REPLICATION"
        if self.case.database == MARIADB:
            grant = "GRANT REPLICATION SLAVE ON *.* TO `txbroker`@`127.0.0.1`"
        await asyncio.to_thread(Tables(self.case.database, self.server.admin_url).run, grant)
        await asyncio.to_thread(create_topic, self._bootstrap, self._mirror)
        self._map()
        await open_capture(str(self._mapping)).apply()
        if self.case.database == POSTGRESQL:
            self._watch = asyncio.create_task(self._sample())

    def _map(self, accept: str = "") -> None:
        """Write the mapping file."""
        mirrored = "".join(
            f'[[tables]]\ntable = "{table}"\ntopic = "{self._mirror}"\nkey = "id"\n'
            f'operations = ["insert", "delete"]\naccept = ["truncates", {accept}]\n'
            for table in MIRRORED
        )
        self._mapping.write_text(
            f'name = "{self.name}"\ndatabase = "{self.shop.url}"\n'
            f'topic_prefix = "{self._prefix}"\n'
            f'[[tables]]\ntable = "orders"\ntopic = "{self.shop.topic}"\nkey = "message_key"\n'
            f'column = "value"\noperations = ["insert"]\n{mirrored}'
        )

    async def _unwatch(self) -> None:
        assert self._watch is not None
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)

    async def _sample(self) -> None:
        """Compare what the database may forget with the position in Kafka, again and again."""
        while True:
            # A KeyError before the first capture has created the topic.
            with contextlib.suppress(KafkaException, KeyError, AssertionError, *ERRORS):
                forgotten = await asyncio.to_thread(
                    self.shop.forgotten, f"txbroker_{self.name.replace('-', '_')}"
                )
                positions = await asyncio.to_thread(self._positions)
                if forgotten is not None and positions:
                    high, low = json.loads(positions[-1][1])["lsn"].split("/")
                    at = (int(high, 16) << 32) + int(low, 16)
                    self._samples.append(Sample(forgotten, at))
            await asyncio.sleep(1)

    async def settle(self) -> None:
        """End the load, and wait until everything is delivered."""
        await asyncio.to_thread(self.shop.close)
        await self._fill_up()
        await self._caught_up(SETTLE_S)

    async def launch(
        self, point: str = "", skip: int = 0, *, stops: bool = False, more: Mapping[str, Any] = MORE
    ) -> Instance:
        """Start a relay, which may kill or stop itself at a moment; `more` are options of it."""
        name = f"r{next(self._numbers)}"
        options: dict[str, Any] = {"topic_prefix": self._prefix, **more}
        if not self.case.captured:
            options |= {"lease_s": LEASE_S, "shards": self.case.shards}
        given = Given(
            bootstrap=self._bootstrap,
            url="" if self.case.captured else self.shop.url,
            mapping=str(self._mapping),
            name=name,
            options=options,
            seed=self._seed,
            point=point,
            skip=skip,
            stops=stops,
        )
        return await self.spawn(name, given)

    async def _fill_up(self) -> None:
        for instance in [each for each in self.instances if not each.running]:
            await self.buried(instance)
        while len(self.instances) < self.case.relays:
            await self.launch()

    # --- faults ------------------------------------------------------------------------------

    def kinds(self) -> list[str]:
        """Return the names of all faults that this fleet can have."""
        found = [*(f"killed at {point}" for point in MOMENTS), "killed", "answers lost"]
        found.append("forged positions")
        if self.server is not None:  # a process that is stopped may have a file's only lock
            found += [f"stopped at {point}" for point in STOPS]
            found += ["database killed", "database restarted", "database paused"]
            found += ["database restored", "database restored before a start"]
        if self.case.captured:
            found += ["partitions changed", "partitions changed with consent", "foreign key added"]
        return [*found, *(["kafka paused"] if self._kafka_pid else [])]

    async def inject(self, kind: str) -> None:
        """Inject a fault, and wait until all that committed before its end is delivered."""
        if kind.startswith(("killed at ", "stopped at ")):
            way, point = kind.split(" at ")
            await self._at(point, stops=way == "stopped")
        elif kind == "killed":
            for instance in self.instances:
                instance.signal(signal.SIGKILL)
        elif kind == "answers lost":
            for instance in self.instances:
                instance.signal(signal.SIGUSR1)
            await asyncio.sleep(LOSE_S)
        elif kind == "kafka paused":
            os.kill(self._kafka_pid, signal.SIGSTOP)
            await asyncio.sleep(HANG_S)
            os.kill(self._kafka_pid, signal.SIGCONT)
        elif kind == "forged positions":
            await self._forge()
        elif kind.startswith("database restored"):
            await self._restore(later=kind != "database restored")
        elif kind.startswith("partitions"):
            await self._change_partitions(accepted=kind.endswith("consent"))
        elif kind == "foreign key added":
            await self._add_foreign_key()
        else:
            await self._break_database(kind)
        await self._fill_up()
        await self._caught_up(SETTLE_S)

    async def _at(self, point: str, *, stops: bool) -> None:
        """A relay that has all rows kills or stops itself at a moment."""
        await self._stop_all()
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
            await self.stop(armed)

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

    async def _stop_all(self) -> None:
        await asyncio.gather(*(self.stop(each) for each in list(self.instances)))

    async def _refused(self, *words: str) -> str:
        """Wait until all relays have ended with a sentence that has these words, and return it; "":
        they have not."""
        with contextlib.suppress(AssertionError):
            await until(lambda: not any(each.running for each in self.instances), REFUSED_S)
        text = ""
        for instance in [each for each in self.instances if not each.running]:
            self.instances.remove(instance)
            if instance.process.returncode == NO_KAFKA:
                continue
            log = instance.log.read_text(errors="replace")
            text = (re.findall(r"^txbroker\S+: (.*)", log, re.MULTILINE) or [""])[-1]
            if not all(word in text for word in words):
                code = instance.process.returncode
                self.wrong.append(f"{instance.name} ({code}) does not name {words}: {log[-1500:]}")
        if self.instances:
            self.wrong.append(f"{self.instances[0].name} goes on, without a sentence of {words}")
            return ""
        if not text:
            self.wrong.append(f"no relay has ended with a sentence of {words}")
        return text

    # --- a database that was put back --------------------------------------------------------

    async def _restore(self, *, later: bool) -> None:
        """Put the server back to an earlier moment. The last deliveries are undone, and their
        places in the log or table are free, or with `later` taken by other transactions. The relays
        must stop; then an operator follows the pages."""
        server, shop = self.server, self.shop
        assert server is not None
        await self._shut_down(server.save)
        await self._caught_up(SETTLE_S)
        await asyncio.sleep(UNDONE_S)
        await self._stop_all()
        await asyncio.sleep(WAITING_S)  # the last delivery has rows of many transactions
        await asyncio.to_thread(shop.close)
        await self._fill_up()
        await self._caught_up(SETTLE_S)
        if later:
            await self._stop_all()
        if self._watch is not None:
            await self._unwatch()
        committed, mirrored = await self._state()
        await self._shut_down(server.put_back)
        positions = await self.answered(self._positions)
        records = await self.answered(self._records)
        kept, still = await self._state()
        self._undone |= {id: committed[id] for id in committed.keys() - kept.keys()}
        self._unshown |= mirrored ^ still
        if later:
            shop.open(3)
            beyond = len(committed) + (len(committed) - len(kept)) // 2
            while len(await self.answered(shop.ids)) < beyond:
                await asyncio.sleep(0.5)
            await asyncio.to_thread(shop.close)
            await self._fill_up()
        await self._refused("restored")
        if self.case.captured:
            await self._go_on_after_restore()
        else:
            await asyncio.to_thread(self._compare, records)
            self._settled |= {record.row for record in records}
            self._first = len(positions)
        shop.open(3)
        await self._fill_up()
        await self._caught_up(SETTLE_S)
        if self._watch is not None:
            self._watch = asyncio.create_task(self._sample())

    async def _shut_down(self, meanwhile: Callable[[], None]) -> None:
        assert self.server is not None
        for each in (self.server.stop, meanwhile, self.server.start):
            await asyncio.to_thread(each)

    async def _state(self) -> tuple[dict[str, Change], frozenset[Key]]:
        changes = await self.answered(self.shop.changes)
        return {each.id: each for each in changes}, await self.answered(self.shop.mirrored)

    def _compare(self, records: Sequence[Rec]) -> None:
        """Mark visible rows, and begin without a position, as in `docs/how-to/outbox.md`."""
        ids = ", ".join(f"'{record.headers[ID]}'" for record in records)
        self._names.append(f"restored-{len(self._names)}")
        self.shop.run(
            f"UPDATE txbroker_outbox SET state = 'GLOBAL_COMMIT' WHERE id IN ({ids})",
            f"UPDATE txbroker_relay SET relay = '{self._names[-1]}'",
        )

    async def _go_on_after_restore(self) -> None:
        """Go on with what changes from now on; fill in the rest."""
        if self.case.database == POSTGRESQL:
            await open_capture(str(self._mapping)).remove()
            await open_capture(str(self._mapping)).apply()
        await self.launch(more={"on_gap": "skip"})
        until_s = time.monotonic() + SETTLE_S
        before = await self.answered(self._visible)
        while not await self.answered(self._visible) - before and time.monotonic() < until_s:
            await asyncio.to_thread(self.shop.once, self.fate)
            await asyncio.sleep(0.5)
        self._settled |= await self.answered(self.shop.ids) - await self.answered(self._visible)
        await self._stop_all()

    # --- changes that a log does not show ----------------------------------------------------

    async def _change_partitions(self, *, accepted: bool) -> None:
        if accepted:
            await self._remap('"partitions"')
        for statements in SLICES[self.case.database]:
            n = next(self._slices)
            await asyncio.to_thread(
                self.shop.run,
                ADD_SLICE[self.case.database].format(n=n),
                *(f"INSERT INTO parts VALUES ({n}{each}, {n})" for each in range(3)),
            )
            await self._caught_up(SETTLE_S)
            before = await asyncio.to_thread(self.shop.mirrored)
            counted = self._accepted()
            await asyncio.to_thread(self.shop.run, *(each.format(n=n) for each in statements))
            unshown = before ^ await asyncio.to_thread(self.shop.mirrored)
            # PostgreSQL's stream describes the table again.
            await asyncio.to_thread(self.shop.run, f"INSERT INTO parts VALUES ({n}8, 0)")
            if accepted:
                with contextlib.suppress(AssertionError):
                    await until(partial(self._has_accepted, counted), REFUSED_S)
                    self._unshown |= unshown
                await self._caught_up(SETTLE_S)
                continue
            statement = statements[-1].format(n=n)
            where = "partition" if self.case.database == POSTGRESQL else statement[:50]
            if text := await self._refused("parts", where):
                self._unshown |= unshown
                await self._go_on(text)
        if accepted:
            await self._remap("")

    async def _remap(self, accept: str) -> None:
        await self._stop_all()
        self._map(accept)
        await self._fill_up()
        await self._caught_up(SETTLE_S)

    def _accepted(self) -> int:
        """Return how many changes the capture has reported that its log does not show."""
        return sum(each.log.read_text().count(ACCEPTED) for each in self.instances)

    def _has_accepted(self, before: int) -> bool:
        return self._accepted() > before

    async def _go_on(self, text: str) -> None:
        """Go on as an operator does who has filled in what a sentence of a capture names."""
        skip = re.findall(r"--skip (\d+-\d+-\d+/\d+)", text)
        options: dict[str, Any] = {"skip": skip} if skip else {"on_gap": "skip"}
        await self.launch(more=options)
        await self._caught_up(SETTLE_S)
        await self._stop_all()
        await self._fill_up()

    async def _add_foreign_key(self) -> None:
        """A key deletes rows: PostgreSQL's log shows that, MariaDB's does not."""
        n = next(self._slices)
        await asyncio.to_thread(
            self.shop.run,
            f"INSERT INTO parents VALUES ({n}1), ({n}2)",
            f"INSERT INTO items VALUES ({n}1, {n}1), ({n}2, {n}1), ({n}3, {n}2)",
        )
        await self._caught_up(SETTLE_S)
        before = await asyncio.to_thread(self.shop.mirrored)
        await asyncio.to_thread(self.shop.run, ADD_KEY, f"DELETE FROM parents WHERE id = {n}1")
        unshown = before ^ await asyncio.to_thread(self.shop.mirrored)
        planned = refusals(await open_capture(str(self._mapping)).plan())
        if self.case.database == POSTGRESQL:
            await self._caught_up(SETTLE_S)
            await asyncio.to_thread(self.shop.run, DROP_KEY[POSTGRESQL])
            if planned:
                self.wrong.append(f"the plan refuses: {planned}")
            return
        if not any("items" in each and "CASCADE" in each for each in planned):
            self.wrong.append(f"the plan has no word on the foreign key: {planned}")
        if text := await self._refused("items", "foreign key"):
            self._unshown |= unshown
        await self._fill_up()
        await self._refused("items", "foreign key")
        await asyncio.to_thread(self.shop.run, DROP_KEY[MARIADB])
        await self._go_on(text)

    # --- positions of strangers --------------------------------------------------------------

    async def _forge(self) -> None:
        """Strangers write earlier positions, then later ones, while no relay runs."""
        await asyncio.sleep(WAITING_S)
        await self._caught_up(SETTLE_S)
        for later in (False, True):
            await self._stop_all()
            await asyncio.sleep(WAITING_S if later else 0)
            await self.answered(self._write_forged, later)
            await self._fill_up()
            await self._caught_up(SETTLE_S)

    def _write_forged(self, later: bool) -> None:
        found = self._positions()
        chosen = dict(found if later else reversed(found))
        servers = {"bootstrap.servers": self._bootstrap}
        for strange in ({}, {"transactional.id": unique("stranger")}):
            producer = Producer({**servers, **strange})
            if strange:
                producer.init_transactions()
                producer.begin_transaction()
            for key, position in chosen.items():
                value = self._later(key, position) if later else position
                for ending, text in (("", value + FORGED), ("/owner", '{"position": true}')):
                    producer.produce(f"{self._prefix}.relay", text, f"{key}{ending}", 0)
            if strange:
                producer.commit_transaction()
            assert producer.flush(MOMENT_S) == 0

    def _later(self, key: str, position: str) -> str:
        """Return a position that would pass over rows which wait."""
        if self.case.captured:
            query, field = "SELECT pg_current_wal_lsn()::text", "lsn"
            if self.case.database == MARIADB:
                query, field = "SELECT @@global.gtid_binlog_pos", "gtids"
            after = {field: self.shop.select(query)[0][0]}
            if field == "gtids":
                return json.dumps(after)
            return json.dumps(json.loads(position) | after)
        shard = int(key.rpartition("/")[2])
        rows = sorted(
            row
            for row in self.shop.queued() or ()
            if row.shard % self.case.shards == shard and row.state == "LOCAL_COMMIT"
        )
        page = Page.of(row.position for row in rows)
        page.digest = sha256("".join(f"{row.id}\n" for row in rows).encode()).hexdigest()
        forged = OutboxPosition(json.loads(position)["identity"], [page])
        return msgspec.json.encode(forged).decode()

    # --- waiting -----------------------------------------------------------------------------

    async def _caught_up(self, within_s: float) -> None:
        """Wait until all that is committed now is visible."""
        wanted = await self.answered(self.shop.ids)
        until_s = time.monotonic() + within_s
        while await self.answered(self._lacks, wanted):
            await self._fill_up_running()
            if time.monotonic() > until_s:
                self.wrong.append(f"not delivered within {within_s:g} s: of {len(wanted)} rows")
                return
            await asyncio.sleep(0.5)

    async def _fill_up_running(self) -> None:
        """Replace relays that found no database or Kafka at their start."""
        if not any(each.running and not each.stopped for each in self.instances):
            await self._fill_up()

    def _lacks(self, wanted: set[str]) -> bool:
        """Return whether a row is not delivered: not marked, or of a capture not in the topic."""
        if not self.case.captured:
            return bool(wanted & self.shop.waiting())
        return bool(wanted - self._settled - self._visible())

    def _visible(self) -> set[str]:
        """Return the ids of visible rows."""
        return {record.row for record in self._records()}

    # --- the judgement -----------------------------------------------------------------------

    async def judged(self) -> tuple[int, list[Violation]]:
        """Return the number of committed rows, and all broken rules."""
        changes = await self.answered(self.shop.changes)
        queued = await self.answered(self.shop.queued)
        positions = await self.answered(self._positions)
        found = Found(
            changes,
            self.shop.txns,
            await self.answered(self._records),
            queued,
            [text for _key, text in positions[self._first :]],
            self.case.shards,
            self._samples,
            undone=[each for id, each in self._undone.items()],
            settled=self._settled,
            names=len(self._names),
            mirrored=await self.answered(self.shop.mirrored),
            mirror=await self.answered(self._mirror_records),
            unshown=self._unshown,
        )
        if self._watch is not None and not self._samples:
            self.wrong.append("no instance looked at the slot")
        return len(changes), await asyncio.to_thread(Judge(found).judge)

    def _mirror_records(self) -> list[tuple[str, Key]]:
        if not self.case.captured:
            return []
        values = [
            ((each.key or b"").decode(), json.loads(each.value or b"{}"))
            for each in read_topics(self._bootstrap, [self._mirror])
        ]
        return [(value["operation"], (value["source"]["table"], key)) for key, value in values]

    def _positions(self) -> list[tuple[str, str]]:
        """Return the positions of relays, each with its key; a claim after one that was forged
        stores the last one again."""
        found: list[tuple[str, str]] = []
        last: dict[str, str] = {}
        for each in read_topics(self._bootstrap, [f"{self._prefix}.relay"]):
            key, text = (each.key or b"").decode(), (each.value or b"").decode()
            if not key.endswith("/owner") and not text.endswith(FORGED) and last.get(key) != text:
                last[key] = text
                found.append((key, text))
        return found

    def _records(self) -> list[Rec]:
        return [
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
