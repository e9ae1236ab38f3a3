"""The audit's report: one HTML file that needs nothing but itself, for people and for their files.

It holds no script and asks for nothing from outside, so it can be sent, kept and printed. Whatever
comes from users (groups, topics, reasons) is escaped where it is put in.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from txbroker import __version__
from txbroker.errors import ConfigurationError
from txbroker.spark.report.figures import count, day, duration, moment, percentile, plural
from txbroker.spark.report.html import Child, Html, join, table, tag
from txbroker.spark.report.plots import (
    Column,
    Window,
    common_window,
    distribution,
    history_row,
)
from txbroker.spark.report.report_read import how_judged, what_was_read
from txbroker.spark.report.report_style import STYLE
from txbroker.spark.schema import (
    ALL_KINDS,
    BUSINESS_KINDS,
    KINDS,
    TOPIC_KINDS,
    Example,
    Histogram,
    Kind,
    RunSummary,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RUNS_SHOWN = 30
PAIRS_SHOWN = 12
"""Topics with plots, and groups; the table has all of them."""
OFFENDERS_SHOWN = 3
"""Transactions of each kind that are in sight; the others are behind a fold."""
GROUPS_SHOWN = 20

_MODES = {"full": "full run", "incremental": "incremental run", "stream": "stream"}
_STATES = {
    "settled": "Settled",
    "promoted": "Promoted",
    "rolled_back": "Rolled back",
    "pending": "Pending",
    "committed": "On their way",
    "parked": "Parked",
    "refused": "Refused",
    "void": "Void",
}
_SAFE = "default-src 'none'; style-src 'unsafe-inline'"


class GroupDrift(NamedTuple):
    """How many transactions of a group have a kind of finding."""

    grp: str
    kind: str
    transactions: int


def check_writable(path: Path) -> None:
    """Make sure that a report can be written, before work is done for it.

    Raises:
        ConfigurationError: it cannot.
    """
    beside = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.touch()
        beside.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _unwritable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"the report {path} cannot be written: {error.strerror}")


def write_report(
    path: Path,
    summary: RunSummary,
    history: Sequence[RunSummary],
    verdicts: "DataFrame | None" = None,
) -> None:
    """Write the report of a run; a file that is there is replaced as a whole.

    Args:
        path: of the HTML file; its folder is made.
        summary: the run.
        history: runs before it, in any order; the run itself may be among them.
        verdicts: the run's verdict rows, for the groups with the most drift; a summary alone, as it
            comes from the journal, does not know these.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    groups = [] if verdicts is None else _drift_by_group(verdicts, summary.run)
    page = render(summary, history, groups)
    beside = _beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(page, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise _unwritable(path, error) from None


def _drift_by_group(verdicts: "DataFrame", run: str) -> list[GroupDrift]:
    """Return the groups with the most findings, a bounded number."""
    found = (
        verdicts.where(verdicts["run"] == run)
        .where("size(findings) > 0")
        .selectExpr("coalesce(grp, '') as grp", "explode(findings) as kind")
        .groupBy("grp", "kind")
        .count()
        .orderBy("count", "grp", "kind", ascending=[False, True, True])
        .limit(GROUPS_SHOWN)
        .collect()
    )
    return [GroupDrift(row[0], row[1], row[2]) for row in found]


def render(
    summary: RunSummary, history: Sequence[RunSummary], groups: Sequence[GroupDrift] = ()
) -> str:
    """Return the page of a run; see `write_report`."""
    runs = _runs(summary, history)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_SAFE),
        tag("title", f"{_headline(summary)} – txbroker audit {summary.run}"),
        tag("style", Html(STYLE)),
    )
    body = tag(
        "body",
        _header(summary),
        tag(
            "main",
            _offenders(summary),
            _by_group(groups),
            _over_time(runs),
            _kinds(summary, runs),
            _pending(summary),
            _latencies(summary),
            what_was_read(summary),
            how_judged(summary),
        ),
        tag("footer", tag("p", f"Written by txbroker {__version__}. Times are UTC.")),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _runs(summary: RunSummary, history: Sequence[RunSummary]) -> list[RunSummary]:
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


# --- what it comes to ------------------------------------------------------------------------


def _headline(summary: RunSummary) -> str:
    if summary.has_drift:
        return "Not everything ended as it was decided"
    if not summary.transactions:
        return "There was nothing to judge"
    if summary.quarantined or any(summary.taken.values()):
        return "Everything that could be read ended as it was decided"
    return "Everything ended as it was decided"


def _header(summary: RunSummary) -> Html:
    found = [kind for kind in _kinds_of([summary]) if summary.drift.get(kind.name)]
    findings = sum(summary.drift.values())
    mode = _MODES.get(summary.mode, summary.mode)
    if found:
        said = join(
            f"{plural(findings, 'finding', 'findings')} in "
            f"{plural(summary.transactions, 'transaction', 'transactions')}: ",
            *(
                tag("span", f"{kind.title} {count(summary.drift[kind.name])}", class_="chip")
                for kind in found
            ),
        )
    else:
        said = join(
            f"{plural(summary.transactions, 'transaction was', 'transactions were')} judged from "
            "the topics themselves, and there is no drift."
        )
    return tag(
        "header",
        tag("p", f"txbroker audit · {summary.run} · {mode}", class_="name"),
        tag(
            "div",
            tag("span", "✗" if found else "✓", class_="sign", aria_hidden="true"),
            tag("div", tag("h1", _headline(summary)), tag("p", said)),
            class_=f"verdict {'bad' if found else 'ok'}",
        ),
        *_notes(summary),
        _tiles(summary),
    )


def _notes(summary: RunSummary) -> Iterator[Html]:
    taken = sum(summary.taken.values())
    if taken:
        yield tag(
            "p",
            f"Retention took {plural(taken, 'record', 'records')} before they were read. What was "
            "in them is not known and was not judged.",
            class_="note",
        )
    held = () if summary.cut is None else summary.cut.held
    if held:
        yield tag(
            "p",
            f"{plural(len(held), 'partition ends', 'partitions end')} in an open transaction, of "
            "another producer or a hanging one: readers see nothing behind it, and what is missing "
            "there counts as late, never as lost.",
            class_="note",
        )
    if summary.quarantined:
        own = summary.drift.get("unreadable", 0)
        whose = f", {count(own)} of them ours" if own else ""
        yield tag(
            "p",
            f"{plural(summary.quarantined, 'record does', 'records do')} not read{whose}. They "
            "were set aside and not judged.",
            class_="note",
        )
    for topic, why in summary.unread_targets.items():
        yield tag(
            "p",
            "The target ",
            tag("code", topic),
            f" is not readable: {why}. What was committed to it was not judged.",
            class_="note",
        )
    for topic, number in summary.missing_targets.items():
        yield tag(
            "p",
            "The target ",
            tag("code", topic),
            f" does not exist, and {plural(number, 'transaction was', 'transactions were')} "
            "committed to it.",
            class_="note",
        )


def _tiles(summary: RunSummary) -> Html:
    states = [(_STATES.get(name, name), count(n)) for name, n in summary.states.items()]
    shown = [
        ("Transactions", count(summary.transactions)),
        *states,
        ("Carried over", count(summary.carried)),
    ]
    return join(
        tag("dl", *(tag("div", tag("dt", k), tag("dd", v)) for k, v in shown), class_="tiles"),
        tag(
            "p",
            f"Begun {moment(summary.started_ms)}, took {duration(summary.took_s * 1000)}; "
            f"{plural(sum(summary.records.values()), 'record', 'records')} read.",
            class_="muted",
        ),
    )


# --- drift -----------------------------------------------------------------------------------


def _section(title: str, lead: Child, *children: Child, long: bool = False) -> Html:
    return tag(
        "section",
        tag("h2", title),
        tag("p", lead, class_="lead") if lead else None,
        *children,
        class_="long" if long else None,
    )


def _offenders(summary: RunSummary) -> Html | None:
    if not summary.examples:
        return None
    kinds = [kind.name for kind in _kinds_of([summary])]
    ordered = sorted(summary.examples, key=lambda each: _gravest(each, kinds))
    near: list[Example] = []
    far: list[Example] = []
    for _kind, some in groupby(ordered, key=lambda each: _gravest(each, kinds)):
        alike = list(some)
        near += alike[:OFFENDERS_SHOWN]
        far += alike[OFFENDERS_SHOWN:]
    more = plural(len(far), "more transaction", "more transactions")
    return _section(
        "Top offenders",
        join(
            "Examples of each kind, the gravest first; the verdict table has all of them. ",
            tag("code", "txbroker tx show ID"),
            " tells what a proxy knows of one.",
        ),
        _examples(near, summary),
        tag("details", tag("summary", more), _examples(far, summary)) if far else None,
        long=True,
    )


def _gravest(example: Example, kinds: Sequence[str]) -> int:
    """The place of its gravest finding among all kinds."""
    return min((kinds.index(one) for one in example.findings if one in kinds), default=len(kinds))


def _examples(examples: Sequence[Example], summary: RunSummary) -> Html:
    titles = {kind.name: kind.title for kind in _kinds_of([summary])}
    rows = [
        tag(
            "tr",
            tag("th", tag("code", each.id, class_="id"), scope="row"),
            tag(
                "td",
                *(tag("span", titles.get(f, f), class_="chip") for f in each.findings),
            ),
            tag("td", tag("code", each.grp), class_="any", data_name="Group"),
            tag("td", each.why, class_="any why"),
        )
        for each in examples
    ]
    return table(("Transaction", "Findings", "Group", "Why"), rows, class_="stack")


def _by_group(groups: Sequence[GroupDrift]) -> Html | None:
    if not groups:
        return None
    titles = {kind.name: kind.title for kind in ALL_KINDS}
    rows = [
        tag(
            "tr",
            tag("th", tag("code", each.grp or "not known"), class_="any", scope="row"),
            tag("td", titles.get(each.kind, each.kind)),
            tag("td", count(each.transactions), class_="n"),
        )
        for each in groups
    ]
    return _section(
        "Groups with the most drift", None, table(("Group", "Kind", "Transactions"), rows, [2])
    )


def _over_time(runs: Sequence[RunSummary]) -> Html:
    found = [kind for kind in _kinds_of(runs) if any(run.drift.get(kind.name) for run in runs)]
    rows: list[Html] = []
    for kind in found or [Kind("", "Any drift", "")]:
        values = [run.drift.get(kind.name, 0) for run in runs]
        columns = [Column(value, place == len(runs) - 1) for place, value in enumerate(values)]
        rows.append(
            tag(
                "div",
                tag("div", kind.title, class_="label"),
                history_row(f"{kind.title}, by run", columns),
                tag("div", f"most: {count(max(values))}", class_="most"),
                class_="kind",
            )
        )
    first, last = day(runs[0].started_ms), day(runs[-1].started_ms)
    dates = tag(
        "div",
        tag("div", tag("span", first if len(runs) > 1 else ""), tag("span", last), class_="dates"),
        class_="kind",
    )
    if len(runs) == 1:
        lead = "This is the first run in the journal; later reports show how it goes on."
    elif not found:
        lead = f"No drift in the last {len(runs)} runs."
    else:
        without = sum(not run.has_drift for run in runs)
        lead = (
            f"Transactions with drift in the last {len(runs)} runs, a bar for each, this one at "
            f"the right; a green line where there is none. {count(without)} of these runs found "
            "nothing at all. Every kind has a scale of its own."
        )
    return _section(
        "Drift over time",
        lead,
        tag("div", *rows, dates, class_="history", style=f"--runs: {len(runs)}"),
        tag("details", tag("summary", "The same as a table"), _runs_table(runs, found)),
    )


def _runs_table(runs: Sequence[RunSummary], kinds: Sequence[Kind]) -> Html:
    rows = [
        tag(
            "tr",
            tag("th", moment(run.started_ms), class_="when", scope="row"),
            tag("td", _MODES.get(run.mode, run.mode)),
            tag("td", count(run.transactions), class_="n"),
            tag("td", count(sum(run.drift.values())), class_="n"),
            *(tag("td", count(run.drift.get(kind.name, 0)), class_="n") for kind in kinds),
        )
        for run in reversed(runs)
    ]
    return table(
        ("Begun", "Mode", "Transactions", "Findings", *(kind.title for kind in kinds)),
        rows,
        range(2, 4 + len(kinds)),
    )


def _kinds(summary: RunSummary, runs: Sequence[RunSummary]) -> Html:
    before = runs[-2] if len(runs) > 1 else None
    rows = []
    for kind in _kinds_of([summary]):
        number = summary.drift.get(kind.name, 0)
        past = "–" if before is None else count(before.drift.get(kind.name, 0))
        rows.append(
            tag(
                "tr",
                tag("th", kind.title, scope="row"),
                tag("td", count(number), class_="n", data_name="This run"),
                tag("td", past, class_="n", data_name="Run before"),
                tag("td", kind.meaning, class_="any"),
                class_="found" if number else "clear",
            )
        )
    return _section(
        "Kinds of drift",
        "The gravest first. A transaction counts once for each kind that it has.",
        table(("Kind", "This run", "Run before", "Meaning"), rows, (1, 2), "stack"),
        long=True,
    )


# --- time ------------------------------------------------------------------------------------


def _pending(summary: RunSummary) -> Html | None:
    ages = summary.pending_age
    if ages is None or not sum(ages.counts):
        return None
    window = common_window([ages])
    return _section(
        "Age of what is pending",
        "How long ago the pending ones were prepared. Pending is no drift: nobody has decided yet.",
        tag(
            "div",
            tag(
                "figure",
                distribution(ages, window, "Age of pending transactions", width=460),
                tag(
                    "figcaption",
                    "Pending transactions by age, and how many are in the highest bar.",
                ),
            ),
            _ages_table(ages, window),
            class_="beside",
        ),
    )


def _ages_table(ages: Histogram, window: Window) -> Html:
    rows = []
    for bucket in range(window.first, min(window.last, len(ages.counts))):
        if not ages.counts[bucket]:
            continue
        over = bucket >= len(ages.bounds)
        words = (
            f"more than {duration(ages.bounds[-1])}"
            if over
            else f"to {duration(ages.bounds[bucket])}"
        )
        rows.append(
            tag(
                "tr",
                tag("th", words, scope="row"),
                tag("td", count(ages.counts[bucket]), class_="n"),
            )
        )
    return table(("Age", "Transactions"), rows, [1])


_DECIDE, _VISIBLE = "From prepare to decision", "From decision to visible"


def _latencies(summary: RunSummary) -> Html | None:
    decide = {one.label: one for one in summary.decide_latency if sum(one.counts)}
    visible = {one.label: one for one in summary.visible_latency if sum(one.counts)}
    labels = _ordered([*decide, *visible])
    if not labels:
        return None
    sides = (
        (_DECIDE, decide, common_window([*decide.values()])),
        (_VISIBLE, visible, common_window([*visible.values()])),
    )
    pairs = [
        _pair(label, sides)
        for _kind, some in groupby(labels, key=_label_kind)
        for label in islice(some, PAIRS_SHOWN)
    ]
    rows = [_latency_row(label, decide.get(label), visible.get(label)) for label in labels]
    heads = ("", "Decided", "p50", "p99", "Visible", "p50", "p99")
    return _section(
        "Prepare, decision, visible",
        "How long transactions took, by topic and by group, by the brokers' clocks. Plots of the "
        "same kind have the same axis; above each, how many are in its highest bar. Half took no "
        "longer than p50, 99 of 100 no longer than p99, as far as counts tell.",
        tag("div", *pairs, class_="pairs"),
        tag("details", tag("summary", "The same as a table"), table(heads, rows, range(1, 7))),
        long=True,
    )


def _label_kind(label: str) -> str:
    return label.partition(":")[0]


def _ordered(labels: Sequence[str]) -> list[str]:
    """Return each label once, topics before groups; those of a kind as they came, which is by
    how many transactions they have."""
    kinds = sorted({_label_kind(label) for label in labels}, reverse=True)
    return [
        label for kind in kinds for label in dict.fromkeys(labels) if _label_kind(label) == kind
    ]


def _name(label: str) -> Html:
    kind, _, name = label.partition(":")
    if not name:
        return join(label)
    return join(tag("small", f"{kind} "), name)


def _pair(label: str, sides: Sequence[tuple[str, dict[str, Histogram], Window]]) -> Html:
    figures = []
    for title, found, window in sides:
        histogram = found.get(label)
        if histogram is not None:
            plot: Child = distribution(histogram, window, f"{title}, {label}")
            figures.append(tag("figure", tag("figcaption", title), plot))
    return tag("div", tag("h3", _name(label)), tag("div", *figures), class_="pair")


def _latency_row(label: str, *histograms: Histogram | None) -> Html:
    cells: list[Html] = []
    for histogram in histograms:
        cells.append(tag("td", count(sum(histogram.counts)) if histogram else "–", class_="n"))
        for share in (0.5, 0.99):
            found = percentile(histogram, share) if histogram else None
            cells.append(tag("td", str(found) if found else "–", class_="n"))
    return tag("tr", tag("th", _name(label), class_="any", scope="row"), *cells)
