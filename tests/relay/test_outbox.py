"""Rows of an outbox by its three schemes, on real databases."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from typing import Any
from zlib import crc32

import pytest

from tests.databases.callers import ASYNC_CALLERS, CALLERS, autocommitting
from tests.databases.places import Place, place_of, run
from tests.kit.until import until
from tests.relay.shops import Row, emptied, message, order, orders, rows, states
from txbroker.core.records import Decision, Message
from txbroker.databases import DatabaseUnavailable, TooLate, from_url
from txbroker.databases.outbox.waiting import WaitingRows
from txbroker.databases.steps import Query
from txbroker.databases.steps import run as steps
from txbroker.errors import BadRequest, ConfigurationError
from txbroker.relay.outbox import Outbox

COMMIT, ROLLBACK = Decision.COMMIT, Decision.ROLLBACK
WAITING = "LOCAL_COMMIT"
WHOLE = Message(
    "payments", "42", b"\xff\x00", {"trace": "1", "raw": b"\xfe", "none": None}, 3, 1234
)


# --- scheme 2 --------------------------------------------------------------------------------


def test_rows_are_stored_with_the_business_change(kind: Place, outbox: Outbox) -> None:
    with kind.transaction() as connection:
        order(connection, "42")
        ids = outbox.add(connection, WHOLE, order_key="clé", timeout_s=60)
    with closing(kind.connect()) as connection:
        outbox.add(connection, message("never"))
        connection.rollback()
    (row,) = rows(kind)
    assert orders(kind) == ["42"]
    assert (ids, row.unit != "") == ((row.id,), True)
    assert (row.state, row.order_key) == (WAITING, "clé")
    check_whole(row)


def check_whole(row: Row) -> None:
    """Check the row of `WHOLE`."""
    assert (row.topic, row.key, row.value) == ("payments", b"42", b"\xff\x00")
    headers = [["trace", "1"], ["raw", {"base64": "/g=="}], ["none", None]]
    assert json.loads(row.headers) == headers
    assert (row.partition, row.timestamp_ms) == (3, 1234)
    assert row.timeout_at is not None
    assert abs(row.timeout_at - row.created_at - 60_000) < 5000


def test_shard_is_of_order_key_else_key_else_id(kind: Place, outbox: Outbox) -> None:
    with kind.transaction() as connection:
        outbox.add(connection, message("a"), message("b"), order_key="clé")
        outbox.add(connection, message("a"), Message("payments"))
    found = rows(kind)
    of = ["clé".encode(), "clé".encode(), b"a", found[3].id.encode()]
    assert [row.shard for row in found] == [crc32(text) % 16 for text in of]


def test_many_rows_keep_their_order(kind: Place, outbox: Outbox) -> None:
    """Of several statements: by number of rows, and by size."""
    sizes = [10] * 200 + [900_000] * 3 + [0] * 20
    messages = [Message("t", str(n), b"v" * size) for n, size in enumerate(sizes)]
    messages[7] = Message("t", "7", None, {"a": "b"}, 1)
    with kind.transaction() as connection:
        ids = outbox.add(connection, *messages)
    found = rows(kind)
    assert [int(row.key) for row in found] == list(range(len(sizes)))
    assert [row.id for row in found] == list(ids)
    assert len({row.unit for row in found}) == 1
    assert [len(row.value or b"") for row in found] == [*sizes[:7], 0, *sizes[8:]]
    assert (found[7].headers, found[7].partition, found[8].partition) == ('[["a","b"]]', 1, None)


def test_rows_of_one_transaction_have_one_unit(kind: Place, outbox: Outbox) -> None:
    other = Outbox(kind.database)
    with closing(kind.connect()) as connection:
        for keys in ("ab", "cde"):
            for key in keys:
                outbox.add(connection, message(key))
            connection.commit()
        outbox.add(connection, message("never"))
        connection.rollback()
        with kind.transaction() as further:
            other.add(further, message("between"))
        outbox.add(connection, message("f"))
        run(connection, "SAVEPOINT mine")
        outbox.add(connection, message("never"))
        run(connection, "ROLLBACK TO SAVEPOINT mine")
        outbox.add(connection, message("g"))
        connection.commit()
        (purged,) = outbox.add(connection, message("h"))
        connection.commit()
        run(connection, f"DELETE FROM txbroker_outbox WHERE id = '{purged}'")
        connection.commit()
        outbox.add(connection, message("i"))
        connection.commit()
    units: dict[str, str] = {}
    for row in rows(kind):
        units[row.unit] = units.get(row.unit, "") + row.key.decode()
    assert list(units.values()) == ["ab", "cde", "between", "fg", "i"]
    if kind.dialect.unit:
        assert list(units) == sorted(units)


def test_unit_is_unknown_while_the_look_fails(
    kind: Place, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite: two transactions with one unit do no harm; two units in one transaction would. On
    MariaDB the order of units is that of rows."""
    if kind.dialect.name == "postgresql":
        return

    def fail(_lock_wait_s: float) -> Any:
        raise OSError("no connection")

    with closing(kind.connect()) as connection:
        with monkeypatch.context() as context:
            context.setattr(kind.database, "open_apart", fail)
            outbox.add(connection, message("a"))
            connection.commit()
            refused = pytest.raises(DatabaseUnavailable, match="no connection")
            with refused if kind.dialect.name == "mariadb" else nullcontext():
                outbox.add(connection, message("b"))
            connection.commit()
        outbox.add(connection, message("c"))
        connection.commit()
    units = [row.unit for row in rows(kind)]
    if kind.dialect.name == "mariadb":
        assert (len(units), units) == (2, sorted(set(units)))
    else:
        assert units[0] == units[1] != units[2]


