"""Set-aside keys follow from the records of the aside topic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from txbroker.core.consuming.aside import (
    AsideKey,
    AsideKeys,
    clearance_record,
    failed_again_record,
    release_record,
    staged_record,
)
from txbroker.core.consuming.copies import Failed, MessageSource, make_copy
from txbroker.core.records import Record

MINE = ("orders", 3)


def source(offset: int, partition: int = 3) -> MessageSource:
    return MessageSource("orders", partition, offset)


def copy(key: bytes | None, offset: int, partition: int = 3) -> Record:
    return make_copy(Record(key, b"v"), Failed(source(offset, partition), 3))


def release(key: bytes | None, offset: int = 0, partition: int = 3) -> Record:
    return release_record(source(offset, partition), key, "checked")


def clear(key: bytes | None, offset: int, count: int) -> Record:
    return clearance_record(source(offset), key, count)


def staged(key: bytes | None, offset: int) -> Record:
    return staged_record(source(offset), key)


@pytest.mark.parametrize(
    ("records", "keys"),
    [
        ([], {}),
        ([copy(b"a", 5), copy(b"b", 6), copy(b"a", 7)], {b"a": (100, 2), b"b": (101, 1)}),
        ([copy(b"a", 5, partition=4), copy(b"b", 6)], {b"b": (101, 1)}),
        ([copy(b"a", 5), release(b"a")], {b"a": (100, 1, -1, True)}),
        ([copy(b"a", 5), release(b"a", partition=4), release(b"b")], {b"a": (100, 1)}),
        ([release(b"a"), copy(b"a", 5)], {b"a": (101, 1)}),
        ([copy(b"a", 5), copy(b"a", 7), clear(b"a", 5, 1)], {b"a": (100, 1, 5)}),
        ([copy(b"a", 5), copy(b"a", 7), *[clear(b"a", 5, 1)] * 2], {b"a": (100, 1, 5)}),
        ([copy(b"a", 5), clear(b"a", 5, 1)], {}),
        ([copy(b"a", 5), clear(b"a", 5, 1), copy(b"a", 9)], {b"a": (102, 1)}),
        (
            [copy(b"a", 5), release(b"a"), failed_again_record(source(5), b"a")],
            {b"a": (100, 1, -1, False, set(), 1)},
        ),
        ([copy(b"a", 5), staged(b"a", 5), staged(b"b", 5)], {b"a": (100, 1, -1, False, {5})}),
        (
            [copy(b"a", 5), copy(b"a", 7), staged(b"a", 5), staged(b"a", 7), clear(b"a", 5, 1)],
            {b"a": (100, 1, 5, False, {7})},
        ),
        ([copy(None, 5), copy(None, 6), release(None, 5)], {5: (100, 1, -1, True), 6: (101, 1)}),
        ([copy(None, 5), clear(None, 5, 1)], {}),
        ([copy(b"", 5)], {b"": (100, 1)}),
        ([Record(b"a", b"v"), Record(b"a", b"1", (("txb-cleared", b"?"),))], {}),
        ([copy(b"a", 5), Record(b"a", b"x", (("txb-cleared", b"orders/3@5"),))], {b"a": (100, 1)}),
        ([copy(b"a", 5), Record(b"a", None, (("txb-release", None),))], {b"a": (100, 1)}),
    ],
)
def test_keys(records: Sequence[Record], keys: dict[bytes | int, tuple[Any, ...]]) -> None:
    aside = AsideKeys(MINE)
    for offset, record in enumerate(records, 100):
        aside.note(structs.replace(record, offset=offset))
    assert aside.keys == {key: AsideKey(*fields) for key, fields in keys.items()}
