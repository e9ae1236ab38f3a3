"""Runs `txbroker audit run` and `stream`: options, Spark, the audit, and its publication."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from txbroker.cli import submit
from txbroker.cli.options import Moment
from txbroker.cli.run import CommandFailed
from txbroker.config.settings import ENV_PREFIX, SECRET_SETTINGS, Settings
from txbroker.errors import needs
from txbroker.spark.launch.remote import check_shared
from txbroker.spark.session import SparkSettings, require_pyspark, spark_session
from txbroker.spark.storage.local import check_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.console import Console

    from txbroker.spark.journal import Journal
    from txbroker.spark.progress import SparkProgress
    from txbroker.spark.schema import Terms, TopicNames
    from txbroker.spark.stream.stream import AuditStream

KEEP_MIN_S = 300.0
POLL_S = 1.0
_SPARKS_OWN = frozenset({"master", "deploy_mode", "conf", "config"})
"""Options for `spark-submit`, or resolved here; not passed on to the cluster."""


def spark_settings(options: dict[str, Any], *, optional: bool = False) -> tuple[SparkSettings, str]:
    """Remove Spark's options from `options`; return them and the deploy mode.

    `optional`: the command may not need Spark; others are refused without pyspark.
    """
    if not optional:
        require_pyspark()
    conf = dict(_setting(text) for text in options.pop("conf"))
    remote, where = options.pop("remote"), options.pop("deploy_mode")
    settings = SparkSettings(options.pop("master"), conf, options.pop("verbose"), remote=remote)
    if where == "cluster" and remote:
        raise click.UsageError(
            "--deploy-mode cluster and --remote exclude one another: leave one of them out"
        )
    if where == "cluster" and not settings.master.startswith(("yarn", "k8s://")):
        raise click.UsageError("--deploy-mode cluster needs --master yarn or --master k8s://URL")
    return settings, where


def local_driver(options: dict[str, Any], *, optional: bool = False) -> SparkSettings:
    """Remove Spark's options from `options`, and return them for a driver on this machine."""
    settings, where = spark_settings(options, optional=optional)
    if where == "cluster":
        raise click.UsageError("this command needs this machine: leave --deploy-mode out")
    return settings


def output_folder(settings: Settings, out: str | None) -> str:
    """Return the folder of the tables, an absolute path or a URI: Delta and a catalogue read a
    relative one from another folder. `out`: the one that is given."""
    out = out or f"{settings.data_dir}/audit"
    return out if urlsplit(out).scheme else str(Path(out).absolute())


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.startswith("spark."):
        raise click.UsageError(f"--conf {text!r}: expected a Spark setting, spark.NAME=VALUE")
    return name, value


def age_limits(options: dict[str, Any]) -> dict[str, int]:
    """Remove the ages from `options`; return them in milliseconds, as `Terms` names them."""
    names = ("late_after", "lost_after", "overdue_after")
    ages_s = {name: options.pop(f"{name}_s") for name in names}
    late_s, lost_s = ages_s["late_after"], ages_s["lost_after"]
    if late_s > lost_s:
        raise click.UsageError(
            f"--late-after-s {late_s:g} exceeds --lost-after-s {lost_s:g}: a transaction is late "
            "before it is lost"
        )
    return {f"{name}_ms": round(age_s * 1000) for name, age_s in ages_s.items()}


@contextmanager
def journal_of(settings: Settings, spark: SparkSettings) -> Iterator["Journal"]:
    """Yield the journal of runs; its file need not exist. Only that of a URI needs Spark."""
    with needs("spark"):
        from txbroker.spark.journal import Journal
        from txbroker.spark.storage.folder import data_folder
    with ExitStack() as stack:
        session = None
        if isinstance(settings.data_dir, str):
            session, _ = stack.enter_context(session_of(spark, settings.data_dir))
        yield Journal(data_folder(settings.data_dir, session).journal)


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
        if isinstance(option.type, Moment) and value is not None:
            value = option.type.text(value)  # an age began to count here
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


def check_server(settings: SparkSettings, *folders: str) -> str:
    """Return the URL of the Spark Connect server, if there is one; refuse folders that it cannot
    share with this machine."""
    server = settings.server
    for folder in folders if server else ():
        check_local(folder)
    return server


@contextmanager
def session_of(
    settings: SparkSettings, *folders: str
) -> Iterator[tuple["SparkSession", "Console"]]:
    """Run Spark within the block, and yield the console for its progress; SIGTERM acts as
    Ctrl-C. `folders`: those that a server of Spark Connect has to share with this machine."""
    from rich.console import Console

    server = check_server(settings, *folders)
    console = Console(stderr=True)
    with ended_by_sigterm(), ExitStack() as stack:
        # Spark's own output would garble a progress bar.
        quiet = not console.is_terminal or settings.verbose
        with nullcontext() if quiet else console.status("starting Spark"):
            session = stack.enter_context(spark_session(settings))
            for folder in folders if server else ():
                check_shared(session, folder)
        yield session, Console(quiet=True) if quiet else console


@contextmanager
def started(
    settings: SparkSettings, *folders: str, stage: str = ""
) -> Iterator[tuple["SparkSession", "SparkProgress"]]:
    """Run Spark within the block as `session_of`, with its progress on stderr. `stage`: the first
    that it names."""
    from txbroker.spark.progress import SparkProgress

    with (
        session_of(settings, *folders) as (session, console),
        SparkProgress(session, console) as bar,
    ):
        if stage:
            bar.stage(stage)
        yield session, bar


def follow(
    settings: Settings,
    spark: SparkSettings,
    ages_ms: dict[str, int],
    *,
    checkpoint: str | None,
    since_ms: int,
    every_s: float,
) -> None:
    """Audit continuously until SIGINT or SIGTERM; findings go to stderr too."""
    if spark.server:
        raise CommandFailed(
            "audit stream does not run over Spark Connect, which would call its functions on the "
            "server, without this machine's access to Kafka: use --master, without "
            "SPARK_REMOTE, or `audit run` often"
        )
    with started(spark) as (session, bar):
        from txbroker.spark.access import access_from
        from txbroker.spark.stream.stream import StreamSettings, start_stream

        terms = terms_of(settings, ages_ms)
        audit = StreamSettings(
            checkpoint=checkpoint or f"{settings.data_dir}/audit-stream",
            names=names_of(settings),
            terms=terms,
            since_ms=since_ms,
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
