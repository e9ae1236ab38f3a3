"""The audit's report: what it says, that nothing in it can break it, and that its plots read."""

from __future__ import annotations

import re
from bisect import bisect_left
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spark.audit_summaries import STARTED_MS, cut, drifted, summary
from txbroker.errors import ConfigurationError
from txbroker.spark.report.report import (
    OFFENDERS_SHOWN,
    PAIRS_SHOWN,
    RUNS_SHOWN,
    TEMPLATES,
    BucketRange,
    GroupDrift,
    Plot,
    common_buckets,
    duration,
    percentile,
    render,
    write_report,
)
from txbroker.spark.schema import (
    KIND_NAMES,
    KINDS,
    VERDICT,
    Example,
    Histogram,
    RunSummary,
    Terms,
    TopicRead,
)

HOSTILE = "\"'><script>alert(1)</script>&amp;\x00\x1b]0;\u202egnp.exe\ud800</style><!--"
ALLOWED = frozenset(
    re.findall(
        r"\w+",
        "html head meta title style body header main footer section div span p h1 h2 h3 small "
        "table caption thead tbody tr th td dl dt dd code details summary figure figcaption "
        "svg desc g rect line text",
    )
)


def parsed(page: str) -> ElementTree.Element:
    """The page, which is well-formed XML too."""
    assert page.startswith("<!doctype html>\n")
    return ElementTree.fromstring(page.partition("\n")[2])


def words(page: str) -> str:
    return " ".join(" ".join(parsed(page).find("body").itertext()).split())  # type: ignore[union-attr]


# --- nothing can break it --------------------------------------------------------------------


def hostile() -> RunSummary:
    read = TopicRead(HOSTILE, (0,), (0,), (5,), 3)
    counted = Histogram(f"group:{HOSTILE}", (1, 10), (1, 2, 3))
    return summary(
        run=HOSTILE,
        mode=HOSTILE,
        cut=type(cut())(read, read, read, (read,), (0,), (0,)),
        records={HOSTILE: 1},
        states={HOSTILE: 1},
        drift={HOSTILE: 1, "lost": 1},
        taken={HOSTILE: 1},
        examples=(Example(HOSTILE, (HOSTILE,), HOSTILE, HOSTILE),),
        pending_age=Histogram(HOSTILE, (1,), (1, 1)),
        decide_latency=(counted,),
        visible_latency=(Histogram(HOSTILE, (1, 10), (1, 2, 3)),),
        business={HOSTILE: 1},
        quarantined=1,
        terms=Terms(STARTED_MS),
    )


def test_no_name_can_bring_in_an_element_or_ask_for_anything() -> None:
    page = render(hostile(), [hostile(), drifted()], [GroupDrift(HOSTILE, HOSTILE, 1)])
    elements = list(parsed(page).iter())
    assert {element.tag for element in elements} <= ALLOWED
    names = {name for element in elements for name in element.attrib}
    assert not names & {"href", "src", "srcset", "action", "data", "xlink:href"}
    assert not [name for name in names if name.startswith("on")]
    assert "url(" not in page
    assert "@import" not in page
    assert "\u202e" not in page
    assert "\x00" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 10
    assert "default-src 'none'" in words_of_policy(page)


def words_of_policy(page: str) -> str:
    return next(
        element.attrib["content"]
        for element in parsed(page).iter("meta")
        if element.get("http-equiv") == "Content-Security-Policy"
    )


def test_a_page_of_any_sizes_stays_small() -> None:
    names = [f"topic-{number}" for number in range(5000)]
    counts = tuple(Histogram(f"topic:{name}", (1, 10), (1, 2, 3)) for name in names[:300])
    read = tuple(TopicRead(name, (0,) * 10, (0,) * 10, (5,) * 10) for name in names)
    base = cut()
    many = drifted(
        cut=type(base)(base.half, base.op, base.parked, read, (0,), (0,)),
        taken=dict.fromkeys(names, 1),
        decide_latency=counts,
        visible_latency=counts,
    )
    page = render(many, [drifted(number) for number in range(2000)])
    assert len(page) < 1_000_000
    assert "4,903 more topics." in words(page)
    assert page.count("<figure>") == 2 * PAIRS_SHOWN + 1


