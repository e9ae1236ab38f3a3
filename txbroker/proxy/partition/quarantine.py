"""Retries of one half partition: target partitions in quarantine, deferred and refused
transactions, and transactions that may have spoiled a promotion transaction."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from txbroker.core.index import Schedule
from txbroker.core.ledger import Ledger
from txbroker.core.promotion import PromotionLimits
from txbroker.core.records import Cause, State
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import NotVisible
from txbroker.errors import InvariantBroken
from txbroker.net.timers import grown_pause_s
from txbroker.proxy.partition.body_cache import refused_as_lost

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0
"""Pause before the first retry; each later pause is twice the one before, up to the maximum."""
NOT_VISIBLE = "not_visible"
"""Cause of a transaction whose promotion is committed, but which readers do not see yet."""


def note_invisible(transactions: Iterable[Transaction], error: NotVisible) -> None:
    """Give the transactions of a committed promotion the cause why readers do not see them yet.

    An operator who looks for transactions to abort must not expect these to be promoted again.
    """
    for transaction in transactions:
        if transaction.state is not State.COMMITTED:
            continue  # a refused one keeps the cause of its refusal until it is visible
        places = {(place.topic, place.partition) for place in transaction.places}
        topic, number = next((p for p in error.partitions if p in places), error.partitions[0])
        transaction.cause = Cause(
            NOT_VISIBLE,
            f"its promotion is committed, but an open transaction in {topic}-{number} hides it "
            "from readers; if that is this promotion, an abort would lose its messages: see "
            "docs/operate/lost-end.md",
            topic,
            number,
            passing=True,
        )


class _Retry(Struct, frozen=True):
    """When to retry, and the number of failures in a row."""

    at_s: float
    failures: int


def _next_retry(retry: _Retry | None, now_s: float) -> _Retry:
    failures = 1 if retry is None else retry.failures + 1
    return _Retry(now_s + grown_pause_s(failures, RETRY_FIRST_S, RETRY_MAX_S), failures)


class TargetQuarantine:
    """Target partitions that could not be written although their facts look well."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._entries: dict[tuple[str, int | None], tuple[Cause, _Retry]] = {}

    def add(self, cause: Cause) -> None:
        """Quarantine the target partition that a cause names, each time for longer."""
        place = (cause.topic, cause.partition)
        _, retry = self._entries.get(place, (cause, None))
        self._entries[place] = cause, _next_retry(retry, self._monotonic_s())

    def cause(self, topic: str, partition: int | None) -> Cause | None:
        cause, retry = self._entries.get((topic, partition), (None, None))
        if retry is not None and retry.at_s > self._monotonic_s():
            return cause
        return None

    def expire(self) -> None:
        """Forget partitions whose quarantine ended long ago: their next one is short again."""
        long_ago_s = self._monotonic_s() - RETRY_MAX_S
        self._entries = {
            place: (cause, retry)
            for place, (cause, retry) in self._entries.items()
            if retry.at_s > long_ago_s
        }


