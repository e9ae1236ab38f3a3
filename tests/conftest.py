"""What all tests share."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator

import pytest
import structlog

from txbroker.embedded import DEFAULT_VERSION, EmbeddedKafka

_LEFT_OUT: dict[str, list[str]] = {}


@pytest.fixture(scope="session")
def kafka() -> Iterator[EmbeddedKafka]:
    """One real Kafka for the whole session, started by the first test that asks for it."""
    version = os.environ.get("TXBROKER_TEST_KAFKA_VERSION", DEFAULT_VERSION)
    with EmbeddedKafka(version=version) as server:
        yield server


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A test that sets logging up writes to its own stderr; the next test has another one."""
    root, settings = logging.getLogger(), structlog.get_config()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**settings)


# --- tests that need a program which pip does not bring --------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    config.addinivalue_line(
        "markers", "needs_tool(name): calls a program that `make tools` installs"
    )
    config.addinivalue_line("markers", "long: takes minutes; `make test-long` runs it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests of minutes to `make test-long`."""
    if os.environ.get("TXBROKER_TEST_LONG"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if item not in long]
    config.hook.pytest_deselected(items=long)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out a test whose program is missing; in CI nothing may be left out unseen."""
    for marker in item.iter_markers("needs_tool"):
        tool = str(marker.args[0])
        if shutil.which(tool) is not None:
            continue
        if os.environ.get("CI") == "true":
            pytest.fail(f"{tool} is missing: run `make tools`", pytrace=False)
        _LEFT_OUT.setdefault(tool, []).append(item.nodeid)
        pytest.skip(f"{tool} is missing: `make tools` installs it")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was left out."""
    for tool, tests in _LEFT_OUT.items():
        terminalreporter.section(f"{tool} is missing (`make tools` installs it); left out")
        for test in tests:
            terminalreporter.line(test)
