"""Spark starts quietly and with what the audit needs, and says in a sentence why it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from txbroker.embedded import EmbeddedKafka


def test_spark_reads_kafka(spark: SparkSession, kafka: EmbeddedKafka) -> None:
    read = spark.read.format("kafka").options(
        **{"kafka.bootstrap.servers": kafka.bootstrap, "subscribePattern": "no-such-.*"}
    )
    assert read.load().count() == 0
    assert spark.range(10).mapInPandas(lambda frames: frames, "id long").count() == 10


def test_a_task_does_not_read_the_directories_of_archives_again(spark: SparkSession) -> None:
    def directories(_number: int) -> list[bool]:
        import importlib
        import zipimport

        known: dict[str, Any] = zipimport._zip_directory_cache  # type: ignore[attr-defined]
        before = dict(known)
        importlib.invalidate_caches()
        return [known.get(path) is before[path] for path in before]

    kept = spark.sparkContext.parallelize([1], 1).flatMap(directories).collect()
    assert kept, "the jar of Spark is on the workers' path"
    assert all(kept)
