"""A group of consumers that store results exactly once: into a database, or into Kafka."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from aiokafka.errors import KafkaError
from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import OffsetSpec

from tests.faults.consuming.exact_judge import ExactJudge, Outcome, Sample
from tests.faults.consuming.fleet import KEYS_FAIL, PARTITIONS, SESSIONS_CHANGED, Case, Fleet
from tests.faults.consuming.found import (
    effects_in,
    kept_in,
    sample_of,
    sessions_of,
    stage_runs,
)
from tests.faults.consuming.instance import Exact
from tests.faults.consuming.judge import History, Place, Stored, Topics, Violation
from tests.faults.consuming.link import DatabaseLink
from tests.faults.consuming.tables import CHANGES, ERRORS, FATAL, POSTGRESQL, SQLITE, Tables
from tests.kit.database_servers import USER, DatabaseServer
from tests.kit.topic_reader import admin_of, create_topic
from txbroker.databases import Database, MariaDB, Postgres, SQLite
from txbroker.databases.dialect import DIALECTS
from txbroker.databases.kept import KeptTable
from txbroker.databases.steps import run

BEHIND_MAX = 1500
STAGE_SHARE, STAGE_FAILS_S = 0.04, 3.0
SESSION_SHARE = 0.2
FATAL_S = {"wait": (0.1, 0.6), "aside": (5.0, 15.0)}
"""For how long a changed session keeps a message from being stored; otherwise for ever."""
SLOW_S, SINGLE_SLOW_S = 0.6, 0.05


class Servers(NamedTuple):
    """The servers that a run needs; None: no case uses it."""

    postgresql: DatabaseServer | None = None
    mariadb: DatabaseServer | None = None

    def of(self, case: Case) -> DatabaseServer | None:
        """Return the server of a case; None without one."""
        found: DatabaseServer | None = getattr(self, case.store, None)
        return found


class ExactFleet(Fleet):
    """One group of consumers with two topics.

    Args:
        server: of the database; None: it is a file, or Kafka.

    Attributes:
        link: through which the consumers reach the server.
        tables: None: results are stored in Kafka.
    """

    def __init__(
        self,
        bootstrap: str,
        case: Case,
        folder: Path,
        seed: int,
        server: DatabaseServer | None = None,
        *,
        size: int = 3,
        rate: float = 150.0,
    ) -> None:
        super().__init__(bootstrap, case, folder, seed, size=size, rate=rate)
        self.server = server
        self.sources = [self.topic, f"{self.group}.other"]
        self.output = f"{self.group}.output"
        self.link: DatabaseLink | None = None
        self.tables: Tables | None = None
        self.slow_s = SINGLE_SLOW_S if case.store == SQLITE else SLOW_S
        self._url = ""
        self._samples: list[Sample] = []

    # --- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Create the database, and start everything."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self.server is not None:
            direct = await self.answered(self.server.create_database)
            self.link = DatabaseLink(self.server.port, random.Random(self.group))
            await self.link.start()
            self._url = direct.replace(f":{self.server.port}/", f":{self.link.port}/")
            self.tables = Tables(self.case.store, direct)
            if self.case.store == POSTGRESQL:
                admin = Tables(POSTGRESQL, self.server.admin_url)
                await self.answered(admin.run, f"GRANT pg_monitor TO {USER}")
        elif self.case.store == SQLITE:
            self._url = str(self._folder / "results.db")
            self.tables = Tables(SQLITE, self._url)
        else:
            await self.answered(create_topic, self.bootstrap, self.output, PARTITIONS)
        if self.tables is not None:
            await self.answered(self.tables.create)
        await super().start()

    async def close(self) -> None:
        """See `Fleet.close`; take a last sample."""
        await super().close()
        self._samples.append(await self.awaited(self._sample))
        if self.link is not None:
            await self.link.close()

    def _exact(self) -> Exact | None:
        case = self.case
        return Exact(
            kind=case.store,
            url=self._url,
            direct=self.tables.url if self.tables is not None else "",
            output=self.output,
            later=case.later,
            batch=case.batch,
            coroutine=case.coroutine,
        )

    def _full(self) -> bool:
        """Whether all could not be done within the time to settle, on a busy machine."""
        table = self._samples[-1].table.values() if self._samples else ()
        return self.produced - sum(max(0, found.next) for found in table) > BEHIND_MAX

    def _message(self) -> tuple[str, dict[str, Any]]:
        key, value = super()._message()
        fate = self.fate
        if self.load == KEYS_FAIL:
            return key, value
        if self.load == SESSIONS_CHANGED and (draw := fate.random()) < SESSION_SHARE:
            return self._changing(key, value["n"], fatal=draw < SESSION_SHARE / 2)
        value["early"] = fate.random() < 0.5
        if self.case.later and fate.random() < STAGE_SHARE:
            value["stage"] = fate.randrange(2, 2 + self.case.later)
            if fate.random() < 0.3 and self.case.on_failure != "wait":
                value["stage_fails_until"] = time.time() + fate.uniform(0.1, STAGE_FAILS_S)
        return key, value

    def _changing(self, key: str, number: int, *, fatal: bool) -> tuple[str, dict[str, Any]]:
        """Let a message change its session; those that fail have few keys."""
        value: dict[str, Any] = {"n": number, "early": False}
        value["session"] = self.fate.choice((FATAL if fatal else CHANGES)[self.case.store])
        if fatal and self.case.on_failure in FATAL_S:
            value["session_until"] = time.time() + self.fate.uniform(*FATAL_S[self.case.on_failure])
        return f"fatal-{number % 4}" if fatal else key, value

    # --- stored results ----------------------------------------------------------------------

    async def _look(self) -> Stored:
        stored = await super()._look()
        with contextlib.suppress(*ERRORS):
            self._samples.append(await self._with_table(stored))
        return stored

    async def _sample(self) -> Sample:
        return await self._with_table(await super()._look())

    async def _with_table(self, stored: Stored) -> Sample:
        found = sample_of(stored, self.sources)
        if (
            self.tables is None
            and self._samples[-1:]
            and self._samples[-1].table.keys() - found.table
        ):
            raise KafkaError(f"the coordinator of {self.group} does not know all offsets yet")
        if self.tables is None:
            return found
        table = await asyncio.to_thread(self.tables.positions, self.group)
        serial = await asyncio.to_thread(self.tables.last_serial)
        return replace(found, at=time.monotonic(), table=table, serial=serial)

    async def _open(self) -> list[str]:
        if self.tables is None:
            return await super()._open() or await self._staged()
        ends = await asyncio.to_thread(self._ends)
        sample = await self._sample()
        kept = await asyncio.to_thread(self.tables.kept, self.group)
        left = []
        for place, end in ends.items():
            found = sample.table.get(place)
            if found is None or found.next < end or (found.later and found.later[0] < end):
                left.append(f"{place} ends at {end}: {found}")
            elif sample.mirror.get(place, (0, []))[0] < end:
                left.append(f"{place} ends at {end}: in Kafka {sample.mirror.get(place)}")
        return left + [f"{source}: {each}" for source, each in kept.items() if each.waits]

    async def _staged(self) -> list[str]:
        later = [
            (place, found.later)
            for place, found in (await self._sample()).table.items()
            if found.later is not None and found.later[0] < found.next
        ]
        return [f"later stages of {place} are at {at}" for place, at in later]

    def _ends(self) -> dict[Place, int]:
        places = [TopicPartition(name, n) for name in self.sources for n in range(PARTITIONS)]
        asked = {place: OffsetSpec.latest() for place in places}
        admin = admin_of(self.bootstrap)
        admin.list_topics(timeout=10)  # or it keeps to the leaders of before a restart
        found = admin.list_offsets(asked, isolation_level=IsolationLevel.READ_COMMITTED)
        ends = {(at.topic, at.partition): found[at].result(10).offset for at in places}
        return {place: end for place, end in ends.items() if end}

    # --- operators ---------------------------------------------------------------------------

    async def release(self) -> None:
        """Release all set-aside keys, as an operator, if the store answers."""
        if self.tables is None:
            await super().release()
            return
        with contextlib.suppress(*ERRORS):
            await asyncio.to_thread(self._release_rows)

    def _release_rows(self) -> None:
        tables = self.tables
        assert tables is not None
        table = KeptTable(DIALECTS[tables.kind], self.group)
        keys: dict[tuple[Place, bytes | int], None] = {}
        for source, each in tables.kept(self.group).items():
            if each.state == "aside":
                keys[source[:2], each.key.encode() if each.key is not None else source[2]] = None
        session = _database(tables).open()
        try:
            for place, key in keys:
                run(table.release(place, key, "healed"), session.execute)
        finally:
            session.close()

    # --- the end -----------------------------------------------------------------------------

    def _names(self) -> list[list[str]]:
        output = [[self.output]] if self.tables is None else []
        return [*super()._names(), *output]

    async def judged(self) -> tuple[History, Topics, list[Violation]]:
        """Read everything and judge it."""
        history, topics = await self._found()
        tables = self.tables
        if tables is not None:
            effects = await self.answered(tables.effects)
            kept = await self.answered(tables.kept, self.group)
        else:
            effects, kept = effects_in(topics.output, self.case.order), kept_in(topics)
        lines = [json.loads(line) for line in self._history.open()]
        outcome = Outcome(
            topics.source,
            effects,
            stage_runs(lines),
            kept,
            self._samples,
            self.case.later,
            mirrored=tables is not None,
            tries=history.tries,
            faults=history.faults,
            sessions=sessions_of(lines),
            waits=self.case.on_failure == "wait",
            batches=bool(self.case.batch),
        )
        return history, topics, await asyncio.to_thread(ExactJudge(outcome).judge)


def _database(tables: Tables) -> Database:
    if tables.kind == SQLITE:
        return SQLite(tables.url)
    return Postgres(tables.url) if tables.kind == "postgresql" else MariaDB(tables.url)
