"""Runs the checks in parallel, each with a timeout, and reports their results."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
from msgspec import Struct

from txbroker import __version__
from txbroker.cli.doctor import checks_access, checks_kafka, checks_proxies, checks_relays
from txbroker.cli.doctor.findings import CheckLevel, DoctorCheck, DoctorResult, Finding, unknown
from txbroker.cli.doctor.outbox import RelayTargets
from txbroker.cli.doctor.subject import NotAllowed, Subject, Unavailable
from txbroker.cli.output import clock, printable
from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.urls import from_url
from txbroker.errors import KafkaUnavailable, TxbrokerError
from txbroker.relay.capture.plan import open_capture

CHECKS = (
    *checks_kafka.book.checks,
    *checks_kafka.topics_book.checks,
    *checks_proxies.proxies_book.checks,
    *checks_proxies.groups_book.checks,
    *checks_proxies.transactions_book.checks,
    *checks_proxies.kafka_book.checks,
    *checks_proxies.audit_book.checks,
    *checks_access.settings_book.checks,
    *checks_access.proxies_book.checks,
)
"""The checks of an installation of proxies."""
RELAY_CHECKS = (
    *checks_relays.book.checks,
    *checks_relays.capture_book.checks,
    *checks_relays.kafka_book.checks,
)
"""The checks of an outbox and of a capture, where they are named."""
_KAFKA = ("kafka-reachable", "kafka-brokers", "kafka-version")


class DoctorScope(NamedTuple):
    """The checks to run, and an outbox and a capture for those that need them."""

    checks: Sequence[DoctorCheck]
    relays: RelayTargets


def scope_of(database: str | None, capture: Path | None, *, proxies: bool) -> DoctorScope:
    """Return the checks to run.

    Args:
        database: the URL of that of an outbox.
        capture: the mapping file of a capture.
        proxies: whether proxies are named.

    Raises:
        ConfigurationError: the URL or file is malformed, or the driver is not installed.
    """
    if database is None and capture is None:
        return DoctorScope(CHECKS, RelayTargets())
    checks = [check for check in CHECKS if proxies or check.name in _KAFKA]
    checks += [] if database is None else checks_relays.book.checks
    checks += [] if capture is None else checks_relays.capture_book.checks
    checks += checks_relays.kafka_book.checks
    targets = RelayTargets(
        None if database is None else from_url(database),
        None if capture is None else open_capture(str(capture)),
    )
    return DoctorScope(checks, targets)


TIMEOUT_S = 15.0
"""Timeout of a check, and about that of all, because they run in parallel."""


class DoctorReport(Struct, frozen=True):
    """The results of all checks, and the time of the run in seconds since 1970."""

    at_s: float
    outcomes: tuple[DoctorResult, ...]

    @property
    def healthy(self) -> bool:
        """True if no check fails or is unknown."""
        return not any(one.level in (CheckLevel.FAILS, CheckLevel.UNKNOWN) for one in self.outcomes)

    def count(self, level: CheckLevel) -> int:
        """Return the number of checks at this level."""
        return sum(one.level is level for one in self.outcomes)


async def examine(
    subject: Subject, checks: Sequence[DoctorCheck], timeout_s: float = TIMEOUT_S
) -> DoctorReport:
    """Run checks and return their results in order. Never raises."""
    at_s = time.time()
    ran = await asyncio.gather(*(_run(check, subject, timeout_s) for check in checks))
    by_name = {outcome.name: outcome for outcome, _looked in ran}
    return DoctorReport(
        at_s,
        tuple(
            outcome if looked else _unknown_if_needs_fail(outcome, check, by_name)
            for check, (outcome, looked) in zip(checks, ran, strict=True)
        ),
    )


async def _run(check: DoctorCheck, subject: Subject, timeout_s: float) -> tuple[DoctorResult, bool]:
    """Return a check's result, and True if it could read its facts."""
    began = time.monotonic()
    looked = False
    try:
        async with asyncio.timeout(timeout_s):
            finding = await check.look(subject)
        looked = True
    except NotAllowed as error:
        looked = True
        finding = unknown(str(error))
    except (KafkaUnavailable, DatabaseUnavailable, Unavailable, TimeoutError) as error:
        # Neither a failure nor a success is known, unless the answer itself is the finding.
        why = str(error) or f"no answer within {timeout_s:g} s"
        finding = Finding(CheckLevel.FAILS, why) if check.reaches else unknown(why)
    except TxbrokerError as error:
        finding = Finding(CheckLevel.FAILS, str(error))
    except Exception as error:
        # A bug in one check must not hide the results of others.
        finding = Finding(
            CheckLevel.FAILS, f"this check is broken: {type(error).__name__}: {error}"
        )
    return _outcome(check, finding, time.monotonic() - began), looked


