"""The commit of a written turn: a task of its own, the same behind every door.

It goes on by itself, whether anybody waits for it or not.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from txbroker.door.protocols import Fenced, PromotionTxnLost, PromotionTxnRefused


def begin(commit: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Begin a commit; `outcome` tells how it ended."""
    task = asyncio.create_task(commit)
    # Whoever does not wait for it meets a failed commit at the next write.
    task.add_done_callback(_retrieve)
    return task


async def outcome(commit: asyncio.Task[None]) -> None:
    """Wait for a commit. Several may wait, and one that gives up does not stop the commit.

    Raises:
        Fenced, PromotionTxnLost
    """
    try:
        await asyncio.shield(commit)
    except asyncio.CancelledError:
        if commit.cancelled():
            raise PromotionTxnLost("the partition's door was closed") from None
        raise


def again(
    error: Fenced | PromotionTxnLost | PromotionTxnRefused,
) -> Fenced | PromotionTxnLost | PromotionTxnRefused:
    """Return an equal exception: one that is raised twice would collect tracebacks."""
    if isinstance(error, PromotionTxnRefused):
        return PromotionTxnRefused(error.cause)
    return type(error)(str(error))


def _retrieve(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
