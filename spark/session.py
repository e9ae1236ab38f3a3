"""Start Spark, or explain in a sentence why it does not start; keep it quiet.

Spark runs in a separate Java process, which ends with the session. Its logs, Java's own output and
the connector's download go to files in a folder that is removed at the end, unless `verbose` asks
for them.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from txbroker.errors import ConfigurationError
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
    own_jars,
)
from txbroker.spark.launch.remote import remote_session, server_of
from txbroker.spark.launch.versions import (
    check_connector,
    check_packages,
    check_pyspark,
    check_spark,
    spark_home,
)
from txbroker.spark.secret import SECRET
from txbroker.spark.tables.formats import MERGED

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from txbroker.spark.launch.driver import Cost


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
        remote: the URL of a Spark Connect server in place of a master; empty: SPARK_REMOTE.
    """

    master: str = ""
    conf: Mapping[str, str] = {}
    verbose: bool = False
    archives: bool = False
    brief: bool = False
    remote: str = ""

    @property
    def server(self) -> str:
        """The URL of the Spark Connect server; empty: there is none. See `server_of`."""
        return server_of(self.master or self.conf.get("spark.master", ""), self.remote)


@contextlib.contextmanager
def spark_session(settings: SparkSettings) -> Iterator["SparkSession"]:
    """Start Spark and stop it, with its Java process.

    Raises:
        ConfigurationError: pyspark, Java or the connector are missing or do not fit, or Spark does
            not start; the message names the next step.
    """
    require_pyspark()
    server = settings.server
    _quieten_pyspark(settings.verbose)
    with _opened(settings, server) as spark:
        _check_connector(spark)
        _read_kafka_by_v2(spark)
        yield spark


@contextlib.contextmanager
def _opened(settings: SparkSettings, server: str) -> Iterator["SparkSession"]:
    from pyspark import SparkContext

    if server:
        with remote_session(server, _DEFAULTS, settings.conf) as spark, in_words(None):
            yield spark
        return
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
    check_packages(_PACKAGES)
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
    if not (connector["spark.jars.packages"] or master.startswith("local")):
        given_jars = settings.conf.get("spark.jars")
        conf["spark.jars"] = ",".join(filter(None, (given_jars, *own_jars())))
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
        with in_words(None):
            yield spark
    finally:
        if ours:
            with contextlib.suppress(Exception):  # where Java is gone there is nothing to stop
                spark.stop()


# --- what Spark has loaded -----------------------------------------------------------------------

EXTENSIONS = "spark.sql.extensions"
_V1_SOURCES = "spark.sql.sources.useV1SourceList"


def _load_extensions(context: "SparkContext") -> None:
    """Let the session have the extensions of the table formats whose packages Spark has loaded.

    It reads the setting when it begins, and shows Java's trace of each class that is missing.
    """
    from txbroker.spark.launch.driver import JavaDriver

    conf: Any = cast(Any, context)._jsc.sc().conf()
    driver, loaded = JavaDriver(context), [conf.get(EXTENSIONS, "")]
    loaded += [each.extension for each in MERGED.values() if driver.jars_of(each.extension)]
    if names := ",".join(dict.fromkeys(filter(None, loaded))):
        conf.set(EXTENSIONS, names)


def _check_connector(spark: "SparkSession") -> None:
    """Raise a ConfigurationError where Spark has no Kafka connector, or one that does not fit."""
    from txbroker.spark.launch.driver import driver_of

    wanted, driver = coordinates(spark.version), driver_of(spark)
    jars = driver.jars_of(KAFKA_SOURCE)
    if jars is None:
        raise ConfigurationError(
            f"Spark {spark.version} has no Kafka connector: {driver.loading(wanted)}"
        )
    for jar in jars:
        check_connector(jar, spark.version, wanted)


def _read_kafka_by_v2(spark: "SparkSession") -> None:
    """Let Spark load the Kafka source by its newer interface.

    The older one, the default for batches, creates an object for each header.
    """
    sources = (spark.conf.get(_V1_SOURCES) or "").split(",")
    spark.conf.set(_V1_SOURCES, ",".join(source for source in sources if source != "kafka"))


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
    from txbroker.spark.launch.driver import driver_of

    is_small = rows is not None and rows < _SMALL_BELOW and stored < _STORED_BELOW
    fitting = _SMALL if is_small else {}
    driver = driver_of(spark)
    if not driver.tasks_fixed:
        fitting = {**fitting, _PARTITIONS: str(tasks_for(rows, driver.cores))}
    with contextlib.ExitStack() as settings:
        for name, value in fitting.items():
            settings.enter_context(setting(spark, name, value))
        yield


def cost_from_now(spark: "SparkSession") -> "Cost":
    """Return the cost of all that the session does from now on."""
    from txbroker.spark.launch.driver import driver_of

    return driver_of(spark).cost()


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

    server_of(settings.master, settings.remote)
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
