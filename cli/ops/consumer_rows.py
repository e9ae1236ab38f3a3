"""What `txbroker consumers` shows: rows, columns and keys."""

import base64
import time
from collections.abc import Sequence

import click

from txbroker.cli.output import Row, TableColumn, clock, duration
from txbroker.consumer.operations.copies import DeadLetter, SetAsideKey
from txbroker.consumer.operations.groups import GroupView, PartitionView, StepView

_HEX, _BASE64 = "hex:", "base64:"


def _age(row: Row) -> str:
    return duration(time.time() - row["since_ms"] / 1000)


LIST_COLUMNS = (
    TableColumn("GROUP", lambda row: row["group"], keep=True),
    TableColumn("STATE", lambda row: row["state"], rank=1),
    TableColumn("MEMBERS", lambda row: row["members"]),
    TableColumn("PARTITIONS", lambda row: row["partitions"]),
    TableColumn("LAG", lambda row: row["lag"], rank=1),
    TableColumn("ASIDE KEYS", lambda row: row["aside_keys"], rank=1),
    TableColumn("DEAD LETTERS", lambda row: row["dead_letters"], rank=1),
    TableColumn("TOPICS", lambda row: ", ".join(row["topics"]), wide=True),
)
PARTITION_COLUMNS = (
    TableColumn("TOPIC", lambda row: row["topic"], keep=True),
    TableColumn("PARTITION", lambda row: row["partition"], keep=True),
    TableColumn("OWNER", lambda row: row["owner"]),
    TableColumn("POSITION", lambda row: row["position"], rank=1),
    TableColumn("END", lambda row: row["end"], rank=1),
    TableColumn("LAG", lambda row: row["lag"], rank=1),
    TableColumn("DONE AHEAD", lambda row: row["done_ahead"]),
    TableColumn("ASIDE KEYS", lambda row: row["aside_keys"], rank=1),
    TableColumn("TOKEN", lambda row: row["token"]),
    TableColumn("METADATA", lambda row: row["metadata"], wide=True),
)
STEP_COLUMNS = (
    TableColumn("STEP", lambda row: row["step"], keep=True),
    TableColumn("DELAY", lambda row: duration(row["delay_s"])),
    TableColumn("MESSAGES", lambda row: row["messages"], rank=1),
    TableColumn("NEXT IS DUE", lambda row: clock(row["due_ms"])),
)
ASIDE_COLUMNS = (
    TableColumn("KEY", lambda row: row["key"], keep=True),
    TableColumn("MESSAGES", lambda row: row["messages"], rank=1),
    TableColumn("FIRST", lambda row: row["source"], keep=True),
    TableColumn("AGE", _age, rank=1),
    TableColumn("RELEASED", lambda row: "yes" if row["released"] else "no"),
    TableColumn("CAUSE", lambda row: row["cause"], text=True),
    TableColumn("ATTEMPTS", lambda row: row["attempts"], wide=True),
)
DEAD_COLUMNS = (
    TableColumn("SOURCE", lambda row: row["source"], keep=True),
    TableColumn("KEY", lambda row: row["key"], text=True),
    TableColumn("ATTEMPTS", lambda row: row["attempts"]),
    TableColumn("AGE", _age, rank=1),
    TableColumn("BYTES", lambda row: row["size"]),
    TableColumn("CAUSE", lambda row: row["cause"], text=True),
    TableColumn("TIMESTAMP", lambda row: clock(row["timestamp_ms"]), wide=True),
    TableColumn("DEAD LETTER", lambda row: row["dead_letter"], wide=True),
    TableColumn("VALUE", lambda row: row["value"], text=True),
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
