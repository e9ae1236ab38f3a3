"""Batches as we encode and fetch them, and causes of refusals."""

from __future__ import annotations

import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from txbroker.core.encoding import PROGRESS_KEY, _names, encode_claim, encode_headers
from txbroker.core.records import LOG_VERSION, Claim, Record
from txbroker.door.own_topics import CheckpointScan
from txbroker.door.writing import Copy, Fenced, Refused, Unknown
from txbroker.errors import InvariantBroken
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.producer import BatchRefused, BatchUnknown, Producer, ProducerFenced
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.pipelined_writer import promotion_writers
from txbroker.kafka.protocol import batch
from txbroker.kafka.protocol.batch import HEADER_BYTES, Body, batch_body, encode_batch
from txbroker.kafka.protocol.codes import RETRIABLE, Code, describe
from txbroker.kafka.protocol.copies import default_bytes
from txbroker.kafka.protocol.fetched import Fetched


def fetched(data: bytes, position: int = 0, end: int = 99, **options: Any) -> Fetched:
    """Return what a reader gets from a broker's answer to a fetch."""
    return Fetched("t-0", position, (0, 0, end, end, [], data), append_time=False, **options)


def ours(*batch: Record, producer_id: int = 1, transactional: bool = False) -> bytes:
    return encode_batch(
        batch_body(batch),
        producer_id=producer_id,
        epoch=0,
        sequence=0,
        transactional=transactional,
    )


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


@pytest.mark.rule(2)
def test_offsets_without_batch_are_not_skipped() -> None:
    batch = ours(*[Record(b"k", b"v")] * 2)
    data = b"".join(offset.to_bytes(8, "big") + batch[8:] for offset in (3, 5, 9))
    read = fetched(data, 3, 11)
    found = [record for piece in read.pieces(2) for record in piece]
    assert [(record.offset, record.skipped) for record in found] == [
        (3, 2), (4, 0), (5, 0), (6, 0), (9, 0), (10, 0)
    ]  # fmt: skip
    assert (read.next_offset, read.skipped) == (11, 0)


def sealed(batch: bytes, offset: int) -> bytes:
    """Return a batch at an offset, its checksum made right."""
    checksum = struct.pack(">I", calc_crc32c(batch[21:]))
    return offset.to_bytes(8, "big") + batch[8:17] + checksum + batch[21:]


def foreign(
    count: int = 3, *, attributes: int = 0, gzip: bool = False, value: bytes = b"v"
) -> bytes:
    """Return another client's batch, whose attributes may not match its body."""
    builder = DefaultRecordBatchBuilder(2, int(gzip), 0, -1, -1, -1, 1 << 30)
    for number in range(count):
        builder.append(number, 1, b"k", value, [("zq", b"x")])
    batch = bytearray(builder.build())
    batch[22] |= attributes
    return bytes(batch)


def broken_records() -> bytes:
    """Return a batch whose first record exceeds its length."""
    batch = bytearray(foreign())
    batch[HEADER_BYTES] += 2
    return bytes(batch)


SNAPPY, LZ4, ZSTD, UNKNOWN = 2, 3, 4, 7
UNREADABLE: dict[str, Callable[[], bytes]] = {
    "snappy": lambda: foreign(attributes=SNAPPY),
    "lz4": lambda: foreign(attributes=LZ4),
    "zstd": lambda: foreign(attributes=ZSTD),
    "codec 7": lambda: foreign(attributes=UNKNOWN),
    "Not a gzipped file": lambda: foreign(attributes=1),
    "16 MiB": lambda: foreign(gzip=True, value=bytes(6 << 20)),
    "exceeds 16 MiB": lambda: foreign(70_000, gzip=True),
    "nvalid record": broken_records,
}


@pytest.mark.parametrize("reason", UNREADABLE)
@pytest.mark.parametrize("producers", [False, True])
def test_undecodable_batch_becomes_one_record(reason: str, producers: bool) -> None:
    own, theirs = ours(Record(b"k", b"ours")), UNREADABLE[reason]()
    count = int.from_bytes(theirs[57:61], "big")
    next_ = 4 + count
    data = sealed(own, 3) + sealed(theirs, 4) + sealed(own, next_)
    reported: list[tuple[int, str]] = []
    read = fetched(
        data,
        3,
        producers=producers,
        unreadable=lambda offset, reason: reported.append((offset, reason)),
    )
    found = [(each.offset, each.key, each.value, each.skipped) for each in read.records]
    key, value = (PROGRESS_KEY, b"") if producers else (None, None)
    assert found == [(3, b"k", b"ours", 0), (4, key, value, 0), (next_, b"k", b"ours", count - 1)]
    assert read.skipped == 0
    ((offset, why),) = reported
    assert offset == 4
    assert reason in why


