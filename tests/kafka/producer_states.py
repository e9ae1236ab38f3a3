"""What brokers still know of producers, asked with requests that the client library lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)

from txbroker.kafka.client import Client

_TAGS = ("tags", TaggedFields)
_NAME = CompactString("utf-8")


class _ProducersResponse(Response):
    API_KEY = 61
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("name", _NAME),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("error_message", _NAME),
                        (
                            "active_producers",
                            CompactArray(
                                ("producer_id", Int64),
                                ("epoch", Int32),
                                ("last_sequence", Int32),
                                ("last_timestamp", Int64),
                                ("coordinator_epoch", Int32),
                                ("start_offset", Int64),
                                _TAGS,
                            ),
                        ),
                        _TAGS,
                    ),
                ),
                _TAGS,
            ),
        ),
        _TAGS,
    )


class _ProducersStruct(RequestStruct):
    API_KEY = 61
    API_VERSION = 0
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _ProducersResponse
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(("name", _NAME), ("partitions", CompactArray(Int32)), _TAGS),
        ),
        _TAGS,
    )


class _Producers(Request[_ProducersStruct]):
    API_KEY: ClassVar[int] = 61

    def __init__(self, topic: str, partition: int) -> None:
        self._topics: list[tuple[str, list[int], dict[int, bytes]]] = [(topic, [partition], {})]

    def build(self, request_struct_class: type[_ProducersStruct]) -> _ProducersStruct:
        return request_struct_class(self._topics, {})


class _TransactionsResponse(Response):
    API_KEY = 66
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("unknown_state_filters", CompactArray(_NAME)),
        (
            "transactions",
            CompactArray(
                ("transactional_id", _NAME), ("producer_id", Int64), ("state", _NAME), _TAGS
            ),
        ),
        _TAGS,
    )


class _TransactionsStruct(RequestStruct):
    API_KEY = 66
    API_VERSION = 0
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _TransactionsResponse
    SCHEMA = Schema(
        ("state_filters", CompactArray(_NAME)), ("producer_ids", CompactArray(Int64)), _TAGS
    )


class _Transactions(Request[_TransactionsStruct]):
    API_KEY: ClassVar[int] = 66

    def build(self, request_struct_class: type[_TransactionsStruct]) -> _TransactionsStruct:
        nobody: Sequence[str] = ()
        return request_struct_class(nobody, (), {})


async def producer_ids(client: Client, topic: str, partition: int) -> set[int]:
    """Return the producers whose last sequence the only broker still knows."""
    answer = await client.ask_any(_Producers(topic, partition), "states")
    ((_name, partitions, _tags),) = answer.topics
    ((_number, code, _message, producers, _tags),) = partitions
    assert code == 0
    return {producer[0] for producer in producers}


async def transactional_ids(client: Client) -> set[str]:
    """Return the transactional ids that the only broker still knows."""
    answer = await client.ask_any(_Transactions(), "states")
    assert answer.error_code == 0
    return {each[0] for each in answer.transactions}
