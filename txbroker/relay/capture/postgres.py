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

from txbroker.core.records import Message
from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.postgres import Postgres
from txbroker.databases.steps import Query, one
from txbroker.door.placing import Refusal
from txbroker.errors import ConfigurationError, TxbrokerError
from txbroker.relay.capture.changes import CaptureMapping, Change, Emitted, TransactionInfo
from txbroker.relay.capture.conversion import Conversion
from txbroker.relay.capture.envelope import refused_change
from txbroker.relay.capture.pg import facts as pgfacts
from txbroker.relay.capture.pg import position as pgposition
from txbroker.relay.capture.pg.pgoutput import (
    Begin,
    CommitMessage,
    Decoder,
    Event,
    LogicalMessage,
    TableDescribed,
    lsn_text,
    parse_lsn,
)
from txbroker.relay.capture.pg.position import Catalog, LastTransaction, SlotPosition
from txbroker.relay.capture.pg.stream import DATA_AT, PgStream, System, Untranslatable
from txbroker.relay.source import Delivery

log = structlog.wrap_logger(logging.getLogger(__name__))

PREFIX = "txbroker"
"""The prefix of messages that `pg_logical_emit_message` writes for us."""
_IDLE_S = 1.0
"""How often a position without messages is delivered."""
_PIECE_BYTES = 1 << 20
_JOINED_S = 0.02
_RECORD_BYTES = 100
_BUSY_FRAMES = 500  # then other tasks run
_STRUCTURE = b"BCR"
"""Messages that count in transactions that are passed over: a table is described only once."""
_LSN = re.compile("[0-9A-F]+/[0-9A-F]+")
_UNREAD_S = 60.0
_BEATS_OF_CHECK = 6
"""A check reads the catalogs of all tables: 70 ms of the server for 1,000."""
_BETWEEN_CHECKS_S = 0.2
_RELEASED_S = 2.0
_POLL_S = 0.05
_HELD = """
SELECT pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
  ELSE pg_current_wal_flush_lsn() END, restart_lsn)::bigint
FROM pg_replication_slots WHERE slot_name = ?
"""
_FILL_IN = "start with --on-gap skip, which goes on at the slot, and fill in the missing changes"
_OTHER_HISTORY = (
    "the server's history does not contain Kafka's position {}: it was restored from a backup or a "
    "copy, or a standby took over that lacked the last changes"
)


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
        self.conversion = Conversion(mapping, skip)
        self._beat_s = beat_s
        self._held_max_s = held_max_s
        self._held_since_s = 0.0
        self._slot = pgfacts.name_of(mapping)
        self._facts: pgfacts.PgFacts
        self._catalog: Catalog | None = None
        self._system = System("", 0, 0)
        self._reader: _StreamReader | None = None
        self._beat: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._delivered = 0
        self._delivered_s = 0.0
        self._unplaced = False
        self._restored = False
        self._alone = False
        self._altered: asyncio.Future[None]

    # --- beginning ---------------------------------------------------------------------------

    async def resume(self, position: bytes | None) -> None:
        """Connect, and begin after a position, or at the slot's; see `Source`."""
        await self.close()
        stream = PgStream(self._database, self._slot)
        try:
            self._system = await stream.open()
            slot = await self._free_slot()
            begin, last = await self._begin(position, stream, slot)
            gaps = pgfacts.gaps_of_all(self._facts, self._mapping)
            self.conversion.begin(each.step for each in gaps)
            await stream.start(slot.confirmed, self._slot, messages=self._mapping.emitted)
        except BaseException:
            await stream.close()
            raise
        self._failure = None
        self._altered = asyncio.get_running_loop().create_future()
        self._delivered, self._delivered_s = begin, time.monotonic()
        reader = _StreamReader(stream, self._mapping, self.conversion, self._facts, begin, last)
        self._reader = reader
        reader.expected = last is not None and parse_lsn(last.end) > slot.confirmed
        self._unplaced = self._place(begin) != position
        self._beat = asyncio.create_task(self._beats(stream), name=f"capture {self._mapping.name}")

    async def _free_slot(self) -> pgfacts.ReplicationSlot:
        """Return the slot once no other process uses it.

        Raises:
            ConfigurationError: the capture cannot run.
            DatabaseUnavailable: the slot may become free soon.
        """
        until_s = time.monotonic() + _RELEASED_S
        while True:
            self._facts = await self._read_facts()
            slot = self._facts.slot
            assert slot is not None
            now_s = time.monotonic()
            if not slot.active_pid:
                self._held_since_s = 0.0
                return slot
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

    async def _read_facts(self) -> pgfacts.PgFacts:
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

    async def _begin(
        self, stored: bytes | None, stream: PgStream, slot: pgfacts.ReplicationSlot
    ) -> tuple[int, LastTransaction | None]:
        """Return where Kafka's position is, an LSN, and the last transaction before it.

        Raises:
            ConfigurationError: changes after the stored position are lost.
        """
        self._catalog = None
        if stored is None or self._restored:
            self._restored = False
            self._compare(self._facts)
            return slot.confirmed, None
        try:
            position = pgposition.decode(stored)
            lsn = parse_lsn(position.lsn)
            catalog = pgposition.decode_catalog(position.catalog)
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
        elif min(self._system.wal_end, await stream.left_at(position.timeline)) < lsn:
            gap = _OTHER_HISTORY.format(position.lsn)
        elif slot.confirmed > lsn:
            gap = (
                f"slot {self._slot} begins at {lsn_text(slot.confirmed)}, after Kafka's position "
                f"{position.lsn}: it was created again or advanced, and changes are lost"
            )
        if gap:
            self._skip_or_stop(gap)
            self._compare(self._facts)
            return slot.confirmed, None
        self._catalog = catalog
        self._compare(self._facts)
        return lsn, position.last

    def _skip_or_stop(self, gap: str) -> None:
        """Log a gap that is to be skipped.

        Raises:
            ConfigurationError: none is.
        """
        if not self._skips_gaps:
            raise ConfigurationError(f"{self._database.name}: {gap}: {_FILL_IN}")
        log.warning("capture skips a gap", capture=self._mapping.name, gap=gap)

    def _compare(self, facts: pgfacts.PgFacts) -> None:
        """Compare the catalogs with those of the last check.

        Raises:
            ConfigurationError: changes in between may be lost.
        """
        for each in pgposition.unseen(self._catalog, facts, self._mapping):
            if isinstance(each, str):
                self._skip_or_stop(each)
            elif each.accepted:
                self.conversion.accept(each)
            elif self._skips_gaps:
                log.warning("capture skips a gap", capture=self._mapping.name, gap=each.step.text)
            else:
                raise ConfigurationError(f"{self._database.name}: {each.step.text}")
        self._keep(pgposition.catalog_of(facts, self._mapping, self._catalog))

    def _keep(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._encoded = msgspec.Raw(pgposition.encode(catalog))

    # --- reading -----------------------------------------------------------------------------

    async def next(self) -> Delivery:
        """Wait for a transaction with messages; see `Source`."""
        reader = self._running()
        while not reader.messages:
            if not reader.inside and self._position_is_due(reader):
                return _StreamDelivery(self._pieces, self._place(reader.end))
            if not await self._advance(reader):
                await self._wait(reader)
        return _StreamDelivery(self._pieces)

    def _position_is_due(self, reader: _StreamReader) -> bool:
        if reader.expected:
            return False
        if self._unplaced:
            return True
        if reader.end <= self._delivered:
            return False
        return reader.stream.asked or time.monotonic() - self._delivered_s >= _IDLE_S

    async def _pieces(self, delivery: _StreamDelivery) -> AsyncIterator[Sequence[Message]]:
        """Yield the messages that were read, with the rest of their transaction, joined with the
        transactions that have arrived by then."""
        reader = self._running()
        until_s = time.monotonic() + (0 if self._alone else _JOINED_S)
        full = False
        while True:
            if reader.size >= _PIECE_BYTES:
                full = True
                yield reader.taken()
            if not reader.inside and (full or time.monotonic() > until_s):
                break
            if not await self._advance(reader):
                if not reader.inside:
                    break
                await self._wait(reader)
        if reader.messages:
            yield reader.taken()
        delivery.position = self._place(reader.end)

    async def _advance(self, reader: _StreamReader) -> bool:
        """Return whether something had arrived, see `_StreamReader.advance`.

        Raises:
            ConfigurationError, DatabaseUnavailable, PgoutputError
        """
        try:
            arrived = await reader.advance()
        except Untranslatable as error:
            raise self._untranslatable(reader, error) from error
        if reader.elsewhere:
            gap = _OTHER_HISTORY.format(lsn_text(self._delivered))
            self._skip_or_stop(gap)
            self._restored = True
            raise DatabaseUnavailable(f"{self._database.name}: {gap}: the capture begins again")
        if reader.problem:
            self._skip_or_stop(reader.problem)
            reader.problem = ""
        if reader.partitions:
            assert self._catalog is not None
            self._keep(pgposition.with_partitions(self._catalog, reader.partitions))
            reader.partitions = {}
        if reader.altered and not reader.inside and not self._altered.done():
            reader.altered = False
            self._altered.set_result(None)
        return arrived

    def _untranslatable(self, reader: _StreamReader, error: Untranslatable) -> TxbrokerError:
        """Return the error for a transaction that the server cannot send. Those before it are
        delivered first, each alone: it may be skipped only then."""
        name, place = self._database.name, reader.place
        if not self._alone:
            self._alone = True
            return DatabaseUnavailable(f"{name}: transaction {place}: {error}")
        beyond = lsn_text(parse_lsn(place) + 1) if place else "LSN"
        return ConfigurationError(
            f"{name}: transaction {place} has a text that the server cannot send as UTF-8: "
            f"{error}: to leave this transaction out, SELECT "
            f"pg_replication_slot_advance('{self._slot}', '{beyond}'), then start with --on-gap "
            "skip, and fill in what it changed"
        )

    def _place(self, lsn: int) -> bytes:
        system, reader = self._system, self._reader
        assert reader is not None
        return pgposition.encode(
            SlotPosition(
                self._slot, system.id, system.timeline, lsn_text(lsn), reader.last, self._encoded
            )
        )

    def _running(self) -> _StreamReader:
        if self._failure is not None:
            raise self._failure
        assert self._reader is not None, "resume() comes first"
        return self._reader

    async def _wait(self, reader: _StreamReader) -> None:
        await reader.stream.readable(_IDLE_S)
        self._running()

    # --- after Kafka -------------------------------------------------------------------------

    async def delivered(self, delivery: Delivery) -> None:
        """Let the server forget what Kafka has."""
        self._delivered = parse_lsn(pgposition.decode(delivery.position).lsn)
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
        """Ask the server for an answer, and check the set-up: the stream does not show what the
        publication leaves out. While Kafka does not answer the server is not asked, and ends the
        connection, which would keep it from shutting down."""
        for beat in count(1):
            await asyncio.wait((self._altered,), timeout=self._beat_s)
            if altered := self._altered.done():
                self._altered = asyncio.get_running_loop().create_future()
            try:
                if time.monotonic() - stream.read_s < _UNREAD_S:
                    stream.report(ask=True)
                if beat % _BEATS_OF_CHECK and not altered:
                    continue
                self._compare(await self._read_facts())
                await asyncio.sleep(_BETWEEN_CHECKS_S)
            except DatabaseUnavailable:
                continue  # if it lasts, the reader notices it
            except Exception as error:
                self._failure = error
                stream.wake()
                return


class _StreamDelivery:
    """Transactions, read while they are taken; without messages if the position is known."""

    def __init__(
        self,
        pieces: Callable[[_StreamDelivery], AsyncIterator[Sequence[Message]]],
        position: bytes = b"",
    ) -> None:
        self._pieces = pieces
        self.position = position

    async def pieces(self) -> AsyncIterator[Sequence[Message]]:
        """Yield the messages; see `Delivery`."""
        if not self.position:
            async for piece in self._pieces(self):
                yield piece


class _StreamReader:
    """Turns the changes of one stream into messages.

    Args:
        facts: of the start.
        begin: where Kafka's position is, an LSN.
        last: the last transaction before it.

    Attributes:
        messages, size: those that were read and not taken; bytes.
        inside: whether the end of a transaction is to come.
        last: the last transaction that was read.
        expected: whether it is still to be read again: the stream before it is passed over.
        elsewhere: it is missing: this is another history.
        problem: why changes cannot be shown as the mapping wants them; "" if they can.
        altered: a table was described: it may have changed.
        partitions: OIDs of partitions that the last transactions changed, each with its table and
            transaction.
    """

    def __init__(
        self,
        stream: PgStream,
        mapping: CaptureMapping,
        conversion: Conversion,
        facts: pgfacts.PgFacts,
        begin: int,
        last: LastTransaction | None,
    ) -> None:
        self.stream = stream
        self.messages: list[Message] = []
        self.size = 0
        self.inside = False
        self.last = last
        self.expected = self.elsewhere = False
        self.problem = ""
        self.altered = False
        self.partitions: dict[int, tuple[str, int]] = {}
        self._conversion = conversion
        self._source = {"kind": "postgresql", "database": facts.server.database}
        self._begin = begin
        self._tables = {(each.schema, each.table): each for each in mapping.tables}
        oids = {table.oid: place for place, table in facts.tables.items()}
        partitioned = [place for place, table in facts.tables.items() if table.kind == "p"]
        self._decoder = Decoder(self._tables, oids, partitioned, facts.server.money_digits)
        self._transaction = TransactionInfo("", 0, self._source, 0)
        self._xid = 0
        self._number = 0

    @property
    def place(self) -> str:
        """The id of the transaction that was read last."""
        return self._transaction.id

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
        take, decode = self.stream.take, self._decoder.decode
        for turn in range(_BUSY_FRAMES):
            frame = take()
            if frame is None:
                self.elsewhere = not self.inside and self._is_elsewhere(self.stream.wal_end)
                return turn > 0
            if self.expected and frame[DATA_AT] not in _STRUCTURE:
                self._decoder.skip(frame, DATA_AT)
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
            self._xid = event.xid
            source = {**self._source, "xid": event.xid}
            place = lsn_text(event.lsn)
            self._transaction = TransactionInfo(place, event.time_ms, source, event.time_ms)
            self._number = 0
        elif isinstance(event, CommitMessage):
            self._commit(event)
            return True
        elif isinstance(event, TableDescribed):
            table = self._tables[event.schema, event.table]
            self.problem = self.problem or pgfacts.identity_problem(table, event.identity)
            self.altered = True
        elif isinstance(event, LogicalMessage):
            self._emit(event)
        elif isinstance(event, tuple):
            for change in event:
                self._add(change)
        return False

    def _commit(self, commit: CommitMessage) -> None:
        self.inside = False
        found = LastTransaction(lsn_text(commit.end_lsn), self._xid, self._transaction.time_ms)
        if not self.expected:
            self.last = found
            for oid, place in self._decoder.partitions.items():
                self.partitions[oid] = ".".join(place), self._xid
        elif found == self.last:
            self.expected = False
        else:
            self.elsewhere = self._is_elsewhere(commit.end_lsn)
        self._decoder.partitions.clear()
        self.stream.wal_end = max(self.stream.wal_end, commit.end_lsn)

    def _is_elsewhere(self, read: int) -> bool:
        """Return whether the last transaction is missing in all that was read, up to an LSN."""
        return self.expected and self.last is not None and parse_lsn(self.last.end) <= read

    def _add(self, change: Change | Emitted) -> None:
        number = self._number
        self._number = number + 1
        for message in self._conversion.messages(self._transaction, number, change):
            self.messages.append(message)
            self.size += len(message.key or b"") + len(message.value or b"") + _RECORD_BYTES

    def _emit(self, message: LogicalMessage) -> None:
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
