"""What the tests of the audit share: one Spark, beside the one Kafka of the session.

A test that takes both asks for `spark` and `kafka`; `kafka.bootstrap` is what Spark's
`kafka.bootstrap.servers` is set to.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.audit_process import REPORT, Commanded, begun
from tests.spark.calls import Calls
from tests.spark.planted_cases import Planted, plant_all
from tests.spark.planting import Planting
from txbroker.embedded import EmbeddedKafka
from txbroker.spark.journal import JOURNAL_FILE, Journal
from txbroker.spark.schema import Acknowledgement

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KNOWN = "visible_twice"
CHECKS = """
[checks.slow]
measure = "decide_p99_s"
limit = 1e6
group = "*"
[checks.parked]
measure = "parked_share"
limit = 0
severity = "warning"
[checks.fresh]
measure = "audit_age_s"
limit = 60
"""
SPARK_CONF = {
    # The quick compiler only: measured, a short session needs half the processor time. A heap that
    # is large from the start: the tests of two files took 85 s instead of 90. And a database of a
    # test would log into the current folder.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xms1g -Xmn512m "
    "-Dderby.stream.error.file=/dev/null",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    # A file system that only Java reaches: `viewfs://store/tmp/x` is the folder `/tmp/x`.
    f"spark.hadoop.fs.viewfs.mounttable.store.link.{gettempdir()}": f"file://{gettempdir()}",
    # Tests need no query plans, which Spark stores at the end of each stage.
    "spark.sql.maxPlanStringLength": "0",
}
if not os.environ.get("TXBROKER_TEST_LONG"):
    # Measured: a quarter of the processor time of small tests goes into Java made for each query.
    # Audits by the command, and the long tests, do have it made.
    SPARK_CONF |= {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One Spark with two threads for the whole session, as `txbroker audit` starts it."""
    from txbroker.spark.session import SparkSettings, spark_session

    with spark_session(SparkSettings(master="local[2]", conf=SPARK_CONF)) as session:
        yield session


@pytest.fixture(scope="session")
async def planted(kafka: EmbeddedKafka) -> AsyncIterator[Planted]:
    """Every state and every finding, once for all tests that only read."""
    async with Planting(kafka.bootstrap) as planting:
        yield Planted(planting, await plant_all(planting))


@pytest.fixture(scope="session")
def commanded(planted: Planted, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commanded]:
    """An audit of that by the command, with checks and an acknowledged finding, which goes on
    while the tests do."""
    folder = tmp_path_factory.mktemp("commanded")
    (folder / "checks.toml").write_text(CHECKS)
    known = next(id for id, one in planted.planting.expected.items() if KNOWN in one.findings)
    Journal(folder / JOURNAL_FILE).acknowledge(
        [Acknowledgement(known, "", KNOWN, "ada", "a test", 1, 4_070_908_800_000)]
    )
    options = (
        *("--master", "local[2]", "--report", str(folder / REPORT)),
        *("--checks", str(folder / "checks.toml")),
        *("--conf", "spark.driver.memory=1g"),
    )
    with begun(planted.planting, folder, *options, TMPDIR=str(folder)) as ended:
        yield Commanded(ended, folder)


@pytest.fixture
def calls(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of Java from now on, by what they ask for."""
    client: Any = spark.sparkContext._gateway._gateway_client  # type: ignore[union-attr]
    send, made = client.send_command, Calls()

    def sent(command: str, *given: Any, **named: Any) -> Any:
        made[command.partition("\n")[0]] += 1
        made.characters += len(command)
        return send(command, *given, **named)

    monkeypatch.setattr(client, "send_command", sent)
    return made


@pytest.fixture(autouse=True)
def _own_answers(request: pytest.FixtureRequest) -> None:
    """Close the connection to Java if it still holds the answer of a call that the time-out of an
    earlier test interrupted: each call would get the answer of the one before."""
    if "spark" not in request.fixturenames:
        return
    session = request.getfixturevalue("spark")
    try:
        mine = session._jvm.java.lang.String.valueOf(request.node.nodeid) == request.node.nodeid
    except Exception:  # as the answer of another call may
        mine = False
    if not mine:
        session._sc._gateway._gateway_client.get_thread_connection().close()


@pytest.fixture(autouse=True)
def _begun_early(request: pytest.FixtureRequest) -> None:
    """Begin what takes half a minute of one processor with the first test that needs Spark or
    Kafka. The test that waits for it is in this folder's last file."""
    expected = any(
        "commanded" in getattr(item, "fixturenames", ()) for item in request.session.items
    )
    if expected and {"spark", "kafka"} & set(request.fixturenames):
        request.getfixturevalue("commanded")
