"""Checks run in parallel, and no error hides another check."""

from __future__ import annotations

import asyncio

from msgspec import structs

from tests.kit.doctor import World
from txbroker.cli.doctor.findings import (
    CheckLevel,
    CheckRegistry,
    DoctorCheck,
    Finding,
    Section,
    fine,
    shortened,
)
from txbroker.cli.doctor.report import examine
from txbroker.cli.doctor.subject import Subject, Unavailable
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
        "hangs": (CheckLevel.FAILS, "not known within 0.05 s"),
        "blind": (CheckLevel.FAILS, "nothing to see"),
    }
    assert {one.name: one.hint for one in report.outcomes if one.hint} == {
        "breaks": "Report it.",
        "hangs": "Wait.",
        "blind": "Help it.",
    }


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
    assert "not known within" in {one.name: one.found for one in report.outcomes}["audit-fresh"]
    assert asyncio.all_tasks() == before


async def test_failure_of_shared_query_reaches_all(world: World) -> None:
    world.kafka.failure = KafkaUnavailable("gone")
    report = await world.examine()
    assert sum(one.level is CheckLevel.UNKNOWN for one in report.outcomes) > 5


def test_long_details_are_shortened() -> None:
    assert shortened(["a"] * 20) == ("a",) * 20
    assert shortened([str(n) for n in range(100)])[-1] == "… and 81 more"
    assert len(shortened(["a"] * 100)) == 20
