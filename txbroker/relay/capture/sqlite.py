"""Capture on SQLite: triggers that write outbox rows, which the relay of that outbox delivers.

A trigger cannot know where a transaction begins. Its rows have the end of the relay's lease as
their unit: it changes only in write transactions of the relay, and SQLite has one writer at a time,
so all rows of one transaction have the same unit, and become visible together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from txbroker.databases.dialect import SQLITE
from txbroker.databases.outbox.table import OUTBOX, RELAY, outbox_tables
from txbroker.databases.sqlite import SQLite
from txbroker.databases.steps import Query, Steps
from txbroker.databases.tables import check
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.changes import Operation
from txbroker.relay.capture.envelope import TableWriter
from txbroker.relay.capture.mapping import TableMappings
from txbroker.relay.capture.setup import NO_EMITTED, Gap, Step, StepState, refusals

_FLOAT_MAX = "1.7976931348623157e308"
_PREFIX = "txbroker_capture_"


class Trigger(Struct, frozen=True):
    """A trigger, as it should be: SQLite stores its SQL as it was written."""

    name: str
    table: str
    sql: str


class SqliteFacts(Struct, frozen=True):
    """The findings of `_look`.

    Attributes:
        columns: of each table that exists, with their place in the primary key, 0 if none.
        unique: the columns of its unique indexes, None for an expression or a collation.
        triggers: SQL of the capture's triggers by name.
        outbox: why the outbox tables cannot be used; "" if they can.
        missing: whether they are missing.
    """

    columns: Mapping[tuple[str, str], Sequence[tuple[str, int]]]
    unique: Mapping[tuple[str, str], Mapping[str, set[str | None]]]
    triggers: Mapping[str, str]
    outbox: str
    missing: bool


async def keys(mapping: TableMappings, database: SQLite) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the columns of primary keys; see `setup.CaptureSetup`."""
    found = await database.ask(_look(mapping, database.name))
    return {
        table: tuple(name for name, place in sorted(columns, key=_place) if place)
        for table, columns in found.columns.items()
    }


async def plan(mapping: TableMappings, database: SQLite) -> list[Step]:
    """Return what `apply` would do; see `setup.CaptureSetup`."""
    return _steps(mapping, await database.ask(_look(mapping, database.name)))


async def apply(mapping: TableMappings, database: SQLite) -> list[Step]:
    """Create the triggers, in one transaction; see `setup.CaptureSetup`."""
    steps = await plan(mapping, database)
    to_do = [each.sql for each in steps if each.state is StepState.TO_DO]
    if to_do and not refusals(steps):
        await database.create_async(outbox_tables())
        await database.ask(_execute(to_do))
    return steps


async def remove(mapping: TableMappings, database: SQLite) -> list[Step]:
    """Drop the capture's triggers; see `setup.CaptureSetup`."""
    with database.explained():
        found = await database.apart_async(_look(mapping, database.name))
        drops = [
            Step(StepState.DONE, f"drop trigger {name}", _drop(name))
            for name in sorted(found.triggers)
        ]
        await database.apart_async(_execute([each.sql for each in drops]))
    return drops


def _place(column: tuple[str, int]) -> int:
    return column[1]


def _execute(statements: Sequence[str]) -> Steps[None]:
    yield Query(SQLITE.begin)
    try:
        for sql in statements:
            for each in filter(None, sql.split(";\n")):
                yield Query(each)
    except BaseException:
        yield Query("ROLLBACK")
        raise
    yield Query("COMMIT")


