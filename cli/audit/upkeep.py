"""Runs `txbroker audit compact` and `expire`."""

import click

from txbroker.cli.audit.run import started
from txbroker.config.settings import Settings
from txbroker.spark.session import SparkSettings


def run_compact(settings: Settings, spark: SparkSettings, out: str) -> None:
    """Compact the tables, and report it on stderr."""
    with started(spark, out, stage="joining small files") as (session, _):
        from txbroker.spark.storage.folder import data_folder
        from txbroker.spark.tables.upkeep import compact

        folder = data_folder(settings.data_dir, session)
        joined = {name: n for name, n in compact(session, out, folder).items() if n}
    counts = ", ".join(f"{name}: {count:,}" for name, count in joined.items())
    click.echo(f"Joined files of {counts}." if joined else "All days are compact.", err=True)


def run_expire(settings: Settings, spark: SparkSettings, out: str, keep_days: int) -> None:
    """Remove old rows from the tables, and report it on stderr."""
    with started(spark, out, stage="removing old days") as (session, _):
        from txbroker.spark.storage.folder import data_folder
        from txbroker.spark.tables.upkeep import expire

        first = expire(session, out, data_folder(settings.data_dir, session), keep_days)
    click.echo(
        "The tables have no run, so nothing was removed."
        if first is None
        else f"Removed the rows of days before {first}; open findings stay.",
        err=True,
    )
