"""The small parts that need no Kafka: batches and causes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from txbroker.core.records import Record
from txbroker.door import Fenced, TurnLost, TurnRefused
from txbroker.kafka.batch import (
    HEADER_BYTES,
    batch_bytes,
    encode_batch,
    record_bytes,
    split_by_bytes,
)
from txbroker.kafka.codes import RETRIABLE, Code, describe
from txbroker.kafka.fetched import Fetched
from txbroker.kafka.producer import BatchRefused, BatchUnknown, ProducerFenced
from txbroker.kafka.turns import translated

records = st.lists(
    st.builds(
        Record,
        st.none() | st.binary(max_size=20),
        st.none() | st.binary(max_size=200),
        st.lists(
            st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=20)), max_size=3
        ).map(tuple),
        st.just(1),
    ),
    min_size=1,
    max_size=20,
)


def size(run: object) -> int:
    return len(encode_batch(run, producer_id=1, epoch=0, sequence=0))  # type: ignore[arg-type]


@given(records, st.integers(HEADER_BYTES, 2000))
def test_runs_keep_all_records_in_order_and_fit(given_: list[Record], bytes_max: int) -> None:
    runs = split_by_bytes(given_, bytes_max)
    assert [record for run in runs for record in run] == given_
    assert all(size(run) <= bytes_max or len(run) == 1 for run in runs)


@given(records)
def test_the_bound_of_a_batch_is_never_too_small_and_exact_where_it_decides(
    given_: list[Record],
) -> None:
    exact = size(given_)
    assert exact <= HEADER_BYTES + sum(map(record_bytes, given_)) == batch_bytes(given_, 1 << 30)
    assert batch_bytes(given_, exact) == exact


def test_offsets_that_came_in_no_batch_are_a_hole_and_not_skipped() -> None:
    batch = encode_batch([Record(b"k", b"v")] * 2, producer_id=1, epoch=0, sequence=0)
    data = b"".join(offset.to_bytes(8, "big") + batch[8:] for offset in (3, 5, 9))
    fetched = Fetched("t-0", 3, (0, 0, 11, 11, [], data), append_time=False)
    found = [record for piece in fetched.pieces(2) for record in piece]
    assert [(record.offset, record.skipped) for record in found] == [
        (3, 2), (4, 0), (5, 0), (6, 0), (9, 0), (10, 0)
    ]  # fmt: skip
    assert (fetched.next_offset, fetched.skipped) == (11, 0)


@pytest.mark.parametrize("number", [74, 75, 78])
def test_errors_that_the_client_library_does_not_know_can_pass(number: int) -> None:
    assert number in RETRIABLE


@pytest.mark.parametrize(
    ("code", "cause", "passing"),
    [
        (Code.MESSAGE_TOO_LARGE, "too_large", False),
        (Code.TOPIC_AUTHORIZATION_FAILED, "not_authorized", False),
        (Code.UNKNOWN_TOPIC_OR_PARTITION, "unknown_topic", True),
        (Code.INVALID_TIMESTAMP, "bad_timestamp", False),
        (Code.INVALID_RECORD, "bad_record", False),
        (44, "refused", False),
    ],
)
def test_a_refused_batch_becomes_a_cause(code: int, cause: str, passing: bool) -> None:
    with pytest.raises(TurnRefused) as raised, translated():
        raise BatchRefused(("target", 3), code, None)
    found = raised.value.cause
    assert (found.code, found.topic, found.partition, found.passing) == (
        cause,
        "target",
        3,
        passing,
    )
    assert "target-3" in found.message


@pytest.mark.parametrize(
    "error",
    [
        BatchUnknown(("t", 0), "no answer"),
        BatchRefused(("target", 0), Code.OUT_OF_ORDER_SEQUENCE, None),
        BatchRefused(("target", 0), Code.INVALID_TXN_STATE, None),
    ],
)
def test_a_producer_that_lost_its_place_is_no_fault_of_a_record(error: Exception) -> None:
    with pytest.raises(TurnLost), translated():
        raise error


def test_a_newer_producer_fences() -> None:
    with pytest.raises(Fenced), translated():
        raise ProducerFenced


def test_codes_are_described_in_words() -> None:
    assert describe(Code.MESSAGE_TOO_LARGE) == "message too large"
    assert describe(9999) == "error 9999"
