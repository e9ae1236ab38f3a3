"""What all tests share."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from xdist.scheduler import LoadScopeScheduling

from txbroker.embedded import DEFAULT_VERSION, EmbeddedKafka

if TYPE_CHECKING:
    from tests.databases.places import Place
    from tests.kit.database_servers import MariaServer, PostgresServer

_FULL = frozenset(
    """alerts chart cluster e2e embedded faults kafka lint operate secure simulator spark
    versions""".split()  # noqa: SIM905
)
"""Folders whose tests take processes, a cluster, Spark or long: `make test` leaves them out."""
_SERVERS = ("kafka", "mariadb_server", "postgres_server")
"""Fixtures, also as parameters, whose tests `make test` leaves out."""


@pytest.fixture(scope="session")
def kafka() -> Iterator[EmbeddedKafka]:
    """One real Kafka for the whole session, started by the first test that asks for it."""
    version = os.environ.get("TXBROKER_TEST_KAFKA_VERSION", DEFAULT_VERSION)
    with EmbeddedKafka(version=version) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One PostgreSQL for the whole session; a test that ends or pauses it starts it again."""
    from tests.kit.database_servers import PostgresServer

    # A killed process loses nothing that the system has.
    with PostgresServer(wal_level="logical", fsync="off") as server:
        yield server


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariaServer]:
    """One MariaDB for the whole session; a test that ends or pauses it starts it again."""
    from tests.kit.database_servers import MariaServer

    with MariaServer() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_place(postgres_server: PostgresServer) -> Place:
    """One database of PostgreSQL, with tables."""
    from tests.databases.places import Place, with_tables

    return with_tables(Place(postgres_server.create_database()))


@pytest.fixture(scope="session")
def mariadb_place(mariadb_server: MariaServer) -> Place:
    """One database of MariaDB, with tables."""
    from tests.databases.places import Place, with_tables

    return with_tables(Place(mariadb_server.create_database()))


_KINDS = [
    "sqlite",
    pytest.param("postgresql", marks=pytest.mark.full),
    pytest.param("mariadb", marks=pytest.mark.full),
]


@pytest.fixture(params=_KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each kind of database, with tables."""
    from tests.databases.places import place_of

    return place_of(request, tmp_path, request.param)


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A test that sets logging up writes to its own stderr; the next test has another one."""
    root, settings = logging.getLogger(), structlog.get_config()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**settings)


@pytest.fixture
async def loop_faults() -> AsyncIterator[list[str]]:
    """Errors that only the exception handler of the event loop sees."""
    found: list[str] = []
    gc.collect()
    earlier = asyncio.all_tasks()  # so that none that a test left is destroyed in this one
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: found.append(str(context)))
    yield found
    loop.set_exception_handler(None)
    del earlier


# --- tests that need what pip does not bring --------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers, and let no user's umask open the files that tests write."""
    os.umask(0o022)
    # xdist sets it for its processes; commands would take it for a terminal's width.
    os.environ.pop("COLUMNS", None)
    config.addinivalue_line(
        "markers", "needs_tool(name): calls a program that `make tools` installs"
    )
    config.addinivalue_line("markers", "rule(number, …): covers rules of docs/reference/rules.md")
    config.addinivalue_line("markers", "needs_root: does what only root may")
    config.addinivalue_line("markers", "long: takes minutes; `make test-long` runs it")
    config.addinivalue_line("markers", "full: `make test-all` runs it, `make test` does not")
    config.addinivalue_line("markers", "quick: `make test` runs it although it is a full one")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the full tests."""
    folder = item.path.parent.name
    fixtures = getattr(item, "fixturenames", ())
    real = any(name in fixtures or f"[{name}" in item.name for name in _SERVERS)
    tool = item.get_closest_marker("needs_tool") is not None
    if (folder in _FULL or real or tool) and not item.get_closest_marker("quick"):
        item.add_marker("full")
    if folder == "spark":  # on a busy machine; a marker at the test counts first
        item.add_marker(pytest.mark.timeout(300), append=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests of minutes to `make test-long`."""
    if os.environ.get("TXBROKER_TEST_LONG"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if item not in long]
    config.hook.pytest_deselected(items=long)


class _FileScheduling(LoadScopeScheduling):
    """Gives test processes whole files, which share fixtures, and two folders whole: Spark's tests
    share one Spark, and those of security one table."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        folder = Path(file).parent
        return str(folder) if folder.name in ("spark", "security") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Distribute files instead of tests."""
    return _FileScheduling(config, log)


def missing(item: pytest.Item) -> Iterator[str]:
    """Yield what a test needs and this machine has not, and how to come by it."""
    for marker in item.iter_markers("needs_tool"):
        if shutil.which(str(marker.args[0])) is None:
            yield f"{marker.args[0]} is missing: `make tools` installs it"
    if item.get_closest_marker("needs_root") and os.geteuid() != 0:
        yield "the rights of root are missing"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out a test that lacks something; in CI nothing may be left out unseen."""
    for what in missing(item):
        if os.environ.get("CI") == "true":
            pytest.fail(what, pytrace=False)
        pytest.skip(what)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that were left out, also those of other test processes."""
    left_out: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", ()):
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if reason.endswith(("installs it", "are missing")):
            left_out.setdefault(reason, []).append(report.nodeid)
    for reason, tests in left_out.items():
        terminalreporter.section(f"left out, as {reason}")
        for test in tests:
            terminalreporter.line(test)
