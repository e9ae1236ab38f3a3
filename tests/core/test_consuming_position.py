"""Positions against a naive model, a set of offsets; and their text."""

from __future__ import annotations

import itertools
import random
import zlib
from base64 import urlsafe_b64encode

import pytest

from tests.faults.consuming.judge import later_position, position
from txbroker.core.consuming.position import (
    METADATA_LENGTH_MAX,
    ForeignMetadata,
    LaterPosition,
    Metadata,
    Position,
    Starts,
    decode_metadata,
    encode_metadata,
    is_newer_metadata,
)
from txbroker.core.records import Record


class Model:
    """A partition with gaps, and the set of its done offsets."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.size = rng.randrange(1, 80)
        self.present = [at for at in range(self.size) if rng.random() < rng.choice((0.3, 0.9, 1))]
        self.done: set[int] = set()
        self.handled: list[int] = []
        self.restart(Position(0))

    def restart(self, position: Position) -> None:
        self.position = position
        self.arrived = self.done_below = position.low
        self.open: list[int] = []

    def arrive(self) -> None:
        upto = min(self.size, self.arrived + self.rng.randrange(12))
        offsets = [at for at in self.present if self.arrived <= at < upto]
        records = [Record(None, None, offset=at) for at in offsets]
        fresh = self.position.arrive(records, upto)
        assert [record.offset for record in fresh] == [at for at in offsets if at not in self.done]
        self.open += [record.offset for record in fresh]
        self.done |= set(range(self.arrived, upto)) - set(offsets)
        self.arrived = upto

    def finish(self) -> None:
        count = self.rng.randrange(4)
        self.rng.shuffle(self.open)
        finished, self.open = self.open[:count], self.open[count:]
        self.done |= set(finished)
        self.handled += finished
        self.position.done_all(list(finished))

    def store(self) -> None:
        """A commit in which further messages are done, and a restart with it."""
        more = [at for at in self.open if self.rng.random() < 0.3]
        stored = self.position.with_done(more)
        self.check(self.position, self.done)
        self.check(stored, self.done | set(more))
        text, left_out = encode_metadata(stored.low, Metadata(7, "ab", 3, stored.ranges()))
        assert left_out == 0
        found = decode_metadata(stored.low, text)
        assert found == Metadata(7, "ab", 3, tuple(stored.ranges()))
        if self.rng.random() < 0.5:
            self.done |= set(more)
            self.handled += more
            self.restart(Position(stored.low, found.ranges))

    def check(self, position: Position, done: set[int]) -> None:
        low = next(at for at in range(self.size + 1) if at not in done)
        assert position.low == low
        ranges = position.ranges()
        assert {at for first, end in ranges for at in range(first, end)} == {
            at for at in done if at > low
        }
        assert all(first < end for first, end in ranges)
        assert all(end < first for (_, end), (first, _) in itertools.pairwise(ranges))


@pytest.mark.parametrize("seed", range(100))
def test_position_equals_a_set_of_offsets(seed: int) -> None:
    model = Model(random.Random(seed))
    while len(model.done) < model.size:
        model.rng.choice((model.arrive, model.finish, model.finish, model.store))()
        model.check(model.position, model.done)
    assert sorted(model.handled) == model.present, "each once, across all restarts"
    assert (model.position.low, model.position.ranges()) == (model.size, [])


@pytest.mark.parametrize("seed", range(20))
def test_ranges_that_fit_only_compressed(seed: int) -> None:
    rng = random.Random(seed)
    ranges, at, gap_max = [], 7, rng.choice((1, 2, 3))
    for _ in range(rng.randrange(1600, 3000)):
        first = at + rng.randint(1, gap_max)
        at = first + rng.randint(1, gap_max)
        ranges.append((first, at))
    later = rng.choice((None, LaterPosition(3), LaterPosition(3, ((5, 6), (8, 9)))))
    metadata = Metadata(10**17, "f" * 32, 1000, tuple(ranges), later, Starts(rng.randrange(2)))
    text, left_out = encode_metadata(7, metadata)
    assert (decode_metadata(7, text), left_out) == (metadata, 0)
    assert text.startswith("txb2:")
    assert len(text) <= METADATA_LENGTH_MAX
    assert (position(7, text), later_position(7, text)) == (
        (7, ranges),
        later and (later.low, list(later.ranges)),
    )


def test_compressed_ranges_are_not_too_many() -> None:
    text = f"txb2:1:ab:0:{urlsafe_b64encode(zlib.compress(bytes([1]) * (2 << 20))).decode()}"
    with pytest.raises(ForeignMetadata):
        decode_metadata(5, text)


@pytest.mark.parametrize("step", [2, 300, 70_000])
def test_metadata_leave_out_last_ranges(step: int) -> None:
    rng = random.Random(step)
    ranges = [(at, at + rng.randint(1, step)) for at in range(step, step * 60_000, step + 1)]
    text, left_out = encode_metadata(0, Metadata(10**17, "f" * 32, 1000, ranges))
    found = decode_metadata(0, text)
    assert METADATA_LENGTH_MAX - 120 <= len(text) <= METADATA_LENGTH_MAX
    assert found is not None
    assert tuple(found.ranges) == tuple(ranges[: len(found.ranges)])
    assert left_out == sum(end - first for first, end in ranges[len(found.ranges) :]) > 0


@pytest.mark.parametrize(
    ("text", "newer"),
    [
        ("1", False),
        ("consumer-1 at 2026", False),
        ("txb", False),
        ("txb1:", False),
        ("txb1:1:ab:0:AB", False),  # cut base64
        ("txb1:1:ab:0:gA==", False),  # cut number
        ("txb1:1:ab:0:AQ==", False),  # half of a range
        ("txb1:1:ab:0:AQA=", False),  # empty range
        ("txb1:-1:ab:0:", False),
        ("txb1:1:ab:0::", False),  # no later stages
        ("txb1:1:ab:0:::1.2", False),  # half of a message's starts
        ("txb1:1:ab:0:\n", False),
        (" txb1:1:ab:0:", False),
        ("txb2:1:ab:0:AQE=", False),  # not compressed
        ("txb2:1:ab:0:eJxjZAQAAAQAAw", False),  # cut
        ("txb3:1:ab:0:", True),
        ("txb10:x", True),
    ],
)
def test_foreign_metadata(text: str, newer: bool) -> None:
    with pytest.raises(ForeignMetadata):
        decode_metadata(5, text)
    assert is_newer_metadata(text) is newer


@pytest.mark.parametrize("starts", [Starts(), Starts(1), Starts(3, 10**12, 0), Starts(12, 0, 7)])
@pytest.mark.parametrize("later", [None, LaterPosition(2), LaterPosition(1, ((3, 4),))])
def test_starts(starts: Starts, later: LaterPosition | None) -> None:
    metadata = Metadata(7, "ab", 3, ((9, 11),), later, starts)
    text, left_out = encode_metadata(5, metadata)
    assert (decode_metadata(5, text), left_out) == (metadata, 0)


def test_no_metadata() -> None:
    assert decode_metadata(5, "") is None
