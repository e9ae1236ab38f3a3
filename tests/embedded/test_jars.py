"""Downloading from a repository that misbehaves."""

from __future__ import annotations

import errno
import hashlib
import http.server
import io
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from txbroker.embedded import jars
from txbroker.embedded.errors import (
    DiskFullError,
    DownloadError,
    StartCancelledError,
    WrongHashError,
)
from txbroker.embedded.lock import Jar

CONTENT = {f"org/x/{name}/1/{name}-1.jar": name.encode() * 50_000 for name in ("aa", "bb", "cc")}
LOCK = [Jar(path, len(body), hashlib.sha256(body).hexdigest()) for path, body in CONTENT.items()]
ODD = LOCK[1]


class Repository:
    """A Maven repository on a free port. `faults` maps a path to its next responses."""

    def __init__(self) -> None:
        self.faults: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.authorization: str | None = None
        self.hold = threading.Event()
        repository = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                repository.answer(self)

            def log_message(self, *_args: object) -> None:
                """Stay silent."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = request.path.removeprefix("/maven2/")
        self.asked.append(path)
        self.authorization = request.headers["Authorization"]
        faults = self.faults.get(path, [])
        fault = faults.pop(0) if faults else ""
        if fault.isdigit():
            return request.send_error(int(fault))
        body = CONTENT[path]
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if fault == "hang":
            self.hold.wait(20)
        if fault == "corrupt":
            body = body[:-1] + b"!"
        if fault == "truncate":
            body = body[:1000]
        request.wfile.write(body)


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Repository]:
    """The repository that is downloaded from, with an empty cache and no pauses."""
    repository = Repository()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(jars.REPOSITORY_SETTING, f"http://{repository.address}/maven2/")
    monkeypatch.setattr(jars, "read_lock", lambda _version: LOCK)
    monkeypatch.setattr(jars, "_BACK_OFF_S", (0.0, 0.0))
    thread = threading.Thread(target=repository.server.serve_forever, args=(0.02,))
    thread.start()
    yield repository
    repository.hold.set()
    repository.server.shutdown()
    thread.join()
    repository.server.server_close()


class Counter(jars.Progress):
    """A progress that adds up."""

    def __init__(self) -> None:
        self.total = self.done = 0
        self.ended = False

    def begin(self, what: str, total_bytes: int) -> None:
        self.total = total_bytes

    def advance(self, n_bytes: int) -> None:
        self.done += n_bytes

    def end(self) -> None:
        self.ended = True


def files_in_cache(tmp_path: Path) -> set[str]:
    root = tmp_path / "cache" / "txbroker" / "maven"
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def assert_whole(paths: list[Path]) -> None:
    assert [path.read_bytes() for path in paths] == list(CONTENT.values())


def test_jars_are_downloaded_once(repository: Repository, tmp_path: Path) -> None:
    progress = Counter()
    assert_whole(jars.ensure_jars("x", progress))
    assert progress.ended
    assert progress.done == progress.total == sum(map(len, CONTENT.values()))
    assert_whole(jars.ensure_jars("x"))
    assert sorted(repository.asked) == sorted(CONTENT)
    assert files_in_cache(tmp_path) == set(CONTENT)


@pytest.mark.parametrize(
    ("fault", "error", "match", "attempts"),
    [
        ("corrupt", WrongHashError, rf"SHA-256 is wrong.*{ODD.sha256}", 3),
        ("truncate", DownloadError, "could not be downloaded", 3),
        ("404", DownloadError, "404", 1),
    ],
)
def test_failed_download_names_jar_and_leaves_no_file(
    repository: Repository,
    tmp_path: Path,
    fault: str,
    error: type[Exception],
    match: str,
    attempts: int,
) -> None:
    repository.faults[ODD.path] = [fault] * 9
    with pytest.raises(error, match=rf"{ODD.name}.*{match}"):
        jars.ensure_jars("x")
    assert repository.asked.count(ODD.path) == attempts
    assert not [name for name in files_in_cache(tmp_path) if "bb" in name or ".part" in name]


@pytest.mark.parametrize("fault", ["corrupt", "truncate", "503", "429"])
def test_transient_failure_is_retried(repository: Repository, fault: str) -> None:
    repository.faults[ODD.path] = [fault, fault]
    progress = Counter()
    assert_whole(jars.ensure_jars("x", progress))
    assert repository.asked.count(ODD.path) == 3
    assert progress.done == progress.total


def test_unreachable_repository_names_next_step(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but not listening
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv(jars.REPOSITORY_SETTING, address)
        with pytest.raises(DownloadError, match=r"unreachable.*Check the network"):
            jars.ensure_jars("x")


def test_invalid_repository_setting_is_refused(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(jars.REPOSITORY_SETTING, "repo.example.com/maven")
    with pytest.raises(DownloadError, match="TXBROKER_MAVEN_REPOSITORY must be a URL"):
        jars.ensure_jars("x")


def test_repository_login_is_sent_but_not_shown(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://ann:s%40cret@{repository.address}/maven2"
    monkeypatch.setenv(jars.REPOSITORY_SETTING, url)
    repository.faults[ODD.path] = ["404"]
    with pytest.raises(DownloadError) as caught:
        jars.ensure_jars("x")
    assert "cret" not in str(caught.value)
    assert repository.authorization == "Basic YW5uOnNAY3JldA=="


def test_full_disk_is_named(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskFullError, match="is full"):
        jars.ensure_jars("x")


def test_unusable_cache_folder_is_named(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DownloadError, match=r"cannot be written.*XDG_CACHE_HOME"):
        jars.ensure_jars("x")


@pytest.mark.parametrize("change", [lambda body: b"half", lambda body: b"!" + body[1:]])
def test_broken_cached_jar_is_replaced(
    repository: Repository, change: Callable[[bytes], bytes]
) -> None:
    paths = jars.ensure_jars("x")
    paths[0].write_bytes(change(paths[0].read_bytes()))
    assert_whole(jars.ensure_jars("x"))


def test_stale_partial_downloads_are_removed(repository: Repository, tmp_path: Path) -> None:
    folder = (tmp_path / "cache" / "txbroker" / "maven" / ODD.path).parent
    folder.mkdir(parents=True)
    old, fresh = folder / ".bb-1.jar.old.part", folder / ".bb-1.jar.fresh.part"
    old.write_bytes(b"x")
    fresh.write_bytes(b"x")
    os.utime(old, (time.time() - 7200,) * 2)
    jars.ensure_jars("x")
    assert not old.exists()
    assert fresh.exists()


def test_download_can_be_cancelled(repository: Repository) -> None:
    repository.faults[ODD.path] = ["hang"]
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(StartCancelledError):
        jars.ensure_jars("x", cancelled=cancelled)


def test_folder_can_be_repository(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for path, body in CONTENT.items():
        (tmp_path / "m2" / path).parent.mkdir(parents=True)
        (tmp_path / "m2" / path).write_bytes(body)
    monkeypatch.setenv(jars.REPOSITORY_SETTING, (tmp_path / "m2").as_uri())
    assert_whole(jars.ensure_jars("x"))
    assert repository.asked == []


def test_two_processes_download_concurrently(repository: Repository, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=jars.ensure_jars, args=("x",)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert files_in_cache(tmp_path) == set(CONTENT)
    assert_whole(jars.ensure_jars("x"))


def test_progress_is_lines_where_stderr_is_no_terminal() -> None:
    file = io.StringIO()
    progress = jars.BarProgress(Console(file=file))
    progress.begin("Kafka 9", 40_000_000)
    for _ in range(3):
        progress.advance(10_000_000)
    progress.advance(-10_000_000)  # a retry
    progress.advance(20_000_000)
    progress.end()
    assert file.getvalue().splitlines() == [
        f"Kafka 9: {megabytes} of 40 MB" for megabytes in (0, 10, 20, 30, 40)
    ]
