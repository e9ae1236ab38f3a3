"""The commit of a promotion transaction: a separate task, shared by all implementations.

It continues whether or not a caller waits for it.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

from txbroker.door.protocols import Fenced, PromotionTxnLost, PromotionTxnRefused


def begin(commit: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a commit; wait for it with `outcome`."""
    task = asyncio.create_task(commit)
    # A caller that does not wait gets the failure at its next write.
    task.add_done_callback(_retrieve)
    return task


async def outcome(commit: asyncio.Task[None]) -> None:
    """Wait for a commit. Several callers may wait; cancelling one does not stop the commit.

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
    """Return an equal exception; raising one object twice would accumulate tracebacks."""
    if isinstance(error, PromotionTxnRefused):
        return PromotionTxnRefused(error.cause)
    return type(error)(str(error))


def _retrieve(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
