"""Capture on SQLite: triggers that write outbox rows in the service's own transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from txbroker.errors import ConfigurationError
from txbroker.relay.capture.plan import open_capture
from txbroker.relay.capture.setup import Step, StepState
from txbroker.relay.capture.triggers import TriggerRelay


class Captured(NamedTuple):
    """A file with table `orders (id, item)`.

    Attributes:
        service: the connection of a service.
        map: writes the mapping file with an entry for table `orders`.
    """

    service: sqlite3.Connection
    map: Callable[..., str]

    def rows(self) -> list[tuple[Any, ...]]:
        """Return topic, key, value, headers of the outbox rows, decoded from JSON."""
        found = self.service.execute(
            "SELECT topic, CAST(message_key AS BLOB), message_value, headers FROM txbroker_outbox "
            "ORDER BY position"
        )
        return [
            (topic, key, value and msgspec.json.decode(value), msgspec.json.decode(headers))
            for topic, key, value, headers in found
        ]

    def triggers(self) -> set[str]:
        """Return the names of all triggers."""
        found = self.service.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
        return {name for (name,) in found}


@pytest.fixture
def captured(tmp_path: Path) -> Iterator[Captured]:
    """A file with a table."""
    file, database = tmp_path / "capture.toml", tmp_path / "shop.db"

    def write(entry: str = "", top: str = "", table: str = "orders") -> str:
        file.write_text(
            f'name = "shop"\ndatabase = "sqlite:///{database}"\n{top}\n'
            f'[[tables]]\ntable = "{table}"\ntopic = "topic"\n{entry}\n'
        )
        return str(file)

    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item)")
        yield Captured(connection, write)


def states(steps: list[Step]) -> list[tuple[str, str]]:
    """Return the state of steps, and the first words of those on triggers."""
    return [(each.state.value, each.text.partition(" trigger")[0]) for each in steps]


def texts(steps: list[Step], state: StepState) -> str:
    """Return the texts of the steps in a state."""
    return "; ".join(each.text for each in steps if each.state is state)


ORDER = {"id": 1, "item": "shoe"}
SOURCE = {"kind": "sqlite", "capture": "shop", "schema": "main", "table": "orders"}


@pytest.mark.parametrize(
    ("entry", "key", "values"),
    [
        ("", b'{"id":1}', [("insert", None, ORDER), ("update", None, {**ORDER, "item": "boot"})]),
        (
            "before = true",
            b'{"id":1}',
            [("insert", None, ORDER), ("update", ORDER, {**ORDER, "item": "boot"})],
        ),
        (
            'operations = ["update"]\nkey = "id"',
            b"1",
            [("update", None, {**ORDER, "item": "boot"})],
        ),
        ('column = "item"', b'{"id":1}', [b"shoe", b"boot"]),
    ],
)
async def test_changes_become_outbox_rows_of_the_same_transaction(
    captured: Captured, entry: str, key: bytes, values: list[Any]
) -> None:
    mapping = captured.map(entry + '\nheaders = { kind = "it\'s" }\nheader_columns = { n = "id" }')
    await open_capture(mapping).apply()
    service = captured.service
    service.execute("INSERT INTO orders VALUES (9, 'never')")
    service.rollback()
    with service:
        service.execute("INSERT INTO orders VALUES (1, 'shoe')")
        service.execute("UPDATE orders SET item = 'boot'")
    found = service.execute(
        "SELECT CAST(message_key AS BLOB), message_value, headers FROM txbroker_outbox"
    )
    rows = [(each, value, msgspec.json.decode(headers)) for each, value, headers in found]
    assert {each for each, _, _ in rows} == {key}
    assert all(headers == [["kind", "it's"], ["n", "1"]] for _, _, headers in rows)
    if isinstance(values[0], bytes):
        assert [value for _, value, _ in rows] == values
    else:
        envelopes = [msgspec.json.decode(value) for _, value, _ in rows]
        assert [(each["operation"], each["before"], each["after"]) for each in envelopes] == values
        assert all(each["source"] == SOURCE and each["time_ms"] > 0 for each in envelopes)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("", {"operation": "delete", "before": {"id": 1}, "after": None}),
        ("before = true", {"operation": "delete", "before": ORDER, "after": None}),
        ("tombstones = true", None),
        ('column = "item"', None),
    ],
)
async def test_delete_and_changed_key(captured: Captured, entry: str, value: Any) -> None:
    await open_capture(captured.map(entry)).apply()
    with captured.service as service:
        service.execute("INSERT INTO orders VALUES (1, 'shoe')")
        service.execute("UPDATE orders SET id = 2")
        service.execute("DELETE FROM orders")
    _inserted, old, new, deleted = captured.rows() if "column" not in entry else _raw(captured)
    assert [each[1] for each in (old, new, deleted)] == [b'{"id":1}', b'{"id":2}', b'{"id":2}']
    kept = old[2] and {name: old[2][name] for name in value}
    assert kept == value
    assert new[2] is not None


def _raw(captured: Captured) -> list[tuple[Any, ...]]:
    return captured.service.execute(
        "SELECT topic, CAST(message_key AS BLOB), message_value FROM txbroker_outbox "
        "ORDER BY position"
    ).fetchall()


async def test_no_value_fails_the_statement_of_the_service(captured: Captured) -> None:
    await open_capture(captured.map('key = "item"\naccept = ["replaced"]')).apply()
    given = ['it\'s "é"\n\0x', b"\x00\xff", 1.5, float("inf"), -float("inf"), 2**63 - 1, None]
    with captured.service as service:
        service.executemany("INSERT INTO orders (item) VALUES (?)", [(each,) for each in given])
    values = [value["after"]["item"] for _, _, value, _ in captured.rows()]
    assert values == [given[0], "00ff", 1.5, "Infinity", "-Infinity", 2**63 - 1, None]


async def test_wide_tables_and_strange_names_are_captured(captured: Captured) -> None:
    names = [f"it's \"{number}" for number in range(200)]
    columns = ", ".join('"' + name.replace('"', '""') + '"' for name in names)
    captured.service.execute("DROP TABLE orders")
    captured.service.execute(
        f'CREATE TABLE "or-ders" ({columns}, g AS (1 + 1), PRIMARY KEY({columns}))'
    )
    await open_capture(captured.map(table="or-ders")).apply()
    with captured.service as service:
        marks = ", ".join("?" * len(names))
        service.execute(f'INSERT INTO "or-ders" VALUES ({marks})', list(range(200)))
    ((_, _, value, _),) = captured.rows()
    assert value["after"] == {**dict(zip(names, range(200), strict=True)), "g": 2}


async def test_rows_of_one_transaction_have_one_unit(captured: Captured) -> None:
    await open_capture(captured.map()).apply()
    service = captured.service
    service.execute("INSERT INTO orders VALUES (1, 'a')")
    file = service.execute("PRAGMA database_list").fetchone()[2]
    with closing(sqlite3.connect(file, timeout=0)) as relay:
        renew = "UPDATE txbroker_relay SET lease_until = lease_until + 1"
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            relay.execute(renew)
        service.execute("INSERT INTO orders VALUES (2, 'b')")
        service.commit()
        with relay:
            relay.execute(renew)
    with service:
        service.execute("INSERT INTO orders VALUES (3, 'c')")
    units = [unit for (unit,) in service.execute("SELECT unit FROM txbroker_outbox")]
    assert units[0] == units[1] != units[2] != ""


async def test_apply_replaces_old_triggers_and_remove_drops_its_own(
    captured: Captured,
) -> None:
    service = captured.service
    service.execute(
        "CREATE TRIGGER txbroker_capture_shopping AFTER DELETE ON orders BEGIN SELECT 1; END"
    )
    capture = open_capture(captured.map("before = true"))
    assert states(await capture.plan())[1:] == [("to do", "create")] * 3
    await capture.apply()
    assert {state for state, _ in states(await capture.plan())} == {"done"}
    service.execute("ALTER TABLE orders ADD COLUMN price")
    assert states(await capture.plan())[1:] == [("to do", "replace")] * 3
    await capture.apply()
    with service:
        service.execute("INSERT INTO orders VALUES (1, 'shoe', 10)")
    assert captured.rows()[0][2]["after"]["price"] == 10
    fewer = open_capture(captured.map('before = true\noperations = ["insert"]'))
    assert states(await fewer.apply())[2:] == [("to do", "drop")] * 2
    assert len(captured.triggers()) == 2
    assert states(await fewer.remove()) == [("done", "drop")]
    assert captured.triggers() == {"txbroker_capture_shopping"}
    assert await fewer.remove() == []
    assert len(captured.rows()) == 1


@pytest.mark.parametrize(
    ("entry", "options", "sentence"),
    [
        ('operations = ["truncate"]', {}, "SQLite has no truncate"),
        ('key = "gone"', {}, "has no column gone"),
        ('column = "gone"', {}, "has no column gone"),
        ("", {"top": "emitted = true"}, "emitted is for PostgreSQL"),
        ("", {"table": "public.orders"}, "public.orders of capture shop does not exist"),
        ("", {"table": "stock"}, "main.stock of capture shop does not exist"),
    ],
)
async def test_mapping_that_does_not_fit_changes_nothing(
    captured: Captured, entry: str, options: dict[str, str], sentence: str
) -> None:
    capture = open_capture(captured.map(entry, **options))
    try:
        found = texts(await capture.apply(), StepState.REFUSED)
    except ConfigurationError as error:
        found = str(error)
    assert sentence in found
    assert captured.triggers() == set()


async def test_replaced_rows_need_consent(captured: Captured) -> None:
    captured.service.execute("CREATE UNIQUE INDEX by_item ON orders (item)")
    for entry, state in (
        ("", StepState.REFUSED),
        ('accept = ["replaced"]', StepState.ACCEPTED),
        ('key = ["item"]', StepState.REFUSED),
    ):
        assert "REPLACE removes" in texts(await open_capture(captured.map(entry)).plan(), state)
    captured.service.executescript(
        "DROP TABLE orders; CREATE TABLE orders (id TEXT COLLATE NOCASE PRIMARY KEY, item)"
    )
    assert "REPLACE removes" in texts(await open_capture(captured.map()).plan(), StepState.REFUSED)
    inserts = open_capture(captured.map('operations = ["insert"]'))
    assert "REPLACE" not in texts(await inserts.plan(), StepState.REFUSED)


async def test_triggers_fire_for_cascades_and_attached_files(captured: Captured) -> None:
    service = captured.service
    service.execute("PRAGMA foreign_keys = ON")
    service.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY)")
    service.execute("ALTER TABLE orders ADD customer REFERENCES customers ON DELETE CASCADE")
    await open_capture(captured.map()).apply()
    file = service.execute("PRAGMA database_list").fetchone()[2]
    with closing(sqlite3.connect(":memory:")) as other:
        other.execute("ATTACH ? AS shop", (file,))
        with other:
            other.execute("INSERT INTO shop.customers VALUES (7)")
            other.execute("INSERT INTO shop.orders VALUES (1, 'shoe', 7)")
    with service:
        service.execute("DELETE FROM customers")
    assert [value["operation"] for _, _, value, _ in captured.rows()] == ["insert", "delete"]


async def test_text_that_is_not_utf8_is_no_message(captured: Captured) -> None:
    """It is text in the outbox, which the relay sets aside, never bytes that are no JSON."""
    await open_capture(captured.map()).apply()
    with captured.service as service:
        service.execute("INSERT INTO orders VALUES (1, CAST(X'C3' AS TEXT))")
    ((kind,),) = service.execute("SELECT typeof(message_value) FROM txbroker_outbox").fetchall()
    assert kind == "text"
    with pytest.raises(sqlite3.OperationalError, match="UTF-8"):
        captured.rows()


async def test_a_table_that_is_built_again_ends_the_relay(captured: Captured) -> None:
    capture = open_capture(captured.map())
    await capture.apply()
    relay = TriggerRelay(capture, "127.0.0.1:1", check_s=0.01)
    await relay.check()
    captured.service.executescript(
        "CREATE TABLE new (id INTEGER PRIMARY KEY, item); INSERT INTO new SELECT * FROM orders; "
        "DROP TABLE orders; ALTER TABLE new RENAME TO orders"
    )
    with pytest.raises(ConfigurationError, match=r"create trigger .*capture apply"):
        await relay._checks()


async def test_outbox_tables_of_another_version_are_refused(captured: Captured) -> None:
    capture = open_capture(captured.map())
    await capture.apply()
    with captured.service as service:
        service.execute("UPDATE txbroker_relay SET version = 99")
    assert "version" in texts(await capture.plan(), StepState.REFUSED)
