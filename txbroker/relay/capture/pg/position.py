"""The position of a capture in Kafka: where it goes on, and what must not have changed since.

The WAL shows changes of rows. A partition that is dropped, a publication that left a table out for
a while, a server that was put back: of these the WAL shows nothing. So the position names the last
transaction, which a start reads again, and the state of the catalogs, which each check compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from zlib import crc32

import msgspec
from msgspec import Raw, Struct, structs

from txbroker.relay.capture.changes import CapturedTable, CaptureMapping
from txbroker.relay.capture.pg.facts import (
    PgFacts,
    PgTable,
    TableMember,
    name_of,
    shows,
    wanted_operations,
)
from txbroker.relay.capture.setup import Gap


class LastTransaction(Struct, frozen=True):
    """The last transaction that was read.

    Attributes:
        end: where its commit ends in the WAL, an LSN.
    """

    end: str
    xid: int
    time_ms: int


class SlotPosition(Struct, frozen=True):
    """Where a capture goes on.

    Attributes:
        slot: its name.
        system, timeline: of the server, see `System`.
        lsn: everything before it is in Kafka, such as `0/16B3748`.
        last: the last transaction before it, if the capture has read one.
        catalog: a `Catalog`, once it was checked.
    """

    slot: str
    system: str
    timeline: int
    lsn: str
    last: LastTransaction | None = None
    catalog: Raw = Raw(b"null")


class CatalogTable(Struct, frozen=True, array_like=True):
    """A captured table in the catalogs.

    Attributes:
        oid: of the table.
        published: of its entry in the publication.
        attributes: a checksum of what altered its columns.
        members: the oids of the table and its partitions, each with its storage; 0 if it
            has none, or was attached and is empty; if only the stream has shown it, or rows that it
            lacked when it was seen, the transaction there, negative.
        placed: the oids of partitions, each with the transaction that made it one.
        key: of its records.
    """

    oid: int
    published: int
    attributes: int
    members: dict[int, int]
    placed: dict[int, int] = {}
    key: tuple[str, ...] = ()


class Catalog(Struct, frozen=True):
    """The catalogs as far as they decide what the WAL shows.

    Attributes:
        publication: its oid.
        altered: the transaction that altered its options last.
        operations: that the mapping wants: `apply` alters the publication for others.
        tables: by schema and name.
        snapshot: which transactions these are the catalogs of, if a partition is empty; see
            `Server`.
    """

    publication: int
    altered: int
    operations: list[str]
    tables: dict[str, CatalogTable]
    snapshot: str = ""


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(SlotPosition).decode
decode_catalog = msgspec.json.Decoder(Catalog | None).decode


def catalog_of(facts: PgFacts, mapping: CaptureMapping, before: Catalog | None = None) -> Catalog:
    """Return the catalogs of a capture without problems.

    Args:
        before: of an earlier check, with what the stream has shown since.
    """
    publication = facts.publication
    assert publication is not None
    tables = {}
    for wanted in mapping.tables:
        table = facts.tables[wanted.schema, wanted.table]
        known = before.tables.get(f"{wanted.schema}.{wanted.table}") if before else None
        earlier = known.members if known else {}
        tables[f"{wanted.schema}.{wanted.table}"] = CatalogTable(
            table.oid,
            publication.tables[wanted.schema, wanted.table].oid,
            crc32(table.attributes.encode()),
            {
                **{oid: xid for oid, xid in earlier.items() if _is_to_come(xid, facts)},
                **{each.oid: _storage(each, earlier) for each in table.members},
            },
            {each.oid: each.placed for each in table.members},
            wanted.key,
        )
    empty = any(0 in table.members.values() for table in tables.values())
    return Catalog(
        publication.oid,
        publication.altered,
        sorted(wanted_operations(mapping)),
        tables,
        facts.server.snapshot if empty else "",
    )


def with_partitions(catalog: Catalog, shown: Mapping[int, tuple[str, int]]) -> Catalog:
    """Return the catalogs with partitions that the stream has shown: rows of theirs were read, so
    that one which a check does not find was dropped or detached.

    Args:
        shown: OIDs, each with its table and its transaction.
    """
    tables = dict(catalog.tables)
    for oid, (name, xid) in shown.items():
        table = tables[name]
        # Rows from before it was seen are gone: it may have been another table meanwhile.
        emptied = not table.members.get(oid, 1) and shows(catalog.snapshot, xid)
        if emptied or oid not in table.members:
            tables[name] = structs.replace(table, members={**table.members, oid: -xid})
    return structs.replace(catalog, tables=tables)


def _is_to_come(shown: int, facts: PgFacts) -> bool:
    """Return whether the stream has shown a partition that the catalogs cannot show yet."""
    return shown < 0 and not shows(facts.server.snapshot, -shown)


def _storage(member: TableMember, earlier: Mapping[int, int]) -> int:
    """Return the storage of a member, 0 of an attached one that is empty since it is known."""
    empty = not (member.created or member.attached or earlier.get(member.oid, 0))
    return 0 if empty else member.storage


def unseen(before: Catalog | None, facts: PgFacts, mapping: CaptureMapping) -> Iterator[str | Gap]:
    """Yield which changes the WAL may lack since an earlier state of the catalogs, as sentences
    without an end or as gaps that the mapping may accept."""
    if before is None:
        return
    now, name = catalog_of(facts, mapping, before), name_of(mapping)
    if now.publication != before.publication:
        yield f"publication {name} was created again, and changes before that may be lost"
    elif now.altered != before.altered and now.operations == before.operations:
        yield f"publication {name} was altered, and changes while it was another may be lost"
    for wanted in mapping.tables:
        place = f"{wanted.schema}.{wanted.table}"
        if (known := before.tables.get(place)) is not None:
            table = facts.tables[wanted.schema, wanted.table]
            yield from _unseen_of_table(wanted, known, now.tables[place], table)


def _unseen_of_table(
    wanted: CapturedTable, before: CatalogTable, now: CatalogTable, table: PgTable
) -> Iterator[str | Gap]:
    name = f"{wanted.schema}.{wanted.table}"
    if now.oid != before.oid:
        yield Gap(
            wanted,
            "tables",
            "it is another one than before, which was dropped or renamed: the WAL does not show "
            "what became of its rows",
            "fill it in, then run with --on-gap skip",
        )
        return
    if now.published != before.published:
        yield (
            f"{name} was taken out of the publication, or had a row filter or a list of columns, "
            "and changes in between may be lost"
        )
    if before.key not in ((), wanted.key) and wanted.key == table.primary:
        yield (
            f"{name} has another primary key ({', '.join(wanted.key)} instead of "
            f"{', '.join(before.key)}), and records of the old keys stay as they are"
        )
    moved = [
        each.name
        for each in table.members
        if before.placed.get(each.oid, each.placed) != each.placed
    ]
    if moved:
        yield _partitions(wanted, f"{', '.join(moved)} was detached and attached again")
    gone = len(before.members.keys() - now.members.keys())
    if gone and wanted.operations & {"delete", "truncate"}:
        yield _partitions(wanted, f"{gone} of its partitions were dropped or detached")
    attached = [each.name for each in table.members if _had_rows(each, before)]
    if attached and wanted.operations & {"insert", "delete"}:
        yield _partitions(wanted, f"{', '.join(attached)} was attached and has or had rows")
    rewritten = any(
        storage > 0 and storage != now.members.get(oid, storage)
        for oid, storage in before.members.items()
    )
    if rewritten and now.attributes != before.attributes and "update" in wanted.operations:
        yield Gap(
            wanted,
            "rewrites",
            "its columns were altered and its rows written again, and the WAL does not show their "
            "new values",
            "fill them in, then run with --on-gap skip",
        )


def _had_rows(member: TableMember, before: CatalogTable) -> bool:
    """Return whether a partition that no check knew may have been attached with rows, or may have
    had some before that the stream has shown."""
    known = before.members.get(member.oid)
    if known is None:
        return member.attached
    return known < 0 and not member.created


def _partitions(wanted: CapturedTable, problem: str) -> Gap:
    return Gap(
        wanted,
        "partitions",
        f"{problem}, and the WAL does not show what that did to the table's rows",
        "fill it in, then run with --on-gap skip",
    )
