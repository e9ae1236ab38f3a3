"""The tables of an outbox: their columns, how they are created, and how they are checked.

| table | rows |
| --- | --- |
| `txbroker_outbox` | a message: to be decided, to be delivered, delivered or refused |
| `txbroker_relay` | a shard: which relay delivers its rows, and until when |

Times are whole milliseconds since 1970 by the database's clock. A row that another program inserts
needs a topic, and a value unless it is a tombstone; every other column has a default.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

from txbroker.databases.dialect import POSTGRESQL, SQLITE, Dialect
from txbroker.databases.steps import Query, Steps
from txbroker.databases.tables import TableSet, table_sql
from txbroker.errors import ConfigurationError

OUTBOX, RELAY = "txbroker_outbox", "txbroker_relay"
SEQUENCE = "txbroker_outbox_position"
"""The sequence of positions, where the column has none."""
CHANNEL = OUTBOX
"""The channel on which PostgreSQL notifies relays."""
ASLEEP = "1954046575, 1"
"""PostgreSQL's advisory lock that a relay holds while it sleeps; the numbers are arbitrary."""
CLUSTER = "(SELECT CAST(system_identifier AS text) FROM pg_control_system())"
"""Which PostgreSQL cluster this is; a dump does not take it along."""
SHARDS_MAX = 16
NUMBERS = ("retries", "check_attempts", "next_at", "created_at", "changed_at")
"""Columns with counts and times."""
NUMBER_MAX = 2**53 - 1
"""It leaves room for sums."""

UNKNOWN, LOCAL_COMMIT, LOCAL_ROLLBACK = "UNKNOWN", "LOCAL_COMMIT", "LOCAL_ROLLBACK"
GLOBAL_COMMIT, MESSAGE_ERROR = "GLOBAL_COMMIT", "MESSAGE_ERROR"
STATES = (UNKNOWN, LOCAL_COMMIT, LOCAL_ROLLBACK, GLOBAL_COMMIT, MESSAGE_ERROR)

COLUMNS: Mapping[str, str] = {
    "position": "{identity}",
    # What consumers deduplicate by.
    "id": "{key} NOT NULL DEFAULT ({random_id}) UNIQUE",
    # Rows of one unit become visible together; '': the row stands alone.
    "unit": "{key} NOT NULL DEFAULT {unit}",
    "state": f"{{key}} NOT NULL DEFAULT '{LOCAL_COMMIT}'",
    "topic": "{key} NOT NULL",
    "message_key": "{blob}",
    "message_value": "{blob}",
    "headers": "{text} NOT NULL DEFAULT '[]'",
    "partition_id": "{whole}",
    "timestamp_ms": "{whole}",
    "order_key": "{text}",
    "shard": "{whole} NOT NULL DEFAULT 0",
    # Reserved.
    "deliver_at": "{whole}",
    "timeout_at": "{whole}",
    "retries": "{whole} NOT NULL DEFAULT 0",
    "cause": "{text} NOT NULL DEFAULT ''",
    # Of an undecided row; a decision sets 0. So a row in MESSAGE_ERROR with checks is undecided.
    "check_attempts": "{whole} NOT NULL DEFAULT 0",
    # UNKNOWN: the next check. LOCAL_COMMIT: not delivered before. 0: at once.
    "next_at": "{whole} NOT NULL DEFAULT 0",
    "created_at": "{whole} NOT NULL DEFAULT ({now_ms})",
    # 0: not since it was created.
    "changed_at": "{whole} NOT NULL DEFAULT 0",
}
# SQLite takes any type otherwise.
_TYPED = (
    f"CONSTRAINT {OUTBOX}_texts_and_bytes CHECK (typeof(id) = 'text' AND typeof(topic) = 'text' "
    "AND typeof(unit) = 'text' AND typeof(headers) = 'text' AND typeof(order_key) IN ('text', "
    "'null') AND typeof(message_key) IN ('blob', 'text', 'null') AND typeof(message_value) IN "
    "('blob', 'text', 'null'))"
)
# One constraint: PostgreSQL prepares each for every statement.
_SOUND = (
    f"CONSTRAINT {OUTBOX}_state_deliver_at_shard_counts_times_in_range CHECK (deliver_at IS NULL "
    f"AND shard BETWEEN 0 AND {SHARDS_MAX - 1} AND state IN {STATES}"
    + "".join(f" AND {name} BETWEEN 0 AND {NUMBER_MAX}" for name in NUMBERS)
    + ")"
)
RELAY_COLUMNS: Mapping[str, str] = {
    "shard": "{whole} NOT NULL PRIMARY KEY",
    "version": "{whole} NOT NULL DEFAULT 1",
    # The name of the relays of this outbox, and a random text of these tables.
    "relay": "{key} NOT NULL",
    "identity": "{key} NOT NULL",
    # How many shards the rows are divided into; the rows' own numbers are of SHARDS_MAX.
    "shards": f"{{whole}} NOT NULL DEFAULT 1 CHECK (shards BETWEEN 1 AND {SHARDS_MAX})",
    "owner": "{key} NOT NULL DEFAULT ''",
    "lease_until": "{whole} NOT NULL DEFAULT 0",
    "wanted_by": "{key} NOT NULL DEFAULT ''",
    # PostgreSQL: of whose transactions the units of the shard's rows are; '': of several.
    "cluster": "{key} NOT NULL DEFAULT ''",
}
_TABLES = {OUTBOX: COLUMNS, RELAY: RELAY_COLUMNS}

