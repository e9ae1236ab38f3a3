"""A proxy's door to a `MemoryKafka`: the same contract as the door to a real Kafka.

More differences from a real Kafka, besides those of `txbroker.testing.memory`: an append whose
answer is lost is stored at once or never, not later; of two concurrent claims the later one always
wins; sessions do not time out, so a silent member keeps its partitions until one of its name joins
or `MemoryCoordinator.forget` removes it.

The protocols in `txbroker.door.protocols` document the methods and their errors.
"""

import asyncio
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from functools import partial
from itertools import dropwhile

from msgspec import structs

from txbroker.core.encoding import encode_claim, encode_progress
from txbroker.core.records import Cause, Claim, Record
from txbroker.door.own_topics import (
    LAYOUT_KEY,
    CheckpointScan,
    encode_layout,
    find_layout,
    partition_problems,
)
from txbroker.door.owners import owner_of
from txbroker.door.protocols import (
    Appended,
    AppendUnknown,
    AuditFeed,
    Claimed,
    GroupStore,
    Hanging,
    Log,
    LogTruncated,
    Membership,
    NotVisible,
    PartitionDoor,
    PromotionTxn,
    PromotionTxnHandle,
    TargetFacts,
    Targets,
    begin_commit,
    commit_outcome,
    raised_again,
)
from txbroker.door.writing import Copy, Fenced, Refused, Unknown
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.testing.members import MemoryMembership
from txbroker.testing.memory import MemoryKafka
from txbroker.testing.topics import KafkaTransaction, MemoryEvidence, MemoryPartition, valid_name

MESSAGE_BYTES_MAX = 8 << 20
"""The largest half batch by default, as on a real Kafka."""

_READ_MAX = 500
_VISIBLE_TIMEOUT_S = 60.0
_ROOM_BYTES = 64 * 1024
_CHECKPOINT_BYTES_MIN = 1 << 20
_CAUSE_TTL_S = 1.0
"""A missing topic may be created at any time."""

Changed = Callable[[str, bytes | None], None]
"""Gets a key's JSON, or None for a removed one."""


