"""Batches of several partitions in one request."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import IncompatibleBrokerVersion, KafkaConnectionError

from txbroker.core.records import Partition, Record
from txbroker.door.protocols import Appended, AppendRefused, AppendUnknown
from txbroker.errors import ConfigurationError
from txbroker.kafka.client import shared_writes
from txbroker.kafka.client.client import Client, NotSent, Unanswered
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.client.shared_writes import REQUEST_BYTES_MAX, SharedWrites
from txbroker.kafka.door.log import KafkaLog
from txbroker.kafka.protocol.transactions import ACKS_ALL, PartitionResult

LONG_S = 60.0
TOO_LARGE, NOT_LEADER, TIMED_OUT, OUT_OF_ORDER = 10, 6, 7, 45
FEW_REPLICAS, FEW_REPLICAS_AFTER_APPEND = 19, 20


Writing = asyncio.Task[PartitionResult]
A, B, C = ("half", 0), ("op", 0), ("half", 1)


class Sent:
    """A request on its way to a broker."""

    def __init__(self, node: int, lane: str, request: Any, answer: Any) -> None:
        self.node = node
        self.lane = lane
        self.request = request
        self.answer = answer or asyncio.get_running_loop().create_future()

    @property
    def batches(self) -> dict[Partition, bytes]:
        """What it writes."""
        topics = self.request.topics
        pairs = [((topic, number), data) for topic, some in topics for number, data in some]
        assert len(dict(pairs)) == len(pairs), "a partition is there twice"
        return dict(pairs)

    def store(self, offset: int = 5, leave_out: Partition | None = None, **codes: int) -> None:
        """Answer it; `codes` are those of topics whose batches are not stored."""
        topics = [
            (topic, [(number, codes.get(topic, 0), offset, 77)])
            for topic, number in self.batches
            if (topic, number) != leave_out
        ]
        self.answer.set_result(SimpleNamespace(topics=topics))

    def lose(self) -> None:
        """Break its connection."""
        self.answer.set_exception(KafkaConnectionError("reset"))


class Scripted:
    """A connection that leaves answers to the test."""

    def __init__(self, brokers: Writes, node: int) -> None:
        self._brokers = brokers
        self._node = node
        self._up = True

    def connected(self) -> bool:
        return self._up

    def send(self, request: Any, answer: Any = None) -> Any:
        if self._brokers.send_fails is not None:
            raise self._brokers.send_fails
        connections = self._brokers.client._connections.items()
        lane = next(lane for (_, lane), each in connections if each is self)
        sent = Sent(self._node, lane, request, answer)
        if type(request).__name__ == "InitProducerIdV0":
            answer = SimpleNamespace(error_code=0, producer_id=7, producer_epoch=0)
            sent.answer.set_result(answer)
        else:
            self._brokers.sent.append(sent)
        return sent.answer

    def close(self) -> asyncio.Future[None]:
        self._up = False
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        closed.set_result(None)
        return closed


class Writes:
    """Brokers 1 and 2, whose answers the test gives, and shared writes to them."""

    def __init__(self, at_once: int = 2, wait_max_s: float = LONG_S, **changes: Any) -> None:
        self.sent: list[Sent] = []
        self.send_fails: Exception | None = None
        self.refused: Exception | None = None
        self.open = asyncio.Event()
        self.open.set()
        settings = KafkaSettings(bootstrap_servers=("x:1",), instance_id="one", **changes)
        self.client = Client(settings, self._open)
        self.client.brokers = {1: ("one", 1), 2: ("two", 2)}
        for at in (A, B, C):
            self.client._leaders[at] = 1
        self.shared = SharedWrites(self.client, at_once, wait_max_s)

    async def _open(self, _host: str, port: int, **_: Any) -> Any:
        await self.open.wait()
        if self.refused is not None:
            raise self.refused
        return Scripted(self, port)

    async def start(self, *places: Partition, data: bytes = b"x", leader: int = 1) -> list[Writing]:
        """Start writes in one iteration; return once nothing is left to do but to answer."""
        writes = [self.write(at, data, leader) for at in places]
        await settle()
        return writes

    def write(self, at: Partition, data: bytes = b"x", leader: int = 1) -> Writing:
        own_channel = f"own/{at[0]}-{at[1]}"
        return asyncio.create_task(self.shared.write(leader, at, data, own_channel))

    async def store_all(self, writes: Iterable[Writing], first: int = 0) -> list[int]:
        """Store what was sent from request `first` on; return the codes that the writes get."""
        for sent in self.sent[first:]:
            sent.store()
        return [result.code for result in await asyncio.gather(*writes)]

    async def done(self, at: Partition) -> None:
        """Write to a partition."""
        writes = await self.start(at)
        assert await self.store_all(writes, len(self.sent) - 1) == [0]

    def log(self, at: Partition) -> KafkaLog:
        return KafkaLog(self.client, *at, f"p/{at[0]}", 1 << 20, self.shared)

    def append(self, *places: Partition) -> list[asyncio.Task[Appended]]:
        """Start to append a record to the log of each partition."""
        return [asyncio.create_task(self.log(at).append([Record(b"k", b"v")])) for at in places]

    async def sent_to(self, number: int) -> Sent:
        """Wait for a request."""
        async with asyncio.timeout(LONG_S):
            while len(self.sent) <= number:
                await asyncio.sleep(0.001)
        return self.sent[number]


@pytest.fixture
async def brokers() -> AsyncIterator[Writes]:
    made = Writes()
    yield made
    await made.shared.close()


async def fail(writes: Iterable[Writing], error: type[Exception], match: str | None = None) -> None:
    """See each write fail."""
    for write in writes:
        with pytest.raises(error, match=match):
            await asyncio.wait_for(write, 5.0)


async def settle() -> None:
    """Let everything run that needs nothing else to happen."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_batches_of_one_iteration_share_a_request(brokers: Writes) -> None:
    writing = [brokers.write(at, data) for at, data in ((A, b"a"), (B, b"b"), (C, b"c"))]
    await settle()
    (sent,) = brokers.sent
    assert sent.batches == {A: b"a", B: b"b", C: b"c"}
    request = sent.request
    assert (request.acks, request.timeout_ms) == (ACKS_ALL, 1000)
    assert request.transactional_id is None
    sent.store()
    results = [await each for each in writing]
    assert [(each.topic, each.partition, each.base_offset) for each in results] == [
        (*A, 5),
        (*B, 5),
        (*C, 5),
    ]


