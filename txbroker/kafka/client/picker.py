"""Single records of a partition by offset: near ones share a fetch, several fetches at once.

Kafka answers a fetch with whole batches from the one that holds the offset on, and with at least
one however small the limit is; so an offset far from all others costs one batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from txbroker.core.records import Record
from txbroker.door.protocols import LogTruncated
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.protocol.fetched import Fetched
from txbroker.net.backoff import Backoff

_AT_ONCE = 8
_NEAR_BYTES = 64 << 10
"""As much unwanted as is worth one request less."""
_FETCH_BYTES = 1 << 20
_SMALL_BYTES = 1
_RECORD_BYTES = 1024
_RUN_RECORDS = 512
_RUN_SPAN_BYTES = 4 << 20


class Picker:
    """Picks records of one partition.

    Args:
        make_reader: makes a reader with a lane of the given name.
    """

    def __init__(self, make_reader: Callable[[str], Reader]) -> None:
        self._readers = [make_reader(f"pick{number}") for number in range(_AT_ONCE)]
        self._record_bytes = _RECORD_BYTES

    async def pick(self, offsets: Sequence[int]) -> list[Record]:
        """Return the records at `offsets`, which grow; one that holds none is left out.

        Raises:
            KafkaUnavailable: Kafka does not answer, or an open transaction hides a record.
            InvariantBroken: a batch is damaged.
        """
        runs = self._runs(offsets)
        found: list[list[Record]] = [[] for _ in runs]
        left = iter(range(len(runs)))

        async def work(reader: Reader) -> None:
            for number in left:
                found[number] = await self._run(reader, runs[number])

        tasks = [asyncio.create_task(work(reader)) for reader in self._readers[: len(runs)]]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [record for records in found for record in records]

    def _runs(self, offsets: Sequence[int]) -> list[list[int]]:
        """Cut offsets into runs of near ones, short enough to be shared out."""
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
        found: list[Record] = []
        wanted = offsets
        backoff: Backoff | None = None
        while wanted:
            try:
                fetched = await reader.fetch(wanted[0], self._size(wanted), wait_ms=0)
            except LogTruncated:
                start = await reader.start()
                if wanted[0] < start:
                    wanted = [offset for offset in wanted if offset >= start]
                    continue
                fetched = None
            if fetched is None or fetched.next_offset == wanted[0]:
                # A new leader learns only a little later how far the log reaches.
                backoff = backoff or reader.backoff()
                if await backoff.pause():
                    continue
                if fetched is not None and fetched.high_watermark > wanted[0]:
                    raise KafkaUnavailable(
                        f"{reader.name}: an open transaction hides the record at {wanted[0]}"
                    )
                if await reader.led_elsewhere():
                    backoff = None
                    continue
                return found
            backoff = None
            found += self._among(fetched, wanted)
            wanted = [offset for offset in wanted if offset >= fetched.next_offset]
        return found

    def _size(self, wanted: list[int]) -> int:
        if len(wanted) == 1:
            return _SMALL_BYTES
        # A batch that is cut off at the end comes again, so ask for a little more.
        span = (wanted[-1] - wanted[0] + 1) * self._record_bytes
        return min(span + span // 4 + self._record_bytes, _FETCH_BYTES)

    def _among(self, fetched: Fetched, wanted: list[int]) -> list[Record]:
        covered = fetched.next_offset - wanted[0]
        if covered > 1:
            self._record_bytes = max(64, (self._record_bytes + fetched.size_bytes // covered) // 2)
        return fetched.among(wanted)
