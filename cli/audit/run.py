"""Runs `txbroker audit run` and `stream`: options, Spark, the audit, and its publication."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from txbroker.cli import submit
from txbroker.cli.run import CommandFailed, usage_errors
from txbroker.config.addresses import read_secret
from txbroker.config.settings import ENV_PREFIX, SECRET_SETTINGS, Settings
from txbroker.errors import TxbrokerError, needs
from txbroker.spark.session import SparkSettings, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from txbroker.spark.business import BusinessTable
    from txbroker.spark.journal import Journal
    from txbroker.spark.progress import SparkProgress
    from txbroker.spark.schema import RunSummary, Terms, TopicNames
    from txbroker.spark.stream.stream import AuditStream

SECONDS_MAX = 1e9
KEEP_MIN_S = 300.0
POLL_S = 1.0
_BUSINESS_OPTIONS = ("table", "id_column", "group", "business_user", "business_password_file")
_SPARKS_OWN = frozenset({"master", "deploy_mode", "conf", "config"})
"""Options for `spark-submit`, or resolved here; not passed on to the cluster."""


def spark_settings(options: dict[str, Any]) -> tuple[SparkSettings, str]:
    """Remove Spark's options from `options`; return them and the deploy mode."""
    conf = dict(_setting(text) for text in options.pop("conf"))
    settings = SparkSettings(options.pop("master"), conf, options.pop("verbose"))
    where = options.pop("deploy_mode")
    if where == "cluster" and not settings.master.startswith(("yarn", "k8s://")):
        raise click.UsageError("--deploy-mode cluster needs --master yarn or --master k8s://URL")
    return settings, where


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise click.UsageError(f"--conf {text!r}: expected a Spark setting, spark.NAME=VALUE")
    return name, value


def seconds(options: dict[str, Any], name: str) -> float:
    """Remove an option from `options`; return its value, positive and finite."""
    value = float(options.pop(name))
    if not 0 < value <= SECONDS_MAX:  # also refuses NaN
        raise click.UsageError(
            f"--{name.replace('_', '-')} {value:g}: expected more than 0, at most 1e9"
        )
    return value


def age_limits(options: dict[str, Any]) -> dict[str, int]:
    """Remove the ages from `options`; return them in milliseconds, as `Terms` names them."""
    late_s, lost_s = seconds(options, "late_after_s"), seconds(options, "lost_after_s")
    if late_s > lost_s:
        raise click.UsageError(
            f"--late-after-s {late_s:g} exceeds --lost-after-s {lost_s:g}: a transaction is late "
            "before it is lost"
        )
    overdue_s = seconds(options, "overdue_after_s")
    ages_s = {"late_after_ms": late_s, "lost_after_ms": lost_s, "overdue_after_ms": overdue_s}
    return {name: round(age_s * 1000) for name, age_s in ages_s.items()}


def business_table(options: dict[str, Any]) -> "BusinessTable | None":
    """Remove the options of --business from `options`; return the table, if one is given."""
    from txbroker.spark.business import BusinessTable

    source = options.pop("business")
    given = {name: options.pop(name) for name in _BUSINESS_OPTIONS}
    if source is None:
        for name, value in given.items():
            if value:
                raise click.UsageError(f"--{name.replace('_', '-')} needs --business")
        return None
    password_file = given["business_password_file"]
    with usage_errors():
        business = BusinessTable(
            source,
            given["table"] or "",
            given["id_column"] or "",
            given["business_user"] or "",
            read_secret("--business-password-file", password_file) if password_file else "",
            tuple(given["group"]),
        )
        business.validate()
    return business


def journal_of(settings: Settings) -> "Journal":
    """Return the journal of runs; its file need not exist."""
    with needs("spark"):
        from txbroker.spark.journal import JOURNAL_FILE, Journal
    return Journal(settings.data_dir / JOURNAL_FILE)


def send_to_cluster(spark: SparkSettings, settings: Settings, context: click.Context) -> int:
    """Run this command in the cluster, and return its exit code."""
    from txbroker.spark.session import submit as send

    for secret in sorted(SECRET_SETTINGS & settings.model_fields_set):
        raise CommandFailed(
            f"{ENV_PREFIX}{secret.upper()} is not sent to the cluster: name a file that exists "
            f"there by --{secret.replace('_', '-')}-file"
        )
    name = context.command.name or ""
    return send(spark, Path(submit.__file__), [name, *arguments_again(settings, context)])


def arguments_again(settings: Settings, context: click.Context) -> list[str]:
    """Return a command's arguments, with the values from environment variables and config file."""
    arguments: list[str] = []
    for option in context.command.params:
        name = option.name or ""
        if name in _SPARKS_OWN:
            continue
        if name in Settings.model_fields:
            value = getattr(settings, name) if name in settings.model_fields_set else None
        elif context.get_parameter_source(name) is ParameterSource.DEFAULT:
            value = None
        else:
            value = context.params[name]
        arguments += _arguments(max(option.opts, key=len), value)
    return arguments


def _arguments(option: str, value: Any) -> Sequence[str]:
    if value is None or value is False:
        return ()
    if isinstance(value, tuple):
        return [f"{option}={item}" for item in value]
    return [option] if value is True else [f"{option}={value}"]


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM act as Ctrl-C within the block, so that Spark is stopped."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def started(settings: SparkSettings) -> Iterator[tuple["SparkSession", "SparkProgress"]]:
    """Run Spark within the block, with its progress on stderr; SIGTERM acts as Ctrl-C."""
    from rich.console import Console

    from txbroker.spark.progress import SparkProgress

    console = Console(stderr=True)
    with ended_by_sigterm(), ExitStack() as stack:
        quiet = not console.is_terminal or settings.verbose
        with nullcontext() if quiet else console.status("starting Spark"):
            session = stack.enter_context(spark_session(settings))
        # Spark's own output would garble the progress bar.
        bar = SparkProgress(session, Console(quiet=True) if quiet else console)
        yield session, stack.enter_context(bar)


