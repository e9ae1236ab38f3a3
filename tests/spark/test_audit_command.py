"""The command as operators call it, over topics in which everything was planted."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pyspark
import pytest
from audit_process import audit, command, drift_of, environment, submitted
from cli_world import until_gone
from planted_cases import plant_all
from planting import Planting
from topic_reader import read_topics

from txbroker.core.audit import BATCH_KEY, BATCH_TICK_KEY, decode_news
from txbroker.embedded import EmbeddedKafka
from txbroker.spark.connector import ivy_conf
from txbroker.spark.journal import JOURNAL_FILE, Journal


@pytest.fixture(scope="module")
async def planted(kafka: EmbeddedKafka) -> AsyncIterator[Planting]:
    """Everything, once for all tests here."""
    async with Planting(kafka.bootstrap) as planting:
        await plant_all(planting)
        yield planting


@pytest.mark.timeout(300)
def test_a_run_tells_everybody_what_it_found(planted: Planting, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    ended = audit(planted, tmp_path, "--master", "local[2]", "--report", str(report))
    assert ended.code == 4, ended.err
    summary = ended.summary
    assert summary.drift == drift_of(planted.expected.values())
    assert ended.err.splitlines()[-1].startswith(f"Run {summary.run} (full): ")
    assert "Drift! Rolled back but visible: " in ended.err
    assert len(ended.err.splitlines()) == 2  # and where the report is
    assert report.read_text().startswith("<!doctype html>")
    assert Journal(tmp_path / JOURNAL_FILE).last() == summary
    assert Journal(tmp_path / JOURNAL_FILE).untold() == []
    assert not list(tmp_path.glob("txbroker-spark-*"))
    assert not (tmp_path / "artifacts").exists()  # Spark's own
    told = read_topics(planted.bootstrap, [planted.names.audit])
    assert [record.key for record in told] == [BATCH_TICK_KEY.encode(), BATCH_KEY.encode()]
    news = decode_news(told[1].value or b"")
    assert (news.run, news.transactions) == (summary.run, summary.transactions)
    assert {kind: count for kind, count in news.drift.items() if count} == summary.drift


@pytest.mark.long
@pytest.mark.timeout(300)
def test_spark_submit_runs_the_same(planted: Planting, tmp_path: Path) -> None:
    nothing = submitted(planted, tmp_path)
    assert nothing.code == 1
    # Spark joins both outputs of what it starts.
    assert "Error: Spark has no Kafka connector: call spark-submit with --pack" in nothing.out
    given = ivy_conf(pyspark.__version__, tmp_path)
    ended = submitted(planted, tmp_path, *(f"{name}={value}" for name, value in given.items()))
    assert ended.code == 4, ended.out
    summary = Journal(tmp_path / JOURNAL_FILE).last()
    assert summary is not None
    assert summary.drift == drift_of(planted.expected.values())


@pytest.mark.timeout(300)
def test_a_run_that_is_ended_leaves_nothing(planted: Planting, tmp_path: Path) -> None:
    with subprocess.Popen(
        command(planted, tmp_path, "--master", "local[2]"),
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
