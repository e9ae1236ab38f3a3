"""Errors of Spark and Java as sentences."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from txbroker.embedded.jars import REPOSITORY_SETTING
from txbroker.errors import TxbrokerError
from txbroker.spark.launch.packages import coordinates, repository_shown

_LENGTH_MAX = 300
_CAUSES_MAX = 20
_SERVER_GONE = r"StatusCode\.UNAVAILABLE|failed to connect to all|INVALID_HANDLE\.SESSION_"
_VERBOSE = "--verbose shows Spark's own messages"


class SparkFailed(TxbrokerError):
    """Spark failed."""


def why_not_launched(log: Path, error: Exception) -> str:
    """Return why Spark's Java process did not start, from its log."""
    import pyspark

    text = log.read_text(errors="replace")
    if re.search(r"unresolved dependenc|download failed", text, re.IGNORECASE):
        wanted = coordinates(pyspark.__version__)
        # Its own, or another one that it needs or the caller has named.
        missing = re.search(r"unresolved dependency: ([^#\s]+)#([^;\s]+);([^:\s]+): not fou", text)
        package = wanted if missing is None else ":".join(missing.groups())
        what, earlier = "the package", ""
        if package == wanted:  # pyspark may be released some days before it
            what = "Spark's Kafka connector"
            earlier = f", or run: pip install 'pyspark<{pyspark.__version__}'"
        return (
            f"{what} {package} could not be downloaded from {repository_shown()}: check the "
            f"network, or set {REPOSITORY_SETTING} to another Maven repository{earlier}; {_VERBOSE}"
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
    if re.search(_SERVER_GONE, text):
        return (
            "the Spark Connect server ended, or is not reachable any more: see its log, start it, "
            "and run the command again"
        )
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
    """Yield the text of an error, then of each of its causes in Java, which Spark Connect lists."""
    raised = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    if raised is None:
        text = str(error)
        yield text
        yield from re.findall(r"^Caused by: (.+)$", text, re.MULTILINE)
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
