"""A service that never decides: `producer_main.py URL TOPIC DATABASE before|after`.

It prints the id of its transaction before or after its local commit, then waits to be killed.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.kit.workload import Shop
from txbroker.sdk import Message, TransactionalProducer


async def main(url: str, topic: str, database: str, killed: str) -> None:
    shop = Shop(Path(database))
    async with (
        TransactionalProducer(url, group="orders", check=shop.barrier.check) as producer,
        producer.transaction(Message(topic, value=b"an order")) as transaction,
    ):
        if killed == "after":
            shop.place_order(transaction.id, "killed")
        print(transaction.id, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
