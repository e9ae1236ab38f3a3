"""Trouble: what is kept away from turns, and until when.

Three kinds are told apart. A *target partition* that could not be written is avoided for a while;
what is for it is deferred. A *refused transaction* is tried again, ever later, unless only trying
could tell that a broker does not take it, or its messages are gone: then it waits for an
operator's `revive`. A *turn* that a record spoiled is tried again in halves, until the transaction
to blame is in one alone.

Nothing here outlives the owner: the next one starts without, and finds the same out again.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from txbroker.core.ledger import Ledger
from txbroker.core.promotion import TurnLimits
from txbroker.core.records import Cause, State
from txbroker.core.schedule import Schedule
from txbroker.core.transaction import Transaction
from txbroker.door import NotVisible
from txbroker.errors import InvariantBroken
from txbroker.proxy.partition.body_cache import refused_as_lost

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0
"""Deferred and refused transactions are tried again after the first pause, then after twice the
last one, up to the longest."""


NOT_VISIBLE = "not_visible"
"""The code of the cause of a transaction whose turn is committed, and that readers do not see."""


def note_invisible(transactions: Iterable[Transaction], error: NotVisible) -> None:
    """Say of the transactions of a committed turn why readers do not see them yet: whoever looks
    for what to abort must not take them for ones that will be promoted again."""
    for transaction in transactions:
        if transaction.state is not State.COMMITTED:
            continue  # what a refused one was refused for counts until it is visible
        places = {(place.topic, place.partition) for place in transaction.places}
        topic, number = next((p for p in error.partitions if p in places), error.partitions[0])
        transaction.cause = Cause(
            NOT_VISIBLE,
            f"its turn is committed, but readers do not come past it in {topic}-{number}, where a "
            "transaction is open; if that is this turn, an abort would lose its messages: see "
            "docs/operate/lost-end.md",
            topic,
            number,
            passing=True,
        )


class _Retry(Struct, frozen=True):
    """When to try again, and how long to wait after that."""

    at_s: float
    pause_s: float


class _Avoided(Struct, frozen=True):
    """A target partition that could not be written, though its facts look well."""

    cause: Cause
    retry: _Retry


class Trouble:
    """What one half partition's turns have to do without for the moment.

    Args:
        ledger: tells which transactions are ready, and which are refused; only read.
        limits: how much goes into a turn while nothing spoils it.
        monotonic_s: a clock that never goes back, seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        limits: TurnLimits,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._limits = limits
        self._monotonic_s = monotonic_s
        self._avoided: dict[tuple[str, int | None], _Avoided] = {}
        self._deferred_retry: _Retry | None = None
        self._retries = Schedule()
        self._retry_pauses_s: dict[str, float] = {}
        self._suspects: frozenset[str] = frozenset()
        self._suspects_limit = 0
        self._refused_alone: set[str] = set()
        self._tried: dict[str, Cause] = {}
        self._given_up: set[str] = set()

    def wait_s(self) -> float | None:
        """Return how long until something is to be tried again, seconds; None: nothing is."""
        times_s = [] if self._deferred_retry is None else [self._deferred_retry.at_s]
        retry_ms = self._retries.next_ms()
        if retry_ms is not None:
            times_s.append(retry_ms / 1000)
        return max(0.0, min(times_s) - self._monotonic_s()) if times_s else None

    def promoted(self, transactions: Iterable[Transaction]) -> None:
        """Forget what was known against these, and places whose last pause ended long ago."""
        ids = [transaction.half.id for transaction in transactions]
        self._refused_alone.difference_update(ids)
        self._given_up.difference_update(ids)
        for id in self._retry_pauses_s.keys() & ids:
            del self._retry_pauses_s[id]
        long_ago_s = self._monotonic_s() - RETRY_MAX_S
        self._avoided = {
            place: avoided
            for place, avoided in self._avoided.items()
            if avoided.retry.at_s > long_ago_s
        }

    # --- target partitions, and what is deferred because of them -------------------------------

    def avoid(self, cause: Cause) -> None:
        """Keep off the target partition that a cause names; each time for longer."""
        place = (cause.topic, cause.partition)
        known = self._avoided.get(place)
        self._avoided[place] = _Avoided(cause, self._later(known.retry if known else None))

    def avoided(self, topic: str, partition: int | None) -> Cause | None:
        """Return why a target partition is kept off now; None if it is not."""
        known = self._avoided.get((topic, partition))
        if known is not None and known.retry.at_s > self._monotonic_s():
            return known.cause
        return None

    def note_deferred(self, *, waiting: bool) -> None:
        """Come back later for what is deferred, after a pause that grows while any `waiting` is."""
        if not waiting:
            self._deferred_retry = None
        elif self._deferred_retry is None or self._deferred_retry.at_s <= self._monotonic_s():
            self._deferred_retry = self._later(self._deferred_retry)

    def _later(self, retry: _Retry | None) -> _Retry:
        """Return when to try again: after the first pause, then after twice the last one."""
        pause_s = RETRY_FIRST_S if retry is None else min(retry.pause_s * 2, RETRY_MAX_S)
        return _Retry(self._monotonic_s() + pause_s, pause_s)

    # --- refused transactions ------------------------------------------------------------------

    @property
    def tried(self) -> Mapping[str, Cause]:
        """Why a broker refused a transaction, by id, where only trying could tell.

        Such a one is tried again when an operator says so, and not before.
        """
        return self._tried

    def retry_later(self, id: str) -> None:
        """Put a refused transaction to its next time, unless only an operator can tell when."""
        if id not in self._tried and id not in self._given_up:
            pause_s = self._retry_pauses_s.get(id, RETRY_FIRST_S)
            self._retries.set(id, self._monotonic_ms() + round(pause_s * 1000))
            self._retry_pauses_s[id] = min(pause_s * 2, RETRY_MAX_S)

    def retry_all(self) -> None:
        """After recovery: whatever is refused is tried again, each after the first pause."""
        for id, transaction in self._ledger.refused.items():
            if refused_as_lost(transaction):
                self.give_up(id)
            elif id not in self._retry_pauses_s:
                self.retry_later(id)

    def give_up(self, id: str) -> None:
        """Its messages are gone: trying again by itself would find the same."""
        self._given_up.add(id)

    def retry_now(self, id: str) -> None:
        """Try a refused transaction again now, whatever was found out about it before."""
        self._tried.pop(id, None)
        self._refused_alone.discard(id)
        self._given_up.discard(id)
        if id in self._ledger.refused:
            self._retry_pauses_s.pop(id, None)
            self._retries.set(id, self._monotonic_ms())

    def take_due(self, in_flight: Collection[str]) -> list[Transaction]:
        """Return the refused transactions whose time has come, and put each to its next time.

        Args:
            in_flight: ids whose fate a turn on its way decides; they are not returned.
        """
        due = []
        for id in list(self._retries.pop_due(self._monotonic_ms())):
            transaction = self._ledger.refused.get(id)
            if transaction is None:
                self._retry_pauses_s.pop(id, None)
                continue
            self.retry_later(id)
            if id not in in_flight and id not in self._tried:
                due.append(transaction)
        return due

    def _monotonic_ms(self) -> int:
        return int(self._monotonic_s() * 1000)

    # --- turns that a record spoiled -----------------------------------------------------------

    def isolate(self, transactions: Sequence[Transaction], cause: Cause) -> None:
        """A record spoiled its turn: try again in halves, until one transaction fails alone.

        Args:
            transactions: what the turn was to promote.
            cause: why which target partition did not take it.

        Raises:
            InvariantBroken: it was a record of our own.
        """
        ours = not any(m.topic == cause.topic for t in transactions for m in t.messages)
        if ours and not cause.passing:
            # No transaction is to blame, and none could be set aside: that is written there too.
            raise InvariantBroken(f"a turn cannot be written: {cause.message}")
        if cause.passing:
            self.avoid(cause)
        elif len(transactions) == 1:
            id = transactions[0].id
            if id in self._refused_alone:
                self._tried[id] = cause
            # Once more first: examined anew, the target may show what is wrong, and then the
            # transaction is tried again by itself when that has passed.
            self._refused_alone.add(id)
        else:
            self._suspects = frozenset(transaction.id for transaction in transactions)
            self._suspects_limit = max(1, len(transactions) // 2)

    def limits(self, retried: Iterable[Transaction]) -> TurnLimits:
        """Return smaller limits while a turn would hold a transaction that may spoil it.

        Args:
            retried: the refused transactions that the turn may hold beside all that are ready.
        """
        if not self._suspects:
            return self._limits
        self._suspects = frozenset([id for id in self._suspects if self._may_be_tried(id)])
        again = {transaction.id for transaction in retried}
        if not any(id in self._ledger.ready or id in again for id in self._suspects):
            return self._limits
        return TurnLimits(self._suspects_limit, self._limits.bytes_max, self._limits.deferred_max)

    def _may_be_tried(self, id: str) -> bool:
        return id in self._ledger.ready or (id in self._ledger.refused and id not in self._tried)
