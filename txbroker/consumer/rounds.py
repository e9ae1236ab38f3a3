"""Stores positions, and copies of failed messages with them: in rounds, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Protocol

import structlog
from msgspec import Struct

from txbroker.consumer.engine.loop import Engine
from txbroker.consumer.engine.stops import Outage
from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.pending import Pending, PendingCopies
from txbroker.core.consuming.partition import PartitionState
from txbroker.core.consuming.position import METADATA_LENGTH_MAX, StoredOffset
from txbroker.core.consuming.queues import StopReason
from txbroker.core.records import Partition
from txbroker.door.writing import Copy, Fenced, Refused
from txbroker.error_text import safe_repr
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.net.timers import grown_pause_s

log = structlog.wrap_logger(logging.getLogger(__name__))

_PAUSE_S, _PAUSE_MAX_S = 0.05, 5.0
_REST_S = 0.01
"""Between rounds: at full speed `max_batch` messages are done in less, and more commits would cost
the broker and this process a fifth of their time."""
_ROUND_MAX_S = 60.0
"""The longest round: each of its requests may be repeated for some time."""
_FLUSH_MIN_S, _FLUSH_PAUSE_S = 1.0, 0.1
REFUSED_PAUSE_S = 5.0
"""Before refused copies are tried again."""
_REFUSED_PAUSES_S = (1.0, 60.0)
"""Pauses where Kafka answers and refuses, as without a right: the first and the longest."""
_UNHANDLED_MAX = 2
"""At most once: batches that count as done and are not handled yet."""


class CommitPolicy(Struct, frozen=True):
    """When positions are stored.

    Attributes:
        max_batch: messages that are done, after which they are; at most every 10 ms.
        max_interval_s: the longest time that a done message waits for it, seconds.
    """

    max_batch: int = 1000
    max_interval_s: float = 1.0

    def validate(self) -> None:
        """Raise ConfigurationError if a value is out of range."""
        if self.max_batch < 1 or not 0 < self.max_interval_s <= 60:
            raise ConfigurationError(
                f"{self}: max_batch is at least 1, max_interval_s above 0 and at most 60"
            )


class Store(Protocol):
    """Keeps positions and copies; see `txbroker.door.consuming.GroupMember`."""

    async def load(self, partitions: Collection[Partition]) -> dict[Partition, StoredOffset]:
        """Return stored positions; offset -1: only the token is stored. A store that can refuse
        commits with a lower token refuses them from now on."""
        ...

    async def commit(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy] = ()
    ) -> Collection[Partition] | None:
        """Store positions and copies. Return the partitions that another owner has taken over:
        nothing of them is stored."""
        ...


class StoreTraits(Struct, frozen=True, kw_only=True):
    """How a store differs from another one.

    Attributes:
        exact: nothing that is stored may be handled again: nothing is handed out while nothing can
            be stored, and results whose done offsets do not fit into a position wait.
        repeatable: a commit may be repeated, also if it has succeeded.
        metadata_max: the length of a position's metadata, characters.
    """

    exact: bool = False
    repeatable: bool = False
    metadata_max: int = METADATA_LENGTH_MAX


class _Round(Struct, eq=False):
    """Positions and copies that are stored together.

    Attributes:
        pending: copies.
        admitted: at most once: messages that count as done.
    """

    offsets: dict[PartitionState, StoredOffset]
    pending: dict[PartitionState, list[Pending]]
    admitted: dict[PartitionState, list[ReceivedMessage]]


class _Due:
    """When the next round begins: after enough messages, at once, or after some time.

    Attributes:
        count: messages since the last round.
        at: the count with which a round begins; infinite once one is to begin.
        since_s: when the first of them was done, event loop seconds.
        now: set when one is to begin.
    """

    def __init__(self, count_max: int) -> None:
        self.count = 0
        self.at: float = count_max
        self.since_s = 0.0
        self.now = asyncio.Event()
        self._max = count_max

    def begin(self) -> None:
        """A round begins."""
        self.now.clear()
        self.at = self._max


class Rounds:
    """Stores the positions of the partitions of one store.

    At most once it stores the position first and then lets the messages be handled.

    Args:
        fenced: called with a partition that another owner has taken over.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        policy: CommitPolicy,
        fenced: Callable[[PartitionState], None],
        *,
        traits: StoreTraits,
    ) -> None:
        self._engine = engine
        self._store = store
        self._policy = policy
        self._traits = traits
        self.fence = fenced
        """See `Commits.fence`."""
        self._dirty: dict[PartitionState, None] = {}
        self.copies = PendingCopies(engine.partitions.memory)
        self._soon = False
        """Some of the copies are to be stored at once."""
        self._full: set[PartitionState] = set()
        """Partitions whose outputs wait, because their position is full."""
        self._unknown: _Round | None = None
        """A round with copies whose result is not known."""
        self._due = _Due(0 if engine.before else policy.max_batch)
        self._in_flight: asyncio.Timeout | None = None
        """Ends the round in flight."""
        self._between_rounds = asyncio.Lock()
        """While it is held no round is in flight."""
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        commits = engine.partitions.commits
        self.outage = Outage(lambda: [each for each, by in commits.items() if by is self])

    def start(self) -> None:
        """Begin to store positions."""
        self._task = asyncio.create_task(self._run(), name="txbroker consumer commits")

    async def close(self) -> None:
        """End without a last round; call `flush` before."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def changed(self, partition: PartitionState, count: int = 1) -> None:
        """Take note that messages of a partition are done or, at most once, have arrived."""
        if not partition.dirty:
            partition.dirty = True
            if not self._dirty:
                self._due.since_s = self._loop.time()
            self._dirty[partition] = None
        due = self._due
        due.count += count
        if due.count >= due.at:
            due.at = math.inf
            due.now.set()

    def store(self, pending: Pending, *, soon: bool = True) -> None:
        """Store copies with the partition's position.

        Args:
            soon: now, and not with the next positions.
        """
        partition = pending.partition
        if partition not in self._engine.partitions.commits:
            return
        self.copies.add(pending)
        self.changed(partition, 0 if soon else 1)
        if soon:
            self._soon = True
            self._due.now.set()

    def withdraw(self, pending: Pending) -> bool:
        """Store copies no more, unless they may be stored already; return whether they are not."""
        partition = pending.partition
        if self._unknown is not None and pending in self._unknown.pending.get(partition, ()):
            return False
        self.copies.remove(partition, [pending])
        return True

    def unavailable(self, partition: PartitionState) -> None:
        """Hand out nothing more until a round has succeeded."""
        if not self.outage.failures and partition in self._engine.partitions:
            self.outage.note()
            self.changed(partition, 0)
            self._due.now.set()

    def forget(self, partition: PartitionState) -> None:
        """Store nothing more of a partition."""
        partition.dirty = False
        self._dirty.pop(partition, None)
        self._full.discard(partition)
        if self._unknown is not None:
            self._unknown.offsets.pop(partition, None)
            self._unknown.pending.pop(partition, None)
        for each in self.copies.drop(partition):
            if each.owner is not None:
                each.owner.dropped(each)

    async def flush(self, partitions: Collection[PartitionState]) -> None:
        """Store the positions and copies of partitions now.

        Raises:
            KafkaUnavailable: they are not stored, or it is unknown.
        """
        while True:
            async with self._between_rounds:  # one in flight may hold these partitions
                if not any(partition.dirty for partition in partitions):
                    return
            await self._round()

    async def flush_finally(self, partitions: Collection[PartitionState], within_s: float) -> None:
        """Store the final positions of partitions, with retries. At most once: without messages
        that count as done and were not handed out.

        If Kafka refuses, or `within_s` ends, they are not stored.
        """
        await self._flush_within(partitions, within_s)
        if not self._engine.before:
            return
        if withdrawn := [partition for partition in partitions if partition.withdraw()]:
            for partition in withdrawn:
                self.changed(partition, 0)
            await self._flush_within(withdrawn, within_s)

    async def _flush_within(self, partitions: Collection[PartitionState], within_s: float) -> None:
        until_s = self._loop.time() + max(_FLUSH_MIN_S, within_s)
        while True:
            left_s = until_s - self._loop.time()
            try:
                await asyncio.wait_for(self.flush(partitions), left_s)
            except (KafkaUnavailable, TimeoutError) as error:
                if left_s < _FLUSH_PAUSE_S or getattr(error, "lasting", False):
                    log.warning("positions not stored", error=safe_repr(error))
                    self._give_up()
                    return
                await asyncio.sleep(_FLUSH_PAUSE_S)
            else:
                return

    @contextlib.asynccontextmanager
    async def paused(self, within_s: float) -> AsyncIterator[None]:
        """Begin no round. One in flight is given up after `within_s`."""
        end = self._loop.call_later(max(_FLUSH_MIN_S, within_s), self._give_up)
        try:
            async with self._between_rounds:
                yield
        finally:
            end.cancel()

    def _give_up(self) -> None:
        if self._in_flight is not None and not self._in_flight.expired():
            self._in_flight.reschedule(self._loop.time())

    async def _run(self) -> None:
        failures = 0
        while True:
            await self._until_due()
            try:
                await self._round()
                failures = 0
                if not (self._engine.before or self.copies.count):
                    await asyncio.sleep(_REST_S)
            except KafkaUnavailable as error:
                if isinstance(error, Fenced):
                    self._engine.settlement.counts["fenced"] += 1
                failures += 1
                log.warning("positions not stored", error=safe_repr(error), attempt=failures)
                pause_s = grown_pause_s(failures, _PAUSE_S, _PAUSE_MAX_S)
                if error.lasting or self._traits.exact:
                    self.outage.note()
                if error.lasting:
                    pause_s = grown_pause_s(self.outage.failures, *_REFUSED_PAUSES_S)
                await self.outage.pause(pause_s)
            except Exception as error:
                self._engine.fail(error)
                return

    def _resume(self) -> None:
        if self.outage.end():
            self._engine.waiting.wake()

    async def _until_due(self) -> None:
        while not (self._due.now.is_set() or self.outage.failures):
            left_s = self._policy.max_interval_s
            if self._dirty:
                left_s = self._due.since_s + left_s - self._loop.time()
                if left_s <= 0:
                    return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._due.now.wait(), left_s)

    async def _round(self) -> None:
        async with self._between_rounds:
            self._due.begin()
            if any(partition.lease.deadline_s <= self._loop.time() for partition in self._dirty):
                raise Fenced("the lease has ended: nothing is stored")
            try:
                async with asyncio.timeout(_ROUND_MAX_S) as self._in_flight:
                    await self._store_next()
            except TimeoutError:
                why = "it took too long, or its partitions are released"
                raise KafkaUnavailable(f"a commit was given up: {why}") from None
            finally:
                self._in_flight = None

    async def _store_next(self) -> None:
        if self._unknown is not None and await self._is_stored(self._unknown):
            stored, self._unknown = self._unknown, None
            self._finish(stored)
            self._resume()
            return
        self._unknown = None
        round_ = self._begin()
        pendings = [each for some in round_.pending.values() for each in some]
        try:
            fenced: Collection[Partition] = ()
            if round_.offsets:
                self._unknown = round_ if round_.pending and not self._traits.repeatable else None
                offsets = {each.place: stored for each, stored in round_.offsets.items()}
                copies = [copy for each in pendings for copy in each.copies]
                failpoint("consumer.committing")
                fenced = await self._store.commit(offsets, copies) or ()
                failpoint("consumer.committed")
        except Refused as error:
            self._unknown = None
            self._refuse(pendings, error)
            self._again(round_)
            self._engine.waiting.wake()
        except Fenced:
            self._unknown = None
            self._again(round_)
            raise
        except BaseException:
            self._again(round_)
            raise
        else:
            self._unknown = None
            for partition in round_.offsets:
                if partition.place in fenced:
                    self.fence(partition)
            self._finish(round_)
            self._resume()

    async def _is_stored(self, round_: _Round) -> bool:
        """Return whether a round without an answer was stored: a second attempt would write its
        copies again. It was stored as a whole or not at all."""
        mine = {partition.place: stored for partition, stored in round_.offsets.items()}
        found = await self._store.load(mine)
        return any(found.get(place) == stored for place, stored in mine.items())

    def _begin(self) -> _Round:
        partitions, self._dirty = list(self._dirty), {}
        admitted = (
            {partition: self._to_admit(partition) for partition in partitions}
            if self._engine.before
            else {}
        )
        pending = self.copies.take(set(partitions))
        round_ = _Round({}, pending, admitted)
        distinct = bool(pending) and not self._traits.repeatable
        waits = False
        for partition in partitions:
            partition.dirty = False
            done = [message.record.offset for message in admitted.get(partition, ())]
            stored = _position(partition, pending.get(partition, ()), done, distinct=distinct)
            if self._traits.exact and partition.progress.overflow and partition in pending:
                # The position may have fewer gaps with all that waits.
                pending[partition] = list(self.copies.of(partition))
                stored = _position(partition, pending[partition], (), distinct=distinct)
                if overflow := partition.progress.overflow:
                    # After a crash messages would be handled again whose outputs are stored.
                    waiting = pending.pop(partition)
                    stored, waits = partition.stored(distinct=distinct), True
                    partition.progress.overflow = overflow
                    if partition not in self._full:
                        self._full.add(partition)
                        why = "its position is full: done and undone messages alternate"
                        log.warning(
                            "outputs wait",
                            partition=partition.place,
                            messages=len(waiting),
                            why=why,
                        )
            if partition in self._full and partition in pending:
                self._full.discard(partition)
                log.info("outputs go on", partition=partition.place)
            round_.offsets[partition] = stored
        taken = sum(len(each.copies) for some in pending.values() for each in some)
        left = self.copies.count - taken
        self._soon = self._soon and left > 0
        # Those that cannot be stored yet wait for the interval.
        self._due.count = 0 if waits else left
        return round_

    def _to_admit(self, partition: PartitionState) -> list[ReceivedMessage]:
        """Return the messages to count as done before they are handled."""
        if self._engine.stopping:
            return []
        room = _UNHANDLED_MAX * self._policy.max_batch - partition.log.queue.count
        count = 0 if partition.draining else max(0, min(self._policy.max_batch, room))
        return list(itertools.islice(partition.gate, count))

    def _again(self, round_: _Round) -> None:
        for partition in round_.offsets:
            if partition in self._engine.partitions:
                self.changed(partition, 0)

    def _refuse(self, pendings: Sequence[Pending], error: Refused) -> None:
        """Store something else in place of refused copies, or all copies of their partitions later.

        Args:
            pendings: of the round, in the order of its copies.
        """
        refused, end = set(error.indexes), 0
        waiting: Counter[PartitionState] = Counter()
        for each in pendings:
            partition, begin, end = each.partition, end, end + len(each.copies)
            mine = [index - begin for index in range(begin, end) if index in refused]
            if not mine or partition not in self._engine.partitions:
                continue
            others: Sequence[Copy] | None = None
            if each.owner is not None:
                others = each.owner.refused(each, Refused(mine, error.cause))
            if others is None:
                waiting[partition] += 1
            elif others:
                self.copies.replace(each, others)
            else:
                self.copies.remove(partition, [each])
        for partition, count in waiting.items():
            log.error("copy refused", partition=partition.place, messages=count, why=str(error))
            self._engine.settlement.counts["copy_refused"] += count
            partition.stop(StopReason.REFUSED)
            self.copies.rest(partition, resting=True)
            self._loop.call_later(REFUSED_PAUSE_S, self._end_rest, partition)

    def _end_rest(self, partition: PartitionState) -> None:
        if partition in self._engine.partitions:
            self.copies.rest(partition, resting=False)
            self.changed(partition, 0)
            self._due.now.set()
            partition.go_on(StopReason.REFUSED)
            self._engine.waiting.wake()

    def _finish(self, round_: _Round) -> None:
        partitions = self._engine.partitions
        for partition, stored in round_.offsets.items():
            partition.progress.confirm(stored)
        for partition, pendings in round_.pending.items():
            self.copies.remove(partition, pendings)
            if partition in partitions:
                for owner, mine in itertools.groupby(pendings, attrgetter("owner")):
                    if owner is not None:
                        owner.stored(list(mine))
        for partition, messages in round_.admitted.items():
            if partition in partitions:  # or lost as the commit ended
                partition.admit_first(len(messages))
                if partition.gate and messages:
                    self.changed(partition, 0)
        if round_.pending or round_.admitted:
            self._engine.waiting.wake()
        for partition in self.copies.partitions:
            self.changed(partition, 0)
        if self._soon:
            self._due.now.set()


def _position(
    partition: PartitionState, pendings: Sequence[Pending], done: Sequence[int], *, distinct: bool
) -> StoredOffset:
    """Return the position to store with copies.

    Args:
        done: offsets that are done, too.
        distinct: see `PartitionState.stored`.
    """
    done_too: list[int] = [*done]
    ahead_too: list[int] = []
    for each in pendings:
        if each.message is not None and each.message.feed is partition.log:
            (ahead_too if each.first else done_too).append(each.message.record.offset)
    return partition.stored(done_too, ahead_too, distinct=distinct)
