"""Waiting for a condition; names and ports that no other test uses."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import random
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

DEADLINE_S = 40.0
"""How long a condition may take to become true, on a busy machine."""
_POLL_S = 0.02
_NUMBERS = itertools.count()
_PORTS = (20_000, 32_000)
"""Below the ephemeral ports."""
_given: set[int] = set()


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


def free_ports(count: int) -> list[int]:
    """Return free ports that the system gives to no outgoing connection.

    Such a connection could take the port while its process restarts, or be connected with itself.
    """
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < count:
            probe = stack.enter_context(socket.socket())
            port = random.randrange(*_PORTS)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                # An earlier caller may not listen on it yet.
                if port not in _given:
                    ports.append(port)
                    _given.add(port)
    return ports
