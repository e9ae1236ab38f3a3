"""Waiting for a condition, and names that no other test uses."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
from collections.abc import Callable
from typing import Any

DEADLINE_S = 40.0
"""How long a condition may take to become true, on a busy machine."""
_POLL_S = 0.02
_NUMBERS = itertools.count()


async def until(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Poll a function, plain or async, until its answer is true; return the answer."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + deadline_s
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        assert loop.time() < deadline, f"not true within {deadline_s:g} s: {condition}"
        await asyncio.sleep(_POLL_S)


def unique(word: str) -> str:
    """Return a name that no other test uses, also not one in another process."""
    return f"{word}-{os.getpid()}-{next(_NUMBERS)}"
