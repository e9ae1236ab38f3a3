"""The rights (ACLs) that each role of txbroker needs on a Kafka with an authorizer. Pure.

Read and Write imply Describe. Since Kafka 3.0 idempotent writes need no right on the cluster.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from enum import StrEnum

from msgspec import Struct

from txbroker.kafka.client.settings import KafkaSettings

READ, WRITE, CREATE = "Read", "Write", "Create"
DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS = "Describe", "DescribeConfigs", "AlterConfigs"
UNKNOWN_PRINCIPAL = "User:NAME"


class Role(StrEnum):
    """A part of txbroker that needs rights."""

    PROXY = "proxy"
    APPLY = "apply"
    """`txbroker topics apply`, or proxies that create their topics."""
    DOCTOR = "doctor"
    """`txbroker doctor`: in addition to the proxy's rights, whose login it uses."""
    AUDIT = "audit"


class Resource(StrEnum):
    """The type of a resource, as in `kafka-acls.sh`."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"


class Right(Struct, frozen=True):
    """Operations that a role needs on a resource.

    Attributes:
        role, resource, operations: who, what type, which ACL operations.
        name: of the resource.
        prefixed: whether `name` is a prefix.
        why: its purpose.
    """

    role: Role
    resource: Resource
    name: str
    prefixed: bool
    operations: tuple[str, ...]
    why: str


def rights_needed(
    settings: KafkaSettings, targets: Iterable[str] = (), *, create_targets: bool = False
) -> list[Right]:
    """Return all rights that txbroker needs.

    Args:
        settings: name the topics.
        targets: the target topics; `orders.*` is a prefix.
        create_targets: whether proxies create missing targets.
    """
    named = [_pattern(target) for target in targets]
    return [
        *_proxy(settings, named, create_targets),
        *_apply(settings),
        *_doctor(settings),
        *_audit(settings, named),
    ]


def kafka_acls_command(right: Right, principal: str, servers: str) -> str:
    """Return the `kafka-acls.sh` command that grants a right."""
    words = ["kafka-acls.sh", "--bootstrap-server", servers, "--add"]
    words += ["--allow-principal", principal]
    for operation in right.operations:
        words += ["--operation", operation]
    words += [f"--{right.resource}", right.name]
    if right.prefixed:
        words += ["--resource-pattern-type", "prefixed"]
    return shlex.join(words)


def _pattern(target: str) -> tuple[str, bool]:
    # `*` alone is Kafka's wildcard, no prefix.
    prefixed = target.endswith("*") and target != "*"
    return (target.removesuffix("*") if prefixed else target, prefixed)


def _topic(role: Role, name: str, operations: Sequence[str], why: str) -> Right:
    return Right(role, Resource.TOPIC, name, False, tuple(operations), why)


def _on_targets(
    role: Role, targets: Iterable[tuple[str, bool]], operations: Sequence[str], why: str
) -> list[Right]:
    return [
        Right(role, Resource.TOPIC, name, prefixed, tuple(operations), why)
        for name, prefixed in targets
    ]


def _proxy(
    settings: KafkaSettings, targets: list[tuple[str, bool]], create_targets: bool
) -> list[Right]:
    role = Role.PROXY
    whys = (
        (settings.half_topic, "half messages"),
        (settings.op_topic, "markers"),
        (settings.checkpoint_topic, "checkpoints and snapshots"),
        (settings.parked_topic, "parked transactions"),
        (settings.groups_topic, "producer groups"),
    )
    own = [_topic(role, name, (READ, WRITE, DESCRIBE_CONFIGS), why) for name, why in whys]
    # Read only to see whether a transaction of an earlier claim is still open.
    on_targets = (READ, WRITE, DESCRIBE_CONFIGS, *((CREATE,) if create_targets else ()))
    return [
        *own,
        _topic(role, settings.audit_topic, (READ,), "audit results, for metrics and console"),
        Right(role, Resource.GROUP, settings.group_id, False, (READ,), "partition assignment"),
        Right(
            role, Resource.TRANSACTIONAL_ID, f"{settings.half_topic}-", True, (WRITE,), "promotion"
        ),
        *_on_targets(role, targets, on_targets, "promotion"),
    ]


def _apply(settings: KafkaSettings) -> list[Right]:
    operations = (CREATE, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS)
    names = settings.own_topics + settings.audit_topics
    return [
        _topic(
            Role.APPLY,
            name,
            (*operations, READ) if name == settings.groups_topic else operations,
            "creating and changing it",
        )
        for name in names
    ]


def _doctor(settings: KafkaSettings) -> list[Right]:
    return [
        _topic(Role.DOCTOR, name, (READ, DESCRIBE_CONFIGS), "age of audits")
        for name in settings.audit_topics
    ]


def _audit(settings: KafkaSettings, targets: list[tuple[str, bool]]) -> list[Right]:
    role = Role.AUDIT
    reads = (READ, DESCRIBE_CONFIGS)
    return [
        *(
            _topic(role, name, reads, "records to compare")
            for name in (settings.half_topic, settings.op_topic, settings.parked_topic)
        ),
        *_on_targets(role, targets, reads, "records to compare"),
        _topic(role, settings.audit_topic, (READ, WRITE), "results"),
        _topic(role, settings.drift_topic, (WRITE,), "findings of streams"),
        Right(
            role,
            Resource.TRANSACTIONAL_ID,
            f"{settings.drift_topic}-",
            True,
            (WRITE,),
            "writing findings exactly once",
        ),
    ]
