"""`txbroker audit` in a process of its own, as operators call it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyspark
from planting import Expected, Planting

from txbroker.cli import submit
from txbroker.spark.java import java_home
from txbroker.spark.schema import RunSummary

TIMEOUT_S = 240.0
QUICK = (
    "--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "--conf", "spark.sql.shuffle.partitions=2",
)  # fmt: skip
OLD = ("--late-after-s", "3600", "--lost-after-s", "7200")
"""Nothing that a test plants is late."""


class Ended(NamedTuple):
    """How it ended."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> RunSummary:
        """What it wrote to stdout, which is one run as JSON."""
        assert self.out, self.err
        return msgspec.json.decode(self.out, type=RunSummary)


def command(planting: Planting, data_dir: Path, *options: str) -> list[str]:
    """Return the command line of an audit of what was planted."""
    return [
        sys.executable, "-m", "txbroker.cli.submit", "run", "--kafka", planting.bootstrap,
        "--topic-prefix", planting.prefix, "--data-dir", str(data_dir), "-o", "json",
        *OLD, *QUICK, *options,
    ]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    """Return the environment without settings of the one who calls the tests."""
    return {k: v for k, v in os.environ.items() if not k.startswith("TXBROKER_")} | more


def audit(planting: Planting, data_dir: Path, *options: str, **more: str) -> Ended:
    """Audit what was planted, called in the data folder, and wait for the end."""
    done = subprocess.run(
        command(planting, data_dir, *options),
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment(**more),
        cwd=data_dir,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)


def submitted(planting: Planting, data_dir: Path, *conf: str) -> Ended:
    """Audit what was planted with a Spark that was there before us, as `spark-submit` starts it.

    Args:
        conf: settings of Spark's, as `spark.NAME=VALUE`.
    """
    home = Path(pyspark.__file__).parent
    options = [word for each in (*conf, *QUICK[1::2]) for word in ("--conf", each)]
    # What comes after the file is ours; how Spark is started is said before it.
    ours = command(planting, data_dir)[3 : -len(QUICK)]
    done = subprocess.run(
        [home / "bin/spark-submit", "--master", "local[2]", *options, submit.__file__, *ours],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=data_dir,
        env=environment(
            SPARK_HOME=str(home), PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1",
            JAVA_HOME=str(java_home() or ""),
        ),
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)


def drift_of(expected: Iterable[Expected]) -> dict[str, int]:
    """Return how many transactions have each finding, where nothing is old enough to be late.

    Nor is a copy of a parked one, which follows its marker in a turn of its own.
    """
    found = Counter(
        name
        for each in expected
        for name in each.findings
        if (each.state, name) != ("parked", "not_kept")
    )
    return {name: count for name, count in found.items() if name not in ("late", "lost")}
