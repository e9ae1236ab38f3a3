"""The mapping file of a capture: which changes of which tables become messages.

`docs/how-to/capture.md` describes each key.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from txbroker.contract.json import MessageError, decode_messages
from txbroker.core.encoding import DEFAULT_PREFIX, ID_HEADER, INSTALLATION_HEADER
from txbroker.core.records import Message
from txbroker.door.owners import own_by_name
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.changes import (
    CapturedTable,
    Change,
    Emitted,
    Operation,
    TransactionInfo,
    Unshown,
)
from txbroker.relay.capture.envelope import TableWriter, identified

DATABASE_VARIABLE = "TXBROKER_DATABASE_URL"
_NAME = re.compile(r"[a-z0-9-]{1,40}")
"""What can be a part of the names of slot, publication, triggers and topics."""
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_OPERATIONS: tuple[Operation, ...] = get_args(Operation)
_SCHEMAS = {"postgresql": "public", "postgres": "public", "sqlite": "main"}
"""The schema of tables that are named without one, by the scheme of the URL; MariaDB's is the
database."""


class TableMapping(Struct, frozen=True, kw_only=True):
    """An entry of `[[tables]]`.

    Attributes:
        key: columns of a JSON object, or one column whose text is the key; None: the primary key.
        column: the value is this column's alone.
        binary: that column is binary.
        tombstones: a delete becomes a record without value.
        headers: fixed texts.
        header_columns: columns by the header's name.
        accept: changes that the database's log does not show, and that may be missing.
    """

    table: str
    topic: str
    key: list[str] | str | None = None
    column: str | None = None
    binary: bool = False
    operations: list[Operation] = msgspec.field(
        default_factory=lambda: ["insert", "update", "delete"]
    )
    before: bool = False
    tombstones: bool = False
    headers: dict[str, str] = {}
    header_columns: dict[str, str] = {}
    accept: list[Unshown] = []


class _File(Struct, frozen=True, kw_only=True):
    name: str
    database: str = ""
    kafka: str = ""
    topic_prefix: str = DEFAULT_PREFIX
    emitted: bool = False
    tables: list[TableMapping] = []


class TableMappings:
    """A mapping that was checked; see `CaptureMapping`.

    Attributes:
        database: the URL.
        kafka: bootstrap servers, "" if the file names none.
        topic_prefix: of the topic that holds the position.
        writers: by schema and table.
    """

    def __init__(self, file: _File, database: str, writers: Sequence[TableWriter]) -> None:
        self.name = file.name
        self.database = database
        self.kafka = file.kafka
        self.topic_prefix = file.topic_prefix
        self.emitted = file.emitted
        self.writers = {(each.schema, each.table): each for each in writers}
        self._file = file
        self._installation = (INSTALLATION_HEADER, self.name.encode())

    @property
    def tables(self) -> Sequence[CapturedTable]:
        return list(self.writers.values())

    def with_keys(self, keys: Mapping[tuple[str, str], Sequence[str]]) -> TableMappings:
        """Return the mapping with the key of each table.

        Args:
            keys: the columns of primary keys by schema and table; () if there is none.

        Raises:
            ConfigurationError: a table does not exist, or has no key.
        """
        writers = []
        for (schema, table), writer in self.writers.items():
            found = keys.get((schema, table))
            if found is None:
                raise ConfigurationError(
                    f"table {schema}.{table} of capture {self.name} does not exist, or this user "
                    "may not read it: create it, correct its name, or grant SELECT on it"
                )
            if not (writer.key or found):
                raise ConfigurationError(
                    f"table {schema}.{table} has no primary key: name the columns that identify a "
                    'row in the mapping, such as key = ["id"]'
                )
            writers.append(writer.with_key(writer.key or tuple(found)))
        return TableMappings(self._file, self.database, writers)

    def messages(
        self, transaction: TransactionInfo, number: int, change: Change | Emitted
    ) -> Sequence[Message]:
        """Return the messages of a change; see `CaptureMapping.messages`."""
        if isinstance(change, Change):
            writer = self.writers.get((change.schema, change.table))
            return () if writer is None else writer.messages(transaction, number, change)
        try:
            found = decode_messages(change.content)
        except MessageError as error:
            raise ConfigurationError(
                f"transaction {transaction.id} emitted invalid messages with "
                f"pg_logical_emit_message: {error}: correct the program that emits them; a capture "
                "with another name begins after this transaction"
            ) from None
        return [
            Message(
                each.topic,
                each.key,
                each.value,
                (
                    self._installation,
                    (ID_HEADER, identified(transaction, number, n if n else "")),
                    *each.headers,
                ),
                each.partition,
                each.timestamp_ms,
            )
            for n, each in enumerate(found)
        ]


# --- reading ---------------------------------------------------------------------------------


def read(file: str | Path) -> TableMappings:
    """Read a mapping file.

    Raises:
        ConfigurationError: it cannot be read or is invalid; the message names all that is wrong.
    """
    try:
        given = tomllib.loads(Path(file).read_text())
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{file} is not TOML: {error}: correct it") from None
    faults = [*_unknown(given, _File, ""), *_unknown_of_tables(given.get("tables"))]
    try:
        found = None if faults else msgspec.convert(given, _File)
    except msgspec.ValidationError as error:
        faults.append(str(error).replace("Object missing", "it lacks the").replace("`$.", "`"))
    if not faults and found is not None:
        database = found.database or os.environ.get(DATABASE_VARIABLE, "")
        schema = _default_schema(database)
        writers = [_writer(found.name, each, schema) for each in found.tables]
        faults += _faults(found, database, writers)
        if not faults:
            return TableMappings(found, database, writers)
    raise ConfigurationError(f"{file}: {'; '.join(faults)}")


def _unknown(given: Mapping[str, Any], kind: type[Struct], place: str) -> list[str]:
    faults = []
    for name in given:
        if name not in kind.__struct_fields__:
            near = difflib.get_close_matches(name, kind.__struct_fields__, 1)
            known = f"did you mean {near[0]!r}?" if near else ", ".join(kind.__struct_fields__)
            faults.append(f"{place}there is no key {name!r}: {known}")
    return faults


def _unknown_of_tables(tables: Any) -> Iterable[str]:
    if isinstance(tables, list):
        for number, table in enumerate(tables, 1):
            if isinstance(table, dict):
                place = f"tables, number {number} ({table.get('table', 'without a table')}): "
                yield from _unknown(table, TableMapping, place)


def _default_schema(database: str) -> str:
    parts = urlsplit(database)
    return _SCHEMAS.get(parts.scheme, parts.path.strip("/"))


def _writer(name: str, table: TableMapping, schema: str) -> TableWriter:
    prefix, dot, rest = table.table.partition(".")
    key = [table.key] if isinstance(table.key, str) else table.key or []
    return TableWriter(
        name=name,
        schema=prefix if dot else schema,
        table=rest if dot else table.table,
        topic=table.topic,
        key=tuple(key),
        key_as_text=isinstance(table.key, str),
        column=table.column,
        binary=table.binary,
        operations=frozenset(table.operations),
        before=table.before,
        tombstones=table.tombstones,
        headers=tuple((each, text.encode()) for each, text in table.headers.items()),
        header_columns=tuple(table.header_columns.items()),
        accept=frozenset(table.accept),
    )


def _faults(file: _File, database: str, writers: Sequence[TableWriter]) -> list[str]:
    faults = []
    if not _NAME.fullmatch(file.name):
        faults.append(f"name {file.name!r}: use 1 to 40 lowercase letters, digits and dashes")
    if not database:
        faults.append(f"no database: add database = 'URL', or set {DATABASE_VARIABLE}")
    if not (writers or file.emitted):
        faults.append("nothing is captured: add [[tables]], or emitted = true on PostgreSQL")
    seen = set()
    for each, given in zip(writers, file.tables, strict=True):
        place = f"table {given.table!r}: "
        if (each.schema, each.table) in seen:
            faults.append(f"{place}it is mapped twice: one entry is enough")
        seen.add((each.schema, each.table))
        faults += (f"{place}{fault}" for fault in _table_faults(each, given, file.topic_prefix))
    return faults


def _table_faults(writer: TableWriter, given: TableMapping, prefix: str) -> Iterable[str]:
    if not writer.table or not writer.schema:
        yield "name it as 'schema.table'"
    if not _TOPIC.fullmatch(given.topic):
        yield f"topic {given.topic!r}: use 1 to 249 letters, digits, dots, dashes and underscores"
    if cause := own_by_name(given.topic, prefix):
        yield cause.message
    if given.key is not None and not (given.key and all(writer.key)):
        yield "key names no column: name some, or leave it out to use the primary key"
    if len(set(writer.key)) != len(writer.key):
        yield "key names a column twice"
    if not given.operations:
        yield f"operations is empty: name some of {', '.join(_OPERATIONS)}"
    if given.binary and given.column is None:
        yield "binary is for a single column: name it by column"
    if given.column is not None and given.before:
        yield "before is for whole rows: leave out column or before"
    for header in (*given.headers, *given.header_columns):
        if header.startswith("txb-"):
            yield f"header {header!r}: names with 'txb-' are txbroker's: choose another"
