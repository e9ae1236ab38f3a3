"""Set-aside keys: kept in order, released, taken over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kit.consumer_world import GROUP, Handler, World, counted, text
from tests.kit.until import until
from txbroker.consumer import ReceivedMessage, Reject
from txbroker.consumer.asides import released, topic
from txbroker.consumer.engine import failures as consumer_failures
from txbroker.core.consuming.copies import ASIDE_PARTITIONS, spread
from txbroker.core.consuming.position import StoredOffset
from txbroker.core.records import Partition, Record
from txbroker.errors import KafkaUnavailable
from txbroker.testing.consuming import MemoryConsumingDoor

BUG = ValueError("bug")
ASIDE: dict[str, Any] = {"order": "key", "on_failure": "aside", "local_attempts_max": 2}


def keys(world: World, consumer: Any, count: int) -> Any:
    return until(lambda: consumer.statistics().aside_keys == count)


@pytest.mark.parametrize("order", ["key", "partition"])
async def test_key_is_set_aside_in_order_and_others_continue(world: World, order: str) -> None:
    handler = Handler(bad=BUG)
    world.produce("a=bad", "a=1", "b=2", "a=3", "4")
    async with world.running(handler, **ASIDE | {"order": order}) as consumer:
        await handler.does("2", "4")
        await world.commits(5)
        world.produce("a=5", "b=6")
        await handler.does("2", "4", "6")
        await world.commits(7)
        await keys(world, consumer, 1)
    assert world.values("aside") == ["bad", "1", "3", "5"]
    assert world.committed()[1].aside == 1
    first, *others = [failed for _record, failed in world.copies("aside")]
    assert (first.attempts, first.cause) == (2, "ValueError: bug")
    assert {failed.cause for failed in others} == {"an earlier message of its key is set aside"}
    assert {failed.attempts for failed in others} == {0}


async def test_first_call_with_a_message_of_a_released_key_is_its_first_attempt(
    world: World,
) -> None:
    attempts: list[tuple[str, int]] = []

    async def handle(message: ReceivedMessage) -> None:
        attempts.append((text(message), message.attempt))
        if attempts[-1][1] <= 2 and text(message) == "bad":
            raise BUG

    world.produce("a=bad", "a=1")
    async with world.running(handle, **ASIDE) as consumer:
        await until(lambda: len(world.copies("aside")) == 2)
        world.release(b"a")
        await keys(world, consumer, 0)
    assert attempts == [("bad", 1), ("bad", 2), ("bad", 3), ("1", 1)]


async def test_released_key_is_done_in_order_while_messages_arrive(world: World) -> None:
    handler = Handler(**{"0": [BUG, BUG, None]})
    number = 1
    async with world.running(handler, **ASIDE) as consumer:
        world.produce("a=0")
        await keys(world, consumer, 1)
        for _ in range(250):
            world.produce(f"a={number}")
            number += 1
        await until(lambda: len(world.copies("aside")) == number)
        world.release(b"a")

        def done() -> bool:
            nonlocal number
            if number < 1000:
                world.produce(f"a={number}", f"b={-number}")
                number += 1
            return not consumer.statistics().aside_keys

        await until(done)
        world.produce(f"a={number}")
        await until(lambda: str(number) in handler.done)
        await world.commits(world.kafka.partition("orders", 0).end)
    done = [int(value) for value in handler.done if int(value) >= 0]
    assert done == list(range(number + 1)), "each once, in order"
    assert world.committed()[1].aside == 0


@pytest.mark.parametrize("together", [True, False])
async def test_released_key_that_fails_again_stays_set_aside(
    world: World, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    handler = Handler(bad=BUG, ugly=BUG)
    world.produce("a=bad", "a=1", "a=ugly", "a=2")
    late: list[Record] = []
    inner = topic.TopicAsides.deliver

    def deliver(self: topic.TopicAsides, place: Any, records: list[Record]) -> None:
        late.extend(records)
        # That the copy failed again, and the next release, arrive apart or together.
        if len(world.records("aside")) != 4 + 2 or not together:
            inner(self, place, list(late))
            late.clear()

    async with world.running(handler, **ASIDE) as consumer:
        await until(lambda: len(world.copies("aside")) == 4)
        monkeypatch.setattr(topic.TopicAsides, "deliver", deliver)
        world.release(b"a")
        await until(lambda: handler.seen.count("bad") == 4)
        handler.failing["bad"] = None
        assert handler.done == []
        # A release, and that a copy failed again, which ends it.
        await until(lambda: len(world.records("aside")) == 4 + 2)
        await until(lambda: consumer.statistics().buffered_bytes == 0)
        world.release(b"a")
        await until(lambda: handler.done == ["bad", "1"])
        # Two releases, a clearance, and twice that a copy failed again.
        await until(lambda: len(world.records("aside")) == 4 + 5)
        await keys(world, consumer, 1)
        seen = len(handler.seen)
    async with world.running(handler, **ASIDE) as consumer:
        await keys(world, consumer, 1)
        world.produce("b=other")
        await until(lambda: "other" in handler.done)
        assert len(handler.seen) == seen + 1, "a release counts once, also after a restart"
        handler.failing["ugly"] = Reject("hopeless")
        world.release(b"a")
        await until(lambda: handler.done[-1] == "2")
        await keys(world, consumer, 0)
    assert world.values("dead") == ["ugly"]


async def test_other_instance_knows_the_keys(world: World) -> None:
    handler = Handler(bad=BUG)
    world.produce("a=bad", "a=1")
    async with world.running(handler, **ASIDE):
        await until(lambda: len(world.copies("aside")) == 2)
        await world.commits(2)
    world.produce("a=2", "b=3")
    world.release(b"a")
    handler = Handler()
    async with world.running(handler, **ASIDE) as consumer:
        await handler.does("bad", "1", "2", "3")
        await keys(world, consumer, 0)
    assert [value for value in handler.done if value != "3"] == ["bad", "1", "2"]
    assert [message.offset for message in handler.messages if message.key == b"a"] == [0, 1, 2]
    assert handler.messages[0].token > 0


async def test_crash_while_released_repeats_but_keeps_order(world: World) -> None:
    handler = Handler(bad=BUG)
    world.produce("a=bad", *(f"a={number}" for number in range(5)))
    async with world.running(handler, **ASIDE):
        await until(lambda: len(world.copies("aside")) == 6)
        await world.commits(6)
    started = asyncio.Event()

    async def stuck(message: ReceivedMessage) -> None:
        if text(message) == "1":
            started.set()
            await asyncio.Event().wait()

    async with world.running(stuck, **ASIDE | {"drain_s": 0.1}):
        world.release(b"a")
        await started.wait()
    handler = Handler()
    async with world.running(handler, **ASIDE) as consumer:
        await until(lambda: handler.done[-1:] == ["4"])
        await keys(world, consumer, 0)
    assert handler.done[-4:] == ["1", "2", "3", "4"]


async def test_messages_without_a_key_are_released_alone(world: World) -> None:
    handler = Handler(bad=BUG, worse=BUG)
    world.produce("bad", "worse", "fine")
    async with world.running(handler, **ASIDE) as consumer:
        await handler.does("fine")
        await keys(world, consumer, 2)
        await until(lambda: len(world.copies("aside")) == 2)
        handler.failing.clear()
        world.release(None, offset=1)
        await handler.does("fine", "worse")
        await keys(world, consumer, 1)


async def test_at_the_limit_of_keys_the_message_waits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_failures, "KEYS_MAX", 2)
    handler = Handler(**{"0": BUG, "1": BUG, "2": BUG})
    world.produce("a=0", "b=1")
    async with world.running(handler, **ASIDE) as consumer:
        await keys(world, consumer, 2)
        world.produce("c=2", "d=3")
        await handler.does("3")
        await until(lambda: counted(consumer, "aside_full"))
        assert consumer.statistics().aside_keys == 2
        handler.failing.clear()
        world.release(b"a")
        await handler.does("3", "0", "2")


async def test_release_outlasts_kafka_being_down(world: World) -> None:
    handler = Handler(bad=BUG)
    world.produce("a=bad", "a=1")
    async with world.running(handler, **ASIDE) as consumer:
        await until(lambda: len(world.copies("aside")) == 2)
        await world.commits(2)
        handler.failing.clear()
        world.release(b"a")
        world.kafka.go_down()
        for _ in range(10):
            await asyncio.sleep(0)
        world.kafka.come_up()
        await handler.does("bad", "1")
        await keys(world, consumer, 0)


@pytest.mark.parametrize("stored", [True, False])
async def test_lost_answer_to_a_clearance(world: World, stored: bool) -> None:
    from txbroker.testing.topics import LostReply

    handler = Handler(bad=BUG)
    world.produce("a=bad", "a=1")
    async with world.running(handler, **ASIDE) as consumer:
        await until(lambda: len(world.copies("aside")) == 2)
        await world.commits(2)
        handler.failing["bad"] = None
        world.group.lose_answer_of_next_commit(LostReply.DONE if stored else LostReply.NOT_DONE)
        world.release(b"a")
        await keys(world, consumer, 0)
        world.produce("a=2")
        await handler.does("bad", "1", "2")
    assert handler.done == ["bad", "1", "2"]


async def test_set_aside_keys_outlive_metadata(world: World) -> None:
    # Kafka's tools reset offsets without metadata, and offsets expire.
    handler = Handler(bad=BUG)
    world.produce("a=bad", "b=1")
    async with world.running(handler, **ASIDE):
        await handler.does("1")
        await world.commits(2)
    world.group.offsets["orders", 0] = StoredOffset(2, "")
    world.produce("a=2", "b=3")
    async with world.running(handler, **ASIDE):
        await handler.does("1", "3")
        await until(lambda: world.values("aside") == ["bad", "2"])


async def test_copies_after_an_open_transaction(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of a member that was killed: a new owner waits until it sees them."""
    handler = Handler(bad=BUG)
    async with world.running(handler, **ASIDE):
        place = f"txbroker.aside.{GROUP}", spread(("orders", 0), ASIDE_PARTITIONS)
        abort = world.kafka.hang(*place)
        world.produce("a=bad")
        await world.commits(1)
    polls = 0
    offsets = MemoryConsumingDoor.offsets

    async def counted_offsets(self: MemoryConsumingDoor, places: Any, time_ms: int) -> Any:
        nonlocal polls
        polls += list(places) == [place]
        if polls == 5:
            abort()
        return await offsets(self, places, time_ms)

    monkeypatch.setattr(MemoryConsumingDoor, "offsets", counted_offsets)
    world.produce("a=2", "b=3")
    async with world.running(handler, **ASIDE):
        await handler.does("3")
        await until(lambda: world.values("aside") == ["bad", "2"])
    assert polls >= 5


