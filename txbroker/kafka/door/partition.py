"""The door of one half partition: claim, turns, and what is kept in the parked topic."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from txbroker.core.encoding import encode_claim
from txbroker.core.records import Cause, Claim, Record
from txbroker.door.own_topics import CheckpointScan
from txbroker.door.protocols import (
    AppendUnknown,
    Claimed,
    Fenced,
    Hanging,
    Log,
    LogTruncated,
    PartitionDoor,
    PromotionTxn,
    PromotionTxnLost,
    PromotionTxnRefused,
)
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.picker import Picker
from txbroker.kafka.client.producer import (
    BatchRefused,
    BatchUnknown,
    Producer,
    ProducerFenced,
    Stored,
)
from txbroker.kafka.client.reader import Reader
from txbroker.kafka.client.shared_writes import SharedWrites
from txbroker.kafka.door.log import KafkaLog
from txbroker.kafka.door.open_transactions import HANGING, OpenTransactionGuard
from txbroker.kafka.door.pipelined_writer import PipelinedTxnWriter
from txbroker.kafka.door.promotion_txn import KafkaPromotionTxn
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.kafka.protocol.batch import batch_body
from txbroker.kafka.protocol.transactions import Partition
from txbroker.net.backoff import Backoff

_PAUSE_S = 0.002
_PAUSE_MAX_S = 0.1
_TRUNCATED_RETRIES = 3
_REST, _REST_MAX_S = 2.0, 0.1
"""Storing rests twice as long as it took, seconds at most."""

_NUMBERS = itertools.count()
"""So that closing an old door of a partition closes no connection of a new one."""


async def read_checkpoint(reader: Reader) -> CheckpointScan:
    """Read a partition of the checkpoint topic from its begin to its end.

    Args:
        reader: one that says which producers wrote the records.

    Raises:
        KafkaUnavailable: Kafka does not answer.
    """
    for _attempt in range(_TRUNCATED_RETRIES):
        scan = CheckpointScan(reader.name)
        start, end = await reader.start(), await reader.stable_end()
        try:
            async for records in reader.read(start, end):
                scan.note(records)
        except LogTruncated:
            continue  # the cleaner moved the begin while we read
        return scan
    raise KafkaUnavailable(f"{reader.name} keeps changing while it is read")


class KafkaPartitionDoor(PartitionDoor):
    """A `txbroker.door.protocols.PartitionDoor` on a real Kafka.

    Through `shared` the half partitions of a client append together, through `stable` they learn
    together what readers see.
    """

    half: Log
    op: Log

    def __init__(
        self,
        client: Client,
        partition: int,
        bytes_max: Callable[[str], int],
        refused: Callable[[Cause], None],
        shared: SharedWrites,
        stable: StableEnds,
    ) -> None:
        settings = client.settings
        self.partition = partition
        self._client = client
        self._settings = settings
        self._bytes_max = bytes_max
        self._refused = refused
        self._stable = stable
        self._lane = f"p{partition}.{next(_NUMBERS)}/"
        self.half = self._log(settings.half_topic, "half", shared)
        self.op = self._log(settings.op_topic, "op", shared)
        self._checkpoint_at: Partition = (settings.checkpoint_topic, partition)
        self._checkpoint = Reader(
            client, *self._checkpoint_at, f"{self._lane}checkpoint", producers=True
        )
        self._snapshots = self._log(settings.checkpoint_topic, "snapshots")
        self._parked = self._parked_reader("parked")
        self._parked_picker = Picker(self._parked_reader)
        self._writer: PipelinedTxnWriter | None = None
        self._ended: OpenTransactionGuard | None = None

    def _log(self, topic: str, name: str, shared: SharedWrites | None = None) -> KafkaLog:
        lane, bytes_max = self._lane + name, self._bytes_max(topic)
        return KafkaLog(self._client, topic, self.partition, lane, bytes_max, shared)

    def _parked_reader(self, lane: str) -> Reader:
        topic = self._settings.parked_topic
        lane = f"{self._lane}parked/{lane}"
        return Reader(self._client, topic, self.partition, lane, producers=True)

    # --- claim -------------------------------------------------------------------------------

    async def claimed_before(self) -> bool:
        """Say whether the checkpoint topic has ever held a record. Writes nothing.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        return await self.checkpoint_end() > 0

    async def checkpoint_end(self) -> int:
        """Return the offset that the next record of the checkpoint topic will get.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        return await self._checkpoint.end(sure=True)

    async def parked_before(self) -> bool:
        """Say whether the parked topic has ever held a record.

        Raises:
            KafkaUnavailable: Kafka does not answer.
        """
        return await self._parked.end(sure=True) > 0

    async def claim(self, claim: Claim) -> Claimed:
        """Fence every earlier owner, write the claim record, then read the progress.

        Both transactional ids are taken, always in the same order, and the claim record is
        committed on the first of them: if two claims succeed, the later one began after the
        earlier one's record, so the earlier owner is fenced on both before the later one reads.

        Raises:
            Fenced: another owner claimed at the same time; try again after a random pause.
            Hanging: a transaction that nobody ends hides the progress, or would be ended by the
                commit of the claim record.
            NewerRecord: a newer version wrote the progress.
            InvariantBroken: the progress does not read, or is lost.
            KafkaUnavailable: Kafka does not answer.
        """
        await self._retire()
        failpoint("claim.beginning")
        backoff = Backoff(self._settings.claim_timeout_s, _PAUSE_S, _PAUSE_MAX_S)
        producers = (self._producer("a"), self._producer("b"))
        try:
            for producer in producers:
                await producer.start(backoff)
                failpoint("claim.fenced")
            ended = OpenTransactionGuard(self._client, f"{self._lane}ended", producers)
            await self._all_ended(ended, backoff)
            stored = await self._write_claim(producers[0], claim, backoff)
        except ProducerFenced:
            raise Fenced("another owner claimed at the same time") from None
        except (BatchRefused, BatchUnknown) as error:
            raise KafkaUnavailable(f"the claim of partition {self.partition}: {error}") from None
        await self._seen(stored.base_offset)
        failpoint("claim.seen")
        claimed = await self._read_progress(claim)
        failpoint("claim.read")
        self._ended = ended
        self._writer = PipelinedTxnWriter(
            self._client, self.partition, producers, self._bytes_max, ended, self._stable
        )
        return claimed

    def _producer(self, side: str) -> Producer:
        transactional_id = f"{self._settings.half_topic}-{self.partition}-{side}"
        return Producer(self._client, self._lane + side, transactional_id)

    async def _all_ended(self, ended: OpenTransactionGuard, backoff: Backoff) -> None:
        """See that our own topics hold no open turn of an earlier claim: the commit of the claim
        record would end it too, and the progress of a turn that was aborted would count."""
        own = [self._checkpoint_at, (self._settings.parked_topic, self.partition)]
        while causes := await ended.verify_no_open_txn(own):
            for cause in causes:
                if cause.code == HANGING:
                    raise Hanging(cause.message)
            if not await backoff.pause():
                raise KafkaUnavailable(causes[0].message)

    async def _write_claim(self, producer: Producer, claim: Claim, backoff: Backoff) -> Stored:
        body = batch_body([encode_claim(claim)])
        await producer.add([self._checkpoint_at], backoff)
        stored = await producer.produce({self._checkpoint_at: body}, backoff)
        failpoint("claim.produced")
        await producer.end(commit=True, backoff=backoff)
        failpoint("claim.committed")
        return stored[self._checkpoint_at]

    async def _seen(self, offset: int) -> None:
        """Wait until `read_committed` readers get past an offset of the checkpoint topic."""
        try:
            await self._stable.pass_by(
                {self._checkpoint_at: offset}, self._settings.claim_timeout_s
            )
        except KafkaUnavailable:
            # Asked once more, because it may also have been Kafka that did not answer.
            wanted = offset + 1 if offset >= 0 else await self._checkpoint.end(sure=True)
            stable_end = await self._checkpoint.stable_end()
            if stable_end >= wanted:
                return
            raise Hanging(
                f"{self._checkpoint.name}: a transaction that nobody ends hides everything from "
                f"offset {stable_end} on; see `kafka-transactions.sh find-hanging`, "
                "and docs/operate/lost-end.md before anything is aborted"
            ) from None

    async def _read_progress(self, claim: Claim) -> Claimed:
        """Read to the end, because only our own record proves when the claim was."""
        return (await read_checkpoint(self._checkpoint)).claimed(claim)

    # --- snapshots ---------------------------------------------------------------------------

    async def store(self, records: Sequence[Record]) -> None:
        """Append records of a snapshot to the checkpoint topic, by a producer and over a
        connection of their own, and rest, so that turns keep their pace. One call at a time.

        Raises:
            AppendRefused: they are too large; nothing was stored.
            KafkaUnavailable: they may or may not be stored.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            await self._snapshots.append(records)
        except AppendUnknown as error:
            raise KafkaUnavailable(str(error)) from None
        # The same broker takes the turns' progress: leave it most of its time.
        await asyncio.sleep(min(_REST * (loop.time() - began_s), _REST_MAX_S))

    # --- turns -------------------------------------------------------------------------------

    def unverified(self, places: Collection[Partition]) -> Sequence[Partition]:
        """Return those target partitions of which it is not known that earlier turns have ended
        there; all while the partition is not claimed."""
        return list(places) if self._ended is None else self._ended.unverified(places)

    async def verify_no_open_txn(self, places: Collection[Partition]) -> Sequence[Cause]:
        """Find out whether earlier turns have ended in target partitions; return why some must
        not be written now. Raises nothing: what is not answered is a cause that passes."""
        if self._ended is None:
            return [
                Cause("no_answer", f"partition {self.partition} is not claimed", *place, True)
                for place in places
            ]
        return await self._ended.verify_no_open_txn(places)

    async def write(self, turn: PromotionTxn) -> KafkaPromotionTxn:
        """Write one turn; return once its records are acknowledged and the next may be written.

        Raises:
            PromotionTxnRefused: a record was refused; the turn is aborted.
            Fenced, PromotionTxnLost: claim again.
        """
        if self._writer is None:
            raise PromotionTxnLost(f"partition {self.partition} is not claimed")
        try:
            return await self._writer.write(turn)
        except PromotionTxnRefused as error:
            self._refused(error.cause)
            raise

    async def parked(self) -> AsyncIterator[Sequence[Record]]:
        """Yield all records of this partition of the parked topic, `read_committed`, in order.

        Raises:
            Hanging: a transaction that nobody ends hides some of them.
            KafkaUnavailable: Kafka does not answer.
        """
        # To the very end: what a committed turn has set aside and an open transaction still hides
        # would otherwise count as promoted.
        start, end = await self._parked.start(), await self._parked.end(sure=True)
        async for records in self._parked.read(start, end):
            yield records

    async def pick_parked(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Return the records of this partition of the parked topic at these offsets.

        Raises:
            KafkaUnavailable: Kafka does not answer, or an open transaction hides a record.
            InvariantBroken: a batch is damaged.
        """
        return await self._parked_picker.pick(offsets)

    async def close(self) -> None:
        """Let go of connections; never blocks on a broker that does not answer."""
        await self._retire()
        self._client.close_channels(self._lane)

    async def _retire(self) -> None:
        writer, self._writer = self._writer, None
        self._ended = None
        if writer is not None:
            await writer.close()
