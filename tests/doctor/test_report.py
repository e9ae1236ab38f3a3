"""Checks run in parallel, no error hides another check, and a report has three forms."""

from __future__ import annotations

import asyncio
import json

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.doctor import NOW_MS, World
from txbroker.cli.doctor.findings import (
    CheckLevel,
    CheckRegistry,
    DoctorCheck,
    Finding,
    Section,
    fine,
    shortened,
)
from txbroker.cli.doctor.report import (
    CHECKS,
    DoctorReport,
    as_json,
    as_prometheus,
    examine,
    summary,
    table,
)
from txbroker.cli.doctor.subject import Subject, Unavailable
from txbroker.contract.audit import AuditNews, encode_news
from txbroker.errors import KafkaUnavailable


def checks(book: CheckRegistry) -> dict[str, DoctorCheck]:
    return {one.name: one for one in book.checks}


def book() -> CheckRegistry:
    """One check of each bad habit."""
    made = CheckRegistry(Section.KAFKA, needs=("base",))

    @made.check("the base", hint="Mend it.")
    async def base(subject: Subject) -> Finding:
        return fine("yes")

    @made.check("it breaks", hint="Report it.")
    async def breaks(subject: Subject) -> Finding:
        raise ZeroDivisionError("by nothing")

    @made.check("it hangs", hint="Wait.")
    async def hangs(subject: Subject) -> Finding:
        await asyncio.Event().wait()
        return fine("never")

    @made.check("it cannot look", hint="Help it.")
    async def blind(subject: Subject) -> Finding:
        raise Unavailable("nothing to see")

    return made


async def test_checks_end_independently(world: World) -> None:
    report = await examine(world.subject(), book().checks, timeout_s=0.05)
    shown = {one.name: (one.level, one.found) for one in report.outcomes}
    assert shown == {
        "base": (CheckLevel.OK, "yes"),
        "breaks": (CheckLevel.FAILS, "this check is broken: ZeroDivisionError: by nothing"),
        "hangs": (CheckLevel.UNKNOWN, "not known: no answer within 0.05 s"),
        "blind": (CheckLevel.UNKNOWN, "not known: nothing to see"),
    }
    assert {one.name: one.hint for one in report.outcomes if one.hint} == {"breaks": "Report it."}


async def test_dependent_check_is_unknown(world: World) -> None:
    async def failing(subject: Subject) -> Finding:
        return Finding(CheckLevel.FAILS, "no")

    made = [
        structs.replace(one, look=failing) if one.name == "base" else one for one in book().checks
    ]
    report = await examine(world.subject(), made, timeout_s=0.05)
    levels = {one.name: one.level for one in report.outcomes}
    assert levels.pop("base") is CheckLevel.FAILS
    assert set(levels.values()) == {CheckLevel.UNKNOWN}
    assert not report.healthy


async def test_checks_run_in_parallel(world: World) -> None:
    met = asyncio.Barrier(3)
    made = CheckRegistry(Section.TOPICS)

    def meeting(name: str) -> None:
        async def look(subject: Subject) -> Finding:
            await met.wait()
            return fine("met")

        look.__name__ = name
        made.check("they meet", hint="Wait.")(look)

    for name in ("a", "b", "c"):
        meeting(name)
    report = await examine(world.subject(), made.checks, timeout_s=5)
    assert report.healthy


async def test_shared_query_runs_once_and_survives_timeout(world: World) -> None:
    asked, answer = 0, asyncio.Event()

    async def slow() -> dict[str, bytes]:
        nonlocal asked
        asked += 1
        await answer.wait()
        return {"batch": b""}

    world.kafka.audit_news = slow  # type: ignore[method-assign]
    subject = world.subject()
    impatient = asyncio.create_task(subject.audit_news())
    patient = asyncio.create_task(subject.audit_news())
    while not asked:
        await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.gather(impatient, return_exceptions=True)
    answer.set()
    assert await patient == {"batch": b""}
    assert asked == 1


async def test_closed_subject_leaves_no_task(world: World) -> None:
    async def never() -> dict[str, bytes]:
        await asyncio.Event().wait()
        return {}

    world.kafka.audit_news = never  # type: ignore[method-assign]
    before = asyncio.all_tasks()
    report = await world.examine(timeout_s=0.05)
    assert "no answer within" in {one.name: one.found for one in report.outcomes}["audit-fresh"]
    assert asyncio.all_tasks() == before


async def test_failure_of_shared_query_reaches_all(world: World) -> None:
    world.kafka.failure = KafkaUnavailable("gone")
    report = await world.examine()
    assert sum(one.level is CheckLevel.UNKNOWN for one in report.outcomes) > 5


def test_long_details_are_shortened() -> None:
    assert shortened(["a"] * 20) == ("a",) * 20
    assert shortened([str(n) for n in range(100)])[-1] == "… and 81 more"
    assert len(shortened(["a"] * 100)) == 20


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
    sections = dict.fromkeys(f"{check.section}:" for check in CHECKS)
    assert [line for line in lines if not line.startswith(" ")] == list(sections)
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
