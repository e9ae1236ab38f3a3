"""Reads the secrets of groups, at the places that the settings allow."""

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
"""A larger secret file is a mistake."""
READS_MAX = 8
"""Secret files that are read at a time."""
READ_S = 3.0
"""Maximum time to read a secret file, seconds: `secrets_dir` may be on a network."""
OWN_VARIABLES = "TXBROKER_"
_OWN = "the proxy itself uses it; a group needs a separate secret"
_BELOW = "secret_ref must name a file below the proxy's setting secrets_dir"
_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC


class SecretUnavailable(Exception):
    """A group's secret cannot be read; the message names the place, never the content."""


class SecretRefused(SecretUnavailable):
    """The group may not name the secret's place, or its content cannot be a secret."""


def file_name(group: str) -> str:
    """Return the name of a group's secret file, or of its folder of them, in `secrets_dir`.

    It is the group's name, encoded as in URL paths. A leading dot is encoded, too: such names
    belong to the file system (`..`) and to Kubernetes (`..data`).
    """
    name = quote(group, safe="")
    return f"%2E{name[1:]}" if name.startswith(".") else name


class GroupSecrets:
    """Reads the secrets that groups refer to, at the places that the settings allow.

    A group may name only its own files: with another group's, its checks would carry that group's
    signature.

    Args:
        folder: holds the groups' files, named by `file_name`; None: no files.
        variables: entries of `secret_env_allow`.
        own: files of the proxy, which no group may name.
        read_s: maximum time to read a file, seconds.
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
        # The folder as configured, which may be a link, and its real path.
        self._spellings = () if folder is None else (os.path.abspath(folder), self._folder or "")
        self._threads = DaemonThreads[bytes]("secret", READS_MAX, READS_MAX)

    def refuse(self, group: str, ref: str) -> str | None:
        """Return why a group may not name this place, or None. Examines only the text."""
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
        """Return the key of a group's secret at `ref`.

        It is read each time, so a changed secret is used at once. A file's trailing line break is
        not part of the secret. A secret that begins with `whsec_` is base64.

        Raises:
            SecretRefused: the group may not name this place, or the file there is too large.
            SecretUnavailable: it is missing, empty, unreadable or not base64.
        """
        refusal = self.refuse(group, ref)
        if refusal is not None:
            raise SecretRefused(refusal)
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
        """Return a path relative to the folder; None if it is not below it."""
        parts = path.split("/")
        if ".." in parts:
            return None
        plain = os.path.normpath(path)
        for folder in self._spellings:
            if plain.startswith(folder.rstrip("/") + "/"):
                return plain[len(folder.rstrip("/")) + 1 :]
        return None

    def _read(self, path: str) -> bytes:
        """Return the content of a file; runs in a thread, may block."""
        folder, below = self._folder, self._below(path)
        if folder is None or below is None:
            raise SecretRefused(f"{_BELOW}, not {path}")
        real = os.path.realpath(os.path.join(folder, below))
        if not real.startswith(folder.rstrip("/") + "/"):
            raise SecretRefused(f"{_BELOW}, and not link out of it as {path} does")
        try:
            # Tested before it is opened: opening alone can have effects on a device.
            _require_regular(os.stat(real, follow_symlinks=False), path)
            file = _open_below(folder, os.path.relpath(real, folder))
        except OSError as error:
            raise SecretUnavailable(f"the file {path} cannot be read: {error.strerror}") from None
        with os.fdopen(file, "rb") as opened:
            status = os.fstat(file)
            _require_regular(status, path)
            if any(_is_file(own, status) for own in self._own):
                raise SecretRefused(f"secret_ref names the file {path}: {_OWN}")
            content = opened.read(SECRET_BYTES_MAX + 1)
        if len(content) > SECRET_BYTES_MAX:
            raise SecretRefused(
                f"the file {path} is too large for a secret: it may have {SECRET_BYTES_MAX:,} bytes"
            )
        return content.rstrip(b"\r\n")


def _require_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SecretRefused(f"the file {path} is not a regular file")


def _open_below(folder: str, path: str) -> int:
    """Open a file by its real path in a folder. No link is followed, so that one created meanwhile
    cannot lead out of the folder.

    Raises:
        OSError: the file is missing, or a link is in its path.
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


def _is_file(own: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(own.stat(), status)
    except (OSError, ValueError):
        return False
