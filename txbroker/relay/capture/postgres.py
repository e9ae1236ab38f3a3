"""A replication slot of PostgreSQL as a source.

The server may forget only what Kafka has, with its position, in a committed transaction. Where no
captured table changes, a position without messages is delivered, so that an idle capture holds no
WAL. The server's keepalives hold the position up to which it has read, so that nothing need be
written for this.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from itertools import count
from typing import Literal

import msgspec
import structlog
from msgspec import Struct

from txbroker.core.records import Message
from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.postgres import Postgres
from txbroker.databases.steps import Query, one
from txbroker.door.placing import Refusal
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.changes import CaptureMapping, Change, Emitted, TransactionInfo
from txbroker.relay.capture.conversion import Conversion
from txbroker.relay.capture.envelope import refused_change
from txbroker.relay.capture.pg import facts as pgfacts
from txbroker.relay.capture.pg.pgoutput import (
    Begin,
    Commit,
    Decoder,
    Event,
    LogicalMessage,
    lsn_text,
    parse_lsn,
)
from txbroker.relay.capture.pg.stream import DATA_AT, PgStream, System
from txbroker.relay.source import Delivery

log = structlog.wrap_logger(logging.getLogger(__name__))

PREFIX = "txbroker"
"""Of messages that `pg_logical_emit_message` writes for us."""
_IDLE_S = 1.0
"""How often a position without messages is delivered."""
_PIECE_BYTES = 1 << 20
_JOINED_S = 0.02
_RECORD_BYTES = 100
_BUSY_FRAMES = 500  # then other tasks run
_STRUCTURE = b"CR"
"""Messages that count in a transaction that is passed over: a table is described only once."""
_LSN = re.compile("[0-9A-F]+/[0-9A-F]+")
_UNREAD_S = 60.0
_BEATS_OF_CHECK = 6
"""A check reads the catalogs of all tables: 70 ms of the server for 1,000."""
_RELEASED_S = 2.0
_POLL_S = 0.05
_HELD = """
SELECT pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
  ELSE pg_current_wal_flush_lsn() END, restart_lsn)::bigint
