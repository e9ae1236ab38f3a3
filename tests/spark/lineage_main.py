"""An audit without Kafka, with the listener that the page about data tools configures:
python -m tests.spark.lineage_main FOLDER SETTING…"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

from tests.spark.conftest import SPARK_CONF
from tests.spark.fact_world import NAMES, World
from txbroker.spark.run import AuditSettings, run_audit
from txbroker.spark.schema import Terms
from txbroker.spark.session import SparkSettings, spark_session


def main(folder: Path, *given: str) -> None:
    world = World(7)
    half = world.prepare()
    world.promote(half, world.mark(half, "commit"))
    world.reads = [world.end()]
    settings = AuditSettings(
        str(folder / "out"), folder / "data", NAMES, Terms(world.now_at(world.end()))
    )
    conf = SPARK_CONF | dict(setting.split("=", 1) for setting in given)
    with (
        spark_session(SparkSettings("local[2]", conf)) as spark,
        patch("txbroker.spark.facts.history.extract", world.stage),
    ):
        access: object = None  # the world is asked itself
        print(run_audit(spark, access, settings).run)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
