"""Messages as JSON: they round-trip, and errors name their path."""

from __future__ import annotations

import base64
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txbroker.contract.json import (
    TIMESTAMP_MS_MAX,
    MessageError,
    decode_messages,
    message_from_json,
    message_to_json,
)
from txbroker.core.records import Message

text = st.text(st.characters(exclude_categories=["Cs"]))
payload = st.one_of(st.binary(), text.map(str.encode))
messages = st.builds(
    Message,
    topic=text.filter(bool),
    key=st.none() | payload,
    value=st.none() | payload,
    headers=st.lists(st.tuples(text, st.none() | payload), max_size=4).map(tuple),
    partition=st.none() | st.integers(0, 2**31 - 1),
    timestamp_ms=st.none() | st.integers(0, TIMESTAMP_MS_MAX),
)


@given(messages)
def test_message_json_round_trips(message: Message) -> None:
    shown = message_to_json(message)
    assert message_from_json(shown) == message
    assert message_from_json(json.loads(json.dumps(shown))) == message


@given(st.lists(messages, max_size=3))
def test_message_list_round_trips_as_bytes(given_messages: list[Message]) -> None:
    body = msgspec.json.encode([message_to_json(message) for message in given_messages])
    assert decode_messages(body) == tuple(given_messages)


def test_text_is_shown_as_text_and_bytes_as_base64() -> None:
    shown = message_to_json(
        Message("t", b"k", b"\xff", (("a", b"x"), ("a", None), ("b", b"\xfe")), 1, 2)
    )
    assert shown == {
        "topic": "t",
        "key": "k",
        "value_base64": "/w==",
        "headers": [["a", "x"], ["a", None], ["b", {"base64": "/g=="}]],
        "partition": 1,
        "timestamp_ms": 2,
    }


def test_null_is_a_tombstone_and_empty_is_not() -> None:
    assert message_from_json({"topic": "t", "value": None}).value is None
    assert message_from_json({"topic": "t", "value": ""}).value == b""
    assert message_to_json(Message("t"))["value"] is None


def test_nulls_of_optional_fields_are_absent() -> None:
    full = {
        "topic": "t",
        "key": None,
        "key_base64": None,
        "value": None,
        "value_base64": "AA==",
        "value_json": None,
        "headers": None,
        "partition": None,
        "timestamp_ms": None,
    }
    assert message_from_json(full) == Message("t", value=b"\0")


def test_headers_may_be_an_object() -> None:
    headers = {"a": "x", "b": None, "c": {"base64": "AA=="}}
    message = message_from_json({"topic": "t", "value": "v", "headers": headers})
    assert message.headers == (("a", b"x"), ("b", None), ("c", b"\0"))


def test_value_json_is_stored_as_it_was_written() -> None:
    body = b'[{"topic": "t", "value_json": {"n": 12345678901234567890123, "f": 1.10, "e": 1e400}}]'
    (message,) = decode_messages(body)
    assert message.value == b'{"n": 12345678901234567890123, "f": 1.10, "e": 1e400}'


def test_value_json_null_is_no_value() -> None:
    with pytest.raises(MessageError, match="has no value"):
        decode_messages(b'[{"topic": "t", "value_json": null}]')


