"""Table formats beside Parquet, each with its package for Spark. Needs no Spark."""

from collections.abc import Mapping

from msgspec import Struct


class TableFormat(Struct, frozen=True):
    """A table format. Its texts leave open `{out}`, the output folder, `{catalog}`, a name for that
    folder, and `{table}`.

    Attributes:
        name, title: in Spark, and in messages.
        packages: Maven coordinates by Spark's first two numbers; none is known for others.
        extension: the class that adds its statements to Spark's SQL.
        log: the folder of a table's versions.
        catalog: the settings of the catalog that Spark needs, the class of it first.
        table: a table in SQL.
        properties: of new tables.
        compaction: SQL that rewrites small files; the row that it returns counts them as `files`.
        cleanup: SQL that removes files of versions that are older than the table keeps.
        registration: SQL that enters a table in a Hive catalogue; empty where that cannot be.
    """

    name: str
    title: str
    packages: Mapping[str, str]
    extension: str
    log: str
    catalog: Mapping[str, str]
    table: str
    properties: Mapping[str, str]
    compaction: str
    files: str
    cleanup: tuple[str, ...]
    registration: str


MERGED = {
    "delta": TableFormat(
        name="delta",
        title="Delta Lake",
        packages={
            "4.0": "io.delta:delta-spark_2.13:4.0.0",
            "4.1": "io.delta:delta-spark_4.1_2.13:4.4.0",
            "4.2": "io.delta:delta-spark_4.2_2.13:4.4.0",
        },
        extension="io.delta.sql.DeltaSparkSessionExtension",
        log="_delta_log",
        catalog={
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
            # It reads the log of a table in as many tasks: 50 by default.
            "spark.databricks.delta.snapshotPartitions": "4",
        },
        table="delta.`{out}/{table}`",
        properties={},
        compaction="OPTIMIZE delta.`{out}/{table}`",
        files="metrics.numFilesRemoved",
        cleanup=("VACUUM delta.`{out}/{table}`",),
        registration="CREATE TABLE IF NOT EXISTS {table} USING delta LOCATION '{out}/{table}'",
    ),
    "iceberg": TableFormat(
        name="iceberg",
        title="Apache Iceberg",
        packages={
            "4.0": "org.apache.iceberg:iceberg-spark-runtime-4.0_2.13:1.10.0",
            "4.1": "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.11.0",
        },
        extension="org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        log="metadata",
        catalog={
            "spark.sql.catalog.{catalog}": "org.apache.iceberg.spark.SparkCatalog",
            "spark.sql.catalog.{catalog}.type": "hadoop",
            "spark.sql.catalog.{catalog}.warehouse": "{out}",
            # Another process may change a table meanwhile.
            "spark.sql.catalog.{catalog}.cache-enabled": "false",
        },
        table="{catalog}.{table}",
        # Else every commit would leave a file for ever.
        properties={"write.metadata.delete-after-commit.enabled": "true"},
        compaction="CALL {catalog}.system.rewrite_data_files(table => '{table}', "
        "options => map('min-input-files', '2'))",
        files="rewritten_data_files_count",
        cleanup=(
            "CALL {catalog}.system.expire_snapshots(table => '{table}')",
            "CALL {catalog}.system.remove_orphan_files(table => '{table}')",
        ),
        # Its own catalog for Hive needs parts of the metastore that pyspark lacks, and removes the
        # table's newest metadata where it fails.
        registration="",
    ),
}
"""The formats that Spark merges into, by the name in `tables.json`."""
