"""The tables below an output folder: a run's rows are staged, and applied once the run counts.

    tables.json                 version, format and installation
    staged/run=RUN/TABLE        rows of a run that are not applied yet
    TABLE/…                     the tables, in their format

Applying can be repeated: the next run completes that of a killed one. Each format has
an engine, which never sees runs: only the folder where a table's rows are staged.
"""

from datetime import date
from typing import Protocol

import msgspec
from msgspec import structs
from pyspark.sql import DataFrame, SparkSession

from txbroker.spark import expressions as F
from txbroker.spark.schema import types_of
from txbroker.spark.storage.storage import storage_of
from txbroker.spark.tables.formats import MERGED
from txbroker.spark.tables.layout import TABLES, Table
from txbroker.spark.tables.manifest import MANIFEST_FILE, PARQUET, Manifest, manifest_of
from txbroker.spark.tables.merging import MergedTables
from txbroker.spark.tables.parquet import ParquetTables

_CONCLUDED = "concluded"
_DAY_MS = 86_400_000


class TableEngine(Protocol):
    """Reads and writes tables in one format."""

    def read(self, table: Table) -> DataFrame:
        """Return the rows, with the columns of `table.ddl` in that order; none where there is no
        table. Columns that older files lack are null."""

    def stage(self, staged: str, table: Table, rows: DataFrame, known: DataFrame | None) -> None:
        """Write below the folder `staged` all that `apply` needs; see `TableStore.stage`."""

    def create(self, staged: str, table: Table) -> None:
        """Make the table without rows, where there is none, through the folder `staged`."""

    def apply(self, staged: str, table: Table) -> None:
        """Change the table as staged. After a kill in the middle it is called again; it is not
        called again once it has returned and `staged` was removed."""

    def compact(self, staged: str, table: Table) -> int:
        """Join the small files of a day, and return how many there were. A format whose commits
        are whole does so at once, others write below `staged` all that `apply` needs."""

    def register(self, table: Table) -> None:
        """Enter the table in the current database of Spark's catalogue, or refresh its entry."""


class TableStore:
    """The tables below an output folder; made by `open_store`.

    Attributes:
        out: the output folder.
        manifest: what `tables.json` holds once a run has staged rows.
    """

    def __init__(
        self,
        spark: SparkSession,
        out: str,
        manifest: Manifest,
        engine: TableEngine,
        stored: Manifest | None,
    ) -> None:
        self.out, self.manifest, self._stored = out, manifest, stored
        self._spark, self._engine, self._files = spark, engine, storage_of(spark, out)

    def read(self, table: Table) -> DataFrame:
        """Return a table; columns as in the layout, no row where there is no table."""
        return self._engine.read(table)

    def stage(
        self, run: str, table: Table, rows: DataFrame, known: DataFrame | None = None
    ) -> None:
        """Stage rows of a run, once for each table.

        Args:
            rows: the rows to add, each key once; columns as in `table.ddl`. `day` is never null.
            known: `day` and the key columns of rows that the table may hold, each once; those rows
                are removed. It is read several times. None: the table holds none of `rows`.
        """
        if self._stored != self.manifest:
            self.write(self.manifest)
        ordered = F.select(rows, *types_of(table.ddl).names)
        self._engine.stage(f"{self._staged}/run={run}/{table.name}", table, ordered, known)

    def apply(self, run: str) -> None:
        """Change the tables as a run has staged; nothing where that was done already. Other
        programs find every table from then on, also those without rows."""
        folder = f"{self._staged}/run={run}"
        names = self._files.names(folder)
        if not names:
            return
        for table in TABLES:
            self._engine.create(f"{folder}/empty/{table.name}", table)
            if table.name in names:
                self._engine.apply(f"{folder}/{table.name}", table)
        self._files.remove(folder)

    def discard(self, run: str) -> None:
        """Remove the staged rows of a run that does not count."""
        self._files.remove(f"{self._staged}/run={run}")

    def compact(self, run: str) -> dict[str, int]:
        """Join small files, which counts from `conclude` on; return how many, by table."""
        folder = f"{self._staged}/run={run}"
        return {t.name: self._engine.compact(f"{folder}/{t.name}", t) for t in TABLES}

    def register(self, table: Table) -> None:
        """Enter a table in the current database of Spark's catalogue, or refresh its entry."""
        self._engine.register(table)

    def conclude(self, run: str) -> None:
        """Let the staged changes of an upkeep count, which has no entry in the journal."""
        self._files.write(f"{self._staged}/run={run}/{_CONCLUDED}", b"")

    def is_concluded(self, run: str) -> bool:
        """Return whether the staged changes count without an entry in the journal."""
        return self._files.exists(f"{self._staged}/run={run}/{_CONCLUDED}")

    def staged_runs(self) -> list[str]:
        """Return the runs with staged rows, the oldest first."""
        return sorted(name.removeprefix("run=") for name in self._files.names(self._staged))

    def belong_to(self, series: str) -> None:
        """Let the tables belong to a series of audits, from the first rows on that it stages."""
        self.manifest = structs.replace(self.manifest, series=series)

    def write(self, manifest: Manifest) -> None:
        """Replace `tables.json`."""
        content = msgspec.json.encode(manifest)
        self._files.write(f"{self.out}/{MANIFEST_FILE}", content)
        self.manifest = self._stored = manifest

    def note_expiry(self, day: str) -> None:
        """Note that rows of earlier days were removed. `day`: ISO 8601."""
        self.write(structs.replace(self.manifest, expired_before=day))

    @property
    def exists(self) -> bool:
        """Whether there are tables."""
        return self._stored is not None

    @property
    def series(self) -> str | None:
        """The series of audits that has written the tables; None: not known, or none."""
        return None if self._stored is None else self._stored.series

    @property
    def expired_ms(self) -> int:
        """When the first day begins of which the tables hold all rows; 0: of all days."""
        day = self.manifest.expired_before
        return 0 if day is None else (date.fromisoformat(day) - date(1970, 1, 1)).days * _DAY_MS

    @property
    def _staged(self) -> str:
        return f"{self.out}/staged"


def open_store(
    spark: SparkSession,
    out: str,
    installation: str | None = None,
    table_format: str | None = None,
    series: str | None = None,
) -> TableStore:
    """Open the tables below an output folder; where there are none, the first run makes them.

    Args:
        out: a path, or a URI that Hadoop knows.
        installation: the `topic_prefix`; None: that of the tables.
        table_format: None: that of the tables, or Parquet where there are none.
        series: of audits; None: any.

    Raises:
        ConfigurationError: the tables do not fit, or the folder cannot be read.
    """
    out = out.rstrip("/")
    content = storage_of(spark, out).read(f"{out}/{MANIFEST_FILE}")
    found = manifest_of(out, content, installation, table_format, series)
    manifest = found or Manifest(installation or "", table_format or PARQUET)
    merged = MERGED.get(manifest.format)
    engine = ParquetTables(spark, out) if merged is None else MergedTables(spark, out, merged)
    return TableStore(spark, out, manifest, engine, found)