FROM pg_replication_slots WHERE slot_name = ?
"""
_FILL_IN = "start with --on-gap skip, which continues at the slot, and fill in what changed before"


class Position(Struct, frozen=True):
    """Where a capture goes on.

    Attributes:
        slot: its name.
        publication: its oid: changes that were made without it are missing in the stream.
        system, timeline: of the server, see `System`.
        lsn: everything before it is in Kafka, such as `0/16B3748`.
    """

    slot: str
    publication: int
    system: str
    timeline: int
    lsn: str


_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(Position).decode


class PostgresSource:
    """Committed transactions of a database, from its replication slot, in the order of commits.

    Args:
        on_gap: "skip": where changes were lost, go on with those that are left, instead of
            stopping.
        skip: ids of changes, as errors name them, that are left out.
        beat_s: how often the server is asked for an answer and the set-up is checked, seconds.
        held_max_s: how long another process may hold the slot, seconds: a server notices a host
            that has vanished only after its `wal_sender_timeout`.
    """

    def __init__(
        self,
        mapping: CaptureMapping,
        database: Postgres,
        *,
        on_gap: Literal["stop", "skip"] = "stop",
        skip: Collection[str] = (),
        beat_s: float = 10.0,
        held_max_s: float = 90.0,
    ) -> None:
        self._mapping = mapping
        self._database = database
        self._skips_gaps = on_gap == "skip"
        self._conversion = Conversion(mapping, skip)
        self._beat_s = beat_s
        self._held_max_s = held_max_s
        self._held_since_s = 0.0
        self._slot = pgfacts.name_of(mapping)
        self._publication = 0
        self._system = System("", 0, 0)
        self._reader: _Reader | None = None
        self._beat: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._delivered = 0
        self._delivered_s = 0.0
        self._unplaced = False

    # --- beginning ---------------------------------------------------------------------------

    async def resume(self, position: bytes | None) -> None:
        """Connect, and begin after a position, or at the slot's; see `Source`."""
        await self.close()
        stream = PgStream(self._database, self._slot)
        try:
            self._system = await stream.open()
            self._publication, slot = await self._free_slot()
            begin = await self._begin(position, stream, slot)
            await stream.start(begin, self._slot, messages=self._mapping.emitted)
        except BaseException:
            await stream.close()
            raise
        self._failure = None
        self._delivered, self._delivered_s = begin, time.monotonic()
        self._unplaced = self._place(begin) != position
        self._reader = _Reader(stream, self._mapping, self._conversion, slot.database, begin)
        self._beat = asyncio.create_task(self._beats(stream), name=f"capture {self._mapping.name}")

    async def _free_slot(self) -> tuple[int, pgfacts.Slot]:
        """Return the oid of the publication, and the slot once no other process uses it.

        Raises:
            ConfigurationError: the capture cannot run.
            DatabaseUnavailable: the slot may become free soon.
        """
        until_s = time.monotonic() + _RELEASED_S
        while True:
            facts = await self._checked()
            slot, publication = facts.slot, facts.publication
            assert slot is not None
            assert publication is not None
            now_s = time.monotonic()
            if not slot.active_pid:
                self._held_since_s = 0.0
                return publication.oid, slot
            self._held_since_s = self._held_since_s or now_s
            held = (
                f"{self._database.name}: the server's process {slot.active_pid} uses {self._slot}"
            )
            if now_s - self._held_since_s > self._held_max_s:
                raise ConfigurationError(
                    f"{held}: two captures have the name {self._mapping.name}: stop one, or give "
                    "it another name"
                )
            if now_s > until_s:
                raise DatabaseUnavailable(f"{held}: another capture of this name has not ended")
            await asyncio.sleep(_POLL_S)

    async def _checked(self) -> pgfacts.Facts:
        """Return the facts of the catalogs.

        Raises:
            ConfigurationError: the capture cannot run.
            DatabaseUnavailable
        """
        facts = await self._database.ask(pgfacts.read(self._mapping))
        problem = pgfacts.running_problem(facts, self._mapping)
        if problem:
            raise ConfigurationError(f"{self._database.name}: {problem}")
        return facts

    async def _begin(self, stored: bytes | None, stream: PgStream, slot: pgfacts.Slot) -> int:
        """Return where to begin, an LSN.

        Raises:
            ConfigurationError: changes after the stored position are lost.
        """
        if stored is None:
            return slot.confirmed
        try:
            position = _decode(stored)
            lsn = parse_lsn(position.lsn)
        except (msgspec.MsgspecError, ValueError):
            raise ConfigurationError(
                f"the position of {self._mapping.name} in Kafka is none of a PostgreSQL slot: "
                "another relay has this name: give this capture another one"
            ) from None
        gap = ""
        if position.slot != self._slot:
            gap = f"Kafka's position is of slot {position.slot}, not of {self._slot}"
        elif position.system != self._system.id:
            gap = "this is another server than the one that Kafka's position is of"
        elif position.publication != self._publication:
            gap = self._created_again()
        elif min(self._system.wal_end, await stream.left_at(position.timeline)) < lsn:
            gap = (
                f"the server's history does not contain Kafka's position {position.lsn}: it was "
                "restored from a backup, or a standby took over that lacked the last changes"
            )
        elif slot.confirmed > lsn:
            gap = (
                f"slot {self._slot} begins at {lsn_text(slot.confirmed)}, after Kafka's position "
                f"{position.lsn}: it was created again or advanced, and changes are lost"
            )
        if not gap:
            return lsn
        if not self._skips_gaps:
            raise ConfigurationError(f"{self._database.name}: {gap}: {_FILL_IN}")
        log.warning("capture skips a gap", capture=self._mapping.name, gap=gap)
        return slot.confirmed

    # --- reading -----------------------------------------------------------------------------

    async def next(self) -> Delivery:
        """Wait for a transaction with messages; see `Source`."""
        reader = self._running()
        while not reader.messages:
            if not reader.inside and self._position_is_due(reader):
                return _Delivery(self._pieces, self._place(reader.end))
            if not await reader.advance():
                await self._wait(reader)
        return _Delivery(self._pieces)

    def _position_is_due(self, reader: _Reader) -> bool:
        if self._unplaced:
            return True
        if reader.end <= self._delivered:
            return False
        return reader.stream.asked or time.monotonic() - self._delivered_s >= _IDLE_S

    async def _pieces(self, delivery: _Delivery) -> AsyncIterator[Sequence[Message]]:
        """Yield the messages that were read, with the rest of their transaction, joined with the
        transactions that have arrived by then."""
        reader = self._running()
        until_s = time.monotonic() + _JOINED_S
        full = False
        while True:
            if reader.size >= _PIECE_BYTES:
                full = True
                yield reader.taken()
            if not reader.inside and (full or time.monotonic() > until_s):
                break
            if not await reader.advance():
                if not reader.inside:
                    break
                await self._wait(reader)
        if reader.messages:
            yield reader.taken()
        delivery.position = self._place(reader.end)

    def _place(self, lsn: int) -> bytes:
        system, publication = self._system, self._publication
        return _encode(Position(self._slot, publication, system.id, system.timeline, lsn_text(lsn)))

    def _created_again(self) -> str:
        return f"publication {self._slot} was created again, and changes before that may be lost"

    def _running(self) -> _Reader:
        if self._failure is not None:
            raise self._failure
        assert self._reader is not None, "resume() comes first"
        return self._reader

    async def _wait(self, reader: _Reader) -> None:
        await reader.stream.readable(_IDLE_S)
        self._running()

    # --- after Kafka -------------------------------------------------------------------------

    async def delivered(self, delivery: Delivery) -> None:
        """Let the server forget what Kafka has."""
        self._delivered = parse_lsn(_decode(delivery.position).lsn)
        self._delivered_s = time.monotonic()
        self._unplaced = False
        stream = self._running().stream
        stream.asked = False
        stream.report(self._delivered)

    async def refused(self, delivery: Delivery, refusals: Sequence[Refusal]) -> None:
        """Raise: a transaction is delivered whole."""
        raise refused_change(refusals[0], _LSN)

    async def lag_bytes(self) -> int:
        """Return how much WAL the slot holds.

        Raises:
            DatabaseUnavailable
        """
        result = await self._database.ask(one(Query(_HELD, (self._slot,))))
        return int(result.rows[0][0] or 0) if result.rows else 0

    async def close(self) -> None:
        """Close the connection; the slot stays."""
        beat, self._beat = self._beat, None
        reader, self._reader = self._reader, None
        if beat is not None:
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)
        if reader is not None:
            await reader.stream.close()

    async def _beats(self, stream: PgStream) -> None:
        """Ask the server for an answer, and check the set-up: a table that is removed from the
        publication is not noticed otherwise. While Kafka does not answer the server is not asked,
        and ends the connection, which would keep it from shutting down."""
        for beat in count(1):
            await asyncio.sleep(self._beat_s)
            try:
                if time.monotonic() - stream.read_s < _UNREAD_S:
                    stream.report(ask=True)
                if beat % _BEATS_OF_CHECK:
                    continue
                facts = await self._checked()
                if facts.publication and facts.publication.oid != self._publication:
                    raise ConfigurationError(
                        f"{self._database.name}: {self._created_again()}: {_FILL_IN}"
                    )
            except DatabaseUnavailable:
                continue  # if it lasts, the reader notices it
            except Exception as error:
                self._failure = error
                stream.wake()
                return


