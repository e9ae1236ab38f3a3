"""How a report looks: for people, for programs, for Prometheus."""

from __future__ import annotations

import json

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.doctor import NOW_MS, World
from txbroker.cli.doctor.findings import CheckLevel, Section
from txbroker.cli.doctor.report import CHECKS, DoctorReport, as_json, as_prometheus, summary, table
from txbroker.contract.audit import AuditNews, encode_news


@pytest.fixture
async def report(world: World) -> DoctorReport:
    """One thing fails, one is unknown because of it, one is to be looked at, the rest is fine."""
    record = AuditNews(
        run="r1", mode="full", started_ms=0, ended_ms=NOW_MS, transactions=1, states={}, drift={}
    )
    world.kafka.news = {"batch": encode_news(record)}
    world.proxies.partition(2, parked=3)
    world.kafka.remove("op")
    found = await world.examine()
    by_level = {one.level for one in found.outcomes}
    assert by_level >= {CheckLevel.OK, CheckLevel.WARNING, CheckLevel.FAILS}
    return found


async def test_report_has_words_without_a_terminal(report: DoctorReport) -> None:
    lines = list(table(report, colours=False))
    text = "\n".join(lines)
    assert [line for line in lines if not line.startswith(" ")] == [f"{s}:" for s in Section]
    assert text.isascii() or all(char.isprintable() or char == "\n" for char in text)
    assert "\x1b" not in text
    assert not set("✓✗→") & set(text)
    (at,) = (n for n, line in enumerate(lines) if "topics-there" in line)
    assert lines[at] == "  FAILS   topics-there: txbroker's topics exist? 1 are missing"
    assert lines[at + 1] == "          - txbroker.op"
    assert lines[at + 2].startswith("          hint: Create them with `txbroker topics apply`.")
    assert lines[at + 3] == "          see:  docs/how-to/run-a-proxy.md"
    assert "  ok      kafka-reachable: Kafka answers: 3 brokers at 127.0.0.1:9092" in lines


async def test_report_has_signs_on_a_terminal(report: DoctorReport) -> None:
    text = "\n".join(table(report, colours=True))
    for sign in ("\x1b[32m\x1b[1m✓", "\x1b[33m\x1b[1m!", "\x1b[31m\x1b[1m✗"):
        assert sign in text
    assert "FAILS" not in text


async def test_foreign_text_cannot_move_the_cursor(world: World) -> None:
    world.proxies.proxy("https://two:8470", reached=False, why="\x1b[2J\rall is well")
    lines = list(table(await world.examine(), colours=False))
    assert not any("\x1b" in line or "\r" in line for line in lines)


async def test_json_has_everything(report: DoctorReport) -> None:
    data = json.loads(as_json(report))
    assert [one["name"] for one in data["checks"]] == [one.name for one in CHECKS]
    (missing,) = [one for one in data["checks"] if one["name"] == "topics-there"]
    assert (missing["level"], missing["details"]) == ("fails", ["txbroker.op"])
    assert (data["healthy"], sum(data["counts"].values())) == (False, len(CHECKS))
    assert data["at"].endswith("Z")


async def test_prometheus_parses_the_report(report: DoctorReport) -> None:
    page = "\n".join(as_prometheus(report)) + "\n"
    families = {one.name: one.samples for one in text_string_to_metric_families(page)}
    levels = {one.labels["check"]: one.value for one in families["txbroker_doctor_check"]}
    assert levels.keys() == {one.name for one in CHECKS}
    assert (levels["topics-there"], levels["parked"], levels["kafka-version"]) == (2, 1, 0)
    assert families["txbroker_doctor_healthy"][0].value == 0
    assert families["txbroker_doctor_timestamp_seconds"][0].value > 1e9
    assert len(families["txbroker_doctor_check_seconds"]) == len(CHECKS)


async def test_summary_counts_levels(report: DoctorReport) -> None:
    only = [one for one in report.outcomes if one.level is CheckLevel.OK][:2]
    failing = structs.replace(only[0], level=CheckLevel.FAILS)
    assert summary(DoctorReport(0.0, (*only, failing))) == "2 ok, 1 failing."
    assert summary(DoctorReport(0.0, tuple(only))) == "2 ok."
