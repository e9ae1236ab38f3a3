"""A database that cannot be used for a time, the end of consumers, and their remains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.kit.consumer_world import World, counted, text
from tests.kit.results import ORDERS, AsyncBooking, Booking, Shop, execute, insert
from tests.kit.until import until
from txbroker.consumer import ReceivedMessage
from txbroker.databases.sessions import PlainSession

KINDS = ("postgres_server read committed", "mariadb_server repeatable read")


@pytest.fixture
def server(request: pytest.FixtureRequest, shop: Shop) -> Any:
    name = {"postgresql": "postgres_server", "mariadb": "mariadb_server"}
    server = request.getfixturevalue(name[shop.database.dialect.name])
    yield server
    server.resume()
    server.start()


@pytest.mark.parametrize(
    ("shop", "handler", "how"),
    [
        (KINDS[0], Booking, "stop"),
        (KINDS[0], AsyncBooking, "kill"),
        (KINDS[0], AsyncBooking, "pause"),
        (KINDS[1], Booking, "kill"),
        (KINDS[1], Booking, "pause"),
    ],
    indirect=["shop"],
)
async def test_server_is_gone_for_a_time(
    world: World, shop: Shop, server: Any, handler: type[Booking], how: str
) -> None:
    booking = handler(shop)
    options = {"order": "key", "on_failure": "skip", "local_attempts_max": 1, **shop.options}
    async with world.running(booking, **options) as consumer:
        world.produce(*(f"{number}={number}" for number in range(20)))
        await booking.begins("3")
        shop.close()
        await asyncio.to_thread(getattr(server, how))
        world.produce(*(f"{number}={number}" for number in range(20, 30)))
        await until(lambda: consumer.statistics().lag.get(("orders", 0), 0) >= 10)
        begun = len(booking.begun)
        await asyncio.sleep(0.5)  # what a busy loop would use
        assert len(booking.begun) - begun < 20
        await asyncio.to_thread(server.resume if how == "pause" else server.start)
        shop.connect()
        await shop.has(*map(str, range(30)))
        await shop.reaches(30)
        assert counted(consumer, "failed") == 0
    assert shop.aside() == []


@pytest.mark.parametrize(
    ("shop", "coroutine"),
    [(KINDS[0], False), (KINDS[0], True), (KINDS[1], False)],
    indirect=["shop"],
)
async def test_restarts_during_a_handler(
    world: World, shop: Shop, server: Any, coroutine: bool
) -> None:
    """They do not count as sessions that its message has ended."""
    booking, begun, restarted = AsyncBooking(shop), threading.Event(), threading.Event()
    left = 3

    async def wait(message: ReceivedMessage) -> bool:
        nonlocal left
        if text(message) != "long" or not left:
            return False
        left -= 1
        begun.set()
        await until(restarted.is_set)
        restarted.clear()
        return True

    async def handle(message: ReceivedMessage, connection: Any) -> None:
        await booking(message, connection)
        if await wait(message):
            await connection.execute("SELECT 1")

    def handle_plainly(message: ReceivedMessage, connection: Any) -> None:
        insert(connection, text(message), message.token, shop.database.dialect.name)
        if asyncio.run(wait(message)):
            execute(connection, shop.database.dialect.name, "SELECT 1")

    world.produce("a=long")
    options = {"order": "key", "on_failure": "skip", "local_attempts_max": 1, **shop.options}
    async with world.running(handle if coroutine else handle_plainly, **options) as consumer:
        for number in range(3):
            await until(begun.is_set)
            begun.clear()
            shop.close()
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
            shop.connect()
            world.produce(f"{number}={number}")
            await until(lambda value=str(number): value in shop.results)
            restarted.set()
        await shop.has("long", "0", "1", "2")
        assert counted(consumer, "failed") == 0


class Broken:
    """Sessions of consumers that raise, as of a server that refuses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shop: Shop, error: Exception) -> None:
        self.error: Exception | None = None
        self.refused = 0
        self._error = error
        opened = shop.database.open

        def open_(*arguments: Any, **options: Any) -> PlainSession:
            session = opened(*arguments, **options)
            session.execute = self._checked(session.execute)  # type: ignore[method-assign]
            return session

        monkeypatch.setattr(shop.database, "open", open_)

    def _checked(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def checked(query: Any) -> Any:
            if self.error is not None:
                self.refused += 1
                raise self.error
            return execute(query)

        return checked

    def begin(self) -> None:
        self.error = self._error

    def end(self) -> None:
        self.error = None


def disk_full() -> Exception:
    import sqlite3

    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL  # type: ignore[misc]
    return error


def no_table() -> Exception:
    import sqlite3

    error = sqlite3.OperationalError("no such table: txbroker_position")
    error.sqlite_errorcode = sqlite3.SQLITE_ERROR  # type: ignore[misc]
    return error


@pytest.mark.parametrize("error", [disk_full(), no_table()], ids=["full", "no table"])
@pytest.mark.parametrize("order", ORDERS)
async def test_database_refuses_for_a_time(
    world: World, shop: Shop, monkeypatch: pytest.MonkeyPatch, error: Exception, order: str
) -> None:
    """That is no failure of messages, and no reason for a busy loop."""
    broken = Broken(monkeypatch, shop, error)
    booking = Booking(shop)
    options = {"order": order, "local_attempts_max": 1, **shop.options}
    async with world.running(booking, **options) as consumer:
        world.produce("a=1", "b=2")
        await shop.has("1", "2")
        broken.begin()
        world.produce("a=3", "b=4")
        await until(lambda: broken.refused > 3)
        refused = broken.refused
        await asyncio.sleep(0.3)  # what a busy loop would use
        assert broken.refused - refused < 60
        assert sum(consumer.statistics().lag.values()) == 2
        broken.end()
        await shop.has("1", "2", "3", "4")
        await shop.reaches(4)
        assert counted(consumer, "failed") == 0


async def test_rows_of_done_stages_are_removed_later(
    world: World, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(monkeypatch, shop, disk_full())
    booking = Booking(shop, **{"1": [ValueError("bug"), None]})
    calls = 0

    def stage(_message: Any) -> None:
        nonlocal calls
        calls += 1
        broken.begin()

    world.produce("a=1")
    options = {"order": "none", "local_attempts_max": 1, **shop.options}
    async with world.running(booking, run={"then": [stage]}, **options) as consumer:
        await until(lambda: broken.refused)
        broken.end()
        await until(lambda: not shop.aside())
        assert counted(consumer, "failed") == 1
    assert calls == 1


@pytest.mark.parametrize("shop", ["sqlite", *KINDS], indirect=True)
async def test_end_waits_for_handlers_in_flight(world: World, shop: Shop) -> None:
    """And closes all connections."""
    opened: list[PlainSession] = []
    open_ = shop.database.open
    shop.database.open = lambda *a, **o: opened.append(s := open_(*a, **o)) or s  # type: ignore[method-assign, func-returns-value, misc]
    booking = Booking(shop)
    world.produce("a=1", "a=2")
    async with world.consumer(**shop.options) as consumer:
        running = asyncio.create_task(consumer.run(booking))
        with booking.held("1"):
            await booking.begins("1")
            consumer.stop()
        await running
    assert shop.results == ["1"]
    assert shop.position()[0] == 1
    assert len(opened) >= 1
    for session in opened:
        with pytest.raises(Exception, match=r"closed|0, ''"):
            session.connection.cursor().execute("SELECT 1")


async def test_handler_that_does_not_end(
    world: World, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer ends without it; its transaction is rolled back or stored as a whole."""
    from txbroker.consumer.engine import workers

    monkeypatch.setattr(workers, "_CANCELLED_S", 0.05)
    booking = Booking(shop)
    world.produce("a=1")
    with booking.held("1"):
        async with world.consumer(drain_s=0.05, **shop.options) as consumer:
            running = asyncio.create_task(consumer.run(booking))
            await booking.begins("1")
            consumer.stop()
            await asyncio.wait_for(running, 20)
        assert not booking.gates["1"].is_set()
    await until(
        lambda: not any(t.name.startswith("txbroker-handler") for t in threading.enumerate())
    )
    assert len(shop.results) == shop.position()[0]
    async with world.running(booking, **shop.options):
        await shop.has("1")
