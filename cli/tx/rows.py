"""Transactions as rows of a table, and each in full."""

from collections.abc import Iterable

from msgspec import UNSET

from txbroker.cli.output import TableColumn, clock, printable, since
from txbroker.contract.transactions import PlacedBody, TransactionBody

STATES = ("pending", "committed", "promoted", "rolled_back", "parked", "refused")


def _attempts(row: TransactionBody) -> str:
    return "" if row.attempts is None else f"{row.attempts}/{row.attempts_max}"


def _cause(row: TransactionBody) -> str | None:
    return None if row.cause is None else row.cause.message


COLUMNS = (
    TableColumn("ID", keep=True),
    TableColumn("GROUP"),
    TableColumn("STATE", rank=1),
    TableColumn("AGE", lambda row: since(row.prepared_at_ms), rank=1),
    TableColumn("MESSAGES", lambda row: len(row.messages), rank=4),
    TableColumn("TOPICS", lambda row: ", ".join(dict.fromkeys(m.topic for m in row.messages))),
    TableColumn("ATTEMPTS", _attempts, rank=3),
    TableColumn("PREPARED", lambda row: clock(row.prepared_at_ms), wide=True),
    TableColumn("NEXT CHECK", lambda row: clock(row.next_check_at_ms), wide=True),
    TableColumn("ROUND", wide=True),
    TableColumn("DECIDED BY", lambda row: row.source, wide=True),
    TableColumn("HALF", lambda row: f"{row.partition}@{row.half_offset}", wide=True),
    TableColumn("CAUSE", _cause, wide=True, text=True),
)


def story(row: TransactionBody) -> Iterable[str]:
    yield f"{row.id}  {row.state}"
    facts = {
        "group": row.group,
        "order key": row.order_key,
        "dedup key": row.dedup_key,
        "attempts": row.attempts is not None
        and f"{row.attempts} of {row.attempts_max}, round {row.round}",
        "next check": clock(row.next_check_at_ms),
        "waiting": row.waiting,
        "half": f"partition {row.partition}, offset {row.half_offset}",
        "cause": _cause(row),
    }
    for name, value in facts.items():
        if value:
            yield f"  {name:<11}{printable(str(value))}"
    for message in row.messages:
        yield f"  message    {printable(_placed(message))}"
    for event in row.timeline:
        text = f"{clock(event.at_ms)}  {event.event:<9} {event.text}"
        yield f"  {printable(text.rstrip())}"
        if event.record:
            yield f"  {'':<24}  {'':<9} record {printable(event.record)}"
    if row.read_back:
        yield "  read back  from the topics: the proxy's memory does not hold all of it"
    for gap in row.gaps:
        yield f"  unknown    {printable(gap)}"


def _placed(message: PlacedBody) -> str:
    where = f"{message.topic}/{message.partition}"
    if message.offset is not None:
        where += f"@{message.offset}"
    content: dict[str, object] = {
        "key": message.key,
        "key (base64)": message.key_base64,
        "value": message.value,
        "value (base64)": message.value_base64,
        "headers": [list(pair) for pair in message.headers] if message.headers else UNSET,
    }
    shown = (f"{name}={value!r}" for name, value in content.items() if value is not UNSET)
    return "  ".join((where, *shown))
