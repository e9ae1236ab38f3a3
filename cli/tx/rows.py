"""Transactions as rows of a table, and each in full."""

from collections.abc import Iterable

from txbroker.cli.output import Row, TableColumn, clock, printable, since

STATES = ("pending", "committed", "promoted", "rolled_back", "parked", "refused")


def _attempts(row: Row) -> str:
    return "" if row["attempts"] is None else f"{row['attempts']}/{row['attempts_max']}"


def topics_of(row: Row) -> str:
    return ", ".join(dict.fromkeys(message["topic"] for message in row["messages"]))


COLUMNS = (
    TableColumn("ID", keep=True),
    TableColumn("GROUP"),
    TableColumn("STATE", rank=1),
    TableColumn("AGE", lambda row: since(row["prepared_at_ms"]), rank=1),
    TableColumn("MESSAGES", lambda row: len(row["messages"]), rank=4),
    TableColumn("TOPICS", topics_of),
    TableColumn("ATTEMPTS", _attempts, rank=3),
    TableColumn("PREPARED", lambda row: clock(row["prepared_at_ms"]), wide=True),
    TableColumn("NEXT CHECK", lambda row: clock(row.get("next_check_at_ms")), wide=True),
    TableColumn("ROUND", wide=True),
    TableColumn("DECIDED BY", lambda row: row.get("source"), wide=True),
    TableColumn("HALF", lambda row: f"{row['partition']}@{row['half_offset']}", wide=True),
    TableColumn("CAUSE", lambda row: (row.get("cause") or {}).get("message"), wide=True, text=True),
)


def story(row: Row) -> Iterable[str]:
    yield f"{row['id']}  {row['state']}"
    facts = {
        "group": row["group"],
        "order key": row.get("order_key"),
        "dedup key": row.get("dedup_key"),
        "attempts": row["attempts"] is not None
        and f"{row['attempts']} of {row['attempts_max']}, round {row['round']}",
        "next check": clock(row.get("next_check_at_ms")),
        "waiting": row.get("waiting"),
        "half": f"partition {row['partition']}, offset {row['half_offset']}",
        "cause": (row.get("cause") or {}).get("message"),
    }
    for name, value in facts.items():
        if value:
            yield f"  {name:<11}{printable(str(value))}"
    for message in row["messages"]:
        yield f"  message    {printable(_placed(message))}"
    for event in row.get("timeline", ()):
        text = f"{clock(event['at_ms'])}  {event['event']:<9} {event.get('text', '')}"
        yield f"  {printable(text.rstrip())}"
        if event.get("record"):
            yield f"  {'':<24}  {'':<9} record {printable(event['record'])}"
    if row.get("read_back"):
        yield "  read back  from the topics: the proxy's memory does not hold all of it"
    for gap in row.get("gaps", ()):
        yield f"  unknown    {printable(gap)}"


def _placed(message: Row) -> str:
    where = f"{message['topic']}/{message['partition']}"
    if message.get("offset") is not None:
        where += f"@{message['offset']}"
    content = [
        f"{name}={message[field]!r}"
        for name, field in (
            ("key", "key"),
            ("key (base64)", "key_base64"),
            ("value", "value"),
            ("value (base64)", "value_base64"),
            ("headers", "headers"),
        )
        if field in message
    ]
    return "  ".join((where, *content))
