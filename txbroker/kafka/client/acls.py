"""The rights (ACLs) that each part of txbroker needs on a Kafka that looks at rights. Pure.

Read and Write bring Describe with them. Idempotent writing needs no right on the cluster: that to
write to any topic is enough, since Kafka 3.0.
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
    """Who needs rights."""

    PROXY = "proxy"
    APPLY = "apply"
    """`txbroker topics apply`, or proxies that make their topics themselves."""
    DOCTOR = "doctor"
    """`txbroker doctor`: these beside a proxy's, with whose login it looks."""
    AUDIT = "audit"


class Resource(StrEnum):
    """What a right is on, as `kafka-acls.sh` calls it."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"


class Right(Struct, frozen=True):
    """What somebody must be allowed.

    Attributes:
        prefixed: on everything whose name begins with `name`, not on one of that name.
        why: what it is for.
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
        targets: the target topics; `orders.*` stands for all that begin with `orders.`.
        create_targets: whether proxies create targets that are missing.
    """
    named = [_pattern(target) for target in targets]
    return [
        *_proxy(settings, named, create_targets),
        *_apply(settings),
        *_doctor(settings),
        *_audit(settings, named),
    ]


def kafka_acls_command(right: Right, principal: str, servers: str) -> str:
    """Return the command of Kafka's own that grants a right."""
    words = ["kafka-acls.sh", "--bootstrap-server", servers, "--add"]
    words += ["--allow-principal", principal]
    for operation in right.operations:
        words += ["--operation", operation]
    words += [f"--{right.resource}", right.name]
    if right.prefixed:
        words += ["--resource-pattern-type", "prefixed"]
    return shlex.join(words)


def _pattern(target: str) -> tuple[str, bool]:
    # `*` alone is Kafka's own sign for every name, and no prefix.
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
        (settings.checkpoint_topic, "progress and snapshots"),
        (settings.parked_topic, "what is kept whole"),
        (settings.groups_topic, "producer groups"),
    )
    own = [_topic(role, name, (READ, WRITE, DESCRIBE_CONFIGS), why) for name, why in whys]
    # Read for one thing: whether a turn of an earlier claim is still open there.
    on_targets = (READ, WRITE, DESCRIBE_CONFIGS, *((CREATE,) if create_targets else ()))
    return [
        *own,
        _topic(role, settings.audit_topic, (READ,), "what audits tell, for metrics and console"),
        Right(role, Resource.GROUP, settings.group_id, False, (READ,), "sharing partitions"),
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
            "making and mending it",
        )
        for name in names
    ]


def _doctor(settings: KafkaSettings) -> list[Right]:
    return [
        _topic(Role.DOCTOR, name, (READ, DESCRIBE_CONFIGS), "whether audits are fresh")
        for name in settings.audit_topics
    ]


def _audit(settings: KafkaSettings, targets: list[tuple[str, bool]]) -> list[Right]:
    role = Role.AUDIT
    reads = (READ, DESCRIBE_CONFIGS)
    return [
        *(
            _topic(role, name, reads, "what is compared")
            for name in (settings.half_topic, settings.op_topic, settings.parked_topic)
        ),
        *_on_targets(role, targets, reads, "what is compared"),
        _topic(role, settings.audit_topic, (READ, WRITE), "what it found"),
        _topic(role, settings.drift_topic, (WRITE,), "what a stream found"),
        Right(
            role,
            Resource.TRANSACTIONAL_ID,
            f"{settings.drift_topic}-",
            True,
            (WRITE,),
            "writing what a stream found once",
        ),
    ]
