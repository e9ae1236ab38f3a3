"""What an audit needs of the place of its files, and which implementation has a path.

A path without a scheme, and a `file:` URI, is a local one, in plain Python. Any other URI is
reached through the Java of Spark's session.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from txbroker.spark.storage.hadoop import HadoopStorage, default_scheme
from txbroker.spark.storage.local import LocalStorage, check_local, local_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Storage(Protocol):
    """Files and folders by their whole paths. On an object store, a folder exists while a file is
    in it.

    Every method raises a `ConfigurationError` where the place does not answer or refuses.
    """

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file; None where it does not exist."""

    def write(self, path: str, content: bytes) -> None:
        """Write a small file in place of an older one, so that a reader never sees a part of it.
        Creates the folders above it."""

    def exists(self, path: str) -> bool:
        """Return whether a file or folder exists."""

    def names(self, path: str) -> list[str]:
        """Return the names in a folder; none where it does not exist."""

    def sizes(self, path: str) -> dict[str, int]:
        """Return the data files in a folder, each with its size in bytes."""

    def make(self, path: str) -> None:
        """Create a folder, with those above it."""

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its contents, if it exists."""

    def replace(self, path: str, old: str) -> None:
        """Move a folder to the place of another one, which is removed."""

    def move(self, source: str, target: str) -> None:
        """Move the files of a folder into another one, which is created. Can be repeated after a
        kill, as the names are unique."""

    def qualified(self, path: str) -> str:
        """Return the whole URI of a path."""


def storage_of(spark: "SparkSession", path: str) -> Storage:
    """Return the storage of a path. One without a scheme is where Spark looks for it: on Hadoop's
    default file system, which usually is this machine's.

    Raises:
        ConfigurationError: it is not local, and the session has no Java (Spark Connect).
    """
    context: Any = getattr(spark, "_sc", None)
    if context is None:
        check_local(path)
    if local_path(path) is not None and (
        context is None or urlsplit(path).scheme or default_scheme(context) == "file"
    ):
        return LocalStorage()
    return _on_hadoop(context)


@lru_cache(maxsize=1)
def _on_hadoop(context: Any) -> HadoopStorage:
    return HadoopStorage(context)
