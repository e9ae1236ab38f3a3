"""A session on a server of Spark Connect, which has the driver's Java; Python reaches none.

The server may have other users: a session has separate settings and views, and only it is stopped.
"""

import contextlib
import os
import re
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from txbroker.errors import ConfigurationError
from txbroker.spark.launch.versions import check_packages, series
from txbroker.spark.storage.local import LocalStorage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODE = "SPARK_CONNECT_MODE_ENABLED"
"""With this variable, pyspark's functions make columns of Spark Connect."""
_REMOTES = ("SPARK_REMOTE", MODE)
_PACKAGES = ("grpc", "grpc_status", "google.rpc", "zstandard")
_PATIENCE_TO_START_S, _PATIENCE_S = 2.0, 20.0
"""How long calls that find no server are repeated; a server that restarts knows no session."""
_BACKOFF_MAX_MS = 5000
_TASKS = "spark.sql.shuffle.partitions"
_DRIVERS = {
    "db2": ("com.ibm.db2.jcc.DB2Driver",),
    "mariadb": ("org.mariadb.jdbc.Driver",),
    "mysql": ("com.mysql.cj.jdbc.Driver", "org.mariadb.jdbc.Driver"),
    "oracle": ("oracle.jdbc.OracleDriver",),
    "postgresql": ("org.postgresql.Driver",),
    "sqlite": ("org.sqlite.JDBC",),
    "sqlserver": ("com.microsoft.sqlserver.jdbc.SQLServerDriver",),
}
"""Classes of JDBC drivers, by the scheme of their URLs."""


def server_of(master: str, remote: str) -> str:
    """Return the URL of the Spark Connect server to use, that of SPARK_REMOTE if none is given;
    empty: the session has its own driver.

    Args:
        master, remote: the chosen ones, or "".

    Raises:
        ConfigurationError: they exclude one another.
    """
    if master.startswith("sc://"):
        raise ConfigurationError(
            f"--master {shown(master)} is a server of Spark Connect: name it with --remote"
        )
    set_by = next((name for name in _REMOTES if os.environ.get(name)), "")
    named = "--remote" if remote else set_by
    url = remote or os.environ.get("SPARK_REMOTE", "")
    if named and master:
        raise ConfigurationError(
            f"{named} and --master exclude one another: leave --master out, or "
            + ("--remote" if remote else f"unset {set_by}")
        )
    if named and not (url.startswith("sc://") and _hostname(url)):
        raise ConfigurationError(
            f"{named} asks for Spark Connect, and names no server: --remote needs the URL of one, "
            f"such as sc://HOST:15002" + ("" if remote else f"; or unset {set_by}")
        )
    return url


def shown(url: str) -> str:
    """Return a server's URL without its parameters, which may hold a token."""
    return url.partition("/;")[0].partition(";")[0]


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


@contextmanager
def remote_session(
    url: str, defaults: Mapping[str, str], conf: Mapping[str, str]
) -> Iterator["SparkSession"]:
    """Open a session on a server and close it.

    Args:
        defaults: settings, of which those of a session are set.
        conf: the caller's settings, all of them of a session.

    Raises:
        ConfigurationError: the server does not answer or does not fit.
    """
    check_packages(_PACKAGES)
    warnings.filterwarnings("ignore", r"\[RETRIES_EXCEEDED\]")  # an error follows
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    was = os.environ.get(MODE)
    os.environ[MODE] = "1"
    try:
        spark = _opened(url)
        try:
            _set(spark, defaults, conf)
            yield spark
        finally:
            _close(spark)
    finally:
        if was is None:
            del os.environ[MODE]
        else:
            os.environ[MODE] = was


def _opened(url: str) -> Any:
    import pyspark
    from pyspark.errors import PySparkException
    from pyspark.sql.connect.session import SparkSession as RemoteSession

    try:
        spark = RemoteSession.builder.remote(url).create()
    except PySparkException as error:
        raise ConfigurationError(f"--remote {shown(url)}: {reason_of(error)}") from None
    try:
        _repeat(spark, _PATIENCE_TO_START_S)
        version = spark.version
        if series(version) != series(pyspark.__version__):
            raise ConfigurationError(
                f"Spark {version} runs at {shown(url)}, and pyspark is {pyspark.__version__}: run "
                f"pip install pyspark=={version}, or start a server of this version"
            )
        _repeat(spark, _PATIENCE_S)
    except BaseException as error:
        _close(spark)
        if not isinstance(error, PySparkException):
            raise
        raise ConfigurationError(
            f"no session on the Spark Connect server at {shown(url)} ({reason_of(error)}): check "
            "that it runs, is reachable from here, and accepts the token of the URL"
        ) from None
    return spark


