"""MariaDB's binary log as a source: a thread reads, and hands messages over in bounded memory."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Literal

import structlog
from msgspec import Struct

from txbroker.core.records import Message
from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.mariadb import MariaDB
from txbroker.databases.sessions import in_thread
from txbroker.databases.steps import Query, Steps
from txbroker.door.placing import Refusal
from txbroker.errors import ConfigurationError
from txbroker.relay.capture import mariadb_setup
from txbroker.relay.capture.changes import CaptureMapping, Change, TransactionInfo
from txbroker.relay.capture.conversion import Conversion
from txbroker.relay.capture.envelope import refused_change
from txbroker.relay.capture.maria.binlog import (
    HEARTBEAT_S,
    Alive,
    Binlog,
    BinlogPlace,
    BinlogPosition,
    ChangesLost,
    Committed,
    Interrupted,
    NotCompared,
    TablesChanged,
    check_position,
    log_end,
    read_position,
)
from txbroker.relay.capture.setup import Gap, refusals
from txbroker.relay.source import Delivery

log = structlog.wrap_logger(logging.getLogger(__name__))

PIECE_BYTES = 1 << 20
"""Bytes after which a piece of a transaction is delivered; small transactions are joined up to
them."""
_WAITING_BYTES_MAX = 16 << 20
"""Bytes of messages that wait for Kafka; as Python objects they take up to three times as much."""
_END_S = 1.0
_CRASHED = (
    "the server rolled it back: PURGE BINARY LOGS TO the file after it, and start again, by which "
    "nothing is lost"
)
_GTID = re.compile(r"\d+-\d+-\d+")
_MESSAGE_BYTES = 300
"""Bytes of a message beside its key and value."""


class _MessagePiece(Struct, frozen=True, gc=False):
    """Messages of one transaction.

    Attributes:
        end: with its last piece.
    """

    messages: list[Message]
    size: int
    end: Committed | None


class _BinlogReader:
    """Reads the binary log in a thread.

    Args:
        inspect: called after the definition of a captured table may have changed, returns the facts
            of the server; raises if the capture cannot go on.
        failed: called with what ended the thread, returns the error to raise.
    """

    def __init__(
        self,
        binlog: Binlog,
        conversion: Conversion,
        inspect: Callable[[], mariadb_setup.MariaFacts],
        failed: Callable[[Exception], Exception],
    ) -> None:
        self._binlog = binlog
        self._conversion = conversion
        self._inspect = inspect
        self._explain = failed
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[_MessagePiece] = deque()
        self._size = 0
        self._changed = threading.Condition()
        self._closed = False
        self._failure: Exception | None = None
        self._skipped: Committed | None = None
        """The last transaction without messages, if it is the last one."""
        self._arrived = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="txbroker-binlog", daemon=True)
        self._thread.start()

    async def wait(self) -> None:
        """Wait until there is a piece.

        Raises: what ended the thread, once all pieces are taken.
        """
        while not self._pieces:
            if self._failure is not None:
                raise self._explain(self._failure)
            await self._arrived.wait()
            self._arrived.clear()

    async def take(self) -> _MessagePiece:
        """Wait for a piece, and take it; see `wait` for errors."""
        await self.wait()
        with self._changed:
            piece = self._pieces.popleft()
            self._size -= piece.size
            self._changed.notify()
        return piece

    def next_whole_size(self) -> int | None:
        """Return the size of the next piece if it is there and a whole transaction."""
        return self._pieces[0].size if self._pieces and self._pieces[0].end else None

    async def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._binlog.close()
        await in_thread(lambda: self._thread.join(_END_S))

    # --- in the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:
            self._put_skipped()  # the next reader begins there
            self._failure = error
        finally:
            self._binlog.close()
            self._wake()

    def _read(self) -> None:
        messages: list[Message] = []
        size = number = 0
        begun = False
        info: TransactionInfo | None = None
        last_s = time.monotonic()
        for event in self._binlog.read():
            if isinstance(event, Change | Gap):
                assert info is not None
                for message in self._convert(info, number, event):
                    messages.append(message)
                    size += _MESSAGE_BYTES + len(message.key or b"") + len(message.value or b"")
                number += 1
                if size >= PIECE_BYTES:
                    self._put_skipped()
                    self._put(_MessagePiece(messages, size, None))
                    messages, size, begun = [], 0, True
            elif isinstance(event, TransactionInfo):
                info, number, begun = event, 0, False
            elif isinstance(event, Committed):
                if messages or begun:
                    self._put(_MessagePiece(messages, size, event))
                    messages, size, self._skipped, last_s = [], 0, None, time.monotonic()
                else:
                    self._skipped = event
            elif isinstance(event, TablesChanged):
                self._binlog.facts = self._inspect()
            # Between transactions, where nothing wanted changes: the position must move on, before
            # the server purges its log.
            if (
                self._skipped is not None
                and isinstance(event, Committed | Alive)
                and time.monotonic() - last_s >= HEARTBEAT_S
            ):
                self._put_skipped()
                last_s = time.monotonic()
            if self._closed:
                return

    def _convert(
        self, info: TransactionInfo, number: int, event: Change | Gap
    ) -> Sequence[Message]:
        try:
            return self._conversion.messages(info, number, event)
        except ConfigurationError as error:
            raise self._binlog.lost(error) if isinstance(event, Gap) else error from None

    def _put_skipped(self) -> None:
        """Let the position move on to the last transaction, if that has no messages."""
        if self._skipped is not None:
            self._put(_MessagePiece([], 0, self._skipped))
            self._skipped = None

    def _put(self, piece: _MessagePiece) -> None:
        with self._changed:
            while self._size >= _WAITING_BYTES_MAX and not self._closed:
                self._changed.wait()
            empty = not self._pieces
            self._pieces.append(piece)
            self._size += piece.size
        if empty:
            self._wake()

    def _wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived.set)


class _BinlogDelivery:
    """Whole transactions, joined while they are small and there.

    Attributes:
        position: after the last; b"" until all pieces are taken.
        place: the same in the files of the log.
    """

    def __init__(self, reader: _BinlogReader) -> None:
        self._reader = reader
        self.position = b""
        self.place = BinlogPlace("", 0)

    async def pieces(self) -> AsyncIterator[Sequence[Message]]:
        """Yield the messages; see `Delivery.pieces`."""
        messages: list[Message] = []
        size = 0
        while not self.position:
            piece = await self._reader.take()
            messages += piece.messages
            size += piece.size
            following = None if piece.end is None else self._reader.next_whole_size()
            if following is not None and size + following <= PIECE_BYTES:
                continue
            yield messages
            messages = []
            if piece.end is not None:
                self.position, self.place = piece.end.position, piece.end.place


class MariadbSource:
    """The changes of a MariaDB's tables; see `Source`. Positions are GTIDs, one for each domain.

    Args:
        on_gap: "skip": where changes were lost, go on at the end of the log, instead of stopping.
        skip: ids of changes and transactions, as errors name them, that are left out.
    """

    def __init__(
        self,
        mapping: CaptureMapping,
        database: MariaDB,
        *,
        on_gap: Literal["stop", "skip"] = "stop",
        skip: Collection[str] = (),
    ) -> None:
        self._mapping = mapping
        self.conversion = Conversion(mapping, skip)
        self._database = database
        self._skips_gaps = on_gap == "skip"
        self._uncompared = False
        """The last transaction was purged, so that it cannot be compared."""
        self._gap = ""
        """Why changes are to be skipped."""
        self._interrupted: BinlogPlace | None = None
        """Where the connection was lost last."""
        self._reader: _BinlogReader | None = None
        self._place: BinlogPlace | None = None

    async def resume(self, position: bytes | None) -> None:
        """Begin after a position, or where `apply` recorded it."""
        await self.close()
        database, mapping = self._database, self._mapping
        facts = await database.ask(mariadb_setup.look(mapping))
        steps = mariadb_setup.needed(mapping, facts)
        if refused := refusals(steps):
            raise ConfigurationError(f"{database.name}: {'; '.join(refused)}")
        if position is None and facts.start is None:
            raise ConfigurationError(
                f"{database.name}: nothing records where capture {mapping.name} begins: run "
                "`txbroker capture apply FILE` first"
            )
        if position is None:
            start = BinlogPosition(facts.start or "")
        else:
            start = read_position(database.name, position)
        try:
            check_position(database.name, start.gtids, facts.settings["gtid_binlog_state"])
        except ChangesLost as error:
            failure = self._explain(error)
            if failure is error:
                raise
        if self._gap:
            start = BinlogPosition(facts.settings["gtid_binlog_pos"])
            log.warning("capture skips a gap", capture=mapping.name, gap=self._gap)
        elif self._uncompared:
            start = BinlogPosition(start.gtids)
        self._gap, self._uncompared = "", False
        self.conversion.begin(steps)
        binlog = Binlog(database, mapping.tables, facts, start, self.conversion.skips)
        self._reader = _BinlogReader(binlog, self.conversion, self._inspect, self._explain)

    def _inspect(self) -> mariadb_setup.MariaFacts:
        """Look at the server again; blocks.

        Raises:
            ConfigurationError: there are changes now that the log does not show.
            DatabaseUnavailable
        """
        with self._database.explained():
            facts = self._database.apart(mariadb_setup.look(self._mapping))
        if problems := mariadb_setup.changed(self._mapping, facts):
            raise ConfigurationError(f"{self._database.name}: {'; '.join(problems)}")
        return facts

    def _explain(self, error: Exception) -> Exception:
        """Return the error to raise for one of a reader, and note what the next one does."""
        if isinstance(error, Interrupted) and not error.moved:
            # After a crash the server begins with the next file, if it need not show the last
            # transaction again, which was compared now.
            before, self._interrupted = self._interrupted, error.place
            self._uncompared = error.compared and (error.crashed or before == error.place)
            if error.crashed and not error.compared:
                lost = ChangesLost(self._database.name, f"{error.problem}: {_CRASHED}")
                return self._explain(lost)
        elif isinstance(error, NotCompared):
            self._uncompared = True
        elif isinstance(error, ChangesLost) and self._skips_gaps:
            self._gap = str(error)
            return DatabaseUnavailable(str(error))
        return error

    async def next(self) -> Delivery:
        """Wait for committed transactions."""
        if self._reader is None:
            raise DatabaseUnavailable(f"{self._database.name}: the source was not resumed")
        await self._reader.wait()
        return _BinlogDelivery(self._reader)

    async def delivered(self, delivery: Delivery) -> None:
        """Remember the place: MariaDB keeps its log for the time in its settings."""
        assert isinstance(delivery, _BinlogDelivery)
        self._place = delivery.place

    async def refused(self, delivery: Delivery, refusals: Sequence[Refusal]) -> None:
        """Raise: a transaction is delivered whole."""
        raise refused_change(refusals[0], _GTID)

    async def lag_bytes(self) -> int:
        """Return how much of the log follows the last delivery, about; 0 before the first.

        Raises:
            DatabaseUnavailable
        """
        if self._place is None:
            return 0
        found = await self._database.ask(_end_of_log())
        return self._place.bytes_to(*found)

    async def close(self) -> None:
        """Close the connections, and end the thread."""
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()


def _end_of_log() -> Steps[tuple[BinlogPlace, int]]:
    """Return the end of the log, and the size of its files."""
    end = yield from log_end("GLOBAL")
    size = yield Query("SELECT @@global.max_binlog_size")
    return end, int(size.rows[0][0])
