"""A message is checked where it is written, and text in it becomes bytes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from txbroker.core.records import Message


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (Message("t", "k", "vä"), Message("t", b"k", b"v\xc3\xa4")),
        (Message("t", bytearray(b"k"), memoryview(b"v")), Message("t", b"k", b"v")),
        (
            Message("t", headers={"a": "1", "b": None}),
            Message("t", None, None, (("a", b"1"), ("b", None))),
        ),
        (Message("t", headers=MappingProxyType({"a": b"1"})), Message("t", headers=(("a", b"1"),))),
        (
            Message("t", headers=[("a", "1"), ("a", b"2")]),
            Message("t", headers=(("a", b"1"), ("a", b"2"))),
        ),
        (Message("t", headers=iter([("a", b"1")])), Message("t", headers=(("a", b"1"),))),
        (Message("t", headers={}), Message("t")),
        (
            Message.json("t", {"a": [1, None, date(2026, 1, 2)]}, key="k"),
            Message("t", b"k", b'{"a":[1,null,"2026-01-02"]}'),
        ),
        (
            Message.json("t", None, headers={"h": "x"}, partition=1, timestamp_ms=2),
            Message("t", None, b"null", (("h", b"x"),), 1, 2),
        ),
    ],
)
def test_text_and_mappings_become_bytes_and_pairs(given: Message, wanted: Message) -> None:
    assert given == wanted
    assert type(given.headers) is tuple
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=Message) == given


class Endless:
    """JSON has no such thing."""


def endless() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Message(5), "topic is a str, not int"),  # type: ignore[arg-type]
        (lambda: Message(None), "topic is a str, not NoneType"),  # type: ignore[arg-type]
        (lambda: Message("t", key=5), "key is bytes, str or None, not int"),  # type: ignore[arg-type]
        (lambda: Message("t", value={"a": 1}), "value is bytes, str or None, not dict"),  # type: ignore[arg-type]
        (lambda: Message("t", headers="text"), "headers is a mapping, or pairs"),  # type: ignore[arg-type]
        (lambda: Message("t", headers=5), "headers is a mapping, or pairs"),  # type: ignore[arg-type]
        (lambda: Message("t", headers=(("h",),)), "headers are a mapping, or pairs"),  # type: ignore[arg-type]
        (lambda: Message("t", headers=((b"h", b""),)), "header's name is a str, not bytes"),  # type: ignore[arg-type]
        (lambda: Message("t", headers={"h": 1}), "header 'h' is bytes, str or None, not int"),  # type: ignore[dict-item]
        (lambda: Message("t", partition="1"), "partition is a whole number or None, not str"),  # type: ignore[arg-type]
        (lambda: Message("t", partition=True), "partition is a whole number or None, not bool"),
        (lambda: Message("t", timestamp_ms=1.5), "timestamp_ms is a whole number or None"),  # type: ignore[arg-type]
        (lambda: Message.json("t", Endless()), "value cannot be written as JSON"),
        (lambda: Message.json("t", endless()), "value cannot be written as JSON"),
        (lambda: Message.json("t", {1j: 1}), "value cannot be written as JSON"),
    ],
)
def test_wrong_type_is_named(make: Callable[[], Message], field: str) -> None:
    with pytest.raises(TypeError, match=f"a message's {field}"):
        make()


@pytest.mark.parametrize("field", ["key", "value"])
def test_text_that_is_no_utf_8_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"a message's {field} cannot be written as UTF-8"):
        Message("t", **{field: "\ud800"})  # type: ignore[arg-type]
