"""`txbroker bench`: throughput, latency, and lost or duplicated messages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from txbroker.cli.bench.figures import Figures, text
from txbroker.cli.bench.load import Job
from txbroker.cli.bench.run import BenchPlan, measure, progress_bar
from txbroker.cli.client import ApiClient, client_options
from txbroker.cli.contexts import target_of
from txbroker.cli.options import SectionedCommand, env_option, with_options
from txbroker.cli.output import object_output_option, show_data
from txbroker.cli.run import CommandFailed, run_async
from txbroker.cli.setting_options import KAFKA_SETTINGS, setting_options, settings_from
from txbroker.cli.signals import until_signal

F = TypeVar("F", bound=Callable[..., Any])

DURATION_S = 10.0
_LONG_S = 7 * 86400.0
_EXPLAINED = ("--duration-s", "--size", "--in-flight", "--topic")
_SHARE = click.FloatRange(0.0, 1.0)


def _option(name: str, text: str, section: str = "Load", **attributes: Any) -> Any:
    brief = name not in _EXPLAINED
    return env_option(name, text, prefix="BENCH_", section=section, brief=brief, **attributes)


def _number(name: str, metavar: str, kind: Any, default: Any, text: str) -> Any:
    return _option(name, text, type=kind, default=default, metavar=metavar)


_LOAD_OPTIONS: Callable[[F], F] = with_options(
    _number("--groups", "N", click.IntRange(1, 10_000), 1, "Producer groups, each with a session."),
    _number(
        "--unknown-share",
        "SHARE",
        _SHARE,
        0.0,
        "Share of transactions left undecided, which their check commits.",
    ),
    _number("--rollback-share", "SHARE", _SHARE, 0.0, "Share of transactions rolled back."),
    _number(
        "--warmup-s",
        "SECONDS",
        click.FloatRange(0.0, _LONG_S),
        30.0,
        "Load before the measurement: a new Java process takes three times the CPU.",
    ),
    _number(
        "--transactions",
        "N",
        click.IntRange(1),
        None,
        "Measure this number of transactions instead of a duration.",
    ),
    _number(
        "--duration-s",
        "SECONDS",
        click.FloatRange(0.0, _LONG_S, min_open=True),
        None,
        f"Duration of the measurement, {DURATION_S:g} unless --transactions is given.",
    ),
    _number(
        "--messages-per-transaction", "N", click.IntRange(1, 1000), 1, "Messages per transaction."
    ),
    _number("--size", "BYTES", click.IntRange(0, 4 << 20), 1024, "Size of each message's value."),
    _number("--in-flight", "N", click.IntRange(1, 1_000_000), 64, "Transactions in flight."),
    _option(
        "--http",
        "Call the HTTP API, with one connection per transaction in flight, instead of SDK "
        "sessions.",
        is_flag=True,
    ),
    _option(
        "--keyless",
        "Send messages without keys, which may go to any partition because they need no order.",
        is_flag=True,
    ),
    _option(
        "--topic",
        "An existing topic for the messages.",
        "Topic",
        shown="one that is created, and deleted afterwards",
        metavar="TOPIC",
    ),
    _option(
        "--topic-partitions",
        "Partitions of the created topic.",
        "Topic",
        type=click.IntRange(1, 1000),
        default=4,
        metavar="N",
    ),
    _option(
        "--read-along",
        "Partitions read during the measurement, for promotion latency and rate. The others are "
        "read afterwards, because reading takes CPU of the same machine.",
        "Topic",
        type=click.Choice(["one", "all"]),
        default="one",
    ),
)


@click.command("bench", cls=SectionedCommand)
@_LOAD_OPTIONS
@setting_options((*KAFKA_SETTINGS, "partitions"))
@object_output_option
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
    """Measure transactions per second, and the time until consumers see them.

    Without --url and --kafka the command starts a proxy and a real Kafka in separate processes, and
    deletes their data afterwards. With both, it measures a running proxy and reads its Kafka.

    The load runs in a separate process. A read_committed consumer, independent of the proxies,
    counts every message. Exit code 1: a message is lost, duplicated, or visible after a rollback.
    """
    names = ("in_flight", "size", "transactions", "warmup_s", "groups", "http")
    load = {name: options.pop(name) for name in (*names, "rollback_share", "unknown_share")}
    load["messages"] = options.pop("messages_per_transaction")
    load["duration_s"] = options.pop("duration_s")
    _check_load(load)
    settings = settings_from(config, options)
    target = target_of(click.get_current_context())
    given = click.get_current_context().params
    running = given["url"] is not None or given["context"] is not None
    if running != ("kafka" in settings.model_fields_set):
        raise click.UsageError(
            "--url and --kafka belong together: give a proxy and its Kafka, or neither to measure "
            "a new installation"
        )
    plan = BenchPlan(
        settings=settings,
        url=client.url if running else None,
        credentials=target.credentials,
        topic=topic,
        partitions=topic_partitions,
        along=1 if read_along == "one" else None,
        keyless=keyless,
        load=load,
    )
    results: list[tuple[Figures, Job]] = []
    if not run_async(until_signal(_measure(plan, results))):
        raise click.Abort
    _show(*results[0], output)


def _check_load(load: dict[str, Any]) -> None:
    if load["transactions"] is None:
        load["duration_s"] = load["duration_s"] or DURATION_S
    elif load["duration_s"] is not None:
        raise click.UsageError("give --duration-s or --transactions, not both")
    if load["rollback_share"] + load["unknown_share"] > 1:
        raise click.UsageError("--rollback-share and --unknown-share exceed 1 together")
    if load["http"] and load["unknown_share"]:
        raise click.UsageError("--unknown-share needs SDK sessions for checks: omit --http")


async def _measure(plan: BenchPlan, results: list[tuple[Figures, Job]]) -> None:
    with progress_bar(Console(stderr=True)) as progress:
        results.append(await measure(plan, progress))


def _show(figures: Figures, job: Job, output: str) -> None:
    if output in ("json", "yaml"):
        show_data(figures.data(job), output)
    else:
        click.echo("\n".join(text(figures, job)))
    if not figures.whole:
        raise CommandFailed(
            f"{figures.lost:,} messages lost, {figures.duplicated:,} duplicated, "
            f"{figures.wrong:,} visible after a rollback"
        )
    if figures.failed:
        error = next(iter(figures.errors))
        raise CommandFailed(f"{figures.failed:,} transactions failed, the first with: {error}")
