"""What a check is, and what it finds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from txbroker.cli.doctor.subject import Subject

MANUAL = "docs/how-to/doctor.md"


class CheckLevel(StrEnum):
    """How it stands with what was looked at, the best first."""

    OK = "ok"
    WARNING = "warning"
    """Works, but somebody should look at it."""
    UNKNOWN = "unknown"
    """Could not be looked at, because something else fails that is named."""
    FAILS = "fails"


class Section(StrEnum):
    """What belongs together, in the order in which it is shown."""

    KAFKA = "Kafka"
    TOPICS = "Topics"
    PROXIES = "Proxies"
    GROUPS = "Groups"
    TRANSACTIONS = "Transactions"
    AUDIT = "Audit"
    ACCESS = "Access"


class Finding(Struct, frozen=True):
    """What a check has found: a sentence, and lines on each thing that is not well."""

    level: CheckLevel
    found: str
    details: tuple[str, ...] = ()


class DoctorCheck(Struct, frozen=True):
    """One thing that is looked at.

    Attributes:
        name: unique; what machines know it by.
        title: what is asked for, in words.
        hint: what to do where it is not well.
        doc: where more is written about it.
        needs: the checks without which this one cannot look: where one of them fails, this one
            is not blamed.
        look: looks, and raises where it cannot.
    """

    name: str
    section: Section
    title: str
    hint: str
    doc: str
    needs: tuple[str, ...]
    look: Callable[[Subject], Awaitable[Finding]]


class CheckResult(Struct, frozen=True):
    """A check and what became of it; `hint` "" where there is nothing to do about it."""

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
    """The checks of one section, in the order in which they were written down."""

    def __init__(self, section: Section, needs: Sequence[str] = ()) -> None:
        self._section = section
        self._needs = tuple(needs)
        self.checks: list[DoctorCheck] = []

    def check(self, title: str, *, hint: str, doc: str = "") -> Callable[[Look], Look]:
        """Enter a function as a check; its name is the check's.

        Args:
            title: what is asked for.
            hint: what to do where it is not well.
            doc: a page with more about it, the manual's section where it is not given.
        """

        def enter(look: Look) -> Look:
            name = look.__name__.replace("_", "-")
            page = doc or f"{MANUAL}#{self._section.lower()}"
            needs = tuple(need for need in self._needs if need != name)
            self.checks.append(DoctorCheck(name, self._section, title, hint, page, needs, look))
            return look

        return enter


def fine(found: str) -> Finding:
    """Return that all is well."""
    return Finding(CheckLevel.OK, found)


def judged(level: CheckLevel, found: str, details: Sequence[str] = ()) -> Finding:
    """Return a finding with its details, at most as many as somebody reads."""
    return Finding(level, found, shortened(details))


DETAILS_MAX = 20


def shortened(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the first lines, and how many are left out."""
    if len(lines) <= DETAILS_MAX:
        return tuple(lines)
    return (*lines[: DETAILS_MAX - 1], f"… and {len(lines) - DETAILS_MAX + 1} more")
