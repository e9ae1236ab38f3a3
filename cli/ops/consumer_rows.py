"""What `txbroker consumers` shows: rows, columns and keys."""

import base64
from collections.abc import Sequence

import click

from txbroker.cli.output import Row, TableColumn, clock, duration, since
from txbroker.consumer.operations.copies import DeadLetter, SetAsideKey
from txbroker.consumer.operations.groups import GroupView, PartitionView, StepView

_HEX, _BASE64 = "hex:", "base64:"


LIST_COLUMNS = (
    TableColumn("GROUP", keep=True),
    TableColumn("STATE", rank=1),
    TableColumn("MEMBERS"),
    TableColumn("PARTITIONS"),
    TableColumn("LAG", rank=1),
    TableColumn("ASIDE KEYS", rank=1),
    TableColumn("DEAD LETTERS", rank=1),
    TableColumn("TOPICS", lambda row: ", ".join(row["topics"]), wide=True),
)
PARTITION_COLUMNS = (
    TableColumn("TOPIC", keep=True),
    TableColumn("PARTITION", keep=True),
    TableColumn("OWNER"),
    TableColumn("POSITION", rank=1),
    TableColumn("END", rank=1),
    TableColumn("LAG", rank=1),
    TableColumn("DONE AHEAD"),
    TableColumn("ASIDE KEYS", rank=1),
    TableColumn("TOKEN"),
    TableColumn("METADATA", wide=True),
)
STEP_COLUMNS = (
    TableColumn("STEP", keep=True),
    TableColumn("DELAY", lambda row: duration(row["delay_s"])),
    TableColumn("MESSAGES", rank=1),
    TableColumn("NEXT IS DUE", lambda row: clock(row["due_ms"])),
)
ASIDE_COLUMNS = (
    TableColumn("KEY", keep=True),
    TableColumn("MESSAGES", rank=1),
    TableColumn("FIRST", lambda row: row["source"], keep=True),
    TableColumn("AGE", lambda row: since(row["since_ms"]), rank=1),
    TableColumn("RELEASED", lambda row: "yes" if row["released"] else "no"),
    TableColumn("CAUSE", text=True),
    TableColumn("ATTEMPTS", wide=True),
)
DEAD_COLUMNS = (
    TableColumn("SOURCE", keep=True),
    TableColumn("KEY", text=True),
    TableColumn("ATTEMPTS"),
    TableColumn("AGE", lambda row: since(row["since_ms"]), rank=1),
    TableColumn("BYTES", lambda row: row["size"]),
    TableColumn("CAUSE", text=True),
    TableColumn("TIMESTAMP", lambda row: clock(row["timestamp_ms"]), wide=True),
    TableColumn("LEFT OUT", wide=True),
    TableColumn("DEAD LETTER", wide=True),
    TableColumn("VALUE", text=True),
)


# --- rows ------------------------------------------------------------------------------------


def list_row(view: GroupView, dead: int | None) -> Row:
    """Return the row of a group in a list."""
    return {
        "group": view.group,
        "state": view.state,
        "members": len(view.members),
        "topics": sorted({each.topic for each in view.partitions}),
        "partitions": len(view.partitions),
        "lag": view.lag,
        "aside_keys": view.aside,
        "dead_letters": dead,
    }


def group_row(view: GroupView, steps: Sequence[StepView]) -> Row:
    """Return a whole group."""
    return {
        "group": view.group,
        "state": view.state,
        "lag": view.lag,
        "members": [{"name": name, "host": host} for name, host in view.members],
        "topics": sorted(view.topics),
        "partitions": [_partition_row(each) for each in view.partitions],
        "retries": [
            {
                "step": each.step,
                "delay_s": each.delay_s,
                "messages": each.messages,
                "due_ms": each.due_ms,
            }
            for each in steps
        ],
    }


def _partition_row(view: PartitionView) -> Row:
    found = view.metadata
    return {
        "topic": view.topic,
        "partition": view.partition,
        "owner": view.owner,
        "position": view.position,
        "end": view.end,
        "lag": view.lag,
        "done_ahead": None if found is None else sum(end - first for first, end in found.ranges),
        "aside_keys": None if found is None else found.aside,
        "token": None if found is None else found.token,
        "metadata": "foreign" if view.foreign else "none" if found is None else "txbroker",
    }


def aside_row(each: SetAsideKey) -> Row:
    """Return the row of a set-aside key."""
    return {
        "key": shown_key(each.key),
        "messages": each.messages,
        "source": str(each.first.source),
        "since_ms": each.first.due_ms,
        "released": each.released,
        "attempts": each.first.attempts,
        "cause": each.first.cause,
    }


def dead_row(each: DeadLetter, *, values: bool = False) -> Row:
    """Return the row of a dead letter."""
    row = {
        "source": str(each.failed.source),
        "key": shown_key(each.message.key),
        "attempts": each.failed.attempts,
        "since_ms": each.failed.due_ms,
        "timestamp_ms": each.message.timestamp_ms,
        "size": each.size,
        "cause": each.failed.cause,
        "left_out": "" if each.failed.left_out is None else each.failed.left_out.parts,
        "dead_letter": str(each.place),
    }
    return {**row, "value": shown_key(each.message.value)} if values else row


# --- keys ------------------------------------------------------------------------------------


def shown_key(key: bytes | None) -> str | None:
    """Return a key, or a value, as `parse_key` takes it."""
    if key is None:
        return None
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return f"{_HEX}{key.hex()}"
    plain = text.isprintable() and not text.startswith((_HEX, _BASE64))
    return text if plain else f"{_HEX}{key.hex()}"


def parse_key(text: str) -> bytes:
    """Return the bytes of a key: text, or `hex:` or `base64:` and its bytes."""
    try:
        if text.startswith(_HEX):
            return bytes.fromhex(text.removeprefix(_HEX))
        if text.startswith(_BASE64):
            return base64.b64decode(text.removeprefix(_BASE64), validate=True)
    except ValueError:
        kind = text.partition(":")[0]
        raise click.UsageError(
            f"--key {text!r}: the bytes after {kind}: are no {kind}; a key that begins so is given "
            "as hex:"
        ) from None
    return text.encode()
