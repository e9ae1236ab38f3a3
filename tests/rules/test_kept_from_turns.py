"""What is kept away from turns, and until when: `Trouble` by itself, on a clock of its own."""

from __future__ import annotations

import pytest

from tests.kit.logs import START_MS, Logs, half_of, id_of, marker_of, replayed
from txbroker.core.ledger import Ledger
from txbroker.core.promotion import PromotionLimits
from txbroker.core.records import Cause, State
from txbroker.errors import InvariantBroken
from txbroker.proxy.partition.targets import Trouble

LIMITS = PromotionLimits(transactions_max=50, bytes_max=4000, deferred_max=30)
SILENT = Cause("no_answer", "its leader is silent", "t", 0, passing=True)
POISON = Cause("bad_timestamp", "it is ahead", "t", 0)
GONE = Cause("unknown_topic", "create it", "t", 0)


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.at_s = 1000.0

    def __call__(self) -> float:
        return self.at_s


class World:
    """A ledger with committed transactions, and the trouble of its partition."""

    def __init__(self, count: int, *, refused: bool = False) -> None:
        self.clock = Clock()
        self.ids = [id_of(number) for number in range(1, count + 1)]
        self.ledger = committed(self.ids)
        if refused:
            for id in self.ids:
                self.ledger.refuse(id, GONE)
        self.trouble = Trouble(self.ledger, LIMITS, self.clock)

    def due(self, *in_flight: str) -> list[str]:
        return [transaction.id for transaction in self.trouble.take_due(in_flight)]

    def isolate(self, *ids: str, cause: Cause = POISON) -> None:
        found = [self.ledger.index.get(id) for id in ids]
        self.trouble.isolate([each for each in found if each is not None], cause)

    def turn_size(self) -> int:
        return self.trouble.limits([]).transactions_max

    def pauses_s(self, times: int) -> list[float]:
        """Return how long each time it waits, going on to when the wait is over."""
        pauses = []
        for _ in range(times):
            wait_s = self.trouble.wait_s()
            assert wait_s is not None
            pauses.append(wait_s)
            self.clock.at_s += wait_s
            self.due()
            self.trouble.note_deferred(waiting=bool(self.ledger.index.ready))
        return pauses


def committed(ids: list[str]) -> Ledger:
    logs = Logs()
    for id in ids:
        logs.prepare(half_of(id), START_MS)
        logs.mark(marker_of("commit", id), START_MS)
    return replayed(logs)


# --- target partitions ---------------------------------------------------------------------------


def test_a_silent_target_partition_is_avoided_for_a_pause_that_grows() -> None:
    world = World(1)
    for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        world.trouble.avoid(SILENT)
        world.clock.at_s += pause_s - 0.1
        assert world.trouble.avoided("t", 0) == SILENT
        assert world.trouble.avoided("t", 1) is None
        assert world.trouble.avoided("u", 0) is None
        world.clock.at_s += 0.1
        assert world.trouble.avoided("t", 0) is None


def test_an_avoided_place_that_was_well_for_long_begins_anew() -> None:
    world = World(1)
    world.trouble.avoid(SILENT)
    world.trouble.avoid(SILENT)
    world.clock.at_s += 31.0
    world.trouble.promoted([])
    world.trouble.avoid(SILENT)
    world.clock.at_s += 0.6
    assert world.trouble.avoided("t", 0) is None
    # Not forgotten so soon: the next pause is longer again.
    world.trouble.promoted([])
    world.trouble.avoid(SILENT)
    world.clock.at_s += 0.9
    assert world.trouble.avoided("t", 0) == SILENT


def test_what_is_deferred_is_looked_at_after_pauses_that_grow() -> None:
    world = World(1)
    assert world.trouble.wait_s() is None
    world.trouble.note_deferred(waiting=True)
    assert world.pauses_s(8) == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    world.clock.at_s += 1.0
    world.trouble.note_deferred(waiting=True)
    # A turn before its time does not put it off.
    assert world.trouble.wait_s() == 29.0
    world.trouble.note_deferred(waiting=False)
    assert world.trouble.wait_s() is None


