"""Checks and their findings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from txbroker.diagnosis.rows import Diagnosis

if TYPE_CHECKING:
    from txbroker.cli.doctor.subject import Subject

MANUAL = "docs/how-to/doctor.md"


class CheckLevel(StrEnum):
    """The level of a finding, the best first."""

    OK = "ok"
    WARNING = "warning"
    """Works, but needs attention."""
    UNKNOWN = "unknown"
    """Could not be checked, because another check fails, or the doctor lacks a right."""
    FAILS = "fails"


class Section(StrEnum):
    """The sections of the report, in order."""

    KAFKA = "Kafka"
    TOPICS = "Topics"
    PROXIES = "Proxies"
    GROUPS = "Groups"
    TRANSACTIONS = "Transactions"
    AUDIT = "Audit"
    ACCESS = "Access"
    RELAYS = "Relays"


class Finding(Struct, frozen=True):
    """A check's finding: a sentence, and a line for each problem."""

    level: CheckLevel
    found: str
    details: tuple[str, ...] = ()


class DoctorCheck(Struct, frozen=True):
    """A check.

    Attributes:
        name: unique id, for programs.
        title: the condition that should hold.
        hint: the remedy.
        doc: page with more information.
        needs: checks that this one depends on: if one fails, this one's result is unknown.
        reaches: whether no answer is a failure; of all others the result is unknown then.
        look: returns the finding; raises if the facts cannot be read.
    """

    name: str
    section: Section
    title: str
    hint: str
    doc: str
    needs: tuple[str, ...]
    reaches: bool
    look: Callable[[Subject], Awaitable[Finding]]


class DoctorResult(Struct, frozen=True):
    """A check's result; `hint` is "" without a remedy."""

    name: str
    section: Section
    title: str
    level: CheckLevel
    found: str
    details: tuple[str, ...]
    hint: str
    doc: str
    seconds: float


Look = Callable[["Subject"], Awaitable[Finding]]


class CheckRegistry:
    """The checks of one section, in order of definition."""

    def __init__(self, section: Section, needs: Sequence[str] = ()) -> None:
        self._section = section
        self._needs = tuple(needs)
        self.checks: list[DoctorCheck] = []

    def check(
        self, title: str, *, hint: str, doc: str = "", reaches: bool = False
    ) -> Callable[[Look], Look]:
        """Return the decorator that registers a function as the check of its name."""

        def register(look: Look) -> Look:
            name = look.__name__.replace("_", "-")
            page = doc or f"{MANUAL}#{self._section.lower()}"
            needs = tuple(need for need in self._needs if need != name)
            check = DoctorCheck(name, self._section, title, hint, page, needs, reaches, look)
            self.checks.append(check)
            return look

        return register

    def diagnosis(self, row: Diagnosis) -> Callable[[Look], Look]:
        """Return the decorator that registers a function as the check for a condition."""
        hint = f"Run `{row.show}`. {row.todo}" if row.show else row.todo
        return self.check(row.holds, hint=hint, doc=row.runbook)


def unknown(why: str, details: Sequence[str] = ()) -> Finding:
    """Return the finding of a check whose evidence is incomplete."""
    return judged(CheckLevel.UNKNOWN, f"not known: {why}", details)


def fine(found: str) -> Finding:
    """Return a finding without problems."""
    return Finding(CheckLevel.OK, found)


def judged(level: CheckLevel, found: str, details: Sequence[str] = ()) -> Finding:
    """Return a finding with its first details."""
    return Finding(level, found, shortened(details))


DETAILS_MAX = 20


def shortened(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the first lines, and the number of the others."""
    if len(lines) <= DETAILS_MAX:
        return tuple(lines)
    return (*lines[: DETAILS_MAX - 1], f"… and {len(lines) - DETAILS_MAX + 1} more")
