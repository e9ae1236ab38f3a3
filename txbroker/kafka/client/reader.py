"""Read a partition between two offsets, `read_committed`, or single records; ends of partitions.

A read has a fixed end, so unlike a consumer it needs no subscription, no stored position and no
background task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any

import structlog

from txbroker.core.records import Partition, Record
from txbroker.door.protocols import Hanging, LogTruncated
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client, KafkaRefused, NotSent, Unanswered, is_retriable
from txbroker.kafka.client.leaders import confirm_leader
from txbroker.kafka.protocol.batch import Decode, decode_batch
from txbroker.kafka.protocol.codes import LEADER_MOVED, Code, describe
from txbroker.kafka.protocol.fetched import Fetched
from txbroker.kafka.protocol.schemas import FetchV11, ListOffsetsV3
from txbroker.kafka.protocol.transactions import by_topic
from txbroker.net.timers import Backoff

log = structlog.wrap_logger(logging.getLogger(__name__))

READ_UNCOMMITTED, READ_COMMITTED = 0, 1
EARLIEST, LATEST = -2, -1
_FETCH_BYTES = 4 << 20
_READ_BYTES = 8 << 20
_FETCH_WAIT_MS = 500
_TRUNCATED_RETRIES = 3


class Reader:
    """Reads one partition over a dedicated channel.

    Args:
        append_time, producers, decode: see `Fetched`.
    """

    def __init__(
        self,
        client: Client,
        topic: str,
        partition: int,
        channel: str,
        *,
        append_time: bool = True,
        producers: bool = False,
        decode: Decode = decode_batch,
    ) -> None:
        self._client = client
        self._topic = topic
        self._partition = partition
        self._channel = channel
        self._append_time = append_time
        self._producers = producers
        self._decode = decode
        self._asked = -1
        """The broker of the last request; one is in flight at a time."""

    @property
    def name(self) -> str:
        """Topic and partition number, for messages."""
        return f"{self._topic}-{self._partition}"

    # --- offsets -----------------------------------------------------------------------------

    async def start(self) -> int:
        """Return the log start offset."""
        return await self._offset(EARLIEST, READ_UNCOMMITTED)

    async def end(self, *, confirmed: bool = False) -> int:
        """Return the high watermark: the offset of the next record.

        A deposed leader that is cut off returns an old one. With `confirmed` the leader is
        confirmed first, so that no record acknowledged before is missing."""
        return await self._offset(LATEST, READ_UNCOMMITTED, confirmed=confirmed)

    async def stable_end(self) -> int:
        """Return the last stable offset: below it every transaction has ended."""
        return await self._offset(LATEST, READ_COMMITTED)

    async def _offset(self, which: int, isolation: int, *, confirmed: bool = False) -> int:
        request = ListOffsetsV3(isolation, [(self._topic, [(self._partition, which)])])
        answer = await self._retry(request, confirmed=confirmed)
        return int(answer[-1])

    async def _retry(self, request: Any, *, confirmed: bool = False) -> Any:
        """Ask the leader until it answers without error, or until the write timeout."""
        settings = self._client.settings
        backoff = Backoff(settings.write_timeout_s, settings.retry_backoff_s)
        while True:
            try:
                return await self._ask(request, confirmed=confirmed)
            except KafkaUnavailable as error:
                if not is_retriable(error) or not await backoff.pause():
                    raise

    async def _ask(self, request: Any, *, confirmed: bool) -> Any:
        """Return the partition's fields of the answer; the second one is the error code."""
        if confirmed:
            leader = await confirm_leader(self._client, self._topic, self._partition)
        else:
            leader = await self._client.leader(self._topic, self._partition)
        self._asked = leader
        try:
            answer = await self._client.ask(leader, request, self._channel)
        except (NotSent, Unanswered):
            self._client.forget_leader(self._topic, self._partition)
            raise
        code = getattr(answer, "error_code", Code.NONE)
        fields: tuple[Any, ...] = ()
        for _topic, partitions in answer.topics:
            for fields in partitions:
                code = fields[1] or code
        if code in LEADER_MOVED:
            self._client.forget_leader(self._topic, self._partition)
        if code != Code.NONE:
            raise KafkaRefused(code)
        return fields

    # --- records -----------------------------------------------------------------------------

    async def read(
        self, start: int, end: int, skipped: Callable[[range], None] | None = None
    ) -> AsyncGenerator[Sequence[Record]]:
        """Yield the committed records from offset `start` up to, not including, `end`.

        One fetch is in flight while the caller handles the records of the previous one.

        Args:
            start, end: offsets.
            skipped: called at the end with the offsets after the last record that hold none.

        Raises:
            LogTruncated: the log starts after `start`, or ends before `end`.
            InvariantBroken: a batch is corrupt, or lacks the broker's append time.
        """
        position = start
        # A new leader learns the high watermark from its followers' next fetch.
        backoff = self.backoff()
        ahead = self._ahead(position, end)
        before = 0
        beyond: Record | None = None
        try:
            while ahead is not None:
                fetched = await ahead
                if fetched.next_offset == position:
                    if not await backoff.pause():
                        backoff = await self._check_stalled(fetched, end)
                    ahead = self._ahead(position, end)
                    continue
                backoff = self.backoff()
                position = fetched.next_offset
                ahead = self._ahead(position, end)
                for records in fetched.pieces(before):
                    inside = _below(records, end)
                    if inside:
                        yield inside
                    if beyond is None and len(inside) < len(records):
                        beyond = records[len(inside)]
                    # Decoding takes milliseconds: let other tasks run.
                    await asyncio.sleep(0)
                before = fetched.skipped
        finally:
            if ahead is not None:
                ahead.cancel()
        last, count = (position, before) if beyond is None else (beyond.offset, beyond.skipped)
        trailing = range(last - count, min(last, end))
        if trailing and skipped is not None:
            skipped(trailing)

    async def read_kept(self, start: int, end: int) -> list[Record]:
        """Return the records of these offsets that the log has kept.

        Raises:
            KafkaUnavailable: no answer, or older ones are deleted while they are read.
        """
        for _attempt in range(_TRUNCATED_RETRIES):
            records: list[Record] = []
            try:
                async for some in self.read(max(start, await self.start()), end):
                    records += some
            except LogTruncated:
                continue  # older records were deleted meanwhile
            return records
        raise KafkaUnavailable(f"records of {self.name} are deleted faster than read: retry")

    def _ahead(self, position: int, end: int) -> asyncio.Task[Fetched] | None:
        if position >= end:
            return None
        task = asyncio.create_task(self.fetch(position, _READ_BYTES), name=f"fetch {self.name}")
        task.add_done_callback(_retrieve)
        return task

    async def _check_stalled(self, fetched: Fetched, end: int) -> Backoff:
        """Return a new backoff if the last request did not go to the leader; else raise."""
        if fetched.high_watermark < end:
            if await self.led_elsewhere():
                return self.backoff()
            raise LogTruncated(f"{self.name} ends at {fetched.high_watermark}, before {end}")
        raise Hanging(
            f"{self.name}: an open transaction hides offsets from {fetched.next_offset} on"
        )

    async def led_elsewhere(self) -> bool:
        """Return whether the last request went to a broker that does not lead (any more)."""
        asked = self._asked
        return await confirm_leader(self._client, self._topic, self._partition) != asked

    def backoff(self) -> Backoff:
        """Return a backoff for acknowledged records that are not visible yet."""
        settings = self._client.settings
        return Backoff(settings.watermark_timeout_s, settings.retry_backoff_s)

    async def fetch(
        self, position: int, bytes_max: int = _FETCH_BYTES, *, wait_ms: int = _FETCH_WAIT_MS
    ) -> Fetched:
        """Fetch from offset `position` on; the broker waits up to `wait_ms` for records.

        Returns at least one whole batch if there is one, even above `bytes_max`.

        Raises:
            LogTruncated: `position` is outside of the log.
        """
        partition = (self._partition, position, bytes_max)
        request = FetchV11(wait_ms, 1, bytes_max, READ_COMMITTED, [(self._topic, [partition])])
        try:
            try:
                answer = await self._retry(request)
            except KafkaRefused as error:
                if error.code != Code.OFFSET_OUT_OF_RANGE or not await self.led_elsewhere():
                    raise
                answer = await self._retry(request)
        except KafkaRefused as error:
            if error.code == Code.OFFSET_OUT_OF_RANGE:
                raise LogTruncated(f"{self.name} has no offset {position} (any more)") from None
            raise
        return Fetched(
            self.name,
            position,
            answer,
            append_time=self._append_time,
            producers=self._producers,
            unreadable=self._unreadable,
            decode=self._decode,
        )

    def _unreadable(self, offset: int, reason: str) -> None:
        if self._topic not in self._client.unreadable:
            self._client.unreadable.add(self._topic)
            log.warning(
                "batch of another client set aside",
                topic=self._topic,
                partition=self._partition,
                offset=offset,
                reason=reason,
            )


