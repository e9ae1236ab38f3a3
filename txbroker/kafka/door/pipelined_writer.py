"""Write promotion transactions with two producers alternately: one writes while the coordinator
still writes the markers of the other's transaction.

Rules that keep a transaction atomic: it is written after the previous one was written, and ended
after the previous commit was acknowledged; only the coordinator's answer ends it; it includes no
partition in which an earlier transaction of the same producer may still be open. Any other error
breaks the
writer for good: then a claim creates new producers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from txbroker.core.encoding import encode_progress
from txbroker.core.records import Cause, Record
from txbroker.door.protocols import (
    PromotionTxn,
    PromotionTxnHandle,
    begin_commit,
    commit_outcome,
    raised_again,
)
from txbroker.door.writing import Fenced, Partition, Refused, Unknown
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.producer import (
    BatchRefused,
    BatchUnknown,
    Producer,
    ProducerFenced,
    Stored,
)
from txbroker.kafka.door.open_transactions import OpenTransactionGuard, UnconfirmedWrites
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.kafka.protocol.batch import Body, batch_bodies
from txbroker.kafka.protocol.codes import Code
from txbroker.kafka.protocol.copies import cause_of
from txbroker.net.timers import Backoff

# The previous transaction's markers on the same transactional id take milliseconds.
_PAUSE_S = 0.001
_PAUSE_MAX_S = 0.02
_ADD_TIMEOUT_S = 5.0
_ABORT_TIMEOUT_S = 1.0


_Batches: TypeAlias = dict[Partition, list[Body]]
"""A transaction's records by partition, encoded as batches."""


