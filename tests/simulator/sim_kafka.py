"""A Kafka of several brokers as far as txbroker's own client speaks to one: logs of record batches,
idempotent and transactional producers, a transaction coordinator whose markers take their time.

It follows Kafka's transaction protocol in its first version, the one in which a delayed EndTxn can
end a later transaction, or in its second (KIP-890), in which every end raises the epoch. What is
acknowledged is kept: no broker loses its disk here.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c

from tests.simulator.sim_loop import Process, SimLoop
from txbroker.core.records import Record
from txbroker.kafka.protocol.batch import batch_body, encode_batch

NONE, OUT_OF_RANGE, UNKNOWN_TOPIC, NO_LEADER, NOT_LEADER = 0, 1, 3, 5, 6
TOO_LARGE, NO_COORDINATOR, NOT_COORDINATOR, OUT_OF_ORDER, DUPLICATE = 10, 15, 16, 45, 46
NO_RIGHT = 29
OFFSET_UNKNOWN = 78
BAD_EPOCH, BAD_STATE, BAD_MAPPING, CONCURRENT = 47, 48, 49, 51

_HEADER = struct.Struct(">qiibIhiqqqhii")
_CRC_FROM = 21
_TRANSACTIONAL, _CONTROL, _APPEND_TIME = 0x10, 0x20, 0x08
_MARKER_KEYS = {True: b"\x00\x00\x00\x01", False: b"\x00\x00\x00\x00"}
_EARLIEST = -2
_READ_COMMITTED = 1
_KEPT_BATCHES = 5
_PLAIN = 7
"""The producer of records of other clients."""
RETAIN_S = 2.0
"""Interval at which brokers delete old records."""

SWIFT_S = (0.001, 0.01)
"""How long a coordinator takes at least and at most to write markers, when nothing is slow."""

Name = tuple[str, int]
"""A topic and the number of one of its partitions."""


class Batch(NamedTuple):
    """A stored record batch."""

    base: int
    last: int
    data: bytes
    producer: int
    control: bool


class _Sequences:
    """What a partition remembers of a producer."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.next = 0
        self.kept: list[tuple[int, int, int]] = []


