"""The data folder of audits on an object store: its locks, and its journal as a whole file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from tests.kit.until import until
from tests.spark.fact_world import World
from tests.spark.stores import STORE, Place
from tests.spark.test_audit_incremental import COMPARED, Installation, differences
from tests.spark.test_audit_run import summary
from txbroker.errors import ConfigurationError
from txbroker.spark.journal import Journal
from txbroker.spark.storage import lease as leases
from txbroker.spark.storage.folder import DataFolder, data_folder
from txbroker.spark.storage.hadoop import HadoopStorage
from txbroker.spark.storage.lease import LockLost, StoreLock
from txbroker.spark.storage.storage import storage_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(STORE, tmp_path / "data")


@pytest.fixture
def one(spark: SparkSession, place: Place) -> DataFolder:
    return data_folder(place.uri, spark)


@pytest.fixture
def other(spark: SparkSession, place: Place) -> DataFolder:
    """Return the folder as another process has it."""
    return data_folder(place.uri, spark)


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def expire(place: Place) -> None:
    """Let the holders of all locks have renewed them long ago."""
    long_ago = time.time() - leases.EXPIRY_S
    for file in (place.folder / "locks").rglob("[0-9]*"):
        os.utime(file, (long_ago, long_ago))


def test_the_journal_is_the_newest_version(
    one: DataFolder, other: DataFolder, place: Place
) -> None:
    first, second = Journal(one.journal), Journal(other.journal)
    assert (first.exists, first.runs(), first.acknowledged()) == (False, [], [])
    assert not place.folder.exists()
    series = first.series()
    first.add(summary("1"))
    second.add(summary("2"))
    assert [each.run for each in first.runs()] == ["2", "1"]
    assert (first.exists, second.series()) == (True, series)
    second.mark_written("0")  # changes nothing
    versions = sorted(path.name for path in (place.folder / "journal").glob("[0-9]*"))
    assert versions == ["2.db", "3.db"]


def test_a_change_that_fails_changes_nothing(
    one: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(one.journal)
    journal.add(summary("1"))
    with monkeypatch.context() as patched:
        patched.setattr(HadoopStorage, "create", refused)
        with pytest.raises(ConfigurationError, match="503"):
            journal.add(summary("2"))
    assert [each.run for each in journal.runs()] == ["1"]
    journal.add(summary("2"))
    assert [each.run for each in journal.runs()] == ["2", "1"]


def refused(storage: HadoopStorage, path: str, content: bytes) -> bool:
    if "/journal/" in path:
        raise ConfigurationError("503")
    return bool(CREATE(storage, path, content))


CREATE = HadoopStorage.create


def test_a_second_audit_is_refused_until_the_first_one_ends(
    one: DataFolder, other: DataFolder, place: Place
) -> None:
    with one.alone():
        holder = rf"process {os.getpid()} on .*\) is running on {place.uri}: .* ends in \d+ s$"
        with pytest.raises(ConfigurationError, match=holder):
            other.alone().__enter__()
    with other.alone():
        pass


def test_changes_of_the_tables_wait_for_each_other(
    one: DataFolder, other: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(leases, "POLL_S", 0.01)
    with one.tables_locked():
        waiting = Thread(target=lambda: order.append(locked(other)))
        waiting.start()
        order.append("one")
    waiting.join()
    assert order == ["one", "other"]


def locked(folder: DataFolder) -> str:
    with folder.tables_locked():
        return "other"


def is_young(file: Path) -> bool:
    return file.exists() and file.stat().st_mtime > time.time() - leases.EXPIRY_S / 2


async def test_a_lock_is_renewed(
    one: DataFolder, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.01)
    with one.alone():
        expire(place)
        await until(lambda: is_young(place.folder / "locks/audit/1"))


@pytest.mark.parametrize("lock", ["alone", "tables_locked"])
def test_a_paused_process_commits_nothing_over_another(
    one: DataFolder,
    other: DataFolder,
    place: Place,
    held: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    lock: str,
) -> None:
    """Also if it was paused just before it stores its version of the journal."""
    journal = Journal(one.journal)
    journal.series()
    held.enter_context(getattr(one, lock)())

    def paused() -> None:
        expire(place)
        held.enter_context(getattr(other, lock)())

    with monkeypatch.context() as patched:
        patched.setattr(one, "check", paused)
        with pytest.raises(LockLost, match="at the same moment"):
            journal.add(summary("1"))
    with pytest.raises(LockLost, match="has taken over the lock"):
        journal.add(summary("1"))
    Journal(other.journal).add(summary("2"))
    assert [each.run for each in journal.runs()] == ["2"]


def test_of_two_takers_at_one_moment_one_has_the_lock(
    spark: SparkSession, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3A of earlier Hadoops looks whether a file is there, then writes it: both succeed."""
    storage = storage_of(spark, place.uri)
    assert isinstance(storage, HadoopStorage)
    one, other = (StoreLock(storage, f"{place.uri}/locks/audit") for _ in range(2))

    def overtaken(storage: HadoopStorage, path: str, content: bytes) -> bool:
        monkeypatch.setattr(HadoopStorage, "create", CREATE)
        CREATE(storage, path, content)
        (place.folder / "locks/audit/1").unlink()
        assert other.take() is None
        return True

    monkeypatch.setattr(leases, "SETTLE_S", 0.0)
    monkeypatch.setattr(HadoopStorage, "creates_alone", lambda storage, path: False)
    monkeypatch.setattr(HadoopStorage, "create", overtaken)
    refused = one.take()
    assert refused is not None
    assert refused.holder == other._holder


def test_an_audit_on_a_store_leaves_what_one_in_a_folder_does(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(7)
    world.prepare()
    world.live(20)
    found = []
    for name in ("local", "store"):
        runs = Installation(spark, world, tmp_path / name, monkeypatch)
        if name == "store":
            runs.move_to_store()
        runs.audit(world.end())
        found.append({table: runs.rows(table) for table in COMPARED})
        assert Journal(runs.settings.journal).last() == runs.summaries[0]
    for table in COMPARED:
        assert differences(found[0][table], found[1][table]) == {}, table.name
    assert not (tmp_path / "store/data/audit.running").exists()


class Busy(BaseHTTPRequestHandler):
    """A store that answers 503."""

    def do_GET(self) -> None:
        self.send_error(503)

    do_PUT = do_GET

    def log_message(self, *args: object) -> None:
        pass


def test_a_store_that_answers_503_is_one_sentence(spark: SparkSession) -> None:
    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        uri = f"webhdfs://127.0.0.1:{server.server_port}/data"
        folder = data_folder(uri, spark)
        for use in (folder.alone().__enter__, Journal(folder.journal).last):
            with pytest.raises(ConfigurationError, match=rf"{uri}/.* cannot be used: .*503"):
                use()
        server.shutdown()