def _repeat(spark: Any, patience_s: float) -> None:
    """Repeat calls that find no server, all of one outage together for `patience_s` seconds: the
    end of a run makes many."""
    from pyspark.sql.connect.client.retries import DefaultPolicy

    class Patience(DefaultPolicy):
        began_s = last_s = float("-inf")

        def can_retry(self, error: BaseException) -> bool:
            now_s = time.monotonic()
            if not super().can_retry(error):
                return False
            if now_s - self.last_s > _BACKOFF_MAX_MS / 1000 * 2:
                self.began_s = now_s
            self.last_s = now_s
            return now_s - self.began_s < patience_s

    spark.client.set_retry_policies([Patience(max_backoff=_BACKOFF_MAX_MS)])


def _set(spark: Any, defaults: Mapping[str, str], conf: Mapping[str, str]) -> None:
    for name, value in {**defaults, **conf}.items():
        if spark.conf.isModifiable(name):
            spark.conf.set(name, value)
        elif name in conf:
            raise ConfigurationError(
                f"--conf {name}=… cannot be set by a session: give it to the server when it starts "
                "(start-connect-server.sh --conf), or use --master"
            )


def _close(spark: Any) -> None:
    spark.client.set_retry_policies([])  # a server that is gone has forgotten the session
    for end in (spark.interruptAll, spark.stop):  # a stop alone lets running queries finish
        with contextlib.suppress(Exception):
            end()


def reason_of(error: Exception) -> str:
    """Return what an error of a server, or of the way to it, states."""
    text = str(error)
    details = re.search(r'details = "([^"]+)|last error: (.+)', text)
    line = (details[1] or details[2]) if details else text.strip().partition("\n")[0]
    line = re.sub(r"^\[[A-Z_.]+\] |SQLSTATE: \w+$", "", line)
    return line.strip()[:300].rstrip(" .;:")


class RemoteDriver:
    """The driver of a server of Spark Connect; see `driver.Driver`."""

    def __init__(self, spark: "SparkSession") -> None:
        self._spark: Any = spark

    @cached_property
    def cores(self) -> int:
        """The partitions that Spark makes by default."""
        return int(
            self._spark.sql("SELECT DISTINCT spark_partition_id() FROM range(100000)").count()
        )

    @cached_property
    def tasks_fixed(self) -> bool:
        """It is asked before the session has set it itself."""
        return _TASKS in self._spark.conf.getAll

    def jars_of(self, name: str) -> list[str] | None:
        """Look for it as for a class of which SQL calls a method."""
        from pyspark.errors import AnalysisException

        try:
            _ = self._spark.sql(f"SELECT reflect('{name}', '-')").schema
        except AnalysisException as error:
            if "UNEXPECTED_CLASS_TYPE" in str(error):
                return None
        return str(self._spark.conf.get("spark.jars", "")).split(",")

    def jdbc_driver(self, url: str) -> str:
        """Look for the drivers of this kind of database."""
        known = _DRIVERS.get(url.split(":")[1], ())
        return next((name for name in known if self.jars_of(name) is not None), "")

    def cost(self) -> "UnknownCost":
        """The server counts for all its users together."""
        return UnknownCost()

    def loading(self, package: str, extension: str = "") -> str:
        """Packages are those of the server."""
        more = f" --conf spark.sql.extensions={extension}" if extension else ""
        return f"start the server with --packages {package}{more}"


class UnknownCost:
    """No cost; see `driver.Cost`."""

    def so_far(self) -> dict[str, int]:
        """Nothing is known."""
        return {}


# --- a folder of two machines ----------------------------------------------------------------


def check_shared(spark: "SparkSession", folder: str) -> None:
    """Raise a ConfigurationError where the server does not read and write the same folder, or
    cannot call Python there."""
    from pyspark.errors import PySparkException

    def same(batches: Any) -> Any:  # inside, as the server lacks this module
        return batches

    files, text = LocalStorage(), secrets.token_hex(8)
    created = not files.exists(folder)
    ours = f"{folder}/checked-{text}"
    try:
        files.write(f"{ours}/sent", text.encode())
        rows = spark.read.text(f"{ours}/sent").mapInArrow(same, "value string")
        rows.write.text(f"{ours}/returned")
        back = f"{ours}/returned"
        found = [files.read(f"{back}/{name}") for name in files.sizes(back)]
        why = "" if f"{text}\n".encode() in found else "its rows do not arrive here"
    except PySparkException as error:
        why = reason_of(error)
    except ConfigurationError as error:
        why = str(error)
    try:  # what the server has written must be this machine's too: a run moves its files
        files.remove(ours)
        if created and not files.names(folder):
            files.remove(folder)
    except ConfigurationError as error:
        why = why or str(error)
    if why:
        raise ConfigurationError(
            f"the Spark Connect server cannot use {folder} as this machine does ({why}): name a "
            "folder that both have at the same path (TMPDIR for exported rows), and run both as "
            "users that may write and remove each other's files there"
        )
