"""A replication connection to PostgreSQL: START_REPLICATION, then COPY BOTH through libpq.

psycopg executes the command; it has no calls for what follows, so libpq is called directly.
"""

from __future__ import annotations

import asyncio
import struct
import time
from typing import Any, NamedTuple

from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.postgres import Postgres
from txbroker.errors import ConfigurationError, TxbrokerError
from txbroker.relay.capture.pg.pgoutput import SESSION, lsn_text, parse_lsn

_STATUS = struct.Struct(">cQQQqB")
_KEEPALIVE = struct.Struct(">QqB")
_DATA, _ALIVE = b"wk"
DATA_AT = 25
"""Where pgoutput's message begins in a frame of data."""
SILENCE_S = 60.0
"""How long a server that was asked may be silent, seconds; its own limit is the same."""
_LOST_SLOT = ("55000", "58P01")
_NO_OBJECT, _DENIED = "42704", "42501"
_UNTRANSLATABLE = ("22P05", "22021")


class Untranslatable(ConfigurationError):
    """The server ends the stream at a text that it cannot send as UTF-8."""


class System(NamedTuple):
    """The server that answers.

    Attributes:
        id: of the database cluster, the same on its standbys.
        timeline: one more after each promotion of a standby and each recovery.
        wal_end: where its WAL ended then, an LSN.
    """

    id: str
    timeline: int
    wal_end: int


