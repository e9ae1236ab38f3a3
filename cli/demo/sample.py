"""`txbroker dev --sample`: a small shop, which takes an order a second until it is stopped."""

import asyncio
import itertools
from pathlib import Path
from typing import NoReturn

from txbroker.cli.demo.shop import CREDIT, ShopOrder, create_tables, orders_in
from txbroker.cli.demo.stage import start_worker
from txbroker.cli.run import CommandFailed

PAUSE_S = 1.0
FIRST = 4701
_ITEMS = ("lamp", "chair", "table", "clock", "piano")
_REFUSED, _KILLED = (7, 5), (15, 8)
"""Of each 7 orders the shop refuses one, and of each 15 one meets a kill: divisor and remainder."""
_AFTER_COMMIT = "after the local commit"


async def run_shop(url: str, folder: Path) -> NoReturn:
    """Place orders at two processes until this is cancelled.

    Most commit, some are rolled back; where a process is killed after its local commit, the other
    one answers the check.

    Args:
        url: the proxy.
        folder: holds the shop's database, which continues that of the last start.
    """
    database = folder / "sample-shop.db"
    create_tables(database)
    last = max((int(order.number) for order in orders_in(database)), default=FIRST - 1)
    names = ("shop-1", "shop-2")
    workers = {name: await start_worker(name, url, database) for name in names}
    try:
        for number in itertools.count(last + 1):
            name = names[number % 2]
            amount = 2 * CREDIT if _hits(number, _REFUSED) else 20 + number % 80
            order = ShopOrder(str(number), _ITEMS[number % len(_ITEMS)], amount)
            killed = _hits(number, _KILLED) and amount <= CREDIT
            try:
                await workers[name].place(order, stop_at=_AFTER_COMMIT if killed else "")
                await workers[name].until(_AFTER_COMMIT if killed else "over", order.number)
            except CommandFailed:
                killed = True  # the proxy or Kafka did not answer, which ended the process
            if killed:
                await workers[name].kill_if_alive()
                workers[name] = await start_worker(name, url, database)
            await asyncio.sleep(PAUSE_S)
    finally:
        await asyncio.gather(*(worker.kill_if_alive() for worker in workers.values()))
    raise AssertionError


def _hits(number: int, rule: tuple[int, int]) -> bool:
    divisor, remainder = rule
    return number % divisor == remainder
