"""What the report shows of the tables."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from txbroker.spark.report.plots import LatencyPoint, TimeAxis

FINDINGS_A_KIND = 20
"""Of each kind and state."""
HEALED_DAYS = 7
"""How long a finding that is over is shown."""
LATENCY_DAYS = 7
"""How far the latencies go back."""


class ShownFinding(NamedTuple):
    """A row of the table `drift`. `state`: `open`, `acknowledged` or `healed`; a finding whose
    evidence expired counts as healed. Times are ms since 1970."""

    id: str
    kind: str
    severity: str
    state: str
    grp: str
    place: str
    why: str
    times: int
    opened_ms: int
    seen_ms: int
    closed_ms: int | None
    expired: bool
    by: str | None
    by_why: str | None
    until_ms: int | None


class KindCount(NamedTuple):
    """How many findings of a kind are in a state, and the group that has most of them."""

    kind: str
    state: str
    findings: int
    grp: str
    of_group: int


class DriftDay(NamedTuple):
    """Open findings by kind after the last run of a day in UTC.

    Attributes:
        at_ms: when that run started, ms since 1970.
        open: with the acknowledged ones.
        acknowledged: those of them.
    """

    at_ms: int
    open: Mapping[str, int]
    acknowledged: Mapping[str, int]


class Percentiles(NamedTuple):
    """Percentiles of a group over the whole time, ms; None without values."""

    p50: float | None
    p95: float | None
    p99: float | None


class GroupLatency(NamedTuple):
    """Latencies of a group.

    Attributes:
        transactions: those that ended; one with several topics counts once for each.
        decide, visible: over time; prepare to decision, and prepare to visible.
        decided, shown: the same as one.
        earliest, latest: estimates of prepare to visible where the targets do not show when: by the
            deciding marker, and by the run that found the transaction visible.
        estimated: number of estimated transactions.
    """

    grp: str
    transactions: int
    decide: Sequence[LatencyPoint]
    visible: Sequence[LatencyPoint]
    decided: Percentiles
    shown: Percentiles
    estimated: int = 0
    earliest: Percentiles | None = None
    latest: Percentiles | None = None


class ReportTables(NamedTuple):
    """What the report shows of the tables."""

    counts: Sequence[KindCount] = ()
    findings: Sequence[ShownFinding] = ()
    groups: Sequence[GroupLatency] = ()
    time: TimeAxis = TimeAxis(0, 1, 1)
    days: Sequence[DriftDay] = ()
    """Days without a run are left out."""
