"""The tables, their version, and how they are created.

| table | rows |
| --- | --- |
| `txbroker_schema` | one: the version of the tables |
| `txbroker_position` | a partition of a consumer group: its owner's token, and what is done |
| `txbroker_done` | a message that was done above the stored position |
| `txbroker_aside` | a message that waits for a retry or a release, or is a dead letter |
| `txbroker_barrier` | a transaction: its local transaction has committed, or a check was first |
| `txbroker_inbox` | a message that was accepted |
"""

from __future__ import annotations

from collections.abc import Iterable

from txbroker.databases.dialect import Dialect, Fault
from txbroker.databases.sessions import PlainSession
from txbroker.databases.steps import Query, Steps
from txbroker.errors import ConfigurationError

VERSION = 1
SCHEMA, BARRIER, INBOX = "txbroker_schema", "txbroker_barrier", "txbroker_inbox"
POSITION, DONE, ASIDE = "txbroker_position", "txbroker_done", "txbroker_aside"

_PARTITION = "group_name {key} NOT NULL, topic {key} NOT NULL, partition_id {whole} NOT NULL"
_TABLES = {
    SCHEMA: "version {whole} NOT NULL PRIMARY KEY",
    POSITION: f"""{_PARTITION},
        token {{whole}} NOT NULL,
        topic_id {{key}} NOT NULL,
        next {{whole}},
        done_ranges {{text}} NOT NULL,
        later_next {{whole}},
        later_ranges {{text}} NOT NULL,
        PRIMARY KEY (group_name, topic, partition_id)""",
    DONE: f"""{_PARTITION},
        message_offset {{whole}} NOT NULL,
        PRIMARY KEY (group_name, topic, partition_id, message_offset)""",
    ASIDE: f"""{_PARTITION},
        message_offset {{whole}} NOT NULL,
        state {{key}} NOT NULL,
        stage {{whole}} NOT NULL,
        step {{whole}} NOT NULL,
        attempts {{whole}} NOT NULL,
        due_ms {{whole}} NOT NULL,
        cause {{text}} NOT NULL,
        reason {{text}} NOT NULL,
        timestamp_ms {{whole}} NOT NULL,
        message_key {{blob}},
        message_value {{blob}},
        headers {{text}} NOT NULL,
        PRIMARY KEY (group_name, topic, partition_id, message_offset)""",
    BARRIER: """id {key} NOT NULL PRIMARY KEY,
        decision {key} NOT NULL CHECK (decision IN ('commit', 'rollback')),
        at_s {whole} NOT NULL""",
    INBOX: """consumer {key} NOT NULL, id {key} NOT NULL,
        at_s {whole} NOT NULL,
        PRIMARY KEY (consumer, id)""",
}


def create_table(name: str, dialect: Dialect, table: str = "") -> str:
    """Return SQL that creates a table if it does not exist.

    Args:
        table: its name in the database, `name` by default.
    """
    types = {"key": dialect.key, "text": dialect.text, "whole": dialect.whole, "blob": dialect.blob}
    columns = " ".join(_TABLES[name].format(**types).split())
    return f"CREATE TABLE IF NOT EXISTS {table or name} ({columns}){dialect.options}"


def statements(dialect: Dialect) -> Iterable[str]:
    """Yield the SQL that creates all tables."""
    for name in _TABLES:
        yield create_table(name, dialect)
    yield (
        f"CREATE INDEX IF NOT EXISTS {ASIDE}_due ON {ASIDE} "
        "(group_name, topic, state, partition_id, due_ms)"
    )
    yield (
        f"INSERT INTO {SCHEMA} (version) SELECT {VERSION} FROM (SELECT 1 AS one) AS once "
        f"WHERE NOT EXISTS (SELECT 1 FROM {SCHEMA})"
    )


def create(session: PlainSession, dialect: Dialect) -> None:
    """Create the tables that do not exist; several processes may."""
    session.begin()
    try:
        if dialect.tables_lock:
            session.execute(Query(dialect.tables_lock))
        for sql in statements(dialect):
            session.execute(Query(sql))
        session.commit()
    except BaseException:
        session.rollback()
        raise
    finally:
        if dialect.tables_unlock:
            session.execute(Query(dialect.tables_unlock))


def check(dialect: Dialect, database: str) -> Steps[None]:
    """Check that the tables exist and have this version.

    Raises:
        ConfigurationError: names the next step.
    """
    try:
        result = yield Query(f"SELECT version FROM {SCHEMA}")
    except Exception as error:
        if dialect.fault(error) is not Fault.NO_TABLE:
            raise
        raise ConfigurationError(
            f"{database} has no txbroker tables: create them with `txbroker databases create`, or "
            "pass create_tables=True"
        ) from None
    versions = [int(row[0]) for row in result.rows]
    if versions != [VERSION]:
        shown = ", ".join(map(str, versions)) or "none"
        raise ConfigurationError(
            f"{database} has txbroker tables of version {shown}; this txbroker uses version "
            f"{VERSION}: upgrade the older of the two"
        )