async def test_answer_resolves_within_one_iteration(brokers: Writes) -> None:
    await brokers.done(A)
    writing = brokers.write(A)
    await asyncio.sleep(0)  # batches ready meanwhile are combined
    await asyncio.sleep(0)
    brokers.sent[-1].store()
    await asyncio.sleep(0)
    assert writing.done()


async def test_each_partition_gets_its_error(brokers: Writes) -> None:
    writes = await brokers.start(A, B)
    brokers.sent[0].store(op=TOO_LARGE)
    assert [(await each).code for each in writes] == [0, TOO_LARGE]


async def test_single_batch_is_sent_at_once(brokers: Writes) -> None:
    for number in range(3):
        await brokers.done(A)
        assert len(brokers.sent) == number + 1


async def test_each_broker_gets_its_batches(brokers: Writes) -> None:
    writing = [brokers.write(A, leader=1), brokers.write(B, leader=2)]
    await settle()
    assert [(sent.node, set(sent.batches)) for sent in brokers.sent] == [(1, {A}), (2, {B})]
    await brokers.store_all(writing)


async def test_batches_wait_while_requests_are_in_flight(brokers: Writes) -> None:
    late = [("late", number) for number in range(3)]
    writing = [write for at in (A, B, *late) for write in await brokers.start(at)]
    assert [set(sent.batches) for sent in brokers.sent] == [{A}, {B}]
    assert [sent.lane for sent in brokers.sent] == ["shared/0", "shared/1"]
    brokers.sent[0].store()
    await settle()
    assert (set(brokers.sent[2].batches), brokers.sent[2].lane) == (set(late), "shared/0")
    await brokers.store_all(writing, 1)


