"""A consumer's door to a `MemoryKafka`: the same contract as the door to a real Kafka.

The door may be used in another event loop than that of its Kafka, such as that of an
`InMemoryBroker`: all access to the Kafka runs in the Kafka's loop, and listeners are called in the
user's. Each side passes plain function calls to the other one, which keep their order.

Differences from a real Kafka, besides those of `txbroker.testing.memory`: a commit is stored at
once or never, not later; a member is silent only on demand (`MemoryGroup.silence`); fetching that
failed is retried when anything changes, without back-off; rebalances do not wait for heartbeats.

The protocols in `txbroker.door.consuming` document the methods and their errors.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from txbroker.core.consuming.assignment import Subscription
from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Cause, Partition, Record
from txbroker.door.consuming import (
    EARLIEST,
    LATEST,
    Deliver,
    Fetcher,
    FetchFailed,
    GroupDescription,
    GroupMember,
    MemberListener,
    OffsetMissing,
    TopicIdentity,
    TopicSpec,
)
from txbroker.door.owners import own_by_name, owner_of, unknown_target
from txbroker.door.writing import Copy, Fenced, GroupOffsets, PositionRecord, Refused, Writer
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.testing.groups import Seat
from txbroker.testing.members import CUT_OFF
from txbroker.testing.memory import MemoryKafka
from txbroker.testing.topics import (
    MESSAGE_BYTES_MAX,
    MemoryEvidence,
    MemoryPartition,
    valid_name,
)
from txbroker.testing.writer import MemoryWriter

_PIECE_RECORDS = 500
_SETTLED_POLL_S = 0.01
_NUMBERS = itertools.count(1)
"""Of dynamic members."""

_UNREADABLE = "not authorized to read topic {}: grant Read on it, or correct its name"

T = TypeVar("T")


class _Side:
    """An event loop, the user's or the Kafka's, and calls to it from the other one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def post(self, call: Callable[..., object], *args: object) -> None:
        """Call a function soon. Nothing is called in a loop that has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    async def run(self, call: Callable[[], T]) -> T:
        """Call a function, and return its result.

        Raises:
            KafkaUnavailable: the loop has ended.
        """

        async def work() -> T:
            return call()

        return await self.wait(work())

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and return its result; see `run`."""
        if self._loop.is_closed():
            work.close()
            raise KafkaUnavailable("the in-memory broker is closed")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