def test_unit_of_a_row_that_was_deleted_is_not_used_again(kind: Place, outbox: Outbox) -> None:
    """Also where a snapshot of the connection still has the row."""
    with closing(kind.connect()) as connection:
        (first,) = outbox.add(connection, message("a"))
        connection.commit()
        if kind.dialect.name == "mariadb":
            run(connection, "SELECT COUNT(*) FROM txbroker_outbox")
        with kind.transaction() as other:
            run(other, f"DELETE FROM txbroker_outbox WHERE id = '{first}'")
        with kind.transaction() as other:
            Outbox(kind.database).add(other, message("between"))
        outbox.add(connection, message("b"))
        connection.commit()
    between, last = rows(kind)
    assert (between.key, last.key) == (b"between", b"b")
    if kind.dialect.unit:
        assert between.unit < last.unit


def test_own_sessions_do_not_see_open_transactions(kind: Place, outbox: Outbox) -> None:
    """Also where the server's default is READ UNCOMMITTED."""
    uncommitted = "?init_command=SET SESSION tx_isolation='READ-UNCOMMITTED'"
    database = from_url(kind.url + uncommitted * (kind.dialect.name == "mariadb"))
    with closing(database.open()) as session, closing(kind.connect()) as connection:
        outbox.add(connection, message("a"))
        found = [session.execute(Query("SELECT COUNT(*) FROM txbroker_outbox")).rows[0][0]]
        connection.commit()
        found += [session.execute(Query("SELECT COUNT(*) FROM txbroker_outbox")).rows[0][0]]
    assert found == [0, 1]


def test_selection_leaves_out_only_the_unit_at_its_end(kind: Place, outbox: Outbox) -> None:
    """On SQLite triggers of a capture write rows of one unit among those of `add`."""
    with kind.transaction() as connection:
        for unit in ("c", "u1", "c", "c", "u2", "c", "c", "u3", "c"):
            sql = "INSERT INTO txbroker_outbox (topic, unit) VALUES ('payments', '%s')"
            run(connection, sql % unit)
    with closing(kind.database.open()) as session:
        found = [steps(WaitingRows(kind.dialect).select(n), session.execute) for n in (7, 2, 100)]
    kept = [("".join(row.unit for row in each.rows), each.longer) for each in found]
    if kind.dialect.name == "sqlite":
        assert kept == [("cu1ccu2", False), ("c", False), ("cu1ccu2ccu3c", False)]
    else:
        assert kept == [("cccccc", False), ("cc", True), ("cu1ccu2ccu3c", False)]


