"""Batches of several partitions in one request: who goes along, who waits, and who hears what."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import IncompatibleBrokerVersion, KafkaConnectionError

from tests.kafka.scripted_brokers import A, B, Brokers, C, Sent
from txbroker.core.records import Record
from txbroker.door.protocols import AppendRefused, AppendUnknown
from txbroker.errors import ConfigurationError
from txbroker.kafka.client import shared_writes
from txbroker.kafka.client.client import NotSent, Unanswered
from txbroker.kafka.client.shared_writes import REQUEST_BYTES_MAX, SharedWrites
from txbroker.kafka.door.log import KafkaLog
from txbroker.kafka.protocol.transactions import ACKS_ALL, Partition, PartitionResult

LONG_S = 60.0
TOO_LARGE, NOT_LEADER, TIMED_OUT, OUT_OF_ORDER = 10, 6, 7, 45
FEW_REPLICAS, FEW_REPLICAS_AFTER_APPEND = 19, 20


@pytest.fixture
async def brokers() -> Brokers:
    """Brokers whose answers the test gives."""
    return Brokers()


@pytest.fixture
async def shared(brokers: Brokers) -> AsyncIterator[SharedWrites]:
    """The tested object: two requests at once, and unlimited wait."""
    made = SharedWrites(brokers.client, at_once=2, wait_max_s=LONG_S)
    yield made
    await made.close()


Writing = asyncio.Task[PartitionResult]


def start(shared: SharedWrites, at: Partition, data: bytes = b"x", leader: int = 1) -> Writing:
    return asyncio.create_task(shared.write(leader, at, data, f"own/{at[0]}-{at[1]}"))


async def heard(writing: Writing) -> PartitionResult:
    """Wait for what a writer hears; one that hears nothing fails its test."""
    return await asyncio.wait_for(writing, 5.0)


async def settle() -> None:
    """Let everything run that needs nothing else to happen."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_batches_of_one_iteration_share_a_request(
    brokers: Brokers, shared: SharedWrites
) -> None:
    writing = [start(shared, at, data) for at, data in ((A, b"a"), (B, b"b"), (C, b"c"))]
    await settle()
    (sent,) = brokers.sent
    assert sent.batches == {A: b"a", B: b"b", C: b"c"}
    request = sent.request
    assert (request._required_acks, request._timeout) == (ACKS_ALL, 1000)
    assert request._transactional_id is None
    sent.store()
    results = [await each for each in writing]
    assert [(each.topic, each.partition, each.base_offset) for each in results] == [
        (*A, 5),
        (*B, 5),
        (*C, 5),
    ]


async def test_answer_resolves_within_one_iteration(brokers: Brokers, shared: SharedWrites) -> None:
    await _done(brokers, shared, A)
    writing = start(shared, A)
    await asyncio.sleep(0)  # batches ready meanwhile are combined
    await asyncio.sleep(0)
    brokers.sent[-1].store()
    await asyncio.sleep(0)
    assert writing.done()


async def test_each_partition_gets_its_error(brokers: Brokers, shared: SharedWrites) -> None:
    first, second = start(shared, A), start(shared, B)
    await settle()
    brokers.sent[0].store(op=TOO_LARGE)
    assert ((await first).code, (await second).code) == (0, TOO_LARGE)


async def test_single_batch_is_sent_at_once(brokers: Brokers, shared: SharedWrites) -> None:
    for number in range(3):
        writing = start(shared, A)
        await settle()
        assert len(brokers.sent) == number + 1
        brokers.sent[number].store()
        await writing


async def test_each_broker_gets_its_batches(brokers: Brokers, shared: SharedWrites) -> None:
    writing = [start(shared, A, leader=1), start(shared, B, leader=2)]
    await settle()
    assert [(sent.node, set(sent.batches)) for sent in brokers.sent] == [(1, {A}), (2, {B})]
    for sent in brokers.sent:
        sent.store()
    await asyncio.gather(*writing)


async def test_batches_wait_while_requests_are_in_flight(
    brokers: Brokers, shared: SharedWrites
) -> None:
    late = [("late", number) for number in range(3)]
    writing = []
    for at in (A, B, *late):
        writing.append(start(shared, at))
        await settle()
    assert [set(sent.batches) for sent in brokers.sent] == [{A}, {B}]
    assert [sent.lane for sent in brokers.sent] == ["shared/0", "shared/1"]
    brokers.sent[0].store()
    await settle()
    assert set(brokers.sent[2].batches) == set(late)
    assert brokers.sent[2].lane == "shared/0"
    for sent in brokers.sent[1:]:
        sent.store()
    await asyncio.gather(*writing)


