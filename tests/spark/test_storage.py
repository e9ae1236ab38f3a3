"""Where audits keep their files: the same on a local folder and through Hadoop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.stores import PLACES, Place
from txbroker.errors import ConfigurationError
from txbroker.spark.storage import storage as seam
from txbroker.spark.storage.hadoop import HadoopStorage
from txbroker.spark.storage.local import LocalStorage
from txbroker.spark.storage.storage import Storage, storage_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path / "a b" / "ü=1%20")


@pytest.fixture
def files(spark: SparkSession, place: Place) -> Storage:
    return storage_of(spark, place.uri)


def test_small_files_come_back_and_go(files: Storage, place: Place) -> None:
    path = f"{place.uri}/x/y"
    assert files.read(path) is None
    assert files.names(f"{place.uri}/x") == []
    for content in (bytes(range(256)), b"new"):
        files.write(path, content)
        assert files.read(path) == content
    assert (place.folder / "x/y").read_bytes() == b"new"
    assert files.names(f"{place.uri}/x") == ["y"]
    for _ in range(2):
        files.remove(f"{place.uri}/x")
    assert not files.exists(path)


def test_files_of_spark_are_read_moved_and_replaced(
    spark: SparkSession, files: Storage, place: Place
) -> None:
    there, into = f"{place.uri}/rows", f"{place.uri}/table"
    spark.range(3).coalesce(1).write.parquet(there)
    sizes = files.sizes(there)
    ((name, size),) = sizes.items()
    assert size == (place.folder / "rows" / name).stat().st_size
    files.remove(f"{there}/_SUCCESS")
    assert files.names(there) == [name]
    files.move(there, into)
    assert files.names(there) == []
    assert spark.read.parquet(into).count() == 3
    files.move(there, into)
    spark.range(5).write.parquet(f"{there}.new")
    files.replace(f"{there}.new", into)
    assert spark.read.parquet(into).count() == 5
    first, *others = files.sizes(into)
    for name in others:
        files.remove(f"{into}/{name}")
    # Hadoop keeps checksums beside local files.
    left = {path.name for path in place.folder.rglob("*part-*")}
    assert left <= {first, f".{first}.crc"}
    files.write(f"{into}/{first}", b"another content")
    assert [row[0] for row in spark.read.text(f"{into}/{first}").collect()] == ["another content"]


def test_a_file_that_a_killed_rename_has_copied_is_not_there_twice(
    spark: SparkSession, files: Storage, place: Place
) -> None:
    """On an object store a rename copies, then removes."""
    there, into = f"{place.uri}/rows", f"{place.uri}/table"
    for name in ("one", "two"):
        files.write(f"{there}/{name}", name.encode())
    files.write(f"{into}/one", b"one")
    files.move(there, into)
    assert files.names(there) == []
    assert {name: files.read(f"{into}/{name}") for name in files.names(into)} == {
        "one": b"one",
        "two": b"two",
    }


def test_uris_are_those_of_hadoop(spark: SparkSession, files: Storage, place: Place) -> None:
    path = spark._jvm.org.apache.hadoop.fs.Path(place.uri)  # type: ignore[union-attr]
    where = path.getFileSystem(spark._jsc.hadoopConfiguration()).makeQualified(path)
    assert files.qualified(place.uri) == where.toString()


def test_local_files_need_no_java(place: Place) -> None:
    """Spark Connect has none in Python."""
    remote: Any = SimpleNamespace()
    if not place.is_local:
        with pytest.raises(ConfigurationError, match=r"Spark Connect.*file: URI"):
            storage_of(remote, place.uri)
        return
    files = storage_of(remote, place.uri)
    files.write(f"{place.uri}/x", b"1")
    assert (place.folder / "x").read_bytes() == b"1"


def test_a_path_without_a_scheme_is_where_spark_looks(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam, "default_scheme", lambda context: "hdfs")
    assert isinstance(storage_of(spark, str(tmp_path)), HadoopStorage)
    assert isinstance(storage_of(spark, tmp_path.as_uri()), LocalStorage)


@pytest.mark.parametrize("uri", ["nofs://x/y", "/proc/version/x"])
def test_an_unusable_place_is_one_sentence(spark: SparkSession, uri: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{uri} cannot be used: \w"):
        storage_of(spark, uri).write(uri, b"")
