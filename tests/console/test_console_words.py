"""Formats of values, filters, and the concerns of the overview."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from txbroker.contract.service import (
    GroupOverview,
    Overview,
    PartitionOverview,
    PartitionState,
    ProxyOverview,
)
from txbroker.errors import RequestError
from txbroker.proxy.console import formatting as shown
from txbroker.proxy.console.concerns import Severity, concerns_of
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


def test_healthy_overview_has_no_concerns() -> None:
    assert concerns_of(WELL) == []


@pytest.mark.parametrize(
    "state", [*(s for s in PartitionState if s not in ("owned", "elsewhere")), "unreachable", "new"]
)
def test_each_partition_state_has_wording_and_next_step(state: str) -> None:
    (concern,) = concerns_of(with_partition(state=state, why="because"))
    assert concern.title.startswith("Half partition 0 ")
    assert concern.title.split()[3] not in ("are", "have", "wait")
    assert concern.detail == "because"
    assert concern.todo
    assert concern.severity is (
        Severity.WARN if state in ("claiming", "replaying", "suspended") else Severity.BAD
    )


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
    assert [c.severity for c in concerns] == [
        Severity.BAD,
        Severity.WARN,
        Severity.WARN,
        Severity.WARN,
    ]
    assert "2 parked transactions need" in concerns[0].title
    assert concerns[0].detail == "Group stuck."
    away = next(c for c in concerns if "away" in c.title)
    assert "For 10\N{NO-BREAK SPACE}m: refused." in away.detail
    assert "3 transactions wait" in away.detail


@pytest.mark.parametrize(
    ("changes", "wording"),
    [
        ({"refused": 1}, "1 committed transaction is refused by a target"),
        ({"oldest_committed_age_s": 61.0}, "Committed messages do not become visible"),
    ],
)
def test_bad_counts_are_concerns(changes: dict[str, Any], wording: str) -> None:
    (concern,) = concerns_of(with_partition(**changes))
    assert (concern.title, concern.severity) == (wording, Severity.BAD)
    assert concern.links


def test_thresholds_match_the_alerts() -> None:
    old = structs.replace(WELL.groups[0], oldest_pending_age_s=900.0)
    assert concerns_of(structs.replace(WELL, groups=(old,))) == []
    older = structs.replace(old, oldest_pending_age_s=900.1)
    (concern,) = concerns_of(structs.replace(WELL, groups=(older,)))
    assert "undecided for up to 15" in concern.title
    assert concerns_of(with_partition(oldest_committed_age_s=60.0)) == []


def test_silent_and_unready_proxies_are_concerns() -> None:
    silent = ProxyOverview("http://b:1", reached=False, why="no answer in time")
    troubled = ProxyOverview(
        "http://c:1", ready=False, problems=("partition 3: claiming", "the op topic is gone")
    )
    found = structs.replace(WELL, proxies=(*WELL.proxies, silent, troubled))
    first, second = concerns_of(found)
    assert (first.title, first.detail) == (
        "The proxy at http://b:1 does not answer", "no answer in time",
    )  # fmt: skip
    assert second.title == "The proxy at http://c:1 is not ready"
    assert second.detail == "the op topic is gone"


def test_many_groups_are_named_in_one_line() -> None:
    away = tuple(GroupOverview(f"g{n}", 1, unreachable_since_ms=1) for n in range(9))
    (concern,) = concerns_of(structs.replace(WELL, groups=away))
    assert concern.title == "9 groups are unreachable"
    assert "Groups g0, g1, g2, g3, g4 and 4 more." in concern.detail
