"""`Inbox`: each message has its effect once, with any Kafka client.

The inbox stores the id of a message in the transaction of its effect. A second INSERT of the id
waits until the first transaction ends; if that committed, the message is a repeat.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from txbroker.databases import tables
from txbroker.databases.connections import run_on, run_on_async
from txbroker.databases.database import Database, check_database
from txbroker.databases.dialect import SQLITE, Fault
from txbroker.databases.steps import Query, Steps
from txbroker.errors import BadRequest, ConfigurationError

_SNAPSHOT_LEVELS = ("repeatable read", "serializable")


class Inbox:
    """The ids of the messages that a consumer has handled; may be used from many threads and
    processes.

    Args:
        database: where the effects are stored.
        consumer: separates consumers of the same messages in one database.

    Raises:
        ConfigurationError: the consumer's name is not ASCII, or longer than 255 characters.
    """

    def __init__(self, database: Database, consumer: str = "") -> None:
        check_database("Inbox", database)
        if consumer != "" and not (isinstance(consumer, str) and tables.is_key(consumer)):
            raise ConfigurationError(
                f"consumer is a text of at most {tables.KEY_MAX} ASCII characters, not {consumer!r}"
            )
        self.database = database
        self._dialect = database.dialect
        self._consumer = consumer

    def accept(self, connection: Any, message_id: str) -> bool:
        """Store the id of a message in the open transaction of `connection`; return False if it is
        stored, and the message is to be skipped.

        While another transaction that accepted it is open, this waits for its end.

        Raises:
            ConfigurationError: the id would not be stored in a transaction with the effect, or the
                table cannot be used.
            BadRequest: the id is empty.
            DatabaseUnavailable: the tables cannot be checked.
            Exception: the driver's: roll back and repeat the transaction.
        """
        return run_on(self.database, connection, self._accept(_row_id(message_id)))

    async def accept_async(self, connection: Any, message_id: str) -> bool:
        """`accept` on a connection whose statements are awaited."""
        return await run_on_async(self.database, connection, self._accept(_row_id(message_id)))

    def forget(self, older_than_s: float) -> int:
        """Delete ids that were stored more than `older_than_s` seconds ago; return how many.

        Keep ids longer than a message can be repeated: at least as long as the topic keeps it.

        Raises:
            BadRequest: less than a day.
            ConfigurationError, DatabaseUnavailable
        """
        with self.database.explained():
            return self.database.apart(self._forget(older_than_s))

    async def forget_async(self, older_than_s: float) -> int:
        """`forget` for asyncio."""
        return await self.database.ask(self._forget(older_than_s))

    def _forget(self, older_than_s: float) -> Steps[int]:
        return tables.forget(
            self._dialect, tables.INBOX, older_than_s, {"consumer": self._consumer}
        )

    def _accept(self, stored: str) -> Steps[bool]:
        if self._dialect is SQLITE:
            yield from tables.check_file(self.database.file)
        if not self._dialect.isolation:
            return (yield from self._insert(stored))
        # Elsewhere than at read committed, a newer row with this id would abort the transaction.
        levels = ", ".join(f"'{level}'" for level in _SNAPSHOT_LEVELS)
        if (yield from self._insert(stored, f"{self._dialect.isolation} NOT IN ({levels})")):
            return True
        result = yield Query(f"SELECT {self._dialect.isolation}")
        if result.rows[0][0] not in _SNAPSHOT_LEVELS:
            return False
        return (yield from self._insert_and_keep_transaction(stored))

    def _insert(self, stored: str, condition: str = "") -> Steps[bool]:
        row = f"VALUES (?, ?, {self._dialect.now_s})"
        if condition:
            row = (
                f"SELECT CAST(? AS text), CAST(? AS text), {self._dialect.now_s} WHERE {condition}"
            )
        sql = f"INSERT INTO {tables.INBOX} (consumer, id, at_s) {row}"
        return (yield from tables.insert_new(self._dialect, sql, (self._consumer, stored)))

    def _insert_and_keep_transaction(self, stored: str) -> Steps[bool]:
        yield Query("SAVEPOINT txbroker")
        try:
            new = yield from self._insert(stored)
        except Exception as error:
            yield Query("ROLLBACK TO SAVEPOINT txbroker")
            if self._dialect.fault(error) is not Fault.BUSY:
                raise
            sql = f"SELECT 1 FROM {tables.INBOX} WHERE consumer = ? AND id = ?"
            found = yield Query(sql, (self._consumer, stored), apart=True)
            if not found.rows:
                raise
            new = False
        yield Query("RELEASE SAVEPOINT txbroker")
        return new


def _row_id(message_id: str) -> str:
    """Return the text that stands for an id in the table: a hash where it is too long or has other
    characters than printable ASCII."""
    if not isinstance(message_id, str) or not message_id:
        raise BadRequest(f"a message's id is a text that is not empty, not {message_id!r}")
    if tables.is_key(message_id):
        return message_id
    return "sha256:" + sha256(message_id.encode(errors="surrogatepass")).hexdigest()