def _below(records: list[Record], end: int) -> list[Record]:
    if not records or records[-1].offset < end:
        return records
    return [record for record in records if record.offset < end]


def _retrieve(task: asyncio.Task[Fetched]) -> None:
    if not task.cancelled():
        task.exception()


async def end_offsets(
    client: Client, partitions: Iterable[Partition], isolation: int, channel: str
) -> dict[Partition, int]:
    """Return the high watermarks or, READ_COMMITTED, the last stable offsets of partitions.

    Sends one request to each leader. Partitions without an answer are left out.
    """
    by_leader: dict[int, list[Partition]] = {}
    # A copy, because the caller's collection may change meanwhile.
    for partition in list(partitions):
        try:
            by_leader.setdefault(await client.leader(*partition), []).append(partition)
        except KafkaUnavailable:
            continue
    if len(by_leader) == 1:  # the usual case, for which a task would be overhead
        ((leader, led),) = by_leader.items()
        return await _end_offsets_at(client, leader, led, isolation, channel)
    answers = await asyncio.gather(
        *(
            _end_offsets_at(client, leader, led, isolation, channel)
            for leader, led in by_leader.items()
        )
    )
    return {partition: end for answer in answers for partition, end in answer.items()}


async def offsets_at(
    client: Client,
    partitions: Iterable[Partition],
    time_ms: int,
    channel: str,
    isolation: int = READ_COMMITTED,
) -> dict[Partition, int]:
    """Return the first offsets with this timestamp or a later one, or `EARLIEST` or `LATEST`.

    Without such a record it is the last stable offset; READ_UNCOMMITTED, the high watermark.

    Raises:
        KafkaUnavailable: a partition's leader does not answer before the deadline, or is unknown.
    """
    settings = client.settings
    backoff = Backoff(settings.write_timeout_s, settings.retry_backoff_s)
    found: dict[Partition, int] = {}
    left = dict.fromkeys(partitions)  # unlike a set in the same order in every process
    while left:
        by_leader: dict[int, list[Partition]] = {}
        try:
            for partition in left:
                by_leader.setdefault(await client.leader(*partition), []).append(partition)
            for leader, led in by_leader.items():
                found.update(await _offsets_from(client, leader, led, time_ms, channel, isolation))
        except KafkaUnavailable as error:
            if not is_retriable(error) or not await backoff.pause():
                raise
        left = dict.fromkeys(partition for partition in left if partition not in found)
    none = [partition for partition, offset in found.items() if offset < 0]
    return found | (await offsets_at(client, none, LATEST, channel, isolation) if none else {})


