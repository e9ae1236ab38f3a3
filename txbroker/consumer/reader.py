"""A reader: the partitions of one group member, or, without a group, all partitions.

It claims partitions that are assigned, drains and releases those that are revoked, and drops those
that are lost. Partitions that stay are not touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import structlog
from msgspec import Struct

from txbroker.consumer.asides import Asides
from txbroker.consumer.committer import CommitPolicy, Committer, Store, StoreTraits
from txbroker.consumer.message import MessageLease
from txbroker.consumer.partition import Work
from txbroker.consumer.positions import Positions, RecordsDeleted, StartOptions
from txbroker.core.consuming.position import (
    Position,
)
from txbroker.core.records import Record
from txbroker.door.consuming import (
    ConsumingDoor,
    Fetcher,
    FetchingEnded,
    MemberListener,
    OffsetMissing,
    Partition,
    TopicIdentity,
)
from txbroker.door.writing import Fenced
from txbroker.error_text import safe_repr
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.net.tasks import Background
from txbroker.net.timers import grown_pause_s

if TYPE_CHECKING:
    from txbroker.consumer.engine import Engine

log = structlog.wrap_logger(logging.getLogger(__name__))

_PAUSE_S, _PAUSE_MAX_S = 1.0, 60.0
_CANCEL_S = 1.0
"""How long cancelled handlers may take to end."""
_WARNING_S = 10.0
"""Between warnings of fetches that fail, which are retried."""
_FENCED_PAUSE_S = 0.1
"""A rebalance may refuse a commit although the partition stays."""

Offsets: TypeAlias = Mapping[Partition, int] | None
Hook: TypeAlias = Callable[[Sequence[Partition]], Awaitable[Offsets] | Offsets]


MakeAsides: TypeAlias = "Callable[[Engine, Committer, Fetcher], Asides]"


class ReaderOptions(Struct, frozen=True, kw_only=True):
    """How a reader treats partitions.

    Attributes:
        start: where partitions begin.
        drain_s: how long a revoked partition finishes the messages in flight, seconds.
        retry_topic: of the group, "" without one.
        commit: when positions are stored.
        traits: of the store.
        before: at most once: they are stored before messages are handed out.
        on_assign: called with the assigned partitions; may return offsets to begin at.
        on_revoke: called with partitions that are finished and will be released, or are lost.
    """

    start: StartOptions
    drain_s: float
    retry_topic: str
    commit: CommitPolicy
    traits: StoreTraits
    before: bool
    on_assign: Hook | None
    on_revoke: Hook | None


class Source(Protocol):
    """Assigns partitions: a group member, or `AllPartitions`."""

    owned: set[Partition]

    @property
    def deadline_s(self) -> float: ...

    def rejoin(self) -> None: ...


class AllPartitions:
    """Assigns all partitions of the topics, with the interface of a group member.

    Args:
        listener: receives the assignment.
    """

    deadline_s = math.inf

    def __init__(self, listener: MemberListener) -> None:
        self.owned: set[Partition] = set()
        self._listener = listener
        self._assigned: frozenset[Partition] = frozenset()

    def subscribe(self, topics: Mapping[str, TopicIdentity]) -> None:
        """Assign all partitions of these topics."""
        partitions = frozenset(
            (name, number) for name, topic in topics.items() for number in range(topic.partitions)
        )
        if partitions != self._assigned:
            self._assigned = partitions
            self._listener.assigned(partitions)

    def rejoin(self) -> None:
        """No other consumer takes the partitions."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Reader:
    """The partitions of one source; a `MemberListener`.

    Args:
        engine: hands out the messages.
        door: to Kafka.
        options: see `ReaderOptions`.
    """

    def __init__(self, engine: Engine, door: ConsumingDoor, options: ReaderOptions) -> None:
        self._engine = engine
        self._door = door
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._works: dict[Partition, Work] = {}
        self._target: frozenset[Partition] = frozenset()
        self._news = asyncio.Event()
        self.claimed = asyncio.Event()
        """Everything that was assigned has a position, or at least that was tried."""
        self.claimed.set()
        self._releasing: set[Partition] = set()
        self._losses = 0
        self._started = False
        """It has claimed what it was assigned at first: a later refusal is no mistake of its
        configuration, but a change that an operator may take back."""
        self._warned_s = -_WARNING_S
        self._background = Background(engine.fail)
        self._positions = Positions(door, options.start, engine.counts)
        self._fetcher = door.fetcher(self.deliver, self.failed)
        self._asides: Asides | None = None
        self._task: asyncio.Task[None] | None = None
        self._source: Source
        self._store: Store
        self._committer: Committer

    def start(self, source: Source, store: Store, asides: MakeAsides | None) -> None:
        """Begin to take partitions of a source over.

        Args:
            store: keeps positions.
            asides: makes what keeps failed messages; None: nothing is set aside.
        """
        options = self._options
        self._source, self._store = source, store
        self._committer = Committer(
            self._engine,
            store,
            options.commit,
            self._fenced,
            traits=options.traits,
            before=options.before,
        )
        if asides is not None:
            self._asides = asides(self._engine, self._committer, self._fetcher)
        self._committer.start()
        self._task = asyncio.create_task(self._run(), name="txbroker consumer reader")

    # --- from the source ---------------------------------------------------------------------

    def assigned(self, partitions: frozenset[Partition]) -> None:
        """See `MemberListener`."""
        self._target = partitions
        self._news.set()
        self.claimed.clear()

    def lost(self, why: str) -> None:
        """See `MemberListener`."""
        lost = list(self._works.values())
        log.warning("partitions lost", why=why, partitions=len(lost))
        self._engine.counts["fenced"] += len(lost)
        self._target = frozenset()
        self._losses += 1
        for work in lost:
            self._drop(work)
        self._background.start(self._revoked(lost))

    def deliver(
        self, partition: Partition, records: Sequence[Record], next_offset: int, end: int
    ) -> None:
        """See `Deliver`."""
        work = self._works.get(partition)
        if work is not None:
            self._engine.deliver(work, records, next_offset, end)
        elif self._asides is not None:
            self._asides.deliver(partition, records)

    def failed(self, partition: Partition, error: KafkaUnavailable) -> None:
        """See `FetchFailed`."""
        work = self._works.get(partition)
        if isinstance(error, OffsetMissing) and work is not None:
            self._background.start(self._continue_after_gap(work))
        elif isinstance(error, OffsetMissing | FetchingEnded):
            self._engine.fail(error)
        elif self._loop.time() - self._warned_s > _WARNING_S:
            self._warned_s = self._loop.time()
            log.warning("fetch failed", partition=partition, error=safe_repr(error))

    def _fenced(self, work: Work) -> None:
        """Another consumer has taken a partition over in the store: drop it. If it is still
        assigned to this one, claim it again."""
        if self._works.get(work.place) is work:
            log.warning("partition fenced", partition=work.place, token=work.token)
            self._engine.counts["fenced"] += 1
            self._drop(work)
            self._loop.call_later(_PAUSE_S, self._news.set)

    # --- claim -------------------------------------------------------------------------------

    async def _run(self) -> None:
        failures = 0
        while True:
            await self._news.wait()
            self._news.clear()
            revoked = [place for place in self._works if place not in self._target]
            if revoked := [place for place in revoked if place not in self._releasing]:
                self._releasing.update(revoked)
                works = [self._works[place] for place in revoked]
                self._background.start(self._release(works, self._losses))
            held = self._works.keys() | self._releasing
            self._disown(self._source.owned - held - self._target)
            try:
                if new := sorted(self._target - held):
                    await self._claim(new)
                failures, self._started = 0, True
                if not self._news.is_set():
                    self.claimed.set()
            except Exception as error:
                self.claimed.set()
                if not isinstance(error, KafkaUnavailable) or (error.lasting and not self._started):
                    self._engine.fail(error)
                    return
                failures += 1
                log.warning("partitions not claimed", error=safe_repr(error), attempt=failures)
                pause_s = _FENCED_PAUSE_S if isinstance(error, Fenced) else _PAUSE_S
                pause_s = grown_pause_s(failures, pause_s, _PAUSE_MAX_S)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), pause_s)
                self._news.set()

    def _disown(self, places: Collection[Partition]) -> None:
        """Let others have partitions."""
        if places:
            self._source.owned.difference_update(places)
            self._source.rejoin()

    async def _claim(self, places: Sequence[Partition]) -> None:
        """Take partitions over: raise their tokens in the store, which an earlier owner cannot do
        any more, then begin at their positions."""
        losses = self._losses
        self._source.owned.update(places)
        stored = await self._store.load(places)
        failpoint("consumer.loaded")
        identities = await self._identities({topic for topic, _number in places})
        works = [self._work(place) for place in places]
        await self._positions.restore(works, stored, identities)
        if self._options.on_assign is not None:
            chosen = await self._call(self._options.on_assign, works)
            for work in works:
                if work.place in chosen:
                    work.position = Position(chosen[work.place])
                    work.ahead.clear()
        if losses != self._losses:
            # Another owner may have moved the positions: in a new generation the commit would
            # move them back.
            return
        for work in works if not self._options.before else ():
            work.begin_start(self._options.commit.max_batch)
        if await self._store.commit({work.place: work.stored() for work in works}):
            raise Fenced("another consumer has taken partitions over meanwhile")
        self._committer.try_again()
        failpoint("consumer.claimed")
        try:
            if self._asides is not None:
                await self._asides.open([work for work in works if not work.is_retry])
            if losses != self._losses:
                self._close_asides(works)
                return
        except BaseException:
            self._close_asides(works)
            raise
        for work in works:
            self._works[work.place] = work
            self._engine.add(work, self._committer, self._fetcher)
            self._fetcher.partition_bytes = self._engine.memory.fetch_bytes
            self._fetcher.add(work.place, work.position.low)
            if self._asides is not None:
                self._asides.begin(work)
        log.info("partitions assigned", partitions=[work.place for work in works])

    async def _identities(self, topics: Collection[str]) -> Mapping[str, TopicIdentity]:
        try:
            return await self._door.topics(topics)
        except ConfigurationError as error:
            if not self._started:
                raise
            raise KafkaUnavailable(str(error)) from None

    def _work(self, place: Partition) -> Work:
        lease = MessageLease(self._source, self._loop)
        work = Work(self._engine, place, lease, is_retry=place[0] == self._options.retry_topic)
        work.metadata_max = self._options.traits.metadata_max
        return work

    def _close_asides(self, works: Sequence[Work]) -> None:
        for work in works:
            if self._asides is not None:
                self._asides.close(work)

    def check_topics(self, identities: Mapping[str, TopicIdentity]) -> None:
        """Stop if a topic was deleted and created again."""
        for (topic, _number), work in self._works.items():
            identity = identities.get(topic)
            if identity is not None and work.topic_id not in ("", identity.id.hex()):
                self._engine.fail(
                    RecordsDeleted(
                        f"topic {topic} was deleted and created again: start the consumer again; "
                        "with on_gap='skip' it continues at the beginning"
                    )
                )

    async def _continue_after_gap(self, work: Work) -> None:
        failures = 0
        while self._works.get(work.place) is work:
            try:
                begin = await self._positions.begin_after_gap(work)
            except KafkaUnavailable as error:
                failures += 1
                log.warning("fetch failed", partition=work.place, error=safe_repr(error))
                await asyncio.sleep(grown_pause_s(failures, _PAUSE_S, _PAUSE_MAX_S))
            else:
                if self._works.get(work.place) is work:
                    self._engine.deliver(work, (), begin, work.end)
                    self._fetcher.add(work.place, begin)
                return

    # --- release -----------------------------------------------------------------------------

    async def _release(self, works: Sequence[Work], losses: int) -> None:
        """Finish with revoked partitions, store their positions, then let others have them."""
        await self._drain(works)
        failpoint("consumer.drained")
        await self._flush(works)
        failpoint("consumer.flushed")
        if losses == self._losses:
            await self._revoked(works)
            await self._give_up(works, losses)
            failpoint("consumer.released")
        self._releasing.difference_update(work.place for work in works)
        self._news.set()

    async def _flush(self, works: Sequence[Work]) -> None:
        """Store the final positions."""
        for work in works:
            if work.end_start():
                self._committer.changed(work, 0)
        await self._committer.flush_finally(works, self._options.drain_s)

    async def _give_up(self, works: Sequence[Work], losses: int) -> None:
        """Let others have partitions, once no round with them is in flight: it would be stored in
        the generation that follows, over the positions of their next owner."""
        async with self._committer.between_rounds:
            if losses == self._losses:
                for work in works:
                    self._drop(work)
                self._disown([work.place for work in works])

    async def _drain(self, works: Sequence[Work]) -> None:
        """Wait for the messages in flight, for up to `drain_s`; then cancel their handlers."""
        for work in works:
            self._fetcher.remove(work.place)
        draining = asyncio.gather(*(self._engine.drained(work) for work in works))
        try:
            await asyncio.wait_for(draining, self._options.drain_s)
        except TimeoutError:
            log.warning("handlers cancelled after drain_s", partitions=[w.place for w in works])
            for work in works:
                self._engine.interrupt(work)
            # The next owner should not meet a handler that is about to end.
            ended = asyncio.gather(*(self._engine.drained(work) for work in works))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended, _CANCEL_S)

    async def _revoked(self, works: Sequence[Work]) -> None:
        if works and self._options.on_revoke is not None:
            await self._call(self._options.on_revoke, works)

    async def _call(self, hook: Hook, works: Sequence[Work]) -> Mapping[Partition, int]:
        places = [work.place for work in works if not work.is_retry]
        result = hook(places) if places else None
        return (await result if inspect.isawaitable(result) else result) or {}

    def _drop(self, work: Work) -> None:
        self._fetcher.remove(work.place)
        self._engine.remove(work)
        self._committer.forget(work)
        self._works.pop(work.place, None)
        self._close_asides([work])
        self._fetcher.partition_bytes = self._engine.memory.fetch_bytes

    async def close(self) -> None:
        """End with all partitions: store their positions. Messages that are still in flight, such
        as pulled ones that are not done, are given up."""
        if self._task is None:
            await self._fetcher.close()
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        works = [work for place, work in self._works.items() if place not in self._releasing]
        for work in works:
            work.draining = True
            self._fetcher.remove(work.place)
            self._engine.interrupt(work)
        try:
            await self._flush(works)
            await self._background.wait(self._options.drain_s)
            await self._revoked(works)
        finally:
            await self._background.end()
            for work in list(self._works.values()):
                self._drop(work)
            if self._asides is not None:
                await self._asides.end()
            await self._committer.close()
            await self._fetcher.close()
