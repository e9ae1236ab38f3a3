"""Start Spark, or explain in a sentence why it does not start; keep it quiet.

Spark runs in a separate Java process, which ends with the session. Its logs, Java's own output and
the connector's download go to files in a folder that is removed at the end, unless `verbose` asks
for them.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from txbroker.errors import ConfigurationError, missing_extra
from txbroker.spark.launch import daemon
from txbroker.spark.launch.failures import in_words, why_not_launched, why_not_started
from txbroker.spark.launch.java import ClassArchive, java_home
from txbroker.spark.launch.packages import (
    CLASS_PATH,
    KAFKA_SOURCE,
    coordinates,
    first_download,
    ivy_conf,
    known_jars,
    note_jars,
)
from txbroker.spark.launch.versions import (
    check_classic,
    check_connector,
    check_pyspark,
    check_spark,
    spark_home,
)
from txbroker.spark.secret import SECRET
from txbroker.spark.tables.formats import MERGED

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


_JAVA_OPTIONS = " ".join(
    (
        # Spark generates one long method for a wide row; by default Java interprets it for ever.
        "-XX:-DontCompileHugeMethods",
        # Compile a method again, optimized, only once it has run for a while: by default that takes
        # more processor time than an audit of half a million transactions itself.
        "-XX:Tier4InvocationThreshold=100000",
        "-XX:Tier4MinInvocationThreshold=10000",
        "-XX:Tier4CompileThreshold=500000",
        "-XX:Tier4BackEdgeThreshold=500000",
    )
)
_NOT_OPTIMIZED = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"
"""With one compiler, Java would reserve 48 MB for code, of which an audit takes 45."""
BRIEF_MAX = 250_000
"""Half messages in a brief session. Measured: without optimized code an audit saves 12 processor
seconds, and takes 50 more for a million transactions."""
_COLLECTOR = "-XX:+UseParallelGC"
"""Java's default, G1, takes a tenth more processor time in a small audit. Java refuses two."""
_NAME = "txbroker audit"
_DRIVER_OPTIONS = "spark.driver.extraJavaOptions"
_DEFAULTS = {
    "spark.executor.extraJavaOptions": _JAVA_OPTIONS,
    "spark.driver.memory": "2g",  # with 1g, a driver that does all the work spills early
    "spark.ui.enabled": "false",  # open no port by default
    "spark.ui.showConsoleProgress": "false",  # the audit draws its own
    "spark.sql.catalogImplementation": "in-memory",
    # By default every expression sends Java its line of Python: a call each.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    # An audit generates more classes than the 100 that Spark caches: each audit of a session and
    # some batches of a stream would generate and compile them again.
    "spark.sql.codegen.cache.maxEntries": "2000",
    # Spark would count the values of each column of a table that it keeps, to choose an encoding:
    # measured, 6 % of a full audit. The kept blocks are compressed anyway.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # Spark stores the plan of each query at the end of each stage and keeps a thousand of them.
    # Without a limit on their text they have filled a driver's memory.
    "spark.sql.maxPlanStringLength": "100000",
    "spark.sql.ui.retainedExecutions": "50",
    "spark.sql.redaction.string.regex": SECRET,
}
_LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
"""With all executors on this machine, neither its name nor its network matters."""
_QUICK_TASKS = {"spark.python.daemon.module": daemon.__name__}
"""Only for workers that are this Python: others, such as those of clusters, do not import
txbroker."""

