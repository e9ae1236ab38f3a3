"""Kafka requests that the client library lacks, as tables of their fields.

A schema lists fields as `name:type`, arrays as `name[type]` or `name[fields]`. The types are those
of Kafka's protocol guide (https://kafka.apache.org/protocol), shortened: i8 to i64, bool, str,
bytes, uuid. In flexible versions strings and arrays are compact, and every struct ends in tagged
fields: requests send none, and answers' are skipped, except for the outermost ones (`tags`)."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from types import SimpleNamespace
from typing import Any, ClassVar

from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.types import (
    Array,
    Boolean,
    Bytes,
    CompactArray,
    CompactBytes,
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

from txbroker.kafka.protocol.packed import PackedRequest

_CORRELATION_ID_BYTES = 4
_NO_TAGS = b"\0"
_NO_TOPIC_ID = bytes(16)
_CONSUMER = -1
_ANY_EPOCH = -1
_READ_UNCOMMITTED = 0
_MAX_TIMESTAMP = -3
_TOPIC = 2
_SET = 0
RIGHTS_NOT_REQUESTED = -(2**31)
"""Brokers return this instead of rights unless the request asks for them."""


# --- reading schemas -----------------------------------------------------------------------------


class _Uuid(AbstractType[bytes]):
    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)


class _TaggedSchema(Schema):
    """A struct of a flexible version. Sends no tagged fields, skips received ones."""

    def encode(self, item: Sequence[Any]) -> bytes:
        return super().encode(item) + _NO_TAGS

    def decode(self, data: BytesIO) -> tuple[Any, ...]:
        values = super().decode(data)
        TaggedFields.decode(data)
        return values


class _FixedSizeArray(CompactArray):
    """A compact array of structs of integers, decoded at once where none of them has tags.

    A partition can have ten thousand producers: one by one they would block the event loop.
    """

    def __init__(self, schema: Schema, types: str) -> None:
        super().__init__(schema)
        self._struct = struct.Struct(f">{types}x")

    def decode(self, data: BytesIO) -> list[Any] | None:
        length = UnsignedVarInt32.decode(data) - 1
        if length < 0:
            return None
        start, size = data.tell(), self._struct.size
        encoded = data.read(length * size)
        if len(encoded) == length * size and not any(encoded[size - 1 :: size]):
            return list(self._struct.iter_unpack(encoded))
        data.seek(start)
        return [self.array_of.decode(data) for _ in range(length)]


_INTEGERS: dict[Any, str] = {Int8: "b", Int16: "h", Int32: "i", Int64: "q"}
_FIXED: dict[str, Any] = {
    "i8": Int8,
    "i16": Int16,
    "i32": Int32,
    "i64": Int64,
    "bool": Boolean,
    "uuid": _Uuid,
}
_PLAIN = {**_FIXED, "str": String("utf-8"), "bytes": Bytes}
_COMPACT = {**_FIXED, "str": CompactString("utf-8"), "bytes": CompactBytes}
_TOKEN = re.compile(r"(\w+):(\w+)|(\w+)\[(\w+)\]|(\w+)\[|(\])")


def _schema(text: str, *, flexible: bool) -> Schema:
    """Return the outermost struct of a schema, without its tagged fields."""
    return Schema(*_fields(_TOKEN.finditer(text), flexible=flexible))


def _fields(tokens: Iterator[re.Match[str]], *, flexible: bool) -> list[tuple[str, Any]]:
    types, array = (_COMPACT, CompactArray) if flexible else (_PLAIN, Array)
    fields: list[tuple[str, Any]] = []
    for token in tokens:
        name, type_, list_name, list_type, struct_name, end = token.groups()
        if end:
            break
        if name:
            fields.append((name, types[type_]))
        elif list_name:
            fields.append((list_name, array(types[list_type])))
        else:
            fields.append((struct_name, _array(_fields(tokens, flexible=flexible), flexible)))
    return fields


def _array(fields: list[tuple[str, Any]], flexible: bool) -> Array:
    if not flexible:
        return Array(Schema(*fields))
    schema = _TaggedSchema(*fields)
    integers = [_INTEGERS.get(type_) for _name, type_ in fields if not isinstance(type_, Array)]
    if len(integers) == len(fields) and all(integers):
        return _FixedSizeArray(schema, "".join(map(str, integers)))
    return CompactArray(schema)


class SchemaRequest(PackedRequest):
    """A request in one version, described by a schema.

    Attributes:
        FLEXIBLE: whether the version is flexible.
        HEADER_TAGS: whether the answer's header has tagged fields, too.
        REQUEST, RESPONSE: the fields, see the module's docstring.
        values: of the request's fields, in order.
    """

    FLEXIBLE: ClassVar[bool] = True
    HEADER_TAGS: ClassVar[bool] = True
    REQUEST: ClassVar[str]
    RESPONSE: ClassVar[str]
    _request: ClassVar[Schema]
    _response: ClassVar[Schema]

    def __init_subclass__(cls) -> None:
        cls._request = _schema(cls.REQUEST, flexible=cls.FLEXIBLE)
        cls._response = _schema(cls.RESPONSE, flexible=cls.FLEXIBLE)

    def __init__(self, *values: Any) -> None:
        self.values = values

    def _pack(self, parts: list[bytes]) -> None:
        body = self._request.encode(self.values)
        parts += (_NO_TAGS, body, _NO_TAGS) if self.FLEXIBLE else (body,)

    def read(self, frame: bytes) -> Any:
        """Return the answer's fields as attributes, `tags` among them."""
        data = BytesIO(frame)
        data.seek(_CORRELATION_ID_BYTES)
        if self.FLEXIBLE and self.HEADER_TAGS:
            TaggedFields.decode(data)
        answer = dict(zip(self._response.names, self._response.decode(data), strict=True))
        return SimpleNamespace(**answer, tags=TaggedFields.decode(data) if self.FLEXIBLE else {})


