"""The tables of a run in one database: the effects of handlers, and what txbroker documents."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql

from tests.faults.consuming.exact_judge import Effect, Kept, TablePosition
from tests.faults.consuming.judge import Place, Source

SQLITE, POSTGRESQL, MARIADB = "sqlite", "postgresql", "mariadb"
_CONNECT_S = 5
_ANSWER_S = 20
_NUMBERED = {
    SQLITE: "INTEGER PRIMARY KEY AUTOINCREMENT",
    POSTGRESQL: "bigserial PRIMARY KEY",
    MARIADB: "BIGINT AUTO_INCREMENT PRIMARY KEY",
}
_COLUMNS = (
    "topic, partition_id, message_offset, message_key, value, lane, number, token, attempt, "
    "instance"
)
CHANGES = {
    POSTGRESQL: (
        *("SET search_path TO pg_temp, public", "SET lock_timeout = 1", "LISTEN elsewhere"),
        *("SET TIME ZONE 'Asia/Tokyo'", "SET default_transaction_read_only = on"),
        *("SET application_name = 'mine'", "SET statement_timeout = 900"),
        *("CREATE TEMP TABLE IF NOT EXISTS effects (n int)", "PREPARE mine AS SELECT 1"),
        *("DECLARE held CURSOR WITH HOLD FOR SELECT 1", "SELECT pg_try_advisory_lock(4711)"),
    ),
    MARIADB: (
        *("SET sql_mode = 'ANSI'", "SET autocommit = 0", "SET time_zone = '+09:00'"),
        *("SET NAMES latin1", "SET @mine = 1", "SET SESSION TRANSACTION READ ONLY"),
        *("SET SESSION max_statement_time = 9", "SET SESSION innodb_lock_wait_timeout = 1"),
        "CREATE TEMPORARY TABLE IF NOT EXISTS effects (n INT)",
    ),
}
"""What handlers do to their session."""
FATAL = {
    POSTGRESQL: (
        *("SET search_path TO pg_temp", "SET LOCAL search_path TO pg_temp"),
        *("SET ROLE pg_monitor", "SET TRANSACTION READ ONLY"),
        "CREATE TEMP TABLE txbroker_position (LIKE txbroker_position INCLUDING ALL)",
    ),
    MARIADB: (
        "USE information_schema",
        "CREATE TEMPORARY TABLE txbroker_position (group_name VARCHAR(255), topic VARCHAR(255), "
        "partition_id INT, token BIGINT, next BIGINT, done_ranges TEXT, later_next BIGINT, "
        "later_ranges TEXT)",
    ),
}
"""The same, so that the position cannot be stored in it."""
SEEN = {
    POSTGRESQL: (
        "SELECT current_setting('search_path'), current_user, current_setting('lock_timeout'), "
        "current_setting('statement_timeout'), current_setting('timezone'), "
        "current_setting('default_transaction_read_only'), "
        "current_setting('transaction_read_only'), "
        "current_setting('application_name'), to_regclass('pg_temp.effects')::text, "
        "to_regclass('pg_temp.txbroker_position')::text, "
        "(SELECT count(*) FROM pg_prepared_statements WHERE from_sql), "
        "(SELECT count(*) FROM pg_cursors WHERE is_holdable), "
        "(SELECT count(*) FROM pg_listening_channels()), (SELECT count(*) FROM pg_locks "
        "WHERE locktype = 'advisory' AND pid = pg_backend_pid())"
    ),
    MARIADB: (
        "SELECT DATABASE(), @@sql_mode, @@autocommit, @@time_zone, @@character_set_client, @mine, "
        "@@tx_read_only, CAST(@@max_statement_time AS CHAR), @@innodb_lock_wait_timeout"
    ),
}
"""What a session is like."""
ERRORS = (sqlite3.Error, psycopg.Error, pymysql.Error, OSError)
"""What a database raises that does not answer."""


class Tables:
    """The tables of one group.

    Args:
        kind: `sqlite`, `postgresql` or `mariadb`.
        url: of the database; of SQLite the file.

    Attributes:
        count_up, counted, insert: the statements of handlers.
    """

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url
        self._mark = "?" if kind == SQLITE else "%s"
        again = "DUPLICATE KEY UPDATE" if kind == MARIADB else "CONFLICT (lane) DO UPDATE SET"
        self.count_up = self._with_marks(
            f"INSERT INTO lanes (lane, number) VALUES (?, 1) ON {again} number = lanes.number + 1"
        )
        self.counted = self._with_marks("SELECT number FROM lanes WHERE lane = ?")
        marks = ", ".join("?" * len(_COLUMNS.split()))
        self.insert = self._with_marks(f"INSERT INTO effects ({_COLUMNS}) VALUES ({marks})")

    def _with_marks(self, sql: str) -> str:
        return sql.replace("?", self._mark)

    def create(self) -> None:
        """Create the tables of effects, unless they exist: without any constraint that would refuse
        a second one."""
        texts = {name: f"{name} VARCHAR(200)" for name in ("topic", "message_key", "lane")}
        columns = [texts.get(name, f"{name} BIGINT") for name in _COLUMNS.split(", ")[:-1]]
        with self.connection() as connection:
            execute(
                connection,
                f"CREATE TABLE IF NOT EXISTS effects (serial {_NUMBERED[self.kind]}, "
                f"{', '.join(columns)}, instance VARCHAR(20))",
            )
            execute(
                connection,
                "CREATE TABLE IF NOT EXISTS lanes (lane VARCHAR(200) PRIMARY KEY, number BIGINT)",
            )
            execute(
                connection,
                "CREATE INDEX IF NOT EXISTS by_message ON effects "
                "(topic, partition_id, message_offset)",
            )

    @contextlib.contextmanager
    def connection(self) -> Iterator[Any]:
        """Open a connection that commits every statement."""
        opened: Any
        if self.kind == SQLITE:
            opened = sqlite3.connect(self.url, isolation_level=None, timeout=_ANSWER_S)
        elif self.kind == POSTGRESQL:
            opened = psycopg.connect(self.url, autocommit=True, connect_timeout=_CONNECT_S)
        else:
            at = urlsplit(self.url)
            opened = pymysql.connect(
                host=at.hostname,
                port=at.port or 0,
                user=at.username,
                password=at.password or "",
                database=at.path[1:],
                autocommit=True,
                connect_timeout=_CONNECT_S,
                read_timeout=_ANSWER_S,
            )
        try:
            yield opened
        finally:
            with contextlib.suppress(*ERRORS):
                opened.close()

    def run(self, sql: str) -> None:
        """Execute a statement."""
        with self.connection() as connection:
            execute(connection, sql)

    def lock(self, seconds: float) -> None:
        """Keep others from writing to an SQLite file for a time."""
        with self.connection() as connection:
            execute(connection, "BEGIN IMMEDIATE")
            time.sleep(seconds)
            execute(connection, "COMMIT")

    def effects_of(self, source: Source) -> int | None:
        """Return the number of effects of a message; None: the database does not answer."""
        where = "topic = ? AND partition_id = ? AND message_offset = ?"
        try:
            with self.connection() as connection:
                rows = execute(
                    connection,
                    self._with_marks(f"SELECT count(*) FROM effects WHERE {where}"),
                    source,
                )
        except ERRORS:
            return None
        return int(rows[0][0])

    # --- afterwards --------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """Return all effects in the order of their serial numbers."""
        with self.connection() as connection:
            rows = execute(connection, f"SELECT serial, {_COLUMNS} FROM effects ORDER BY serial")
        return [
            Effect(
                serial=serial,
                source=(topic, int(partition), int(offset)),
                key=key,
                value=int(value),
                lane=lane,
                number=int(number),
                token=int(token),
                instance=instance,
            )
            for (
                *(serial, topic, partition, offset, key, value, lane, number, token),
                _attempt,
                instance,
            ) in rows
        ]

    def last_serial(self) -> int:
        """Return the highest serial number of effects; 0: there are none."""
        with self.connection() as connection:
            ((serial,),) = execute(connection, "SELECT COALESCE(MAX(serial), 0) FROM effects")
        return int(serial)

    def positions(self, group: str) -> dict[Place, TablePosition]:
        """Return the positions of a group, of one moment; none if there are no tables yet."""
        with self.connection() as connection:
            begin = {
                SQLITE: "BEGIN",
                POSTGRESQL: "BEGIN ISOLATION LEVEL REPEATABLE READ",
                MARIADB: "START TRANSACTION WITH CONSISTENT SNAPSHOT",
            }
            execute(connection, begin[self.kind])
            rows = execute(
                connection,
                self._with_marks(
                    "SELECT topic, partition_id, token, next, done_ranges, later_next, "
                    "later_ranges FROM txbroker_position WHERE group_name = ?"
                ),
                (group,),
            )
            done = execute(
                connection,
                self._with_marks(
                    "SELECT topic, partition_id, message_offset FROM txbroker_done "
                    "WHERE group_name = ?"
                ),
                (group,),
            )
        offsets: dict[Place, list[int]] = {}
        for topic, partition, offset in done:
            offsets.setdefault((topic, int(partition)), []).append(int(offset))
        found = {}
        for topic, partition, token, next_, ranges, later_next, later_ranges in rows:
            place = (topic, int(partition))
            later = None if later_next is None else (int(later_next), _ranges(later_ranges))
            found[place] = TablePosition(
                token=int(token),
                next=-1 if next_ is None else int(next_),
                ranges=_ranges(ranges),
                later=later,
                done=frozenset(offsets.get(place, ())),
            )
        return found

    def kept(self, group: str) -> dict[Source, Kept]:
        """Return the messages of a group that failed."""
        with self.connection() as connection:
            rows = execute(
                connection,
                self._with_marks(
                    "SELECT topic, partition_id, message_offset, state, stage, message_key "
                    "FROM txbroker_aside WHERE group_name = ?"
                ),
                (group,),
            )
        return {
            (topic, int(partition), int(offset)): Kept(
                state, int(stage), None if key is None else bytes(key).decode()
            )
            for topic, partition, offset, state, stage, key in rows
        }


def execute(connection: Any, sql: str, values: Sequence[Any] = ()) -> list[Any]:
    """Execute a statement of any of the drivers; return its rows."""
    cursor = connection.cursor()
    cursor.execute(sql, values)
    return list(cursor.fetchall()) if cursor.description else []


def _ranges(text: Any) -> tuple[tuple[int, int], ...]:
    return tuple((int(first), int(end)) for first, end in json.loads(text))
