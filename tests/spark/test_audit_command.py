"""The command under `spark-submit`, and ended half way."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pyspark
import pytest

from tests.kit.cli import until_gone
from tests.spark.audit_process import command, drift_of, environment, submitted
from tests.spark.planted_cases import Planted, plant_all
from tests.spark.planting import Planting
from txbroker.embedded import EmbeddedKafka
from txbroker.spark.journal import JOURNAL_FILE, Journal
from txbroker.spark.session import ivy_conf


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_spark_submit_runs_the_same(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    async with Planting(kafka.bootstrap) as planting:
        await plant_all(planting)
    nothing = submitted(planting, tmp_path)
    assert nothing.code == 1
    # Spark joins both outputs of its child.
    assert "Error: Spark has no Kafka connector: run spark-submit with --pack" in nothing.out
    given = ivy_conf(pyspark.__version__, tmp_path)
    ended = submitted(planting, tmp_path, *(f"{name}={value}" for name, value in given.items()))
    assert ended.code == 4, ended.out
    summary = Journal(tmp_path / JOURNAL_FILE).last()
    assert summary is not None
    assert summary.drift == drift_of(planting)


@pytest.mark.timeout(300)
def test_a_run_that_is_ended_leaves_nothing(planted: Planted, tmp_path: Path) -> None:
    with subprocess.Popen(
        command(planted.planting, tmp_path, "--master", "local[2]"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(TMPDIR=str(tmp_path)),
    ) as running:  # fmt: skip
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
        while not (found := children.read_text().split()):
            assert running.poll() is None
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=120)
    assert (running.returncode, out, err.strip()) == (130, "", "Stopped.")
    until_gone([int(pid) for pid in found])
    assert not list(tmp_path.glob("txbroker-spark-*"))
    assert Journal(tmp_path / JOURNAL_FILE).last() is None