READY = f"state = '{LOCAL_COMMIT}' AND next_at = 0"
MAYBE_UNDECIDED = f"state IN ('{UNKNOWN}', '{MESSAGE_ERROR}')"
_INDEXES = {
    "ready": f"(position, shard) WHERE {READY}",
    "undecided": f"(unit) WHERE {MAYBE_UNDECIDED}",
    "later": f"(next_at) WHERE state = '{LOCAL_COMMIT}' AND next_at > 0",
    "checks": f"(next_at) WHERE state = '{UNKNOWN}'",
    "errors": f"(position) WHERE state = '{MESSAGE_ERROR}'",
}
"""A query uses one of them only if it has the same conditions."""
_POSTGRES_INDEXES = _INDEXES | {"ready": f"(unit, position, shard) WHERE {READY}"}
_MARIADB_INDEXES = {"ready": "(state, next_at, unit, position, shard)", "unit": "(unit)"}
_ALL_INDEXES = {
    "sqlite": _INDEXES,
    "postgresql": _POSTGRES_INDEXES,
    "mariadb": _MARIADB_INDEXES,
}
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")


@lru_cache(maxsize=64)
def outbox_tables(name: str = "") -> TableSet:
    """Return the tables of an outbox.

    Args:
        name: of its relays; "": that in the database, and a random one when they are created.

    Raises:
        ConfigurationError: Kafka has no topics or transactional ids with such a name.
    """
    if name and not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ConfigurationError(
            f"the name of an outbox has at most 200 letters, digits, '.', '_' and '-', not {name!r}"
        )
    return TableSet(
        name="outbox",
        names=(OUTBOX, RELAY),
        versioned=RELAY,
        migrations=(partial(_migration_1, name),),
        hint="create the tables with `txbroker outbox create URL`, or pass create_tables=True",
        check=partial(_check, name),
    )


# --- creation --------------------------------------------------------------------------------


