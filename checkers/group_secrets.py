"""The secrets of groups, and where they may be."""

import asyncio
import os
import stat
from collections.abc import Collection
from pathlib import Path
from urllib.parse import quote

from txbroker.checkers.daemon_threads import DaemonThreads, TooManyCalls
from txbroker.config.addresses import parse_secret_variable
from txbroker.contract.signing import secret_key

SECRET_BYTES_MAX = 65_536
"""A secret file larger than this is not a secret but a mistake."""
READS_MAX = 8
"""Secret files that are read at a time."""
READ_S = 3.0
"""How long reading a secret file may take, seconds: `secrets_dir` may be on a network."""
OWN_VARIABLES = "TXBROKER_"
_OWN = "it is what the proxy itself uses; a group has a secret of its own"
_BELOW = "secret_ref must name a file below the proxy's setting secrets_dir"
_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC


class SecretUnavailable(Exception):
    """A group's secret cannot be read; the message names its place, never its content."""


class SecretRefused(SecretUnavailable):
    """The secret is at a place that the group may not name, or what is there cannot be one."""


def file_name(group: str) -> str:
    """Return what a group's secret file, or its folder of them, is called in `secrets_dir`.

    It is the group's name as it stands in URL paths. A leading dot is encoded, too: such names
    belong to the file system (`..`) and to Kubernetes (`..data`).
    """
    name = quote(group, safe="")
    return f"%2E{name[1:]}" if name.startswith(".") else name


class GroupSecrets:
    """Reads the secrets that groups refer to, at the places that the settings allow.

    A group may name its own files only: with those of another group, its checks would carry that
    group's signature.

    Args:
        folder: a group's files are in it, by the name that `file_name` gives; None: no files.
        variables: entries of `secret_env_allow`.
        own: files of the proxy, which may not be named wherever they are.
        read_s: how long reading a file may take, seconds.
    """

    def __init__(
        self,
        folder: Path | None = None,
        variables: Collection[str] = (),
        own: Collection[Path] = (),
        *,
        read_s: float = READ_S,
    ) -> None:
        self._variables = frozenset(map(parse_secret_variable, variables))
        self._own = tuple(own)
        self._read_s = read_s
        self._folder = None if folder is None else os.path.realpath(folder)
        # The folder as it is configured, which may be a link, and as it really is.
        self._spellings = () if folder is None else (os.path.abspath(folder), self._folder or "")
        self._threads = DaemonThreads[bytes]("secret", READS_MAX, READS_MAX)

    def refuse(self, group: str, ref: str) -> str | None:
        """Return why a group may not name this place, or None. Looks at nothing but the text."""
        kind, _, place = ref.partition(":")
        if kind == "env":
            if place.upper().startswith(OWN_VARIABLES):
                return f"secret_ref names the environment variable {place}: {_OWN}"
            if not self._variables & {("", place), (group, place)}:
                return (
                    "secret_ref must name an environment variable that the proxy's setting "
                    f"secret_env_allow lists for group {group}, not {place}"
                )
            return None
        if self._folder is None:
            return "secret_ref names a file, but the proxy's setting secrets_dir is not set"
        below = self._below(place)
        if below is None:
            return f"{_BELOW}, not {place}"
        own = file_name(group)
        if below.partition("/")[0] != own:
            return (
                f"secret_ref must name a file of group {group}: {self._folder}/{own} or one in "
                f"that folder, not {place}"
            )
        return None

    async def read(self, group: str, ref: str) -> bytes:
        """Return the key that the secret of a group at `ref` stands for.

        It is read each time, so a changed secret is used at once. A file's trailing line break is
        not part of the secret. What begins with `whsec_` is base64.

        Raises:
            SecretRefused: the group may not name this place, or the file there is too large.
            SecretUnavailable: it is not there, empty, unreadable or no base64.
        """
        refused = self.refuse(group, ref)
        if refused is not None:
            raise SecretRefused(refused)
        kind, _, place = ref.partition(":")
        if kind == "env":
            secret = os.environb.get(place.encode(), b"")
            where = f"the environment variable {place}"
        else:
            secret = await self._file(place)
            where = f"the file {place}"
        if not secret:
            raise SecretUnavailable(f"{where} is not set or empty; it holds the group's secret")
        try:
            return secret_key(secret)
        except ValueError as error:
            raise SecretUnavailable(f"{where} does not hold a secret: {error}") from None

    async def close(self) -> None:
        """Stop waiting for files."""
        await self._threads.close()

    async def _file(self, path: str) -> bytes:
        try:
            async with asyncio.timeout(self._read_s):
                return await self._threads.run(path, lambda: self._read(path))
        except TimeoutError:
            raise SecretUnavailable(
                f"the file {path} cannot be read within {self._read_s:g} s"
            ) from None
        except TooManyCalls:
            raise SecretUnavailable(f"the file {path}: too many secrets are being read") from None

    def _below(self, path: str) -> str | None:
        """Return what follows the folder in a path, None where the path is not below it."""
        parts = path.split("/")
        if ".." in parts:
            return None
        plain = os.path.normpath(path)
        for folder in self._spellings:
            if plain.startswith(folder.rstrip("/") + "/"):
                return plain[len(folder.rstrip("/")) + 1 :]
        return None

    def _read(self, path: str) -> bytes:
        """Return what a file holds; runs in a thread, may block."""
        folder, below = self._folder, self._below(path)
        if folder is None or below is None:
            raise SecretRefused(f"{_BELOW}, not {path}")
        real = os.path.realpath(os.path.join(folder, below))
        if not real.startswith(folder.rstrip("/") + "/"):
            raise SecretRefused(f"{_BELOW}, and not link out of it as {path} does")
        try:
            # Before it is opened: opening alone can have effects on a device.
            _require_regular(os.stat(real, follow_symlinks=False), path)
            file = _open_below(folder, os.path.relpath(real, folder))
        except OSError as error:
            raise SecretUnavailable(f"the file {path} cannot be read: {error.strerror}") from None
        with os.fdopen(file, "rb") as opened:
            found = os.fstat(file)
            _require_regular(found, path)
            if any(_is_file(own, found) for own in self._own):
                raise SecretRefused(f"secret_ref names the file {path}: {_OWN}")
            content = opened.read(SECRET_BYTES_MAX + 1)
        if len(content) > SECRET_BYTES_MAX:
            raise SecretRefused(
                f"the file {path} is too large for a secret: it may have {SECRET_BYTES_MAX:,} bytes"
            )
        return content.rstrip(b"\r\n")


def _require_regular(found: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise SecretRefused(f"the file {path} is not a regular file")


def _open_below(folder: str, path: str) -> int:
    """Open a file by its real path in a folder, following no link, so that none that is put there
    meanwhile leads out of it.

    Raises:
        OSError: it is not there, or a link was put in its way.
    """
    *folders, name = path.split("/")
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in folders:
            inner = os.open(part, _OPEN_FLAGS | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(name, _OPEN_FLAGS, dir_fd=at)
    finally:
        os.close(at)


def _is_file(own: Path, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(own.stat(), found)
    except (OSError, ValueError):
        return False
