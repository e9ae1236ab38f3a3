"""HTTP clients with little overhead, each with one connection."""

import asyncio
from contextlib import closing

from txbroker.cli.bench.http import HttpConnection


async def transactions_over_http(url: str, count: int, in_flight: int, size: int) -> None:
    """Prepare and commit `count` transactions.

    Raises:
        TxbrokerError: a call failed.
    """
    numbers, value = iter(range(count)), "x" * size

    async def client() -> None:
        with closing(HttpConnection(url)) as connection:
            for number in numbers:
                message = {"topic": "payments", "key": f"key-{number:020}", "value": value}
                body = {"group": "bench", "messages": [message]}
                prepared = await connection.post("/v1/transactions", body)
                path = f"/v1/transactions/{prepared['id']}/commit"
                await connection.post(path, {"group": "bench"})

    await asyncio.gather(*(client() for _ in range(in_flight)))
