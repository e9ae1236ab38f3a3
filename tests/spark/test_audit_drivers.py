"""A database whose driver Spark fetches from Maven Central; runs with `make test-long`."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from txbroker.core.routing import make_id

pytestmark = pytest.mark.long

DRIVER = "org.xerial:sqlite-jdbc:3.46.1.3"
PROGRAM = Path(__file__).with_name("driver_main.py")
IDS = [make_id(number % 3, 1_700_000_000_000, number) for number in range(5)]


def run(database: Path, packages: str) -> subprocess.CompletedProcess[str]:
    """Compare in a separate process: Spark loads packages only when it starts."""
    command = [sys.executable, str(PROGRAM), str(database), packages, *IDS[:4]]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """The rows of all messages but the first, and one more."""
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE orders (id TEXT PRIMARY KEY)")
        base.executemany("INSERT INTO orders VALUES (?)", [(id,) for id in IDS[1:]])
    base.close()
    return path


@pytest.mark.timeout(300)
def test_a_driver_is_fetched_as_a_package(database: Path) -> None:
    done = run(database, DRIVER)
    assert done.returncode == 0, done.stderr
    reported = json.loads(done.stdout)
    assert reported["found"] == {IDS[0]: "message_without_row", IDS[4]: "row_without_message"}
    assert reported["counts"]["rows"] == 4


@pytest.mark.timeout(300)
def test_missing_jdbc_driver_names_the_next_step(database: Path) -> None:
    done = run(database, "")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "no JDBC driver" in last
    assert "spark.jars.packages" in last