class MemoryConsumingDoor:
    """A `txbroker.door.consuming.ConsumingDoor` to a Kafka in memory.

    Args:
        kafka: shared by all doors.
        home: the event loop of `kafka`; None: the one in which the door is started.
    """

    def __init__(self, kafka: MemoryKafka, home: asyncio.AbstractEventLoop | None = None) -> None:
        self._kafka = kafka
        self._home_loop = home

    @property
    def _home(self) -> _Side:
        if self._home_loop is None:
            self._home_loop = asyncio.get_running_loop()
        return _Side(self._home_loop)

    async def start(self) -> None:
        await self._home.run(self._kafka.require_up)

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    async def topics(self, names: Collection[str] | None = None) -> dict[str, TopicIdentity]:
        def look() -> dict[str, TopicIdentity]:
            self._kafka.require_up()
            known = self._kafka.topics
            for name in names or ():
                if name in known and not known[name].authorized:
                    raise ConfigurationError(_UNREADABLE.format(name))
            return {
                name: TopicIdentity(topic.id.to_bytes(16), len(topic.partitions))
                for name, topic in known.items()
                if topic.authorized and (names is None or name in names)
            }

        return await self._home.run(look)

    async def target(self, topic: str, prefix: str) -> int | Cause:
        async def look() -> int | Cause:
            self._kafka.require_up()
            cause = own_by_name(topic, prefix) or await owner_of(
                topic, lambda owner: owner.exists(MemoryEvidence(self._kafka))
            )
            found = self._kafka.topics.get(topic)
            return cause or (unknown_target(topic) if found is None else len(found.partitions))

        return await self._home.wait(look())

    async def offsets(
        self, partitions: Collection[Partition], time_ms: int
    ) -> dict[Partition, int]:
        def look() -> dict[Partition, int]:
            self._kafka.require_up()
            return {at: _offset(self._kafka.partition(*at), time_ms) for at in partitions}

        return await self._home.run(look)

    async def settled_end(self, partition: Partition) -> int:
        end = await self._home.run(lambda: self._kafka.partition(*partition).end)
        while True:
            if (await self.offsets([partition], LATEST))[partition] >= end:
                return end
            await asyncio.sleep(_SETTLED_POLL_S)

    async def create(self, topics: Collection[TopicSpec]) -> None:
        def create() -> None:
            self._kafka.require_up()
            for spec in topics:
                if spec.name not in self._kafka.topics:
                    self._create(spec)

        await self._home.run(create)

    def _create(self, spec: TopicSpec) -> None:
        reason = self._kafka.create_refusal
        if not valid_name(spec.name):
            reason = "topic names have 1 to 249 of the characters a-z, A-Z, 0-9, '.', '_' and '-'"
        elif spec.replication not in (-1, 1):
            reason = f"replication factor {spec.replication}, but there is one broker"
        if reason:
            raise ConfigurationError(f"Kafka refuses to create topic {spec.name}: {reason}")
        self._kafka.create_topic(
            spec.name,
            None if spec.partitions == -1 else spec.partitions,
            message_bytes_max=int(spec.configs.get("max.message.bytes", MESSAGE_BYTES_MAX)),
            log_append_time=spec.configs.get("message.timestamp.type") == "LogAppendTime",
        )

    def member(
        self,
        group: str,
        instance: str | None,
        listener: MemberListener,
        *,
        exact: bool = False,
        **timing: Any,
    ) -> GroupMember:
        return MemoryMember(
            self._home, self._kafka, group, instance, listener, MemoryTiming(**timing)
        )

    def fetcher(self, deliver: Deliver, failed: FetchFailed) -> Fetcher:
        return MemoryFetcher(self._home, self._kafka, deliver, failed)

    async def read(self, partition: Partition, start: int, end: int) -> list[Record]:
        def look() -> list[Record]:
            self._kafka.require_up()
            log = self._kafka.partition(*partition)
            return log.read(max(start, log.begin), min(end, log.stable_end))

        return await self._home.run(look)

    async def append(self, topic: str, partition: int, records: Sequence[Record]) -> None:
        def write() -> None:
            self._kafka.require_up()
            try:
                self._kafka.write(topic, partition, records, None)
            except Refused as error:
                raise TopicRefused(error.cause.message) from None

        await self._home.run(write)

    async def store(self, group: str, copies: Sequence[Copy]) -> None:
        def write() -> None:
            self._kafka.require_up()
            MemoryWriter(self._home, self._kafka, group).store(copies)

        await self._home.run(write)

    def writer(
        self, transactional_id: str, position: PositionRecord, *, take: bool = False
    ) -> Writer:
        return MemoryWriter(self._home, self._kafka, transactional_id, position, take=take)

    async def groups(self) -> list[str]:
        def look() -> list[str]:
            self._kafka.require_up()
            return sorted(name for name, group in self._kafka.groups.items() if group.exists)

        return await self._home.run(look)

    async def describe(self, group: str) -> GroupDescription:
        def look() -> GroupDescription:
            self._kafka.require_up()
            return self._kafka.group(group).describe()

        return await self._home.run(look)

    async def committed(self, group: str) -> dict[Partition, StoredOffset]:
        def look() -> dict[Partition, StoredOffset]:
            self._kafka.require_up()
            return dict(self._kafka.group(group).offsets)

        return await self._home.run(look)


def _offset(log: MemoryPartition, time_ms: int) -> int:
    if time_ms == EARLIEST:
        return log.begin
    if time_ms == LATEST:
        return log.stable_end
    records = log.read(log.begin, log.stable_end)
    found = (record.offset for record in records if record.timestamp_ms >= time_ms)
    return next(found, log.stable_end)


class TopicRefused(KafkaUnavailable):
    """A topic may not be read or written, or refuses a record."""

    lasting = True


class MemoryTiming(NamedTuple):
    """Times of a group member, seconds."""

    session_s: float = 60.0
    heartbeat_s: float = 3.0
    lease_s: float = 30.0


