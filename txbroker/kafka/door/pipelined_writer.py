"""The twin transactional writer: two producers take turns, so that one writes while the
coordinator still finishes the other's markers.

What keeps a turn whole: only an answer of the coordinator ends it; a turn is written after the
one before it was written, and ended after that one's commit was acknowledged; no partition is
put into it where what the same producer wrote before may still be open; whatever else happens
breaks the writer for good, and only a claim, with new producers, goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import TypeAlias

from txbroker.core.encoding import encode_progress
from txbroker.core.records import Record
from txbroker.door.commits import again, begin, outcome
from txbroker.door.protocols import Fenced, PromotionTxn, PromotionTxnLost, PromotionTxnRefused
from txbroker.errors import KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.producer import Producer, ProducerFenced, Stored
from txbroker.kafka.door.open_transactions import OpenTransactionGuard, UnconfirmedWrites
from txbroker.kafka.door.promotion_txn import KafkaPromotionTxn, translated
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.kafka.protocol.batch import Body, batch_bodies
from txbroker.kafka.protocol.transactions import Partition
from txbroker.net.backoff import Backoff

# The markers of the turn before on the same transactional id take milliseconds.
_PAUSE_S = 0.001
_PAUSE_MAX_S = 0.02
_ADD_TIMEOUT_S = 5.0
_ABORT_TIMEOUT_S = 1.0


_Runs: TypeAlias = dict[Partition, list[Body]]
"""A turn's records by partition, encoded as batches."""


