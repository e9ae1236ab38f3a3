"""The dbt package: its sources are the tables, and dbt runs it on tables that an audit wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.spark.table_cases import new_store, rows_of
from txbroker.spark.tables.layout import DRIFT, RUNS, TABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGE = Path(__file__).parents[2] / "spark/dbt"
VERSIONS = ("dbt-core>=1.10.5,<1.11", "dbt-duckdb<1.11")
"""They need newer packages than pyspark allows, so the test gives them a venv."""
PROFILE = {"txbroker": {"target": "t", "outputs": {"t": {"type": "duckdb", "path": ":memory:"}}}}
CHECKS = ("no_open_critical_findings", "newest_run_is_young")


def test_sources_are_the_tables() -> None:
    (source,) = yaml.safe_load((PACKAGE / "models/sources.yml").read_text())["sources"]
    columns = {
        table["name"]: {column["name"] for column in table["columns"]} for table in source["tables"]
    }
    assert columns.keys() == {table.name for table in TABLES}
    for table in TABLES:
        declared = {part.split()[0] for part in table.ddl.split(",") if part.strip()}
        assert columns[table.name] <= declared
    assert {path.stem for path in (PACKAGE / "tests").glob("*.sql")} == {*CHECKS}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_dbt_runs_it(spark: SparkSession, tmp_path: Path) -> None:
    """First on tables of which most have no rows, then with a critical finding, acknowledged and
    not, and with an old run."""
    dbt = Dbt(tmp_path)
    store = new_store(spark, tmp_path, "parquet")
    now = datetime.now(UTC)

    def write(run: str, began_at: datetime, until: datetime | None = None, **found: Any) -> None:
        row = {"run": run, "mode": "full", "began_at": began_at, "day": began_at.date()}
        store.stage(run, RUNS, rows_of(spark, RUNS, row))
        if found:
            finding = {"id": run, "kind": "lost", "state": "open", "day": now.date(), **found}
            finding["acknowledged_until"] = until
            store.stage(run, DRIFT, rows_of(spark, DRIFT, finding))
        store.apply(run)

    write("1", now - timedelta(hours=30))
    assert dbt.failed() == {"newest_run_is_young"}
    assert not dbt.is_fresh()
    write("2", now, severity="warning")
    write("3", now, now + timedelta(days=1), severity="critical")
    assert dbt.failed() == set()
    assert dbt.is_fresh()
    write("4", now, now - timedelta(days=1), severity="critical")
    assert dbt.failed() == {"no_open_critical_findings"}


class Dbt:
    """dbt in a new venv, for the tables in the folder `out`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        venv = folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([venv / "bin/pip", "install", "-q", *VERSIONS], check=True)
        self._dbt = venv / "bin/dbt"
        (folder / "profiles.yml").write_text(yaml.safe_dump(PROFILE))

    def failed(self) -> set[str]:
        """Return the tests that fail."""
        done = self._run("test")
        written = json.loads((self._folder / "target/run_results.json").read_text())
        results = {each["unique_id"].split(".")[2]: each["status"] for each in written["results"]}
        assert {*CHECKS} <= results.keys(), done.stdout
        failed = {name for name, status in results.items() if status != "pass"}
        assert done.returncode == bool(failed), done.stdout
        return failed

    def is_fresh(self) -> bool:
        return self._run("source", "freshness").returncode == 0

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        location = {"audit_location": str(self._folder / "out")}
        options = ["--project-dir", PACKAGE, "--profile", "txbroker"]
        options += ["--profiles-dir", self._folder, "--vars", json.dumps(location)]
        return subprocess.run(
            [self._dbt, *command, *options],
            capture_output=True, text=True, check=False, cwd=self._folder,
            env=os.environ | {
                "DBT_TARGET_PATH": str(self._folder / "target"),
                "DBT_LOG_PATH": str(self._folder / "logs"),
                "DBT_SEND_ANONYMOUS_USAGE_STATS": "false",
            },
        )  # fmt: skip
