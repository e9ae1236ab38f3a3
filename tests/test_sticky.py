"""Choices that stay the same for a while: of half partitions, and of target partitions."""

import random
from collections import Counter

import pytest

from txbroker import batching as sticky
from txbroker.batching import SECONDS, TIMES, Sticky
from txbroker.core.records import Message
from txbroker.core.routing import murmur2
from txbroker.door.protocols import TargetFacts
from txbroker.proxy.partition.targets import TargetPartitioner


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands still, and the same chances each time."""
    clock = Clock()
    monkeypatch.setattr(sticky, "time", clock)
    monkeypatch.setattr(sticky, "random", random.Random(7))
    return clock


def runs(chosen: list[int]) -> list[int]:
    """Return how often the same was chosen one after another, of each stretch."""
    lengths = [0]
    for before, after in zip([chosen[0], *chosen], chosen, strict=False):
        if before != after:
            lengths.append(0)
        lengths[-1] += 1
    return lengths


def test_choice_is_kept_for_a_number_of_uses(clock: Clock) -> None:
    choice: Sticky[int] = Sticky()
    chosen = [choice.choose(range(5)) for _ in range(200 * TIMES)]
    assert all(length % TIMES == 0 for length in runs(chosen))
    assert all(0.7 < count / (40 * TIMES) < 1.3 for count in Counter(chosen).values())
    assert len(Counter(chosen)) == 5


def test_rare_choices_are_made_again(clock: Clock) -> None:
    choice: Sticky[int] = Sticky()
    chosen = []
    for _ in range(1000):
        chosen.append(choice.choose(range(5)))
        clock.now_s += SECONDS
    assert max(runs(chosen)) < 10
    # Time counts from the first of a stretch, not from the last.
    chosen = []
    for _ in range(1000):
        chosen.append(choice.choose(range(5)))
        clock.now_s += SECONDS * 0.3
    assert max(runs(chosen)) <= 4 * 10


def test_what_is_there_no_more_is_not_chosen_again(clock: Clock) -> None:
    choice: Sticky[str] = Sticky()
    first = choice.choose(["a", "b", "c"])
    left = [each for each in "abc" if each != first]
    second = choice.choose(left)
    assert second in left
    assert [choice.choose(["a", "b", "c"]) for _ in range(TIMES - 1)] == [second] * (TIMES - 1)


@pytest.mark.rule("topics")
def test_messages_without_a_key_go_together_and_where_there_is_a_leader(clock: Clock) -> None:
    placing = TargetPartitioner()
    facts = {topic: TargetFacts(6, 1 << 20, log_append_time=False) for topic in "tu"}

    def placed(message: Message) -> int | None:
        return placing.place([message], facts, 0)[0][0].partition

    first, other = placed(Message("t")), placed(Message("u"))
    keys = [b"%d" % number for number in range(30)]
    assert [placed(Message("t", key=key)) for key in keys] == [murmur2(key) % 6 for key in keys]
    assert placed(Message("t", partition=5)) == 5
    # One at least of those that were chosen by key or by hand would have counted.
    assert [placed(Message("t")) for _ in range(TIMES - 1)] == [first] * (TIMES - 1)
    assert placed(Message("u")) == other
    several, _ = placing.place([Message("t")] * 3 * TIMES, facts, 0)
    assert len({message.partition for message in several}) == 1
    facts["t"] = TargetFacts(6, 1 << 20, log_append_time=False, leaderless=frozenset({0, 2, 3, 5}))
    found = Counter(placed(Message("t")) for _ in range(40 * TIMES))
    assert found.keys() == {1, 4}
    facts["t"] = TargetFacts(6, 1 << 20, log_append_time=False, leaderless=frozenset(range(6)))
    assert placed(Message("t")) in range(6)  # it waits there for a leader
