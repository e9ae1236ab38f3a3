"""Half and operation logs for tests, written as an owner's appender would, without a Kafka."""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import structs

from txbroker.core.encoding import encode_contents, encode_half, encode_marker
from txbroker.core.ledger import ApplyResult, Effect, Ledger
from txbroker.core.records import (
    ATTRIBUTES,
    RECORD_VERSION,
    Attributes,
    CheckPolicy,
    Half,
    Marker,
    MarkerKind,
    Message,
    Record,
)
from txbroker.core.routing import make_id

PARTITION = 3
WINDOW_MS = 120_000
START_MS = 1_700_000_000_000


def id_of(number: int, time_ms: int = START_MS, partition: int = PARTITION) -> str:
    return make_id(partition, time_ms, number)


def message(value: str = "v", topic: str = "t", key: bytes | None = b"k", at: int = 0) -> Message:
    return Message(topic, key, value.encode(), (("h", b"1"),), partition=at)


def half_of(
    id: str,
    *messages: Message,
    group: str = "g",
    order_key: str | None = None,
    dedup_key: str | None = None,
    policy: CheckPolicy | None = None,
) -> Half:
    """Return a half message, of one plain message if none is given."""
    attributes = Attributes(order_key, dedup_key)
    return Half(id, group, messages or (message(),), attributes, policy or CheckPolicy())


def with_fields(half: Half, **fields: Any) -> Half:
    """Return a half message with these fields, attributes among them."""
    given = {name: fields.pop(name) for name in ATTRIBUTES if name in fields}
    attributes = structs.replace(half.attributes, **given)
    return structs.replace(half, attributes=attributes, **fields)


def marker_of(kind: MarkerKind | str, id: str, **fields: object) -> Marker:
    return structs.replace(Marker(RECORD_VERSION, MarkerKind(kind), id), **fields)


class Log:
    """The records of one partition: contiguous offsets, append times as the broker gives them."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def append(self, records: Iterable[Record], at_ms: int) -> None:
        for record in records:
            self.records.append(
                structs.replace(record, offset=len(self.records), timestamp_ms=at_ms)
            )


class Logs:
    """The half log and the operation log of one partition."""

    def __init__(self) -> None:
        self.half = Log()
        self.op = Log()

    def prepare(self, half: Half, at_ms: int) -> None:
        self.half.append(encode_half(half), at_ms)

    def mark(self, marker: Marker, at_ms: int) -> None:
        self.op.append([encode_marker(marker)], at_ms)

    def commit_with(self, half: Half, contents: Sequence[Message], at_ms: int) -> None:
        """Append a commit whose messages replace the prepared ones, in one batch."""
        marker = marker_of("commit", half.id, group=half.group, contents=len(contents))
        self.op.append([encode_marker(marker), *encode_contents(half, contents)], at_ms)


def new_ledger(beyond_max: int = 10_000) -> Ledger:
    return Ledger(PARTITION, WINDOW_MS, beyond_max)


def apply_all(ledger: Ledger, logs: Logs, half_end: int, op_end: int) -> None:
    """Apply what is left below two offsets, half first."""
    for record in logs.half.records[ledger.half_position : half_end]:
        ledger.apply_half(record)
    for record in logs.op.records[ledger.op_position : op_end]:
        ledger.apply_op(record)


def replayed(logs: Logs) -> Ledger:
    ledger = new_ledger()
    apply_all(ledger, logs, len(logs.half.records), len(logs.op.records))
    return ledger


def picture(ledger: Ledger) -> dict[str, dict[str, object]]:
    """Return all that a ledger knows of its transactions, for comparing ledgers."""
    return {transaction.id: structs.asdict(transaction) for transaction in ledger.index}


def effects(outcomes: Iterable[ApplyResult]) -> list[Effect]:
    return [outcome.effect for outcome in outcomes]
