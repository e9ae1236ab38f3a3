"""`tables.json`, which describes the tables of an output folder.

It needs no Spark, so that a run with an unsuitable folder ends before Spark starts.
"""

import msgspec
from msgspec import Struct

from txbroker.errors import ConfigurationError
from txbroker.spark.storage.local import local_path
from txbroker.spark.tables.formats import MERGED
from txbroker.spark.tables.layout import TABLES_VERSION

MANIFEST_FILE = "tables.json"
PARQUET = "parquet"
FORMATS = (PARQUET, *MERGED)


class Manifest(Struct, frozen=True):
    """The tables of an output folder.

    Attributes:
        installation: the `topic_prefix`.
        format: of the tables: `parquet`, `delta` or `iceberg`.
        version: of the tables.
        series: of the audits that write them, as their journal names it; None: not known, as an
            earlier version wrote the file.
        expired_before: rows of earlier days were removed, ISO 8601; None: no rows were.
    """

    installation: str
    format: str = PARQUET
    version: int = TABLES_VERSION
    series: str | None = None
    expired_before: str | None = None


class _Version(Struct):
    version: int


def manifest_of(
    out: str,
    content: bytes | None,
    installation: str | None = None,
    table_format: str | None = None,
    series: str | None = None,
) -> Manifest | None:
    """Parse and check a `tables.json`; return None where there is none.

    Args:
        out: the output folder, for messages.
        content: of the file; None where it does not exist.
        installation, table_format, series: those that are expected; None: any.

    Raises:
        ConfigurationError: it does not parse, or is another version's, installation's, format's or
            series'.
    """
    if content is None:
        return None
    try:
        version = msgspec.json.decode(content, type=_Version).version
        if version > TABLES_VERSION:
            raise ConfigurationError(
                f"the tables in {out} have version {version}, this txbroker knows "
                f"{TABLES_VERSION}: install the newer txbroker, or name another folder with --out"
            )
        manifest = msgspec.json.decode(content, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"{out}/{MANIFEST_FILE} does not parse ({error}): restore it, or name another folder "
            "with --out"
        ) from None
    if installation not in (None, manifest.installation):
        raise ConfigurationError(
            f"the tables in {out} belong to the installation {manifest.installation}, not "
            f"{installation}: name a separate --out for each installation"
        )
    if table_format not in (None, manifest.format):
        raise ConfigurationError(
            f"the tables in {out} have the format {manifest.format}, not {table_format}: leave out "
            "--format, or name another folder with --out"
        )
    if series is not None and manifest.series not in (None, series):
        raise ConfigurationError(
            f"the tables in {out} belong to audits with another data folder: name it with "
            "--data-dir; where it is lost, `txbroker audit run --full` takes the tables over"
        )
    return manifest


def check_local(out: str, installation: str, table_format: str | None, series: str | None) -> None:
    """Check the output folder of a run if it is on this machine, and create it.

    Raises:
        ConfigurationError: the folder cannot be used, or its tables are others'.
    """
    folder = local_path(out)
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            content = (folder / MANIFEST_FILE).read_bytes()
        except FileNotFoundError:
            content = None
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(f"the output folder {out} cannot be used: {error}") from None
    manifest_of(out, content, installation, table_format, series)
