"""Reading a partition from one offset to another, `read_committed`, without a consumer.

A read knows where it ends, so it needs no subscription, no position store and no background task.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.record.control_record import ABORT_MARKER, ControlRecord
from aiokafka.record.memory_records import MemoryRecords

from txbroker.core.records import Record
from txbroker.door import LogTruncated
from txbroker.errors import InvariantBroken, KafkaUnavailable
from txbroker.kafka.client import Client, KafkaRefused, NotSent, Patience, Unanswered, may_pass
from txbroker.kafka.codes import LEADER_MOVED, Code

_EARLIEST, _LATEST = -2, -1
_READ_UNCOMMITTED, _READ_COMMITTED = 0, 1
_CONSUMER = -1
_FETCH_BYTES = 4 << 20
_FETCH_WAIT_MS = 500
_LOG_APPEND_TIME = 1


class Reader:
    """Reads one partition over a lane of its own."""

    def __init__(
        self, client: Client, topic: str, partition: int, lane: str, *, append_time: bool = True
    ) -> None:
        self._client = client
        self._topic = topic
        self._partition = partition
        self._lane = lane
        self._append_time = append_time

    @property
    def name(self) -> str:
        """The partition as people write it."""
        return f"{self._topic}-{self._partition}"

    # --- where it begins and ends ------------------------------------------------------------

    async def start(self) -> int:
        """Return the first offset that is kept."""
        return await self._offset(_EARLIEST, _READ_UNCOMMITTED)

    async def end(self) -> int:
        """Return the high watermark: the offset that the next record will get."""
        return await self._offset(_LATEST, _READ_UNCOMMITTED)

    async def stable_end(self) -> int:
        """Return the last stable offset: below it every transaction has ended."""
        return await self._offset(_LATEST, _READ_COMMITTED)

    async def _offset(self, which: int, isolation: int) -> int:
        request = OffsetRequest(_CONSUMER, isolation, [(self._topic, [(self._partition, which)])])
        answer = await self._retry(request)
        return int(answer[-1])

    async def _retry(self, request: Any) -> Any:
        """Ask the leader until it answers without error, or patience is over."""
        settings = self._client.settings
        patience = Patience(settings.write_timeout_s, settings.retry_backoff_s)
        while True:
            try:
                return await self._ask(request)
            except KafkaUnavailable as error:
                if not may_pass(error) or not await patience.pause():
                    raise

    async def _ask(self, request: Any) -> Any:
        """Return the answer for our partition: a tuple whose second field is its error code."""
        leader = await self._client.leader(self._topic, self._partition)
        try:
            answer = await self._client.ask(leader, request, self._lane)
        except (NotSent, Unanswered):
            self._client.forget_leader(self._topic, self._partition)
            raise
        code = getattr(answer, "error_code", Code.NONE)
        found: tuple[Any, ...] = ()
        for _topic, partitions in answer.topics:
            for found in partitions:
                code = found[1] or code
        if code in LEADER_MOVED:
            self._client.forget_leader(self._topic, self._partition)
        if code != Code.NONE:
            raise KafkaRefused(code)
        return found

    # --- reading -----------------------------------------------------------------------------

    async def read(self, start: int, end: int) -> AsyncIterator[Sequence[Record]]:
        """Yield the committed records from offset `start` up to, not including, `end`.

        Raises:
            LogTruncated: `start` is not kept any more, or the log ends before `end`.
            InvariantBroken: a record does not carry the broker's append time.
            KafkaUnavailable: Kafka does not answer.
        """
        position = start
        # A new leader learns the high watermark only from its followers' next fetch.
        patience = self._patience()
        while position < end:
            fetched = await self.fetch(position)
            if fetched.next_offset == position:
                if fetched.high_watermark < end and not await patience.pause():
                    raise LogTruncated(
                        f"{self.name} ends at {fetched.high_watermark}, before {end}"
                    )
                if fetched.high_watermark >= end and not await patience.pause():
                    raise KafkaUnavailable(
                        f"{self.name}: an open transaction hides the records from {position} on"
                    )
                continue
            patience = self._patience()
            position = fetched.next_offset
            records = fetched.records
            if records and records[-1].offset >= end:
                records = [record for record in records if record.offset < end]
            if records:
                yield records

    def _patience(self) -> Patience:
        settings = self._client.settings
        return Patience(settings.watermark_timeout_s, settings.retry_backoff_s)

    async def fetch(self, position: int) -> Fetched:
        """Return what comes from offset `position` on, waiting half a second for something.

        Raises:
            LogTruncated: the log does not reach to `position`, at its begin or its end.
            InvariantBroken, KafkaUnavailable: as for `read`.
        """
        partition = (self._partition, position, _FETCH_BYTES)
        request = FetchRequest(
            _FETCH_WAIT_MS, 1, _FETCH_BYTES, _READ_COMMITTED, [(self._topic, [partition])]
        )
        try:
            answer = await self._retry(request)
        except KafkaRefused as error:
            if error.code == Code.OFFSET_OUT_OF_RANGE:
                raise LogTruncated(f"{self.name} has no offset {position} (any more)") from None
            raise
        high_watermark, aborted, data = answer[2], _aborted(answer), answer[-1]
        unpacked = _Unpacked(self.name, aborted, position, append_time=self._append_time)
        records = list(unpacked.records(data)) if data else []
        return Fetched(records, unpacked.position, high_watermark)


class Fetched:
    """What a fetch brought: records, the offset to go on from, and the high watermark."""

    __slots__ = ("high_watermark", "next_offset", "records")

    def __init__(self, records: list[Record], next_offset: int, high_watermark: int) -> None:
        self.records = records
        self.next_offset = next_offset
        self.high_watermark = high_watermark


def _aborted(answer: tuple[Any, ...]) -> list[tuple[int, int]]:
    """Return (first offset, producer id) of aborted transactions from a fetch's answer."""
    for item in answer[4:-1]:
        if isinstance(item, list):
            return sorted((first, producer) for producer, first in item)
    return []


