"""Long work in small pieces, so that heartbeats and other partitions' turns go on meanwhile."""

import asyncio
import time

PIECE_S = 0.004
"""How long one piece of work may hold everybody else up, seconds."""
LOOK_EVERY = 32
"""Steps between two looks at the clock; each takes microseconds."""


class Pace:
    """Gives way to everybody else after each few milliseconds of work."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._steps = 0

    async def step(self) -> None:
        """A small step was done."""
        self._steps += 1
        if self._steps >= LOOK_EVERY:
            await self.piece()

    async def piece(self) -> None:
        """Something was done that may have taken longer."""
        self._steps = 0
        if time.monotonic() - self._since_s >= PIECE_S:
            await asyncio.sleep(0)
            self._since_s = time.monotonic()