class Log:
    """One partition."""

    def __init__(self, leader: int, *, append_time: bool, bytes_max: int) -> None:
        self.leader = leader
        self.append_time = append_time
        self.bytes_max = bytes_max
        self.refuses = False
        """Only other clients may write to it, see `Cluster.append_plainly`."""
        self.begin = 0
        self.end = 0
        self.plain = 0
        """The next sequence of `Cluster.append_plainly`."""
        self.learns = (0.0, 0)
        """Until when a new leader does not know the end of its log, and the end it returns."""
        self.batches: list[Batch] = []
        self._bases: list[int] = []
        self.producers: dict[int, _Sequences] = {}
        self.open: dict[int, int] = {}
        self._aborted: list[tuple[int, int, int]] = []

    @property
    def stable_end(self) -> int:
        return min(self.open.values(), default=self.end)

    def append(self, data: bytes, now_ms: int, *, in_transaction: Callable[..., bool]) -> Any:
        """Store a producer's batch; return (error code, base offset, append time)."""
        fields = _HEADER.unpack_from(data)
        attributes, producer, epoch, sequence, count = fields[5], *fields[9:13]
        if len(data) > self.bytes_max:
            return TOO_LARGE, -1, -1
        if self.refuses and producer != _PLAIN:
            return NO_RIGHT, -1, -1
        known = self.producers.get(producer)
        if known is None or epoch > known.epoch:
            known = self.producers[producer] = _Sequences(epoch)
        if epoch < known.epoch:
            return BAD_EPOCH, -1, -1
        for first, base, at_ms in known.kept:
            if first == sequence:
                return NONE, base, at_ms
        if sequence != known.next:
            return OUT_OF_ORDER, -1, -1
        transactional = bool(attributes & _TRANSACTIONAL)
        if transactional and not in_transaction(producer, epoch):
            return BAD_STATE, -1, -1
        base = self._store(data, fields, now_ms)
        if transactional:
            self.open.setdefault(producer, base)
        known.next = (sequence + count) & 0x7FFFFFFF
        at_ms = now_ms if self.append_time else -1
        known.kept = [*known.kept[1 - _KEPT_BATCHES :], (sequence, base, at_ms)]
        return NONE, base, at_ms

    def _store(self, data: bytes, fields: tuple[Any, ...], now_ms: int) -> int:
        base = self.end
        stamped = list(fields)
        stamped[0] = base
        if self.append_time:
            stamped[5] |= _APPEND_TIME
            stamped[8] = now_ms
        head = _HEADER.pack(*stamped)
        crc = calc_crc32c(head[_CRC_FROM:] + data[_HEADER.size :])
        stamped[4] = crc
        data = _HEADER.pack(*stamped) + data[_HEADER.size :]
        self._add(Batch(base, base + fields[6], data, fields[9], control=False))
        return base

    def _add(self, batch: Batch) -> None:
        self.batches.append(batch)
        self._bases.append(batch.base)
        self.end = batch.last + 1

    def mark(self, producer: int, epoch: int, now_ms: int, *, commit: bool) -> None:
        """Store the marker that ends a producer's transaction here."""
        known = self.producers.get(producer)
        if known is None or epoch > known.epoch:
            # Kafka bumps the epoch to abort what a fenced producer has left open.
            self.producers[producer] = _Sequences(epoch)
        first = self.open.pop(producer, None)
        base = self.end
        if first is not None and not commit:
            self._aborted.append((producer, first, base))
        self._add(
            Batch(base, base, _control(base, producer, epoch, now_ms, commit), producer, True)
        )

    def fetch(
        self, position: int, bytes_max: int, high: int, *, committed: bool
    ) -> tuple[int, Any, bytes]:
        """Return (error code, aborted transactions, batches) from a position on, below `high`."""
        if not self.begin <= position <= self.end:
            return OUT_OF_RANGE, [], b""
        stop = min(high, self.stable_end if committed else self.end)
        number = max(0, bisect_right(self._bases, position) - 1)
        found: list[bytes] = []
        size = 0
        last = position
        for batch in self.batches[number:]:
            if batch.base >= stop:
                break
            if batch.last < position:
                continue
            if found and size + len(batch.data) > bytes_max:
                break
            found.append(batch.data)
            size += len(batch.data)
            last = batch.last
        aborted = []
        if committed:
            aborted = [
                (producer, first)
                for producer, first, end in self._aborted
                if end >= position and first <= last
            ]
        return NONE, aborted, b"".join(found)

    def hang(self, stranger: int) -> None:
        self.open[-stranger] = self.end

    def unhang(self, stranger: int) -> None:
        self.open.pop(-stranger, None)

    def delete(self, older_ms: float = math.inf, below: float = math.inf) -> None:
        """Delete the batches at the start that were appended before a time and end below an
        offset, as retention and DeleteRecords do."""
        for batch in self.batches[bisect_left(self._bases, self.begin) :]:
            if batch.last >= below or _HEADER.unpack_from(batch.data)[8] >= older_ms:
                return
            self.begin = batch.last + 1

    def records(self, start: int = 0, *, committed: bool) -> Iterator[Any]:
        """Yield every record of the batches that begin at `start` or later; with `committed`, only
        what `read_committed` readers see."""
        stop = self.stable_end if committed else self.end
        for batch in self.batches[bisect_left(self._bases, start) :]:
            if batch.base >= stop:
                return
            if not batch.control and not (committed and self.is_aborted(batch)):
                yield from next_batch(batch.data)

    def is_aborted(self, batch: Batch) -> bool:
        """Return whether a batch belongs to a transaction that was aborted."""
        return bool(_HEADER.unpack_from(batch.data)[5] & _TRANSACTIONAL) and any(
            producer == batch.producer and first <= batch.base < end
            for producer, first, end in self._aborted
        )


def next_batch(data: bytes) -> Any:
    """Return a stored batch as the client library reads it."""
    return MemoryRecords(data).next_batch()


def _control(base: int, producer: int, epoch: int, now_ms: int, commit: bool) -> bytes:
    # attributes, timestamp delta, offset delta, key, value (version, coordinator epoch), no headers
    body = b"\x00\x00\x00\x08" + _MARKER_KEYS[commit] + b"\x0c" + b"\x00" * 6 + b"\x00"
    body = bytes([len(body) * 2]) + body
    attributes = _TRANSACTIONAL | _CONTROL | _APPEND_TIME
    rest = (attributes, 0, now_ms, now_ms, producer, epoch, -1, 1)
    length = _HEADER.size - 12 + len(body)
    head = _HEADER.pack(base, length, 0, 2, 0, *rest)
    crc = calc_crc32c(head[_CRC_FROM:] + body)
    return _HEADER.pack(base, length, 0, 2, crc, *rest) + body