# --- refused transactions ------------------------------------------------------------------------


def test_a_refused_one_is_tried_again_after_pauses_that_grow() -> None:
    world = World(1, refused=True)
    world.trouble.retry_all()
    assert world.due() == []
    assert world.pauses_s(8) == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    # A recovery does not bring forward what has its time.
    world.trouble.retry_all()
    assert world.trouble.wait_s() == 30.0
    world.trouble.retry_now(world.ids[0])
    assert world.trouble.wait_s() == 0.0
    assert world.due() == world.ids
    assert world.trouble.wait_s() == 0.5


def test_a_refused_one_that_is_in_a_turn_waits_for_its_next_time() -> None:
    world = World(2, refused=True)
    first, second = world.ids
    world.trouble.retry_all()
    world.clock.at_s += 0.5
    assert world.due(first) == [second]
    world.clock.at_s += 1.0
    assert set(world.due()) == {first, second}


def test_a_promoted_one_is_not_tried_again() -> None:
    world = World(1, refused=True)
    transaction = world.ledger.index.refused[world.ids[0]]
    world.trouble.retry_all()
    world.ledger.promote_run([transaction])
    world.trouble.promoted([transaction])
    world.clock.at_s += 0.5
    assert world.due() == []
    assert world.trouble.wait_s() is None


# --- spoiled turns -------------------------------------------------------------------------------


def test_a_spoiled_turn_is_tried_again_in_halves_until_one_fails_alone() -> None:
    world = World(9)
    sizes = [world.turn_size()]
    first = world.ids
    while len(first) > 1:
        world.isolate(*first)
        sizes.append(world.turn_size())
        first = first[: sizes[-1]]
    assert sizes == [50, 4, 2, 1]
    limits = world.trouble.limits([])
    assert (limits.bytes_max, limits.deferred_max) == (LIMITS.bytes_max, LIMITS.deferred_max)
    world.isolate(*first)
    assert not world.trouble.tried
    world.isolate(*first)
    assert world.trouble.tried == {first[0]: POISON}


def test_turns_are_as_large_as_ever_once_no_suspect_is_left() -> None:
    world = World(4)
    good, poison = world.ids[:2]
    world.isolate(good, poison)
    assert world.turn_size() == 1
    world.ledger.promote_run([world.ledger.index.transactions[good]])
    world.ledger.refuse(poison, POISON)
    # Refused, it may spoil only the turn in which it is tried again.
    assert world.turn_size() == LIMITS.transactions_max
    retried = world.ledger.index.refused[poison]
    assert world.trouble.limits([retried]).transactions_max == 1
    world.isolate(poison)
    world.isolate(poison)
    assert world.trouble.limits([retried]) == LIMITS


def test_one_that_only_trying_can_tell_about_waits_for_revive() -> None:
    world = World(1)
    (id,) = world.ids
    world.isolate(id)
    world.isolate(id)
    world.ledger.refuse(id, POISON)
    world.trouble.retry_later(id)
    world.trouble.retry_all()
    assert world.trouble.wait_s() is None
    world.trouble.retry_now(id)
    assert world.due() == [id]
    assert not world.trouble.tried
    # It fails alone again: one more attempt first, as for any other.
    world.isolate(id)
    assert not world.trouble.tried
    world.isolate(id)
    assert list(world.trouble.tried) == [id]
    assert world.ledger.index.refused[id].state is State.REFUSED


def test_nobody_is_suspected_where_the_target_may_take_it_later() -> None:
    world = World(4)
    world.isolate(*world.ids, cause=SILENT)
    assert world.turn_size() == LIMITS.transactions_max
    assert world.trouble.avoided("t", 0) == SILENT


def test_a_record_of_our_own_that_is_refused_stops_the_partition() -> None:
    world = World(4)
    own = Cause("too_large", "raise it", "txbroker.parked", 3)
    with pytest.raises(InvariantBroken, match="raise it"):
        world.isolate(*world.ids, cause=own)
    assert world.turn_size() == LIMITS.transactions_max
