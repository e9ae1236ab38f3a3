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
from typing import Protocol, TypeAlias

import structlog
from msgspec import Struct

from txbroker.consumer.asides.released import Asides
from txbroker.consumer.engine.loop import Engine
from txbroker.consumer.positions import Positions, RecordsDeleted, StartOptions
from txbroker.consumer.rounds import CommitPolicy, Rounds, Store, StoreTraits
from txbroker.core.consuming.partition import PartitionState
from txbroker.core.consuming.position import Position
from txbroker.core.consuming.progress import PartitionProgress
from txbroker.core.records import Partition, Record
from txbroker.door.consuming import (
    ConsumingDoor,
    Fetcher,
    FetchingEnded,
    MemberListener,
    OffsetMissing,
    TopicIdentity,
)
from txbroker.door.writing import Fenced
from txbroker.error_text import safe_repr
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.failpoints import failpoint
from txbroker.net.tasks import Background
from txbroker.net.timers import grown_pause_s

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


MakeAsides: TypeAlias = Callable[[Engine, Rounds, Fetcher], Asides]


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


class PartitionSource(Protocol):
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


class PartitionReader:
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
        self._partitions: dict[Partition, PartitionState] = {}
        self._target: frozenset[Partition] = frozenset()
        self._news = asyncio.Event()
        self.claimed = asyncio.Event()
        """Everything that was assigned has a position, or at least that was tried."""
        self.claimed.set()
        self._releasing: set[Partition] = set()
        self._losses = 0
        self._begun: set[Partition] = set()
        """Partitions whose claim was stored and has not ended."""
        self._started = False
        """It has claimed what it was assigned at first: a later refusal is no mistake of its
        configuration, but a change that an operator may take back."""
        self._warned_s = -_WARNING_S
        self._background = Background(engine.fail)
        self._positions = Positions(door, options.start, engine.settlement.counts)
        self._fetcher = door.fetcher(self.deliver, self.failed)
        self._asides: Asides | None = None
        self._task: asyncio.Task[None] | None = None
        self._source: PartitionSource
        self._store: Store
        self._rounds: Rounds

    def start(self, source: PartitionSource, store: Store, asides: MakeAsides | None) -> None:
        """Begin to take partitions of a source over.

        Args:
            store: keeps positions.
            asides: makes what keeps failed messages; None: nothing is set aside.
        """
        options = self._options
        self._source, self._store = source, store
        self._rounds = Rounds(
            self._engine,
            store,
            options.commit,
            self._fenced,
            traits=options.traits,
        )
        if asides is not None:
            self._asides = asides(self._engine, self._rounds, self._fetcher)
        self._rounds.start()
        self._task = asyncio.create_task(self._run(), name="txbroker consumer reader")

    # --- from the source ---------------------------------------------------------------------

    def assigned(self, partitions: frozenset[Partition]) -> None:
        """See `MemberListener`."""
        self._target = partitions
        self._news.set()
        self.claimed.clear()

    def lost(self, why: str) -> None:
        """See `MemberListener`."""
        lost = list(self._partitions.values())
        log.warning("partitions lost", why=why, partitions=len(lost))
        self._engine.settlement.counts["fenced"] += len(lost)
        self._target = frozenset()
        self._losses += 1
        self._begun.clear()
        for partition in lost:
            self._drop(partition)
        self._background.start(self._revoked(lost))

    def deliver(
        self, partition: Partition, records: Sequence[Record], next_offset: int, end: int
    ) -> None:
        """See `Deliver`."""
        owned = self._partitions.get(partition)
        if owned is not None:
            self._engine.arrivals.deliver(owned, records, next_offset, end)
        elif self._asides is not None:
            self._asides.deliver(partition, records)

    def failed(self, partition: Partition, error: KafkaUnavailable) -> None:
        """See `FetchFailed`."""
        owned = self._partitions.get(partition)
        if isinstance(error, OffsetMissing) and owned is not None:
            self._background.start(self._continue_after_gap(owned))
        elif isinstance(error, OffsetMissing | FetchingEnded):
            self._engine.fail(error)
        elif self._engine.time() - self._warned_s > _WARNING_S:
            self._warned_s = self._engine.time()
            log.warning("fetch failed", partition=partition, error=safe_repr(error))

    def _fenced(self, partition: PartitionState) -> None:
        """Another consumer has taken a partition over in the store: drop it. If it is still
        assigned to this one, claim it again."""
        if self._partitions.get(partition.place) is partition:
            log.warning("partition fenced", partition=partition.place, token=partition.token)
            self._engine.settlement.counts["fenced"] += 1
            self._drop(partition)
            asyncio.get_running_loop().call_later(_PAUSE_S, self._news.set)

    # --- claim -------------------------------------------------------------------------------

    async def _run(self) -> None:
        failures = 0
        while True:
            await self._news.wait()
            self._news.clear()
            revoked = [place for place in self._partitions if place not in self._target]
            if revoked := [place for place in revoked if place not in self._releasing]:
                self._releasing.update(revoked)
                self._background.start(
                    self._release([self._partitions[place] for place in revoked], self._losses)
                )
            held = self._partitions.keys() | self._releasing
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
        partitions = [self._partition(place) for place in places]
        await self._positions.restore(partitions, stored, identities)
        if self._options.on_assign is not None:
            chosen = await self._call(self._options.on_assign, partitions)
            for partition in partitions:
                if partition.place in chosen:
                    partition.progress.begin_at(Position(chosen[partition.place]))
        if losses != self._losses:
            # Another owner may have moved the positions: in a new generation the commit would
            # move them back.
            return
        for partition in partitions if not self._options.before else ():
            again = partition.place in self._begun
            partition.begin_start(self._options.commit.max_batch, again=again)
        if await self._store.commit(
            {partition.place: partition.stored() for partition in partitions}
        ):
            raise Fenced("another consumer has taken partitions over meanwhile")
        self._rounds.outage.try_again()
        self._begun.update(places)
        failpoint("consumer.claimed")
        try:
            if self._asides is not None:
                await self._asides.open(
                    [partition for partition in partitions if not partition.log.retries]
                )
            if losses != self._losses:
                self._close_asides(partitions)
                return
        except BaseException:
            self._close_asides(partitions)
            raise
        self._begun.difference_update(places)
        for partition in partitions:
            self._partitions[partition.place] = partition
            self._engine.partitions.add(partition, self._rounds, self._fetcher)
            self._fetcher.partition_bytes = self._engine.partitions.memory.fetch_bytes
            self._fetcher.add(partition.place, partition.progress.position.low)
            if self._asides is not None:
                self._asides.begin(partition)
        log.info("partitions assigned", partitions=[partition.place for partition in partitions])

    async def _identities(self, topics: Collection[str]) -> Mapping[str, TopicIdentity]:
        try:
            return await self._door.topics(topics)
        except ConfigurationError as error:
            if not self._started:
                raise
            raise KafkaUnavailable(str(error)) from None

    def _partition(self, place: Partition) -> PartitionState:
        return PartitionState(
            place,
            self._engine.queues,
            self._source,
            PartitionProgress(self._options.traits.metadata_max),
            retries=place[0] == self._options.retry_topic,
            before=self._options.before,
        )

    def _close_asides(self, partitions: Sequence[PartitionState]) -> None:
        for partition in partitions:
            if self._asides is not None:
                self._asides.close(partition)

    def check_topics(self, identities: Mapping[str, TopicIdentity]) -> None:
        """Stop if a topic was deleted and created again."""
        for (topic, _number), partition in self._partitions.items():
            identity = identities.get(topic)
            if identity is not None and partition.topic_id not in ("", identity.id.hex()):
                self._engine.fail(
                    RecordsDeleted(
                        f"topic {topic} was deleted and created again: start the consumer again; "
                        "with on_gap='skip' it continues at the beginning"
                    )
                )

    async def _continue_after_gap(self, partition: PartitionState) -> None:
        failures = 0
        while self._partitions.get(partition.place) is partition:
            try:
                begin = await self._positions.begin_after_gap(partition)
            except KafkaUnavailable as error:
                failures += 1
                log.warning("fetch failed", partition=partition.place, error=safe_repr(error))
                await asyncio.sleep(grown_pause_s(failures, _PAUSE_S, _PAUSE_MAX_S))
            else:
                if self._partitions.get(partition.place) is partition:
                    self._engine.arrivals.deliver(partition, (), begin, partition.end)
                    self._fetcher.add(partition.place, begin)
                return

    # --- release -----------------------------------------------------------------------------

    async def _release(self, partitions: Sequence[PartitionState], losses: int) -> None:
        """Finish with revoked partitions, store their positions, then let others have them."""
        await self._drain(partitions)
        failpoint("consumer.drained")
        await self._flush(partitions)
        failpoint("consumer.flushed")
        if losses == self._losses:
            await self._revoked(partitions)
            await self._give_up(partitions, losses)
            failpoint("consumer.released")
        self._releasing.difference_update(partition.place for partition in partitions)
        self._news.set()

    async def _flush(self, partitions: Sequence[PartitionState]) -> None:
        """Store the final positions."""
        for partition in partitions:
            if partition.starts.release():
                self._rounds.changed(partition, 0)
        await self._rounds.flush_finally(partitions, self._options.drain_s)

    async def _give_up(self, partitions: Sequence[PartitionState], losses: int) -> None:
        """Let others have partitions, once no round with them is in flight: it would be stored in
        the generation that follows, over the positions of their next owner."""
        async with self._rounds.paused(self._options.drain_s):
            if losses == self._losses:
                for partition in partitions:
                    self._drop(partition)
                self._disown([partition.place for partition in partitions])

    async def _drain(self, partitions: Sequence[PartitionState]) -> None:
        """Wait for the messages in flight, for up to `drain_s`; then cancel their handlers."""
        for partition in partitions:
            self._fetcher.remove(partition.place)
        draining = asyncio.gather(
            *(self._engine.partitions.drained(partition) for partition in partitions)
        )
        try:
            await asyncio.wait_for(draining, self._options.drain_s)
        except TimeoutError:
            log.warning(
                "handlers cancelled after drain_s", partitions=[w.place for w in partitions]
            )
            for partition in partitions:
                self._engine.partitions.interrupt(partition)
            # The next owner should not meet a handler that is about to end.
            ended = asyncio.gather(
                *(self._engine.partitions.drained(partition) for partition in partitions)
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended, _CANCEL_S)

    async def _revoked(self, partitions: Sequence[PartitionState]) -> None:
        if partitions and self._options.on_revoke is not None:
            await self._call(self._options.on_revoke, partitions)

    async def _call(
        self, hook: Hook, partitions: Sequence[PartitionState]
    ) -> Mapping[Partition, int]:
        places = [partition.place for partition in partitions if not partition.log.retries]
        result = hook(places) if places else None
        return (await result if inspect.isawaitable(result) else result) or {}

    def _drop(self, partition: PartitionState) -> None:
        self._fetcher.remove(partition.place)
        self._engine.partitions.remove(partition)
        self._rounds.forget(partition)
        self._partitions.pop(partition.place, None)
        self._close_asides([partition])
        self._fetcher.partition_bytes = self._engine.partitions.memory.fetch_bytes

    async def close(self) -> None:
        """End with all partitions: store their positions. Messages that are still in flight, such
        as pulled ones that are not done, are given up."""
        if self._task is None:
            await self._fetcher.close()
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        partitions = [
            partition
            for place, partition in self._partitions.items()
            if place not in self._releasing
        ]
        for partition in partitions:
            partition.draining = True
            self._fetcher.remove(partition.place)
            self._engine.partitions.interrupt(partition)
        try:
            await self._flush(partitions)
            await self._background.wait(self._options.drain_s)
            await self._revoked(partitions)
        finally:
            await self._background.end()
            for partition in list(self._partitions.values()):
                self._drop(partition)
            if self._asides is not None:
                await self._asides.end()
            await self._rounds.close()
            await self._fetcher.close()
