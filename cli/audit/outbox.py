"""Runs `txbroker audit outbox`, and shows its result."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from txbroker.cli.audit.output import EXAMPLES_SHOWN, ONE, UNREAD
from txbroker.cli.audit.run import started
from txbroker.cli.output import Row, TableColumn, printable, show_data, show_rows
from txbroker.cli.run import usage_errors
from txbroker.config.settings import Settings
from txbroker.databases.urls import from_url
from txbroker.spark.access import access_from
from txbroker.spark.jdbc import driver_package
from txbroker.spark.outbox import KINDS, OutboxSummary, audit_outbox
from txbroker.spark.session import SparkSettings

_STATES = {
    "LOCAL_COMMIT": "committed, and waiting for a relay",
    "GLOBAL_COMMIT": "visible, by the table",
    "LOCAL_ROLLBACK": "rolled back",
    "UNKNOWN": "undecided",
    "MESSAGE_ERROR": "given up: `txbroker outbox list --state MESSAGE_ERROR` shows why",
}
_EXAMPLES = (
    TableColumn("ID", keep=True),
    TableColumn("STATE"),
    TableColumn("TOPIC"),
    TableColumn("FINDINGS", lambda row: ", ".join(row["findings"]), text=True),
    TableColumn("RECORDS", lambda row: ", ".join(row["places"]), text=True),
)
_PACKAGES = "spark.jars.packages"


def run_outbox(
    settings: Settings, spark: SparkSettings, url: str, keep_s: float, topics: Sequence[str]
) -> OutboxSummary:
    """Audit the outbox of a database.

    Args:
        keep_s, topics: see `audit_outbox`.
    """
    with usage_errors():
        database = from_url(url)
    given = (spark.conf.get(_PACKAGES), driver_package(database))
    packages = ",".join(name for name in given if name)
    if packages:
        spark = structs.replace(spark, conf={**spark.conf, _PACKAGES: packages})
    with (
        tempfile.TemporaryDirectory(prefix="txbroker-audit-") as folder,
        started(spark) as (session, bar),
    ):
        bar.stage("comparing rows with records")
        access = access_from(settings)
        return audit_outbox(session, access, database, Path(folder), keep_s=keep_s, topics=topics)


def show_outbox(summary: OutboxSummary, output: str) -> None:
    """Write a result to stdout; as a table its counts and examples."""
    if output in ("json", "yaml"):
        show_data(msgspec.to_builtins(summary), output)
        return
    show_rows(_counts(summary), ONE, output, "The outbox has no rows, and its topics no records.")
    most = None if output == "wide" else EXAMPLES_SHOWN
    unread = [{"topic": topic, "why": why} for topic, why in summary.unread.items()]
    for rows, columns in (
        (msgspec.to_builtins(summary.examples[:most]), _EXAMPLES),
        (unread, UNREAD),
    ):
        if rows:
            print()
            show_rows(rows, columns, output, "")


def _counts(summary: OutboxSummary) -> list[Row]:
    apart = {
        "purged": (summary.purged, "ids of older records, whose rows may have been purged"),
        "gone": (summary.gone, "rows whose records retention or compaction may have removed"),
        "young": (summary.young, "rows that became visible during the audit, or may be hidden yet"),
    }
    rows = [_row(state, count, _STATES.get(state, "")) for state, count in summary.rows.items()]
    if summary.records:
        rows.append(_row("records", summary.records, f"records of relay {summary.relay}"))
    rows += [_row(name, count, text) for name, (count, text) in apart.items() if count]
    meanings = {kind.name: kind.meaning for kind in KINDS}
    return [*rows, *(_row(*of, meanings[of[0]], drift=True) for of in summary.drift.items())]


def _row(what: str, count: int, means: str, *, drift: bool = False) -> Row:
    return {"what": what, "count": count, "means": means, "drift": "yes" if drift else ""}


def outbox_in_words(summary: OutboxSummary) -> str:
    """Return a result in a sentence."""
    text = (
        f"Outbox {printable(summary.relay)}: {sum(summary.rows.values()):,} rows, "
        f"{summary.records:,} records."
    )
    if not summary.drift:
        return f"{text} No drift."
    titles = {kind.name: kind.title for kind in KINDS}
    kinds = ", ".join(f"{titles[kind]}: {count:,}" for kind, count in summary.drift.items())
    return f"{text} Drift! {kinds}."
