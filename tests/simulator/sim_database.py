"""Databases of a run: SQLite in memory, whose sessions take time, end at any statement, and leave
commits without an answer.

Every file that txbroker opens is one of these. Threads with sessions are callbacks of their
process: what one of them does with its session is one step, as SQLite has one writer at a time.
`Server` is a database with asynchronous sessions, each statement of which is a step.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast

from msgspec import Struct, structs

from tests.simulator.sim_loop import PROCESS, STAND_INS, START_S, Process, SimLoop
from tests.simulator.sim_network import Network
from txbroker.databases import sessions
from txbroker.databases.database import IDLE_S, LOCK_WAIT_S, Database
from txbroker.databases.dialect import SQLITE
from txbroker.databases.sessions import DriverSession, PlainSession, SessionThreads
from txbroker.databases.steps import Query, Result

T = TypeVar("T")
SERVER = structs.replace(SQLITE, name="server")
"""A database that is no file: what txbroker does on SQLite alone it does not do here."""
_LOCKS = re.compile(r" FOR (UPDATE|SHARE)( SKIP LOCKED| NOWAIT)?$")
_DAYS = 2440587.5
_CALL_S = (0.0002, 0.004)
_RUNS = itertools.count()


class Climate(Struct):
    """How often a database does what. All zero: it answers, and soon.

    Attributes:
        ended: the share of statements at which their session ends.
        lost: the share of commits without an answer, half of which are executed.
    """

    ended: float = 0.0
    lost: float = 0.0


def _gone(why: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(why)
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    return error


class Databases:
    """All databases of a run, by the path of their file.

    Args:
        draw: the random numbers of their faults.
    """

    def __init__(self, loop: SimLoop, draw: random.Random) -> None:
        self.loop = loop
        self.climate = Climate()
        self.away = False
        """Whether no database answers."""
        self.idle_s = IDLE_S
        """A transaction without a statement for this time is ended."""
        self.note: Callable[[str], None] = lambda _: None
        self.random = draw
        self._run = next(_RUNS)
        self._open: list[_Connection] = []
        self._anchors: dict[str, sqlite3.Connection] = {}
        loop.connect = self.connect

    def connect(self, path: Any, *, factory: Any = sqlite3.Connection, **_: Any) -> Any:
        """Open a connection, in the place of `sqlite3.connect`."""
        if self.away:
            raise _gone("the database does not answer")
        connection = self.quiet(path, factory=_simulated(factory))
        connection.begin(self, PROCESS.get())
        self._open.append(connection)
        return connection

    def quiet(self, path: Any, *, factory: Any = sqlite3.Connection) -> Any:
        """Open a connection that no fault befalls, for the judge and operators."""
        name = f"file:/{self._run}/{os.path.basename(path)}?vfs=memdb"
        if name not in self._anchors:  # it holds the data
            self._anchors[name] = sqlite3.connect(name, uri=True)
        return sqlite3.connect(name, uri=True, isolation_level=None, timeout=0, factory=factory)

    def now_s(self) -> float:
        """Return the clock of the databases, seconds since 1970."""
        return START_S + self.loop.time()

    def reap(self) -> None:
        """End sessions whose transaction has waited for too long: their processes are stopped."""
        late_s = self.loop.time() - self.idle_s
        for each in [each for each in self._open if each.used_s < late_s and each.holds]:
            self.note(f"database: the transaction of {each.process.name} has timed out")
            each.end()

    def holds(self, process: Process) -> bool:
        """Return whether a process has a transaction open."""
        return any(each.process is process and each.holds for each in self._open)

    def end_of(self, process: Process) -> None:
        """End the sessions of a process that is gone."""
        for each in [each for each in self._open if each.process is process]:
            each.close()

    def forget(self, connection: _Connection) -> None:
        """Take note that a session has ended."""
        self._open = [each for each in self._open if each is not connection]

    def close(self) -> None:
        """End everything."""
        for each in list(self._open):
            each.close()
        for anchor in self._anchors.values():
            anchor.close()


class _Cursor(sqlite3.Cursor):
    def execute(self, sql: str, values: Any = ()) -> Any:
        """Execute a statement, unless the session ends here."""
        connection = cast(_Connection, self.connection)
        if sql.startswith("PRAGMA busy_timeout"):
            return self  # no wait takes real time: others go on first
        answered = connection.reach(sql)
        # SQLite has no locks of rows: the one that writes has all.
        super().execute(_LOCKS.sub("", sql), values)
        if not answered:
            connection.end()
            raise _gone("no answer to a commit")
        return self

    def executemany(self, sql: str, values: Any) -> Any:
        cast(_Connection, self.connection).reach(sql)
        return super().executemany(sql, values)


class _Connection(sqlite3.Connection):
    """A session.

    Attributes:
        process: that uses it.
        used_s: when its last statement was.
    """

    process: Process
    used_s: float

    def begin(self, databases: Databases, process: Process) -> None:
        """Begin with the session."""
        self._databases, self.process, self._over = databases, process, False
        self.used_s = databases.loop.time()
        # What SQL draws and reads itself: no real clock, no chance.
        define: Any = sqlite3.Connection.create_function
        define(self, "julianday", 1, lambda _: _DAYS + databases.now_s() / 86_400)
        define(self, "randomblob", 1, lambda size: databases.random.randbytes(size))

    @property
    def holds(self) -> bool:
        """Whether it has a transaction open."""
        return not self._over and self.in_transaction

    def cursor(self, factory: Any = _Cursor) -> Any:
        return super().cursor(_Cursor)

    def reach(self, sql: str) -> bool:
        """Come to a statement; return whether it will be answered."""
        databases = self._databases
        climate, draw = databases.climate, databases.random
        self.used_s = databases.loop.time()
        if sql.startswith("BEGIN"):
            databases.reap()
        if not self._over and (databases.away or (climate.ended and draw.random() < climate.ended)):
            databases.note(f"database: a session of {self.process.name} ends at {sql[:30]!r}")
            self.end()
        if self._over:
            raise _gone("the session has ended")
        if sql.startswith("COMMIT") and climate.lost and draw.random() < climate.lost:
            done = draw.random() < 0.5
            word = "executed" if done else "lost"
            databases.note(f"database: a commit of {self.process.name} is {word}, not answered")
            if not done:
                self.end()
                raise _gone("no answer to a commit")
            return False
        return True

    def end(self) -> None:
        """End the session; what it has not committed is gone. Its user finds out later."""
        if not self._over:
            self._over = True
            sqlite3.Connection.rollback(self)

    def close(self) -> None:
        self._over = True
        self._databases.forget(self)
        super().close()


def _simulated(factory: type[sqlite3.Connection]) -> Any:
    """Return a class of connections with what a user's class adds."""
    if factory is sqlite3.Connection:
        return _Connection
    return type("_SimConnection", (_Connection, factory), {})