def _outcome(check: DoctorCheck, finding: Finding, seconds: float) -> DoctorResult:
    return DoctorResult(
        name=check.name,
        section=check.section,
        title=check.title,
        level=finding.level,
        found=finding.found,
        details=finding.details,
        hint="" if finding.level in (CheckLevel.OK, CheckLevel.UNKNOWN) else check.hint,
        doc=check.doc,
        seconds=seconds,
    )


def _unknown_if_needs_fail(
    outcome: DoctorResult, check: DoctorCheck, by_name: Mapping[str, DoctorResult]
) -> DoctorResult:
    """Return the result as unknown if a check that it depends on fails."""
    for name in check.needs:
        if name in by_name and by_name[name].level is CheckLevel.FAILS:
            finding = Finding(CheckLevel.UNKNOWN, f"could not be checked, see {name}")
            return _outcome(check, finding, outcome.seconds)
    return outcome


class _Shown(NamedTuple):
    """How a level is shown: sign and colour on a terminal, word elsewhere, number in metrics."""

    sign: str
    colour: str
    word: str
    number: int


_SHOWN = {
    CheckLevel.OK: _Shown("✓", "green", "ok     ", 0),
    CheckLevel.WARNING: _Shown("!", "yellow", "warning", 1),
    CheckLevel.FAILS: _Shown("✗", "red", "FAILS  ", 2),
    CheckLevel.UNKNOWN: _Shown("?", "magenta", "unknown", 3),
}


def table(report: DoctorReport, *, colours: bool) -> Iterator[str]:
    """Yield the report as text, with signs and colours for a terminal."""
    for section, outcomes in groupby(report.outcomes, key=lambda one: one.section):
        yield click.style(str(section), bold=True) if colours else f"{section}:"
        for one in outcomes:
            yield from _lines(one, colours)


def _lines(one: DoctorResult, colours: bool) -> Iterator[str]:
    shown = _SHOWN[one.level]
    if colours:
        mark, hint, see = click.style(shown.sign, fg=shown.colour, bold=True), "→ ", "  "
    else:
        mark, hint, see = shown.word, "hint: ", "see:  "
    indent = " " * 4 if colours else " " * 10
    asked = ":" if one.level is CheckLevel.OK else "?"
    yield f"  {mark} {one.name}: {one.title}{asked} {printable(one.found)}"
    for line in one.details:
        yield f"{indent}- {printable(line)}"
    if one.hint:
        yield f"{indent}{hint}{one.hint}"
        yield f"{indent}{see}{one.doc}"


def summary(report: DoctorReport) -> str:
    """Return the number of checks at each level."""
    counted = [
        (report.count(CheckLevel.OK), "ok"),
        (report.count(CheckLevel.WARNING), "warnings"),
        (report.count(CheckLevel.FAILS), "failing"),
        (report.count(CheckLevel.UNKNOWN), "unknown"),
    ]
    return ", ".join(f"{count} {what}" for count, what in counted if count) + "."


def as_json(report: DoctorReport) -> str:
    data = {
        "healthy": report.healthy,
        "at": clock(round(report.at_s * 1000)),
        "version": __version__,
        "counts": {level.value: report.count(level) for level in CheckLevel},
        "checks": [
            msgspec.to_builtins(one) | {"seconds": round(one.seconds, 3)} for one in report.outcomes
        ],
    }
    return json.dumps(data, indent=2, ensure_ascii=False)


def as_prometheus(report: DoctorReport) -> Iterator[str]:
    """Yield the lines of a file for the textfile collector of Prometheus' node exporter."""
    yield ("# HELP txbroker_doctor_check Result of a check: 0 ok, 1 warning, 2 fails, 3 unknown.")
    yield "# TYPE txbroker_doctor_check gauge"
    for one in report.outcomes:
        yield f"txbroker_doctor_check{_labels(one)} {_SHOWN[one.level].number}"
    yield "# HELP txbroker_doctor_check_seconds Duration of a check."
    yield "# TYPE txbroker_doctor_check_seconds gauge"
    for one in report.outcomes:
        yield f"txbroker_doctor_check_seconds{_labels(one)} {one.seconds:.3f}"
    yield "# HELP txbroker_doctor_healthy 1 if nothing fails, else 0."
    yield "# TYPE txbroker_doctor_healthy gauge"
    yield f"txbroker_doctor_healthy {int(report.healthy)}"
    yield "# HELP txbroker_doctor_timestamp_seconds Time of the report, seconds since 1970."
    yield "# TYPE txbroker_doctor_timestamp_seconds gauge"
    yield f"txbroker_doctor_timestamp_seconds {report.at_s:.3f}"


def _labels(one: DoctorResult) -> str:
    return f'{{check="{one.name}",section="{one.section.lower()}"}}'
