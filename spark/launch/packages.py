"""The Kafka connector: its jars, resolved by Ivy once."""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.sax.saxutils import quoteattr

import msgspec

from txbroker.embedded.jars import DEFAULT_REPOSITORY, REPOSITORY_SETTING, cache_dir
from txbroker.errors import ConfigurationError
from txbroker.spark.launch.versions import SCALA, release, spark_home

KAFKA_SOURCE = "org.apache.spark.sql.kafka010.KafkaSourceProvider"
"""The connector's class that every Kafka query loads first."""

CLASS_PATH = "spark.driver.extraClassPath"
_IN_SPARK = (
    # Spark includes these: without the exclusions Ivy would download 52 MB again, and Spark would
    # send them to every executor.
    "org.apache.hadoop:hadoop-client-api",
    "org.apache.hadoop:hadoop-client-runtime",
    "org.slf4j:slf4j-api",
    "org.lz4:lz4-java",
    "at.yawk.lz4:lz4-java",
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
    """Return the connector's Maven coordinates for a version of Spark, as `4.0.0`."""
    return f"org.apache.spark:spark-sql-kafka-0-10_{SCALA}:{release(spark_version)}"


def ivy_conf(spark_version: str, folder: Path) -> dict[str, str]:
    """Return the Spark settings that load the connector, unless Spark's own folder of jars has it.

    `folder`: for Ivy's settings file; it must exist until Spark has started.
    """
    there = bool(_own("spark-sql-kafka-0-10_"))
    settings = folder / "ivysettings.xml"
    settings.touch(mode=0o600)  # it may hold a password
    settings.write_text(_settings_text(repository()))
    return {
        "spark.jars.packages": "" if there else coordinates(spark_version),
        "spark.jars.excludes": ",".join(_IN_SPARK),
        "spark.jars.ivy": str(ivy_dir()),
        "spark.jars.ivySettings": str(settings),
    }


def own_jars() -> list[str]:
    """Return the connector's jars in Spark's folder, which executors on other machines may lack."""
    names = ("spark-sql-kafka-0-10_", "spark-token-provider-kafka-0-10_", "kafka-clients-")
    return [str(jar) for name in (*names, "commons-pool2-") for jar in _own(name)]


def _own(name: str) -> list[Path]:
    return sorted((spark_home() / "jars").glob(f"*{name}*.jar"))


def known_jars(conf: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that load the packages as an earlier start has resolved them, without
    Ivy, which takes two to four processor seconds; empty where that is not known.

    Java's archive holds no classes of other loaders than that of the class path. So the connector
    is on the driver's class path too, unless the caller adds jars, which it would go before.
    """
    jars = [ivy_dir() / "jars" / name for name in _resolved().get(_packages_of(conf), ())]
    if not jars or not all(jar.exists() for jar in jars):
        return {}
    own = conf.get("spark.jars")
    known = {"spark.jars": ",".join([*([own] if own else []), *map(str, jars)])}
    if not (own or "," in conf["spark.jars.packages"] or conf.get(CLASS_PATH) or _has_defaults()):
        known[CLASS_PATH] = os.pathsep.join(map(str, jars))
    return {**known, "spark.jars.packages": ""}


def _has_defaults() -> bool:
    """Return whether there are Spark settings that this process does not know."""
    folder = os.environ.get("SPARK_CONF_DIR") or spark_home() / "conf"
    return Path(folder, "spark-defaults.conf").exists()


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
