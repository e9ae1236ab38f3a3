"""Files of an audit on any file system that Hadoop knows, through the Java of Spark's session.

On an object store a file appears whole, when it is closed, and a rename copies and removes. Where
renames are real ones, a file is written beside the older one and renamed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from py4j.protocol import Py4JJavaError

from txbroker.errors import ConfigurationError

_RENAMING = frozenset({"hdfs", "webhdfs", "swebhdfs", "viewfs", "ofs", "o3fs"})
"""File systems that write a file in place, and whose renames are atomic."""
_CONDITIONAL = "fs.option.create.conditional.overwrite"
"""S3A, from Hadoop 3.4.2 on: let the store itself refuse to create a file that exists."""
_CHECKS_FIRST = frozenset({"s3a", "s3", "s3n"})
"""File systems that otherwise only look whether it exists before they create a file."""
_NOT_THERE = "java.io.FileNotFoundException"

_default_schemes: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def default_scheme(context: Any) -> str:
    """Return the scheme of the file system where Spark looks for paths without one. `context`: the
    session's `SparkContext`."""
    if context not in _default_schemes:
        files = context._jvm.org.apache.hadoop.fs.FileSystem
        uri = files.getDefaultUri(context._jsc.hadoopConfiguration())
        _default_schemes[context] = str(uri.getScheme())
    return _default_schemes[context]


class HadoopStorage:
    """Files on Hadoop's file systems; see `storage.Storage`. `context`: the session's
    `SparkContext`."""

    def __init__(self, context: Any) -> None:
        self._jvm, self._gateway = context._jvm, context._gateway
        self._path = self._jvm.org.apache.hadoop.fs.Path
        self._conf = context._jsc.hadoopConfiguration()

    def read(self, path: str) -> bytes | None:
        """Read a file."""
        with self._located(path) as (where, files):
            try:
                stream = files.open(where)
            except Py4JJavaError as error:
                if _is_missing(error):
                    return None
                raise
            try:
                return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
            finally:
                stream.close()

    def write(self, path: str, content: bytes) -> None:
        """Write a file; see the module."""
        with self._located(path) as (where, files):
            if files.getUri().getScheme() not in _RENAMING:
                _fill(files.create(where, True), content)
                return
            fresh = where.suffix(".new")
            _fill(files.create(fresh, True), content)
            options = getattr(self._jvm.org.apache.hadoop.fs, "Options$Rename")
            overwrite = self._gateway.new_array(options, 1)
            overwrite[0] = options.OVERWRITE
            context = self._jvm.org.apache.hadoop.fs.FileContext
            context.getFileContext(files.getUri(), self._conf).rename(
                files.makeQualified(fresh), files.makeQualified(where), overwrite
            )

    def create(self, path: str, content: bytes) -> bool:
        """Write a file only where there is none; return whether it was written. `content`: no other
        process writes the same."""
        with self._located(path) as (where, files):
            creation = files.createFile(where).overwrite(False).recursive().opt(_CONDITIONAL, True)
            try:
                _fill(creation.build(), content)
            except Py4JJavaError:
                if not files.exists(where):
                    raise
        # After an error it may be there all the same: the answer was lost.
        return self.read(path) == content

    def creates_alone(self, path: str) -> bool:
        """Return whether only one of several processes can `create` a file. Otherwise several may
        at the same moment, and the content of the last one stays."""
        with self._located(path) as (where, files):
            if files.getUri().getScheme() not in _CHECKS_FIRST:
                return True
            return bool(files.hasPathCapability(where, _CONDITIONAL))

    def modified_ms(self, path: str) -> int:
        """Return when a file was written, ms since 1970 by the clock of the store."""
        with self._located(path) as (where, files):
            return int(files.getFileStatus(where).getModificationTime())

    def exists(self, path: str) -> bool:
        """Return whether there is such a file or folder."""
        with self._located(path) as (where, files):
            return bool(files.exists(where))

    def names(self, path: str) -> list[str]:
        """List a folder."""
        with self._located(path) as (where, files):
            return [str(each.getPath().getName()) for each in _listed(files, where)]

    def sizes(self, path: str) -> dict[str, int]:
        """List the data files of a folder."""
        with self._located(path) as (where, files):
            found = {str(s.getPath().getName()): int(s.getLen()) for s in files.listStatus(where)}
        return {name: size for name, size in found.items() if not name.startswith((".", "_"))}

    def make(self, path: str) -> None:
        """Create a folder."""
        with self._located(path) as (where, files):
            files.mkdirs(where)

    def remove(self, path: str) -> None:
        """Remove a file or folder."""
        with self._located(path) as (where, files):
            files.delete(where, True)

    def replace(self, path: str, old: str) -> None:
        """Rename a folder."""
        self.remove(old)
        self._rename(path, old)

    def move(self, source: str, target: str) -> None:
        """Rename the files of a folder, one by one."""
        self.make(target)
        there = set(self.names(target))
        for name in self.names(source):
            if name in there:  # copied by a rename that was killed, as object stores have it
                self.remove(f"{source}/{name}")
            else:
                self._rename(f"{source}/{name}", f"{target}/{name}")

    def qualified(self, path: str) -> str:
        """Return the whole URI."""
        with self._located(path) as (where, files):
            return str(files.makeQualified(where).toString())

    def _rename(self, path: str, to: str) -> None:
        with self._located(path) as (where, files):
            renamed = bool(files.rename(where, self._path(to)))
        if not renamed:
            raise ConfigurationError(f"{path} cannot be renamed")

    @contextmanager
    def _located(self, path: str) -> Iterator[tuple[Any, Any]]:
        """Yield Hadoop's path and file system; turn their errors into a `ConfigurationError`."""
        try:
            where = self._path(path)
            yield where, where.getFileSystem(self._conf)
        except Exception as error:
            reason = str(getattr(error, "java_exception", None) or error).partition("\n")[0]
            raise ConfigurationError(f"{path} cannot be used: {reason[:300]}") from None


def _fill(stream: Any, content: bytes) -> None:
    # After an error it is not closed: that would let an object store keep a part of the content.
    stream.write(bytearray(content))
    stream.close()


def _listed(files: Any, where: Any) -> Any:
    try:
        return files.listStatus(where)
    except Py4JJavaError as error:
        if _is_missing(error):
            return ()
        raise


def _is_missing(error: Py4JJavaError) -> bool:
    return str(error.java_exception.getClass().getName()) == _NOT_THERE
