"""Records and positions in Kafka transactions of one transactional id.

A transaction is open from the first request of `write` or `commit` until `commit` or `abort` has an
answer. After any other end whether it is open is unknown, and the writer must be claimed again:
that aborts or completes it, in both versions of the transaction protocol.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence

from txbroker.core.records import Record
from txbroker.door.delivering import PositionScan, claim_record
from txbroker.door.writing import (
    Copy,
    Fenced,
    GroupOffsets,
    Partition,
    PositionRecord,
    Refused,
    Unknown,
    Writer,
)
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.kafka.client.acls import consumers_transactional_id
from txbroker.kafka.client.client import Client, KafkaRefused
from txbroker.kafka.client.groups import store_offsets
from txbroker.kafka.client.producer import BatchRefused, BatchUnknown, Producer, ProducerFenced
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.protocol.batch import batch_body
from txbroker.kafka.protocol.codes import RECORDS_REFUSED, TOPIC_REFUSED, TRANSACTION_BROKEN
from txbroker.kafka.protocol.copies import Batch, Batches, RefusedBatch, cause_of
from txbroker.net.timers import Backoff

POSITIONS_PARTITION = 0
"""The topic has one partition: with more, a position would be where its successor does not look."""
_PAUSE_S = 0.002
"""Between attempts while the transaction before is completed, which takes some milliseconds."""
_WINDOW = 1000
"""Offsets that are read first for a position, from the end backwards; then eight times as many."""


class TransactionalWriter(Writer):
    """A `Writer` on a real Kafka.

    Args:
        channel: name of its connections; the part before the first `/` names its failpoints.
        position: the record that `claim` returns and `commit` replaces; None: there is none.
        take: take a position that is not proved.
        alone: no other process knows the transactional id, so only a timeout fences this writer.
    """

    def __init__(
        self,
        client: Client,
        transactional_id: str,
        channel: str,
        position: PositionRecord | None = None,
        *,
        take: bool = False,
        alone: bool = False,
    ) -> None:
        self._client = client
        self._settings = client.settings
        self._transactional_id = transactional_id
        self._channel = channel
        self._points = channel.partition("/")[0]
        self._position = position
        self._take_any = take
        self._alone = alone
        self._producer: Producer | None = None
        self.unsettled = False
        """A transaction may be open, or be completed: claim."""
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
        """See `Writer.look`."""
        with self._explained("look"):
            known = await self._new_producer().known_id(self._claim_backoff())
        found = (await self._scan({known})).position(take=self._take_any)
        return found.value if found is not None else None

    async def claim(self) -> bytes | None:
        """See `Writer.claim`.

        The position is read to the offset of the claim record: a deposed leader that shows as much
        has all that is before it. The transaction of the claim is open meanwhile, so that the
        position is stored again together with the claim, or not at all.
        """
        self._producer, self.unsettled = None, True
        self._claimed_by = -1
        self._drop()
        producer, backoff = self._new_producer(), self._claim_backoff()
        if self._position is None:
            with self._explained("claim"):
                await producer.start(backoff)
            self._keep(producer)
            return None
        with self._explained("claim"):
            before = await producer.known_id(backoff)
            await producer.start(backoff)
            failpoint("relay.fenced")
            stored = await self._write_claim(producer, backoff, [self._claim_record(after=False)])
        scan = await self._scan({before, producer.id}, stored, backoff)
        try:
            found = scan.position(take=self._take_any)
        except ConfigurationError:
            with contextlib.suppress(KafkaUnavailable, ProducerFenced):
                await _abort(producer, backoff)
            raise
        with self._explained("claim"):
            if found is not None:
                records = [self._claim_record(after=True)]
                if scan.is_overwritten(found, producer.id):
                    records.append(Record(found.key, found.value))
                await self._write_claim(producer, backoff, records)
                self._claimed_by = producer.id
            await producer.end(commit=True, backoff=backoff)
        failpoint("relay.claimed")
        self._keep(producer)
        return found.value if found is not None else None

    async def _write_claim(
        self, producer: Producer, backoff: Backoff, records: Sequence[Record]
    ) -> int:
        """Write records of the position; return the first offset."""
        at = self._positions_at
        try:
            await producer.add([at], backoff)
            return (await producer.produce({at: batch_body(records)}, backoff))[at].base_offset
        except BatchRefused as error:
            raise ConfigurationError(
                f"{error}: a relay keeps its position there: create the topic, or grant this login "
                "Read and Write on it"
            ) from None

    @property
    def _positions_at(self) -> Partition:
        assert self._position is not None
        return self._position.topic, POSITIONS_PARTITION

    def _claim_record(self, *, after: bool) -> Record:
        """Return the record of a claim; `after`: a position is stored with it, or before it."""
        assert self._position is not None
        return claim_record(self._position.key.encode(), position=after)

    def _new_producer(self) -> Producer:
        return Producer(self._client, self._channel, self._transactional_id)

    async def _scan(
        self, producers: set[int], end: int | None = None, backoff: Backoff | None = None
    ) -> PositionScan:
        """Let a scan read backwards.

        Args:
            producers: of the transactional id; -1: none.
            end: the offset at which it begins; None: the last stable offset.
            backoff: pauses while an open transaction hides records.
        """
        assert self._position is not None
        at, key = self._positions_at, self._position.key.encode()
        channel = f"{self._channel}/position"
        reader = Reader(self._client, *at, channel, append_time=False, producers=True)
        scan = PositionScan(self._transactional_id, at[0], key, producers - {-1})
        high = await reader.stable_end() if end is None else end
        begin, size = await reader.start(), _WINDOW
        while high > begin:
            low = max(begin, high - size)
            try:
                mine = [
                    record
                    async for records in reader.read(low, high)
                    for record in records
                    if record.key is not None and record.key.startswith(key)
                ]
            except KafkaUnavailable:
                if backoff is None or not await backoff.pause():
                    raise
                continue
            if scan.note(mine):
                break
            high, size = low, size * 8
        return scan

    @property
    def claimed(self) -> bool:
        """Whether it may be used."""
        return self._producer is not None

    # --- transactions ------------------------------------------------------------------------

    async def write(self, copies: Sequence[Copy]) -> None:
        """See `Writer.write`."""
        if self._pending:
            await self._send(self._pending)
            self._sent += len(self._pending)
        self._pending = copies

    async def abort(self) -> None:
        """See `Writer.abort`."""
        sent = self._sent
        self._drop()
        if sent:
            with self._using("abort") as producer:
                await _abort(producer, self._backoff())

    async def commit(
        self, position: bytes | None = None, offsets: Sequence[GroupOffsets] = ()
    ) -> None:
        """See `Writer.commit`."""
        if not self._sent:
            with self._using("commit") as producer:
                await producer.replace_exhausted(self._backoff())
        records, claiming = [], self._producer.id if self._producer is not None else -1
        if position is not None and self._position is not None:
            records.append(Record(self._position.key.encode(), position))
            if claiming != self._claimed_by:
                records.insert(0, self._claim_record(after=True))
        await self._send([*self._pending, *(Copy(*self._positions_at, one) for one in records)])
        written_by = self._producer.id if self._producer is not None else -1
        with self._using("commit") as producer:
            await self._store(producer, offsets)
            failpoint(f"{self._points}.ending")
            await producer.end(commit=True, backoff=self._backoff())
        self._drop()
        failpoint(f"{self._points}.ended")
        # Not if Kafka has given another id after a refusal.
        if records:
            self._claimed_by = claiming if written_by == claiming else -1

    async def _store(self, producer: Producer, offsets: Sequence[GroupOffsets]) -> None:
        for each in offsets:
            failpoint(f"{self._points}.copied")
            backoff = self._backoff()
            try:
                await producer.add_group(each.group, backoff)
                await store_offsets(self._client, each, producer.offset_commit, backoff)
            except Fenced:
                self._drop()
                # If this fails, the next claim aborts it.
                with contextlib.suppress(KafkaUnavailable, ProducerFenced):
                    await _abort(producer, backoff)
                    self._keep(producer)
                raise

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
                self._drop()
                if found:
                    raise Refused(mine, cause_of(refused.why))
                raise Unknown(f"{refused.why}: the transaction begins again, in smaller batches")

    async def _try(self, rounds: Sequence[Mapping[Partition, Batch]]) -> RefusedBatch | None:
        """Write batches, at most one to a partition in each round; or abort the transaction and
        return a batch that was refused."""
        self._begun_s = self._begun_s or time.monotonic()
        backoff = self._backoff()
        with self._using("write") as producer:
            for batches in rounds:
                try:
                    await producer.add(list(batches), backoff)
                    await producer.produce({at: one.body for at, one in batches.items()}, backoff)
                except BatchRefused as error:
                    if error.code in TRANSACTION_BROKEN:
                        why = f"the transaction of {self._transactional_id} ended: {error}"
                        raise Unknown(why) from None
                    if error.code not in TOPIC_REFUSED | RECORDS_REFUSED:
                        why = f"{self._transactional_id} cannot write: {error}"
                        raise KafkaRefused(error.code, why) from None
                    await _abort(producer, backoff)
                    self._begun_s = 0.0
                    return RefusedBatch(batches[error.partition], error)
        return None

    # --- the producer ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _using(self, what: str) -> Iterator[Producer]:
        """Take the producer, and give it back after success alone: otherwise the transaction may
        be open."""
        producer, self._producer = self._producer, None
        if producer is None:
            raise Unknown(f"{self._transactional_id} is not claimed")
        self.unsettled = True
        with self._explained(what):
            yield producer
        self._keep(producer)

    def _keep(self, producer: Producer) -> None:
        self._producer, self.unsettled = producer, False
        self._longest_s = producer.transaction_timeout_s

    def _drop(self) -> None:
        """Forget the records of the transaction."""
        self._pending, self._sent, self._begun_s = (), 0, 0.0

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
            if self._alone:
                raise Unknown(f"{self._transactional_id}: {what} unknown: fenced") from None
            raise Fenced(
                f"another process has claimed {self._transactional_id}: this one stops"
            ) from None
        except BatchUnknown as error:
            raise Unknown(f"{self._transactional_id}: {what} unknown: {error}") from None

    def _claim_backoff(self) -> Backoff:
        return Backoff(self._settings.claim_timeout_s, self._settings.retry_backoff_s)

    def _backoff(self) -> Backoff:
        return Backoff(self._settings.write_timeout_s, _PAUSE_S)


async def _abort(producer: Producer, backoff: Backoff) -> None:
    await producer.end(commit=False, backoff=backoff)
    await producer.renew(backoff)


def group_writer(client: Client, group: str) -> TransactionalWriter:
    """Return a writer of copies and offsets of a group, not claimed."""
    id = consumers_transactional_id(group) + secrets.token_hex(8)
    return TransactionalWriter(client, id, "consumer/copies", alone=True)
