"""Lock files: the jars of a Kafka version, with size and SHA-256.

`python -m txbroker.embedded.lock VERSION` writes one: it asks Maven (`mvn`) for the runtime
dependencies of the `kafka_2.13` artifact. Review the diff, then commit it.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from txbroker.embedded.errors import EmbeddedKafkaError, UnknownVersionError

_FOLDER = Path(__file__).parent
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_LINE = re.compile(r"(?P<path>[\w./+-]+\.jar) (?P<size>\d+) (?P<sha256>[0-9a-f]{64})")

# Kafka's own artifact brings no slf4j binding; this one is one small jar for every version
# and writes to stderr, which saves the start-up time and the configuration of log4j.
_POM = """<project><modelVersion>4.0.0</modelVersion>
<groupId>txbroker</groupId><artifactId>lock</artifactId><version>1</version><dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId>
<version>{version}</version></dependency>
<dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId>
<version>1.7.36</version></dependency>
</dependencies></project>
"""


@dataclass(frozen=True)
class Jar:
    """One line of a lock file; `path` is the jar's path in a Maven repository."""

    path: str
    size_bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """The file name."""
        return self.path.rpartition("/")[2]


def lock_path(version: str) -> Path:
    """Return the path of a Kafka version's lock file."""
    return _FOLDER / f"kafka-{version}.lock"


def versions() -> list[str]:
    """Return the Kafka versions with a lock file, oldest first."""
    names = (path.name[len("kafka-") : -len(".lock")] for path in _FOLDER.glob("kafka-*.lock"))
    return sorted(names, key=lambda version: [int(part) for part in version.split(".")])


def read_lock(version: str) -> list[Jar]:
    """Return the jars of a Kafka version."""
    if version not in versions():
        raise UnknownVersionError(
            f"Kafka {version} cannot be embedded: choose one of {', '.join(versions())}, or create "
            f"its lock file with: python -m txbroker.embedded.lock {version}"
        )
    return read_lock_file(lock_path(version))


def read_lock_file(path: Path) -> list[Jar]:
    """Return the jars of a lock file."""
    lines = path.read_text(encoding="ascii").splitlines()
    return [_parse(line) for line in lines if line and not line.startswith("#")]


def _parse(line: str) -> Jar:
    match = _LINE.fullmatch(line)
    if match is None or ".." in line:
        raise EmbeddedKafkaError(
            f"A lock file of txbroker is malformed: {line!r}. Reinstall txbroker"
        )
    return Jar(match["path"], int(match["size"]), match["sha256"])


def resolve(version: str) -> list[Jar]:
    """Return the jars that a Kafka version needs, according to Maven."""
    return resolve_pom(_POM.format(version=version))


def resolve_pom(pom: str) -> list[Jar]:
    """Return the jars that a project needs at run time; see `resolve`."""
    maven = shutil.which("mvn")
    if maven is None:
        raise EmbeddedKafkaError("Maven is required to write a lock file: install mvn")
    with tempfile.TemporaryDirectory(prefix="txbroker-lock-") as folder:
        (Path(folder) / "pom.xml").write_text(pom, encoding="utf-8")
        command = [maven, "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime"]
        command += ["-Dmdep.useRepositoryLayout=true", "-DoutputDirectory=jars"]
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise EmbeddedKafkaError(f"Maven failed: {(answer.stdout + answer.stderr).strip()}")
        root = Path(folder) / "jars"
        return [_describe(path, root) for path in sorted(root.rglob("*.jar"))]


def _describe(path: Path, root: Path) -> Jar:
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return Jar(path.relative_to(root).as_posix(), len(content), digest)


def write_lock(version: str, jars: list[Jar]) -> Path:
    """Write a version's lock file and return its path."""
    head = [
        f"# Apache Kafka {version}: Maven path, size in bytes, SHA-256.",
        f"# Renew with: python -m txbroker.embedded.lock {version}",
    ]
    path = lock_path(version)
    write_lock_file(path, head, jars)
    return path


def write_lock_file(path: Path, head: list[str], jars: list[Jar]) -> None:
    """Write a lock file; `head` holds its comment lines."""
    lines = [f"{jar.path} {jar.size_bytes} {jar.sha256}" for jar in jars]
    path.write_text("\n".join([*head, *lines, ""]), encoding="ascii")


def main(arguments: list[str]) -> int:
    """Write the lock files of the given versions; return the exit code."""
    if not arguments or not all(_VERSION.fullmatch(version) for version in arguments):
        sys.stderr.write("usage: python -m txbroker.embedded.lock VERSION…\n")
        return 2
    try:
        for version in arguments:
            sys.stderr.write(f"{write_lock(version, resolve(version))}\n")
    except EmbeddedKafkaError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
