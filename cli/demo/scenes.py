"""The sequence of the demo."""

import asyncio

from txbroker.cli.demo.shop import Order
from txbroker.cli.demo.stage import DemoEnvironment

EXPECTED = {
    "A-1": "commits",
    "A-2": "rolled back by the shop",
    "B-1": "killed after the local commit",
    "B-2": "killed before the local commit",
    "C-1": "slower than the check",
}
"""Every order, with its description in the table."""

_SLOW_S = 2.5
"""Longer than the time until the first check."""


async def play(stage: DemoEnvironment) -> None:
    """Place orders and kill workers.

    Raises:
        Failed: a worker does not reach a step.
    """
    timeline = stage.timeline
    timeline.title("1. An order that commits, and one that the shop refuses")
    first, second = await asyncio.gather(stage.worker("shop-1"), stage.worker("shop-2"))
    await first.place(Order("A-1", "lamp", 40))
    await first.until("over", "A-1")
    await first.place(Order("A-2", "piano", 9000))
    await first.until("over", "A-2")
    await stage.show_new_steps()

    timeline.title("2. A process killed between its local commit and its decision")
    await first.place(Order("B-1", "chair", 120), stop_at="after the local commit")
    await first.until("after the local commit", "B-1")
    await first.kill()
    timeline.show("shop-1", "killed", "kill -9: the order exists, and has no commit")

    timeline.title("3. A process killed before its local commit")
    await second.place(Order("B-2", "table", 300), stop_at="before the local commit")
    await second.until("before the local commit", "B-2")
    await second.kill()
    timeline.show("shop-2", "killed", "kill -9: the order does not exist, and has no rollback")

    timeline.title("4. The proxy checks with a new instance, which reads the database")
    third = await stage.worker("shop-3")
    await third.place(Order("C-1", "clock", 75), stop_at="prepared")
    await third.until("prepared", "C-1")
    timeline.show("C-1", "slow", f"its local transaction starts {_SLOW_S:g} s later")
    await asyncio.sleep(_SLOW_S)
    await third.go_on()
    await third.until("over", "C-1")
    await stage.settled()
    await third.finish()
