"""Wrong input to an outbox is refused before anything is written, with the next step."""

from __future__ import annotations

import gc
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.databases.places import Place, sqlite_place, with_tables
from tests.relay.shops import emptied, message, rows
from txbroker.core.records import Decision, Message
from txbroker.databases import DatabaseUnavailable, TooLate, from_url
from txbroker.databases.outbox.rows import MESSAGE_BYTES_MAX
from txbroker.databases.sessions import SessionPool
from txbroker.errors import BadRequest, ConfigurationError
from txbroker.relay.outbox import Outbox, Prepared


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return with_tables(sqlite_place(tmp_path))


def messages(*given: Any, **options: Any) -> dict[str, Any]:
    return {"messages": given, **options}


BAD = {
    "no message": (messages(), "there are no messages: give at least one"),
    "no Message": (messages({"topic": "t"}), r"messages\[0\] is a Message of txbroker.relay"),
    "second": (messages(Message("t"), Message("a b")), r"a topic has 1 to 249 .* not 'a b'"),
    "empty topic": (messages(Message("")), "a topic has 1 to 249"),
    "dots": (messages(Message("..")), "a topic has 1 to 249"),
    "long topic": (messages(Message("x" * 250)), "a topic has 1 to 249"),
    "10 MB": (
        messages(Message("t", value=b"x" * 10_000_000)),
        r"messages\[0\] has 10,000,000 bytes, more than 7,340,032: store the content elsewhere",
    ),
    "large header": (
        messages(Message("t", headers={"a": b"x" * MESSAGE_BYTES_MAX})),
        "7,340,033 bytes",
    ),
    "partition": (messages(Message("t", partition=-1)), "partition is between 0 and 2147483647"),
    "timestamp": (messages(Message("t", timestamp_ms=-1)), "timestamp_ms is between 0 and"),
    "header name": (
        messages(Message("t", headers=[("\ud800", b"")])),
        "cannot be written as UTF-8",
    ),
    "order key": (messages(Message("t"), order_key=""), "order_key is a text of 1 to 1024"),
    "null": (messages(Message("t"), order_key="a\0b"), "order_key is a text of 1 to 1024"),
    "surrogate": (messages(Message("t"), order_key="\ud800"), "order_key is a text"),
    "bytes": (messages(Message("t"), order_key=b"a"), "order_key is a text"),
    "timeout": (messages(Message("t"), timeout_s=0), "timeout_s is above 0 and at most 1e"),
    "nan": (messages(Message("t"), timeout_s=float("nan")), "timeout_s is above 0"),
    "text": (messages(Message("t"), timeout_s="5"), "timeout_s is above 0"),
}


@pytest.mark.parametrize("bad", BAD)
async def test_message_that_cannot_be_delivered_is_refused(place: Place, bad: str) -> None:
    given, problem = BAD[bad]
    options = dict(given)
    some = options.pop("messages")
    with emptied(place) as outbox, closing(place.connect()) as connection:
        for use in (
            lambda: outbox.add(connection, *some, **options),
            lambda: outbox.prepare(*some, **options),
            lambda: outbox.transaction(connection, *some, **options).__enter__(),
        ):
            with pytest.raises(BadRequest, match=problem):
                use()
        with pytest.raises(BadRequest, match=problem):
            await outbox.add_async(connection, *some, **options)
        connection.commit()
        assert rows(place) == []


def test_largest_message_is_stored(kind: Place, outbox: Outbox) -> None:
    """In MariaDB's default packet, even where SQL needs two characters a byte."""
    with kind.transaction() as connection:
        outbox.add(connection, Message("t", value=b"\0" * MESSAGE_BYTES_MAX))
    assert [len(row.value) for row in rows(kind)] == [MESSAGE_BYTES_MAX]


def test_text_becomes_utf8(place: Place) -> None:
    with emptied(place) as outbox, place.transaction() as connection:
        outbox.add(connection, Message("t", "clé", "€", {"é": "ü"}))
    (row,) = rows(place)
    assert (row.key, row.value, row.headers) == ("clé".encode(), "€".encode(), '[["é","ü"]]')


def test_deliver_at_is_no_argument(place: Place) -> None:
    with (
        emptied(place) as outbox,
        closing(place.connect()) as connection,
        pytest.raises(TypeError, match="deliver_at"),
    ):
        outbox.add(connection, Message("t"), deliver_at=5)  # type: ignore[call-arg]


def test_decision_must_be_one(place: Place) -> None:
    with emptied(place) as outbox, closing(place.connect()) as connection:
        for decision in (Decision.UNKNOWN, "yes", None):
            with pytest.raises(BadRequest, match=r"with Decision.COMMIT or Decision.ROLLBACK"):
                outbox.decide(connection, Prepared(("a",)), decision)  # type: ignore[arg-type]
        for prepared in ("", "a,,b", None, b"a"):
            with pytest.raises(BadRequest, match="what `prepare` returned, or its text"):
                outbox.decide(connection, prepared, Decision.COMMIT)  # type: ignore[arg-type]
        with pytest.raises(TooLate, match="row a is not in txbroker_outbox"):
            outbox.decide(connection, "a,b", Decision.COMMIT)


def test_connection_to_another_file_is_refused(place: Place, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = sqlite_place(tmp_path / "other")
    with emptied(place) as outbox, closing(other.connect()) as connection:
        with pytest.raises(ConfigurationError, match="another database than"):
            outbox.add(connection, message("a"))
        for thing in (object(), None):
            with pytest.raises(ConfigurationError, match="is no connection"):
                outbox.add(thing, message("a"))


# --- the outbox's own connections ------------------------------------------------------------


def test_lost_connection_is_replaced(kind: Place, outbox: Outbox) -> None:
    """`prepare` keeps its connections; the server may close them."""
    outbox.prepare(message("a"))
    (session, _since), *_ = outbox._sessions._idle
    session.close()
    with pytest.raises(DatabaseUnavailable):
        outbox.prepare(message("b"))
    outbox.prepare(message("c"))
    assert [row.key for row in rows(kind)] == [b"a", b"c"]


def test_pool_serves_threads_and_forks(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SessionPool(place.database.open)
    with pool.lend() as first, pool.lend() as second:
        assert first is not second
    with pool.lend() as again:
        assert again is first
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a forked process
    with pool.lend() as own:
        assert own not in (first, second)
    assert again.connection.execute("SELECT 1").fetchone() == (1,)  # the parent's is left alone
    pool.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        own.connection.execute("SELECT 1")
    first.close()
    second.close()


def test_connections_end_with_the_outbox(place: Place) -> None:
    outbox = Outbox(from_url(place.url, create_tables=True))
    outbox.prepare(message("a"))
    (session, _since), *_ = outbox._sessions._idle
    del outbox
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        session.connection.execute("SELECT 1")
