"""Records: everything comes out as it went in, and damage is named, never a crash."""

import contextlib
import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.core_fuzz import fuzz
from tests.core.core_values import COMMITS, HALVES, HEADERS, IDS, KEPT, MARKERS, MESSAGES, WORDS
from tests.kit.logs import with_fields
from txbroker.config.settings import Settings
from txbroker.core.decoding import (
    Malformed,
    NewerVersion,
    decode_checkpoint,
    decode_half,
    decode_kept,
    decode_marker,
    is_content,
    join_parts,
)
from txbroker.core.encoding import (
    encode_claim,
    encode_contents,
    encode_half,
    encode_headers,
    encode_kept,
    encode_marker,
    encode_progress,
    installation_headers,
    kept_tombstones,
    promoted_headers,
)
from txbroker.core.records import (
    RECORD_VERSION,
    Anchor,
    Checkpoint,
    CheckPolicy,
    Claim,
    Half,
    Header,
    Marker,
    Message,
    ParkedCopy,
    Record,
)

ID = "0000" + "0" * 22
DECODERS: list[Callable[[Record], object]] = [
    decode_half,
    decode_marker,
    decode_checkpoint,
    decode_kept,
]


def half_with(**fields: object) -> Half:
    return with_fields(Half(ID, "g", (Message("t", partition=0),)), **fields)


# --- round trips -----------------------------------------------------------------------------


@fuzz
@given(HALVES)
def test_a_half_message_comes_back_whole(half: Half) -> None:
    parts = [decode_half(record) for record in encode_half(half)]
    assert [(part.sequence, part.count) for part in parts] == [
        (n, len(half.messages)) for n in range(len(half.messages))
    ]
    assert join_parts(parts) == half
    for record, message in zip(encode_half(half), half.messages, strict=True):
        assert (record.key, record.value) == (message.key, message.value)
        assert record.headers[len(record.headers) - len(message.headers) :] == message.headers


@fuzz
@given(HALVES, st.lists(MESSAGES, min_size=1, max_size=3).map(tuple))
def test_replaced_messages_come_back_whole(half: Half, messages: tuple[Message, ...]) -> None:
    records = encode_contents(half, messages)
    assert all(is_content(record) for record in records)
    assert tuple(decode_half(record).message for record in records) == messages


@fuzz
@given(MARKERS | COMMITS)
def test_a_marker_comes_back(marker: Marker) -> None:
    record = encode_marker(marker)
    assert not is_content(record)
    assert record.key == marker.id.encode()
    assert decode_marker(record) == marker


@fuzz
@given(KEPT)
def test_a_copy_comes_back_whole_and_has_its_tombstones(kept: ParkedCopy) -> None:
    records = encode_kept(kept)
    parts = [decode_kept(record) for record in records]
    halves = [part.part for part in parts if part.part is not None]
    assert join_parts(halves) == kept.half
    facts = parts[0].facts
    assert facts is not None
    assert kept == ParkedCopy(
        kept.half,
        facts.half,
        facts.at_ms,
        facts.state,
        facts.cause,
        facts.decided_ms,
        checks=facts.checks,
    )
    assert all(part.facts is None for part in parts[1:])
    tombstones = kept_tombstones(kept.half.id, len(kept.half.messages))
    assert [record.key for record in tombstones] == [record.key for record in records]
    assert all(record.value is not None for record in records)
    for n, tombstone in enumerate(tombstones):
        gone = decode_kept(tombstone)
        assert (gone.id, gone.sequence, gone.part) == (kept.half.id, n, None)


@fuzz
@given(WORDS, WORDS, st.lists(IDS, max_size=3).map(tuple), st.integers(0, 2**62))
def test_claim_and_progress_come_back(
    claim: str, owner: str, deferred: tuple[str, ...], op: int
) -> None:
    first = Claim(1, claim, owner, "http://x")
    assert decode_checkpoint(encode_claim(first)) == first
    progress = Checkpoint(1, claim, op, op + 1, Anchor(op, 7), None, deferred)
    assert decode_checkpoint(encode_progress(progress)) == progress


