"""The audit's HTML report: one self-contained file without scripts, to send, keep and print.

Users choose groups, topics and reasons, so the templates escape every value that they insert.
"""

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from txbroker import __version__
from txbroker.errors import ConfigurationError
from txbroker.spark.checks import SEVERITIES, limit_in_words, value_in_words
from txbroker.spark.judge.kinds import ALL_KINDS, Kind
from txbroker.spark.report.contents import (
    FINDINGS_A_KIND,
    HEALED_DAYS,
    LATENCY_DAYS,
    DriftDay,
    GroupLatency,
    KindCount,
    Percentiles,
    ReportTables,
)
from txbroker.spark.report.formatting import count, date, day, duration, moment, plural
from txbroker.spark.report.plots import (
    DAY_MS,
    Bar,
    Decades,
    LatencyPlot,
    TimeAxis,
    bar_height,
    common_decades,
)
from txbroker.spark.schema import BrokenRecord, Histogram, RunSummary, SnapshotBounds, TopicRead

RUNS_SHOWN = 30
PARTITIONS_SHOWN = 200
TOPICS_SHOWN = 100
KINDS_DRAWN = 8
SET_ASIDE_SHOWN = 200

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
}
_FINDING_STATES = {"open": "Open", "acknowledged": "Acknowledged", "healed": "Healed lately"}


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
    tables: ReportTables,
    broken: Sequence[BrokenRecord] = (),
) -> None:
    """Write the report of a run; an existing file is replaced atomically.

    Args:
        path: the HTML file; its folder is created.
        history: earlier runs in any order; the run itself may be among them.
        tables: what the tables hold.
        broken: unreadable records, where there are more than in the summary.
    """
    page = render(summary, history, tables, broken)
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from None


def _printable(value: object) -> object:
    """Return a value whose invisible characters, and those that turn the writing direction, are
    shown as their codes: two names must not look alike."""
    if isinstance(value, Markup):
        return value
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in str(value))


def _width(read: TopicRead) -> int:
    """Return how many offsets of a topic were read."""
    return sum(max(0, end - begin) for begin, end in zip(read.begins, read.ends, strict=False))


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
    date=date,
    day=day,
    duration=duration,
    mode=lambda mode: _MODES.get(mode, mode),
    multiply=lambda value, by: value * by,
    moment=moment,
    px=lambda number: f"{number:.2f}",
    role=lambda table: _ROLES.get(table, table),
    scope=lambda mode: _SCOPES.get(mode, ""),
    state=lambda state: _STATES.get(state, state),
    total=lambda counts: sum(counts.values()),
    width=_width,
)
TEMPLATES.globals.update(
    bar_height=bar_height,
    limit_in_words=limit_in_words,
    plural=plural,
    value_in_words=value_in_words,
    version=__version__,
)


def render(
    summary: RunSummary,
    history: Sequence[RunSummary],
    tables: ReportTables,
    broken: Sequence[BrokenRecord] = (),
) -> str:
    """Return the page of a run; see `write_report`."""
    kinds = [*ALL_KINDS, *_unknown_kinds(summary, tables.counts)]
    numbers = [number for kind in kinds if (number := _numbers(kind, summary, tables.counts))]
    order = {kind.name: place for place, kind in enumerate(kinds)}
    aside = _set_aside(summary, broken or summary.set_aside)
    runs, days = _last_runs(summary, history), _days(tables.days)
    titles = {kind.name: kind.title for kind in kinds}
    day_bars = _day_bars(tables.days, days, titles)
    return TEMPLATES.get_template("report.html").render(
        summary=summary,
        headline=_headline(summary),
        found=[kind for kind in kinds if summary.open_drift.get(kind.name)],
        checks=_checks(summary),
        runs=runs,
        run_bars=_run_bars(runs),
        days=days,
        day_bars=day_bars,
        kinds_drawn=KINDS_DRAWN,
        day_heads=("Day", *(title for title, _ in day_bars)),
        kinds=numbers,
        filters=_filters(numbers),
        findings=sorted(tables.findings, key=lambda one: (order.get(one.kind, 99), one.state)),
        kind_names={kind.name for kind in ALL_KINDS},
        titles=titles,
        states=_FINDING_STATES,
        a_kind=FINDINGS_A_KIND,
        healed_days=HEALED_DAYS,
        latency_days=LATENCY_DAYS,
        groups=_groups(tables.groups, tables.time),
        ages=_ages(summary.pending_age),
        aside=aside[:SET_ASIDE_SHOWN],
        more_aside=len(aside) - SET_ASIDE_SHOWN + summary.quarantined
        - len(broken or summary.set_aside),
        **({} if summary.cut is None else _reads(summary.cut)),
        topics_shown=TOPICS_SHOWN,
        partitions_shown=PARTITIONS_SHOWN,
    )  # fmt: skip


