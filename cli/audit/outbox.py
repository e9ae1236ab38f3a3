"""Runs `txbroker audit outbox`."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from txbroker.cli.audit.run import started
from txbroker.cli.run import usage_errors
from txbroker.config.settings import Settings
from txbroker.databases.urls import from_url
from txbroker.spark.access import access_from
from txbroker.spark.jdbc import driver_package
from txbroker.spark.rows.outbox import OutboxSummary, audit_outbox
from txbroker.spark.session import SparkSettings

_PACKAGES = "spark.jars.packages"


def run_outbox(
    settings: Settings, spark: SparkSettings, url: str, keep_s: float, topics: Sequence[str]
) -> OutboxSummary:
    """Audit the outbox of a database.

    Args:
        keep_s, topics: see `audit_outbox`.
    """
    with usage_errors():
        database = from_url(url)
    given = (spark.conf.get(_PACKAGES), driver_package(database))
    packages = ",".join(name for name in given if name)
    if packages:
        spark = structs.replace(spark, conf={**spark.conf, _PACKAGES: packages})
    with (
        tempfile.TemporaryDirectory(prefix="txbroker-audit-") as folder,
        started(spark, "comparing rows with records") as (session, _),
    ):
        access = access_from(settings)
        return audit_outbox(session, access, database, Path(folder), keep_s=keep_s, topics=topics)