class _Unpacked:
    """Takes fetched bytes apart; leaves out control records and what was aborted."""

    def __init__(
        self, name: str, aborted: list[tuple[int, int]], position: int, *, append_time: bool
    ) -> None:
        self._name = name
        self._aborted = aborted
        self._append_time = append_time
        self._hidden: set[int] = set()
        self.position = position

    def records(self, data: bytes) -> Iterator[Record]:
        memory = MemoryRecords(data)
        start = self.position
        while memory.has_next():
            batch: Any = memory.next_batch()
            if not batch.validate_crc():
                raise InvariantBroken(f"{self._name}: a batch at {batch.base_offset} is damaged")
            self._open_aborted(batch.base_offset)
            if batch.is_control_batch:
                self._close_aborted(batch)
            elif not (batch.is_transactional and batch.producer_id in self._hidden):
                if self._append_time and batch.timestamp_type != _LOG_APPEND_TIME:
                    raise InvariantBroken(
                        f"{self._name}: the record at {batch.base_offset} does not carry the "
                        "broker's append time; set message.timestamp.type=LogAppendTime"
                    )
                for r in batch:
                    if r.offset >= start:
                        yield Record(r.key, r.value, tuple(r.headers), r.timestamp, r.offset)
            # The batch's own end: compaction takes records away, but leaves that.
            self.position = max(self.position, batch.next_offset)

    def _open_aborted(self, offset: int) -> None:
        while self._aborted and self._aborted[0][0] <= offset:
            self._hidden.add(self._aborted.pop(0)[1])

    def _close_aborted(self, batch: Any) -> None:
        marker = next(iter(batch), None)
        if marker is not None and ControlRecord.parse(marker.key) == ABORT_MARKER:
            self._hidden.discard(batch.producer_id)