class MemoryDoor:
    """A `txbroker.door.protocols.Door` to a Kafka in memory.

    Args:
        kafka: shared by the doors of one installation.
        instance: the name of this proxy, the same after a restart.
        topic_prefix: of the names of txbroker's own topics.
        half_partitions: created if the half topic does not exist.
        message_bytes_max: the largest half batch, bytes.
        facts_ttl_s: how long facts of target topics are cached, seconds; the default is that of
            the door to a real Kafka.
        claim_timeout_s: how long a claim waits for an open transaction to end, seconds.
    """

    def __init__(
        self,
        kafka: MemoryKafka,
        *,
        instance: str = "one",
        topic_prefix: str = "txbroker",
        half_partitions: int = 4,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        facts_ttl_s: float = 5.0,
        claim_timeout_s: float = 30.0,
    ) -> None:
        self.partitions = 0
        self._kafka = kafka
        self._prefix = topic_prefix
        self._half_partitions = half_partitions
        self._message_bytes_max = message_bytes_max
        self._claim_timeout_s = claim_timeout_s
        self._ids: dict[str, int] = {}
        self._targets = MemoryTargets(kafka, facts_ttl_s)
        self._groups = MemoryGroupStore(kafka, f"{topic_prefix}.groups")
        self._membership = MemoryMembership(kafka.coordinator(topic_prefix), instance, kafka.reach)
        self.targets: Targets = self._targets
        self.groups: GroupStore = self._groups
        self._audit = MemoryAuditFeed(kafka, f"{topic_prefix}.audit")
        self.audit: AuditFeed = self._audit
        self.membership: Membership = self._membership

    async def start(self) -> None:
        """Create txbroker's own topics if they are missing."""
        await self._kafka.reach()
        half, larger = self._message_bytes_max, self._message_bytes_max + _ROOM_BYTES
        count = self._remembered() or self._half_partitions
        for name, partitions, bytes_max in (
            ("half", count, half),
            ("op", count, larger),
            ("checkpoint", count, max(larger, _CHECKPOINT_BYTES_MIN)),
            ("parked", count, larger),
            ("groups", 1, larger),
            ("audit", 1, larger),
            ("audit.drift", 1, larger),
        ):
            self._kafka.create_topic(
                f"{self._prefix}.{name}",
                partitions,
                message_bytes_max=bytes_max,
                log_append_time=True,
            )
        problems = self._problems()
        if problems:
            raise ConfigurationError("; ".join(problems))
        self.partitions = len(self._kafka.topics[f"{self._prefix}.half"].partitions)
        self._ids = {name: self._kafka.topics[name].id for name in self._own}
        if find_layout(self._kafka.visible(f"{self._prefix}.groups")) is None:
            await self._remember_layout()
        self._membership.expect(self.partitions)

    def _remembered(self) -> int | None:
        if self._own[-1] not in self._kafka.topics:
            return None
        layout = find_layout(self._kafka.visible(self._own[-1]))
        return None if layout is None else layout.partitions

    async def _remember_layout(self) -> None:
        record = encode_layout(self.partitions)
        try:
            await self._kafka.append(f"{self._prefix}.groups", 0, [record])
        except AppendUnknown as error:
            raise KafkaUnavailable(str(error)) from None

    @property
    def _own(self) -> list[str]:
        names = ("half", "op", "checkpoint", "parked", "groups")
        return [f"{self._prefix}.{name}" for name in names]

    async def check_topics(self) -> list[str]:
        await self._kafka.reach()
        recreated = [
            f"{name} was deleted and recreated: its records are lost"
            for name, id in self._ids.items()
            if name in self._kafka.topics and self._kafka.topics[name].id != id
        ]
        return recreated + self._problems()

    def _problems(self) -> list[str]:
        topics = self._kafka.topics
        missing = [name for name in self._own if name not in topics]
        if missing:
            return [f"missing: {', '.join(missing)}"]
        half = self._own[0]
        counts = {name: len(topics[name].partitions) for name in self._own[:-1]}
        layout = find_layout(self._kafka.visible(self._own[-1]))
        return partition_problems(half, counts, layout) + [
            f"{name} needs message.timestamp.type=LogAppendTime"
            for name in self._own
            if not topics[name].log_append_time
        ]

    def brokers(self) -> Sequence[tuple[str, int]]:
        """Return nothing: there are no network addresses."""
        return ()

    def partition(self, partition: int) -> PartitionDoor:
        return MemoryPartitionDoor(
            self._kafka, self._prefix, partition, self._targets.note, self._claim_timeout_s
        )

    async def close(self) -> None:
        """Release all resources. Does not leave the group: see `Membership.leave`."""
        self._membership.close()
        self._groups.close()
        self._audit.close()


class MemoryLog:
    """A `txbroker.door.protocols.Log` in memory."""

    def __init__(self, kafka: MemoryKafka, topic: str, number: int) -> None:
        self.batch_bytes_max = kafka.topics[topic].message_bytes_max
        self._kafka = kafka
        self._topic = topic
        self._number = number

    @property
    def _partition(self) -> MemoryPartition:
        return self._kafka.partition(self._topic, self._number)

    async def append(self, records: Sequence[Record]) -> Appended:
        return await self._kafka.append(self._topic, self._number, records)

    async def bounds(self, *, confirmed: bool = True) -> tuple[int, int]:
        await self._kafka.reach()
        return self._partition.begin, self._partition.end

    async def read(
        self, start: int, end: int, skipped: Callable[[range], None] | None = None
    ) -> AsyncIterator[Sequence[Record]]:
        """Yield the records from offset `start` up to, not including, `end`, in order; then call
        `skipped` with the offsets after the last record that hold none."""
        position = start
        for first in range(start, end, _READ_MAX):
            await self._kafka.reach()
            records = self._partition.read(first, min(end, first + _READ_MAX), producers=True)
            if records:
                yield _placed(records, position)
                position = records[-1].offset + 1
        # Records that an open transaction hides may become visible later.
        trailing = range(position, min(end, self._partition.stable_end))
        if trailing and skipped is not None:
            skipped(trailing)

    async def pick(self, offsets: Sequence[int]) -> Sequence[Record]:
        await self._kafka.reach()
        return self._partition.pick(offsets)


