"""Records the events of a member of the proxies' group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from txbroker.door.protocols import Assignment

WAIT_S = 20.0


class Heard:
    """Takes what `Membership.join` posts, in order."""

    def __init__(self) -> None:
        self.events: list[Assignment | str] = []
        self._more = asyncio.Event()

    def assigned(self, assignment: Assignment) -> None:
        self._take(assignment)

    def lost(self, why: str) -> None:
        self._take(why)

    def _take(self, event: Assignment | str) -> None:
        self.events.append(event)
        self._more.set()

    @property
    def now(self) -> Assignment:
        """The last assignment, unless it was lost since."""
        last = self.events[-1]
        assert isinstance(last, Assignment), f"lost: {last}"
        return last

    @property
    def losses(self) -> list[str]:
        """Why touch was lost, each time."""
        return [event for event in self.events if isinstance(event, str)]

    async def until(self, wanted: Callable[[Assignment], bool]) -> Assignment:
        await self._wait(lambda last: isinstance(last, Assignment) and wanted(last))
        return self.now

    async def until_owned(self, count: int) -> Assignment:
        return await self.until(lambda last: len(last.mine) == count)

    async def until_lost(self, words: str = "") -> str:
        """Wait until the assignment is lost, and return the reason, which contains `words`."""
        await self._wait(lambda last: isinstance(last, str) and words in last)
        return self.losses[-1]

    async def _wait(self, wanted: Callable[[Assignment | str], bool]) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                while not self.events or not wanted(self.events[-1]):
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            raise AssertionError(f"events: {self.events}") from None
