"""Files of an audit in a local folder, in plain Python.

Hadoop, through which Spark writes to local folders, puts a file of checksums beside each file
(`.NAME.crc`). These are not listed, and are moved and removed with their files.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from txbroker.errors import ConfigurationError


def local_path(path: str) -> Path | None:
    """Return where a path or `file:` URI is on this machine; None for another URI. As in Hadoop,
    `%` escapes nothing."""
    scheme = urlsplit(path).scheme
    if not scheme:
        return Path(path)
    return Path("/" + path[len("file:") :].lstrip("/")) if scheme == "file" else None


def check_local(path: str) -> None:
    """Raise a ConfigurationError where only the Java of a session reaches a path."""
    if local_path(path) is None:
        raise ConfigurationError(
            f"{path} cannot be used with Spark Connect, where Python has no Java: name a folder "
            "that this machine shares with Spark's executors, as a path or file: URI; or use "
            "--master, without SPARK_REMOTE"
        )


class LocalStorage:
    """Local files; see `storage.Storage`."""

    def read(self, path: str) -> bytes | None:
        """Read a file."""
        with self._located(path) as where:
            try:
                return where.read_bytes()
            except FileNotFoundError:
                return None

    def write(self, path: str, content: bytes, mode: int = 0o666) -> None:
        """Write a file beside the older one to the disk, then rename it. `mode`: who may read it,
        less the process's mask."""
        with self._located(path) as where:
            where.parent.mkdir(parents=True, exist_ok=True)
            fresh = where.with_name(f"{where.name}.new")
            fresh.unlink(missing_ok=True)
            with os.fdopen(
                os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb"
            ) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            _checksums(where).unlink(missing_ok=True)  # of the older one
            fresh.replace(where)

    def exists(self, path: str) -> bool:
        """Return whether there is such a file or folder."""
        with self._located(path) as where:
            return where.exists()

    def names(self, path: str) -> list[str]:
        """List a folder."""
        with self._located(path) as where:
            try:
                return [name for name in os.listdir(where) if not _is_checksums(name)]
            except FileNotFoundError:
                return []

    def sizes(self, path: str) -> dict[str, int]:
        """List the data files of a folder."""
        with self._located(path) as where, os.scandir(where) as entries:
            shown = [each for each in entries if not each.name.startswith((".", "_"))]
            return {each.name: each.stat().st_size for each in shown}

    def make(self, path: str) -> None:
        """Create a folder."""
        with self._located(path) as where:
            where.mkdir(parents=True, exist_ok=True)

    def remove(self, path: str) -> None:
        """Remove a file or folder."""
        with self._located(path) as where, suppress(FileNotFoundError):
            if where.is_dir():
                shutil.rmtree(where)
            else:
                where.unlink()
                _checksums(where).unlink(missing_ok=True)

    def replace(self, path: str, old: str) -> None:
        """Rename a folder."""
        self.remove(old)
        with self._located(path) as source, self._located(old) as target:
            source.replace(target)

    def move(self, source: str, target: str) -> None:
        """Rename the files of a folder, one by one."""
        self.make(target)
        for name in self.names(source):
            with self._located(f"{source}/{name}") as was, self._located(target) as into:
                was.replace(into / name)
                with suppress(FileNotFoundError):
                    _checksums(was).replace(_checksums(into / name))

    def qualified(self, path: str) -> str:
        """Return a `file:` URI, as Hadoop writes it."""
        with self._located(path) as where:
            return f"file:{where.absolute()}"

    @contextmanager
    def _located(self, path: str) -> Iterator[Path]:
        """Yield where a path is; turn the system's errors into a `ConfigurationError`."""
        where = local_path(path)
        assert where is not None
        try:
            yield where
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be used: {error.strerror or error}") from None


def _checksums(file: Path) -> Path:
    return file.with_name(f".{file.name}.crc")


def _is_checksums(name: str) -> bool:
    return name.startswith(".") and name.endswith(".crc")
