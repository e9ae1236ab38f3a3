"""Quarantine and retries of a partition, on a separate clock."""

from __future__ import annotations

import asyncio

import pytest

from tests.kit.logs import START_MS, Logs, half_of, id_of, marker_of, replayed
from txbroker.core.ledger import Ledger
from txbroker.core.promotion import PromotionLimits
from txbroker.core.records import Cause, State
from txbroker.errors import InvariantBroken
from txbroker.proxy.partition.clock import Slot, TxnLimiter
from txbroker.proxy.partition.quarantine import RetryQueue, TargetQuarantine

LIMITS = PromotionLimits(transactions_max=50, bytes_max=4000, deferred_max=30)
SILENT = Cause("no_answer", "its leader is silent", "t", 0, passing=True)
POISON = Cause("bad_timestamp", "it is ahead", "t", 0)
GONE = Cause("unknown_topic", "create it", "t", 0)


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.at_s = 1000.0

    def __call__(self) -> float:
        return self.at_s


class Harness:
    """A ledger with committed or refused transactions, with the retries of its partition."""

    def __init__(self, count: int, *, refused: bool = False) -> None:
        self.clock = Clock()
        self.ids = [id_of(number) for number in range(1, count + 1)]
        self.ledger = committed(self.ids)
        if refused:
            for id in self.ids:
                self.ledger.refuse(id, GONE)
        self.quarantine = TargetQuarantine(self.clock)
        self.retries = RetryQueue(self.ledger, LIMITS, self.quarantine, self.clock)

    def due(self, *in_flight: str) -> list[str]:
        return [transaction.id for transaction in self.retries.take_due(in_flight)]

    def isolate(self, *ids: str, cause: Cause = POISON) -> None:
        transactions = [self.ledger.index.get(id) for id in ids]
        self.retries.isolate([one for one in transactions if one is not None], cause)

    def turn_size(self) -> int:
        return self.retries.limits([]).transactions_max

    def pauses_s(self, times: int) -> list[float]:
        """Return the next pauses, moving the clock to the end of each."""
        pauses = []
        for _ in range(times):
            wait_s = self.retries.wait_s()
            assert wait_s is not None
            pauses.append(wait_s)
            self.clock.at_s += wait_s
            self.due()
            self.retries.note_deferred(waiting=bool(self.ledger.index.ready))
        return pauses


def committed(ids: list[str]) -> Ledger:
    logs = Logs()
    for id in ids:
        logs.prepare(half_of(id), START_MS)
        logs.mark(marker_of("commit", id), START_MS)
    return replayed(logs)


# --- target partitions ---------------------------------------------------------------------------


def test_quarantine_of_a_target_grows_each_time() -> None:
    harness = Harness(1)
    for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        harness.quarantine.add(SILENT)
        harness.clock.at_s += pause_s - 0.1
        assert harness.quarantine.cause("t", 0) == SILENT
        assert harness.quarantine.cause("t", 1) is None
        assert harness.quarantine.cause("u", 0) is None
        harness.clock.at_s += 0.1
        assert harness.quarantine.cause("t", 0) is None


def test_quarantine_is_short_again_after_a_long_time() -> None:
    harness = Harness(1)
    harness.quarantine.add(SILENT)
    harness.quarantine.add(SILENT)
    harness.clock.at_s += 31.0
    harness.retries.promoted([])
    harness.quarantine.add(SILENT)
    harness.clock.at_s += 0.6
    assert harness.quarantine.cause("t", 0) is None
    # Not forgotten this early: the next pause is longer again.
    harness.retries.promoted([])
    harness.quarantine.add(SILENT)
    harness.clock.at_s += 0.9
    assert harness.quarantine.cause("t", 0) == SILENT


