"""The gate through which everything goes that an owner writes: closed while it is suspended.

Reading goes on, as it harms nobody. A turn that is written already is committed by itself; if
another owner has claimed the partition meanwhile it is fenced instead.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from txbroker.core.records import Cause, Claim, Record
from txbroker.door import Appended, Claimed, Log, PartitionDoor, Turn, TurnHandle


class GatedLog:
    """A `txbroker.door.Log` whose appends wait while the gate is closed."""

    def __init__(self, inner: Log, gate: asyncio.Event) -> None:
        self.batch_bytes_max = inner.batch_bytes_max
        self._inner = inner
        self._gate = gate

    async def append(self, records: Sequence[Record]) -> Appended:
        """Append once the gate is open."""
        await self._gate.wait()
        return await self._inner.append(records)

    async def bounds(self, *, sure: bool = True) -> tuple[int, int]:
        """Return the first offset that is kept and the offset that the next record will get."""
        return await self._inner.bounds(sure=sure)

    def read(
        self, start: int, end: int, skipped: Callable[[range], None] | None = None
    ) -> AsyncIterator[Sequence[Record]]:
        """Yield the records from `start` up to, not including, `end`."""
        return self._inner.read(start, end, skipped)

    async def pick(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Return the records at these offsets."""
        return await self._inner.pick(offsets)


class GatedDoor:
    """A `txbroker.door.PartitionDoor` through which nothing is written while the gate is closed.

    Args:
        inner: the door itself.
        gate: open while it is set.
    """

    half: Log
    op: Log

    def __init__(self, inner: PartitionDoor, gate: asyncio.Event) -> None:
        self.partition = inner.partition
        self.half = GatedLog(inner.half, gate)
        self.op = GatedLog(inner.op, gate)
        self._inner = inner
        self._gate = gate

    async def claimed_before(self) -> bool:
        """As `PartitionDoor.claimed_before`: writes nothing."""
        return await self._inner.claimed_before()

    async def checkpoint_end(self) -> int:
        """As `PartitionDoor.checkpoint_end`: writes nothing."""
        return await self._inner.checkpoint_end()

    async def parked_before(self) -> bool:
        """As `PartitionDoor.parked_before`: writes nothing."""
        return await self._inner.parked_before()

    async def claim(self, claim: Claim) -> Claimed:
        """Claim once the gate is open: whoever is out of touch would fence the rightful owner."""
        await self._gate.wait()
        return await self._inner.claim(claim)

    async def store(self, records: Sequence[Record]) -> None:
        """Store records of a snapshot once the gate is open."""
        await self._gate.wait()
        await self._inner.store(records)

    def parked(self) -> AsyncIterator[Sequence[Record]]:
        """Yield all records of this partition of the parked topic."""
        return self._inner.parked()

    async def pick_parked(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Return the records of the parked topic at these offsets."""
        return await self._inner.pick_parked(offsets)

    def unproved(self, places: Collection[tuple[str, int]]) -> Sequence[tuple[str, int]]:
        """Return those target partitions where turns of earlier claims may be open."""
        return self._inner.unproved(places)

    async def prove(self, places: Collection[tuple[str, int]]) -> Sequence[Cause]:
        """Return why some target partitions must not be written now."""
        return await self._inner.prove(places)

    async def write(self, turn: Turn) -> TurnHandle:
        """Write one turn once the gate is open."""
        await self._gate.wait()
        return await self._inner.write(turn)

    async def close(self) -> None:
        """Let go of connections."""
        await self._inner.close()
