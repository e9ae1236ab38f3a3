"""Follow compacted topics: registered producer groups, and results of audits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import structlog

from txbroker.core.records import Record
from txbroker.door.own_topics import LAYOUT_KEY
from txbroker.door.protocols import Appended, AppendUnknown, AuditFeed, GroupStore, LogTruncated
from txbroker.error_text import raised_at, safe_repr
from txbroker.errors import ConfigurationError, InvariantBroken, KafkaUnavailable
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.door.log import KafkaLog

log = structlog.wrap_logger(logging.getLogger(__name__))

_PAUSE_S = 0.5
_AUDIT_PAUSE_S = 5.0
_AUDIT_WAIT_MS = 2000
"""How long a broker waits for records; less than any request timeout."""


class _Follower:
    """Follows partition 0 of a topic in a task."""

    def __init__(
        self, client: Client, topic: str, channel: str, *, append_time: bool = True
    ) -> None:
        self._reader, self._bounds = (
            Reader(client, topic, 0, f"{channel}/{name}", append_time=append_time)
            for name in ("follow", "bounds")
        )
        self._follower: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Stop following."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await follower


class KafkaGroupStore(_Follower, GroupStore):
    """A `GroupStore` on a real Kafka: the newest record of each key."""

    def __init__(self, client: Client, bytes_max: Callable[[str], int]) -> None:
        self._client = client
        self._topic = client.settings.groups_topic
        super().__init__(client, self._topic, "groups")
        self._bytes_max = bytes_max
        self._log: KafkaLog | None = None
        self._append_lock = asyncio.Lock()
        self._moved = asyncio.Condition()
        self._position = 0
        self._changed: Callable[[str, bytes | None], None] | None = None

    async def load(self, changed: Callable[[str, bytes | None], None]) -> None:
        """Read all groups, then follow the topic. Returns once the current end is reached."""
        self._changed = changed
        self._position, end = await self._bounds.start(), await self._bounds.end(confirmed=True)
        while self._position < end:
            await self._step()
        self._follower = asyncio.create_task(self._follow(), name="txbroker groups")

    async def put(self, group: str, value: bytes | None) -> None:
        """Store a group, or remove it with None. Returns once it is stored and read back."""
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
        """Append a record to the topic."""
        if self._log is None:
            self._log = KafkaLog(
                self._client, self._topic, 0, "groups", self._bytes_max(self._topic)
            )
        try:
            async with self._append_lock:
                return await self._log.append([record])
        except AppendUnknown as error:
            raise KafkaUnavailable(str(error)) from None

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


class KafkaAuditFeed(_Follower, AuditFeed):
    """An `AuditFeed` on a real Kafka."""

    def __init__(self, client: Client, pause_s: float = _AUDIT_PAUSE_S) -> None:
        # The topic may have been created without LogAppendTime.
        super().__init__(client, client.settings.audit_topic, "audit", append_time=False)
        self._pause_s = pause_s

    def follow(self, changed: Callable[[str, bytes | None], None]) -> None:
        """Follow the topic; see `AuditFeed`."""
        self._follower = asyncio.create_task(self._follow(changed), name="txbroker audit")

    async def _follow(self, changed: Callable[[str, bytes | None], None]) -> None:
        skip_to_end = False
        while True:
            try:
                bounds = self._bounds
                start = await (bounds.stable_end() if skip_to_end else bounds.start())
                skip_to_end = False
                await self._follow_from(start, changed)
            except LogTruncated:
                # The cleaner advanced the log start, or the topic was created again: read all of
                # it, the newest values count.
                pass
            except InvariantBroken:
                # A corrupt batch. Each record replaces earlier ones, so the next one suffices.
                skip_to_end = True
            except (KafkaUnavailable, ConfigurationError):
                pass
            await asyncio.sleep(self._pause_s)

    async def _follow_from(
        self, position: int, changed: Callable[[str, bytes | None], None]
    ) -> None:
        """Report records from `position` on, without end.

        Of the records that exist at the start only the newest of each key is reported: an old alarm
        must not be raised again.
        """
        end = await self._bounds.stable_end()
        newest: dict[bytes, bytes | None] = {}

        def report() -> None:
            for key, value in newest.items():
                changed(key.decode(errors="replace"), value)
            newest.clear()

        while True:
            if position >= end:
                report()
            try:
                fetched = await self._reader.fetch(position, wait_ms=_AUDIT_WAIT_MS)
            except InvariantBroken:
                report()
                raise
            for records in fetched.pieces():
                newest |= {r.key: r.value for r in records if r.key is not None}
                await asyncio.sleep(0)
            position = fetched.next_offset
