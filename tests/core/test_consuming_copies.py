"""Copies of failed messages, their headers, and the identity of messages."""

from __future__ import annotations

import pytest

from txbroker.core.consuming.copies import (
    DEAD_PARTITIONS,
    Failed,
    GroupTopics,
    MessageSource,
    make_copy,
    message_id,
    parse_source,
    read_copy,
    spread,
)
from txbroker.core.records import Header, Record

SOURCE = MessageSource("orders", 3, 42)
RECORD = Record(b"k", b"v", (("trace", b"1"), ("trace", None)), timestamp_ms=5)
PROMOTED: tuple[Header, ...] = (
    ("txb-id", b"tx"),
    ("txb-seq", b"1"),
    ("txb-installation", b"shop"),
)


@pytest.mark.parametrize(
    "failed",
    [
        Failed(SOURCE, 3, 1_764_000_000_000, "ValueError: bug", 15),
        Failed(SOURCE, 1),
        Failed(SOURCE, 1, cause="tränen\n\x00"),
    ],
)
@pytest.mark.parametrize(
    "record", [RECORD, Record(None, None), make_copy(RECORD, Failed(SOURCE, 9))]
)
def test_copy_and_back(record: Record, failed: Failed) -> None:
    copy = make_copy(record, failed)
    names = [name for name, _value in copy.headers[:6]]
    assert names == [
        "txb-source",
        "txb-attempt",
        "txb-step",
        "txb-due",
        "txb-cause",
        "txb-timestamp",
    ]
    assert tuple(copy.headers[6:]) == tuple(record.headers)
    # Retention counts from when the copy is written.
    assert (copy.key, copy.value, copy.timestamp_ms) == (record.key, record.value, -1)
    assert read_copy(copy) == (record, failed)


@pytest.mark.parametrize(
    ("cause", "stored"), [("x" * 2000, "x" * 1000), ("\ud800", "\\ud800"), ("", "")]
)
def test_cause_is_bounded_text(cause: str, stored: str) -> None:
    found = read_copy(make_copy(RECORD, Failed(SOURCE, 1, 0, cause)))
    assert found is not None
    assert found[1].cause == stored


def headers(**changes: bytes | None) -> tuple[Header, ...]:
    values: dict[str, bytes | None] = {
        "source": b"orders/3@42",
        "attempt": b"1",
        "step": b"-1",
        "due": b"0",
        "cause": b"",
        "timestamp": b"0",
    }
    return tuple((f"txb-{name}", value) for name, value in (values | changes).items())


@pytest.mark.parametrize(
    "given",
    [
        (),
        headers()[:5],
        headers()[::-1],
        (("first", b""), *headers()),
        headers(source=None),
        headers(source=b"\xff/3@42"),
        headers(source=b"orders/3@42 "),
        headers(source=b"orders/-3@42"),
        headers(source=b"a/b/3@42"),
        headers(attempt=b""),
        headers(attempt=b"-1"),
        headers(attempt="²".encode()),
        headers(due=b"1e3"),
        headers(due=b"9" * 16),
        headers(due=b"-1"),
        headers(attempt=b"9" * 5000),
        headers(step=b"-2"),
        headers(timestamp=None),
    ],
)
def test_foreign_records_are_no_copies(given: tuple[Header, ...]) -> None:
    assert read_copy(Record(b"k", b"v", given)) is None


def test_cause_of_any_bytes_is_text() -> None:
    found = read_copy(Record(None, None, headers(cause=b"\xff")))
    assert found is not None
    assert found[1].cause == "\ufffd"


@pytest.mark.parametrize(
    ("given", "identity"),
    [
        ((), "orders/3@42"),
        (PROMOTED, "shop/tx/1"),
        (PROMOTED[:1], "/tx/0"),
        ((*PROMOTED, ("txb-id", b"later")), "shop/tx/1"),
        ((("txb-id", None),), "orders/3@42"),
        ((("txb-seq", b"1"),), "orders/3@42"),
        ((("txb-id", b"\xff"),), "/\ufffd/0"),
    ],
)
def test_identity_is_that_of_every_copy(given: tuple[Header, ...], identity: str) -> None:
    assert message_id("orders", 3, 42, given) == identity
    copy = make_copy(Record(None, None, given), Failed(SOURCE, 1))
    assert message_id("txbroker.dead.stock", 0, 7, copy.headers) == identity


@pytest.mark.parametrize("text", ["", "orders", "orders/3", "/3@4", "o/3@x", "o/3@4@5", "o/٣@4"])
def test_no_source(text: str) -> None:
    assert parse_source(text) is None


def test_names_and_spreading() -> None:
    assert GroupTopics.of("tx", "stock") == ("tx.retry.stock", "tx.dead.stock", "tx.aside.stock")
    used = {spread(("orders", number), DEAD_PARTITIONS) for number in range(100)}
    assert used == set(range(DEAD_PARTITIONS))
