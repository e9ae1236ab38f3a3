"""Facts about a capture in PostgreSQL's catalogs: settings, rights, slot, publication, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from txbroker.databases.steps import Query, Steps
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.changes import CapturedTable, CaptureMapping
from txbroker.relay.capture.pg.pgoutput import parse_lsn

PLUGIN = "pgoutput"
VERSION_MIN = 140_000
SENDS_GENERATED = 180_000
"""The version from which a publication may have stored generated columns, and must have those of a
replica identity: otherwise updates fail."""
_NAME = re.compile(r"[a-z0-9-]{1,50}")
OPERATIONS = ("insert", "update", "delete", "truncate")

_SERVER = """
SELECT current_setting('server_version_num')::int, current_setting('wal_level'),
  current_setting('max_replication_slots')::int, (SELECT count(*) FROM pg_replication_slots),
  current_setting('max_slot_wal_keep_size'), pg_is_in_recovery(), current_database(),
  current_setting('server_encoding'), current_user,
  (SELECT rolsuper OR rolreplication FROM pg_roles WHERE rolname = current_user)
    OR (to_regrole('rds_replication') IS NOT NULL
      AND pg_has_role(to_regrole('rds_replication'), 'MEMBER')),
  has_database_privilege(current_database(), 'CREATE')
"""
_SLOT = """
SELECT plugin, database, temporary, active_pid, wal_status, confirmed_flush_lsn::text
FROM pg_replication_slots WHERE slot_name = ?
"""
_PUBLICATION = """
SELECT pubinsert, pubupdate, pubdelete, pubtruncate, oid::bigint, pubviaroot,
  coalesce(to_jsonb(p) ->> 'pubgencols', 's') = 's', puballtables, pg_has_role(pubowner, 'USAGE')
FROM pg_publication AS p WHERE pubname = ?
"""
_PUBLISHED = "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = ?"
# Of a partitioned table the identity of the partitions counts, where the rows are.
_TABLES = """
SELECT n.nspname, c.relname, c.relkind, c.relpersistence, pg_has_role(c.relowner, 'USAGE'),
  ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0
    AND NOT attisdropped AND attgenerated = ''),
  ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0
    AND NOT attisdropped AND attgenerated <> ''),
  ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0
    AND NOT attisdropped AND attgenerated = 'v'),
  ARRAY(SELECT a.attname::text FROM pg_index i
    CROSS JOIN unnest(i.indkey) WITH ORDINALITY AS k (attnum, n)
    JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.attnum
    WHERE i.indrelid = c.oid AND i.indisprimary AND k.n <= i.indnkeyatts ORDER BY k.n),
  leaf.relreplident,
  ARRAY(SELECT a.attname::text FROM pg_index i
    CROSS JOIN unnest(i.indkey) WITH ORDINALITY AS k (attnum, n)
    JOIN pg_attribute a ON a.attrelid = leaf.oid AND a.attnum = k.attnum
    WHERE i.indrelid = leaf.oid AND k.n <= i.indnkeyatts
      AND ((leaf.relreplident = 'd' AND i.indisprimary)
        OR (leaf.relreplident = 'i' AND i.indisreplident)))
FROM unnest(CAST(? AS text[]), CAST(? AS text[])) AS wanted (nspname, relname)
JOIN pg_namespace n ON n.nspname = wanted.nspname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.relname
  AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
LEFT JOIN LATERAL (SELECT relid FROM pg_partition_tree(c.oid) WHERE isleaf) AS part
  ON c.relkind = 'p'
