"""Blocks of the docs' pages, and the sessions with `txbroker` that they show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ID = re.compile(r"\b[0-9A-Z]{26}\b")


def block(page: str, language: str) -> str:
    """Return the one block of a language in a page."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return str(found)


def session(page: str) -> list[tuple[str, str]]:
    """Return the commands in the one console block of a page, without `txbroker`, and the output of
    each; they are about one transaction, whose id the first output has."""
    parts = re.split(r"^\$ txbroker ", block(page, "console"), flags=re.M)[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]
