"""Spark starts quietly and with what the audit needs, and says in a sentence why it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from txbroker.embedded import EmbeddedKafka


def test_spark_reads_kafka(spark: SparkSession, kafka: EmbeddedKafka) -> None:
    read = spark.read.format("kafka").options(
        **{"kafka.bootstrap.servers": kafka.bootstrap, "subscribePattern": "no-such-.*"}
    )
    assert read.load().count() == 0
    assert spark.range(10).mapInPandas(lambda frames: frames, "id long").count() == 10
