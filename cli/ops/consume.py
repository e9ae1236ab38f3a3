"""`txbroker consume`: show the messages of a topic as a `read_committed` consumer gets them."""

import asyncio
import base64
import re
import select
import sys
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from txbroker.cli.client import ApiClient, ApiError, client_options
from txbroker.cli.completion import complete_topics
from txbroker.cli.main import near
from txbroker.cli.ops.consumers import open_door
from txbroker.cli.options import SectionedCommand
from txbroker.cli.output import Row, RowStream, TableColumn, clock, escaped, output_option
from txbroker.cli.run import CommandFailed
from txbroker.cli.setting_options import KAFKA_SETTINGS, setting_options, settings_from
from txbroker.config.settings import Settings
from txbroker.contract.json import message_to_json
from txbroker.core.records import Message, Partition, Record
from txbroker.door.consuming import EARLIEST, LATEST, ConsumingDoor, Fetcher
from txbroker.errors import KafkaUnavailable

T = TypeVar("T")

TIMEOUT_S = 8.0
"""The command fails if Kafka does not answer for this time."""
_LOOK_S = 0.5
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
_ID, _SEQUENCE = "txb-id", "txb-seq"


def _line(content: str | bytes) -> str:
    """Return content as one line that a terminal shows and does not obey."""
    return escaped(
        content if isinstance(content, str) else content.decode(errors="backslashreplace")
    )


def _content(name: str) -> Any:
    def shown(row: Row) -> str | None:
        if f"{name}_base64" in row:
            return _line(base64.b64decode(row[f"{name}_base64"]))
        return None if row.get(name) is None else _line(row[name])

    return shown


def _headers(row: Row) -> str:
    shown = []
    for name, value in row["headers"]:
        if not name.startswith("txb-"):
            raw = base64.b64decode(value["base64"]) if isinstance(value, dict) else value or ""
            shown.append(f"{_line(name)}={_line(raw)}")
    return ", ".join(shown)


def _header(name: str) -> Any:
    return lambda row: next((value for given, value in row["headers"] if given == name), None)


COLUMNS = (
    TableColumn(
        "RECORD", lambda row: f"{row['topic']}/{row['partition']}@{row['offset']}", keep=True
    ),
    TableColumn("KEY", _content("key"), rank=1),
    TableColumn("VALUE", _content("value"), rank=0, text=True),
    TableColumn("HEADERS", _headers, rank=3, text=True),
    TableColumn("ID", rank=2),
    TableColumn("TIME", lambda row: clock(row["timestamp_ms"]), rank=4),
    TableColumn("SEQUENCE", _header(_SEQUENCE), wide=True),
)


@click.command("consume", cls=SectionedCommand)
@click.argument("topic", shell_complete=complete_topics)
@click.option("--from-beginning", is_flag=True, help="Begin at the first message, not at the end.")
@click.option(
    "--follow/--no-follow",
    default=None,
    help="Wait for further messages until Ctrl-C. [default: on a terminal, and without "
    "--from-beginning]",
)
@click.option(
    "-n", "--count", type=click.IntRange(min=1), metavar="COUNT", help="End after these messages."
)
@setting_options(KAFKA_SETTINGS)
@output_option
@client_options
def command(
    client: ApiClient,
    config: Path | None,
    output: str,
    topic: str,
    from_beginning: bool,
    follow: bool | None,
    count: int | None,
    **options: Any,
) -> None:
    """Show the messages of TOPIC as they become visible.

    Reads Kafka as a consumer with isolation.level=read_committed does, and commits no offsets.
    Without --kafka it takes Kafka's address from the proxy. With -o json and ndjson each message is
    a line.
    """
    if not _TOPIC_NAME.fullmatch(topic):
        raise click.UsageError(
            f"{_line(topic)!r} is no topic: use up to 249 letters, digits, dots, dashes and "
            "underscores"
        )
    settings = with_kafka(settings_from(config, options), client)
    if follow is None:
        follow = not from_beginning or sys.stdout.isatty()
    shown = _MessageOutput(output, count)
    asyncio.run(_consume(settings, topic, shown, from_beginning=from_beginning, follow=follow))


def with_kafka(settings: Settings, client: ApiClient) -> Settings:
    """Return settings with the proxy's address of Kafka, unless one is given."""
    if "kafka" in settings.model_fields_set:
        return settings
    try:
        kafka = client.get("overview").get("kafka")
    except ApiError as error:
        kafka, why = None, error.sentence
    else:
        why = "it is older"
    if not kafka:
        raise CommandFailed(
            f"Kafka's address is unknown: the proxy does not name it ({why}). Name Kafka by --kafka"
        )
    return settings.model_copy(update={"kafka": kafka})


class _Delivery(NamedTuple):
    """Records of a partition, or why there are none."""

    partition: Partition
    records: Sequence[Record] = ()
    next_offset: int = 0
    error: KafkaUnavailable | None = None


