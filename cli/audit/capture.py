"""Runs `txbroker audit capture`: rows first, then the position of the capture, then Spark."""

import asyncio
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from txbroker.cli.audit.run import started
from txbroker.cli.run import CommandFailed, usage_errors
from txbroker.config.settings import Settings
from txbroker.contract.captured import AuditedTable
from txbroker.relay.capture.mapping import TableMappings
from txbroker.relay.capture.plan import Capture, open_capture
from txbroker.relay.capture.snapshots.opening import audited, open_snapshot
from txbroker.spark.access import AuditKafka, access_from
from txbroker.spark.rows.capture import (
    CaptureAudit,
    CaptureSummary,
    CaptureTerms,
    StoredPosition,
    audit_capture,
    export,
    settled_reads,
)
from txbroker.spark.schema import TopicRead
from txbroker.spark.session import SparkSettings


def opened(file: Path) -> Capture:
    """Return the capture of a mapping file."""
    with usage_errors():
        return open_capture(str(file))


def run_capture(
    settings: Settings,
    spark: SparkSettings,
    capture: Capture,
    names: Sequence[str],
    **terms: Any,
) -> CaptureSummary:
    """Audit a capture; see `read_capture`, and `CaptureTerms` for the terms."""
    with (
        read_capture(settings, capture, names, CaptureTerms(**terms)) as (audit, reads),
        started(spark, str(audit.folder), stage="comparing rows with records") as (session, _),
    ):
        return audit_capture(session, access_from(settings), audit, reads)


@contextmanager
def read_capture(
    settings: Settings, capture: Capture, names: Sequence[str], terms: CaptureTerms
) -> Iterator[tuple[CaptureAudit, Sequence[TopicRead]]]:
    """Read the rows of a capture into a folder that exists during the block, and wait for their
    records; return both ends of the comparison.

    Args:
        names: the tables to compare; all of them if there is none.
    """
    if capture.is_outbox:
        raise CommandFailed(
            f"capture {capture.mapping.name} writes into the outbox of its SQLite file: audit that "
            "with `txbroker audit outbox`"
        )
    mapping = asyncio.run(capture.keyed())
    access = access_from(settings)
    positions = f"{settings.topic_prefix}.relay"
    stored = StoredPosition(access, positions, mapping.name)
    stored.read()
    if not stored.known:
        raise CommandFailed(
            f"topic {positions} has nothing of capture {mapping.name}: start it with `txbroker "
            "capture run`, or correct the name, --kafka or --topic-prefix"
        )
    chosen = _chosen(mapping, names)
    with tempfile.TemporaryDirectory(prefix="txbroker-audit-") as folder:
        audit, reached = _read_rows(access, capture, mapping, chosen, Path(folder), terms)
        stored.await_all(audit.place.text, reached, terms.wait_s)
        yield audit, settled_reads(access, {each.topic for each in audit.tables}, terms.wait_s)


def _chosen(mapping: TableMappings, names: Sequence[str]) -> set[str]:
    known = {f"{schema}.{table}" for schema, table in mapping.writers}
    if unknown := set(names) - known:
        raise click.UsageError(
            f"capture {mapping.name} has no table {', '.join(sorted(unknown))}: name some of "
            f"{', '.join(sorted(known))}"
        )
    return set(names) or known


def _without_topic(access: AuditKafka, tables: Iterable[AuditedTable]) -> dict[str, str]:
    ends = access.ends({each.topic for each in tables})
    refused = {}
    for each in tables:
        if (found := ends.get(each.topic)) is None:
            refused[each.name] = f"topic {each.topic} does not exist: create it"
        elif found.unread:
            refused[each.name] = f"topic {each.topic} cannot be read: {found.unread}"
    return refused


def _read_rows(
    access: AuditKafka,
    capture: Capture,
    mapping: TableMappings,
    chosen: set[str],
    folder: Path,
    terms: CaptureTerms,
) -> tuple[CaptureAudit, Callable[[bytes], bool]]:
    """Read the rows into a folder, all as of one moment; also return whether a position in Kafka
    includes all that they show."""
    tables, why_not = audited(mapping)
    tables = {place: each for place, each in tables.items() if each.name in chosen}
    why_not |= _without_topic(access, tables.values())
    rows = {}
    with open_snapshot(mapping, capture.database) as snapshot:
        why_not = {".".join(place): why for place, why in snapshot.refused().items()} | why_not
        refused = {name: why for name, why in why_not.items() if name in chosen}
        read = {place: each for place, each in tables.items() if each.name not in refused}
        if not read:
            reasons = "; ".join(f"table {name}: {why}" for name, why in refused.items())
            raise CommandFailed(f"no table of capture {mapping.name} can be audited: {reasons}")
        for number, (place, each) in enumerate(read.items()):
            pieces = snapshot.pieces(mapping.writers[place])
            rows[each.name] = export(folder / f"{number}.parquet", each, pieces, terms.share)
        found = list(read.values()), rows, folder, snapshot.place, terms, refused
        return CaptureAudit(mapping.name, *found), snapshot.reached
