"""Tables and named views of an audit in Spark SQL.

A view is one query on the tables, and relates to the newest run, not to the time of the query: so
it shows the same until an audit runs again.
"""

from typing import Any, NamedTuple

from pyspark.sql import SparkSession

from txbroker.errors import ConfigurationError
from txbroker.spark.storage.storage import storage_of
from txbroker.spark.tables.layout import TABLES
from txbroker.spark.tables.sketch import GAMMA, PERCENTILES
from txbroker.spark.tables.store import TableStore


class View(NamedTuple):
    """A named query. `meaning`: its rows."""

    name: str
    meaning: str
    sql: str


_METASTORES = ("hive.metastore.uris", "javax.jdo.option.ConnectionURL")
_WEEK = "(SELECT max(began_at) - INTERVAL 7 DAYS FROM runs)"


def _percentiles(measure: str, scope: dict[str, str], where: str = "true") -> str:
    """Return SQL for the percentiles of a measure in `latency`, by merged sketches.

    Args:
        scope: the columns of the result, each with its expression.
    """
    names = ", ".join(scope)
    columns = ", ".join(f"{value} AS {name}" for name, value in scope.items())
    found = ", ".join(
        f"round(2 / {1 + GAMMA} * power({GAMMA}, min(bucket) FILTER "
        f"(WHERE upto * 100 >= total * {q})), 1) AS p{q}_ms"
        for q in PERCENTILES
    )
    return (
        f"WITH counted AS (SELECT {columns}, bucket, sum(n) AS n FROM latency "
        f"LATERAL VIEW explode({measure}.sketch) AS bucket, n WHERE {where} GROUP BY ALL), "
        f"ranked AS (SELECT *, sum(n) OVER (PARTITION BY {names} ORDER BY bucket) AS upto, "
        f"sum(n) OVER (PARTITION BY {names}) AS total FROM counted) "
        f"SELECT {names}, max(total) AS transactions, {found} FROM ranked GROUP BY {names}"
    )


_HOUR = "date_trunc('hour', minute)"

VIEWS = (
    View(
        "decided_by_hand",
        "decisions of operators, by group",
        "SELECT grp, decision, count(*) AS transactions, max(decided_at) AS newest_at, "
        "max_by(id, decided_at) AS newest FROM transactions WHERE source = 'operator' "
        "GROUP BY grp, decision ORDER BY transactions DESC, grp",
    ),
    View(
        "slowest_groups",
        "prepare to visible by group in the last seven days, the slowest first",
        _percentiles("visible", {"grp": "grp"}, f"minute >= {_WEEK}") + " ORDER BY p99_ms DESC",
    ),
    View(
        "latency_by_hour",
        "prepare to visible by hour and group",
        _percentiles("visible", {"hour": _HOUR, "grp": "grp"}) + " ORDER BY hour, grp",
    ),
    View(
        "volume_by_hour",
        "transactions that were prepared in each hour, by group",
        "SELECT date_trunc('hour', prepared_at) AS hour, grp, count(*) AS transactions, "
        "sum(messages) AS messages, count_if(decision = 'commit') AS committed, "
        "count_if(decision = 'rollback') AS rolled_back FROM transactions "
        "WHERE prepared_at IS NOT NULL GROUP BY ALL ORDER BY hour, grp",
    ),
    View(
        "checked_often",
        "transactions with more than three check-backs",
        "SELECT id, grp, count(*) AS checks, min(at) AS first_at, max(at) AS last_at, "
        "max_by(outcome, at) AS outcome FROM attempts GROUP BY id, grp HAVING checks > 3 "
        "ORDER BY checks DESC, id",
    ),
    View(
        "undecided_and_parked",
        "transactions of the newest run without a decision, by group and topic",
        "SELECT grp, topic, sum(undecided) AS undecided, sum(parked) AS parked, "
        "min(minute) AS oldest FROM latency WHERE undecided > 0 OR parked > 0 "
        "GROUP BY grp, topic ORDER BY oldest",
    ),
    View(
        "open_drift",
        "findings that are not healed, the gravest first",
        "SELECT severity, kind, id, grp, topic, partition, offset, opened_at, times, "
        "acknowledged_until, why FROM drift WHERE state = 'open' "
        "ORDER BY array_position(array('critical', 'error', 'warning'), severity), opened_at",
    ),
    View(
        "drift_this_week",
        "findings that the runs of the last seven days opened or closed",
        "SELECT severity, kind, id, grp, state, opened_at, seen_at, closed_at, why FROM drift "
        f"WHERE greatest(opened_at, closed_at) >= {_WEEK} ORDER BY opened_at",
    ),
    View(
        "acknowledged",
        "acknowledged findings that are open, those that end first at the top",
        "SELECT kind, id, grp, acknowledged_by, acknowledged_until, acknowledged_why FROM drift "
        "WHERE state = 'open' AND acknowledged_at IS NOT NULL ORDER BY acknowledged_until",
    ),
    View(
        "run_costs",
        "runs with their cost, the newest first",
        "SELECT run, mode, took_s, cost['cpu_ms'] / 1000 AS cpu_s, transactions, "
        "aggregate(map_values(records), 0L, (sum, n) -> sum + n) AS records, "
        "round(cost['shuffle_bytes'] / 1e6, 1) AS shuffle_mb, "
        "round(cost['spill_bytes'] / 1e6, 1) AS spill_mb FROM runs ORDER BY run DESC",
    ),
)


def open_tables(spark: SparkSession, store: TableStore) -> None:
    """Give the session the tables and views by their names."""
    for table in TABLES:
        store.read(table).createOrReplaceTempView(table.name)
    for view in VIEWS:
        spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW {view.name} AS {view.sql}")


def register(spark: SparkSession, store: TableStore, database: str) -> None:
    """Register tables and views in a database of Spark's catalogue, and make it the current one.

    The tables stay where they are. Those in Parquet show new days only after they were registered
    again, as the catalogue lists their days.

    Raises:
        ConfigurationError: Spark has no metastore, which would be an empty one in the current
            folder; or the database has the tables of another folder.
    """
    hadoop: Any = spark.sparkContext._jsc
    given = map(hadoop.hadoopConfiguration().get, _METASTORES)
    if not any(given):
        raise ConfigurationError(
            "--catalog needs a Hive metastore: name it with "
            "--conf spark.hadoop.hive.metastore.uris=thrift://HOST:9083, or by a hive-site.xml in "
            "SPARK_CONF_DIR"
        )
    spark.sql(f"CREATE DATABASE IF NOT EXISTS `{database}`")
    spark.sql(f"USE `{database}`")
    for table in TABLES:
        store.register(table)
        path = f"{store.out}/{table.name}"
        kept, ours = _location(spark, table.name), storage_of(spark, path).qualified(path)
        if kept != ours:
            raise ConfigurationError(
                f"the table {table.name} of the database {database} is another folder's ({kept}): "
                "name a separate database with --catalog for each output folder"
            )
    for view in VIEWS:
        spark.sql(f"CREATE OR REPLACE VIEW {view.name} COMMENT '{view.meaning}' AS {view.sql}")


def _location(spark: SparkSession, table: str) -> str:
    described = spark.sql(f"DESCRIBE FORMATTED {table}").where("col_name = 'Location'")
    row = described.first()
    return "" if row is None else str(row["data_type"])
