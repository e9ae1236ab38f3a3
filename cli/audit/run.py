"""What `txbroker audit run` and `stream` do with their options: Spark, the cut, the run."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource
from msgspec import Struct

from txbroker.cli import submit
from txbroker.cli.run import CommandFailed
from txbroker.config.addresses import read_secret
from txbroker.config.settings import ENV_PREFIX, SECRET_SETTINGS, Settings
from txbroker.errors import ConfigurationError, TxbrokerError
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
TELL_S = 1.0
_BUSINESS_OPTIONS = ("table", "id_column", "group", "business_user", "business_password_file")
_SPARKS_OWN = frozenset({"master", "deploy_mode", "conf", "config"})
"""Options that `spark-submit` is given, or that are resolved here; not passed on to the cluster."""


class AgeLimits(Struct, frozen=True):
    """When a commit that is not visible is late, and when lost; when a first check is overdue."""

    late_after_ms: int
    lost_after_ms: int
    overdue_after_ms: int


class RunOptions(Struct, frozen=True):
    """The options of one audit; see its command's help."""

    out: str | None
    full: bool
    ages: AgeLimits
    business: "BusinessTable | None"
    report: Path | None


class StreamOptions(Struct, frozen=True):
    """The options of a stream; see its command's help."""

    checkpoint: str | None
    every_s: float
    ages: AgeLimits


def spark_settings(options: dict[str, Any]) -> tuple[SparkSettings, str]:
    """Take Spark's options out of a command's; return them, and where the driver runs.

    Raises:
        click.UsageError: they do not read, or contradict one another.
    """
    conf = dict(_setting(text) for text in options.pop("conf"))
    settings = SparkSettings(options.pop("master"), conf, options.pop("verbose"))
    where = options.pop("deploy_mode")
    if where == "cluster" and not settings.master.startswith(("yarn", "k8s://")):
        raise click.UsageError("--deploy-mode cluster needs --master yarn or --master k8s://URL")
    return settings, where


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise click.UsageError(f"--conf {text!r}: expected a setting of Spark's, spark.NAME=VALUE")
    return name, value


def _seconds(options: dict[str, Any], name: str) -> float:
    value = float(options.pop(name))
    if not 0 < value <= SECONDS_MAX:  # neither is NaN
        raise click.UsageError(f"--{name.replace('_', '-')} {value:g}: expected 0 to 1e9 seconds")
    return value


def _ages(options: dict[str, Any]) -> AgeLimits:
    late_s, lost_s = _seconds(options, "late_after_s"), _seconds(options, "lost_after_s")
    if late_s > lost_s:
        raise click.UsageError(
            f"--late-after-s {late_s:g} is more than --lost-after-s {lost_s:g}: what is lost has "
            "been late before"
        )
    overdue_s = _seconds(options, "overdue_after_s")
    return AgeLimits(*(round(seconds * 1000) for seconds in (late_s, lost_s, overdue_s)))


def run_options(options: dict[str, Any]) -> RunOptions:
    """Take an audit's own options out of a command's, and return them.

    Raises:
        click.UsageError: they contradict one another.
    """
    return RunOptions(
        out=options.pop("out"),
        full=options.pop("full"),
        ages=_ages(options),
        business=_business(options),
        report=options.pop("report"),
    )


def _business(options: dict[str, Any]) -> "BusinessTable | None":
    from txbroker.spark.business import BusinessTable

    source = options.pop("business")
    given = {name: options.pop(name) for name in _BUSINESS_OPTIONS}
    if source is None:
        for name, value in given.items():
            if value:
                raise click.UsageError(f"--{name.replace('_', '-')} goes with --business")
        return None
    password_file = given["business_password_file"]
    try:
        business = BusinessTable(
            source,
            given["table"] or "",
            given["id_column"] or "",
            given["business_user"] or "",
            read_secret("--business-password-file", password_file) if password_file else "",
            tuple(given["group"]),
        )
        business.validate()
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from None
    return business


def stream_options(options: dict[str, Any]) -> StreamOptions:
    """Take a stream's own options out of a command's, and return them.

    Raises:
        click.UsageError: they contradict one another.
    """
    return StreamOptions(options.pop("checkpoint"), _seconds(options, "every_s"), _ages(options))


