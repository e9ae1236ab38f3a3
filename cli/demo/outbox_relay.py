"""A process with the relay of the shop's outbox; it ends with its stdin.

Arguments: bootstrap servers, database.
"""

import asyncio
import sqlite3
import sys
from contextlib import closing

from txbroker.cli.demo.worker import report
from txbroker.databases import SQLite
from txbroker.proxy.observe.logging import configure_logging
from txbroker.relay import Decision, Outbox, Relay
from txbroker.sdk import CheckRequest

CHECK_AFTER_S = 1.0
_POLL_S = 0.01


async def main(kafka: str, database: str) -> None:
    """Deliver messages until stdin ends."""

    def check(request: CheckRequest) -> Decision:
        """Decide by whether the order exists."""
        number = (request.messages[0].key or b"").decode()
        with closing(sqlite3.connect(database)) as connection:
            found = connection.execute("SELECT 1 FROM orders WHERE number = ?", (number,))
            return Decision.ROLLBACK if found.fetchone() is None else Decision.COMMIT

    async with Relay(
        Outbox(SQLite(database)),
        kafka,
        check=check,
        check_after_s=CHECK_AFTER_S,
        check_interval_s=1.0,
        lease_s=1.0,  # of a killed relay: the next one waits for its end
    ) as relay:
        report(step="ready")
        ended = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        while not ended.done():
            if relay.statistics()["delivered_total"]:
                break
            await asyncio.sleep(_POLL_S)
        report(step="delivering")
        await ended


if __name__ == "__main__":
    configure_logging("auto", "error")
    asyncio.run(main(*sys.argv[1:]))
