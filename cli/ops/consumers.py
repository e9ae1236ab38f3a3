"""`txbroker consumers`: show groups of consumers; release set-aside keys, retry dead letters."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from txbroker.cli.client import who
from txbroker.cli.main import SuggestingGroup
from txbroker.cli.ops.consumer_rows import (
    ASIDE_COLUMNS,
    DEAD_COLUMNS,
    LIST_COLUMNS,
    PARTITION_COLUMNS,
    STEP_COLUMNS,
    aside_row,
    dead_row,
    group_row,
    list_row,
    parse_key,
    shown_key,
)
from txbroker.cli.options import (
    confirm,
    limit_option,
    reason_option,
    require_terminal,
    with_options,
    yes_option,
)
from txbroker.cli.output import (
    object_output_option,
    output_option,
    show_data,
    show_rows,
    shown_columns,
    table,
)
from txbroker.cli.run import CommandFailed, PartlyDone
from txbroker.cli.setting_options import KAFKA_SETTINGS, setting_options, settings_from
from txbroker.config.settings import Settings
from txbroker.consumer.operations.copies import DeadLetter, SetAsideKey, count_dead_letters
from txbroker.consumer.operations.failed import FailedMessages, InTable, InTopics
from txbroker.consumer.operations.groups import ConsumerGroups, GroupView
from txbroker.core.consuming.copies import MessageSource, parse_source
from txbroker.door.consuming import ConsumingDoor
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.door.consuming import KafkaConsumingDoor

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_RETRIED_MAX = 10_000
"""Dead letters of one command: all of them are in memory, without their values."""
_WAIT_PAUSE_S = 0.5
_PREVIEWED = 20
_settings = setting_options((*KAFKA_SETTINGS, "topic_prefix"))
_database_option = click.option(
    "--database",
    metavar="URL",
    help="Where consumers with InDatabase keep failed messages: sqlite:///FILE, postgresql://… or "
    "mariadb://…; Kafka is not used.",
)


@click.group("consumers", cls=SuggestingGroup)
def command() -> None:
    """Show groups of consumers; release set-aside keys, retry dead letters.

    Reads and writes Kafka directly, with the rights of the group's consumers (`txbroker topics plan
    --consumer GROUP`), or the group's database. A key is text, or `hex:` or `base64:` and its
    bytes.
    """


# --- show ------------------------------------------------------------------------------------


@command.command("list")
@_settings
@output_option
def list_command(config: Path | None, output: str, **options: Any) -> None:
    """List the groups of txbroker's consumers.

    Set-aside keys are those of the newest commit. Dead letters are counted in the newest 10,000
    offsets of each partition.
    """

    async def look(groups: ConsumerGroups) -> list[tuple[GroupView, int | None]]:
        return [(view, await count_dead_letters(groups.door, view)) for view in await groups.find()]

    rows = [list_row(view, dead) for view, dead in _with_groups(config, options, "", look)]
    show_rows(rows, LIST_COLUMNS, output, "No group of txbroker's consumers.")


@command.command("show")
@click.argument("group")
@_settings
@object_output_option
def show_command(config: Path | None, output: str, group: str, **options: Any) -> None:
    """Show each partition of a group, and the messages that wait for a retry.

    DONE AHEAD are messages done beyond the position, which no restart repeats. TOKEN increases with
    each owner.
    """

    async def look(groups: ConsumerGroups) -> dict[str, Any]:
        view = await groups.view(group)
        return group_row(view, await groups.steps(view))

    row = _with_groups(config, options, group, look)
    if output in ("json", "yaml"):
        show_data(row, output)
    else:
        members = _counted(len(row["members"]), "member")
        click.echo(f"{group}: {row['state']}, {members}, lag {row['lag']:,}")
        show_rows(row["partitions"], PARTITION_COLUMNS, output, "It has no committed offsets.")
        if row["retries"]:
            click.echo()
            show_rows(row["retries"], STEP_COLUMNS, output, "")
    if any(each["metadata"] == "foreign" for each in row["partitions"]):
        click.echo(
            "Note: another program, or a newer version, committed offsets of this group: stop it, "
            "or give txbroker's consumers another group",
            err=True,
        )


def _places(function: F) -> F:
    return with_options(
        click.option("--topic", metavar="TOPIC", help="Only keys of this topic."),
        click.option("--partition", type=int, metavar="N", help="Only keys of this partition."),
        click.option("--key", metavar="KEY", help="Only this key."),
    )(function)


@command.command("aside")
@click.argument("group")
@_places
@_database_option
@_settings
@output_option
def aside_command(
    config: Path | None,
    output: str,
    group: str,
    database: str | None,
    topic: str | None,
    partition: int | None,
    key: str | None,
    **options: Any,
) -> None:
    """List set-aside keys, with the first message of each."""
    wanted = None if key is None else parse_key(key)

    async def look(failed: FailedMessages) -> list[SetAsideKey]:
        return _chosen(await failed.set_aside_keys(), topic, partition, wanted, ())

    rows = [aside_row(each) for each in _with_failed(config, options, group, database, look)]
    show_rows(rows, ASIDE_COLUMNS, output, "No key is set aside.")


@command.command("dead")
@click.argument("group")
@limit_option("Show at most this number.", 100)
@click.option("--values", is_flag=True, help="Show the messages' values, too.")
@_database_option
@_settings
@output_option
def dead_command(
    config: Path | None,
    output: str,
    group: str,
    limit: int,
    values: bool,
    database: str | None,
    **options: Any,
) -> None:
    """List dead letters, newest first; not those that were sent back."""

    async def look(failed: FailedMessages) -> list[DeadLetter]:
        return await failed.dead_letters(limit, values=values)

    found = _with_failed(config, options, group, database, look)
    rows = [dead_row(each, values=values) for each in found]
    columns = [column for column in DEAD_COLUMNS if values or column.title != "VALUE"]
    show_rows(rows, columns, output, "There are no dead letters.")


# --- change ----------------------------------------------------------------------------------


@command.command("release")
@click.argument("group")
@_places
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="TOPIC/PARTITION@OFFSET",
    help="The key whose first message is this one, as `aside` shows it; for messages without a "
    "key. Repeatable.",
)
@click.option("--all", "all_", is_flag=True, help="All set-aside keys.")
@reason_option(required=True)
@click.option(
    "--wait",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Wait until all their messages are done, at most this time.",
)
@_database_option
@_settings
@yes_option
@output_option
def release_command(
    config: Path | None,
    output: str,
    group: str,
    topic: str | None,
    partition: int | None,
    key: str | None,
    sources: tuple[str, ...],
    all_: bool,
    reason: str,
    wait: float | None,
    yes: bool,
    database: str | None,
    **options: Any,
) -> None:
    """Let consumers handle the messages of set-aside keys again, in order.

    A key stays set aside until all its messages are done; new ones follow them. If its handler
    fails again it stays set aside, and you can release it again.
    """
    _require_choice(all_, key is not None or topic is not None, sources)
    if partition is not None and topic is None:
        raise click.UsageError("--partition needs --topic")
    wanted = None if key is None else parse_key(key)
    places = [_source(text) for text in sources]
    require_terminal(yes)

    async def look(failed: FailedMessages) -> list[SetAsideKey]:
        return _chosen(await failed.set_aside_keys(), topic, partition, wanted, places)

    chosen = _with_failed(config, options, group, database, look)
    if not chosen:
        what = f"key {shown_key(wanted)} is not" if wanted is not None else "no such key is"
        raise CommandFailed(
            f"{what} set aside in group {group}: `txbroker consumers aside {group}` lists the keys"
        )
    rows = [aside_row(each) for each in chosen]
    _preview(rows, ASIDE_COLUMNS, yes)
    confirm(f"Release {_counted(len(chosen), 'key')} of group {group}?", yes)

    async def act(failed: FailedMessages) -> list[SetAsideKey]:
        await failed.release(chosen, f"{who()}: {reason}")
        return [] if wait is None else await _still_aside(failed, chosen, wait)

    left = _with_failed(config, options, group, database, act)
    show_rows(rows, ASIDE_COLUMNS, output, "")
    if left:
        again = sum(not each.released for each in left)
        raise PartlyDone(
            f"{len(left)} of {_counted(len(chosen), 'key')} still set aside: {again} failed again; "
            f"{len(left) - again} not done after {wait:g} s, check that consumers run; see "
            f"`txbroker consumers aside {group}`"
        )
    done = "released" if wait is None else "released, and all their messages are done"
    click.echo(f"{_counted(len(chosen), 'key')} {done}.", err=True)


@command.command("retry")
@click.argument("group")
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="TOPIC/PARTITION@OFFSET",
    help="The dead letter of this message, as `dead` shows it. Repeatable.",
)
@click.option("--key", metavar="KEY", help="The dead letters with this key.")
@click.option("--all", "all_", is_flag=True, help="All dead letters, the newest 10,000 at a time.")
@reason_option(required=True)
@_database_option
@_settings
@yes_option
@output_option
def retry_command(
    config: Path | None,
    output: str,
    group: str,
    sources: tuple[str, ...],
    key: str | None,
    all_: bool,
    reason: str,
    yes: bool,
    database: str | None,
    **options: Any,
) -> None:
    """Send dead letters back to the group's consumers, which handle them again at once.

    They are retried messages, so their order is lost. Each is sent once: the copy, and the note
    that it was sent, are one Kafka transaction; only two `retry` at the same moment could send one
    twice, and with a database none. One that fails again becomes a new dead letter.
    """
    _require_choice(all_, key is not None, sources)
    wanted = None if key is None else parse_key(key)
    places = {_source(text) for text in sources}
    require_terminal(yes)

    async def look(failed: FailedMessages) -> list[DeadLetter]:
        found = await failed.dead_letters(_RETRIED_MAX)
        return [
            each
            for each in found
            if (wanted is None or each.message.key == wanted)
            and (not places or each.failed.source in places)
        ]

    chosen = _with_failed(config, options, group, database, look)
    missing = places - {each.failed.source for each in chosen}
    if missing or not chosen:
        what = f"{min(missing)} has no dead letter" if missing else "there is no such dead letter"
        raise CommandFailed(
            f"{what} in group {group}, or it was sent back already: `txbroker consumers dead "
            f"{group}` lists them"
        )
    rows = [dead_row(each) for each in chosen]
    columns = [column for column in DEAD_COLUMNS if column.title != "VALUE"]
    _preview(rows, columns, yes)
    confirm(f"Send {_counted(len(chosen), 'dead letter')} of group {group} back?", yes)

    async def act(failed: FailedMessages) -> int:
        return await failed.send_back(chosen, f"{who()}: {reason}")

    sent = _with_failed(config, options, group, database, act)
    show_rows(rows, columns, output, "")
    if sent < len(chosen):
        raise PartlyDone(f"{sent} of {len(chosen)} sent back: the others were deleted meanwhile")
    click.echo(f"{_counted(sent, 'dead letter')} sent back.", err=True)


