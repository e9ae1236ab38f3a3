"""A process of the order service: orders are JSON lines on stdin, steps JSON lines on stdout.

An order may name a step to stop at. The process then waits there for another line, and the demo may
kill it. It ends when stdin does, so it never outlives the demo.

Arguments: URL of the proxy, database, name of this instance.
"""

import json
import sys
from pathlib import Path

from txbroker.cli.demo.shop import Shop, ShopOrder
from txbroker.sdk import BlockingTransactionalProducer, SqliteBarrier

GROUP = "shop"


def main(url: str, database: str, instance: str) -> None:
    """Place orders until stdin ends."""
    barrier = SqliteBarrier(database)
    stop_at = ""

    def at_step(order: ShopOrder, step: str, id: str) -> None:
        report(order=order.number, step=step, id=id)
        if step == stop_at:
            wait()

    with BlockingTransactionalProducer(
        url, group=GROUP, check=barrier.check, instance=instance
    ) as producer:
        shop = Shop(Path(database), producer, barrier, at_step)
        report(step="ready")
        for line in sys.stdin:
            command = json.loads(line)
            stop_at = command.pop("stop_at")
            shop.place(ShopOrder(**command))
            report(order=command["number"], step="over")


def report(**event: str) -> None:
    """Write an event to stdout."""
    sys.stdout.write(f"{json.dumps(event)}\n")
    sys.stdout.flush()


def wait() -> None:
    """Wait for the next line, which may never come."""
    if not sys.stdin.readline():
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
