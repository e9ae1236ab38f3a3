"""The barrier: a check and a late local transaction exclude each other, on real databases."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import socket
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest
from sqlalchemy.exc import TimeoutError as PoolExhausted

from tests.databases.places import Place, run, sqlite_place, with_tables
from tests.kit.until import unique
from txbroker.core.records import CheckReason, Decision
from txbroker.databases import barrier as module
from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.dialect import MARIADB, POSTGRESQL, Fault
from txbroker.errors import BadRequest, ConfigurationError
from txbroker.sdk import (
    AlreadyRecorded,
    Barrier,
    CheckRequest,
    MariaDBBarrier,
    NotYet,
    PostgresBarrier,
    Rollback,
    SqliteBarrier,
    TooLate,
)

AGAIN = NotYet(module.BUSY_AGAIN_S)
ENDS = pytest.mark.parametrize("end", ["commit", "rollback"])


@pytest.fixture(autouse=True)
def _impatient_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that waits for a lock gives up soon."""
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0.1)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check waits for a lock until the test releases it."""
    monkeypatch.setattr(module, "LOCK_WAIT_S", 30.0)


@pytest.fixture
def id() -> str:
    return unique("tx")


def orders(place: Place, like: str) -> list[str]:
    return [row[0] for row in place.select("SELECT id FROM orders") if row[0].startswith(like)]


def place_order(place: Place, transaction_id: str, connection: Any = None) -> None:
    """The local transaction of a service."""
    barrier = Barrier(place.database)
    with place.transaction() as connection:
        barrier.record(connection, transaction_id)
        run(connection, f"INSERT INTO orders (id) VALUES ('{transaction_id}')")


def insert_rollback(connection: Any, transaction_id: str) -> None:
    """What a check does, in a transaction that stays open."""
    run(
        connection,
        "INSERT INTO txbroker_barrier (id, decision, at_s) "
        f"VALUES ('{transaction_id}', 'rollback', 4000000000)",
    )


def test_committed_before_the_check(place: Place, id: str) -> None:
    barrier = Barrier(place.database)
    with closing(place.connect()) as connection:
        snapshot(place, connection)
        place_order(place, id)
        assert [barrier.check(id), barrier.check(id)] == [Decision.COMMIT] * 2
        with pytest.raises(AlreadyRecorded):
            barrier.record(connection, id)
    assert orders(place, id) == [id]


@pytest.mark.rule(24)
def test_checked_before_the_local_transaction(place: Place, id: str) -> None:
    barrier = Barrier(place.database)
    with closing(place.connect()) as connection:
        snapshot(place, connection)
        question = CheckRequest(id, "g", 1, 15, CheckReason.DUE, 0.0, ())
        assert barrier.check(question) is Decision.ROLLBACK
        assert barrier.check(id) is Decision.ROLLBACK
        with pytest.raises(TooLate) as late:
            barrier.record(connection, id)
        assert isinstance(late.value, Rollback)
    with pytest.raises(TooLate):
        place_order(place, id)
    assert orders(place, id) == []


def snapshot(place: Place, connection: Any) -> None:
    """Begin a transaction whose snapshot is older than what follows.

    A reader of an SQLite file with a rollback journal would keep others from committing.
    """
    if place.dialect.name == "mariadb":  # at serializable, a SELECT locks what it has read
        run(connection, "START TRANSACTION WITH CONSISTENT SNAPSHOT")
    elif place.level != "delete":
        run(connection, "BEGIN" if place.level == "wal" else "SELECT 1")
        run(connection, "SELECT * FROM orders")


@pytest.mark.rule(24)
@ENDS
def test_running_local_transaction_is_not_yet(place: Place, id: str, end: str) -> None:
    barrier = Barrier(place.database)
    with closing(place.connect()) as connection:
        barrier.record(connection, id)
        assert barrier.check(id) == AGAIN
        getattr(connection, end)()
    assert barrier.check(id) is Decision(end)


@ENDS
@pytest.mark.usefixtures("patience")
async def test_check_waits_for_the_local_transaction(place: Place, id: str, end: str) -> None:
    barrier = Barrier(place.database)
    with closing(place.connect()) as connection:
        barrier.record(connection, id)
        check = await place.blocked(lambda: barrier.check(id))
        getattr(connection, end)()
        assert await check is Decision(end)


@ENDS
async def test_local_transaction_waits_for_the_check(place: Place, id: str, end: str) -> None:
    with closing(place.connect()) as checking:
        insert_rollback(checking, id)
        late = await place.blocked(lambda: place_order(place, id))
        getattr(checking, end)()
        if end == "commit":
            with pytest.raises(TooLate):
                await late
        else:
            await late
    assert orders(place, id) == ([] if end == "commit" else [id])


@ENDS
@pytest.mark.usefixtures("patience")
async def test_checks_agree(place: Place, id: str, end: str) -> None:
    """Two checks wait for a third, and then for each other."""
    barrier = Barrier(place.database)
    with closing(place.connect()) as third:
        insert_rollback(third, id)
        checks = [await place.blocked(lambda: barrier.check(id), count) for count in (1, 2)]
        getattr(third, end)()
        answers = await asyncio.gather(*checks)
    # InnoDB may end one of the two as a deadlock.
    assert Decision.ROLLBACK in answers
    assert set(answers) <= {Decision.ROLLBACK, AGAIN}
    assert barrier.check(id) is Decision.ROLLBACK


def test_one_side_wins(place: Place, id: str) -> None:
    barrier, both = Barrier(place.database), threading.Barrier(2)
    ids = [f"{id}-{number}" for number in range(5)]

    def check(transaction_id: str) -> Decision:
        both.wait()
        return decided(barrier, transaction_id)

    with ThreadPoolExecutor(1) as thread:
        for transaction_id in ids:
            answer = thread.submit(check, transaction_id)
            both.wait()
            placed = placed_at_last(place, transaction_id)
            assert answer.result() is (Decision.COMMIT if placed else Decision.ROLLBACK)
            assert decided(barrier, transaction_id) is answer.result()
    placed_ids = [each for each in ids if decided(barrier, each) is Decision.COMMIT]
    assert sorted(orders(place, id)) == sorted(placed_ids)


def decided(barrier: Barrier, transaction_id: str) -> Decision:
    """Repeat the check while the answer is "not yet"."""
    answer = barrier.check(transaction_id)
    while isinstance(answer, NotYet):
        answer = barrier.check(transaction_id)
    return answer


def placed_at_last(place: Place, transaction_id: str) -> bool:
    """Repeat the local transaction while the database asks for it."""
    while True:
        try:
            place_order(place, transaction_id)
        except TooLate:
            return False
        except Exception as error:
            if place.dialect.fault(error) is not Fault.BUSY:
                raise
        else:
            return True


def _local_process(url: str, ids: list[str], meet: Callable[[], object]) -> None:
    meet()
    for transaction_id in ids:
        placed_at_last(Place(url), transaction_id)


@pytest.mark.rule(24)
def test_one_side_wins_between_processes(kind: Place, id: str) -> None:
    barrier, ids = Barrier(kind.database), [f"{id}-{number}" for number in range(10)]
    context = multiprocessing.get_context("spawn")
    meeting = context.Barrier(2)
    other = context.Process(target=_local_process, args=(kind.url, ids, meeting.wait))
    other.start()
    meeting.wait(20)
    shuffled = random.Random(7).sample(ids, len(ids))
    answers = {transaction_id: decided(barrier, transaction_id) for transaction_id in shuffled}
    other.join(20)
    assert other.exitcode == 0
    committed = {each for each, answer in answers.items() if answer is Decision.COMMIT}
    assert set(orders(kind, id)) == committed
    assert all(decided(barrier, each) is answers[each] for each in ids)


def test_old_rows_are_deleted_in_pieces(
    kind: Place, id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbroker.databases.tables._PIECE", 2)
    barrier = Barrier(kind.database)
    for number in range(5):
        place_order(kind, f"{id}-{number}")
    kind.execute(
        f"UPDATE txbroker_barrier SET at_s = at_s - 200000 WHERE id LIKE '{id}-%' "
        f"AND id <> '{id}-2'"
    )
    assert barrier.forget(300_000) == 0
    assert barrier.forget(100_000) == 4
    assert barrier.check(f"{id}-2") is Decision.COMMIT
    for seconds in (60, float("nan"), float("inf")):
        with pytest.raises(BadRequest, match="older_than_s"):
            barrier.forget(seconds)


@pytest.mark.parametrize("bad", [None, 7, "", "ä", "x" * 256, "a\nb"])
def test_bad_id_is_refused(tmp_path: Path, bad: Any) -> None:
    place = with_tables(sqlite_place(tmp_path))
    barrier = Barrier(place.database)
    with place.transaction() as connection, pytest.raises(BadRequest, match="1 to 255 ASCII"):
        barrier.record(connection, bad)
    with pytest.raises(BadRequest, match="1 to 255 ASCII"):
        barrier.check(bad)


def test_error_of_the_driver_is_raised(kind: Place, id: str) -> None:
    """Where the decision is not known, the caller repeats the local transaction."""
    barrier = Barrier(kind.database)
    with closing(kind.connect()) as holder, closing(kind.connect()) as connection:
        barrier.record(holder, id)
        if kind.dialect.name == "sqlite":
            connection.execute("PRAGMA busy_timeout = 10")
        elif kind.dialect.name == "postgresql":
            run(connection, "SET lock_timeout = 10")
        else:
            run(connection, "SET innodb_lock_wait_timeout = 0")
        kinds = (sqlite3.Error, psycopg.Error, pymysql.Error)
        with pytest.raises(kinds) as failed:
            barrier.record(connection, id)
        assert kind.dialect.fault(failed.value) is Fault.BUSY


# --- kinds of barriers -----------------------------------------------------------------------


def test_server_barriers_take_urls_and_databases(
    postgres_place: Place, mariadb_place: Place, id: str
) -> None:
    barriers = [
        PostgresBarrier(postgres_place.url),
        PostgresBarrier(postgres_place.database),
        MariaDBBarrier(mariadb_place.url, create_tables=True),
        MariaDBBarrier(mariadb_place.database),
    ]
    assert [barrier.check(id) for barrier in barriers] == [Decision.ROLLBACK] * 4


@pytest.mark.parametrize("kind", [PostgresBarrier, MariaDBBarrier])
def test_frozen_server_is_unavailable(kind: type[Barrier], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the proxy gives up: the attempt would count."""
    monkeypatch.setattr(module, "CONNECT_S", 1)
    monkeypatch.setattr(module, "READ_S", 1)
    scheme = kind.__name__.removesuffix("Barrier").lower().replace("postgres", "postgresql")
    with closing(socket.create_server(("127.0.0.1", 0))) as frozen:
        barrier = kind(f"{scheme}://u:p@127.0.0.1:{frozen.getsockname()[1]}/shop")
        with pytest.raises(DatabaseUnavailable):
            barrier.check("a")


