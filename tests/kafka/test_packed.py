"""Requests of every transaction beside the client library's, and their answers."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from aiokafka.errors import IncompatibleBrokerVersion
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.offset import OffsetRequest as TheirOffsets
from aiokafka.protocol.produce import ProduceRequest as TheirProduce
from aiokafka.protocol.transaction import EndTxnRequest as TheirEnd
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactBytes,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)
from hypothesis import given
from hypothesis import strategies as st

from txbroker.kafka.protocol.packed import (
    EndTxnResponse,
    EndTxnV0,
    EndTxnV5,
    ListOffsetsV3,
    PackedRequest,
    ProduceV7,
    ProduceV12,
)

_TEXT, _TAGS = CompactString("utf-8"), ("tags", TaggedFields)


def array(**fields: Any) -> CompactArray:
    """A compact array of structs with tags."""
    return CompactArray(*fields.items(), _TAGS)


def schema(**fields: Any) -> Schema:
    return Schema(*fields.items(), _TAGS)


class WrittenAnswer(Response):
    API_KEY, API_VERSION = 0, 12
    SCHEMA = schema(
        topics=array(
            topic=_TEXT,
            partitions=array(
                partition=Int32,
                error_code=Int16,
                offset=Int64,
                timestamp=Int64,
                log_start_offset=Int64,
                record_errors=array(batch_index=Int32, batch_index_error_message=_TEXT),
                error_message=_TEXT,
            ),
        ),
        throttle_time_ms=Int32,
    )


class WriteStruct(RequestStruct):
    API_KEY, API_VERSION, FLEXIBLE_VERSION = 0, 12, True
    RESPONSE_TYPE = WrittenAnswer
    SCHEMA = schema(
        transactional_id=_TEXT,
        required_acks=Int16,
        timeout_ms=Int32,
        topics=array(topic=_TEXT, partitions=array(partition=Int32, records=CompactBytes)),
    )


class OverAnswer(Response):
    API_KEY, API_VERSION = 26, 5
    SCHEMA = schema(
        throttle_time_ms=Int32, error_code=Int16, producer_id=Int64, producer_epoch=Int16
    )


class EndStruct(RequestStruct):
    API_KEY, API_VERSION, FLEXIBLE_VERSION = 26, 5, True
    RESPONSE_TYPE = OverAnswer
    SCHEMA = schema(
        transactional_id=_TEXT, producer_id=Int64, producer_epoch=Int16, committed=Boolean
    )


VERSIONS = {0: (3, 12), 2: (1, 10), 26: (0, 5)}
FIRST_VERSIONS = {**VERSIONS, 0: (3, 7)}

ints, longs = st.integers(0, (1 << 31) - 1), st.integers(-1, (1 << 63) - 1)
shorts, bytes_ = st.integers(-1, (1 << 15) - 1), st.binary(max_size=300)
names = st.text("abcñ☃._-", min_size=1, max_size=140)


def of_topics(partition: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(st.tuples(names, st.lists(partition, max_size=4)), max_size=4)


def theirs(request: Request[Any] | RequestStruct, number: int) -> bytes:
    """Return what the client library sends."""
    made = request.prepare(FIRST_VERSIONS) if isinstance(request, Request) else request
    header = made.build_request_header(correlation_id=number, client_id="txbroker")
    frame = header.encode() + made.encode()
    return len(frame).to_bytes(4, "big") + frame


def ours(request: PackedRequest, number: int) -> bytes:
    return request.frame(VERSIONS, number, b"txbroker")


@given(st.none() | names, shorts, ints, of_topics(st.tuples(ints, bytes_)), ints)
def test_produce_equals_that_of_client_library(
    id: Any, acks: int, timeout_ms: int, topics: Any, number: int
) -> None:
    plain = ProduceV7(id, acks, timeout_ms, topics)
    assert ours(plain, number) == theirs(TheirProduce(id, acks, timeout_ms, topics), number)
    tagged = [(topic, [(n, data, {}) for n, data in parts], {}) for topic, parts in topics]
    struct_ = WriteStruct(id, acks, timeout_ms, tagged, {})
    assert ours(ProduceV12(id, acks, timeout_ms, topics), number) == theirs(struct_, number)


@given(names, longs, shorts, st.booleans(), ints)
def test_end_txn_equals_that_of_client_library(
    id: str, producer: int, epoch: int, commit: bool, number: int
) -> None:
    plain = EndTxnV0(id, producer, epoch, commit)
    assert ours(plain, number) == theirs(TheirEnd(id, producer, epoch, commit), number)
    struct_ = EndStruct(id, producer, epoch, commit, {})
    assert ours(EndTxnV5(id, producer, epoch, commit), number) == theirs(struct_, number)


@given(st.integers(0, 1), of_topics(st.tuples(ints, longs)), ints)
def test_list_offsets_equals_that_of_client_library(
    isolation: int, topics: Any, number: int
) -> None:
    assert ours(ListOffsetsV3(isolation, topics), number) == theirs(
        TheirOffsets(-1, isolation, topics), number
    )


# --- answers -------------------------------------------------------------------------------------

PLAIN_HEADER, TAGGED_HEADER = bytes(4), st.sampled_from([bytes(5), bytes(4) + b"\x01\x05\x02xy"])
# The library leaves the sizes of tags to the caller.
tag = st.binary(max_size=99).map(lambda value: bytes([len(value)]) + value)
tags = st.just({}) | st.dictionaries(st.integers(1, 300), tag, max_size=2)
message = st.none() | st.text(max_size=150)
errors = st.lists(st.tuples(ints, message, tags), max_size=2)
results = st.tuples(ints, shorts, longs, longs, longs, errors, message, tags)


@given(of_topics(st.tuples(ints, shorts, longs, longs, longs)))
def test_produce_v7_answer_is_decoded(topics: Any) -> None:
    (made,) = [each for each in TheirProduce._CLASSES if each.API_VERSION == 7]
    frame = PLAIN_HEADER + made.RESPONSE_TYPE(topics, 0).encode()
    assert ProduceV7(None, -1, 1, []).read(frame).topics == topics


@given(
    TAGGED_HEADER,
    st.lists(st.tuples(names, st.lists(results, max_size=3), tags), max_size=3),
    tags,
)
def test_produce_v12_answer_is_decoded(header: bytes, topics: Any, more: Any) -> None:
    frame = header + WrittenAnswer(topics, 0, more).encode()
    assert ProduceV12("id", -1, 1, []).read(frame).topics == [
        (topic, [(*each[:4], each[6], [error[0] for error in each[5]]) for each in parts])
        for topic, parts, _ in topics
    ]


@given(TAGGED_HEADER, shorts, longs, shorts, tags)
def test_end_txn_answers_are_decoded(
    header: bytes, code: int, producer: int, epoch: int, more: Any
) -> None:
    plain = EndTxnV0("id", 1, 1, True)
    answer = TheirEnd._CLASSES[0].RESPONSE_TYPE(7, code)
    assert plain.read(PLAIN_HEADER + answer.encode()) == EndTxnResponse(code)
    frame = header + OverAnswer(7, code, producer, epoch, more).encode()
    assert EndTxnV5("id", 1, 1, True).read(frame) == EndTxnResponse(code, producer, epoch)


@given(of_topics(st.tuples(ints, shorts, longs, longs)))
def test_list_offsets_answer_is_decoded(topics: Any) -> None:
    (made,) = [each for each in TheirOffsets._CLASSES if each.API_VERSION == 3]
    frame = PLAIN_HEADER + made.RESPONSE_TYPE(7, topics).encode()
    assert ListOffsetsV3(0, []).read(frame).topics == topics


REQUESTS: list[PackedRequest] = [
    ProduceV7(None, -1, 1, []),
    ProduceV12("id", -1, 1, []),
    EndTxnV0("id", 1, 1, True),
    EndTxnV5("id", 1, 1, True),
    ListOffsetsV3(0, []),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
@given(st.binary(max_size=60))
def test_other_bytes_are_refused_as_answer(request_: PackedRequest, data: bytes) -> None:
    try:
        request_.read(data)
    except (ValueError, IndexError, struct.error):
        return
    # An answer to nothing at least.
    assert len(data) >= 6


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_request_is_sent_only_in_its_version(request_: PackedRequest) -> None:
    key, version = request_.API_KEY, request_.API_VERSION
    for refused in ((version + 1, version + 2), (version - 2, version - 1)):
        with pytest.raises(NotImplementedError):
            request_.frame({key: refused}, 1, b"me")
    with pytest.raises(IncompatibleBrokerVersion):
        request_.frame({}, 1, b"me")