def _look(mapping: TableMappings, name: str) -> Steps[SqliteFacts]:
    columns, unique = {}, {}
    for schema, table in mapping.writers:
        if schema != "main":
            continue
        found = yield Query(
            "SELECT x.name, x.pk FROM pragma_table_xinfo(?) AS x WHERE x.hidden <> 1 "
            "AND EXISTS (SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?)",
            (table, table),
        )
        if found.rows:
            columns[schema, table] = [(str(row[0]), int(row[1])) for row in found.rows]
            found = yield Query(
                # Other collations take keys for the same whose messages have different ones.
                "SELECT l.name, CASE i.coll WHEN 'BINARY' THEN i.name END "
                "FROM pragma_index_list(?) AS l JOIN pragma_index_xinfo(l.name) AS i "
                'WHERE l."unique" AND i.key',
                (table,),
            )
            indexes: dict[str, set[str | None]] = {}
            for index, column in found.rows:
                indexes.setdefault(index, set()).add(column)
            unique[schema, table] = indexes
    begin = f"{_PREFIX}{mapping.name}:"
    triggers = yield Query(
        "SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND substr(name, 1, ?) = ?",
        (len(begin), begin),
    )
    tables = yield Query("SELECT COUNT(*) FROM sqlite_master WHERE name = ?", (OUTBOX,))
    missing, problem = tables.rows[0][0] == 0, ""
    if not missing:
        try:
            yield from check(SQLITE, name, outbox_tables())
        except ConfigurationError as error:
            problem = str(error)
    return SqliteFacts(columns, unique, {row[0]: row[1] for row in triggers.rows}, problem, missing)


# --- steps -----------------------------------------------------------------------------------


def _steps(mapping: TableMappings, found: SqliteFacts) -> list[Step]:
    steps = []
    if found.outbox:
        steps.append(Step(StepState.REFUSED, found.outbox))
    elif not found.missing:
        steps.append(Step(StepState.DONE, f"the tables {OUTBOX} and {RELAY}"))
    else:
        steps.append(Step(StepState.TO_DO, f"create the tables {OUTBOX} and {RELAY}"))
    if mapping.emitted:
        steps.append(NO_EMITTED)
    wanted: dict[str, Trigger] = {}
    for place, writer in mapping.writers.items():
        columns = [name for name, _ in found.columns.get(place, ())]
        faults = list(_faults(writer, columns))
        if faults:
            text = f"table {writer.table}: {'; '.join(faults)}"
            steps.append(Step(StepState.REFUSED, text))
        else:
            wanted |= {each.name: each for each in _triggers(writer, columns)}
            steps += [each.step for each in _gaps(writer, found, place)]
    for name, trigger in wanted.items():
        present = found.triggers.get(name)
        if present == trigger.sql:
            steps.append(Step(StepState.DONE, f"trigger {name}"))
        elif present is None:
            text = f"create trigger {name} on {trigger.table}"
            steps.append(Step(StepState.TO_DO, text, trigger.sql))
        else:
            text = f"replace trigger {name} on {trigger.table}: the table or mapping has changed"
            steps.append(Step(StepState.TO_DO, text, f"{_drop(name)};\n{trigger.sql}"))
    for name in sorted(set(found.triggers) - set(wanted)):
        text = f"drop trigger {name}: the mapping no longer has it"
        steps.append(Step(StepState.TO_DO, text, _drop(name)))
    return steps


def _faults(writer: TableWriter, columns: Sequence[str]) -> Iterator[str]:
    if writer.schema != "main":
        yield f"SQLite has no schema {writer.schema!r}: name the table alone"
    elif not columns:
        yield "it does not exist, or is no table: create it, or correct the name"
    else:
        used = [*writer.key, *(column for _, column in writer.header_columns)]
        if writer.column is not None:
            used.append(writer.column)
        missing = sorted(set(used) - set(columns))
        if missing:
            yield f"it has no column {', '.join(missing)}, which the mapping names"
    if "truncate" in writer.operations:
        yield "SQLite has no truncate: remove it from operations"


def _gaps(writer: TableWriter, found: SqliteFacts, place: tuple[str, str]) -> Iterator[Gap]:
    """Yield changes for which SQLite fires no trigger."""
    indexes = dict(found.unique[place])
    indexes["primary key"] = {name for name, number in found.columns[place] if number}
    others = [name for name, columns in indexes.items() if columns and not columns >= {*writer.key}]
    if others and "delete" in writer.operations:
        yield Gap(
            writer,
            "replaced",
            f"a row that INSERT or UPDATE OR REPLACE removes, because of {', '.join(others)}, may "
            "have another key, and SQLite fires no trigger for it",
            f"make the key a part of {', '.join(others)}, or use ON CONFLICT DO UPDATE",
        )