class PgStream:
    """One replication connection. Methods that are not coroutines do not wait.

    Args:
        slot: its name.

    Attributes:
        wal_end: everything before it was received; an LSN.
        flushed: what the server was last allowed to forget; an LSN.
        read_s: when all that had arrived was read, by the monotonic clock, seconds.
        asked: the server has asked how far this is: it shuts down only when it may forget all.
    """

    def __init__(self, database: Postgres, slot: str) -> None:
        self._database = database
        self._slot = slot
        self._connection: Any = None
        self._libpq: Any = None
        self._loop = asyncio.get_running_loop()
        self._timeline = 0
        self._waiter: asyncio.Future[None] | None = None
        self.wal_end = 0
        self.flushed = 0
        self.asked = False
        self.read_s = time.monotonic()
        self._silent_since_s: float | None = None

    async def open(self) -> System:
        """Connect, and return the server's identity.

        Raises:
            ConfigurationError: this user may not replicate.
            DatabaseUnavailable
        """
        try:
            self._connection = await self._database.open_replication()
            for sql in SESSION:
                await self._connection.execute(sql)
            cursor = await self._connection.execute("IDENTIFY_SYSTEM")
            row = await cursor.fetchone()
        except Exception as error:
            raise self._explain(error) from error
        self._timeline = int(row[1])
        return System(str(row[0]), self._timeline, parse_lsn(row[2]))

    async def left_at(self, timeline: int) -> int:
        """Return where the server's history left an earlier timeline, as an LSN; -1 if it was never
        on it.

        Raises:
            DatabaseUnavailable
        """
        if timeline == self._timeline:
            return 1 << 64
        if self._timeline == 1:
            return -1
        try:
            cursor = await self._connection.execute(f"TIMELINE_HISTORY {self._timeline}")
            row = await cursor.fetchone()
        except Exception as error:
            raise self._explain(error) from error
        content = row[1].decode() if isinstance(row[1], bytes) else str(row[1])
        for line in content.splitlines():
            fields = line.split()
            if len(fields) >= 2 and fields[0] == str(timeline):
                return parse_lsn(fields[1])
        return -1

    async def start(self, lsn: int, publication: str, *, messages: bool) -> None:
        """Begin to stream transactions whose commit is not before `lsn`.

        Args:
            messages: also what `pg_logical_emit_message` wrote.

        Raises:
            ConfigurationError, DatabaseUnavailable
        """
        options = f"proto_version '1', publication_names '{publication}', messages '{messages}'"
        sql = f"START_REPLICATION SLOT {self._slot} LOGICAL {lsn_text(lsn)} ({options})"
        try:
            await self._connection.execute(sql)
        except Exception as error:
            raise self._explain(error) from error
        self._libpq = self._connection.pgconn
        self.wal_end = self.flushed = lsn

    def take(self) -> bytes | None:
        """Return the next frame of data (see `DATA_AT`), or None if none has arrived.

        Raises:
            ConfigurationError: the server ends the stream for a lasting reason.
            DatabaseUnavailable: the connection is lost.
        """
        libpq = self._libpq
        while True:
            try:
                size, view = libpq.get_copy_data(1)
                if size == 0:
                    libpq.consume_input()
                    size, view = libpq.get_copy_data(1)
            except Exception as error:
                raise self._explain(error) from error
            if size == 0:
                self.read_s = time.monotonic()
                return None
            if size < 0:
                raise self._end_error()
            self._silent_since_s = None
            frame = bytes(view)
            if frame[0] == _DATA:
                return frame
            self._heard(frame)

    def _heard(self, frame: bytes) -> None:
        if frame[0] != _ALIVE:
            raise self._unavailable(f"sent an unknown frame {frame[:1]!r}")
        wal_end, _time_us, reply = _KEEPALIVE.unpack_from(frame, 1)
        self.wal_end = max(self.wal_end, wal_end)
        if reply:
            self.asked = True
            self.report()

    async def readable(self, timeout_s: float) -> None:
        """Wait until something arrives, `wake` is called, or the time is over.

        Raises:
            DatabaseUnavailable: the server does not answer any more.
        """
        now_s = self._loop.time()
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        elif now_s - self._silent_since_s > SILENCE_S:
            raise self._unavailable(f"does not answer since {SILENCE_S:.0f} s")
        try:
            socket = self._libpq.socket
        except Exception as error:
            raise self._explain(error) from error
        self._waiter = self._loop.create_future()
        self._loop.add_reader(socket, self.wake)
        try:
            await asyncio.wait((self._waiter,), timeout=timeout_s)
        finally:
            self._loop.remove_reader(socket)
            self._waiter = None

    def wake(self) -> None:
        """End `readable`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def report(self, flushed: int = 0, *, ask: bool = False) -> None:
        """Report to the server that it may forget everything before `flushed`, or before the
        last such position.

        Args:
            ask: have it answer.

        Raises:
            DatabaseUnavailable: the connection is lost.
        """
        self.flushed = max(self.flushed, flushed)
        received = max(self.wal_end, self.flushed)
        status = _STATUS.pack(b"r", received, self.flushed, self.flushed, 0, ask)
        try:
            self._libpq.put_copy_data(status)
            self._libpq.flush()
        except Exception as error:
            raise self._explain(error) from error

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection, self._libpq = self._connection, None, None
        if connection is not None:
            await connection.close()

    # --- errors ------------------------------------------------------------------------------

    def _end_error(self) -> TxbrokerError:
        result = self._libpq.get_result()
        text = result.error_message.decode(errors="replace") if result is not None else ""
        code = result.error_field(ord("C")) if result is not None else None
        return self._refusal((code or b"").decode(), " ".join(text.split()))

    def _explain(self, error: Exception) -> BaseException:
        """Return the error to raise for one of the driver; others as they are."""
        if not hasattr(error, "sqlstate"):
            return error
        code, text = error.sqlstate or "", " ".join(str(error).split())
        # A refused connection has no code.
        if code == _DENIED or "start walsender" in text or "start WAL sender" in text:
            return ConfigurationError(
                f"{self._database.name}: this user may not replicate: ALTER ROLE … REPLICATION as "
                "an administrator"
            )
        found = self._refusal(code, text)
        known = self._database.explain(error)
        return known if known is not error and isinstance(found, DatabaseUnavailable) else found

    def _refusal(self, code: str, text: str) -> TxbrokerError:
        """Return the error for one of the server while it streams."""
        if code == _NO_OBJECT and "publication" in text:
            return ConfigurationError(
                f"{self._database.name}: {text}: the publication was dropped, and changes since "
                "cannot be read, even if it was created again: run `txbroker capture remove`, then "
                "`apply`, then `run` with --on-gap skip; fill in what changed in between"
            )
        if code in _UNTRANSLATABLE:
            return Untranslatable(text)
        if code in _LOST_SLOT and ("slot" in text or "WAL" in text):
            return ConfigurationError(
                f"{self._database.name}: {text}: the server has removed changes that the slot "
                "still had to send: run `txbroker capture remove`, then `apply`, then `run` with "
                "--on-gap skip; fill in what changed in between; a larger max_slot_wal_keep_size "
                "prevents it"
            )
        return self._unavailable(f"ended the stream: {text or 'connection lost'}")

    def _unavailable(self, what: str) -> DatabaseUnavailable:
        return DatabaseUnavailable(f"{self._database.name} {what}")
