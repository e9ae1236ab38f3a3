"""The command under `spark-submit`, and ended half way."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyspark
import pytest

from tests.kit.cli import until_gone
from tests.spark.audit_process import audit, command, drift_of, environment, submitted, summary_of
from tests.spark.planted_cases import Planted
from txbroker.embedded.java import find_java
from txbroker.spark.journal import JOURNAL_FILE, Journal
from txbroker.spark.launch.packages import ivy_conf


@pytest.mark.long
@pytest.mark.timeout(300)
def test_spark_submit_runs_the_same(planted: Planted, tmp_path: Path) -> None:
    planting = planted.planting
    nothing = submitted(planting, tmp_path)
    assert nothing.code == 1
    # Spark joins both outputs of its child.
    assert "has no Kafka connector: run spark-submit with --packages org.apache" in nothing.out
    assert "ClassNotFoundException" not in nothing.out
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


# --- executors as separate processes without txbroker --------------------------------------------


PYSPARK = Path(pyspark.__file__).parent
DEADLINE_S = 90.0
BLOCK = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("txbroker", "msgspec", "aiokafka"):
            raise ImportError(f"executors have no {name}")

sys.meta_path.insert(0, Nothing())
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options by which executors' Pythons can import nothing of ours."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(BLOCK)
    return ("--conf", f"spark.executorEnv.PYTHONPATH={folder}")


@pytest.fixture(scope="module")
def spark_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Spark in a folder of the tests' own, as its workers write below it."""
    home = tmp_path_factory.mktemp("spark")
    for path in PYSPARK.iterdir():
        (home / path.name).symlink_to(path)
    return home


def test_the_connector_in_sparks_own_folder_needs_no_network(
    spark_home: Path, tmp_path: Path
) -> None:
    home = tmp_path / "spark"
    (home / "jars").mkdir(parents=True)
    for path in spark_home.iterdir():
        if path.name != "jars":
            (home / path.name).symlink_to(path)
    for path in (PYSPARK / "jars").iterdir():
        (home / "jars" / path.name).symlink_to(path)

    def connector(**more: str) -> str:
        command = [sys.executable, "-m", "txbroker.cli.connector"]
        given = environment(SPARK_HOME=str(home), **more)
        done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    jars = connector().split()
    assert [Path(jar).parent for jar in jars] == [home / "jars"] * 4
    no_network = {"TXBROKER_MAVEN_REPOSITORY": "file:///nowhere", "XDG_CACHE_HOME": str(tmp_path)}
    assert connector(**no_network) == "Spark has the connector already.\n"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_executors_in_separate_processes(
    planted: Planted, bare: tuple[str, ...], spark_home: Path, tmp_path: Path
) -> None:
    ended = audit(
        planted.planting,
        tmp_path,
        "--master",
        "local-cluster[2,1,2048]",
        *bare,
        SPARK_HOME=str(spark_home),
    )
    assert ended.code == 4, ended.err
    assert summary_of(ended).drift == drift_of(planted.planting)


@pytest.fixture
def start(spark_home: Path, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Starts a process of a standalone cluster; returns its log. Ended after the test."""
    running = []

    def starting(name: str, *arguments: str, log: str = "") -> Path:
        path = tmp_path / f"{log or name}.log"
        command = [
            find_java().path, "-Xmx512m", "-cp", f"{spark_home}/jars/*",
            f"org.apache.spark.deploy.{name}", *arguments,
        ]  # fmt: skip
        more = {
            "SPARK_HOME": str(spark_home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_SCALA_VERSION": "2.13",  # as in Spark's scripts
        }
        with path.open("w") as file:
            running.append(
                subprocess.Popen(
                    command, stdout=file, stderr=file, env=environment(**more), cwd=tmp_path
                )
            )
        return path

    yield starting
    for process in reversed(running):
        process.terminate()
        process.wait(30)


def output(log: Path, pattern: str) -> str:
    """Wait until a log matches a pattern; return its group."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := re.search(pattern, log.read_text())) is None:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return found[1]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_standalone_master_and_two_workers(
    planted: Planted, bare: tuple[str, ...], start: Callable[..., Path], tmp_path: Path
) -> None:
    master = start("master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    url = output(master, r"Starting Spark master at (spark://\S+)")
    for number in range(2):
        worker = start(
            "worker.Worker", "--host", "127.0.0.1", "--cores", "1", "--memory", "2g",
            "--webui-port", "0", "--work-dir", str(tmp_path / f"work{number}"), url,
            log=f"worker{number}",
        )  # fmt: skip
        output(worker, r"(Successfully registered with master)")
    ended = audit(
        planted.planting, tmp_path, "--master", url, *bare,
        SPARK_LOCAL_IP="127.0.0.1", PYSPARK_PYTHON=sys.executable,
    )  # fmt: skip
    assert ended.code == 4, ended.err
    assert summary_of(ended).drift == drift_of(planted.planting)