def _drop(name: str) -> str:
    return f"DROP TRIGGER IF EXISTS {_quote(name)}"


# --- SQL of triggers -------------------------------------------------------------------------


def _triggers(writer: TableWriter, columns: Sequence[str]) -> Iterator[Trigger]:
    """Yield a trigger for each operation."""
    insert = _insert(writer, "insert", "NEW", columns)
    delete = _insert(writer, "delete", "OLD", columns)
    update = _insert(writer, "update", "NEW", columns)
    same = " AND ".join(f"OLD.{_quote(each)} IS NEW.{_quote(each)}" for each in writer.key)
    bodies: Mapping[Operation, str] = {
        "insert": f"{insert};",
        "delete": f"{delete};",
        # Of a changed key, the old one is deleted.
        "update": f"{update} WHERE {same}; {delete} WHERE NOT ({same}); {insert} "
        f"WHERE NOT ({same});",
    }
    for operation, body in bodies.items():
        if operation in writer.operations:
            name = f"{_PREFIX}{writer.name}:{writer.table}:{operation}"
            yield Trigger(
                name,
                writer.table,
                f"CREATE TRIGGER {_quote(name)} AFTER {operation.upper()} ON "
                f"{_quote(writer.table)} BEGIN {body} END",
            )


def _insert(writer: TableWriter, operation: Operation, row: str, columns: Sequence[str]) -> str:
    if writer.key_as_text:
        key = f"CAST({_json_value(row, writer.key[0])} AS TEXT)"
    else:
        key = _object(row, writer.key)
    headers = [*(_text(value.decode()) for _, value in writer.headers if value is not None)]
    names = [name for name, _ in writer.headers]
    for name, column in writer.header_columns:
        names.append(name)
        headers.append(f"CAST({_json_value(row, column)} AS TEXT)")
    pairs = ", ".join(
        f"json_array({_text(name)}, {value})" for name, value in zip(names, headers, strict=True)
    )
    return (
        f"INSERT INTO {OUTBOX} (unit, topic, message_key, message_value, headers) "
        f"SELECT 'capture-' || (SELECT MAX(lease_until) FROM {RELAY}), {_text(writer.topic)}, "
        f"{key}, {_value(writer, operation, row, columns)}, json_array({pairs})"
    )


def _value(writer: TableWriter, operation: Operation, row: str, columns: Sequence[str]) -> str:
    if operation == "delete" and (writer.tombstones or writer.column is not None):
        return "NULL"
    if writer.column is not None:
        return f"CAST({row}.{_quote(writer.column)} AS BLOB)"
    before = after = "'null'"
    if operation == "delete":
        before = _object("OLD", columns if writer.before else writer.key)
    else:
        after = _object("NEW", columns)
        if operation == "update" and writer.before:
            before = _object("OLD", columns)
    source = {"kind": "sqlite", "capture": writer.name, "schema": "main", "table": writer.table}
    parts = (
        _text(f'{{"operation":"{operation}","before":'),
        before,
        _text(',"after":'),
        after,
        _text(',"time_ms":'),
        SQLITE.now_ms,
        _text(f',"source":{json.dumps(source, separators=(",", ":"))}}}'),
    )
    return " || ".join(parts)


def _object(row: str, columns: Sequence[str]) -> str:
    """Return SQL of a JSON object, as text: `json_object` takes at most 63 columns."""
    members = [
        f"{_text(('{' if number == 0 else ',') + json.dumps(each) + ':')} || "
        f"json_quote({_json_value(row, each)})"
        for number, each in enumerate(columns)
    ]
    return f"{' || '.join(members)} || '}}'"


def _json_value(row: str, column: str) -> str:
    """Return SQL of a value that JSON can hold: otherwise the service's statement would fail."""
    value = f"{row}.{_quote(column)}"
    return (
        f"CASE typeof({value}) WHEN 'blob' THEN lower(hex({value})) WHEN 'real' THEN "
        f"CASE WHEN {value} > {_FLOAT_MAX} THEN 'Infinity' "
        f"WHEN {value} < -{_FLOAT_MAX} THEN '-Infinity' ELSE {value} END ELSE {value} END"
    )


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