def _migration_1(name: str, dialect: Dialect) -> Iterator[str]:
    if dialect.sequence:
        yield dialect.sequence.format(sequence=SEQUENCE)
    for table in (RELAY, OUTBOX):
        columns = _column_list(_TABLES[table])
        if table == OUTBOX:
            columns += f", {_SOUND}" + (f", {_TYPED}" if dialect is SQLITE else "")
        yield table_sql(table, columns, dialect, **_defaults(dialect))
    indexes = _ALL_INDEXES[dialect.name]
    for index, columns in indexes.items():
        yield f"CREATE INDEX IF NOT EXISTS {OUTBOX}_{index} ON {OUTBOX} {columns}"
    if dialect is POSTGRESQL:
        yield from _notification()
    relay, identity = name or f"outbox-{secrets.token_hex(4)}", secrets.token_hex(16)
    cluster = CLUSTER if dialect is POSTGRESQL else "''"
    yield (
        f"INSERT INTO {RELAY} (shard, relay, identity, cluster) "
        f"SELECT 0, '{relay}', '{identity}', {cluster} "
        f"FROM (SELECT 1 AS one) AS once WHERE NOT EXISTS (SELECT 1 FROM {RELAY})"
    )


def _column_list(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def _defaults(dialect: Dialect) -> dict[str, str]:
    return {
        "identity": dialect.identity.format(sequence=SEQUENCE),
        "random_id": dialect.random_id,
        "now_ms": dialect.now_ms,
        "unit": f"({dialect.unit.format(sequence=SEQUENCE)})" if dialect.unit else "''",
    }


def _notification() -> Iterator[str]:
    """Yield the SQL of a trigger that notifies while a relay sleeps, and not else: PostgreSQL lets
    one transaction commit at a time if they notify.

    The condition costs a microsecond; a query in the function would cost tens of them."""
    yield (
        f"CREATE OR REPLACE FUNCTION {OUTBOX}_wake() RETURNS trigger LANGUAGE plpgsql "
        f"AS $$BEGIN PERFORM pg_catalog.pg_notify('{CHANNEL}', ''); RETURN NULL; END$$"
    )
    yield (
        f"CREATE OR REPLACE TRIGGER {OUTBOX}_wake AFTER INSERT OR UPDATE OF state ON {OUTBOX} "
        f"FOR EACH STATEMENT WHEN (NOT pg_try_advisory_xact_lock_shared({ASLEEP})) "
        f"EXECUTE FUNCTION {OUTBOX}_wake()"
    )


# --- check -----------------------------------------------------------------------------------


def _check(name: str, dialect: Dialect, database: str) -> Steps[None]:
    """Check the columns, and the name.

    Raises:
        ConfigurationError
    """
    for table, columns in _TABLES.items():
        found = yield Query(dialect.columns, (table,))
        problem = _difference(dialect, columns, {row[0]: row[1] for row in found.rows})
        if problem:
            raise ConfigurationError(
                f"{database}: table {table} {problem}: correct it as `txbroker outbox create URL "
                "--dry-run` prints it, or rename it and create it again"
            )
    named = yield Query(f"SELECT DISTINCT relay FROM {RELAY}")
    names = [row[0] for row in named.rows]
    if len(names) != 1 or name not in ("", names[0]):
        shown = ", ".join(map(repr, names))
        raise ConfigurationError(
            f"{database}: the outbox has the name {shown}, not {name or 'one name'!r}: leave the "
            f"name out; to change it, stop all relays and update {RELAY}"
        )


def _difference(dialect: Dialect, columns: Mapping[str, str], found: Mapping[str, Any]) -> str:
    """Return how columns differ from those that are declared, "" if they do not."""
    problems = [f"has no column {name}" for name in columns if name not in found]
    for name, kind in columns.items():
        wanted = _type(dialect, kind)
        if name in found and str(found[name]).lower() != wanted:
            problems.append(f"has column {name} of type {found[name]} instead of {wanted}")
    return " and ".join(problems)


def _type(dialect: Dialect, kind: str) -> str:
    """Return a declared column's type, as the database shows it."""
    types = {"key": dialect.key, "text": dialect.text, "blob": dialect.blob}
    word = re.match(r"\{(\w+)\}", kind)
    assert word is not None
    return types.get(word[1], dialect.whole).partition(" ")[0].partition("(")[0].lower()