JOIN pg_class leaf ON leaf.oid = coalesce(part.relid, c.oid)
"""


class Slot(Struct, frozen=True):
    """A replication slot.

    Attributes:
        active_pid: the server's process that sends its changes, 0 if none does.
        lost: the server has removed changes that it still had to send.
        confirmed: everything before it was acknowledged; an LSN.
    """

    plugin: str
    database: str
    temporary: bool
    active_pid: int
    lost: bool
    confirmed: int


class Publication(Struct, frozen=True):
    """A publication.

    Attributes:
        oid: another one once it was created again.
        generated: whether it sends generated columns, as far as the server can.
        via_root: changes of partitions are sent as changes of their partitioned table.
        owned: whether this user may alter it.
    """

    operations: frozenset[str]
    oid: int
    via_root: bool
    generated: bool
    all_tables: bool
    owned: bool
    tables: frozenset[tuple[str, str]]


class Table(Struct, frozen=True):
    """A table that a mapping names.

    Attributes:
        kind, persistence: as `pg_class` has them.
        generated: generated columns; `virtual` are those that are not stored.
        primary: columns of the primary key, in its order.
        identity: columns of the replica identity that each change has.
        full: each change has the old row.
    """

    kind: str
    persistence: str
    owned: bool
    columns: tuple[str, ...]
    generated: tuple[str, ...]
    virtual: tuple[str, ...]
    primary: tuple[str, ...]
    identity: frozenset[str]
    full: bool


class Server(Struct, frozen=True):
    """The server, as this user sees it.

    Attributes:
        slots: how many replication slots it has.
        wal_keep: how much WAL a slot may hold.
    """

    version: int
    wal_level: str
    slots_max: int
    slots: int
    wal_keep: str
    standby: bool
    database: str
    encoding: str
    user: str
    may_replicate: bool
    may_create: bool


class Facts(Struct, frozen=True):
    """The content of the catalogs at one moment."""

    server: Server
    slot: Slot | None
    publication: Publication | None
    tables: dict[tuple[str, str], Table]


def name_of(mapping: CaptureMapping) -> str:
    """Return the name of slot and publication.

    Raises:
        ConfigurationError: the capture's name does not fit.
    """
    if not _NAME.fullmatch(mapping.name):
        raise ConfigurationError(
            f"the name {mapping.name!r} of a capture becomes part of the name of a replication "
            "slot: use at most 50 lower-case letters, digits and -"
        )
    return "txbroker_" + mapping.name.replace("-", "_")


def read(mapping: CaptureMapping) -> Steps[Facts]:
    """Read the facts, as steps."""
    name = name_of(mapping)
    (server,) = (yield Query(_SERVER)).rows
    slots = (yield Query(_SLOT, (name,))).rows
    publications = (yield Query(_PUBLICATION, (name,))).rows
    published = (yield Query(_PUBLISHED, (name,))).rows
    schemas = [each.schema for each in mapping.tables]
    tables = (yield Query(_TABLES, (schemas, [each.table for each in mapping.tables]))).rows
    publication = None
    if publications:
        *operations, oid, via_root, generated, all_tables, owned = publications[0]
        sent = frozenset(each for each, on in zip(OPERATIONS, operations, strict=True) if on)
        of_it = frozenset((str(schema), str(table)) for schema, table in published)
        publication = Publication(sent, oid, via_root, generated, all_tables, owned, of_it)
    return Facts(
        Server(*server),
        slot=_slot(slots[0]) if slots else None,
        publication=publication,
        tables=_tables(tables),
    )


def _slot(row: Any) -> Slot:
    plugin, database, temporary, active_pid, wal_status, confirmed = row
    return Slot(
        plugin or "physical",
        database or "",
        temporary,
        active_pid or 0,
        wal_status == "lost",
        parse_lsn(confirmed) if confirmed else 0,
    )


def _tables(rows: Any) -> dict[tuple[str, str], Table]:
    found: dict[tuple[str, str], Table] = {}
    for row in rows:
        schema, name, kind, persistence, owned, *columns, identity, key = row
        sent, generated, virtual, primary = (tuple(names) for names in columns)
        full = identity == "f"
        of_each = frozenset(sent if full else key)
        earlier = found.get((schema, name))
        if earlier is not None:  # another partition
            full, of_each = full and earlier.full, of_each & earlier.identity
        found[schema, name] = Table(
            kind, persistence, owned, sent, generated, virtual, primary, of_each, full
        )
    return found


def wanted_operations(mapping: CaptureMapping) -> frozenset[str]:
    """Return what the publication sends; it is the same for all of its tables."""
    return frozenset().union(*(each.operations for each in mapping.tables))


# --- faults ----------------------------------------------------------------------------------


def server_problems(server: Server) -> Iterator[str]:
    """Yield why the server cannot be captured, as sentences with the next step."""
    if server.version < VERSION_MIN:
        yield "the server is older than PostgreSQL 14: update it"
    if server.wal_level != "logical":
        yield (
            f"wal_level is {server.wal_level}, so that the WAL lacks what a capture reads: as an "
            "administrator, ALTER SYSTEM SET wal_level = 'logical' and restart the server"
        )
    if server.encoding == "SQL_ASCII":
        yield (
            "the database has the encoding SQL_ASCII, so that its text may be of any: move it to "
            "one with encoding UTF8"
        )
    if not server.may_replicate:
        yield (
            f"the user {server.user} may not replicate: as an administrator, "
            f'ALTER ROLE "{server.user}" REPLICATION'
        )


def table_problems(wanted: CapturedTable, facts: Facts, *, changed: bool) -> Iterator[str]:
    """Yield why a table cannot be captured.

    Args:
        changed: whether updates or deletes of any table are captured.
    """
    name = f"table {wanted.schema}.{wanted.table}"
    table = facts.tables.get((wanted.schema, wanted.table))
    if table is None:
        yield f"{name} does not exist: create it, or correct the mapping"
        return
    if table.kind not in "rp":
        yield (
            f"{name} is a view or a foreign table, whose changes are not in the WAL: capture the "
            "tables that it reads"
        )
        return
    if table.persistence != "p":
        yield f"{name} is unlogged or temporary, so that the WAL lacks it: ALTER TABLE … SET LOGGED"
        return
    for column in wanted.key:
        if column in table.generated:
            yield f"{name}: the key column {column} is generated: use another"
        elif column not in table.columns:
            yield f"{name} has no column {column} for the key: correct the mapping"
    full = f'ALTER TABLE "{wanted.schema}"."{wanted.table}" REPLICA IDENTITY FULL'
    if changed and not table.identity:
        yield (
            f"{name} has no primary key or other replica identity, so that its updates and deletes "
            f"would fail: add a primary key, or {full}"
        )
    elif changed and table.full and table.virtual:
        yield (
            f"{name}: PostgreSQL refuses updates and deletes of a published table with REPLICA "
            f"IDENTITY FULL and virtual generated columns ({', '.join(table.virtual)}): make them "
            "STORED, or use another replica identity"
        )
    elif wanted.before and not table.full:
        yield f"{name}: the WAL lacks the row before a change: {full}, or leave `before` out"
    elif not table.identity.issuperset(wanted.key) and wanted.operations & {"update", "delete"}:
        yield (
            f"{name}: the key {', '.join(wanted.key)} is not part of its replica identity "
            f"({', '.join(sorted(table.identity))}), so that deletes lack it: use columns of that, "
            f"or {full}"
        )


def publication_problems(facts: Facts, mapping: CaptureMapping) -> Iterator[str]:
    """Yield what the publication does not send."""
    publication, name = facts.publication, name_of(mapping)
    if publication is None:
        yield f"publication {name} is missing"
        return
    for each in mapping.tables:
        if (each.schema, each.table) not in publication.tables:
            yield f"publication {name} lacks table {each.schema}.{each.table}"
    lacking = wanted_operations(mapping) - publication.operations
    if lacking:
        yield f"publication {name} does not send {', '.join(sorted(lacking))}"
    if not publication.via_root and any(table.kind == "p" for table in facts.tables.values()):
        yield f"publication {name} does not send changes of partitions as ones of their table"


def slot_problems(facts: Facts, mapping: CaptureMapping) -> Iterator[str]:
    """Yield why the slot cannot be used; nothing if it is missing."""
    slot, name = facts.slot, name_of(mapping)
    if slot is None:
        return
    if slot.plugin != PLUGIN or slot.temporary or slot.database != facts.server.database:
        kind = "temporary slot" if slot.temporary else f"slot of {slot.plugin}"
        yield (
            f"the server has a {kind} {name} of database {slot.database or '-'}: it belongs to "
            "something else: give the capture another name"
        )
    elif slot.lost:
        yield (
            f"slot {name} is lost: the server has removed changes that it still had to send, "
            "because of max_slot_wal_keep_size: run `txbroker capture remove`, then `apply`, then "
            "`run` with --on-gap skip, and fill in what changed in between; a larger "
            "max_slot_wal_keep_size prevents it"
        )


def running_problem(facts: Facts, mapping: CaptureMapping) -> str:
    """Return the first reason why a capture cannot run, with the next step; "" if it can."""
    apply = "run `txbroker capture apply`"
    for problem in server_problems(facts.server):
        return problem
    if facts.slot is None:
        return (
            f"replication slot {name_of(mapping)} is missing, and with it every change since it "
            f"was dropped: {apply}; if the capture has run before, then `run` with --on-gap skip, "
            "and fill in what changed in between"
        )
    for problem in slot_problems(facts, mapping):
        return problem
    for problem in publication_problems(facts, mapping):
        return f"{problem}, so that changes are not captured: {apply}, and fill in the missing ones"
    return ""
