"""Facts about a capture in PostgreSQL's catalogs: settings, rights, slot, publication, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

from msgspec import Struct

from txbroker.databases.steps import Query, Steps
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.changes import CapturedTable, CaptureMapping
from txbroker.relay.capture.pg.pgoutput import ReplicaIdentity, parse_lsn
from txbroker.relay.capture.setup import Gap

PLUGIN = "pgoutput"
VERSION_MIN = 140_000
SENDS_GENERATED = 180_000
"""The version from which a publication may have stored generated columns, and must have those of a
replica identity: otherwise updates fail."""
_NAME = re.compile(r"[a-z0-9-]{1,50}")
_XIDS = 1 << 32
OPERATIONS = ("insert", "update", "delete", "truncate")

_SERVER = """
SELECT current_setting('server_version_num')::int, current_setting('wal_level'),
  current_setting('max_replication_slots')::int, (SELECT count(*) FROM pg_replication_slots),
  current_setting('max_slot_wal_keep_size'), pg_is_in_recovery(), current_database(),
  current_setting('server_encoding'), current_user,
  (SELECT rolsuper OR rolreplication FROM pg_roles WHERE rolname = current_user)
    OR (to_regrole('rds_replication') IS NOT NULL
      AND pg_has_role(to_regrole('rds_replication'), 'MEMBER')),
  has_database_privilege(current_database(), 'CREATE'), scale(CAST(1::money AS numeric)),
  pg_current_snapshot()::text
"""
_SLOT = """
SELECT plugin, database, temporary, active_pid, wal_status, confirmed_flush_lsn::text
FROM pg_replication_slots WHERE slot_name = ?
"""
_PUBLICATION = """
SELECT pubinsert, pubupdate, pubdelete, pubtruncate, oid::bigint, xmin::text::bigint, pubviaroot,
  coalesce(to_jsonb(p) ->> 'pubgencols', 's') = 's', puballtables, pg_has_role(pubowner, 'USAGE')
FROM pg_publication AS p WHERE pubname = ?
"""
# PostgreSQL 14 has neither row filters nor lists of columns.
_PUBLISHED = """
SELECT n.nspname, c.relname, r.oid::bigint,
  coalesce(to_jsonb(r) ->> 'prqual', to_jsonb(r) ->> 'prattrs') IS NOT NULL
FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = ?
"""
# A row for each table and one for each of its partitions. A partition that was created as one has
# attributes that are older than its place in the tree, of the same transaction; ATTACH writes both
# in one command. Where all of them were altered since, that is not known.
_TABLES = """
SELECT n.nspname, c.relname, c.relkind, c.relpersistence, c.oid::bigint,
  pg_has_role(c.relowner, 'USAGE'),
  coalesce((SELECT string_agg(attnum || ' ' || xmin::text, ',' ORDER BY attnum)
    FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped
    AND (attgenerated = '' OR current_setting('server_version_num')::int >= 180000)), ''),
  ARRAY(SELECT cn.nspname || '.' || cc.relname FROM pg_inherits i
    JOIN pg_class cc ON cc.oid = i.inhrelid JOIN pg_namespace cn ON cn.oid = cc.relnamespace
    WHERE i.inhparent = c.oid AND c.relkind = 'r'),
  ARRAY(SELECT pn.nspname || '.' || pc.relname FROM pg_partition_ancestors(c.oid) AS a
    JOIN pg_class pc ON pc.oid = a.relid JOIN pg_namespace pn ON pn.oid = pc.relnamespace
    WHERE a.relid <> c.oid),
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
  m.oid::bigint, m.oid::regclass::text, m.relkind, m.relpersistence, m.relfilenode::bigint,
  m.relreplident,
  ARRAY(SELECT a.attname::text FROM pg_index i
    CROSS JOIN unnest(i.indkey) WITH ORDINALITY AS k (attnum, n)
    JOIN pg_attribute a ON a.attrelid = m.oid AND a.attnum = k.attnum
    WHERE i.indrelid = m.oid AND k.n <= i.indnkeyatts
      AND ((m.relreplident = 'd' AND i.indisprimary)
        OR (m.relreplident = 'i' AND i.indisreplident))),
  place.created,
  NOT place.created AND (SELECT sum(pg_relation_size(relid)) FROM pg_partition_tree(m.oid)) > 0,
  coalesce(place.xmin::bigint, 0)
