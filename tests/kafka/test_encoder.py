"""Requests and answers by tables, beside the client library's types and requests."""

from __future__ import annotations

import inspect
import struct
from io import BytesIO
from typing import Any

import pytest
from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol import admin, coordination, fetch, group, metadata, offset, produce
from aiokafka.protocol import transaction as transactions
from aiokafka.protocol.api import RequestStruct
from aiokafka.protocol.types import (
    AbstractType,
    Array,
    Boolean,
    Bytes,
    CompactArray,
    CompactBytes,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from txbroker.kafka.protocol import schemas
from txbroker.kafka.protocol.encoder import Field, Request, _parsed

THEIR_MODULES = (admin, coordination, fetch, group, metadata, offset, produce, transactions)
REQUESTS = [
    each
    for each in vars(schemas).values()
    if inspect.isclass(each) and issubclass(each, Request) and each is not Request
]
THEIRS: dict[tuple[int, int], type[RequestStruct]] = {
    (each.API_KEY, each.API_VERSION): each
    for module in THEIR_MODULES
    for each in vars(module).values()
    if inspect.isclass(each) and issubclass(each, RequestStruct) and each is not RequestStruct
}


class Uuid(AbstractType[bytes]):
    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)


FIXED = {"i8": Int8, "i16": Int16, "i32": Int32, "i64": Int64, "bool": Boolean, "uuid": Uuid}
NULLABLE = {
    False: {"str": String("utf-8"), "text": String("utf-8"), "bytes": Bytes},
    True: {"str": CompactString("utf-8"), "text": CompactString("utf-8"), "bytes": CompactBytes},
}
BITS = {"i8": 8, "i16": 16, "i32": 32, "i64": 64}


def their_type(type_: Any, flexible: bool) -> Any:
    """Return the library's type for one of a table."""
    if isinstance(type_, str):
        return FIXED.get(type_) or NULLABLE[flexible][type_]
    array = CompactArray if flexible else Array
    if isinstance(type_[0], str):
        return array(their_type(type_[0], flexible))
    return array(*their_fields(type_, flexible))


def their_fields(fields: list[Field], flexible: bool) -> list[tuple[str, Any]]:
    found = [(name, their_type(type_, flexible)) for name, type_, _ in fields]
    return [*found, ("tags", TaggedFields)] if flexible else found


def values(type_: Any) -> st.SearchStrategy[Any]:
    """Values of a type of a table, as requests take them and answers hold them."""
    if isinstance(type_, list):
        alone = isinstance(type_[0], str)
        items = values(type_[0]) if alone else structs(type_)
        return st.lists(items, max_size=3)
    if type_ in BITS:
        end = 1 << BITS[type_] - 1
        return st.integers(-end, end - 1)
    if type_ == "bool":
        return st.booleans()
    if type_ == "uuid":
        return st.binary(min_size=16, max_size=16)
    found = st.binary(max_size=300) if type_ == "bytes" else st.text("abcñ☃._-", max_size=140)
    return st.none() | found


def structs(fields: list[Field]) -> st.SearchStrategy[Any]:
    return st.tuples(*(values(type_) for _, type_, constant in fields if not constant))


def complete(fields: list[Field], given_: Any, flexible: bool) -> list[Any]:
    """Return a struct as the library takes it: with constants and tagged fields."""
    found: list[Any] = []
    left = iter(given_)
    for _, type_, constant in fields:
        if constant:
            found.append({"False": False}.get(constant) if constant == "False" else int(constant))
            continue
        value = next(left)
        if isinstance(type_, list) and not isinstance(type_[0], str) and value is not None:
            value = [tuple(complete(type_, each, flexible)) for each in value]
        found.append(value)
    return [*found, {}] if flexible else found


def front(request: type[Request], number: int) -> bytes:
    header = struct.pack(">hhih", request.API_KEY, request.API_VERSION, number, 8) + b"txbroker"
    return header + b"\0" if request.FLEXIBLE else header


@pytest.mark.parametrize("kind", REQUESTS)
@settings(max_examples=30)
@given(st.data())
def test_requests_equal_those_of_client_library(kind: type[Request], data: st.DataObject) -> None:
    fields = _parsed(kind.REQUEST)
    given_ = data.draw(structs(fields))
    made = kind(*given_).frame({kind.API_KEY: (0, 99)}, 7, b"txbroker")
    whole = complete(fields, given_, kind.FLEXIBLE)
    body = Schema(*their_fields(fields, kind.FLEXIBLE)).encode(whole) if whole else b""
    frame = front(kind, 7) + body
    assert made == struct.pack(">i", len(frame)) + frame


