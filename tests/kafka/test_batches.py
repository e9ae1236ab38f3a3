"""Batches as we encode them, beside those of the client library."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from hypothesis import example, given
from hypothesis import strategies as st

from txbroker.core.encoding import _names, encode_headers
from txbroker.core.records import Record
from txbroker.kafka.protocol import batch
from txbroker.kafka.protocol.batch import HEADER_BYTES, Body, batch_bodies, batch_body, encode_batch

NOW_MS = 1_700_000_000_123

large = st.builds(lambda byte, size: byte * size, st.binary(min_size=1, max_size=1), st.integers(
    60, 70_000
))  # fmt: skip
content = st.none() | st.binary(max_size=200) | large
headers = st.lists(st.tuples(st.text(max_size=70), st.none() | st.binary(max_size=90)), max_size=5)
many_headers = st.integers(60, 70).map(lambda count: [("h", b"")] * count)
timestamps = st.just(-1) | st.integers(0, 5000) | st.integers(0, (1 << 63) - 1)
plain = (headers | many_headers).map(tuple)
records = st.builds(Record, content, content, plain | plain.map(encode_headers), timestamps)
runs = st.lists(records, min_size=1, max_size=8)
long_runs = st.builds(lambda some, count: (some * count)[:count], runs, st.integers(1, 300))
producers = st.tuples(
    st.integers(-1, (1 << 63) - 1), st.integers(-1, (1 << 15) - 1), st.integers(-1, (1 << 31) - 1)
)
EDGES = (-1, -1, -1), ((1 << 63) - 1, (1 << 15) - 1, (1 << 31) - 1)


def theirs(run: Sequence[Record], producer: tuple[int, int, int], transactional: bool) -> bytes:
    builder = DefaultRecordBatchBuilder(2, 0, int(transactional), *producer, (1 << 31) - 1)
    for number, each in enumerate(run):
        at_ms = NOW_MS if each.timestamp_ms < 0 else each.timestamp_ms
        builder.append(number, at_ms, each.key, each.value, list(each.headers))
    return bytes(builder.build())


def ours(body: Body, producer: tuple[int, int, int], transactional: bool = False) -> bytes:
    id, epoch, sequence = producer
    return encode_batch(
        body, producer_id=id, epoch=epoch, sequence=sequence, transactional=transactional
    )


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        @staticmethod
        def time() -> float:
            return (NOW_MS + 0.5) / 1000

    monkeypatch.setattr(batch, "time", Clock)


@given(runs | long_runs, producers | st.sampled_from(EDGES), st.booleans())
@example([Record(None, None)], EDGES[0], False)
@example([Record(b"", b"", (("", None), ("", b""), ("ñ☃🙂", b"v")))] * 2, EDGES[1], True)
@example([Record(b"k", b"v", (), n % 3 - 1) for n in range(300)], EDGES[1], True)
@example([Record(b"k", None, (), (1 << 63) - 1), Record(None, b"v", (), 0)], EDGES[0], False)
@example([Record(b"k" * 8191, b"v" * 8192), Record(b"k" * 63, b"v" * 64)], EDGES[0], False)
def test_batch_equals_that_of_client_library(
    run: list[Record], producer: tuple[int, int, int], transactional: bool
) -> None:
    body = batch_body(run)
    encoded = ours(body, producer, transactional)
    assert encoded == theirs(run, producer, transactional)
    assert (body.count, body.batch_bytes) == (len(run), len(encoded))


@given(runs | long_runs, st.integers(HEADER_BYTES, 5000))
def test_split_batches_keep_order_and_fill_limit(run: list[Record], bytes_max: int) -> None:
    bodies = batch_bodies(run, bytes_max)
    first = 0
    for body in bodies:
        part = run[first : first + body.count]
        assert ours(body, EDGES[0]) == theirs(part, EDGES[0], False)
        assert body.batch_bytes <= bytes_max or body.count == 1
        first += body.count
        longer = [*part, *run[first : first + 1]]
        assert longer == part or len(theirs(longer, EDGES[0], False)) > bytes_max
    assert first == len(run)


def test_header_name_cache_is_bounded() -> None:
    for number in range(3000):
        batch_body([Record(b"k", b"v", ((f"name-{number}", b"x"), (f"{number}" * 1000, b"x")))])
    assert len(_names) <= 1024
    assert max(map(len, _names)) < 100


def test_record_without_timestamp_gets_current_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "time", time)
    before_ms = int(time.time() * 1000)
    body = batch_body([Record(b"k", b"v"), Record(b"k", b"v", (), 5)])
    assert before_ms <= body.first_ms == body.largest_ms <= int(time.time() * 1000)


@pytest.mark.parametrize("wrong", [Record("text", b"v"), Record(b"k", 5)])  # type: ignore[arg-type]
def test_non_bytes_are_refused_as_record(wrong: Record) -> None:
    with pytest.raises(TypeError):
        batch_body([wrong])
