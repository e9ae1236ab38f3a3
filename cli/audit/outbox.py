"""Runs `txbroker audit outbox`."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from txbroker.cli.audit.run import started
from txbroker.cli.run import usage_errors
from txbroker.config.settings import Settings
from txbroker.databases.dialect import SQLITE
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
    driver = "" if spark.server else driver_package(database)  # the server's packages are its own
    given = (spark.conf.get(_PACKAGES), driver)
    packages = ",".join(name for name in given if name)
    if packages:
        spark = structs.replace(spark, conf={**spark.conf, _PACKAGES: packages})
    with tempfile.TemporaryDirectory(prefix="txbroker-audit-") as folder:
        exported = [folder] if database.dialect is SQLITE else []
        with started(spark, *exported, stage="comparing rows with records") as (session, _):
            access, place = access_from(settings), Path(folder)
            return audit_outbox(session, access, database, place, keep_s=keep_s, topics=topics)
