"""Store the results of audits; findings with the progress of their audit exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from txbroker.core.records import Record
from txbroker.door.protocols import Appended, AppendRefused, AppendUnknown, Hanging
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.client import ClientOwner
from txbroker.kafka.client.producer import BatchRefused, BatchUnknown, Producer, ProducerFenced
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.log import KafkaLog
from txbroker.kafka.protocol.batch import batch_body
from txbroker.kafka.protocol.codes import Code, describe
from txbroker.net.timers import Backoff

_BYTES_MAX = 1 << 20
"""Kafka's default; these records are far smaller."""
_RECORDS_MAX = 500
"""Findings per batch, far below the maximum batch size."""


class KafkaAuditWriter(ClientOwner):
    """Writes to the topics of the audits."""

    def __init__(self, settings: KafkaSettings) -> None:
        super().__init__(settings)
        self._logs: dict[str, KafkaLog] = {}

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
        return (await _append(self._logs[topic], topic, key, value)).timestamp_ms

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


class KafkaDrift(ClientOwner):
    """Writes to the drift topic and the audit topic for one stream, or for batches.

    Findings and the writer's progress are stored in one Kafka transaction. A restarted writer
    resumes from its progress and repeats no finding.

    One call at a time.

    Args:
        name: of the writer. A new one fences earlier ones with its name.
    """

    def __init__(self, settings: KafkaSettings, name: str) -> None:
        super().__init__(settings)
        self._settings = settings
        self._name = name
        self._audit = (settings.audit_topic, 0)
        self._drift = (settings.drift_topic, 0)
        self._log = KafkaLog(self._client, settings.audit_topic, 0, "stream", _BYTES_MAX)
        self._producer: Producer | None = None

    async def mark(self, key: str, value: bytes) -> Appended:
        """Append a record to the audit topic; return its offset and append time, ms by the broker's
        clock.

        Raises:
            ConfigurationError: the topic is missing, refuses the record, or lacks LogAppendTime.
            KafkaUnavailable: it may or may not be stored; a retry is safe.
        """
        stored = await _append(self._log, self._settings.audit_topic, key, value)
        if stored.timestamp_ms < 0:
            raise ConfigurationError(
                f"{self._settings.audit_topic} must have message.timestamp.type=LogAppendTime: "
                "run `txbroker topics apply`"
            )
        return stored

    async def begin(self, key: str) -> bytes | None:
        """Fence earlier writers of this name, and return the newest record of a key.

        Raises:
            ConfigurationError: a topic is missing.
            KafkaUnavailable: Kafka does not answer, or an open transaction hides the newest
                records.
        """
        self._producer = None
        backoff = self._backoff()
        producer = Producer(self._client, "stream/findings", self._transactional_id)
        try:
            await producer.start(backoff)
        except ProducerFenced:
            raise KafkaUnavailable(
                f"another audit begins to write findings as {self._name}, too: run one of them"
            ) from None
        reader = Reader(self._client, *self._audit, "stream/progress", append_time=False)
        # The earlier writer's commits must be visible before the read.
        end = await reader.end()
        while await reader.stable_end() < end:
            if not await backoff.pause():
                raise Hanging(f"{reader.name}: an open transaction hides the newest records")
        newest = None
        async for records in reader.read(await reader.start(), end):
            for record in records:
                if record.key == key.encode():
                    newest = record.value
        self._producer = producer
        return newest

    async def write(self, findings: Iterable[tuple[str, bytes]], key: str, progress: bytes) -> None:
        """Store findings and progress, all or nothing.

        Raises:
            ConfigurationError: a topic is missing or refuses a record, or another writer of this
                name has begun; nothing was stored.
            KafkaUnavailable: the outcome is unknown: call `begin` again.
        """
        producer, self._producer = self._producer, None
        if producer is None:
            raise KafkaUnavailable("the outcome of the last write is unknown: begin again")
        backoff = self._backoff()
        try:
            await producer.add([self._audit], backoff)
            chunk: list[Record] = []
            for name, value in findings:
                chunk.append(Record(name.encode(), value))
                if len(chunk) == _RECORDS_MAX:
                    await self._put(producer, chunk)
                    chunk = []
            await self._put(producer, chunk)
            last = {self._audit: batch_body([Record(key.encode(), progress)])}
            await producer.produce(last, self._backoff())
            await producer.end(commit=True, backoff=self._backoff())
        except BatchRefused as error:
            if error.code == Code.UNKNOWN_TOPIC_OR_PARTITION:
                raise ConfigurationError(
                    f"topic {error.partition[0]} does not exist: create it with "
                    "`txbroker topics apply`"
                ) from None
            raise ConfigurationError(_refused(self._settings.audit_topic, error)) from None
        except BatchUnknown as error:
            raise KafkaUnavailable(str(error)) from None
        except ProducerFenced:
            raise ConfigurationError(
                f"another audit writes findings as {self._name}: stop one of them"
            ) from None
        self._producer = producer

    async def _put(self, producer: Producer, records: Sequence[Record]) -> None:
        if records:
            await producer.add([self._drift], self._backoff())
            await producer.produce({self._drift: batch_body(records)}, self._backoff())
            await asyncio.sleep(0)

    @property
    def _transactional_id(self) -> str:
        return f"{self._settings.drift_topic}-{self._name}"

    def _backoff(self) -> Backoff:
        return Backoff(self._settings.write_timeout_s, self._settings.retry_backoff_s)


async def _append(log: KafkaLog, topic: str, key: str, value: bytes | None) -> Appended:
    """Append a record to a topic; its append time is negative without LogAppendTime."""
    try:
        return await log.append([Record(key.encode(), value)])
    except AppendRefused as error:
        raise ConfigurationError(_refused(topic, error)) from None
    except AppendUnknown as error:
        raise KafkaUnavailable(f"cannot write to topic {topic} now: {error}") from None


def _refused(topic: str, why: Exception) -> str:
    return f"topic {topic} refused the audit's record: {why}"
