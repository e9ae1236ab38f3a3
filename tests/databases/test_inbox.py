"""The inbox: a message has its effect once, on real databases at each isolation level."""

from __future__ import annotations

from contextlib import closing

import pymysql
import pytest

from tests.databases.places import Place, run
from tests.kit.until import unique
from txbroker.databases import Inbox
from txbroker.errors import BadRequest, ConfigurationError


@pytest.fixture
def consumer() -> str:
    return unique("consumer")


def effects(place: Place, consumer: str) -> list[str]:
    return [row[0] for row in place.select("SELECT id FROM orders") if row[0].startswith(consumer)]


def handle(place: Place, consumer: str, message: str) -> bool:
    """What a consumer does with a message."""
    with place.transaction() as connection:
        new = Inbox(place.database, consumer).accept(connection, message)
        if new:
            run(connection, f"INSERT INTO orders (id) VALUES ('{consumer}')")
    return new


def test_message_is_accepted_once(place: Place, consumer: str) -> None:
    assert [handle(place, consumer, "t/0@1"), handle(place, consumer, "t/0@1")] == [True, False]
    assert [handle(place, consumer, "t/0@2"), handle(place, f"{consumer}-", "t/0@1")] == [True] * 2
    assert len(effects(place, consumer)) == 3
    assert effects(place, f"{consumer}-") == [f"{consumer}-"]


def test_rolled_back_message_is_accepted_again(place: Place, consumer: str) -> None:
    inbox = Inbox(place.database, consumer)
    with closing(place.connect()) as connection:
        for _ in range(2):
            assert inbox.accept(connection, "t/0@1")
            connection.rollback()
    assert handle(place, consumer, "t/0@1")


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_concurrent_repeat_waits(place: Place, consumer: str, end: str) -> None:
    with closing(place.connect()) as first:
        assert Inbox(place.database, consumer).accept(first, "t/0@1")
        repeat = await place.blocked(lambda: handle(place, consumer, "t/0@1"))
        getattr(first, end)()
        assert await repeat is (end == "rollback")


def test_repeat_leaves_the_transaction_usable(server: Place, consumer: str) -> None:
    """Also where the first transaction is newer than the snapshot of the second."""
    inbox = Inbox(server.database, consumer)
    with server.transaction() as connection:
        assert inbox.accept(connection, "t/0@1")
        run(connection, f"INSERT INTO orders (id) VALUES ('{consumer}')")
        assert handle(server, consumer, "t/0@2")
        assert not inbox.accept(connection, "t/0@2")
        assert inbox.accept(connection, "t/0@3")
    repeats = [handle(server, consumer, f"t/0@{number}") for number in (1, 2, 3)]
    assert repeats == [False] * 3
    assert len(effects(server, consumer)) == 2


def test_lost_transaction_is_no_repeat(mariadb_place: Place, consumer: str) -> None:
    """With snapshot isolation, MariaDB rolls back the whole transaction of a repeat."""
    inbox = Inbox(mariadb_place.database, consumer)
    with closing(mariadb_place.connect()) as connection:
        run(connection, "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        run(connection, "SET innodb_snapshot_isolation = 1")
        assert inbox.accept(connection, "t/0@1")
        run(connection, "SELECT * FROM orders")
        assert handle(mariadb_place, consumer, "t/0@2")
        with pytest.raises(pymysql.OperationalError, match="try restarting transaction"):
            inbox.accept(connection, "t/0@2")
    assert handle(mariadb_place, consumer, "t/0@1")


def test_different_ids_are_different(kind: Place, consumer: str) -> None:
    ids = [
        "a",
        "A",
        "a ",
        " a",
        "ä",
        "a\0",
        "a\0b",
        "\ud800",
        "x" * 255,
        "x" * 256,
        "x" * 257,
        "%s",
        "?",
    ]
    assert [handle(kind, consumer, each) for each in ids] == [True] * len(ids)
    assert [handle(kind, consumer, each) for each in ids] == [False] * len(ids)
    for bad in ("", None, 7):
        with pytest.raises(BadRequest, match="not empty"):
            handle(kind, consumer, bad)  # type: ignore[arg-type]
    for bad in ("ä", "x" * 256):
        with pytest.raises(ConfigurationError, match="255 ASCII"):
            Inbox(kind.database, bad)


async def test_old_ids_are_deleted_in_pieces(
    kind: Place, consumer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbroker.databases.tables._PIECE", 2)
    names = [consumer, f"{consumer}-"]
    for name in names:
        for number in range(5):
            assert handle(kind, name, f"t/0@{number}")
    kind.execute("UPDATE txbroker_inbox SET at_s = at_s - 200000 WHERE id <> 't/0@2'")
    inbox = Inbox(kind.database, consumer)
    assert [inbox.forget(300_000), await inbox.forget_async(100_000)] == [0, 4]
    assert [handle(kind, consumer, f"t/0@{number}") for number in (1, 2)] == [True, False]
    assert not handle(kind, names[1], "t/0@1")
    with pytest.raises(BadRequest, match="at least 86400"):
        inbox.forget(3600)
