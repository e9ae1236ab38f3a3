"""What stops partitions, found in the topics themselves, and the decision to pass it over.

No proxy is asked: this works while proxies run, and while none does.
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

_CHANNEL = "repair"
_LOSES = {
    "half": "the message: its transaction is not known to this version, and never promoted by it",
    "op": "what the marker says: the transaction stands as it was before it, and may be decided "
    "otherwise",
    "parked": "the copy: what half holds of the transaction counts, a refused one counts as "
    "promoted",
}
SET_ASIDE = "set_aside"
"""The code of records that stop nothing."""


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
        self._topics = {
            "half": settings.half_topic,
            "op": settings.op_topic,
            "parked": settings.parked_topic,
            CHECKPOINT: settings.checkpoint_topic,
        }

    async def find(self, *, set_aside: bool = False) -> list[Found]:
        """Return what stops partitions at their next claim, or has stopped them.

        Args:
            set_aside: return the newest records of the checkpoint and the parked topic, too, that
                other clients wrote there and that stop nothing.

        Raises:
            ConfigurationError: there are no topics of an installation.
            KafkaUnavailable: Kafka does not answer.
        """
        return [
            Found(self._topics[stop.log], number, stop)
            for number in await self._partitions()
            async for stop in self._partition(number)
            if set_aside or stop.code != SET_ASIDE
        ]

    async def set_aside(self) -> list[Found]:
        """Return the records that stop nothing, as `find`, without reading half messages and
        markers, of which there may be many.

        Raises:
            ConfigurationError, KafkaUnavailable: as `find`.
        """
        found = []
        for number in await self._partitions():
            scan = await read_checkpoint(self._reader(CHECKPOINT, number))
            stops = [*_in_checkpoint(scan), *await self._in_parked(number, scan)]
            found += [Found(self._topics[stop.log], number, stop) for stop in stops]
        return [one for one in found if one.stop.code == SET_ASIDE]

    async def _partitions(self) -> list[int]:
        topic = self._client.settings.half_topic
        facts = (await self._client.refresh([topic])).get(topic)
        if facts is None or not facts.partitions:
            raise ConfigurationError(f"there is no topic {topic}: see topic_prefix")
        return sorted(facts.partitions)

    def _reader(self, log: str, number: int) -> Reader:
        topic = self._topics[log]
        return Reader(self._client, topic, number, f"{_CHANNEL}/{log}", producers=True)

    async def _partition(self, number: int) -> AsyncIterator[Stop]:
        scan = await read_checkpoint(self._reader(CHECKPOINT, number))
        for stop in _in_checkpoint(scan):
            yield stop
        op, half = self._reader("op", number), self._reader("half", number)
        # From where the next owner replays them.
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
        return stops + [_set_aside("parked", each) for each in parked.set_aside]

    async def skip(self, found: Found, by: str, reason: str) -> None:
        """Record that a record is passed over: by the next owner of its partition, and by one
        that has stopped.

        Raises:
            KafkaUnavailable: Kafka does not answer; it may or may not be recorded.
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
    # One that is set aside may stop the partition, as progress is lost.
    offsets = {stop.record.offset for stop in stops}
    aside = [each for each in scan.set_aside() if each.record.offset not in offsets]
    return stops + [_set_aside(CHECKPOINT, each) for each in aside]


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
    """Return how a newer version shows in a record, "" where it does not."""
    try:
        decode_log(log, record)
    except NewerVersion as error:
        return str(error)
    except Malformed:
        pass
    return ""