# --- shared ----------------------------------------------------------------------------------


def _with_groups(
    config: Path | None,
    options: dict[str, Any],
    group: str,
    act: Callable[[ConsumerGroups], Awaitable[T]],
) -> T:
    """Return the result of `act` with a connection to Kafka."""
    settings = settings_from(config, options)

    async def run() -> T:
        door = open_door(settings)
        try:
            await door.start()
            return await act(ConsumerGroups(door, settings.topic_prefix))
        finally:
            await door.close()

    with _explained(group):
        return asyncio.run(run())


def _with_failed(
    config: Path | None,
    options: dict[str, Any],
    group: str,
    database: str | None,
    act: Callable[[FailedMessages], Awaitable[T]],
) -> T:
    """Return the result of `act` with a group's failed messages."""
    if database is not None:

        async def in_table() -> T:
            return await act(InTable.at(database, group))

        return asyncio.run(in_table())

    async def in_topics(groups: ConsumerGroups) -> T:
        return await act(InTopics(groups.door, await groups.view(group)))

    return _with_groups(config, options, group, in_topics)


def open_door(settings: Settings) -> ConsumingDoor:
    """Return a door that is not started."""
    return KafkaConsumingDoor.from_access(settings, "txbroker-cli")


@contextmanager
def _explained(group: str) -> Iterator[None]:
    """Name the next step where Kafka refuses."""
    try:
        yield
    except KafkaUnavailable as error:
        if not error.lasting:
            raise
        step = "this login needs Describe on the consumer groups and their topics"
        if group:
            step = f"`txbroker topics plan --consumer {group} --acls` shows the necessary rights"
        raise CommandFailed(f"{error}; {step}") from None


