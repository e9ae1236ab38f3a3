"""Deliveries of a relay: records and their position, in Kafka transactions of one producer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

from txbroker.core.records import Record
from txbroker.door.delivering import DeliveryWriter, PositionScan, claim_record
from txbroker.door.writing import Copy, Fenced, Partition, Refused, Unknown
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.producer import BatchRefused, BatchUnknown, Producer, ProducerFenced
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.door.group_offsets import write_rounds
from txbroker.kafka.protocol.batch import batch_body
from txbroker.kafka.protocol.copies import Batch, Batches, RefusedBatch, cause_of
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
        take: take a position that is not proved.
    """

    def __init__(
        self, client: Client, transactional_id: str, topic: str, key: str, *, take: bool
    ) -> None:
        self._client = client
        self._settings = client.settings
        self._transactional_id = transactional_id
        self._at = (topic, POSITIONS_PARTITION)
        self._key = key.encode()
        self._channel = f"relay/{transactional_id}"
        self._take_any = take
        self._reader = Reader(
            client, *self._at, f"{self._channel}/position", append_time=False, producers=True
        )
        self._producer: Producer | None = None
        self._pending: Sequence[Copy] = ()
        """Written with the next call: in one request with the position, if that follows."""
        self._claimed_by = -1
        """The producer of the newest claim that follows a position."""
        self._sent = 0
        """Records of the open transaction that `_pending` does not hold."""
        self._begun_s = 0.0
        """When the open transaction began; 0: none is open."""
        self._longest_s = self._settings.transaction_timeout_s
        self._limits: dict[str, int] = {}
        """Sizes of batches by topic, see `Batches`."""

    # --- claim -------------------------------------------------------------------------------

    async def look(self) -> bytes | None:
        """See `DeliveryWriter.look`."""
        producer, backoff = self._new_producer(), self._claim_backoff()
        with self._explained("look"):
            scan = self._scan({await producer.known_id(backoff)})
        await self._read(scan, await self._reader.stable_end())
        found = scan.position(take=self._take_any)
        return found.value if found is not None else None

    async def claim(self) -> bytes | None:
        """See `DeliveryWriter.claim`.

        The position is read to the offset of the claim record: a deposed leader that shows as much
        has all that is before it. The transaction of the claim is open meanwhile, so that the
        position is stored again together with the claim, or not at all.
        """
        self._producer, self._pending, self._sent, self._begun_s = None, (), 0, 0.0
        self._claimed_by = -1
        producer, backoff = self._new_producer(), self._claim_backoff()
        with self._explained("claim"):
            before = await producer.known_id(backoff)
            await producer.start(backoff)
            failpoint("relay.fenced")
            await producer.add([self._at], backoff)
            claim = batch_body([claim_record(self._key, position=False)])
            stored = (await producer.produce({self._at: claim}, backoff))[self._at]
        scan = self._scan({before, producer.id})
        await self._read(scan, stored.base_offset, backoff)
        try:
            found = scan.position(take=self._take_any)
        except ConfigurationError:
            with contextlib.suppress(KafkaUnavailable, ProducerFenced):
                await _abort(producer, backoff)
            raise
        with self._explained("claim"):
            if found is not None:
                records = [claim_record(self._key, position=True)]
                if scan.is_overwritten(found, producer.id):
                    records.append(Record(self._key, found.value))
                await producer.produce({self._at: batch_body(records)}, backoff)
                self._claimed_by = producer.id
            await producer.end(commit=True, backoff=backoff)
        failpoint("relay.claimed")
        self._producer = producer
        self._longest_s = producer.transaction_timeout_s
        return found.value if found is not None else None

    def _new_producer(self) -> Producer:
        return Producer(self._client, self._channel, self._transactional_id)

    def _claim_backoff(self) -> Backoff:
        return Backoff(self._settings.claim_timeout_s, self._settings.retry_backoff_s)

    def _scan(self, producers: set[int]) -> PositionScan:
        return PositionScan(self._transactional_id, self._at[0], self._key, producers - {-1})

    async def _read(self, scan: PositionScan, end: int, backoff: Backoff | None = None) -> None:
        """Let a scan read backwards from an offset.

        Args:
            backoff: pauses while an open transaction hides records.
        """
        begin, high, size = await self._reader.start(), end, _WINDOW
        while high > begin:
            low = max(begin, high - size)
            try:
                mine = [
                    record
                    async for records in self._reader.read(low, high)
                    for record in records
                    if record.key is not None and record.key.startswith(self._key)
                ]
            except KafkaUnavailable:
                if backoff is None or not await backoff.pause():
                    raise
                continue
            if scan.note(mine):
                return
            high, size = low, size * 8

    # --- deliveries --------------------------------------------------------------------------

    async def write(self, copies: Sequence[Copy]) -> None:
        """See `DeliveryWriter.write`."""
        if self._pending:
            await self._send(self._pending)
            self._sent += len(self._pending)
        self._pending = copies

    async def abort(self) -> None:
        """See `DeliveryWriter.abort`."""
        sent, self._pending, self._sent = self._sent, (), 0
        if sent:
            producer, backoff = self._take(), self._backoff()
            with self._explained("abort"):
                await _abort(producer, backoff)
            self._producer, self._begun_s = producer, 0.0

    async def commit(self, position: bytes) -> None:
        """See `DeliveryWriter.commit`."""
        producer, backoff = self._take(), self._backoff()
        with self._explained("commit"):
            if not self._sent:
                await producer.replace_exhausted(backoff)
        self._producer, claiming = producer, producer.id
        records = [Record(self._key, position)]
        if claiming != self._claimed_by:
            records.insert(0, claim_record(self._key, position=True))
        await self._send([*self._pending, *(Copy(*self._at, record) for record in records)])
        producer, self._pending, self._sent = self._take(), (), 0
        written_by = producer.id
        failpoint("relay.ending")
        with self._explained("commit"):
            await producer.end(commit=True, backoff=self._backoff())
        failpoint("relay.ended")
        # Not if Kafka has given another id after a refusal.
        self._claimed_by = claiming if written_by == claiming else -1
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
                mine = [self._sent + index for index in found if index < len(self._pending)]
                self._pending, self._sent = (), 0
                if found:
                    raise Refused(mine, cause_of(refused.why))
                raise Unknown(f"{refused.why}: the delivery begins again, in smaller batches")

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
            raise Unknown(f"{self._transactional_id} is not claimed")
        return producer

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except ProducerFenced:
            longest_s = self._longest_s
            if self._begun_s and time.monotonic() - self._begun_s > longest_s:
                raise Unknown(
                    f"{self._transactional_id}: Kafka has aborted the transaction after "
                    f"{longest_s:g} s: the relay was paused, or a transaction of the database has "
                    "too many rows: divide it"
                ) from None
            raise Fenced(
                f"another process has claimed {self._transactional_id}: this one stops"
            ) from None
        except BatchUnknown as error:
            raise Unknown(f"{self._transactional_id}: {what} unknown: {error}") from None
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
