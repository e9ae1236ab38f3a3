"""What a capture needs of MariaDB: settings, rights, tables, and where it begins.

MariaDB has no slots. `apply` records the position at which the capture begins in a row of table
`txbroker_capture`, so that no change between `apply` and the first `run` is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from txbroker.databases.dialect import MARIADB, Fault
from txbroker.databases.mariadb import MariaDB
from txbroker.databases.steps import Query, Steps
from txbroker.relay.capture.changes import CaptureMapping
from txbroker.relay.capture.setup import Step, StepState

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
_FACTS = (*_SETTINGS, "gtid_binlog_pos", "gtid_binlog_state", "binlog_expire_logs_seconds")
_VERSION_MIN = (10, 6)
_KEPT_S_MIN = 86_400
_STRANGE = re.compile(r"COMPRESSED|mariadb-5\.3", re.IGNORECASE)
"""Column types that mysql-replication does not read, in comments of MariaDB's description."""


class Column(Struct, frozen=True):
    """A column of a captured table."""

    name: str
    kind: str
    description: str
    charset: str | None


class Facts(Struct, frozen=True):
    """The findings of `look`.

    Attributes:
        settings: by name, as text.
        columns: by database and table.
        replication: whether the user may read the binary log.
        start: where the capture begins, None if it is not recorded.
    """

    version: tuple[int, ...]
    settings: Mapping[str, str]
    columns: Mapping[tuple[str, str], Sequence[Column]]
    replication: bool
    start: str | None

    def byte_types(self, kinds: Mapping[str, int]) -> dict[tuple[str, str], dict[str, str]]:
        """Return the columns of some types, by table."""
        return {
            name: {each.name: each.kind for each in columns if each.kind in kinds}
            for name, columns in self.columns.items()
        }


def look(mapping: CaptureMapping) -> Steps[Facts]:
    """Look at the server."""
    shown = yield Query("SELECT VERSION()")
    version = tuple(int(each) for each in re.findall(r"\d+", shown.rows[0][0])[:2])
    settings = {}
    if version >= _VERSION_MIN and "maria" in str(shown.rows[0][0]).lower():
        names = ", ".join(f"@@global.{name}" for name in _FACTS)
        found = yield Query(f"SELECT {names}")
        settings = dict(zip(_FACTS, map(str, found.rows[0]), strict=True))
    else:
        version = (0, 0)
    columns: dict[tuple[str, str], list[Column]] = {}
    for table in mapping.tables:
        found = yield Query(
            "SELECT column_name, data_type, column_type, character_set_name "
            "FROM information_schema.columns WHERE table_schema = ? AND table_name = ? "
            "ORDER BY ordinal_position",
            (table.schema, table.table),
        )
        if found.rows:
            columns[table.schema, table.table] = [Column(*row) for row in found.rows]
    grants = yield Query("SHOW GRANTS")
    rights = [row[0] for row in grants.rows if " ON *.* TO " in row[0]]
    replication = any(re.search(r"REPLICATION SLAVE[,\s]|ALL PRIVILEGES", each) for each in rights)
    start = yield from _recorded(mapping.name)
    return Facts(version, settings, columns, replication, start)


def _recorded(name: str) -> Steps[str | None]:
    try:
        found = yield Query(f"SELECT position FROM {TABLE} WHERE name = ?", (name,))
    except Exception as error:
        if MARIADB.fault(error) is not Fault.NO_TABLE:
            raise
        return None
    return found.rows[0][0] if found.rows else None


def refusals(mapping: CaptureMapping, facts: Facts) -> list[str]:
    """Return why a capture cannot run, as sentences with the next step."""
    steps = [*_server_steps(facts), *_table_steps(mapping, facts)]
    return [each.text for each in steps if each.state is StepState.REFUSED]


# --- steps -----------------------------------------------------------------------------------


async def keys(
    mapping: CaptureMapping, database: MariaDB
) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the columns of primary keys; see `setup.CaptureSetup`."""
    with database.explained():
        return await database.apart_async(_keys(mapping))


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
    with database.explained():
        return _steps(mapping, await database.apart_async(look(mapping)))


async def apply(mapping: CaptureMapping, database: MariaDB) -> list[Step]:
    """Record where the capture begins; see `setup.CaptureSetup`."""
    steps = await plan(mapping, database)
    states = {each.state for each in steps}
    if StepState.REFUSED not in states and StepState.TO_DO in states:
        with database.explained():
            await database.apart_async(_record(mapping.name))
    return steps


async def remove(mapping: CaptureMapping, database: MariaDB) -> list[Step]:
    """Remove what `apply` recorded; see `setup.CaptureSetup`."""
    with database.explained():
        removed = await database.apart_async(_forget(mapping.name))
    state = StepState.TO_DO if removed else StepState.DONE
    return [Step(state, f"remove the position of {mapping.name} from {TABLE}")]


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


def _steps(mapping: CaptureMapping, facts: Facts) -> list[Step]:
    steps = [*_server_steps(facts), *_table_steps(mapping, facts)]
    if mapping.emitted:
        steps.append(
            Step(
                StepState.REFUSED,
                "emitted is for PostgreSQL, which has pg_logical_emit_message: remove it",
            )
        )
    if facts.start is None:
        insert = _INSERT.replace("?", f"'{mapping.name}'")
        text = f"record in {TABLE} that {mapping.name} begins with changes after now"
        steps.append(Step(StepState.TO_DO, text, f"{_CREATE};\n{insert}"))
    else:
        text = f"{mapping.name} begins after {facts.start or 'the start of the log'}"
        steps.append(Step(StepState.DONE, text))
    return steps


def _server_steps(facts: Facts) -> Iterator[Step]:
    if facts.version < _VERSION_MIN:
        yield Step(
            StepState.REFUSED,
            "a capture needs MariaDB 10.6 or newer, and not MySQL: upgrade the server",
        )
        return
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
    if facts.replication:
        yield Step(StepState.DONE, "the user may read the binary log")
    else:
        yield Step(
            StepState.REFUSED,
            "the user may not read the binary log: grant it",
            "GRANT REPLICATION SLAVE ON *.* TO CURRENT_USER()",
        )


def _table_steps(mapping: CaptureMapping, facts: Facts) -> Iterator[Step]:
    for table in mapping.tables:
        name = f"{table.schema}.{table.table}"
        columns = facts.columns.get((table.schema, table.table), ())
        faults = list(_column_faults(table.key, columns))
        if faults:
            yield Step(StepState.REFUSED, f"table {name}: {'; '.join(faults)}")
        else:
            yield Step(StepState.DONE, f"table {name}, key {', '.join(table.key)}")


def _column_faults(key: Sequence[str], columns: Sequence[Any]) -> Iterator[str]:
    if not columns:
        yield "it does not exist, or this user may not read it: correct the name, or grant SELECT"
        return
    missing = set(key) - {each.name for each in columns}
    if missing:
        yield f"it has no column {', '.join(sorted(missing))}, which the mapping's key names"
    for each in columns:
        if _STRANGE.search(each.description):
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
