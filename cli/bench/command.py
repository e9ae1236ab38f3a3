"""`txbroker bench`: how many transactions a second, how soon visible, what is lost or doubled."""

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from txbroker.cli.bench.figures import Figures, text
from txbroker.cli.bench.load import Job
from txbroker.cli.bench.run import BenchPlan, measure, showing
from txbroker.cli.client import ApiClient, client_options
from txbroker.cli.contexts import target_of
from txbroker.cli.output import output_option, show_data
from txbroker.cli.proxy.serving import until_signal
from txbroker.cli.run import CommandFailed, run_async
from txbroker.cli.setting_options import KAFKA_SETTINGS, setting_options, settings_from

DURATION_S = 10.0
_MANY = 1_000_000
_LONG_S = 7 * 86400.0
_SHARE = click.FloatRange(0.0, 1.0)


def _option(name: str, kind: Any, metavar: str, default: Any, text: str) -> Any:
    """Return an option with its environment variable."""
    variable = f"TXBROKER_BENCH_{name.upper()}"
    told = "" if default is None else f"; default: {default:g}"
    return click.option(
        f"--{name.replace('_', '-')}",
        type=kind,
        default=default,
        metavar=metavar,
        envvar=variable,
        help=f"{text} [env: {variable}{told}]",
    )


def _load_options(function: Any) -> Any:
    """Give a command the options about the load."""
    whole, seconds = click.IntRange(1, _MANY), click.FloatRange(0.0, _LONG_S)
    for option in (
        _option("in_flight", whole, "N", 64, "Transactions under way at one time."),
        _option("size", click.IntRange(0, 4 << 20), "BYTES", 1024, "Of each message's value."),
        _option(
            "messages_per_transaction",
            click.IntRange(1, 1000),
            "N",
            1,
            "Messages of each transaction.",
        ),
        _option(
            "duration_s",
            click.FloatRange(0.0, _LONG_S, min_open=True),
            "SECONDS",
            None,
            f"How long to measure, {DURATION_S:g} unless --transactions is given.",
        ),
        _option(
            "transactions",
            click.IntRange(1),
            "N",
            None,
            "How many to measure, instead of for how long.",
        ),
        _option(
            "warmup_s",
            seconds,
            "SECONDS",
            30.0,
            "How long to run before: a Java just started takes three times as much.",
        ),
        _option("rollback_share", _SHARE, "SHARE", 0.0, "Of transactions that are rolled back."),
        _option(
            "unknown_share",
            _SHARE,
            "SHARE",
            0.0,
            "Of transactions that are left undecided, for their check to commit.",
        ),
        _option("groups", click.IntRange(1, 10_000), "N", 1, "Producer groups, one session each."),
    ):
        function = option(function)
    return function


@click.command("bench")
@_load_options
@click.option(
    "--http",
    is_flag=True,
    envvar="TXBROKER_BENCH_HTTP",
    help="Call the HTTP API, on one connection each, instead of sessions of the SDK. "
    "[env: TXBROKER_BENCH_HTTP]",
)
@click.option(
    "--keyless",
    is_flag=True,
    envvar="TXBROKER_BENCH_KEYLESS",
    help="Messages without keys: nobody keeps their order, so they go to any partition. "
    "[env: TXBROKER_BENCH_KEYLESS]",
)
@click.option(
    "--topic",
    metavar="TOPIC",
    envvar="TXBROKER_BENCH_TOPIC",
    help="Send to this topic, which is there. [env: TXBROKER_BENCH_TOPIC; default: one that is "
    "made, and removed afterwards]",
)
@click.option(
    "--topic-partitions",
    type=click.IntRange(1, 1000),
    default=4,
    metavar="N",
    envvar="TXBROKER_BENCH_TOPIC_PARTITIONS",
    help="Partitions of the topic that is made. [env: TXBROKER_BENCH_TOPIC_PARTITIONS; default: 4]",
)
@click.option(
    "--read-along",
    type=click.Choice(["one", "all"]),
    default="one",
    envvar="TXBROKER_BENCH_READ_ALONG",
    help="How many partitions are read while it is measured, for how soon messages are visible "
    "and how many a second; the others are read afterwards, as reading costs the same machine. "
    "[env: TXBROKER_BENCH_READ_ALONG; default: one]",
)
@setting_options((*KAFKA_SETTINGS, "partitions"))
@output_option
@client_options
def command(
    client: ApiClient,
    config: Path | None,
    output: str,
    topic: str | None,
    topic_partitions: int,
    read_along: str,
    keyless: bool,
    **options: Any,
) -> None:
    """Measure how many transactions a second there are, and how soon consumers see them.

    Without --url and --kafka a proxy and a real Kafka are run for it, each in a process of its
    own, and thrown away. With them, a running proxy is measured, and its Kafka is read.

    The load runs in a process of its own. A read_committed consumer that asks no proxy counts
    every message. Exit code 1 where one is lost or doubled, or visible though rolled back.
    """
    taken = ("in_flight", "size", "transactions", "warmup_s", "groups", "http")
    asked = {name: options.pop(name) for name in (*taken, "rollback_share", "unknown_share")}
    asked["messages"] = options.pop("messages_per_transaction")
    asked["duration_s"] = options.pop("duration_s")
    _require_sense(asked)
    settings = settings_from(config, options)
    target = target_of(click.get_current_context())
    given = click.get_current_context().params
    running = given["url"] is not None or given["context"] is not None
    if running != ("kafka" in settings.model_fields_set):
        raise click.UsageError(
            "--url and --kafka go together: a proxy, and the Kafka where its messages are read. "
            "Without both, they are run for the measurement"
        )
    plan = BenchPlan(
        settings=settings,
        url=client.url if running else None,
        credentials=target.credentials,
        topic=topic,
        partitions=topic_partitions,
        along=1 if read_along == "one" else None,
        keyless=keyless,
        asked=asked,
    )
    found: list[tuple[Figures, Job]] = []
    if not run_async(until_signal(_measure(plan, found))):
        raise click.Abort
    _show(*found[0], output)


def _require_sense(asked: dict[str, Any]) -> None:
    if asked["transactions"] is None:
        asked["duration_s"] = asked["duration_s"] or DURATION_S
    elif asked["duration_s"] is not None:
        raise click.UsageError("--duration-s and --transactions: one of them says when it ends")
    if asked["rollback_share"] + asked["unknown_share"] > 1:
        raise click.UsageError("--rollback-share and --unknown-share are more than 1 together")
    if asked["http"] and asked["unknown_share"]:
        raise click.UsageError("--unknown-share needs sessions of the SDK, which answer checks")


async def _measure(plan: BenchPlan, found: list[tuple[Figures, Job]]) -> None:
    with showing(Console(stderr=True)) as shown:
        found.append(await measure(plan, shown))


def _show(figures: Figures, job: Job, output: str) -> None:
    if output in ("json", "yaml"):
        show_data(figures.data(job), output)
    else:
        click.echo("\n".join(text(figures, job)))
    if not figures.whole:
        raise CommandFailed(
            f"{figures.lost:,} messages lost, {figures.duplicated:,} doubled, {figures.wrong:,} "
            "visible though rolled back"
        )
    if figures.failed:
        why = next(iter(figures.errors))
        raise CommandFailed(f"{figures.failed:,} transactions failed, the first ones with: {why}")