@given(st.text())
def test_inserted_values_stay_text(value: str) -> None:
    template = TEMPLATES.from_string('<p title="{{ value }}">{{ value }}</p>')
    element = ElementTree.fromstring(template.render(value=value))
    assert not list(element)
    if value.isprintable():
        assert (element.text or "", element.get("title")) == (value, value)


# --- what it says ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reported", "headline"),
    [
        (summary(), "Everything ended as it was decided"),
        (summary(transactions=0, states={}), "There was nothing to judge"),
        (summary(quarantined=1), "Everything that could be read ended as it was decided"),
        (summary(taken={"a": 1}), "Everything that could be read ended as it was decided"),
        (summary(drift={"lost": 0}), "Everything ended as it was decided"),
        (drifted(), "Not everything ended as it was decided"),
        (drifted(transactions=0), "Not everything ended as it was decided"),
    ],
)
def test_headline_shows_whether_there_is_drift(reported: RunSummary, headline: str) -> None:
    page = render(reported, [])
    assert "".join(parsed(page).find(".//h1").itertext()) == headline  # type: ignore[union-attr]
    assert (parsed(page).find(".//div[@class='verdict ok']") is None) == reported.has_drift


def test_report_shows_findings_and_records_not_judged() -> None:
    reported = words(render(drifted(terms=Terms(STARTED_MS, late_after_ms=90_000)), []))
    for example in drifted().examples:
        assert example.id in reported
        assert example.why in reported
    for expected in (
        "3 findings in 1,100 transactions: Visible twice 1 Committed, not visible: lost 2",
        "Retention removed 7 records before the audit read them.",
        "1 record does not read.",
        "payments target 1 983 7",
        "late after 1.5 min",
        "and lost after 10 min",
        "Started 2025-10-09 08:53:20 UTC, took 12 s; 3,806 records read.",
    ):
        assert expected in reported


def test_a_kind_with_many_offenders_hides_none_of_another() -> None:
    many = [Example(f"{'0' * 23}{n:03}", ("late",), "g", "") for n in range(20)]
    grave = Example("G" * 26, ("too_many_attempts", "visible_twice"), "g", "")
    reported = drifted(drift={"late": 20, "visible_twice": 1}, examples=(*many, grave))
    section = next(
        one
        for one in parsed(render(reported, [])).iter("section")
        if one.findtext("h2") == "Top offenders"
    )
    near, far = (
        [
            row.findtext("th/code")
            for row in part.findall(".//tr")
            if row.find("th/code") is not None
        ]
        for part in (section.find("div"), section.find("details"))
        if part is not None
    )
    assert near == [grave.id, *(one.id for one in many[:OFFENDERS_SHOWN])]
    assert far == [one.id for one in many[OFFENDERS_SHOWN:]]


def test_largest_topics_and_groups_have_plots() -> None:
    labels = [f"{kind}:n{n}" for kind in ("group", "topic") for n in range(20, 0, -1)]
    reported = summary(decide_latency=[Histogram(label, (1, 2), (1, 1, 0)) for label in labels])
    shown = ["".join(one.itertext()) for one in parsed(render(reported, [])).iter("h3")]
    firsts = [f"n{n}" for n in range(20, 20 - PAIRS_SHOWN, -1)]
    assert shown == [f"{kind} {name}" for kind in ("topic", "group") for name in firsts]


def test_every_kind_has_its_row_with_this_run_and_the_one_before() -> None:
    page = render(drifted(1), [summary(0, drift={"late": 4})])
    section = next(
        one for one in parsed(page).iter("section") if one.findtext("h2") == "Kinds of drift"
    )
    rows = {row[0].text: (row[1].text, row[2].text) for row in section.find(".//tbody") or ()}
    assert list(rows) == [kind.title for kind in KINDS]
    shown = {kind.name: rows[kind.title] for kind in KINDS}
    assert shown.pop("lost") == ("2", "0")
    assert shown.pop("visible_twice") == ("1", "0")
    assert shown.pop("late") == ("0", "4")
    assert set(shown.values()) == {("0", "0")}


def test_business_and_unknown_kinds_are_shown_where_found() -> None:
    assert "Message without row" not in words(render(drifted(), []))
    reported = words(render(drifted(drift={"row_without_message": 3, "brand_new": 4}), []))
    assert "Row without message 3" in reported
    assert "brand_new 4" in reported


def rows_of_history(page: str) -> dict[str, str]:
    return {
        row.findtext("div") or "": row.findtext("svg/desc") or ""
        for row in parsed(page).findall(".//div[@class='kind']")
        if row.find("svg") is not None
    }