async def test_wait_for_slow_requests_is_bounded(brokers: Brokers) -> None:
    shared = SharedWrites(brokers.client, at_once=1, wait_max_s=0.001)
    writing = []
    async with asyncio.timeout(LONG_S):
        for number, at in enumerate((A, B, C), 1):
            writing.append(start(shared, at))
            while len(brokers.sent) < number:
                await asyncio.sleep(0.001)
    assert [sent.lane for sent in brokers.sent] == ["shared/0", "shared/1", "shared/2"]
    for sent in brokers.sent:
        sent.store()
    await asyncio.gather(*writing)


async def test_request_size_is_bounded(brokers: Brokers, shared: SharedWrites) -> None:
    some = [("some", number) for number in range(3)]
    writing = [start(shared, at, bytes(REQUEST_BYTES_MAX // 2)) for at in some]
    writing.append(start(shared, A, bytes(REQUEST_BYTES_MAX + 1)))
    await settle()
    assert [(sent.lane, set(sent.batches)) for sent in brokers.sent] == [
        ("own/half-0", {A}),
        ("shared/0", set(some[:2])),
        ("shared/1", {some[2]}),
    ]
    for sent in brokers.sent:
        sent.store()
    await asyncio.gather(*writing)


async def test_small_batch_passes_large_one(brokers: Brokers, shared: SharedWrites) -> None:
    writing = [start(shared, at, bytes(REQUEST_BYTES_MAX * 9 // 10)) for at in (A, C)]
    writing.append(start(shared, B, b"a decision"))
    await settle()
    assert [set(sent.batches) for sent in brokers.sent] == [{A, B}, {C}]
    for sent in brokers.sent:
        sent.store()
    await asyncio.gather(*writing)


async def test_request_has_one_batch_per_partition(brokers: Brokers, shared: SharedWrites) -> None:
    """As where one who gave up has an heir in the same moment."""
    made = asyncio.get_running_loop().create_future
    batches = [shared_writes._Batch(A, data, made()) for data in (b"1", b"2")]
    writing = [asyncio.create_task(shared._write(1, each, "")) for each in batches]
    await settle()
    assert [sent.batches for sent in brokers.sent] == [{A: b"1"}, {A: b"2"}]
    for number, sent in enumerate(brokers.sent):
        sent.store(number)
    assert [(await each).base_offset for each in writing] == [0, 1]


# --- who gives up --------------------------------------------------------------------------------


@pytest.mark.rule(1)
async def test_cancelled_batch_is_not_sent(brokers: Brokers, shared: SharedWrites) -> None:
    brokers.open.clear()
    given_up, stays = start(shared, A), start(shared, B)
    await settle()
    given_up.cancel()
    brokers.open.set()
    await settle()
    (sent,) = brokers.sent
    assert set(sent.batches) == {B}
    sent.store()
    assert (await stays).code == 0
    assert given_up.cancelled()


async def test_batch_cancelled_in_same_iteration_is_not_sent(
    brokers: Brokers, shared: SharedWrites
) -> None:
    assert (await _done(brokers, shared, A)).code == 0
    brokers.sent.clear()
    given_up = start(shared, A)
    await asyncio.sleep(0)
    given_up.cancel()
    await settle()
    assert not brokers.sent
    assert not shared._brokers[1].waiting
    assert not shared._in_flight
    assert not shared._brokers[1].channels
    again = start(shared, A)
    await settle()
    # It did not come through as far as is known, so the next one goes alone.
    (sent,) = brokers.sent
    assert sent.lane == "own/half-0"
    sent.store()
    await again


async def _done(brokers: Brokers, shared: SharedWrites, at: Partition) -> PartitionResult:
    writing = start(shared, at)
    await settle()
    brokers.sent[-1].store()
    return await writing


async def test_cancel_in_flight_does_not_affect_others(
    brokers: Brokers, shared: SharedWrites
) -> None:
    given_up, stays = start(shared, A), start(shared, B)
    await settle()
    given_up.cancel()
    await settle()
    brokers.sent[0].store()
    assert (await stays).code == 0
    assert given_up.cancelled()


@pytest.mark.parametrize("alone", [False, True])
async def test_failed_batch_frees_its_bytes(
    brokers: Brokers, shared: SharedWrites, alone: bool
) -> None:
    data = bytes(REQUEST_BYTES_MAX + alone)
    gc.collect()
    gc.disable()
    try:
        for node in (1, 2):  # a connection that breaks, and one that does not come about
            some = [("x", node), ("y", node)]
            writing = [start(shared, at, data, leader=node) for at in some]
            await settle()
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


# --- trouble -------------------------------------------------------------------------------------


@pytest.mark.rule(1)
async def test_broken_connection_leaves_all_unanswered(
    brokers: Brokers, shared: SharedWrites
) -> None:
    lost = [start(shared, A), start(shared, B)]
    await settle()
    other = start(shared, C)
    await settle()
    waiting = start(shared, ("late", 0))
    await settle()
    brokers.sent[0].lose()
    for each in lost:
        with pytest.raises(Unanswered, match="reset"):
            await heard(each)
    await settle()
    assert [set(sent.batches) for sent in brokers.sent[1:]] == [{C}, {("late", 0)}]
    for sent in brokers.sent[1:]:
        sent.store()
    assert [(await each).code for each in (other, waiting)] == [0, 0]


async def test_failed_connection_means_not_sent(brokers: Brokers, shared: SharedWrites) -> None:
    brokers.refused = ConnectionRefusedError(111, "connection refused")
    for each in [start(shared, A), start(shared, B)]:
        with pytest.raises(NotSent, match="no connection"):
            await heard(each)
    assert not brokers.sent


async def test_connection_broken_on_send_means_not_sent(
    brokers: Brokers, shared: SharedWrites
) -> None:
    brokers.send_fails = KafkaConnectionError("broken")
    for each in [start(shared, A), start(shared, B)]:
        with pytest.raises(NotSent, match="broken"):
            await each


async def test_unexpected_error_fails_all(brokers: Brokers, shared: SharedWrites) -> None:
    brokers.send_fails = IncompatibleBrokerVersion("produce")
    for each in [start(shared, A), start(shared, B)]:
        with pytest.raises(ConfigurationError, match="too old"):
            await each


async def test_unexpected_error_reaches_one_partition(
    brokers: Brokers, shared: SharedWrites
) -> None:
    # An answer that does not decode.
    first, second = start(shared, A), start(shared, B)
    await settle()
    brokers.sent[0].answer.set_result(SimpleNamespace(topics=[("half",)]))
    with pytest.raises(ValueError, match="unpack") as raised:
        await first
    assert "parse_produce_response" in [
        entry.name for entry in raised.traceback
    ]  # where it came up
    with pytest.raises(Unanswered, match="several partitions"):
        await second


async def test_unexpected_error_reaches_a_waiting_partition(
    brokers: Brokers, shared: SharedWrites
) -> None:
    given_up, other = start(shared, A), start(shared, B)
    await settle()
    given_up.cancel()
    await settle()
    brokers.sent[0].answer.set_result(SimpleNamespace(topics=[("half",)]))
    with pytest.raises(ValueError, match="unpack"):
        await other


async def test_unsent_batch_does_not_isolate_partition(
    brokers: Brokers, shared: SharedWrites
) -> None:
    brokers.refused = ConnectionRefusedError(111, "connection refused")
    for each in [start(shared, A), start(shared, B)]:
        with pytest.raises(NotSent):
            await heard(each)
    brokers.refused = None
    both = [start(shared, A), start(shared, B)]
    await settle()
    (sent,) = brokers.sent
    assert set(sent.batches) == {A, B}
    sent.store()
    assert [(await each).code for each in both] == [0, 0]


@pytest.mark.rule(1)
async def test_missing_result_is_unanswered_for_that_partition(
    brokers: Brokers, shared: SharedWrites
) -> None:
    first, second = start(shared, A), start(shared, B)
    await settle()
    brokers.sent[0].store(leave_out=B)
    assert (await first).code == 0
    with pytest.raises(Unanswered, match="op-0"):
        await second


async def test_failed_partition_writes_alone_until_success(
    brokers: Brokers, shared: SharedWrites
) -> None:
    for code in (TIMED_OUT, NOT_LEADER, 0):
        first, second = start(shared, A), start(shared, B)
        await settle()
        lanes = {sent.lane: sent for sent in brokers.sent}
        brokers.sent.clear()
        for sent in lanes.values():
            sent.store(half=code)
        assert ((await first).code, (await second).code) == (code, 0)
        together = code == TIMED_OUT
        assert set(lanes) == ({"shared/0"} if together else {"own/half-0", "shared/0"})
    first, second = start(shared, A), start(shared, B)
    await settle()
    assert [set(sent.batches) for sent in brokers.sent] == [{A, B}]
    brokers.sent[0].store()
    await asyncio.gather(first, second)


async def test_shared_request_has_short_timeout(brokers: Brokers, shared: SharedWrites) -> None:
    writing = [start(shared, A), start(shared, B), start(shared, C, b"x" * REQUEST_BYTES_MAX)]
    await settle()
    waits = sorted((len(sent.batches), sent.request._timeout) for sent in brokers.sent)
    patience_ms = round(brokers.client.settings.request_timeout_s * 1000)
    assert waits == [(1, patience_ms), (2, 1000)]
    for sent in brokers.sent:
        sent.store()
    await asyncio.gather(*writing)


async def test_slow_partition_writes_alone(
    brokers: Brokers, shared: SharedWrites, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_writes, "SLOW_S", 0.0)
    await _done(brokers, shared, A)
    monkeypatch.setattr(shared_writes, "SLOW_S", LONG_S)
    await _done(brokers, shared, A)
    await _done(brokers, shared, A)
    assert [sent.lane for sent in brokers.sent] == ["shared/0", "own/half-0", "shared/0"]


async def test_close_fails_waiting_batches(brokers: Brokers, shared: SharedWrites) -> None:
    writes = [start(shared, A)]
    await settle()
    writes.append(start(shared, B))
    await settle()
    waiting = start(shared, C)
    await settle()
    await shared.close()
    for each in writes:
        with pytest.raises(Unanswered):
            await heard(each)
    with pytest.raises(NotSent):
        await heard(waiting)
    with pytest.raises(NotSent):
        await heard(start(shared, A))


# --- as the logs see it --------------------------------------------------------------------------


def log(brokers: Brokers, shared: SharedWrites, at: Partition) -> KafkaLog:
    return KafkaLog(brokers.client, *at, f"p/{at[0]}", 1 << 20, shared)


async def sent_to(brokers: Brokers, number: int) -> Sent:
    """Wait for a request."""
    async with asyncio.timeout(LONG_S):
        while len(brokers.sent) <= number:
            await asyncio.sleep(0.001)
    return brokers.sent[number]


async def test_refused_batch_does_not_affect_other_logs(
    brokers: Brokers, shared: SharedWrites
) -> None:
    half, op = log(brokers, shared, A), log(brokers, shared, B)
    appends = [asyncio.create_task(each.append([Record(b"k", b"v")])) for each in (half, op)]
    (await sent_to(brokers, 0)).store(half=TOO_LARGE)
    with pytest.raises(AppendRefused, match="too large"):
        await appends[0]
    assert await appends[1] == (5, 77)
    assert len(brokers.sent) == 1


async def test_unanswered_batch_is_resent_alone_and_identical(
    brokers: Brokers, shared: SharedWrites
) -> None:
    half = log(brokers, shared, A)
    first = asyncio.create_task(half.append([Record(b"1", b"")]))
    lost = await sent_to(brokers, 0)
    lost.lose()
    brokers.client._leaders[A] = 1
    # The leader is looked up again; its answer is the same.
    brokers.client.refresh = _same_leader  # type: ignore[method-assign]
    again = await sent_to(brokers, 1)
    assert (again.lane, again.batches) == ("p/half/append", lost.batches)
    await settle()
    assert len(brokers.sent) == 2
    again.store(8)
    assert (await first).base_offset == 8
    second = asyncio.create_task(half.append([Record(b"2", b"")]))
    (await sent_to(brokers, 2)).store(9)
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
    brokers: Brokers, shared: SharedWrites, first: int, then: type[Exception]
) -> None:
    brokers.client.refresh = _same_leader  # type: ignore[method-assign]
    append = asyncio.create_task(log(brokers, shared, A).append([Record(b"k", b"v")]))
    (await sent_to(brokers, 0)).store(half=first)
    (await sent_to(brokers, 1)).store(half=TOO_LARGE)
    assert brokers.sent[1].batches == brokers.sent[0].batches
    with pytest.raises(then, match="too large"):
        await append


async def test_unanswered_append_is_unknown_for_every_log() -> None:
    brokers = Brokers(write_timeout_s=0.05)
    brokers.client.refresh = _same_leader  # type: ignore[method-assign]
    shared = SharedWrites(brokers.client)
    logs = [log(brokers, shared, at) for at in (A, B)]
    appends = [asyncio.create_task(each.append([Record(b"k", b"v")])) for each in logs]
    losing = asyncio.create_task(_lose_all(brokers))
    for append in appends:
        with pytest.raises(AppendUnknown, match="reset"):
            await append
    losing.cancel()
    assert set(brokers.sent[0].batches) == {A, B}


async def _lose_all(brokers: Brokers) -> None:
    number = 0
    while True:
        (await sent_to(brokers, number)).lose()
        number += 1