def test_deferred_transactions_are_retried_with_growing_pauses() -> None:
    harness = Harness(1)
    assert harness.retries.wait_s() is None
    harness.retries.note_deferred(waiting=True)
    assert harness.pauses_s(8) == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    harness.clock.at_s += 1.0
    harness.retries.note_deferred(waiting=True)
    # A promotion before that time does not postpone it.
    assert harness.retries.wait_s() == 29.0
    harness.retries.note_deferred(waiting=False)
    assert harness.retries.wait_s() is None


# --- refused transactions ------------------------------------------------------------------------


def test_refused_transaction_is_retried_with_growing_pauses() -> None:
    harness = Harness(1, refused=True)
    harness.retries.retry_all()
    assert harness.due() == []
    assert harness.pauses_s(8) == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    # A recovery does not move scheduled retries.
    harness.retries.retry_all()
    assert harness.retries.wait_s() == 30.0
    harness.retries.retry_now(harness.ids[0])
    assert harness.retries.wait_s() == 0.0
    assert harness.due() == harness.ids
    assert harness.retries.wait_s() == 0.5


def test_refused_transaction_in_flight_waits_for_next_retry() -> None:
    harness = Harness(2, refused=True)
    first, second = harness.ids
    harness.retries.retry_all()
    harness.clock.at_s += 0.5
    assert harness.due(first) == [second]
    harness.clock.at_s += 1.0
    assert set(harness.due()) == {first, second}


def test_promoted_transaction_is_not_retried() -> None:
    harness = Harness(1, refused=True)
    transaction = harness.ledger.index.refused[harness.ids[0]]
    harness.retries.retry_all()
    harness.ledger.promote_run([transaction])
    harness.retries.promoted([transaction])
    harness.clock.at_s += 0.5
    assert harness.due() == []
    assert harness.retries.wait_s() is None


# --- spoiled promotions --------------------------------------------------------------------------


def test_spoiled_promotion_is_halved_until_one_fails_alone() -> None:
    harness = Harness(9)
    sizes = [harness.turn_size()]
    first = harness.ids
    while len(first) > 1:
        harness.isolate(*first)
        sizes.append(harness.turn_size())
        first = first[: sizes[-1]]
    assert sizes == [50, 4, 2, 1]
    limits = harness.retries.limits([])
    assert (limits.bytes_max, limits.deferred_max) == (LIMITS.bytes_max, LIMITS.deferred_max)
    harness.isolate(*first)
    assert not harness.retries.tried
    harness.isolate(*first)
    assert harness.retries.tried == {first[0]: POISON}


def test_limits_are_full_again_without_suspects() -> None:
    harness = Harness(4)
    good, poison = harness.ids[:2]
    harness.isolate(good, poison)
    assert harness.turn_size() == 1
    harness.ledger.promote_run([harness.ledger.index.transactions[good]])
    harness.ledger.refuse(poison, POISON)
    # Refused, it may spoil only the promotion that retries it.
    assert harness.turn_size() == LIMITS.transactions_max
    retried = harness.ledger.index.refused[poison]
    assert harness.retries.limits([retried]).transactions_max == 1
    harness.isolate(poison)
    harness.isolate(poison)
    assert harness.retries.limits([retried]) == LIMITS


def test_transaction_that_fails_alone_twice_waits_for_revive() -> None:
    harness = Harness(1)
    (id,) = harness.ids
    harness.isolate(id)
    harness.isolate(id)
    harness.ledger.refuse(id, POISON)
    harness.retries.retry_later(id)
    harness.retries.retry_all()
    assert harness.retries.wait_s() is None
    harness.retries.retry_now(id)
    assert harness.due() == [id]
    assert not harness.retries.tried
    # It fails alone again: one more attempt first, as for any other.
    harness.isolate(id)
    assert not harness.retries.tried
    harness.isolate(id)
    assert list(harness.retries.tried) == [id]
    assert harness.ledger.index.refused[id].state is State.REFUSED


def test_passing_cause_quarantines_target_without_suspects() -> None:
    harness = Harness(4)
    harness.isolate(*harness.ids, cause=SILENT)
    assert harness.turn_size() == LIMITS.transactions_max
    assert harness.quarantine.cause("t", 0) == SILENT


