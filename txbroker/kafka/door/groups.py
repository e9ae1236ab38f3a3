"""Registered producer groups: the newest record of each key in a compacted topic."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import structlog

from txbroker.core.records import Record
from txbroker.door.own_topics import LAYOUT_KEY
from txbroker.door.protocols import Appended, AppendUnknown, GroupStore, LogTruncated
from txbroker.error_text import raised_at, safe_repr
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.door.log import KafkaLog

log = structlog.wrap_logger(logging.getLogger(__name__))

_PAUSE_S = 0.5


class KafkaGroupStore(GroupStore):
    """A `GroupStore` on a real Kafka."""

    def __init__(self, client: Client, bytes_max: Callable[[str], int]) -> None:
        self._client = client
        self._topic = client.settings.groups_topic
        self._bytes_max = bytes_max
        self._reader = Reader(client, self._topic, 0, "groups/follow")
        self._bounds = Reader(client, self._topic, 0, "groups/bounds")
        self._log: KafkaLog | None = None
        self._append_lock = asyncio.Lock()
        self._moved = asyncio.Condition()
        self._position = 0
        self._changed: Callable[[str, bytes | None], None] | None = None
        self._follower: asyncio.Task[None] | None = None

    async def load(self, changed: Callable[[str, bytes | None], None]) -> None:
        """Read all groups, then follow the topic. Returns once the current end is reached.

        Args:
            changed: called with each group and its JSON, or None for a removed one.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        self._changed = changed
        self._position, end = await self._bounds.start(), await self._bounds.end(confirmed=True)
        while self._position < end:
            await self._step()
        self._follower = asyncio.create_task(self._follow(), name="txbroker groups")

    async def put(self, group: str, value: bytes | None) -> None:
        """Store a group, or remove it with None. Returns once it is stored and read back.

        Raises:
            AppendRefused: Kafka refused the record, for instance as too large.
            KafkaUnavailable: it may or may not be stored.
        """
        appended = await self.append(Record(group.encode(), value))
        end = appended.base_offset + 1
        if appended.base_offset < 0:
            end = await self._bounds.end(confirmed=True)
        try:
            async with asyncio.timeout(self._client.settings.write_timeout_s), self._moved:
                await self._moved.wait_for(lambda: self._position >= end)
        except TimeoutError:
            raise KafkaUnavailable(
                f"group {group} was stored but not read back from {self._topic} in time: retry"
            ) from None

    async def append(self, record: Record) -> Appended:
        """Append a record to the topic.

        Raises:
            AppendRefused, KafkaUnavailable: as for `put`.
        """
        if self._log is None:
            self._log = KafkaLog(
                self._client, self._topic, 0, "groups", self._bytes_max(self._topic)
            )
        try:
            async with self._append_lock:
                return await self._log.append([record])
        except AppendUnknown as error:
            raise KafkaUnavailable(str(error)) from None

    async def close(self) -> None:
        """Stop following."""
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
            self._follower = None

    async def _follow(self) -> None:
        while True:
            try:
                await self._step()
            except LogTruncated:
                # The cleaner advanced the log start: read all of it, the newest values count.
                await self._restart()
            except KafkaUnavailable:
                await asyncio.sleep(_PAUSE_S)
            except Exception as error:
                # Keep following, so that later changes are seen after any error.
                log.error(
                    "groups not read",
                    topic=self._topic,
                    error=safe_repr(error),
                    where=raised_at(error),
                )
                await asyncio.sleep(_PAUSE_S)

    async def _restart(self) -> None:
        with contextlib.suppress(KafkaUnavailable):
            self._position = await self._bounds.start()

    async def _step(self) -> None:
        assert self._changed is not None
        fetched = await self._reader.fetch(self._position)
        for records in fetched.pieces():
            for record in records:
                if record.key not in (None, LAYOUT_KEY):
                    self._changed(record.key.decode(errors="replace"), record.value)
            await asyncio.sleep(0)
        async with self._moved:
            self._position = fetched.next_offset
            self._moved.notify_all()
