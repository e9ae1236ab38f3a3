"""Wait until writes are visible: the last stable offset has passed them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from msgspec import Struct

from txbroker.core.records import Partition
from txbroker.door.protocols import NotVisible
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.reader import READ_COMMITTED, READ_UNCOMMITTED, end_offsets
from txbroker.net.timers import Backoff, grown_pause_s

_CHANNEL = "visible"
_POLL_S = 0.001
_POLL_MAX_S = 0.1
BATCH_WAIT_S = 0.005
"""Pause after a request that released a waiter: one request then serves transactions of several
half partitions. The first request is sent at once, and so is one that the next transaction waits
for."""


class _Wait(Struct, eq=False):
    """A wait until partitions are stable up to given ends."""

    ends: dict[Partition, int]
    """The partitions that are not stable up to their end yet."""
    done: asyncio.Future[None]
    """Done when no partition is left, or on timeout."""

    def finish(self) -> None:
        """End the wait."""
        if not self.done.done():
            self.done.set_result(None)


class _Leader:
    """The waits for partitions of one leader, and the task that polls it."""

    def __init__(self) -> None:
        self.waiting: dict[Partition, list[_Wait]] = {}
        self.more = asyncio.Event()
        """Set by a new wait."""
        self.hurry = asyncio.Event()
        """Set by a new wait that must not be delayed."""
        self.task: asyncio.Task[None] | None = None
        self.moved_s = float("-inf")
        """Time of the last request that released a wait, by the loop's clock."""

    def add(self, partition: Partition, *waiting: _Wait) -> None:
        """Add waits for a partition."""
        self.waiting.setdefault(partition, []).extend(waiting)
        self.more.set()

    def drop(self, partition: Partition, wait: _Wait) -> None:
        """Remove a wait; stop polling if none is left."""
        left = [other for other in self.waiting.pop(partition, ()) if other is not wait]
        if left:
            self.waiting[partition] = left
        if not self.waiting and self.task is not None:
            self.task.cancel()
            self.task = None

    def release(self, stable: Mapping[Partition, int]) -> bool:
        """Finish the waits whose ends have passed; return whether there were any."""
        moved = False
        for partition, end in stable.items():
            waiting = self.waiting.pop(partition, ())
            left = [wait for wait in waiting if wait.ends[partition] > end]
            if left:
                self.waiting[partition] = left
            for wait in waiting:
                if wait.ends[partition] <= end:
                    moved = True
                    del wait.ends[partition]
                    if not wait.ends:
                        wait.finish()
        return moved


class StableEnds:
    """Polls last stable offsets, with one request at a time to each leader. One per client.

    While another client's open transaction blocks a partition, transactions queue up after it; if
    each polled, the load on the broker would grow with the queue. An unresponsive broker delays no
    waits for others.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._leaders: dict[int, _Leader] = {}

    async def pass_by(self, last: Mapping[Partition, int], seconds: float) -> None:
        """Wait until the last stable offset of every partition has passed the given offset.

        An offset of -1 is the partition's current end.

        Raises:
            NotVisible: after `seconds`.
        """
        if left := await self.left(last, seconds):
            raise _invisible(left, seconds)

    async def left(
        self, last: Mapping[Partition, int], seconds: float, *, hurry: bool = False
    ) -> list[Partition]:
        """Wait like `pass_by`; return the partitions that are left after `seconds`.

        With `hurry` the next request is not delayed.
        """
        backoff = Backoff(seconds, _POLL_S, _POLL_MAX_S)
        ends = await self._resolve(last, backoff)
        unresolved = last.keys() - ends.keys()
        loop = asyncio.get_running_loop()
        wait = _Wait(ends, loop.create_future())
        for partition in list(ends):
            self._add(partition, wait, hurry=hurry)
        if ends:
            timer = loop.call_later(max(backoff.left_s, 0.0), wait.finish)
            try:
                await wait.done
            finally:
                timer.cancel()
                self._give_up(wait)
        return [p for p in last if p in unresolved or p in wait.ends]

    def _give_up(self, wait: _Wait) -> None:
        for partition in wait.ends:
            for leader in self._leaders.values():
                if partition in leader.waiting:
                    leader.drop(partition, wait)

    async def _resolve(
        self, last: Mapping[Partition, int], backoff: Backoff
    ) -> dict[Partition, int]:
        """Return the end up to which each partition must be stable, as far as known in time."""
        ends = {partition: offset + 1 for partition, offset in last.items() if offset >= 0}
        unknown = last.keys() - ends.keys()
        while unknown:
            answer = await end_offsets(self._client, unknown, READ_UNCOMMITTED, _CHANNEL)
            ends.update(answer)
            unknown -= answer.keys()
            if unknown and not await backoff.pause():
                break
        return ends

    def _add(self, partition: Partition, *waiting: _Wait, hurry: bool = False) -> None:
        """Add waits to the leader of a partition, -1 if it is unknown."""
        leader = self._leaders.setdefault(self._client.known_leader(*partition), _Leader())
        leader.add(partition, *waiting)
        if hurry:
            leader.hurry.set()
        if leader.task is None or leader.task.done():
            leader.task = asyncio.create_task(self._poll(leader), name="txbroker visible")

    async def _poll(self, leader: _Leader) -> None:
        """Poll while waits are left, with growing pauses while none is released."""
        loop = asyncio.get_running_loop()
        failures = 0
        while leader.waiting:
            if (early_s := leader.moved_s + BATCH_WAIT_S - loop.time()) > 0:
                await _set_within(leader.hurry, early_s)
            leader.hurry.clear()
            leader.more.clear()
            asked_s = loop.time()
            stable = await end_offsets(self._client, leader.waiting, READ_COMMITTED, _CHANNEL)
            moved = leader.release(stable)
            leader.moved_s = asked_s if moved else float("-inf")
            self._move(leader)
            if not leader.waiting:
                return
            failures = 0 if moved else failures + 1
            pause_s = grown_pause_s(failures + 1, _POLL_S, _POLL_MAX_S)
            if await _set_within(leader.more, pause_s):
                failures = 0

    def _move(self, leader: _Leader) -> None:
        """Move waits for partitions that have another leader now."""
        for partition in list(leader.waiting):
            if self._leaders.get(self._client.known_leader(*partition)) is not leader:
                self._add(partition, *leader.waiting.pop(partition))


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    """Return whether an event is set within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _invisible(partitions: list[Partition], seconds: float) -> NotVisible:
    names = ", ".join(sorted(f"{topic}-{number}" for topic, number in partitions))
    return NotVisible(
        f"committed {seconds:g} s ago, but not visible in {names}: look for a hanging transaction "
        "with `kafka-transactions.sh find-hanging`",
        partitions,
    )