# --- threads -------------------------------------------------------------------------------------


class SimThreads(SessionThreads):
    """`SessionThreads` without threads: one call after another, each a little later and at once."""

    _free_s = 0.0
    _session: PlainSession | None = None

    def submit(self, function: Callable[[PlainSession], T]) -> Future[T]:
        """See `SessionThreads.submit`."""
        if self._closed:
            raise RuntimeError(f"threads {self._name} are closed")
        future: Future[T] = Future()
        loop, draw = cast(SimLoop, asyncio.get_running_loop()), PROCESS.get().random
        self._free_s = max(self._free_s, loop.time() + draw.uniform(*_CALL_S))
        loop.call_at(self._free_s, self._answer, future, function)
        return future

    def _answer(self, future: Future[T], function: Callable[[PlainSession], T]) -> None:
        inner: Future[T] = Future()
        if not future.set_running_or_notify_cancel():
            return
        self._session = self._call(self._session, inner, function)
        # The result is on its way: its process may be gone before it arrives.
        later_s = PROCESS.get().random.uniform(*_CALL_S)
        asyncio.get_running_loop().call_later(later_s, _pass_on, inner, future)

    async def close(self) -> None:
        """See `SessionThreads.close`."""
        self._closed = True
        if self._session is not None:
            self._session.close()


def _pass_on(done: Future[T], future: Future[T]) -> None:
    error = done.exception()
    if error is None:
        future.set_result(done.result())
    else:
        future.set_exception(error)


async def _at_once(function: Callable[[], T]) -> T:
    await asyncio.sleep(PROCESS.get().random.uniform(*_CALL_S))
    return function()


class _Sqlite:
    """In place of the module `sqlite3`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sqlite3, name)

    @staticmethod
    def connect(path: Any, **options: Any) -> Any:
        return cast(SimLoop, asyncio.get_running_loop()).connect(path, **options)


STAND_INS |= {
    sqlite3: _Sqlite(),
    SessionThreads: SimThreads,
    sessions.in_thread: _at_once,
}


# --- a server ------------------------------------------------------------------------------------


class Server(Database):
    """A database whose sessions are plain, or asynchronous over the network."""

    plain = asynchronous = True

    def __init__(self, databases: Databases, network: Network, path: str) -> None:
        super().__init__(
            lambda: databases.connect(path), "sqlite", style="qmark", name=path, create_tables=True
        )
        self.dialect = SERVER
        self._network = network

    async def open_async(
        self, lock_wait_s: float = LOCK_WAIT_S, idle_s: float = IDLE_S
    ) -> _AsyncSession:
        """See `Database.open_async`."""
        await self._network.pass_message()
        return _AsyncSession(self._network, self._connect())


class _Rows:
    def __init__(self, cursor: sqlite3.Cursor) -> None:
        self.description = cursor.description
        self._rows = cursor.fetchall() if cursor.description else []

    async def fetchall(self) -> list[Any]:
        return self._rows


class _Remote:
    """What a handler receives."""

    def __init__(self, session: _AsyncSession) -> None:
        self._session = session

    async def execute(self, sql: str, values: Sequence[Any] = ()) -> _Rows:
        return await self._session.ask(lambda plain: _Rows(plain.connection.execute(sql, values)))


class _AsyncSession:
    """An `AsyncSession`: each statement travels, and its result."""

    reusable = True

    def __init__(self, network: Network, connection: Any) -> None:
        self._network = network
        self._plain = DriverSession(connection, SERVER, "qmark")
        self.connection = _Remote(self)

    @property
    def in_transaction(self) -> bool:
        return cast(_Connection, self._plain.connection).holds

    async def ask(self, what: Callable[[DriverSession], T]) -> T:
        """Let the server do something."""
        await self._network.pass_message()
        try:
            return what(self._plain)
        finally:
            await self._network.pass_message()

    async def lend(self) -> None:
        """See `AsyncSession`: handlers change nothing of their session here."""

    async def execute(self, query: Query) -> Result:
        return await self.ask(lambda plain: plain.execute(query))

    async def begin(self) -> None:
        await self.ask(DriverSession.begin)

    async def commit(self) -> None:
        await self.ask(DriverSession.commit)

    async def rollback(self) -> None:
        # A session that has ended shows it.
        await self.ask(lambda plain: plain.rollback() or plain.execute(Query("SELECT 1")))

    async def close(self) -> None:
        self._plain.close()