def test_history_ends_with_this_run_and_keeps_streams_apart() -> None:
    others = [summary(n, drift={"late": n}) for n in (3, 1, 2)]
    stream = summary(0, run="stream-1", mode="stream", drift={"late": 99})
    later = summary(9, drift={"late": 77})
    me = summary(4, drift={"late": 5})
    page = render(me, [*others, stream, later, me])
    assert rows_of_history(page) == {
        "Committed, not visible: late": "By run, the oldest first: 1, 2, 3, 5"
    }
    assert "stream-1" not in page


def test_history_is_bounded_and_shows_no_drift_when_clean() -> None:
    page = render(summary(100), [summary(number) for number in range(100)])
    assert rows_of_history(page) == {
        "Any drift": f"By run, the oldest first: {', '.join('0' * RUNS_SHOWN)}"
    }
    assert f"No drift in the last {RUNS_SHOWN} runs." in words(page)
    assert "first run in the journal" in words(render(summary(), []))


def test_plots_have_names_descriptions_and_tables_beside_them() -> None:
    page = render(drifted(), [])
    plots = list(parsed(page).iter("svg"))
    assert len(plots) == 2 + 3
    for plot in plots:
        assert plot.get("role") == "img"
        assert plot[0].tag == "title"
        assert plot[0].text
        assert plot[1].tag == "desc"
        assert plot[1].text
    for table in parsed(page).iter("table"):
        heads = [cell for cell in table.iter("th") if cell.get("scope")]
        assert heads, "a table without named rows or columns"
    assert "topic payments 950 24 ms > 1 s" in words(page)


def test_sections_without_data_are_left_out() -> None:
    reported = words(render(summary(cut=None), []))
    assert "Age of pending transactions" not in reported
    assert "Prepare, decision, visible" not in reported
    assert "Records read" in reported


# --- figures ---------------------------------------------------------------------------------


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


