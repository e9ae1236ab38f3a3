"""A shop: an outbox in a separate database, and topics of a real Kafka."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tests.databases.places import Place
from tests.faults.judge import Rec
from tests.kit.topic_reader import create_topic, read_topics
from tests.kit.until import unique
from txbroker.core.encoding import ID_HEADER, INSTALLATION_HEADER
from txbroker.relay import Message, Outbox, Relay


@dataclass
class Shop:
    """One test's outbox and topic."""

    place: Place
    bootstrap: str
    topic: str = ""
    prefix: str = field(default_factory=lambda: unique("shop"))
    outbox: Outbox = field(init=False)

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.place.database)
        self.outbox.create()
        self.topic = create_topic(self.bootstrap, f"{self.prefix}.orders", 3)

    def relay(self, **options: Any) -> Relay:
        """Return a relay with positions of this shop's own."""
        return Relay(self.outbox, self.bootstrap, topic_prefix=self.prefix, **options)

    def messages(self, numbers: Sequence[int], key: str = "") -> list[Message]:
        """Return messages with these numbers as values; each has a key, by default its number."""
        return [Message(self.topic, key or f"k{n}", str(n)) for n in numbers]

    def add(self, numbers: Sequence[int], *, commit: bool = True, **options: Any) -> None:
        """Add messages in one transaction, and commit it or roll it back."""
        with closing(self.place.connect()) as connection:
            with_transaction(connection)
            self.outbox.add(connection, *self.messages(numbers), **options)
            connection.commit() if commit else connection.rollback()

    def visible(self) -> list[Rec]:
        """Return the records that a reader of committed transactions sees."""
        return read_topics(self.bootstrap, [self.topic])

    def numbers(self) -> list[int]:
        """Return the values of visible records, sorted."""
        return sorted(int(record.value or b"-1") for record in self.visible())

    def states(self) -> dict[str, int]:
        """Return the number of rows by state."""
        rows = self.place.select("SELECT state, COUNT(*) FROM txbroker_outbox GROUP BY state")
        return {str(state): int(count) for state, count in rows}

    def execute(self, sql: str) -> None:
        """Execute a statement of another program."""
        self.place.execute(sql)


def with_transaction(connection: Any) -> None:
    """Begin a transaction where the driver begins none before the first change."""
    if type(connection).__module__.startswith("sqlite3"):
        connection.execute("BEGIN IMMEDIATE")


def ids(records: Sequence[Rec]) -> list[tuple[str, str]]:
    """Return installation and id of records."""
    found = []
    for record in records:
        headers = dict(record.headers)
        installation, id = headers[INSTALLATION_HEADER], headers[ID_HEADER]
        assert installation is not None
        assert id is not None
        found.append((installation.decode(), id.decode()))
    return found