@pytest.mark.parametrize("kind", REQUESTS)
@settings(max_examples=30)
@given(st.data())
def test_answers_equal_those_of_client_library(kind: type[Request], data: st.DataObject) -> None:
    fields = _parsed(kind.RESPONSE)
    given_ = data.draw(structs(fields))
    whole = complete(fields, given_, kind.FLEXIBLE)
    body = Schema(*their_fields(fields, kind.FLEXIBLE)).encode(whole)
    header = b"\0\0\0\7\0" if kind.FLEXIBLE and kind.HEADER_TAGS else b"\0\0\0\7"
    answer = kind(*[None] * 9).read(header + body)
    assert [getattr(answer, name) for name, _, _ in fields] == list(given_)
    # Cut anywhere, it is refused, and no other error is raised.
    end = data.draw(st.integers(0, len(header + body) - 1))
    with pytest.raises((ValueError, IndexError, struct.error)):
        kind(*[None] * 9).read((header + body)[:end])


def _shapes(type_: Any) -> Any:
    """Return a type of the library as text that shows nothing but the form on the wire."""
    if isinstance(type_, Array | CompactArray):
        return [type(type_).__name__, _shapes(type_.array_of)]
    if isinstance(type_, Schema):
        return [_shapes(each) for each in type_.fields]
    return type_.__name__ if inspect.isclass(type_) else type(type_).__name__


KNOWN = [each for each in REQUESTS if (each.API_KEY, each.API_VERSION) in THEIRS]


@pytest.mark.parametrize("kind", KNOWN)
def test_tables_equal_those_of_client_library(kind: type[Request]) -> None:
    theirs = THEIRS[kind.API_KEY, kind.API_VERSION]
    assert theirs.FLEXIBLE_VERSION == kind.FLEXIBLE
    answer = Schema(*their_fields(_parsed(kind.RESPONSE), kind.FLEXIBLE))
    assert _shapes(answer) == _shapes(theirs.RESPONSE_TYPE.SCHEMA)
    if kind is not schemas.FetchV11:  # it ends in an empty array and an empty string as constants
        asked = Schema(*their_fields(_parsed(kind.REQUEST), kind.FLEXIBLE))
        assert _shapes(asked) == _shapes(theirs.SCHEMA)


def test_library_knows_most_tables() -> None:
    assert len(KNOWN) > 15


def test_fetch_equals_that_of_client_library() -> None:
    topics = [("a", [(1, 20, 300), (2, 30, 400)]), ("b", [(0, 5, 6)])]
    made = schemas.FetchV11(500, 1, 1 << 20, 1, topics).frame({1: (4, 17)}, 7, b"txbroker")
    theirs = fetch.FetchRequest(500, 1, 1 << 20, 1, topics).prepare({1: (4, 17)})
    frame = front(schemas.FetchV11, 7) + theirs.encode()
    assert made == struct.pack(">i", len(frame)) + frame


def test_tagged_fields_are_skipped_in_structs_and_returned_at_the_end() -> None:
    tag = b"\1\5\2xy"
    name = b"\2a"
    producer = struct.pack(">qiiqiq", 1, 2, 3, 4, 5, 6)
    partition = struct.pack(">ih", 0, 0) + b"\0" + b"\3" + producer + tag + producer + b"\0" + tag
    topics = b"\2" + name + b"\2" + partition + tag
    answer = schemas.DescribeProducersV0([]).read(
        bytes(4) + tag + bytes(4) + topics + b"\2\3\1!\xac\2\2hi"
    )
    assert answer.topics == [("a", [(0, 0, None, [(1, 2, 3, 4, 5, 6)] * 2)])]
    assert answer.tags == {3: b"!", 300: b"hi"}


def test_endless_number_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="varint is too long"):
        schemas.DescribeProducersV0([]).read(bytes(4) + b"\xff" * 200_000)


def test_null_array_of_an_answer_is_empty() -> None:
    frame = bytes(4) + struct.pack(">hi", 0, -1)
    assert schemas.ApiVersionsV0().read(frame).api_versions == []


def test_null_array_of_a_request_is_sent() -> None:
    made = schemas.MetadataV5(None, False).frame({3: (0, 13)}, 1, b"")
    assert made.endswith(b"\xff\xff\xff\xff\0")


@pytest.mark.parametrize("kind", REQUESTS)
@given(st.binary(max_size=60))
def test_other_bytes_are_refused_as_answer(kind: type[Request], data: bytes) -> None:
    try:
        kind(*[None] * 9).read(data)
    except (ValueError, IndexError, struct.error):
        return
    # An answer to nothing at least.
    assert len(data) >= 6


@pytest.mark.parametrize("kind", REQUESTS)
def test_request_is_sent_only_in_its_version(kind: type[Request]) -> None:
    request, version = kind(*[None] * 9), kind.API_VERSION
    for refused in ((version + 1, version + 2), (version - 2, version - 1)):
        with pytest.raises(NotImplementedError):
            request.frame({kind.API_KEY: refused}, 1, b"me")
    with pytest.raises(IncompatibleBrokerVersion):
        request.frame({}, 1, b"me")


def test_values_are_attributes_by_their_names() -> None:
    request = schemas.ListOffsetsV3(1, [("a", [])])
    assert (request.isolation_level, request.topics) == (1, [("a", [])])
    with pytest.raises(AttributeError):
        _ = request.replica_id