FROM unnest(CAST(? AS text[]), CAST(? AS text[])) AS wanted (nspname, relname)
JOIN pg_namespace n ON n.nspname = wanted.nspname
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.relname
  AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
CROSS JOIN LATERAL (SELECT c.oid AS relid UNION SELECT relid FROM pg_partition_tree(c.oid)) AS part
JOIN pg_class m ON m.oid = part.relid
CROSS JOIN LATERAL (SELECT max(i.xmin::text) AS xmin, bool_and(EXISTS (SELECT FROM pg_attribute a
    WHERE a.attrelid = m.oid AND a.attnum > 0 AND NOT a.attisdropped
    AND a.xmin = i.xmin AND a.cmin::text::bigint < i.cmin::text::bigint)) IS NOT false AS created
  FROM pg_inherits i WHERE i.inhrelid = m.oid AND m.oid <> c.oid) AS place
ORDER BY m.oid <> c.oid, m.oid
"""


class ReplicationSlot(Struct, frozen=True):
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
        altered: the transaction that altered its options last.
        generated: whether it sends generated columns, as far as the server can.
        via_root: changes of partitions are sent as changes of their partitioned table.
        owned: whether this user may alter it.
        tables: how each is published.
    """

    operations: frozenset[str]
    oid: int
    altered: int
    via_root: bool
    generated: bool
    all_tables: bool
    owned: bool
    tables: dict[tuple[str, str], Published]


class Published(Struct, frozen=True):
    """A table in a publication.

    Attributes:
        oid: of its entry, another one once it was altered; 0 in a publication of all tables.
        partly: a row filter or a list of columns applies.
    """

    oid: int
    partly: bool


class TableMember(Struct, frozen=True):
    """A table or one of its partitions.

    Attributes:
        kind, persistence: as `pg_class` has them.
        storage: the file with its rows, another one once they were all written again.
        created: it certainly became a partition when it was created.
        attached: it may have become one with rows in it.
        placed: the transaction that made it one, 0 if it is none.
        full, identity: see `ReplicaIdentity`.
    """

    oid: int
    name: str
    kind: str
    persistence: str
    storage: int
    created: bool
    attached: bool
    placed: int
    full: bool
    identity: frozenset[str]


class PgTable(Struct, frozen=True):
    """A table that a mapping names.

    Attributes:
        kind, persistence: as `pg_class` has them.
        attributes: which transactions altered the columns last that the server may send.
        children: tables that inherit from it.
        ancestors: partitioned tables that it is a part of.
        generated: generated columns; `virtual` are those that are not stored.
        primary: columns of the primary key, in its order.
        members: the table, then its partitions.
    """

    kind: str
    persistence: str
    oid: int
    owned: bool
    attributes: str
    children: tuple[str, ...]
    ancestors: tuple[str, ...]
    columns: tuple[str, ...]
    generated: tuple[str, ...]
    virtual: tuple[str, ...]
    primary: tuple[str, ...]
    members: tuple[TableMember, ...]

    @property
    def identity(self) -> ReplicaIdentity:
        """What changes have of the old row, in whichever partition it is."""
        found = [
            ReplicaIdentity(each.full, each.identity) for each in (self.members[0], *self.parts)
        ]
        return reduce(ReplicaIdentity.of_partition, found[1:], found[0])

    @property
    def parts(self) -> Sequence[TableMember]:
        """The partitions that hold rows."""
        return [each for each in self.members[1:] if each.kind != "p"]