async def test_aside_topic_is_read_in_pieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = Handler(bad=BUG)
    world.produce(*(f"{number}=bad" for number in range(9)))
    async with world.running(handler, **ASIDE) as consumer:
        await keys(world, consumer, 9)
        await world.commits(9)
    lengths: list[int] = []
    real = MemoryConsumingDoor.read

    async def read(self: MemoryConsumingDoor, place: Any, start: int, end: int) -> list[Record]:
        lengths.append(end - start)
        return await real(self, place, start, end)

    monkeypatch.setattr(MemoryConsumingDoor, "read", read)
    monkeypatch.setattr(topic, "_READ_OFFSETS", 4)
    async with world.running(handler, **ASIDE) as consumer:
        await keys(world, consumer, 9)
    assert lengths
    assert max(lengths) <= 4


async def test_failed_release_ends_the_consumer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = Handler(bad=BUG)
    world.produce("a=bad")
    async with world.consumer(**ASIDE) as consumer:
        running = asyncio.create_task(consumer.run(handler))
        await until(lambda: len(world.copies("aside")) == 1)

        def broken(*_args: object) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(released, "messages_of", broken)
        world.release(b"a")
        with pytest.raises(RuntimeError, match="broken"):
            await asyncio.wait_for(running, 5)


async def test_released_key_that_fails_again_needs_no_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_failures, "KEYS_MAX", 2)
    handler = Handler(bad=BUG, ugly=BUG)
    world.produce("a=bad", "b=ugly", partition=0)
    async with world.running(handler, **ASIDE | {"local_attempts_max": 1}) as consumer:
        await until(lambda: len(world.records("aside")) == 2)
        world.release(b"a")
        await until(lambda: len(world.records("aside")) == 4)  # the release, and its end
        assert handler.seen.count("bad") == 2
        assert not counted(consumer, "aside_full")