def _placed(records: Sequence[Record], position: int) -> list[Record]:
    """Set on each record the number of offsets before it without a record, from `position` on."""
    before = [position, *(record.offset + 1 for record in records)]
    return [
        structs.replace(record, skipped=record.offset - at) if record.offset > at else record
        for record, at in zip(records, before, strict=False)
    ]


class MemoryPartitionDoor:
    """A `txbroker.door.protocols.PartitionDoor` in memory."""

    half: Log
    op: Log

    def __init__(
        self,
        kafka: MemoryKafka,
        prefix: str,
        partition: int,
        refused: Callable[[Cause], None],
        claim_timeout_s: float,
    ) -> None:
        self.partition = partition
        self.half = MemoryLog(kafka, f"{prefix}.half", partition)
        self.op = MemoryLog(kafka, f"{prefix}.op", partition)
        self._kafka = kafka
        self._refused = refused
        self._claim_timeout_s = claim_timeout_s
        self._checkpoint = f"{prefix}.checkpoint"
        self._parked = f"{prefix}.parked"
        self._id = f"{prefix}.half-{partition}"
        self._writer: _Writer | None = None

    async def claimed_before(self) -> bool:
        return await self.checkpoint_end() > 0

    async def checkpoint_end(self) -> int:
        await self._kafka.reach()
        return self._kafka.partition(self._checkpoint, self.partition).end

    async def parked_before(self) -> bool:
        await self._kafka.reach()
        return self._kafka.partition(self._parked, self.partition).end > 0

    async def claim(self, claim: Claim) -> Claimed:
        await self._retire()
        await self._kafka.reach()
        writer = _Writer(self._kafka, self._id, (self._checkpoint, self._parked), self.partition)
        self._kafka.fence(self._id, writer)
        # Here another owner can claim, too, as between the requests of a real claim.
        await self._kafka.reach()
        if not self._kafka.holds(self._id, writer):
            raise Fenced("another owner claimed at the same time")
        transaction = self._kafka.begin(self._id)
        claim = structs.replace(claim, producers=(transaction.producer,))
        records = [encode_claim(claim)]
        at = self._kafka.write(self._checkpoint, self.partition, records, transaction)
        self._kafka.end(transaction, committed=True)
        await self._seen(at)
        scan = CheckpointScan(f"{self._checkpoint}-{self.partition}", claim.producers)
        log = self._kafka.partition(self._checkpoint, self.partition)
        records = log.read(log.begin, log.stable_end, producers=True)
        scan.note(_placed(records, log.begin))
        claimed = scan.claimed(claim)
        self._writer = writer
        return claimed

    async def _seen(self, offset: int) -> None:
        """Wait until `read_committed` readers have passed an offset of the checkpoint topic."""
        log = self._kafka.partition(self._checkpoint, self.partition)
        try:
            async with asyncio.timeout(self._claim_timeout_s):
                while log.stable_end <= offset:
                    await self._kafka.ended()
        except TimeoutError:
            raise Hanging(
                f"{self._checkpoint}-{self.partition}: an open transaction hides the checkpoint"
            ) from None

    async def store(self, records: Sequence[Record]) -> None:
        try:
            await self._kafka.append(self._checkpoint, self.partition, records)
        except AppendUnknown as error:
            raise KafkaUnavailable(str(error)) from None

    async def parked(self) -> AsyncIterator[Sequence[Record]]:
        await self._kafka.reach()
        log = self._kafka.partition(self._parked, self.partition)
        if log.stable_end < log.end:
            raise Hanging(f"{self._parked}: an open transaction hides records")
        records = log.read(log.begin, log.stable_end, producers=True)
        for first in range(0, len(records), _READ_MAX):
            yield records[first : first + _READ_MAX]

    async def pick_parked(self, offsets: Sequence[int]) -> Sequence[Record]:
        await self._kafka.reach()
        log = self._kafka.partition(self._parked, self.partition)
        if any(log.stable_end <= offset < log.end for offset in offsets):
            raise KafkaUnavailable(f"{self._parked}: an open transaction hides a record")
        return log.pick(offsets)

    def unverified(self, places: Collection[tuple[str, int]]) -> Sequence[tuple[str, int]]:
        return [place for place in places if place in self._kafka.unaware]

    async def verify_no_open_txn(self, places: Collection[tuple[str, int]]) -> Sequence[Cause]:
        return [
            Cause(
                "hanging", f"{topic}-{number} has an open transaction", topic, number, passing=True
            )
            for topic, number in self.unverified(places)
        ]

    async def write(self, txn: PromotionTxn) -> PromotionTxnHandle:
        if self._writer is None:
            raise Unknown(f"partition {self.partition} is not claimed")
        try:
            return await self._writer.write(txn)
        except Refused as error:
            self._refused(error.cause)
            raise

    async def close(self) -> None:
        """Abandon an open transaction; the next claim aborts it."""
        await self._retire()

    async def _retire(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            await writer.close()


class _Writer:
    """Writes the promotion transactions of one half partition, from a claim until a failure.

    A transaction is written at once; a separate task commits it after the one before.
    """

    def __init__(
        self, kafka: MemoryKafka, id: str, own_topics: tuple[str, str], partition: int
    ) -> None:
        self._kafka = kafka
        self._id = id
        self._checkpoint, self._parked = own_topics
        self._partition = partition
        self._before: asyncio.Task[None] | None = None
        self._broken: Fenced | Unknown | Refused | None = None

    async def write(self, txn: PromotionTxn) -> PromotionTxnHandle:
        self._check()
        with self._breaking():
            with _translated():
                await self._kafka.reach()
                if not self._kafka.holds(self._id, self):
                    raise Fenced
            transaction = self._kafka.begin(self._id)
            try:
                offsets, last = self._write_all(txn, transaction)
            except (Refused, Unknown):
                self._kafka.end(transaction, committed=False)
                raise
        self._before = begin_commit(self._commit(transaction, self._before))
        pass_by, count = partial(_pass_by, self._kafka, last), len(txn.promoted)
        return PromotionTxnHandle(offsets[:count], offsets[count:-1], self._before, pass_by)

    def _write_all(
        self, txn: PromotionTxn, transaction: KafkaTransaction
    ) -> tuple[Sequence[int], Mapping[tuple[str, int], tuple[MemoryPartition, int]]]:
        """Write all records; return the offsets, and the last of each partition."""
        parked, checkpoint = (self._parked, self._partition), (self._checkpoint, self._partition)
        copies = [
            *txn.promoted,
            *(Copy(*parked, record) for record in txn.parked),
            Copy(*checkpoint, encode_progress(txn.progress)),
        ]
        last: dict[tuple[str, int], tuple[MemoryPartition, int]] = {}
        with _translated():
            offsets = self._kafka.write_all(copies, transaction)
            for at, offset in {
                (copy.topic, copy.partition): offset
                for copy, offset in zip(copies, offsets, strict=True)
            }.items():
                last[at] = self._kafka.partition(*at), offset
        return offsets, last

    async def _commit(
        self, transaction: KafkaTransaction, before: asyncio.Task[None] | None
    ) -> None:
        with self._breaking():
            if before is not None:
                await commit_outcome(before)
            with _translated():
                await asyncio.sleep(0)
                if not self._kafka.holds(self._id, self):
                    raise Fenced
                self._kafka.commit(transaction)

    async def close(self) -> None:
        self._break(Unknown("the partition's door was closed"))
        if self._before is not None:
            self._before.cancel()
            await asyncio.gather(self._before, return_exceptions=True)

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        try:
            yield
        except (Fenced, Unknown, Refused) as error:
            self._break(error)
            raise

    def _break(self, error: Fenced | Unknown | Refused) -> None:
        if self._broken is None:
            self._broken = error

    def _check(self) -> None:
        if self._broken is not None:
            raise raised_again(self._broken)


async def _pass_by(
    kafka: MemoryKafka, last: Mapping[tuple[str, int], tuple[MemoryPartition, int]]
) -> None:
    """Wait until the last stable offsets have passed a transaction."""

    def hidden() -> list[tuple[str, int]]:
        return [name for name, (at, offset) in last.items() if at.stable_end <= offset]

    try:
        async with asyncio.timeout(_VISIBLE_TIMEOUT_S):
            while hidden():
                await kafka.ended()
    except TimeoutError:
        if left := hidden():
            raise NotVisible("an open transaction hides a committed one", left) from None


@contextmanager
def _translated() -> Iterator[None]:
    """Translate errors of the broker into those that an owner handles."""
    try:
        yield
    except (Refused, Fenced):
        raise
    except KafkaUnavailable as error:
        raise Unknown(str(error)) from None


# --- the topics of groups and audits, and the properties of targets ---------------------------


class _MemoryFollower:
    """Follows the only partition of a topic."""

    def __init__(self, kafka: MemoryKafka, topic: str) -> None:
        self._kafka = kafka
        self._topic = topic
        self._close: Callable[[], None] | None = None

    def _follow(self, records: Iterable[Record], changed: Changed) -> None:
        def follower(record: Record) -> None:
            if record.key not in (None, LAYOUT_KEY):
                changed(record.key.decode(errors="replace"), record.value)

        for record in records:
            follower(record)
        self._close = self._kafka.topics[self._topic].partitions[0].follow(follower)

    def close(self) -> None:
        """Stop following."""
        close, self._close = self._close, None
        if close is not None:
            close()


class MemoryGroupStore(_MemoryFollower):
    """A `txbroker.door.protocols.GroupStore` in memory."""

    async def load(self, changed: Changed) -> None:
        await self._kafka.reach()
        self._follow(self._kafka.visible(self._topic), changed)

    async def put(self, group: str, value: bytes | None) -> None:
        try:
            await self._kafka.append(self._topic, 0, [Record(group.encode(), value)])
        except AppendUnknown as error:
            raise KafkaUnavailable(str(error)) from None


class MemoryAuditFeed(_MemoryFollower):
    """A `txbroker.door.protocols.AuditFeed` in memory. Does not wait for a missing topic."""

    def follow(self, changed: Changed) -> None:
        if self._topic in self._kafka.topics:
            newest = {record.key: record for record in self._kafka.visible(self._topic)}
            self._follow(newest.values(), changed)


class MemoryTargets:
    """A `txbroker.door.protocols.Targets` in memory."""

    def __init__(self, kafka: MemoryKafka, ttl_s: float) -> None:
        self._kafka = kafka
        self._ttl_s = ttl_s
        self._known: dict[str, tuple[float, TargetFacts | Cause]] = {}

    def known(self, topic: str) -> TargetFacts | Cause | None:
        until, facts = self._known.get(topic, (0.0, None))
        return facts if asyncio.get_running_loop().time() < until else None

    async def examine(self, topic: str, *, create: bool = False) -> TargetFacts | Cause:
        await self._kafka.reach()
        cause = await owner_of(topic, lambda owner: owner.exists(MemoryEvidence(self._kafka)))
        if cause is not None:
            self._remember(topic, cause)
            return cause
        if create and topic not in self._kafka.topics and valid_name(topic):
            self._kafka.create_topic(topic)
        facts = self._kafka.facts(topic)
        self._remember(topic, facts)
        return facts

    def forget(self, topic: str) -> None:
        self._known.pop(topic, None)

    async def records(
        self, topic: str, partition: int, *, start: int | None = None, since_ms: int = 0
    ) -> AsyncIterator[Sequence[Record]]:
        """Yield committed records; see `Targets.records`."""
        await self._kafka.reach()
        facts = self._kafka.facts(topic)
        if isinstance(facts, Cause):
            raise KafkaUnavailable(facts.message)
        if not 0 <= partition < facts.partitions:
            raise LogTruncated(f"topic {topic} has partitions 0 to {facts.partitions - 1}")
        log = self._kafka.partition(topic, partition)
        end = log.stable_end
        if start is not None and not log.begin <= start < end:
            raise LogTruncated(f"{topic}-{partition} holds offsets {log.begin} to {end}")
        records = log.read(log.begin if start is None else start, end)
        yield (
            records
            if start is not None
            else list(dropwhile(lambda record: record.timestamp_ms < since_ms, records))
        )

    def note(self, cause: Cause) -> None:
        """Drop the facts of a topic that refused a record: they are out of date."""
        self.forget(cause.topic)

    def _remember(self, topic: str, facts: TargetFacts | Cause) -> None:
        ttl_s = min(self._ttl_s, _CAUSE_TTL_S) if isinstance(facts, Cause) else self._ttl_s
        self._known[topic] = (asyncio.get_running_loop().time() + ttl_s, facts)
