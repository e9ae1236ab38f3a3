"""Write promotion transactions with two writers alternately: one writes while the coordinator
still writes the markers of the other's transaction.

Rules that keep a transaction atomic: it is written after the previous one was written, and ended
after the previous commit was acknowledged; only the coordinator's answer ends it; it includes no
partition in which an earlier transaction of the same producer may still be open. Any other error
breaks the pair for good: then a claim begins with new producers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator

from txbroker.core.encoding import encode_progress
from txbroker.core.records import Partition
from txbroker.door.protocols import (
    PromotionTxn,
    PromotionTxnHandle,
    begin_commit,
    commit_outcome,
    raised_again,
)
from txbroker.door.writing import Copy, Fenced, Refused, Unknown
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.client.transaction import PAUSE_S, TransactionalWriter, WriterTraits
from txbroker.kafka.door.open_transactions import OpenTransactionGuard, UnconfirmedWrites
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.net.timers import Backoff

_PAUSE_MAX_S = 0.02
_ENDS_TIMEOUT_S = 5.0


def promotion_writers(
    client: Client, partition: int, channel: str, bytes_max: Callable[[str], int]
) -> tuple[TransactionalWriter, TransactionalWriter]:
    """Return the writers of a half partition, not claimed.

    Args:
        bytes_max: returns a topic's maximum batch size.
    """
    settings = client.settings
    traits = WriterTraits(
        "turn",
        bytes_max=bytes_max,
        # Short, because the open transaction blocks the readers of all targets.
        write_s=settings.request_timeout_s,
        end_s=settings.transaction_timeout_s,
        pause_max_s=_PAUSE_MAX_S,
    )
    ids = (f"{settings.half_topic}-{partition}-{side}" for side in "ab")
    first, second = (TransactionalWriter(client, id, f"{channel}{id[-1]}", traits) for id in ids)
    return first, second


class PipelinedTxnWriter:
    """Writes the promotion transactions of one half partition, from a claim until an error.

    Args:
        writers: claimed.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        partition: int,
        writers: tuple[TransactionalWriter, TransactionalWriter],
        guard: OpenTransactionGuard,
        stable: StableEnds,
    ) -> None:
        self.guard = guard
        self._stable = stable
        self._unconfirmed = tuple(UnconfirmedWrites(w.producer, guard, stable) for w in writers)
        self._settings = settings
        self._writers = writers
        self._checkpoint = (settings.checkpoint_topic, partition)
        self._parked = (settings.parked_topic, partition)
        self._written = 0
        self._commits: list[asyncio.Task[None] | None] = [None, None]
        self._broken: Fenced | Unknown | Refused | None = None
        self._writing = False

    async def write(self, txn: PromotionTxn) -> PromotionTxnHandle:
        """Write a transaction; return once its records are acknowledged and the next may follow.

        Raises:
            Refused: a record was refused; the transaction is aborted.
            Fenced, Unknown: claim again.
        """
        if self._writing:
            raise AssertionError("promotion transactions are written one at a time")
        self._check()
        side = self._written % 2
        writer, own, unconfirmed = self._writers[side], self._commits[side], self._unconfirmed[side]
        self._writing = True
        try:
            if own is not None:
                await commit_outcome(own)
            copies = [
                *txn.promoted,
                *(Copy(*self._parked, record) for record in txn.parked),
                Copy(*self._checkpoint, encode_progress(txn.progress)),
            ]
            last = {(copy.topic, copy.partition): -1 for copy in copies}
            with self._breaking():
                await self._wait_for_ends(unconfirmed, last)
                offsets = await self._send(writer, copies)
        finally:
            self._writing = False
        for copy, offset in zip(copies, offsets, strict=True):
            last[copy.topic, copy.partition] = offset
        unconfirmed.add(last)
        self._written += 1
        commit = begin_commit(self._commit(writer, self._commits[1 - side]))
        self._commits[side] = commit

        async def pass_by() -> None:
            await self._stable.pass_by(last, self._settings.visible_timeout_s)
            unconfirmed.confirm(last)

        count = len(txn.promoted)
        return PromotionTxnHandle(offsets[:count], offsets[count:-1], commit, pass_by)

    async def close(self) -> None:
        """Stop. The next claim, or Kafka's timeout, aborts an open transaction."""
        self._broken = self._broken or Unknown("the partition was closed")
        commits = [commit for commit in self._commits if commit is not None]
        for commit in commits:
            commit.cancel()
        await asyncio.gather(*commits, return_exceptions=True)

    async def _wait_for_ends(
        self, unconfirmed: UnconfirmedWrites, partitions: Collection[Partition]
    ) -> None:
        """Wait until nothing is open that the end of this transaction would end, too."""
        backoff = Backoff(_ENDS_TIMEOUT_S, PAUSE_S, _PAUSE_MAX_S)
        await unconfirmed.wait_until_ended(partitions, backoff)
        if self._parked in partitions:
            # The claim verified it, but its leader may have changed since.
            for cause in await self.guard.verify_no_open_txn([self._parked]):
                raise Unknown(cause.message)

    async def _send(self, writer: TransactionalWriter, copies: list[Copy]) -> list[int]:
        self._check()  # The previous commit may have failed meanwhile.
        try:
            offsets = await writer.send(copies)
            self._check()
        except (Unknown, Refused):
            await writer.give_up()
            raise
        return offsets

    async def _commit(self, writer: TransactionalWriter, before: asyncio.Task[None] | None) -> None:
        with self._breaking():
            try:
                if before is not None:
                    await commit_outcome(before)
            except (Unknown, Refused) as error:
                # The previous one may not be committed, so this one must not be either.
                await writer.give_up()
                raise raised_again(error) from None
            await writer.commit()

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Refuse all later calls after a failure or a cancellation: Kafka may have the records."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Fenced | Unknown | Refused):
                error = Unknown("a write was cancelled")
            self._broken = self._broken or error
            raise

    def _check(self) -> None:
        if self._broken is not None:
            raise raised_again(self._broken)