# --- topics --------------------------------------------------------------------------------------


class MetadataV10(SchemaRequest):
    """Brokers and topics, with topic ids, leader epochs and, if requested, rights (KIP-430)."""

    API_KEY, API_VERSION = 3, 10
    REQUEST = """topics[topic_id:uuid name:str] allow_auto_topic_creation:bool
        include_cluster_authorized_operations:bool include_topic_authorized_operations:bool"""
    RESPONSE = """throttle_time_ms:i32 brokers[node_id:i32 host:str port:i32 rack:str]
        cluster_id:str controller_id:i32
        topics[error_code:i16 name:str topic_id:uuid is_internal:bool
            partitions[error_code:i16 partition:i32 leader:i32 leader_epoch:i32 replicas[i32]
                isr[i32] offline_replicas[i32]]
            authorized_operations:i32]
        cluster_authorized_operations:i32"""


def metadata(topics: Iterable[str] | None, *, rights: bool = False) -> MetadataV10:
    """Return a request for metadata of topics, None: of all. It creates none of them."""
    entries = None if topics is None else [(_NO_TOPIC_ID, name) for name in topics]
    return MetadataV10(entries, False, False, rights)


class IncrementalAlterConfigsV0(SchemaRequest):
    """Changes the named settings and keeps the others."""

    API_KEY, API_VERSION, FLEXIBLE = 44, 0, False
    REQUEST = """resources[resource_type:i8 resource_name:str
            configs[name:str config_operation:i8 value:str]]
        validate_only:bool"""
    RESPONSE = """throttle_time_ms:i32
        resources[error_code:i16 error_message:str resource_type:i8 resource_name:str]"""


def alter_configs(topic: str, configs: Mapping[str, str]) -> IncrementalAlterConfigsV0:
    """Return a request that sets settings of a topic."""
    entries = [(name, _SET, value) for name, value in configs.items()]
    return IncrementalAlterConfigsV0([(_TOPIC, topic, entries)], False)


class ListOffsetsV7(SchemaRequest):
    """Offsets and timestamps; this version knows the largest timestamp (KIP-734)."""

    API_KEY, API_VERSION = 2, 7
    REQUEST = """replica_id:i32 isolation_level:i8
        topics[name:str partitions[partition:i32 current_leader_epoch:i32 timestamp:i64]]"""
    RESPONSE = """throttle_time_ms:i32
        topics[name:str partitions[partition:i32 error_code:i16 timestamp:i64 offset:i64
            leader_epoch:i32]]"""


