"""The facts that Spark reads out of records agree with what the codec reads."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.spark.any_records import (
    AT_MS,
    JSON,
    PARTITION,
    damaged,
    frame,
    outcome,
    rows_of,
    some_half,
    some_marker,
)
from txbroker.core.decoding import (
    Malformed,
    NewerVersion,
    decode_half,
    decode_kept,
    decode_marker,
    is_content,
)
from txbroker.core.encoding import (
    DEFAULT_PREFIX,
    encode_contents,
    encode_half,
    encode_kept,
    encode_marker,
    installation_headers,
    kept_tombstones,
    promoted_headers,
)
from txbroker.core.records import (
    Cause,
    Header,
    Marker,
    MarkerKind,
    Message,
    ParkedCopy,
    Record,
    State,
)
from txbroker.core.routing import make_id, order_mark, parse_id

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession


def assert_broken(row: Row, expected: type, record: Record) -> None:
    assert row["why"] is not None, (expected, record)
    assert ("newer" in row["why"]) is (expected is NewerVersion), (row["why"], expected, record)


# --- the tests -------------------------------------------------------------------------------


INT_MAX = (1 << 31) - 1


class Hashes:
    """Checks that things have the same hash exactly if they are the same."""

    def __init__(self) -> None:
        self._by_thing: dict[object, int] = {}
        self._by_hash: dict[int, object] = {}

    def see(self, thing: object, value: int) -> None:
        assert self._by_thing.setdefault(thing, value) == value, thing
        assert self._by_hash.setdefault(value, thing) == thing, thing

    def __len__(self) -> int:
        return len(self._by_thing)


@pytest.mark.parametrize("seed", [1, 2])
def test_half_facts_are_what_the_codec_reads(spark: SparkSession, seed: int) -> None:
    from txbroker.spark.facts.messages import half_facts

    rng = random.Random(seed)
    good = [record for _ in range(300) for record in encode_half(some_half(rng))]
    records = good + [damaged(rng, rng.choice(good)) for _ in range(900)]
    rows = rows_of(half_facts(frame(spark, records)))
    assert len(rows) == len(records)
    bodies, headers, orders, kinds = Hashes(), Hashes(), Hashes(), set()
    for offset, record in enumerate(records):
        row, part = rows[offset], outcome(decode_half, record)
        kinds.add(part if isinstance(part, type) else None)
        if isinstance(part, type):
            assert_broken(row, part, record)
            continue
        assert row["why"] is None, (row["why"], record)
        message, policy = part.message, part.policy
        assert (row["id"], row["grp"]) == (part.id, part.group)
        assert (row["seq"], row["count"]) == (part.sequence, part.count)
        assert (row["topic"], row["target_partition"]) == (message.topic, message.partition)
        assert (row["timestamp_ms"], row["at_ms"]) == (message.timestamp_ms, AT_MS)
        bodies.see((message.key, message.value), row["body"])
        headers.see(message.headers, row["headers"])
        assert_void(row, part.id)
        if part.sequence:
            assert (row["dedup"], row["order_mark"], row["after_ms"]) == (None, None, None)
            continue
        assert row["dedup"] == part.attributes.dedup_key
        assert (row["after_ms"], row["interval_ms"], row["attempts_max"], row["timeout_ms"]) == (
            round(policy.after_s * 1000),
            round(policy.interval_s * 1000),
            policy.attempts_max,
            round(policy.timeout_s * 1000),
        )
        mark = order_mark(part.attributes.order_key, message.topic, message.key)
        assert (row["order_mark"] is None) is (mark is None)
        if mark is not None:
            orders.see(mark, row["order_mark"])
    assert kinds == {None, Malformed, NewerVersion}
    assert len(bodies) > 60
    assert len(headers) > 60
    assert len(orders) > 5


def assert_void(row: Row, id: str) -> None:
    try:
        parts = parse_id(id)
    except ValueError:
        assert (row["id_ms"], row["void"]) == (None, "id")
        return
    assert row["id_ms"] == parts.time_ms
    assert row["void"] == (None if parts.partition == PARTITION else "id")


@pytest.mark.parametrize("seed", [1, 2])
def test_op_facts_are_what_the_codec_reads(spark: SparkSession, seed: int) -> None:
    from txbroker.spark.facts.messages import op_facts

    rng = random.Random(seed)
    id = make_id(PARTITION, AT_MS, seed)
    halves = [some_half(rng) for _ in range(20)]
    contents = [record for half in halves for record in encode_contents(half, half.messages)]
    records = [encode_marker(some_marker(rng)) for _ in range(300)]
    records += [Record(id.encode(), text.replace(b"ID", id.encode())) for text in JSON]
    records += [Record(id.encode(), None), Record(None, records[0].value)]
    records += [Record(b"x", records[0].value), Record(b"x", _marker("x"))]
    other = make_id(PARTITION + 1, AT_MS, seed)
    records.append(Record(other.encode(), _marker(other)))
    records += contents + [damaged(rng, rng.choice(contents)) for _ in range(60)]
    rows = rows_of(op_facts(frame(spark, records)))
    assert len(rows) == len(records)
    for offset, record in enumerate(records):
        row = rows[offset]
        if is_content(record):
            assert_content(row, record)
            continue
        assert (row["content"], row["content_count"]) == (None, None)
        marker = outcome(decode_marker, record)
        if isinstance(marker, type):
            assert_broken(row, marker, record)
            continue
        if not _counts(marker.id):
            assert row["why"] is not None
            continue
        assert row["why"] is None, (row["why"], record)
        assert (row["id"], row["kind"], row["source"]) == (marker.id, marker.kind, marker.source)
        # The reason of a decision is a person's text.
        reason = marker.reason if marker.kind is MarkerKind.CHECK else ""
        assert (row["grp"], row["reason"]) == (marker.group, reason)
        assert (row["round"], row["number"]) == (min(marker.round, INT_MAX), marker.number)
        assert row["later_ms"] == round(marker.later_s * 1000)
        assert row["contents_count"] == min(marker.contents, INT_MAX)
        assert row["id_ms"] == parse_id(marker.id).time_ms


def _marker(id: str) -> bytes | None:
    return encode_marker(Marker(1, MarkerKind.COMMIT, id)).value


def _counts(id: str) -> bool:
    try:
        return parse_id(id).partition == PARTITION
    except ValueError:
        return False


def assert_content(row: Row, record: Record) -> None:
    part = outcome(decode_half, record)
    if isinstance(part, type):
        assert_broken(row, part, record)
        return
    assert row["why"] is None
    content, message = row["content"], part.message
    assert (row["id"], row["content_count"], content["seq"]) == (part.id, part.count, part.sequence)
    assert (content["topic"], content["target_partition"]) == (message.topic, message.partition)
    assert content["timestamp_ms"] == message.timestamp_ms


@pytest.mark.parametrize("seed", [1, 2])
def test_parked_facts_are_what_the_codec_reads(spark: SparkSession, seed: int) -> None:
    from txbroker.spark.facts.messages import parked_facts

    rng = random.Random(seed)
    good: list[Record] = []
    for state in (State.PENDING, State.PARKED, State.REFUSED, State.COMMITTED) * 15:
        half = some_half(rng)
        cause = Cause("unknown_topic", "not there", "t", 0) if state is State.REFUSED else None
        good += encode_kept(ParkedCopy(half, 7, AT_MS, state, cause, 5))
        good += kept_tombstones(half.id, len(half.messages))
    records = good + [damaged(rng, rng.choice(good)) for _ in range(150)]
    records += [
        msgspec.structs.replace(rng.choice(good), key=key)
        for key in (None, b"", b"x", b"x/", b"x/-1", b"x/1\n", b"\xff/1", b"/0", b"x/1/2")
    ]
    rows = rows_of(parked_facts(frame(spark, records)))
    assert len(rows) == len(records)
    for offset, record in enumerate(records):
        row, kept = rows[offset], outcome(decode_kept, record)
        if isinstance(kept, type):
            assert_broken(row, kept, record)
            continue
        assert row["why"] is None, (row["why"], record)
        assert (row["id"], row["seq"]) == (kept.id, kept.sequence)
        assert row["tombstone"] is (kept.part is None)
        facts = kept.facts
        assert row["state"] == (None if facts is None else facts.state)
        assert row["cause"] == (None if facts is None or not facts.cause else facts.cause.code)
        if facts is not None:
            assert row["due_ms"] == facts.at_ms + round(kept.part.policy.after_s * 1000)


@pytest.mark.parametrize("prefix", [DEFAULT_PREFIX, "shop"])
def test_a_promoted_record_has_the_hashes_of_its_half_message(
    spark: SparkSession, prefix: str
) -> None:
    from txbroker.spark.facts.messages import half_facts, visible_facts

    rng = random.Random(5)
    halves, promoted, reported = [], [], []
    for _ in range(150):
        half = some_half(rng)
        count = len(half.messages)
        for number, (message, record) in enumerate(
            zip(half.messages, encode_half(half), strict=True)
        ):
            headers = promoted_headers(
                half.id, number, count, message, installation_headers(prefix)
            )
            halves.append(record)
            promoted.append(Record(message.key, message.value, headers))
            reported.append((half.id, number, count))
    before = rows_of(half_facts(frame(spark, halves)))
    after = rows_of(visible_facts(frame(spark, promoted, "orders"), prefix))
    assert before.keys() == after.keys()
    for offset, (id, number, count) in enumerate(reported):
        row, was = after[offset], before[offset]
        assert (row["why"], row["id"], row["topic"], row["append_time"]) == (
            None,
            id,
            "orders",
            True,
        )
        assert row["id_ms"] == was["id_ms"]
        assert row["body"] == was["body"]
        as_read = (row["seq"], row["count"], row["headers"])
        as_one = (0, 1, row["headers_if_alone"])
        # A single message whose own first header looks like our second can be read in two ways.
        assert (number, count, was["headers"]) in (as_read, as_one)
        if row["headers_if_alone"] is None or count > 1:
            assert as_read == (number, count, was["headers"])


def test_a_copy_holds_what_its_half_message_holds(spark: SparkSession) -> None:
    from txbroker.spark.facts.messages import half_facts, parked_facts

    rng = random.Random(6)
    halves, copies = [], []
    for state in (State.PENDING, State.PARKED, State.REFUSED) * 40:
        half = some_half(rng)
        halves += encode_half(half)
        copies += encode_kept(ParkedCopy(half, 7, AT_MS, state, None, 5))
    before = rows_of(half_facts(frame(spark, halves)))
    dropped = kept_tombstones(make_id(PARTITION, AT_MS, 1), 1)
    after = rows_of(parked_facts(frame(spark, [*copies, *dropped])))
    held = (
        *("id", "grp", "seq", "count", "topic", "target_partition"),
        *("body", "headers", "timestamp_ms"),
    )
    for offset, was in before.items():
        assert [after[offset][name] for name in held] == [was[name] for name in held]
    tombstone = after[len(copies)]
    assert tombstone["tombstone"]
    assert [tombstone[name] for name in held if name not in ("id", "seq")] == [None] * 7


def test_each_installation_takes_what_it_promoted_itself(spark: SparkSession) -> None:
    from txbroker.spark.facts.messages import visible_facts

    prefixes = (DEFAULT_PREFIX, "shop", "shop2", "Shop", "a" * 200)
    # A user's own headers may say anything, and a consumer may forward those that it was given.
    message = Message("t", b"k", b"v", (*installation_headers("shop"), ("txb-id", b"theirs")))
    ids = [make_id(PARTITION, AT_MS, number) for number in range(2 * len(prefixes))]
    records = [
        Record(b"k", b"v", promoted_headers(id, 0, count, message, installation_headers(prefix)))
        for count in (1, 2)
        for prefix, id in zip(prefixes, ids[(count - 1) * len(prefixes) :], strict=False)
    ]
    records += [
        Record(b"k", b"v", headers)
        for headers in (
            installation_headers("shop"),
            (*installation_headers("shop"), ("a", b"b"), ("txb-id", ids[0].encode())),
            (*installation_headers("shop"), *installation_headers("shop2")),
            (("txb-installation", None), ("txb-id", ids[0].encode())),
            (("txb-installation", b""), ("txb-id", ids[0].encode())),
            # Nobody has written that one.
            (("txb-installation", b"txbroker"), ("txb-id", ids[0].encode())),
        )
    ]
    read = frame(spark, records)
    for place, prefix in enumerate(prefixes):
        rows = rows_of(visible_facts(read, prefix))
        assert {row["id"]: (row["count"], row["why"]) for row in rows.values()} == {
            ids[place]: (1, None),
            ids[place + len(prefixes)]: (2, None),
        }
        assert len({row["headers"] for row in rows.values()}) == 1


def test_only_records_with_our_first_header_are_visible_facts(spark: SparkSession) -> None:
    from txbroker.spark.facts.messages import visible_facts

    id = make_id(PARTITION, AT_MS, 1)
    ours: Header = ("txb-id", id.encode())
    records = [
        Record(b"k", b"v"),
        Record(b"k", b"v", (("a", b"b"), ours)),
        Record(b"k", b"v", (ours,)),
        Record(b"k", b"v", (("txb-id", b"no id"),)),
        Record(b"k", b"v", (("txb-id", None),)),
    ]
    rows = rows_of(visible_facts(frame(spark, records), DEFAULT_PREFIX))
    assert {offset: row["why"] is None for offset, row in rows.items()} == {
        2: True,
        3: False,
        4: False,
    }


def test_hashes_distinguish_null_empty_and_header_ends(spark: SparkSession) -> None:
    from txbroker.spark.facts.messages import visible_facts

    id: Header = ("txb-id", make_id(0, AT_MS, 1).encode())
    lists: list[tuple[Header, ...]] = [
        (), (("", None),), (("", b""),), (("a", None),), (("a", b""),), (("a", b"b"),),
        (("ab", b""),), (("a", b"b"), ("c", None)), (("a", None), ("b", b"c")), (("a", b"bc"),),
        (("a", None), ("a", b"a")), (("a", b"a"), ("a", None)), (("a", b"a"), ("a", b"")),
        (("a", b""), ("a", b"a")), (("a", b"x"), ("b", b"y")), (("b", b"y"), ("a", b"x")),
        (("a", None), ("a", None)), (("a", None), ("a", None), ("a", None)),
    ]  # fmt: skip
    bodies = [(None, None), (b"", None), (None, b""), (b"", b""), (b"a", b"b"), (b"ab", b""),
              (b"", b"ab"), (b"a", None), (None, b"a")]  # fmt: skip
    records = [Record(None, None, (id, *each)) for each in lists]
    records += [Record(key, value, (id,)) for key, value in bodies]
    rows = rows_of(visible_facts(frame(spark, records), DEFAULT_PREFIX))
    assert len({rows[n]["headers"] for n in range(len(lists))}) == len(lists)
    assert len({rows[len(lists) + n]["body"] for n in range(len(bodies))}) == len(bodies)


def test_time_and_partition_come_out_of_any_id(spark: SparkSession) -> None:
    from pyspark.sql import functions as F

    from txbroker.spark.facts.messages import id_partition, id_time_ms, is_id

    rng = random.Random(9)
    edges = (0, 1, (1 << 48) - 1, 1 << 47, 15, 16)
    ids = [
        make_id(p, t, r) for p in (0, 1, 65535, 32768) for t in edges for r in (0, (1 << 64) - 1)
    ]
    ids += [
        make_id(rng.getrandbits(16), rng.getrandbits(48), rng.getrandbits(64)) for _ in range(200)
    ]
    wrong = [
        ids[0] + "\n",
        ids[0][:-1],
        "8" + ids[0][1:],
        ids[0].lower() + "a",
        "I" + ids[0][1:],
        "",
    ]
    id = F.col("id")
    frame = spark.createDataFrame([(each,) for each in ids + wrong], "id string")
    read = frame.select("id", is_id(id), id_partition(id), id_time_ms(id)).collect()
    for text, known, partition, time_ms in read:
        if text in wrong:
            assert not known, text
        else:
            parts = parse_id(text)
            assert (known, partition, time_ms) == (True, parts.partition, parts.time_ms), text


# --- what users wrote ----------------------------------------------------------------------------


def test_only_the_secret_repeats_a_hash(spark: SparkSession) -> None:
    """Equal messages keep equal hashes; nothing of the user, and nothing of the secret, shows."""
    from pyspark.sql import functions as F

    from txbroker.spark.facts.keyed import HASH_OF_NOTHING, with_secret
    from txbroker.spark.facts.messages import headers_hash
    from txbroker.spark.session import setting

    rows = spark.createDataFrame(
        [(1, HASH_OF_NOTHING, "a@b.example"), (1, 7, "c"), (2, None, None)],
        "body bigint, headers bigint, dedup string",
    ).selectExpr("*", "if(body = 1, named_struct('body', body, 'headers', headers), NULL) content")
    secret, other = (f"txb-audit-secret:{digit * 64}" for digit in "ab")
    mine, theirs = with_secret(rows, secret), with_secret(rows, other)
    (one, two, three), (another, *_) = mine.collect(), theirs.collect()
    assert one.body == two.body != three.body
    assert len({1, one.body, another.body}) == 3
    assert (one.headers, three.headers) == (HASH_OF_NOTHING, None)
    assert two.headers not in (7, HASH_OF_NOTHING)
    assert len({"a@b.example", one.dedup, another.dedup, two.dedup}) == 4
    assert three.dedup is None
    assert (one.content.body, one.content.headers) == (one.body, one.headers)
    assert (two.content.headers, three.content) == (two.headers, None)
    (none,) = (
        spark.sql("SELECT array() AS h")
        .select(headers_hash(F.col("h").cast("array<struct<key: string, value: binary>>")))
        .collect()
    )
    assert none[0] == HASH_OF_NOTHING
    with setting(spark, "spark.sql.maxPlanStringLength", "100000"):
        plan = mine._jdf.queryExecution().toString()
    assert "sha2" in plan
    assert "a" * 64 not in plan