class _MessageOutput:
    """Writes messages to stdout, until there are `count`."""

    def __init__(self, output: str, count: int | None) -> None:
        self._rows = RowStream(COLUMNS, output)
        self._left = count

    @property
    def enough(self) -> bool:
        """True once the number of messages is reached."""
        return self._left == 0

    def show(self, partition: Partition, records: Sequence[Record]) -> None:
        """Write records; raise BrokenPipeError if the reader has gone."""
        if self._left is not None:
            records = records[: self._left]
            self._left -= len(records)
        self._rows.write([_row(partition, record) for record in records])


def _row(partition: Partition, record: Record) -> Row:
    topic, number = partition
    message = Message(
        topic, record.key, record.value, tuple(record.headers), number, record.timestamp_ms
    )
    row = {
        "topic": topic,
        "partition": number,
        "offset": record.offset,
        "id": None,
        "headers": [],
        **message_to_json(message),
    }
    row["id"] = _header(_ID)(row)
    return row


async def _consume(
    settings: Settings, topic: str, shown: _MessageOutput, *, from_beginning: bool, follow: bool
) -> None:
    door = open_door(settings)
    fetcher: Fetcher | None = None
    arrived: asyncio.Queue[_Delivery] = asyncio.Queue()

    def deliver(
        partition: Partition, records: Sequence[Record], next_offset: int, end: int
    ) -> None:
        if records and fetcher is not None:
            fetcher.pause(partition)  # until these are shown
        arrived.put_nowait(_Delivery(partition, records, next_offset))

    try:
        await _within(door.start(), settings)
        partitions, created = await _partitions(door, settings, topic, wait=follow)
        ends = await _within(door.offsets(partitions, LATEST), settings)
        starts = ends
        if from_beginning or created:
            starts = await _within(door.offsets(partitions, EARLIEST), settings)
        fetcher = door.fetcher(
            deliver, lambda partition, error: arrived.put_nowait(_Delivery(partition, error=error))
        )
        left = {each for each in partitions if follow or starts[each] < ends[each]}
        for partition in left:
            fetcher.add(partition, starts[partition])
        await _show(arrived, fetcher, shown, left, None if follow else ends)
    finally:
        if fetcher is not None:
            await fetcher.close()
        await door.close()


async def _within(asking: Awaitable[T], settings: Settings) -> T:
    """Return Kafka's answer."""
    try:
        return await asyncio.wait_for(asking, TIMEOUT_S)
    except TimeoutError:
        raise CommandFailed(
            f"no answer from Kafka at {settings.kafka} within {TIMEOUT_S:g} s: check that it runs, "
            "and its address, TLS and login"
        ) from None


async def _partitions(
    door: ConsumingDoor, settings: Settings, topic: str, *, wait: bool
) -> tuple[list[Partition], bool]:
    """Return a topic's partitions, and whether it was created meanwhile.

    Args:
        wait: until the topic exists.
    """
    waiting = False
    while True:
        found = (await _within(door.topics([topic]), settings)).get(topic)
        if found is not None:
            return [(topic, number) for number in range(found.partitions)], waiting
        if not waiting:
            known = near(topic, sorted(await _within(door.topics(), settings)))
            hint = f" Did you mean {known[0]}?" if known else ""
            sentence = f"there is no topic {topic} on Kafka at {settings.kafka}."
            if not wait:
                raise CommandFailed(f"{sentence}{hint} A transaction or your Kafka tools create it")
            click.echo(f"Waiting: {sentence}{hint}", err=True)
            waiting = True
        await asyncio.sleep(_LOOK_S)
        _require_reader()


async def _show(
    arrived: "asyncio.Queue[_Delivery]",
    fetcher: Fetcher,
    shown: _MessageOutput,
    left: set[Partition],
    ends: Mapping[Partition, int] | None,
) -> None:
    """Show records of the partitions `left` until there are enough, or until `ends`."""
    loop = asyncio.get_running_loop()
    failing_since_s = 0.0
    while left and not shown.enough:
        try:
            one = await asyncio.wait_for(arrived.get(), _LOOK_S)
        except TimeoutError:
            continue
        finally:
            _require_reader()
        if one.error is not None:
            first, failing_since_s = not failing_since_s, failing_since_s or loop.time()
            if one.error.lasting or (ends and loop.time() > failing_since_s + TIMEOUT_S):
                raise CommandFailed(f"{one.error}. Check the topic and Kafka, and repeat")
            if first:
                click.echo(f"{one.error}; trying again", err=True)
            continue
        failing_since_s = 0.0
        end = one.next_offset if ends is None else ends[one.partition]
        shown.show(one.partition, [each for each in one.records if each.offset < end])
        fetcher.resume(one.partition)
        if ends is not None and one.next_offset >= end:
            left.discard(one.partition)
            fetcher.remove(one.partition)


def _require_reader() -> None:
    """Raise BrokenPipeError if the reader of stdout has gone; without messages no write fails."""
    poll = select.poll()
    with suppress(OSError, ValueError):  # stdout is no file
        poll.register(sys.stdout.fileno(), 0)
    if any(event & select.POLLERR for _, event in poll.poll(0)):
        raise BrokenPipeError
