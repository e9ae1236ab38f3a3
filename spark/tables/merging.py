"""Tables in Delta Lake or Apache Iceberg, whose commits make each change whole.

Applying merges the staged rows into a table by their keys. So it can be repeated, and a reader sees
the table as before or as after it. Both formats are brought by the user, as packages of Spark.
"""

import zlib

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField

from txbroker.errors import ConfigurationError
from txbroker.spark import expressions as F
from txbroker.spark.launch.driver import driver_of
from txbroker.spark.launch.versions import series
from txbroker.spark.session import EXTENSIONS, setting
from txbroker.spark.storage.storage import storage_of
from txbroker.spark.tables.formats import TableFormat
from txbroker.spark.tables.judged import same_keys
from txbroker.spark.tables.layout import Table

_GONE = "_gone"
"""The column of merged rows that marks those to remove."""
_SOURCE = "_staged_rows"
_LISTING_TASKS = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
"""Delta lists the files of a table in as many tasks: 10,000 by default, which take minutes."""


class MergedTables:
    """The engine of a format that merges; see `store.TableEngine`.

    Raises:
        ConfigurationError: Spark has not loaded the format's package.
    """

    def __init__(self, spark: SparkSession, out: str, table_format: TableFormat) -> None:
        self._spark, self._out, self._format = spark, out, table_format
        # Spark keeps a catalog for the whole session, so each folder has its own.
        self._catalog = f"audit_{zlib.crc32(out.encode()):08x}"
        _, implementation = next(iter(table_format.catalog.items()))
        driver = driver_of(spark)
        if driver.jars_of(implementation) is None:
            package = table_format.packages.get(series(spark.version))
            raise ConfigurationError(
                f"the tables in {out} are of {table_format.title}, "
                + (
                    f"which has no package for Spark {spark.version}: use pyspark "
                    f"{max(table_format.packages)}"
                    if package is None
                    else "and Spark has not loaded its package: "
                    + driver.loading(package, table_format.extension)
                )
            )
        if table_format.extension not in (spark.conf.get(EXTENSIONS, "") or ""):
            raise ConfigurationError(
                f"the tables in {out} are of {table_format.title}, and Spark was started without "
                f"its extension: start it with --conf {EXTENSIONS}={table_format.extension}"
            )
        for name, value in table_format.catalog.items():
            spark.conf.set(self._filled(name), self._filled(value))

    def read(self, table: Table) -> DataFrame:
        """Return the rows of a table."""
        empty = self._spark.createDataFrame([], table.ddl)
        if not self._exists(table):
            return empty
        rows = self._spark.table(self._name(table))
        missing = {f.name: F.lit(None).cast(f.dataType) for f in self._missing(table)}
        return rows.select(*(missing.get(name, F.col(name)).alias(name) for name in empty.columns))

    def stage(self, staged: str, table: Table, rows: DataFrame, known: DataFrame | None) -> None:
        """Write the new rows, and the keys of the known ones."""
        rows.write.parquet(f"{staged}/rows")
        if known is not None:
            known.select("day", *table.keys).write.parquet(f"{staged}/known")

    def create(self, staged: str, table: Table) -> None:
        """Create the table, or add the columns that it lacks."""
        self._prepare(table)

    def apply(self, staged: str, table: Table) -> None:
        """Merge the staged rows into the table."""
        rows = self._spark.read.schema(table.ddl).parquet(f"{staged}/rows")
        keys, days = ["day", *table.keys], rows.select("day")
        source = rows.withColumn(_GONE, F.lit(False))
        if storage_of(self._spark, staged).exists(f"{staged}/known"):
            schema = rows.select(keys).schema
            known = self._spark.read.schema(schema).parquet(f"{staged}/known")
            # A row may move to another day.
            gone = known.join(rows, same_keys(table.keys, known, rows), "left_anti")
            source = source.unionByName(gone.withColumn(_GONE, F.lit(True)), True)
            days = days.union(known.select("day"))
        dates = ", ".join(f"DATE'{row.day}'" for row in days.distinct().collect())
        if not dates:
            return
        source.createOrReplaceTempView(_SOURCE)
        same = " AND ".join(f"t.`{key}` <=> s.`{key}`" for key in table.keys)
        self._spark.sql(
            f"MERGE INTO {self._name(table)} AS t USING {_SOURCE} AS s "
            f"ON {same} AND t.day IN ({dates}) "
            f"WHEN MATCHED AND s.{_GONE} THEN DELETE WHEN MATCHED THEN UPDATE SET * "
            f"WHEN NOT MATCHED AND NOT s.{_GONE} THEN INSERT *"
        )
        self._spark.catalog.dropTempView(_SOURCE)

    def compact(self, staged: str, table: Table) -> int:
        """Join small files, and remove those of versions older than the table keeps."""
        if not self._exists(table):
            return 0
        tasks = driver_of(self._spark).cores
        done = self._spark.sql(self._filled(self._format.compaction, table))
        row = done.selectExpr(f"sum({self._format.files}) AS files").first()
        with setting(self._spark, _LISTING_TASKS, str(tasks)):
            for statement in self._format.cleanup:
                self._spark.sql(self._filled(statement, table)).collect()
        return 0 if row is None else int(row.files or 0)

    def register(self, table: Table) -> None:
        """Enter the table in the current database, where the format allows it."""
        if not self._format.registration:
            raise ConfigurationError(
                f"Spark's Hive catalogue takes no tables of {self._format.title} by their path: "
                f"leave out --catalog, and read them as those of a Hadoop catalog in {self._out}"
            )
        self._prepare(table)
        self._spark.sql(self._filled(self._format.registration, table))

    def _prepare(self, table: Table) -> None:
        """Create the table, or add the columns that it lacks."""
        if not self._exists(table):
            new = self._spark.createDataFrame([], table.ddl).writeTo(self._name(table))
            for name, value in self._format.properties.items():
                new.tableProperty(name, value)
            new.using(self._format.name).partitionedBy(F.col("day")).create()
        if missing := self._missing(table):
            columns = ", ".join(f"`{f.name}` {f.dataType.simpleString()}" for f in missing)
            self._spark.sql(f"ALTER TABLE {self._name(table)} ADD COLUMNS ({columns})")

    def _missing(self, table: Table) -> list[StructField]:
        there = set(self._spark.table(self._name(table)).columns)
        schema = self._spark.createDataFrame([], table.ddl).schema
        return [field for field in schema if field.name not in there]

    def _exists(self, table: Table) -> bool:
        try:
            self._spark.table(self._name(table))
        except AnalysisException as error:
            folder = f"{self._out}/{table.name}"
            # A kill may leave the folder of the log, but rows are only written after it.
            if set(storage_of(self._spark, folder).names(folder)) - {self._format.log}:
                raise ConfigurationError(
                    f"{folder} cannot be read as {self._format.title} ({error.getCondition()}): "
                    "restore it, or name another folder with --out"
                ) from None
            return False
        return True

    def _name(self, table: Table) -> str:
        return self._filled(self._format.table, table)

    def _filled(self, text: str, table: Table | None = None) -> str:
        name = "" if table is None else table.name
        return text.format(out=self._out, catalog=self._catalog, table=name)