async def test_wait_for_slow_requests_is_bounded() -> None:
    brokers = Writes(at_once=1, wait_max_s=0.001)
    writing = []
    for number, at in enumerate((A, B, C)):
        writing.append(brokers.write(at))
        assert (await brokers.sent_to(number)).lane == f"shared/{number}"
    await brokers.store_all(writing)


async def test_request_size_is_bounded(brokers: Writes) -> None:
    some = [("some", number) for number in range(3)]
    writing = [brokers.write(at, bytes(REQUEST_BYTES_MAX // 2)) for at in some]
    writing.append(brokers.write(A, bytes(REQUEST_BYTES_MAX + 1)))
    await settle()
    assert [(sent.lane, set(sent.batches)) for sent in brokers.sent] == [
        ("own/half-0", {A}),
        ("shared/0", set(some[:2])),
        ("shared/1", {some[2]}),
    ]
    await brokers.store_all(writing)


async def test_small_batch_passes_large_one(brokers: Writes) -> None:
    writing = [brokers.write(at, bytes(REQUEST_BYTES_MAX * 9 // 10)) for at in (A, C)]
    writing.append(brokers.write(B, b"a decision"))
    await settle()
    assert [set(sent.batches) for sent in brokers.sent] == [{A, B}, {C}]
    await brokers.store_all(writing)


async def test_request_has_one_batch_per_partition(brokers: Writes) -> None:
    """As where a write is cancelled and repeated in the same moment."""
    made = asyncio.get_running_loop().create_future
    batches = [shared_writes._Batch(A, data, made()) for data in (b"1", b"2")]
    writing = [asyncio.create_task(brokers.shared._write(1, each, "")) for each in batches]
    await settle()
    assert [sent.batches for sent in brokers.sent] == [{A: b"1"}, {A: b"2"}]
    for number, sent in enumerate(brokers.sent):
        sent.store(number)
    assert [(await each).base_offset for each in writing] == [0, 1]


# --- cancelled writes ----------------------------------------------------------------------------


@pytest.mark.rule(1)
async def test_cancelled_batch_is_not_sent(brokers: Writes) -> None:
    brokers.open.clear()
    given_up, stays = await brokers.start(A, B)
    given_up.cancel()
    brokers.open.set()
    await settle()
    (sent,) = brokers.sent
    assert set(sent.batches) == {B}
    assert await brokers.store_all([stays]) == [0]
    assert given_up.cancelled()


async def test_batch_cancelled_in_same_iteration_is_not_sent(brokers: Writes) -> None:
    await brokers.done(A)
    brokers.sent.clear()
    given_up = brokers.write(A)
    await asyncio.sleep(0)
    given_up.cancel()
    await settle()
    assert not brokers.sent
    broker = brokers.shared._brokers[1]
    assert (broker.waiting, broker.channels, brokers.shared._in_flight) == ({}, set(), set())
    await brokers.done(A)
    # It did not come through as far as is known, so the next one goes alone.
    assert [sent.lane for sent in brokers.sent] == ["own/half-0"]


async def test_cancel_in_flight_does_not_affect_others(brokers: Writes) -> None:
    given_up, stays = await brokers.start(A, B)
    given_up.cancel()
    await settle()
    assert await brokers.store_all([stays]) == [0]
    assert given_up.cancelled()


@pytest.mark.parametrize("alone", [False, True])
async def test_failed_batch_frees_its_bytes(brokers: Writes, alone: bool) -> None:
    data = bytes(REQUEST_BYTES_MAX + alone)
    gc.collect()
    gc.disable()
    try:
        for node in (1, 2):  # a connection that breaks, and one that does not come about
            writing = await brokers.start(("x", node), ("y", node), data=data, leader=node)
            while brokers.sent:
                brokers.sent.pop().lose()
            brokers.refused = ConnectionRefusedError(111, "connection refused")
            results = await asyncio.gather(*writing, return_exceptions=True)
            assert {type(each) for each in results} <= {Unanswered, NotSent}
            del writing, results
            await settle()
            assert not [each for each in gc.get_objects() if type(each) is shared_writes._Batch]
    finally:
        gc.enable()


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.rule(1)
async def test_broken_connection_leaves_all_unanswered(brokers: Writes) -> None:
    lost = await brokers.start(A, B)
    others = [*await brokers.start(C), *await brokers.start(("late", 0))]
    brokers.sent[0].lose()
    await fail(lost, Unanswered, "reset")
    await settle()
    assert [set(sent.batches) for sent in brokers.sent[1:]] == [{C}, {("late", 0)}]
    assert await brokers.store_all(others, 1) == [0, 0]


@pytest.mark.parametrize(
    ("refused", "on_send", "error", "match"),
    [
        (ConnectionRefusedError(111, "connection refused"), None, NotSent, "no connection"),
        (None, KafkaConnectionError("broken"), NotSent, "broken"),
        (None, IncompatibleBrokerVersion("produce"), ConfigurationError, "too old"),
    ],
    ids=["no connection", "broken on send", "unexpected"],
)
async def test_unsent_request_fails_all_and_isolates_no_partition(
    brokers: Writes,
    refused: Exception | None,
    on_send: Exception | None,
    error: type[Exception],
    match: str,
) -> None:
    brokers.refused, brokers.send_fails = refused, on_send
    await fail([brokers.write(A), brokers.write(B)], error, match)
    assert not brokers.sent
    if error is NotSent:
        brokers.refused = brokers.send_fails = None
        both = await brokers.start(A, B)
        assert [set(sent.batches) for sent in brokers.sent] == [{A, B}]
        assert await brokers.store_all(both) == [0, 0]


@pytest.mark.parametrize("first_waits", [True, False])
async def test_unexpected_error_reaches_one_partition(brokers: Writes, first_waits: bool) -> None:
    first, second = await brokers.start(A, B)
    if not first_waits:
        first.cancel()
        await settle()
    # An answer that does not decode.
    brokers.sent[0].answer.set_result(SimpleNamespace(topics=[("half",)]))
    with pytest.raises(ValueError, match="unpack") as raised:
        await (first if first_waits else second)
    # Where it came up.
    assert "parse_produce_response" in [entry.name for entry in raised.traceback]
    if first_waits:
        await fail([second], Unanswered, "several partitions")


@pytest.mark.rule(1)
async def test_missing_result_is_unanswered_for_that_partition(brokers: Writes) -> None:
    first, second = await brokers.start(A, B)
    brokers.sent[0].store(leave_out=B)
    assert (await first).code == 0
    await fail([second], Unanswered, "op-0")


async def test_failed_partition_writes_alone_until_success(brokers: Writes) -> None:
    for code in (TIMED_OUT, NOT_LEADER, 0):
        first, second = await brokers.start(A, B)
        lanes = {sent.lane: sent for sent in brokers.sent}
        brokers.sent.clear()
        for sent in lanes.values():
            sent.store(half=code)
        assert ((await first).code, (await second).code) == (code, 0)
        together = code == TIMED_OUT
        assert set(lanes) == ({"shared/0"} if together else {"own/half-0", "shared/0"})
    both = await brokers.start(A, B)
    assert [set(sent.batches) for sent in brokers.sent] == [{A, B}]
    await brokers.store_all(both)


async def test_shared_request_has_short_timeout(brokers: Writes) -> None:
    writing = [brokers.write(A), brokers.write(B), brokers.write(C, b"x" * REQUEST_BYTES_MAX)]
    await settle()
    waits = sorted((len(sent.batches), sent.request.timeout_ms) for sent in brokers.sent)
    patience_ms = round(brokers.client.settings.request_timeout_s * 1000)
    assert waits == [(1, patience_ms), (2, 1000)]
    await brokers.store_all(writing)


async def test_slow_partition_writes_alone(
    brokers: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for slow_s in (0.0, LONG_S, LONG_S):
        monkeypatch.setattr(shared_writes, "SLOW_S", slow_s)
        await brokers.done(A)
    assert [sent.lane for sent in brokers.sent] == ["shared/0", "own/half-0", "shared/0"]


async def test_close_fails_waiting_batches(brokers: Writes) -> None:
    sent = [*await brokers.start(A), *await brokers.start(B)]
    waiting = await brokers.start(C)
    await brokers.shared.close()
    await fail(sent, Unanswered)
    await fail([*waiting, brokers.write(A)], NotSent)


# --- as the logs see it --------------------------------------------------------------------------


async def test_refused_batch_does_not_affect_other_logs(brokers: Writes) -> None:
    half, op = brokers.append(A, B)
    (await brokers.sent_to(0)).store(half=TOO_LARGE)
    with pytest.raises(AppendRefused, match="too large"):
        await half
    assert await op == (5, 77)
    assert len(brokers.sent) == 1


async def test_unanswered_batch_is_resent_alone_and_identical(brokers: Writes) -> None:
    half = brokers.log(A)
    first = asyncio.create_task(half.append([Record(b"1", b"")]))
    lost = await brokers.sent_to(0)
    lost.lose()
    brokers.client._leaders[A] = 1
    # The leader is looked up again; its answer is the same.
    brokers.client.refresh = _same_leader  # type: ignore[method-assign]
    again = await brokers.sent_to(1)
    assert (again.lane, again.batches) == ("p/half/append", lost.batches)
    await settle()
    assert len(brokers.sent) == 2
    again.store(8)
    assert (await first).base_offset == 8
    second = asyncio.create_task(half.append([Record(b"2", b"")]))
    (await brokers.sent_to(2)).store(9)
    assert (await second).base_offset == 9
    assert brokers.sent[2].lane == "shared/0"


async def _same_leader(topics: Any) -> Any:
    facts = SimpleNamespace(leader=1)
    return {topic: SimpleNamespace(error=0, partitions={0: facts, 1: facts}) for topic in topics}


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (TIMED_OUT, AppendUnknown),
        (FEW_REPLICAS_AFTER_APPEND, AppendUnknown),
        (NOT_LEADER, AppendUnknown),
        (FEW_REPLICAS, AppendRefused),
    ],
)
async def test_maybe_stored_batch_is_not_refused(
    brokers: Writes, first: int, then: type[Exception]
) -> None:
    brokers.client.refresh = _same_leader  # type: ignore[method-assign]
    (append,) = brokers.append(A)
    (await brokers.sent_to(0)).store(half=first)
    (await brokers.sent_to(1)).store(half=TOO_LARGE)
    assert brokers.sent[1].batches == brokers.sent[0].batches
    with pytest.raises(then, match="too large"):
        await append


async def test_unanswered_append_is_unknown_for_every_log() -> None:
    brokers = Writes(write_timeout_s=0.05)
    brokers.client.refresh = _same_leader  # type: ignore[method-assign]

    async def lose_all() -> None:
        for number in itertools.count():
            (await brokers.sent_to(number)).lose()

    appends = brokers.append(A, B)
    losing = asyncio.create_task(lose_all())
    for append in appends:
        with pytest.raises(AppendUnknown, match="reset"):
            await append
    losing.cancel()
    assert set(brokers.sent[0].batches) == {A, B}
