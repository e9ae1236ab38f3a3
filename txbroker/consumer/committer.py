"""Stores positions, and copies of failed messages with them: in rounds, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import structlog
from msgspec import Struct

from txbroker.consumer.message import ReceivedMessage
from txbroker.consumer.partition import Work
from txbroker.core.consuming.position import METADATA_LENGTH_MAX
from txbroker.door.consuming import CommitFenced, Copy, CopyRefused, Partition, StoredOffset
from txbroker.error_text import safe_repr
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.net.timers import grown_pause_s

if TYPE_CHECKING:
    from txbroker.consumer.engine import Engine

log = structlog.wrap_logger(logging.getLogger(__name__))

_COPIES_MAX = 1000
"""Copies of one round: they are one Kafka transaction."""
_PAUSE_S, _PAUSE_MAX_S = 0.05, 5.0
_REST_S = 0.01
"""Between rounds: at full speed `max_batch` messages are done in less, and more commits would cost
the broker and this process a fifth of their time."""
_FLUSH_MIN_S, _FLUSH_PAUSE_S = 1.0, 0.1
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


class Pending(Struct, eq=False):
    """Copies that are stored with the position in which their message is done.

    Attributes:
        message: None: the copies are of no message.
        stored: called once they are.
        refused: called if one cannot be stored; returns what is stored in its place. None: the
            message is handled again.
        settled: the lane of the message has continued.
        first: the message is not done then, but its first stage.
    """

    work: Work
    message: ReceivedMessage | None
    copies: Sequence[Copy]
    stored: Callable[[], None]
    refused: Callable[[str], Sequence[Copy]] | None = None
    settled: bool = False
    first: bool = False


class _Round(Struct, eq=False):
    """Positions and copies that are stored together.

    Attributes:
        pending: copies.
        admitted: at most once: messages that count as done.
    """

    offsets: dict[Partition, StoredOffset]
    pending: list[Pending]
    admitted: dict[Work, list[ReceivedMessage]]
    works: list[Work]


class Committer:
    """Stores the positions of the partitions of one store.

    At most once (`before`) it stores the position first and then lets the messages be handled.

    Args:
        fenced: called with a partition that another owner has taken over.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        policy: CommitPolicy,
        fenced: Callable[[Work], None],
        *,
        traits: StoreTraits,
        before: bool = False,
    ) -> None:
        self._engine = engine
        self._store = store
        self._policy = policy
        self._before = before
        self._traits = traits
        self.fenced = fenced
        self._dirty: dict[Work, None] = {}
        self._pending: list[Pending] = []
        self._unknown: _Round | None = None
        """A round with copies whose result is not known."""
        self._count = 0
        self._max = 0 if before else policy.max_batch
        self._due_at: float = self._max
        """The count with which a round begins; infinite once one is to begin."""
        self._since_s = 0.0
        self._now = asyncio.Event()
        self.between_rounds = asyncio.Lock()
        """While it is held no round is in flight."""
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._refusals = 0
        """In a row: Kafka answers, and stores nothing."""
        self._again_now = asyncio.Event()
        """Ends a pause."""
        self._pauses: list[asyncio.TimerHandle] = []

    def start(self) -> None:
        """Begin to store positions."""
        self._task = asyncio.create_task(self._run(), name="txbroker consumer commits")

    async def close(self) -> None:
        """End without a last round; call `flush` before."""
        for pause in self._pauses:
            pause.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def changed(self, work: Work, count: int = 1) -> None:
        """Take note that messages of a partition are done or, at most once, have arrived."""
        if not work.dirty:
            work.dirty = True
            if not self._dirty:
                self._since_s = self._loop.time()
            self._dirty[work] = None
        self._count += count
        if self._count >= self._due_at:
            self._due_at = math.inf
            self._now.set()

    def store(self, pending: Pending, *, soon: bool = True) -> None:
        """Store copies with the partition's position.

        Args:
            soon: now, and not with the next positions.
        """
        work = pending.work
        if work not in self._engine.works:
            return
        self._pending.append(pending)
        self.changed(work, 0 if soon else 1)
        if soon:
            self._now.set()

    def withdraw(self, pending: Pending) -> bool:
        """Store copies no more, unless they may be stored already; return whether they are not."""
        unknown = self._unknown is not None and pending in self._unknown.pending
        if unknown and pending.work in self._engine.works:
            return False
        self._pending = [each for each in self._pending if each is not pending]
        return True

    def unavailable(self, work: Work) -> None:
        """Hand out nothing more until a round has succeeded."""
        if not self._refusals and work in self._engine.works:
            self._hold()
            self.changed(work, 0)
            self._now.set()

    @property
    def waiting(self) -> set[tuple[str, int, int]]:
        """Topic, partition and offset of the messages whose copies are not stored."""
        messages = [each.message for each in self._pending if each.message is not None]
        return {(message.topic, message.partition, message.offset) for message in messages}

    def forget(self, work: Work) -> None:
        """Store nothing more of a partition."""
        work.dirty = False
        self._dirty.pop(work, None)
        self._pending = [each for each in self._pending if each.work is not work]
        if self._unknown is not None:
            round_ = self._unknown
            round_.pending = [each for each in round_.pending if each.work is not work]

    async def flush(self, works: Collection[Work]) -> None:
        """Store the positions and copies of partitions now.

        Raises:
            KafkaUnavailable: they are not stored, or it is unknown.
        """
        while await self._in_doubt(works):
            await self._round()

    async def flush_finally(self, works: Collection[Work], within_s: float) -> None:
        """Store the final positions of partitions, with retries. At most once: without messages
        that count as done and were not handed out.

        If Kafka refuses, or `within_s` ends, they are not stored.
        """
        await self._flush_within(works, within_s)
        if withdrawn := [work for work in works if work.withdraw()]:
            for work in withdrawn:
                self.changed(work, 0)
            await self._flush_within(withdrawn, within_s)

    async def _flush_within(self, works: Collection[Work], within_s: float) -> None:
        until_s = self._loop.time() + max(_FLUSH_MIN_S, within_s)
        while True:
            left_s = until_s - self._loop.time()
            try:
                await asyncio.wait_for(self.flush(works), left_s)
            except (KafkaUnavailable, TimeoutError) as error:
                if left_s < _FLUSH_PAUSE_S or getattr(error, "lasting", False):
                    log.warning("positions not stored", error=safe_repr(error))
                    return
                await asyncio.sleep(_FLUSH_PAUSE_S)
            else:
                return

    async def _in_doubt(self, works: Collection[Work]) -> bool:
        """Wait for the round in flight, which may hold these partitions; return whether another
        one must follow."""
        async with self.between_rounds:
            return any(work.dirty for work in works)

    async def _run(self) -> None:
        failures = 0
        while True:
            await self._until_due()
            try:
                await self._round()
                failures = 0
                if not self._before:
                    await asyncio.sleep(_REST_S)
            except KafkaUnavailable as error:
                if isinstance(error, CommitFenced):
                    self._engine.counts["fenced"] += 1
                failures += 1
                log.warning("positions not stored", error=safe_repr(error), attempt=failures)
                pause_s = grown_pause_s(failures, _PAUSE_S, _PAUSE_MAX_S)
                if error.lasting or self._traits.exact:
                    self._hold()
                if error.lasting:
                    pause_s = grown_pause_s(self._refusals, *_REFUSED_PAUSES_S)
                self._again_now.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._again_now.wait(), pause_s)
            except Exception as error:
                self._engine.fail(error)
                return

    def _hold(self) -> None:
        """Hand out nothing more while nothing is stored."""
        self._refusals += 1
        self._engine.suspensions.hold_all(self)

    def _resume(self) -> None:
        if self._refusals:
            self._refusals = 0
            self._engine.suspensions.release_all(self)
            self._engine.waiting.wake()
            self.try_again()

    def try_again(self) -> None:
        """End the pause after a failure: Kafka has stored something."""
        self._again_now.set()

    async def _until_due(self) -> None:
        while not (self._now.is_set() or self._refusals):
            left_s = self._policy.max_interval_s
            if self._dirty:
                left_s += self._since_s - self._loop.time()
                if left_s <= 0:
                    return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._now.wait(), left_s)

    async def _round(self) -> None:
        async with self.between_rounds:
            self._now.clear()
            self._due_at = self._max
            if any(work.lease.ended(self._loop.time()) for work in self._dirty):
                raise CommitFenced("the lease has ended: nothing is stored")
            if self._unknown is not None and await self._is_stored(self._unknown):
                stored, self._unknown = self._unknown, None
                self._finish(stored)
                self._resume()
                return
            self._unknown = None
            round_ = self._begin()
            try:
                fenced: Collection[Partition] = ()
                if round_.offsets:
                    self._unknown = (
                        round_ if round_.pending and not self._traits.repeatable else None
                    )
                    copies = [copy for each in round_.pending for copy in each.copies]
                    failpoint("consumer.committing")
                    fenced = await self._store.commit(round_.offsets, copies) or ()
                    failpoint("consumer.committed")
            except CopyRefused as error:
                self._unknown = None
                self._refuse(round_, error)
            except CommitFenced:
                self._unknown = None
                self._again(round_)
                raise
            except BaseException:
                self._again(round_)
                raise
            else:
                self._unknown = None
                for work in round_.works:
                    if work.place in fenced:
                        self.fenced(work)
                self._finish(round_)
                self._resume()

    async def _is_stored(self, round_: _Round) -> bool:
        """Return whether a round without an answer was stored: a second attempt would write its
        copies again. It was stored as a whole or not at all."""
        mine = {work.place for work in self._engine.works if work.place in round_.offsets}
        found = await self._store.load(mine)
        return any(found.get(place) == round_.offsets[place] for place in mine)

    def _begin(self) -> _Round:
        works, self._dirty, self._count = list(self._dirty), {}, 0
        admitted = {work: self._to_admit(work) for work in works} if self._before else {}
        round_ = _Round({}, self._first_pending(), admitted, works)
        distinct = bool(round_.pending) and not self._traits.repeatable
        for work in works:
            work.dirty = False
            done_too = [message.record.offset for message in admitted.get(work, ())]
            ahead_too: list[int] = []
            for each in round_.pending:
                if each.message is not None and each.message.work is work:
                    (ahead_too if each.first else done_too).append(each.message.record.offset)
            stored = work.stored(done_too, ahead_too, distinct=distinct)
            if self._traits.exact and work.overflow:
                # After a crash messages would be handled again whose outputs are stored.
                round_.pending = [each for each in round_.pending if each.work is not work]
                stored = work.stored(distinct=distinct)
            round_.offsets[work.place] = stored
        return round_

    def _first_pending(self) -> list[Pending]:
        count = 0
        found: list[Pending] = []
        for each in self._pending:
            count += len(each.copies)
            if found and count > _COPIES_MAX:
                break
            found.append(each)
        return found

    def _to_admit(self, work: Work) -> list[ReceivedMessage]:
        """Return the messages to count as done before they are handled."""
        if self._engine.stopping:
            return []
        room = _UNHANDLED_MAX * self._policy.max_batch - len(work.unhandled)
        count = 0 if work.draining else max(0, min(self._policy.max_batch, room))
        return list(itertools.islice(work.gate, count))

    def _again(self, round_: _Round) -> None:
        for work in round_.works:
            if work in self._engine.works:
                self.changed(work, 0)

    def _refuse(self, round_: _Round, error: CopyRefused) -> None:
        """Store something else in place of a refused copy, or give back the messages of its
        partition."""
        first = next(
            (each for each in round_.pending if any(copy is error.copy for copy in each.copies)),
            None,
        )
        if first is None or first.work not in self._engine.works:  # its partition was lost
            self._again(round_)
            return
        if first.refused is not None:
            replace, first.refused = first.refused, None
            first.copies = replace(str(error))
            if not first.copies:
                self._pending.remove(first)
            self._again(round_)
            return
        work = first.work
        mine = [each for each in self._pending if each.work is work]
        self._pending = [each for each in self._pending if each.work is not work]
        for each in mine:
            if each.message is None:
                pause = self._loop.call_later(_PAUSE_MAX_S, self.store, each)
                self._pauses = [one for one in self._pauses if one.when() > self._loop.time()]
                self._pauses.append(pause)
        refused = [(each.message, each.settled) for each in mine if each.message is not None]
        self._engine.refused(work, refused, str(error))
        self._again(round_)

    def _finish(self, round_: _Round) -> None:
        for work in round_.works:
            work.confirm(round_.offsets[work.place])
        ended = set(map(id, round_.pending))
        self._pending = [each for each in self._pending if id(each) not in ended]
        for each in round_.pending:
            if each.work in self._engine.works:
                each.stored()
        for work, messages in round_.admitted.items():
            if work not in self._engine.works:
                continue  # lost as the commit ended
            for message in messages:
                work.gate.popleft()
                work.finished(message.record.offset)
            self._engine.admit(work, messages)
            if work.gate and messages:
                self.changed(work, 0)
        for each in self._pending:
            self.changed(each.work, 0)
        if self._pending and round_.pending:
            self._now.set()
