"""Reports: text, JSON, and Prometheus' textfile collector."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby

import click

from txbroker import __version__
from txbroker.cli.doctor.findings import CheckLevel, CheckResult
from txbroker.cli.doctor.runner import DoctorReport
from txbroker.cli.output import clock, printable

_MARKS = {
    CheckLevel.OK: ("✓", "green"),
    CheckLevel.WARNING: ("!", "yellow"),
    CheckLevel.UNKNOWN: ("?", "magenta"),
    CheckLevel.FAILS: ("✗", "red"),
}
_WORDS = {
    CheckLevel.OK: "ok     ",
    CheckLevel.WARNING: "warning",
    CheckLevel.UNKNOWN: "unknown",
    CheckLevel.FAILS: "FAILS  ",
}
_NUMBERS = {CheckLevel.OK: 0, CheckLevel.WARNING: 1, CheckLevel.FAILS: 2, CheckLevel.UNKNOWN: 3}


def table(report: DoctorReport, *, colours: bool) -> Iterator[str]:
    """Yield the report as text, with signs and colours for a terminal."""
    for section, outcomes in groupby(report.outcomes, key=lambda one: one.section):
        yield click.style(str(section), bold=True) if colours else f"{section}:"
        for one in outcomes:
            yield from _lines(one, colours)


def _lines(one: CheckResult, colours: bool) -> Iterator[str]:
    if colours:
        sign, colour = _MARKS[one.level]
        mark, hint, see = click.style(sign, fg=colour, bold=True), "→ ", "  "
    else:
        mark, hint, see = _WORDS[one.level], "hint: ", "see:  "
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
    """Return the report as JSON."""
    data = {
        "healthy": report.healthy,
        "at": clock(round(report.at_s * 1000)),
        "version": __version__,
        "counts": {level.value: report.count(level) for level in CheckLevel},
        "checks": [
            {
                "name": one.name,
                "section": one.section.value,
                "title": one.title,
                "level": one.level.value,
                "found": one.found,
                "details": list(one.details),
                "hint": one.hint,
                "doc": one.doc,
                "seconds": round(one.seconds, 3),
            }
            for one in report.outcomes
        ],
    }
    return json.dumps(data, indent=2, ensure_ascii=False)


def as_prometheus(report: DoctorReport) -> Iterator[str]:
    """Yield the lines of a file for the textfile collector of Prometheus' node exporter."""
    yield ("# HELP txbroker_doctor_check Result of a check: 0 ok, 1 warning, 2 fails, 3 unknown.")
    yield "# TYPE txbroker_doctor_check gauge"
    for one in report.outcomes:
        yield f"txbroker_doctor_check{_labels(one)} {_NUMBERS[one.level]}"
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


def _labels(one: CheckResult) -> str:
    return f'{{check="{one.name}",section="{one.section.lower()}"}}'