def _chosen(
    found: Sequence[SetAsideKey],
    topic: str | None,
    partition: int | None,
    key: bytes | None,
    sources: Collection[MessageSource],
) -> list[SetAsideKey]:
    return [
        each
        for each in found
        if (topic is None or each.first.source.topic == topic)
        and (partition is None or each.first.source.partition == partition)
        and (key is None or each.key == key)
        and (not sources or each.first.source in sources)
    ]


async def _still_aside(
    failed: FailedMessages, chosen: Sequence[SetAsideKey], wait_s: float
) -> list[SetAsideKey]:
    """Wait until keys are done; return those that failed again, or are not done after `wait_s`."""
    ids = {each.id for each in chosen}
    until_s = time.monotonic() + wait_s
    while True:
        left = [each for each in await failed.set_aside_keys() if each.id in ids]
        if not any(each.released for each in left) or time.monotonic() >= until_s:
            return left
        await asyncio.sleep(_WAIT_PAUSE_S)


def _require_choice(all_: bool, narrowed: bool, sources: Collection[str]) -> None:
    if not (all_ or narrowed or sources):
        raise click.UsageError("choose by --key or --source, or give --all")
    if all_ and (narrowed or sources):
        raise click.UsageError("--all chooses everything: leave it out, or the other choices")


def _source(text: str) -> MessageSource:
    source = parse_source(text)
    if source is None:
        raise click.UsageError(
            f"--source {text!r} is no TOPIC/PARTITION@OFFSET, as `aside` and `dead` show it"
        )
    return source


def _preview(rows: Sequence[dict[str, Any]], columns: Sequence[Any], yes: bool) -> None:
    """Show the changes, unless there is nothing to confirm."""
    if yes:
        return
    shown = rows[:_PREVIEWED]
    lines = table(shown, shown_columns(columns, "table"), sys.stderr).lines
    click.echo("\n".join(lines), err=True)
    if len(rows) > _PREVIEWED:
        click.echo(f"… and {len(rows) - _PREVIEWED:,} more", err=True)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
