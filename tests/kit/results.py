"""Databases for consumers that store results exactly once, and handlers that write into them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.consumer_world import GROUP, text
from tests.kit.until import until
from txbroker import failpoints
from txbroker.consumer import InDatabase, ReceivedMessage
from txbroker.consumer.stores.transaction import ResultTransaction
from txbroker.databases import MariaDB, Postgres, SQLite
from txbroker.databases.database import Database, steps_in_transaction
from txbroker.databases.kept import KeptTable
from txbroker.databases.positions import PositionTable
from txbroker.databases.sessions import PlainSession
from txbroker.databases.steps import Query, Steps, with_placeholders
from txbroker.databases.tables import ASIDE, DONE, POSITION

DATABASES = [
    "sqlite",
    "postgres_server read committed",
    "postgres_server repeatable read",
    "mariadb_server read committed",
    "mariadb_server repeatable read",
]
SERVERS = DATABASES[1:]
ORDERS = ("partition", "key", "none")
_NUMBER = {
    "sqlite": "INTEGER PRIMARY KEY",
    "postgresql": "bigserial PRIMARY KEY",
    "mariadb": "BIGINT AUTO_INCREMENT PRIMARY KEY",
}
_INSERT = "INSERT INTO results (value, token) VALUES (?, ?)"
PLACE = ("orders", 0)


def open_database(kind: str, folder: Path, request: pytest.FixtureRequest) -> Database:
    """Return a new database of one of `DATABASES`, with txbroker's tables."""
    if kind == "sqlite":
        return SQLite(folder / "shop.db", create_tables=True)
    server, _space, level = kind.partition(" ")
    url = request.getfixturevalue(server).create_database()
    if server == "postgres_server":
        option = f"-c default_transaction_isolation={level.replace(' ', chr(92) + ' ')}"
        return Postgres(url, create_tables=True, options=option)
    command = f"SET SESSION TRANSACTION ISOLATION LEVEL {level.upper()}"
    return MariaDB(url, create_tables=True, init_command=command)


