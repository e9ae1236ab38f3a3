"""The audit's HTML report: one self-contained file without scripts, to send, keep and print.

Users choose groups, topics and reasons, so the templates escape every value that they insert.
"""

import contextlib
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import accumulate, groupby, islice
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
from markupsafe import Markup

from txbroker import __version__
from txbroker.errors import ConfigurationError
from txbroker.spark.schema import (
    ALL_KINDS,
    BUSINESS_KINDS,
    KINDS,
    TOPIC_KINDS,
    Example,
    Histogram,
    Kind,
    RunSummary,
    SnapshotBounds,
    TopicRead,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"), (1, "ms"))


def count(value: int) -> str:
    """Return a number with separated thousands."""
    return f"{value:,}"


def plural(value: int, one: str, many: str = "") -> str:
    """Return a number and its noun, in the plural (`one` + s by default) unless it is 1."""
    return f"{count(value)} {one if value == 1 else many or one + 's'}"


def duration(ms: float) -> str:
    """Return a time span in its largest unit, with two digits where they are significant."""
    for size, unit in _UNITS:
        if ms >= size * 0.9995:  # what would round up to a whole one is one
            number = ms / size
            digits = 1 if number < 9.95 and round(number, 1) != round(number) else 0
            return f"{number:.{digits}f} {unit}"
    return "0" if ms <= 0 else f"{ms:.2g} ms"


def moment(ms: int) -> str:
    """Return a UTC time to the second."""
    return f"{_utc(ms):%Y-%m-%d %H:%M:%S} UTC"


def day(ms: int) -> str:
    """Return a UTC day and time to the minute."""
    return f"{_utc(ms):%d %b %H:%M}"


def _utc(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


class Percentile(NamedTuple):
    """The value below which a share of all values lies.

    `place`: number of buckets below it, with a fraction. `ms`: the value; None beyond the last
    bound, `over_ms`.
    """

    place: float
    ms: float | None
    over_ms: int

    def __str__(self) -> str:
        return f"> {duration(self.over_ms)}" if self.ms is None else duration(self.ms)


def percentile(histogram: Histogram, share: float) -> Percentile | None:
    """Return a percentile, interpolated within its bucket; None without values."""
    total = sum(histogram.counts)
    bounds = histogram.bounds
    if not total or not bounds:
        return None
    rank = share * total
    sums = list(accumulate(histogram.counts))
    bucket = bisect_left(sums, rank)
    number = histogram.counts[bucket]
    fraction = (rank - (sums[bucket] - number)) / number if number else 0.0
    over = bucket >= len(bounds)
    low = bounds[bucket - 1] if bucket else 0
    ms = None if over else low + fraction * (bounds[bucket] - low)
    return Percentile(bucket + fraction, ms, bounds[-1])


# --- plots -----------------------------------------------------------------------------------

_TICK_APART = 46
"""Pixels between axis labels, so that they can be read."""
_CHAR = 6.9
"""Approximate width of a label's character, pixels."""
_MARKS = (("p50", 0.5), ("p99", 0.99))


class BucketRange(NamedTuple):
    """The buckets of a plot: from `first` up to, not including, `last`."""

    first: int
    last: int


def common_buckets(histograms: Sequence[Histogram]) -> BucketRange:
    """Return the buckets with values in any of these histograms, which have the same bounds:
    plots side by side share one axis."""
    used = [
        bucket
        for histogram in histograms
        for bucket, number in enumerate(histogram.counts)
        if number
    ]
    if not used:
        return BucketRange(0, 1)
    longest = max(len(histogram.counts) for histogram in histograms)
    return BucketRange(max(0, min(used) - 1), min(longest, max(used) + 2))


class Bar(NamedTuple):
    """A bar of a plot; `unbounded`: of the last bucket, which has no upper bound."""

    x: float
    y: float
    width: float
    height: float
    unbounded: bool


class Label(NamedTuple):
    """A text of a plot; `anchor` as SVG's `text-anchor`."""

    x: float
    y: float
    words: str
    anchor: str


class PercentileMark(NamedTuple):
    """A percentile marked in a plot by a vertical line."""

    name: str
    x: float
    label: Label


class Plot:
    """Geometry of a histogram with buckets of equal width, for the template `plots.html`.

    Args:
        buckets: the buckets to show.
        title: read aloud by screen readers.
        width: approximate width on the page, pixels, so that text has its usual size.
    """

    top, floor, left = 44, 142, 8

    def __init__(
        self, histogram: Histogram, buckets: BucketRange, title: str, width: int = 260
    ) -> None:
        self._histogram = histogram
        self._range = buckets
        self.title = title
        self.width, self.right = width, width - self.left
        self._bar = (width - 2 * self.left) / max(1, buckets.last - buckets.first)
        percentiles = ((name, percentile(histogram, share)) for name, share in _MARKS)
        self._percentiles = [(name, value) for name, value in percentiles if value]

    @property
    def description(self) -> str:
        """The plot in words."""
        marks = ", ".join(f"{name} {value}" for name, value in self._percentiles)
        total = plural(sum(self._histogram.counts), "transaction")
        return f"{total}; {marks}" if marks else total

    @property
    def height(self) -> int:
        """Height of the plot, pixels."""
        return self.floor + (38 if self._has_unbounded else 23)

    @property
    def _has_unbounded(self) -> bool:
        return self._range.last > len(self._histogram.bounds)

    def _x(self, place: float) -> float:
        return self.left + (place - self._range.first) * self._bar

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Yield bound and count of each bucket with values."""
        bounds = self._histogram.bounds
        for bucket, number in enumerate(self._histogram.counts):
            if number and bucket < len(bounds):
                yield f"to {duration(bounds[bucket])}", number
            elif number:
                yield f"more than {duration(bounds[-1])}", number

    def bars(self) -> Iterator[Bar]:
        """Yield the bar of each bucket with values."""
        highest = max(self._histogram.counts, default=0)
        for bucket, number in enumerate(self._histogram.counts):
            if number and self._range.first <= bucket < self._range.last:
                height = max(1.5, number / highest * (self.floor - self.top))
                x, width = self._x(bucket) + 0.5, max(1.0, self._bar - 1)
                over = bucket >= len(self._histogram.bounds)
                yield Bar(x, self.floor - height, width, height, over)

    def ticks(self) -> list[float]:
        """Return where the axis is marked: at bounds between bars, as far apart as labels need."""
        return [self._x(place) for place in self._tick_places()]

    def _tick_places(self) -> range:
        last = min(self._range.last, len(self._histogram.bounds))
        return range(self._range.first, last + 1, max(1, ceil(_TICK_APART / self._bar)))

    def tick_labels(self) -> Iterator[Label]:
        """Yield the labels of the axis that do not overlap."""
        free_from = 0.0
        for place in self._tick_places():
            words = "0" if place == 0 else duration(self._histogram.bounds[place - 1])
            # The last one ends at the plot's side, and may have no room there.
            left, right = self._extent(self._x(place), words)
            if left >= free_from:
                free_from = right + _CHAR
                yield self._label(self._x(place), self.floor + 17, words)
        if self._has_unbounded:
            yield Label(self.right, self.floor + 32, "and more", "end")

    def highest(self) -> Label:
        """Return the label with the count of the highest bar."""
        words = f"max {count(max(self._histogram.counts, default=0))}"
        return self._label(self.left, self.top - 4, words)

    def marks(self) -> Iterator[PercentileMark]:
        """Yield the percentiles; each has a separate row above the bars for its label."""
        for row, (name, value) in enumerate(self._percentiles):
            x, y = self._x(value.place), 13 + row * 15
            words = f"{name} {value}"
            if x + 5 + len(words) * _CHAR < self.width:
                yield PercentileMark(name, x, Label(x + 5, y, words, "start"))
            else:
                yield PercentileMark(name, x, Label(x - 5, y, words, "end"))

    def _extent(self, x: float, words: str) -> tuple[float, float]:
        """Return where a text at `x` begins and ends: it stays within the plot."""
        wide = len(words) * _CHAR
        if x < wide / 2:
            return x, x + wide
        if x > self.width - wide / 2:
            return x - wide, x
        return x - wide / 2, x + wide / 2

    def _label(self, x: float, y: float, words: str) -> Label:
        left, right = self._extent(x, words)
        return Label(x, y, words, "start" if left == x else "end" if right == x else "middle")


def trend_height(value: int, values: Sequence[int]) -> float:
    """Return the height of a run's bar among those of other runs; even the smallest is visible."""
    return max(3.0, 34 * value / max(values)) if value else 2.5


# --- numbers as people read them, and the geometry of plots --------------------------------------

RUNS_SHOWN = 30
PAIRS_SHOWN = 12
"""Topics with plots, and groups; the table has all of them."""
OFFENDERS_SHOWN = 3
"""Transactions of each kind that are visible; a fold holds the others."""
GROUPS_SHOWN = 20
PARTITIONS_SHOWN = 200
TOPICS_SHOWN = 100

_MODES = {"full": "full run", "incremental": "incremental run", "stream": "stream"}
_STATES = {
    "settled": "Settled",
    "promoted": "Promoted",
    "rolled_back": "Rolled back",
    "pending": "Pending",
    "committed": "In flight",
    "parked": "Parked",
    "refused": "Refused",
    "void": "Void",
}
_ROLES = {
    "half": "half messages",
    "op": "markers",
    "visible": "visible messages",
    "parked": "parked copies",
}
_SCOPES = {
    "full": "A full run: everything that the topics still hold.",
    "incremental": "An incremental run: records since the previous run, and the transactions that "
    "it left open.",
    "stream": "A stream: everything since it started, judged as it arrives.",
}


class GroupDrift(NamedTuple):
    """The number of a group's transactions that have a kind of finding."""

    grp: str
    kind: str
    transactions: int


def check_writable(path: Path) -> None:
    """Refuse a path where no report can be written, before any work is done for it."""
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _unwritable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"the report {path} cannot be written: {error.strerror}; name another file with --report"
    )


def write_report(
    path: Path,
    summary: RunSummary,
    history: Sequence[RunSummary],
    verdicts: "DataFrame | None" = None,
) -> None:
    """Write the report of a run; an existing file is replaced atomically.

    Args:
        path: the HTML file; its folder is created.
        history: earlier runs in any order; the run itself may be among them.
        verdicts: the run's verdict rows, for the groups with the most drift; a summary from the
            journal does not hold them.
    """
    groups = [] if verdicts is None else _drift_by_group(verdicts, summary.run)
    page = render(summary, history, groups)
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from None


def _drift_by_group(verdicts: "DataFrame", run: str) -> list[GroupDrift]:
    rows = (
        verdicts.where(verdicts["run"] == run)
        .where("size(findings) > 0")
        .selectExpr("coalesce(grp, '') as grp", "explode(findings) as kind")
        .groupBy("grp", "kind")
        .count()
        .orderBy("count", "grp", "kind", ascending=[False, True, True])
        .limit(GROUPS_SHOWN)
        .collect()
    )
    return [GroupDrift(row[0], row[1], row[2]) for row in rows]


def _printable(value: object) -> object:
    """Return a value whose invisible characters, and those that turn the writing direction, are
    shown as their codes: two names must not look alike."""
    if isinstance(value, Markup):
        return value
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in str(value))


TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader(__package__ or ""),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=_printable,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters.update(
    count=count,
    day=day,
    duration=duration,
    get=dict.get,
    mode=lambda mode: _MODES.get(mode, mode),
    moment=moment,
    px=lambda number: f"{number:.2f}",
    role=lambda table: _ROLES.get(table, table),
    scope=lambda mode: _SCOPES.get(mode, ""),
    state=lambda state: _STATES.get(state, state),
)
TEMPLATES.globals.update(plural=plural, trend_height=trend_height, version=__version__)


def render(
    summary: RunSummary, history: Sequence[RunSummary], groups: Sequence[GroupDrift] = ()
) -> str:
    """Return the page of a run; see `write_report`."""
    runs = _last_runs(summary, history)
    kinds = _kinds_of([summary])
    near, others = _offenders(summary.examples, [kind.name for kind in kinds])
    return TEMPLATES.get_template("report.html").render(
        summary=summary,
        runs=runs,
        groups=groups,
        headline=_headline(summary),
        kinds=kinds,
        found=[kind for kind in kinds if summary.drift.get(kind.name)],
        titles={kind.name: kind.title for kind in (*ALL_KINDS, *kinds)},
        offenders=near,
        other_offenders=others,
        trends=[kind for kind in _kinds_of(runs) if any(run.drift.get(kind.name) for run in runs)],
        any_drift=Kind("", "Any drift", ""),
        ages=_ages(summary.pending_age),
        **_latencies(summary),
        **({} if summary.cut is None else _reads(summary.cut)),
        topics_shown=TOPICS_SHOWN,
        partitions_shown=PARTITIONS_SHOWN,
    )


