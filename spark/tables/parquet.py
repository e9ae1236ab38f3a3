"""Tables as Parquet files: `OUT/TABLE/day=DAY/*.parquet`.

A file is never changed. To replace rows, the files that hold them are written again without them,
into the staging folder like the new rows. Applying renames all staged files into the table, and
then removes the files that were written again. Both can be repeated. Between the two, a reader sees
some rows twice, for as long as the renames take.

A new table starts with a file that has its columns and no rows, so that other programs can read it.
"""

import io
from collections.abc import Sequence
from datetime import date

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from txbroker.spark import expressions as F
from txbroker.spark.schema import arrow_types, no_rows, types_of
from txbroker.spark.session import setting
from txbroker.spark.storage.storage import storage_of
from txbroker.spark.tables.judged import known_keys, same_keys
from txbroker.spark.tables.layout import Table

_TIMESTAMP_TYPE = "spark.sql.parquet.outputTimestampType"
_REPLACED_FILE = "replaced.json"
_NO_DAY = "day=1969-12-31"
"""Where the file without rows is: the day before the first one that a row can have."""
_SMALL_BYTES = 32 << 20
"""Files below this size are joined."""
_WHOLE_BYTES = 128 << 20
"""Size of the files that they are joined to."""


class ParquetTables:
    """The engine of Parquet tables; see `store.TableEngine`."""

    def __init__(self, spark: SparkSession, out: str) -> None:
        self._spark, self._out, self._storage = spark, out, storage_of(spark, out)

    def read(self, table: Table) -> DataFrame:
        """Return the rows of a table."""
        if not self._may_have_rows(table):
            return no_rows(self._spark, table.ddl)
        return self._files(table, [self._folder(table)])

    def stage(self, staged: str, table: Table, rows: DataFrame, known: DataFrame | None) -> None:
        """Write new rows, and the other rows of files that hold known ones."""
        replaced: list[str] = []
        if known is not None and self._may_have_rows(table):
            replaced = self._files_with(table, known)
            paths = [f"{self._folder(table)}/{name}" for name in replaced]
            if paths:
                held = self._files(table, paths)
                rest = held.join(known, same_keys(known_keys(table), held, known), "left_anti")
                rows = rows.unionByName(rest)
        # As few files as hold the rows of a day.
        self._write(staged, rows.hint("rebalance", "day"), replaced)

    def compact(self, staged: str, table: Table) -> int:
        """Write the small files of each day that has several again, as few ones."""
        files: dict[str, int] = {}
        parts: dict[date, int] = {}
        for day in filter(_is_day, self._storage.names(self._folder(table))):
            sizes = self._storage.sizes(f"{self._folder(table)}/{day}")
            small = {f"{day}/{name}": n for name, n in sizes.items() if n < _SMALL_BYTES}
            if len(small) > 1:
                files |= small
                parts[date.fromisoformat(day.removeprefix("day="))] = -(
                    -sum(small.values()) // _WHOLE_BYTES
                )
        if files:
            rows = self._files(table, [f"{self._folder(table)}/{name}" for name in files])
            of_day = F.create_map(*(F.lit(each) for item in parts.items() for each in item))
            part = F.pmod(F.xxhash64(*table.keys), of_day[F.col("day")])
            self._write(staged, rows.repartition(sum(parts.values()), "day", part), [*files])
        return len(files)

    def create(self, staged: str, table: Table) -> None:
        """Rename a folder with a file without rows to the table's place, if that is free."""
        folder = self._folder(table)
        if self._storage.exists(folder):
            return
        import pyarrow.parquet as pq  # takes a while, and only the first run needs it

        columns = [field for field in types_of(table.ddl) if field.name != "day"]
        schema = arrow_types(StructType(columns))
        file = io.BytesIO()
        pq.write_table(schema.empty_table(), file)
        self._storage.write(f"{staged}/{_NO_DAY}/no-rows.parquet", file.getvalue())
        self._storage.replace(staged, folder)

    def apply(self, staged: str, table: Table) -> None:
        """Rename the staged files into the table, and remove those that they replace."""
        content = self._storage.read(f"{staged}/{_REPLACED_FILE}")
        for day in filter(_is_day, self._storage.names(f"{staged}/rows")):
            self._storage.move(f"{staged}/rows/{day}", f"{self._folder(table)}/{day}")
        for name in msgspec.json.decode(content or b"[]", type=list[str]):
            self._storage.remove(f"{self._folder(table)}/{name}")

    def register(self, table: Table) -> None:
        """Enter the table in the current database, with the days that it has now."""
        self._spark.sql(
            f"CREATE TABLE IF NOT EXISTS {table.name} ({table.ddl}) USING parquet "
            f"PARTITIONED BY (day) LOCATION '{self._folder(table)}'"
        )
        self._spark.sql(f"MSCK REPAIR TABLE {table.name} SYNC PARTITIONS")

    def _write(self, staged: str, rows: DataFrame, replaced: Sequence[str]) -> None:
        # INT96, Spark's default, has no statistics, and DuckDB and Arrow call it deprecated.
        with setting(self._spark, _TIMESTAMP_TYPE, "TIMESTAMP_MICROS"):
            rows.write.partitionBy("day").parquet(f"{staged}/rows")
        self._storage.write(f"{staged}/{_REPLACED_FILE}", msgspec.json.encode(replaced))

    def _files(self, table: Table, paths: list[str]) -> DataFrame:
        reader = self._spark.read.schema(table.ddl).option("basePath", self._folder(table))
        rows = reader.parquet(*paths)
        return F.select(rows, *types_of(table.ddl).names)

    def _files_with(self, table: Table, known: DataFrame) -> list[str]:
        """Return the files that hold known rows, as `day=DAY/NAME`."""
        days = [row["day"] for row in known.select("day").distinct().collect()]
        reader = self._spark.read.schema(table.ddl).parquet(self._folder(table))
        named = reader.where(F.col("day").isin(days)).select(
            *known_keys(table), F.col("_metadata.file_name").alias("file")
        )
        found = named.join(known, same_keys(known_keys(table), named, known), "left_semi")
        files = found.select("day", "file").distinct().collect()
        return [f"day={row['day'].isoformat()}/{row['file']}" for row in files]

    def _may_have_rows(self, table: Table) -> bool:
        # Else Spark would read the file without rows in a job.
        folder = self._folder(table)
        return any(name != _NO_DAY for name in self._storage.names(folder))

    def _folder(self, table: Table) -> str:
        return f"{self._out}/{table.name}"


def _is_day(name: str) -> bool:
    return name.startswith("day=")
