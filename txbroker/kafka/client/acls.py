"""The rights (ACLs) that each role of txbroker needs on a Kafka with an authorizer. Pure.

Read and Write imply Describe. Since Kafka 3.0 idempotent writes need no right on the cluster.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from txbroker.kafka.client.settings import KafkaSettings

READ, WRITE, CREATE = "Read", "Write", "Create"
DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS = "Describe", "DescribeConfigs", "AlterConfigs"
UNKNOWN_PRINCIPAL = "User:NAME"


class AclRole(StrEnum):
    """A part of txbroker that needs rights."""

    PROXY = "proxy"
    APPLY = "apply"
    """`txbroker topics apply`, or proxies that create their topics."""
    DOCTOR = "doctor"
    """`txbroker doctor`: in addition to the proxy's rights, whose login it uses."""
    AUDIT = "audit"
    CONSUMER = "consumer"
    """Consumers of a group, and `txbroker consumers`."""


class Resource(StrEnum):
    """The type of a resource, as in `kafka-acls.sh`."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"


class Right(Struct, frozen=True):
    """Operations that a role needs on a resource; `prefixed`: its name is a prefix."""

    role: AclRole
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
        targets: the target topics; `orders.*` is a prefix.
        create_targets: whether proxies create missing targets.
    """
    named = [_pattern(target) for target in targets]
    topic, group, transactional_id = Resource
    half, op = settings.half_topic, settings.op_topic
    parked, drift = settings.parked_topic, settings.drift_topic
    whys = {
        half: "half messages",
        op: "markers",
        settings.checkpoint_topic: "checkpoints and snapshots",
        parked: "parked transactions",
        settings.groups_topic: "producer groups",
    }
    read_all, write_all = (READ, DESCRIBE_CONFIGS), (READ, WRITE, DESCRIBE_CONFIGS)
    change = (CREATE, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS)
    # Read only to see whether a transaction of an earlier claim is still open.
    promote = (*write_all, CREATE) if create_targets else write_all
    rows: list[tuple[AclRole, Resource, str, bool, tuple[str, ...], str]] = [
        *((AclRole.PROXY, topic, name, False, write_all, why) for name, why in whys.items()),
        (
            AclRole.PROXY,
            topic,
            settings.audit_topic,
            False,
            (READ,),
            "audit results, for metrics and console",
        ),
        (AclRole.PROXY, group, settings.group_id, False, (READ,), "partition assignment"),
        (AclRole.PROXY, transactional_id, f"{half}-", True, (WRITE,), "promotion"),
        *((AclRole.PROXY, topic, *name, promote, "promotion") for name in named),
        *(
            (AclRole.APPLY, topic, name, False, rights, "creating and changing it")
            for name in settings.own_topics + settings.audit_topics
            for rights in [(*change, READ) if name == settings.groups_topic else change]
        ),
        *(
            (AclRole.DOCTOR, topic, name, False, read_all, "age of audits")
            for name in settings.audit_topics
        ),
        *(
            (AclRole.AUDIT, topic, n, False, read_all, "records to compare")
            for n in (half, op, parked)
        ),
        *((AclRole.AUDIT, topic, *name, read_all, "records to compare") for name in named),
        (AclRole.AUDIT, topic, settings.audit_topic, False, (READ, WRITE), "results"),
        (AclRole.AUDIT, topic, drift, False, (WRITE,), "findings"),
        (
            AclRole.AUDIT,
            transactional_id,
            f"{drift}-",
            True,
            (WRITE,),
            "writing findings exactly once",
        ),
    ]
    return [Right(*row) for row in rows]


def consumer_rights(
    group: str, own: Iterable[str], topics: Iterable[str], outputs: Iterable[str] = ()
) -> list[Right]:
    """Return all rights of a group of consumers, and of `txbroker topics apply` for its topics.

    Args:
        own: the group's own topics.
        topics: the topics that it reads; `orders.*` is a prefix.
        outputs: the topics that it writes to with `InKafka`; `prices.*` is a prefix.
    """
    topic, group_, transactional_id = Resource
    own = list(own)
    change = (CREATE, DESCRIBE, DESCRIBE_CONFIGS, ALTER_CONFIGS)
    created = "creating it at the first start; not after `topics apply`"
    rows: list[tuple[AclRole, Resource, str, bool, tuple[str, ...], str]] = [
        *((AclRole.CONSUMER, topic, *_pattern(name), (READ,), "messages") for name in topics),
        *((AclRole.CONSUMER, topic, *_pattern(name), (WRITE,), "outputs") for name in outputs),
        (AclRole.CONSUMER, group_, group, False, (READ,), "membership and positions"),
        *((AclRole.CONSUMER, topic, n, False, (READ, WRITE), "messages that failed") for n in own),
        *((AclRole.CONSUMER, topic, name, False, (CREATE,), created) for name in own),
        (
            AclRole.CONSUMER,
            transactional_id,
            consumers_transactional_id(group),
            True,
            (WRITE,),
            "storing outputs and failed messages together with positions",
        ),
        *((AclRole.APPLY, topic, name, False, change, "creating and changing it") for name in own),
    ]
    return [Right(*row) for row in rows]


def consumers_transactional_id(group: str) -> str:
    """Return the beginning of the transactional ids of a group's consumers."""
    return f"txbroker.{group}."


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
