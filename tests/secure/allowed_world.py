"""A test's own topics on a Kafka that looks at rights, and a user who is given some."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from msgspec import structs

from tests.kit.kafka import ADMIN_TIMEOUT_S, KafkaHarness
from tests.secure.secure_world import SecureKafka
from txbroker.config.settings import Settings
from txbroker.kafka import KafkaDoor, KafkaSettings
from txbroker.kafka.client.acls import Right
from txbroker.kafka.client.connection import open_connection
from txbroker.kafka.client.login import NoLogin, SettingsLogin

_NUMBERS = itertools.count()
_PASSWORD = "a-password-of-a-user"
_OPERATIONS = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Create": AclOperation.CREATE,
    "Describe": AclOperation.DESCRIBE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
    "AlterConfigs": AclOperation.ALTER_CONFIGS,
}
_RESOURCES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional-id": ResourceType.TRANSACTIONAL_ID,
}


class AllowedWorld(KafkaHarness):
    """Doors log in as a user of this test's; the test itself may do everything."""

    def __init__(self, kafka: SecureKafka, way: str = "CLEAR") -> None:
        super().__init__(kafka.inside)
        self.user = f"user-{next(_NUMBERS)}"
        kafka.add_user(self.user, _PASSWORD)
        password = kafka.folder / f"{self.user}.password"
        password.write_text(_PASSWORD)
        self.login: Settings = kafka.settings(
            way,
            kafka_sasl_username=self.user,
            kafka_sasl_password_file=password,
            topic_prefix=self.prefix,
        )

    def settings(self, instance_id: str = "one", **changes: Any) -> KafkaSettings:
        """Settings that log in, and wait for nothing for long."""
        given: dict[str, Any] = {
            "bootstrap_servers": (self.login.kafka,),
            "login": partial(SettingsLogin, self.login),
            # As KafkaSettings.from_configuration names it.
            "group_id": self.prefix,
            "watermark_timeout_s": 5.0,
        }
        return super().settings(instance_id, **{**given, **changes})

    def closed_door(
        self, instance_id: str = "one", opener: Callable[..., Any] = open_connection, **changes: Any
    ) -> KafkaDoor:
        """A door that is not started yet, on our own connections."""
        return super().closed_door(instance_id, opener, **changes)

    async def make_topics(self) -> None:
        """Create txbroker's topics, as an authorized user."""
        settings = structs.replace(
            self.settings(partitions=1), bootstrap_servers=(self.bootstrap,), login=NoLogin
        )
        door = KafkaDoor(settings)
        try:
            await door.apply(await door.plan())
            await door.start()  # which remembers how they were made
        finally:
            await door.close()

    async def allow(self, rights: Iterable[Right]) -> None:
        bindings = [one for right in rights for one in self._bindings(right, right.operations)]
        made = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})

        def wait() -> None:
            for future in made.create_acls(bindings).values():
                future.result(ADMIN_TIMEOUT_S)

        await asyncio.to_thread(wait)

    async def take(self, right: Right, operation: str) -> None:
        (binding,) = self._bindings(right, [operation])
        matching = AclBindingFilter(
            binding.restype,
            binding.name,
            binding.resource_pattern_type,
            binding.principal,
            binding.host,
            binding.operation,
            binding.permission_type,
        )
        made = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})

        def wait() -> None:
            for future in made.delete_acls([matching]).values():
                assert len(future.result(ADMIN_TIMEOUT_S)) == 1

        await asyncio.to_thread(wait)

    def _bindings(self, right: Right, operations: Iterable[str]) -> list[AclBinding]:
        pattern = ResourcePatternType.PREFIXED if right.prefixed else ResourcePatternType.LITERAL
        return [
            AclBinding(
                _RESOURCES[right.resource],
                right.name,
                pattern,
                f"User:{self.user}",
                "*",
                _OPERATIONS[operation],
                AclPermissionType.ALLOW,
            )
            for operation in operations
        ]
