"""MariaDB's binary log as a stream of transactions, read by mysql-replication. All calls block.

The position is the last GTID of every domain: given a file and an offset, mysql-replication begins
at the start of a MariaDB's binary log. It also connects again after an error, to the position at
which it began, and so repeats: here a stream ends with the first lost connection.
"""

from __future__ import annotations

import logging
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias
from zlib import crc32

import msgspec
import pymysql
from msgspec import Struct
from pymysqlreplication import BinLogStreamReader
from pymysqlreplication.event import (
    ExecuteLoadQueryEvent,
    HeartbeatLogEvent,
    MariadbGtidEvent,
    NotImplementedEvent,
    QueryEvent,
    RotateEvent,
    XidEvent,
)
from pymysqlreplication.exceptions import StatusVariableMismatch
from pymysqlreplication.row_event import (
    DeleteRowsEvent,
    RowsEvent,
    TableMapEvent,
    UpdateRowsEvent,
    WriteRowsEvent,
)

from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.mariadb import MariaDB
from txbroker.databases.steps import Query, Steps
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.changes import CapturedTable, Change, Operation, TransactionInfo
from txbroker.relay.capture.maria.charsets import Charsets
from txbroker.relay.capture.maria.rows import RowReader, Unreadable
from txbroker.relay.capture.maria.statements import Statement, read_statement, statement_gap
from txbroker.relay.capture.mariadb_setup import MariaFacts
from txbroker.relay.capture.setup import Gap

HEARTBEAT_S = 1.0
"""How often a server without events shows that it is alive."""
_SILENT_S = 30
_STANDALONE, _PREPARED_XA = 1, 64
"""Flags of a GTID event."""
_COMPRESSED = range(165, 172)
_LOST = 26
_OF_FILES = (9, 11)
"""Parts of `LOAD DATA` as a statement, which has another event, too."""
_IGNORABLE = 0x80
"""Types and a flag of events that mysql-replication does not know, and would drop."""
_HEADER_BYTES = 20
_QUERY_BYTES = 13
"""Before an event, and in a statement before its variables."""
_PURGED, _DENIED, _SAME_ID = 1236, 1227, 4052
_EVENTS = (
    MariadbGtidEvent,
    TableMapEvent,
    WriteRowsEvent,
    UpdateRowsEvent,
    DeleteRowsEvent,
    QueryEvent,
    ExecuteLoadQueryEvent,
    XidEvent,
    RotateEvent,
    HeartbeatLogEvent,
    NotImplementedEvent,
)
_OPERATIONS: Mapping[type, Operation] = {
    WriteRowsEvent: "insert",
    UpdateRowsEvent: "update",
    DeleteRowsEvent: "delete",
}
_OF_STATEMENTS = (TableMapEvent, QueryEvent, ExecuteLoadQueryEvent, *_OPERATIONS)


def _pass_over_variables(self: Any, key: int) -> None:
    """Read a variable of a statement, or pass over the rest if it is not known: newer servers
    write more, behind those that are read here."""
    if not hasattr(self, "_variables_end"):
        self._variables_end = self.packet.read_bytes - 1 + self.status_vars_length
    try:
        _read_variable(self, key)
    except StatusVariableMismatch:
        self.packet.read(self._variables_end - self.packet.read_bytes)


_read_variable = QueryEvent._read_status_vars_value_for_key
QueryEvent._read_status_vars_value_for_key = _pass_over_variables
# It warns of each connection that it loses.
logging.getLogger("pymysqlreplication").setLevel(logging.ERROR)


class NotCompared(DatabaseUnavailable):
    """The last transaction of a position was purged; those after it may be there."""


