"""Tables in each format: changed by runs, compacted and expired; the same cases for all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pyspark
import pytest

from tests.spark.audit_process import environment
from tests.spark.table_cases import (
    CASES,
    FIRST,
    MERGED_CASES,
    Case,
    add,
    files,
    new_store,
    settled,
    transactions,
)
from txbroker.errors import ConfigurationError
from txbroker.spark.launch.versions import series
from txbroker.spark.storage.local import LocalStorage
from txbroker.spark.tables.formats import MERGED
from txbroker.spark.tables.store import TableStore, open_store
from txbroker.spark.tables.upkeep import compact

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TIMEOUT_S = 900.0
HERE = sorted(name for name, form in MERGED.items() if series(pyspark.__version__) in form.packages)
"""The formats that have a package for this Spark."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_parquet_tables(spark: SparkSession, tmp_path: Path, case: Case) -> None:
    case(spark, new_store(spark, tmp_path, "parquet"))


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("name", HERE)
def test_merged_tables(tmp_path: Path, name: str) -> None:
    """In another Spark, which loads the format's package."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.table_cases", name, str(tmp_path)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [case.__name__ for case in MERGED_CASES]


@pytest.mark.parametrize(
    "killed",
    [(TableStore, "conclude"), (TableStore, "apply"), (LocalStorage, "remove")],
    ids=lambda killed: killed[1],
)
def test_killed_compaction_loses_and_doubles_nothing(
    spark: SparkSession, tmp_path: Path, killed: tuple[object, str]
) -> None:
    """Before it counts, before it is applied, and after its renames."""
    tables = new_store(spark, tmp_path, "parquet")
    for run in "12":
        add(tables, spark, run, settled(run, FIRST, run))
    before = transactions(tables)
    # First it removes what a killed one has left.
    effects = [None, KeyboardInterrupt] if killed[1] == "remove" else KeyboardInterrupt
    with patch.object(*killed, side_effect=effects), pytest.raises(KeyboardInterrupt):
        compact(spark, tables.out, tmp_path)
    compact(spark, tables.out, tmp_path)
    assert transactions(tables) == before
    assert files(tables) == {FIRST: 1}
    assert tables.staged_runs() == []


@pytest.mark.parametrize("name", sorted(MERGED))
def test_missing_package_is_named(spark: SparkSession, tmp_path: Path, name: str) -> None:
    package = MERGED[name].packages.get(series(spark.version))
    reason = f"has no package for Spark {spark.version}" if package is None else f"={package}$"
    with pytest.raises(ConfigurationError, match=reason):
        open_store(spark, str(tmp_path), "shop", name)


def test_upkeep_needs_tables(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="name the output folder of audits with --out"):
        compact(spark, str(tmp_path / "out"), tmp_path)


def test_upkeep_needs_rights(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(ConfigurationError, match="data cannot be used: "):
        compact(spark, str(tmp_path / "out"), tmp_path / "data")