@pytest.mark.rule(37)
async def test_claim_that_fails_after_its_commit_counts_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise messages are handled one at a time, as after processes that ended."""
    world.produce("a=bad", partition=0)
    async with world.running(Handler(bad=BUG), **ASIDE | {"local_attempts_max": 1}):
        await until(lambda: len(world.records("aside")) == 1)
    settled_end, failures = MemoryConsumingDoor.settled_end, 3

    async def fail_at_first(self: MemoryConsumingDoor, partition: Partition) -> int:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise KafkaUnavailable("no leader")
        return await settled_end(self, partition)

    monkeypatch.setattr(MemoryConsumingDoor, "settled_end", fail_at_first)
    world.produce("b=1", "c=2", "d=3", partition=0)
    handler, gate = Handler(), asyncio.Event()

    async def wait(message: ReceivedMessage) -> None:
        handler.seen.append(text(message))
        await gate.wait()

    async with world.running(wait, **ASIDE):
        await until(lambda: len(handler.seen) == 3)
        gate.set()


@pytest.mark.parametrize("batch", [0, 1, 3])
async def test_later_messages_of_a_key_wait_for_the_copy(world: World, batch: int) -> None:
    dead: list[tuple[str, int]] = []

    async def handle(given: Any) -> None:
        for message in given if batch else [given]:
            dead.append((text(message), len(world.copies("dead"))))
            if text(message) == "bad":
                raise Reject("no")

    world.produce("a=bad", "a=1", "a=2", partition=0)
    async with world.running(handle, run={"batch": batch}, order="key"):
        await until(lambda: {"1", "2"} <= {value for value, _ in dead})
    assert all(stored == 1 for value, stored in dead if value != "bad")
