"""What stops partitions, found in the topics themselves, and the decision to pass it over.

No proxy is asked: this works while proxies run, and while none does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection

from msgspec import Struct

from txbroker.core.codec import (
    Malformed,
    NewerVersion,
    decode_half,
    decode_marker,
    encode_skip,
    is_content,
    passed_over,
)
from txbroker.core.records import Record, Skip
from txbroker.core.snapshot import find_whole
from txbroker.door import AppendRefused, AppendUnknown
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client import Client
from txbroker.kafka.log import KafkaLog
from txbroker.kafka.partition import read_checkpoint
from txbroker.kafka.reader import Reader
from txbroker.own_topics import Stop

_LANE = "repair"
_LOSES = {
    "half": "the message: its transaction is not known to this version, and never promoted by it",
    "op": "what the marker says: the transaction stands as it was before it, and may be decided "
    "otherwise",
}


class Found(Struct, frozen=True):
    """A record that stops a partition, and where it is."""

    topic: str
    partition: int
    stop: Stop

    @property
    def at(self) -> str:
        """As people write it: topic, partition and offset."""
        return f"{self.topic}/{self.partition}@{self.stop.record.offset}"


class Repair:
    """Finds what stops the partitions of an installation, and records what operators decide."""

    def __init__(self, client: Client, bytes_max: Callable[[str], int]) -> None:
        self._client = client
        self._bytes_max = bytes_max
        settings = client.settings
        self._topics = {"half": settings.half_topic, "op": settings.op_topic}

    async def find(self) -> list[Found]:
        """Return what stops partitions at their next claim, or has stopped them.

        Raises:
            ConfigurationError: there are no topics of an installation.
            KafkaUnavailable: Kafka does not answer.
        """
        topic = self._client.settings.half_topic
        facts = (await self._client.refresh([topic])).get(topic)
        if facts is None or not facts.partitions:
            raise ConfigurationError(f"there is no topic {topic}: see topic_prefix")
        return [one for number in sorted(facts.partitions) async for one in self._partition(number)]

    async def _partition(self, number: int) -> AsyncIterator[Found]:
        topic = self._client.settings.checkpoint_topic
        scan = await read_checkpoint(
            Reader(self._client, topic, number, f"{_LANE}/checkpoint", producers=True)
        )
        for stop in scan.stops():
            yield Found(topic, number, stop)
        op = Reader(self._client, self._topics["op"], number, f"{_LANE}/op")
        half = Reader(self._client, self._topics["half"], number, f"{_LANE}/half")
        # From where the next owner replays them.
        starts = {"half": await half.start(), "op": await op.start()}
        for whole in find_whole(scan.snapshots()):
            if whole.closing.op >= starts["op"]:
                starts = {"half": max(whole.closing.half, starts["half"]), "op": whole.closing.op}
                break
        for log, reader in (("half", half), ("op", op)):
            async for stop in _newer(log, reader, starts[log], scan.skips()):
                yield Found(self._topics[log], number, stop)

    async def skip(self, found: Found, by: str, reason: str) -> None:
        """Record that a record is passed over: by the next owner of its partition, and by one
        that has stopped.

        Raises:
            KafkaUnavailable: Kafka does not answer; it may or may not be recorded.
        """
        topic = self._client.settings.checkpoint_topic
        log = KafkaLog(
            self._client, topic, found.partition, f"{_LANE}/skip", self._bytes_max(topic)
        )
        try:
            await log.append([encode_skip(found.stop.log, found.stop.record, by, reason)])
        except (AppendUnknown, AppendRefused) as error:
            raise KafkaUnavailable(f"the decision may not be recorded: {error}") from None


async def _newer(
    log: str, reader: Reader, start: int, skips: Collection[Skip]
) -> AsyncIterator[Stop]:
    end = await reader.stable_end()
    async for records in reader.read(start, end):
        for record in records:
            why = _newer_why(log, record)
            if why and not passed_over(skips, log, record):
                at = f"{reader.name} at offset {record.offset}"
                yield Stop(log, record, "newer", f"{at}: {why}: upgrade the proxies", _LOSES[log])


def _newer_why(log: str, record: Record) -> str:
    """Return how a newer version shows in a record, "" where it does not."""
    try:
        if log == "half" or is_content(record):
            decode_half(record)
        else:
            decode_marker(record)
    except NewerVersion as error:
        return str(error)
    except Malformed:
        pass
    return ""
