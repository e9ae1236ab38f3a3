"""The facts about an outbox and its relays, and about txbroker's other tables in its database."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from txbroker.databases.database import TABLE_SETS, Database
from txbroker.databases.dialect import MARIADB
from txbroker.databases.outbox.leases import Leases, ShardLease
from txbroker.databases.outbox.operations import WHOLE, problem_of, selected
from txbroker.databases.outbox.table import OUTBOX, SHARDS_MAX, STATES, outbox_tables
from txbroker.databases.outbox.waiting import WaitingRows
from txbroker.databases.steps import Query, Steps
from txbroker.databases.tables import check_versions, stored_versions
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.plan import Capture

_ROWS = 20
_ODD = (
    f"state NOT IN {STATES} OR deliver_at IS NOT NULL OR shard NOT BETWEEN 0 AND {SHARDS_MAX - 1} "
    "OR retries < 0 OR check_attempts < 0 OR next_at < 0 OR created_at < 0 OR changed_at < 0"
)


class RelayTargets(NamedTuple):
    """The database of an outbox, and a capture; None: not named."""

    database: Database | None = None
    capture: Capture | None = None


class OutboxFacts(Struct, frozen=True):
    """An outbox at one moment.

    Attributes:
        counts: unfinished rows by state: their number, and the oldest one's age in seconds.
        shards: into how many shards the rows are divided, by each row of the table of shards.
        leases: of the shards.
        waiting: rows that wait, by shard.
        causes: topic and cause of some rows that Kafka refused and that are sent again.
        problems: rows in impossible states, each with the next step; some of them.
        packet_bytes: the largest statement that the server takes; None: no limit of this kind.
    """

    database: str
    relay: str
    counts: Mapping[str, tuple[int, float]] = {}
    shards: int = 1
    leases: Sequence[ShardLease] = ()
    waiting: Mapping[int, int] = {}
    causes: Sequence[tuple[str, str]] = ()
    problems: Sequence[str] = ()
    packet_bytes: int | None = None


async def version_problems(database: Database) -> list[str]:
    """Return which tables are of another version than this txbroker's, each with the next step.

    Raises:
        ConfigurationError: they may not be read.
        DatabaseUnavailable
    """
    problems = []
    for tables in TABLE_SETS:
        steps = stored_versions(database.dialect, tables)
        with database.explained(tables=tables):
            versions = await asyncio.to_thread(database.apart, steps)
        try:
            if versions:
                check_versions(database.name, tables, versions)
        except ConfigurationError as error:
            problems.append(str(error))
    return problems


async def outbox_facts(database: Database) -> OutboxFacts:
    """Read the facts.

    Raises:
        ConfigurationError: the tables do not exist, or are of another version.
        DatabaseUnavailable
    """
    return await asyncio.to_thread(_read, database)


def _read(database: Database) -> OutboxFacts:
    tables = outbox_tables()
    database.prepare(tables)
    with database.explained(tables=tables):
        return database.apart(_facts(database))


def _facts(database: Database) -> Steps[OutboxFacts]:
    dialect = database.dialect
    leases, rows = Leases(dialect, "", 1.0), WaitingRows(dialect)
    named = yield from leases.named()
    by_row = yield Query(
        f"SELECT shard, COUNT(*) FROM {OUTBOX} WHERE state = 'LOCAL_COMMIT' GROUP BY shard"
    )
    waiting: Counter[int] = Counter()
    for shard, count in by_row.rows:
        waiting[int(shard) % named.shards] += int(count)
    odd = yield Query(f"SELECT {selected(WHOLE)} FROM {OUTBOX} WHERE {_ODD} LIMIT {_ROWS}")
    found = [dict(zip(WHOLE, row, strict=True)) for row in odd.rows]
    packet = None
    if dialect is MARIADB:
        packet = int((yield Query("SELECT @@max_allowed_packet")).rows[0][0])
    return OutboxFacts(
        database.name,
        named.relay,
        (yield from rows.counts()),
        named.shards,
        (yield from leases.all()),
        waiting,
        (yield from rows.causes(_ROWS)),
        [f"row {row['id']}: {problem_of(row)}" for row in found],
        packet,
    )
