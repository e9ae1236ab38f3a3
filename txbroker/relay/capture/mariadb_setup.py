"""What a capture needs of MariaDB: settings, rights, tables, and where it begins.

MariaDB has no slots. `apply` records the position at which the capture begins in a row of table
`txbroker_capture`, so that no change between `apply` and the first `run` is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from txbroker.databases.dialect import MARIADB, Fault
from txbroker.databases.mariadb import MariaDB
from txbroker.databases.steps import Query, Steps
from txbroker.relay.capture.changes import CapturedTable, CaptureMapping
from txbroker.relay.capture.maria.rows import BYTE_TYPES
from txbroker.relay.capture.maria.statements import definition_gaps
from txbroker.relay.capture.setup import NO_EMITTED, Gap, Step, StepState, refusals

TableName: TypeAlias = tuple[str, str]
"""Database and table."""

TABLE = "txbroker_capture"
_CREATE = (
    f"CREATE TABLE IF NOT EXISTS {TABLE} (name {MARIADB.key} NOT NULL PRIMARY KEY, "
    f"position {MARIADB.text} NOT NULL, created_at {MARIADB.whole} NOT NULL){MARIADB.options}"
)
_INSERT = (
    f"INSERT INTO {TABLE} (name, position, created_at) "
    "VALUES (?, @@global.gtid_binlog_pos, UNIX_TIMESTAMP())"
)
_SETTINGS = {
    "log_bin": ("1", "ON"),
    "binlog_format": ("ROW", "ROW"),
    "binlog_row_image": ("FULL", "FULL"),
    "binlog_row_metadata": ("FULL", "FULL"),
    "log_bin_compress": ("0", "OFF"),
}
"""What the server shows, and what to set."""
_FACTS = (
    *_SETTINGS,
    "gtid_binlog_pos",
    "gtid_binlog_state",
    "binlog_expire_logs_seconds",
    "lower_case_table_names",
    "slave_run_triggers_for_rbr",
)
_VERSION_MIN = (10, 6)
_COLLATIONS = "collation_character_set_applicability"
_COLLATIONS_VERSION = (10, 10)
"""The first in which that view has numbers. The older view lacks some since then."""
_KEPT_S_MIN = 86_400
_STRANGE = re.compile(r"COMPRESSED|mariadb-5\.3", re.IGNORECASE)
"""Column types that mysql-replication does not read, in comments of MariaDB's description."""
_KINDS = frozenset(
    (
        *("tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "float", "double", "bit"),
        *("year", "date", "time", "datetime", "timestamp", "char", "varchar", "enum", "set"),
        *("tinytext", "text", "mediumtext", "longtext", "binary", "varbinary"),
        *("tinyblob", "blob", "mediumblob", "longblob", "uuid", "inet4", "inet6"),
        *("geometry", "point", "linestring", "polygon", "geometrycollection"),
        *("multipoint", "multilinestring", "multipolygon"),
    )
)
"""Types of columns that a capture reads."""
_TABLES = ("BASE TABLE", "SYSTEM VERSIONED")


class Column(Struct, frozen=True):
    """A column of a captured table."""

    name: str
    kind: str
    description: str
    charset: str | None


class MariaFacts(Struct, frozen=True):
    """The findings of `look`.

    Attributes:
        version: (0, 0) of a server that cannot be captured; nothing else is known of it.
        settings: by name, as text.
        columns: by database and table.
        definitions: the same tables as `SHOW CREATE TABLE` shows them; None without the right.
        others: names that stand for no table, or are spelled differently; with the reason.
        collations: names of character sets, by the numbers of collations.
        filters: databases that the log has alone or lacks, None without the right to see that.
        replication: whether the user may read the binary log.
        start: where the capture begins, None if it is not recorded.
    """

    version: tuple[int, ...]
    settings: Mapping[str, str] = {}
    columns: Mapping[TableName, Sequence[Column]] = {}
    definitions: Mapping[TableName, str | None] = {}
    others: Mapping[TableName, str] = {}
    collations: Mapping[int, str] = {}
    filters: tuple[str, str] | None = None
    replication: bool = False
    start: str | None = None

    def byte_types(self, table: TableName) -> dict[str, str]:
        """Return the columns of a table whose type the log does not show, with their types."""
        return {
            each.name: each.kind for each in self.columns.get(table, ()) if each.kind in BYTE_TYPES
        }


def look(mapping: CaptureMapping) -> Steps[MariaFacts]:
    """Look at the server."""
    shown = yield Query("SELECT VERSION()")
    version = tuple(int(each) for each in re.findall(r"\d+", shown.rows[0][0])[:2])
    if version < _VERSION_MIN or "maria" not in str(shown.rows[0][0]).lower():
        return MariaFacts((0, 0))
    names = ", ".join(f"@@global.{name}" for name in _FACTS)
    found = yield Query(f"SELECT {names}")
    settings = dict(zip(_FACTS, map(str, found.rows[0]), strict=True))
    columns: dict[TableName, list[Column]] = {}
    definitions: dict[TableName, str | None] = {}
    others: dict[TableName, str] = {}
    for table in mapping.tables:
        name = (table.schema, table.table)
        found_columns = yield from columns_of(name)
        if not found_columns:
            continue
        columns[name] = found_columns
        found = yield Query(
            "SELECT table_type, table_schema, table_name FROM information_schema.tables "
            "WHERE table_schema = ? AND table_name = ?",
            name,
        )
        for kind, *stored in found.rows:
            if kind not in _TABLES:
                others[name] = f"it is a {kind}"
            elif tuple(stored) != name:
                others[name] = f"the server stores it as {'.'.join(stored)}: name it so"
        if name not in others:
            definitions[name] = yield from _definition(name)
    view = _COLLATIONS if version >= _COLLATIONS_VERSION else "collations"
    numbers = yield Query(f"SELECT id, character_set_name FROM information_schema.{view}")
    collations = {int(number): str(charset) for number, charset in numbers.rows if number}
    grants = yield Query("SHOW GRANTS")
    rights = [row[0] for row in grants.rows if " ON *.* TO " in row[0]]
    replication = any(re.search(r"REPLICATION SLAVE[,\s]|ALL PRIVILEGES", each) for each in rights)
    filters = yield from _filters()
    start = yield from _recorded_position(mapping.name)
    return MariaFacts(
        version,
        settings,
        columns,
        definitions,
        others,
        collations,
        filters,
        replication,
        start,
    )


def columns_of(name: TableName) -> Steps[list[Column]]:
    """Return the columns of a table in their order, none without the right to read it."""
    found = yield Query(
        "SELECT column_name, data_type, column_type, character_set_name "
        "FROM information_schema.columns WHERE table_schema = ? AND table_name = ? "
        "ORDER BY ordinal_position",
        name,
    )
    return [Column(*row) for row in found.rows]


def _definition(name: TableName) -> Steps[str | None]:
    """Return what creates a table: unlike the views of keys, it needs no right but SELECT."""
    quoted = ".".join(f"`{each.replace('`', '``')}`" for each in name)
    try:
        found = yield Query(f"SET STATEMENT sql_mode = '' FOR SHOW CREATE TABLE {quoted}")
    except Exception as error:
        if MARIADB.fault(error) in (Fault.DENIED, Fault.NO_TABLE):
            return None
        raise
    return str(found.rows[0][1])


def _filters() -> Steps[tuple[str, str] | None]:
    try:
        found = yield Query("SHOW MASTER STATUS")
    except Exception as error:
        if MARIADB.fault(error) is not Fault.DENIED:
            raise
        return None
    return (found.rows[0][2], found.rows[0][3]) if found.rows else ("", "")


def _recorded_position(name: str) -> Steps[str | None]:
    try:
        found = yield Query(f"SELECT position FROM {TABLE} WHERE name = ?", (name,))
    except Exception as error:
        if MARIADB.fault(error) is not Fault.NO_TABLE:
            raise
        return None
    return found.rows[0][0] if found.rows else None


# --- steps -----------------------------------------------------------------------------------


async def keys(
    mapping: CaptureMapping, database: MariaDB
) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the columns of primary keys; see `setup.CaptureSetup`."""
    return await database.ask(_keys(mapping))


def _keys(mapping: CaptureMapping) -> Steps[dict[tuple[str, str], tuple[str, ...]]]:
    found = {}
    for table in mapping.tables:
        # No join: it would read the tables of all databases.
        columns = yield Query(
            "SELECT column_name, 0 AS place FROM information_schema.columns "
            "WHERE table_schema = ? AND table_name = ? "
            "UNION ALL SELECT column_name, seq_in_index FROM information_schema.statistics "
            "WHERE table_schema = ? AND table_name = ? AND index_name = 'PRIMARY' ORDER BY place",
            (table.schema, table.table) * 2,
        )
        if columns.rows:
            key = tuple(column for column, place in columns.rows if place)
            found[table.schema, table.table] = key
    return found


async def plan(mapping: CaptureMapping, database: MariaDB) -> list[Step]:
    """Return what `apply` would do; see `setup.CaptureSetup`."""
    return _steps(mapping, await database.ask(look(mapping)))


async def apply(mapping: CaptureMapping, database: MariaDB) -> list[Step]:
    """Record where the capture begins; see `setup.CaptureSetup`."""
    steps = await plan(mapping, database)
    if steps[-1].state is StepState.TO_DO and not refusals(steps):
        await database.ask(_record(mapping.name))
    return steps


async def remove(mapping: CaptureMapping, database: MariaDB) -> list[Step]:
    """Remove what `apply` recorded; see `setup.CaptureSetup`."""
    removed = await database.ask(_forget(mapping.name))
    text = f"remove the position of {mapping.name} from {TABLE}"
    return [Step(StepState.DONE, text)] if removed else []


def _record(name: str) -> Steps[None]:
    yield Query(_CREATE)
    yield Query(_INSERT, (name,))


def _forget(name: str) -> Steps[bool]:
    try:
        deleted = yield Query(f"DELETE FROM {TABLE} WHERE name = ?", (name,))
        left = yield Query(f"SELECT COUNT(*) FROM {TABLE}")
    except Exception as error:
        if MARIADB.fault(error) is not Fault.NO_TABLE:
            raise
        return False
    if left.rows[0][0] == 0:
        yield Query(f"DROP TABLE {TABLE}")
    return deleted.count > 0


def needed(mapping: CaptureMapping, facts: MariaFacts) -> list[Step]:
    """Return the steps without which a capture cannot run."""
    if facts.version < _VERSION_MIN:
        text = "a capture needs MariaDB 10.6 or newer, and not MySQL: upgrade the server"
        return [Step(StepState.REFUSED, text)]
    return [*_server_steps(facts), *_table_steps(mapping, facts)]


def _steps(mapping: CaptureMapping, facts: MariaFacts) -> list[Step]:
    steps = needed(mapping, facts)
    if mapping.emitted:
        steps.append(NO_EMITTED)
    if facts.start is None:
        insert = _INSERT.replace("?", f"'{mapping.name}'")
        text = f"record in {TABLE} that {mapping.name} begins with changes after now"
        steps.append(Step(StepState.TO_DO, text, f"{_CREATE};\n{insert}"))
    else:
        text = f"{mapping.name} begins after {facts.start or 'the start of the log'}"
        steps.append(Step(StepState.DONE, text))
    return steps


def _server_steps(facts: MariaFacts) -> Iterator[Step]:
    for name, (shown, wanted) in _SETTINGS.items():
        found = facts.settings[name]
        if found == shown:
            yield Step(StepState.DONE, f"{name} = {wanted}")
        elif name == "log_bin":
            yield Step(
                StepState.REFUSED,
                "the server writes no binary log: add log_bin to its configuration, with a "
                "server_id, and restart it",
            )
        else:
            yield Step(
                StepState.REFUSED,
                f"{name} is {found}, not {wanted}: set it, also in the server's configuration",
                f"SET GLOBAL {name} = {wanted}",
            )
    kept_s = int(float(facts.settings["binlog_expire_logs_seconds"]))
    if 0 < kept_s < _KEPT_S_MIN:
        yield Step(
            StepState.ADVICE,
            f"the binary log is kept for {kept_s} s; a capture that stands still for longer loses "
            "changes, and stops",
            f"SET GLOBAL binlog_expire_logs_seconds = {7 * _KEPT_S_MIN}",
        )
    if facts.settings["slave_run_triggers_for_rbr"] == "YES":
        yield Step(
            StepState.REFUSED,
            "slave_run_triggers_for_rbr is YES: what triggers change on this replica is not in its "
            "binary log: let them run with LOGGING",
            "SET GLOBAL slave_run_triggers_for_rbr = LOGGING",
        )
    if facts.replication:
        yield Step(StepState.DONE, "the user may read the binary log")
    else:
        yield Step(
            StepState.REFUSED,
            "the user may not read the binary log: grant it",
            "GRANT REPLICATION SLAVE ON *.* TO CURRENT_USER()",
        )


def _table_steps(mapping: CaptureMapping, facts: MariaFacts) -> Iterator[Step]:
    for table in mapping.tables:
        name = f"{table.schema}.{table.table}"
        faults = list(_faults(table, facts))
        if faults:
            yield Step(StepState.REFUSED, f"table {name}: {'; '.join(faults)}")
        else:
            yield Step(StepState.DONE, f"table {name}, key {', '.join(table.key)}")
    yield from (each.step for each in gaps(mapping, facts))


def gaps(mapping: CaptureMapping, facts: MariaFacts) -> Iterator[Gap]:
    """Yield the changes of tables that the binary log does not show."""
    for table in mapping.tables:
        definition = facts.definitions.get((table.schema, table.table))
        if definition is not None:
            yield from definition_gaps(table, definition)


def changed(mapping: CaptureMapping, facts: MariaFacts) -> list[str]:
    """Return why a capture cannot go on after its tables were changed."""
    found = refusals(each.step for each in gaps(mapping, facts))
    for (schema, table), columns in facts.columns.items():
        faults = list(_column_faults((), columns))
        found += [f"table {schema}.{table}: {'; '.join(faults)}"] if faults else []
    return found


def _faults(table: CapturedTable, facts: MariaFacts) -> Iterator[str]:
    name = (table.schema, table.table)
    if name not in facts.columns:
        yield "it does not exist, or this user may not read it: correct the name, or grant SELECT"
    elif name in facts.others:
        yield f"{facts.others[name]}, which the binary log has no rows of"
    elif facts.definitions[name] is None:
        yield "this user may not see its foreign keys: grant SELECT on the whole table"
    else:
        yield from _column_faults(table.key, facts.columns[name])
    alone, without = facts.filters or ("", "")
    if table.schema in without.split(",") or (alone and table.schema not in alone.split(",")):
        yield (
            "the server leaves its database out of the binary log: correct binlog_do_db and "
            "binlog_ignore_db"
        )


def _column_faults(key: Sequence[str], columns: Sequence[Column]) -> Iterator[str]:
    missing = set(key) - {each.name for each in columns}
    if missing:
        yield f"it has no column {', '.join(sorted(missing))}, which the mapping's key names"
    for each in columns:
        if _STRANGE.search(each.description) or each.kind not in _KINDS:
            yield (
                f"column {each.name} is stored as {each.description}, which a capture cannot read: "
                "change it with ALTER TABLE … MODIFY"
            )
        named = each.kind in ("enum", "set") and not each.description.isascii()
        if named and not str(each.charset).startswith("utf8"):
            yield (
                f"column {each.name} has names of {each.charset} in its {each.kind}, which a "
                "capture cannot read: change its character set to utf8mb4"
            )
