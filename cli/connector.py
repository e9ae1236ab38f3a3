"""Put the Kafka connector into Spark's own folder of jars, from which every Spark loads it.

`python -m txbroker.cli.connector`: for images, and for machines without a network.
"""

import os
import shutil
import sys
from pathlib import Path

import click

from txbroker.cli.run import run
from txbroker.errors import ConfigurationError


@click.command()
def connector() -> None:
    """Copy the jars of Spark's Kafka connector into Spark's folder, and print their names."""
    from txbroker.spark.launch.packages import ivy_dir
    from txbroker.spark.launch.versions import spark_home
    from txbroker.spark.session import SparkSettings, spark_session

    with spark_session(SparkSettings("local[1]")) as spark:
        loaded = spark.sparkContext.getConf().get("spark.jars", "")
    paths = [Path(jar.removeprefix("file:")) for jar in loaded.split(",")]
    jars = [path for path in paths if path.parent == ivy_dir() / "jars"]
    if not jars:
        click.echo("Spark has the connector already.")
        return
    folder = spark_home() / "jars"
    if not os.access(folder, os.W_OK):
        raise ConfigurationError(f"{folder} cannot be written: run it as the user that owns it")
    # The connector last: where it is, the others are.
    for jar in sorted(jars, key=lambda path: "spark-sql-kafka" in path.name):
        click.echo(shutil.copy2(jar, folder))


if __name__ == "__main__":
    sys.exit(run(connector, sys.argv[1:]))
