"""Groups: partitions that move, leases, topics that change, faults of Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.kit.consumer_world import GROUP, TIMING, Handler, World, counted, text, texts
from tests.kit.until import until
from txbroker.consumer import ReceivedMessage, RecordsDeleted, Reject
from txbroker.consumer import rounds as rounds_module
from txbroker.core.consuming.copies import ASIDE_PARTITIONS, spread
from txbroker.core.consuming.position import Metadata, StoredOffset, encode_metadata
from txbroker.core.records import Partition
from txbroker.door.consuming import OffsetMissing
from txbroker.errors import KafkaUnavailable
from txbroker.testing.consuming import MemoryMember
from txbroker.testing.topics import LostReply

BUG = ValueError("bug")


def partitions(consumer: Any) -> set[Partition]:
    lag = consumer.statistics().lag
    return {place for place in lag if not place[0].startswith("txbroker.")}


async def test_partitions_move_without_repeating_anything(world: World) -> None:
    world.kafka.add_partitions("orders", 6)
    handler = Handler()
    total = 0

    def produce() -> list[str]:
        nonlocal total
        values = []
        for partition in range(6):
            for _ in range(20):
                world.produce(f"{total % 7}={total}", partition=partition)
                values.append(str(total))
                total += 1
        return values

    produce()
    async with world.running(handler, order="key") as one:
        await until(lambda: len(partitions(one)) == 6)
        async with world.running(handler, order="key") as two:
            await until(lambda: len(partitions(one)) == len(partitions(two)) == 3)
            produce()
            await until(lambda: len(handler.done) == total)
        await until(lambda: len(partitions(one)) == 6)
        produce()
        await until(lambda: len(handler.done) >= total)
    assert sorted(handler.done, key=int) == [str(number) for number in range(total)]
    by_lane: dict[Any, list[int]] = {}
    for message in handler.messages:
        by_lane.setdefault((message.partition, message.key), []).append(message.offset)
    assert all(offsets == sorted(offsets) for offsets in by_lane.values())


async def test_revoked_partition_drains(world: World) -> None:
    """Messages in flight are finished, later ones are left to the new owner."""
    for partition in (0, 1):
        world.produce(*(f"{partition}-{number}" for number in range(3)), partition=partition)
    release = asyncio.Event()
    done: list[str] = []

    async def handle(message: ReceivedMessage) -> None:
        await release.wait()
        done.append(text(message))

    other = Handler()
    async with world.running(handle) as one:
        await until(lambda: one.statistics().in_flight == 2)
        async with world.running(other) as two:
            for _ in range(50):
                await asyncio.sleep(0)
            assert not partitions(two), "nobody gets it before"
            release.set()
            await until(lambda: len(partitions(two)) == 1)
            await until(lambda: len(done) + len(other.done) == 6)
    assert len(set(done + other.done)) == 6


@pytest.mark.rule(46)
@pytest.mark.parametrize("hangs", ["commit", "load"])
async def test_release_does_not_wait_for_a_commit_that_hangs(
    world: World, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    """Neither for the look whether one without an answer was stored."""
    hanging = asyncio.Event()
    async with world.running(Handler(bad=Reject("bad")), drain_s=0.1) as one:
        await until(lambda: len(partitions(one)) == 2)
        (owner,) = (source for _reader, source in one._readers)
        inner = getattr(MemoryMember, hangs)

        async def hang(member: MemoryMember, *given: Any) -> Any:
            if member is not owner:
                return await inner(member, *given)
            hanging.set()
            await asyncio.Event().wait()

        if hangs == "load":
            world.group.lose_answer_of_next_commit(LostReply.NOT_DONE)
        monkeypatch.setattr(MemoryMember, hangs, hang)
        world.produce("bad")
        await hanging.wait()
        async with world.running(Handler()) as two:
            await until(lambda: len(partitions(two)) == 1)


async def test_handlers_are_cancelled_after_drain(world: World) -> None:
    world.produce("stuck", partition=0)
    world.produce("stuck", partition=1)
    cancelled: list[str] = []

    async def handle(message: ReceivedMessage) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(text(message))
            raise

    handler = Handler()
    async with world.running(handle, drain_s=0.1) as one:
        await until(lambda: one.statistics().in_flight == 2)
        async with world.running(handler):
            await until(lambda: handler.done == ["stuck"])
            assert cancelled == ["stuck"]


async def test_lost_lease_stops_work_and_it_comes_back(world: World) -> None:
    world.produce("1", "2")
    cancelled, token = asyncio.Event(), []

    async def stuck(message: ReceivedMessage) -> None:
        token.append(message.token)
        assert message.lease.left_s > 0
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert message.lease.left_s == 0
            cancelled.set()
            raise

    handler = Handler()

    async def handle(message: ReceivedMessage) -> None:
        await (handler(message) if cancelled.is_set() else stuck(message))

    async with world.running(handle, instance="one", **TIMING) as consumer:
        await until(lambda: token)
        before = dict(world.group.offsets)
        world.group.silence("one")
        await asyncio.wait_for(cancelled.wait(), 10)
        world.produce("3", "x", partition=1)
        for _ in range(100):
            await asyncio.sleep(0.002)
        assert handler.seen == [], "nothing starts"
        assert world.group.offsets == before, "nothing is committed"
        assert counted(consumer, "fenced")
        world.group.reconnect("one")
        await handler.does("1", "2", "3", "x")
    assert {message.token for message in handler.messages if message.partition == 0} == set(token)


async def test_other_member_takes_over_and_results_of_the_first_are_ignored(world: World) -> None:
    world.produce("1", "2")
    held: list[ReceivedMessage] = []
    handler = Handler()
    async with world.consumer(instance="one", **TIMING | {"session_s": 0.5}) as one:
        held.append(await anext(aiter(one)))
        world.group.silence("one")
        async with world.running(handler, instance="two"):
            await handler.does("1", "2")
            await world.commits(2)
        after = dict(world.group.offsets)
        held[0].done()
        world.group.reconnect("one")
        held[0].done()
        held[0].failed(BUG)
        assert world.group.offsets[("orders", 0)] == after["orders", 0]
        assert handler.messages[0].token > held[0].token
    assert world.committed()[0] == 2


@pytest.mark.parametrize("mode", ["at-least-once", "at-most-once"])
async def test_at_most_once_repeats_nothing_after_a_lease(world: World, mode: str) -> None:
    world.produce("1", "2")
    calls: list[str] = []

    async def handle(message: ReceivedMessage) -> None:
        calls.append(text(message))
        if len(calls) == 1:
            await asyncio.Event().wait()

    async with world.running(handle, mode=mode, instance="one", **TIMING):
        await until(lambda: calls)
        world.group.silence("one")
        await asyncio.sleep(TIMING["lease_s"] + 0.2)
        world.group.reconnect("one")
        await until(lambda: "2" in calls)
    assert calls == (["1", "2"] if mode == "at-most-once" else ["1", "1", "2"])


async def test_readers_share_partitions(world: World) -> None:
    world.kafka.add_partitions("orders", 7)
    handler = Handler()
    for partition in range(7):
        world.produce(str(partition), partition=partition)
    async with world.running(handler, readers=3) as consumer:
        await handler.does(*(str(partition) for partition in range(7)))
        assert len(world.group.seats) == 3
        await until(lambda: len(partitions(consumer)) == 7)
    assert not world.group.seats, "all have left"


@pytest.mark.parametrize("plain", [False, True])
async def test_hooks_of_assignment(world: World, plain: bool) -> None:
    world.produce("1", "2", "3")
    calls: list[tuple[str, list[Partition]]] = []

    def assigned(places: Sequence[Partition]) -> dict[Partition, int]:
        calls.append(("assigned", sorted(places)))
        return {("orders", 0): 2, ("unknown", 0): 7}

    def revoked(places: Sequence[Partition]) -> None:
        calls.append(("revoked", sorted(places)))

    async def assigned_later(places: Sequence[Partition]) -> dict[Partition, int]:
        return assigned(places)

    async def revoked_later(places: Sequence[Partition]) -> None:
        revoked(places)

    handler = Handler()
    async with world.running(
        handler,
        order="none",
        on_assign=assigned if plain else assigned_later,
        on_revoke=revoked if plain else revoked_later,
    ):
        await handler.does("3")
    both = [("orders", 0), ("orders", 1)]
    assert calls == [("assigned", both), ("revoked", both)]


@pytest.mark.parametrize("hook", ["on_assign", "on_revoke"])
async def test_failing_hook_ends_the_consumer_and_leaves_nothing(world: World, hook: str) -> None:
    async def fail(_places: Sequence[Partition]) -> None:
        raise RuntimeError("hook")

    handler = Handler()

    async def consume() -> None:
        async with world.running(handler, **{hook: fail}) as consumer:
            world.produce("1")
            await until(lambda: consumer._engine.stopping or handler.done)

    with pytest.raises(RuntimeError, match="hook"):
        await consume()
    assert not world.group.seats


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (None, ["0", "1", "2", "new"]),
        ("earliest", ["0", "1", "2", "new"]),
        ("latest", ["new"]),
        (datetime.fromtimestamp(2, UTC), ["2", "new"]),
        ({("orders", 0): 1}, ["1", "2", "new"]),
    ],
)
async def test_start(world: World, start: Any, expected: list[str]) -> None:
    for number in range(3):
        world.produce(str(number), timestamp_ms=number * 1000)
    handler = Handler()
    async with world.running(handler, start=start):
        world.produce("new")
        await handler.does(*expected)
    world.produce("newer")
    async with world.running(handler, start=start):
        await handler.does(*expected, "newer")


@pytest.mark.parametrize("start", ["earliest", "latest"])
async def test_new_partitions_and_topics_are_read_from_their_beginning(
    world: World, start: str
) -> None:
    handler = Handler()
    async with world.running(handler, pattern="orders.*", start=start):
        world.kafka.add_partitions("orders", 4)
        world.produce("1", partition=3)
        world.kafka.create_topic("orders-b", 2)
        world.produce("2", topic="orders-b")
        world.kafka.create_topic("other", 1)
        world.produce("x", topic="other")
        await handler.does("1", "2")


ABORTED_ALONE = (
    r"orders-0: offsets 2 to 4 were deleted unread \(they may hold records of aborted transactions "
    "alone, .*on_gap"
)


async def test_deleted_records_stop_or_are_skipped(world: World) -> None:
    world.produce("0", "1")
    handler = Handler()
    async with world.running(handler):
        await handler.does("0", "1")
    world.produce("2", "3", "4")
    world.kafka.truncate("orders", 0, before=4)
    async with world.consumer() as consumer:
        with pytest.raises(RecordsDeleted, match=ABORTED_ALONE):
            await consumer.run(handler)
    async with world.running(handler, on_gap="skip") as consumer:
        await handler.does("0", "1", "4")
        assert counted(consumer, "gap") == 2


@pytest.mark.parametrize("on_gap", ["stop", "skip"])
async def test_records_deleted_while_running(world: World, on_gap: str) -> None:
    """500 records are fetched, the others wait for memory."""
    world.produce(*(str(number) for number in range(600)))
    handler = Handler()
    release = asyncio.Event()

    async def handle(message: ReceivedMessage) -> None:
        await release.wait()
        await handler(message)

    async def consume() -> None:
        async with world.running(handle, on_gap=on_gap, buffered_bytes_max=1 << 16) as consumer:
            await until(lambda: consumer.statistics().in_flight)
            world.kafka.truncate("orders", 0, before=550)
            release.set()
            await until(lambda: consumer._engine.stopping or len(handler.done) == 550)

    if on_gap == "skip":
        await consume()
        assert handler.done[499:501] == ["499", "550"]
        assert world.committed()[0] == 600
    else:
        with pytest.raises(RecordsDeleted, match=r"offsets 500 to 550 were deleted"):
            await consume()
        assert world.committed()[0] <= 500


@pytest.mark.parametrize("running", [True, False])
async def test_recreated_topic_stops(world: World, running: bool) -> None:
    world.produce("0", "1", "2")
    handler = Handler()

    async def consume() -> None:
        async with world.running(handler) as consumer:
            await until(lambda: len(handler.done) == 3)
            if running:
                world.kafka.recreate_topic("orders")
                await until(lambda: consumer._engine.stopping)

    if not running:
        await consume()
        world.kafka.recreate_topic("orders")
    with pytest.raises(RecordsDeleted, match="deleted and created again"):
        await consume()
    world.produce("new")
    async with world.running(handler, on_gap="skip"):
        await handler.does("0", "1", "2", "new")
        await world.commits(1)


@pytest.mark.parametrize("on_gap", ["stop", "skip", "continue"])
async def test_position_of_a_mirrored_topic(world: World, on_gap: str) -> None:
    """Offsets are translated, their metadata name the topic and the ranges of the other cluster."""
    world.produce("0", "1", "2", "3")
    metadata, _ = encode_metadata(2, Metadata(7, "ab" * 16, 0, ((3, 4),)))
    world.kafka.group(GROUP).offsets["orders", 0] = StoredOffset(2, metadata)
    handler = Handler()
    if on_gap == "stop":
        async with world.consumer() as consumer:
            with pytest.raises(RecordsDeleted, match=r"created again, or it is a mirror.*continue"):
                await consumer.run(handler)
        return
    async with world.running(handler, on_gap=on_gap) as consumer:
        await handler.does(*(["0", "1"] if on_gap == "skip" else []), "2", "3")
        assert counted(consumer, "gap") == (on_gap == "skip")
    async with world.running(handler):  # the new topic is stored
        pass
    assert world.committed()[0] == 4


@pytest.mark.parametrize("on_gap", ["stop", "continue"])
async def test_position_that_a_mirror_does_not_hold_yet(world: World, on_gap: str) -> None:
    world.produce("0", "1")
    metadata, _ = encode_metadata(9, Metadata(7, "ab" * 16))
    world.kafka.group(GROUP).offsets["orders", 0] = StoredOffset(9, metadata)
    async with world.consumer(on_gap=on_gap) as consumer:
        with pytest.raises(RecordsDeleted, match=r"position 9 .* holds 0 to 2, .* and holds the"):
            await consumer.run(Handler())


async def test_kafka_down_and_back(world: World) -> None:
    handler = Handler()
    async with world.running(handler, order="none", on_failure="skip") as consumer:
        await until(lambda: partitions(consumer))
        for round_ in range(3):
            world.produce(*(f"{round_}-{number}" for number in range(5)))
            world.kafka.go_down()
            for _ in range(20):
                await asyncio.sleep(0.002)
            world.kafka.come_up()
            await world.commits(5 * round_ + 5)
    assert sorted(handler.done) == sorted(set(handler.done))
    assert len(handler.done) == 15


async def test_refusal_at_the_start_ends_the_consumer(world: World) -> None:
    """Later it is outlasted: the right may have been withdrawn by mistake."""

    def withdraw(_places: Sequence[Partition]) -> None:
        world.group.authorized = False

    async with world.consumer(on_assign=withdraw) as consumer:
        with pytest.raises(KafkaUnavailable, match="not authorized to use the consumer group"):
            await consumer.run(Handler())


@pytest.mark.parametrize("mode", ["at-least-once", "at-most-once"])
async def test_refused_commits_hold_messages_back(world: World, mode: str) -> None:
    """What could not be stored is not handled, and nothing is repeated when the right is back."""
    handler = Handler()
    async with world.running(handler, mode=mode) as consumer:
        world.produce("0")
        await world.commits(1)
        world.group.authorized = False
        world.produce("1")
        rounds = consumer._readers[0][0]._rounds
        await until(lambda: rounds.outage.failures == 2)
        world.produce(*"234")
        await until(lambda: rounds.outage.failures == 4)
        assert handler.done == ["0", "1"][: 1 + (mode == "at-least-once")]
        world.group.authorized = True
        await world.commits(5)
        await until(lambda: len(handler.done) == 5)
    assert handler.done == ["0", "1", "2", "3", "4"]
    assert not counted(consumer, "fenced")


async def test_released_key_is_held_back_too(world: World) -> None:
    handler = Handler(**{"0": BUG})
    async with world.running(handler, order="key", on_failure="aside") as consumer:
        world.produce("a=0")
        await until(lambda: world.copies("aside"))
        world.group.authorized = False
        world.produce("b=1")
        rounds = consumer._readers[0][0]._rounds
        await until(lambda: rounds.outage.failures == 2)
        seen = list(handler.seen)
        world.release(b"a")
        await until(lambda: rounds.outage.failures == 5)
        assert handler.seen == seen
        world.group.authorized = True
        await until(lambda: len(handler.seen) > len(seen))


async def test_commits_go_on_with_the_first_success(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that is stored ends the pause, which may be a minute."""
    monkeypatch.setattr(rounds_module, "_REFUSED_PAUSES_S", (600.0, 600.0))
    handler = Handler()
    async with world.running(handler) as consumer:
        world.produce("0")
        await world.commits(1)
        world.group.authorized = False
        world.produce("1")
        await until(lambda: consumer._readers[0][0]._rounds.outage.failures)
        world.group.authorized = True
        world.group.expire(next(iter(world.group.seats)))
        world.produce("2")
        await world.commits(3)