@pytest.mark.parametrize(
    "policy",
    [
        CheckPolicy(0.1, 1234567.875, 1, 0.30000000000000004),
        CheckPolicy(6, 30, 15, 5),
        CheckPolicy(1e9, 0.0, 10**9, 1e-9),
    ],
)
def test_a_policy_keeps_every_digit(policy: CheckPolicy) -> None:
    assert decode_half(encode_half(half_with(policy=policy))[0]).policy == policy


@pytest.mark.rule("topics")
def test_a_users_headers_like_ours_stay_the_users() -> None:
    theirs = (("txb-ts", b"1"), ("txb-order", None), ("txb-ts", b"\xff"), ("txb-v", b"9"))
    half = half_with(messages=(Message("t", partition=0, headers=theirs),))
    part = decode_half(encode_half(half)[0])
    assert part.message.headers == theirs
    assert part.message.timestamp_ms is None
    assert part.attributes.order_key is None


@pytest.mark.rule("topics")
def test_promoted_headers_start_with_ours() -> None:
    message = Message("t", headers=(("txb-id", b"theirs"), ("a", None), ("a", b"2")))
    assert promoted_headers(ID, 0, 1, message) == (("txb-id", ID.encode()), *message.headers)
    assert promoted_headers(ID, 1, 3, message)[:2] == (("txb-id", ID.encode()), ("txb-seq", b"1/3"))


@pytest.mark.rule("topics")
def test_promoted_headers_say_whose_they_are_unless_the_prefix_is_the_default() -> None:
    message = Message("t", headers=(("txb-installation", b"theirs"), ("a", None)))
    assert installation_headers(Settings.model_fields["topic_prefix"].default) == ()
    shops = installation_headers("shop")
    assert shops == (("txb-installation", b"shop"),)
    ours = (*shops, ("txb-id", ID.encode()))
    assert promoted_headers(ID, 0, 1, message, shops) == (*ours, *message.headers)
    several = (*ours, ("txb-seq", b"1/3"), *message.headers)
    assert promoted_headers(ID, 1, 3, message, shops) == several


@fuzz
@given(HEADERS, HEADERS)
def test_encoded_headers_are_to_readers_what_was_encoded(
    headers: tuple[Header, ...], others: tuple[Header, ...]
) -> None:
    encoded = encode_headers(headers)
    assert (tuple(encoded), len(encoded), encoded[1:]) == (headers, len(headers), headers[1:])
    # A record that was read is looked for among those that were written.
    assert {encoded: "ours"}[headers] == {headers: "ours"}[encoded] == "ours"
    same = headers == others
    assert (encoded == others) is (others == encoded) is (encoded == encode_headers(others)) is same


# --- what must not be written ----------------------------------------------------------------


@pytest.mark.parametrize(
    "half",
    [
        half_with(messages=(Message("t"),)),
        half_with(messages=(Message("t", partition=-1),)),
        half_with(messages=(Message("t", partition=0, timestamp_ms=-1),)),
        half_with(policy=CheckPolicy(after_s=float("nan"))),
        half_with(policy=CheckPolicy(interval_s=float("inf"))),
        half_with(policy=CheckPolicy(timeout_s=-1)),
        half_with(policy=CheckPolicy(attempts_max=0)),
    ],
)
def test_what_could_not_be_read_back_is_not_written(half: Half) -> None:
    with pytest.raises(ValueError):
        encode_half(half)


# --- damage ----------------------------------------------------------------------------------


JSON = st.recursive(
    st.none() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(["v", "kind", "id", "op", "half", "later_s", "contents"]), inner
        )
    ),
)
ANY_RECORD = st.builds(
    Record,
    st.none() | st.binary() | st.sampled_from([b"claim", b"progress", ID.encode() + b"/0"]),
    st.none() | st.binary() | JSON.map(lambda value: json.dumps(value).encode()),
    st.lists(st.tuples(st.sampled_from(["txb-v", "txb-id", "x"]), st.none() | st.binary())).map(
        tuple
    ),
)


