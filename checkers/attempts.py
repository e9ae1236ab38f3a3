"""What the questions of one attempt brought, and whom earlier attempts asked in vain. Pure."""

from collections import OrderedDict
from collections.abc import Sequence

from txbroker.checkers.base import (
    Answered,
    CheckCall,
    CheckOwner,
    CheckResult,
    Unclear,
    Unreached,
    shortened,
)
from txbroker.core.records import Decision
from txbroker.net.timers import grown_pause_s

LATER_FIRST_S = 5.0
LATER_MAX_S = 60.0
"""Pauses of a transaction about which no instance can find out now: the first one and the longest.
They grow because an outage of a database may last for hours and concern many transactions."""
TRANSACTIONS_MAX = 10_000
"""Transactions of which it is known whom earlier attempts asked in vain. The next attempt of one
that was dropped begins with the preferred instance again, which costs at most that attempt."""


def in_vain(result: CheckResult) -> bool:
    """Return True if another instance is asked after this result: neither a decision nor a
    deliberate "not yet"."""
    if isinstance(result, Answered):
        return result.decision is Decision.UNKNOWN and result.ask_again_s is None
    return True


def combined(call: CheckCall, asked: Sequence[tuple[str, CheckResult]]) -> CheckResult:
    """Return the result of an attempt.

    Args:
        asked: the endpoints that were asked, in order, with their results; an endpoint "" stands
            for an `Unreached` of the finder, which found no other instance.

    A decision or "not yet" is the result. An attempt counts if a result is unclear, or if
    instances answered "unknown" and no other one is left to ask. It is given back if none
    took the question. Otherwise no attempt is used, and the transaction is asked about later.
    """
    endpoint, last = asked[-1]
    if not in_vain(last):
        return last if len(asked) == 1 else _with(last, f"{endpoint}: {last.detail}")
    results = [result for _, result in asked]
    refused = [result for result in results if isinstance(result, Unreached)]
    unknown = len(refused) < len(results)
    shown = [
        (endpoint, result)
        for endpoint, result in asked
        if endpoint or not unknown or not (isinstance(result, Unreached) and result.lasting)
    ]
    detail = shown[0][1].detail
    if len(shown) > 1:
        parts = [f"{at}: {result.detail}" if at else result.detail for at, result in shown]
        detail = shortened("; ".join(parts))
    text = next((r.text for r in reversed(results) if not isinstance(r, Unreached)), "")
    if any(isinstance(result, Unclear) for result in results):
        return Unclear(detail, text)
    again_s = [result.ask_again_s for result in refused if result.ask_again_s is not None]
    if again_s or (unknown and not all(result.lasting for result in refused)):
        pause_s = max(grown_pause_s(call.number, LATER_FIRST_S, LATER_MAX_S), *again_s, 0.0)
        return Answered(Decision.UNKNOWN, pause_s, None, detail, text)
    return Answered(Decision.UNKNOWN, None, None, detail, text) if unknown else Unreached(detail)


def _with(result: CheckResult, detail: str) -> CheckResult:
    match result:
        case Answered(decision, again_s, messages, _, text):
            return Answered(decision, again_s, messages, shortened(detail), text)
    return result


class AskedInVain:
    """The instances that earlier attempts of each transaction asked in vain, the oldest first.

    An attempt asks others first, so that instances which fail, or do not answer in time, use up no
    second attempt before each had one. In memory only, of a bounded number of transactions.
    """

    def __init__(self) -> None:
        self._instances: OrderedDict[tuple[CheckOwner, str], tuple[str, ...]] = OrderedDict()

    def of(self, owner: CheckOwner, id: str) -> tuple[str, ...]:
        """Return the instances; "" is the check URL."""
        return self._instances.get((owner, id), ())

    def note(self, owner: CheckOwner, id: str, instances: tuple[str, ...]) -> None:
        """Note the instances of an attempt; none: it brought an answer, which ends the memory."""
        before = self._instances.pop((owner, id), ())
        if instances:
            kept = tuple(name for name in before if name not in instances)
            self._instances[owner, id] = kept + instances
            if len(self._instances) > TRANSACTIONS_MAX:
                self._instances.popitem(last=False)

    def forget(self, owner: CheckOwner) -> None:
        """Forget the transactions of an owner."""
        for key in [key for key in self._instances if key[0] is owner]:
            del self._instances[key]
