"""One partition of the half or operation topic: appended batch by batch, read by offset."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from txbroker.core.records import Record
from txbroker.door.protocols import Appended, AppendRefused, AppendUnknown, Log
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.picker import Picker
from txbroker.kafka.client.producer import BatchRefused, BatchUnknown, Producer, ProducerFenced
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.client.shared_writes import SharedWrites
from txbroker.kafka.protocol.batch import batch_body
from txbroker.kafka.protocol.codes import SEQUENCE_LOST
from txbroker.net.backoff import Backoff

_NEW_PRODUCERS_MAX = 2


class KafkaLog(Log):
    """A `Log` on a real Kafka. With `shared`, its batches share requests."""

    def __init__(
        self,
        client: Client,
        topic: str,
        partition: int,
        lane: str,
        batch_bytes_max: int,
        shared: SharedWrites | None = None,
    ) -> None:
        self.batch_bytes_max = batch_bytes_max
        self._client = client
        self._at = (topic, partition)
        self._lane = f"{lane}/append"
        # Its last part says what is appended: half messages, markers, parts of a snapshot.
        name = lane.rpartition("/")[2]
        self._sending, self._stored = f"{name}.sending", f"{name}.stored"
        self._reader = Reader(client, topic, partition, f"{lane}/read", producers=True)
        self._picker = Picker(lambda name: Reader(client, topic, partition, f"{lane}/{name}"))
        self._shared = shared
        self._producer: Producer | None = None

    async def append(self, records: Sequence[Record]) -> Appended:
        """Append records as one batch: acks=all, idempotent. One call at a time.

        Raises:
            AppendRefused: certainly not stored; the next append may go on.
            AppendUnknown: may or may not be stored, now or a little later.
        """
        body = batch_body(records)
        if body.batch_bytes > self.batch_bytes_max:
            raise AppendRefused(
                f"{self._at[0]} takes batches of {self.batch_bytes_max} bytes, this one has "
                f"{body.batch_bytes}"
            )
        settings = self._client.settings
        backoff = Backoff(settings.write_timeout_s, settings.retry_backoff_s)
        # Until it is known how this ends the producer is nobody's: after an error, a cancelled
        # call or a sequence that the broker lost, only a new producer id is safe.
        producer, self._producer = self._producer, None
        for _attempt in range(_NEW_PRODUCERS_MAX):
            try:
                if producer is None:
                    producer = Producer(self._client, self._lane, shared=self._shared)
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
        raise AppendUnknown(f"{self._at[0]}-{self._at[1]} refuses every new producer id")

    async def bounds(self, *, sure: bool = True) -> tuple[int, int]:
        """Return the first offset that is kept and the offset that the next record will get.

        Unless `sure`, records may be missing that a leader unknown to us has acknowledged.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        end = await self._reader.end(sure=sure)
        # Behind it, as the leader is confirmed then.
        return await self._reader.start(), end

    def read(
        self, start: int, end: int, skipped: Callable[[range], None] | None = None
    ) -> AsyncIterator[Sequence[Record]]:
        """Yield the records from offset `start` up to, not including, `end`, in order; then tell
        `skipped` which offsets behind the last one hold none.

        Raises:
            LogTruncated: `start` is not kept any more, or the log ends before `end`.
            KafkaUnavailable: Kafka does not answer.
        """
        return self._reader.read(start, end, skipped)

    async def pick(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Return the records at these offsets; an offset that holds none (any more) is left out.

        Raises:
            KafkaUnavailable: Kafka does not answer.
            InvariantBroken: a batch is damaged.
        """
        return await self._picker.pick(offsets)