@st.composite
def damaged(draw: st.DrawFn) -> Record:
    """A record of ours in which one header, the key or the value was changed."""
    records = [*encode_half(draw(HALVES)), *encode_kept(draw(KEPT)), encode_marker(draw(MARKERS))]
    record = draw(st.sampled_from(records))
    headers = list(record.headers)
    texts = st.sampled_from(
        [
            *(b"", b"1", b"2", b"-1", b"+1", b"1_0", b"nan", b"1/0", b"0/0", b"5/3", b"1e400"),
            *(b"\xff", b"6/30/0/5", b"inf/30/15/5", b"6/30/15/1e300", b"1 ts ts", b"1 id"),
            *(b"{}", b"[" * 9999, "١".encode(), b"9" * 5000),
        ]
    )
    bytes_or_none = st.none() | st.binary(max_size=8) | texts
    if headers and draw(st.booleans()):
        place = draw(st.integers(0, len(headers) - 1))
        change = draw(st.sampled_from(["drop", "double", "swap", "value"]))
        if change == "drop":
            del headers[place]
        elif change == "double":
            headers.insert(place, headers[place])
        elif change == "swap":
            headers[place], headers[0] = headers[0], headers[place]
        else:
            headers[place] = (headers[place][0], draw(bytes_or_none))
        return msgspec.structs.replace(record, headers=tuple(headers))
    if draw(st.booleans()):
        return msgspec.structs.replace(record, key=draw(bytes_or_none))
    return msgspec.structs.replace(record, value=draw(bytes_or_none))


@settings(fuzz, max_examples=2 * fuzz.max_examples)
@given(st.sampled_from(DECODERS), ANY_RECORD | damaged())
def test_any_record_reads_or_is_named_damaged(
    decode: Callable[[Record], object], record: Record
) -> None:
    with contextlib.suppress(Malformed, NewerVersion):
        assert decode(record) is not None


@pytest.mark.parametrize(
    "value",
    [
        b'{"v":1,"kind":"check","id":"' + ID.encode() + b'","x":' + b"[" * 100_000,
        b'{"v":1,"kind":"check","id":"\\ud800"}',
        b'{"v":1,"kind":"check","id":"\xff"}',
        b'{"v":1,"kind":"guess","id":"' + ID.encode() + b'"}',
        b'{"v":1,"kind":"rollback","contents":1,"id":"' + ID.encode() + b'"}',
        b'{"v":1,"kind":"commit","contents":-1,"id":"' + ID.encode() + b'"}',
        b'{"kind":"check"}',
        b"",
        None,
    ],
)
def test_a_marker_that_is_none(value: bytes | None) -> None:
    with pytest.raises(Malformed):
        decode_marker(Record(ID.encode(), value))


def test_a_marker_under_a_foreign_key_is_malformed() -> None:
    record = encode_marker(Marker(1, "park", ID))  # type: ignore[arg-type]
    with pytest.raises(Malformed, match="key"):
        decode_marker(msgspec.structs.replace(record, key=b"other"))


def test_newer_version_differs_from_damage() -> None:
    half = encode_half(half_with())[0]
    newer = (("txb-v", b"%d what ever" % (RECORD_VERSION + 1)), *half.headers[1:])
    with pytest.raises(NewerVersion):
        decode_half(msgspec.structs.replace(half, headers=newer))
    with pytest.raises(NewerVersion):
        decode_marker(Record(ID.encode(), b'{"v":%d,"kind":"unheard of"}' % (RECORD_VERSION + 1)))
    with pytest.raises(NewerVersion):
        decode_checkpoint(Record(b"progress", b'{"v":%d}' % (RECORD_VERSION + 1)))


def test_a_copy_under_another_transactions_key_is_malformed() -> None:
    half = half_with()
    record = encode_kept(ParkedCopy(half, 0, 0, "parked"))[0]  # type: ignore[arg-type]
    with pytest.raises(Malformed):
        decode_kept(msgspec.structs.replace(record, key=b"other/0"))
    with pytest.raises(Malformed):
        decode_kept(msgspec.structs.replace(record, key=half.id.encode() + b"/1"))
