"""The settled window, packed, answers like a plain dict of what was settled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs

from tests.kit.logs import PARTITION, START_MS
from txbroker.core import settled
from txbroker.core.records import (
    Attributes,
    Decision,
    Half,
    Place,
    State,
)
from txbroker.core.routing import make_id, parse_id
from txbroker.core.segment import MARK_BYTES, Segment, SettledSummary, name_of, pack, read
from txbroker.core.settled import SettledWindow, summary_of, to_transaction
from txbroker.core.transaction import Transaction, Verdict, bare

DAY_MS = 86_400_000
FAR = 1 << 40
GROUPS = ("shop-1", "shop-2", "bank")


class Step(Struct, frozen=True):
    """What is done to a window: some are settled, all is packed, or the old is forgotten."""

    transactions: tuple[Transaction, ...] = ()
    forget_before_ms: int = 0
    kept: int = 0


def near(centre: int, *far: int) -> st.SearchStrategy[int]:
    """Return numbers around one, now and then far away."""
    distances = st.integers(-50, 50) | st.sampled_from((0, *far))
    return distances.map(lambda distance: centre + distance)


@st.composite
def transactions(draw: st.DrawFn, number: int) -> Transaction:
    """Draw a settled transaction; few ids have the same randomness or time, each is unique."""
    now_ms = START_MS + 1000 * number
    time_ms = draw(near(now_ms, -31_000, -DAY_MS, -100 * DAY_MS, 200_000))
    partition = draw(st.sampled_from((PARTITION, PARTITION, PARTITION, 9)))
    id = make_id(partition, time_ms, draw(st.sampled_from((0, 7, (1 << 64) - 1))) ^ number % 4)
    places = tuple(Place(topic, at, 0) for topic, at in draw(_PLACES))
    state = draw(st.sampled_from((State.PROMOTED, State.ROLLED_BACK)))
    decision = Decision.COMMIT if state is State.PROMOTED else Decision.ROLLBACK
    verdict = Verdict(
        decision,
        draw(near(3 * number, FAR) | st.just(-1)),
        draw(near(now_ms, -40 * DAY_MS)),
        contents_fingerprint=draw(st.sampled_from((b"", b"\x01" * 16, bytes(range(16))))),
    )
    key = draw(st.none() | st.sampled_from(("d", "e" * 40)))
    half = Half(id, draw(st.sampled_from(GROUPS)), bare(places), Attributes(dedup_key=key))
    prepared_ms = draw(near(time_ms, -17_000, 66_000))
    mark = draw(st.sampled_from((bytes(16), b"\xff" * 16, bytes(range(16)))))
    offset = draw(near(1000 + 2 * number, FAR))
    return Transaction(half, offset, prepared_ms, mark, places, None, state, False, verdict=verdict)


_PLACES = st.lists(
    st.tuples(st.sampled_from(("t", "u")), st.integers(0, 200)), min_size=1, max_size=2
)


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    """Draw what is done to a window, each id once."""
    found: list[Step] = []
    known: set[str] = set()
    number = 0
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(("settle", "settle", "settle", "seal", "forget")))
        if kind == "settle":
            run = []
            for _ in range(draw(st.integers(1, 4))):
                each = draw(transactions(number))
                number += 1
                if each.id not in known:
                    known.add(each.id)
                    run.append(each)
            found.append(Step(tuple(run)))
        elif kind == "forget":
            before_ms = START_MS + draw(st.integers(-40_000, 40_000))
            found.append(Step((), before_ms, draw(st.integers(0, 6))))
        else:
            found.append(Step())
    return found


def facts(transaction: Transaction) -> SettledSummary:
    """Return a transaction's summary with the stored start of its fingerprint."""
    summary = summary_of(transaction)
    return structs.replace(summary, fingerprint=summary.fingerprint[:MARK_BYTES])


def agrees(window: SettledWindow, model: dict[str, Transaction], never: Sequence[str]) -> None:
    """Assert that a window remembers what the model has, and nothing of some other ids."""
    assert len(window) == len(model)
    assert sorted(each.id for each in window) == sorted(model)
    for id, transaction in model.items():
        found = window.get(id)
        assert found is not None
        assert facts(found) == facts(transaction)
        assert transaction.fingerprint.startswith(found.fingerprint)
        assert facts(to_transaction(summary_of(found))) == facts(transaction)
    for id in never:
        assert window.get(id) is None
    if model:
        last = [summary_of(transaction).last_ms for transaction in model.values()]
        assert min(last) <= window.oldest_ms() <= max(last)
    else:
        assert window.oldest_ms() == 0


