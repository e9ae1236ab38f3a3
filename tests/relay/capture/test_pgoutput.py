"""Messages of pgoutput, made by hand: what they become, and that rubbish is one clean error."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.core.core_fuzz import fuzz
from txbroker.relay.capture.changes import Change
from txbroker.relay.capture.pg.pgoutput import (
    Begin,
    CommitMessage,
    Decoder,
    LogicalMessage,
    PgoutputError,
    ReplicaIdentity,
    TableDescribed,
    lsn_text,
    parse_lsn,
)

OID, OTHER_OID = 16_384, 16_385
TEXT, INT = 25, 23
UNCHANGED = "unchanged"
YEAR_2001_US = 366 * 86_400_000_000
YEAR_2001_MS = 978_307_200_000


def relation(*columns: tuple[str, int], oid: int = OID, table: str = "orders") -> bytes:
    """Return the description of a table whose first column is its key."""
    encoded = b"R" + struct.pack(">I", oid) + b"public\0" + table.encode() + b"\0d"
    encoded += struct.pack(">H", len(columns))
    for number, (name, type_oid) in enumerate(columns):
        encoded += bytes([number == 0]) + name.encode() + b"\0" + struct.pack(">Ii", type_oid, -1)
    return encoded


def values(*given: bytes | str | None) -> bytes:
    """Return a row."""
    encoded = struct.pack(">H", len(given))
    for value in given:
        if isinstance(value, bytes):
            encoded += b"t" + struct.pack(">I", len(value)) + value
        else:
            encoded += b"n" if value is None else b"u"
    return encoded


def change(kind: bytes, *rows: bytes, oid: int = OID) -> bytes:
    """Return a change of a row."""
    return kind + struct.pack(">I", oid) + b"".join(rows)


def decoder(*columns: tuple[str, int]) -> Decoder:
    """Return a decoder that knows the table `orders`."""
    made = Decoder([("public", "orders")])
    described = made.decode(relation(*(columns or (("id", INT), ("item", TEXT)))))
    assert described == TableDescribed(*OF_ORDERS, ReplicaIdentity(False, frozenset({"id"})))
    return made


ROW = {"id": 7, "item": "book"}
NEW, OLD = b"N" + values(b"7", b"book"), b"O" + values(b"7", b"pen")
OF_ORDERS = ("public", "orders")
MESSAGES: Sequence[tuple[bytes, Any]] = [
    (b"B" + struct.pack(">QqI", 0x116B3748, YEAR_2001_US, 9), Begin(0x116B3748, YEAR_2001_MS, 9)),
    (b"C" + struct.pack(">BQQq", 0, 5, 77, 0), CommitMessage(77)),
    (change(b"I", NEW), Change(*OF_ORDERS, "insert", after=ROW)),
    (change(b"U", NEW), Change(*OF_ORDERS, "update", after=ROW)),
    (
        change(b"U", b"K", values(b"6", None), NEW),
        Change(*OF_ORDERS, "update", after=ROW, key={"id": 6}),
    ),
    (change(b"U", OLD, NEW), Change(*OF_ORDERS, "update", {"id": 7, "item": "pen"}, ROW)),
    (
        change(b"U", b"N", values(b"7", UNCHANGED)),
        Change(*OF_ORDERS, "update", after={"id": 7}, unchanged=("item",)),
    ),
    (
        change(b"U", OLD, b"N", values(b"8", UNCHANGED)),
        Change(*OF_ORDERS, "update", {"id": 7, "item": "pen"}, {"id": 8, "item": "pen"}),
    ),
    (change(b"D", b"K", values(b"7", None)), Change(*OF_ORDERS, "delete", key={"id": 7})),
    (change(b"D", OLD), Change(*OF_ORDERS, "delete", {"id": 7, "item": "pen"})),
    (b"T" + struct.pack(">IBI", 1, 0, OID), (Change(*OF_ORDERS, "truncate"),)),
    (
        b"M" + struct.pack(">BQ", 1, 99) + b"txbroker\0" + struct.pack(">I", 2) + b"hi",
        LogicalMessage(True, 99, "txbroker", b"hi"),
    ),
    (b"O" + struct.pack(">Q", 1) + b"elsewhere\0", None),
    (b"Y" + struct.pack(">I", 99_999) + b"public\0mood\0", None),
]


@pytest.mark.parametrize(("message", "event"), MESSAGES)
def test_each_kind_of_message(message: bytes, event: Any) -> None:
    assert decoder().decode(b"frame" + message, 5) == event


@pytest.mark.parametrize(
    ("digits", "text", "value"),
    [
        (2, b"-$92,233,720,368,547,758.08", "-92233720368547758.08"),
        (2, b"$0.00", "0.00"),
        (2, b"-$0.05", "-0.05"),
        (0, b"$12.34", "1234"),
        (3, b"-$0.01", "-0.001"),
    ],
)
def test_money_is_a_decimal_with_the_digits_of_the_database(
    digits: int, text: bytes, value: str
) -> None:
    made = Decoder([OF_ORDERS], money_digits=digits)
    made.decode(relation(("id", INT), ("price", 790)))
    event = made.decode(change(b"I", b"N", values(b"1", text)))
    assert isinstance(event, Change)
    assert event.after == {"id": 1, "price": value}


@pytest.mark.parametrize(
    ("type_oid", "text", "reason"),
    [
        (TEXT, b"\xff", "it is not UTF-8"),
        (INT, b"seven", "invalid literal"),
        (16, b"x", "a boolean is t or f"),
        (17, b"raw", "a bytea is not in hex"),
    ],
)
def test_a_value_that_cannot_be_shown_is_a_fault_of_its_change(
    type_oid: int, text: bytes, reason: str
) -> None:
    made = decoder(("id", INT), ("v", type_oid))
    for message, after in ((b"I", {"id": 1, "v": None}), (b"U", {"id": 1, "v": None})):
        event = made.decode(change(message, b"N", values(b"1", text)))
        assert isinstance(event, Change)
        assert event.after == after
        assert event.fault.startswith(f"column v: {reason}")
    old = made.decode(change(b"D", b"O", values(b"1", text)))
    assert isinstance(old, Change)
    assert old.fault


def test_an_unchanged_key_is_taken_from_the_old_one() -> None:
    event = decoder().decode(change(b"U", b"K", values(b"7", None), b"N", values(UNCHANGED, b"x")))
    assert event == Change(*OF_ORDERS, "update", after={"id": 7, "item": "x"}, key={"id": 7})


def test_tables_that_are_not_wanted_are_not_decoded() -> None:
    made = decoder()
    made.decode(relation(("id", INT), oid=OTHER_OID, table="other"))
    assert made.decode(change(b"I", b"rubbish", oid=OTHER_OID)) is None
    assert made.partitions == {}


TYPE = b"Y" + struct.pack(">I", 99_999) + b"public\0mood\0"


@pytest.mark.parametrize(
    ("between", "partition"), [([], True), ([TYPE], True), ([change(b"I", NEW)], False)]
)
def test_a_partition_is_described_after_its_table(between: list[bytes], partition: bool) -> None:
    made = Decoder([OF_ORDERS], partitioned=[OF_ORDERS])
    for each in (relation(("id", INT), ("item", TEXT)), *between):
        made.decode(each)
    event = made.decode(relation(("id", INT), oid=OTHER_OID, table="other"))
    assert (event is not None) == partition
    assert made.partitions == ({OTHER_OID: OF_ORDERS} if partition else {})
    assert made.decode(change(b"I", b"rubbish", oid=OTHER_OID)) is None
    truncate = b"T" + struct.pack(">IBII", 2, 0, OTHER_OID, OID)
    assert made.decode(truncate) == (Change(*OF_ORDERS, "truncate"),)
    assert made.partitions == {}


def test_a_table_that_is_described_again_has_other_columns() -> None:
    made = decoder()
    made.decode(relation(("id", INT), ("colour", TEXT)))
    event = made.decode(change(b"I", b"N", values(b"1", b"red")))
    assert event == Change(*OF_ORDERS, "insert", after={"id": 1, "colour": "red"})


@fuzz
@given(st.binary(max_size=60))
@example(b"")
@example(b"I")
@example(b"S\0\0\0\1")
@example(change(b"I", b"N", values(b"7")))
@example(change(b"I", b"N", values(b"seven", b"book")))
@example(change(b"I", b"N", values(b"7", b"\xff")))
@example(change(b"I", b"N", struct.pack(">H", 2) + b"t\0\0\0\1" + b"7b\0\0\0\1x"))
def test_rubbish_is_one_clean_error(rubbish: bytes) -> None:
    try:
        decoder().decode(rubbish)
    except PgoutputError:
        return
    assert rubbish[:1] in b"BCDIMORTUY"


@fuzz
@given(st.sampled_from([message for message, _ in MESSAGES if message[:1] not in b"OY"]), st.data())
def test_no_part_of_a_message_is_taken_for_it(message: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(message) - 1))
    longer = data.draw(st.binary(min_size=1, max_size=5))
    for wrong in (message[:cut], message + longer):
        with pytest.raises(PgoutputError):
            decoder().decode(wrong)


@given(st.integers(0, 2**64 - 1))
def test_positions_are_written_as_postgresql_does(lsn: int) -> None:
    assert parse_lsn(lsn_text(lsn)) == lsn


def test_positions_that_are_none_are_refused() -> None:
    for text in ("", "16B3748", "0/x"):
        with pytest.raises(ValueError, match=r"LSN|invalid"):
            parse_lsn(text)
