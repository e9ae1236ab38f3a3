"""What a consumer has lost leaves its memory. Messages hide cycles from the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any
from weakref import WeakSet

import pytest

from tests.kit.consumer_world import World, text
from tests.kit.results import PLACE, Shop
from tests.kit.until import until
from txbroker.consumer import InKafka, ReceivedMessage
from txbroker.consumer.asides.released import KeyFeed
from txbroker.core.consuming.failure import DELAYS_S
from txbroker.core.consuming.partition import Feed
from txbroker.core.consuming.position import Metadata, Starts, StoredOffset, encode_metadata
from txbroker.testing.topics import LostReply

MESSAGES = ("a=bad", "a=1", "b=2", "c=stuck", "c=3", "4", "a=5")
NOW: dict[str, Any] = {"local_attempts_max": 1}
LATER: dict[str, Any] = {"retry_interval_s": 30}


@pytest.fixture
def feeds(monkeypatch: pytest.MonkeyPatch) -> WeakSet[Feed]:
    """The feeds in memory; each has its partition."""
    found: WeakSet[Feed] = WeakSet()
    begin = Feed.__init__

    def collected(feed: Feed, *given: Any) -> None:
        begin(feed, *given)
        found.add(feed)

    monkeypatch.setattr(Feed, "__init__", collected)
    return found


async def forgotten(feeds: WeakSet[Feed], kind: type[Feed] = Feed, left: int = 0) -> None:
    """Wait until no more feeds of a kind are in memory."""

    def none() -> bool:
        gc.collect()
        return sum(isinstance(each, kind) for each in feeds) == left

    await until(none)


class Failing:
    """Fails with `bad`, and waits with `stuck`; keeps no message."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.fails = True
        self.go_on = threading.Event()

    async def handle(self, given: Any, _out: Any = None) -> None:
        for value in [text(each) for each in (given if isinstance(given, list) else [given])]:
            self._look(value)
            while value == "stuck" and not self.go_on.is_set():
                await asyncio.sleep(0.01)

    def plain(self, message: ReceivedMessage, _connection: Any) -> None:
        self._look(text(message))
        if text(message) == "stuck":
            assert self.go_on.wait(30)

    def _look(self, value: str) -> None:
        self.seen.append(value)
        if value == "bad" and self.fails:
            raise ValueError("bug")  # a new one: its traceback has the message


def lose(consumer: Any) -> None:
    (reader, _source) = consumer._readers[0]
    reader.lost("a test")


@pytest.mark.parametrize("order", ["none", "key", "partition"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(LATER, id="delayed"),
        pytest.param(LATER | {"run": {"batch": 5}}, id="delayed batch"),
        pytest.param(LATER | {"mode": "exactly-once", "store": InKafka()}, id="in Kafka"),
        pytest.param(LATER | {"mode": "at-most-once"}, id="before"),
        pytest.param(LATER | {"suspect": True}, id="suspect"),
        pytest.param(NOW | {"on_failure": "retry"}, id="retry topic"),
        pytest.param(NOW | {"unanswered": True}, id="unanswered"),
    ],
)
async def test_lost_partition(
    world: World, feeds: WeakSet[Feed], order: str, options: dict[str, Any]
) -> None:
    options, handler = {"order": order, **options}, Failing()
    if order != "none" and "on_failure" in options:
        options["on_failure"] = "wait"
    if options.pop("suspect", False):
        metadata = Metadata(1, starts=Starts(count=3, offset=0, failures=1))
        stored = StoredOffset(0, encode_metadata(0, metadata)[0])
        world.group.offsets["orders", 0] = stored
    unanswered = options.pop("unanswered", False)
    async with world.running(handler.handle, **options) as consumer:
        if unanswered:
            world.group.lose_answer_of_next_commit(LostReply.NOT_DONE)
        world.produce(*MESSAGES)
        await until(lambda: consumer.statistics().counts.get("failed"))
        lose(consumer)
        await forgotten(feeds)


async def test_revoked_partition(world: World, feeds: WeakSet[Feed]) -> None:
    def partitions(consumer: Any) -> int:
        return sum(place[0] == "orders" for place in consumer.statistics().lag)

    handler = Failing()
    for partition in (0, 1):
        world.produce("a=1", "b=2", partition=partition)
    async with world.running(handler.handle, order="partition") as one:
        await until(lambda: len(handler.seen) == 4)
        async with world.running(handler.handle, order="partition") as two:
            await until(lambda: partitions(one) == partitions(two) == 1)
            await forgotten(feeds, left=2 + len(DELAYS_S))


@pytest.mark.parametrize("end", ["done", "failed", "lost"])
@pytest.mark.parametrize("store", ["group", "Kafka", "database"])
async def test_released_key(
    world: World, shop: Shop, feeds: WeakSet[Feed], store: str, end: str
) -> None:
    handler = Failing()
    options: dict[str, Any] = NOW | {"order": "key", "on_failure": "aside"}
    if store != "group":
        options |= {"mode": "exactly-once", "store": InKafka()}
    if store == "database":
        options |= shop.options
    world.produce("a=bad", "a=1", "a=stuck", "a=2", "b=3")
    call = handler.plain if store == "database" else handler.handle
    async with world.running(call, **options) as consumer:
        await until(lambda: consumer.statistics().counts.get("aside") == 4)
        if end != "failed":
            handler.fails = False
        if end != "lost":
            handler.go_on.set()
        if store == "database":
            assert shop.transact(shop.kept.release(PLACE, b"a", "checked")) == 4
        else:
            world.release(b"a")
        if end == "done":
            await until(lambda: not consumer.statistics().aside_keys)
        else:
            await until(lambda: (handler.seen[-1], end) in (("stuck", "lost"), ("bad", "failed")))
        if end == "failed":
            await until(lambda: handler.seen.count("bad") == 2)
        if end != "lost":
            await forgotten(feeds, KeyFeed)
        lose(consumer)
        handler.go_on.set()
        await forgotten(feeds)
