"""Rights, on a real Kafka that has some taken away."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from tests.kit.doctor import FakeProxies, settings
from txbroker.cli.doctor.findings import DoctorResult
from txbroker.cli.doctor.report import CHECKS, examine
from txbroker.cli.doctor.subject import Subject
from txbroker.embedded import EmbeddedKafka
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.door import KafkaDoor
from txbroker.kafka.tools.examination import KafkaExamination

TIMEOUT_S = 30.0
AUTHORIZER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[EmbeddedKafka]:
    """A Kafka that looks at rights."""
    with EmbeddedKafka(properties=AUTHORIZER) as server:
        yield server


async def rights(bootstrap: str) -> DoctorResult:
    """Run the check of rights."""
    given = settings(kafka=bootstrap)
    async with KafkaExamination(KafkaSettings.from_configuration(given)) as kafka:
        subject = Subject(given, kafka, FakeProxies())
        report = await examine(subject, [one for one in CHECKS if one.name == "kafka-rights"])
        await subject.close()
    return report.outcomes[0]


def grant(bootstrap: str, kind: ResourceType, name: str, *operations: AclOperation) -> None:
    """Allow exactly these operations to all users."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    bindings = [
        AclBinding(
            kind,
            name,
            ResourcePatternType.LITERAL,
            "User:ANONYMOUS",
            "*",
            operation,
            AclPermissionType.ALLOW if operations else AclPermissionType.DENY,
        )
        for operation in operations or (AclOperation.ALL,)
    ]
    for future in admin.create_acls(bindings).values():
        future.result(TIMEOUT_S)


async def test_revoked_rights_are_named(guarded: EmbeddedKafka) -> None:
    bootstrap = guarded.bootstrap
    door = KafkaDoor.from_configuration(settings(kafka=bootstrap))
    try:
        await door.apply(await door.plan())
    finally:
        await door.close()
    assert (await rights(bootstrap)).level == "ok"

    half = (AclOperation.READ, AclOperation.DESCRIBE_CONFIGS)  # Read brings Describe
    grant(bootstrap, ResourceType.TOPIC, "txbroker.half", *half)
    grant(bootstrap, ResourceType.TOPIC, "txbroker.op")
    grant(bootstrap, ResourceType.GROUP, "txbroker")
    deadline = time.monotonic() + TIMEOUT_S
    while len((found := await rights(bootstrap)).details) < 3:
        assert time.monotonic() < deadline, found
    assert found.level == "fails"
    assert found.details == (
        "topic txbroker.half: Write",
        "topic txbroker.op: Describe, DescribeConfigs, Read, Write (topic authorization failed)",
        "group txbroker: Describe, Read",
    )