def _last_runs(summary: RunSummary, history: Sequence[RunSummary]) -> list[RunSummary]:
    """Return the last runs of this sort up to this one, the oldest first."""
    stream = summary.mode == "stream"
    before = {
        run.run: run
        for run in history
        if (run.mode == "stream") == stream and run.started_ms <= summary.started_ms
    }
    before.pop(summary.run, None)
    ordered = sorted(before.values(), key=lambda run: (run.started_ms, run.run))
    return [*ordered, summary][-RUNS_SHOWN:]


def _kinds_of(runs: Sequence[RunSummary]) -> list[Kind]:
    """Return all kinds that these runs know of, the gravest first."""
    found = {kind for run in runs for kind in run.drift}
    known = [*KINDS, *(kind for kind in TOPIC_KINDS if kind.name in found)]
    if any(run.business for run in runs) or found & {kind.name for kind in BUSINESS_KINDS}:
        known += BUSINESS_KINDS
    names = {kind.name for kind in known}
    return known + [Kind(name, name, "") for name in sorted(found - names)]


def _headline(summary: RunSummary) -> str:
    if summary.has_drift:
        return "Not everything ended as it was decided"
    if not summary.transactions:
        return "There was nothing to judge"
    if summary.quarantined or any(summary.taken.values()):
        return "Everything that could be read ended as it was decided"
    return "Everything ended as it was decided"


