"""Records and positions in Kafka transactions of one transactional id.

A transaction is open from the first request of `write` or `commit` until `commit` or `abort` has an
answer. After any other end whether it is open is unknown, and the writer must be claimed again:
that aborts or completes it, in both versions of the transaction protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from txbroker.core.records import Cause, Partition, Record
from txbroker.door.delivering import PositionScan, claim_record
from txbroker.door.writing import (
    Copy,
    Fenced,
    GroupOffsets,
    PositionRecord,
    Refused,
    Unknown,
    Writer,
)
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.kafka.client.acls import consumers_transactional_id
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.groups import store_offsets
from txbroker.kafka.client.producer import BatchRefused, BatchUnknown, Producer, ProducerFenced
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.protocol.batch import batch_body
from txbroker.kafka.protocol.codes import (
    PRODUCER_LOST,
    RECORDS_REFUSED,
    RETRIABLE,
    TOPIC_REFUSED,
    TRANSACTION_BROKEN,
)
from txbroker.kafka.protocol.copies import Batch, Batches, RefusedBatch, cause_of, default_bytes
from txbroker.net.timers import Backoff

POSITIONS_PARTITION = 0
"""The topic has one partition: with more, a position would be where its successor does not look."""
_REFUSALS = TOPIC_REFUSED | RECORDS_REFUSED
PAUSE_S = 0.001
_ABORT_S = 1.0
_WINDOW = 1000
"""Offsets that are read first for a position, from the end backwards; then eight times as many."""


class WriterTraits(Struct, frozen=True):
    """How a writer treats time, refusals and fencing.

    Attributes:
        points: names its failpoints.
        take: take a position that is not proved.
        alone: no other process knows the transactional id, so only a timeout fences the writer.
        bytes_max: returns the size of a topic's batches, bytes. A batch that is refused then ends
            the transaction as it is; otherwise smaller ones show which records are at fault.
        write_s: to add partitions, and to write one batch to each; None: `write_timeout_s`.
        end_s: to commit; None: `write_timeout_s`.
        pause_max_s: between attempts. Mostly these wait until the transaction before is completed,
            which takes some milliseconds.
    """

    points: str
    take: bool = False
    alone: bool = False
    bytes_max: Callable[[str], int] | None = None
    write_s: float | None = None
    end_s: float | None = None
    pause_max_s: float = 0.25


class TransactionalWriter(Writer):
    """A `Writer` on a real Kafka.

    Args:
        channel: name of its connections.
        position: the record that `claim` returns and `commit` replaces; None: there is none.
    """

    def __init__(
        self,
        client: Client,
        transactional_id: str,
        channel: str,
        traits: WriterTraits,
        position: PositionRecord | None = None,
    ) -> None:
        self._client = client
        self._settings = client.settings
        self._transactional_id = transactional_id
        self._channel = channel
        self._traits = traits
        topic, key = ("", "") if position is None else position
        self._at: Partition = (topic, POSITIONS_PARTITION)
        self._key = key.encode()
        self.producer = Producer(client, channel, transactional_id)
        self.claimed = False
        """The writer may be used."""
        self._pending: Sequence[Copy] = ()
        """Written with the next call: in one request with the position, if that follows."""
        self._claimed_by = -1
        """The producer of the newest claim that follows a position."""
        self._sent = 0
        """Records of the open transaction that `_pending` does not hold."""
        self._begun_s = 0.0
        """When the open transaction began; 0: none is open."""
        self._limits: dict[str, int] = {}
        """Sizes of batches by topic, see `Batches`."""
        self._single: set[str] = set()
        """Topics whose batches hold one record, until it is known which one is refused."""

    # --- claim -------------------------------------------------------------------------------

    async def look(self) -> bytes | None:
        """See `Writer.look`."""
        with self._explained("look"):
            known = await self.producer.known_id(self._backoff(self._settings.claim_timeout_s))
        found = (await self._scan({known})).position(take=self._traits.take)
        return found.value if found is not None else None

    async def claim(self, backoff: Backoff | None = None) -> bytes | None:
        """See `Writer.claim`.

        The position is read to the offset of the claim record: a deposed leader that shows as much
        has all that is before it. The transaction of the claim is open meanwhile, so that the
        position is stored again together with the claim, or not at all.

        Args:
            backoff: None: for `claim_timeout_s`.
        """
        self.claimed, self._claimed_by = False, -1
        self._drop()
        producer, found = self.producer, None
        backoff = backoff or self._backoff(self._settings.claim_timeout_s)
        with self._explained("claim"):
            before = await producer.known_id(backoff) if self._key else -1
            await producer.start(backoff)
            if self._key:
                found = await self._claim_position({before, producer.id}, backoff)
        self._drop()
        self.claimed = True
        return found.value if found is not None else None

    async def _claim_position(self, producers: set[int], backoff: Backoff) -> Record | None:
        producer = self.producer
        failpoint("relay.fenced")
        self._begun_s = time.monotonic()
        stored = await self._write_claim([claim_record(self._key, position=False)], backoff)
        scan = await self._scan(producers, stored, backoff)
        found = scan.position(take=self._traits.take)
        if found is not None:
            records = [claim_record(self._key, position=True)]
            if scan.is_overwritten(found, producer.id):
                records.append(Record(found.key, found.value))
            await self._write_claim(records, backoff)
            self._claimed_by = producer.id
        await producer.end(commit=True, backoff=backoff)
        failpoint("relay.claimed")
        return found

    async def _write_claim(self, records: Sequence[Record], backoff: Backoff) -> int:
        """Write records of the position; return the first offset."""
        producer, at = self.producer, self._at
        try:
            await producer.add([at], backoff)
            return (await producer.produce({at: batch_body(records)}, backoff))[at].base_offset
        except BatchRefused as error:
            if error.code not in _REFUSALS:
                raise
            raise ConfigurationError(
                f"{error}: a relay keeps its position there: create the topic, or grant this login "
                "Read and Write on it"
            ) from None

    async def _scan(
        self, producers: set[int], end: int | None = None, backoff: Backoff | None = None
    ) -> PositionScan:
        """Let a scan read backwards.

        Args:
            producers: of the transactional id; -1: none.
            end: the offset at which it begins; None: the last stable offset.
            backoff: pauses while an open transaction hides records.
        """
        channel = f"{self._channel}/position"
        reader = Reader(self._client, *self._at, channel, append_time=False, producers=True)
        scan = PositionScan(self._transactional_id, self._at[0], self._key, producers - {-1})
        high = await reader.stable_end() if end is None else end
        begin, size = await reader.start(), _WINDOW
        while high > begin:
            low = max(begin, high - size)
            try:
                mine = [
                    record
                    async for records in reader.read(low, high)
                    for record in records
                    if record.key is not None and record.key.startswith(self._key)
                ]
            except KafkaUnavailable:
                if backoff is None or not await backoff.pause():
                    raise
                continue
            if scan.note(mine):
                break
            high, size = low, size * 8
        return scan

    # --- transactions ------------------------------------------------------------------------

    async def write(self, copies: Sequence[Copy]) -> None:
        """See `Writer.write`."""
        self._check_claimed()
        if self._pending:
            await self.send(self._pending)
        self._pending = copies

    async def abort(self) -> None:
        """See `Writer.abort`."""
        if not self.claimed:
            await self.give_up()
        elif self._sent:
            with self._using("abort") as producer:
                await producer.abort(self._backoff())
        self._drop()

    async def commit(
        self,
        position: bytes | None = None,
        offsets: Sequence[GroupOffsets] = (),
        backoff: Backoff | None = None,
    ) -> None:
        """See `Writer.commit`; `backoff`: of the end, in place of that of the traits."""
        if not self._sent:
            with self._using("commit") as producer:
                await producer.replace_exhausted(self._backoff())
        records, claiming = [], self.producer.id
        if position is not None:
            records.append(Record(self._key, position))
            if claiming != self._claimed_by:
                records.insert(0, claim_record(self._key, position=True))
        if records or self._pending:
            own = [Copy(*self._at, record) for record in records]
            await self.send([*self._pending, *own], own=len(own))
        written_by = self.producer.id
        with self._using("commit") as producer:
            await self._store(producer, offsets)
            failpoint(f"{self._traits.points}.ending")
            backoff = backoff or self._backoff(self._traits.end_s)
            await producer.end(commit=True, backoff=backoff)
        self._drop()
        self._single.clear()
        failpoint(f"{self._traits.points}.ended")
        # Not if Kafka has given another id after a refusal.
        if records:
            self._claimed_by = claiming if written_by == claiming else -1

    async def _store(self, producer: Producer, offsets: Sequence[GroupOffsets]) -> None:
        for each in offsets:
            failpoint(f"{self._traits.points}.copied")
            backoff = self._backoff()
            try:
                await producer.add_group(each.group, backoff)
                make, again = producer.offset_commit, producer.retries_unanswered
                await store_offsets(self._client, each, make, backoff, again=again)
            except Fenced:
                self._drop()
                # If this fails, the next claim aborts it.
                with contextlib.suppress(KafkaUnavailable, ProducerFenced):
                    await producer.abort(backoff)
                    self.claimed = True
                raise

    async def send(
        self, copies: Sequence[Copy], backoff: Backoff | None = None, own: int = 0
    ) -> list[int]:
        """Write records at once, see `write`; return their offsets, -1 where one is unknown.

        Args:
            backoff: in place of those of the traits.
            own: the number of the last records that are the writer's.
        """
        passed = len(copies) - own
        limits = (
            {**self._limits, **dict.fromkeys(self._single, 1)} if self._single else self._limits
        )
        batches = Batches(limits, self._traits.bytes_max or default_bytes)
        while True:
            offsets = [-1] * len(copies)
            refused = await self._try(batches.rounds(copies), offsets, backoff)
            if refused is None:
                self._pending, self._sent = (), self._sent + passed
                return offsets
            found = batches.refused(refused, copies)
            # Otherwise with smaller batches, until a batch holds nothing but refused copies.
            if found or self._sent:
                mine = [self._sent + index for index in found if index < passed]
                self._drop()
                if found:
                    self._single.clear()
                    raise Refused(mine, cause_of(refused.why))
                self._single.add(refused.why.partition[0])
                self.claimed = False
                raise Unknown(f"{refused.why}: the transaction begins again, in smaller batches")

    async def _try(
        self,
        rounds: Sequence[Mapping[Partition, Batch]],
        offsets: list[int],
        backoff: Backoff | None,
    ) -> RefusedBatch | None:
        """Write batches, at most one to a partition in each round; or abort the transaction and
        return a batch that was refused.

        Args:
            offsets: takes those of the records.
        """
        traits, batches = self._traits, rounds[0]
        self._begun_s = self._begun_s or time.monotonic()
        with self._using("write") as producer:
            within = backoff or self._backoff(traits.write_s)
            try:
                await producer.add(list(batches), within)
                failpoint(f"{traits.points}.begun")
                for batches in rounds:
                    within = backoff or self._backoff(traits.write_s)
                    bodies = {at: one.body for at, one in batches.items()}
                    for at, where in (await producer.produce(bodies, within)).items():
                        if where.base_offset >= 0:
                            for offset, index in enumerate(batches[at].indexes, where.base_offset):
                                offsets[index] = offset
                failpoint(f"{traits.points}.produced")
            except BatchRefused as error:
                whole = traits.bytes_max is not None
                if error.code in PRODUCER_LOST or (not whole and error.code not in _REFUSALS):
                    raise
                refused = RefusedBatch(batches[error.partition], error)
                if whole:
                    raise Refused(refused.batch.indexes, cause_of(error)) from None
                await producer.abort(self._backoff())  # `within` may be used up
                self._begun_s = 0.0
                return refused
        return None

    async def give_up(self) -> None:
        """Abort what may be open, so that readers do not wait for the next claim, which is needed
        in any case. It fences no later producer."""
        self.claimed, backoff = False, self._backoff(_ABORT_S)
        with contextlib.suppress(ProducerFenced, KafkaUnavailable, TimeoutError):
            await asyncio.wait_for(self.producer.end(commit=False, backoff=backoff), _ABORT_S)

    # --- the producer ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _using(self, what: str) -> Iterator[Producer]:
        """Yield the producer, which may be used again after success alone: otherwise the
        transaction may be open."""
        self._check_claimed()
        self.claimed = False
        with self._explained(what):
            yield self.producer
        self.claimed = True

    def _check_claimed(self) -> None:
        if not self.claimed:
            raise Unknown(f"{self._transactional_id} is not claimed")

    @property
    def unsettled(self) -> bool:
        """Whether a transaction may be open, or be completed: claim."""
        return not self.claimed and self.producer.id >= 0

    def _drop(self) -> None:
        """Forget the records of the transaction."""
        self._pending, self._sent, self._begun_s = (), 0, 0.0

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        id = self._transactional_id
        try:
            yield
        except ProducerFenced:
            longest_s = self.producer.transaction_timeout_s
            if self._begun_s and time.monotonic() - self._begun_s > longest_s:
                raise Unknown(
                    f"{id}: Kafka has aborted the transaction after {longest_s:g} s: this process "
                    "was paused, another transaction hid the position, or this one has too many "
                    "rows: divide it"
                ) from None
            now_s = asyncio.get_running_loop().time()
            if self._traits.alone or now_s < self.producer.late_until_s:
                raise Unknown(f"{id}: {what} unknown: Kafka has ended the transaction") from None
            raise Fenced(f"another process has claimed {id}: this one stops") from None
        except BatchRefused as error:
            lasting = error.code not in RETRIABLE | TRANSACTION_BROKEN
            raise Unknown(f"{id} cannot write: {error}", lasting=lasting) from None
        except BatchUnknown as error:
            topic, number = error.partition
            why = f"its leader does not answer: {error}"
            cause = Cause("no_answer", why, topic, number, passing=True)
            raise Unknown(f"{id}: {what} unknown: {error}", cause) from None
        except (Refused, Fenced, Unknown):
            raise
        except KafkaUnavailable as error:
            raise Unknown(str(error), lasting=error.lasting) from None

    def _backoff(self, seconds: float | None = None) -> Backoff:
        seconds = self._settings.write_timeout_s if seconds is None else seconds
        return Backoff(seconds, PAUSE_S, self._traits.pause_max_s)


def group_writer(client: Client, group: str) -> TransactionalWriter:
    """Return a writer of copies and offsets of a group, not claimed."""
    id = consumers_transactional_id(group) + secrets.token_hex(8)
    return TransactionalWriter(client, id, "group/copies", WriterTraits("consumer", alone=True))
