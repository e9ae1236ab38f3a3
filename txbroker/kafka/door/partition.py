"""The Kafka side of one half partition: claim, promotion transactions, parked records."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from msgspec import structs

from txbroker.core.encoding import encode_claim
from txbroker.core.records import Cause, Claim, Partition, Record
from txbroker.door.own_topics import CheckpointScan
from txbroker.door.protocols import (
    AppendUnknown,
    Claimed,
    Hanging,
    Log,
    LogTruncated,
    PartitionDoor,
    PromotionTxn,
    PromotionTxnHandle,
)
from txbroker.door.writing import Copy, Fenced, Refused, Unknown
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.reader import Picker, Reader
from txbroker.kafka.client.shared_writes import SharedWrites
from txbroker.kafka.client.transaction import TransactionalWriter
from txbroker.kafka.door.log import KafkaLog
from txbroker.kafka.door.open_transactions import HANGING, OpenTransactionGuard
from txbroker.kafka.door.pipelined_writer import (
    PipelinedTxnWriter,
    promotion_writers,
)
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.net.timers import Backoff

_PAUSE_S = 0.002
_PAUSE_MAX_S = 0.1
_TRUNCATED_RETRIES = 3
_REST, _REST_MAX_S = 2.0, 0.1
"""After storing, pause for this multiple of the time it took, at most so long."""

_NUMBERS = itertools.count()
"""Makes channel names unique, so that closing an old door closes no channel of a new one."""


async def read_checkpoint(reader: Reader, producers: Collection[int]) -> CheckpointScan:
    """Read a whole partition of the checkpoint topic.

    Args:
        reader: with `producers`.
        producers: see `CheckpointScan`.
    """
    for _attempt in range(_TRUNCATED_RETRIES):
        scan = CheckpointScan(reader.name, producers)
        start, end = await reader.start(), await reader.stable_end()
        try:
            async for records in reader.read(start, end):
                scan.note(records)
        except LogTruncated:
            continue  # the cleaner advanced the log start meanwhile
        return scan
    raise KafkaUnavailable(f"{reader.name} is compacted faster than it is read: retry")


class KafkaPartitionDoor(PartitionDoor):
    """A `PartitionDoor` on a real Kafka.

    Args:
        bytes_max: returns a topic's maximum batch size.
        refused: called with the cause when a target refuses a record.
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
        self._channel = f"p{partition}.{next(_NUMBERS)}/"
        self.half = self._log(settings.half_topic, "half", shared)
        self.op = self._log(settings.op_topic, "op", shared)
        self._checkpoint_at: Partition = (settings.checkpoint_topic, partition)
        self._checkpoint = Reader(
            client, *self._checkpoint_at, f"{self._channel}checkpoint", producers=True
        )
        self._snapshots = self._log(settings.checkpoint_topic, "snapshots")
        self._parked = self._parked_reader("parked")
        self._parked_picker = Picker(self._parked_reader)
        self._writer: PipelinedTxnWriter | None = None

    def _log(self, topic: str, name: str, shared: SharedWrites | None = None) -> KafkaLog:
        channel, bytes_max = self._channel + name, self._bytes_max(topic)
        return KafkaLog(self._client, topic, self.partition, channel, bytes_max, shared)

    def _parked_reader(self, channel: str) -> Reader:
        topic = self._settings.parked_topic
        channel = f"{self._channel}parked/{channel}"
        return Reader(self._client, topic, self.partition, channel, producers=True)

    # --- claim -------------------------------------------------------------------------------

    async def claimed_before(self) -> bool:
        """Return whether the checkpoint topic has ever held a record. Writes nothing."""
        return await self.checkpoint_end() > 0

    async def checkpoint_end(self) -> int:
        """Return the offset of the next record of the checkpoint topic."""
        return await self._checkpoint.end(confirmed=True)

    async def parked_before(self) -> bool:
        """Return whether the parked topic has ever held a record."""
        return await self._parked.end(confirmed=True) > 0

    async def claim(self, claim: Claim) -> Claimed:
        """Fence every earlier owner, write the claim record, then read the progress.

        Both transactional ids are taken, always in the same order, and the claim record is
        committed on the first one. So if two claims succeed, the later one began after the earlier
        one's record, and the earlier owner is fenced on both ids before the later one reads.
        """
        await self._retire()
        failpoint("claim.beginning")
        backoff = Backoff(self._settings.claim_timeout_s, _PAUSE_S, _PAUSE_MAX_S)
        writers = self._writers()
        try:
            for writer in writers:
                await writer.claim(backoff)
                failpoint("claim.fenced")
            producers = [writer.producer for writer in writers]
            guard = OpenTransactionGuard(self._client, f"{self._channel}guard", producers)
            await self._verify_own_topics(guard, backoff)
            claim = structs.replace(claim, producers=tuple(one.id for one in producers))
            offset = await self._write_claim(writers[0], claim, backoff)
        except Fenced:
            raise Fenced("another owner claimed at the same time") from None
        await self._wait_until_visible(offset)
        failpoint("claim.seen")
        claimed = await self._read_progress(claim)
        failpoint("claim.read")
        self._writer = PipelinedTxnWriter(
            self._settings, self.partition, writers, guard, self._stable
        )
        return claimed

    def _writers(self) -> tuple[TransactionalWriter, TransactionalWriter]:
        return promotion_writers(self._client, self.partition, self._channel, self._bytes_max)

    async def _verify_own_topics(self, guard: OpenTransactionGuard, backoff: Backoff) -> None:
        """Wait until our own topics hold no open transaction of an earlier claim.

        The commit of the claim record would end it, too, and progress that was aborted would count.
        """
        own = [self._checkpoint_at, (self._settings.parked_topic, self.partition)]
        while causes := await guard.verify_no_open_txn(own):
            for cause in causes:
                if cause.code == HANGING:
                    raise Hanging(cause.message)
            if not await backoff.pause():
                raise KafkaUnavailable(causes[0].message)

    async def _write_claim(
        self, writer: TransactionalWriter, claim: Claim, backoff: Backoff
    ) -> int:
        (offset,) = await writer.send([Copy(*self._checkpoint_at, encode_claim(claim))], backoff)
        failpoint("claim.produced")
        await writer.commit(backoff=backoff)
        failpoint("claim.committed")
        return offset

    async def _wait_until_visible(self, offset: int) -> None:
        """Wait until an offset of the checkpoint topic is visible."""
        try:
            await self._stable.pass_by(
                {self._checkpoint_at: offset}, self._settings.claim_timeout_s
            )
        except KafkaUnavailable:
            # Ask once more: the brokers may just not have answered.
            end = offset + 1 if offset >= 0 else await self._checkpoint.end(confirmed=True)
            stable_end = await self._checkpoint.stable_end()
            if stable_end >= end:
                return
            raise Hanging(
                f"{self._checkpoint.name}: a hanging transaction hides all records from offset "
                f"{stable_end} on; find it with `kafka-transactions.sh find-hanging`, and read "
                "docs/operate/lost-end.md before you abort it"
            ) from None

    async def _read_progress(self, claim: Claim) -> Claimed:
        """Read to the end: only our own record proves the time of the claim."""
        return (await read_checkpoint(self._checkpoint, claim.producers)).claimed(claim)

    # --- snapshots ---------------------------------------------------------------------------

    async def store(self, records: Sequence[Record]) -> None:
        """Append records of a snapshot to the checkpoint topic, by a separate producer.

        Then pause, so that promotion is not slowed. One call at a time.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            await self._snapshots.append(records)
        except AppendUnknown as error:
            raise KafkaUnavailable(str(error)) from None
        # The same broker takes the promotion transactions: leave it most of its time.
        await asyncio.sleep(min(_REST * (loop.time() - began_s), _REST_MAX_S))

    # --- promotion ---------------------------------------------------------------------------

    def unverified(self, places: Collection[Partition]) -> Sequence[Partition]:
        """Return the target partitions that may hold an open transaction of an earlier claim; all
        of them before `claim`."""
        return list(places) if self._writer is None else self._writer.guard.unverified(places)

    async def verify_no_open_txn(self, places: Collection[Partition]) -> Sequence[Cause]:
        """Verify that no earlier transaction is open in target partitions.

        Returns:
            Why some must not be written now. An unanswered request is a passing cause, no error.
        """
        if self._writer is None:
            return [
                Cause("no_answer", f"partition {self.partition} is not claimed", *place, True)
                for place in places
            ]
        return await self._writer.guard.verify_no_open_txn(places)

    async def write(self, txn: PromotionTxn) -> PromotionTxnHandle:
        """Write a promotion transaction; see `PipelinedTxnWriter.write`."""
        if self._writer is None:
            raise Unknown(f"partition {self.partition} is not claimed")
        try:
            return await self._writer.write(txn)
        except Refused as error:
            self._refused(error.cause)
            raise

    async def parked(self) -> AsyncIterator[Sequence[Record]]:
        """Yield all committed records of this partition of the parked topic, in order."""
        # To the high watermark: parked records that an open transaction still hides would otherwise
        # count as promoted.
        start, end = await self._parked.start(), await self._parked.end(confirmed=True)
        async for records in self._parked.read(start, end):
            yield records

    async def pick_parked(self, offsets: Sequence[int]) -> Sequence[Record]:
        """Return records of this partition of the parked topic; see `Picker.pick`."""
        return await self._parked_picker.pick(offsets)

    async def close(self) -> None:
        """Close the connections; never waits for an unresponsive broker."""
        await self._retire()
        self._client.close_channels(self._channel)

    async def _retire(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.close()
