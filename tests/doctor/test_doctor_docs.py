"""The manual lists every check, and every link of a check leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from txbroker.cli.doctor.findings import MANUAL, DoctorCheck
from txbroker.cli.doctor.report import CHECKS, RELAY_CHECKS

ROOT = Path(__file__).parents[2]
ALL = (*CHECKS, *RELAY_CHECKS)


def rows() -> list[tuple[str, str, str]]:
    """Return section, name and title of each check in the manual."""
    found, section = [], ""
    for line in (ROOT / MANUAL).read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif match := re.fullmatch(r"\| `([a-z-]+)` \| (.*?) \| .+ \|", line):
            found.append((section, match[1], match[2]))
    return found


def test_manual_lists_the_checks() -> None:
    assert rows() == [(str(one.section), one.name, one.title) for one in ALL]


def test_names_are_unique_and_hints_are_sentences() -> None:
    assert len({one.name for one in ALL}) == len(ALL)
    assert [one.name for one in ALL if not re.fullmatch(r"[A-Z`].*\.", one.hint)] == []
    known = {one.name for one in ALL}
    assert [one.name for one in ALL if not known.issuperset(one.needs)] == []


@pytest.mark.parametrize("check", ALL, ids=lambda one: one.name)
def test_every_link_exists(check: DoctorCheck) -> None:
    page, _, anchor = check.doc.partition("#")
    text = (ROOT / page).read_text()
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    assert not anchor or anchor in headings
