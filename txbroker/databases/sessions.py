"""Connections that txbroker opens: they begin and commit its own transactions."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import lru_cache
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any, Protocol, TypeVar

from txbroker.databases.dialect import Dialect, Fault
from txbroker.databases.restoring import Restorer, restorer
from txbroker.databases.steps import Query, Result, run, with_placeholders
from txbroker.errors import ConfigurationError

T = TypeVar("T")
_PROBE = Query("SELECT 1")
_CLOSE_S = 0.5
_BUSY_ATTEMPTS = 20
_BUSY_PAUSE_S, _BUSY_PAUSE_MAX_S = 0.005, 0.5
_IDLE_MAX, _IDLE_S = 8, 30.0
_of_parents: list[Any] = []
"""Sessions of the process that forked this one: never closed."""


class TransactionControlled(ConfigurationError):
    """The consumer begins and ends the transaction of a handler: leave commit and rollback out of
    the handler, and raise an exception to roll back."""


def refuse_control(*_arguments: object, **_options: object) -> Any:
    """Stand in for `commit` and `rollback` of a connection that a handler receives.

    Raises:
        TransactionControlled
    """
    raise TransactionControlled(
        "the handler called commit or rollback, or a method that does: the consumer begins and "
        "ends its transaction. Leave it out, and raise an exception to roll back"
    )


class PlainSession(Protocol):
    """A connection that the caller's thread uses alone.

    Attributes:
        connection: what a handler receives.
        dialect: of its database.
    """

    connection: Any
    dialect: Dialect

    @property
    def reusable(self) -> bool:
        """True while the session is as it was opened; otherwise it is to be closed."""

    @property
    def in_transaction(self) -> bool:
        """True while a transaction is open, as the driver knows without asking the server."""

    def lend(self) -> None:
        """Handlers will use the session: from now on, the end of a transaction restores it."""

    def execute(self, query: Query) -> Result: ...

    def begin(self) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    def close(self) -> None: ...


class AsyncSession(Protocol):
    """`PlainSession` for asyncio."""

    connection: Any

    @property
    def reusable(self) -> bool: ...

    @property
    def in_transaction(self) -> bool: ...

    async def lend(self) -> None: ...

    async def execute(self, query: Query) -> Result: ...

    async def begin(self) -> None: ...

    async def commit(self) -> None: ...

    async def rollback(self) -> None: ...

    async def close(self) -> None: ...


class DriverSession:
    """A DB-API connection that commits every statement, unless a transaction was begun.

    Args:
        style: the driver's `paramstyle`.
    """

    def __init__(self, connection: Any, dialect: Dialect, style: str) -> None:
        self.connection = connection
        self.dialect = dialect
        self.reusable = True
        self._style = style
        self._restorer: Restorer | None = None

    @property
    def in_transaction(self) -> bool:
        return bool(in_transaction(self.connection)) and not handler_ended(self._restorer)

    def lend(self) -> None:
        """Handlers will use the session, see `PlainSession.lend`."""
        self._restorer = restorer(self.connection, driver_of(self.connection))
        run(self._restorer.opened(), self.execute)

    def execute(self, query: Query) -> Result:
        """Execute a statement."""
        return execute(self.connection, query, self._style)

    def begin(self) -> None:
        """Begin a transaction that may write."""
        if self._restorer is None:
            self._command(self.dialect.begin)
        else:
            self.reusable = False
            self._command(self.dialect.begin_marked)
            self._restorer.begun()

    def commit(self) -> None:
        """Commit it."""
        self._end("COMMIT")

    def rollback(self) -> None:
        """Roll it back, if one is open."""
        if in_transaction(self.connection) is not False:
            self._end("ROLLBACK")
        elif not self.reusable:
            self._end("")

    def _end(self, sql: str) -> None:
        if self._restorer is None:
            self._command(sql)
        else:
            self.reusable = run(self._restorer.ended(sql), self.execute)

    def _command(self, sql: str) -> None:
        """Execute a statement without a result: with less work than `execute`."""
        driver = driver_of(self.connection)
        if driver == "pymysql":
            self.connection.query(sql)
        elif driver in ("sqlite3", "psycopg"):
            self.connection.execute(sql)
        else:
            self.execute(Query(sql))

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


def set_up_own(session: PlainSession) -> None:
    """Set up a session that no handler receives: its settings are txbroker's, and it reads what
    other programs have written."""
    for sql in session.dialect.own:
        session.execute(Query(sql))
    read_any_text(session)


def read_any_text(session: PlainSession | AsyncSession) -> None:
    """Let a session read text that is no UTF-8: it has surrogates, as in file names."""
    connection = session.connection  # its own, or that of Django or SQLAlchemy
    connection = getattr(connection, "sync_connection", connection)
    driver = getattr(connection, "connection", connection)
    driver = getattr(driver, "dbapi_connection", driver)
    if driver_of(driver) == "sqlite3":
        driver.text_factory = _any_text
    elif (
        driver_of(driver) == "psycopg"
        and driver.info.parameter_status("server_encoding") == "SQL_ASCII"
    ):
        from psycopg.adapt import Loader

        loader = type("AnyText", (Loader,), {"load": lambda _, data: _any_text(bytes(data))})
        for kind in ("text", "varchar", "name"):
            driver.adapters.register_loader(kind, loader)


def _any_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


class SessionPool:
    """Sessions that stay open between their uses, for many threads.

    Args:
        opener: opens a session.
    """

    def __init__(self, opener: Callable[[], PlainSession]) -> None:
        self._open = opener
        self._idle: list[tuple[PlainSession, float]] = []
        self._process = os.getpid()

    @contextmanager
    def lend(self) -> Iterator[PlainSession]:
        """Lend a session for exclusive use. After an error, it and all idle ones are closed:
        they may be lost, too.

        Raises: the driver's error.
        """
        session = self._take() or self._open()
        try:
            yield session
        except BaseException:
            close_quietly(session)
            self.close()
            raise
        if len(self._idle) < _IDLE_MAX:
            self._idle.append((session, time.monotonic()))
        else:
            session.close()

    def close(self) -> None:
        """Close the idle sessions."""
        while session := self._take():
            close_quietly(session)

    def _take(self) -> PlainSession | None:
        """Return an idle session, no longer the pool's; close those that a server or a proxy may
        have closed."""
        if self._process != os.getpid():
            # A forked process must neither use nor close connections of the other one.
            _of_parents.extend(self._idle)
            self._idle, self._process = [], os.getpid()
        while True:
            try:
                session, since = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - since < _IDLE_S:
                return session
            close_quietly(session)


def handler_ended(restored: Restorer | None) -> bool:
    """Return whether a handler has ended its transaction, as the driver reports statements."""
    return restored is not None and restored.ended_by_handler


def close_quietly(session: PlainSession) -> None:
    """Close a session after an error, which is the one to raise."""
    with suppress(Exception):
        session.close()


def execute(connection: Any, query: Query, style: str) -> Result:
    """Execute a statement on a DB-API connection.

    Args:
        style: the driver's `paramstyle`.
    """
    cursor = tuple_cursor(connection)
    try:
        cursor.execute(with_placeholders(query.sql, style), tuple(query.values))
        while driver_of(connection) == "psycopg" and cursor.nextset():
            pass  # of several statements, the last one's result counts
        rows = cursor.fetchall() if cursor.description else ()
        return Result(cursor.rowcount, rows)
    finally:
        cursor.close()


def tuple_cursor(connection: Any) -> Any:
    """Return a cursor whose rows are tuples, also where the connection's are dictionaries."""
    driver = driver_of(connection)
    if driver == "psycopg":
        from psycopg.rows import tuple_row

        return connection.cursor(row_factory=tuple_row)
    if driver == "psycopg2":
        from psycopg2.extensions import cursor as plain_cursor

        return connection.cursor(cursor_factory=plain_cursor)
    if driver == "pymysql":
        from pymysql.cursors import Cursor

        return connection.cursor(Cursor)
    cursor = connection.cursor()
    if driver == "sqlite3":
        cursor.row_factory = None
    return cursor