class Shop:
    """A database with table `results`, and one connection of the test.

    Attributes:
        options: of consumers that store into it.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        database.create()
        self.connect()
        number = _NUMBER[database.dialect.name]
        self.do(f"CREATE TABLE results (number {number}, value VARCHAR(50), token BIGINT)")
        self.positions = PositionTable(database.dialect, GROUP)
        self.kept = KeptTable(database.dialect, GROUP)
        self.options: dict[str, Any] = {"mode": "exactly-once", "store": InDatabase(database)}

    def connect(self) -> None:
        """Open the connection, again after `close`."""
        self._session = self.database.open()
        self.execute = self._session.execute

    def do(self, sql: str, *values: Any) -> list[Any]:
        """Execute a statement; return its rows."""
        return list(self.execute(Query(sql, values)).rows)

    def transact(self, steps: Steps[Any]) -> Any:
        """Execute steps in one transaction."""
        return steps_in_transaction(steps, self._session)

    def close(self) -> None:
        self._session.close()

    # --- stored results ----------------------------------------------------------------------

    @property
    def results(self) -> list[str]:
        return [row[0] for row in self.do("SELECT value FROM results ORDER BY number")]

    @property
    def tokens(self) -> list[int]:
        return [row[0] for row in self.do("SELECT token FROM results ORDER BY number")]

    @property
    def done_rows(self) -> list[int]:
        return [row[0] for row in self.do(f"SELECT message_offset FROM {DONE} ORDER BY 1")]

    def position(self, partition: int = 0) -> tuple[int, str, int]:
        """Return the stored position of a partition of `orders`, its done ranges, and its token."""
        columns = "next, done_ranges, token"
        rows = self.do(f"SELECT {columns} FROM {POSITION} WHERE partition_id = ?", partition)
        return tuple(rows[0]) if rows else (-1, "", -1)

    def aside(self, state: str = "") -> list[str]:
        """Return the values of kept messages, with a state only those in it."""
        rows = self.do(
            f"SELECT message_value, state FROM {ASIDE} ORDER BY partition_id, message_offset"
        )
        return [bytes(row[0]).decode() for row in rows if state in ("", row[1])]

    async def has(self, *values: str) -> None:
        """Wait until exactly these results are stored, in any order."""
        await until(lambda: len(self.results) >= len(values))
        assert sorted(self.results) == sorted(values)

    async def reaches(self, offset: int, partition: int = 0) -> None:
        """Wait until everything below an offset is stored as done, without done rows."""
        await until(lambda: self.position(partition)[0] == offset and not self.done_rows)

    # --- other owners ------------------------------------------------------------------------

    def claim(self, partition: int = 0) -> int:
        """Take a partition over, as another consumer does; return the token before."""
        place = ("orders", partition)
        token: int = self.transact(self.positions.claim([place], 1))[place].metadata.token
        return token

    def claims_before(self, monkeypatch: pytest.MonkeyPatch, when: Callable[[], bool]) -> None:
        """Take the partition over before transactions of plain handlers begin."""
        handled = ResultTransaction.run

        def run(transaction: ResultTransaction, session: PlainSession) -> int | None:
            if when():
                self.claim()
            return handled(transaction, session)

        monkeypatch.setattr(ResultTransaction, "run", run)


class Booking:
    """A plain handler that inserts its message, or those of a batch, and fails as planned.

    Args:
        failing: errors by value, raised in turn after the insert; the last one for ever.

    Attributes:
        gates: by value: the handler waits there, after the insert.
        begun: values in the order of the calls.
    """

    def __init__(self, shop: Shop, **failing: Any) -> None:
        self.shop = shop
        self.failing: dict[str, Any] = failing
        self.begun: list[str] = []
        self.messages: list[ReceivedMessage] = []
        self.batches: list[list[str]] = []
        self.gates: dict[str, threading.Event] = {}

    def __call__(self, message: Any, connection: Any) -> Any:
        messages = message if isinstance(message, list) else [message]
        self.batches.append([text(each) for each in messages])
        for each in messages:
            self.begun.append(text(each))
            self.messages.append(each)
            insert(connection, text(each), each.token, self.shop.database.dialect.name)
            if gate := self.gates.get(text(each)):
                assert gate.wait(30)
            if planned := self.planned(text(each)):
                raise planned

    def planned(self, value: str) -> Any:
        planned = self.failing.get(value)
        if isinstance(planned, list):
            return planned.pop(0) if planned else None
        return planned

    @contextlib.contextmanager
    def held(self, *values: str) -> Iterator[None]:
        """Let the handler wait with these messages."""
        gates = {value: threading.Event() for value in values}
        self.gates |= gates
        try:
            yield
        finally:
            for value, gate in gates.items():
                self.gates.pop(value, None)
                gate.set()

    async def begins(self, value: str, times: int = 1) -> None:
        """Wait until the handler is called with a message."""
        await until(lambda: self.begun.count(value) >= times)


class AsyncBooking(Booking):
    """`Booking` as a coroutine function."""

    async def __call__(self, message: Any, connection: Any) -> None:
        messages = message if isinstance(message, list) else [message]
        self.batches.append([text(each) for each in messages])
        for each in messages:
            self.begun.append(text(each))
            self.messages.append(each)
            await connection.execute(_INSERT.replace("?", "%s"), (text(each), each.token))
            if gate := self.gates.get(text(each)):
                await until(gate.is_set)
            if planned := self.planned(text(each)):
                raise planned


def insert(connection: Any, value: str, token: int, dialect: str) -> None:
    """Insert a result by a driver's connection."""
    execute(connection, dialect, _INSERT, value, token)


def execute(connection: Any, dialect: str, sql: str, *values: Any) -> None:
    """Execute a statement by a driver's connection."""
    cursor = connection.cursor()
    style = "qmark" if dialect == "sqlite" else "pyformat"
    cursor.execute(with_placeholders(sql, style), values)
    cursor.close()


class Lost:
    """Loses the replies of commits of handlers' transactions.

    Args:
        database: whose consumers lose them.

    Attributes:
        executed: whether the commits take effect.
        count: how many are lost from now on.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, database: Database) -> None:
        self.executed = True
        self.count = 0
        self._of_thread = threading.local()
        monkeypatch.setattr(failpoints, "hook", self._reached)
        opened = database.open

        def open_(*arguments: Any, **options: Any) -> PlainSession:
            session = opened(*arguments, **options)
            commit = session.commit

            def lossy() -> None:
                self._commit(session, commit)

            session.commit = lossy  # type: ignore[method-assign]
            return session

        monkeypatch.setattr(database, "open", open_)

    def _reached(self, point: str) -> None:
        self._of_thread.result = point == "consumer.result_committing"

    def _commit(self, session: PlainSession, commit: Any) -> None:
        if not (self.count and getattr(self._of_thread, "result", False)):
            commit()
            return
        self._of_thread.result = False
        self.count -= 1
        if self.executed:
            commit()
        session.close()
        session.execute(Query("SELECT 1"))  # raises as a lost connection does