def test_exhausted_pools_are_unavailable() -> None:
    class PoolTimeout(psycopg.OperationalError):
        """As psycopg's pool raises it."""

    for error in (PoolTimeout(), psycopg.errors.ConnectionTimeout(), PoolExhausted()):
        assert POSTGRESQL.fault(error) is Fault.UNAVAILABLE


def test_a_shutdown_during_commit_is_no_fault_of_the_caller() -> None:
    error = pymysql.OperationalError(1180, 'Got error 1 "Operation not permitted" during COMMIT')
    assert MARIADB.fault(error) is Fault.UNAVAILABLE


def test_sqlite_barrier_creates_its_table_only(tmp_path: Path, id: str) -> None:
    path = tmp_path / "shop.db"
    barriers = [
        SqliteBarrier(path, busy_timeout_s=0.05),
        SqliteBarrier(lambda: sqlite3.connect(path, isolation_level=None), "mine"),
        SqliteBarrier(lambda: sqlite3.connect(path, timeout=0.05), "other"),
    ]
    for barrier in barriers:
        with closing(sqlite3.connect(path)) as connection:
            barrier.record(connection, id)
            if barrier is not barriers[1]:
                assert barrier.check(id) == AGAIN
            connection.commit()
        assert barrier.check(id) is Decision.COMMIT
        assert barrier.check(f"{id}-") is Decision.ROLLBACK
    place = Place(f"sqlite:///{path}")
    names = [row[0] for row in place.select("SELECT name FROM sqlite_master WHERE type = 'table'")]
    assert names == ["txbroker_barrier", "mine", "other"]