def in_transaction(connection: Any) -> bool | None:
    """Return whether a driver's connection has an open transaction; None: the driver does not show
    it."""
    driver = driver_of(connection)
    if driver in ("sqlite3", "aiosqlite"):
        return bool(connection.in_transaction)
    if driver in ("psycopg", "psycopg2"):
        return int(connection.info.transaction_status) != 0
    if driver == "pymysql":
        return bool(connection.server_status & 1)
    if driver == "asyncpg":
        return bool(connection.is_in_transaction())
    return None


def closed_by_user(connection: Any) -> bool:
    """Return whether a driver's connection was closed; False for one that was lost."""
    driver = driver_of(connection)
    if driver == "sqlite3":
        try:
            return connection.in_transaction is None
        except Exception:
            return True
    if driver == "pymysql":
        return bool(connection._closed)
    return bool(getattr(connection, "closed", False)) and not getattr(connection, "broken", False)


def driver_of(connection: Any) -> str:
    """Return the name of the package that a connection's class comes from, "" if it is unknown."""
    kind: Any = type(connection)  # mypy takes no class for hashable
    return _driver_of(kind)


@lru_cache(maxsize=64)
def _driver_of(connection: Any) -> str:
    """Return `driver_of` of a connection's class."""
    known: Mapping[str, None] = dict.fromkeys(
        ("sqlite3", "psycopg", "psycopg2", "pymysql", "asyncpg", "sqlalchemy", "django")
    )
    for kind in connection.__mro__:
        package: str = kind.__module__.partition(".")[0]
        if package in known:
            return package
    name: str = connection.__module__.partition(".")[0]
    return name