class PipelinedTxnWriter:
    """Writes the promotion transactions of one half partition, from a claim until an error."""

    def __init__(
        self,
        client: Client,
        partition: int,
        producers: tuple[Producer, Producer],
        bytes_max: Callable[[str], int],
        guard: OpenTransactionGuard,
        stable: StableEnds,
    ) -> None:
        settings = client.settings
        self._guard = guard
        self._stable = stable
        self._unconfirmed = tuple(UnconfirmedWrites(p, guard, stable) for p in producers)
        self._settings = settings
        self._producers = producers
        self._bytes_max = bytes_max
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
        producer, own = self._producers[side], self._commits[side]
        self._writing = True
        try:
            if own is not None:
                await commit_outcome(own)
            batches, places = self._batches(txn)
            await self._wait_for_ends(self._unconfirmed[side], batches)
            # The previous commit may have failed meanwhile.
            self._check()
            offsets = await self._write_or_break(producer, batches)
        except Refused as error:
            at = (error.cause.topic, error.cause.partition)
            mine = [index for index, (one, _number) in enumerate(places) if one == at]
            raise Refused(mine, error.cause) from None
        finally:
            self._writing = False
        last = {partition: numbers[-1] for partition, numbers in offsets.items()}
        self._unconfirmed[side].add(last)
        self._written += 1
        commit = begin_commit(self._commit(producer, self._commits[1 - side]))
        self._commits[side] = commit
        return KafkaPromotionTxn(
            self._stable,
            [offsets[partition][index] for partition, index in places],
            offsets.get(self._parked, ()),
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
            await unconfirmed.wait_until_ended(partitions, self._backoff(_ADD_TIMEOUT_S))
            if self._parked in partitions:
                # The claim verified it, but its leader may have changed since.
                for cause in await self._guard.verify_no_open_txn([self._parked]):
                    raise Unknown(cause.message)
        except Unknown as error:
            self._break(error)
            raise

    async def _write_or_break(
        self, producer: Producer, batches: _Batches
    ) -> dict[Partition, list[int]]:
        try:
            offsets = await self._write(producer, batches)
            # The previous commit may have failed meanwhile.
            self._check()
        except (Fenced, Unknown, Refused) as error:
            self._break(error)
            await self._abort(producer, error)
            raise
        except BaseException:
            # Cancelled: it is unknown what was sent, and the next claim aborts it.
            self._break(Unknown("the write of a promotion transaction was cancelled"))
            raise
        return offsets

    async def _write(self, producer: Producer, batches: _Batches) -> dict[Partition, list[int]]:
        """Write all batches; return the offsets of each partition's records, in order."""
        offsets: dict[Partition, list[int]] = {partition: [] for partition in batches}
        with translated():
            await producer.add(list(batches), self._backoff(_ADD_TIMEOUT_S))
            failpoint("turn.begun")
            for number in range(max(map(len, batches.values()))):
                # A request takes one batch per partition, so further ones follow in turn.
                some = {p: parts[number] for p, parts in batches.items() if number < len(parts)}
                # Short, because the open transaction blocks the readers of all targets.
                backoff = self._backoff(self._settings.request_timeout_s)
                stored = await producer.produce(some, backoff)
                for partition, where in stored.items():
                    offsets[partition].extend(_offsets(where, some[partition].count))
            failpoint("turn.produced")
        return offsets

    def _batches(self, txn: PromotionTxn) -> tuple[_Batches, list[tuple[Partition, int]]]:
        """Return the batches of each partition, and the place of each promoted record: its
        partition and its number among the records for it."""
        by_partition: dict[Partition, list[Record]] = {}
        places = []
        for copy in txn.promoted:
            at = (copy.topic, copy.partition)
            records = by_partition.setdefault(at, [])
            places.append((at, len(records)))
            records.append(copy.record)
        if txn.parked:
            by_partition[self._parked] = list(txn.parked)
        by_partition[self._checkpoint] = [encode_progress(txn.progress)]
        batches = {
            partition: batch_bodies(records, self._bytes_max(partition[0]))
            for partition, records in by_partition.items()
        }
        return batches, places

    def _backoff(self, seconds: float) -> Backoff:
        return Backoff(seconds, _PAUSE_S, _PAUSE_MAX_S)

    # --- end ---------------------------------------------------------------------------------

    async def _commit(self, producer: Producer, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await commit_outcome(before)
            with translated():
                backoff = self._backoff(self._settings.transaction_timeout_s)
                failpoint("turn.ending")
                await producer.end(commit=True, backoff=backoff)
                failpoint("turn.ended")
        except (Fenced, Unknown, Refused) as error:
            self._break(error)
            if before is not None and before.done() and _failed(before):
                # The previous one may not be committed, so this one must not be either.
                await self._abort(producer, error)
            raise raised_again(error) from None

    async def _abort(self, producer: Producer, error: Exception) -> None:
        """Try to unblock the targets' readers early; the next claim aborts it in any case."""
        if isinstance(error, Fenced):
            return
        with contextlib.suppress(ProducerFenced, KafkaUnavailable, TimeoutError):
            ending = producer.end(commit=False, backoff=self._backoff(_ABORT_TIMEOUT_S))
            await asyncio.wait_for(ending, _ABORT_TIMEOUT_S)

    def _check(self) -> None:
        if self._broken is not None:
            raise raised_again(self._broken)

    def _break(self, error: Fenced | Unknown | Refused) -> None:
        if self._broken is None:
            self._broken = error


def _failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None


def _offsets(where: Stored, count: int) -> list[int]:
    if where.base_offset < 0:
        return [-1] * count
    return list(range(where.base_offset, where.base_offset + count))


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


# The state of producer or coordinator is lost; the record is valid.
_PRODUCER_LOST = frozenset(
    {
        Code.OUT_OF_ORDER_SEQUENCE,
        Code.UNKNOWN_PRODUCER_ID,
        Code.INVALID_TXN_STATE,
        Code.INVALID_PRODUCER_ID_MAPPING,
        Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        Code.COORDINATOR_LOADING,
        Code.COORDINATOR_NOT_AVAILABLE,
        Code.NOT_COORDINATOR,
        Code.CONCURRENT_TRANSACTIONS,
        Code.TRANSACTION_ABORTABLE,
        Code.UNSUPPORTED_VERSION,
    }
)


@contextmanager
def translated() -> Iterator[None]:
    """Translate a producer's errors into those of the door."""
    try:
        yield
    except ProducerFenced:
        raise Fenced from None
    except BatchRefused as error:
        if error.code in _PRODUCER_LOST:
            raise Unknown(str(error)) from None
        raise Refused((), cause_of(error)) from None
    except BatchUnknown as error:
        topic, number = error.partition
        cause = Cause(
            "no_answer", f"its leader does not answer: {error}", topic, number, passing=True
        )
        raise Unknown(str(error), cause) from None
    except KafkaUnavailable as error:
        raise Unknown(str(error)) from None