def others(model: dict[str, Transaction]) -> list[str]:
    """Return ids that differ from those of the model in one part each."""
    found = []
    for id in model:
        partition, time_ms, randomness = parse_id(id)
        found.append(make_id(partition, time_ms + 1, randomness))
        found.append(make_id(partition, time_ms, randomness ^ 8))
        found.append(make_id(partition + 1, time_ms, randomness))
    return [id for id in found if id not in model]


def played(done: Sequence[Step], window: SettledWindow) -> dict[str, Transaction]:
    """Do all steps to a window and to a dict; compare them after each."""
    model: dict[str, Transaction] = {}
    gone: list[str] = []
    for step in done:
        if step.transactions:
            window.settle_many(step.transactions)
            model |= {each.id: each for each in step.transactions}
        elif step.forget_before_ms:
            before = len(model)
            keyed = window.forget(step.forget_before_ms, step.kept, {})
            left = {each.id for each in window}
            lost = {id: each for id, each in model.items() if id not in left}
            for id, each in lost.items():
                assert summary_of(each).last_ms < step.forget_before_ms
                del model[id]
            assert len(model) >= min(before, step.kept)
            gone += lost
            assert sorted((each.id, each.dedup_key) for each in keyed) == sorted(
                (id, each.half.attributes.dedup_key)
                for id, each in lost.items()
                if each.half.attributes.dedup_key
            )
        else:
            window.seal()
        agrees(window, model, [id for id in gone if id not in model])
    return model


@settings(max_examples=50, deadline=None)
@given(done=steps(), entries=st.sampled_from((1, 3, 4096)), shown=st.sampled_from((0, 4)))
def test_a_packed_window_is_a_dict(done: list[Step], entries: int, shown: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settled, "SEGMENT_ENTRIES", entries)
        patch.setattr(settled, "SHOWN_MAX", shown)
        window = SettledWindow()
        model = played(done, window)
        agrees(window, model, others(model))
        window.seal()
        window.shown.clear()
        agrees(window, model, others(model))
        assert window.size == sum([segment.memory_bytes for segment in window.segments])
        again = SettledWindow()
        for segment in window.segments:
            again.add_segment(segment)
        assert again.size == window.size
        assert_shares(again)


def assert_shares(window: SettledWindow) -> None:
    """Assert that each group counts until its own newest time in each segment, and no longer."""
    uses = [use for segment in window.segments for use in segment.groups]
    for segment in window.segments:
        groups = {each.group for each in segment.summaries()}
        assert {use.group for use in segment.groups} == groups
        for use in segment.groups:
            mine = [each.last_ms for each in segment.summaries() if each.group == use.group]
            assert use.newest_ms == max(mine)
    for since_ms in sorted({0, *[use.newest_ms + 1 for use in uses]}):
        for group in GROUPS:
            expected = [u.size for u in uses if u.group == group and u.newest_ms >= since_ms]
            assert window.recent_of(group, since_ms) == sum(expected)


@settings(max_examples=50, deadline=None)
@given(done=steps(), entries=st.sampled_from((1, 3, 4096)))
def test_stored_segments_make_the_same_window(done: list[Step], entries: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settled, "SEGMENT_ENTRIES", entries)
        for version in (1, 2):
            window, again = SettledWindow(), SettledWindow()
            window.version = again.version = version
            model = played(done, window)
            window.seal()
            assert window.store_as(version) == version
            for segment in window.segments:
                value = segment.value_in(version)
                assert name_of(value) == segment.name_in(version)
                back = read(value)
                assert back.name_in(version) == segment.name_in(version)
                again.add_segment(back)
            agrees(again, model, others(model))
            # What is stored for older proxies has the whole fingerprints.
            ends = {id: each.fingerprint for id, each in model.items()}
            length = 16 if version == 1 else MARK_BYTES
            assert {t.id: t.fingerprint for t in again} == {
                id: mark[:length] for id, mark in ends.items()
            }


