"""Requests that the client library does not bring, written in its own way.

Metadata with the rights that the asker has (KIP-430), the newest timestamp of a partition
(KIP-734), what producers and coordinators say of transactions that are open (KIP-664), the
features that all brokers agreed on (KIP-584), and producer ids for transactions whose every end
raises the epoch (KIP-890).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any, ClassVar

from aiokafka.protocol.api import Request, RequestStruct, Response, ResponseHeader_v0
from aiokafka.protocol.types import (
    Array,
    Boolean,
    CompactArray,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
    UnsignedVarInt32,
)

_TAGS = ("tags", TaggedFields)
_CONSUMER = -1
_ANY_EPOCH = -1
_READ_UNCOMMITTED = 0
_MAX_TIMESTAMP = -3
NO_RIGHTS_TOLD = -(2**31)
"""What brokers send in place of rights where nobody asked for them."""


class _MetadataResponse(Response):
    API_KEY = 3
    API_VERSION = 8
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            Array(
                ("node_id", Int32),
                ("host", String("utf-8")),
                ("port", Int32),
                ("rack", String("utf-8")),
            ),
        ),
        ("cluster_id", String("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            Array(
                ("error_code", Int16),
                ("name", String("utf-8")),
                ("is_internal", Boolean),
                (
                    "partitions",
                    Array(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", Array(Int32)),
                        ("isr", Array(Int32)),
                        ("offline_replicas", Array(Int32)),
                    ),
                ),
                ("authorized_operations", Int32),
            ),
        ),
        ("cluster_authorized_operations", Int32),
    )


class _MetadataStruct(RequestStruct):
    API_KEY = 3
    API_VERSION = 8
    RESPONSE_TYPE = _MetadataResponse
    SCHEMA = Schema(
        ("topics", Array(String("utf-8"))),
        ("allow_auto_topic_creation", Boolean),
        ("include_cluster_authorized_operations", Boolean),
        ("include_topic_authorized_operations", Boolean),
    )


class RightsRequest(Request[_MetadataStruct]):
    """Metadata of topics, with what the asker may do with each; creates none."""

    API_KEY: ClassVar[int] = 3

    def __init__(self, topics: Iterable[str]) -> None:
        self._topics = list(topics)

    def build(self, request_struct_class: type[_MetadataStruct]) -> _MetadataStruct:
        return request_struct_class(self._topics, False, False, True)


class _NewestResponse(Response):
    API_KEY = 2
    API_VERSION = 7
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("name", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("timestamp", Int64),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        _TAGS,
                    ),
                ),
                _TAGS,
            ),
        ),
        _TAGS,
    )


class _NewestStruct(RequestStruct):
    API_KEY = 2
    API_VERSION = 7
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _NewestResponse
    SCHEMA = Schema(
        ("replica_id", Int32),
        ("isolation_level", Int8),
        (
            "topics",
            CompactArray(
                ("name", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("current_leader_epoch", Int32),
                        ("timestamp", Int64),
                        _TAGS,
                    ),
                ),
                _TAGS,
            ),
        ),
        _TAGS,
    )


class NewestRequest(Request[_NewestStruct]):
    """The largest timestamp of partitions, asked of their leader."""

    API_KEY: ClassVar[int] = 2

    def __init__(self, topics: Mapping[str, Sequence[int]]) -> None:
        self._topics: list[Any] = [
            (name, [(number, _ANY_EPOCH, _MAX_TIMESTAMP, {}) for number in numbers], {})
            for name, numbers in topics.items()
        ]

    def build(self, request_struct_class: type[_NewestStruct]) -> _NewestStruct:
        return request_struct_class(_CONSUMER, _READ_UNCOMMITTED, self._topics, {})


_PRODUCER = struct.Struct(">qiiqiqb")
"""What is told of a producer, and that no tags follow."""


class _Producers(CompactArray):
    """What is told of producers. A partition can have ten thousands of them, so they are read
    together: one by one they would hold up the event loop for that long."""

    def decode(self, data: BytesIO) -> list[Any] | None:
        """Read them; of those without tags the last field is 0."""
        length = UnsignedVarInt32.decode(data) - 1
        if length < 0:
            return None
        start, size = data.tell(), _PRODUCER.size
        told = data.read(length * size)
        if len(told) == length * size and not any(told[size - 1 :: size]):
            return list(_PRODUCER.iter_unpack(told))
        data.seek(start)
        return [self.array_of.decode(data) for _ in range(length)]


class _ProducersResponse(Response):
    API_KEY = 61
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("name", CompactString("utf-8")),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("error_message", CompactString("utf-8")),
                        (
                            "active_producers",
                            _Producers(
                                ("producer_id", Int64),
                                ("producer_epoch", Int32),
                                ("last_sequence", Int32),
                                ("last_timestamp", Int64),
                                ("coordinator_epoch", Int32),
                                ("current_txn_start_offset", Int64),
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
            CompactArray(
                ("name", CompactString("utf-8")), ("partitions", CompactArray(Int32)), _TAGS
            ),
        ),
        _TAGS,
    )


class ProducersRequest(Request[_ProducersStruct]):
    """Who writes to partitions, asked of their leader."""

    API_KEY: ClassVar[int] = 61

    def __init__(self, topics: Mapping[str, Sequence[int]]) -> None:
        self._topics: list[Any] = [(name, list(numbers), {}) for name, numbers in topics.items()]

    def build(self, request_struct_class: type[_ProducersStruct]) -> _ProducersStruct:
        return request_struct_class(self._topics, {})


class _ListResponse(Response):
    API_KEY = 66
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("unknown_state_filters", CompactArray(CompactString("utf-8"))),
        (
            "transaction_states",
            CompactArray(
                ("transactional_id", CompactString("utf-8")),
                ("producer_id", Int64),
                ("transaction_state", CompactString("utf-8")),
                _TAGS,
            ),
        ),
        _TAGS,
    )


class _ListStruct(RequestStruct):
    API_KEY = 66
    API_VERSION = 0
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _ListResponse
    SCHEMA = Schema(
        ("state_filters", CompactArray(CompactString("utf-8"))),
        ("producer_id_filters", CompactArray(Int64)),
        _TAGS,
    )


class ListTransactionsRequest(Request[_ListStruct]):
    """The transactional ids of producers, asked of every broker: each tells of those that it
    coordinates and that the asker may describe."""

    API_KEY: ClassVar[int] = 66

    def __init__(self, producer_ids: Iterable[int]) -> None:
        self._producer_ids = list(producer_ids)

    def build(self, request_struct_class: type[_ListStruct]) -> _ListStruct:
        return request_struct_class([], self._producer_ids, {})


class _DescribeResponse(Response):
    API_KEY = 65
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "transaction_states",
            CompactArray(
                ("error_code", Int16),
                ("transactional_id", CompactString("utf-8")),
                ("transaction_state", CompactString("utf-8")),
                ("transaction_timeout_ms", Int32),
                ("transaction_start_time_ms", Int64),
                ("producer_id", Int64),
                ("producer_epoch", Int16),
                (
                    "topics",
                    CompactArray(
                        ("topic", CompactString("utf-8")),
                        ("partitions", CompactArray(Int32)),
                        _TAGS,
                    ),
                ),
                _TAGS,
            ),
        ),
        _TAGS,
    )


class _DescribeStruct(RequestStruct):
    API_KEY = 65
    API_VERSION = 0
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _DescribeResponse
    SCHEMA = Schema(("transactional_ids", CompactArray(CompactString("utf-8"))), _TAGS)


class DescribeTransactionsRequest(Request[_DescribeStruct]):
    """The state of transactions, asked of their coordinator."""

    API_KEY: ClassVar[int] = 65

    def __init__(self, transactional_ids: Iterable[str]) -> None:
        self._ids = list(transactional_ids)

    def build(self, request_struct_class: type[_DescribeStruct]) -> _DescribeStruct:
        return request_struct_class(self._ids, {})


# --- features ------------------------------------------------------------------------------------


class _FeaturesResponse(Response):
    API_KEY = 18
    API_VERSION = 3
    SCHEMA = Schema(
        ("error_code", Int16),
        (
            "api_versions",
            CompactArray(("api_key", Int16), ("min_version", Int16), ("max_version", Int16), _TAGS),
        ),
        ("throttle_time_ms", Int32),
        _TAGS,
    )


class _FeaturesStruct(RequestStruct):
    API_KEY = 18
    API_VERSION = 3
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _FeaturesResponse
    SCHEMA = Schema(
        ("client_software_name", CompactString("utf-8")),
        ("client_software_version", CompactString("utf-8")),
        _TAGS,
    )

    def parse_response_header(self, read_buffer: BytesIO | bytes) -> ResponseHeader_v0:
        """Parse the old header: this answer alone keeps it, so that every client can read it."""
        return ResponseHeader_v0.decode(read_buffer)


class FeaturesRequest(Request[_FeaturesStruct]):
    """What a broker can do, with the features that all brokers agreed on."""

    API_KEY: ClassVar[int] = 18

    def build(self, request_struct_class: type[_FeaturesStruct]) -> _FeaturesStruct:
        return request_struct_class("txbroker", "1", {})


_FINALIZED_TAG = 2
_FINALIZED = CompactArray(
    ("name", CompactString("utf-8")), ("max_level", Int16), ("min_level", Int16), _TAGS
)


def finalized_features(answer: Any) -> dict[str, int]:
    """Return the level of each feature that all brokers agreed on, from a broker's answer."""
    told: bytes | None = answer.tags.get(_FINALIZED_TAG)
    if told is None:
        return {}
    found: Any = _FINALIZED.decode(BytesIO(told))
    return {name: level for name, level, _min_level, _tags in found}


