"""Spark's Kafka client, which is Java's, logs in with the same settings and the rights named."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.kit.service import FakeEndpoint, Service
from tests.secure.secret_proxy import call, words_of
from tests.secure.secure_world import KEY_PASSWORD, USER, WAYS, AllowedWorld, SecureKafka
from tests.secure.token_endpoint import TokenEndpoint
from tests.tls.tls_files import PBES1
from txbroker.config.settings import Settings
from txbroker.core.records import Message
from txbroker.kafka.client.acls import AclRole, rights_needed
from txbroker.spark.access import access_from
from txbroker.spark.session import SparkSettings, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

AUDIT_TIMEOUT_S = 300.0
CONF = {"spark.driver.memory": "1g", "spark.sql.shuffle.partitions": "2"}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    """One Spark for all of these tests."""
    with spark_session(SparkSettings("local[2]", CONF)) as session:
        yield session


@pytest.fixture
async def world(secure_kafka: SecureKafka) -> AsyncIterator[AllowedWorld]:
    """A user without rights, and txbroker's topics."""
    made = AllowedWorld(secure_kafka)
    await made.make_topics()
    yield made
    await made.close()


def count(spark: SparkSession, settings: Settings, topic: str) -> int:
    """Return how many records Spark reads, in the way the audit does."""
    options: dict[str, Any] = {
        **access_from(settings).options,
        "assign": json.dumps({topic: [0]}),
        "startingOffsets": json.dumps({topic: {"0": 0}}),
        "endingOffsets": json.dumps({topic: {"0": 1}}),
        "failOnDataLoss": "true",
        "kafka.isolation.level": "read_committed",
    }
    return int(spark.read.format("kafka").options(**options).load().count())


@pytest.mark.parametrize("way", [*WAYS, "locked key"])
async def test_spark_uses_every_login(
    spark: SparkSession,
    secure_kafka: SecureKafka,
    endpoint: TokenEndpoint,
    world: AllowedWorld,
    tmp_path: Path,
    way: str,
) -> None:
    changes: dict[str, Any] = {}
    if way == "locked key":
        way = "MUTUAL"
        cert, key = secure_kafka.authority.sign(USER, password=KEY_PASSWORD, cipher=PBES1)
        password = tmp_path / "key-password"
        password.write_text(KEY_PASSWORD)
        changes = {
            "kafka_ssl_cert_file": cert,
            "kafka_ssl_key_file": key,
            "kafka_ssl_key_password_file": password,
        }
    settings = secure_kafka.settings(way, **changes)
    # What a door has written when it started: how the topics were made.
    assert count(spark, settings, world.name("groups")) == 1
    assert bool(endpoint.asked) == (way == "OAUTHBEARER-URL")


async def test_audit_needs_only_the_listed_rights(
    secure_kafka: SecureKafka, world: AllowedWorld, tmp_path: Path
) -> None:
    target = await world.create_topic("target")
    needed = rights_needed(world.settings(), [target])
    proxy = AllowedWorld(secure_kafka)
    proxy.prefix = world.prefix
    await proxy.allow(right for right in needed if right.role is AclRole.PROXY)
    await world.allow(right for right in needed if right.role is AclRole.AUDIT)
    async with FakeEndpoint().serve() as desk:
        service = Service(proxy, desk, partitions=1)
        await service.start()
        try:
            for number in range(3):
                id = await service.prepare(Message(target, b"", b"%d" % number))
                assert (await service.commit(id))["state"] == "promoted"
        finally:
            await service.stop()
            await proxy.close()
    options = {
        **{name: getattr(world.login, name) for name in secure_kafka.options("CLEAR")},
        "topic_prefix": world.prefix,
        "data_dir": tmp_path,
    }
    words = ["audit", "run", *words_of(options), "--master", "local[2]", "-o", "json"]
    ended = call(words, timeout_s=AUDIT_TIMEOUT_S)
    assert ended.code == 0, ended
    assert json.loads(ended.out)["drift"] == {}, ended