def many(count: int, *, late: bool = False) -> list[Transaction]:
    """Return plain transactions, settled at once or a minute after their preparation."""
    found = []
    for number in range(count):
        time_ms = START_MS + number
        verdict = Verdict(Decision.COMMIT, number, time_ms + (60_000 if late else 5))
        places = (Place("t", 0, 100),)
        id = make_id(PARTITION, time_ms, number * 0x9E3779B97F4A7C15 % (1 << 64))
        half = Half(id, "g", bare(places))
        found.append(
            Transaction(
                half, number, time_ms + 2, bytes(16), places, None, State.PROMOTED, False,
                verdict=verdict,
            )
        )  # fmt: skip
    return found


def test_what_is_settled_late_lies_apart() -> None:
    window = SettledWindow()
    usual, late = many(100)[:60], many(100, late=True)[60:]
    window.settle_many([*usual, *late])
    window.seal()
    assert [(each.late, each.count) for each in window.segments] == [(False, 60), (True, 40)]
    again = SettledWindow()
    for segment in window.segments:
        again.add_segment(read(segment.value))
    assert [(each.late, each.count) for each in again.segments] == [(False, 60), (True, 40)]
    assert all(again.get(each.id) is not None for each in (*usual, *late))


def test_a_row_takes_36_bytes() -> None:
    window = SettledWindow()
    window.settle_many(many(settled.SEGMENT_ENTRIES))
    (segment,) = window.segments
    assert len(segment.value) / segment.count < 36
    assert segment.memory_bytes / segment.count < 36
    # One group at 20,000 a second and a window of 600 s, within four fifths of 512 MiB.
    assert segment.memory_bytes / segment.count * 20_000 * 600 < 512 * 2**20 * 4 / 5


def test_fingerprints_that_were_cut_are_stored_in_version_2_for_good() -> None:
    window = SettledWindow()
    window.version = 1
    window.settle_many(many(3))
    window.seal()
    assert window.segments[0].tails
    assert window.store_as(1) == 1
    before = window.size
    assert window.store_as(2) == 2
    assert not window.segments[0].tails
    assert window.size == before - 3 * MARK_BYTES
    assert window.store_as(1) == 2


def test_what_is_no_segment_is_refused() -> None:
    segment = pack([summary_of(each) for each in many(3)])
    with pytest.raises(ValueError, match="version"):
        read(segment.value[:3] + b"\x03" + segment.value[4:])
    with pytest.raises(ValueError, match="rows"):
        Segment(_grown(segment))


def _grown(segment: Segment) -> bytes:
    """Return a segment that says that it has a row more than it has."""
    assert (segment.value[3], segment.value[6]) == (2, segment.count)
    return segment.value[:6] + bytes([segment.count + 1]) + segment.value[7:]


_VERSION_1 = bytes.fromhex(
    "9601d934303030433052514b5a3544303030303030303030303030303037303030433052514b5a35"
    "44303047303030303030303030303035c48a000102030405060708090a0b0c0d0e0f000000000000"
    "00000000000000000000000000000000000500000000000000060000018bcfe568020000018bcfe5"
    "68090000000000101112131415161718191a1b1c1d1e1f0101010101010101010101010101010100"
    "0000000000000700000000000000080000018bcfe568030000018bcfe5680900000001019292a167"
    "9192a1740092a1689292a1740092a17501919201a164cf0000018bcfe56803"
)
"""As the release before has stored it."""


def test_a_segment_of_version_1_is_read_as_it_was_stored() -> None:
    segment = read(_VERSION_1)
    first, second = sorted(segment.summaries(), key=lambda each: each.offset)
    at = [("t", 0)]
    assert first == SettledSummary(
        make_id(PARTITION, START_MS, 7), "g", State.PROMOTED, bytes(range(16)), b"", 5, 6,
        START_MS + 2, START_MS + 9, tuple(at),
    )  # fmt: skip
    assert second == SettledSummary(
        make_id(PARTITION, START_MS + 1, 5), "h", State.ROLLED_BACK, bytes(range(16, 32)),
        b"\x01" * 16, 7, 8, START_MS + 3, START_MS + 9, (*at, ("u", 1)), "d",
    )  # fmt: skip
    assert segment.value_in(1) == _VERSION_1
    assert segment.name_in(1) == name_of(_VERSION_1)
    window = SettledWindow()
    window.add_segment(segment)
    assert [each.dedup_key for each in segment.keyed()] == ["d"]
    assert {each.fingerprint for each in window} == {bytes(range(8)), bytes(range(16, 24))}
