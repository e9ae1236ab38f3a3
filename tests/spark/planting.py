"""An installation's topics on a real Kafka, written as its owners would, rightly or wrongly.

Nothing runs here but Kafka: half messages, markers, promoted records and copies are written by
txbroker's codec, so a test decides how every transaction ends, and stores the findings that an
audit must report. All append times are the broker's; old transactions are planted first.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import msgspec
from confluent_kafka import IsolationLevel, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from tests.kit.logs import with_fields
from tests.kit.topic_reader import create_topic
from tests.kit.until import until
from txbroker.config.settings import load_settings
from txbroker.core.encoding import (
    encode_contents,
    encode_half,
    encode_kept,
    encode_marker,
    installation_headers,
    kept_tombstones,
    promoted_headers,
)
from txbroker.core.records import (
    RECORD_VERSION,
    Cause,
    CheckPolicy,
    Half,
    Header,
    Marker,
    MarkerKind,
    Message,
    ParkedCopy,
    Record,
    Source,
    State,
)
from txbroker.core.routing import make_id, parse_id
from txbroker.door.protocols import PartitionDoor
from txbroker.kafka.door.door import KafkaDoor
from txbroker.spark.access import AuditKafka, access_from
from txbroker.spark.schema import TopicNames

NEVER = CheckPolicy(after_s=86_400.0)
"""No check is due during a test."""
FAR_MS = 9_300_000_000_000_000
"""A timestamp that is no 64-bit number in microseconds."""
AT_ONCE = CheckPolicy(after_s=0.0, interval_s=0.0, attempts_max=15, timeout_s=0.0)
"""Any number of attempts, as soon as one likes."""
ONE_ATTEMPT = CheckPolicy(after_s=0.0, interval_s=0.0, attempts_max=1, timeout_s=0.0)
TWO_ATTEMPTS = CheckPolicy(after_s=0.0, interval_s=0.0, attempts_max=2, timeout_s=0.0)
HOUR_MS = 3_600_000
_NUMBERS = itertools.count()
_TIMEOUT_S = 60.0
_KEYS = 1000
"""Different keys of a bulk fill, a half partition."""


class Expected(msgspec.Struct, frozen=True):
    """The expected result of a transaction. `label` describes the planted case."""

    id: str
    state: str
    findings: frozenset[str]
    label: str


class Filled(msgspec.Struct):
    states: Counter[str] = msgspec.field(default_factory=Counter)
    pending: list[str] = msgspec.field(default_factory=list)


class Placed(msgspec.Struct, frozen=True):
    """A record on its way to a target or to the parked topic."""

    topic: str
    partition: int
    record: Record


class Planting:
    """One installation and three target topics; used as `async with Planting(...) as planting`.

    Attributes:
        names: its topics.
        orders, bills: target topics with 4 and 2 partitions whose records keep their timestamps.
        stamped: one with 2 partitions, where the broker's clock is the records' timestamp.
        expected: expected results, by id.
        broken: records that do not read, by topic.
        own_broken: those of them that bear what only ours do.

    Args:
        prefix: of the topics; a unique one if empty.
        partitions: of the half topic.
        fresh: False where another process has created the topics; then turns need `ready`.
    """

    def __init__(
        self, bootstrap: str, *, prefix: str = "", partitions: int = 2, fresh: bool = True
    ) -> None:
        self.bootstrap = bootstrap
        self._fresh = fresh
        self.prefix = prefix or f"planted-{os.getpid()}-{next(_NUMBERS)}"
        self.installation = installation_headers(self.prefix)
        self.partitions = partitions
        self.names = TopicNames.of(self.prefix)
        self.orders = f"{self.prefix}-orders"
        self.bills = f"{self.prefix}-bills"
        self.stamped = f"{self.prefix}-stamped"
        self.expected: dict[str, Expected] = {}
        self.broken: Counter[str] = Counter()
        self.own_broken: Counter[str] = Counter()
        self._doors: list[PartitionDoor] = []
        self._turn: list[Placed] = []
        self._numbers = itertools.count()
        settings = {
            "kafka": bootstrap,
            "topic_prefix": self.prefix,
            "instance": "planting",
            "partitions": partitions,
        }
        self._settings = load_settings(settings, environ={})
        self._admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
        self._turns = Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": f"{self.prefix}-turns",
                "linger.ms": 1,
                "log_level": 0,
            }
        )

    async def __aenter__(self) -> Planting:
        self._door = KafkaDoor.from_configuration(self._settings)
        await self._door.start()
        self._doors = [self._door.partition(number) for number in range(self.partitions)]
        if self._fresh:
            await asyncio.to_thread(self._make_targets)
            await self.ready()
        return self

    async def ready(self) -> None:
        """Begin to take turns; only one process does."""
        await asyncio.to_thread(self._turns.init_transactions, _TIMEOUT_S)

    def _make_targets(self) -> None:
        create_topic(self.bootstrap, self.orders, 4)
        create_topic(self.bootstrap, self.bills, 2)
        create_topic(self.bootstrap, self.stamped, 2, message_timestamp_type="LogAppendTime")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go of Kafka; the topics stay."""
        await self._door.close()

    # --- expectations -----------------------------------------------------------------------

    def expect(self, id: str, label: str, state: str, *findings: str) -> str:
        """Store the expected result of a transaction; return its id."""
        assert id not in self.expected, label
        self.expected[id] = Expected(id, state, frozenset(findings), label)
        return id

    # --- half messages -----------------------------------------------------------------------

    def make(self, *messages: Message, age_ms: int = 0, **fields: Any) -> Half:
        """Return a half message that is not stored yet. Without messages it gets a unique one;
        its key is unique, so no order is kept with others.

        Args:
            messages: in the end.
            age_ms: the age of its id.
            fields: of the half message; `partition`: of the half topic.
        """
        number = next(self._numbers)
        partition = fields.pop("partition", number % self.partitions)
        now_ms = round(time.time() * 1000)
        id = make_id(partition, now_ms - age_ms, secrets.randbits(64))
        messages = messages or (self.message(),)
        fields = {"group": f"group-{number % 3}", "policy": NEVER, **fields}
        return with_fields(Half(id, fields.pop("group"), messages), **fields)

    def message(self, topic: str = "", partition: int = 0, **fields: Any) -> Message:
        """Return a message with a unique key, by default to the orders."""
        number = next(self._numbers)
        fields = {"key": f"key-{number}".encode(), "value": f"value {number}".encode(), **fields}
        return Message(topic or self.orders, partition=partition, **fields)

    async def prepare(self, *messages: Message, **fields: Any) -> Half:
        half = self.make(*messages, **fields)
        await self.store(half)
        return half

    async def store(self, half: Half) -> tuple[int, int]:
        """Append a half message; return offset and append time."""
        return await self.append_half(partition_of(half), encode_half(half))

    async def append_half(self, partition: int, records: Sequence[Record]) -> tuple[int, int]:
        return await self._doors[partition].half.append(records)

    # --- markers -----------------------------------------------------------------------------

    async def append_op(self, partition: int, records: Sequence[Record]) -> tuple[int, int]:
        return await self._doors[partition].op.append(records)

    async def mark(
        self, half: Half, kind: MarkerKind, contents: Sequence[Message] = (), **fields: Any
    ) -> int:
        """Append a marker; return its append time."""
        fields = {"source": Source.SCHEDULE, "contents": len(contents), **fields}
        marker = Marker(RECORD_VERSION, kind, half.id, **fields)
        records = [encode_marker(marker)]
        if contents:
            records += encode_contents(half, contents)
        return (await self.append_op(partition_of(half), records))[1]

    async def decide(
        self, half: Half, kind: MarkerKind, contents: Sequence[Message] = (), **fields: Any
    ) -> int:
        """Append a deciding marker, by default of its producer."""
        fields = {"source": Source.PRODUCER, "group": half.group, **fields}
        return await self.mark(half, kind, contents, **fields)

    async def commit(self, half: Half, contents: Sequence[Message] = (), **fields: Any) -> int:
        return await self.decide(half, MarkerKind.COMMIT, contents, **fields)

    async def roll_back(self, half: Half, **fields: Any) -> int:
        return await self.decide(half, MarkerKind.ROLLBACK, **fields)

    async def check(
        self, half: Half, number: int, in_round: int = 1, reason: str = "due", **fields: Any
    ) -> int:
        fields = {"endpoint": "http://127.0.0.1:1/check", **fields}
        return await self.mark(
            half, MarkerKind.CHECK, round=in_round, number=number, reason=reason, **fields
        )

    async def checks(self, half: Half, count: int, in_round: int = 1) -> int:
        """Append the markers of `count` attempts; return the append time of the last."""
        at_ms = 0
        for number in range(1, count + 1):
            at_ms = await self.check(half, number, in_round)
        return at_ms

    # --- turns -------------------------------------------------------------------------------

    def promote(
        self, half: Half, at_ms: int, messages: Sequence[Message] = (), only: Sequence[int] = ()
    ) -> None:
        """Write a transaction's messages to their targets in the next turn.

        Args:
            at_ms: append time of its commit marker.
            messages: promoted in place of the prepared ones.
            only: numbers of the messages that are written; all of them if empty.
        """
        messages = messages or half.messages
        for number, message in enumerate(messages):
            if only and number not in only:
                continue
            stamp_ms = at_ms if message.timestamp_ms is None else message.timestamp_ms
            headers = self.headers(half, number, len(messages), message)
            self.put(message, headers, stamp_ms)

    def headers(self, half: Half, number: int, count: int, message: Message) -> tuple[Header, ...]:
        return promoted_headers(half.id, number, count, message, self.installation)

    def put(self, message: Message, headers: Sequence[Header], stamp_ms: int) -> None:
        """Write a record to a target in the next turn."""
        record = Record(message.key, message.value, tuple(headers), stamp_ms)
        self._turn.append(Placed(message.topic, message.partition or 0, record))

    def keep(self, half: Half, stored: tuple[int, int], state: State, decided_ms: int = 0) -> None:
        """Copy a whole transaction to the parked topic in the next turn."""
        cause = None
        if state is State.REFUSED:
            first = half.messages[0]
            cause = Cause("unknown_topic", "it is not there", first.topic, first.partition or 0)
        kept = ParkedCopy(half, stored[0], stored[1], state, cause, decided_ms)
        self.put_parked(partition_of(half), encode_kept(kept))

    def release(self, half: Half) -> None:
        self.put_parked(partition_of(half), kept_tombstones(half.id, len(half.messages)))

    def put_parked(self, partition: int, records: Sequence[Record]) -> None:
        """Write any records to the parked topic in the next Kafka transaction."""
        self._turn += [Placed(self.names.parked, partition, record) for record in records]

    async def turn(self, *, abort: bool = False, hidden: bool = False) -> None:
        """Write all that waits for it in one Kafka transaction, commit or abort that, and wait
        until readers see it; not where it is `hidden` by another's transaction."""
        some, self._turn = self._turn, []
        await asyncio.to_thread(self._write_turn, some, abort)
        places = {TopicPartition(each.topic, each.partition) for each in some}
        if places and not hidden:
            await until(lambda: asyncio.to_thread(self._is_over, places))

    def _is_over(self, places: Iterable[TopicPartition]) -> bool:
        """Return whether no transaction is open in partitions: the coordinator ends it there only
        after it has answered."""
        latest = dict.fromkeys(places, OffsetSpec.latest())
        ends = [
            {
                (place.topic, place.partition): reported.result(_TIMEOUT_S).offset
                for place, reported in self._admin.list_offsets(
                    latest, isolation_level=level
                ).items()
            }
            for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
        ]
        return ends[0] == ends[1]

    def _write_turn(self, some: Sequence[Placed], abort: bool) -> None:
        wrong: list[str] = []
        self._turns.begin_transaction()
        for each in some:
            produce(self._turns, each, wrong)
        assert self._turns.flush(_TIMEOUT_S) == 0
        assert not wrong, wrong
        if abort:
            self._turns.abort_transaction(_TIMEOUT_S)
        else:
            self._turns.commit_transaction(_TIMEOUT_S)

    # --- a long history, fast ----------------------------------------------------------------

    async def fill_clean(
        self,
        count: int,
        *,
        size: int = 100,
        rolled_back: float = 0.1,
        pending: float = 0.0,
        batch: int = 500,
        only: Sequence[int] = (),
    ) -> Filled:
        """Store `count` faultless transactions of one message each.

        Args:
            count: how many.
            size: bytes of a value.
            rolled_back, pending: which share is; all others are promoted.
            batch: transactions in one batch of a partition.
            only: half partitions that get any; all of them if empty.
        """
        filled = Filled()
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "enable.idempotence": True,
                "linger.ms": 5,
                "queue.buffering.max.messages": 1_000_000,
                "queue.buffering.max.kbytes": 256 << 10,
                "log_level": 0,
            }
        )
        filling = only or range(self.partitions)
        shares = {p: (count + n) // len(filling) for n, p in enumerate(filling)}
        body = secrets.token_bytes(size)
        wrong: list[str] = []

        async def fill(partition: int) -> None:
            for start in range(0, shares[partition], batch):
                some = range(start, min(start + batch, shares[partition]))
                halves = [self._clean(partition, number, body) for number in some]
                await self._fill_batch(halves, rolled_back, pending, filled, producer, wrong)

        await asyncio.gather(*map(fill, filling))
        assert await asyncio.to_thread(producer.flush, _TIMEOUT_S) == 0
        assert not wrong, wrong[:3]
        return filled

    def _clean(self, partition: int, number: int, body: bytes) -> Half:
        id = make_id(partition, round(time.time() * 1000), secrets.randbits(64))
        key = f"{partition}-{number % _KEYS}".encode()
        message = Message(self.orders, key, body, (), number % 4)
        return Half(id, f"bulk-{number % 8}", (message,), policy=NEVER)

    async def _fill_batch(
        self,
        halves: Sequence[Half],
        rolled_back: float,
        pending: float,
        filled: Filled,
        producer: Producer,
        wrong: list[str],
    ) -> None:
        """Store one batch of half messages and what becomes of them."""
        partition = partition_of(halves[0])
        undecided = round(len(halves) * pending)
        back = round(len(halves) * rolled_back)
        rest = len(halves) - undecided
        kinds = [MarkerKind.ROLLBACK] * back + [MarkerKind.COMMIT] * (rest - back)
        await self.append_half(partition, [encode_half(half)[0] for half in halves])
        markers = [
            encode_marker(Marker(RECORD_VERSION, kind, half.id, -1, Source.PRODUCER, half.group))
            for half, kind in zip(halves, kinds, strict=False)
        ]
        _, at_ms = await self.append_op(partition, markers) if markers else (0, 0)
        for half in halves[back:rest]:
            message = half.messages[0]
            record = Record(message.key, message.value, self.headers(half, 0, 1, message))
            record = msgspec.structs.replace(record, timestamp_ms=at_ms)
            produce(producer, Placed(message.topic, message.partition or 0, record), wrong)
        filled.states.update(rolled_back=back, promoted=rest - back, pending=undecided)
        filled.pending += [half.id for half in halves[rest:]]


def access_to(bootstrap: str, prefix: str) -> AuditKafka:
    """Return an audit's access to an installation on a Kafka without logins."""
    given = {"kafka": bootstrap, "topic_prefix": prefix, "instance": "audit"}
    return access_from(load_settings(given, environ={}))


async def park(planting: Planting, *messages: Message) -> Half:
    """Store a transaction whose last attempt is over, and its copy."""
    half = planting.make(*messages, policy=ONE_ATTEMPT)
    stored = await planting.store(half)
    await planting.checks(half, 1)
    await planting.mark(half, MarkerKind.PARK, round=1)
    planting.keep(half, stored, State.PARKED)
    return half


async def now_by(planting: Planting, half: Half) -> int:
    """Return a broker's time, by a marker without effect."""
    return await planting.mark(half, MarkerKind.REVIVE, round=9)


def partition_of(half: Half) -> int:
    return parse_id(half.id).partition


def produce(producer: Producer, placed: Placed, wrong: list[str]) -> None:
    """Hand a record to a producer; what fails later is noted in `wrong`."""

    def done(error: object, _message: object) -> None:
        if error is not None:
            wrong.append(str(error))

    record = placed.record
    while True:
        try:
            producer.produce(
                placed.topic,
                record.value,
                record.key,
                placed.partition,
                on_delivery=done,
                timestamp=0 if record.timestamp_ms == -1 else record.timestamp_ms,
                headers=list(record.headers),
            )
        except BufferError:
            producer.poll(0.1)
        else:
            producer.poll(0)
            return


def write_stamped(bootstrap: str, topic: str, codec: str, stamps: Iterable[int]) -> None:
    """Write another's records with these timestamps, in one batch."""
    producer = Producer(
        {"bootstrap.servers": bootstrap, "compression.type": codec, "linger.ms": 1000}
    )
    wrong: list[str] = []
    for stamp_ms in stamps:
        record = Record(None, b"x" * 1000, (("a", None),), stamp_ms)
        produce(producer, Placed(topic, 0, record), wrong)
    assert (producer.flush(30), wrong) == (0, [])
