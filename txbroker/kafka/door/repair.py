"""Find records that stop partitions, and record the decision to skip them.

Reads only the topics, so it works with or without running proxies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection

from msgspec import Struct

from txbroker.core.decoding import Malformed, NewerVersion, decode_log, passed_over
from txbroker.core.encoding import encode_skip
from txbroker.core.records import Record, Skip
from txbroker.core.snapshot import find_whole
from txbroker.door.own_topics import CHECKPOINT, CheckpointScan, ParkedScan, Stop, foreign_why
from txbroker.door.protocols import AppendRefused, AppendUnknown, ForeignRecord
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.door.log import KafkaLog
from txbroker.kafka.door.partition import read_checkpoint
from txbroker.kafka.door.pipelined_writer import promotion_writers
from txbroker.kafka.protocol.copies import default_bytes
from txbroker.net.timers import Backoff

_CHANNEL = "repair"
_LOSES = {
    "half": "the message: this version does not know its transaction and never promotes it",
    "op": "the marker: the transaction keeps its previous state and may be decided differently",
    "parked": "the copy: the half topic's records of the transaction count, a refused one counts "
    "as promoted",
}
SET_ASIDE = "set_aside"
"""The code of records that stop no partition."""


class StoppingRecord(Struct, frozen=True):
    """A record that stops a partition, and its place."""

    topic: str
    partition: int
    stop: Stop

    @property
    def at(self) -> str:
        """Topic, partition and offset, for messages."""
        return f"{self.topic}/{self.partition}@{self.stop.record.offset}"


class Repair:
    """Finds records that stop partitions of an installation, and records operators' decisions."""

    def __init__(self, client: Client, bytes_max: Callable[[str], int]) -> None:
        self._client = client
        self._bytes_max = bytes_max
        settings = client.settings
        self._topics = {
            "half": settings.half_topic,
            "op": settings.op_topic,
            "parked": settings.parked_topic,
            CHECKPOINT: settings.checkpoint_topic,
        }

    async def find(self, *, set_aside: bool = False) -> list[StoppingRecord]:
        """Return the records that stop partitions, now or at their next claim.

        Args:
            set_aside: also return the newest records of other clients in the checkpoint and the
                parked topic, which stop no partition.

        Raises:
            ConfigurationError: the installation has no topics.
        """
        return [
            StoppingRecord(self._topics[stop.log], number, stop)
            for number in await self._partitions()
            async for stop in self._partition(number)
            if set_aside or stop.code != SET_ASIDE
        ]

    async def set_aside(self) -> list[StoppingRecord]:
        """Return the set-aside records of `find`, without reading the half and op topics."""
        records = []
        for number in await self._partitions():
            scan = await self._checkpoint(number)
            stops = [*_in_checkpoint(scan), *await self._in_parked(number, scan)]
            records += [StoppingRecord(self._topics[stop.log], number, stop) for stop in stops]
        return [record for record in records if record.stop.code == SET_ASIDE]

    async def _partitions(self) -> list[int]:
        topic = self._client.settings.half_topic
        facts = (await self._client.refresh([topic])).get(topic)
        if facts is None or not facts.partitions:
            raise ConfigurationError(f"topic {topic} does not exist: check topic_prefix")
        return sorted(facts.partitions)

    def _reader(self, log: str, number: int) -> Reader:
        topic = self._topics[log]
        return Reader(self._client, topic, number, f"{_CHANNEL}/{log}", producers=True)

    async def _checkpoint(self, number: int) -> CheckpointScan:
        backoff = Backoff(
            self._client.settings.claim_timeout_s, self._client.settings.retry_backoff_s
        )
        writers = promotion_writers(self._client, number, f"{_CHANNEL}/", default_bytes)
        known = {await one.producer.known_id(backoff) for one in writers}
        return await read_checkpoint(self._reader(CHECKPOINT, number), () if -1 in known else known)

    async def _partition(self, number: int) -> AsyncIterator[Stop]:
        scan = await self._checkpoint(number)
        for stop in _in_checkpoint(scan):
            yield stop
        op, half = self._reader("op", number), self._reader("half", number)
        # The offsets from which the next owner replays them.
        starts = {"half": await half.start(), "op": await op.start()}
        for whole in find_whole(scan.snapshots()):
            if whole.closing.op >= starts["op"]:
                starts = {"half": max(whole.closing.half, starts["half"]), "op": whole.closing.op}
                break
        for log, reader in (("half", half), ("op", op)):
            async for stop in _newer(log, reader, number, starts[log], scan.skips()):
                yield stop
        for stop in await self._in_parked(number, scan):
            yield stop

    async def _in_parked(self, number: int, scan: CheckpointScan) -> list[Stop]:
        reader = self._reader("parked", number)
        parked = ParkedScan(number, scan.skips(), bodies=True)
        async for records in reader.read(await reader.start(), await reader.stable_end()):
            for record in records:
                parked.take(record)
        stops = [_stop("parked", reader, record, why) for record, why in parked.stops()]
        return stops + [_set_aside("parked", record) for record in parked.set_aside]

    async def skip(self, found: StoppingRecord, by: str, reason: str) -> None:
        """Record the decision to skip a record, for a stopped and for the next owner.

        Raises:
            KafkaUnavailable: Kafka does not answer; the decision may or may not be recorded.
        """
        topic = self._client.settings.checkpoint_topic
        log = KafkaLog(
            self._client, topic, found.partition, f"{_CHANNEL}/skip", self._bytes_max(topic)
        )
        try:
            await log.append([encode_skip(found.stop.log, found.stop.record, by, reason)])
        except (AppendUnknown, AppendRefused) as error:
            raise KafkaUnavailable(f"the decision may not be recorded: {error}") from None


def _in_checkpoint(scan: CheckpointScan) -> list[Stop]:
    stops = scan.stops()
    # A set-aside record may also stop the partition, if progress is lost.
    offsets = {stop.record.offset for stop in stops}
    aside = [found for found in scan.set_aside() if found.record.offset not in offsets]
    return stops + [_set_aside(CHECKPOINT, found) for found in aside]


def _set_aside(log: str, found: ForeignRecord) -> Stop:
    return Stop(log, found.record, SET_ASIDE, f"{found.why}: set aside, stops nothing", "nothing")


def _stop(log: str, reader: Reader, record: Record, why: str) -> Stop:
    at = f"{reader.name} at offset {record.offset}"
    return Stop(log, record, "newer", f"{at}: {why}: upgrade the proxies", _LOSES[log])


async def _newer(
    log: str, reader: Reader, partition: int, start: int, skips: Collection[Skip]
) -> AsyncIterator[Stop]:
    end = await reader.stable_end()
    async for records in reader.read(start, end):
        for record in records:
            why = _newer_why(log, record)
            foreign = why and foreign_why(log, record, partition)
            if why and not foreign and not passed_over(skips, log, record):
                yield _stop(log, reader, record, why)


def _newer_why(log: str, record: Record) -> str:
    """Return what shows that a newer version wrote a record, else ""."""
    try:
        decode_log(log, record)
    except NewerVersion as error:
        return str(error)
    except Malformed:
        pass
    return ""