# --- scheme 1 --------------------------------------------------------------------------------


def test_block_is_one_transaction(kind: Place, outbox: Outbox) -> None:
    for open_ in (kind.connect, lambda: autocommitting(kind)):
        with closing(open_()) as connection:
            with outbox.transaction(connection, message("a"), message("b")) as prepared:
                order(connection, "42")
                inside = run(connection, "SELECT state FROM txbroker_outbox")
                assert inside == [("UNKNOWN",)] * 2
                assert rows(kind) == [] or kind.level == "read uncommitted"
            assert states(kind) == [(WAITING, b"a"), (WAITING, b"b")]
            assert [row.id for row in rows(kind)] == list(prepared.ids)
            assert orders(kind) == ["42"]
            fail_in_block(outbox, connection)
            connection.rollback()
        assert (len(rows(kind)), orders(kind)) == (2, ["42"])
        for table in ("orders", "txbroker_outbox"):
            kind.execute(f"DELETE FROM {table}")


def fail_in_block(outbox: Outbox, connection: Any) -> None:
    def act() -> None:
        with outbox.transaction(connection, message("never")):
            order(connection, "never")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        act()


def test_block_joins_an_open_transaction(kind: Place, outbox: Outbox) -> None:
    with kind.transaction() as connection:
        order(connection, "1")
        with outbox.transaction(connection, message("a")):
            fail_in_block(outbox, connection)
            with outbox.transaction(connection, message("c")):
                order(connection, "2")
        outbox.add(connection, message("d"))
        assert rows(kind) == []
    assert (states(kind), orders(kind)) == (
        [(WAITING, key) for key in (b"a", b"c", b"d")],
        ["1", "2"],
    )
    assert len({row.unit for row in rows(kind)}) == 1


def test_block_that_ends_its_transaction_is_reported(kind: Place, outbox: Outbox) -> None:
    with (
        closing(kind.connect()) as connection,
        pytest.raises(ConfigurationError, match=r"block of outbox\.transaction has committed or"),
        outbox.transaction(connection, message("a")),
    ):
        connection.rollback()
    assert rows(kind) == []


# --- scheme 3 --------------------------------------------------------------------------------


def test_prepared_rows_are_decided(kind: Place, outbox: Outbox) -> None:
    committed, final, rolled_back = (
        outbox.prepare(message(f"{name}1"), message(f"{name}2", "stock")) for name in "abc"
    )
    with kind.transaction() as connection:
        outbox.add(connection, message("between"))
    assert [row.state for row in rows(kind)] == ["UNKNOWN"] * 6 + [WAITING]
    with closing(kind.connect()) as connection:
        for _ in range(2):  # the same decision again
            outbox.decide(connection, final, COMMIT, [message("b3"), message("b4", "stock")])
            outbox.decide(connection, str(committed), COMMIT)
            outbox.decide(connection, pickle.loads(pickle.dumps(rolled_back)), ROLLBACK)
            order(connection, "42")
            connection.commit()
        with pytest.raises(TooLate, match=r"LOCAL_COMMIT.*rollback is too late\. Roll"):
            outbox.decide(connection, committed, ROLLBACK)
        with pytest.raises(TooLate, match=r"LOCAL_ROLLBACK.*commit is too late"):
            outbox.decide(connection, rolled_back, COMMIT)
    keys = [(row.state, row.key.decode(), row.topic) for row in rows(kind)]
    assert keys == [
        ("LOCAL_ROLLBACK", "c1", "payments"),
        ("LOCAL_ROLLBACK", "c2", "stock"),
        (WAITING, "between", "payments"),
        # In the order of commits, with the messages that the first decision had.
        (WAITING, "b3", "payments"),
        (WAITING, "b4", "stock"),
        (WAITING, "a1", "payments"),
        (WAITING, "a2", "stock"),
    ]
    found = {row.key.decode(): row for row in rows(kind)}
    assert found["b3"].shard == crc32(b"b3") % 16
    assert len({found[key].unit for key in ("b3", "b4", "a1", "a2")}) == 1
    assert found["a1"].unit not in ("", found["between"].unit, found["c1"].unit)


