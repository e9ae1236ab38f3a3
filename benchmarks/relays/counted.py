"""Runs a command of txbroker, and counts its requests to Kafka and its statements to SQLite.

    python -m benchmarks.relays.counted FILE outbox relay …

The counts are two 8-byte numbers in FILE, so that another process reads them at any time.
"""

from __future__ import annotations

import mmap
import sqlite3
import sys
from pathlib import Path
from typing import Any

from txbroker.kafka.client.connection import BrokerConnection

SIZE = 16


def counters(file: Path) -> memoryview:
    """Return the counts in a file: requests, statements."""
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), SIZE)).cast("Q")


def main() -> None:
    """Count, and run the command."""
    counts = counters(Path(sys.argv.pop(1)))
    send, connect = BrokerConnection.send, sqlite3.connect

    def counted(self: BrokerConnection, request: Any, answer: Any = None) -> Any:
        counts[0] += 1
        return send(self, request, answer)

    def statement(_sql: str) -> None:
        counts[1] += 1

    def connected(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.set_trace_callback(statement)
        return connection

    BrokerConnection.send = counted  # type: ignore[method-assign]
    sqlite3.connect = connected
    from txbroker.__main__ import main as run

    run()


if __name__ == "__main__":
    main()