class _Delivery:
    """Transactions, read while they are taken; without messages if the position is known."""

    def __init__(
        self,
        pieces: Callable[[_Delivery], AsyncIterator[Sequence[Message]]],
        position: bytes = b"",
    ) -> None:
        self._pieces = pieces
        self.position = position

    async def pieces(self) -> AsyncIterator[Sequence[Message]]:
        """Yield the messages; see `Delivery`."""
        if not self.position:
            async for piece in self._pieces(self):
                yield piece


class _Reader:
    """Turns the changes of one stream into messages.

    Args:
        database: its name.
        begin: what committed before it is passed over, an LSN.

    Attributes:
        messages, size: those that were read and not taken; bytes.
        inside: whether the end of a transaction is to come.
    """

    def __init__(
        self,
        stream: PgStream,
        mapping: CaptureMapping,
        conversion: Conversion,
        database: str,
        begin: int,
    ) -> None:
        self.stream = stream
        self.messages: list[Message] = []
        self.size = 0
        self.inside = False
        self._conversion = conversion
        self._facts = {"kind": "postgresql", "database": database}
        self._begin = begin
        self._decode = Decoder({(each.schema, each.table) for each in mapping.tables}).decode
        self._transaction = TransactionInfo("", 0, self._facts)
        self._number = 0
        self._passing = False
        self._turns = 0

    @property
    def end(self) -> int:
        """Everything before it was read; an LSN."""
        return self.stream.wal_end

    def taken(self) -> list[Message]:
        """Return the messages and forget them."""
        messages, self.messages, self.size = self.messages, [], 0
        return messages

    async def advance(self) -> bool:
        """Read the frames that have arrived, up to a transaction's end or a piece; return whether
        there were any.

        Raises:
            ConfigurationError, DatabaseUnavailable, PgoutputError
        """
        take, decode = self.stream.take, self._decode
        for turn in range(_BUSY_FRAMES):
            frame = take()
            if frame is None:
                return turn > 0
            if self._passing and frame[DATA_AT] not in _STRUCTURE:
                continue
            event = decode(frame, DATA_AT)
            if type(event) is Change:
                self._add(event)
                if self.size >= _PIECE_BYTES:
                    return True
            elif event is not None and self._follow(event):
                return True
        await asyncio.sleep(0)  # others run, too
        return True

    def _follow(self, event: Event) -> bool:
        """Return whether a transaction has ended."""
        if isinstance(event, Begin):
            self.inside = True
            self._passing = event.lsn < self._begin
            self._transaction = TransactionInfo(
                lsn_text(event.lsn), event.time_ms, {**self._facts, "xid": event.xid}
            )
            self._number = 0
        elif isinstance(event, Commit):
            self.inside = self._passing = False
            self.stream.wal_end = max(self.stream.wal_end, event.end_lsn)
            return True
        elif isinstance(event, LogicalMessage):
            self._emitted(event)
        elif isinstance(event, tuple):
            for change in event:
                self._add(change)
        return False

    def _add(self, change: Change | Emitted) -> None:
        number = self._number
        self._number = number + 1
        for message in self._conversion.messages(self._transaction, number, change):
            self.messages.append(message)
            self.size += len(message.key or b"") + len(message.value or b"") + _RECORD_BYTES

    def _emitted(self, message: LogicalMessage) -> None:
        if message.prefix != PREFIX:
            return
        if message.transactional:
            self._add(Emitted(message.content))
            return
        change_id = f"{lsn_text(message.lsn)}/0"
        if message.lsn >= self._begin and not self._conversion.skips(change_id):
            raise ConfigurationError(
                f"change {change_id}: pg_logical_emit_message(false, '{PREFIX}', …) belongs to no "
                "transaction and would be visible even after a rollback: pass true; to leave this "
                f"one out, run with --skip {change_id}"
            )
