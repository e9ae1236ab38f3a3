"""`txbroker audit` in a separate process, as operators call it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyspark

from tests.kit.cli import Result
from tests.spark.planting import Planting
from txbroker.cli import submit
from txbroker.spark.launch.java import java_home
from txbroker.spark.schema import RunSummary

TIMEOUT_S = 240.0
_END_S = 30.0
QUICK = (
    "--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "--conf", "spark.sql.shuffle.partitions=2",
)  # fmt: skip
OLD = ("--late-after-s", "3600", "--lost-after-s", "7200")
"""Nothing that a test plants is late."""
REPORT = "report.html"


def summary_of(ended: Result) -> RunSummary:
    """Return the summary of a run that was printed as JSON."""
    assert ended.out, ended.err
    return msgspec.json.decode(ended.out, type=RunSummary)


class Commanded(NamedTuple):
    """One that was begun: what waits for its end, and the folder where it works."""

    ended: Callable[[], Result]
    folder: Path


def command(planting: Planting, data_dir: Path, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "txbroker.cli.submit", "run", "--kafka", planting.bootstrap,
        "--topic-prefix", planting.prefix, "--data-dir", str(data_dir), "-o", "json",
        *OLD, *QUICK, *options,
    ]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    """Return the environment without settings of the one who calls the tests."""
    return {k: v for k, v in os.environ.items() if not k.startswith("TXBROKER_")} | more


@contextlib.contextmanager
def begun(
    planting: Planting, data_dir: Path, *options: str, **more: str
) -> Iterator[Callable[[], Result]]:
    """Audit the planted topics in the data folder during the block, which gets a function that
    waits for the end."""
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        subprocess.Popen(
            command(planting, data_dir, *options),
            stdout=out, stderr=err, text=True, env=environment(**more), cwd=data_dir,
        ) as running,
    ):  # fmt: skip

        def ended() -> Result:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(TIMEOUT_S)
            written = []
            for file in (out, err):
                file.seek(0)
                written.append(file.read())
            code = running.poll()
            assert code is not None, f"it has not ended within {TIMEOUT_S:g} s: {written[1]}"
            assert "Traceback" not in written[1], written[1]
            return Result(code, *written)

        try:
            yield ended
        finally:
            running.terminate()
            try:
                running.wait(_END_S)
            except subprocess.TimeoutExpired:
                running.kill()


def audit(planting: Planting, data_dir: Path, *options: str, **more: str) -> Result:
    with begun(planting, data_dir, *options, **more) as ended:
        return ended()


def submitted(planting: Planting, data_dir: Path, *conf: str) -> Result:
    """Audit the planted topics with `spark-submit`.

    Args:
        conf: settings of Spark's, as `spark.NAME=VALUE`.
    """
    home = Path(pyspark.__file__).parent
    options = [word for each in (*conf, *QUICK[1::2]) for word in ("--conf", each)]
    # The audit's options follow the file; Spark's options precede it.
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
    return Result(done.returncode, done.stdout, done.stderr)


def drift_of(planting: Planting) -> dict[str, int]:
    """Return how many transactions have each finding, where nothing is old enough to be late, and
    how many of our records do not read.

    Nor is a copy of a parked one, which follows its marker in a separate Kafka transaction.
    """
    found = Counter(
        name
        for each in planting.expected.values()
        for name in each.findings
        if (each.state, name) != ("parked", "not_kept")
    )
    by_age = ("late", "lost", "overdue")
    drift = {name: count for name, count in found.items() if name not in by_age}
    own = planting.own_broken.total()
    return drift | ({"unreadable": own} if own else {})
