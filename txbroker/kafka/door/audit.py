"""The topics of the audits: every proxy follows them, audits write them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from txbroker.core.records import Record
from txbroker.door.protocols import AppendRefused, AppendUnknown, AuditFeed, LogTruncated
from txbroker.errors import ConfigurationError, InvariantBroken, KafkaUnavailable
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.log import KafkaLog
from txbroker.kafka.protocol.codes import Code, describe

_PAUSE_S = 5.0
_WAIT_MS = 2000
"""How long a broker waits for records; less than any request timeout."""

_BYTES_MAX = 1 << 20
"""Kafka's default; records of an audit are far smaller."""


class KafkaAuditFeed(AuditFeed):
    """An `AuditFeed` on a real Kafka."""

    def __init__(self, client: Client, pause_s: float = _PAUSE_S) -> None:
        topic = client.settings.audit_topic
        # The topic may have been created without LogAppendTime.
        self._reader = Reader(client, topic, 0, "audit/follow", append_time=False)
        self._bounds = Reader(client, topic, 0, "audit/bounds", append_time=False)
        self._pause_s = pause_s
        self._follower: asyncio.Task[None] | None = None

    def follow(self, changed: Callable[[str, bytes | None], None]) -> None:
        """Follow the topic; see `AuditFeed`."""
        self._follower = asyncio.create_task(self._follow(changed), name="txbroker audit")

    async def close(self) -> None:
        """Stop following."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await follower

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
                fetched = await self._reader.fetch(position, wait_ms=_WAIT_MS)
            except InvariantBroken:
                report()
                raise
            for records in fetched.pieces():
                newest |= {r.key: r.value for r in records if r.key is not None}
                await asyncio.sleep(0)
            position = fetched.next_offset


class KafkaAuditWriter:
    """Writes to the topics of the audits, through a separate client.

    Used as `async with`, in a running event loop.

    Raises:
        ConfigurationError: the settings contradict each other.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        settings.validate()
        self._client = Client(settings)
        self._logs: dict[str, KafkaLog] = {}

    async def __aenter__(self) -> KafkaAuditWriter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def put(self, topic: str, key: str, value: bytes | None) -> int:
        """Append a record to partition 0 of a topic. One call at a time.

        Returns:
            Its append time, ms by the broker's clock; negative without LogAppendTime.

        Raises:
            ConfigurationError: the topic is missing, forbidden, or refuses the record; nothing was
                stored.
            KafkaUnavailable: it may or may not be stored; a retry is safe.
        """
        if topic not in self._logs:
            await self._examine(topic)
            self._logs[topic] = KafkaLog(self._client, topic, 0, topic, _BYTES_MAX)
        try:
            return (await self._logs[topic].append([Record(key.encode(), value)]))[1]
        except AppendRefused as error:
            raise ConfigurationError(f"topic {topic} refused the audit's record: {error}") from None
        except AppendUnknown as error:
            raise KafkaUnavailable(f"cannot write to topic {topic} now: {error}") from None

    async def _examine(self, topic: str) -> None:
        facts = (await self._client.refresh([topic])).get(topic)
        if facts is None or facts.error == Code.UNKNOWN_TOPIC_OR_PARTITION:
            raise ConfigurationError(
                f"topic {topic} does not exist: create it with `txbroker topics apply`"
            )
        if facts.error == Code.TOPIC_AUTHORIZATION_FAILED:
            raise ConfigurationError(
                f"not authorized: grant the audit Describe and Write on topic {topic}"
            )
        if facts.error not in (Code.NONE, Code.LEADER_NOT_AVAILABLE):
            raise KafkaUnavailable(f"topic {topic}: {describe(facts.error)}")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