class RetryQueue:
    """Schedules retries of deferred and refused transactions, and isolates suspects."""

    def __init__(
        self,
        ledger: Ledger,
        limits: PromotionLimits,
        quarantine: TargetQuarantine,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = ledger.index
        self._limits = limits
        self._quarantine = quarantine
        self._monotonic_s = monotonic_s
        self._deferred_retry: _Retry | None = None
        self._retries = Schedule()
        self._failures: dict[str, int] = {}
        self._suspects: frozenset[str] = frozenset()
        self._suspects_limit = 0
        self._refused_alone: set[str] = set()
        self._tried: dict[str, Cause] = {}
        self._given_up: set[str] = set()

    def wait_s(self) -> float | None:
        """Return the time until the next retry, seconds; None without any."""
        times_s = [] if self._deferred_retry is None else [self._deferred_retry.at_s]
        retry_ms = self._retries.next_ms()
        if retry_ms is not None:
            times_s.append(retry_ms / 1000)
        return max(0.0, min(times_s) - self._monotonic_s()) if times_s else None

    def note_deferred(self, *, waiting: bool) -> None:
        """Schedule a retry of deferred transactions; the pause grows while any are `waiting`."""
        if not waiting:
            self._deferred_retry = None
        elif self._deferred_retry is None or self._deferred_retry.at_s <= self._monotonic_s():
            self._deferred_retry = _next_retry(self._deferred_retry, self._monotonic_s())

    # --- refused transactions ------------------------------------------------------------------

    @property
    def tried(self) -> Mapping[str, Cause]:
        """Why a broker rejected a transaction, by id, where only an attempt could show it.

        It is retried only when an operator revives it.
        """
        return self._tried

    def retry_later(self, id: str) -> None:
        """Schedule the next retry of a refused transaction, unless it takes an operator."""
        if id not in self._tried and id not in self._given_up:
            failures = self._failures[id] = self._failures.get(id, 0) + 1
            pause_s = grown_pause_s(failures, RETRY_FIRST_S, RETRY_MAX_S)
            self._retries.set(id, self._monotonic_ms() + round(pause_s * 1000))

    def retry_all(self) -> None:
        """Schedule all refused transactions after the first pause: the owner has recovered."""
        for id, transaction in self._index.refused.items():
            if refused_as_lost(transaction):
                self.give_up(id)
            elif id not in self._failures:
                self.retry_later(id)

    def give_up(self, id: str) -> None:
        """Do not retry a transaction whose messages no longer exist."""
        self._given_up.add(id)

    def retry_now(self, id: str) -> None:
        """Retry a refused transaction now, and forget its failures."""
        self._tried.pop(id, None)
        self._refused_alone.discard(id)
        self._given_up.discard(id)
        if id in self._index.refused:
            self._failures.pop(id, None)
            self._retries.set(id, self._monotonic_ms())

    def take_due(self, in_flight: Collection[str]) -> list[Transaction]:
        """Return the refused transactions that are due, and schedule the next retry of each."""
        due = []
        for id in list(self._retries.pop_due(self._monotonic_ms())):
            transaction = self._index.refused.get(id)
            if transaction is None:
                self._failures.pop(id, None)
                continue
            self.retry_later(id)
            if id not in in_flight and id not in self._tried:
                due.append(transaction)
        return due

    def promoted(self, transactions: Iterable[Transaction]) -> None:
        """Forget the failures of promoted transactions, and long past quarantines."""
        ids = [transaction.half.id for transaction in transactions]
        self._refused_alone.difference_update(ids)
        self._given_up.difference_update(ids)
        for id in self._failures.keys() & ids:
            del self._failures[id]
        self._quarantine.expire()

    def _monotonic_ms(self) -> int:
        return int(self._monotonic_s() * 1000)

    # --- records that spoil a promotion transaction ---------------------------------------------

    def isolate(self, transactions: Sequence[Transaction], cause: Cause) -> None:
        """Retry a spoiled promotion transaction in halves, until one transaction fails alone."""
        if cause.passing:
            self._quarantine.add(cause)
        elif not any(m.topic == cause.topic for t in transactions for m in t.messages):
            # No transaction caused it, and none could be set aside: that writes there, too.
            raise InvariantBroken(f"the promotion cannot be written: {cause.message}")
        elif len(transactions) == 1:
            id = transactions[0].id
            if id in self._refused_alone:
                self._tried[id] = cause
            # One more attempt first: examined again, the target may show the problem, and then
            # the transaction is retried automatically when that has passed.
            self._refused_alone.add(id)
        else:
            self._suspects = frozenset(transaction.id for transaction in transactions)
            self._suspects_limit = max(1, len(transactions) // 2)

    def limits(self, retried: Iterable[Transaction]) -> PromotionLimits:
        """Return the limits of the next promotion transaction: smaller while suspects remain."""
        if not self._suspects:
            return self._limits
        self._suspects = frozenset([id for id in self._suspects if self._may_be_tried(id)])
        again = {transaction.id for transaction in retried}
        if not any(id in self._index.ready or id in again for id in self._suspects):
            return self._limits
        return PromotionLimits(
            self._suspects_limit, self._limits.bytes_max, self._limits.deferred_max
        )

    def _may_be_tried(self, id: str) -> bool:
        return id in self._index.ready or (id in self._index.refused and id not in self._tried)
