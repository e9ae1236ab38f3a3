"""Shows the results of `txbroker audit outbox` and `capture`."""

import click
import msgspec

from txbroker.cli.audit.output import (
    EXAMPLES_SHOWN,
    ONE,
    count_row,
    kinds_in_words,
    show_parts,
)
from txbroker.cli.output import Row, TableColumn, printable, show_data, show_rows
from txbroker.cli.run import DRIFT
from txbroker.spark.rows.capture import CaptureSummary
from txbroker.spark.rows.outbox import OutboxSummary

_STATES = {
    "LOCAL_COMMIT": "committed, and waiting for a relay",
    "GLOBAL_COMMIT": "visible, by the table",
    "LOCAL_ROLLBACK": "rolled back",
    "UNKNOWN": "undecided",
    "MESSAGE_ERROR": "given up: `txbroker outbox list --state MESSAGE_ERROR` shows why",
}
_FINDINGS = TableColumn("FINDINGS", lambda row: ", ".join(row["findings"]), text=True)
_OF_OUTBOX = (
    TableColumn("ID", keep=True),
    TableColumn("STATE"),
    TableColumn("TOPIC"),
    _FINDINGS,
    TableColumn("RECORDS", lambda row: ", ".join(row["places"]), text=True),
)
_OF_CAPTURE = (
    TableColumn("KEY", keep=True),
    TableColumn("TABLE"),
    _FINDINGS,
    TableColumn("COLUMNS", lambda row: ", ".join(row["columns"]), text=True),
    TableColumn("RECORD", lambda row: row["place"]),
)
_UNREAD = (
    TableColumn("NOT COMPARED", lambda row: row["what"], keep=True),
    TableColumn("WHY", text=True),
)
_APART = {
    "purged": "ids of older records, whose rows may have been purged",
    "gone": "rows whose records retention or compaction may have removed",
    "young": "changed just before the rows were read, or may be hidden yet",
    "older": "rows without a record, which may be older than the capture",
    "partly": "rows of which the last record lacks large columns that an update left as they were",
    "unshown": "rows with a value that no record can show",
    "set_aside": "records with the capture's name that are of none of these tables",
}


def end_with(context: click.Context, summary: OutboxSummary | CaptureSummary, output: str) -> None:
    """Show a result; exit if it has drift."""
    _show(summary, output)
    click.echo(_in_words(summary), err=True)
    if summary.drift:
        context.exit(DRIFT)


def _show(summary: OutboxSummary | CaptureSummary, output: str) -> None:
    """Write a result to stdout; as a table its counts and examples."""
    found = msgspec.to_builtins(summary)
    if output in ("json", "yaml"):
        show_data(found, output)
        return
    show_rows(_counts(summary), ONE, output, "There are neither rows nor records.")
    most = None if output == "wide" else EXAMPLES_SHOWN
    limits = {**summary.unread, **found.get("unjudged", {})}
    of_kind = _OF_OUTBOX if isinstance(summary, OutboxSummary) else _OF_CAPTURE
    unread = [{"what": what, "why": why} for what, why in limits.items()]
    show_parts([(found["examples"][:most], of_kind), (unread, _UNREAD)], output)


def _counts(summary: OutboxSummary | CaptureSummary) -> list[Row]:
    rows = [count_row(*of, _STATES.get(of[0], "rows")) for of in summary.rows.items()]
    if summary.records:
        rows.append(count_row("records", summary.records, f"records of {printable(summary.title)}"))
    apart = {name: getattr(summary, name, 0) for name in _APART}
    rows += [count_row(name, count, _APART[name]) for name, count in apart.items() if count]
    meanings = {kind.name: kind.meaning for kind in summary.kinds}
    return [*rows, *(count_row(*of, meanings[of[0]], "yes") for of in summary.drift.items())]


def _in_words(summary: OutboxSummary | CaptureSummary) -> str:
    """Return a result in a sentence."""
    name = printable(summary.title)
    text = (
        f"{name[:1].upper()}{name[1:]}: {sum(summary.rows.values()):,} rows, "
        f"{summary.records:,} records."
    )
    if not summary.drift:
        return f"{text} No drift."
    return f"{text} Drift! {kinds_in_words(summary.drift, summary.kinds)}."
