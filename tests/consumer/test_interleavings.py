"""Rare interleavings: commits that take long, partitions that go meanwhile, other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.kit.consumer_world import GROUP, Handler, World, counted, text, texts
from tests.kit.until import until
from txbroker.consumer import ReceivedMessage, Reject, statistics
from txbroker.consumer.engine import arrivals
from txbroker.core.consuming.copies import Failed, MessageSource, make_copy
from txbroker.core.consuming.failure import DELAYS_S, Bury, FailurePolicy, OnFailure
from txbroker.core.consuming.position import decode_metadata
from txbroker.core.records import Record
from txbroker.testing.consuming import MemoryMember

BUG = ValueError("bug")


async def test_scrape_in_a_thread_reads_in_the_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    real = statistics.statistics

    def spy(engine: Any) -> Any:
        threads.append(threading.get_ident())
        return real(engine)

    monkeypatch.setattr(statistics, "statistics", spy)
    async with world.consumer() as consumer:
        collector = consumer.collector()
        assert await asyncio.to_thread(lambda: list(collector.collect()))
    assert await asyncio.to_thread(lambda: list(collector.collect())), "after its end, too"
    assert threads == [threading.get_ident()] * 2


async def test_position_of_moved_partition_is_not_stored_late(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With copies a commit takes long, and is made in the generation that is current at its end.
    commit, going = MemoryMember.commit, asyncio.Event()
    tokens: dict[Any, list[int]] = {}

    async def late(self: MemoryMember, offsets: Any, copies: Any = ()) -> None:
        if copies:
            await going.wait()
        await commit(self, offsets, copies)
        for place, stored in offsets.items():
            metadata = decode_metadata(stored.offset, stored.metadata)
            assert metadata is not None
            tokens.setdefault(place, []).append(metadata.token)

    monkeypatch.setattr(MemoryMember, "commit", late)
    world.produce("bad", partition=0)
    world.produce("bad", partition=1)
    handler = Handler(bad=Reject("bad"))
    options: dict[str, Any] = {"order": "partition", "on_failure": "skip", "drain_s": 0}
    async with world.running(handler, **options), asyncio.timeout(20):
        await until(lambda: handler.seen == ["bad", "bad"])
        # The commit is given up after the time for which positions are waited for.
        async with world.running(handler, **options):
            await until(lambda: max(map(len, tokens.values())) > 1)
            going.set()
            await until(lambda: len(world.copies("dead")) == 2)
    for place, known in tokens.items():
        assert known == sorted(known), place


async def test_partition_lost_as_it_is_revoked_ends_nothing(world: World) -> None:
    handler = Handler()
    world.produce("a")
    async with world.running(handler) as consumer:
        await handler.does("a")
        reader, _source = consumer._readers[0]
        reader.assigned(frozenset())
        await asyncio.sleep(0)
        reader.lost("test")
        for _ in range(5):
            await asyncio.sleep(0)


async def test_partition_lost_as_its_commit_ends_is_not_handed_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, calls = MemoryMember.commit, 0

    async def lost(self: MemoryMember, offsets: Any, copies: Any = ()) -> None:
        nonlocal calls
        await commit(self, offsets, copies)
        calls += 1
        if calls == 2:  # the first one claims
            self._listener.lost("test")

    monkeypatch.setattr(MemoryMember, "commit", lost)
    handler = Handler()
    world.produce("a", "b")
    async with world.running(handler, mode="at-most-once"):
        await until(lambda: calls >= 2)
        for _ in range(5):
            await asyncio.sleep(0)
    assert handler.seen == []


async def test_at_most_once_repeats_no_message_of_a_failed_batch(world: World) -> None:
    world.produce("a", "b", "c", "d")
    seen: list[str] = []

    async def handle(messages: Sequence[ReceivedMessage]) -> None:
        seen.extend(texts(messages))
        if "a" in texts(messages):
            raise BUG

    run = {"batch": 4}
    options: dict[str, Any] = {"mode": "at-most-once", "order": "partition"}
    async with world.running(handle, run=run, **options) as consumer:
        await until(lambda: len(seen) >= 4)
        world.produce("e")
        await until(lambda: "e" in seen)
        assert seen == ["a", "b", "c", "d", "e"]
        assert counted(consumer, "dropped") == 4


async def test_pulled_batch_keeps_the_order_of_a_lane_that_fails(world: World) -> None:
    world.produce("k=1", "k=2", "k=3", "other=4")
    seen: list[str] = []
    failing = {"1", "2"}
    async with world.consumer(order="key", on_failure="wait") as consumer:
        async for messages in consumer.batches(4, max_wait_s=0.1):
            for message in messages:
                seen.append(text(message))
                if text(message) in failing:
                    failing.discard(text(message))
                    message.failed(BUG)
                else:
                    message.done()
            if len([each for each in seen if each == "3"]) == 2:
                break
        await world.commits(4)
    again = seen[seen.index("1", 1) :]
    assert [each for each in again if each != "4"] == ["1", "2", "3"]


async def test_foreign_due_time_holds_up_no_more_than_its_step(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "DELAYS_S", (0.1,))
    copies = [
        make_copy(Record(None, value), Failed(MessageSource("orders", 0, number), 1, due_ms))
        for number, (value, due_ms) in enumerate([(b"foreign", 10**14), (b"due", 0)])
    ]
    handler = Handler()
    async with world.running(handler, order="none"):
        world.kafka.write(f"txbroker.retry.{GROUP}", 0, copies, None)
        await handler.does("foreign", "due")
    last = FailurePolicy(OnFailure.RETRY, 1, 1.0).decide(BUG, 1, len(DELAYS_S))
    assert isinstance(last, Bury), "of a partition that was added to the retry topic"
