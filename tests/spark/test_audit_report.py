"""The audit's report: what it shows, that nothing in it can break it, and that its plots read."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spark.audit_summaries import (
    DAY_MS,
    HOURS,
    STARTED_MS,
    cut,
    drift_day,
    drifted,
    finding,
    latency,
    summary,
    tables,
)
from tests.spark.table_cases import rows_of
from txbroker.errors import ConfigurationError
from txbroker.spark.judge.kinds import ALL_KINDS
from txbroker.spark.report.contents import (
    FINDINGS_A_KIND,
    DriftDay,
    KindCount,
    Percentiles,
    ReportTables,
)
from txbroker.spark.report.formatting import duration, moment
from txbroker.spark.report.plots import (
    Bar,
    Decades,
    LatencyPlot,
    LatencyPoint,
    common_decades,
)
from txbroker.spark.report.report import KINDS_DRAWN, RUNS_SHOWN, TEMPLATES, render, write_report
from txbroker.spark.schema import (
    BrokenRecord,
    CheckResult,
    Example,
    Histogram,
    RunSummary,
    Terms,
    TopicRead,
)
from txbroker.spark.tables.layout import DRIFT, LATENCY, TRANSACTIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from txbroker.spark.tables.store import TableStore

NONE = ReportTables()
HOSTILE = "\"'><script>alert(1)</script>&amp;\x00\x1b]0;\u202egnp.exe\ud800</style><!--"
ALLOWED = frozenset(
    re.findall(
        r"\w+",
        "html head meta title style body header main footer section nav div span p a br h1 h2 h3 "
        "small table caption thead tbody tr th td dl dt dd code details summary figure figcaption "
        "svg desc g rect line text path circle",
    )
)


def parsed(page: str) -> ElementTree.Element:
    """The page, which is well-formed XML too."""
    assert page.startswith("<!doctype html>\n")
    return ElementTree.fromstring(page.partition("\n")[2])


def words(page: str) -> str:
    return " ".join(" ".join(parsed(page).find("body").itertext()).split())  # type: ignore[union-attr]


def section(page: str, title: str) -> ElementTree.Element:
    return next(one for one in parsed(page).iter("section") if one.findtext("h2") == title)


def cells(page: str, title: str) -> list[list[str]]:
    """The rows of the first table of a section."""
    body = section(page, title).find(".//tbody")
    assert body is not None
    return [[" ".join("".join(cell.itertext()).split()) for cell in row] for row in body]


# --- nothing can break it --------------------------------------------------------------------


def hostile() -> RunSummary:
    read = TopicRead(HOSTILE, (0,), (0,), (5,), 3)
    return summary(
        run=HOSTILE,
        mode=HOSTILE,
        cut=type(cut())(read, read, read, (read,), (0,), (0,), held=(HOSTILE,)),
        records={HOSTILE: 1},
        states={HOSTILE: 1},
        drift={HOSTILE: 1, "lost": 1},
        taken={HOSTILE: 1},
        examples=(Example(HOSTILE, (HOSTILE,), HOSTILE, HOSTILE),),
        pending_age=Histogram(HOSTILE, (1,), (1, 1)),
        business={HOSTILE: 1},
        quarantined=1,
        set_aside=(BrokenRecord(HOSTILE, 0, 1, HOSTILE),),
        missing_targets={HOSTILE: 1},
        unread_targets={HOSTILE: HOSTILE},
        checks=(CheckResult(HOSTILE, "error", HOSTILE, 1.0, 0.5, False, HOSTILE),),
        terms=Terms(STARTED_MS),
    )


def hostile_tables() -> ReportTables:
    texts = dict.fromkeys(("id", "grp", "place", "why", "by", "by_why"), HOSTILE)
    found = [
        finding(kind, state, severity=HOSTILE, **texts)
        for kind in (HOSTILE, "lost")
        for state in ("open", "acknowledged", HOSTILE)
    ]
    return tables(*found, groups=(latency(HOSTILE),))


def test_no_name_can_bring_in_an_element_or_ask_for_anything() -> None:
    page = render(hostile(), [hostile(), drifted()], hostile_tables())
    elements = list(parsed(page).iter())
    assert {element.tag for element in elements} <= ALLOWED
    names = {name for element in elements for name in element.attrib}
    assert not names & {"src", "srcset", "action", "data", "xlink:href"}
    links = {element.attrib["href"] for element in elements if "href" in element.attrib}
    assert links
    assert all(re.fullmatch("#[a-z_-]+", link) for link in links)
    assert not [name for name in names if name.startswith("on")]
    assert "url(" not in page
    assert "@import" not in page
    assert "\u202e" not in page
    assert "\x00" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 10
    assert "default-src 'none'" in words_of_policy(page)
    style = parsed(page).findtext("head/style") or ""
    assert "script" not in style


def words_of_policy(page: str) -> str:
    return next(
        element.attrib["content"]
        for element in parsed(page).iter("meta")
        if element.get("http-equiv") == "Content-Security-Policy"
    )


def test_a_page_of_any_sizes_stays_small() -> None:
    names = [f"topic-{number}" for number in range(5000)]
    read = tuple(TopicRead(name, (0,) * 10, (0,) * 10, (5,) * 10) for name in names)
    base = cut()
    many = drifted(
        cut=type(base)(base.half, base.op, base.parked, read, (0,), (0,)),
        taken=dict.fromkeys(names, 1),
    )
    found = [
        finding(kind.name, state, why="w" * 300)
        for kind in ALL_KINDS
        for state in ("open", "acknowledged", "healed")
        for _ in range(FINDINGS_A_KIND)
    ]
    counts = [KindCount(one.name, "open", 100_000, "orders", 99_000) for one in ALL_KINDS]
    shown = tables(*found, groups=(latency(),) * 6)._replace(counts=counts)
    page = render(many, [drifted(number) for number in range(2000)], shown)
    assert len(page) < 1_700_000
    assert "4,903 more topics." in words(page)
    assert "orders 99,000" in words(page)
    assert page.count("<figure>") == 12


@given(st.text())
def test_inserted_values_stay_text(value: str) -> None:
    template = TEMPLATES.from_string('<p title="{{ value }}">{{ value }}</p>')
    element = ElementTree.fromstring(template.render(value=value))
    assert not list(element)
    if value.isprintable():
        assert (element.text or "", element.get("title")) == (value, value)


# --- what it shows ---------------------------------------------------------------------------

FAILED = CheckResult("slow", "critical", "visible_p99_s", 7.25, 5, False, "orders")
KEPT = CheckResult("few", "error", "volume_min", 0.9, 0.5, True)
KNOWN = {"drift": {"lost": 2}, "acknowledged": {"lost": 2}}


@pytest.mark.parametrize(
    ("reported", "headline", "sign"),
    [
        (summary(), "Everything ended as it was decided", "ok"),
        (summary(transactions=0, states={}), "There was nothing to judge", "ok"),
        (summary(quarantined=1), "Everything that could be read ended as it was decided", "ok"),
        (summary(taken={"a": 1}), "Everything that could be read ended as it was decided", "ok"),
        (summary(drift={"lost": 0}), "Everything ended as it was decided", "ok"),
        (summary(checks=(FAILED,)), "Everything ended as it was decided", "warn"),
        (
            summary(**KNOWN),
            "Everything ended as it was decided, except for acknowledged findings",
            "ok",
        ),
        (drifted(), "Not everything ended as it was decided", "bad"),
        (drifted(transactions=0), "Not everything ended as it was decided", "bad"),
        (drifted(checks=(FAILED,)), "Not everything ended as it was decided", "bad"),
    ],
)
def test_headline_shows_whether_there_is_drift(
    reported: RunSummary, headline: str, sign: str
) -> None:
    page = parsed(render(reported, [], NONE))
    assert "".join(page.find(".//h1").itertext()) == headline  # type: ignore[union-attr]
    assert page.find(f".//div[@class='verdict {sign}']") is not None


def test_verdict_and_terms_are_in_words() -> None:
    run = drifted(
        terms=Terms(STARTED_MS, late_after_ms=90_000),
        drift={"lost": 5, "visible_twice": 1},
        acknowledged={"lost": 3},
        checks=(FAILED,),
    )
    reported = words(render(run, [], NONE))
    for expected in (
        "3 findings in 1,100 transactions: Visible twice 1 Committed, not visible: lost 2",
        "3 more findings are acknowledged.",
        "1 check failed: slow 7.25 s",
        "payments target 1 983 7",
        "late after 1.5 min",
        "and lost after 10 min",
        "Started 2025-10-09 08:53:20 UTC, took 12 s; 3,806 records read.",
    ):
        assert expected in reported


def test_failed_checks_are_first() -> None:
    unknown = CheckResult("age", "warning", "audit_age_s", None, 90_000, None)
    page = render(summary(checks=(KEPT, unknown, FAILED)), [], NONE)
    assert cells(page, "Checks") == [
        ["slow", "failed", "critical", "visible_p99_s of orders", "7.25 s", "at most 5 s"],
        ["few", "kept", "error", "volume_min", "0.9", "at least 0.5"],
        ["age", "nothing to compare", "warning", "audit_age_s", "–", "at most 90,000 s"],
    ]


def test_everything_set_aside_has_its_place_and_reason() -> None:
    run = drifted(
        cut=type(cut())(
            *(cut().half, cut().op, cut().parked, (), (0,), (0,)), held=("payments-3",)
        ),
        quarantined=300,
        set_aside=(BrokenRecord("payments", 0, 5, "no id"),),
        unread_targets={"bills": "no leader"},
        missing_targets={"gone": 2},
    )
    own = [BrokenRecord("txbroker.half", 1, n, "no policy", own=True) for n in range(250)]
    page = render(run, [], NONE, own)
    rows = cells(page, "Set aside")
    assert rows[0] == ["target", "bills", "no leader"]
    assert rows[1] == ["target", "gone", "does not exist; 2 transactions committed to it"]
    assert rows[2][1] == "payments-3"
    assert rows[3][1:] == ["payments", "retention removed 7 records before any run read them"]
    assert rows[4] == ["own record", "txbroker.half-1@0", "no policy"]
    assert len(rows) == 200
    assert "104 more in the table broken." in words(page)
    alone = render(summary(quarantined=1, set_aside=run.set_aside), [], NONE)
    assert cells(alone, "Set aside") == [["another's record", "payments-0@5", "no id"]]
    assert "Set aside" not in words(render(summary(), [], NONE))


# --- drift -----------------------------------------------------------------------------------


def test_findings_show_their_life() -> None:
    found = tables(
        finding("late", "healed", expired=True),
        finding("lost", "open", times=3),
        finding("lost", "acknowledged"),
    )
    page = render(drifted(), [], found)
    assert cells(page, "Drift") == [
        [
            *("Visible twice", "critical", "1", "0", "0", "0", "–"),
            "a message was promoted more than once",
        ],
        [
            *("Committed, not visible: lost", "critical", "2", "1", "1", "0", "orders 1"),
            "a committed message has not become visible",
        ],
        [
            *("Committed, not visible: late", "warning", "0", "0", "0", "1", "–"),
            "not visible although its decision is old",
        ],
    ]  # fmt: skip
    rows = [" ".join("".join(row.itertext()).split()) for row in finding_rows(page)]
    assert [row.get("class") for row in finding_rows(page)] == [
        "finding is-acknowledged is-critical is-lost",
        "finding is-open is-critical is-lost",
        "finding is-healed is-warning is-late",
    ]
    assert "until 2025-11-08 08:53:20 UTC by ada: an old outage" in rows[0]
    assert "by 3 runs" in rows[1]
    assert "at payments-0@17" in rows[1]
    assert "evidence expired 09 Oct 08:53" in rows[2]


def finding_rows(page: str) -> list[ElementTree.Element]:
    return [row for row in section(page, "Drift").iter("tr") if "finding" in row.get("class", "")]


def test_each_filter_has_a_target_a_link_and_a_rule() -> None:
    states = ("open", "acknowledged", "healed")
    page = render(
        drifted(),
        [],
        tables(*(finding(kind.name, state) for kind in ALL_KINDS for state in states)),
    )
    style = parsed(page).findtext("head/style") or ""
    drift = section(page, "Drift")
    names = [*states, "critical", "error", "warning", *(kind.name for kind in ALL_KINDS)]
    assert [link.get("href") for link in drift.iter("a")] == [
        *(f"#drift-{kind.name}" for kind in ALL_KINDS),
        "#drift",
        *(f"#drift-{name}" for name in names[:6]),
    ]
    children = [(one.tag, one.get("id") or one.get("class", "")) for one in drift]
    rows_at = next(n for n, (_, name) in enumerate(children) if "findings" in name)
    for name in names:
        # The rule reaches siblings after the target only.
        assert children.index(("span", f"drift-{name}")) < rows_at
        rule = f"#drift-{name}:target ~ .findings tr.finding:not(.is-{name}) {{ display: none; }}"
        assert rule in style
        assert [row for row in finding_rows(page) if f"is-{name}" in row.get("class", "").split()]


def test_filters_without_rows_have_no_link_and_kinds_of_a_newer_version_no_filter() -> None:
    found = tables(finding("brand_new", "open"), finding("row_without_message", "open"))
    page = render(drifted(drift={"row_without_message": 3, "brand_new": 4}), [], found)
    links = [link.get("href") for link in section(page, "Drift").iter("a")]
    assert links == ["#drift-row_without_message", "#drift", "#drift-open", "#drift-critical"]
    assert [row[:3] for row in cells(page, "Drift")] == [
        ["Row without message", "critical", "3"],
        ["brand_new", "critical", "4"],
    ]
    assert "brand_new:target" not in page
    clean = section(render(summary(), [], NONE), "Drift")
    assert clean.find("table") is None
    assert "No finding is open" in "".join(clean.itertext())


# --- drift by day ----------------------------------------------------------------------------


def test_drift_by_day_shows_each_kind_with_gaps_and_acknowledged_ones() -> None:
    days = (
        drift_day(0, lost=3, late=0),
        drift_day(1, {"lost": 2}, lost=3, brand_new=1),
        drift_day(3, {"lost": 1}, lost=1),
        drift_day(4),
    )
    page = render(drifted(4), [], tables(finding("lost"), days=days))
    assert rows_of_bars(page, "Drift") == {
        "Committed, not visible: lost": "3, 3 (2 acknowledged), no run, 1 (1 acknowledged), 0",
        "brand_new": "0, 1, no run, 0, 0",
    }
    heads = [head.text for head in section(page, "Drift").findall(".//thead")[0].iter("th")]
    assert heads == ["Day", "Committed, not visible: lost", "brand_new"]
    assert cells(page, "Drift") == [
        ["2025-10-13", "0", "0"],
        ["2025-10-12", "1 (1 acknowledged)", "0"],
        ["2025-10-11", "no run", "no run"],
        ["2025-10-10", "3 (2 acknowledged)", "1"],
        ["2025-10-09", "3", "0"],
    ]


def test_acknowledged_ones_are_outlined_and_a_gap_has_no_bar() -> None:
    bars = rects(Bar(4, "4"), Bar(None, "no run"), Bar(4, "4 (1)", 1), Bar(2, "2 (2)", 2))
    assert [(bar.get("class"), bar.get("x"), bar.get("height")) for bar in bars] == [
        ("bad", "1.5", "34.00"),
        ("known", "21.5", "8.50"),
        ("bad", "21.5", "25.50"),
        ("known newest", "31.5", "17.00"),
    ]


@pytest.mark.parametrize("days", [(), (drift_day(0, lost=3),), (drift_day(-1), drift_day(0))])
def test_without_drift_or_with_a_single_day_nothing_is_drawn_by_day(
    days: tuple[DriftDay, ...],
) -> None:
    page = render(summary(), [], tables(days=days))
    assert rows_of_bars(page, "Drift") == {}
    assert ("since 2025-10-08 none was open" in words(page)) == (len(days) == 2)


def test_the_table_has_the_kinds_that_are_not_drawn() -> None:
    every = {kind.name: 1 for kind in ALL_KINDS}
    page = render(drifted(), [], tables(days=(drift_day(-1), drift_day(0, **every))))
    titles = [kind.title for kind in ALL_KINDS]
    assert [*rows_of_bars(page, "Drift")] == titles[:KINDS_DRAWN]
    assert f"{len(titles) - KINDS_DRAWN} more kinds, in the table." in words(page)
    assert cells(page, "Drift")[0] == ["2025-10-09", *["1"] * len(titles)]


# --- the last runs ---------------------------------------------------------------------------


def rows_of_bars(page: str, title: str) -> dict[str, str]:
    """The words of each row of bars of a section, by its name."""
    return {
        (row.findtext("title") or "").partition(", by")[0]: (
            (row.findtext("desc") or "").partition(": ")[2]
        )
        for row in section(page, title).findall("div[@class='bars']/svg")
    }


def test_history_ends_with_this_run_and_leaves_streams_out() -> None:
    others = [summary(n, drift={"late": n}, transactions=n) for n in (3, 1, 2)]
    stream = summary(0, run="stream-1", mode="stream", drift={"late": 99})
    later = summary(9, drift={"late": 77})
    me = summary(4, drift={"late": 5}, took_s=90.0)
    page = render(me, [*others, stream, later, me], NONE)
    assert rows_of_bars(page, "The last runs") == {
        "Transactions": "1, 2, 3, 1,100",
        "Findings": "1, 2, 3, 5",
        "Duration": "12 s, 12 s, 12 s, 1.5 min",
    }
    assert "stream-1" not in page


def test_history_is_bounded() -> None:
    page = render(summary(100), [summary(number) for number in range(100)], NONE)
    assert rows_of_bars(page, "The last runs")["Findings"] == ", ".join("0" * RUNS_SHOWN)
    assert f"{RUNS_SHOWN} of them had no finding." in words(page)
    assert "first run in the journal" in words(render(summary(), [], NONE))


def test_clean_run_is_green_and_smallest_drift_is_visible() -> None:
    bars = rects(Bar(0, "0"), Bar(1, "1"), Bar(10**9, "many"))
    assert [bar.get("class") for bar in bars] == ["none", "bad", "bad newest"]
    heights = [float(bar.attrib["height"]) for bar in bars]
    assert heights[0] < heights[1] < heights[2] <= 36


def rects(*bars: Bar) -> list[ElementTree.Element]:
    return list(drawn("bars", "x", bars, "day", "bad").iter("rect"))


# --- latency ---------------------------------------------------------------------------------


def test_latencies_are_shown_by_group_and_estimates_marked() -> None:
    nothing = Percentiles(None, None, None)
    guessed = latency(
        "guessed",
        visible=[],
        shown=nothing,
        estimated=500,
        earliest=Percentiles(20.0, 30.0, 40.0),
        latest=Percentiles(3_600_000.0, 7_200_000.0, 7_200_000.0),
    )
    mixed = guessed._replace(grp="mixed", shown=Percentiles(1.0, 2.0, 3.0))
    page = render(summary(), [], tables(groups=(latency(), guessed, mixed)))
    estimate = "estimate: 20 ms / 30 ms / 40 ms … 1 h / 2 h / 2 h"
    assert cells(page, "Latency by group") == [
        ["orders", "1,000", "24 ms / 120 ms / 700 ms", "48 ms / 360 ms / 2.8 s"],
        ["guessed", "1,000", "24 ms / 120 ms / 700 ms", estimate],
        ["mixed", "1,000", "24 ms / 120 ms / 700 ms", f"1 ms / 2 ms / 3 ms; {estimate}"],
    ]
    titles = [one.findtext("title") for one in section(page, "Latency by group").iter("svg")]
    assert titles == [
        "Prepare to decision, group orders",
        "Prepare to visible, group orders",
        "Prepare to decision, group guessed",
        "Prepare to decision, group mixed",
    ]


def test_plots_have_names_descriptions_and_tables_beside_them() -> None:
    days = drift_day(0, lost=1), drift_day(1)
    page = render(drifted(1), [drifted()], tables(groups=(latency(),), days=days))
    plots = [one for one in parsed(page).iter("svg") if one.get("role") == "img"]
    assert len(plots) == 3 + 1 + 2
    for plot in plots:
        assert plot[0].tag == "title"
        assert plot[0].text
        assert plot[1].tag == "desc"
        assert plot[1].text
    described = [plot[1].text or "" for plot in plots]
    assert any("p99 is at most 900 ms, at 08 Oct 12:53" in text for text in described)
    for table in parsed(page).iter("table"):
        heads = [cell for cell in table.iter("th") if cell.get("scope")]
        assert heads, "a table without named rows or columns"


def drawn(macro: str, *values: object) -> ElementTree.Element:
    module = TEMPLATES.get_template("plots.html").module
    return ElementTree.fromstring(f"<div>{getattr(module, macro)(*values)}</div>")


def points(*values: tuple[int, float]) -> list[LatencyPoint]:
    """Points at hours, whose p95 and p99 are a multiple of the p50."""
    return [
        LatencyPoint(HOURS.begin_ms + hour * HOURS.step_ms, ms, 2 * ms, 3 * ms)
        for hour, ms in values
    ]


SERIES = {
    "one point": points((5, 10.0)),
    "ends": points((0, 1.0), (23, 86_400_000.0)),
    "dense": points(*((hour, 2.0**hour) for hour in range(24))),
    "below a millisecond": points((1, 0.99), (2, 0.99)),
    "after the end": points((30, 5.0)),
}


@pytest.mark.parametrize("series", SERIES.values(), ids=SERIES.keys())
def test_lines_of_a_plot_stay_inside(series: list[LatencyPoint]) -> None:
    made = LatencyPlot("x", series, HOURS, common_decades([series]))
    assert all(0 <= mark.top <= made.height for mark in made.levels())
    paths = list(drawn("latency", made).iter("path"))
    assert len(paths) == 3
    for path in paths:
        for x, y in re.findall(r"[ML]([\d.]+) ([\d.-]+)", path.attrib["d"]):
            assert 0 <= float(x) <= made.width
            assert 0 <= float(y) <= made.height


def test_a_step_without_transactions_interrupts_the_lines() -> None:
    series = points((0, 1.0), (1, 2.0), (3, 3.0), (5, 4.0), (6, 5.0))
    lines = list(LatencyPlot("x", series, HOURS, Decades(0, 3)).lines())
    assert [line.name for line in lines] == ["p99", "p95", "p50"]
    for line in lines:
        assert re.sub(r"[^ML]", "", line.path) == "MLMML"
        assert line.path.count("h0") == 1


@pytest.mark.parametrize(
    ("values", "decades"),
    [((), (0, 1)), ((1.0,), (0, 1)), ((0.2,), (0, 1)), ((100.0,), (2, 3)), ((5.0, 2e6), (0, 7))],
)
def test_plots_beside_each_other_have_one_axis(
    values: tuple[float, ...], decades: tuple[int, int]
) -> None:
    assert common_decades([points((0, value)) for value in values]) == decades


def test_pending_ages_are_a_table() -> None:
    assert cells(render(drifted(), [], NONE), "Age of pending transactions") == [
        ["to 1 s", "3", ""],
        ["to 1 min", "20", ""],
        ["to 1 h", "4", ""],
    ]
    assert "Age of pending" not in words(render(summary(), [], NONE))


def test_sections_without_data_are_left_out() -> None:
    reported = words(render(summary(cut=None), [], NONE))
    for title in ("Age of pending transactions", "Latency by group", "Checks", "Set aside"):
        assert title not in reported
    assert "Records read" in reported


# --- figures ---------------------------------------------------------------------------------


def test_times_that_no_calendar_has_are_the_nearest() -> None:
    assert moment(-(2**60)).endswith("1-01-01 00:00:00 UTC")
    assert moment(2**60) == "9999-12-31 23:59:59 UTC"


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (0, "0"),
        (0.25, "0.25 ms"),
        (1, "1 ms"),
        (999.7, "1 s"),
        (1500, "1.5 s"),
        (12_500, "12 s"),
        (59_999, "1 min"),
        (90_000, "1.5 min"),
        (3_600_000, "1 h"),
        (36 * 3_600_000, "1.5 d"),
        (400 * 86_400_000, "400 d"),
    ],
)
def test_durations_are_short(ms: float, shown: str) -> None:
    assert duration(ms) == shown


# --- the file --------------------------------------------------------------------------------


def test_a_report_replaces_the_one_before_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "reports" / "audit.html"
    write_report(path, drifted(), [], NONE)
    first = path.read_text(encoding="utf-8")
    write_report(path, summary(), [], NONE)
    assert path.read_text(encoding="utf-8") != first
    assert [one.name for one in path.parent.iterdir()] == ["audit.html"]


def test_unwritable_report_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "a.html", tmp_path / "folder"):
        with pytest.raises(ConfigurationError, match="cannot be written"):
            write_report(path, summary(), [], NONE)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]


def test_style_uses_only_defined_variables() -> None:
    page = render(drifted(), [summary(1)], NONE)
    style = next(parsed(page).iter("style")).text or ""
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", style))
    light, _, dark = style.partition("prefers-color-scheme: dark")
    assert used - {"--bars"} <= set(re.findall(r"(--[a-z0-9-]+):", light))
    assert used - {"--bars"} <= set(re.findall(r"(--[a-z0-9-]+):", dark))


# --- the tables --------------------------------------------------------------------------------


def at(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)


def drift_row(id: str, kind: str, **changes: Any) -> dict[str, Any]:
    return {
        "day": at(STARTED_MS).date(),  # type: ignore[union-attr]
        "installation": "txbroker",
        "id": id,
        "kind": kind,
        "severity": "critical",
        "grp": "orders",
        "topic": "payments",
        "partition": 0,
        "offset": 7,
        "why": "why",
        "state": "open",
        "opened_at": at(STARTED_MS - DAY_MS),
        "seen_at": at(STARTED_MS),
        "times": 2,
        **changes,
    }


def latency_row(ago_ms: int, grp: str, n: int, **changes: Any) -> tuple[Any, ...]:
    minute = at((STARTED_MS - ago_ms) // 60_000 * 60_000)
    decide = changes.get("decide", {50: n})
    return (
        minute.date(),  # type: ignore[union-attr]
        *("txbroker", minute, grp, "payments", n, changes.get("estimated", 0), 0, 0),
        *((n, 0.0, 0.0, 0.0, one) if one else None for one in (decide, changes.get("visible"))),
    )


def test_the_tables_are_read_in_bounded_numbers(spark: SparkSession) -> None:
    from txbroker.spark.report.tables import axis_from, report_tables

    lost = [drift_row(f"{n:04}", "lost", seen_at=at(STARTED_MS + n)) for n in range(30)]
    known = {"acknowledged_by": "ada", "acknowledged_why": "w"}
    others = [
        drift_row("b", "lost", grp="bills", topic=None),
        drift_row("c", "late", **known, acknowledged_until=at(STARTED_MS + DAY_MS)),
        drift_row("d", "late", **known, acknowledged_until=at(STARTED_MS)),
        drift_row("e", "late", state="healed", closed_at=at(STARTED_MS - 6 * DAY_MS)),
        drift_row("f", "late", state="expired", closed_at=at(STARTED_MS - 6 * DAY_MS)),
        drift_row("g", "late", state="healed", closed_at=at(STARTED_MS - 8 * DAY_MS)),
    ]
    minutes = [latency_row(n * 60_000, f"g{n}", 10 + n) for n in range(9)]
    minutes += [
        latency_row(3_600_000, "g8", 100, decide={50: 98, 200: 2}, visible={60: 98}, estimated=2),
        latency_row(9 * DAY_MS, "old", 9999),
    ]
    guessed: dict[str, Any] = {
        "day": at(STARTED_MS).date(),  # type: ignore[union-attr]
        "id": "x",
        "grp": "g8",
        "visible_estimated": True,
        "prepared_at": at(STARTED_MS - 3_600_000),
        "observed_at": at(STARTED_MS),
        "visible_ms": 77,
    }
    held = {
        DRIFT: rows_of(spark, DRIFT, *lost, *others),
        LATENCY: spark.createDataFrame(minutes, LATENCY.ddl),
        TRANSACTIONS: rows_of(spark, TRANSACTIONS, guessed),
    }
    store = cast("TableStore", SimpleNamespace(read=held.get))
    found = report_tables(store, STARTED_MS, [])
    assert {(one.kind, one.state): one[2:] for one in found.counts} == {
        ("lost", "open"): (31, "orders", 30),
        ("late", "open"): (1, "orders", 1),
        ("late", "acknowledged"): (1, "orders", 1),
        ("late", "healed"): (2, "orders", 2),
    }
    shown = [one for one in found.findings if one.kind == "lost"]
    assert len(shown) == FINDINGS_A_KIND
    assert {one.id for one in shown} == {f"{n:04}" for n in range(10, 30)}
    late = {one.id: one for one in found.findings if one.kind == "late"}
    assert {id: (one.state, one.expired) for id, one in late.items()} == {
        "c": ("acknowledged", False),
        "d": ("open", False),
        "e": ("healed", False),
        "f": ("healed", True),
    }
    assert late["c"][-3:] == ("ada", "w", STARTED_MS + DAY_MS)
    assert (late["c"].place, late["c"].times) == ("payments-0@7", 2)
    assert [one.grp for one in found.groups] == [f"g{n}" for n in range(8, 2, -1)]
    first, second = found.groups[:2]
    assert (first.transactions, first.estimated) == (118, 2)
    assert [round(value or 0) for value in first.decided] == [3, 3, 52]
    assert (len(first.decide), len(first.visible), len(second.visible)) == (2, 1, 0)
    assert first.earliest == (77, 77, 77)
    assert first.latest == (3_600_000, 3_600_000, 3_600_000)
    assert second.earliest is None
    assert found.time == axis_from(STARTED_MS // 60_000 * 60_000 - 3_600_000, STARTED_MS)
    assert found.time.step_ms == 60_000
    empty = {table: rows.limit(0) for table, rows in held.items()}
    nothing = report_tables(cast("TableStore", SimpleNamespace(read=empty.get)), STARTED_MS, [])
    assert (nothing.counts, nothing.findings, nothing.groups, nothing.days) == ([], [], [], [])


def test_the_table_has_which_findings_were_acknowledged_on_a_day(spark: SparkSession) -> None:
    from txbroker.spark.report.tables import drift_days

    later = {"acknowledged_until": at(STARTED_MS + DAY_MS)}
    known = {**later, "opened_run": "run-1", "acknowledged_run": "run-1"}
    rows = [
        drift_row("a", "late", **{**known, "acknowledged_run": "run-2"}),
        drift_row("b", "late", **{**known, "acknowledged_run": "run-3"}),
        drift_row("c", "late", **{**known, "opened_run": "run-3"}),
        drift_row("d", "late", **known, closed_run="run-2"),
        drift_row("e", "late", **known, closed_run="run-3"),
        drift_row("f", "late", **{**known, "acknowledged_until": at(STARTED_MS)}),
        drift_row("g", "late", opened_run="run-1"),
    ]
    daily = [
        summary(-1, run="run-0", drift={"late": 9}),  # of a version without the table
        summary(0, run="run-2", open_findings={"late": 5, "lost": 31}),
        summary(3, run="run-4"),
    ]
    assert drift_days(rows_of(spark, DRIFT, *rows), daily) == [
        drift_day(-1, late=9),
        drift_day(0, {"late": 2}, late=5, lost=31),
        drift_day(3),
    ]


@pytest.mark.parametrize(
    ("span_ms", "step_ms"),
    [
        (0, 60_000),
        (3_600_000, 60_000),
        (DAY_MS, 30 * 60_000),
        (7 * DAY_MS, 2 * 3_600_000),
    ],
)
def test_steps_follow_the_time_shown(span_ms: int, step_ms: int) -> None:
    from txbroker.spark.report.tables import axis_from

    time = axis_from(STARTED_MS - span_ms, STARTED_MS)
    assert time.step_ms == step_ms
    assert time.begin_ms <= STARTED_MS - span_ms
    assert time.begin_ms % step_ms == 0
    assert time.begin_ms < time.end_ms
