"""What goes into the next turn: the promotion plan.

Committed transactions are taken in the order of their deciding markers, each whole. One whose
target cannot take it now is *deferred*, and with it every later one of the same order key that
shares a target partition with it, transitively; one whose target will never take it is *refused*.
Everything else flows past them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import TypeAlias

from msgspec import Struct

from txbroker.core.records import Cause, Place
from txbroker.core.transaction import Transaction

Verdict: TypeAlias = Cause | None
"""None: the target takes it; a Cause: it does not, for good or (`passing`) for a while."""


_TURN_FULL = "turn_full"
_Blocked: TypeAlias = dict[int | None, dict[tuple[str, int], Cause]]
"""By order, never None: where something deferred holds back what comes later, and why."""
_Taken: TypeAlias = dict[tuple[str, int], int]
"""Up to which size, bytes, a target partition was found to take a message."""


class PromotionLimits(Struct, frozen=True):
    """How much goes into one turn at most; a single transaction may be larger."""

    transactions_max: int = 1000
    bytes_max: int = 4 * 1024 * 1024
    deferred_max: int = 1000
    """Beyond this many deferred ones promotion of the partition stops: the list is written in
    every turn's progress."""


class PromotionPlan(Struct):
    """The next turn: what is promoted, refused and deferred, and how far that gets.

    `op` is the first offset of the operation topic that is not dealt with yet.
    """

    promote: list[Transaction]
    refuse: list[tuple[Transaction, Cause]]
    deferred: dict[str, Cause]
    op: int
    full: bool = False

    def waiting(self) -> list[str]:
        """Return the ids of those that a target does not take now."""
        return [id for id, cause in self.deferred.items() if cause.code != _TURN_FULL]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to write."""
        return not self.promote and not self.refuse


def transaction_bytes(transaction: Transaction) -> int:
    """Return an upper bound of a transaction's size in a turn, bytes."""
    return sum([place.size for place in transaction.places])


def plan_promotion(
    ready: Iterable[Transaction],
    op_position: int,
    examine: Callable[[Place], Verdict],
    limits: PromotionLimits,
    *,
    in_flight: Collection[str] = (),
    retried: Iterable[Transaction] = (),
    tried: Mapping[str, Cause] = MappingProxyType({}),
    progressed: int = 0,
) -> PromotionPlan:
    """Return the next turn.

    Args:
        ready: committed transactions in the order of their markers, deferred ones among them. No
            more of them are looked at than fit the turn.
        op_position: how far the ledger has applied the operation topic, in whole batches.
        examine: says whether a target takes a message of this size, from what is known already.
            One that takes it is not asked again about a message that is no larger.
        limits: how much goes into one turn.
        in_flight: ids that an earlier turn, not yet committed, has promoted or refused.
        retried: refused transactions to be tried again. Their place in the order is lost.
        tried: why a broker refused a transaction, by id, where only trying could tell.
        progressed: the `op` of the newest progress, written or on its way. Progress never goes
            back, or what was promoted above it would be promoted again after a crash; so what
            lies below it and finds no room in this turn is in this turn's `deferred`.
    """
    plan, size = PromotionPlan([], [], {}, op_position), 0
    blocked: _Blocked = {}
    taken: _Taken = {}
    # First, so that one that is suspected of spoiling turns is alone in a turn for one.
    for transaction in retried:
        bytes_more = transaction_bytes(transaction)
        count = len(plan.promote) + len(plan.refuse)
        if count and (count >= limits.transactions_max or size + bytes_more > limits.bytes_max):
            break
        if transaction.id not in in_flight and _cause(transaction, examine, {}, taken) is None:
            size += bytes_more
            plan.promote.append(transaction)
    queue = iter(ready)
    for transaction in queue:
        # Thousands come by here in each turn: nothing is called for those that just go.
        id, places = transaction.half.id, transaction.places
        if id in in_flight:
            continue
        cause, doubtful, bytes_more = tried.get(id), transaction.order in blocked, 0
        for place in places:
            bytes_more += place.size
            if place.size > taken.get((place.topic, place.partition), -1):
                doubtful = True
        if doubtful and cause is None:
            cause = _cause(transaction, examine, blocked, taken)
        if cause is not None and cause.passing:
            if len(plan.deferred) >= limits.deferred_max:
                plan.full = True
                _cut(plan, transaction, queue, in_flight, progressed)
                break
            plan.deferred[id] = cause
            _block(transaction, cause, blocked)
            continue
        count = len(plan.promote) + len(plan.refuse)
        if count and (count >= limits.transactions_max or size + bytes_more > limits.bytes_max):
            _cut(plan, transaction, queue, in_flight, progressed)
            break
        size += bytes_more
        if cause is None:
            plan.promote.append(transaction)
        else:
            plan.refuse.append((transaction, cause))
    return plan


def _cut(
    plan: PromotionPlan,
    first: Transaction,
    rest: Iterable[Transaction],
    in_flight: Collection[str],
    progressed: int,
) -> None:
    """End the turn before `first`: progress stops there, unless it has been further already."""
    plan.op = max(first.op_offset, progressed)
    for transaction in chain((first,), rest):
        if transaction.op_offset >= plan.op:
            break
        if transaction.id in in_flight:
            continue
        place = transaction.places[0]
        plan.deferred[transaction.id] = Cause(
            _TURN_FULL, "it goes with the next turn", place.topic, place.partition, True
        )


def _cause(
    transaction: Transaction,
    examine: Callable[[Place], Verdict],
    blocked: _Blocked,
    taken: _Taken,
) -> Cause | None:
    """Why a transaction does not go now: a lasting cause weighs more than a passing one."""
    passing: Cause | None = None
    for place in transaction.places:
        where = place.topic, place.partition
        if place.size <= taken.get(where, -1):
            continue
        cause = examine(place)
        if cause is None:
            taken[where] = place.size
        elif not cause.passing:
            return cause
        else:
            passing = passing or cause
    if passing is None and transaction.order in blocked:
        before = blocked[transaction.order]
        for place in transaction.places:
            if (place.topic, place.partition) in before:
                return before[place.topic, place.partition]
    return passing


def _block(transaction: Transaction, cause: Cause, blocked: _Blocked) -> None:
    """Hold back what comes later of the same order, if it has any, to the same places."""
    if transaction.order is not None:
        before = blocked.setdefault(transaction.order, {})
        for place in transaction.places:
            before.setdefault((place.topic, place.partition), cause)
