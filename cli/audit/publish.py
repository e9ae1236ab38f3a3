"""Publishes the result of a run: to the proxies, in the drift topic, and as a report."""

import asyncio
from collections.abc import Sequence
from itertools import takewhile
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
from txbroker.spark.report.summary import count_unread
from txbroker.spark.report.tables import DRIFT_DAYS, report_tables
from txbroker.spark.schema import Acknowledgement, RunSummary, Thresholds
from txbroker.spark.storage.folder import data_folder
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
    """Publish a run to the proxies if it judged all transactions, with earlier ones that ended
    before that, and changes of findings in the drift topic; return the earlier ones with drift.

    A failure is reported: the run counts, and the next one publishes it.
    """
    kafka = KafkaSettings.from_configuration(settings)
    earlier = _publish(kafka, summary, journal) if summary.continues else ()
    try:
        _write_events(session, settings, kafka, journal, out)
    except TxbrokerError as error:
        click.echo(
            f"Changes of findings were not written to {kafka.drift_topic}; the next run will do "
            f"it: {error}",
            err=True,
        )
    return earlier


def _publish(kafka: KafkaSettings, summary: RunSummary, journal: Journal) -> Sequence[RunSummary]:
    earlier: list[RunSummary] | None = None
    try:
        unpublished = [run for run in journal.unpublished() if run.run < summary.run]
        earlier = [run for run in unpublished if run.open_drift]
    except TxbrokerError as error:
        click.echo(f"Unpublished earlier runs cannot be read: {error}", err=True)
    try:
        asyncio.run(access.publish(kafka, summary, earlier or ()))
        if earlier is not None:  # else the next run publishes those that this one missed
            journal.mark_published(summary.run)
    except TxbrokerError as error:
        click.echo(
            f"The result was not published to the proxies; the next run will do it: {error}",
            err=True,
        )
    return earlier or ()


def _write_events(
    session: SparkSession, settings: Settings, kafka: KafkaSettings, journal: Journal, out: str
) -> None:
    runs = journal.unwritten()
    if not runs:
        return
    # Compaction would show rows twice for a moment.
    with data_folder(settings.data_dir, session).tables_locked():
        store = open_store(session, out)
        waiting = set(store.staged_runs())
        runs = list(takewhile(lambda run: run.run not in waiting, runs))
        if runs:
            asyncio.run(write_events(kafka, store.read(DRIFT), runs))
            journal.mark_written(runs[-1].run)


def report_run(
    session: SparkSession,
    path: Path,
    summary: RunSummary,
    journal: Journal,
    settings: Settings,
    out: str,
) -> None:
    """Write the report of a run."""
    broken = summary.set_aside
    if summary.continues and summary.quarantined > len(broken):
        unread = read_broken(session, Folders(out), summary.run)
        broken = count_unread(unread, SET_ASIDE_SHOWN).shown
    daily = journal.daily(DRIFT_DAYS, summary.started_ms)
    with data_folder(settings.data_dir, session).tables_locked():
        tables = report_tables(open_store(session, out), summary.now_ms, daily)
    write_report(path, summary, journal.runs(), tables, broken)
    click.echo(f"The report is in {path}", err=True)
