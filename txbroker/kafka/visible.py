"""When `read_committed` readers see what was written: the last stable offset has passed it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from txbroker.door import NotVisible
from txbroker.kafka.client import Client, Patience
from txbroker.kafka.offsets import READ_COMMITTED, READ_UNCOMMITTED, ends
from txbroker.kafka.transactions import Partition

_LANE = "visible"
_POLL_S = 0.001
_POLL_MAX_S = 0.1


class StableEnds:
    """Waits for last stable offsets: one question at a time, however many turns wait.

    While somebody's open transaction holds a partition back, turns pile up behind it; if each
    asked for itself, the brokers would be asked ever more often.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: dict[Partition, list[tuple[int, asyncio.Future[None]]]] = {}
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def pass_by(self, last: Mapping[Partition, int], seconds: float) -> None:
        """Wait until the last stable offset of every partition is behind the offset given.

        An offset of -1 stands for the partition's end as it is now.

        Raises:
            NotVisible: the time is up.
        """
        if left := await self.left(last, seconds):
            raise _invisible(left, seconds)

    async def left(self, last: Mapping[Partition, int], seconds: float) -> list[Partition]:
        """Wait as `pass_by` does; return those for which the time was not enough."""
        patience = Patience(seconds, _POLL_S, _POLL_MAX_S)
        wanted = await self._wanted(last, patience)
        futures = {partition: self._wait(partition, end) for partition, end in wanted.items()}
        try:
            async with asyncio.timeout(max(patience.left_s, 0.0)):
                await asyncio.gather(*futures.values())
        except TimeoutError:
            pass
        finally:
            self._give_up(futures)
        return [each for each in last if each not in wanted or futures[each].cancelled()]

    def _give_up(self, futures: Mapping[Partition, asyncio.Future[None]]) -> None:
        """Ask no more for what nobody waits for."""
        for partition, future in futures.items():
            future.cancel()
            left = [each for each in self._waiting.get(partition, ()) if each[1] is not future]
            if left:
                self._waiting[partition] = left
            else:
                self._waiting.pop(partition, None)
        if not self._waiting and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _wanted(
        self, last: Mapping[Partition, int], patience: Patience
    ) -> dict[Partition, int]:
        """Return where each partition must be stable up to; without those that do not tell."""
        wanted = {partition: offset + 1 for partition, offset in last.items() if offset >= 0}
        unknown = last.keys() - wanted.keys()
        while unknown:
            found = await ends(self._client, unknown, READ_UNCOMMITTED, _LANE)
            wanted.update(found)
            unknown -= found.keys()
            if unknown and not await patience.pause():
                break
        return wanted

    def _wait(self, partition: Partition, end: int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(partition, []).append((end, future))
        self._more.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll(), name="txbroker visible")
        return future

    async def _poll(self) -> None:
        """Ask for as long as anybody waits; less often while nothing moves."""
        pause_s = _POLL_S
        while self._waiting:
            self._more.clear()
            moved = self._release(await ends(self._client, self._waiting, READ_COMMITTED, _LANE))
            if not self._waiting:
                return
            pause_s = _POLL_S if moved else min(pause_s * 2, _POLL_MAX_S)
            try:
                async with asyncio.timeout(pause_s):
                    await self._more.wait()
                pause_s = _POLL_S
            except TimeoutError:
                continue

    def _release(self, stable: Mapping[Partition, int]) -> bool:
        """Let go whoever has waited long enough; say whether there was anybody."""
        moved = False
        for partition, waiting in list(self._waiting.items()):
            left = []
            for end, future in waiting:
                if future.done():
                    continue
                if stable.get(partition, -1) >= end:
                    future.set_result(None)
                    moved = True
                else:
                    left.append((end, future))
            if left:
                self._waiting[partition] = left
            else:
                del self._waiting[partition]
        return moved


def _invisible(partitions: list[Partition], seconds: float) -> NotVisible:
    names = ", ".join(sorted(f"{topic}-{number}" for topic, number in partitions))
    return NotVisible(
        f"written and committed {seconds:g} s ago, but not visible in {names}: "
        "see whether a transaction hangs there",
        partitions,
    )
