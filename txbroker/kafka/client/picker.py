"""Read single records of a partition by offset: near ones in one fetch, several fetches at once.

Kafka returns whole batches, beginning with the one that holds the offset, and at least one whatever
the limit. So an offset far from the others costs one batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from txbroker.core.records import Record
from txbroker.door.protocols import LogTruncated
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.protocol.fetched import Fetched
from txbroker.net.timers import Backoff

_AT_ONCE = 8
_NEAR_BYTES = 64 << 10
"""Bytes between two offsets up to which one fetch is cheaper than two."""
_FETCH_BYTES = 1 << 20
_SMALL_BYTES = 1
_RECORD_BYTES = 1024
_RUN_RECORDS = 512
_RUN_SPAN_BYTES = 4 << 20


class Picker:
    """Reads records of one partition by offset.

    Args:
        make_reader: returns a reader with a channel of the given name.
    """

    def __init__(self, make_reader: Callable[[str], Reader]) -> None:
        self._readers = [make_reader(f"pick{number}") for number in range(_AT_ONCE)]
        self._record_bytes = _RECORD_BYTES

    async def pick(self, offsets: Sequence[int]) -> list[Record]:
        """Return the records at ascending `offsets`; one that holds no record is left out.

        Raises:
            KafkaUnavailable: Kafka does not answer, or an open transaction hides a record.
            InvariantBroken: a batch is corrupt.
        """
        runs = self._runs(offsets)
        records: list[list[Record]] = [[] for _ in runs]
        numbers = iter(range(len(runs)))

        async def work(reader: Reader) -> None:
            for number in numbers:
                records[number] = await self._run(reader, runs[number])

        tasks = [asyncio.create_task(work(reader)) for reader in self._readers[: len(runs)]]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [record for run in records for record in run]

    def _runs(self, offsets: Sequence[int]) -> list[list[int]]:
        """Split offsets into runs of near ones, short enough to be read in parallel."""
        near = max(1, _NEAR_BYTES // self._record_bytes)
        span = max(1, _RUN_SPAN_BYTES // self._record_bytes)
        runs: list[list[int]] = []
        for offset in offsets:
            run = runs[-1] if runs else None
            if (
                run is None
                or offset - run[-1] > near
                or offset - run[0] > span
                or len(run) >= _RUN_RECORDS
            ):
                runs.append([offset])
            else:
                run.append(offset)
        return runs

    async def _run(self, reader: Reader, offsets: list[int]) -> list[Record]:
        records: list[Record] = []
        left = offsets
        backoff: Backoff | None = None
        while left:
            try:
                fetched = await reader.fetch(left[0], self._size(left), wait_ms=0)
            except LogTruncated:
                start = await reader.start()
                if left[0] < start:
                    left = [offset for offset in left if offset >= start]
                    continue
                fetched = None
            if fetched is None or fetched.next_offset == left[0]:
                # A new leader learns the high watermark from its followers' next fetch.
                backoff = backoff or reader.backoff()
                if await backoff.pause():
                    continue
                if fetched is not None and fetched.high_watermark > left[0]:
                    raise KafkaUnavailable(
                        f"{reader.name}: an open transaction hides the record at offset {left[0]}"
                    )
                if await reader.led_elsewhere():
                    backoff = None
                    continue
                return records
            backoff = None
            records += self._among(fetched, left)
            left = [offset for offset in left if offset >= fetched.next_offset]
        return records

    def _size(self, offsets: list[int]) -> int:
        if len(offsets) == 1:
            return _SMALL_BYTES
        # Ask for more: a batch truncated at the end would have to be fetched again.
        span = (offsets[-1] - offsets[0] + 1) * self._record_bytes
        return min(span + span // 4 + self._record_bytes, _FETCH_BYTES)

    def _among(self, fetched: Fetched, offsets: list[int]) -> list[Record]:
        covered = fetched.next_offset - offsets[0]
        if covered > 1:
            self._record_bytes = max(64, (self._record_bytes + fetched.size_bytes // covered) // 2)
        return fetched.among(offsets)