def journal_of(settings: Settings) -> "Journal":
    """Return the journal of the runs, a file that need not be there yet.

    Raises:
        CommandFailed: what it needs is not installed.
    """
    try:
        from txbroker.spark.journal import JOURNAL_FILE, Journal
    except ModuleNotFoundError as error:
        raise CommandFailed(
            f"the Python package {error.name} is missing, run: pip install 'txbroker[spark]'"
        ) from None
    return Journal(settings.data_dir / JOURNAL_FILE)


def send_to_cluster(spark: SparkSettings, settings: Settings, context: click.Context) -> int:
    """Have the cluster run this very command, and return how that ended.

    Raises:
        CommandFailed: a secret setting is set here, and would not reach the cluster.
    """
    from txbroker.spark.session import submit as send

    for secret in sorted(SECRET_SETTINGS & settings.model_fields_set):
        raise CommandFailed(
            f"{ENV_PREFIX}{secret.upper()} does not go to the cluster with the audit: name a file "
            f"that is there by --{secret.replace('_', '-')}-file"
        )
    name = context.command.name or ""
    return send(spark, Path(submit.__file__), [name, *arguments_again(settings, context)])


def arguments_again(settings: Settings, context: click.Context) -> list[str]:
    """Return a command's arguments as they would be given where no environment variable and no
    config file of this machine is there."""
    found: list[str] = []
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
        found += _given(max(option.opts, key=len), value)
    return found


def _given(option: str, value: Any) -> Sequence[str]:
    if value is None or value is False:
        return ()
    if isinstance(value, tuple):
        return [f"{option}={each}" for each in value]
    return [option] if value is True else [f"{option}={value}"]


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end what is done within as Ctrl-C does: Spark is stopped, nothing left behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def started(settings: SparkSettings) -> Iterator[tuple["SparkSession", "SparkProgress"]]:
    """Start Spark, with its progress on stderr, and end it; SIGTERM ends it as Ctrl-C does.

    Raises:
        TxbrokerError: it does not start, or fails later; the sentence says what to do.
    """
    from rich.console import Console

    from txbroker.spark.progress import SparkProgress

    console = Console(stderr=True)
    with ended_by_sigterm(), ExitStack() as stack:
        quiet = not console.is_terminal or settings.verbose
        with nullcontext() if quiet else console.status("starting Spark"):
            session = stack.enter_context(spark_session(settings))
        # What Spark says would go through the bar.
        bar = SparkProgress(session, Console(quiet=True) if quiet else console)
        yield session, stack.enter_context(bar)


class AuditResult(NamedTuple):
    """What an audit came to.

    Attributes:
        summary: of the run.
        untold: earlier runs whose drift nobody was told of until now.
    """

    summary: "RunSummary"
    untold: "Sequence[RunSummary]" = ()

    @property
    def has_drift(self) -> bool:
        """Whether there is any that is told now."""
        from txbroker.spark.report.news import news_of

        return any(news_of(self.summary, self.untold).drift.values())


def run_once(settings: Settings, spark: SparkSettings, options: RunOptions) -> AuditResult:
    """Audit once, tell the proxies, write the report; return what was found.

    Once something was found it is told, whatever fails after that.

    Raises:
        TxbrokerError: nothing was found out; the sentence says what to do.
    """
    journal = journal_of(settings)
    if options.report is not None:
        from txbroker.spark.report.report import check_writable

        check_writable(options.report)
    found = None
    try:
        with started(spark) as (session, bar):
            from txbroker.spark.access import access_from
            from txbroker.spark.run import AuditSettings, run_audit

            wanted = AuditSettings(
                out=options.out or str(settings.data_dir / "audit"),
                data_dir=settings.data_dir,
                names=names_of(settings),
                terms=terms_of(settings, options.ages),
                mode="full" if options.full else "incremental",
                business=options.business,
            )
            found = AuditResult(run_audit(session, access_from(settings), wanted, bar.stage))
            found = _publish(settings, journal, found.summary)
            if options.report is not None:
                bar.stage("writing the report")
                _report(session, options.report, found.summary, journal, wanted.out)
    except Exception as error:
        if found is None:
            raise
        # Whatever it is, the run is in the journal and counts.
        said = str(error) if isinstance(error, TxbrokerError) else repr(error)
        click.echo(f"What was found stands, but something failed after it: {said}", err=True)
    return found


