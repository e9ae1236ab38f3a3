"""Publishes the result of a run: to the proxies, in the drift topic, and as a report."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click
from pyspark.sql import SparkSession

from txbroker.config.settings import Settings
from txbroker.errors import TxbrokerError
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.spark import access
from txbroker.spark.checks import fails
from txbroker.spark.folders import Folders, read_broken
from txbroker.spark.journal import Journal
from txbroker.spark.report.report import SET_ASIDE_SHOWN, write_report
from txbroker.spark.report.summary import set_aside
from txbroker.spark.report.tables import report_tables
from txbroker.spark.schema import Acknowledgement, RunSummary, Thresholds
from txbroker.spark.tables.events import write_events
from txbroker.spark.tables.layout import DRIFT
from txbroker.spark.tables.store import open_store


class AuditResult(NamedTuple):
    """A run's summary, earlier runs whose drift was published only now, and what decides how the
    command ends."""

    summary: RunSummary
    thresholds: Thresholds
    acknowledged: Sequence[Acknowledgement] = ()
    unpublished: Sequence[RunSummary] = ()

    @property
    def fails(self) -> bool:
        """True if drift that is published now, or a failed check, is grave enough."""
        drift = access.news_of(self.summary, self.unpublished).drift
        return fails(drift, self.summary.checks, self.thresholds.exit_from)


def publish_run(
    session: SparkSession,
    settings: Settings,
    summary: RunSummary,
    journal: Journal,
    out: str,
) -> Sequence[RunSummary]:
    """Publish a run in the drift topic, and to the proxies if it judged all transactions, with
    earlier ones that ended before that; return those of them with drift."""
    earlier: list[RunSummary] | None = None
    try:
        earlier = [run for run in journal.unpublished() if run.run < summary.run]
    except TxbrokerError as error:
        click.echo(f"Unpublished earlier runs cannot be read: {error}", err=True)
    with_drift = [run for run in earlier or () if run.open_drift and run.continues]
    changed = [run for run in (*(earlier or ()), summary) if run.changed_findings]
    kafka = KafkaSettings.from_configuration(settings)
    try:
        if summary.continues:
            asyncio.run(access.publish(kafka, summary, with_drift))
        if changed:
            asyncio.run(write_events(kafka, open_store(session, out).read(DRIFT), changed))
        if earlier is not None:  # else the next run publishes those that this one missed
            journal.mark_published(summary.run, alone=not summary.continues)
    except TxbrokerError as error:
        # The run still counts, and its result is shown.
        click.echo(
            f"The result was not published to the proxies; the next run will do it: {error}",
            err=True,
        )
    return with_drift if summary.continues else ()


def report_run(
    session: SparkSession, path: Path, summary: RunSummary, journal: Journal, out: str
) -> None:
    """Write the report of a run."""
    broken = summary.set_aside
    if summary.continues and summary.quarantined > len(broken):
        broken = set_aside(read_broken(session, Folders(out), summary.run), SET_ASIDE_SHOWN)
    tables = report_tables(open_store(session, out), summary.now_ms)
    write_report(path, summary, journal.runs(), tables, broken)
    click.echo(f"The report is in {path}", err=True)
