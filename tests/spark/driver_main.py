"""Compares three messages with an SQLite table, in a Spark that fetches the driver itself.

Called with the database and the driver's Maven coordinates; prints the findings as JSON.
"""

from __future__ import annotations

import json
import sys

from txbroker.spark.business import BusinessTable, compare
from txbroker.spark.schema import Terms
from txbroker.spark.session import SparkSettings, spark_session

COLUMNS = """
    id string, state string, grp string, findings array<string>,
    places array<struct<topic: string, partition: int, offset: bigint, seq: int>>,
    prepared_at_ms bigint, decided_at_ms bigint
"""


def main(database: str, packages: str, *ids: str) -> None:
    conf = {"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "1"}
    if packages:
        conf["spark.jars.packages"] = packages
    with spark_session(SparkSettings("local[2]", conf)) as spark:
        reported = [(id, "promoted", "shop", [], [("orders", 0, 1, 0)], 1, 1) for id in ids]
        business = BusinessTable(f"jdbc:sqlite:{database}", "orders", "id")
        terms = Terms(1_800_000_000_000)
        table = spark.createDataFrame(reported, COLUMNS)
        found, counts = compare(spark, table, business, terms, half_partitions=3)
        rows = {row["id"]: row["kind"] for row in found.collect()}
    print(json.dumps({"found": rows, "counts": counts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