def _headline(summary: RunSummary) -> str:
    if summary.open_drift:
        return "Not everything ended as it was decided"
    if not summary.transactions:
        return "There was nothing to judge"
    if summary.acknowledged:
        return "Everything ended as it was decided, except for acknowledged findings"
    if summary.quarantined or any(summary.taken.values()):
        return "Everything that could be read ended as it was decided"
    return "Everything ended as it was decided"


def _checks(summary: RunSummary) -> list[Any]:
    """Return the checks, the failed ones first and of these the gravest."""
    return sorted(
        summary.checks, key=lambda one: (one.ok is not False, SEVERITIES.index(one.severity))
    )


def _last_runs(summary: RunSummary, history: Sequence[RunSummary]) -> list[RunSummary]:
    """Return the last batches up to this one, the oldest first."""
    before = {
        run.run: run
        for run in history
        if run.mode != "stream" and run.started_ms <= summary.started_ms
    }
    before.pop(summary.run, None)
    ordered = sorted(before.values(), key=lambda run: (run.started_ms, run.run))
    return [*ordered, summary][-RUNS_SHOWN:]


def _run_bars(runs: Sequence[RunSummary]) -> list[tuple[str, str, list[Bar]]]:
    """Return the rows of bars of runs: title, class, and a bar for each run."""
    drift = [sum(run.drift.values()) for run in runs]
    took_ms = [run.took_s * 1000 for run in runs]
    return [
        ("Transactions", "plain", [Bar(one, count(one)) for one in (r.transactions for r in runs)]),
        ("Findings", "bad", [Bar(one, count(one)) for one in drift]),
        ("Duration", "plain", [Bar(one, duration(one)) for one in took_ms]),
    ]


# --- drift -----------------------------------------------------------------------------------


class _KindNumbers(NamedTuple):
    """A kind with findings: in this run, in each state, and the group with most that are open."""

    kind: Kind
    run: int
    states: dict[str, int]
    most: str
    of_most: int


