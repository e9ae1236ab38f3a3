"""A business that writes rows and messages in transactions, from several threads."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from typing import Any

from tests.databases.places import connect
from tests.faults.consuming.tables import ERRORS, POSTGRESQL, SQLITE, Tables, execute
from tests.faults.relays.judge import Change, Key, Queued, Txn
from txbroker.databases import from_url
from txbroker.errors import TxbrokerError
from txbroker.relay import Message, Outbox

KEYS = 12
ROWS_MAX = 5
BIG_SHARE, BIG_ROWS, BIG_BYTES = 0.01, 40, 60_000
"""Of transactions that are larger than a piece of a delivery."""
_PAUSE_S = 0.3
MIRRORED = ("parts", "items")
"""Captured tables that only faults change: one has partitions, the other gets a foreign key."""
COLUMNS = "id, txn, number, message_key, value"


class Shop:
    """The business.

    Args:
        kind: of the database: `sqlite`, `postgresql` or `mariadb`.
        url: of the database.
        topic: of its messages.
        queued: whether it writes messages; else its rows are captured.
        rate: transactions a second.
    """

    def __init__(
        self, kind: str, url: str, topic: str, *, queued: bool, seed: int, rate: float
    ) -> None:
        self.kind = kind
        self.url = url
        self.topic = topic
        self.txns: list[Txn] = []
        self.outbox = Outbox(from_url(url)) if queued else None
        self._tables = Tables(kind, url.removeprefix("sqlite:///") if kind == SQLITE else url)
        self._seed = seed
        self._rate = rate
        self._numbers = iter(range(1, 10**9))
        self._guard = threading.Lock()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def create(self) -> None:
        """Create the tables."""
        text = "LONGTEXT" if self.kind == "mariadb" else "text"
        with self._tables.connection() as connection:
            execute(
                connection,
                "CREATE TABLE orders (id VARCHAR(100) PRIMARY KEY, txn BIGINT, number BIGINT, "
                f"message_key VARCHAR(100), value {text})",
            )
        if self.outbox is not None:
            self.outbox.create()
            return
        listed = "" if self.kind == POSTGRESQL else " (PARTITION part_0 VALUES IN (0))"
        self.run(
            "CREATE TABLE parts (id BIGINT, slice BIGINT, PRIMARY KEY (id, slice)) "
            f"PARTITION BY LIST (slice){listed}",
            *(["CREATE TABLE part_0 PARTITION OF parts FOR VALUES IN (0)"] if not listed else ()),
            "CREATE TABLE parents (id BIGINT PRIMARY KEY)",
            "CREATE TABLE items (id BIGINT PRIMARY KEY, parent BIGINT)",
        )

    def open(self, writers: int) -> None:
        """Begin to write, also again after `close`."""
        self._over.clear()
        self._threads = [
            threading.Thread(target=self._write, args=(number, writers), daemon=True)
            for number in range(writers)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Write no more."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def once(self, fate: random.Random) -> None:
        """Write one transaction; it may be rolled back."""
        with contextlib.closing(connect(self.url)) as connection:
            self._transaction(connection, fate)

    # --- transactions ------------------------------------------------------------------------

    def _write(self, writer: int, writers: int) -> None:
        fate = random.Random(f"{self._seed}/{writer}")
        while not self._over.is_set():
            with (
                contextlib.suppress(*ERRORS, TxbrokerError),
                contextlib.closing(connect(self.url)) as connection,
            ):
                while not self._over.is_set():
                    self._transaction(connection, fate)
                    self._over.wait(fate.uniform(0, 2 * writers / self._rate))
            self._over.wait(_PAUSE_S)

    def _transaction(self, connection: Any, fate: random.Random) -> None:
        with self._guard:
            number = next(self._numbers)
        began, ended = time.monotonic(), math.inf
        try:
            if self.kind == SQLITE:
                connection.execute("BEGIN IMMEDIATE")
            self._rows(connection, fate, number)
            if fate.random() < 0.1:
                connection.rollback()
            else:
                connection.commit()
            ended = time.monotonic()
        finally:
            with self._guard:
                self.txns.append(Txn(number, began, ended))

    def _rows(self, connection: Any, fate: random.Random, txn: int) -> None:
        count, size = fate.randrange(1, ROWS_MAX + 1), 20
        if fate.random() < BIG_SHARE:
            count, size = BIG_ROWS, BIG_BYTES
        marks = ", ".join(["?" if self.kind == SQLITE else "%s"] * 5)
        for number in range(count):
            id = f"{txn}.{number}"
            key, value = f"key{fate.randrange(KEYS)}", f"{id}|" + "v" * size
            execute(
                connection,
                f"INSERT INTO orders ({COLUMNS}) VALUES ({marks})",
                (id, txn, number, key, value),
            )
            if self.outbox is not None:
                self.outbox.add(connection, Message(self.topic, key, value))
            if self.kind != SQLITE and fate.random() < 0.1:
                time.sleep(fate.uniform(0, 0.02))  # another transaction commits meanwhile

    # --- tables ------------------------------------------------------------------------------

    def run(self, *statements: str) -> None:
        """Execute statements, each in a transaction."""
        with self._tables.connection() as connection:
            for each in statements:
                execute(connection, each)

    def ids(self) -> set[str]:
        """Return the ids of committed rows."""
        return {id for (id,) in self.select("SELECT id FROM orders")}

    def mirrored(self) -> frozenset[Key]:
        """Return the keys of the rows of mirrored tables."""
        if self.outbox is not None:
            return frozenset()
        return frozenset(
            (table, str(id))
            for table in MIRRORED
            for (id,) in self.select(f"SELECT id FROM {table}")
        )

    def waiting(self) -> set[str]:
        """Return the ids of rows that are in the outbox, and not marked as delivered."""
        sql = "SELECT message_value FROM txbroker_outbox WHERE state <> 'GLOBAL_COMMIT'"
        return {bytes(value).decode().partition("|")[0] for (value,) in self.select(sql)}

    def changes(self) -> list[Change]:
        """Return all committed rows."""
        return [
            Change(id, int(txn), int(number), key, value)
            for id, txn, number, key, value in self.select(f"SELECT {COLUMNS} FROM orders")
        ]

    def queued(self) -> list[Queued] | None:
        """Return the rows of the outbox; None: there is none."""
        if self.outbox is None:
            return None
        found = self.select("SELECT position, id, state, shard, message_value FROM txbroker_outbox")
        return [
            Queued(int(position), id, state, int(shard), bytes(value).decode())
            for position, id, state, shard, value in found
        ]

    def forgotten(self, slot: str) -> int | None:
        """Return up to where a slot of PostgreSQL may forget; None: nothing yet."""
        found = self.select(
            "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots "
            f"WHERE slot_name = '{slot}'"
        )
        return int(found[0][0]) if found else None

    def select(self, sql: str) -> list[Any]:
        """Return the rows of a statement."""
        with self._tables.connection() as connection:
            return execute(connection, sql)