class Server(Struct, frozen=True):
    """The server, as this user sees it.

    Attributes:
        slots: how many replication slots it has.
        wal_keep: how much WAL a slot may hold.
        money_digits: how many digits a `money` has after the point, by lc_monetary.
        snapshot: the transactions that it shows, such as `10:20:10,14`, or fewer than it shows.
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
    money_digits: int
    snapshot: str


class PgFacts(Struct, frozen=True):
    """The content of the catalogs at one moment."""

    server: Server
    slot: ReplicationSlot | None
    publication: Publication | None
    tables: dict[tuple[str, str], PgTable]


def shows(snapshot: str, xid: int) -> bool:
    """Return whether a snapshot shows a transaction that the stream has. The stream may be earlier:
    a commit may wait for a synchronous standby.

    Args:
        snapshot: see `Server`.
        xid: its last 32 bits.
    """
    _, end, running = snapshot.split(":")
    begun = 0 < (int(end) - xid) % _XIDS < _XIDS // 2
    return begun and xid not in {int(each) % _XIDS for each in running.split(",") if each}


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


def read(mapping: CaptureMapping) -> Steps[PgFacts]:
    """Read the facts, as steps."""
    name = name_of(mapping)
    (server,) = (yield Query(_SERVER)).rows
    slots = (yield Query(_SLOT, (name,))).rows
    publications = (yield Query(_PUBLICATION, (name,))).rows
    published = (yield Query(_PUBLISHED, (name,))).rows
    schemas = [each.schema for each in mapping.tables]
    tables = (yield Query(_TABLES, (schemas, [each.table for each in mapping.tables]))).rows
    found = _tables(tables)
    publication = None
    if publications:
        *operations, oid, altered, via_root, generated, all_tables, owned = publications[0]
        sent = frozenset(each for each, on in zip(OPERATIONS, operations, strict=True) if on)
        of_it = {(schema, table): Published(*rest) for schema, table, *rest in published}
        if all_tables:
            of_it = dict.fromkeys(found, Published(0, partly=False))
        publication = Publication(sent, oid, altered, via_root, generated, all_tables, owned, of_it)
    return PgFacts(
        Server(*server),
        slot=_slot(slots[0]) if slots else None,
        publication=publication,
        tables=found,
    )


def _slot(row: Any) -> ReplicationSlot:
    plugin, database, temporary, active_pid, wal_status, confirmed = row
    return ReplicationSlot(
        plugin or "physical",
        database or "",
        temporary,
        active_pid or 0,
        wal_status == "lost",
        parse_lsn(confirmed) if confirmed else 0,
    )


def _tables(rows: Any) -> dict[tuple[str, str], PgTable]:
    found: dict[tuple[str, str], PgTable] = {}
    for row in rows:
        schema, name, *of_table = row[:13]
        earlier = found.get((schema, name))
        members = (*(earlier.members if earlier else ()), _member(row))
        given = [tuple(each) if isinstance(each, list) else each for each in of_table]
        fields: dict[str, Any] = dict(
            zip(PgTable.__struct_fields__, (*given, members), strict=True)
        )
        found[schema, name] = PgTable(**fields)
    return found


def _member(row: Any) -> TableMember:
    oid, name, kind, persistence, storage, identity, key, created, attached, placed = row[13:]
    full = identity == "f"
    columns = frozenset(row[9] if full else key)
    return TableMember(
        oid, name, kind, persistence, storage, created, attached, placed, full, columns
    )


def wanted_operations(mapping: CaptureMapping) -> frozenset[str]:
    """Return what the publication sends; it is the same for all of its tables. A TRUNCATE deletes
    rows, too."""
    wanted = frozenset[str]().union(*(each.operations for each in mapping.tables))
    return wanted | {"truncate"} if "delete" in wanted else wanted


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


def table_problems(wanted: CapturedTable, facts: PgFacts, mapping: CaptureMapping) -> Iterator[str]:
    """Yield why a table cannot be captured."""
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
    for each in table.members:
        if each.persistence != "p":
            yield (
                f"{name}: {each.name} is unlogged or temporary, so that the WAL lacks it: ALTER "
                "TABLE … SET LOGGED"
            )
        elif each.kind == "f":
            yield f"{name}: the partition {each.name} is a foreign table: DETACH it"
    captured = {f"{each.schema}.{each.table}" for each in mapping.tables}
    for ancestor in captured.intersection(table.ancestors):
        yield f"{name} is a partition of {ancestor}, which has its changes: map one of the two"
    for column in wanted.key:
        if column in table.generated:
            yield f"{name}: the key column {column} is generated: use another"
        elif column not in table.columns:
            yield f"{name} has no column {column} for the key: correct the mapping"
    changed = bool(wanted_operations(mapping) & {"update", "delete"})
    identity = table.identity
    if changed and not identity.columns:
        yield (
            f"{name} has no primary key or other replica identity, so that its updates and deletes "
            f"would fail: add a primary key, or {full_identity(wanted)}"
        )
    elif changed and identity.full and table.virtual:
        yield (
            f"{name}: PostgreSQL refuses updates and deletes of a published table with REPLICA "
            f"IDENTITY FULL and virtual generated columns ({', '.join(table.virtual)}): make them "
            "STORED, or use another replica identity"
        )
    elif problem := identity_problem(wanted, identity):
        yield problem


def full_identity(table: CapturedTable) -> str:
    """Return the SQL with which each change has the old row."""
    return f'ALTER TABLE "{table.schema}"."{table.table}" REPLICA IDENTITY FULL'


def identity_problem(wanted: CapturedTable, identity: ReplicaIdentity) -> str:
    """Return what updates and deletes lack; "" if they have all."""
    name, full = f"table {wanted.schema}.{wanted.table}", full_identity(wanted)
    if not wanted.operations & {"update", "delete"}:
        return ""
    if identity.mixed:
        return (
            f"{name} has REPLICA IDENTITY FULL, and one of its partitions has not, so that its old "
            "rows would lack values: ALTER TABLE … REPLICA IDENTITY FULL for each partition"
        )
    if wanted.before and not identity.full:
        return (
            f"{name}: the WAL lacks the row before a change: {full}, and so for each partition, or "
            "leave `before` out"
        )
    if not identity.columns.issuperset(wanted.key):
        return (
            f"{name}: the key {', '.join(wanted.key)} is not part of its replica identity "
            f"({', '.join(sorted(identity.columns))}), so that deletes lack it: use columns of "
            f"that, or {full}"
        )
    return ""


def gaps(wanted: CapturedTable, facts: PgFacts, mapping: CaptureMapping) -> Iterator[Gap]:
    """Yield changes of a table that the WAL does not show."""
    table = facts.tables.get((wanted.schema, wanted.table))
    if table is None:
        return
    captured = {f"{each.schema}.{each.table}" for each in mapping.tables}
    children = [each for each in table.children if each not in captured]
    if children:
        yield Gap(
            wanted,
            "partitions",
            f"its rows in {', '.join(children)}, which inherit from it, are not captured",
            "map these tables, too",
        )
    if table.kind == "p" and wanted.operations & {"delete", "truncate"}:
        yield Gap(
            wanted,
            "truncates",
            "PostgreSQL does not send the TRUNCATE of a single partition",
            "leave delete and truncate out of its operations",
        )


def gaps_of_all(facts: PgFacts, mapping: CaptureMapping) -> Iterator[Gap]:
    """Yield changes of all tables that the WAL does not show."""
    for each in mapping.tables:
        yield from gaps(each, facts, mapping)


def publication_problems(facts: PgFacts, mapping: CaptureMapping) -> Iterator[str]:
    """Yield what the publication does not send."""
    publication, name = facts.publication, name_of(mapping)
    if publication is None:
        yield f"publication {name} is missing"
        return
    for each in mapping.tables:
        published = publication.tables.get((each.schema, each.table))
        if published is None:
            yield f"publication {name} lacks table {each.schema}.{each.table}"
        elif published.partly:
            yield (
                f"publication {name} has a row filter or a list of columns for table "
                f"{each.schema}.{each.table}"
            )
    lacking = wanted_operations(mapping) - publication.operations
    if lacking:
        yield f"publication {name} does not send {', '.join(sorted(lacking))}"
    if not publication.via_root and any(table.kind == "p" for table in facts.tables.values()):
        yield f"publication {name} does not send changes of partitions as ones of their table"


def slot_problems(facts: PgFacts, mapping: CaptureMapping) -> Iterator[str]:
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


def running_problem(facts: PgFacts, mapping: CaptureMapping) -> str:
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
        return (
            f"{problem}, so that changes are not captured: {apply}, then `run` with --on-gap skip, "
            "and fill in the missing ones"
        )
    for each in mapping.tables:
        for problem in table_problems(each, facts, mapping):
            return problem
        for gap in gaps(each, facts, mapping):
            if not gap.accepted:
                return gap.step.text
    return ""