def newest_timestamps(topics: Mapping[str, Sequence[int]]) -> ListOffsetsV7:
    """Return a request for the largest timestamp of partitions; send it to their leader."""
    entries = [
        (name, [(number, _ANY_EPOCH, _MAX_TIMESTAMP) for number in numbers])
        for name, numbers in topics.items()
    ]
    return ListOffsetsV7(_CONSUMER, _READ_UNCOMMITTED, entries)


# --- transactions --------------------------------------------------------------------------------


class DescribeProducersV0(SchemaRequest):
    """The producers whose state a partition's leader keeps (KIP-664)."""

    API_KEY, API_VERSION = 61, 0
    REQUEST = "topics[name:str partitions[i32]]"
    RESPONSE = """throttle_time_ms:i32
        topics[name:str partitions[partition:i32 error_code:i16 error_message:str
            active_producers[producer_id:i64 producer_epoch:i32 last_sequence:i32
                last_timestamp:i64 coordinator_epoch:i32 current_txn_start_offset:i64]]]"""


def describe_producers(topics: Mapping[str, Sequence[int]]) -> DescribeProducersV0:
    """Return a request for the producers of partitions; send it to their leader."""
    return DescribeProducersV0([(name, list(numbers)) for name, numbers in topics.items()])


class ListTransactionsV0(SchemaRequest):
    """The transactions that one broker coordinates and the caller may describe (KIP-664)."""

    API_KEY, API_VERSION = 66, 0
    REQUEST = "state_filters[str] producer_id_filters[i64]"
    RESPONSE = """throttle_time_ms:i32 error_code:i16 unknown_state_filters[str]
        transaction_states[transactional_id:str producer_id:i64 transaction_state:str]"""


class DescribeTransactionsV0(SchemaRequest):
    """The state of transactions; send it to their coordinator (KIP-664)."""

    API_KEY, API_VERSION = 65, 0
    REQUEST = "transactional_ids[str]"
    RESPONSE = """throttle_time_ms:i32
        transaction_states[error_code:i16 transactional_id:str transaction_state:str
            transaction_timeout_ms:i32 transaction_start_time_ms:i64 producer_id:i64
            producer_epoch:i16 topics[topic:str partitions[i32]]]"""


class InitProducerIdV5(SchemaRequest):
    """A producer id that fences earlier users of the transactional id (KIP-890).

    With the id and epoch of a producer, only if no other producer has taken over since.
    """

    API_KEY, API_VERSION = 22, 5
    REQUEST = """transactional_id:str transaction_timeout_ms:i32 producer_id:i64
        producer_epoch:i16"""
    RESPONSE = "throttle_time_ms:i32 error_code:i16 producer_id:i64 producer_epoch:i16"


# --- features ------------------------------------------------------------------------------------


class ApiVersionsV0(SchemaRequest):
    """The versions of requests that a broker takes: the first request of a connection."""

    API_KEY, API_VERSION, FLEXIBLE = 18, 0, False
    REQUEST = ""
    RESPONSE = "error_code:i16 api_versions[api_key:i16 min_version:i16 max_version:i16]"


class ApiVersionsV3(SchemaRequest):
    """The requests that a broker takes, and the finalized features of the cluster (KIP-584)."""

    API_KEY, API_VERSION = 18, 3
    HEADER_TAGS = False  # so that every client can read the answer
    REQUEST = "client_software_name:str client_software_version:str"
    RESPONSE = """error_code:i16 api_versions[api_key:i16 min_version:i16 max_version:i16]
        throttle_time_ms:i32"""


def api_versions() -> ApiVersionsV3:
    """Return a request for requests and features."""
    return ApiVersionsV3("txbroker", "1")


_FINALIZED_TAG = 2
_FINALIZED = _array([("name", _COMPACT["str"]), ("max_level", Int16), ("min_level", Int16)], True)


def finalized_features(answer: Any) -> dict[str, int]:
    """Return the level of each finalized feature, from an answer to `api_versions`."""
    encoded: bytes | None = answer.tags.get(_FINALIZED_TAG)
    if encoded is None:
        return {}
    features: Any = _FINALIZED.decode(BytesIO(encoded))
    return {name: level for name, level, _min_level in features}


