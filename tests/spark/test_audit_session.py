"""Spark starts quietly and with what the audit needs, and says in a sentence why it does not."""

from __future__ import annotations

import sys
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
        import sys
        import zipimport

        importer: Any = zipimport.zipimporter
        known = [each for each in sys.path_importer_cache.values() if isinstance(each, importer)]
        before = [each._files for each in known]
        importlib.invalidate_caches()
        after = [each.__dict__.get("_files") for each in known]
        return [one is other for one, other in zip(before, after, strict=True)]

    kept = spark.sparkContext.parallelize([1], 1).flatMap(directories).collect()
    assert kept, "the jar of Spark is on the workers' path"
    # Since 3.12 Python itself puts off reading them until something is looked for there.
    assert sys.version_info >= (3, 12) or all(kept)