class ChangesLost(ConfigurationError):
    """What follows the position cannot be read: changes are lost."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(
            f"{name}: {problem}; to go on with the changes from now on, start with on_gap=skip, "
            "and fill in what changed before"
        )


class BinlogPlace(NamedTuple):
    """A place in the files of the log."""

    file: str
    offset: int

    def __str__(self) -> str:
        return f"{self.file}:{self.offset}"

    def bytes_to(self, end: BinlogPlace, file_bytes: int) -> int:
        """Return the bytes up to another place, about.

        Args:
            file_bytes: of a whole file, at most.
        """
        files = int(end.file.rpartition(".")[2]) - int(self.file.rpartition(".")[2])
        return max(0, files * file_bytes + end.offset - self.offset)


def log_end(scope: Literal["GLOBAL", "SESSION"]) -> Steps[BinlogPlace]:
    """Return the end of the binary log; of a session with a consistent snapshot, that at its
    snapshot."""
    found = yield Query(f"SHOW {scope} STATUS LIKE ?", ("binlog_snapshot%",))
    shown = {name.lower(): value for name, value in found.rows}
    return BinlogPlace(shown["binlog_snapshot_file"], int(shown["binlog_snapshot_position"]))


class Interrupted(DatabaseUnavailable):
    """A transaction was not read to its end.

    Attributes:
        place: after its GTID.
        problem: the text without the database.
        crashed: it has none: the server crashed while it wrote it, and rolled it back.
        compared: the last transaction of the position was found before it.
        moved: another one was read to its end before it.
    """

    def __init__(
        self,
        name: str,
        cause: str,
        place: BinlogPlace,
        *,
        crashed: bool,
        compared: bool,
        moved: bool,
    ) -> None:
        self.problem = f"the transaction at {place} of the binary log was not read whole: {cause}"
        super().__init__(f"{name}: {self.problem}")
        self.place = place
        self.crashed = crashed
        self.compared = compared
        self.moved = moved


class BinlogPosition(Struct, frozen=True, omit_defaults=True):
    """Where a capture goes on, as JSON in Kafka.

    A log that was reset begins with low GTIDs again, which a server later has once more. So the
    last transaction is read again at a start, and compared.

    Attributes:
        gtids: of every domain, after the last transaction.
        before: the same before it; "": it was the first of the log.
        last: its GTID.
        time_s: of its commit, by the server's clock; on a replica of its last statement.
        first_s: of its first statement on captured tables, which is that of its replicas, too; 0:
            it has none.
        rows: digests of the captured tables' names, and of their rows in it; "": not known.
    """

    gtids: str
    before: str = ""
    last: str = ""
    time_s: int = 0
    first_s: int = 0
    rows: str = ""


class Committed(Struct, frozen=True, gc=False):
    """The end of a transaction, and the position after it."""

    position: bytes
    place: BinlogPlace


class Alive(Struct, frozen=True, gc=False):
    """The server is alive, and has nothing new."""


class TablesChanged(Struct, frozen=True, gc=False):
    """A statement may have changed the definition of a captured table."""


Event: TypeAlias = "TransactionInfo | Change | Gap | TablesChanged | Committed | Alive"


encode, _decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(BinlogPosition).decode


def gtids(text: str) -> dict[int, str]:
    """Return the GTID of each domain in a list such as `0-1-100,5-1-7`.

    Raises:
        ValueError
    """
    return {int(each.split("-")[0]): each for each in text.replace("\n", "").split(",") if each}


class Binlog:
    """A connection that reads the binary log.

    Args:
        tables: whose rows are wanted.
        facts: of the server.
        position: where to begin; with `before` the last transaction is compared first.
        skips: returns whether an operator leaves the transaction with this GTID out.

    Attributes:
        facts: to be replaced after `TablesChanged`.
    """

    def __init__(
        self,
        database: MariaDB,
        tables: Sequence[CapturedTable],
        facts: MariaFacts,
        position: BinlogPosition,
        skips: Callable[[str], bool],
    ) -> None:
        self._name = database.name
        self._options = database.options
        self._tables = tables
        self._wanted = {(each.schema, each.table) for each in tables}
        self.facts = facts
        self._charsets = Charsets(facts.collations, self._ask)
        self._compared = position if position.before else None
        """The position whose last transaction is to be read again, as the first of its domain."""
        self._passing = False
        """The transaction is that one, and only compared."""
        self._skips, self._skipped = skips, False
        self._open: BinlogPlace | None = None
        """After the GTID of the transaction that was not read to its end."""
        self._found = self._moved = False
        """The last transaction of the position was found, and another one was read."""
        start = position.before or position.gtids
        self._position = gtids(position.gtids)
        self._connections: list[Any] = []
        self._readers: dict[int, RowReader] = {}
        self._ours = False
        """Whether the transaction has changed a wanted table."""
        self._names = crc32(repr(sorted(self._wanted)).encode())
        self._rows = self._first_s = 0
        """Digest of the transaction's rows of wanted tables, and the time of its first statement:
        a replica has the same."""
        self._stream = BinLogStreamReader(
            connection_settings={"read_timeout": _SILENT_S},
            # Another reader with the same number would end this one.
            server_id=secrets.randbelow(2**31) + 2**31,
            blocking=True,
            only_events=_EVENTS,
            filter_non_implemented_events=False,
            auto_position=start,
            is_mariadb=True,
            only_schemas={each.schema for each in tables},
            only_tables={each.table for each in tables},
            # A table's number changes with its columns, until the server restarts: see
            # `_forget_tables`.
            freeze_schema=True,
            slave_heartbeat=HEARTBEAT_S,
            pymysql_wrapper=self._connect,
            enable_logging=False,
        )

    def close(self) -> None:
        """Close the connections, also while another thread reads."""
        for connection in self._connections:
            with suppress(Exception):
                connection._sock.shutdown(socket.SHUT_RDWR)
            with suppress(Exception):
                connection.close()

    def read(self) -> Iterator[Event]:
        """Yield what happens: of each transaction `TransactionInfo`, its changes, `Committed`.

        Raises:
            ConfigurationError: the log does not have what follows the position, or holds changes
                that cannot be captured.
            DatabaseUnavailable: the connection is lost.
        """
        info: TransactionInfo | None = None
        begun: MariadbGtidEvent | None = None
        flags = 0
        while True:
            event = self._next()
            kind = type(event)
            if kind is HeartbeatLogEvent:
                yield Alive()
                continue
            if kind in (MariadbGtidEvent, RotateEvent):
                if info is not None:
                    if not flags & _PREPARED_XA:
                        raise self._interruption("the server crashed", crashed=True)
                    yield from self._end(info)
                info = begun = self._open = None
                if kind is RotateEvent:
                    self._forget_tables()
                else:
                    flags, begun, self._open = event.flags, event, self._place()
                continue
            if begun is not None:
                info = self._begin(begun, event)
                begun = None
                if not self._passing:
                    yield info
                    self._skipped = self._skips(info.id)
            if kind is TableMapEvent:
                self._describe(event)
            elif kind is NotImplementedEvent:
                self._check_known(event)
            elif info is None:
                continue  # before the first transaction
            elif kind is XidEvent:
                yield from self._end(info)
                info = None
            elif kind is ExecuteLoadQueryEvent:
                if not (self._passing or self._skipped):
                    yield statement_gap(self._tables, "LOAD DATA")
            elif kind is QueryEvent:
                if self._skipped:
                    yield TablesChanged()  # perhaps
                elif not self._passing:
                    yield from self._statement(event, info)
                if flags & _STANDALONE or _ends(event):
                    yield from self._end(info)
                    info = None
            else:
                if flags & _PREPARED_XA and not (self._passing or self._skipped):
                    self._refuse_xa(event, info)
                yield from self._changes(event)

    def lost(self, error: Exception) -> ChangesLost:
        """Return the error of changes that are lost."""
        return ChangesLost(self._name, str(error))

    # --- the connection ----------------------------------------------------------------------

    def _connect(self, **options: Any) -> Any:
        """Open the stream's connection, then that for its questions; the third is a repetition."""
        if len(self._connections) == 2:
            raise self._interruption("the connection to the binary log was lost")
        connection = pymysql.connect(**{**self._options, **options})
        self._connections.append(connection)
        return connection

    def _ask(self, sql: str) -> str:
        """Return the one value that a query finds."""
        try:
            with self._connections[1].cursor(pymysql.cursors.Cursor) as cursor:
                cursor.execute(sql)
                return str(cursor.fetchone()[0])
        except (pymysql.MySQLError, OSError) as error:
            raise DatabaseUnavailable(f"{self._name}: {error}") from error

    def _next(self) -> Any:
        try:
            event = self._stream.fetchone()
        except (ConfigurationError, DatabaseUnavailable):
            raise
        except pymysql.MySQLError as error:
            raise self._explain(error) from error
        except (OSError, struct.error) as error:
            raise self._interruption(str(error)) from error
        except Exception as error:
            raise self._unreadable(error) from error
        if event is None:
            raise self._interruption("the server has ended the binary log")
        return event

    def _place(self) -> BinlogPlace:
        """Return the place after the last event that was read."""
        return BinlogPlace(self._stream.log_file or "", self._stream.log_pos or 0)

    def _interruption(self, cause: str, *, crashed: bool = False) -> DatabaseUnavailable:
        if self._open is None:
            return DatabaseUnavailable(f"{self._name}: {cause}")
        return Interrupted(
            self._name,
            cause,
            self._open,
            crashed=crashed,
            compared=self._found,
            moved=self._moved,
        )

    def _unreadable(self, error: Exception) -> ChangesLost:
        after = ",".join(self._position.values()) or "the start"
        return ChangesLost(
            self._name,
            f"an event of the binary log after {after} cannot be read: {type(error).__name__}: "
            f"{error}: report it",
        )

    def _explain(self, error: pymysql.MySQLError) -> Exception:
        number, text = (*error.args, "", "")[:2]
        if number == _DENIED:
            return ConfigurationError(
                f"{self._name}: {text}: GRANT REPLICATION SLAVE ON *.* TO this user"
            )
        if number != _PURGED:
            return self._interruption(text or str(error))
        if "purged" in text and self._compared is not None:
            return NotCompared(f"{self._name}: the last transaction is no longer in the log")
        if "purged" in text:
            return ChangesLost(
                self._name,
                "the binary log no longer has what follows the position "
                f"{','.join(self._position.values())}: keep it longer with "
                "binlog_expire_logs_seconds",
            )
        if "not in the master's binlog" in text:
            return unknown_position(self._name, ",".join(self._position.values()))
        if "truncated" in text and self._open is not None:
            return self._interruption(text, crashed=True)
        where = f"the server ends the binary log after {self._place()}"
        return ChangesLost(self._name, f"{where}: {text}")

    def _forget_tables(self) -> None:
        """Forget all tables: a server that was restarted gives their numbers again."""
        self._stream.table_map = {}
        self._readers.clear()

    # --- events ------------------------------------------------------------------------------

    def _begin(self, begun: MariadbGtidEvent, first: Any) -> TransactionInfo:
        """Return the transaction that a GTID begins.

        Args:
            first: the event after it: its first statement on captured tables, or its end.
        """
        domain = int(begun.gtid.split("-")[0])
        last = self._compared
        self._passing = last is not None and domain == int(last.last.split("-")[0])
        self._check_order(begun.gtid)
        of_statement = isinstance(first, _OF_STATEMENTS) and not _ends(first)
        self._first_s = first.timestamp if of_statement else 0
        self._ours, self._rows = False, 0
        return TransactionInfo(
            begun.gtid,
            begun.timestamp * 1000,
            {"kind": "mariadb"},
            (self._first_s or begun.timestamp) * 1000,
        )

    def _compare(self, info: TransactionInfo, position: BinlogPosition) -> None:
        """Check that a transaction is the last one of the position. A replica has an earlier time
        for it, another history a later one."""
        names, rows = position.rows.partition("-")[0], self._digest()
        same = info.id == position.last
        if rows.startswith(f"{names}-") and position.first_s and self._first_s:
            same = same and (rows, self._first_s) == (position.rows, position.first_s)
        else:
            same = same and info.time_ms <= position.time_s * 1000
        if not same:
            raise unknown_position(self._name, position.gtids)

    def _digest(self) -> str:
        return f"{self._names:x}-{self._rows:x}"

    def _end(self, info: TransactionInfo) -> Iterator[Committed]:
        """Yield the end of a transaction, unless it was only compared."""
        self._open = None
        if self._passing:
            assert self._compared is not None
            self._compare(info, self._compared)
            self._compared, self._passing, self._found = None, False, True
            return
        self._moved = True
        before = ",".join(self._position.values())
        self._position[int(info.id.split("-")[0])] = info.id
        after = ",".join(self._position.values())
        time_s, digest = info.time_ms // 1000, self._digest()
        position = BinlogPosition(after, before, info.id, time_s, self._first_s, digest)
        yield Committed(encode(position), self._place())

    def _check_order(self, gtid: str) -> None:
        """Refuse a number that was set by hand: the server may have it twice, and so no place."""
        domain, server, number = map(int, gtid.split("-"))
        last = self._position.get(domain, "")
        if (
            not self._passing
            and last.startswith(f"{domain}-{server}-")
            and number <= int(last.rpartition("-")[2])
        ):
            raise ChangesLost(
                self._name,
                f"transaction {gtid} follows {last} in the binary log, so that positions are not "
                "unique: let no session set gtid_seq_no; SET GLOBAL gtid_strict_mode = ON",
            )

    def _check_known(self, event: NotImplementedEvent) -> None:
        if event.event_type in _COMPRESSED:
            raise ChangesLost(
                self._name,
                "the binary log has compressed events, which a capture cannot read: SET GLOBAL "
                "log_bin_compress = OFF",
            )
        if event.event_type == _LOST:
            raise ChangesLost(self._name, "the server reports that its binary log lacks events")
        if not (event.event_type in _OF_FILES or event.packet.flags & _IGNORABLE):
            raise ChangesLost(
                self._name,
                f"the binary log has an event of type {event.event_type}, which a capture does not "
                "know: report it",
            )

    def _refuse_xa(self, event: RowsEvent, info: TransactionInfo) -> None:
        if (event.schema, event.table) in self._wanted:
            raise ChangesLost(
                self._name,
                f"XA transaction {info.id} changes {event.schema}.{event.table}; whether it is "
                "committed is unknown when the binary log shows its rows, so a capture cannot read "
                "it: use no XA transactions on captured tables; to leave this one out, compare its "
                f"rows with the topic, and run with --skip {info.id}",
            )

    def _statement(self, event: QueryEvent, info: TransactionInfo) -> Iterator[Event]:
        if event.query.startswith("ROLLBACK") and self._ours:
            raise ChangesLost(
                self._name,
                f"transaction {info.id} was rolled back in part, and the binary log has its rows, "
                "because it also changed tables of engines without transactions: change them with "
                "ALTER TABLE … ENGINE=InnoDB; rows of tables with transactions are undone, so to "
                f"leave this transaction out run with --skip {info.id}",
            )
        found = self._read_statement(event)
        for table in found.truncated:
            yield Change(table.schema, table.table, "truncate")
        yield from found.gaps
        if found.defined:
            yield TablesChanged()

    def _read_statement(self, event: QueryEvent) -> Statement:
        end = _HEADER_BYTES + event.event_size
        before = _QUERY_BYTES + event.status_vars_length + event.schema_length + 1
        raw = event.packet.packet.get_all_data()[_HEADER_BYTES + before : end]
        decode = self._charsets.decoder(getattr(event, "character_set_client", 0))
        try:
            text = event.query if decode is None else decode(raw)
        except ValueError:
            text = event.query
        schema = event.schema.decode(errors="replace")
        if self.facts.settings["lower_case_table_names"] != "0":
            text, schema = text.lower(), schema.lower()
        return read_statement(text, schema, self._tables, getattr(event, "sql_mode", 0))

    def _changes(self, event: RowsEvent) -> Iterator[Change]:
        reader = self._readers.get(event.table_id)
        if reader is None:
            return
        self._ours = True
        data = event.packet.packet.read_all()[: event.event_size - event.packet.read_bytes]
        self._rows = crc32(data, self._rows)
        if self._passing or self._skipped:
            return
        _check_whole(self._name, event)
        change = partial(Change, event.schema, event.table, _OPERATIONS[type(event)])
        try:
            rows = reader.rows(data)
            for row, fault in rows:
                if type(event) is UpdateRowsEvent:
                    after, more = next(rows, ({}, "the row after it is missing"))
                    yield change(before=row, after=after, fault=_join(fault, more))
                elif type(event) is WriteRowsEvent:
                    yield change(after=row, fault=fault)
                else:
                    yield change(before=row, fault=fault)
        except Unreadable as error:
            yield change(fault=f"rows of its event cannot be read: {error}")

    def _describe(self, event: TableMapEvent) -> None:
        """Remember how to read the rows of a table, if they are wanted."""
        name = (event.schema, event.table)
        if name in self._wanted:
            self._readers[event.table_id] = RowReader(
                event, self.facts.byte_types(name), self._charsets
            )