class MemoryMember:
    """A `txbroker.door.consuming.GroupMember` in memory.

    Attributes:
        name: the instance id, or the name of a dynamic member: faults of `MemoryGroup` take it.
    """

    def __init__(
        self,
        home: _Side,
        kafka: MemoryKafka,
        group: str,
        instance: str | None,
        listener: MemberListener,
        timing: MemoryTiming,
    ) -> None:
        self.name = instance or f"member-{next(_NUMBERS)}"
        self.owned: set[Partition] = set()
        self._home = home
        self._group_name = group
        self._group = kafka.group(group)
        self._writer = MemoryWriter(home, kafka, f"{group}/{self.name}/{next(_NUMBERS)}")
        self._static = instance is not None
        self._listener = listener
        self._timing = timing
        self._loop = asyncio.get_running_loop()
        self._topics: frozenset[str] = frozenset()
        self._generation = -1
        self._share: frozenset[Partition] = frozenset()
        self._answered_s = 0.0
        self._lost = False
        self._seat: Seat | None = None
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._beats: asyncio.TimerHandle | None = None

    @property
    def deadline_s(self) -> float:
        return 0.0 if self._generation < 0 else self._answered_s + self._timing.lease_s

    async def start(self) -> None:
        await self._home.run(self._group.check_usable)
        self._enter()
        self._beat()
        await self._started

    def subscribe(self, topics: Collection[str]) -> None:
        self._topics = frozenset(topics)
        if self._seat is not None:
            self._home.post(self._group.subscribe, self._seat, self._topics)

    def rejoin(self) -> None:
        if self._seat is not None:
            self._home.post(self._group.rejoin, self._seat)

    async def close(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
        seat, self._seat = self._seat, None
        if seat is not None:
            with suppress(KafkaUnavailable):
                await self._home.run(partial(self._group.leave, seat))

    async def load(self, partitions: Collection[Partition]) -> dict[Partition, StoredOffset]:
        return await self._home.run(partial(self._group.load, tuple(partitions)))

    async def commit(
        self, offsets: Mapping[Partition, StoredOffset], copies: Sequence[Copy] = ()
    ) -> None:
        seat = self._seat
        if seat is None or self._generation < 0:
            raise Fenced("this consumer is not in its group: nothing is stored")
        stored = GroupOffsets(self._group_name, dict(offsets), cast(Any, seat))

        def store() -> None:
            self._writer.lost, self._group.lost_commit = self._group.lost_commit, None
            self._writer.store(copies, [stored])

        await self._home.run(store)

    # --- in the user's loop ------------------------------------------------------------------

    def _enter(self) -> None:
        notices = _Notices(_Side(self._loop), self)
        self._seat = Seat(self.name, notices, self._timing.session_s, static=self._static)
        self._home.post(self._group.enter, self._seat, self._topics)

    def _beat(self) -> None:
        """Send a heartbeat, and the following ones."""
        self._beats = self._loop.call_later(self._timing.heartbeat_s, self._beat)
        if self._seat is None:
            return
        now_s = self._loop.time()
        if self._generation >= 0 and now_s - self._answered_s > self._timing.session_s:
            self.end(self._seat, CUT_OFF)
            self.rejoin()
        self._home.post(self._ask, self._seat, now_s)

    def _ask(self, seat: Seat, sent_s: float) -> None:
        """Answer a heartbeat, in the Kafka's loop."""
        if self._group.beat(seat):
            _Side(self._loop).post(self.confirmed, seat, sent_s)

    def confirmed(self, seat: Seat, sent_s: float) -> None:
        """Extend the lease."""
        if seat is self._seat:
            self._answered_s = max(self._answered_s, sent_s)

    def prepare(self, seat: Seat) -> None:
        """Join the generation that is prepared."""
        if seat is self._seat:
            # The user may still prepare to use the newest assignment.
            mine = Subscription(self._topics, self._share.union(self.owned), self._generation)
            self._home.post(self._group.join, seat, mine)

    def begin(self, seat: Seat, generation: int, share: frozenset[Partition]) -> None:
        """Begin a generation."""
        if seat is not self._seat:
            return
        self._generation, self._share = generation, share
        self._lost = False
        self.confirmed(seat, self._loop.time())
        if not self._started.done():
            self._started.set_result(None)
        self._listener.assigned(share)

    def end(self, seat: Seat, why: str) -> None:
        """End the membership."""
        if seat is self._seat and not self._lost:
            self._generation, self._share, self._lost = -1, frozenset(), True
            self.owned.clear()
            self._listener.lost(why)

    def admit(self, seat: Seat) -> None:
        """Enter the group again after the end."""
        if seat is self._seat:
            self._enter()


class _Notices:
    """Passes the coordinator's notices to a member in its loop."""

    def __init__(self, user: _Side, member: MemoryMember) -> None:
        self._user = user
        self._member = member

    def prepare(self, seat: Seat) -> None:
        self._user.post(self._member.prepare, seat)

    def begin(self, seat: Seat, generation: int) -> None:
        self._user.post(self._member.begin, seat, generation, seat.share)

    def end(self, seat: Seat, why: str) -> None:
        self._user.post(self._member.end, seat, why)

    def admit(self, seat: Seat) -> None:
        self._user.post(self._member.admit, seat)


class _Fetch:
    """One partition from `add` to `remove`.

    Attributes:
        offset: of the next record; changed by the user's side only.
        asked: whether the Kafka's side has to answer, or waits for records.
        reported: next offset and end of the newest answer, so that only news follow.
    """

    def __init__(self, partition: Partition, offset: int) -> None:
        self.partition = partition
        self.offset = offset
        self.paused = False
        self.removed = False
        self.asked = False
        self.reported: tuple[int, int] | None = None
        self.log: MemoryPartition | None = None
        self.unfollow: Callable[[], None] | None = None


class _Piece(NamedTuple):
    records: Sequence[Record]
    next_offset: int
    end: int


class MemoryFetcher:
    """A `txbroker.door.consuming.Fetcher` in memory.

    The user's side asks for a piece per partition and, when it has been delivered, for the next
    one: so a slow user is never sent more than one. Without records the Kafka's side answers later.
    """

    def __init__(
        self, home: _Side, kafka: MemoryKafka, deliver: Deliver, failed: FetchFailed
    ) -> None:
        self.partition_bytes = 1 << 20  # not looked at: pieces are counted in records
        self._home = home
        self._user = _Side(asyncio.get_running_loop())
        self._kafka = kafka
        self._deliver = deliver
        self._failed = failed
        self._fetches: dict[Partition, _Fetch] = {}
        self._waiting: set[_Fetch] = set()
        self._unwatch: Callable[[], None] | None = None
        home.post(self._watch)

    # --- in the user's loop ------------------------------------------------------------------

    def add(self, partition: Partition, offset: int) -> None:
        self.remove(partition)
        self._fetches[partition] = _Fetch(partition, offset)
        self._ask(self._fetches[partition])

    def remove(self, partition: Partition) -> None:
        fetch = self._fetches.pop(partition, None)
        if fetch is not None:
            fetch.removed = True
            self._home.post(self._forget, fetch)

    def pause(self, partition: Partition) -> None:
        if partition in self._fetches:
            self._fetches[partition].paused = True

    def resume(self, partition: Partition) -> None:
        if partition in self._fetches:
            self._fetches[partition].paused = False
            self._ask(self._fetches[partition])

    async def close(self) -> None:
        for partition in list(self._fetches):
            self.remove(partition)
        self._home.post(self._end_watch)

    def _ask(self, fetch: _Fetch) -> None:
        if not (fetch.asked or fetch.paused or fetch.removed):
            fetch.asked = True
            self._home.post(self._look, fetch)

    def _take(self, fetch: _Fetch, piece: _Piece | None) -> None:
        """Deliver a piece; None: the partition was paused."""
        fetch.asked = False
        if piece is not None and not fetch.removed:
            fetch.offset = piece.next_offset
            self._deliver(fetch.partition, *piece)
        self._ask(fetch)

    def _fail(self, fetch: _Fetch, error: KafkaUnavailable) -> None:
        if fetch.removed:
            return
        if isinstance(error, OffsetMissing):
            self.remove(fetch.partition)
        self._failed(fetch.partition, error)

    # --- in the Kafka's loop -----------------------------------------------------------------

    def _watch(self) -> None:
        self._unwatch = self._kafka.watch(self._look_again)

    def _end_watch(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def _look_again(self) -> None:
        for fetch in list(self._waiting):
            self._wake(fetch)

    def _wake(self, fetch: _Fetch) -> None:
        if fetch in self._waiting:
            self._waiting.discard(fetch)
            # Not now: the records of a batch follow one another.
            self._home.post(self._look, fetch)

    def _look(self, fetch: _Fetch) -> None:
        """Answer with a piece, or later."""
        if fetch.removed:
            return
        if fetch.paused:
            self._user.post(self._take, fetch, None)
            return
        try:
            self._kafka.require_up()
            piece = self._piece(fetch)
        except KafkaUnavailable as error:
            self._waiting.add(fetch)
            self._user.post(self._fail, fetch, error)
            return
        if piece is None:
            self._waiting.add(fetch)
        else:
            self._user.post(self._take, fetch, piece)

    def _piece(self, fetch: _Fetch) -> _Piece | None:
        topic, number = fetch.partition
        log = self._kafka.partition(topic, number)
        if not self._kafka.topics[topic].authorized:
            raise TopicRefused(_UNREADABLE.format(topic))
        if log is not fetch.log:
            self._forget(fetch)
            fetch.log = log
            fetch.unfollow = log.follow(lambda _: self._wake(fetch))
        start, end = fetch.offset, log.stable_end
        if not log.begin <= start <= log.end:
            raise OffsetMissing(
                f"{topic}-{number} holds offsets {log.begin} to {log.end}, not {start}"
            )
        upto = min(end, start + _PIECE_RECORDS)
        if fetch.reported == (upto, end):
            return None
        fetch.reported = upto, end
        return _Piece(log.read(start, upto), upto, end)

    def _forget(self, fetch: _Fetch) -> None:
        self._waiting.discard(fetch)
        if fetch.unfollow is not None:
            fetch.unfollow()
            fetch.unfollow = None