class AuditResult(NamedTuple):
    """A run's summary, and earlier runs whose drift was published only now."""

    summary: "RunSummary"
    unpublished: "Sequence[RunSummary]" = ()

    @property
    def has_drift(self) -> bool:
        """True if any drift is published now."""
        from txbroker.spark.access import news_of

        return any(news_of(self.summary, self.unpublished).drift.values())


def run_once(
    settings: Settings,
    spark: SparkSettings,
    ages_ms: dict[str, int],
    business: "BusinessTable | None",
    *,
    out: str | None,
    full: bool,
    report: Path | None,
) -> AuditResult:
    """Audit once, publish the result to the proxies, write the report; return the result.

    A failure after the audit itself is reported, and does not hide its result.
    """
    journal = journal_of(settings)
    if report is not None:
        from txbroker.spark.report.report import check_writable

        check_writable(report)
    result = None
    try:
        with started(spark) as (session, bar):
            from txbroker.spark.access import access_from
            from txbroker.spark.run import AuditSettings, run_audit

            audit = AuditSettings(
                out=out or str(settings.data_dir / "audit"),
                data_dir=settings.data_dir,
                names=names_of(settings),
                terms=terms_of(settings, ages_ms),
                mode="full" if full else "incremental",
                business=business,
            )
            result = AuditResult(run_audit(session, access_from(settings), audit, bar.stage))
            result = _publish(settings, journal, result.summary)
            if report is not None:
                bar.stage("writing the report")
                _report(session, report, result.summary, journal, audit.out)
    except Exception as error:
        if result is None:
            raise
        # The run is in the journal, so it counts.
        reason = str(error) if isinstance(error, TxbrokerError) else repr(error)
        click.echo(f"The result stands, but a later step failed: {reason}", err=True)
    return result


def follow(
    settings: Settings,
    spark: SparkSettings,
    ages_ms: dict[str, int],
    *,
    checkpoint: str | None,
    every_s: float,
) -> None:
    """Audit continuously until SIGINT or SIGTERM; findings go to stderr too."""
    with started(spark) as (session, bar):
        from txbroker.spark.access import access_from
        from txbroker.spark.stream.stream import StreamSettings, start_stream

        terms = terms_of(settings, ages_ms)
        audit = StreamSettings(
            checkpoint=checkpoint or str(settings.data_dir / "audit-stream"),
            names=names_of(settings),
            terms=terms,
            every_s=every_s,
            keep_s=max(KEEP_MIN_S, (terms.dedup_window_ms + terms.late_after_ms) / 1000 * 2),
        )
        stream = start_stream(session, access_from(settings), audit)
        bar.stage("watching")
        click.echo(f"Watching {audit.names.half} on {settings.kafka}", err=True)
        try:
            _report_until_end(stream)
        except KeyboardInterrupt:
            click.echo("Stopped.", err=True)
        finally:
            stream.stop()


def _report_until_end(stream: "AuditStream") -> None:
    from txbroker.cli.audit.output import kinds_in_words

    reported: dict[str, int] = {}
    strangers = 0
    while not stream.wait(POLL_S):
        summary = stream.summary()
        if summary.drift and summary.drift != reported:
            click.echo(f"Drift! {kinds_in_words(summary.drift)}.", err=True)
        reported = summary.drift
        if summary.strangers > strangers:
            strangers = summary.strangers
            click.echo(
                f"{strangers} records arrived after the stream had dropped their transactions, and "
                "were not judged: run `txbroker audit run` to judge them.",
                err=True,
            )


def names_of(settings: Settings) -> "TopicNames":
    """Return the topics that an audit reads and writes."""
    from txbroker.spark.schema import TopicNames

    return TopicNames.of(settings.topic_prefix)


def terms_of(settings: Settings, ages_ms: dict[str, int]) -> "Terms":
    """Return the terms of judgement."""
    from txbroker.spark.schema import Terms

    return Terms(now_ms=0, dedup_window_ms=round(settings.dedup_window_s * 1000), **ages_ms)


def _report(
    session: "SparkSession", path: Path, summary: "RunSummary", journal: "Journal", out: str
) -> None:
    from txbroker.spark.folders import read_verdicts
    from txbroker.spark.report.report import write_report

    verdicts = read_verdicts(session, out, (summary.run,))
    write_report(path, summary, journal.runs(), verdicts)
    click.echo(f"The report is in {path}", err=True)


def _publish(settings: Settings, journal: "Journal", summary: "RunSummary") -> AuditResult:
    """Publish a run to the proxies, and earlier ones that ended before publishing."""
    from txbroker.kafka.client.settings import KafkaSettings
    from txbroker.spark.access import publish

    unpublished: list[RunSummary] | None = None
    try:
        unpublished = [run for run in journal.unpublished() if run.run < summary.run]
    except TxbrokerError as error:
        click.echo(f"Unpublished earlier runs cannot be read: {error}", err=True)
    try:
        asyncio.run(publish(KafkaSettings.from_configuration(settings), summary, unpublished or ()))
        if unpublished is not None:  # else the next run publishes those that this one missed
            journal.mark_published(summary.run)
    except TxbrokerError as error:
        # The run still counts, and its result is shown.
        click.echo(
            f"The result was not published to the proxies; the next run will do it: {error}",
            err=True,
        )
    return AuditResult(summary, unpublished or ())
