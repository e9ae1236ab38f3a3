"""The page matches the results of this folder's tests; this runs after them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.security.security_table import CLASSES, PAGE, ROWS, WRITE, page_of, rows_in


@pytest.mark.full
def test_page_matches_the_results(request: pytest.FixtureRequest) -> None:
    seen = request.config.stash[ROWS]
    if os.environ.get(WRITE):
        PAGE.write_text(page_of(seen))
    page = PAGE.read_text()
    assert rows_in(page_of(seen)) <= rows_in(page), "run `make security-table`"
    folder = Path(__file__).parent
    ran = {item.path for item in request.session.items if item.path.parent == folder}
    if ran == set(folder.glob("test_*.py")) and not request.config.option.keyword:
        assert page_of(seen) == page, "run `make security-table`"
        assert {row.number for row in seen} == set(CLASSES)
