"""Write promotion transactions with two writers alternately: one writes while the coordinator
still writes the markers of the other's transaction.

Rules that keep a transaction atomic: it is written after the previous one was written, and ended
after the previous commit was acknowledged; only the coordinator's answer ends it; it includes no
partition in which an earlier transaction of the same producer may still be open. Any other error
breaks the pair for good: then a claim begins with new producers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

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
from txbroker.kafka.client.transaction import TransactionalWriter, WriterTraits
from txbroker.kafka.door.open_transactions import OpenTransactionGuard, UnconfirmedWrites
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.net.timers import Backoff

# The previous transaction's markers on the same transactional id take milliseconds.
_PAUSE_S = 0.001
_PAUSE_MAX_S = 0.02
_ADD_TIMEOUT_S = 5.0
_ABORT_TIMEOUT_S = 1.0


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
        add_s=_ADD_TIMEOUT_S,
        # Short, because the open transaction blocks the readers of all targets.
        write_s=settings.request_timeout_s,
        end_s=settings.transaction_timeout_s,
        pause_s=_PAUSE_S,
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
        self._guard = guard
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

    async def write(self, txn: PromotionTxn) -> KafkaPromotionTxn:
        """Write a transaction; return once its records are acknowledged and the next may follow.

        Raises:
            Refused: a record was refused; the transaction is aborted.
            Fenced, Unknown: claim again.
        """
        if self._writing:
            raise AssertionError("promotion transactions are written one at a time")
        self._check()
        side = self._written % 2
        writer, own = self._writers[side], self._commits[side]
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
            await self._wait_for_ends(self._unconfirmed[side], last)
            # The previous commit may have failed meanwhile.
            self._check()
            offsets = await self._write_or_break(writer, copies)
        finally:
            self._writing = False
        for copy, offset in zip(copies, offsets, strict=True):
            last[copy.topic, copy.partition] = offset
        self._unconfirmed[side].add(last)
        self._written += 1
        commit = begin_commit(self._commit(writer, self._commits[1 - side]))
        self._commits[side] = commit
        count = len(txn.promoted)
        return KafkaPromotionTxn(
            self._stable,
            offsets[:count],
            offsets[count:-1],
            last,
            commit,
            self._settings.visible_timeout_s,
            self._unconfirmed[side].confirm,
        )

    async def close(self) -> None:
        """Stop. The next claim, or Kafka's timeout, aborts an open transaction."""
        self._break(Unknown("the partition was closed"))
        commits = [commit for commit in self._commits if commit is not None]
        for commit in commits:
            commit.cancel()
        await asyncio.gather(*commits, return_exceptions=True)

    # --- write -------------------------------------------------------------------------------

    async def _wait_for_ends(
        self, unconfirmed: UnconfirmedWrites, partitions: Collection[Partition]
    ) -> None:
        """Wait until nothing is open that the end of this transaction would end, too.

        It has not begun yet, so an error needs no abort.
        """
        try:
            await unconfirmed.wait_until_ended(
                partitions, Backoff(_ADD_TIMEOUT_S, _PAUSE_S, _PAUSE_MAX_S)
            )
            if self._parked in partitions:
                # The claim verified it, but its leader may have changed since.
                for cause in await self._guard.verify_no_open_txn([self._parked]):
                    raise Unknown(cause.message)
        except Unknown as error:
            self._break(error)
            raise

    async def _write_or_break(self, writer: TransactionalWriter, copies: list[Copy]) -> list[int]:
        try:
            offsets = await writer.send(copies)
            # The previous commit may have failed meanwhile.
            self._check()
        except (Fenced, Unknown, Refused) as error:
            self._break(error)
            await self._abort(writer, error)
            raise
        except BaseException:
            # Cancelled: it is unknown what was sent, and the next claim aborts it.
            self._break(Unknown("the write of a promotion transaction was cancelled"))
            raise
        return offsets

    # --- end ---------------------------------------------------------------------------------

    async def _commit(self, writer: TransactionalWriter, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await commit_outcome(before)
            await writer.commit()
        except (Fenced, Unknown, Refused) as error:
            self._break(error)
            if before is not None and before.done() and _failed(before):
                # The previous one may not be committed, so this one must not be either.
                await self._abort(writer, error)
            raise raised_again(error) from None

    async def _abort(self, writer: TransactionalWriter, error: Exception) -> None:
        """Try to unblock the targets' readers early; the next claim aborts it in any case."""
        if not isinstance(error, Fenced):
            await writer.give_up(_ABORT_TIMEOUT_S)

    def _check(self) -> None:
        if self._broken is not None:
            raise raised_again(self._broken)

    def _break(self, error: Fenced | Unknown | Refused) -> None:
        if self._broken is None:
            self._broken = error


def _failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None


# --- written transactions ------------------------------------------------------------------------


class KafkaPromotionTxn(PromotionTxnHandle):
    """A `PromotionTxnHandle` on a real Kafka. The commit proceeds in its own task."""

    def __init__(
        self,
        stable: StableEnds,
        offsets: Sequence[int],
        parked_offsets: Sequence[int],
        last: Mapping[Partition, int],
        commit: asyncio.Task[None],
        visible_timeout_s: float,
        on_visible: Callable[[Mapping[Partition, int]], None],
    ) -> None:
        self.offsets = offsets
        self.parked_offsets = parked_offsets
        self._stable = stable
        self._visible_timeout_s = visible_timeout_s
        self._last = last
        self._commit = commit
        self._on_visible = on_visible

    async def committed(self) -> None:
        """Wait until the commit is acknowledged."""
        await commit_outcome(self._commit)

    async def visible(self) -> None:
        """Wait until the transaction is visible to every `read_committed` reader."""
        await self.committed()
        await self._stable.pass_by(self._last, self._visible_timeout_s)
        self._on_visible(self._last)
