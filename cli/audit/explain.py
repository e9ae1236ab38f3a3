"""Shows why an audit came to a verdict or a finding."""

from typing import TYPE_CHECKING

import click
import msgspec

from txbroker.cli.audit.acknowledge import finding_id
from txbroker.cli.audit.output import show_parts
from txbroker.cli.audit.run import journal_of, output_folder
from txbroker.cli.output import Row, TableColumn, clock, printable, show_data
from txbroker.config.settings import Settings
from txbroker.errors import needs
from txbroker.spark.session import SparkSettings

if TYPE_CHECKING:
    from txbroker.spark.query.explain import Explanation

_RECORDS_SHOWN = 25
_RECORDS = (
    TableColumn("AT", lambda row: clock(row["at_ms"])),
    TableColumn("RECORD", lambda row: row["kind"], keep=True),
    TableColumn("PLACE", keep=True),
    TableColumn("WHAT", text=True),
    TableColumn("RUN", wide=True),
)
_FINDINGS = (
    TableColumn("FINDING", lambda row: row["kind"], keep=True),
    TableColumn("STATE", keep=True),
    TableColumn("SEVERITY"),
    TableColumn("OPENED", lambda row: row["opened_at"]),
    TableColumn("CLOSED", lambda row: row["closed_at"] or ""),
    TableColumn("RUN", lambda row: row["seen_run"], wide=True),
    TableColumn("WHY", text=True),
)


def show_explanation(
    settings: Settings, spark: SparkSettings, out: str | None, id: str, output: str
) -> None:
    """Write an explanation to stdout; as a table, heading, findings and records."""
    id = finding_id(id)
    with needs("spark"):
        from txbroker.spark.query.explain import explain
    with journal_of(settings, spark) as journal:
        found = explain(output_folder(settings, out), journal, id)
    if output in ("json", "yaml"):
        run = found.run and {"run": found.run.run, "mode": found.run.mode}
        data: Row = {**msgspec.to_builtins(found), "run": run}
        show_data(data, output)
        return
    for line in _heading(found):
        click.echo(printable(line))
    records = found.records if output == "wide" else found.records[:_RECORDS_SHOWN]
    parts = [(found.findings, _FINDINGS), (msgspec.to_builtins(records), _RECORDS)]
    show_parts(parts, output)
    if len(records) < len(found.records):
        left = len(found.records) - len(records)
        click.echo(f"There are {left:,} more records; -o wide shows all.", err=True)
    if not found.records:
        click.echo(
            "The facts of the runs that have read its records were removed: the tables show only "
            "the verdict.",
            err=True,
        )


def _heading(found: "Explanation") -> list[str]:
    row, run = found.verdict, found.run
    by = "" if run is None else f"{run.run} ({run.mode}, {clock(run.now_ms)})"
    if "@" in found.id:
        return [f"{found.id}: an unreadable record"]
    if row is None and found.is_open:
        return [f"{found.id}: it has not ended, and each run judges it again", f"judged by {by}"]
    if row is None:
        return [f"{found.id}: no row in `transactions`; expiry may have removed it"]
    verdict = [row["verdict"]] if row["verdict"] == row["state"] else [row["verdict"], row["state"]]
    lines = [f"{found.id}: {', '.join(verdict)}, group {row['grp']}"]
    times = (("prepared", "prepared_at"), ("decided", "decided_at"), ("visible", "visible_at"))
    lines.append("; ".join(f"{name} {row[at]}" for name, at in times if row[at]))
    if row["source"]:
        lines[-1] += f"; {row['decision']} by {row['source']}"
    if row["why"]:
        lines.append(f"why: {row['why']}")
    return [*filter(None, lines), f"judged by {by or row['run']}"]
