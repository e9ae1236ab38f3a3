"""Registers tables in a Hive catalogue, as a program: Spark takes its kind at its start."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from tests.spark.conftest import SPARK_CONF
from tests.spark.table_cases import FIRST, SECOND, add, new_store, settled
from txbroker.errors import ConfigurationError
from txbroker.spark.query.views import VIEWS, register
from txbroker.spark.session import SparkSettings, spark_session


def main(folder: Path) -> None:
    derby = f"jdbc:derby:;databaseName={folder}/metastore;create=true"
    conf = {
        **SPARK_CONF,
        "spark.sql.catalogImplementation": "hive",
        "spark.hadoop.javax.jdo.option.ConnectionURL": derby,
    }
    with spark_session(SparkSettings("local[2]", conf)) as spark:
        store = new_store(spark, folder, "parquet")
        for run, day in (("1", FIRST), ("2", SECOND)):
            add(store, spark, run, settled(run, day, run))
            register(spark, store, "shop")
            print(spark.table("shop.transactions").count(), flush=True)
        other = new_store(spark, folder / "other", "parquet")
        add(other, spark, "1", settled("1", FIRST, "1"))
        with suppress(ConfigurationError):
            register(spark, other, "shop")
            print("tables of another folder")
        for view in VIEWS:
            spark.table(f"shop.{view.name}").collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