# --- logins --------------------------------------------------------------------------------------


class SaslHandshakeV1(SchemaRequest):
    """Chooses the mechanism of a login."""

    API_KEY, API_VERSION, FLEXIBLE = 17, 1, False
    REQUEST = "mechanism:str"
    RESPONSE = "error_code:i16 enabled_mechanisms[str]"


class SaslAuthenticateV1(SchemaRequest):
    """One message of a login's mechanism; the last answer has the login's lifetime (KIP-368)."""

    API_KEY, API_VERSION, FLEXIBLE = 36, 1, False
    REQUEST = "auth_bytes:bytes"
    RESPONSE = "error_code:i16 error_message:str auth_bytes:bytes session_lifetime_ms:i64"


# --- groups --------------------------------------------------------------------------------------


class HeartbeatV3(SchemaRequest):
    """With the instance id, so that the coordinator fences a second process that uses it."""

    API_KEY, API_VERSION, FLEXIBLE = 12, 3, False
    REQUEST = "group:str generation_id:i32 member_id:str group_instance_id:str"
    RESPONSE = "throttle_time_ms:i32 error_code:i16"


class LeaveGroupV3(SchemaRequest):
    """Removes a static member, which the client library never does."""

    API_KEY, API_VERSION, FLEXIBLE = 13, 3, False
    REQUEST = "group:str members[member_id:str group_instance_id:str]"
    RESPONSE = """throttle_time_ms:i32 error_code:i16
        members[member_id:str group_instance_id:str error_code:i16]"""


class DescribeGroupsV4(SchemaRequest):
    """With the members' instance ids, which the client library's versions lack."""

    API_KEY, API_VERSION, FLEXIBLE = 15, 4, False
    REQUEST = "groups[str] include_authorized_operations:bool"
    RESPONSE = """throttle_time_ms:i32
        groups[error_code:i16 group:str state:str protocol_type:str protocol:str
            members[member_id:str group_instance_id:str client_id:str client_host:str
                member_metadata:bytes member_assignment:bytes]
            authorized_operations:i32]"""


class ListGroupsV4(SchemaRequest):
    """The groups that one broker coordinates and the caller may describe."""

    API_KEY, API_VERSION = 16, 4
    REQUEST = "states_filter[str]"
    RESPONSE = """throttle_time_ms:i32 error_code:i16
        groups[group_id:str protocol_type:str group_state:str]"""


# --- offsets of groups ---------------------------------------------------------------------------


class OffsetFetchV7(SchemaRequest):
    """Committed offsets; `topics` None is all. `require_stable` refuses them while a transaction
    with new ones is open (KIP-447)."""

    API_KEY, API_VERSION = 9, 7
    REQUEST = "group_id:str topics[name:str partitions[i32]] require_stable:bool"
    RESPONSE = """throttle_time_ms:i32
        topics[name:str partitions[partition:i32 offset:i64 leader_epoch:i32 metadata:str
            error_code:i16]]
        error_code:i16"""


class OffsetCommitV7(SchemaRequest):
    """Stores offsets with a member's generation and instance id."""

    API_KEY, API_VERSION, FLEXIBLE = 8, 7, False
    REQUEST = """group_id:str generation_id:i32 member_id:str group_instance_id:str
        topics[name:str partitions[partition:i32 offset:i64 leader_epoch:i32 metadata:str]]"""
    RESPONSE = """throttle_time_ms:i32 topics[name:str partitions[partition:i32 error_code:i16]]"""


class TxnOffsetCommitV3(SchemaRequest):
    """Stores offsets in a transaction with a member's generation and instance id (KIP-447)."""

    API_KEY, API_VERSION = 28, 3
    REQUEST = """transactional_id:str group_id:str producer_id:i64 producer_epoch:i16
        generation_id:i32 member_id:str group_instance_id:str
        topics[name:str partitions[partition:i32 offset:i64 leader_epoch:i32 metadata:str]]"""
    RESPONSE = """throttle_time_ms:i32 topics[name:str partitions[partition:i32 error_code:i16]]"""


class TxnOffsetCommitV5(TxnOffsetCommitV3):
    """The same, and adds the group to the transaction if needed (KIP-890)."""

    API_VERSION = 5
