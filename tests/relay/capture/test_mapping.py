"""Mapping files, and the records that they make of changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from txbroker.core.records import Message
from txbroker.errors import ConfigurationError
from txbroker.relay.capture.changes import Change, Emitted, TransactionInfo
from txbroker.relay.capture.mapping import TableMappings, read

INFO = TransactionInfo("0/16B3748", 1700, {"kind": "postgresql", "database": "shop"}, 1699)
ROW = {"id": 7, "item": "shoe", "price": "1.50", "payload": "aGk="}


def mapped(tmp_path: Path, table: str = "") -> TableMappings:
    """Return the mapping of table public.orders with key `id`."""
    file = tmp_path / "capture.toml"
    file.write_text(
        f'name = "shop"\ndatabase = "postgresql://u@h/shop"\n'
        f'[[tables]]\ntable = "orders"\ntopic = "topic"\n{table}\n'
    )
    return read(file).with_keys({("public", "orders"): ("id",)})


def change(operation: Any, **values: Any) -> Change:
    """Return a change of table public.orders."""
    return Change("public", "orders", operation, **values)


def only(mapping: TableMappings, given: Change | Emitted) -> Message:
    """Return the single message of a change, number 3 of its transaction."""
    (message,) = mapping.messages(INFO, 3, given)
    return message


def test_envelope_has_operation_rows_time_and_source(tmp_path: Path) -> None:
    message = only(
        mapped(tmp_path, "before = true"),
        change("update", before=ROW, after={**ROW, "item": "boot"}, unchanged=("photo",)),
    )
    assert (message.topic, message.key) == ("topic", b'{"id":7}')
    assert msgspec.json.decode(message.value or b"") == {
        "operation": "update",
        "before": ROW,
        "after": {**ROW, "item": "boot"},
        "time_ms": 1700,
        "source": {
            "kind": "postgresql",
            "database": "shop",
            "capture": "shop",
            "schema": "public",
            "table": "orders",
            "transaction": "0/16B3748",
            "number": 3,
        },
        "unchanged": ["photo"],
    }
    assert message.headers == (("txb-installation", b"shop"), ("txb-id", b"0/16B3748@1699/3"))


def test_a_restored_database_does_not_repeat_ids(tmp_path: Path) -> None:
    """A transaction of another history may have the LSN or GTID of one that was delivered."""
    mapping, inserted = mapped(tmp_path), change("insert", after=ROW)
    ids = {
        message.headers[1]
        for mark_ms in (1700, 1701)
        for message in mapping.messages(structs.replace(INFO, mark_ms=mark_ms), 3, inserted)
    }
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("table", "given", "key", "value"),
    [
        ("", change("insert", after=ROW), b'{"id":7}', (None, ROW)),
        ("", change("update", before=ROW, after=ROW), b'{"id":7}', (None, ROW)),
        ("", change("delete", before=ROW), b'{"id":7}', ({"id": 7}, None)),
        ("", change("delete", key={"id": 7}), b'{"id":7}', ({"id": 7}, None)),
        ("before = true", change("delete", before=ROW), b'{"id":7}', (ROW, None)),
        ("tombstones = true", change("delete", key={"id": 7}), b'{"id":7}', None),
        ('key = "item"', change("insert", after=ROW), b"shoe", (None, ROW)),
        ('key = "id"', change("insert", after=ROW), b"7", (None, ROW)),
        (
            'key = ["item", "id"]',
            change("insert", after=ROW),
            b'{"item":"shoe","id":7}',
            (None, ROW),
        ),
        ('column = "item"', change("insert", after=ROW), b'{"id":7}', b"shoe"),
        ('column = "id"', change("insert", after=ROW), b'{"id":7}', b"7"),
        ('column = "payload"\nbinary = true', change("insert", after=ROW), b'{"id":7}', b"hi"),
        ('column = "item"', change("delete", before=ROW), b'{"id":7}', None),
        ('operations = ["truncate"]', change("truncate"), None, (None, None)),
    ],
)
def test_table_entry_decides_key_and_value(
    tmp_path: Path, table: str, given: Change, key: bytes | None, value: Any
) -> None:
    message = only(mapped(tmp_path, table), given)
    assert message.key == key
    if isinstance(value, tuple):
        envelope = msgspec.json.decode(message.value or b"")
        assert (envelope["before"], envelope["after"]) == value
    else:
        assert message.value == value


@pytest.mark.parametrize(
    "old", [{"before": {**ROW, "id": 6}}, {"key": {"id": 6}}], ids=["row", "key"]
)
def test_changed_key_is_a_delete_and_an_insert(tmp_path: Path, old: dict[str, Any]) -> None:
    deleted, inserted = mapped(tmp_path).messages(INFO, 3, change("update", after=ROW, **old))
    assert (deleted.key, inserted.key) == (b'{"id":6}', b'{"id":7}')
    assert b'"operation":"delete","before":{"id":6}' in (deleted.value or b"")
    assert b'"operation":"insert","before":null' in (inserted.value or b"")
    assert [each.headers[1][1] for each in (deleted, inserted)] == [
        b"0/16B3748@1699/3/old",
        b"0/16B3748@1699/3",
    ]


def test_a_new_key_without_large_columns_is_refused_unless_accepted(tmp_path: Path) -> None:
    """On a compacted topic no record of the new key would have them."""
    lacking = change("update", key={"id": 6}, after={"id": 7}, unchanged=("photo", "text"))
    with pytest.raises(ConfigurationError, match=r"large columns photo, text.*IDENTITY FULL"):
        mapped(tmp_path).messages(INFO, 3, lacking)
    accepting = mapped(tmp_path, 'accept = ["unchanged"]')
    assert len(accepting.messages(INFO, 3, lacking)) == 2
    kept = change("update", key={"id": 7}, after={"id": 7}, unchanged=("photo",))
    assert len(mapped(tmp_path).messages(INFO, 3, kept)) == 1


def test_headers_are_texts_and_columns(tmp_path: Path) -> None:
    mapping = mapped(
        tmp_path, 'headers = { kind = "é" }\nheader_columns = { item = "item", n = "id" }'
    )
    expected = (("kind", "é".encode()), ("item", b"shoe"), ("n", b"7"))
    for given in (change("insert", after=ROW), change("delete", before=ROW)):
        assert only(mapping, given).headers[2:] == expected
    deleted = only(mapping, change("delete", key={"id": 7}))
    assert deleted.headers[3:] == (("item", None), ("n", b"7"))


@pytest.mark.parametrize("operation", ["insert", "update", "delete", "truncate"])
def test_other_operations_and_tables_are_left_out(tmp_path: Path, operation: Any) -> None:
    others = {"insert", "update", "delete", "truncate"} - {operation}
    mapping = mapped(tmp_path, f"operations = {sorted(others)}")
    assert not mapping.messages(INFO, 0, change(operation, before=ROW, after=ROW))
    assert not mapping.messages(INFO, 0, Change("public", "stock", "insert", after=ROW))


def test_emitted_messages_become_records(tmp_path: Path) -> None:
    content = msgspec.json.encode(
        [
            {"topic": "t", "key": "k", "value": "v", "headers": {"h": "x"}},
            {"topic": "t", "value": None},
        ]
    )
    first, second = mapped(tmp_path).messages(INFO, 3, Emitted(content))
    assert (first.topic, first.key, first.value) == ("t", b"k", b"v")
    assert first.headers == (
        ("txb-installation", b"shop"),
        ("txb-id", b"0/16B3748@1699/3"),
        ("h", b"x"),
    )
    assert second.headers[1] == ("txb-id", b"0/16B3748@1699/3/1")
    with pytest.raises(ConfigurationError, match="invalid messages with pg_logical_emit_message"):
        mapped(tmp_path).messages(INFO, 3, Emitted(b"{}"))


@pytest.mark.parametrize(
    ("table", "given", "sentence"),
    [
        ('column = "gone"', change("insert", after=ROW), "has no column 'gone'"),
        ('key = ["gone"]', change("insert", after=ROW), "has no column 'gone'"),
        ('header_columns = { h = "gone" }', change("insert", after=ROW), "has no column 'gone'"),
        (
            'column = "price"\nbinary = true',
            change("insert", after=ROW),
            "'price' of public.orders is not binary",
        ),
    ],
)
def test_change_that_does_not_fit_stops_the_capture(
    tmp_path: Path, table: str, given: Change, sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        mapped(tmp_path, table).messages(INFO, 0, given)


# --- faults of files -------------------------------------------------------------------------

TABLE = '[[tables]]\ntable = "orders"\ntopic = "t"\n'


def to(topic: str) -> str:
    return TABLE.replace('"t"', f'"{topic}"')


TOP = 'name = "shop"\ndatabase = "postgresql://u@h/shop"\n'


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("name = ", ["is not TOML"]),
        (
            f"{TOP}topicprefix = 'x'\n{TABLE}",
            ["no key 'topicprefix': did you mean 'topic_prefix'?"],
        ),
        (f"{TOP}{TABLE}keys = ['id']", ["tables, number 1 (orders): there is no key 'keys'"]),
        (f"{TOP}{TABLE}operations = ['merge']", ["Invalid enum value 'merge'"]),
        (f"{TOP}[[tables]]\ntable = 'orders'", ["it lacks the required field `topic`"]),
        (TOP, ["nothing is captured"]),
        (
            f"name = 'My Shop'\n{TABLE}",
            ["name 'My Shop': use 1 to 40 lowercase", "no database: add database"],
        ),
        (f"{TOP}{TABLE}{TABLE.replace('orders', 'public.orders')}", ["it is mapped twice"]),
        (f"{TOP}{TABLE}key = []", ["key names no column"]),
        (f"{TOP}{TABLE}key = ['id', 'id']", ["key names a column twice"]),
        (f"{TOP}{TABLE}operations = []", ["operations is empty"]),
        (f"{TOP}{TABLE}binary = true", ["binary is for a single column"]),
        (f"{TOP}{TABLE}column = 'a'\nbefore = true", ["before is for whole rows"]),
        (f"{TOP}{TABLE}headers = {{ txb-id = 'x' }}", ["names with 'txb-' are txbroker's"]),
        (f"{TOP}{to('a b')}", ["topic 'a b'"]),
        (f"{TOP}{to('txbroker.op')}", ["topic txbroker.op is txbroker's own: it is no target"]),
        (f"{TOP}topic_prefix = 'x'\n{to('x.relay')}", ["topic x.relay is txbroker's own"]),
    ],
)
def test_faults_of_a_file_are_sentences(
    tmp_path: Path, text: str, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TXBROKER_DATABASE_URL", raising=False)
    file = tmp_path / "capture.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as raised:
        read(file)
    for sentence in [str(file), *sentences]:
        assert sentence in str(raised.value)


def test_database_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TXBROKER_DATABASE_URL", "mariadb://u@h/shop")
    file = tmp_path / "capture.toml"
    file.write_text(f'name = "shop"\n{TABLE}')
    (table,) = read(file).tables
    assert (table.schema, table.table, table.key) == ("shop", "orders", ())
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read(tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [({}, "does not exist"), ({("public", "orders"): ()}, r'no primary key: .*key = \["id"\]')],
)
def test_table_without_a_key_is_refused(
    tmp_path: Path, keys: dict[tuple[str, str], tuple[str, ...]], sentence: str
) -> None:
    file = tmp_path / "capture.toml"
    file.write_text(f"{TOP}{TABLE}")
    with pytest.raises(ConfigurationError, match=sentence):
        read(file).with_keys(keys)