def _ends(event: Any) -> bool:
    """Return whether an event is the end of a transaction without an Xid."""
    return type(event) is QueryEvent and event.query in ("COMMIT", "ROLLBACK")


def _join(*faults: str) -> str:
    return "; ".join(dict.fromkeys(filter(None, faults)))


def _check_whole(name: str, event: RowsEvent) -> None:
    """Refuse rows without some of their columns."""
    every = (1 << event.number_of_columns) - 1
    for bitmap in (event.columns_present_bitmap, getattr(event, "columns_present_bitmap2", None)):
        if bitmap is not None and int.from_bytes(bitmap, "little") & every != every:
            raise ChangesLost(
                name,
                f"the binary log has rows of {event.schema}.{event.table} without all columns: set "
                "binlog_row_image = FULL, and let no session change it",
            )


def includes(position: bytes, other: str) -> bool:
    """Return whether a stored position includes GTIDs."""
    own = gtids(_decode(position).gtids)
    return all(
        domain in own and int(own[domain].split("-")[2]) >= int(gtid.split("-")[2])
        for domain, gtid in gtids(other).items()
    )


def unknown_position(name: str, position: str) -> ConfigurationError:
    """Return the error of a server that has never had a position."""
    return ChangesLost(
        name,
        f"this server does not know the position {position}: it is another server, its binary log "
        "was reset, or it was restored from a backup: connect to the server that has it",
    )


def read_position(name: str, stored: bytes) -> BinlogPosition:
    """Return a position of Kafka.

    Raises:
        ConfigurationError: it is none of MariaDB.
    """
    try:
        position = _decode(stored)
        gtids(position.gtids)
    except (msgspec.MsgspecError, ValueError):
        raise ConfigurationError(
            f"{name}: the position in Kafka is no position of MariaDB: {stored[:60]!r}: another "
            "capture has this name; give this one another name"
        ) from None
    return position


def check_position(name: str, position: str, state: str) -> None:
    """Check that a server has written GTIDs.

    MariaDB itself does not refuse a domain that it does not know.

    Args:
        state: its `@@gtid_binlog_state`: GTIDs, several for each domain.

    Raises:
        ConfigurationError
    """
    newest: dict[int, int] = {}
    for each in filter(None, state.replace("\n", "").split(",")):
        domain, _, number = map(int, each.split("-"))
        newest[domain] = max(number, newest.get(domain, 0))
    for domain, gtid in gtids(position).items():
        if int(gtid.split("-")[2]) > newest.get(domain, -1):
            raise unknown_position(name, position)