def test_sqlite_barrier_uses_a_table_of_earlier_versions(tmp_path: Path, id: str) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "CREATE TABLE txbroker_barrier (id TEXT PRIMARY KEY NOT NULL, decision TEXT NOT NULL "
            "CHECK (decision IN ('commit', 'rollback')), at_s INTEGER NOT NULL "
            "DEFAULT (CAST(strftime('%s', 'now') AS INTEGER))) WITHOUT ROWID"
        )
        connection.execute(f"INSERT INTO txbroker_barrier (id, decision) VALUES ('{id}', 'commit')")
    barrier = SqliteBarrier(path)
    assert barrier.check(id) is Decision.COMMIT
    assert barrier.check(f"{id}-") is Decision.ROLLBACK


def test_bad_sqlite_barrier_is_refused_at_once(tmp_path: Path) -> None:
    for database in (":memory:", "", lambda: sqlite3.connect(":memory:")):
        with pytest.raises(ConfigurationError, match="needs a file"):
            SqliteBarrier(database)
    with pytest.raises(ConfigurationError, match="plain word"):
        SqliteBarrier(tmp_path / "x.db", table="a; DROP TABLE b")


def test_missing_table_is_reported(tmp_path: Path, id: str) -> None:
    barrier = SqliteBarrier(tmp_path / "shop.db")
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("DROP TABLE txbroker_barrier")
        with pytest.raises(ConfigurationError, match="txbroker databases create"):
            barrier.record(connection, id)
    with pytest.raises(ConfigurationError, match="txbroker databases create"):
        barrier.check(id)
    barrier.create()
    assert barrier.check(id) is Decision.ROLLBACK
