"""The versions of Spark that the audit runs with, and the one that is here."""

import importlib.util
import os
import re
from collections.abc import Iterable
from pathlib import Path

from txbroker.errors import ConfigurationError, missing_extra

SCALA = "2.13"
SERIES = ("4.0", "4.1", "4.2")
"""The tests run with each of them: `make spark-matrix`."""


def release(version: str) -> str:
    """Return the numbers of a version: `4.0.1` of `4.0.1`, `4.0.1.dev1` and `4.0.1-amzn-0`."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return "" if found is None else found[0]


def series(version: str) -> str:
    """Return the first two numbers of a version, as `4.0`."""
    return ".".join(release(version).split(".")[:2])


def spark_home() -> Path:
    """Return the folder of Spark: that of SPARK_HOME, else pyspark's."""
    import pyspark

    return Path(os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent)


def check_packages(modules: Iterable[str]) -> None:
    """Raise a ConfigurationError where one of these modules is not installed."""
    for module in modules:
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # its parent package is missing too
            spec = None
        if spec is None:
            raise missing_extra(module, "spark")


def check_pyspark() -> None:
    """Raise a ConfigurationError where pyspark is of another series."""
    import pyspark

    if series(pyspark.__version__) not in SERIES:
        raise ConfigurationError(
            f"pyspark is {pyspark.__version__}, and the audit runs with {', '.join(SERIES)}: run "
            "pip install 'txbroker[spark]', or use a cluster with one of these"
        )


def check_streams(spark: str) -> None:
    """Raise a ConfigurationError where this version of Spark cannot continue a stream: after a
    crash its Kafka connector fails in the metrics of the first batch (SPARK-55271)."""
    if series(spark) == "4.1":
        raise ConfigurationError(
            f"Spark {spark} cannot continue a stream after a crash (SPARK-55271): run the stream "
            "with Spark 4.0 or 4.2, or `audit run` often"
        )


def check_spark() -> None:
    """Raise a ConfigurationError where the Spark to start does not fit pyspark, or is built with
    another Scala than Kafka's connector."""
    import pyspark

    for jar in (spark_home() / "jars").glob("spark-core_*.jar"):
        scala, _, version = jar.stem.removeprefix("spark-core_").partition("-")
        if scala != SCALA:
            raise ConfigurationError(
                f"Spark {version} in {spark_home()} is built with Scala {scala}, and the audit "
                f"needs Scala {SCALA}: unset SPARK_HOME, or set it to another Spark"
            )
        if release(version) != release(pyspark.__version__):
            raise ConfigurationError(
                f"Spark {version} is in SPARK_HOME, but pyspark is {pyspark.__version__}: "
                f"unset SPARK_HOME, or run: pip install pyspark=={release(version)}"
            )


def check_connector(source: str, spark: str, wanted: str) -> None:
    """Raise a ConfigurationError where a connector's jar is of another Spark or Scala.

    Args:
        source: path or URL of the jar; one with another name is not judged.
        spark: the version of the running Spark.
        wanted: the Maven coordinates of the right one.
    """
    found = re.search(r"spark-sql-kafka-0-10_([\d.]+)-([^/]+)\.jar$", source)
    if found is not None and (found[1], series(found[2])) != (SCALA, series(spark)):
        raise ConfigurationError(
            f"the Kafka connector {source} does not fit Spark {spark} with Scala {SCALA}: remove "
            f"it, and load {wanted} instead"
        )
