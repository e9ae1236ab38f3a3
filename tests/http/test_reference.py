"""The reference pages that are committed are those that the code makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from txbroker.config.settings import Settings
from txbroker.errors import request_errors
from txbroker.proxy.http.api import operations
from txbroker.proxy.reference import pages, write

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize("name", sorted(pages()))
def test_page_is_current(name: str) -> None:
    committed = (REFERENCE / name).read_text(encoding="utf-8")
    assert committed == pages()[name], "run python -m txbroker.proxy.reference"


def test_reference_is_complete(tmp_path: Path) -> None:
    write(tmp_path / "reference")
    made = {path.name: path.read_text() for path in (tmp_path / "reference").iterdir()}
    assert all(f"`{name}`" in made["settings.md"] for name in Settings.model_fields)
    assert all(f"`{code}`" in made["errors.md"] for code in request_errors())
    assert all(f"{one.method} {one.path}" in made["http.md"] for one in operations())