def follow(settings: Settings, spark: SparkSettings, options: StreamOptions) -> None:
    """Audit what goes by until SIGINT or SIGTERM; what is found is told on stderr too.

    Raises:
        TxbrokerError: with a sentence that says what to do.
    """
    with started(spark) as (session, bar):
        from txbroker.spark.access import access_from
        from txbroker.spark.stream.stream import StreamSettings, start_stream

        terms = terms_of(settings, options.ages)
        wanted = StreamSettings(
            checkpoint=options.checkpoint or str(settings.data_dir / "audit-stream"),
            names=names_of(settings),
            terms=terms,
            every_s=options.every_s,
            keep_s=max(KEEP_MIN_S, (terms.dedup_window_ms + terms.late_after_ms) / 1000 * 2),
        )
        stream = start_stream(session, access_from(settings), wanted)
        bar.stage("watching")
        click.echo(f"Watching {wanted.names.half} on {settings.kafka}", err=True)
        try:
            _tell_until_it_ends(stream)
        except KeyboardInterrupt:
            click.echo("Stopped.", err=True)
        finally:
            stream.stop()


def _tell_until_it_ends(stream: "AuditStream") -> None:
    from txbroker.cli.audit.output import kinds_in_words

    told: dict[str, int] = {}
    strangers = 0
    while not stream.wait(TELL_S):
        summary = stream.summary()
        if summary.drift and summary.drift != told:
            click.echo(f"Drift! {kinds_in_words(summary.drift)}.", err=True)
        told = summary.drift
        if summary.strangers > strangers:
            strangers = summary.strangers
            click.echo(
                f"{strangers} records came when the stream had forgotten their transactions: not "
                "judged. `txbroker audit run` judges them.",
                err=True,
            )


def names_of(settings: Settings) -> "TopicNames":
    """Return the names of the topics that an audit reads and writes."""
    from txbroker.spark.schema import TopicNames

    topics = ("half", "op", "parked", "audit", "audit.drift")
    return TopicNames(*(settings.topic(name) for name in topics))


def terms_of(settings: Settings, ages: AgeLimits) -> "Terms":
    """Return what is judged by."""
    from txbroker.spark.schema import Terms

    return Terms(
        now_ms=0,
        dedup_window_ms=round(settings.dedup_window_s * 1000),
        late_after_ms=ages.late_after_ms,
        lost_after_ms=ages.lost_after_ms,
        overdue_after_ms=ages.overdue_after_ms,
    )


def _report(
    session: "SparkSession", path: Path, summary: "RunSummary", journal: "Journal", out: str
) -> None:
    from txbroker.spark.folders import read_verdicts
    from txbroker.spark.report.report import write_report

    verdicts = read_verdicts(session, out, (summary.run,))
    write_report(path, summary, journal.runs(), verdicts)
    click.echo(f"The report is in {path}", err=True)


def _publish(settings: Settings, journal: "Journal", summary: "RunSummary") -> AuditResult:
    """Tell the proxies of a run, and of earlier ones that ended before they had told it."""
    from txbroker.kafka.client.settings import KafkaSettings
    from txbroker.spark.report.news import publish

    untold: list[RunSummary] | None = None
    try:
        untold = [run for run in journal.untold() if run.run < summary.run]
    except TxbrokerError as error:
        click.echo(f"What earlier runs have not told is not known: {error}", err=True)
    try:
        asyncio.run(publish(KafkaSettings.from_configuration(settings), summary, untold or ()))
        if untold is not None:  # else the next run tells what this one could not look up
            journal.told(summary.run)
    except TxbrokerError as error:
        # The run counts all the same, and what it found is said.
        click.echo(f"The proxies were not told; the next run tells them: {error}", err=True)
    return AuditResult(summary, untold or ())
