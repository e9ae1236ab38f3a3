"""What the checks of each group brought: counts of the last 15 minutes, and the last answers."""

from collections import deque
from collections.abc import Mapping, Sequence

from msgspec import Struct

from txbroker.checkers.base import CheckResult, Unreached
from txbroker.checkers.queues import QueuedCheck
from txbroker.contract.service import CheckCounts, CheckReport, GroupChecks

WINDOW_S = 900
"""The window of the counts, as in the alert on failing checks, seconds."""
_BUCKET_S = 60
GROUPS_MAX = 1000
"""Groups that are remembered; the one that was checked longest ago makes room."""
REPORTS_MAX = 10
"""Checks of a group that are remembered one by one."""

OUTCOMES = CheckCounts.__struct_fields__
_PLACES = {name: place for place, name in enumerate(OUTCOMES)} | {
    # An attempt that reached no instance, and no attempt because there was no channel.
    name: OUTCOMES.index("unreached")
    for name in ("returned", "unreachable")
}
_UNDECIDED = frozenset({"unknown", "unclear"})


class _Report(Struct, gc=False):
    """One check; its age is known, and so its time by any clock."""

    at_s: float
    id: str
    endpoint: str
    outcome: str
    answer: str

    def at(self, now_s: float, now_ms: int) -> CheckReport:
        at_ms = now_ms - round((now_s - self.at_s) * 1000)
        return CheckReport(self.id, at_ms, self.endpoint, self.outcome, self.answer)


class _Group:
    """The checks of one group."""

    __slots__ = ("buckets", "fresh", "reports", "sums", "undecided")

    def __init__(self) -> None:
        self.buckets: deque[tuple[int, list[int]]] = deque()
        self.sums = [0] * len(OUTCOMES)
        self.fresh: list[int] | None = None
        self.reports: deque[_Report] = deque(maxlen=REPORTS_MAX)
        self.undecided: _Report | None = None

    def count(self, now_s: float, place: int, number: int) -> None:
        bucket = int(now_s // _BUCKET_S)
        if not self.buckets or self.buckets[-1][0] != bucket:
            self.buckets.append((bucket, [0] * len(OUTCOMES)))
            self.expire(now_s)
        if self.fresh is None:
            self.fresh = [0] * len(OUTCOMES)
        for counts in (self.buckets[-1][1], self.sums, self.fresh):
            counts[place] += number

    def expire(self, now_s: float) -> None:
        """Forget what left the window."""
        oldest = (now_s - WINDOW_S) // _BUCKET_S
        while self.buckets and self.buckets[0][0] <= oldest:
            for place, number in enumerate(self.buckets.popleft()[1]):
                self.sums[place] -= number


class CheckOutcomes:
    """The outcomes of all groups. Times are those of the event loop's clock."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def count(self, group: str, outcome: str, number: int, now_s: float) -> None:
        """Count checks with the same outcome: one of `txbroker_checks_total`."""
        known = self._groups.pop(group, None)
        if known is None:
            known = _Group()
            if len(self._groups) >= GROUPS_MAX:
                del self._groups[next(iter(self._groups))]
        self._groups[group] = known
        known.count(now_s, _PLACES[outcome], number)

    def remember(
        self, group: str, outcome: str, checks: Sequence[QueuedCheck], now_s: float
    ) -> None:
        """Remember the last of checks that were counted, in the order of their answers."""
        known = self._groups[group]
        for check in checks[-REPORTS_MAX:]:
            answer = answer_of(check.result)
            known.reports.append(_Report(now_s, check.id, check.endpoint, outcome, answer))
        if outcome in _UNDECIDED:
            known.undecided = known.reports[-1]

    def read(self, now_s: float, now_ms: int) -> dict[str, GroupChecks]:
        """Return counts and the last undecided answer of each group; `now_ms` is the time by
        which its time is stated."""
        read = {}
        for name, group in self._groups.items():
            group.expire(now_s)
            last = None if group.undecided is None else group.undecided.at(now_s, now_ms)
            read[name] = GroupChecks(CheckCounts(*group.sums), last)
        return read

    def reports(self, group: str, now_s: float, now_ms: int) -> Sequence[CheckReport]:
        """Return the last checks of a group, the newest first."""
        known = self._groups.get(group)
        return [] if known is None else [one.at(now_s, now_ms) for one in reversed(known.reports)]

    def take(self) -> Mapping[str, Sequence[int]]:
        """Return the counts since the last call, by group and in the order of `OUTCOMES`."""
        fresh = {name: group.fresh for name, group in self._groups.items() if group.fresh}
        for name in fresh:
            self._groups[name].fresh = None
        return fresh


def answer_of(result: CheckResult) -> str:
    """Return an answer as text: its meaning, and the beginning of the endpoint's body."""
    text = "" if isinstance(result, Unreached) else result.text
    return f"{result.detail}: {text}" if text else result.detail