# --- transactions whose end raises the epoch -----------------------------------------------------


class _BeginResponse(Response):
    API_KEY = 22
    API_VERSION = 5
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        _TAGS,
    )


class _BeginStruct(RequestStruct):
    API_KEY = 22
    API_VERSION = 5
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _BeginResponse
    SCHEMA = Schema(
        ("transactional_id", CompactString("utf-8")),
        ("transaction_timeout_ms", Int32),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        _TAGS,
    )


class BeginRequest(Request[_BeginStruct]):
    """InitProducerId: a producer id that fences every earlier user of the transactional id; with
    a producer id and epoch, only if these are still its user's."""

    API_KEY: ClassVar[int] = 22
    VERSION: ClassVar[int] = _BeginStruct.API_VERSION

    def __init__(
        self,
        transactional_id: str,
        transaction_timeout_ms: int,
        producer_id: int = -1,
        producer_epoch: int = -1,
    ) -> None:
        self._transactional_id = transactional_id
        self._timeout_ms = transaction_timeout_ms
        self._producer_id = producer_id
        self._producer_epoch = producer_epoch

    def build(self, request_struct_class: type[_BeginStruct]) -> _BeginStruct:
        producer = self._producer_id, self._producer_epoch
        return request_struct_class(self._transactional_id, self._timeout_ms, *producer, {})
