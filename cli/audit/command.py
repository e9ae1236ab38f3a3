"""`txbroker audit`: Spark reads the topics and says whether every transaction ended as decided."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from txbroker.cli.lazy import SuggestingGroup
from txbroker.cli.output import output_option
from txbroker.cli.run import DRIFT, CommandFailed
from txbroker.cli.setting_options import KAFKA_SETTINGS, setting_options, settings_from

F = TypeVar("F", bound=Callable[..., Any])

AUDIT_SETTINGS = (*KAFKA_SETTINGS, "data_dir", "topic_prefix", "dedup_window_s")
RUNS_SHOWN = 20
LAST = "last"


@click.group("audit", cls=SuggestingGroup)
def command() -> None:
    """Prove from Kafka's topics that every transaction ended as it was decided.

    Apache Spark reads the topics themselves, independently of the proxies: pip install
    'txbroker[spark]', and a Java 17 or 21.
    """


def _spark_options(function: F) -> F:
    for option in reversed(
        (
            click.option(
                "--master",
                metavar="URL",
                envvar="TXBROKER_MASTER",
                default="",
                help="Where Spark works: local[N], spark://HOST:PORT, yarn or k8s://URL. "
                "[env: TXBROKER_MASTER; default: local[*]]",
            ),
            click.option(
                "--deploy-mode",
                type=click.Choice(["client", "cluster"]),
                envvar="TXBROKER_DEPLOY_MODE",
                default="client",
                help="Where Spark's driver runs: here, or in the cluster of --master (yarn, k8s). "
                "[env: TXBROKER_DEPLOY_MODE; default: client]",
            ),
            click.option(
                "--conf",
                metavar="KEY=VALUE",
                multiple=True,
                help="A setting of Spark's, such as spark.driver.memory=4g. Repeatable.",
            ),
            click.option(
                "--verbose", is_flag=True, help="Show what Spark and Java have to say, on stderr."
            ),
        )
    ):
        function = option(function)
    return function


def _age_options(function: F) -> F:
    late = click.option(
        "--late-after-s",
        type=float,
        default=60.0,
        envvar="TXBROKER_LATE_AFTER_S",
        metavar="SECONDS",
        help="A commit that is older than this and not visible is late. "
        "[env: TXBROKER_LATE_AFTER_S; default: 60]",
    )
    lost = click.option(
        "--lost-after-s",
        type=float,
        default=600.0,
        envvar="TXBROKER_LOST_AFTER_S",
        metavar="SECONDS",
        help="And one that is older than this is lost. [env: TXBROKER_LOST_AFTER_S; default: 600]",
    )
    overdue = click.option(
        "--overdue-after-s",
        type=float,
        default=86_400.0,
        envvar="TXBROKER_OVERDUE_AFTER_S",
        metavar="SECONDS",
        help="A pending transaction is overdue if its first check was due for longer than this and "
        "never made. [env: TXBROKER_OVERDUE_AFTER_S; default: 86400]",
    )
    return late(lost(overdue(function)))


@command.command("run")
@setting_options(AUDIT_SETTINGS)
@click.option(
    "--out",
    envvar="TXBROKER_OUT",
    metavar="FOLDER",
    help="Where the Parquet tables go: a folder, or a URI that Spark can write, such as "
    "hdfs://… or s3a://…. [env: TXBROKER_OUT; default: audit in --data-dir]",
)
@click.option(
    "--full",
    is_flag=True,
    envvar="TXBROKER_FULL",
    help="Read everything again. Otherwise a run goes on where the last one ended.",
)
@_age_options
@click.option(
    "--business",
    metavar="jdbc:…|parquet:…",
    help="Compare with the business's own rows: a JDBC URL, or `parquet:` and a folder or URI.",
)
@click.option(
    "--table",
    metavar="NAME",
    help="With --business, the table of these rows; for Parquet a folder below the path.",
)
@click.option(
    "--id-column", metavar="NAME", help="With --business, the column of the transaction's id."
)
@click.option(
    "--group",
    metavar="NAME",
    multiple=True,
    help="With --business, only this producer group writes such rows. Repeatable.",
)
@click.option(
    "--business-user",
    metavar="NAME",
    envvar="TXBROKER_BUSINESS_USER",
    help="With --business jdbc:…, who logs in. [env: TXBROKER_BUSINESS_USER]",
)
@click.option(
    "--business-password-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    envvar="TXBROKER_BUSINESS_PASSWORD_FILE",
    help="And a file that holds the password. [env: TXBROKER_BUSINESS_PASSWORD_FILE]",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a report with plots, one HTML file.",
)
@_spark_options
@output_option
@click.pass_context
def run_command(
    context: click.Context, /, config: Path | None, output: str, **options: Any
) -> None:
    """Audit all transactions up to this moment, once.

    Ends with 4 where anything did not end as it was decided.
    """
    from txbroker.cli.audit.output import drift_in_words, show_run, untold_in_words
    from txbroker.cli.audit.run import run_once, run_options, send_to_cluster, spark_settings

    spark, where = spark_settings(options)
    wanted = run_options(options)
    settings = settings_from(config, options)
    if where == "cluster":
        context.exit(send_to_cluster(spark, settings, context))
    found = run_once(settings, spark, wanted)
    show_run(found.summary, output)
    for run in found.untold:
        click.echo(untold_in_words(run), err=True)
    click.echo(drift_in_words(found.summary), err=True)
    if found.has_drift:
        context.exit(DRIFT)


@command.command("stream")
@setting_options(AUDIT_SETTINGS)
@click.option(
    "--checkpoint",
    envvar="TXBROKER_CHECKPOINT",
    metavar="FOLDER",
    help="Where Spark remembers how far it is: a folder or URI. With it a stream that is started "
    "again goes on without gaps or doubles. "
    "[env: TXBROKER_CHECKPOINT; default: audit-stream in --data-dir]",
)
@click.option(
    "--every-s",
    type=float,
    default=3.0,
    envvar="TXBROKER_EVERY_S",
    metavar="SECONDS",
    help="How often what is new is judged. [env: TXBROKER_EVERY_S; default: 3]",
)
@_age_options
@_spark_options
@click.pass_context
def stream_command(context: click.Context, /, config: Path | None, **options: Any) -> None:
    """Audit transactions as they go by, until SIGINT or SIGTERM.

    What is found goes to the topic `PREFIX.audit.drift`, how things stand to the proxies' metrics.
    """
    from txbroker.cli.audit.run import follow, send_to_cluster, spark_settings, stream_options

    spark, where = spark_settings(options)
    wanted = stream_options(options)
    settings = settings_from(config, options)
    if where == "cluster":
        context.exit(send_to_cluster(spark, settings, context))
    follow(settings, spark, wanted)


@command.command("show")
@click.argument("run", required=False)
@setting_options(("data_dir",))
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=RUNS_SHOWN,
    show_default=True,
    help="Show at most so many runs.",
)
@output_option
def show_command(
    run: str | None,
    config: Path | None,
    limit: int,
    output: str,
    **options: Any,
) -> None:
    """Show the runs that there were, the newest first, or one of them.

    RUN is the name of a run, or `last`. Needs no Spark.
    """
    from txbroker.cli.audit.output import show_run, show_runs
    from txbroker.cli.audit.run import journal_of

    book = journal_of(settings_from(config, options))
    if run is None:
        show_runs(book.runs(limit), output, f"There was no run yet in {book.path}.")
        return
    found = book.runs(1) if run == LAST else [book.get(run)]
    if not found or found[0] is None:
        raise CommandFailed(
            f"there is no run {run} in {book.path}: `txbroker audit show` lists what there is"
        )
    show_run(found[0], output, heading=True)