def _days(audited: Sequence[DriftDay]) -> list[int]:
    """Return all days from the first to the last with a run, ms since 1970."""
    found = [one.at_ms // DAY_MS for one in audited]
    return [day * DAY_MS for day in range(min(found), max(found) + 1)] if found else []


def _day_bars(
    audited: Sequence[DriftDay], days: Sequence[int], titles: Mapping[str, str]
) -> list[tuple[str, list[Bar]]]:
    """Return a row of bars for each kind of which a finding was open; none of a single day."""
    of_day = {one.at_ms // DAY_MS * DAY_MS: one for one in audited}
    found = {kind for one in audited for kind, number in one.open.items() if number}
    if len(days) < 2:
        return []
    order = [*(kind for kind in titles if kind in found), *sorted(found - titles.keys())]
    return [
        (titles.get(kind, kind), [_day_bar(of_day.get(day), kind) for day in days])
        for kind in order
    ]


def _day_bar(day: DriftDay | None, kind: str) -> Bar:
    if day is None:
        return Bar(None, "no run")
    number, known = day.open.get(kind, 0), day.acknowledged.get(kind, 0)
    words = f"{count(number)} ({count(known)} acknowledged)" if known else count(number)
    return Bar(number, words, known)


class _Filter(NamedTuple):
    """Rows that a URL fragment shows: the class that they have, the text, and their number."""

    name: str
    text: str
    findings: int


def _unknown_kinds(summary: RunSummary, counts: Iterable[KindCount]) -> list[Kind]:
    """Return the kinds that a newer txbroker has found."""
    known = {kind.name for kind in ALL_KINDS}
    found = {*summary.drift, *(one.kind for one in counts)}
    return [Kind(name, name, "") for name in sorted(found - known)]


def _numbers(kind: Kind, summary: RunSummary, counts: Sequence[KindCount]) -> _KindNumbers | None:
    of_kind = {one.state: one for one in counts if one.kind == kind.name}
    states = {state: one.findings for state, one in of_kind.items()}
    run = summary.drift.get(kind.name, 0)
    most = of_kind.get("open")
    if not run and not states:
        return None
    return _KindNumbers(kind, run, states, most.grp if most else "", most.of_group if most else 0)


def _filters(kinds: Sequence[_KindNumbers]) -> list[list[_Filter]]:
    """Return the filters in rows: by state, by severity, and by kind. Only known names: they stand
    in the page's style sheet."""
    known = [one for one in kinds if one.kind in ALL_KINDS]
    severities = {
        severity: sum(sum(one.states.values()) for one in known if one.kind.severity == severity)
        for severity in SEVERITIES
    }
    return [
        [
            _Filter(state, text, sum(one.states.get(state, 0) for one in known))
            for state, text in _FINDING_STATES.items()
        ],
        [_Filter(severity, severity, n) for severity, n in severities.items()],
        [_Filter(one.kind.name, one.kind.title, sum(one.states.values())) for one in known],
    ]


# --- latency, ages and records -----------------------------------------------------------------


class _ShownGroup(NamedTuple):
    group: GroupLatency
    decided: str
    visible: str
    plots: list[tuple[str, LatencyPlot]]


def _groups(groups: Sequence[GroupLatency], time: TimeAxis) -> list[_ShownGroup]:
    decades = common_decades([line for one in groups for line in (one.decide, one.visible)])
    return [_shown(group, time, decades) for group in groups]


def _shown(group: GroupLatency, time: TimeAxis, decades: Decades) -> _ShownGroup:
    measures = {"Prepare to decision": group.decide, "Prepare to visible": group.visible}
    plots = [
        (title, LatencyPlot(f"{title}, group {group.grp}", points, time, decades))
        for title, points in measures.items()
        if points
    ]
    visible = _in_words(group.shown)
    if group.earliest is not None and group.latest is not None:
        estimate = f"estimate: {_in_words(group.earliest)} … {_in_words(group.latest)}"
        visible = estimate if group.shown.p50 is None else f"{visible}; {estimate}"
    return _ShownGroup(group, _in_words(group.decided), visible, plots)


def _in_words(whole: Percentiles) -> str:
    return " / ".join("–" if value is None else duration(value) for value in whole)


def _ages(ages: Histogram | None) -> list[tuple[str, int, float]]:
    """Return the ages that pending transactions have: in words, their number, its share of the
    greatest number."""
    if ages is None or not any(ages.counts):
        return []
    words = [*(f"to {duration(bound)}" for bound in ages.bounds), "longer"]
    most = max(ages.counts)
    rows = zip(words, ages.counts, strict=True)
    return [(text, number, number / most) for text, number in rows if number]


def _set_aside(summary: RunSummary, broken: Sequence[BrokenRecord]) -> list[tuple[str, str, str]]:
    """Return everything that was not judged: what, where and why."""
    held = () if summary.cut is None else summary.cut.held
    return [
        *(("target", topic, why) for topic, why in summary.unread_targets.items()),
        *(
            ("target", topic, f"does not exist; {plural(n, 'transaction')} committed to it")
            for topic, n in summary.missing_targets.items()
        ),
        *(
            ("partition", place, "ends in an open transaction, of another producer or a hanging "
             "one: messages missing after it are late, never lost")
            for place in held
        ),
        *(
            ("records", topic, f"retention removed {plural(n, 'record')} before any run read them")
            for topic, n in summary.taken.items()
        ),
        *(
            ("own record" if one.own else "another's record",
             f"{one.topic}-{one.partition}@{one.offset}", one.why)
            for one in broken
        ),
    ]  # fmt: skip


def _reads(bounds: SnapshotBounds) -> dict[str, Any]:
    reads = [
        ("half messages", bounds.half),
        ("markers", bounds.op),
        ("parked copies", bounds.parked),
        *(("target", read) for read in bounds.targets),
    ]
    partitions = [
        (read.topic, number, *offsets)
        for _, read in reads
        for number, offsets in enumerate(zip(read.starts, read.begins, read.ends, strict=False))
    ]
    return {"reads": reads, "partitions": partitions}
