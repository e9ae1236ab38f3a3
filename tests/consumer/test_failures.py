"""Orders, failing handlers, and what follows."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import structlog

from tests.kit.consumer_world import GROUP, Handler, World, counted, text
from tests.kit.until import until
from txbroker.consumer import Later, ReceivedMessage, Reject
from txbroker.core.consuming import failure
from txbroker.core.consuming.copies import (
    Failed,
    LeftOut,
    MessageSource,
    make_copy,
    read_copy,
    smaller,
)
from txbroker.core.records import Record

BUG = ValueError("bug")


@pytest.fixture
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "DELAYS_S", tuple(0.05 + 0.01 * step for step in range(16)))


@pytest.mark.parametrize(("order", "calls"), [("none", 8), ("partition", 2), ("key", 6)])
async def test_calls_at_the_same_time(world: World, order: str, calls: int) -> None:
    for partition in (0, 1):
        world.produce("a=1", "a=2", "b=3", "4", partition=partition)
    active, most = 0, 0
    release = asyncio.Event()

    async def handle(_message: ReceivedMessage) -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await release.wait()
        active -= 1

    async with world.running(handle, order=order):
        await until(lambda: most >= calls)
        for _ in range(20):
            await asyncio.sleep(0)
        assert most == calls
        release.set()
        await world.commits(4, 0)
        await world.commits(4, 1)


async def test_in_flight_max_bounds_calls(world: World) -> None:
    world.produce(*(f"{number}={number}" for number in range(50)))
    active, most, done = 0, 0, 0

    async def handle(_message: ReceivedMessage) -> None:
        nonlocal active, most, done
        active += 1
        most = max(most, active)
        await asyncio.sleep(0.001)
        active -= 1
        done += 1

    async with world.running(handle, order="none", in_flight_max=5):
        await until(lambda: done == 50)
    assert most == 5


@pytest.mark.parametrize("order", ["partition", "key"])
async def test_order_holds_through_local_attempts(world: World, order: str) -> None:
    world.produce("a=1", "a=2", "b=3", "a=4")
    handler = Handler(**{"2": [BUG, Later(0.01), BUG, None]})
    async with world.running(handler, order=order):
        await handler.does("1", "2", "3", "4")
    mine = [value for value in handler.seen if value != "3"]
    assert mine == ["1", "2", "2", "2", "2", "4"]
    attempts = [message.attempt for message in handler.messages]
    assert max(attempts) == 4


async def test_wait_goes_on_and_others_continue(world: World) -> None:
    world.produce("a=1", "a=2", "b=3")
    handler = Handler(**{"1": [BUG] * 7 + [None]})
    async with world.running(handler, order="key", on_failure="wait", local_attempts_max=2):
        await handler.does("1", "2", "3")
    assert handler.done[0] == "3"
    assert handler.seen.count("1") == 8
    assert not world.copies("dead")


@pytest.mark.parametrize("order", ["none", "partition", "key"])
async def test_skip_copies_to_dead_letters(world: World, order: str) -> None:
    headers = (("trace", b"1"), ("trace", None))
    world.produce("a=1", "a=2", partition=1, headers=headers, timestamp_ms=1234)
    handler = Handler(**{"1": BUG})
    async with world.running(handler, order=order, on_failure="skip") as consumer:
        await handler.does("2")
        await world.commits(2, 1)
        await until(lambda: counted(consumer, "dead") == 1)
    assert handler.seen.count("1") == 3
    ((record, failed),) = world.copies("dead")
    assert (record.key, record.value, record.headers) == (b"a", b"1", headers)
    assert record.timestamp_ms == 1234
    assert (failed.source, failed.attempts) == (MessageSource("orders", 1, 0), 3)
    assert failed.cause == "ValueError: bug"


@pytest.mark.parametrize("on_failure", ["retry", "wait", "skip", "aside"])
async def test_rejected_goes_to_dead_letters_at_once(world: World, on_failure: str) -> None:
    order = "none" if on_failure == "retry" else "key"
    world.produce("a=1", "a=2")
    handler = Handler(**{"1": Reject("empty order")})
    async with world.running(handler, order=order, on_failure=on_failure):
        await handler.does("2")
        await until(lambda: len(world.copies("dead")) == 1)
    assert handler.seen.count("1") == 1
    assert world.copies("dead")[0][1].cause == "empty order"


async def test_later_is_no_failure(world: World) -> None:
    """It may be raised more often than the local attempts are."""
    world.produce("a=1", "b=2")
    handler = Handler(**{"1": [Later(0.01)] * 10 + [None]})
    async with world.running(handler, order="key", on_failure="skip") as consumer:
        await handler.does("1", "2")
        assert counted(consumer, "failed") == 0
    assert handler.done == ["2", "1"]
    assert not world.copies("dead")


@pytest.mark.usefixtures("short_delays")
async def test_retries_by_step_then_dead_letter(world: World) -> None:
    world.produce("a=1", "a=2")
    handler = Handler(**{"1": BUG})
    async with world.running(handler, order="none", local_attempts_max=2) as consumer:
        await until(lambda: world.copies("dead"))
        counts = consumer.statistics().counts
        assert {name: counts[name] for name in counts if name.startswith("retry")} == {
            f"retry_{step}": 1 for step in range(16)
        }
    assert handler.done == ["2"]
    assert len(handler.seen) == 1 + 2 * 17
    ((record, failed),) = world.copies("dead")
    assert (record.key, record.value, failed.attempts) == (b"a", b"1", 34)
    ids = {message.id for message in handler.messages if text(message) == "1"}
    places = {(message.topic, message.offset) for message in handler.messages}
    assert ids == {"orders/0@0"}
    assert places == {("orders", 0), ("orders", 1)}
    attempts = [message.attempt for message in handler.messages if text(message) == "1"]
    assert len(attempts) == 34


@pytest.mark.usefixtures("short_delays")
async def test_long_later_takes_first_step_that_is_long_enough(world: World) -> None:
    world.produce("1", "2")
    handler = Handler(**{"1": [Later(0.071), None]})
    async with world.running(handler, order="none"):
        await handler.does("1", "2")
    assert handler.done == ["2", "1"]
    (copy,) = world.kafka.visible(f"txbroker.retry.{GROUP}", 3)
    assert dict(copy.headers)["txb-source"] == b"orders/0@0"


async def test_retry_waits_for_the_head_that_is_not_due(world: World) -> None:
    handler = Handler()
    now_ms = round(time.time() * 1000)
    async with world.running(handler, order="none"):
        for value, due_ms in ((b"later", now_ms + 300), (b"due", now_ms - 1), (b"at once", 0)):
            copy = make_copy(Record(None, value), Failed(MessageSource("orders", 0, 7), 3, due_ms))
            world.kafka.write(f"txbroker.retry.{GROUP}", 2, [copy], None)
        copy = make_copy(Record(None, b"other step"), Failed(MessageSource("orders", 0, 8), 3, 0))
        world.kafka.write(f"txbroker.retry.{GROUP}", 3, [copy], None)
        await handler.does("other step", "later", "due", "at once")
        assert time.time() * 1000 >= now_ms + 300
    assert handler.done == ["other step", "later", "due", "at once"]
    assert handler.messages[0].attempt == 4


async def test_foreign_record_in_the_retry_topic_is_a_message(world: World) -> None:
    handler = Handler()
    async with world.running(handler, order="none"):
        world.kafka.write(f"txbroker.retry.{GROUP}", 0, [Record(None, b"x")], None)
        await handler.does("x")
    assert handler.messages[0].topic == f"txbroker.retry.{GROUP}"


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("order", ["none", "key"])
async def test_lost_answer_duplicates_and_loses_no_copy(
    world: World, stored: bool, order: str
) -> None:
    from txbroker.testing.topics import LostReply

    world.produce(*(f"{number}={number}" for number in range(20)))
    handler = Handler(**{str(number): Reject("bad") for number in range(0, 20, 2)})
    outcome = LostReply.DONE if stored else LostReply.NOT_DONE
    async with world.running(handler, order=order, on_failure="skip"):
        await world.commits(20)
        for number in range(20, 60, 2):
            world.group.lose_answer_of_next_commit(outcome)
            handler.failing[str(number)] = Reject("bad")
            world.produce(f"k={number}", f"k={number + 1}")
            await world.commits(number + 2)
    dead = sorted(world.values("dead"), key=int)
    assert dead == [str(number) for number in range(0, 60, 2)], "each once"
    assert sorted(handler.done, key=int) == [str(number) for number in range(1, 60, 2)]


@pytest.mark.parametrize("on_failure", ["skip", "aside"])
async def test_refused_copy_rests_its_partition_and_keeps_order(
    world: World, on_failure: str
) -> None:
    kind = "dead" if on_failure == "skip" else "aside"
    topic = f"txbroker.{kind}.{GROUP}"
    handler = Handler(**{"0": BUG})
    options: dict[str, Any] = {"order": "key", "on_failure": on_failure, "local_attempts_max": 1}
    async with world.running(handler, **options) as consumer:
        await until(lambda: topic in world.kafka.topics)
        world.kafka.set_message_bytes_max(topic, 10)
        world.produce("a=0", "a=1", "a=2", "b=3")
        await until(lambda: counted(consumer, "copy_refused") >= 2)
        world.produce("c=x", partition=1)
        await until(lambda: "x" in handler.done)
        assert "1" not in handler.seen
        world.kafka.set_message_bytes_max(topic, 1 << 20)
        world.produce("a=4")
        if on_failure == "skip":
            await handler.does("x", "3", "1", "2", "4")
            assert [value for value in handler.done if value in "124"] == ["1", "2", "4"]
        else:
            await handler.does("x", "3")
            await until(lambda: len(world.copies("aside")) == 4)
            assert world.values("aside") == ["0", "1", "2", "4"]
        await world.commits(5)
    expected = ["0"] if on_failure == "skip" else ["0", "1", "2", "4"]
    assert world.values(kind) == expected, "no copy twice"


@pytest.mark.parametrize("order", ["none", "partition", "key"])
async def test_batches_with_single_failures(world: World, order: str) -> None:
    world.produce(*(f"{number % 2}={number}" for number in range(10)))
    done: list[str] = []
    failed: set[str] = set()
    sizes: list[int] = []

    async def handle(messages: list[ReceivedMessage]) -> None:
        sizes.append(len(messages))
        for message in messages:
            if text(message) in ("3", "4") and text(message) not in failed:
                failed.add(text(message))
                message.failed(BUG)
            elif order == "none" or not any(
                text(other) in failed and text(other) not in done
                for other in messages[: messages.index(message)]
                if order == "partition" or other.key == message.key
            ):
                done.append(text(message))

    async with world.running(handle, order=order, run={"batch": 4, "max_wait_s": 0.01}):
        await world.commits(10)
    assert sorted(done) == sorted(set(done)) == [str(number) for number in range(10)]
    assert max(sizes) > 1
    if order == "partition":
        assert done == sorted(done)
    elif order == "key":
        assert [v for v in done if int(v) % 2] == ["1", "3", "5", "7", "9"]


async def test_batch_that_raises_fails_no_other_message(world: World) -> None:
    """Each message without a separate result is handled alone."""
    world.produce("1", "bad", "2", "3")
    calls: list[list[str]] = []

    async def handle(messages: list[ReceivedMessage]) -> None:
        calls.append([f"{text(message)} {message.attempt}" for message in messages])
        if text(messages[0]) == "1":
            messages[0].done()
        if "bad" in map(text, messages):
            raise BUG

    run = {"batch": 4, "max_wait_s": 0.2}
    async with world.running(handle, order="none", on_failure="skip", run=run) as consumer:
        await world.commits(4)
        assert counted(consumer, "failed") == 3
    assert calls[0] == ["1 1", "bad 1", "2 1", "3 1"]
    assert sorted(calls[1:]) == [["2 2"], ["3 2"], ["bad 2"], ["bad 3"], ["bad 4"]]
    assert world.values("dead") == ["bad"]


LARGE = "x" * 20_000
BYTES_MAX = 2_000


@pytest.mark.parametrize("on_failure", ["skip", "retry", "aside"])
@pytest.mark.parametrize(
    ("headers", "lacks"), [((), "value"), ((("h", b"y" * 20_000),), "value, headers")]
)
async def test_copy_that_is_too_large_lacks_its_value(
    world: World, on_failure: str, headers: Any, lacks: str
) -> None:
    """A retry needs the whole message: it becomes a dead letter."""
    handler = Handler(**{LARGE: Reject("bad") if on_failure == "skip" else BUG})
    order = "none" if on_failure == "retry" else "key"
    given = {"on_failure": on_failure, "local_attempts_max": 1, "order": order}
    async with world.running(handler, **given) as consumer:
        kind = "aside" if on_failure == "aside" else "dead"
        await until(lambda: f"txbroker.{kind}.{GROUP}" in world.kafka.topics)
        for topic in [name for name in world.kafka.topics if name.startswith("txbroker.")]:
            world.kafka.set_message_bytes_max(topic, BYTES_MAX)
        world.produce(f"a={LARGE}", headers=headers)
        world.produce("b=1")
        await handler.does("1")
        await until(lambda: world.copies(kind))
        await world.commits(2)
        assert counted(consumer, "left_out") == 1
        assert counted(consumer, "copy_refused") == 0
    ((record, failed),) = world.copies(kind)
    assert (record.key, record.value) == (b"a", None)
    assert failed.left_out == LeftOut(lacks, len(LARGE))
    assert failed.source == MessageSource("orders", 0, 0)


@pytest.mark.parametrize("deleted", [False, True])
async def test_released_copy_that_lacks_its_value_is_read_in_its_first_place(
    world: World, deleted: bool
) -> None:
    handler = Handler(**{LARGE: BUG})
    options = {"order": "key", "on_failure": "aside", "local_attempts_max": 1}
    with structlog.testing.capture_logs() as lines:
        async with world.running(handler, **options):
            await until(lambda: f"txbroker.aside.{GROUP}" in world.kafka.topics)
            world.kafka.set_message_bytes_max(f"txbroker.aside.{GROUP}", BYTES_MAX)
            world.produce(f"a={LARGE}", "a=2")
            await until(lambda: len(world.copies("aside")) == 2)
            handler.failing.clear()
            if deleted:
                world.kafka.partition("orders", 0).delete_before(1)
            world.release(b"a")
            if deleted:
                await until(lambda: any(line["event"] == "released key not read" for line in lines))
            else:
                await handler.does(LARGE, "2")
    if deleted:
        error = next(line["error"] for line in lines if line["event"] == "released key not read")
        assert "the copy of orders/0@0 lacks value" in error
        assert "None" not in handler.seen
        assert handler.done == []


async def test_refusals_end_where_nothing_more_can_be_left_out() -> None:
    record = make_copy(Record(b"k", b"v", (("h", b"1"),)), Failed(MessageSource("orders", 0, 7), 1))
    found = []
    while (record := smaller(record, keyed=False)) is not None:  # type: ignore[assignment]
        copy = read_copy(record)
        assert copy is not None
        found.append((copy[1].left_out, copy[0].key, copy[0].value, copy[0].headers))
    assert found == [
        (LeftOut("value", 1), b"k", None, (("h", b"1"),)),
        (LeftOut("value, headers", 1), b"k", None, ()),
        (LeftOut("value, headers, key", 1), None, None, ()),
    ]