def test_decision_rolls_back_with_its_transaction(kind: Place, outbox: Outbox) -> None:
    prepared = outbox.prepare(message("a"))
    with closing(kind.connect()) as connection:
        outbox.decide(connection, prepared, COMMIT)
        connection.rollback()
        assert states(kind) == [("UNKNOWN", b"a")]
        outbox.decide(connection, prepared, ROLLBACK)
        connection.commit()
    assert states(kind) == [("LOCAL_ROLLBACK", b"a")]


async def test_second_decision_waits_for_the_first(kind: Place, outbox: Outbox) -> None:
    prepared = outbox.prepare(message("a"))
    with closing(kind.connect()) as first:
        outbox.decide(first, prepared, COMMIT)

        def late() -> None:
            with kind.transaction() as connection:
                outbox.decide(connection, prepared, ROLLBACK)

        waiting = await kind.blocked(late)
        first.commit()
        with pytest.raises(TooLate):
            await waiting
    assert states(kind) == [(WAITING, b"a")]


def _missing(place: Place, _id: str) -> None:
    place.execute("DELETE FROM txbroker_outbox")


def _torn(place: Place, id: str) -> None:
    place.execute(f"UPDATE txbroker_outbox SET state = 'LOCAL_ROLLBACK' WHERE id = '{id}'")


def _given_up(place: Place, _id: str) -> None:
    place.execute("UPDATE txbroker_outbox SET state = 'MESSAGE_ERROR', check_attempts = 15")


def _delivered(place: Place, _id: str) -> None:
    place.execute("UPDATE txbroker_outbox SET state = 'GLOBAL_COMMIT'")


