"""A process of the order service. Orders come as lines of JSON on stdin, steps go out on stdout.

An order may name a step to stop at. The process then waits there for another line: that is where
the demo kills it. It ends when stdin does, so none outlives the demo.

Arguments: URL of the proxy, database, name of this instance.
"""

import json
import sys
from pathlib import Path

from txbroker.cli.demo.shop import Order, Shop
from txbroker.sdk import BlockingTransactionalProducer, SqliteBarrier

GROUP = "shop"


def main(url: str, database: str, instance: str) -> None:
    """Place orders until stdin ends."""
    barrier = SqliteBarrier(database)
    stop_at = ""

    def at_step(order: Order, step: str, id: str) -> None:
        tell(order=order.number, step=step, id=id)
        if step == stop_at:
            wait()

    with BlockingTransactionalProducer(
        url, group=GROUP, check=barrier.check, instance=instance
    ) as producer:
        shop = Shop(Path(database), producer, barrier, at_step)
        tell(step="ready")
        for line in sys.stdin:
            wish = json.loads(line)
            stop_at = wish.pop("stop_at")
            shop.place(Order(**wish))
            tell(order=wish["number"], step="over")


def tell(**event: str) -> None:
    """Say one thing on stdout."""
    sys.stdout.write(f"{json.dumps(event)}\n")
    sys.stdout.flush()


def wait() -> None:
    """Wait for the demo to say that it goes on, which it may never do."""
    if not sys.stdin.readline():
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
