"""When `read_committed` readers see what was written: the last stable offset has passed it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from msgspec import Struct

from txbroker.door.protocols import NotVisible
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.offsets import READ_COMMITTED, READ_UNCOMMITTED, ends
from txbroker.kafka.protocol.transactions import Partition
from txbroker.net.backoff import Backoff

_LANE = "visible"
_POLL_S = 0.001
_POLL_MAX_S = 0.1
COMPANY_S = 0.005
"""So long behind a question that somebody was waiting for the next one waits for company, seconds:
turns of several half partitions are seen by one question then. The first leaves at once, and so
does one for which the next turn waits."""


class _Wait(Struct, eq=False):
    """Somebody who waits until partitions are stable up to an end."""

    ends: dict[Partition, int]
    """Of the partitions that are not stable so far yet."""
    over: asyncio.Future[None]
    """Done when there are none left, or the time is up."""

    def end(self) -> None:
        """Wait no longer."""
        if not self.over.done():
            self.over.set_result(None)


class _Leader:
    """Who waits for partitions of one broker."""

    def __init__(self) -> None:
        self.waiting: dict[Partition, list[_Wait]] = {}
        self.more = asyncio.Event()
        """Somebody came."""
        self.hurry = asyncio.Event()
        """Somebody came who waits for no company."""
        self.task: asyncio.Task[None] | None = None
        self.moved_s = float("-inf")
        """When it was asked last so that somebody had waited long enough, by the loop's clock."""

    def add(self, partition: Partition, *waiting: _Wait) -> None:
        """Let somebody wait."""
        self.waiting.setdefault(partition, []).extend(waiting)
        self.more.set()

    def drop(self, partition: Partition, wait: _Wait) -> None:
        """Let one wait no more, if it does, and ask no more for what nobody waits for."""
        left = [each for each in self.waiting.pop(partition, ()) if each is not wait]
        if left:
            self.waiting[partition] = left
        if not self.waiting and self.task is not None:
            self.task.cancel()
            self.task = None

    def release(self, stable: Mapping[Partition, int]) -> bool:
        """Let go whoever has waited long enough; say whether there was anybody."""
        moved = False
        for partition, end in stable.items():
            waiting = self.waiting.pop(partition, ())
            left = [each for each in waiting if each.ends[partition] > end]
            if left:
                self.waiting[partition] = left
            for each in waiting:
                if each.ends[partition] <= end:
                    moved = True
                    del each.ends[partition]
                    if not each.ends:
                        each.end()
        return moved


class StableEnds:
    """Waits for last stable offsets: one question at a time to each leader, however many turns
    wait, of whichever half partition. One for each client.

    While somebody's open transaction holds a partition back, turns pile up behind it; if each
    asked for itself, the brokers would be asked ever more often. A broker that does not answer
    holds up nobody who waits for others.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._leaders: dict[int, _Leader] = {}

    async def pass_by(self, last: Mapping[Partition, int], seconds: float) -> None:
        """Wait until the last stable offset of every partition is behind the offset given.

        An offset of -1 stands for the partition's end as it is now.

        Raises:
            NotVisible: the time is up.
        """
        if left := await self.left(last, seconds):
            raise _invisible(left, seconds)

    async def left(
        self, last: Mapping[Partition, int], seconds: float, *, hurry: bool = False
    ) -> list[Partition]:
        """Wait as `pass_by` does; return those for which the time was not enough. With `hurry`
        it is asked without waiting for company."""
        backoff = Backoff(seconds, _POLL_S, _POLL_MAX_S)
        wanted = await self._wanted(last, backoff)
        untold = last.keys() - wanted.keys()
        loop = asyncio.get_running_loop()
        wait = _Wait(wanted, loop.create_future())
        for partition in wanted:
            self._add(partition, wait, hurry=hurry)
        if wanted:
            timer = loop.call_later(max(backoff.left_s, 0.0), wait.end)
            try:
                await wait.over
            finally:
                timer.cancel()
                self._give_up(wait)
        return [each for each in last if each in untold or each in wait.ends]

    def _give_up(self, wait: _Wait) -> None:
        for partition in wait.ends:
            for leader in self._leaders.values():
                if partition in leader.waiting:
                    leader.drop(partition, wait)

    async def _wanted(
        self, last: Mapping[Partition, int], backoff: Backoff
    ) -> dict[Partition, int]:
        """Return where each partition must be stable up to; without those that do not tell."""
        wanted = {partition: offset + 1 for partition, offset in last.items() if offset >= 0}
        unknown = last.keys() - wanted.keys()
        while unknown:
            found = await ends(self._client, unknown, READ_UNCOMMITTED, _LANE)
            wanted.update(found)
            unknown -= found.keys()
            if unknown and not await backoff.pause():
                break
        return wanted

    def _add(self, partition: Partition, *waiting: _Wait, hurry: bool = False) -> None:
        """Let somebody wait for the leader of a partition; -1 stands for that of whom no leader is
        known."""
        leader = self._leaders.setdefault(self._client.known_leader(*partition), _Leader())
        leader.add(partition, *waiting)
        if hurry:
            leader.hurry.set()
        if leader.task is None or leader.task.done():
            leader.task = asyncio.create_task(self._poll(leader), name="txbroker visible")

    async def _poll(self, leader: _Leader) -> None:
        """Ask for as long as anybody waits; less often while nothing moves."""
        loop = asyncio.get_running_loop()
        pause_s = _POLL_S
        while leader.waiting:
            if (early_s := leader.moved_s + COMPANY_S - loop.time()) > 0:
                await _set_within(leader.hurry, early_s)
            leader.hurry.clear()
            leader.more.clear()
            asked_s = loop.time()
            moved = leader.release(await ends(self._client, leader.waiting, READ_COMMITTED, _LANE))
            leader.moved_s = asked_s if moved else float("-inf")
            self._move(leader)
            if not leader.waiting:
                return
            pause_s = _POLL_S if moved else min(pause_s * 2, _POLL_MAX_S)
            if await _set_within(leader.more, pause_s):
                pause_s = _POLL_S

    def _move(self, leader: _Leader) -> None:
        """Give partitions that have another leader now to that one."""
        for partition in list(leader.waiting):
            if self._leaders.get(self._client.known_leader(*partition)) is not leader:
                self._add(partition, *leader.waiting.pop(partition))


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Say whether an event is set, or comes to be within so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _invisible(partitions: list[Partition], seconds: float) -> NotVisible:
    names = ", ".join(sorted(f"{topic}-{number}" for topic, number in partitions))
    return NotVisible(
        f"written and committed {seconds:g} s ago, but not visible in {names}: "
        "see whether a transaction hangs there",
        partitions,
    )