class PipelinedTxnWriter:
    """Writes the turns of one half partition, from one claim until something breaks."""

    def __init__(
        self,
        client: Client,
        partition: int,
        producers: tuple[Producer, Producer],
        bytes_max: Callable[[str], int],
        ended: OpenTransactionGuard,
        stable: StableEnds,
    ) -> None:
        settings = client.settings
        self._ended = ended
        self._stable = stable
        self._unseen = tuple(UnconfirmedWrites(producer, ended, stable) for producer in producers)
        self._settings = settings
        self._producers = producers
        self._bytes_max = bytes_max
        self._checkpoint = (settings.checkpoint_topic, partition)
        self._parked = (settings.parked_topic, partition)
        self._turns = 0
        self._commits: list[asyncio.Task[None] | None] = [None, None]
        self._broken: Fenced | PromotionTxnLost | PromotionTxnRefused | None = None
        self._writing = False

    async def write(self, turn: PromotionTxn) -> KafkaPromotionTxn:
        """Write one turn; return once its records are acknowledged and the next may be written.

        Raises:
            PromotionTxnRefused: a record was refused; the turn is aborted.
            Fenced, PromotionTxnLost: claim again.
        """
        if self._writing:
            raise AssertionError("turns are written one at a time")
        self._check()
        side = self._turns % 2
        producer, own = self._producers[side], self._commits[side]
        self._writing = True
        try:
            if own is not None:
                await outcome(own)
            runs, places = self._runs(turn)
            await self._ended_before(self._unseen[side], runs)
            # The commit of the turn before may have failed meanwhile.
            self._check()
            offsets = await self._write_or_break(producer, runs)
        finally:
            self._writing = False
        last = {partition: found[-1] for partition, found in offsets.items()}
        self._unseen[side].wrote(last)
        self._turns += 1
        commit = begin(self._commit(producer, self._commits[1 - side]))
        self._commits[side] = commit
        return KafkaPromotionTxn(
            self._stable,
            [offsets[partition][index] for partition, index in places],
            offsets.get(self._parked, ()),
            last,
            commit,
            self._settings.visible_timeout_s,
            self._unseen[side].seen,
        )

    async def close(self) -> None:
        """Give up what is still open; the next claim, or Kafka, aborts it."""
        self._break(PromotionTxnLost("the partition's door was closed"))
        commits = [commit for commit in self._commits if commit is not None]
        for commit in commits:
            commit.cancel()
        await asyncio.gather(*commits, return_exceptions=True)

    # --- writing -----------------------------------------------------------------------------

    async def _ended_before(
        self, unseen: UnconfirmedWrites, partitions: Collection[Partition]
    ) -> None:
        """See that nothing is open that the end of this turn would end, too. Nothing is begun yet,
        so there is nothing to abort either."""
        try:
            await unseen.over(partitions, self._backoff(_ADD_TIMEOUT_S))
            if self._parked in partitions:
                # It was asked about at the claim, and has another leader by now perhaps.
                for cause in await self._ended.verify_no_open_txn([self._parked]):
                    raise PromotionTxnLost(cause.message)
        except PromotionTxnLost as error:
            self._break(error)
            raise

    async def _write_or_break(self, producer: Producer, runs: _Runs) -> dict[Partition, list[int]]:
        try:
            offsets = await self._write(producer, runs)
            # The commit of the turn before may have failed meanwhile.
            self._check()
        except (Fenced, PromotionTxnLost, PromotionTxnRefused) as error:
            self._break(error)
            await self._abort(producer, error)
            raise
        except BaseException:
            # Given up half-way: what was sent is unknown, and the next claim aborts it.
            self._break(PromotionTxnLost("the write of a turn was given up"))
            raise
        return offsets

    async def _write(self, producer: Producer, runs: _Runs) -> dict[Partition, list[int]]:
        """Write everything; return the offsets of each partition's records, in their order."""
        offsets: dict[Partition, list[int]] = {partition: [] for partition in runs}
        with translated():
            await producer.add(list(runs), self._backoff(_ADD_TIMEOUT_S))
            failpoint("turn.begun")
            for number in range(max(map(len, runs.values()))):
                # A request takes one batch of a partition, so the second follows the first.
                batches = {p: parts[number] for p, parts in runs.items() if number < len(parts)}
                # Short, because meanwhile readers of all other targets are held back.
                backoff = self._backoff(self._settings.request_timeout_s)
                stored = await producer.produce(batches, backoff)
                for partition, where in stored.items():
                    offsets[partition].extend(_offsets(where, batches[partition].count))
            failpoint("turn.produced")
        return offsets

    def _runs(self, turn: PromotionTxn) -> tuple[_Runs, list[tuple[Partition, int]]]:
        """Return each partition's records as batches, and where each promoted one is: its
        partition, and its number among those that go there."""
        by_partition: dict[Partition, list[Record]] = {}
        places = []
        for topic, number, record in turn.promoted:
            records = by_partition.setdefault((topic, number), [])
            places.append(((topic, number), len(records)))
            records.append(record)
        if turn.parked:
            by_partition[self._parked] = list(turn.parked)
        by_partition[self._checkpoint] = [encode_progress(turn.progress)]
        runs = {
            partition: batch_bodies(records, self._bytes_max(partition[0]))
            for partition, records in by_partition.items()
        }
        return runs, places

    def _backoff(self, seconds: float) -> Backoff:
        return Backoff(seconds, _PAUSE_S, _PAUSE_MAX_S)

    # --- ending ------------------------------------------------------------------------------

    async def _commit(self, producer: Producer, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await outcome(before)
            with translated():
                backoff = self._backoff(self._settings.transaction_timeout_s)
                failpoint("turn.ending")
                await producer.end(commit=True, backoff=backoff)
                failpoint("turn.ended")
        except (Fenced, PromotionTxnLost, PromotionTxnRefused) as error:
            self._break(error)
            if before is not None and before.done() and _failed(before):
                # Its predecessor may not be committed, so this one must not be.
                await self._abort(producer, error)
            raise again(error) from None

    async def _abort(self, producer: Producer, error: Exception) -> None:
        """Free the readers of the targets early; the next claim aborts it for certain."""
        if isinstance(error, Fenced):
            return
        with contextlib.suppress(ProducerFenced, KafkaUnavailable, TimeoutError):
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await producer.end(commit=False, backoff=self._backoff(_ABORT_TIMEOUT_S))

    def _check(self) -> None:
        if self._broken is not None:
            raise again(self._broken)

    def _break(self, error: Fenced | PromotionTxnLost | PromotionTxnRefused) -> None:
        if self._broken is None:
            self._broken = error


def _failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None


def _offsets(where: Stored, count: int) -> list[int]:
    if where.base_offset < 0:
        return [-1] * count
    return list(range(where.base_offset, where.base_offset + count))