@pytest.mark.parametrize(
    ("obj", "sentence"),
    [
        (7, "messages[0]: must be an object, not a number"),
        ({"value": "v"}, "messages[0]: has no topic"),
        ({"topic": "", "value": "v"}, "messages[0].topic: must not be empty"),
        ({"topic": 1, "value": "v"}, "messages[0].topic: must be text, not a number"),
        ({"topic": "t"}, "messages[0]: has no value; give one of value, value_base64 and"),
        ({"topic": "t", "value_base64": None}, "messages[0]: has no value"),
        (
            {"topic": "t", "value": {}},
            "messages[0].value: must be text, not an object; use value_j",
        ),
        ({"topic": "t", "value": "a", "value_json": 1}, "messages[0]: gives value and value_json"),
        ({"topic": "t", "value": None, "key": "a", "key_base64": "AA=="}, "gives key and key_base"),
        ({"topic": "t", "value_base64": "AA"}, "messages[0].value_base64: is not base64"),
        ({"topic": "t", "value_base64": "A_=="}, "messages[0].value_base64: is not base64"),
        ({"topic": "t", "value_base64": "é"}, "messages[0].value_base64: is not base64"),
        ({"topic": "t", "value": "\ud800"}, "messages[0].value: has half of a surrogate pair"),
        ({"topic": "\udfff", "value": "v"}, "messages[0].topic: has half of a surrogate pair"),
        ({"topic": "t", "value": "v", "valu": 1}, "messages[0]: unknown field 'valu'; known are"),
        ({"topic": "t", "value": "v", "headers": "x"}, "messages[0].headers: must be an object or"),
        (
            {"topic": "t", "value": "v", "headers": [["a"]]},
            "messages[0].headers[0]: must be a pair",
        ),
        ({"topic": "t", "value": "v", "headers": [[1, "a"]]}, "headers[0]: the name must be text"),
        (
            {"topic": "t", "value": "v", "headers": {"a": 1}},
            "headers.a: the value must be text, nul",
        ),
        (
            {"topic": "t", "value": "v", "headers": {"a": {"base64": 1}}},
            "headers.a: the value must",
        ),
        (
            {"topic": "t", "value": "v", "headers": {"a": {"base64": "?"}}},
            "headers.a: is not base64",
        ),
        ({"topic": "t", "value": "v", "partition": -1}, "messages[0].partition: must be from 0 to"),
        (
            {"topic": "t", "value": "v", "partition": True},
            "must be a whole number, not true or fal",
        ),
        ({"topic": "t", "value": "v", "partition": 1.5}, "must be a whole number, not a number"),
        (
            {"topic": "t", "value": "v", "timestamp_ms": TIMESTAMP_MS_MAX + 1},
            "messages[0].timestamp_ms: must be f",
        ),
        ({"topic": "t", "value": "v", "timestamp_ms": "1"}, "must be a whole number, not text"),
    ],
)
def test_message_errors_name_their_path(obj: object, sentence: str) -> None:
    with pytest.raises(MessageError) as caught:
        message_from_json(obj, "messages[0]")
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(caught.value.path)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'[{"topic": "t", "topic": "u", "value": "v"}]', "messages: has a message with 'topic' t"),
        (b'[{"headers": {"a": "1", "a": "2"}}]', "messages[0].headers: has 'a' twice"),
        (b'[{"headers": [["a", {"base64": "", "base64": ""}]]}]', "headers: has 'base64' twice"),
        (b"{}", "messages: must be a list of objects"),
        (b"[1]", "messages: must be a list of objects"),
        (b"[", "messages: is not JSON"),
        (b'[{"topic": "\xff"}]', "messages: is not JSON"),
        (b'[{"topic": "t", "value_json": "\xff"}]', "messages: is not JSON"),
        (b'[{"topic": "t", "value_json": ' + b"[" * 100_000 + b"}]", "messages: is not JSON"),
        (b'[{"topic": "t", "value": ' + b"1" * 10_000 + b"}]", "messages[0]: value does not read"),
        (b'[{"topic": ' + b"[" * 5000 + b"]" * 5000 + b"}]", "messages: is not JSON"),
    ],
)
def test_malformed_bodies_are_refused(body: bytes, sentence: str) -> None:
    with pytest.raises(MessageError) as caught:
        decode_messages(body)
    assert sentence in str(caught.value)


@given(st.binary())
def test_base64_must_be_standard(value: bytes) -> None:
    obj = {"topic": "t", "value_base64": base64.b64encode(value).decode()}
    assert message_from_json(obj).value == value