async def test_held_partitions_continue_without_those_that_were_lost(world: World) -> None:
    """The partition whose position was refused has gone: nothing is left to be stored."""
    handler = Handler()
    async with world.running(handler) as consumer:
        world.produce("0", partition=1)
        await world.commits(1, partition=1)
        world.group.authorized = False
        world.produce("1", partition=1)
        reader, _source = consumer._readers[0]
        await until(lambda: reader._rounds.outage.failures)
        reader._drop(reader._partitions["orders", 1])
        world.produce("2")
        await until(lambda: "2" in handler.done)
        world.group.authorized = True


async def test_withdrawn_topic_is_waited_for(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    handler = Handler()
    async with world.running(handler) as consumer:
        world.produce("0")
        await world.commits(1)
        world.kafka.set_authorized("orders", authorized=False)
        await until(lambda: "topics not refreshed" in caplog.text)
        world.group.expire(next(iter(world.group.seats)))
        await until(lambda: "partitions not claimed" in caplog.text)
        world.kafka.set_authorized("orders", authorized=True)
        world.produce("1")
        await handler.does("0", "1")
        await until(lambda: len(partitions(consumer)) == 2)


async def test_cut_aside_topic_ends_the_consumer(world: World) -> None:
    """Releases that it cannot see would hold their keys for ever."""
    handler = Handler(**{"0": BUG})
    async with world.consumer(order="key", on_failure="aside") as consumer:
        running = asyncio.create_task(consumer.run(handler))
        world.produce("a=0")
        await until(lambda: world.copies("aside"))
        place = (f"txbroker.aside.{GROUP}", spread(("orders", 0), ASIDE_PARTITIONS))
        consumer._readers[0][0].failed(place, OffsetMissing("holds offsets 0 to 0, not 2"))
        with pytest.raises(OffsetMissing, match="holds offsets"):
            await running


async def test_claim_outlasts_kafka_being_down(world: World) -> None:
    world.produce("a=1")
    handler = Handler()
    async with world.running(handler, order="key", on_failure="aside") as one:
        await handler.does("1")
        await world.commits(1)
        other = Handler()
        async with world.running(other, order="key", on_failure="aside") as two:
            world.kafka.go_down()
            for _ in range(20):
                await asyncio.sleep(0.002)
            world.kafka.come_up()
            await until(lambda: len(partitions(one)) == len(partitions(two)) == 1)
        await until(lambda: len(partitions(one)) == 2)


async def test_stuck_key_pauses_its_partition_and_others_continue(world: World) -> None:
    release = asyncio.Event()
    handler = Handler()

    async def handle(message: ReceivedMessage) -> None:
        if message.key == b"stuck":
            await release.wait()
        await handler(message)

    async with world.running(
        handle, order="key", buffered_bytes_max=1 << 17, in_flight_max=4
    ) as consumer:
        await until(lambda: len(partitions(consumer)) == 2)
        for _ in range(40):
            world.produce(*["stuck=" + "x" * 1000] * 50)
        world.produce(*(f"{number}={number}" for number in range(100)), partition=1)
        await until(lambda: len(handler.done) == 100)
        most = consumer.statistics().buffered_bytes
        assert most < (1 << 17) + 2 * 500 * 1400, "more than the fetched records"
        release.set()
        await until(lambda: len(handler.done) == 2100)
        await until(lambda: consumer.statistics().buffered_bytes == 0)


# --- control ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suspension", "runs"),
    [
        ({}, []),
        ({"topic": "orders"}, []),
        ({"topic": "other"}, ["a0", "b0", "a1", "b1"]),
        ({"topic": "orders", "partition": 1}, ["a0", "b0"]),
        ({"partition": 0}, ["a1", "b1"]),
        ({"key": b"a"}, ["b0", "b1"]),
        ({"topic": "orders", "partition": 0, "key": b"a"}, ["b0", "a1", "b1"]),
    ],
)
@pytest.mark.parametrize("early", [True, False])
async def test_suspend_and_resume(
    world: World, suspension: dict[str, Any], runs: list[str], early: bool
) -> None:
    handler = Handler()

    def produce() -> None:
        for partition in (0, 1):
            world.produce(*(f"{key}={key}{partition}" for key in "ab"), partition=partition)

    async with world.consumer(order="key") as consumer:
        if early:
            produce()
        consumer.suspend(**suspension)
        task = asyncio.create_task(consumer.run(handler))
        if not early:
            await until(lambda: len(partitions(consumer)) == 2)
            produce()
        await handler.does(*runs)
        for _ in range(50):
            await asyncio.sleep(0)
        consumer.resume(topic="unknown")
        assert sorted(handler.done) == sorted(runs)
        consumer.resume(**suspension)
        await handler.does("a0", "b0", "a1", "b1")
        consumer.stop()
        await task


