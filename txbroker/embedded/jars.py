"""Kafka's jars in the user's cache: downloaded in parallel, verified, renamed when complete."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import http.client
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich import progress as bars
from rich.console import Console

from txbroker.embedded.errors import (
    DiskFullError,
    DownloadError,
    StartCancelledError,
    WrongHashError,
)
from txbroker.embedded.lock import Jar, read_lock

REPOSITORY_SETTING = "TXBROKER_MAVEN_REPOSITORY"
DEFAULT_REPOSITORY = "https://repo1.maven.org/maven2"

_PARALLEL = 8  # more gains nothing: three jars make up half of all bytes
_TIMEOUT_S = 15.0
_BACK_OFF_S = (0.3, 1.0, 3.0)  # one more attempt than there are pauses
_CHUNK_BYTES = 1 << 16
_POLL_S = 0.05
_STALE_PART_S = 3600.0  # a part this old was left by a process that was killed
_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class Progress:
    """Receives the progress of a download, from the starting thread except for `advance`.

    This one shows nothing."""

    def begin(self, what: str, total_bytes: int) -> None:
        """A download of `total_bytes` begins; `what` describes it."""

    def advance(self, n_bytes: int) -> None:
        """`n_bytes` more have arrived (negative before a retry); from any thread."""

    def end(self) -> None:
        """The download has ended or failed."""


class BarProgress(Progress):
    """A progress bar on stderr, drawn only while something is downloaded. Where stderr is not a
    terminal, a line for each tenth."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: bars.Progress | None = None
        self._task = bars.TaskID(0)
        self._shown_tenths = 0

    def begin(self, what: str, total_bytes: int) -> None:
        """Draw the bar."""
        self._shown_tenths = 0
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(),
            bars.TransferSpeedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=total_bytes)
        self._bar.start()
        self._show_tenth()

    def advance(self, n_bytes: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.advance(self._task, n_bytes)
            self._show_tenth()

    def end(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_tenth(self) -> None:
        if self._bar is None or not self._bar.disable:
            return
        task = self._bar.tasks[self._task]
        tenths = int(task.percentage // 10)
        if tenths >= self._shown_tenths:
            self._shown_tenths = tenths + 1
            total_mb = (task.total or 0) / 1e6
            self._console.print(
                f"{task.description}: {task.completed / 1e6:.0f} of {total_mb:.0f} MB",
                highlight=False,
            )


def cache_dir() -> Path:
    """Return the cache folder: txbroker/ in $XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a path that is not absolute.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "txbroker"


def ensure_jars(
    version: str, progress: Progress | None = None, cancelled: threading.Event | None = None
) -> list[Path]:
    """Return the paths of all jars of a Kafka version, downloading missing ones.

    Raises:
        UnknownVersionError: there is no lock file.
        DownloadError: a jar cannot be downloaded.
        StartCancelledError: `cancelled` was set.
    """
    return fetch_jars(f"Kafka {version}", read_lock(version), progress, cancelled)


def fetch_jars(
    what: str,
    jars: list[Jar],
    progress: Progress | None = None,
    cancelled: threading.Event | None = None,
) -> list[Path]:
    """Return the paths of jars, described by `what`; otherwise like `ensure_jars`."""
    folder = cache_dir() / "maven"
    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="txbroker-jars") as pool:
        whole = pool.map(lambda jar: _is_whole(folder / jar.path, jar), jars)
        missing = [jar for jar, found in zip(jars, whole, strict=True) if not found]
    if missing:
        stop = cancelled or threading.Event()
        _download_all(what, missing, folder, progress or Progress(), stop)
    return [folder / jar.path for jar in jars]


def _is_whole(path: Path, jar: Jar) -> bool:
    """Return whether a jar is in the cache, with its hash: a disk or a program may have changed it.

    A process reads a file again only after it has changed."""
    try:
        found = path.stat()
        if found.st_size != jar.size_bytes:
            return False
        return _sha256(path, found.st_ino, found.st_mtime_ns, found.st_ctime_ns) == jar.sha256
    except OSError:
        return False


@cache
def _sha256(path: Path, _inode: int, _modified_ns: int, _changed_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download_all(
    what: str, jars: list[Jar], folder: Path, progress: Progress, cancelled: threading.Event
) -> None:
    source = _Repository.from_environment()
    cancellation = _Cancellation(cancelled)
    pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="txbroker-jars")
    progress.begin(what, sum(jar.size_bytes for jar in jars))
    try:
        largest_first = sorted(jars, key=lambda jar: -jar.size_bytes)
        downloads = [
            pool.submit(_Download(jar, folder / jar.path, source, progress, cancellation).run)
            for jar in largest_first
        ]
        done, _ = wait(downloads, return_when=FIRST_EXCEPTION)
        for download in done:
            download.result()
    finally:
        cancellation.failed.set()
        pool.shutdown(wait=True, cancel_futures=True)
        progress.end()
    if cancelled.is_set():
        raise StartCancelledError


class _Cancellation:
    """True after the caller cancelled, or another download failed."""

    def __init__(self, cancelled: threading.Event) -> None:
        self._cancelled = cancelled
        self.failed = threading.Event()

    def __bool__(self) -> bool:
        return self._cancelled.is_set() or self.failed.is_set()

    def pause(self, seconds: float) -> None:
        """Sleep, unless cancelled."""
        deadline = time.monotonic() + seconds
        while not self and time.monotonic() < deadline:
            self.failed.wait(_POLL_S)


@dataclass(frozen=True)
class _Repository:
    """A Maven repository: its URL without credentials, and request headers."""

    url: str
    headers: dict[str, str]

    @classmethod
    def from_environment(cls) -> _Repository:
        url = (os.environ.get(REPOSITORY_SETTING) or DEFAULT_REPOSITORY).rstrip("/")
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https", "file"):
            raise DownloadError(
                f"{REPOSITORY_SETTING} must be a URL that begins with https://, http:// or file://"
            )
        login, at, host = parts.netloc.rpartition("@")
        plain = parts._replace(netloc=host).geturl()
        headers = {"User-Agent": "txbroker"}
        if at:
            token = base64.b64encode(urllib.parse.unquote(login).encode()).decode("ascii")
            headers["Authorization"] = f"Basic {token}"
        return cls(plain, headers)


class _PassingFailure(Exception):
    """An attempt failed with an error that a retry may cure."""

    def __init__(self, cause: str, error: type[DownloadError] = DownloadError) -> None:
        super().__init__(cause)
        self.error = error


class _Download:
    """Downloads one jar to a temporary file, verifies it, then renames it."""

    def __init__(
        self,
        jar: Jar,
        target: Path,
        source: _Repository,
        progress: Progress,
        cancellation: _Cancellation,
    ) -> None:
        self._jar = jar
        self._target = target
        self._source = source
        self._progress = progress
        self._cancellation = cancellation

    def run(self) -> None:
        """Download the jar, with retries."""
        for pause_s in (*_BACK_OFF_S, None):
            if self._cancellation:
                return
            try:
                return self._attempt()
            except _PassingFailure as failure:
                if pause_s is None:
                    raise failure.error(self._message(str(failure))) from failure
                self._cancellation.pause(pause_s)

    def _attempt(self) -> None:
        part = self._target.with_name(f".{self._target.name}.{uuid.uuid4().hex}.part")
        count = _Count(self._progress.advance)
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale_parts(self._target.parent)
            sha256 = self._fetch(part, count)
            if self._cancellation:
                return
            self._verify(count.total, sha256)
            os.replace(part, self._target)
        except OSError as error:
            count.take_back()
            raise self._translate(error) from error
        except http.client.HTTPException as error:
            count.take_back()
            raise _PassingFailure(f"the connection broke ({error!r})") from error
        except _PassingFailure:
            count.take_back()
            raise
        finally:
            with contextlib.suppress(OSError):  # the earlier error matters more
                part.unlink()

    def _fetch(self, part: Path, count: _Count) -> str:
        """Download to `part`; return the SHA-256."""
        request = urllib.request.Request(
            f"{self._source.url}/{self._jar.path}", headers=self._source.headers
        )
        digest = hashlib.sha256()
        with (
            urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer,
            open(part, "wb") as file,
        ):
            while chunk := answer.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
                count.add(len(chunk))
                if self._cancellation or count.total > self._jar.size_bytes:
                    break
            file.flush()
            # A jar's name must imply complete content, even after a power cut.
            os.fsync(file.fileno())
        return digest.hexdigest()

    def _verify(self, size_bytes: int, sha256: str) -> None:
        if size_bytes < self._jar.size_bytes:
            raise _PassingFailure(f"only {size_bytes} of {self._jar.size_bytes} bytes arrived")
        if sha256 != self._jar.sha256:
            raise _PassingFailure(
                f"its SHA-256 is wrong (expected {self._jar.sha256}, got {sha256})",
                WrongHashError,
            )

    def _translate(self, error: OSError) -> DownloadError | _PassingFailure:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskFullError(
                f"The disk of {self._target.parent} is full, {self._jar.name} could not be "
                "stored: free space, or set XDG_CACHE_HOME to another disk"
            )
        if isinstance(error, urllib.error.HTTPError):
            cause = f"the repository answered {error.code} {error.reason}"
            if error.code in _PASSING_STATUS:
                return _PassingFailure(cause)
            return DownloadError(self._message(cause))
        if error.filename and not isinstance(error, urllib.error.URLError):
            return DownloadError(
                f"{error.filename} cannot be written ({error.strerror}): make {cache_dir()} "
                "writable, or set XDG_CACHE_HOME to another folder"
            )
        reason = getattr(error, "reason", error)
        return _PassingFailure(f"the repository is unreachable ({reason})")

    def _message(self, cause: str) -> str:
        return (
            f"{self._jar.name} could not be downloaded from {self._source.url}: {cause}. "
            f"Check the network, or name another Maven repository in {REPOSITORY_SETTING}"
        )


class _Count:
    """Counts the bytes of one attempt, for the progress."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance
        self.total = 0

    def add(self, n_bytes: int) -> None:
        self.total += n_bytes
        self._advance(n_bytes)

    def take_back(self) -> None:
        self._advance(-self.total)


def _remove_stale_parts(folder: Path) -> None:
    oldest = time.time() - _STALE_PART_S
    for part in folder.glob(".*.part"):
        try:
            if part.stat().st_mtime < oldest:
                part.unlink()
        except FileNotFoundError:
            continue  # another process removed it
