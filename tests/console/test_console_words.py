"""Formats of values, filters, and the concerns of the overview."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs

from tests.kit.doctor import METRICS, NOW_MS, World
from txbroker.cli.doctor.findings import CheckLevel, DoctorResult
from txbroker.contract.audit import AuditNews, CheckNews, encode_news
from txbroker.contract.groups import GroupAnswer, TestedBody
from txbroker.contract.service import (
    AuditOverview,
    CheckCounts,
    CheckReport,
    GroupChecks,
    GroupOverview,
    HalfPartitionState,
    Overview,
    PartitionOverview,
    ProxyOverview,
)
from txbroker.diagnosis.table import DIAGNOSES, problems_of
from txbroker.errors import RequestError
from txbroker.proxy.console import formatting as shown
from txbroker.proxy.console.concerns import SHOWN, concerns_of
from txbroker.proxy.console.filters import PAGE_ROWS_MAX, read_listing
from txbroker.proxy.console.formatting import (
    BODY_CHARS_MAX,
    age,
    kind_of,
    link,
    number,
    rate,
    text_of,
)
from txbroker.proxy.console.pages import sums_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"), (0, "< 1 s"), (0.99, "< 1 s"), (1, "1 s"), (59.6, "1 m"), (60, "1 m"),
        (200, "3 m 20 s"), (3600, "1 h"), (3660, "1 h 1 m"), (3601, "1 h"), (86400, "1 d"),
        (90061, "1 d 1 h"), (400 * 86400, "400 d"),
    ],
)  # fmt: skip
def test_ages_have_two_units(seconds: float | None, text: str) -> None:
    assert age(seconds).replace("\N{NO-BREAK SPACE}", " ") == text


def test_numbers_have_thin_spaces_and_small_rates_a_digit() -> None:
    assert number(None) == "–"
    assert number(1234567).replace("\N{NARROW NO-BREAK SPACE}", " ") == "1 234 567"
    assert [rate(value) for value in (0, 0.04, 0.5, 9.94, 9.96, 120.4)] == [
        "0", "0.0", "0.5", "9.9", "10", "120",
    ]  # fmt: skip


def test_times_out_of_range_are_rendered() -> None:
    assert shown.time_of(1_700_000_000_123) == "2023-11-14 22:13:20"
    assert shown.machine_time(1_700_000_000_123) == "2023-11-14T22:13:20.123Z"
    assert shown.time_of(10**20) == "1970-01-01 00:00:00"


def test_links_are_quoted() -> None:
    assert link("/groups", name="a&b=c", state="") == "/groups?name=a%26b%3Dc"
    assert link("/transactions/a b") == "/transactions/a%20b"


@pytest.mark.parametrize(
    ("raw", "text", "kind"),
    [
        (None, "", "null"),
        (b"", "", "empty"),
        ("ü".encode(), "ü", "2 bytes, text"),
        (b"\xff\x01", "ff 01", "2 bytes, bytes, in hexadecimal"),
    ],
)
def test_utf8_bytes_are_shown_as_text(raw: bytes | None, text: str, kind: str) -> None:
    assert (text_of(raw), kind_of(raw)) == (text, kind)


def test_long_bytes_are_cut_between_characters() -> None:
    long = "€".encode() * BODY_CHARS_MAX * 2
    assert text_of(long) == "€" * BODY_CHARS_MAX
    assert "its beginning" in kind_of(long)
    for extra in range(4):
        odd = b"x" * extra + "😀".encode() * BODY_CHARS_MAX * 2
        assert set(text_of(odd)) <= {"x", "😀"}
    assert "its beginning" in kind_of(b"\xff" * BODY_CHARS_MAX)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("10m", 600), ("2 h", 7200), ("1d", 86400), ("1.5m", 90)]
)
def test_older_than_takes_units(text: str, seconds: float) -> None:
    assert read_listing({"older": text}).filter.older_s == seconds


@pytest.mark.parametrize(
    "fields",
    [
        {"older": "-1"}, {"older": "1w"}, {"older": "٣"}, {"older": "9" * 10 + "d"},
        {"state": "x"}, {"limit": "x"}, {"limit": "1001"}, {"group": "g" * 1000},
        {"id": "x"}, {"topic": "t" * 250}, {"older_than_s": "600"}, {"states": ""},
    ],
)  # fmt: skip
def test_invalid_filter_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(RequestError) as caught:
        read_listing(fields)
    assert caught.value.status == 400


def test_filter_is_equal_in_link_and_words() -> None:
    fields = {"state": "rolled_back", "group": " g ", "topic": "t", "older": "600"}
    chosen = read_listing(fields).filter
    assert chosen.query() == {"state": "rolled_back", "group": "g", "topic": "t", "older": "10m"}
    for older in ("0s", "1.5s", "61s", "90m", "2h", "30000d", "864001s"):
        again = read_listing({"older": older}).filter
        assert read_listing(again.query()).filter == again
    assert read_listing(chosen.query()).filter == chosen
    wording = chosen.words().replace("\N{NO-BREAK SPACE}", " ")
    assert (
        wording == "rolled back, of group g, with a message to topic t, prepared more than 10 m ago"
    )
    assert read_listing({}).filter.words() == "all unsettled"
    assert read_listing({"limit": "1000"}).limit == PAGE_ROWS_MAX


# --- concerns ---------------------------------------------------------------------------

WELL = Overview(
    at_ms=1_000_000,
    complete=True,
    proxies=(ProxyOverview("http://a:1", ready=True, version="1"),),
    partitions=tuple(
        PartitionOverview(n, "http://a:1", "owned", "", 5, 0, 0, 0, 3.0, 0.1) for n in range(3)
    ),
    groups=(GroupOverview("g", pending=5, oldest_pending_age_s=3.0),),
    groups_left_off=0,
    refused_topics={},
)


def with_partition(**changes: Any) -> Overview:
    """Return the same with another first half partition."""
    first, *rest = WELL.partitions
    return structs.replace(WELL, partitions=(structs.replace(first, **changes), *rest))


@pytest.mark.parametrize(
    "state",
    [*(s for s in HalfPartitionState if s not in ("owned", "elsewhere")), "unreachable", "new"],
)
def test_each_partition_state_has_wording_and_next_step(state: str) -> None:
    (concern,) = concerns_of(with_partition(state=state, why="because"))
    assert concern.title.startswith("Half partition 0 ")
    assert concern.title.split()[3] not in ("are", "have", "wait")
    assert concern.detail == "because"
    assert concern.diagnosis.todo
    assert concern.diagnosis.act == (state not in ("claiming", "replaying", "suspended"))


def test_worst_concerns_come_first() -> None:
    found = structs.replace(
        with_partition(state="claiming", parked=2),
        groups=(
            GroupOverview("away", 3, unreachable_since_ms=400_000, unreachable_why="refused"),
            GroupOverview("slow", 1, oldest_pending_age_s=901.0),
            GroupOverview("stuck", parked=2),
        ),
    )
    concerns = concerns_of(found)
    assert [c.diagnosis.act for c in concerns] == [True, False, False, False]
    assert "2 parked transactions need" in concerns[0].title
    assert concerns[0].detail == "Group stuck."
    away = next(c for c in concerns if "away" in c.title)
    assert "For 10\N{NO-BREAK SPACE}m: refused." in away.detail
    assert "3 transactions wait" in away.detail


FAILING = GroupChecks(
    CheckCounts(commit=1, unclear=4),
    CheckReport("id", 1_000, "http://e/check", "unclear", "answered 500: locked"),
)
DAY_MS = 86_400_000
HOUR_S = 3600.0


def with_group(**changes: Any) -> Overview:
    return structs.replace(WELL, groups=(structs.replace(WELL.groups[0], **changes),))


def with_proxy(**changes: Any) -> Overview:
    return structs.replace(WELL, proxies=(structs.replace(WELL.proxies[0], **changes),))


def with_audit(ended_ms: int, mode: str = "batch", **drift: int) -> Overview:
    audits = (AuditOverview(mode, ended_ms, drift),)
    return structs.replace(WELL, at_ms=100 * DAY_MS, audits=audits)


def with_checks(**failed: str) -> Overview:
    audits = (AuditOverview("batch", 100 * DAY_MS, {}, failed),)
    return structs.replace(WELL, at_ms=100 * DAY_MS, audits=audits)


PLANTED = {
    "PendingTooOld": (with_group(oldest_pending_age_s=901.0), "undecided for up to 15 m 1 s"),
    "PendingGrowing": (
        with_group(pending=1001, pending_growth_per_s=0.51), "1\u202f001 are pending, 0.5 more",
    ),
    "PrepareSlow": (with_proxy(prepare_p99_s=2.1), "Prepares take up to 2 s 99 % of those"),
    "Parking": (with_partition(parked=1), "1 parked transaction needs a manual decision"),
    "UndecidedLost": (with_proxy(lost_last_hour=2), "The messages of 2 transactions"),
    "ChecksFailing": (
        with_group(checks=FAILING), "4 of 5 checks in 15 minutes. The last, of http://e/check: an",
    ),
    "GroupUnreachable": (with_group(unreachable_since_ms=1), "Group g is unreachable"),
    "PromotionStalled": (with_partition(oldest_committed_age_s=61.0), "do not become visible"),
    "Refusing": (with_partition(refused=1), "1 committed transaction is refused"),
    "NotReady": (
        with_proxy(ready=False, problems=("partition 3: claiming", "no group")),
        "http://a:1 is not ready no group",
    ),
    "NotReady of a silent proxy": (
        with_proxy(reached=False, why="no answer"), "http://a:1 does not answer no answer",
    ),
    "NotReady of half partitions": (with_partition(state="none"), "Half partition 0 has no owner"),
    "NotReady of Kafka": (
        with_proxy(kafka_silent_since_ms=1_000, kafka_why="no connection", partitions=(0, 1),
                   kafka_partitions=(0, 1)),
        "Kafka has not answered this proxy since 1970-01-01 00:00:01 UTC no connection",
    ),
    "FileNotRead": (
        with_proxy(problems=("the file of token_file cannot be used",)), "cannot use a file",
    ),
    "HalfRetentionAtRisk": (
        with_proxy(half_retention_s=10 * HOUR_S, half_retention_headroom_s=3.9 * HOUR_S),
        "In 3 h 54 m the retention of half messages (10 h)",
    ),
    "AuditDrift": (with_audit(100 * DAY_MS, late=3, lost=0), "UTC: 3 late."),
    "AuditCheckFailed": (
        with_checks(slow="error", few="warning"), "UTC: few (warning), slow (error).",
    ),
    "AuditCheckFailed of a critical one": (with_checks(slow="critical"), "UTC: slow (critical)."),
    "AuditStale": (with_audit(97 * DAY_MS), "The newest one ended 3 d ago"),
    "AuditStreamLagging": (
        with_audit(100 * DAY_MS - 301_000, "stream"), "what happened until 5 m 1 s ago",
    ),
}  # fmt: skip
"""For each alert an overview in which only its reason is planted, and the words of the page."""
WARNINGS = {
    "PendingTooOld", "PendingGrowing", "PrepareSlow", "ChecksFailing", "GroupUnreachable",
    "FileNotRead", "AuditStale", "AuditStreamLagging", "AuditCheckFailed",
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_reason_of_each_alert_is_a_concern(name: str) -> None:
    planted, wording = PLANTED[name]
    (concern,) = concerns_of(planted)
    assert concern.diagnosis.alert == name.partition(" ")[0]
    text = f"{concern.title} {concern.detail}".replace("\N{NO-BREAK SPACE}", " ")
    assert wording in text
    assert concern.diagnosis.todo
    assert concern.links or "Audit" in name
    assert concern.diagnosis.act == (name not in WARNINGS)


async def doctor_of(planted: Overview) -> dict[str, DoctorResult]:
    """Return what the doctor finds in an installation with this overview, by check."""
    world = World()
    world.proxies.view = planted
    world.proxies.pages = {one.url: METRICS for one in planted.proxies}
    world.proxies.registered = [GroupAnswer(group="g", sessions=0, check_url="http://g/check")]
    world.proxies.tests = {"g": TestedBody(group="g", answered=True)}
    for audit in planted.audits:
        checks = [CheckNews(*one, ok=False) for one in audit.failed_checks.items()]
        news = AuditNews(
            run="r1", mode=audit.mode, started_ms=0, transactions=1, states={}, drift=audit.drift,
            ended_ms=NOW_MS - planted.at_ms + audit.ended_ms, checks=checks,
        )  # fmt: skip
        world.kafka.news[audit.mode] = encode_news(news)
    report = await world.examine()
    return {one.name: one for one in report.outcomes}


@pytest.mark.parametrize("name", PLANTED)
async def test_console_top_doctor_and_alert_agree(name: str) -> None:
    planted, _ = PLANTED[name]
    (row,) = {concern.diagnosis for concern in concerns_of(planted)}
    assert {words for words, _group in problems_of(planted)} == {row.words}
    found = await doctor_of(planted)
    if row.holds:
        (level,) = {one.level for one in found.values() if one.title == row.holds}
        assert level is (CheckLevel.FAILS if row.critical else CheckLevel.WARNING)
    else:
        levels = {found["proxies-ready"].level, found["proxies-owners"].level}
        assert CheckLevel.FAILS in levels or not row.act
        assert levels != {CheckLevel.OK}
    assert not row.critical or row.act
    alerts = yaml.safe_load((ROOT / "charts/txbroker/files/alerts.yaml").read_text())
    severities = {
        rule["labels"]["severity"]
        for group in alerts["groups"]
        for rule in group["rules"]
        if rule["alert"] == row.name and rule["expr"].strip() == row.expr
    }
    assert severities == ({"critical" if row.critical else "warning"} if row.expr else set())


def test_old_transactions_of_unreachable_groups_are_reported_as_by_the_alert() -> None:
    planted = with_group(unreachable_since_ms=1, oldest_pending_age_s=901.0)
    titles = [concern.diagnosis.alert for concern in concerns_of(planted)]
    assert titles == ["GroupUnreachable", "PendingTooOld"]


def test_every_condition_is_shown_or_a_command_shows_it() -> None:
    shown = {one for one in DIAGNOSES if one.find}
    assert SHOWN.keys() == shown
    assert {one.alert for one in shown} == {name.partition(" ")[0] for name in PLANTED}
    page = (ROOT / "docs/operate/console.md").read_text()
    row = r"^\| \[(TxBroker\w+)\]\(../runbooks/\1\.md\) \| (.+) \|$"
    texts = dict(re.findall(row, page, re.M))
    assert texts.keys() == {one.name for one in DIAGNOSES}
    for one in DIAGNOSES:
        if one not in shown:
            assert f"`{one.show}`" in texts[one.name]
        elif one.alert != "NotReady":
            titles = [re.sub(r"{\w+}", "…", text) for text in (one.title.several, one.title.one)]
            assert any(title and title in texts[one.name] for title in titles)


@pytest.mark.parametrize(
    "quiet",
    [
        WELL,
        with_group(oldest_pending_age_s=900.0),
        with_partition(oldest_committed_age_s=60.0),
        with_group(pending=1000, pending_growth_per_s=9.0),
        with_group(pending=9999, pending_growth_per_s=0.5),
        with_group(checks=GroupChecks(CheckCounts(unclear=2))),
        with_proxy(half_retention_s=10.0, half_retention_headroom_s=4.0),
        with_proxy(half_retention_s=None, half_retention_headroom_s=-5.0),
        with_proxy(prepare_p99_s=1.0),
        with_audit(98 * DAY_MS, lost=0),
        with_audit(100 * DAY_MS - 300_000, "stream"),
    ],
)
async def test_at_the_bounds_there_is_no_concern(quiet: Overview) -> None:
    assert concerns_of(quiet) == []
    titles = {one.holds for one in DIAGNOSES}
    unwell = [one for one in (await doctor_of(quiet)).values() if one.level != CheckLevel.OK]
    # Without an audit the doctor alone advises one.
    assert [one.name for one in unwell if one.title in titles and quiet.audits] == []
    assert {one.name for one in unwell if one.title in titles} <= {"audit-fresh"}


def test_silent_kafka_is_the_headline_and_takes_the_place_of_not_ready() -> None:
    proxy = ProxyOverview(
        "http://b:1", ready=False, problems=("lost contact", "partition 1: suspended"),
        partitions=(1, 2), kafka_silent_since_ms=0, kafka_partitions=(2,),
    )  # fmt: skip
    (concern,) = concerns_of(structs.replace(WELL, proxies=(*WELL.proxies, proxy)))
    assert concern.title == (
        "Kafka has not answered the proxy at http://b:1 for half partition 2 since "
        "1970-01-01 00:00:00 UTC"
    )
    assert (concern.diagnosis.headline, concern.detail) == (True, "lost contact")


def test_sums_of_unknown_counts_are_no_zeros() -> None:
    unknown = with_partition(pending=None, parked=None, refused=None, committed=None)
    sums = sums_of(unknown)
    assert (sums.pending, sums.parked, sums.partial) == (10, 0, True)
    assert shown.least(sums.pending, sums.partial) == "at least 10"
    assert shown.least(sums.parked, sums.partial) == "–"
    nothing = structs.replace(unknown, partitions=unknown.partitions[:1])
    assert (sums_of(nothing).pending, sums_of(nothing).rates) == (None, None)
    assert shown.least(None, False) == "–"
    stale = sums_of(with_partition(as_of_ms=5))
    assert (stale.pending, stale.partial, stale.as_of_ms) == (15, False, 5)


def test_failed_checks_are_listed_with_their_grade() -> None:
    details = [
        one.detail.partition("UTC: ")[2]
        for one in concerns_of(with_checks(slow="critical", few="warning"))
    ]
    assert details == ["slow (critical).", "few (warning)."]


def test_parked_transactions_are_counted_where_only_groups_report_them() -> None:
    (concern,) = concerns_of(with_group(parked=2))
    assert concern.title == "2 parked transactions need a manual decision"


def test_many_groups_are_named_in_one_line() -> None:
    away = tuple(GroupOverview(f"g{n}", 1, unreachable_since_ms=1) for n in range(9))
    (concern,) = concerns_of(structs.replace(WELL, groups=away))
    assert concern.title == "9 groups are unreachable"
    assert "Groups g0, g1, g2, g3, g4 and 4 more." in concern.detail
