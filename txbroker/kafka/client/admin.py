"""Describe topics, create them and change their settings."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from txbroker.door.consuming import TopicIdentity, TopicSpec
from txbroker.errors import ConfigurationError, KafkaUnavailable
from txbroker.kafka.client.client import Client, KafkaRefused, TopicFacts, is_retriable
from txbroker.kafka.client.producer import TOPIC_CREATION_S
from txbroker.kafka.protocol.codes import RETRIABLE, Code, describe
from txbroker.kafka.protocol.encoder import Request
from txbroker.kafka.protocol.schemas import (
    RIGHTS_NOT_REQUESTED,
    CreateTopicsV3,
    DescribeConfigsV2,
    IncrementalAlterConfigsV0,
    metadata,
)
from txbroker.net.timers import Backoff

_CHANNEL = "admin"
_TOPIC = 2
_READ = 3
"""The bit of the right to read in authorized operations."""
_CREATE_TIMEOUT_S = 10.0


class Admin:
    """The topics of one Kafka cluster."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def topics(self, names: Sequence[str]) -> dict[str, TopicFacts]:
        """Return the metadata of topics; creates none."""
        return await self._client.refresh(names)

    async def configs(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the settings of topics, without topics that are missing or may not be read."""
        request = DescribeConfigsV2([(_TOPIC, name, None) for name in names])
        answer = await self._client.ask_any(request, _CHANNEL)
        configs: dict[str, dict[str, str]] = {}
        for code, _message, _type, name, entries in answer.resources:
            if code == Code.NONE:
                configs[name] = {entry[0]: entry[1] for entry in entries}
        return configs

    async def topic_ids(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the ids of those topics that exist; creates none.

        A topic that was deleted and created again has another id.
        """
        answer = await self._client.ask_any(metadata(names), _CHANNEL)
        return {topic[1]: topic[2] for topic in answer.topics if topic[0] == Code.NONE}

    async def identities(self, names: Collection[str] | None) -> dict[str, TopicIdentity]:
        """Return the identities of topics that exist; None: of all that may be read, without
        Kafka's own.

        Raises:
            ConfigurationError: a topic of `names` may not be read.
        """
        answer = await self._client.ask_any(metadata(names, rights=True), _CHANNEL)
        found: dict[str, TopicIdentity] = {}
        for code, name, id, internal, partitions, rights in answer.topics:
            readable = rights == RIGHTS_NOT_REQUESTED or rights >> _READ & 1
            if code == Code.TOPIC_AUTHORIZATION_FAILED or (code == Code.NONE and not readable):
                if names is not None:
                    raise ConfigurationError(
                        f"not authorized to read topic {name}: grant Read on it, or correct its "
                        "name"
                    )
            elif code == Code.NONE and not (internal and names is None):
                found[name] = TopicIdentity(id, len(partitions))
        return found

    async def partition_count(self, topic: str) -> int:
        """Return a topic's number of partitions; 0: it does not exist, or may not be described.

        Raises:
            KafkaUnavailable: no broker knows.
        """
        for pause_s in (TOPIC_CREATION_S, 0.0):
            facts = (await self._client.refresh([topic]))[topic]
            if facts.partitions:
                return len(facts.partitions)
            if facts.error == Code.UNKNOWN_TOPIC_OR_PARTITION:
                await asyncio.sleep(pause_s)
            elif facts.error in RETRIABLE:
                raise KafkaRefused(facts.error)
            else:
                break
        return 0

    async def create(self, topics: Sequence[TopicSpec]) -> None:
        """Create topics that do not exist yet, and wait until their partitions have leaders.

        Raises:
            KafkaRefused: Kafka does not create a topic; the message holds the reason.
            KafkaUnavailable: no broker answers, or partitions have no leaders in time.
        """
        if not topics:
            return
        requests: list[Any] = [
            (topic.name, topic.partitions, topic.replication, [], list(topic.configs.items()))
            for topic in topics
        ]
        settings = self._client.settings
        backoff = Backoff(_CREATE_TIMEOUT_S, settings.retry_backoff_s)
        timeout_ms = round(settings.request_timeout_s * 1000)
        while True:
            try:
                answer = await self._ask_controller(CreateTopicsV3(requests, timeout_ms))
                for name, code, *message in answer.topic_errors:
                    if code not in (Code.NONE, Code.TOPIC_EXISTS):
                        reason = (message and message[0]) or describe(code)
                        raise KafkaRefused(code, f"cannot create topic {name}: {reason}")
                break
            except KafkaUnavailable as error:
                if not is_retriable(error) or not await backoff.pause():
                    raise
        await self._wait_for_leaders({topic.name for topic in topics}, backoff)

    async def _wait_for_leaders(self, names: set[str], backoff: Backoff) -> None:
        while True:
            topics = await self.topics(sorted(names))
            names = {
                name
                for name in names
                if name not in topics
                or topics[name].error
                or any(fact.leader < 0 for fact in topics[name].partitions.values())
            }
            if not names:
                return
            if not await backoff.pause():
                raise KafkaUnavailable(
                    f"partitions of {', '.join(sorted(names))} have no leader yet: retry"
                )

    async def alter(self, topic: str, configs: Mapping[str, str]) -> None:
        """Change settings of a topic and keep the others.

        Raises:
            KafkaRefused: Kafka rejects a setting; the message holds the reason.
        """
        request = IncrementalAlterConfigsV0([(topic, list(configs.items()))])
        answer = await self._client.ask_any(request, _CHANNEL)
        for code, message, _type, name in answer.resources:
            if code != Code.NONE:
                raise KafkaRefused(
                    code, f"cannot change settings of topic {name}: {message or describe(code)}"
                )

    async def _ask_controller(self, request: Request) -> Any:
        await self._client.refresh(())
        return await self._client.ask(self._client.controller, request, _CHANNEL)
