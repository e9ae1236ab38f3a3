"""Hypothesis strategies for what travels: messages, half messages, markers, kept copies."""

from hypothesis import strategies as st

from txbroker.core.records import (
    Attempt,
    Attributes,
    Cause,
    CheckPolicy,
    CheckReason,
    Checks,
    Half,
    Header,
    Marker,
    MarkerKind,
    Message,
    ParkedCopy,
    Source,
    State,
)
from txbroker.core.routing import make_id

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
# Names like ours must pass as a user's own, also directly behind ours.
OURS = st.sampled_from(
    ["txb-v", "txb-id", "txb-ts", "txb-check", "txb-order", "txb-dedup", "txb-key", "txb-kept"]
)
BYTES = st.none() | st.binary(max_size=20)
HEADERS: st.SearchStrategy[tuple[Header, ...]] = st.lists(
    st.tuples(OURS | WORDS, BYTES | st.just(b"1")), max_size=4
).map(tuple)
SECONDS = st.floats(0, 1e9) | st.integers(0, 10**9).map(float)
POLICIES = st.builds(CheckPolicy, SECONDS, SECONDS, st.integers(1, 10**6), SECONDS)
IDS = st.builds(
    make_id, st.integers(0, 0xFFFF), st.integers(0, 2**48 - 1), st.integers(0, 2**64 - 1)
)
MESSAGES = st.builds(
    Message,
    topic=WORDS,
    key=BYTES,
    value=BYTES,
    headers=HEADERS,
    partition=st.integers(0, 2**31 - 1),
    timestamp_ms=st.none() | st.integers(0, 2**63 - 1),
)
HALVES = st.builds(
    Half,
    id=IDS,
    group=WORDS,
    messages=st.lists(MESSAGES, min_size=1, max_size=4).map(tuple),
    attributes=st.builds(Attributes, st.none() | WORDS, st.none() | WORDS),
    policy=POLICIES,
)
NUMBERS = st.integers(0, 2**62)
MARKERS = st.builds(
    Marker,
    v=st.just(1),
    kind=st.sampled_from([kind for kind in MarkerKind if kind is not MarkerKind.COMMIT]),
    id=IDS,
    half=st.integers(-1, 2**62),
    source=st.sampled_from(Source),
    group=WORDS,
    by=WORDS,
    reason=WORDS,
    round=NUMBERS,
    number=NUMBERS,
    claim=WORDS,
    endpoint=WORDS,
    previous=WORDS,
    later_s=SECONDS,
)
COMMITS = st.builds(
    Marker,
    v=st.just(1),
    kind=st.just(MarkerKind.COMMIT),
    id=IDS,
    group=WORDS,
    contents=st.integers(0, 1000),
)
CAUSES = st.builds(Cause, WORDS, WORDS, WORDS, st.integers(-1, 2**31 - 1), st.booleans())
CHECKS = st.builds(
    Checks,
    round=NUMBERS,
    number=NUMBERS,
    counted_ms=st.lists(NUMBERS, max_size=3).map(tuple),
    attempts=st.lists(
        st.builds(Attempt, NUMBERS, NUMBERS, NUMBERS, st.sampled_from(CheckReason), WORDS, WORDS),
        max_size=3,
    ).map(tuple),
)
KEPT = st.builds(
    ParkedCopy,
    half=HALVES,
    half_offset=NUMBERS,
    prepared_at_ms=NUMBERS,
    state=st.sampled_from(State),
    cause=st.none() | CAUSES,
    decided_at_ms=NUMBERS,
    checks=CHECKS,
)
