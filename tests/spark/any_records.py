"""Records of all sorts for tests of the facts: well-formed ones, damaged ones, and any others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from txbroker.core.decoding import Malformed, NewerVersion
from txbroker.core.encoding import (
    DEFAULT_PREFIX,
    encode_half,
    encode_kept,
    encode_marker,
    installation_headers,
    kept_tombstones,
    promoted_headers,
)
from txbroker.core.records import (
    Attributes,
    CheckPolicy,
    Half,
    Header,
    Marker,
    MarkerKind,
    Message,
    ParkedCopy,
    Record,
    Source,
    State,
)
from txbroker.core.routing import make_id
from txbroker.kafka.tools.audit_access import StoredRecord
from txbroker.spark.facts.bounds import as_row

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

AT_MS = 1_700_000_000_123
PARTITION = 3
TEXTS = ("", "a", "ä€😀", "a b", "1/2", "x" * 300, "null", '"', "\\", "}", "{", "txb-id")
BYTES = (None, b"", b"a", b"b", b"ab", b"\x00", b"\xff\xfe", b"null", b"1/2", b"k" * 50)
STAMPS = (0, -2, 1 << 62, -1 << 62, (1 << 63) - 1, -1 << 63)
"""Timestamps in ms; some are far beyond what 64 bits hold in microseconds."""
NAMES = ("", "a", "ab", "b", "txb-v", "txb-id", "txb-seq", "txb-ts", "ä")


def frame(spark: SparkSession, records: Iterable[Record], topic: str = "t") -> DataFrame:
    """Return records as the Kafka source gives them; the offset is the place in the sequence."""
    from txbroker.spark.facts.topics import KAFKA

    rows = [as_row(topic, PARTITION, each) for each in stored(records)]
    return spark.createDataFrame(rows, KAFKA)


def stored(records: Iterable[Record]) -> list[StoredRecord]:
    """Return records as a topic holds them that gives its own time to those without one."""
    return [
        StoredRecord(
            *(r.key, r.value, tuple(r.headers)),
            AT_MS if r.timestamp_ms == -1 else r.timestamp_ms,
            offset,
            append_time=r.timestamp_ms == -1,
        )
        for offset, r in enumerate(records)
    ]


def rows_of(facts: DataFrame) -> dict[int, Row]:
    return {row["offset"]: row for row in facts.collect()}


def some_headers(rng: random.Random) -> tuple[Header, ...]:
    return tuple((rng.choice(NAMES), rng.choice(BYTES)) for _ in range(rng.choice((0, 0, 1, 3))))


def some_message(rng: random.Random) -> Message:
    return Message(
        rng.choice(("orders", "bills", "o.p-q_r")),
        rng.choice(BYTES),
        rng.choice(BYTES),
        some_headers(rng),
        rng.choice((0, 1, 17)),
        rng.choice((None, 0, AT_MS)),
    )


def some_half(rng: random.Random) -> Half:
    policy = CheckPolicy(
        rng.choice((6.0, 0.0, 0.5, 1e9, 1e-07, 0.1 + 0.2)), 30.0, rng.choice((1, 15, 1000)), 5.0
    )
    return Half(
        make_id(
            rng.choice((PARTITION, PARTITION, 65535)), rng.getrandbits(48), rng.getrandbits(64)
        ),
        rng.choice(TEXTS),
        tuple(some_message(rng) for _ in range(rng.choice((1, 1, 2, 3)))),
        Attributes(rng.choice((None, "", "o", "ä€")), rng.choice((None, "", "d", "ä€"))),
        policy,
    )


def some_marker(rng: random.Random) -> Marker:
    kind = rng.choice(list(MarkerKind))
    return Marker(
        1,
        kind,
        make_id(PARTITION, rng.getrandbits(48), rng.getrandbits(64)),
        half=rng.choice((-1, 0, 10**15)),
        source=rng.choice(list(Source)),
        group=rng.choice(TEXTS),
        by=rng.choice(TEXTS),
        reason=rng.choice(("", "due", "asked")),
        round=rng.choice((0, 1, 7)),
        number=rng.choice((0, 1, 15)),
        claim=rng.choice(TEXTS),
        endpoint=rng.choice(TEXTS),
        previous=rng.choice(TEXTS),
        later_s=rng.choice((0.0, 5.0, 0.25, 3600.0, 1e-05)),
        contents=rng.choice((0, 2)) if kind is MarkerKind.COMMIT else 0,
    )


# --- damage ----------------------------------------------------------------------------------

FIRSTS = (b"", b"1 ", b"01", b"0", b"2", b"3", b"-1", b"+1", b"1\n", b"1 ts ts", b"1 v", b"1 id",
           b"1 x", b"99999999999999999999", b"\xff", b"1  ts", b"1 ts", None)  # fmt: skip
VALUES = (b"", None, b"\xff", b"1/1", b"0/1", b"1/0", b"0/1\n", b" 0/1", b"+1", b"1/2/3", b"/",
           b"7", b"-1", b"1_0", b"1 ", b"6/30/15", b"6/30/0/5", b"nan/1/1/1", b"1e3/1/1/1",
           b"-1/1/1/1",
           b"1e10/1/1/1", b"6/30/15/5/1", "٣".encode(), b"0/00000000000000000003")  # fmt: skip


def damaged(rng: random.Random, record: Record) -> Record:
    """Return a record in which something of its headers, key or value is another."""
    headers = list(record.headers)
    if not headers or rng.random() < 0.1:
        return msgspec.structs.replace(record, value=rng.choice(BYTES))
    at = rng.randrange(min(len(headers), 9))
    name, value = headers[at]
    what = rng.randrange(5)
    if what == 0:
        del headers[at]
    elif what == 1:
        headers.insert(at, headers[rng.randrange(len(headers))])
    elif what == 2:
        headers[at] = (rng.choice((*NAMES, "txb-check")), value)
    else:
        headers[at] = (name, rng.choice(FIRSTS if at == 0 else VALUES))
    return msgspec.structs.replace(record, headers=tuple(headers))


JSON = (
    b"", b"{}", b"null", b"[]", b"5", b"{", b"\xff", b'{"v":1}', b'{"v":3}', b'{"v":"2"}',
    b'{"v":2,"kind":7}', b'{"v":3,"kind":7}', b'{"v":1,"kind":"commit"}',
    b'{"v":1,"kind":"nothing","id":"ID"}',
    b'{"v":1,"kind":"commit","id":"ID"}', b' {"id":"ID", "v":1, "kind":"commit"} ',
    b'{"v":1,"kind":"commit","id":"ID"} x', b'{"v":1,"kind":"commit","id":"ID"}{"v":1}',
    b'{"v":1,"kind":"commit","id":"ID","group":5}', b'{"v":1,"kind":"commit","id":"ID","by":null}',
    b'{"v":1,"kind":"commit","id":"ID","round":"1"}', b'{"v":1,"kind":"commit","id":"ID","new":{}}',
    b'{"v":1,"kind":"commit","id":"ID","contents":-1}', b"{'v':1,'kind':'commit','id':'ID'}",
    b'{"v":1,"kind":"park","id":"ID","contents":1}',
    b'{"v":1,"kind":"commit","id":"ID","half":1.5}',
    b'{"v":1,"kind":"later","id":"ID","later_s":7}',
    b'{"v":1,"kind":"later","id":"ID","later_s":NaN}',
    b'{"v":1,"kind":"commit","id":"ID","source":"nobody"}', b'{"v":0,"kind":"commit","id":"ID"}',
    b'{"v":1,"kind":"commit","id":"ID","by":"\xff"}', b'{"v":3,"kind":"commit","id":"ID"}',
    b'{"v":1,"kind":"commit","id":"ID","by":"\\u00e4 \\" }{ ,"}',
    b'{"v":1,"kind":"commit","id":""}',
    b'{"v":1,"kind":"comm\\u0069t","id":"ID"}', b'{"v":1,"kind":"commit","id":"ID","half":01}',
    b'{"v":1,"kind":"later","id":"ID","later_s":1e400}',
    b'{"v":1,"kind":"check","id":"ID","round":99999999999}',
    b'{"v":1,"kind":"commit","id":"ID","contents":2147483648}',
    b'{"v":1,"kind":"commit","id":"ID","contents":2147483647}',
    b'{"v":' + b"[" * 5000, b'{"a":' * 5000,
)  # fmt: skip


def outcome(decode: Callable[[Record], Any], record: Record) -> Any:
    """Return what the codec reads, or the kind of error."""
    try:
        return decode(record)
    except (Malformed, NewerVersion) as error:
        return type(error)


# --- any records -----------------------------------------------------------------------------

_ID_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_OUR_NAMES = (
    *("txb-v", "txb-id", "txb-group", "txb-topic", "txb-part", "txb-seq", "txb-ts", "txb-check"),
    *("txb-order", "txb-dedup", "txb-kept", "txb-key", "txb-tombstone", "txb-installation"),
)
_STATES = (b'{"state":"parked","half":1,"at_ms":2}', b'{"state":"refused","half":"1"}', b"{}")


def an_id(seed: int) -> str:
    """Return a text that looks like an id of this partition, or nearly."""
    rng = random.Random(seed)
    if rng.random() < 0.5:
        return make_id(PARTITION, rng.getrandbits(48), rng.randrange(9))
    digits = rng.choices(rng.choice(("0", "01", "7Z", _ID_DIGITS)), k=rng.choice((26, 26, 25, 4)))
    digits[rng.randrange(len(digits))] = rng.choice("-+. \n\x00/eEILOUabä😀")
    return "".join(digits)


_IDS = st.integers(0, 1 << 32).map(an_id)


def _small() -> st.SearchStrategy[bytes | None]:
    return st.one_of(
        st.sampled_from((*BYTES, *VALUES, *FIRSTS, *JSON, *_STATES, b"0/2147483647", b"0/2")),
        st.binary(max_size=12),
        st.text(max_size=12).map(str.encode),
        _IDS.map(str.encode),
        st.integers().map(lambda number: str(number).encode()),
        st.floats().map(lambda number: f"{number}/{number}/3/1".encode()),
    )


@st.composite
def foreign(draw: st.DrawFn) -> Record:
    names = st.one_of(st.sampled_from(_OUR_NAMES), st.text(max_size=5))
    headers = draw(st.lists(st.tuples(names, _small()), max_size=4))
    if draw(st.booleans()):
        first = draw(st.sampled_from(("txb-id", "txb-v", "txb-installation")))
        headers.insert(0, (first, draw(_small())))
    key = draw(st.one_of(_small(), _IDS.map(lambda id: f"{id}/0".encode())))
    stamp_ms = draw(st.sampled_from((*STAMPS, *[-1] * len(STAMPS))))
    return Record(key, draw(_small()), tuple(headers), stamp_ms)


@st.composite
def nearly_ours(draw: st.DrawFn) -> Record:
    """Return a record as our encoder writes it, mostly with something that is another's."""
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    half, number = some_half(rng), draw(st.integers(0, 4))
    if number == 0:
        record = rng.choice(encode_half(half))
    elif number == 1:
        record = encode_marker(some_marker(rng))
    elif number == 2:
        kept = ParkedCopy(half, 7, AT_MS, rng.choice(list(State)), None, 5)
        record = rng.choice((*encode_kept(kept), *kept_tombstones(half.id, 2)))
    else:
        message = half.messages[0]
        whose = installation_headers(rng.choice((DEFAULT_PREFIX, "shop")))
        headers = promoted_headers(half.id, 0, rng.choice((1, 2)), message, whose)
        record = Record(message.key, message.value, headers)
    what = draw(st.integers(0, 5))
    if what == 0:
        return record
    if what == 1:
        return msgspec.structs.replace(record, key=draw(_small()))
    if what == 2:
        return msgspec.structs.replace(record, value=draw(_small()))
    if what == 3 and record.headers:
        at = draw(st.integers(0, len(record.headers) - 1))
        name, _ = record.headers[at]
        changed = (*record.headers[:at], (name, draw(_small())), *record.headers[at + 1 :])
        return msgspec.structs.replace(record, headers=changed)
    return damaged(rng, record)


def any_records(count: int) -> list[Record]:
    """Return `count` generated records; one Spark job reads them all."""
    found: list[Record] = []
    batch = st.lists(st.one_of(foreign(), nearly_ours()), min_size=50, max_size=50)

    @settings(
        max_examples=count // 50,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(batch)
    def collect(some: list[Record]) -> None:
        found.extend(some)

    collect()
    return found
