"""A process of the stock service: counts sold items in SQLite, exactly once.

It stops at a message if the demo wants to kill it there, and reports that on stdout. It ends when
all messages are counted, or with its stdin.

Arguments: bootstrap servers, topic, group, database, where to stop, after how many messages.
"""

import asyncio
import json
import sqlite3
import sys

from txbroker.cli.demo.worker import report
from txbroker.consumer import Consumer, InDatabase, ReceivedMessage
from txbroker.databases import SQLite
from txbroker.proxy.observe.logging import configure_logging

IN_TRANSACTION, AFTER_COMMIT = "in the transaction", "after the commit"
PARTITIONS = 4
_POLL_S = 0.05


async def main(
    kafka: str, topic: str, group: str, database: str, stop_at: str, stop_after: str
) -> None:
    """Count until everything is counted."""
    seen = 0

    def count(message: ReceivedMessage, connection: sqlite3.Connection) -> None:
        nonlocal seen
        sold = json.loads(message.value or b"")
        connection.execute("UPDATE stock SET n = n - ? WHERE item = ?", (sold["n"], sold["item"]))
        seen += 1
        _pause(IN_TRANSACTION, message)

    def after(message: ReceivedMessage, _error: BaseException | None) -> None:
        _pause(AFTER_COMMIT, message)

    def _pause(step: str, message: ReceivedMessage) -> None:
        if step == stop_at and seen >= int(stop_after):
            report(step=step, message=message.id)
            sys.stdin.readline()
            sys.exit(1)

    async with Consumer(
        kafka,
        group=group,
        topics=[topic],
        mode="exactly-once",
        order="key",
        store=InDatabase(SQLite(database)),
        instance="stock",  # a process that starts again takes its partitions over at once
        after=after,
    ) as consumer:
        running = asyncio.create_task(consumer.run(count))
        report(step="ready")
        while not running.done():
            lag = consumer.statistics().lag
            if len(lag) == PARTITIONS and not any(lag.values()):
                consumer.stop()
            await asyncio.sleep(_POLL_S)
        await running
    report(step="counted")


if __name__ == "__main__":
    configure_logging("auto", "error")  # the demo itself shows the kills
    asyncio.run(main(*sys.argv[1:]))
