"""The queues of groups: which check comes next, and whose turn it is within the limits."""

from collections.abc import Iterator
from typing import Protocol

from txbroker.checkers.base import Channel, CheckCall, CheckOwner, CheckResult
from txbroker.core.records import CheckReason


class Timer(Protocol):
    """What ends a group's rest, as `asyncio.TimerHandle` does."""

    def cancel(self) -> None:
        """Let it not happen."""
        ...


class QueuedCheck:
    """A check that is due, and how far it has come."""

    __slots__ = (
        "began_s", "call", "channel", "endpoint", "era", "forgotten", "group", "id", "owner",
        "place", "prefer", "reason", "result",
    )  # fmt: skip

    channel: Channel
    call: CheckCall
    endpoint: str
    result: CheckResult

    def __init__(
        self,
        owner: CheckOwner,
        id: str,
        group: "GroupQueue",
        prefer: str,
        reason: CheckReason,
        place: tuple[float, int],
    ) -> None:
        self.owner = owner
        self.id = id
        self.group = group
        self.prefer = prefer
        self.reason = reason
        self.place = place
        """In its group's queue: since when it is due, and a number."""
        self.forgotten = False
        self.era = 0
        """The group's when it was taken from the queue."""
        self.began_s = 0.0
        """When somebody to ask was looked for, later when it was asked, by the loop's clock."""

    @property
    def wanted(self) -> bool:
        return not self.forgotten and self.owner.still_pending(self.id)


class GroupQueue:
    """The queue of one group and how it fares."""

    def __init__(self, name: str, share: "CallBudget") -> None:
        self.name = name
        self.share = share
        self.queue: list[tuple[tuple[float, int], QueuedCheck]] = []
        self.running = 0
        self.failures = 0
        self.away_s = 0.0
        """When the first of these failures was met, by the loop's clock."""
        self.detail = ""
        self.era = 0
        """Grows with each back-off and each end of one, so that calls which began before it
        neither lengthen it nor count twice."""
        self.timer: Timer | None = None

    @property
    def resting(self) -> bool:
        return self.timer is not None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class CallBudget:
    """Groups whose calls are bounded together: all groups, or those of one share.

    Args:
        name: of the share, "" for all groups.
        first_max, more_max: calls at a time up to which a group gets its first one, or a further
            one.
    """

    def __init__(self, name: str, first_max: int, more_max: int) -> None:
        self.name = name
        self.groups = 0
        """How many of a share are known now."""
        self.running = 0
        self.charged = 0
        """What counts against further calls: of a share its calls up to its own bound, of all
        groups what their shares are charged. So first calls of a share take no other's part."""
        self.first_max = first_max
        self.more_max = more_max
        # Groups that the bound holds up, longest waiting first: those without any call under way,
        # and those that wait for a further one.
        self._first: dict[str, GroupQueue] = {}
        self._more: dict[str, GroupQueue] = {}

    def _open(self, further: bool) -> bool:
        return self.charged < self.more_max if further else self.running < self.first_max

    def room(self, group: GroupQueue) -> bool:
        """Say whether the bound allows a group another call; if not, line it up."""
        further = group.running > 0
        if self._open(further):
            return True
        (self._more if further else self._first)[group.name] = group
        return False

    def forget(self, group: GroupQueue) -> None:
        """It waits for nothing any more."""
        self._first.pop(group.name, None)
        self._more.pop(group.name, None)

    def next(self) -> Iterator[GroupQueue]:
        """Yield the groups whose turn it is, while there is room."""
        for waiting, further in ((self._first, False), (self._more, True)):
            while waiting and self._open(further):
                yield waiting.pop(next(iter(waiting)))
