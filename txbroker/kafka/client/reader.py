"""Reading a partition from one offset to another, `read_committed`, without a consumer.

A read knows where it ends, so it needs no subscription, no position store and no background task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import structlog
from aiokafka.protocol.fetch import FetchRequest

from txbroker.core.records import Record
from txbroker.door.protocols import Hanging, LogTruncated
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client, KafkaRefused, NotSent, Unanswered, may_pass
from txbroker.kafka.client.leaders import confirm_leader
from txbroker.kafka.protocol.batch import Decode, decode_batch
from txbroker.kafka.protocol.codes import LEADER_MOVED, Code
from txbroker.kafka.protocol.fetched import Fetched
from txbroker.kafka.protocol.packed import ListOffsetsV3
from txbroker.net.backoff import Backoff

log = structlog.wrap_logger(logging.getLogger(__name__))

_EARLIEST, _LATEST = -2, -1
_READ_UNCOMMITTED, _READ_COMMITTED = 0, 1
_FETCH_BYTES = 4 << 20
_READ_BYTES = 8 << 20
_FETCH_WAIT_MS = 500


class Reader:
    """Reads one partition over a lane of its own."""

    def __init__(
        self,
        client: Client,
        topic: str,
        partition: int,
        lane: str,
        *,
        append_time: bool = True,
        producers: bool = False,
        decode: Decode = decode_batch,
    ) -> None:
        self._client = client
        self._topic = topic
        self._partition = partition
        self._lane = lane
        self._append_time = append_time
        self._producers = producers
        self._decode = decode
        self._asked = -1
        """The broker that was asked last; one question is under way at a time."""

    @property
    def name(self) -> str:
        """The partition as people write it."""
        return f"{self._topic}-{self._partition}"

    # --- where it begins and ends ------------------------------------------------------------

    async def start(self) -> int:
        """Return the first offset that is kept."""
        return await self._offset(_EARLIEST, _READ_UNCOMMITTED)

    async def end(self, *, sure: bool = False) -> int:
        """Return the high watermark: the offset that the next record will get.

        A leader that was deposed and does not know it says where it was then. Where that would be
        wrong, `sure` has the leader confirmed: nothing is missing that was acknowledged before.
        """
        return await self._offset(_LATEST, _READ_UNCOMMITTED, sure=sure)

    async def stable_end(self) -> int:
        """Return the last stable offset: below it every transaction has ended."""
        return await self._offset(_LATEST, _READ_COMMITTED)

    async def _offset(self, which: int, isolation: int, *, sure: bool = False) -> int:
        request = ListOffsetsV3(isolation, [(self._topic, [(self._partition, which)])])
        answer = await self._retry(request, sure=sure)
        return int(answer[-1])

    async def _retry(self, request: Any, *, sure: bool = False) -> Any:
        """Ask the leader until it answers without error, or backoff is over."""
        settings = self._client.settings
        backoff = Backoff(settings.write_timeout_s, settings.retry_backoff_s)
        while True:
            try:
                return await self._ask(request, sure=sure)
            except KafkaUnavailable as error:
                if not may_pass(error) or not await backoff.pause():
                    raise

    async def _ask(self, request: Any, *, sure: bool) -> Any:
        """Return the answer for our partition: a tuple whose second field is its error code."""
        if sure:
            leader = await confirm_leader(self._client, self._topic, self._partition)
        else:
            leader = await self._client.leader(self._topic, self._partition)
        self._asked = leader
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

    async def read(
        self, start: int, end: int, skipped: Callable[[range], None] | None = None
    ) -> AsyncGenerator[Sequence[Record]]:
        """Yield the committed records from offset `start` up to, not including, `end`; then tell
        `skipped` which offsets behind the last one hold none, if any.

        While the caller works on what one fetch brought the next one is under way, and no more.

        Raises:
            LogTruncated: `start` is not kept any more, or the log ends before `end`.
            InvariantBroken: a batch is damaged, or does not carry the broker's append time.
            KafkaUnavailable: Kafka does not answer.
        """
        position = start
        # A new leader learns the high watermark only from its followers' next fetch.
        backoff = self.backoff()
        ahead = self._ahead(position, end)
        before = 0
        beyond: Record | None = None
        try:
            while ahead is not None:
                fetched = await ahead
                if fetched.next_offset == position:
                    if not await backoff.pause():
                        backoff = await self._later(fetched, end)
                    ahead = self._ahead(position, end)
                    continue
                backoff = self.backoff()
                position = fetched.next_offset
                ahead = self._ahead(position, end)
                for records in fetched.pieces(before):
                    wanted = _below(records, end)
                    if wanted:
                        yield wanted
                    if beyond is None and len(wanted) < len(records):
                        beyond = records[len(wanted)]
                    # Decoding takes its time; others have work too.
                    await asyncio.sleep(0)
                before = fetched.skipped
        finally:
            if ahead is not None:
                ahead.cancel()
        last, count = (position, before) if beyond is None else (beyond.offset, beyond.skipped)
        trailing = range(last - count, min(last, end))
        if trailing and skipped is not None:
            skipped(trailing)

    def _ahead(self, position: int, end: int) -> asyncio.Task[Fetched] | None:
        if position >= end:
            return None
        task = asyncio.create_task(self.fetch(position, _READ_BYTES), name=f"fetch {self.name}")
        task.add_done_callback(_retrieve)
        return task

    async def _later(self, fetched: Fetched, end: int) -> Backoff:
        """Return the backoff with another leader, where it was not the leader that we asked."""
        if fetched.high_watermark < end:
            if await self.led_elsewhere():
                return self.backoff()
            raise LogTruncated(f"{self.name} ends at {fetched.high_watermark}, before {end}")
        raise Hanging(
            f"{self.name}: an open transaction hides the records from {fetched.next_offset} on"
        )

    async def led_elsewhere(self) -> bool:
        """Say whether another broker leads than was asked last, which then lacks what came since.

        Raises:
            KafkaUnavailable: nobody can tell.
        """
        asked = self._asked
        return await confirm_leader(self._client, self._topic, self._partition) != asked

    def backoff(self) -> Backoff:
        """Return how long to wait for records that were acknowledged but do not show."""
        settings = self._client.settings
        return Backoff(settings.watermark_timeout_s, settings.retry_backoff_s)

    async def fetch(
        self, position: int, bytes_max: int = _FETCH_BYTES, *, wait_ms: int = _FETCH_WAIT_MS
    ) -> Fetched:
        """Return what comes from offset `position` on, waiting up to `wait_ms` for something.

        At least one whole batch comes where there is one, however large it is.

        Raises:
            LogTruncated: the log does not reach to `position`, at its begin or its end.
            InvariantBroken: a batch is damaged.
            KafkaUnavailable: Kafka does not answer.
        """
        partition = (self._partition, position, bytes_max)
        request = FetchRequest(wait_ms, 1, bytes_max, _READ_COMMITTED, [(self._topic, [partition])])
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