# --- threads ---------------------------------------------------------------------------------
# They are daemons: a server that hangs does not keep the process from its end, which the threads
# of `concurrent.futures` and `asyncio.to_thread` would.


class HandlerFailed(Exception):
    """The handler raised an error, of any class.

    Attributes:
        session_lost: the connection that it received cannot be used any more.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error
        self.session_lost = False


def note_lost(error: BaseException) -> None:
    """Note in the error of a handler that its session is lost."""
    if isinstance(error, HandlerFailed):
        error.session_lost = True


class SessionThreads:
    """Threads with a session each, which call functions.

    Args:
        opener: opens a session.
        count: of threads, at most.

    Attributes:
        opened: how many sessions were opened.
    """

    def __init__(self, opener: Callable[[], PlainSession], name: str, count: int = 1) -> None:
        self._open = opener
        self._name = name
        self._count = count
        self.opened = 0
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[PlainSession], Any]] | None]
        self._calls = SimpleQueue()
        self._idle = Semaphore(0)
        self._closed = False
        self._threads: list[Future[None]] = []
        """Done when they end."""

    def submit(self, function: Callable[[PlainSession], T]) -> Future[T]:
        """Call a function in a thread. After an error its session is rolled back, and closed if it
        cannot be used again."""
        if self._closed:
            raise RuntimeError(f"threads {self._name} are closed")
        future: Future[T] = Future()
        self._calls.put((future, function))
        if len(self._threads) < self._count and not self._idle.acquire(blocking=False):
            self._threads.append(_in_thread(self._run, self._name))
        return future

    async def call(self, function: Callable[[PlainSession], T]) -> T:
        """`submit`, and wait for the result. A cancelled call that has begun goes on alone; one
        that waits for a thread does not begin."""
        return await asyncio.wrap_future(self.submit(function))

    async def close(self) -> None:
        """End the threads after the calls that wait, and close their sessions; after half a second
        go on without them."""
        self._closed = True
        for _ in self._threads:
            self._calls.put(None)
        if self._threads:
            await asyncio.wait(map(asyncio.wrap_future, self._threads), timeout=_CLOSE_S)

    # --- in a thread -------------------------------------------------------------------------

    def _run(self) -> None:
        session: PlainSession | None = None
        while call := self._calls.get():
            session = self._call(session, *call)
            del call  # what it holds may be large
            self._idle.release()
        if session is not None:
            close_quietly(session)

    def _call(
        self,
        session: PlainSession | None,
        future: Future[T],
        function: Callable[[PlainSession], T],
    ) -> PlainSession | None:
        """Call a function, and return the session if it can be used again."""
        if not future.set_running_or_notify_cancel():
            return session
        try:
            if session is None:
                session = self._open()
                self.opened += 1
            result = function(session)
        except BaseException as error:
            if session is not None and not _can_be_used(session, error):
                close_quietly(session)
                note_lost(error)
                session = None
            future.set_exception(error)
        else:
            future.set_result(result)
        if session is not None and not session.reusable:
            close_quietly(session)
            session = None
        return session


def _can_be_used(session: PlainSession, error: BaseException) -> bool:
    """Roll back, and return whether a session can be used again after an error."""
    if session.dialect.fault(error) is Fault.UNAVAILABLE:
        return False  # a server that became read-only answers, and another one is the primary
    try:
        session.rollback()
        session.execute(_PROBE)  # PyMySQL does not show that its connection is lost
    except Exception:
        return False
    return True


async def in_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread made for it. A cancelled call goes on alone."""
    return await asyncio.wrap_future(_in_thread(function, "txbroker-call"))


def _in_thread(function: Callable[[], T], name: str) -> Future[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future


async def while_busy(dialect: Dialect, attempt: Callable[[], Awaitable[T]]) -> T:
    """Repeat an attempt while other transactions are in its way.

    Raises: the driver's error.
    """
    for number in range(_BUSY_ATTEMPTS - 1):
        try:
            return await attempt()
        except Exception as error:
            if dialect.fault(error) is not Fault.BUSY:
                raise
        await busy_pause(number)
    return await attempt()


async def busy_pause(attempt: int) -> None:
    """Wait for a random time, which grows with each attempt, so that others can end."""
    longest_s = min(_BUSY_PAUSE_MAX_S, _BUSY_PAUSE_S * 2**attempt)
    await asyncio.sleep(random.uniform(longest_s / 2, longest_s))