_PYTHON_LOGGERS = ("DataFrameQueryContextLogger", "SQLQueryContextLogger")
"""pyspark logs every error that it raises to these, as JSON with Java's whole stack."""
_PACKAGES = ("pyspark", "py4j", "pandas", "pyarrow", "google.protobuf")
_END_TIMEOUT_S = 60.0
"""Java writes its archive of classes in some seconds."""
_CRASH = "fatal error has been detected by the Java Runtime"
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
        archives: write the archive of Java's classes where there is none, at the end: a session
            that does what most sessions do.
        brief: Java compiles without optimizing: for a session with less work than that takes.
    """

    master: str = ""
    conf: Mapping[str, str] = {}
    verbose: bool = False
    archives: bool = False
    brief: bool = False


@contextlib.contextmanager
def spark_session(settings: SparkSettings) -> Iterator["SparkSession"]:
    """Start Spark and stop it, with its Java process.

    Raises:
        ConfigurationError: pyspark, Java or the connector are missing or do not fit, or Spark does
            not start; the message names the next step.
    """
    require_pyspark()
    check_classic(settings.master or settings.conf.get("spark.master", ""))
    _quieten_pyspark(settings.verbose)
    from pyspark import SparkContext

    if "PYSPARK_GATEWAY_PORT" in os.environ or SparkContext._active_spark_context is not None:
        with _submitted(settings) as spark:
            keep_names(cast(Any, spark.sparkContext)._jvm)
            yield spark
        return
    folder = Path(tempfile.mkdtemp(prefix="txbroker-spark-"))
    try:
        with _without_artifacts(), _started(settings, folder) as spark:
            keep_names(cast(Any, spark.sparkContext)._jvm)
            yield spark
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require_pyspark() -> None:
    """Raise a ConfigurationError where pyspark or one of its dependencies is not installed, or
    pyspark has another version."""
    for module in _PACKAGES:
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # its parent package is missing too
            spec = None
        if spec is None:
            raise missing_extra(module, "spark")
    check_pyspark()


def _quieten_pyspark(verbose: bool) -> None:
    from pyspark.logger import PySparkLogger

    for name in _PYTHON_LOGGERS:
        PySparkLogger.getLogger(name).disabled = not verbose


# --- a dedicated Java process ---------------------------------------------------------------


@contextlib.contextmanager
def _started(settings: SparkSettings, folder: Path) -> Iterator["SparkSession"]:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    check_spark()
    master = settings.master or settings.conf.get("spark.master") or "local[*]"
    log = folder / "jvm.log"
    environment = launch_environment(master)
    conf = _conf(settings, master, folder)
    archive = _class_archive(settings, environment["JAVA_HOME"], conf)
    if archive is not None:
        conf[_DRIVER_OPTIONS] = f"{archive.option} {conf[_DRIVER_OPTIONS]}"
    with first_download(), _variables(environment), log.open("wb") as errors:
        output = {} if settings.verbose else {"stdout": errors, "stderr": subprocess.STDOUT}
        try:
            given = SparkConf(loadDefaults=False).setAll(list(conf.items()))
            gateway = launch_gateway(given, output)  # type: ignore[no-untyped-call]
        except Exception as error:
            why = why_not_launched(log, error)
            if archive is not None and _CRASH in log.read_text(errors="replace"):
                archive.drop()
                why += ". Java's archive of classes may be damaged and was removed: try again"
            raise ConfigurationError(why) from None
    whole = False
    try:
        try:
            with _variables(environment):
                context = SparkContext(conf=_known_to(gateway, conf), gateway=gateway)
            note_jars(conf, context.getConf().get("spark.jars", ""))
            _load_extensions(context)
            spark = SparkSession(context)
        except Exception as error:
            raise ConfigurationError(why_not_started(master, error)) from None
        _check_connector(context)
        with in_words(log):
            yield spark
        whole = True
    finally:
        ended = _end(gateway)
        if archive is not None:
            archive.keep(whole and ended)


def _class_archive(
    settings: SparkSettings, home: str | None, conf: Mapping[str, str]
) -> ClassArchive | None:
    """Return the archive to use or to make; None with the caller's own. None is made where Java's
    warnings about what it leaves out would be shown, or Ivy has to find the connector first."""
    given = settings.conf.get(_DRIVER_OPTIONS, "")
    if re.search(r"SharedArchiveFile|ArchiveClassesAtExit|-Xshare", given):
        return None
    before = map(Path, filter(None, conf.get(CLASS_PATH, "").split(os.pathsep)))
    archive = ClassArchive(None if home is None else Path(home), (spark_home() / "jars", *before))
    # On YARN, Spark does not show which jars Ivy has found.
    known = not conf["spark.jars.packages"] or conf["spark.master"] == "yarn"
    makes = settings.archives and not settings.verbose and known
    return archive if archive.is_there or makes else None


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

    connector = ivy_conf(pyspark.__version__, folder)
    conf = {
        **_DEFAULTS,
        **(_LOOPBACK if master.startswith("local") else {}),
        **(_QUICK_TASKS if _runs_our_python(master) else {}),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        **connector,
        "spark.app.name": _NAME,
        **settings.conf,
        "spark.master": master,
    }
    for name in ("spark.jars.packages", "spark.jars.excludes"):
        conf[name] = ",".join(filter(None, (connector[name], settings.conf.get(name))))
    conf |= known_jars(conf)
    # The caller's options come last, so they win.
    given = settings.conf.get(_DRIVER_OPTIONS, "")
    collector = "" if re.search(r"-XX:\+Use\w+GC", given) else _COLLECTOR
    compiler = _NOT_OPTIMIZED if settings.brief else ""
    options = (log_conf(settings.verbose, folder), _JAVA_OPTIONS, compiler, collector, given)
    conf[_DRIVER_OPTIONS] = " ".join(filter(None, options))
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


def _end(gateway: Any) -> bool:
    """Stop Spark and its Java process, so that another session can start; return whether Java
    has ended without being killed."""
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
        return bool(gateway.proc.wait(_END_TIMEOUT_S) == 0)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()
        return False


# --- a Java process of spark-submit -------------------------------------------------------------


@contextlib.contextmanager
def _submitted(settings: SparkSettings) -> Iterator["SparkSession"]:
    """Use the Java process of `spark-submit`, which started this one, or the Spark that a platform
    has already started in it, which goes on afterwards."""
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    given = {**_DEFAULTS, **settings.conf}
    ours = SparkContext._active_spark_context is None
    try:
        if ours:
            conf = SparkConf().setAppName(_NAME)
            for name, value in {"spark.master": settings.master or "local[*]", **given}.items():
                conf.setIfMissing(name, value)
            context = SparkContext(conf=conf)
            _load_extensions(context)
            spark = SparkSession(context)
        else:
            spark = SparkSession.builder.getOrCreate().newSession()
            context = spark.sparkContext
            for name, value in given.items():
                if spark.conf.isModifiable(name):
                    spark.conf.set(name, value)
    except Exception as error:
        raise ConfigurationError(why_not_started(settings.master, error)) from None
    try:
        _check_connector(context)
        with in_words(None):
            yield spark
    finally:
        if ours:
            with contextlib.suppress(Exception):  # where Java is gone there is nothing to stop
                spark.stop()


# --- what Spark has loaded -----------------------------------------------------------------------

_EXTENSIONS = "spark.sql.extensions"


def _load_extensions(context: "SparkContext") -> None:
    """Let the session have the extensions of the table formats whose packages Spark has loaded.

    It reads the setting when it begins, and shows Java's trace of each class that is missing.
    """
    conf: Any = context._jsc.sc().conf()
    loaded = [conf.get(_EXTENSIONS, "")]
    loaded += [each.extension for each in MERGED.values() if _source(context, each.extension)]
    if names := ",".join(dict.fromkeys(filter(None, loaded))):
        conf.set(_EXTENSIONS, names)


def _check_connector(context: "SparkContext") -> None:
    """Raise a ConfigurationError where Spark has no Kafka connector, or one that does not fit."""
    wanted = coordinates(context.version)
    source = _source(context, KAFKA_SOURCE)
    if source is None:
        raise ConfigurationError(
            f"Spark {context.version} has no Kafka connector: run spark-submit with --packages "
            f"{wanted}"
        )
    check_connector(source, context.version, wanted)


_KEPT_NAMES = (
    (("functions",), ("col", "lit")),
    (("org.apache.spark.sql.functions",), ("col", "expr", "lit", "when")),
    (("PythonUtils",), ("toSeq",)),
    (("PythonSQLUtils",), ("ddlToJson",)),
    (("java", "util", "regex", "Pattern"), ("compile",)),
    (("org", "apache", "hadoop", "fs"), ("Path",)),
    (("py4j", "reflection", "TypeUtil"), ("isInstanceOf",)),
)
"""Classes that each column and table asks for, and their methods."""


def keep_names(jvm: Any) -> None:
    """Look up some names of Java once: by default, each use of one is some calls more."""
    from py4j.protocol import Py4JError

    for path, methods in _KEPT_NAMES:
        place = jvm
        for name in path:
            setattr(place, name, getattr(place, name))
            place = getattr(place, name)
        for name in methods:
            with contextlib.suppress(Py4JError):  # other versions of Spark may not have it
                setattr(place, name, getattr(place, name))


def has_class(spark: "SparkSession", name: str) -> bool:
    """Return whether Spark has loaded a package with this class."""
    return _source(spark.sparkContext, name) is not None


def _source(context: "SparkContext", name: str) -> str | None:
    """Return the URL of the jar that has a class; None where there is none."""
    jvm: Any = context._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    try:
        kind = jvm.java.lang.Class.forName(name, False, loader)
        return str(kind.getProtectionDomain().getCodeSource().getLocation())
    except Exception:
        return None


_PARTITIONS = "spark.sql.shuffle.partitions"
ROWS_A_TASK = 200_000
"""Rows of facts in one task: about 100 MB at the widest, which a task sorts without spilling."""
_ROWS_A_CORE = 20_000
"""With fewer rows, another task costs more than it saves."""
_SMALL_BELOW = 20_000
_STORED_BELOW = 200_000
"""Rows of earlier runs: a query may read all of them, though only some of their columns."""
_SMALL = {
    # Expressions are evaluated without compiling Java for each query.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # A query is one job: otherwise each shuffle and each broadcast is one more.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
    # A table is read by one task, however many files it has.
    "spark.sql.files.minPartitionNum": "1",
    "spark.sql.files.openCostInBytes": "0",
}
"""For fewer rows, the planning of a query costs more than its rows."""


@contextmanager
def spread(spark: "SparkSession", rows: int | None, stored: int = 0) -> Iterator[None]:
    """Let queries in the block do what suits the number of rows; None: it is not known. `stored`:
    rows of tables that they may be compared with.

    Shuffles are cut into as many tasks as suit them. Spark's default of 200 is far too many for a
    small audit, where each task costs more than its rows, and too few for a large one. A
    `spark.sql.shuffle.partitions` that Spark was started with stays.
    """
    is_small = rows is not None and rows < _SMALL_BELOW and stored < _STORED_BELOW
    fitting = _SMALL if is_small else {}
    cores = _cores_to_use(spark.sparkContext)
    if cores:
        tasks = tasks_for(rows, cores)
        fitting = {**fitting, _PARTITIONS: str(tasks)}
    with contextlib.ExitStack() as settings:
        for name, value in fitting.items():
            settings.enter_context(setting(spark, name, value))
        yield


@lru_cache(maxsize=1)
def _cores_to_use(context: "SparkContext") -> int:
    """Return the number of cores; 0 where Spark was started with a number of tasks."""
    fixed = cast(Any, context)._jsc.sc().conf().contains(_PARTITIONS)
    return 0 if fixed else context.defaultParallelism


def _context(spark: "SparkSession") -> Any:
    """Return Spark's context as Java has it: a call of Python's copies all settings."""
    return cast(Any, spark.sparkContext)._jsc.sc()


@contextmanager
def setting(spark: "SparkSession", name: str, value: str) -> Iterator[None]:
    """Change one of Spark SQL's settings in the block."""
    was = spark.conf.get(name, None)
    if was == value:
        yield
        return
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
        self._context = _context(spark)
        self._jobs, self._stages = self._so_far()

    def so_far(self) -> dict[str, int]:
        """Return counts of Spark, by the names of `tables.layout.RUNS`.

        A session keeps its last thousand jobs and stages.
        """
        jobs, stages = self._so_far()
        store = self._context.statusStore()
        cost = dict.fromkeys(COSTS, 0) | {"jobs": jobs - self._jobs}
        for number in range(self._stages, stages):
            try:
                stage = store.lastStageAttempt(number)
            except Exception:  # the store has dropped it
                continue
            tasks = stage.numCompleteTasks()
            if not tasks:
                continue  # what it would compute was there
            cost["tasks"] += tasks
            cost["cpu_ms"] += stage.executorCpuTime() // 1_000_000
            cost["input_bytes"] += stage.inputBytes()
            cost["shuffle_bytes"] += stage.shuffleWriteBytes()
            cost["spill_bytes"] += stage.diskBytesSpilled()
        return cost

    def _so_far(self) -> tuple[int, int]:
        """Return how many jobs and stages there were in the session: both are numbered."""
        jobs = int(self._context.dagScheduler().numTotalJobs())
        if not jobs:
            return 0, 0
        # The store follows events, which Spark delivers later.
        self._context.listenerBus().waitUntilEmpty()
        of_last = self._context.statusStore().job(jobs - 1).stageIds()
        return jobs, 1 + max(of_last.apply(number) for number in range(of_last.size()))


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
    check_spark()
    folder = Path(tempfile.mkdtemp(prefix="txbroker-spark-"))
    try:
        conf = {
            **ivy_conf(pyspark.__version__, folder),
            "spark.app.name": _NAME,
            **settings.conf,
        }
        options = [f"--conf={name}={value}" for name, value in conf.items()]
        command = [str(spark_home() / "bin" / "spark-submit"), "--master", settings.master]
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
