"""The installation under attack, and the rows of the table of results."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator

import pytest

from tests.kit.memory import MemoryHarness
from tests.security.installation import Installation
from tests.security.security_table import ROWS, row_of


@pytest.fixture(params=[1, 2], ids=["one proxy", "two proxies"], scope="module")
async def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Installation]:
    """An installation for the tests of one file."""
    world = MemoryHarness()
    made = Installation(world, tmp_path_factory.mktemp("installation"))
    try:
        await made.start(request.param)
        yield made
    finally:
        await made.close()
        await world.close()


# --- the table -------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Begin with no rows."""
    config.stash[ROWS] = set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the test of the page run when all rows are there."""
    items.sort(key=lambda item: item.path.name == "test_table.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the row of a test that has passed."""
    report = yield
    number = getattr(getattr(item, "module", None), "CLASS", None)
    if number is not None and report.when == "call" and report.passed:
        item.config.stash[ROWS].add(row_of(item, number, dict(report.user_properties)))
    return report
