"""Deliveries of a relay: records and their position, in Kafka transactions of one producer."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from txbroker.core.records import Record
from txbroker.door.consuming import Copy, CopyRefused, Partition
from txbroker.door.delivering import DeliveryWriter, WriterFenced
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.producer import BatchRefused, BatchUnknown, Producer, ProducerFenced
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.door.group_offsets import write_rounds
from txbroker.kafka.protocol.batch import batch_body
from txbroker.kafka.protocol.copies import Batch, Batches, RefusedBatch
from txbroker.net.timers import Backoff

POSITIONS_PARTITION = 0
"""The topic has one partition: with more, a position would be where its successor does not look."""
_PAUSE_S = 0.002
"""Between attempts while the transaction before is completed, which takes some milliseconds."""
_WINDOW = 1000
"""Offsets that are read first for a position, from the end backwards; then eight times as many."""


class KafkaDeliveryWriter(DeliveryWriter):
    """A `DeliveryWriter` on a real Kafka.

    Args:
        transactional_id: of the producer.
        topic: the compacted topic of positions.
        key: of the positions.
    """

    def __init__(self, client: Client, transactional_id: str, topic: str, key: str) -> None:
        self._client = client
        self._settings = client.settings
        self._transactional_id = transactional_id
        self._at = (topic, POSITIONS_PARTITION)
        self._key = key.encode()
        self._channel = f"relay/{transactional_id}"
        self._reader = Reader(client, *self._at, f"{self._channel}/position", append_time=False)
        self._producer: Producer | None = None
        self._pending: Sequence[Copy] = ()
        """Written with the next call: in one request with the position, if that follows."""
        self._sent = False
        """The open transaction holds records that `_pending` does not."""
        self._begun_s = 0.0
        """When the open transaction began; 0: none is open."""
        self._limits: dict[str, int] = {}
        """Sizes of batches by topic, see `Batches`."""

    # --- claim -------------------------------------------------------------------------------

    async def look(self) -> bytes | None:
        """See `DeliveryWriter.look`."""
        return await self._last_before(await self._reader.stable_end())

    async def claim(self) -> bytes | None:
        """See `DeliveryWriter.claim`.

        The claim record proves that the position was read from the leader: a deposed one does not
        have it.
        """
        self._producer, self._pending, self._sent, self._begun_s = None, (), False, 0.0
        backoff = Backoff(self._settings.claim_timeout_s, self._settings.retry_backoff_s)
        producer = Producer(self._client, self._channel, self._transactional_id)
        with self._explained("claim"):
            await producer.start(backoff)
            failpoint("relay.fenced")
            await producer.add([self._at], backoff)
            claim = batch_body([self._record(b"/owner", _owner())])
            stored = (await producer.produce({self._at: claim}, backoff))[self._at]
            await producer.end(commit=True, backoff=backoff)
        failpoint("relay.claimed")
        position = await self._last_before(stored.base_offset + 1, backoff)
        self._producer = producer
        return position

    async def _last_before(self, end: int, backoff: Backoff | None = None) -> bytes | None:
        """Return the position before an offset.

        Args:
            backoff: pauses while an open transaction hides it.
        """
        while True:
            try:
                return await self._newest(end)
            except KafkaUnavailable:
                if backoff is None or not await backoff.pause():
                    raise

    async def _newest(self, end: int) -> bytes | None:
        begin, high, size = await self._reader.start(), end, _WINDOW
        while high > begin:
            low, found = max(begin, high - size), None
            async for records in self._reader.read(low, high):
                for record in records:
                    if record.key == self._key:
                        found = record
            if found is not None:
                return found.value
            high, size = low, size * 8
        return None

    def _record(self, suffix: bytes, value: bytes) -> Record:
        return Record(self._key + suffix, value)

    # --- deliveries --------------------------------------------------------------------------

    async def write(self, copies: Sequence[Copy]) -> None:
        """See `DeliveryWriter.write`."""
        if self._pending:
            await self._send(self._pending)
            self._sent = True
        self._pending = copies

    async def abort(self) -> None:
        """See `DeliveryWriter.abort`."""
        sent, self._pending, self._sent = self._sent, (), False
        if sent:
            producer, backoff = self._take(), self._backoff()
            with self._explained("abort"):
                await _abort(producer, backoff)
            self._producer, self._begun_s = producer, 0.0

    async def commit(self, position: bytes) -> None:
        """See `DeliveryWriter.commit`."""
        place = Copy(*self._at, self._record(b"", position))
        await self._send([*self._pending, place])
        producer, self._pending, self._sent = self._take(), (), False
        failpoint("relay.ending")
        with self._explained("commit"):
            await producer.end(commit=True, backoff=self._backoff())
        failpoint("relay.ended")
        self._producer, self._begun_s = producer, 0.0

    async def _send(self, copies: Sequence[Copy]) -> None:
        batches = Batches(self._limits)
        while True:
            refused = await self._try(batches.rounds(copies))
            if refused is None:
                return
            found = batches.refused(refused, copies)
            # Otherwise with smaller batches, until a batch holds nothing but refused copies.
            if found or self._sent:
                self._pending, self._sent = (), False
                if found:
                    raise CopyRefused(str(refused), found)
                raise KafkaUnavailable(f"{refused}: the delivery begins again, in smaller batches")

    async def _try(self, rounds: Sequence[Mapping[Partition, Batch]]) -> RefusedBatch | None:
        """Write, or abort the transaction and return a refused batch."""
        producer = self._take()
        self._begun_s = self._begun_s or time.monotonic()
        backoff = Backoff(self._settings.write_timeout_s, _PAUSE_S)
        with self._explained("write"):
            refused = await write_rounds(producer, rounds, backoff, self._transactional_id)
            if refused is not None:
                await _abort(producer, backoff)
                self._begun_s = 0.0
        self._producer = producer
        return refused

    def _take(self) -> Producer:
        """Return the producer. Its user gives it back only after success: otherwise the
        transaction may be open."""
        producer, self._producer = self._producer, None
        if producer is None:
            raise KafkaUnavailable(f"{self._transactional_id} is not claimed")
        return producer

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except ProducerFenced:
            longest_s = self._settings.transaction_timeout_s
            if self._begun_s and time.monotonic() - self._begun_s > longest_s:
                raise KafkaUnavailable(
                    f"{self._transactional_id}: Kafka has aborted the transaction after "
                    f"{longest_s:g} s: the relay was paused, or a transaction of the database has "
                    "too many rows: divide it"
                ) from None
            raise WriterFenced(
                f"another process has claimed {self._transactional_id}: this one stops"
            ) from None
        except BatchUnknown as error:
            raise KafkaUnavailable(f"{self._transactional_id}: {what} unknown: {error}") from None
        except BatchRefused as error:
            raise ConfigurationError(
                f"{error}: a relay keeps its position there: create the topic, or grant this login "
                "Read and Write on it"
            ) from None

    def _backoff(self) -> Backoff:
        return Backoff(self._settings.write_timeout_s, self._settings.retry_backoff_s)


async def _abort(producer: Producer, backoff: Backoff) -> None:
    await producer.end(commit=False, backoff=backoff)
    await producer.renew(backoff)


def _owner() -> bytes:
    """Return who claims, for operators."""
    return msgspec.json.encode({"host": socket.gethostname(), "process": os.getpid()})
