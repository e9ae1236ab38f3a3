"""`txbroker audit`: Spark checks that every transaction, and every row of an outbox, ended as
decided."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from txbroker.cli.main import SuggestingGroup
from txbroker.cli.options import FILE, SectionOption, env_option, with_options
from txbroker.cli.output import object_output_option, output_option
from txbroker.cli.run import DRIFT, CommandFailed
from txbroker.cli.setting_options import KAFKA_SETTINGS, setting_options, settings_from

F = TypeVar("F", bound=Callable[..., Any])

AUDIT_SETTINGS = (*KAFKA_SETTINGS, "data_dir", "topic_prefix", "dedup_window_s")
RUNS_SHOWN = 20
LAST = "last"


@click.group("audit", cls=SuggestingGroup)
def command() -> None:
    """Prove from Kafka's topics that every transaction ended as it was decided.

    Apache Spark reads the topics, independently of the proxies. It needs Java 17 or 21, and: pip
    install 'txbroker[spark]'.
    """


_spark_option = partial(click.option, cls=SectionOption, section="Spark", brief=True)
_SPARK_OPTIONS: Callable[[F], F] = with_options(
    env_option(
        "--master",
        "The Spark master: local[N], spark://HOST:PORT, yarn or k8s://URL.",
        section="Spark",
        metavar="URL",
        default="",
        shown="local[*]",
    ),
    env_option(
        "--deploy-mode",
        "Where Spark's driver runs: on this machine, or in the cluster of --master (yarn, k8s).",
        section="Spark",
        brief=True,
        type=click.Choice(["client", "cluster"]),
        default="client",
    ),
    _spark_option(
        "--conf",
        metavar="KEY=VALUE",
        multiple=True,
        help="A Spark setting, such as spark.driver.memory=4g. Repeatable.",
    ),
    _spark_option("--verbose", is_flag=True, help="Show the output of Spark and Java on stderr."),
)


def _seconds(name: str, default: float, text: str) -> Callable[[F], F]:
    kind: dict[str, Any] = {"type": float, "default": default, "metavar": "SECONDS"}
    return env_option(name, text, section="Judgement", brief=True, **kind)


_AGE_OPTIONS: Callable[[F], F] = with_options(
    _seconds("--late-after-s", 60.0, "A commit that is older and not visible is late."),
    _seconds("--lost-after-s", 600.0, "A commit that is older and not visible is lost."),
    _seconds(
        "--overdue-after-s",
        86_400.0,
        "A pending transaction is overdue if its first check has been due for longer.",
    ),
)


_business_option = partial(click.option, cls=SectionOption, section="Business rows", brief=True)


@command.command("run")
@setting_options(AUDIT_SETTINGS)
@env_option(
    "--out",
    "Location of the Parquet tables: a folder, or a URI that Spark can write, such as hdfs://… or "
    "s3a://….",
    shown="audit in --data-dir",
    metavar="FOLDER",
)
@env_option(
    "--full",
    "Read all topics from their beginning, not from the end of the last run.",
    is_flag=True,
)
@_AGE_OPTIONS
@click.option(
    "--business",
    cls=SectionOption,
    section="Business rows",
    metavar="jdbc:…|parquet:…",
    help="Compare with your business rows: a JDBC URL, or `parquet:` and a folder or URI.",
)
@_business_option(
    "--table",
    metavar="NAME",
    help="With --business, the table of these rows; for Parquet a subfolder.",
)
@_business_option(
    "--id-column", metavar="NAME", help="With --business, the column of the transaction id."
)
@_business_option(
    "--group",
    metavar="NAME",
    multiple=True,
    help="With --business, only this producer group writes such rows. Repeatable.",
)
@env_option(
    "--business-user",
    "With --business jdbc:…, the database user.",
    section="Business rows",
    brief=True,
    metavar="NAME",
)
@env_option(
    "--business-password-file",
    "The file with that user's password.",
    section="Business rows",
    brief=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
)
@click.option(
    "--report", type=FILE, metavar="FILE", help="Write a report with plots to this HTML file."
)
@_SPARK_OPTIONS
@object_output_option
@click.pass_context
def run_command(
    context: click.Context,
    /,
    config: Path | None,
    output: str,
    out: str | None,
    full: bool,
    report: Path | None,
    **options: Any,
) -> None:
    """Audit all transactions up to now, once.

    Exit code 4: a transaction did not end as it was decided.
    """
    from txbroker.cli.audit import run as audits
    from txbroker.cli.audit.output import drift_in_words, show_run, unpublished_in_words

    spark, where = audits.spark_settings(options)
    ages_ms, business = audits.age_limits(options), audits.business_table(options)
    settings = settings_from(config, options)
    if where == "cluster":
        context.exit(audits.send_to_cluster(spark, settings, context))
    result = audits.run_once(settings, spark, ages_ms, business, out=out, full=full, report=report)
    show_run(result.summary, output)
    for run in result.unpublished:
        click.echo(unpublished_in_words(run), err=True)
    click.echo(drift_in_words(result.summary), err=True)
    if result.has_drift:
        context.exit(DRIFT)


@command.command("stream")
@setting_options(AUDIT_SETTINGS)
@env_option(
    "--checkpoint",
    "Spark's checkpoint, a folder or URI. With it a restarted stream resumes without gaps or "
    "duplicates.",
    shown="audit-stream in --data-dir",
    metavar="FOLDER",
)
@_seconds("--every-s", 3.0, "Interval between judgements.")
@_AGE_OPTIONS
@_SPARK_OPTIONS
@click.pass_context
def stream_command(
    context: click.Context, /, config: Path | None, checkpoint: str | None, **options: Any
) -> None:
    """Audit transactions continuously, until SIGINT or SIGTERM.

    Findings go to the topic `PREFIX.audit.drift`, the summary to the proxies' metrics.
    """
    from txbroker.cli.audit import run as audits

    spark, where = audits.spark_settings(options)
    every_s, ages_ms = audits.seconds(options, "every_s"), audits.age_limits(options)
    settings = settings_from(config, options)
    if where == "cluster":
        context.exit(audits.send_to_cluster(spark, settings, context))
    audits.follow(settings, spark, ages_ms, checkpoint=checkpoint, every_s=every_s)


@command.command("outbox")
@click.argument("url", envvar="TXBROKER_DATABASE_URL")
@setting_options(KAFKA_SETTINGS)
@_seconds(
    "--keep-s",
    86_400.0,
    "How long the relays keep finished rows: a younger record without a row is a stray.",
)
@click.option(
    "--topic",
    "topics",
    metavar="NAME",
    multiple=True,
    help="Read this topic, too, of which the table has no row. Repeatable.",
)
@_SPARK_OPTIONS
@object_output_option
@click.pass_context
def outbox_command(
    context: click.Context,
    /,
    url: str,
    config: Path | None,
    topics: tuple[str, ...],
    output: str,
    **options: Any,
) -> None:
    """Compare the rows of an outbox with the records that its relays wrote.

    URL is that of the database, as of `txbroker outbox create`. All topics of the rows are read
    whole. Exit code 4: a row is not visible exactly once and unchanged, or a record has no
    committed row.
    """
    from txbroker.cli.audit import run as audits
    from txbroker.cli.audit.outbox import outbox_in_words, run_outbox, show_outbox

    spark, where = audits.spark_settings(options)
    keep_s = audits.seconds(options, "keep_s")
    if where == "cluster":
        raise click.UsageError(
            "audit outbox reaches the database from this machine: leave --deploy-mode out"
        )
    summary = run_outbox(settings_from(config, options), spark, url, keep_s, topics)
    show_outbox(summary, output)
    click.echo(outbox_in_words(summary), err=True)
    if summary.drift:
        context.exit(DRIFT)


@command.command("show")
@click.argument("run", required=False)
@setting_options(("data_dir",))
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=RUNS_SHOWN,
    show_default=True,
    help="Maximum number of runs.",
)
@output_option
def show_command(
    run: str | None, config: Path | None, limit: int, output: str, **options: Any
) -> None:
    """Show past runs, newest first, or one of them.

    RUN is the name of a run, or `last`. Works without Spark.
    """
    from txbroker.cli.audit.output import show_run, show_runs
    from txbroker.cli.audit.run import journal_of

    journal = journal_of(settings_from(config, options))
    if run is None:
        show_runs(journal.runs(limit), output, f"There is no run yet in {journal.path}.")
        return
    runs = journal.runs(1) if run == LAST else [journal.get(run)]
    if not runs or runs[0] is None:
        raise CommandFailed(
            f"there is no run {run} in {journal.path}: `txbroker audit show` lists all runs"
        )
    show_run(runs[0], output, heading=True)