def _offenders(
    examples: Sequence[Example], kinds: Sequence[str]
) -> tuple[list[Example], list[Example]]:
    """Return a few examples of each kind, the gravest first, and the others."""

    def gravity(example: Example) -> int:
        places = (kinds.index(name) for name in example.findings if name in kinds)
        return min(places, default=len(kinds))

    near: list[Example] = []
    others: list[Example] = []
    for _, group in groupby(sorted(examples, key=gravity), key=gravity):
        of_kind = list(group)
        near += of_kind[:OFFENDERS_SHOWN]
        others += of_kind[OFFENDERS_SHOWN:]
    return near, others


def _ages(ages: Histogram | None) -> Plot | None:
    if ages is None or not sum(ages.counts):
        return None
    return Plot(ages, common_buckets([ages]), "Age of pending transactions", width=460)


# --- latencies -------------------------------------------------------------------------------


class _Label(NamedTuple):
    """A histogram's label `KIND:NAME` in its parts; `kind` is empty where there is none."""

    kind: str
    name: str


class _PlotPair(NamedTuple):
    label: _Label
    plots: list[tuple[str, Plot]]


class _LatencyRow(NamedTuple):
    label: _Label
    cells: list[str]


def _latencies(summary: RunSummary) -> dict[str, Any]:
    measures = {
        "From prepare to decision": _with_values(summary.decide_latency),
        "From decision to visible": _with_values(summary.visible_latency),
    }
    labels = _ordered([label for histograms in measures.values() for label in histograms])
    buckets = {
        title: common_buckets([*histograms.values()]) for title, histograms in measures.items()
    }
    shown = [
        label
        for _, of_kind in groupby(labels, key=_kind_of)
        for label in islice(of_kind, PAIRS_SHOWN)
    ]
    rows = []
    for label in labels:
        cells = [cell for histograms in measures.values() for cell in _cells(histograms.get(label))]
        rows.append(_LatencyRow(_parts(label), cells))
    return {"pairs": [_pair(label, measures, buckets) for label in shown], "latencies": rows}


def _with_values(histograms: Sequence[Histogram]) -> dict[str, Histogram]:
    return {histogram.label: histogram for histogram in histograms if sum(histogram.counts)}


def _pair(
    label: str, measures: dict[str, dict[str, Histogram]], buckets: dict[str, BucketRange]
) -> _PlotPair:
    plots = [
        (title, Plot(histograms[label], buckets[title], f"{title}, {label}"))
        for title, histograms in measures.items()
        if label in histograms
    ]
    return _PlotPair(_parts(label), plots)


def _kind_of(label: str) -> str:
    return label.partition(":")[0]


def _parts(label: str) -> _Label:
    kind, _, name = label.partition(":")
    return _Label(kind, name) if name else _Label("", label)


def _ordered(labels: Sequence[str]) -> list[str]:
    """Return each label once, topics before groups; within a kind in their given order, which is
    by number of transactions."""
    kinds = sorted({_kind_of(label) for label in labels}, reverse=True)
    return [label for kind in kinds for label in dict.fromkeys(labels) if _kind_of(label) == kind]


def _cells(histogram: Histogram | None) -> Iterator[str]:
    yield count(sum(histogram.counts)) if histogram else "–"
    for share in (0.5, 0.99):
        value = percentile(histogram, share) if histogram else None
        yield str(value) if value else "–"


# --- topics that were read -------------------------------------------------------------------


class _ReadTopic(NamedTuple):
    topic: str
    ends: Sequence[int]
    width: int
    taken: int


def _reads(bounds: SnapshotBounds) -> dict[str, Any]:
    reads = [
        *zip(
            ("half messages", "markers", "parked copies"),
            (bounds.half, bounds.op, bounds.parked),
            strict=True,
        ),
        *(("target", read) for read in bounds.targets),
    ]
    partitions = [
        (read.topic, number, *offsets)
        for _, read in reads
        for number, offsets in enumerate(zip(read.starts, read.begins, read.ends, strict=False))
    ]
    topics = [
        (role, _ReadTopic(read.topic, read.ends, _width(read), read.taken)) for role, read in reads
    ]
    return {"reads": topics, "partitions": partitions}


def _width(read: TopicRead) -> int:
    return sum(max(0, end - begin) for begin, end in zip(read.begins, read.ends, strict=False))
