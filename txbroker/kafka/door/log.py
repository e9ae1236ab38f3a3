"""A partition of one of txbroker's topics: appended in batches, read by offset."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

from txbroker.core.records import Record
from txbroker.door.protocols import Appended, AppendRefused, AppendUnknown, Log
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.producer import BatchRefused, BatchUnknown, Producer, ProducerFenced
from txbroker.kafka.client.reader import Picker, Reader
from txbroker.kafka.client.shared_writes import SharedWrites
from txbroker.kafka.protocol.batch import batch_body
from txbroker.kafka.protocol.codes import SEQUENCE_LOST
from txbroker.net.timers import Backoff

_NEW_PRODUCERS_MAX = 2
_BATCH_BYTES = 1_000_000
"""A bit less than the default of `max.message.bytes`."""
_LARGE_BYTES = (1 << 31) - 1


class RecordsRefused(KafkaUnavailable):
    """A broker refused records: the message holds its reason."""

    lasting = True


class KafkaLog(Log):
    """A `Log` on a real Kafka; `shared` combines its batches with those of other logs."""

    def __init__(
        self,
        client: Client,
        topic: str,
        partition: int,
        channel: str,
        batch_bytes_max: int,
        shared: SharedWrites | None = None,
    ) -> None:
        self.batch_bytes_max = batch_bytes_max
        self._client = client
        self._at = (topic, partition)
        self._channel = channel
        # The last part of the channel names the content, as failpoints do.
        name = channel.rpartition("/")[2]
        self._sending, self._stored = f"{name}.sending", f"{name}.stored"
        self._ends = Reader(client, topic, partition, f"{channel}/ends")
        self._picker = Picker(lambda name: Reader(client, topic, partition, f"{channel}/{name}"))
        self._reads = itertools.count()
        self._shared = shared
        self._producer: Producer | None = None

    async def append(self, records: Sequence[Record]) -> Appended:
        """Append records as one batch: acks=all, idempotent. One call at a time."""
        body = batch_body(records)
        if body.batch_bytes > self.batch_bytes_max:
            raise AppendRefused(
                f"topic {self._at[0]} takes batches of {self.batch_bytes_max} bytes at most, this "
                f"one has {body.batch_bytes}: raise max.message.bytes, or send less"
            )
        settings = self._client.settings
        backoff = Backoff(settings.write_timeout_s, settings.retry_backoff_s)
        # Reused only after success: after an error, a cancelled call or a sequence that the broker
        # lost, only a new producer id is safe.
        producer, self._producer = self._producer, None
        for _attempt in range(_NEW_PRODUCERS_MAX):
            try:
                if producer is None:
                    producer = Producer(
                        self._client, f"{self._channel}/append", shared=self._shared
                    )
                    await producer.start(backoff)
                failpoint(self._sending)
                stored = (await producer.produce({self._at: body}, backoff))[self._at]
                failpoint(self._stored)
            except BatchRefused as error:
                if error.code not in SEQUENCE_LOST:
                    raise AppendRefused(str(error)) from None
                producer = None
            except (BatchUnknown, ProducerFenced, KafkaUnavailable) as error:
                raise AppendUnknown(str(error)) from None
            else:
                self._producer = producer
                return Appended(*stored)
        raise AppendUnknown(f"{self._at[0]}-{self._at[1]} refuses new producer ids: retry")

    async def bounds(self, *, confirmed: bool = True) -> tuple[int, int]:
        """Return the log start offset and the offset of the next record.

        Unless `confirmed`, records acknowledged by a newer leader may be missing.
        """
        end = await self._ends.end(confirmed=confirmed)
        # After the end, so that the confirmed leader is asked.
        return await self._ends.start(), end

    async def read(
        self, start: int, end: int, skipped: Callable[[range], None] | None = None
    ) -> AsyncIterator[Sequence[Record]]:
        """Yield records; see `Reader.read`."""
        # A dedicated channel each: the owner's catch-up must not wait for the scan of a search.
        channel = f"{self._channel}/read{next(self._reads)}/"
        reader = Reader(self._client, *self._at, channel, producers=True)
        try:
            async with aclosing(reader.read(start, end, skipped)) as pieces:
                async for records in pieces:
                    yield records
        finally:
            self._client.close_channels(channel)

    async def pick(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Return records by offset; see `Picker.pick`."""
        return await self._picker.pick(offsets)


async def append_records(
    client: Client, topic: str, partition: int, records: Sequence[Record]
) -> None:
    """Append records outside of a transaction, in batches that topics take by default.

    Raises:
        RecordsRefused: a broker refused a batch; earlier ones are stored.
        KafkaUnavailable: a batch may or may not be stored.
    """
    log = KafkaLog(client, topic, partition, "append/records", _LARGE_BYTES)
    while records:
        count = batch_body(records, _BATCH_BYTES).count
        try:
            await log.append(records[:count])
        except AppendRefused as error:
            raise RecordsRefused(str(error)) from None
        except AppendUnknown as error:
            raise KafkaUnavailable(str(error)) from None
        records = records[count:]