CHANGES: dict[str, tuple[Callable[[Place, str], None], str]] = {
    "deleted": (_missing, "is not in txbroker_outbox: it was decided and deleted"),
    "torn": (_torn, "are in states LOCAL_ROLLBACK, UNKNOWN.*outbox show"),
    "given up": (_given_up, ""),
    "delivered": (_delivered, ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_decision_meets_rows_that_others_changed(kind: Place, outbox: Outbox, change: str) -> None:
    prepared = outbox.prepare(message("a"), message("b"))
    act, problem = CHANGES[change]
    act(kind, prepared.ids[1])
    with closing(kind.connect()) as connection:
        if not problem:
            outbox.decide(connection, prepared, COMMIT)
            connection.commit()
            assert {row.state for row in rows(kind)} <= {WAITING, "GLOBAL_COMMIT"}
            return
        with pytest.raises((TooLate, ConfigurationError), match=problem):
            outbox.decide(connection, prepared, COMMIT)


def test_final_messages_must_fit(kind: Place, outbox: Outbox) -> None:
    prepared = outbox.prepare(message("a"), message("b"))
    with closing(kind.connect()) as connection:
        for final in ([message("a")], [message("a"), message("b", "other")]):
            with pytest.raises(BadRequest, match="topics payments, payments of the prepared ones"):
                outbox.decide(connection, prepared, COMMIT, final)
        with pytest.raises(BadRequest, match="there are no messages"):
            outbox.decide(connection, prepared, COMMIT, [])
        connection.rollback()
    assert states(kind) == [("UNKNOWN", b"a"), ("UNKNOWN", b"b")]


# --- connections -----------------------------------------------------------------------------


def _chosen(callers: Mapping[str, Any], ends: tuple[str, ...]) -> list[Any]:
    """Return kind and name of the callers whose names end so."""
    return [
        pytest.param(
            caller.kind, name, id=name, marks=[pytest.mark.full] * (caller.kind != "sqlite")
        )
        for name, caller in callers.items()
        if name.endswith(ends)
    ]


@pytest.fixture
def caller_place(request: pytest.FixtureRequest, tmp_path: Any) -> Place:
    return place_of(request, tmp_path, request.param)


@pytest.mark.parametrize(
    ("caller_place", "name"),
    _chosen(CALLERS, (" unknown", " Connection", " scoped_session", " Django")),
    indirect=["caller_place"],
)
def test_each_kind_of_connection_is_taken(caller_place: Place, name: str) -> None:
    caller = CALLERS[name]
    with emptied(caller_place) as outbox:
        prepared = outbox.prepare(message("a"))
        with caller.inside(caller_place) as connection:
            outbox.decide(connection, prepared, COMMIT)
            outbox.add(connection, message("b"), WHOLE, timeout_s=60)
            with outbox.transaction(connection, message("c")):
                outbox.add(connection, message("d"))
            with pytest.raises(ZeroDivisionError), outbox.transaction(connection, message("e")):
                raise ZeroDivisionError
        assert states(caller_place) == [(WAITING, key) for key in (b"a", b"b", b"42", b"c", b"d")]
        check_whole(rows(caller_place)[2])
        assert len({row.unit for row in rows(caller_place)}) == 1
        with (
            caller.outside(caller_place) as connection,
            pytest.raises(ConfigurationError, match="commits every statement automatically"),
        ):
            outbox.add(connection, message("never"))


@pytest.mark.parametrize(
    ("caller_place", "name"),
    _chosen(ASYNC_CALLERS, (" block", " pool", "Session", "scoped_session")),
    indirect=["caller_place"],
)
async def test_each_kind_of_awaited_connection_is_taken(caller_place: Place, name: str) -> None:
    caller = ASYNC_CALLERS[name]
    with emptied(caller_place) as outbox:
        prepared = await outbox.prepare_async(message("a"))
        async with caller.inside(caller_place) as connection:
            await outbox.decide_async(connection, prepared, COMMIT)
            await outbox.add_async(connection, message("b"), WHOLE, timeout_s=60)
            async with outbox.transaction_async(connection, message("c")):
                await outbox.add_async(connection, message("d"))
            with pytest.raises(ZeroDivisionError):
                async with outbox.transaction_async(connection, message("e")):
                    raise ZeroDivisionError
        assert states(caller_place) == [(WAITING, key) for key in (b"a", b"b", b"42", b"c", b"d")]
        check_whole(rows(caller_place)[2])
        assert len({row.unit for row in rows(caller_place)}) == 1
        async with caller.outside(caller_place) as connection:
            with pytest.raises(ConfigurationError, match="commits every statement automatically"):
                await outbox.add_async(connection, message("never"))


@pytest.mark.parametrize("begun", [False, True])
def test_sqlalchemy_block_rolls_back_with_the_session(tmp_path: Any, begun: bool) -> None:
    """SQLAlchemy begins SQLite's transaction late: the end of a savepoint would commit."""
    from sqlalchemy import create_engine, text
    from sqlalchemy.orm import Session

    place = place_of(None, tmp_path, "sqlite")  # type: ignore[arg-type]
    with emptied(place) as outbox, Session(create_engine(place.url)) as session:
        if begun:
            session.execute(text("SELECT 1"))
            with outbox.transaction(session, message("a")):
                session.execute(text("INSERT INTO orders VALUES ('1')"))
            session.rollback()
            assert (rows(place), orders(place)) == ([], [])
        with outbox.transaction(session, message("b")):
            session.execute(text("INSERT INTO orders VALUES ('2')"))
        session.commit()
        assert (states(place), orders(place)) == ([(WAITING, b"b")], ["2"])
        session.bind.dispose()  # type: ignore[union-attr]


async def test_writers_in_threads_have_own_units(kind: Place, outbox: Outbox) -> None:
    def write(worker: int) -> None:
        with closing(kind.connect()) as connection:
            for number in range(5):
                for part in range(2):
                    outbox.add(connection, message(f"{worker}-{number}-{part}"))
                connection.commit()

    await asyncio.gather(*(asyncio.to_thread(write, worker) for worker in range(4)))
    units: dict[str, set[str]] = {}
    for row in rows(kind):
        units.setdefault(row.unit, set()).add(row.key.decode().rpartition("-")[0])
    assert (len(units), {len(keys) for keys in units.values()}) == (20, {1})
    await until(lambda: len(rows(kind)) == 40)