def test_read_within_undecodable_batch_leaves_no_gap() -> None:
    data = sealed(foreign(5, attributes=ZSTD), 10)
    read = fetched(data, 12)
    assert [(each.offset, each.skipped) for each in read.records] == [(12, 0)]
    assert (read.next_offset, read.skipped) == (15, 2)
    assert fetched(data, 12).among([12, 13]) == []


def test_undecodable_batch_is_picked_as_it_is_read() -> None:
    data = sealed(foreign(5, attributes=ZSTD), 10)
    assert fetched(data, 10).among([10, 11]) == fetched(data, 10).records


def test_wrong_checksum_stops_for_any_attributes() -> None:
    for attributes in (0, 1, ZSTD):
        batch = foreign(attributes=attributes)
        damaged = batch[:-1] + bytes([batch[-1] ^ 1])
        with pytest.raises(InvariantBroken, match="checksum"):
            _ = fetched(damaged).records


def test_non_utf8_header_names_are_replaced() -> None:
    batch = sealed(foreign().replace(b"zq", b"\xffq"), 7)
    expected = [Record(b"k", b"v", (("\ufffdq", b"x"),), 1, offset) for offset in (8, 9)]
    assert fetched(batch, 8).records == expected


@given(records, st.booleans(), st.sampled_from((0, -1 << 63, (1 << 63) - 1, (1 << 63) - (1 << 40))))
def test_gzip_batch_reads_like_uncompressed_one(
    given_: list[Record], append_time: bool, base_ms: int
) -> None:
    def read(batch: bytes) -> list[Record]:
        if append_time:
            batch = batch[:22] + bytes([batch[22] | 8]) + batch[23:]
        batch = batch[:27] + struct.pack(">q", base_ms) + batch[35:]
        answer = (0, 0, 99, 99, [], sealed(batch, 5))
        return Fetched("t-0", 5, answer, append_time=append_time).records

    plain = ours(*given_)
    compress = zlib.compressobj(wbits=31)
    body = compress.compress(plain[HEADER_BYTES:]) + compress.flush()
    size = (len(body) + HEADER_BYTES - 12).to_bytes(4, "big")
    attributes = bytes([plain[22] | 1])
    packed = plain[:8] + size + plain[12:22] + attributes + plain[23:HEADER_BYTES] + body
    assert read(packed) == read(plain)
    odd = [*given_, Record(b"", None, (("zzqzz", None),), 1 << 41)]
    batch = ours(*odd)
    named = read(batch.replace(b"zzqzz", b"zz\xffzz"))
    assert named[:-1] == read(batch)[:-1]
    assert named[-1].headers == (("zz\ufffdzz", None),)
    assert named[-1].timestamp_ms == read(batch)[-1].timestamp_ms


def test_gzip_bomb_takes_little_memory() -> None:
    batch = sealed(foreign(1, gzip=True, value=bytes(200 << 20)), 0)
    assert len(batch) < 1 << 20
    tracemalloc.start()
    try:
        assert [each.value for each in fetched(batch).records] == [None]
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("is_ours", [True, False])
def test_only_own_undecodable_checkpoint_stops(is_ours: bool) -> None:
    claim = ours(encode_claim(Claim(LOG_VERSION, "c", "o", "")), producer_id=7, transactional=True)
    builder = DefaultRecordBatchBuilder(2, 0, 1, 7 if is_ours else 8, 0, 1, 1 << 20)
    builder.append(0, 1, b"progress", b"{}", [])
    packed = bytearray(builder.build())
    packed[22] |= ZSTD
    scan = CheckpointScan("checkpoint-0")
    scan.note(fetched(sealed(claim, 0) + sealed(bytes(packed), 1), producers=True).records)
    assert [stop.code for stop in scan.stops()] == (["unreadable"] if is_ours else [])
    assert scan.foreign == (0 if is_ours else 1)


def test_codes_unknown_to_library_are_retriable() -> None:
    assert {74, 75, 78} <= RETRIABLE


