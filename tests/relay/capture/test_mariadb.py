"""MariaDB's binary log as a source: whole transactions, positions, types, what stops it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from tests.kit.until import DEADLINE_S, until
from tests.relay.capture.deliveries import read, read_until
from tests.relay.capture.maria_world import MariaWorld
from txbroker.databases.database import DatabaseUnavailable
from txbroker.door.placing import Refusal
from txbroker.errors import ConfigurationError
from txbroker.relay.capture import mariadb
from txbroker.relay.capture.setup import StepState, refusals
from txbroker.relay.source import DeliveryRefused

pytestmark = pytest.mark.full
LARGE = 100_000


# --- transactions ----------------------------------------------------------------------------


async def test_transactions_are_whole_and_in_the_order_of_commits(maria: MariaWorld) -> None:
    await maria.capture.apply()
    with closing(maria.connect()) as early, closing(maria.connect()) as late:
        for connection in (early, late):
            connection.begin()
        early.query("INSERT INTO orders VALUES (1, 'early')")
        late.query("INSERT INTO orders VALUES (2, 'late')")
        early.query("INSERT INTO other VALUES (1)")
        early.query("SAVEPOINT s")
        early.query("INSERT INTO orders VALUES (3, 'savepoint')")
        early.query("ROLLBACK TO s")
        late.commit()
        early.query("UPDATE orders SET item = 'end' WHERE id = 1")
        early.commit()
        late.begin()
        late.query("INSERT INTO orders VALUES (4, 'never')")
        late.rollback()
    maria.execute("UPDATE orders SET id = 5 WHERE id = 1", "DELETE FROM orders WHERE id = 2")
    maria.execute("TRUNCATE /* all */ orders")
    taken = await read_until(await maria.source(), 7)
    assert taken.changes == [
        ("insert", 2, "late"),
        ("insert", 1, "early"),
        ("update", 1, "end"),
        ("delete", 1, None),
        ("insert", 5, "end"),
        ("delete", 2, None),
        ("truncate", None, None),
    ]
    places = [each.partition("/")[0] for each in taken.ids]
    assert places[1] == places[2]
    assert len(set(taken.ids)) == 7
    assert taken.values[2]["before"] == {"id": 1, "item": "early"}
    assert taken.values[0]["source"] == {
        "kind": "mariadb",
        "capture": maria.name,
        "schema": maria.database,
        "table": "orders",
        "transaction": places[0].partition("@")[0],
        "number": 0,
    }


async def test_every_position_of_several_domains_resumes_there(maria: MariaWorld) -> None:
    source = await maria.started()
    positions, ids = [], []
    for number in range(6):
        maria.admin(
            f"SET gtid_domain_id = {number % 3 * 7}",
            f"INSERT INTO orders VALUES ({number}, 'x')",
            f"INSERT INTO {maria.database}.other VALUES (1)",
        )
        taken = await read_until(source, 1)
        positions.append(taken.position)
        ids += taken.ids
    gtids = json.loads(positions[-1])["gtids"]
    assert {each.split("-")[0] for each in gtids.split(",")} >= {"0", "7", "14"}
    for number, position in enumerate(positions[:-1], 1):
        again = await read_until(await maria.source(position), 6 - number)
        assert again.ids == ids[number:]
        assert maria.capture.database.dialect.name == "mariadb"


async def test_position_moves_on_without_captured_changes(maria: MariaWorld) -> None:
    source = await maria.started()
    maria.execute("INSERT INTO other VALUES (1)", "CREATE TABLE further (id INT)")
    includes_all = await maria.capture.end()

    async def reached() -> bool:
        taken = await read(source, empty=True)
        assert taken.ids == []
        return includes_all(taken.position)

    await until(reached)
    maria.execute(f"INSERT INTO orders VALUES (1, '{'x' * 2000}')")
    assert await source.lag_bytes() > 2000


async def test_schema_changes_apply_to_the_rows_after_them(maria: MariaWorld) -> None:
    source = await maria.started()
    maria.execute(
        "INSERT INTO orders VALUES (1, 'a')",
        "ALTER TABLE orders ADD COLUMN price DECIMAL(10, 2) FIRST",
        "INSERT INTO orders VALUES (1.5, 2, 'b')",
        "ALTER TABLE orders CHANGE item name TEXT",
        "INSERT INTO orders VALUES (1.5, 3, 'c')",
    )
    assert [each["after"] for each in (await read_until(source, 3)).values] == [
        {"id": 1, "item": "a"},
        {"price": "1.50", "id": 2, "item": "b"},
        {"price": "1.50", "id": 3, "name": "c"},
    ]


async def test_large_transaction_is_one_delivery_in_bounded_memory(
    maria: MariaWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 4 << 20
    monkeypatch.setattr(mariadb, "_WAITING_BYTES_MAX", bound)
    await maria.capture.apply()
    maria.execute(
        f"INSERT INTO orders SELECT seq, 'some text' FROM seq_1_to_{LARGE}",
        "INSERT INTO orders VALUES (0, 'next')",
    )
    source = await maria.source()
    before = await source.next()  # of other tables: the position has passed them
    assert [list(piece) async for piece in before.pieces()] == [[]]
    delivery = await source.next()
    reader = source._reader
    assert reader is not None
    await until(lambda: reader._size >= bound)
    ids, pieces, size = [], 0, 0
    async for piece in delivery.pieces():
        ids += [message.headers[1][1] for message in piece]
        pieces, size = pieces + 1, max(size, reader._size)
    assert len(ids) == len(set(ids)) == LARGE
    assert pieces > 10
    assert size < bound + 2 * mariadb.PIECE_BYTES
    assert (await read(source)).changes == [("insert", 0, "next")]


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_restarted_server_is_read_on_at_the_position(maria: MariaWorld, end: str) -> None:
    source = await maria.started()
    maria.execute("INSERT INTO orders VALUES (1, 'a')")
    position = (await read_until(source, 1)).position
    maria.execute("INSERT INTO orders VALUES (2, 'b')")
    getattr(maria.server, end)()

    async def lost() -> bool:
        try:
            await read(source)
        except DatabaseUnavailable:
            return True
        return False

    await until(lost)
    with pytest.raises(DatabaseUnavailable):
        await source.resume(position)
    maria.server.start()
    # The server gives numbers of tables again.
    maria.execute("CREATE TABLE more (x TEXT, y TEXT)", "ALTER TABLE orders ADD COLUMN z INT FIRST")
    maria.execute("INSERT INTO more VALUES ('x', 'y')", "INSERT INTO orders VALUES (9, 3, 'c')")
    await source.resume(position)
    assert (await read_until(source, 2)).changes == [("insert", 2, "b"), ("insert", 3, "c")]


async def test_refused_message_stops_the_delivery(maria: MariaWorld) -> None:
    source = await maria.started()
    maria.execute("INSERT INTO orders VALUES (1, 'a')")
    delivery = await source.next()
    (messages,) = [piece async for piece in delivery.pieces()]
    with pytest.raises(DeliveryRefused, match=r"too large.*run with --skip [\d-]+/0$") as caught:
        await source.refused(delivery, [Refusal(0, messages[0], "too large")])
    maria.execute("INSERT INTO orders VALUES (2, 'b')")
    change_id = str(caught.value).rpartition(" ")[2]
    taken = await read_until(await maria.source(None, skip=[change_id]), 1)
    assert taken.changes == [("insert", 2, "b")]


# --- what stops a capture --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("binlog_format", "MIXED", "ROW"),
        ("binlog_row_image", "MINIMAL", "FULL"),
        ("binlog_row_metadata", "MINIMAL", "FULL"),
        ("log_bin_compress", "ON", "OFF"),
    ],
)
async def test_wrong_setting_is_refused_with_its_correction(
    maria: MariaWorld, name: str, wrong: str, right: str
) -> None:
    maria.admin(f"SET GLOBAL {name} = {wrong}")
    try:
        (refused,) = [
            each for each in await maria.capture.plan() if each.state is StepState.REFUSED
        ]
        with pytest.raises(ConfigurationError, match=f"{name} is .*, not {right}"):
            await maria.source(b"")
        maria.admin(refused.sql)
        assert (await maria.capture.plan())[-1].state is StepState.TO_DO
    finally:
        maria.admin(f"SET GLOBAL {name} = {right}")


async def test_missing_right_is_refused_with_the_grant(maria: MariaWorld) -> None:
    user = "`txbroker`@`127.0.0.1`"
    maria.admin(f"REVOKE REPLICATION SLAVE ON *.* FROM {user}")
    with pytest.raises(ConfigurationError, match="may not read the binary log: grant it"):
        await maria.source(b"")
    steps = [each for each in await maria.capture.plan() if each.state is StepState.REFUSED]
    maria.admin(steps[0].sql.replace("CURRENT_USER()", user))
    assert {each.state for each in await maria.capture.apply()} == {StepState.DONE, StepState.TO_DO}


async def test_run_without_apply_does_not_guess_the_beginning(maria: MariaWorld) -> None:
    with pytest.raises(ConfigurationError, match="run `txbroker capture apply FILE` first"):
        await maria.source()


async def _left(maria: MariaWorld) -> bytes:
    """Return the position of a capture that has ended after a delivery."""
    source = await maria.started()
    maria.execute("INSERT INTO orders VALUES (1, 'a')")
    position = (await read_until(source, 1)).position
    await source.close()
    return position


def _purge(maria: MariaWorld) -> None:
    maria.admin("FLUSH BINARY LOGS", "INSERT INTO other VALUES (1)", "FLUSH BINARY LOGS")
    deadline_s = time.monotonic() + DEADLINE_S
    while len(logs := maria.admin("SHOW BINARY LOGS")) > 1:  # a reader that left may be in one
        maria.admin(f"PURGE BINARY LOGS TO '{logs[-1][0]}'")
        assert time.monotonic() < deadline_s, logs


def _xa(maria: MariaWorld) -> None:
    maria.execute(
        "XA START 'a'",
        "INSERT INTO orders VALUES (2, 'x')",
        "XA END 'a'",
        "XA PREPARE 'a'",
        "XA ROLLBACK 'a'",
    )


def _undone(maria: MariaWorld) -> None:
    maria.execute(
        "BEGIN",
        "CREATE TEMPORARY TABLE seen (id INT) ENGINE=Aria",
        "INSERT INTO orders VALUES (2, 'x')",
        "INSERT INTO seen VALUES (2)",
        "ROLLBACK",
    )


def _in_session(setting: str) -> Callable[[MariaWorld], None]:
    def change(maria: MariaWorld) -> None:
        maria.admin(f"SET SESSION {setting}", "UPDATE orders SET item = 'y'")

    return change


def _compressed(maria: MariaWorld) -> None:
    maria.admin("SET GLOBAL log_bin_compress = ON")
    try:
        maria.execute("INSERT INTO orders VALUES (2, REPEAT('x', 1000))")
    finally:
        maria.admin("SET GLOBAL log_bin_compress = OFF")


@pytest.mark.parametrize(
    ("cause", "sentence"),
    [
        pytest.param(_purge, "no longer has what follows the position", id="purged"),
        pytest.param(_xa, "XA transaction .* changes .*orders", id="xa"),
        pytest.param(_in_session("binlog_format = STATEMENT"), "as the statement", id="statement"),
        pytest.param(_in_session("binlog_row_image = MINIMAL"), "without all columns", id="image"),
        pytest.param(_compressed, "compressed events", id="compressed"),
    ],
)
async def test_lost_changes_stop_a_capture_unless_gaps_are_skipped(
    maria: MariaWorld, cause: Callable[[MariaWorld], None], sentence: str
) -> None:
    position = await _left(maria)
    cause(maria)
    source = await maria.source(position)
    if cause is _purge:  # the last transaction cannot be compared; that alone is no loss
        await _not_compared(source, position)
    with pytest.raises(ConfigurationError, match=f"{sentence}.*start with on_gap=skip"):
        await read(source)
    source = await maria.source(position, on_gap="skip")
    if cause is _purge:
        await _not_compared(source, position)
    with pytest.raises(DatabaseUnavailable, match=sentence):
        await read(source)
    await source.resume(position)
    maria.execute("INSERT INTO orders VALUES (9, 'after')")
    assert (await read_until(source, 1)).changes == [("insert", 9, "after")]


@pytest.mark.parametrize(
    ("cause", "sentence"),
    [
        pytest.param(_xa, "XA transaction .* changes .*orders", id="xa"),
        pytest.param(_undone, "was rolled back in part", id="rollback"),
    ],
)
async def test_a_transaction_is_left_out_by_its_id(
    maria: MariaWorld, cause: Callable[[MariaWorld], None], sentence: str
) -> None:
    position = await _left(maria)
    cause(maria)
    maria.execute("INSERT INTO orders VALUES (9, 'after')")
    with pytest.raises(ConfigurationError, match=sentence) as error:
        await read_until(await maria.source(position), 1)
    found = re.search(r"run with --skip (\S+?),? ", f"{error.value} ")
    assert found is not None
    source = await maria.source(position, skip=[found[1].rstrip(";,.")])
    taken = await read_until(source, 1)
    assert taken.changes == [("insert", 9, "after")]
    assert source.conversion.left_out["skip"] == 1
    # The position after it can be compared.
    maria.execute("INSERT INTO orders VALUES (10, 'more')")
    assert (await read_until(await maria.source(taken.position), 1)).changes[0][1] == 10


async def _not_compared(source: Any, position: bytes) -> None:
    with pytest.raises(DatabaseUnavailable, match="the last transaction is no longer in the log"):
        await read(source)
    await source.resume(position)


async def test_statements_may_have_variables_that_are_not_known(maria: MariaWorld) -> None:
    """As those of ALTER in two phases; from MariaDB 11.3 on, others have some, too."""
    source = await maria.started()
    maria.execute(
        "SET SESSION binlog_alter_two_phase = 1",
        "ALTER TABLE orders ADD colour TEXT FIRST",
        "INSERT INTO orders VALUES ('red', 1, 'a')",
    )
    taken = await read_until(source, 1)
    assert taken.values[0]["after"] == {"colour": "red", "id": 1, "item": "a"}


async def test_log_that_was_reset_is_noticed_by_another_domain(maria: MariaWorld) -> None:
    """The last transaction was the first of its domain."""
    source = await maria.started()
    maria.admin("SET gtid_domain_id = 7", "INSERT INTO orders VALUES (1, 'a')")
    position = (await read(source)).position
    domains = json.loads(position)["gtids"].split(",")
    maria.admin("RESET MASTER", "SET gtid_domain_id = 7", "INSERT INTO orders VALUES (2, 'b')")
    for n in range(int(domains[0].split("-")[2])):
        maria.execute(f"INSERT INTO orders VALUES ({n + 10}, 'b')")
    with pytest.raises(ConfigurationError, match=r"does not know the position.*was reset"):
        await read_until(await maria.source(position), 99)


@pytest.mark.parametrize("later_s", [0, 1])
async def test_log_that_was_reset_stops_the_capture(maria: MariaWorld, later_s: int) -> None:
    """Its GTIDs begin again, and pass the position."""
    position = await _left(maria)
    last = json.loads(position)
    maria.admin("RESET MASTER")
    number = int(last["last"].split("-")[2])
    at = f"SET timestamp = {last['time_s'] + later_s}"
    for n in range(number + 2):
        maria.execute(at, f"INSERT INTO orders VALUES ({n + 10}, 'b')")
    with pytest.raises(ConfigurationError, match=r"does not know the position.*was reset"):
        await read(await maria.source(position))


@pytest.mark.parametrize(
    "position",
    [
        b'{"gtids":"0-1-999999"}',
        b'{"gtids":"0-77-1"}',
        b'{"gtids":"0-1-1,77-1-1"}',
        b"{}",
        b"0-1-1",
    ],
)
async def test_position_that_the_server_never_had_is_refused(
    maria: MariaWorld, position: bytes
) -> None:
    await maria.capture.apply()

    async def begin() -> None:
        await read(await maria.source(position))

    with pytest.raises(
        ConfigurationError, match=r"does not know the position|is no position of MariaDB"
    ):
        await begin()


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("id INT PRIMARY KEY, t TEXT COMPRESSED", "column t is stored as"),
        ("id INT PRIMARY KEY, e ENUM('é') CHARACTER SET latin1", "names of latin1 in its enum"),
        ("id INT", "has no primary key"),
        ("n INT PRIMARY KEY", "has no column id"),
    ],
)
async def test_table_that_cannot_be_captured_is_refused(
    maria: MariaWorld, table: str, sentence: str
) -> None:
    maria.execute("DROP TABLE orders", f"CREATE TABLE orders ({table})")
    if "no column" in sentence:
        maria.mapping += 'key = ["id"]\n'
    try:
        found = "; ".join(refusals(await maria.capture.plan()))
    except ConfigurationError as error:
        found = str(error)
    assert sentence in found


async def test_readers_of_one_capture_do_not_end_each_other(maria: MariaWorld) -> None:
    first = await maria.started()
    second = await maria.source()
    maria.execute("INSERT INTO orders VALUES (1, 'a')")
    for taken in await asyncio.gather(read_until(first, 1), read_until(second, 1)):
        assert taken.changes == [("insert", 1, "a")]
