"""Asking Kafka about topics, creating them and changing their settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from aiokafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Int8, Int16, Int32, Schema, String
from msgspec import Struct

from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.client import Client, KafkaRefused, TopicFacts, may_pass
from txbroker.kafka.protocol.codes import Code, describe
from txbroker.net.backoff import Backoff

_LANE = "admin"
_TOPIC = 2
_SET = 0
_SETTLE_S = 10.0


class NewTopic(Struct, frozen=True):
    """A topic to create. `replication` -1 leaves it to the cluster's default."""

    name: str
    partitions: int
    replication: int
    configs: Mapping[str, str]


class _AlterResponse(Response):
    API_KEY = 44
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "resources",
            Array(
                ("error_code", Int16),
                ("error_message", String("utf-8")),
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
            ),
        ),
    )


class _AlterStruct(RequestStruct):
    API_KEY = 44
    API_VERSION = 0
    RESPONSE_TYPE = _AlterResponse
    SCHEMA = Schema(
        (
            "resources",
            Array(
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
                (
                    "configs",
                    Array(
                        ("name", String("utf-8")),
                        ("config_operation", Int8),
                        ("value", String("utf-8")),
                    ),
                ),
            ),
        ),
        ("validate_only", Boolean),
    )


class _AlterRequest(Request[_AlterStruct]):
    """IncrementalAlterConfigs, which leaves the settings alone that it does not name."""

    API_KEY: ClassVar[int] = 44

    def __init__(self, topic: str, configs: Mapping[str, str]) -> None:
        self._resources = [(_TOPIC, topic, [(k, _SET, v) for k, v in configs.items()])]

    def build(self, request_struct_class: type[_AlterStruct]) -> _AlterStruct:
        return request_struct_class(self._resources, False)


class Admin:
    """Topics of one Kafka."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def topics(self, names: Sequence[str]) -> dict[str, TopicFacts]:
        """Return what metadata say of topics; nothing is created.

        Raises:
            KafkaUnavailable: no broker answers.
        """
        return await self._client.refresh(names)

    async def configs(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the settings of topics; those that may not be read, or do not exist, are missing.

        Raises:
            KafkaUnavailable: no broker answers.
        """
        request = DescribeConfigsRequest([(_TOPIC, name, None) for name in names])
        answer = await self._client.ask_any(request, _LANE)
        found: dict[str, dict[str, str]] = {}
        for code, _message, _type, name, entries in answer.resources:
            if code == Code.NONE:
                found[name] = {entry[0]: entry[1] for entry in entries}
        return found

    async def create(self, topics: Sequence[NewTopic]) -> None:
        """Create topics, and wait until each has leaders. One that exists is no error.

        Raises:
            KafkaRefused: a topic cannot be created; the message says why.
            KafkaUnavailable: no broker answers, or leaders take too long.
        """
        if not topics:
            return
        requests: list[Any] = [
            (topic.name, topic.partitions, topic.replication, [], list(topic.configs.items()))
            for topic in topics
        ]
        settings = self._client.settings
        backoff = Backoff(_SETTLE_S, settings.retry_backoff_s)
        timeout_ms = round(settings.request_timeout_s * 1000)
        while True:
            try:
                answer = await self._ask_controller(
                    CreateTopicsRequest(requests, timeout_ms, validate_only=False)
                )
                for name, code, *message in answer.topic_errors:
                    if code not in (Code.NONE, Code.TOPIC_EXISTS):
                        reason = (message and message[0]) or describe(code)
                        raise KafkaRefused(code, f"topic {name} was not created: {reason}")
                break
            except KafkaUnavailable as error:
                if not may_pass(error) or not await backoff.pause():
                    raise
        await self._settled({topic.name for topic in topics}, backoff)

    async def _settled(self, names: set[str], backoff: Backoff) -> None:
        while True:
            found = await self.topics(sorted(names))
            names = {
                name
                for name in names
                if name not in found
                or found[name].error
                or any(fact.leader < 0 for fact in found[name].partitions.values())
            }
            if not names:
                return
            if not await backoff.pause():
                raise KafkaUnavailable(f"no leaders yet for {', '.join(sorted(names))}")

    async def alter(self, topic: str, configs: Mapping[str, str]) -> None:
        """Change settings of a topic, leaving the others as they are.

        Raises:
            KafkaRefused: Kafka does not take a setting; the message says why.
            KafkaUnavailable: no broker answers.
        """
        answer = await self._client.ask_any(_AlterRequest(topic, configs), _LANE)
        for code, message, _type, name in answer.resources:
            if code != Code.NONE:
                raise KafkaRefused(code, f"settings of {name}: {message or describe(code)}")

    async def _ask_controller(self, request: Request[Any]) -> Any:
        await self._client.refresh(())
        return await self._client.ask(self._client.controller, request, _LANE)
