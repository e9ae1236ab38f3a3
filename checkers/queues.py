"""The queues of groups: the order of checks, and the limits on calls in flight."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from txbroker.checkers.base import Channel, CheckCall, CheckOwner, CheckResult
from txbroker.core.records import CheckReason


class BackoffTimer(Protocol):
    """Ends a group's back-off, as `asyncio.TimerHandle` does."""

    def cancel(self) -> None:
        """Cancel the call."""


@dataclass(slots=True, eq=False)
class QueuedCheck:
    """A due check and its progress.

    Attributes:
        place: its position in the group's queue: the time it became due, and a number.
        has_slot: it counts as a call in flight.
        era: the group's, when the check left the queue.
        began_s: when an instance was looked for, later when it was asked, on the loop's clock.
        in_vain: the instances that brought no decision in this attempt; "" is the check URL.
    """

    owner: CheckOwner
    id: str
    group: "GroupQueue"
    prefer: str
    reason: CheckReason
    place: tuple[float, int]
    forgotten: bool = False
    has_slot: bool = False
    era: int = 0
    began_s: float = 0.0
    in_vain: tuple[str, ...] = ()
    channel: Channel = field(init=False)
    call: CheckCall = field(init=False)
    endpoint: str = field(init=False)
    result: CheckResult = field(init=False)

    @property
    def wanted(self) -> bool:
        """True while the owner has not forgotten the check and the transaction is undecided."""
        return not self.forgotten and self.owner.still_pending(self.id)


@dataclass(slots=True, eq=False)
class GroupQueue:
    """The queue of one group and its reachability.

    Attributes:
        unreachable_since_s: when the first of its failures in a row happened, on the loop's clock.
        era: grows when a back-off begins or ends. Calls of an earlier era neither lengthen a
            back-off nor count as another failure.
        timer: runs during a back-off.
    """

    name: str
    share: "CallBudget"
    queue: list[tuple[tuple[float, int], QueuedCheck]] = field(default_factory=list)
    running: int = 0
    failures: int = 0
    unreachable_since_s: float = 0.0
    detail: str = ""
    era: int = 0
    timer: BackoffTimer | None = None

    @property
    def resting(self) -> bool:
        """True during a back-off."""
        return self.timer is not None

    def stop_timer(self) -> None:
        """End the back-off."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class CallBudget:
    """Limits the calls in flight of several groups together: of all, or of one share.

    Args:
        name: of the share, "" for all groups.
        first_max: calls in flight below which a group may start its first call.
        more_max: calls in flight below which a group may start another call.

    Attributes:
        groups: how many groups of the share are known.
        charged: what counts towards `more_max`: for a share, its calls up to its own limit; for
            all groups, the sum over the shares. So first calls of one share do not reduce the
            others' budget.
    """

    def __init__(self, name: str, first_max: int, more_max: int) -> None:
        self.name = name
        self.groups = 0
        self.running = 0
        self.charged = 0
        self.first_max = first_max
        self.more_max = more_max
        # Groups that wait for their first call, or for another one; longest waiting first.
        self._first: dict[str, GroupQueue] = {}
        self._more: dict[str, GroupQueue] = {}

    def _open(self, further: bool) -> bool:
        return self.charged < self.more_max if further else self.running < self.first_max

    def room(self, group: GroupQueue) -> bool:
        """Return True if a group may start a call; otherwise let it wait for room."""
        further = group.running > 0
        if self._open(further):
            return True
        (self._more if further else self._first)[group.name] = group
        return False

    def forget(self, group: GroupQueue) -> None:
        """Stop a group's waiting."""
        self._first.pop(group.name, None)
        self._more.pop(group.name, None)

    def next(self) -> Iterator[GroupQueue]:
        """Yield waiting groups, while there is room."""
        for waiting, further in ((self._first, False), (self._more, True)):
            while waiting and self._open(further):
                yield waiting.pop(next(iter(waiting)))
