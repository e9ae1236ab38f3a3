"""Audits on a server of Spark Connect: the same tables, and a sentence for each limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest

from tests.kit.cli import Result
from tests.kit.until import free_ports
from tests.spark.audit_process import OLD
from tests.spark.audit_tables import rows_in
from tests.spark.planted_cases import plant_all, plant_clean
from tests.spark.planting import Planting
from txbroker.cli.main import cli
from txbroker.cli.run import DRIFT, run
from txbroker.errors import ConfigurationError, MissingExtra
from txbroker.spark import session
from txbroker.spark.journal import JOURNAL_FILE, Journal
from txbroker.spark.launch import remote
from txbroker.spark.launch.failures import SparkFailed
from txbroker.spark.launch.remote import check_shared, server_of
from txbroker.spark.launch.versions import spark_home
from txbroker.spark.progress import ReportedStages
from txbroker.spark.session import SparkSettings, spark_session
from txbroker.spark.storage.local import LocalStorage
from txbroker.spark.tables.layout import ATTEMPTS, TRANSACTIONS
from txbroker.spark.tables.layout import DRIFT as DRIFTS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from txbroker.embedded import EmbeddedKafka

_START_S, _END_S = 60.0, 20.0
_QUICK = (
    "--conf", "spark.sql.shuffle.partitions=2", "--conf", "spark.sql.codegen.wholeStage=false",
    "--conf", "spark.sql.codegen.factoryMode=NO_CODEGEN",
)  # fmt: skip


class Server:
    """A server of Spark Connect. `url`: its address."""

    def __init__(self, folder: Path) -> None:
        (port,) = free_ports(1)
        self.url = f"sc://127.0.0.1:{port}"
        conf = session._conf(SparkSettings(), "local[2]", folder) | {
            "spark.driver.memory": "1g",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": str(port),
            # The audit's settings are those of its session.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
            + session.log_conf(False, folder),
        }
        for name in session._DEFAULTS:
            if name.startswith("spark.sql."):
                del conf[name]
        variables = session.launch_environment("local[2]")
        self._log = folder / "server.log"
        self._process = subprocess.Popen(
            [
                str(spark_home() / "bin/spark-submit"),
                *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
                *(word for item in conf.items() for word in ("--conf", "=".join(item))),
                "spark-internal",
            ],
            stdout=self._log.open("wb"), stderr=subprocess.STDOUT, cwd=folder,
            env={**os.environ, **{name: value or "" for name, value in variables.items()}},
        )  # fmt: skip
        try:
            self._await(port)
        except BaseException:
            self.kill()
            raise

    def _await(self, port: int) -> None:
        until_s = time.monotonic() + _START_S
        while time.monotonic() < until_s and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return
            time.sleep(0.1)
        raise AssertionError(self._log.read_text())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_END_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def connected(server: Server) -> Iterator[SparkSession]:
    with spark_session(SparkSettings(remote=server.url)) as spark:
        yield spark


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_tables_are_those_of_a_driver_of_this_machine(
    spark: SparkSession,
    server: Server,
    kafka: EmbeddedKafka,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("txbroker.cli.audit.run.ended_by_sigterm", contextlib.nullcontext)

    async def called(*arguments: str) -> Result:
        code = await asyncio.to_thread(run, cli, ["audit", *arguments])
        return Result(code, *capsys.readouterr())

    now_ms: list[int] = []
    # All runs judge ages as of one moment, however long they take.
    monkeypatch.setattr("txbroker.spark.access.AuditKafka.now_ms", lambda *given: now_ms[-1])
    here, there = tmp_path / "here", tmp_path / "there"
    on_server = ("--data-dir", str(there), "--remote", server.url)
    async with Planting(kafka.bootstrap) as planting:
        own = ("run", "--kafka", planting.bootstrap, "--topic-prefix", planting.prefix)
        for plant in (plant_all, plant_clean):
            await plant(planting)
            now_ms.append(round(time.time() * 1000))
            result = await called(*own, *OLD, *_QUICK, *on_server)
            assert result.code == DRIFT, result.err
        assert remote.MODE not in os.environ
        result = await called(*own, *OLD, *_QUICK, "--data-dir", str(here))
        assert result.code == DRIFT, result.err
    runs = Journal(there / JOURNAL_FILE).runs(2)
    assert [(summary.mode, summary.cost) for summary in runs] == [("incremental", {}), ("full", {})]
    for table in (TRANSACTIONS, ATTEMPTS, DRIFTS):
        rows = rows_in(spark, str(there / "audit"), table)
        assert rows == rows_in(spark, str(here / "audit"), table), table.name
        assert rows


def test_the_server_reports_stages(connected: SparkSession) -> None:
    watch = ReportedStages(connected)
    connected.conf.set("spark.connect.progress.reportInterval", "50ms")
    connected.sql("SELECT count(*) FROM range(0, 100000000, 1, 8)").collect()
    assert watch.stages()
    watch.forget()
    assert watch.stages() == []


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("master", "option", "variables", "reason"),
    [
        ("sc://a", "", {}, "--master sc://a is a server of Spark Connect: name it with --remote$"),
        ("yarn", "sc://a", {}, "--remote and --master exclude .* leave --master out, or --remote$"),
        ("yarn", "", {"SPARK_REMOTE": "sc://a"}, "SPARK_REMOTE and --master .* unset SPARK_REMOTE"),
        ("", "http://a", {}, "--remote needs the URL of one, such as sc://HOST:15002$"),
        ("", "sc://", {}, "--remote needs the URL of one"),
        ("", "", {"SPARK_REMOTE": "local[2]"}, "SPARK_REMOTE asks .* or unset SPARK_REMOTE$"),
        ("", "", {remote.MODE: "1"}, f"{remote.MODE} asks .* or unset {remote.MODE}$"),
    ],
)
def test_what_excludes_one_another_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    master: str,
    option: str,
    variables: dict[str, str],
    reason: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=reason):
        server_of(master, option)


def test_the_variable_of_spark_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://a:1")
    assert (server_of("", ""), server_of("", "sc://b")) == ("sc://a:1", "sc://b")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("sc://127.0.0.1:9/;token=s3cret", r"no session .* at sc://127.0.0.1:9 \(.+\): check that"),
        ("sc://127.0.0.1:9/;hidden", "--remote sc://127.0.0.1:9: Invalid URL for Spark Connect: "),
    ],
)
def test_a_server_that_does_not_answer_is_one_sentence(url: str, reason: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(ConfigurationError, match=reason) as raised, _session(url):
        raise AssertionError("it has started")
    assert "\n" not in str(raised.value)
    assert "s3cret" not in str(raised.value)
    assert time.monotonic() - began_s < 20


def _session(url: str, **conf: str) -> Any:
    return spark_session(SparkSettings(conf=conf, remote=url))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PACKAGES", ("nosuch",))
    with pytest.raises(MissingExtra, match="nosuch is missing"), _session("sc://a"):
        raise AssertionError("it has started")


def test_another_spark_is_named(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    version = pyspark.__version__
    other = "4.0.9" if version.startswith("4.1") else "4.1.9"
    monkeypatch.setattr(pyspark, "__version__", other)
    reason = re.escape(f"Spark {version} runs at {server.url}, and pyspark is {other}: run pip ")
    with pytest.raises(ConfigurationError, match=reason), _session(server.url):
        raise AssertionError("it has started")


def test_settings_of_the_server_are_refused(server: Server) -> None:
    conf = {"spark.jars.packages": "a:b:1"}
    reason = "--conf spark.jars.packages=… cannot be set by a session: give it to the server"
    with pytest.raises(ConfigurationError, match=reason), _session(server.url, **conf):
        raise AssertionError("it has started")


def test_a_server_without_a_package_names_it(
    connected: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = remote.RemoteDriver(connected)
    assert driver.jdbc_driver("jdbc:postgresql://x/y") == ""
    assert driver.jars_of("no.such.Class") is None
    assert (driver.cores, driver.tasks_fixed) == (2, False)
    assert driver.loading("a:b:1", "E").endswith("--packages a:b:1 --conf spark.sql.extensions=E")
    monkeypatch.setattr(remote.RemoteDriver, "jars_of", lambda self, name: None)
    with pytest.raises(ConfigurationError, match="no Kafka connector: start the server with --pac"):
        session._check_connector(connected)


def _denied(*_given: object) -> None:
    raise ConfigurationError("returned cannot be used: Permission denied")


@pytest.mark.parametrize(
    ("method", "instead"),
    [("write", lambda *given: None), ("read", lambda *given: b""), ("remove", _denied)],
)
def test_a_folder_that_is_not_shared_is_refused(
    connected: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    instead: Callable[..., Any],
) -> None:
    folder = tmp_path / "out"
    check_shared(connected, str(folder))
    assert not folder.exists()
    with monkeypatch.context() as patched:
        patched.setattr(LocalStorage, method, instead)
        reason = f"the Spark Connect server cannot use {folder} as this machine does"
        with pytest.raises(ConfigurationError, match=reason):
            check_shared(connected, str(folder))
    assert method == "remove" or not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["run", "--out", "s3a://b/x"], "s3a://b/x cannot be used with Spark Connect, where "),
        (["sql", "-e", "SELECT 1"], "audit sql does not run over Spark Connect"),
        (["compact", "--out", "hdfs:///x"], "hdfs:///x cannot be used with Spark Connect, where"),
        (["show", "--data-dir", "s3a://b/x"], "s3a://b/x cannot be used with Spark Connect, where"),
        (["stream"], "audit stream does not run over Spark Connect"),
        (["run", "--deploy-mode", "cluster"], "--deploy-mode cluster and --remote exclude one"),
        (["run", "--master", "yarn"], "--remote and --master exclude one another"),
    ],
)
def test_commands_that_need_java_are_refused_before_the_start(
    kafka: EmbeddedKafka,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    more = ["--remote", "sc://127.0.0.1:9"]
    if "--data-dir" not in arguments:
        more += ["--data-dir", str(tmp_path)]
    if arguments[0] in ("run", "stream"):
        more += ["--kafka", kafka.bootstrap]
    assert run(cli, ["audit", *arguments, *more]) != 0
    assert reason in capsys.readouterr().err.replace("\n", " ")


# --- the end, last: it kills the server ----------------------------------------------------------


def test_a_server_that_ends_is_one_sentence(
    server: Server, connected: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_PATIENCE_S", 1.0)
    assert connected.range(3).count() == 3
    with pytest.raises(SparkFailed, match="the Spark Connect server ended, or is not reachable"):
        _ask_after_its_end(server)


def _ask_after_its_end(server: Server) -> None:
    with _session(server.url) as spark:
        server.kill()
        spark.range(3).count()
