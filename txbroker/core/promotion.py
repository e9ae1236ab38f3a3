"""The plan of the next promotion transaction.

Committed transactions are promoted in the order of their deciding markers, each whole. One whose
target is unavailable is *deferred*, and with it every later one of the same order key that shares a
target partition with it, transitively; one whose target will never accept it is *refused*. The
others do not wait for them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import TypeAlias

from msgspec import Struct

from txbroker.core.records import Cause, Place
from txbroker.core.transaction import Transaction

Examine: TypeAlias = Callable[[Place], Cause | None]
"""Returns why a target does not accept a message of this size, for good or (`passing`) not."""
_FULL = "turn_full"
_Blocked: TypeAlias = dict[int | None, dict[tuple[str, int], Cause]]
"""By order (never None): the target partitions blocked by a deferred transaction, and why."""
_Accepted: TypeAlias = dict[tuple[str, int], int]
"""The largest message, bytes, known to be accepted by each target partition."""


class PromotionLimits(Struct, frozen=True):
    """Limits of one promotion transaction; a single transaction may be larger."""

    transactions_max: int = 1000
    bytes_max: int = 4 * 1024 * 1024
    deferred_max: int = 1000
    """With more deferred ones promotion of the partition stops: each checkpoint lists them."""


class PromotionPlan(Struct):
    """The next promotion transaction.

    Attributes:
        promote: transactions to promote.
        refuse: transactions to refuse, and why.
        deferred: ids of transactions below `op` that stay committed, and why.
        op: the first offset of the operation topic that is not promoted yet.
        full: whether there are too many deferred ones.
    """

    promote: list[Transaction]
    refuse: list[tuple[Transaction, Cause]]
    deferred: dict[str, Cause]
    op: int
    full: bool = False

    def waiting(self) -> list[str]:
        """Return the ids of transactions whose target is unavailable."""
        return [id for id, cause in self.deferred.items() if cause.code != _FULL]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to write."""
        return not self.promote and not self.refuse


def transaction_bytes(transaction: Transaction) -> int:
    """Return an upper bound of a transaction's size once promoted, bytes."""
    return sum([place.size for place in transaction.places])


def plan_promotion(
    ready: Iterable[Transaction],
    op_position: int,
    examine: Examine,
    limits: PromotionLimits,
    *,
    in_flight: Collection[str] = (),
    retried: Iterable[Transaction] = (),
    tried: Mapping[str, Cause] = MappingProxyType({}),
    progressed: int = 0,
) -> PromotionPlan:
    """Return the plan of the next promotion transaction.

    Args:
        ready: committed transactions in the order of their markers, deferred ones among them.
            Only as many as fit are consumed.
        op_position: the operation topic's offset up to which the ledger has applied whole batches.
        examine: uses cached facts; called again only for a larger message.
        in_flight: ids in promotion transactions that are not committed yet.
        retried: refused transactions to retry. Their place in the order is lost.
        tried: why a broker refused a transaction, by id, where only trying could show it.
        progressed: the `op` of the newest checkpoint, written or in flight. Checkpoints never go
            back, or what was promoted above would be promoted again after a crash; so what lies
            below and does not fit is in this plan's `deferred`.
    """
    plan, size = PromotionPlan([], [], {}, op_position), 0
    blocked: _Blocked = {}
    accepted: _Accepted = {}
    # First, so that a suspect of failed promotion transactions is alone with a limit of one.
    for transaction in retried:
        bytes_more = transaction_bytes(transaction)
        count = len(plan.promote) + len(plan.refuse)
        if count and (count >= limits.transactions_max or size + bytes_more > limits.bytes_max):
            break
        if transaction.id not in in_flight and _cause(transaction, examine, {}, accepted) is None:
            size += bytes_more
            plan.promote.append(transaction)
    queue = iter(ready)
    for transaction in queue:
        # Thousands run through here: no call for those without an obstacle.
        id, places = transaction.half.id, transaction.places
        if id in in_flight:
            continue
        cause, doubtful, bytes_more = tried.get(id), transaction.order in blocked, 0
        for place in places:
            bytes_more += place.size
            if place.size > accepted.get((place.topic, place.partition), -1):
                doubtful = True
        if doubtful and cause is None:
            cause = _cause(transaction, examine, blocked, accepted)
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
    """End the plan before `first`: the checkpoint stops there, unless it was further already."""
    plan.op = max(first.verdict.op_offset, progressed)
    for transaction in chain((first,), rest):
        if transaction.verdict.op_offset >= plan.op:
            break
        if transaction.id in in_flight:
            continue
        place = transaction.places[0]
        plan.deferred[transaction.id] = Cause(
            _FULL, "it goes with the next promotion transaction", place.topic, place.partition, True
        )


def _cause(
    transaction: Transaction, examine: Examine, blocked: _Blocked, accepted: _Accepted
) -> Cause | None:
    """Return why a transaction cannot be promoted now; a lasting cause wins over a passing one."""
    passing: Cause | None = None
    for place in transaction.places:
        where = place.topic, place.partition
        if place.size <= accepted.get(where, -1):
            continue
        cause = examine(place)
        if cause is None:
            accepted[where] = place.size
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
    """Block later transactions of the same order, if there is one, to the same places."""
    if transaction.order is not None:
        before = blocked.setdefault(transaction.order, {})
        for place in transaction.places:
            before.setdefault((place.topic, place.partition), cause)
