"""What goes wrong in Spark, in one sentence that says what to do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from txbroker.embedded.jars import REPOSITORY_SETTING
from txbroker.errors import TxbrokerError
from txbroker.spark import connector

_LENGTH_MAX = 300
_CAUSES_MAX = 20
_VERBOSE = "--verbose shows all that it says"


class SparkFailed(TxbrokerError):
    """Spark could not do its work."""


def why_not_launched(log: Path, error: Exception) -> str:
    """Return why Spark's Java did not come up, from what it has said."""
    import pyspark

    text = log.read_text(errors="replace")
    if re.search(r"unresolved dependenc|download failed", text, re.IGNORECASE):
        coordinates = connector.coordinates(pyspark.__version__)
        return (
            f"Spark's Kafka connector {coordinates} could not be had from "
            f"{connector.repository_shown()}: check the network, or name another Maven "
            f"repository in {REPOSITORY_SETTING}; {_VERBOSE}"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"error|exception|invalid", line, re.IGNORECASE)]
    said = _plain((telling or lines or [str(error)])[0])
    return f"Spark's Java does not start: {said}; {_VERBOSE}"


def why_not_started(master: str, error: Exception) -> str:
    """Return why Java came up, but Spark did not."""
    from py4j.protocol import Py4JNetworkError

    try:
        causes = list(_causes(error))
    except (Py4JNetworkError, ConnectionError):  # nobody is left to ask
        return (
            f"Spark has ended itself while it started on {master}, as it does where executors fail "
            f"again and again: the logs of the workers say why; {_VERBOSE}"
        )
    text = "\n".join(causes)
    said = _plain(causes[0])
    if "parse Master URL" in text:
        return (
            f"{master!r} is no master that Spark knows: local[*], local[2], spark://HOST:PORT, "
            "yarn or k8s://URL"
        )
    if "sparkDriver" in text or "BindException" in text:
        return (
            f"Spark's driver cannot listen ({said}): set --conf spark.driver.bindAddress=… to an "
            "address of this machine, or --conf spark.driver.port=… to a free port"
        )
    if "UnknownHostException" in text or "Expected hostname" in text:
        return f"Spark does not know the name of a host ({said}): set SPARK_LOCAL_IP"
    if "All masters are unresponsive" in text or "stopped SparkContext" in text:
        return f"no Spark master answers at {master}: check that it runs and is reached from here"
    return f"Spark does not start on {master}: {said}; {_VERBOSE}"


@contextmanager
def in_words(log: Path | None) -> Iterator[None]:
    """Turn what Spark raises within into a `SparkFailed`.

    Args:
        log: what Java says on stderr, where it is kept.
    """
    from py4j.protocol import Py4JError, Py4JNetworkError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JNetworkError, ConnectionError, EOFError) as error:
        said = log.read_text(errors="replace") if log is not None and log.exists() else ""
        hint = (
            "its memory was too small" if "OutOfMemory" in said else "its memory may be too small"
        )
        raise SparkFailed(
            f"Spark's Java has ended: {hint}, give it more with --conf spark.driver.memory=4g"
        ) from error
    except (Py4JError, PySparkException) as error:
        raise SparkFailed(_why_it_failed(error)) from error


def _why_it_failed(error: Exception) -> str:
    causes = list(_causes(error))
    text = "\n".join(causes)
    if "OutOfMemoryError" in text:
        return (
            "Spark's memory is too small: give it more with --conf spark.driver.memory=4g "
            "(spark.executor.memory on a cluster)"
        )
    if "No space left on device" in text:
        return "a disk is full: free some room, or set --conf spark.local.dir=… to another disk"
    said = _of_python(text) or _plain(causes[-1])
    return f"Spark could not do its work: {said}; {_VERBOSE}"


def _of_python(text: str) -> str | None:
    """Return what Python says in an executor, where that is what failed: its traceback's end."""
    _, begun, trace = text.rpartition("Traceback (most recent call last):")
    ends = re.findall(r"^(?!\s)(?:[\w.]+: .+|[\w.]*(?:Error|Exception))$", trace, re.MULTILINE)
    return ends[0][:_LENGTH_MAX] if begun and ends else None


def _causes(error: BaseException) -> Iterator[str]:
    """Yield what an error says, then what each of its causes in Java says."""
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
    """Return the first line of what Java says, without the names of its classes."""
    first = text.strip().partition("\n")[0]
    first = first.removeprefix('Exception in thread "main" ')
    first = re.sub(r"^(?:[\w.$]+(?:Exception|Error): )+", "", first)
    return first[:_LENGTH_MAX].rstrip(" .;:")