async def _send(error: Exception) -> None:
    """Write records as promotion does, to two topics; writing to one of them fails."""

    class Failing:
        transaction_timeout_s = 15.0
        late_until_s = 0.0

        async def add(self, partitions: Any, backoff: Any) -> None: ...

        async def produce(self, batches: Any, backoff: Any) -> Any:
            raise error

    settings = KafkaSettings(bootstrap_servers=("127.0.0.1:1",), instance_id="one")
    writer, _other = promotion_writers(Client(settings), 0, "p0/", default_bytes)
    writer.producer, writer.claimed = cast(Producer, Failing()), True
    record = Record(b"k", b"v")
    await writer.send([Copy("other", 0, record), Copy("target", 3, record)])


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
async def test_refused_batch_becomes_cause(code: int, cause: str, passing: bool) -> None:
    with pytest.raises(Refused) as raised:
        await _send(BatchRefused(("target", 3), code, None))
    assert raised.value.indexes == [1]
    found = raised.value.cause
    expected = (cause, "target", 3, passing)
    assert (found.code, found.topic, found.partition, found.passing) == expected
    assert "target-3" in found.message


LOST = Unknown
ERRORS: list[tuple[Exception, type[Exception]]] = [
    (BatchUnknown(("t", 0), "no answer"), LOST),
    *(
        (BatchRefused(("target", 0), code, None), LOST)
        for code in (
            Code.OUT_OF_ORDER_SEQUENCE,
            Code.INVALID_TXN_STATE,
            Code.UNSUPPORTED_VERSION,
            Code.TRANSACTION_ABORTABLE,
        )
    ),
    (ProducerFenced(), Fenced),
]


@pytest.mark.parametrize(("error", "raised"), ERRORS)
async def test_lost_producer_state_blames_no_record(
    error: Exception, raised: type[Exception]
) -> None:
    with pytest.raises(raised):
        await _send(error)


def test_codes_are_described_in_words() -> None:
    assert describe(Code.MESSAGE_TOO_LARGE) == "message too large"
    assert describe(9999) == "error 9999"
    assert not [code for code in range(134) if describe(code) == f"error {code}"]


# --- batches beside those of the client library ---------------------------------------------------

NOW_MS = 1_700_000_000_123

large = st.builds(lambda byte, size: byte * size, st.binary(min_size=1, max_size=1), st.integers(
    60, 70_000
))  # fmt: skip
content = st.none() | st.binary(max_size=200) | large
headers = st.lists(st.tuples(st.text(max_size=70), st.none() | st.binary(max_size=90)), max_size=5)
many_headers = st.integers(60, 70).map(lambda count: [("h", b"")] * count)
timestamps = st.just(-1) | st.integers(0, 5000) | st.integers(0, (1 << 63) - 1)
plain = (headers | many_headers).map(tuple)
any_record = st.builds(Record, content, content, plain | plain.map(encode_headers), timestamps)
runs = st.lists(any_record, min_size=1, max_size=8)
long_runs = st.builds(lambda some, count: (some * count)[:count], runs, st.integers(1, 300))
producers = st.tuples(
    st.integers(-1, (1 << 63) - 1), st.integers(-1, (1 << 15) - 1), st.integers(-1, (1 << 31) - 1)
)
EDGES = (-1, -1, -1), ((1 << 63) - 1, (1 << 15) - 1, (1 << 31) - 1)


def library_batch(
    run: Sequence[Record], producer: tuple[int, int, int], transactional: bool
) -> bytes:
    builder = DefaultRecordBatchBuilder(2, 0, int(transactional), *producer, (1 << 31) - 1)
    for number, each in enumerate(run):
        at_ms = NOW_MS if each.timestamp_ms < 0 else each.timestamp_ms
        builder.append(number, at_ms, each.key, each.value, list(each.headers))
    return bytes(builder.build())


def our_batch(body: Body, producer: tuple[int, int, int], transactional: bool = False) -> bytes:
    id, epoch, sequence = producer
    return encode_batch(
        body, producer_id=id, epoch=epoch, sequence=sequence, transactional=transactional
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        @staticmethod
        def time() -> float:
            return (NOW_MS + 0.5) / 1000

    monkeypatch.setattr(batch, "time", Clock)


@pytest.mark.usefixtures("clock")
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
    encoded = our_batch(body, producer, transactional)
    assert encoded == library_batch(run, producer, transactional)
    assert (body.count, body.batch_bytes) == (len(run), len(encoded))


@pytest.mark.usefixtures("clock")
@given(runs | long_runs, st.integers(HEADER_BYTES, 5000))
def test_split_batches_keep_order_and_fill_limit(run: list[Record], bytes_max: int) -> None:
    first = 0
    while first < len(run):
        body = batch_body(run[first:], bytes_max)
        part = run[first : first + body.count]
        assert our_batch(body, EDGES[0]) == library_batch(part, EDGES[0], False)
        assert body.batch_bytes <= bytes_max or body.count == 1
        first += body.count
        longer = [*part, *run[first : first + 1]]
        assert longer == part or len(library_batch(longer, EDGES[0], False)) > bytes_max
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
