"""`txbroker audit`: Spark checks that every transaction, every row of an outbox and every row of a
captured table ended as decided."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from txbroker.cli.main import SuggestingGroup
from txbroker.cli.options import (
    FILE,
    MOMENT,
    SectionOption,
    env_option,
    limit_option,
    with_options,
)
from txbroker.cli.output import object_output_option, output_option
from txbroker.cli.run import DRIFT, CommandFailed
from txbroker.cli.setting_options import KAFKA_SETTINGS, setting_options, settings_from
from txbroker.spark.tables.manifest import FORMATS

F = TypeVar("F", bound=Callable[..., Any])

AUDIT_SETTINGS = (*KAFKA_SETTINGS, "data_dir", "topic_prefix", "dedup_window_s")
RUNS_SHOWN = 20
ROWS_SHOWN = 1000
LAST = "last"
SECONDS_MAX = 1e9


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
        "--remote",
        "In place of --master, a server of Spark Connect: sc://HOST:PORT.",
        section="Spark",
        metavar="URL",
        default="",
        brief=True,
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


def _positive(_context: click.Context, option: click.Parameter, value: float) -> float:
    if not 0 < value <= SECONDS_MAX:  # also refuses NaN
        raise click.UsageError(f"{option.opts[0]} {value:g}: expected more than 0, at most 1e9")
    return value


def _seconds(name: str, default: float, text: str) -> Callable[[F], F]:
    shown: dict[str, Any] = {"section": "Judgement", "brief": True, "metavar": "SECONDS"}
    return env_option(name, text, type=float, default=default, callback=_positive, **shown)


_AGE_OPTIONS: Callable[[F], F] = with_options(
    _seconds("--late-after-s", 60.0, "A commit that is older and not visible is late."),
    _seconds("--lost-after-s", 600.0, "A commit that is older and not visible is lost."),
    _seconds(
        "--overdue-after-s",
        86_400.0,
        "A pending transaction is overdue if its first check has been due for longer.",
    ),
)


_out_option = env_option(
    "--out",
    "Location of the tables: a folder, or a URI that Spark can write, such as hdfs://… or s3a://….",
    shown="audit in --data-dir",
    metavar="FOLDER",
)
_upkeep_options: Callable[[F], F] = with_options(
    setting_options(("data_dir",)), _out_option, _SPARK_OPTIONS
)
_part_option = partial(click.option, cls=SectionOption, section="Part", brief=True)
_business_option = partial(click.option, cls=SectionOption, section="Business rows", brief=True)


@command.command("run")
@setting_options(AUDIT_SETTINGS)
@_out_option
@env_option(
    "--format",
    "Format of the tables.",
    param="table_format",
    type=click.Choice(FORMATS),
    shown="that of the tables in --out, else parquet",
)
@env_option(
    "--full",
    "Read all topics from their beginning, not from the end of the last run.",
    is_flag=True,
)
@_part_option(
    "--rejudge",
    is_flag=True,
    help="Judge the stored facts of earlier runs again, as after an upgrade, without Kafka.",
)
@_part_option(
    "--from",
    "from_ms",
    type=MOMENT,
    metavar="TIME",
    help="Judge only transactions that were prepared then or later: an age such as 2h, or a date "
    "and time in ISO 8601.",
)
@_part_option("--to", "to_ms", type=MOMENT, metavar="TIME", help="… and before then.")
@_part_option(
    "--topics", multiple=True, metavar="NAME", help="… with a message for this target. Repeatable."
)
@_part_option(
    "--groups", multiple=True, metavar="NAME", help="… of this producer group. Repeatable."
)
@_part_option(
    "--installations",
    multiple=True,
    metavar="PREFIX",
    help="Audit the installation with this topic prefix, in a subfolder of --data-dir. Repeatable.",
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
@env_option(
    "--checks",
    "Compare the run with the limits in this TOML file: latencies, volume, parked ones, ages.",
    type=FILE,
    metavar="FILE",
)
@env_option(
    "--exit-from",
    "The least severity of findings and failed checks that exits with 4.",
    section="Judgement",
    brief=True,
    type=click.Choice(["critical", "error", "warning"]),
    shown="that of --checks, else warning",
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
    table_format: str | None,
    report: Path | None,
    checks: Path | None,
    exit_from: str | None,
    installations: tuple[str, ...],
    **options: Any,
) -> None:
    """Audit all transactions up to now, or a part of them, once.

    Exit code 4: a transaction did not end as it was decided, or a check failed.
    """
    from txbroker.cli.audit import batch
    from txbroker.cli.audit import run as audits
    from txbroker.cli.audit.inputs import business_table, read_limits
    from txbroker.cli.audit.output import show_result

    spark, where = audits.spark_settings(options)
    ages_ms, business = audits.age_limits(options), business_table(options)
    mode, part = batch.mode_of(options)
    settings = settings_from(config, options)
    thresholds = read_limits(checks, exit_from)
    if mode == "part" and (business is not None or checks is not None):
        raise click.UsageError("--business and --checks need all transactions, not a part of them")
    each = batch.installations(settings, installations)
    if where == "cluster":
        context.exit(audits.send_to_cluster(spark, settings, context))
    request = batch.AuditRequest(
        ages_ms, mode, part, business, thresholds, out, table_format, report
    )
    fails = False
    for result in batch.run_all(each, spark, request, several=bool(installations)):
        show_result(result.summary, output, result.acknowledged, result.unpublished)
        fails |= result.fails
    if fails:
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
@env_option(
    "--since",
    "Let a new stream skip transactions that were prepared earlier: an age such as 2h, or a date "
    "and time in ISO 8601. A stream that continues from its checkpoint ignores it.",
    type=MOMENT,
    shown="the beginning of the topics",
    metavar="TIME",
)
@_seconds("--every-s", 3.0, "Interval between judgements.")
@_AGE_OPTIONS
@_SPARK_OPTIONS
@click.pass_context
def stream_command(
    context: click.Context,
    /,
    config: Path | None,
    checkpoint: str | None,
    since: int | None,
    every_s: float,
    **options: Any,
) -> None:
    """Audit transactions continuously, until SIGINT or SIGTERM.

    Findings go to the topic `PREFIX.audit.drift`, the summary to the proxies' metrics.
    """
    from txbroker.cli.audit import run as audits

    spark, where = audits.spark_settings(options)
    ages_ms, settings = audits.age_limits(options), settings_from(config, options)
    if where == "cluster":
        context.exit(audits.send_to_cluster(spark, settings, context))
    audits.follow(
        settings, spark, ages_ms, checkpoint=checkpoint, since_ms=since or 0, every_s=every_s
    )


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
    keep_s: float,
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
    from txbroker.cli.audit.compared import end_with
    from txbroker.cli.audit.outbox import run_outbox

    spark = audits.local_driver(options)
    summary = run_outbox(settings_from(config, options), spark, url, keep_s, topics)
    end_with(context, summary, output)


@command.command("capture")
@click.argument("file", type=FILE)
@click.option(
    "--table",
    "tables",
    metavar="SCHEMA.TABLE",
    multiple=True,
    help="Compare only this table of the capture. Repeatable.",
)
@click.option(
    "--sample",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    metavar="SHARE",
    help="Compare only this share of the keys, such as 0.01: the same ones each time.",
)
@click.option(
    "--older-rows",
    is_flag=True,
    help="Tables had rows before `txbroker capture apply`: one without a record is no finding.",
)
@_seconds("--wait-s", 60.0, "How long changes that the rows show may be on their way to Kafka.")
@setting_options((*KAFKA_SETTINGS, "topic_prefix"))
@_SPARK_OPTIONS
@object_output_option
@click.pass_context
def capture_command(
    context: click.Context,
    /,
    file: Path,
    config: Path | None,
    tables: tuple[str, ...],
    sample: float,
    older_rows: bool,
    wait_s: float,
    output: str,
    **options: Any,
) -> None:
    """Compare the rows of captured tables with the last records of their keys.

    FILE is the mapping of a capture from PostgreSQL or MariaDB, which must be running. All its
    topics are read whole. Exit code 4: a record and its row differ, or one of them is missing; 1:
    there is no result, or a table could not be compared.
    """
    from txbroker.cli.audit import run as audits
    from txbroker.cli.audit.capture import opened, run_capture
    from txbroker.cli.audit.compared import end_with

    capture = opened(file)
    mapping = capture.mapping
    options["kafka"] = options["kafka"] or mapping.kafka or None
    options["topic_prefix"] = options["topic_prefix"] or mapping.topic_prefix
    terms = {"share": sample, "older_rows": older_rows, "wait_s": wait_s}
    spark = audits.local_driver(options)
    summary = run_capture(settings_from(config, options), spark, capture, tables, **terms)
    end_with(context, summary, output)
    if summary.unread:
        raise CommandFailed(
            f"{', '.join(summary.unread)} not compared: correct the reason above, or name the "
            "other tables with --table"
        )


@command.command("ack")
@click.argument("what", nargs=-1, metavar="[ID] [KIND]…")
@setting_options(("data_dir",))
@click.option(
    "--group", metavar="NAME", help="All transactions of this producer group; without an ID."
)
@click.option(
    "--until", metavar="DATE", help="The last day, or a time in ISO 8601; UTC without another zone."
)
@click.option("--why", metavar="TEXT", help="The reason.")
@click.option("--by", metavar="NAME", help="Who acknowledges.", show_default="user@machine")
@click.option("--list", "listed", is_flag=True, help="List the acknowledgements.")
@click.option("--remove", is_flag=True, help="Remove them, without a KIND all of the ID or group.")
@_SPARK_OPTIONS
@output_option
def ack_command(
    what: tuple[str, ...], config: Path | None, output: str, listed: bool, **options: Any
) -> None:
    """Acknowledge findings until a date.

    ID is a transaction, or the TOPIC-PARTITION@OFFSET of an unreadable record; KIND is what
    `txbroker audit show` lists as findings. From the next run on they stay visible as acknowledged
    findings, but are not counted as drift: no exit code 4, no alert. Works without Spark, unless
    --data-dir is a URI.
    """
    from txbroker.cli.audit import acknowledge
    from txbroker.cli.audit import run as audits

    asked = {name: options.pop(name) for name in ("group", "until", "why", "by", "remove")}
    spark = audits.local_driver(options, optional=True)
    with audits.journal_of(settings_from(config, options), spark) as journal:
        if listed:
            acknowledge.show(journal, what, asked, output)
        else:
            acknowledge.change(journal, what, **asked)


@command.command("sql")
@click.option("-e", "statement", metavar="SQL", help="Answer this statement, and end.")
@_upkeep_options
@click.option(
    "--catalog",
    metavar="DATABASE",
    default="",
    help="Register the tables and views in this database of Spark's Hive catalogue first.",
)
@limit_option("Show at most this number of rows.", ROWS_SHOWN)
@output_option
def sql_command(
    statement: str | None,
    config: Path | None,
    out: str | None,
    output: str,
    limit: int,
    catalog: str,
    **options: Any,
) -> None:
    """Query the tables of audits in SQL, at a prompt or by -e.

    SHOW TABLES lists the tables and views. Statements that change something are refused.
    """
    from txbroker.cli.audit import run as audits
    from txbroker.cli.audit.sql import run_sql

    spark = audits.local_driver(options)
    where = audits.output_folder(settings_from(config, options), out)
    run_sql(spark, where, statement, output, limit, catalog)


@command.command("compact")
@_upkeep_options
def compact_command(config: Path | None, out: str | None, **options: Any) -> None:
    """Join the small files of the tables, beside a running audit.

    Each run adds files to the days that it changes. Days without small files stay as they are.
    """
    from txbroker.cli.audit import run as audits
    from txbroker.cli.audit.upkeep import run_compact

    spark, settings = audits.local_driver(options), settings_from(config, options)
    run_compact(settings, spark, audits.output_folder(settings, out))


@command.command("expire")
@click.option(
    "--keep-days",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="Keep the rows of this number of days before that of the newest run.",
)
@_upkeep_options
def expire_command(config: Path | None, out: str | None, keep_days: int, **options: Any) -> None:
    """Remove old rows from the tables, beside a running audit.

    Open findings stay. The next run removes its facts of these days. The journal keeps all runs.
    """
    from txbroker.cli.audit import run as audits
    from txbroker.cli.audit.upkeep import run_expire

    spark, settings = audits.local_driver(options), settings_from(config, options)
    run_expire(settings, spark, audits.output_folder(settings, out), keep_days)


@command.command("explain")
@click.argument("id")
@setting_options(("data_dir",))
@_out_option
@_SPARK_OPTIONS
@object_output_option
def explain_command(
    id: str, config: Path | None, out: str | None, output: str, **options: Any
) -> None:
    """Show why an audit came to its verdict of a transaction, and from which records.

    ID is a transaction, or the TOPIC-PARTITION@OFFSET of an unreadable record. It reads what runs
    have stored in a local folder, as Parquet. Works without Spark, unless --data-dir is a URI. Exit
    code 1: no run has stored anything of it.
    """
    from txbroker.cli.audit import run as audits
    from txbroker.cli.audit.explain import show_explanation

    spark = audits.local_driver(options, optional=True)
    show_explanation(settings_from(config, options), spark, out, id, output)


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
@_SPARK_OPTIONS
@output_option
def show_command(
    run: str | None, config: Path | None, limit: int, output: str, **options: Any
) -> None:
    """Show past runs, newest first, or one of them.

    RUN is the name of a run, or `last`. Works without Spark, unless --data-dir is a URI.
    """
    from txbroker.cli.audit import run as audits
    from txbroker.cli.audit.output import show_run, show_runs

    spark = audits.local_driver(options, optional=True)
    with audits.journal_of(settings_from(config, options), spark) as journal:
        if run is None:
            show_runs(journal.runs(limit), output, f"There is no run yet in {journal.path}.")
            return
        runs = journal.runs(1) if run == LAST else [journal.get(run)]
        if not runs or runs[0] is None:
            raise CommandFailed(
                f"there is no run {run} in {journal.path}: `txbroker audit show` lists all runs"
            )
        acknowledged = journal.acknowledged(round(time.time() * 1000))
    show_run(runs[0], output, acknowledged, heading=True)
