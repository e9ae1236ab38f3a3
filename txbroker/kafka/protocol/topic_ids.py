"""The ids of topics: another one for each topic that is made, also under a name used before.

The client library asks for metadata of a version that has no ids, so this brings one of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import ClassVar

from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

from txbroker.kafka.client.client import Client
from txbroker.kafka.protocol.codes import Code

_LANE = "admin"
_NO_ID = bytes(16)


class _Uuid(AbstractType[bytes]):
    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)


_TAGS = ("tags", TaggedFields)


class _IdsResponse(Response):
    API_KEY = 3
    API_VERSION = 10
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                _TAGS,
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString("utf-8")),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        _TAGS,
                    ),
                ),
                ("authorized_operations", Int32),
                _TAGS,
            ),
        ),
        ("cluster_authorized_operations", Int32),
        _TAGS,
    )


class _IdsStruct(RequestStruct):
    API_KEY = 3
    API_VERSION = 10
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _IdsResponse
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(("topic_id", _Uuid), ("name", CompactString("utf-8")), _TAGS),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
        _TAGS,
    )


class _IdsRequest(Request[_IdsStruct]):
    API_KEY: ClassVar[int] = 3

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def build(self, request_struct_class: type[_IdsStruct]) -> _IdsStruct:
        topics: list[tuple[bytes, str, dict[int, bytes]]] = [
            (_NO_ID, name, {}) for name in self._names
        ]
        return request_struct_class(topics, False, False, False, {})


async def topic_ids(client: Client, names: Sequence[str]) -> dict[str, bytes]:
    """Return the ids of those of the named topics that exist; none is created.

    Raises:
        KafkaUnavailable: no broker answers.
    """
    answer = await client.ask_any(_IdsRequest(names), _LANE)
    return {topic[1]: topic[2] for topic in answer.topics if topic[0] == Code.NONE}
