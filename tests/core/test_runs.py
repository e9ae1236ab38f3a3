"""Runs come to what their records come to, one by one, in whatever state they are applied."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from txbroker.core.ids import make_id
from txbroker.core.ledger import Ledger
from txbroker.core.outcome import Effect, Outcome
from txbroker.core.records import (
    RECORD_VERSION,
    CheckPolicy,
    Half,
    Marker,
    MarkerKind,
    Message,
    Record,
)
from txbroker.core.runs import HalfRow, MarkerRow, half_row, marker_row
from txbroker.core.snapshot import Capture

START_MS = 1_700_000_000_000
WINDOW_MS = 10_000
GROUPS = ("g", "h")

_texts = st.sampled_from(["a", "b", "é"])
_bytes = st.one_of(st.none(), st.binary(max_size=4))
_headers = st.lists(st.tuples(st.text(max_size=3), _bytes), max_size=2).map(tuple)
_messages = st.lists(
    st.builds(
        Message,
        topic=st.sampled_from(["t", "u"]),
        key=_bytes,
        value=_bytes,
        headers=_headers,
        partition=st.integers(0, 2),
        timestamp_ms=st.one_of(st.none(), st.integers(0, 1 << 40)),
    ),
    min_size=1,
    max_size=3,
).map(tuple)
_policies = st.sampled_from([CheckPolicy(), CheckPolicy(0.0, 0.1, 2, 0.05), CheckPolicy(1 / 3)])


@st.composite
def _halves(draw: st.DrawFn) -> Half:
    """A half message of a few ids, some of them too old, of the future, or of another partition."""
    number = draw(st.integers(0, 7))
    away_ms = draw(st.sampled_from([0, 0, 0, -WINDOW_MS - 5, WINDOW_MS + 50]))
    partition = draw(st.sampled_from([0, 0, 0, 0, 1]))
    return Half(
        make_id(partition, START_MS + away_ms, number),
        draw(st.sampled_from(GROUPS)),
        draw(_messages),
        draw(st.one_of(st.none(), _texts)),
        draw(st.one_of(st.none(), _texts)),
        draw(_policies),
    )


@st.composite
def _marks(draw: st.DrawFn) -> MarkerRow:
    """Any marker of a few ids, fitting or not."""
    number = draw(st.integers(0, 8))
    half = Half(make_id(0, START_MS, number), "g", draw(_messages))
    kind = draw(st.sampled_from(list(MarkerKind)))
    contents = None
    if kind is MarkerKind.COMMIT and draw(st.booleans()):
        contents = half.messages
    marker = Marker(
        RECORD_VERSION,
        kind,
        half.id,
        group=draw(st.sampled_from(["", *GROUPS])),
        by=draw(_texts),
        reason="due" if kind is MarkerKind.CHECK else "",
        round=draw(st.integers(0, 2)),
        number=draw(st.integers(0, 2)),
        later_s=draw(st.sampled_from([0.0, 2.5])),
        contents=0 if contents is None else len(contents),
    )
    return marker_row(marker, half, contents)


_steps = st.lists(
    st.tuples(
        st.one_of(
            st.lists(_halves(), min_size=1, max_size=12).map(
                lambda halves: [half_row(half, RECORD_VERSION) for half in halves]
            ),
            st.lists(_marks(), min_size=1, max_size=12),
        ),
        st.integers(-2000, 8000),
    ),
    min_size=1,
    max_size=8,
)


def _stored(
    rows: Sequence[HalfRow] | Sequence[MarkerRow], offset: int, at_ms: int
) -> list[list[Record]]:
    """Return the records of each row as they are read back."""
    found = []
    for row in rows:
        records = []
        for each in row.records:
            records.append(Record(each.key, each.value, each.headers, at_ms, offset))
            offset += 1
        found.append(records)
    return found


def _seen(outcome: Outcome) -> tuple[object, ...]:
    transaction = outcome.transaction
    return (outcome.effect, outcome.why, None if transaction is None else _shown(transaction))


def _shown(transaction: object) -> dict[str, object]:
    return {name: getattr(transaction, name) for name in transaction.__struct_fields__}  # type: ignore[attr-defined]


def _state(ledger: Ledger) -> dict[str, object]:
    """Return everything that can be observed of a ledger."""
    return {
        "positions": (ledger.half_position, ledger.op_position),
        "whole": (ledger.half_whole, ledger.op_whole),
        "clocks": (ledger.half_clock_ms, ledger.op_clock_ms),
        "anchors": (ledger.half_anchor, ledger.op_anchor),
        "whole anchors": (ledger.half_whole_anchor, ledger.op_whole_anchor),
        "transactions": [_shown(each) for each in ledger],
        "ready": list(ledger.ready),
        "waiting": {id: list(each) for id, each in ledger.waiting.items()},
        "waited": ledger.commits_waited,
        "keep": list(ledger.to_keep),
        "release": list(ledger.to_release),
        "parked": list(ledger.parked),
        "groups": (dict(ledger.pending_by_group), dict(ledger.parked_by_group)),
        "counts": (ledger.undecided_count, ledger.unsettled.total, ledger.settled_count),
        "bytes": ledger.body_bytes,
        "order": [each.id for each in ledger.in_order(-1, 1000)],
        "keys": {key: ledger.by_dedup_key(*key) is not None for key in ledger._dedup},
    }


def _snapshot(ledger: Ledger) -> list[Record]:
    return list(Capture(ledger, "one", 0, RECORD_VERSION).records())


@settings(max_examples=300, deadline=None)
@given(_steps)
def test_a_run_comes_to_what_its_records_come_to(
    steps: list[tuple[list[HalfRow] | list[MarkerRow], int]],
) -> None:
    runs, single = Ledger(0, WINDOW_MS, 3), Ledger(0, WINDOW_MS, 3)
    at_ms = START_MS
    for rows, later_ms in steps:
        at_ms += later_ms
        first = rows[0]
        if isinstance(first, HalfRow):
            offset = runs.half_position
            outcomes = runs.apply_halves(rows, offset, at_ms)  # type: ignore[arg-type]
            apply = single.apply_half
        else:
            offset = runs.op_position
            outcomes = runs.apply_markers(rows, offset, at_ms)  # type: ignore[arg-type]
            apply = single.apply_op
        last = []
        for records in _stored(rows, offset, at_ms):
            each = [apply(record) for record in records]
            assert [one.effect for one in each[:-1]] == [Effect.PARTIAL] * (len(each) - 1)
            last.append(each[-1])
        assert list(map(_seen, outcomes)) == list(map(_seen, last))
        assert _state(runs) == _state(single)
    assert _snapshot(runs) == _snapshot(single)
