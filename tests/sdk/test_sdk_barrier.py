"""The SQLite barrier: a check and a late local transaction exclude each other."""

import multiprocessing
import random
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from txbroker.core.records import CheckReason, Decision
from txbroker.databases.barrier import BUSY_AGAIN_S
from txbroker.errors import BadRequest, ConfigurationError
from txbroker.sdk import AlreadyRecorded, CheckRequest, NotYet, Rollback, SqliteBarrier, TooLate

ID = "0" * 26


@pytest.fixture(params=["delete", "wal"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode={request.param}")
        connection.execute("CREATE TABLE orders (id TEXT)")
        connection.commit()
    return path


@pytest.fixture
def barrier(path: Path) -> SqliteBarrier:
    return SqliteBarrier(path, busy_timeout_s=0.05)


def orders(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [row[0] for row in connection.execute("SELECT id FROM orders")]


def place_order(barrier: SqliteBarrier, path: Path, transaction_id: str = ID) -> None:
    with closing(sqlite3.connect(path, timeout=10)) as connection, connection:
        barrier.record(connection, transaction_id)
        connection.execute("INSERT INTO orders VALUES (?)", (transaction_id,))


def test_committed_before_the_check(barrier: SqliteBarrier, path: Path) -> None:
    place_order(barrier, path)
    assert barrier.check(ID) is Decision.COMMIT
    assert barrier.check(ID) is Decision.COMMIT
    with pytest.raises(AlreadyRecorded):
        place_order(barrier, path)
    assert orders(path) == [ID]


@pytest.mark.rule(24)
def test_checked_before_the_local_transaction(barrier: SqliteBarrier, path: Path) -> None:
    question = CheckRequest(ID, "g", 1, 15, CheckReason.DUE, 0.0, ())
    assert barrier.check(question) is Decision.ROLLBACK
    assert barrier.check(ID) is Decision.ROLLBACK
    with pytest.raises(TooLate) as late:
        place_order(barrier, path)
    assert isinstance(late.value, Rollback)
    assert orders(path) == []


def test_running_local_transaction_is_not_yet(barrier: SqliteBarrier, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        barrier.record(connection, ID)
        assert barrier.check(ID) == NotYet(BUSY_AGAIN_S)
        connection.commit()
    assert barrier.check(ID) is Decision.COMMIT


def test_failed_local_transaction_is_rolled_back(barrier: SqliteBarrier, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        barrier.record(connection, ID)
        connection.rollback()
    assert barrier.check(ID) is Decision.ROLLBACK


def test_stale_local_transaction_cannot_commit(barrier: SqliteBarrier, path: Path) -> None:
    with closing(sqlite3.connect(path, timeout=0.05, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT * FROM orders").fetchall()
        answer = barrier.check(ID)
        # With a rollback journal the reader keeps the check from committing, in WAL mode the
        # check makes the reader's snapshot too old to write.
        if answer is Decision.ROLLBACK:
            with pytest.raises((TooLate, sqlite3.OperationalError)):
                barrier.record(connection, ID)
        else:
            assert answer == NotYet(BUSY_AGAIN_S)
            barrier.record(connection, ID)
            connection.execute("COMMIT")
            assert barrier.check(ID) is Decision.COMMIT


def test_autocommit_connection_is_refused(barrier: SqliteBarrier, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        with pytest.raises(ConfigurationError, match="BEGIN"):
            barrier.record(connection, ID)
        connection.execute("BEGIN IMMEDIATE")
        barrier.record(connection, ID)
        connection.execute("COMMIT")
    assert barrier.check(ID) is Decision.COMMIT


def test_another_database_is_refused(barrier: SqliteBarrier, tmp_path: Path) -> None:
    for other in (tmp_path / "other.db", Path(":memory:")):
        with (
            closing(sqlite3.connect(str(other))) as connection,
            pytest.raises(ConfigurationError, match="another database"),
        ):
            barrier.record(connection, ID)


def test_invalid_barrier_is_refused_at_creation(tmp_path: Path) -> None:
    for database in (":memory:", ""):
        with pytest.raises(ConfigurationError, match="needs a file"):
            SqliteBarrier(database)
    with pytest.raises(ConfigurationError, match="needs a file"):
        SqliteBarrier(lambda: sqlite3.connect(":memory:"))
    with pytest.raises(ConfigurationError, match="plain word"):
        SqliteBarrier(tmp_path / "x.db", table="a; DROP TABLE b")


def test_barrier_with_function_and_other_table(path: Path) -> None:
    barrier = SqliteBarrier(lambda: sqlite3.connect(path, isolation_level=None), "mine")
    place_order(barrier, path)
    assert barrier.check(ID) is Decision.COMMIT
    assert barrier.check("1" * 26) is Decision.ROLLBACK
    assert barrier.check("1" * 26) is Decision.ROLLBACK


def test_other_database_errors_are_raised(barrier: SqliteBarrier, path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        with pytest.raises(sqlite3.IntegrityError):
            barrier.record(connection, None)  # type: ignore[arg-type]
        connection.execute("DROP TABLE txbroker_barrier")
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        barrier.check(ID)
    barrier.create()
    assert barrier.check(ID) is Decision.ROLLBACK


def test_old_rows_are_deleted(barrier: SqliteBarrier, path: Path) -> None:
    place_order(barrier, path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE txbroker_barrier SET at_s = at_s - 200000")
    place_order(barrier, path, "1" * 26)
    assert barrier.forget(100_000) == 1
    assert barrier.check("1" * 26) is Decision.COMMIT
    with pytest.raises(BadRequest):
        barrier.forget(60)


# --- races ---------------------------------------------------------------------------------------


def decided(barrier: SqliteBarrier, transaction_id: str) -> Decision:
    answer = barrier.check(transaction_id)
    while isinstance(answer, NotYet):
        answer = barrier.check(transaction_id)
    return answer


def race(barrier: SqliteBarrier, path: Path, number: int, meet: Callable[[], object]) -> str:
    """Let a local transaction and a check of one id begin together; return who won."""
    transaction_id = f"{number:026}"
    answers: list[Decision] = []

    def check() -> None:
        meet()
        answers.append(decided(barrier, transaction_id))

    checker = threading.Thread(target=check)
    checker.start()
    meet()
    try:
        place_order(barrier, path, transaction_id)
        placed = True
    except TooLate:
        placed = False
    checker.join()
    assert answers == [Decision.COMMIT if placed else Decision.ROLLBACK]
    assert decided(barrier, transaction_id) is answers[0]
    return "local" if placed else "check"


def test_one_side_wins_between_threads(barrier: SqliteBarrier, path: Path) -> None:
    def one(number: int) -> str:
        return race(barrier, path, number, threading.Barrier(2).wait)

    with ThreadPoolExecutor(4) as threads:
        winners = list(threads.map(one, range(60)))
    assert sorted(orders(path)) == [f"{n:026}" for n, w in enumerate(winners) if w == "local"]


def _local_process(path: Path, ids: list[str], meet: Callable[[], object]) -> None:
    barrier = SqliteBarrier(path, busy_timeout_s=0.05)
    meet()
    for transaction_id in ids:
        try:
            place_order(barrier, path, transaction_id)
        except TooLate:
            continue


@pytest.mark.rule(24)
def test_one_side_wins_between_processes(barrier: SqliteBarrier, path: Path) -> None:
    ids = [f"{n:026}" for n in range(60)]
    context = multiprocessing.get_context("spawn")
    meeting = context.Barrier(2)
    other = context.Process(target=_local_process, args=(path, ids, meeting.wait))
    other.start()
    shuffled = random.Random(7).sample(ids, len(ids))
    meeting.wait(20)
    answers = {transaction_id: decided(barrier, transaction_id) for transaction_id in shuffled}
    other.join(20)
    assert other.exitcode == 0
    placed = set(orders(path))
    assert placed == {i for i, answer in answers.items() if answer is Decision.COMMIT}
    assert all(decided(barrier, i) is answers[i] for i in ids)