async def test_suspensions_add_up(world: World) -> None:
    handler = Handler()
    async with world.running(handler, order="key") as consumer:
        consumer.suspend(key=b"a")
        consumer.suspend("orders", key=b"a")
        consumer.suspend("orders")
        world.produce("a=1", "b=2")
        consumer.resume("orders")
        await handler.does("2")
        consumer.resume(key=b"a")
        world.produce("c=3")
        await handler.does("2", "3")
        consumer.resume("orders", key=b"a")
        await handler.does("1", "2", "3")


async def test_start_that_fails_leaves_nothing(world: World) -> None:
    world.group.authorized = False
    for _ in range(2):
        with pytest.raises(Exception, match="not authorized to use the consumer group"):
            await world.consumer(readers=2).start()
    world.kafka.go_down()
    with pytest.raises(Exception, match="down"):
        await world.consumer().start()
    assert not world.group.seats


@pytest.mark.parametrize("pulled", [True, False])
async def test_batch_that_is_being_filled_when_the_lease_ends(world: World, pulled: bool) -> None:
    world.produce("1")
    calls: list[tuple[list[str], float]] = []

    def note(messages: list[ReceivedMessage]) -> None:
        calls.append((texts(messages), min(message.lease.left_s for message in messages)))
        for message in messages:
            message.done()

    async def handle(messages: list[ReceivedMessage]) -> None:
        note(messages)

    async def pull(consumer: Any) -> None:
        async for messages in consumer.batches(5, max_wait_s=0.5):
            note(messages)

    async with world.consumer(instance="one", **TIMING) as consumer:
        task = asyncio.create_task(
            pull(consumer) if pulled else consumer.run(handle, batch=5, max_wait_s=0.5)
        )
        await until(lambda: consumer.statistics().in_flight == 1)
        world.group.silence("one")
        await until(lambda: consumer.statistics().in_flight == 0)
        await asyncio.sleep(0.5)
        assert not calls, "nothing starts without a lease"
        world.group.reconnect("one")
        await until(lambda: calls)
        consumer.stop()
        await task
    assert calls[0][0] == ["1"]
    assert calls[0][1] > 0