BOUNDS = (10, 20, 50, 100, 1000)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_lies_in_the_bucket_of_the_true_one(values: list[int], share: float) -> None:
    counts = [0] * (len(BOUNDS) + 1)
    for value in values:
        counts[bisect_left(BOUNDS, value)] += 1
    found = percentile(Histogram("", BOUNDS, tuple(counts)), share)
    assert found is not None
    ordered = sorted(values)
    true = ordered[min(len(values) - 1, max(0, -(-round(share * 1000) * len(values) // 1000) - 1))]
    bucket = bisect_left(BOUNDS, true)
    assert bucket <= found.place <= bucket + 1
    if found.ms is None:
        assert bucket == len(BOUNDS)
        assert str(found) == "> 1 s"
    else:
        assert (BOUNDS[bucket - 1] if bucket else 0) <= found.ms <= BOUNDS[bucket]


def test_nothing_has_no_percentile() -> None:
    assert percentile(Histogram("", (1, 2), (0, 0, 0)), 0.5) is None
    assert percentile(Histogram("", (), (5,)), 0.5) is None


# --- plots -----------------------------------------------------------------------------------


def drawn(macro: str, *values: object) -> str:
    module = TEMPLATES.get_template("plots.html").module
    return str(getattr(module, macro)(*values))


FINE = tuple(2**n for n in range(28))


def one_bucket(bucket: int, number: int = 1) -> Histogram:
    counts = [0] * (len(FINE) + 1)
    counts[bucket] = number
    return Histogram("x", FINE, tuple(counts))


PLOTS = {
    "first bucket": one_bucket(0),
    "middle": one_bucket(14, 10**9),
    "beyond all bounds": one_bucket(28),
    "everywhere": Histogram("x", FINE, tuple(range(1, 30))),
    "narrow at its end": Histogram("x", (5, 10, 20, 50, 100, 200), (67, 6, 4, 2, 0, 0, 0)),
    "both ends": Histogram("x", FINE, (99, *(0,) * 27, 99)),
    "few": Histogram("x", (1000, 60_000), (3, 4, 5)),
    "nothing": Histogram("x", FINE, (0,) * 29),
}


@pytest.mark.parametrize("width", [260, 460])
@pytest.mark.parametrize("histogram", PLOTS.values(), ids=PLOTS.keys())
def test_words_and_bars_of_a_plot_stay_inside_and_apart(histogram: Histogram, width: int) -> None:
    plot = ElementTree.fromstring(
        drawn("distribution", Plot(histogram, common_buckets([histogram]), "x", width))
    )
    _, _, right, bottom = map(float, plot.attrib["viewBox"].split())
    boxes = []
    for text in plot.iter("text"):
        x, y, long = float(text.attrib["x"]), float(text.attrib["y"]), len(text.text or "") * 6.9
        begin = x - {"start": 0, "middle": long / 2, "end": long}[text.attrib["text-anchor"]]
        assert begin >= -0.1, text.text
        assert begin + long <= right + 0.1, text.text
        assert 9 <= y <= bottom - 3
        boxes.append((y, begin, begin + long, text.text))
    for y, begin, end, words in boxes:
        for other in boxes:
            apart = other[1] >= end or other[2] <= begin or abs(other[0] - y) >= 11
            assert apart or other == (y, begin, end, words), (words, other)
    for bar in plot.iter("rect"):
        numbers = {name: float(bar.attrib[name]) for name in ("x", "y", "width", "height")}
        assert numbers["x"] >= 0
        assert numbers["x"] + numbers["width"] <= right
        assert numbers["y"] >= 40
    shown = sum(number > 0 for number in histogram.counts)
    assert len(list(plot.iter("rect"))) == shown


def test_plots_beside_each_other_show_the_same_buckets() -> None:
    assert common_buckets([one_bucket(5), one_bucket(9)]) == BucketRange(4, 11)
    assert common_buckets([one_bucket(0), one_bucket(28)]) == BucketRange(0, 29)
    assert common_buckets([]) == BucketRange(0, 1)


def test_p99_beyond_the_bounds_is_shown_so() -> None:
    plot = drawn("distribution", Plot(one_bucket(28), BucketRange(27, 29), "x"))
    assert "p99 &gt; 1.6 d" in plot
    assert "and more" in plot


def test_clean_run_is_green_and_smallest_drift_is_visible() -> None:
    row = ElementTree.fromstring(drawn("trend", "x", [0, 1, 10**9]))
    bars = list(row.iter("rect"))
    assert [bar.get("class") for bar in bars] == ["ok", "bad", "bad newest"]
    heights = [float(bar.attrib["height"]) for bar in bars]
    assert heights[0] < heights[1] < heights[2] <= 36


# --- the file --------------------------------------------------------------------------------


def test_a_report_replaces_the_one_before_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "reports" / "audit.html"
    write_report(path, drifted(), [])
    first = path.read_text(encoding="utf-8")
    write_report(path, summary(), [])
    assert path.read_text(encoding="utf-8") != first
    assert [one.name for one in path.parent.iterdir()] == ["audit.html"]


def test_unwritable_report_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "a.html", tmp_path / "folder"):
        with pytest.raises(ConfigurationError, match="cannot be written"):
            write_report(path, summary(), [])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]


def test_style_uses_only_defined_variables() -> None:
    page = render(drifted(), [summary(1)])
    style = next(parsed(page).iter("style")).text or ""
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", style))
    light, _, dark = style.partition("prefers-color-scheme: dark")
    assert used - {"--runs"} <= set(re.findall(r"(--[a-z0-9-]+):", light))
    assert used - {"--runs"} <= set(re.findall(r"(--[a-z0-9-]+):", dark))


def test_groups_with_the_most_drift_come_from_the_verdicts(spark: Any, tmp_path: Path) -> None:
    columns = [part.split() for part in re.sub(r"<.*?>", "", VERDICT.replace("\n", " ")).split(",")]
    names = [column[0] for column in columns]

    def row(run: str, grp: str | None, *findings: str) -> tuple[Any, ...]:
        known = {"run": run, "grp": grp, "findings": list(findings), "id": "x"}
        return tuple(known.get(name) for name in names)

    reported = drifted()
    rows = [row(reported.run, "<orders>", "lost", "late")] * 3 + [
        row(reported.run, None, KIND_NAMES[0]),
        row(reported.run, "clean"),
        row("another run", "bills", "lost"),
    ]
    write_report(tmp_path / "a.html", reported, [], spark.createDataFrame(rows, VERDICT))
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert (
        "<orders> Committed, not visible: late 3 <orders> Committed, not visible: lost 3 "
        "not known Rolled back but visible 1"
    ) in words(page)
    assert "bills Committed" not in words(page)