# --- transactions --------------------------------------------------------------------------------


class TransactionalId:
    """What the coordinator knows of a transactional id."""

    def __init__(self, producer: int) -> None:
        self.producer = producer
        self.epoch = -1
        self.state = "empty"
        self.partitions: set[Name] = set()
        self.number = 0
        """Grows with each transaction, so that an old timeout ends no later one."""
        self.raised = False
        """Whether the last end raised the epoch."""


class Cluster:
    """The brokers, sequential in time: each request is handled at once.

    Args:
        loop: gives the time.
        process: whose callbacks write markers; it never dies.
        now_ms: the clock of a broker, by its number.
        brokers: how many there are.
    """

    def __init__(
        self, loop: SimLoop, process: Process, now_ms: Callable[[int], int], brokers: int = 3
    ) -> None:
        self.loop = loop
        self.process = process
        self.now_ms = now_ms
        self.nodes = range(brokers)
        self.logs: dict[Name, Log] = {}
        self.ids: dict[str, TransactionalId] = {}
        self.coordinators: dict[str, int] = {}
        self.marker_s = SWIFT_S
        self.second = False  # whether it takes the second version of the transaction protocol
        self.lost = {False: 0.0, True: 0.0}  # the share of markers that are dropped (KAFKA-20734)
        self.left_open: list[tuple[Log, int, bool]] = []
        self.note: Callable[[str], None] = lambda _: None
        self._producers = 0
        self._handlers = {
            "ProduceV7": self._produce,
            "FetchV11": self._fetch,
            "ListOffsetsV3": self._offsets,
            "MetadataV5": self._metadata,
            "MetadataV10": self._topic_metadata,  # all know the same: none is cut off
            "FindCoordinatorV1": self._find_coordinator,
            "InitProducerIdV0": self._init,
            "AddPartitionsToTxnV0": self._add,
            "EndTxnV0": self._end,
            "ApiVersionsV3": self._features,
            "InitProducerIdV5": self._init,
            "ProduceV12": self._write,
            "EndTxnV5": self._end_and_raise,
            "DescribeProducersV0": self._describe_producers,
        }

    def create(
        self, topic: str, partitions: int, *, append_time: bool, bytes_max: int = 1 << 20
    ) -> None:
        for number in range(partitions):
            leader = (number + len(self.logs)) % len(self.nodes)
            self.logs[topic, number] = Log(leader, append_time=append_time, bytes_max=bytes_max)

    def append_plainly(self, name: Name, record: Record) -> None:
        """Let a client that knows no transactions write a record."""
        log = self.logs[name]
        body, sequence = batch_body([record]), log.plain
        log.plain += 1
        data = encode_batch(
            body, producer_id=_PLAIN, epoch=0, sequence=sequence, transactional=False
        )
        code, *_ = log.append(data, self.now_ms(max(log.leader, 0)), in_transaction=_never)
        assert code == NONE, code

    def decided(self, name: Name) -> Iterator[Any]:
        """Yield the records of a partition whose transaction is committed, the newest first, also
        before its markers are written."""
        log = self.logs[name]
        ending = {each.producer for each in self.ids.values() if each.state == "prepare commit"}
        for batch in reversed(log.batches):
            undecided = batch.base >= log.open.get(batch.producer, batch.base + 1)
            if (
                batch.control
                or log.is_aborted(batch)
                or (undecided and batch.producer not in ending)
            ):
                continue
            yield from reversed(list(next_batch(batch.data)))

    def retain(self, topic: str, seconds: float) -> None:
        """Delete older records, now and later. They are only hidden: the judge reads them."""
        for (name, _), log in self.logs.items():
            if name == topic:
                log.delete(self.now_ms(max(log.leader, 0)) - round(seconds * 1000))
        context = self.process.context
        self.loop.call_later(RETAIN_S, self.retain, topic, seconds, context=context)

    def answer(self, node: int, request: Any) -> Any:
        """Carry out a request that has reached a broker; return its answer, or a time in seconds
        after which it is to be asked again (a fetch waits for something to come)."""
        return self._handlers[type(request).__name__](node, request)

    # --- logs ------------------------------------------------------------------------------------

    def _produce(self, node: int, request: Any) -> Any:
        topics = []
        for topic, parts in request.topics:
            stored = [(n, *self._append(node, (topic, n), data, request)) for n, data in parts]
            topics.append((topic, stored))
        return SimpleNamespace(topics=topics)

    def _append(self, node: int, name: Name, data: bytes, request: Any) -> tuple[int, int, int]:
        log = self.logs.get(name)
        if log is None:
            return UNKNOWN_TOPIC, -1, -1
        if log.leader != node:
            return NOT_LEADER, -1, -1

        def in_transaction(producer: int, epoch: int) -> bool:
            known = self.ids.get(request.transactional_id)
            ongoing = known is not None and known.state == "ongoing"
            ours = ongoing and (known.producer, known.epoch) == (producer, epoch)
            return ours and name in known.partitions

        found = log.append(data, self.now_ms(node), in_transaction=in_transaction)
        self.note(f"append {name[0]}-{name[1]} at {found[1]} code {found[0]}")
        return found  # type: ignore[no-any-return]

    def _write(self, node: int, request: Any) -> Any:
        """A write that puts its partitions into the transaction, as far as they are led here."""
        topics = []
        for topic, parts in request.topics:
            stored = []
            for number, data in parts:
                name, code = (topic, number), NONE
                if name in self.logs and self.logs[name].leader == node:
                    code = self._put_in(request.transactional_id, name, data)
                found = (code, -1, -1)
                if code == NONE:
                    found = self._append(node, name, data, request)
                stored.append((number, *found, -1, [], None))
            topics.append((topic, stored))
        return SimpleNamespace(topics=topics)

    def _put_in(self, id: str, name: Name, data: bytes) -> int:
        """What the coordinator answers a broker that is to write a batch."""
        producer, epoch = _HEADER.unpack_from(data)[9:11]
        known = self.ids.get(id)
        if self.coordinator(id) < 0:
            return NO_COORDINATOR
        if known is None or known.producer != producer:
            return BAD_MAPPING
        if known.epoch != epoch:
            return BAD_EPOCH
        if known.state.startswith("prepare"):
            return CONCURRENT
        self._open(id, known, [name])
        return NONE

    def _fetch(self, node: int, request: Any) -> Any:
        topics = []
        for topic, parts in request.topics:
            topics.append((topic, [self._fetched(node, topic, *part, request) for part in parts]))
        asked = [each for _topic, found in topics for each in found]
        if request.wait_ms > 0 and not any(code or data for _n, code, *_, data in asked):
            wait_s = request.wait_ms / 1000
            request.wait_ms = 0
            return wait_s
        return SimpleNamespace(topics=topics, error_code=NONE)

    def _fetched(
        self, node: int, topic: str, number: int, position: int, bytes_max: int, request: Any
    ) -> tuple[Any, ...]:
        log = self.logs.get((topic, number))
        code, aborted, data = UNKNOWN_TOPIC, [], b""
        high, stable = -1, -1
        if log is not None:
            high = self._high(log)
            stable = min(high, log.stable_end)
            if log.leader != node:
                code = NOT_LEADER
            else:
                committed = request.isolation_level == _READ_COMMITTED
                code, aborted, data = log.fetch(position, bytes_max, high, committed=committed)
        return number, code, high, stable, 0, aborted, data

    def lead(self, log: Log, node: int, learns_s: float = 0.0) -> None:
        """Make a broker the leader of a log; for a while it shows only a part of it."""
        log.leader = node
        shown = self.process.random.randint(log.begin, log.end)
        log.learns = (self.loop.time() + learns_s, shown)

    def _high(self, log: Log) -> int:
        """Return how far a leader knows the log to be replicated."""
        until_s, shown = log.learns
        return shown if self.loop.time() < until_s else log.end

    def _offsets(self, node: int, request: Any) -> Any:
        topics = []
        for topic, parts in request.topics:
            found = []
            for number, which in parts:
                log = self.logs.get((topic, number))
                if log is None or log.leader != node:
                    found.append((number, UNKNOWN_TOPIC if log is None else NOT_LEADER, -1, -1))
                    continue
                if which != _EARLIEST and self._high(log) < log.end:
                    found.append((number, OFFSET_UNKNOWN, -1, -1))
                    continue
                stable = request.isolation_level == _READ_COMMITTED
                end = log.stable_end if stable else log.end
                found.append((number, NONE, -1, log.begin if which == _EARLIEST else end))
            topics.append((topic, found))
        return SimpleNamespace(topics=topics, error_code=NONE)

    def _describe_producers(self, node: int, request: Any) -> Any:
        def states_of(topic: str, number: int) -> tuple[Any, ...]:
            log = self.logs.get((topic, number))
            if log is None or log.leader != node:
                return number, UNKNOWN_TOPIC if log is None else NOT_LEADER, None, []
            found = [(id, 0, 0, -1, 0, first) for id, first in log.open.items()]
            return number, NONE, None, found

        topics = [(t, [states_of(t, number) for number in ns]) for t, ns in request.values[0]]
        return SimpleNamespace(topics=topics)

    def _metadata(self, _: int, request: Any) -> Any:
        return self._described(request.topics, [], [])

    def _topic_metadata(self, _: int, request: Any) -> Any:
        names = [name for _id, name in request.values[0]]
        return self._described(names, [bytes(16)], [0])

    def _described(self, names: Sequence[str], ids: list[bytes], epochs: list[int]) -> Any:
        topics = []
        for topic in names:
            parts = [
                (
                    NONE if log.leader >= 0 else NO_LEADER,
                    number,
                    log.leader,
                    *epochs,
                    *[[0, 1, 2]] * 2,
                )
                for (name, number), log in self.logs.items()
                if name == topic
            ]
            topics.append((NONE if parts else UNKNOWN_TOPIC, topic, *ids, False, parts))
        brokers = [(node, "broker", FIRST_PORT + node, None) for node in self.nodes]
        return SimpleNamespace(brokers=brokers, controller_id=0, topics=topics)

    # --- transactions ----------------------------------------------------------------------------

    def coordinator(self, transactional_id: str) -> int:
        """Return the broker that coordinates a transactional id."""
        return self.coordinators.setdefault(transactional_id, len(transactional_id) % 3)

    def _find_coordinator(self, _: int, request: Any) -> Any:
        node = self.coordinator(request.key)
        return SimpleNamespace(error_code=NONE if node >= 0 else 15, coordinator_id=node)

    def _init(self, node: int, request: Any) -> Any:
        id = request.transactional_id
        if id is None:
            return self._begun(self._new_producer(), 0)
        if self.coordinator(id) != node:
            return self._begun(-1, -1, NOT_COORDINATOR)
        known = self.ids.get(id)
        if known is None:
            known = self.ids[id] = TransactionalId(self._new_producer())
        if known.state == "ongoing":
            # The next epoch is used up for the abort, so that its producer is fenced at once.
            self._raise(known)
            self._prepare(id, known, commit=False)
            return self._begun(-1, -1, CONCURRENT)
        if known.state.startswith("prepare"):
            return self._begun(-1, -1, CONCURRENT)
        known.epoch += 1
        known.state = "empty"
        self.note(f"init {id} epoch {known.epoch}")
        return self._begun(known.producer, known.epoch)

    def _new_producer(self) -> int:
        self._producers += 1
        return 1000 + self._producers

    @staticmethod
    def _begun(producer: int, epoch: int, code: int = NONE) -> Any:
        return SimpleNamespace(error_code=code, producer_id=producer, producer_epoch=epoch)

    def _refusal(self, node: int, request: Any) -> int:
        known = self.ids.get(request.transactional_id)
        if self.coordinator(request.transactional_id) != node:
            return NOT_COORDINATOR
        if known is None or known.producer != request.producer_id:
            return BAD_MAPPING
        return NONE if known.epoch == request.producer_epoch else BAD_EPOCH

    def _add(self, node: int, request: Any) -> Any:
        code = self._refusal(node, request)
        id = request.transactional_id
        names = [(topic, number) for topic, parts in request.topics for number in parts]
        if code == NONE:
            known = self.ids[id]
            if known.state.startswith("prepare"):
                code = CONCURRENT
            elif any(name not in self.logs for name in names):
                code = UNKNOWN_TOPIC
            else:
                self._open(id, known, names)
        errors = [(topic, [(number, code) for number in parts]) for topic, parts in request.topics]
        return SimpleNamespace(errors=errors)

    def _open(self, id: str, known: TransactionalId, names: list[Name]) -> None:
        if known.state != "ongoing":
            known.state = "ongoing"
            known.number += 1
            known.partitions.clear()
            self.loop.call_later(15.0, self._expire, id, known.number, context=self.process.context)
        known.partitions.update(names)

    def _expire(self, id: str, number: int) -> None:
        known = self.ids[id]
        if known.state == "ongoing" and known.number == number:
            self._raise(known)
            self._prepare(id, known, commit=False)

    def _end(self, node: int, request: Any) -> Any:
        code = self._refusal(node, request)
        if code == NONE:
            known = self.ids[request.transactional_id]
            wanted = "commit" if request.committed else "abort"
            if known.state == "ongoing":
                self._prepare(request.transactional_id, known, commit=request.committed)
            elif known.state == f"prepare {wanted}":
                code = CONCURRENT
            elif known.state != f"complete {wanted}":
                code = BAD_STATE
        self.note(f"end {request.transactional_id} {request.committed} code {code}")
        return SimpleNamespace(error_code=code)

    def _features(self, _: int, __: Any) -> Any:
        """The feature as brokers announce it, with its requests."""
        level = b"\x02\x14transaction.version\x00\x02\x00\x02\x00" if self.second else b"\x01"
        versions = [(key, 0, last) for key, last in ((0, 12), (22, 5), (26, 5))]
        return SimpleNamespace(error_code=NONE, api_versions=versions, tags={2: level})

    def _raise(self, known: TransactionalId) -> None:
        known.epoch += 1
        known.raised = self.second

    def _end_and_raise(self, node: int, request: Any) -> Any:
        id, commit = request.transactional_id, request.committed
        known = self.ids.get(id)
        code = NONE
        if self.coordinator(id) != node:
            code = NOT_COORDINATOR
        elif known is None or known.producer != request.producer_id:
            code = BAD_MAPPING
        else:
            code = self._end_once(known, request.producer_epoch, commit=commit)
            if code == NONE and known.state == "ongoing":
                self._raise(known)
                self._prepare(id, known, commit=commit)
        self.note(f"end {id} {commit} code {code}")
        if code != NONE or known is None:
            return self._begun(-1, -1, code)
        return self._begun(known.producer, known.epoch)

    @staticmethod
    def _end_once(known: TransactionalId, epoch: int, *, commit: bool) -> int:
        """What becomes of an end that may be one that was asked for before."""
        if known.state in ("ongoing", "empty"):
            if epoch != known.epoch:
                return BAD_EPOCH
            return NONE if known.state == "ongoing" else BAD_STATE
        if not known.raised or epoch + 1 != known.epoch:
            return BAD_EPOCH
        how, outcome = known.state.split()
        if outcome != ("commit" if commit else "abort"):
            return BAD_STATE
        return CONCURRENT if how == "prepare" else NONE

    def _prepare(self, id: str, known: TransactionalId, *, commit: bool) -> None:
        known.state = "prepare commit" if commit else "prepare abort"
        random = self.process.random
        left = sorted(known.partitions)
        for name in left:
            self.loop.call_later(
                random.uniform(*self.marker_s),
                self._mark,
                (id, name, known.epoch, commit, left),
                context=self.process.context,
            )
        if not left:
            known.state = "complete commit" if commit else "complete abort"

    def _mark(self, what: tuple[str, Name, int, bool, list[Name]]) -> None:
        id, name, epoch, commit, left = what
        known = self.ids[id]
        log = self.logs[name]
        if log.leader < 0:
            self.loop.call_later(0.1, self._mark, what, context=self.process.context)
            return
        lost = known.producer in log.open and self.lost[commit]
        if lost and self.process.random.random() < lost:
            self.note(f"{'commit' if commit else 'abort'} of {id} lost for {name[0]}-{name[1]}")
            self.left_open.append((log, known.producer, commit))
        else:
            log.mark(known.producer, epoch, self.now_ms(log.leader), commit=commit)
        left.remove(name)
        if not left:
            known.state = "complete commit" if commit else "complete abort"


def _never(*_: object) -> bool:
    return False


FIRST_PORT = 9000
"""Broker n is reached at this port and n."""