async def _offsets_from(
    client: Client,
    leader: int,
    partitions: list[Partition],
    time_ms: int,
    channel: str,
    isolation: int,
) -> dict[Partition, int]:
    topics = by_topic((topic, (number, time_ms)) for topic, number in partitions)
    request = ListOffsetsV3(isolation, list(topics.items()))
    try:
        answer = await client.ask(leader, request, channel)
    except (NotSent, Unanswered):
        for partition in partitions:
            client.forget_leader(*partition)
        raise
    found: dict[Partition, int] = {}
    for topic, entries in answer.topics:
        for number, code, _timestamp, offset in entries:
            if code in LEADER_MOVED:
                client.forget_leader(topic, number)
            if code != Code.NONE:
                raise KafkaRefused(code, f"no offset of {topic}-{number}: {describe(code)}")
            found[topic, number] = offset
    return found


async def _end_offsets_at(
    client: Client, leader: int, partitions: list[Partition], isolation: int, channel: str
) -> dict[Partition, int]:
    topics = by_topic((topic, (number, LATEST)) for topic, number in partitions)
    try:
        answer = await client.ask(leader, ListOffsetsV3(isolation, list(topics.items())), channel)
    except (NotSent, Unanswered):
        for partition in partitions:
            client.forget_leader(*partition)
        return {}
    ends = {}
    for topic, entries in answer.topics:
        for number, code, _timestamp, offset in entries:
            if code == Code.NONE:
                ends[topic, number] = offset
            elif code in LEADER_MOVED:
                client.forget_leader(topic, number)
    return ends


# --- single records ------------------------------------------------------------------------------

_PICKS_AT_ONCE = 8
_NEAR_BYTES = 64 << 10
"""Bytes between two offsets up to which one fetch is cheaper than two."""
_PICK_BYTES = 1 << 20
_SMALL_BYTES = 1
_RECORD_BYTES = 1024
_RUN_RECORDS = 512
_RUN_SPAN_BYTES = 4 << 20


class Picker:
    """Reads records of one partition by offset: near ones in one fetch, several fetches at once.

    Kafka returns whole batches, beginning with the one that holds the offset, and at least one
    at any limit. So an offset far from the others costs one batch.
    """

    def __init__(self, make_reader: Callable[[str], Reader]) -> None:
        self._readers = [make_reader(f"pick{number}") for number in range(_PICKS_AT_ONCE)]
        self._record_bytes = _RECORD_BYTES

    async def pick(self, offsets: Sequence[int]) -> list[Record]:
        """Return the records at ascending `offsets`; one that holds no record is left out.

        Raises:
            KafkaUnavailable: Kafka does not answer, or an open transaction hides a record.
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
        return min(span + span // 4 + self._record_bytes, _PICK_BYTES)

    def _among(self, fetched: Fetched, offsets: list[int]) -> list[Record]:
        covered = fetched.next_offset - offsets[0]
        if covered > 1:
            self._record_bytes = max(64, (self._record_bytes + fetched.size_bytes // covered) // 2)
        return fetched.among(offsets)