def test_rejected_own_record_stops_the_partition() -> None:
    harness = Harness(4)
    own = Cause("too_large", "raise it", "txbroker.parked", 3)
    with pytest.raises(InvariantBroken, match="raise it"):
        harness.isolate(*harness.ids, cause=own)
    assert harness.turn_size() == LIMITS.transactions_max


# --- starts of promotion transactions ------------------------------------------------------------

LONG_S = 60.0


async def begun(asked: asyncio.Task[Slot]) -> bool:
    """Return whether an admission is immediate."""
    for _ in range(5):
        await asyncio.sleep(0)
    return asked.done()


async def test_admission_is_immediate_below_limit() -> None:
    limiter = TxnLimiter(at_once=2, wait_max_s=LONG_S)
    for _ in range(2):
        assert await begun(asyncio.create_task(limiter.begin()))


async def test_release_admits_first_waiting() -> None:
    limiter = TxnLimiter(at_once=2, wait_max_s=LONG_S)
    first, _ = await limiter.begin(), await limiter.begin()
    waiting = [asyncio.create_task(limiter.begin()) for _ in range(3)]
    assert not await begun(waiting[0])
    first.release()
    assert await begun(waiting[0])
    assert not await begun(waiting[1])
    first.release()  # repeated: admits none
    assert not await begun(waiting[1])
    waiting[0].result().release()
    assert await begun(waiting[1])
    assert not await begun(waiting[2])
    waiting[2].cancel()


async def test_slow_promotion_delays_others_briefly() -> None:
    limiter = TxnLimiter(at_once=1, wait_max_s=0.001)
    stuck = await limiter.begin()
    async with asyncio.timeout(LONG_S):
        second = await limiter.begin()
    second.release()
    limiter._wait_max_s = LONG_S
    assert await begun(asyncio.create_task(limiter.begin()))
    # It no longer counts, and its release admits none.
    stuck.release()
    asked = asyncio.create_task(limiter.begin())
    assert not await begun(asked)
    asked.cancel()


async def test_slow_promotion_admits_all_waiting() -> None:
    limiter = TxnLimiter(at_once=1, wait_max_s=0.05)
    slow = await limiter.begin()
    waiting = [asyncio.create_task(limiter.begin()) for _ in range(20)]
    assert not await begun(waiting[0])
    limiter._wait_max_s = LONG_S  # those that begin now would hold the next ones up for long
    async with asyncio.timeout(LONG_S / 2):
        turns = await asyncio.gather(*waiting)
    slow.release()
    asked = asyncio.create_task(limiter.begin())
    for turn in turns[1:]:
        turn.release()
        assert not await begun(asked)
    turns[0].release()
    assert await begun(asked)


async def test_admitted_one_is_not_overtaken() -> None:
    limiter = TxnLimiter(at_once=1, wait_max_s=LONG_S)
    first = await limiter.begin()
    called = asyncio.create_task(limiter.begin())
    assert not await begun(called)
    first.release()
    late = asyncio.create_task(limiter.begin())
    assert await begun(called)
    assert not await begun(late)
    called.result().release()
    assert await begun(late)


async def test_cancelled_wait_takes_no_slot() -> None:
    limiter = TxnLimiter(at_once=1, wait_max_s=LONG_S)
    first = await limiter.begin()
    gone, next_one = (asyncio.create_task(limiter.begin()) for _ in range(2))
    assert not await begun(gone)
    assert not await begun(next_one)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    first.release()
    assert await begun(next_one)


async def test_cancelled_admission_passes_slot_on() -> None:
    limiter = TxnLimiter(at_once=1, wait_max_s=LONG_S)
    first = await limiter.begin()
    gone, next_one = (asyncio.create_task(limiter.begin()) for _ in range(2))
    assert not await begun(next_one)
    first.release()
    gone.cancel()
    assert await begun(next_one)
