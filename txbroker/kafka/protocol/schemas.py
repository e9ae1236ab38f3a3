"""The requests to Kafka, each in one version, as tables of their fields (`encoder.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from txbroker.kafka.protocol.encoder import Request, decoder

Batches: TypeAlias = Sequence[tuple[str, Sequence[tuple[int, bytes]]]]
"""Each topic with its partition numbers and the encoded batch for each."""

_NO_TOPIC_ID = bytes(16)
RIGHTS_NOT_REQUESTED = -(2**31)
"""Brokers return this instead of rights unless the request asks for them."""


# --- records -------------------------------------------------------------------------------------


class ProduceV7(Request):
    """Produce for version 1 of the transaction protocol, and outside of transactions."""

    API_KEY, API_VERSION, FLEXIBLE = 0, 7, False
    REQUEST = """transactional_id:str acks:i16 timeout_ms:i32
        topics[name:str partitions[partition:i32 records:bytes]]"""
    RESPONSE = """topics[name:str
            partitions[partition:i32 error_code:i16 offset:i64 timestamp:i64 log_start_offset:i64]]
        throttle_time_ms:i32"""


class ProduceV12(Request):
    """Produce that also adds the partitions to the transaction, beginning it if needed."""

    API_KEY, API_VERSION = 0, 12
    REQUEST = ProduceV7.REQUEST
    RESPONSE = """topics[name:str
            partitions[partition:i32 error_code:i16 offset:i64 timestamp:i64 log_start_offset:i64
                record_errors[batch_index:i32 error_message:str] error_message:str]]
        throttle_time_ms:i32"""


class FetchV11(Request):
    """Records of partitions, without a fetch session."""

    API_KEY, API_VERSION, FLEXIBLE = 1, 11, False
    REQUEST = """replica_id:i32=-1 wait_ms:i32 bytes_min:i32 bytes_max:i32 isolation_level:i8
        session_id:i32=0 session_epoch:i32=-1
        topics[topic:str partitions[partition:i32 leader_epoch:i32=-1 offset:i64
            log_start_offset:i64=-1 bytes_max:i32]]
        forgotten_topics:i32=0 rack_length:i16=0"""
    RESPONSE = """throttle_time_ms:i32 error_code:i16 session_id:i32
        topics[topic:str partitions[partition:i32 error_code:i16 highwater_offset:i64
            last_stable_offset:i64 log_start_offset:i64
            aborted_transactions[producer_id:i64 first_offset:i64]
            preferred_read_replica:i32 records:bytes]]"""


class ListOffsetsV3(Request):
    """Start or end of partitions, or the first offset from a timestamp on."""

    API_KEY, API_VERSION, FLEXIBLE = 2, 3, False
    REQUEST = """replica_id:i32=-1 isolation_level:i8
        topics[name:str partitions[partition:i32 timestamp:i64]]"""
    RESPONSE = """throttle_time_ms:i32
        topics[name:str partitions[partition:i32 error_code:i16 timestamp:i64 offset:i64]]"""


# --- topics --------------------------------------------------------------------------------------


class MetadataV5(Request):
    """Brokers, and partitions of topics with their leaders and replicas."""

    API_KEY, API_VERSION, FLEXIBLE = 3, 5, False
    REQUEST = "topics[str] allow_auto_topic_creation:bool"
    RESPONSE = """throttle_time_ms:i32 brokers[node_id:i32 host:str port:i32 rack:str]
        cluster_id:str controller_id:i32
        topics[error_code:i16 name:str is_internal:bool
            partitions[error_code:i16 partition:i32 leader:i32 replicas[i32] isr[i32]
                offline_replicas[i32]]]"""


class MetadataV10(Request):
    """Brokers and topics, with topic ids, leader epochs and, if requested, rights (KIP-430)."""

    API_KEY, API_VERSION = 3, 10
    REQUEST = """topics[topic_id:uuid name:str] allow_auto_topic_creation:bool
        include_cluster_authorized_operations:bool=False
        include_topic_authorized_operations:bool"""
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
    return MetadataV10(entries, False, rights)


class CreateTopicsV3(Request):
    """Creates topics; their number of partitions or explicit replicas."""

    API_KEY, API_VERSION, FLEXIBLE = 19, 3, False
    REQUEST = """topics[name:str partitions:i32 replication:i16
            assignments[partition:i32 replicas[i32]] configs[name:str value:text]]
        timeout_ms:i32 validate_only:bool=False"""
    RESPONSE = "throttle_time_ms:i32 topic_errors[topic:str error_code:i16 error_message:str]"


class DeleteTopicsV3(Request):
    """Deletes topics."""

    API_KEY, API_VERSION, FLEXIBLE = 20, 3, False
    REQUEST = "topics[str] timeout_ms:i32"
    RESPONSE = "throttle_time_ms:i32 topic_error_codes[topic:str error_code:i16]"


class DescribeConfigsV2(Request):
    """Settings of topics or brokers, with their origin."""

    API_KEY, API_VERSION, FLEXIBLE = 32, 2, False
    REQUEST = "resources[type:i8 name:str names[str]] include_synonyms:bool=False"
    RESPONSE = """throttle_time_ms:i32
        resources[error_code:i16 error_message:str type:i8 name:str
            configs[name:str value:str read_only:bool source:i8 is_sensitive:bool
                synonyms[name:str value:str source:i8]]]"""


class IncrementalAlterConfigsV0(Request):
    """Sets the named settings (0) of topics (2), and keeps the others."""

    API_KEY, API_VERSION, FLEXIBLE = 44, 0, False
    REQUEST = """resources[resource_type:i8=2 resource_name:str
            configs[name:str config_operation:i8=0 value:text]]
        validate_only:bool=False"""
    RESPONSE = """throttle_time_ms:i32
        resources[error_code:i16 error_message:str resource_type:i8 resource_name:str]"""


class ListOffsetsV7(Request):
    """The largest timestamp (-3) of partitions (KIP-734); send it to their leader."""

    API_KEY, API_VERSION = 2, 7
    REQUEST = """replica_id:i32=-1 isolation_level:i8=0
        topics[name:str partitions[partition:i32 current_leader_epoch:i32=-1 timestamp:i64=-3]]"""
    RESPONSE = """throttle_time_ms:i32
        topics[name:str partitions[partition:i32 error_code:i16 timestamp:i64 offset:i64
            leader_epoch:i32]]"""


# --- transactions --------------------------------------------------------------------------------


class DescribeProducersV0(Request):
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


class ListTransactionsV0(Request):
    """The transactions that one broker coordinates and the caller may describe (KIP-664)."""

    API_KEY, API_VERSION = 66, 0
    REQUEST = "state_filters[str] producer_id_filters[i64]"
    RESPONSE = """throttle_time_ms:i32 error_code:i16 unknown_state_filters[str]
        transaction_states[transactional_id:str producer_id:i64 transaction_state:str]"""


class DescribeTransactionsV0(Request):
    """The state of transactions; send it to their coordinator (KIP-664)."""

    API_KEY, API_VERSION = 65, 0
    REQUEST = "transactional_ids[str]"
    RESPONSE = """throttle_time_ms:i32
        transaction_states[error_code:i16 transactional_id:str transaction_state:str
            transaction_timeout_ms:i32 transaction_start_time_ms:i64 producer_id:i64
            producer_epoch:i16 topics[topic:str partitions[i32]]]"""


class InitProducerIdV0(Request):
    """A producer id that fences earlier users of the transactional id, which may be None."""

    API_KEY, API_VERSION, FLEXIBLE = 22, 0, False
    REQUEST = "transactional_id:str transaction_timeout_ms:i32"
    RESPONSE = "throttle_time_ms:i32 error_code:i16 producer_id:i64 producer_epoch:i16"


class InitProducerIdV5(Request):
    """A producer id that fences earlier users of the transactional id (KIP-890).

    With the id and epoch of a producer, only if no other producer has taken over since.
    """

    API_KEY, API_VERSION = 22, 5
    REQUEST = """transactional_id:str transaction_timeout_ms:i32 producer_id:i64
        producer_epoch:i16"""
    RESPONSE = "throttle_time_ms:i32 error_code:i16 producer_id:i64 producer_epoch:i16"


class AddPartitionsToTxnV0(Request):
    """Adds partitions to a transaction, beginning it if needed."""

    API_KEY, API_VERSION, FLEXIBLE = 24, 0, False
    REQUEST = """transactional_id:str producer_id:i64 producer_epoch:i16
        topics[topic:str partitions[i32]]"""
    RESPONSE = """throttle_time_ms:i32
        errors[topic:str partition_errors[partition:i32 error_code:i16]]"""


class AddOffsetsToTxnV0(Request):
    """Adds the offsets of a group to a transaction."""

    API_KEY, API_VERSION, FLEXIBLE = 25, 0, False
    REQUEST = "transactional_id:str producer_id:i64 producer_epoch:i16 group_id:str"
    RESPONSE = "throttle_time_ms:i32 error_code:i16"


class EndTxnV0(Request):
    """Commits or aborts, for version 1 of the transaction protocol."""

    API_KEY, API_VERSION, FLEXIBLE = 26, 0, False
    REQUEST = "transactional_id:str producer_id:i64 producer_epoch:i16 committed:bool"
    RESPONSE = "throttle_time_ms:i32 error_code:i16"


class EndTxnV5(Request):
    """The same; its answer has the producer id and epoch for the next transaction (KIP-890)."""

    API_KEY, API_VERSION = 26, 5
    REQUEST = EndTxnV0.REQUEST
    RESPONSE = "throttle_time_ms:i32 error_code:i16 producer_id:i64 producer_epoch:i16"


# --- features ------------------------------------------------------------------------------------


class ApiVersionsV0(Request):
    """The versions of requests that a broker takes: the first request of a connection."""

    API_KEY, API_VERSION, FLEXIBLE = 18, 0, False
    REQUEST = ""
    RESPONSE = "error_code:i16 api_versions[api_key:i16 min_version:i16 max_version:i16]"


class ApiVersionsV3(Request):
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
_finalized = decoder("features[name:str max_level:i16 min_level:i16]")


def finalized_features(answer: Any) -> dict[str, int]:
    """Return the level of each finalized feature, from an answer to `api_versions`."""
    encoded: bytes | None = answer.tags.get(_FINALIZED_TAG)
    if encoded is None:
        return {}
    return {name: level for name, level, _min_level in _finalized(encoded)}


# --- logins --------------------------------------------------------------------------------------


class SaslHandshakeV1(Request):
    """Chooses the mechanism of a login."""

    API_KEY, API_VERSION, FLEXIBLE = 17, 1, False
    REQUEST = "mechanism:str"
    RESPONSE = "error_code:i16 enabled_mechanisms[str]"


class SaslAuthenticateV1(Request):
    """One message of a login's mechanism; the last answer has the login's lifetime (KIP-368)."""

    API_KEY, API_VERSION, FLEXIBLE = 36, 1, False
    REQUEST = "auth_bytes:bytes"
    RESPONSE = "error_code:i16 error_message:str auth_bytes:bytes session_lifetime_ms:i64"


# --- groups --------------------------------------------------------------------------------------


class FindCoordinatorV1(Request):
    """The broker that coordinates a group or a transactional id."""

    API_KEY, API_VERSION, FLEXIBLE = 10, 1, False
    REQUEST = "key:str kind:i8"
    RESPONSE = """throttle_time_ms:i32 error_code:i16 error_message:str
        coordinator_id:i32 host:str port:i32"""


class JoinGroupV5(Request):
    """Enters a group, or its next generation; answered when all members have."""

    API_KEY, API_VERSION, FLEXIBLE = 11, 5, False
    REQUEST = """group:str session_timeout_ms:i32 rebalance_timeout_ms:i32 member_id:str
        group_instance_id:str protocol_type:str protocols[name:str metadata:bytes]"""
    RESPONSE = """throttle_time_ms:i32 error_code:i16 generation_id:i32 group_protocol:str
        leader_id:str member_id:str
        members[member_id:str group_instance_id:str member_metadata:bytes]"""


class SyncGroupV3(Request):
    """Brings the leader's assignment to all members."""

    API_KEY, API_VERSION, FLEXIBLE = 14, 3, False
    REQUEST = """group:str generation_id:i32 member_id:str group_instance_id:str
        assignments[member_id:str assignment:bytes]"""
    RESPONSE = "throttle_time_ms:i32 error_code:i16 member_assignment:bytes"


class HeartbeatV3(Request):
    """With the instance id, so that the coordinator fences a second process that uses it."""

    API_KEY, API_VERSION, FLEXIBLE = 12, 3, False
    REQUEST = "group:str generation_id:i32 member_id:str group_instance_id:str"
    RESPONSE = "throttle_time_ms:i32 error_code:i16"


class LeaveGroupV3(Request):
    """Removes a static member of a group."""

    API_KEY, API_VERSION, FLEXIBLE = 13, 3, False
    REQUEST = "group:str members[member_id:str group_instance_id:str]"
    RESPONSE = """throttle_time_ms:i32 error_code:i16
        members[member_id:str group_instance_id:str error_code:i16]"""


class DescribeGroupsV4(Request):
    """The members of groups, with their instance ids."""

    API_KEY, API_VERSION, FLEXIBLE = 15, 4, False
    REQUEST = "groups[str] include_authorized_operations:bool=False"
    RESPONSE = """throttle_time_ms:i32
        groups[error_code:i16 group:str state:str protocol_type:str protocol:str
            members[member_id:str group_instance_id:str client_id:str client_host:str
                member_metadata:bytes member_assignment:bytes]
            authorized_operations:i32]"""


class ListGroupsV4(Request):
    """The groups that one broker coordinates and the caller may describe."""

    API_KEY, API_VERSION = 16, 4
    REQUEST = "states_filter[str]"
    RESPONSE = """throttle_time_ms:i32 error_code:i16
        groups[group_id:str protocol_type:str group_state:str]"""


# --- offsets of groups ---------------------------------------------------------------------------


class OffsetFetchV7(Request):
    """Committed offsets; `topics` None is all. `require_stable` refuses them while a transaction
    with new ones is open (KIP-447)."""

    API_KEY, API_VERSION = 9, 7
    REQUEST = "group_id:str topics[name:str partitions[i32]] require_stable:bool"
    RESPONSE = """throttle_time_ms:i32
        topics[name:str partitions[partition:i32 offset:i64 leader_epoch:i32 metadata:str
            error_code:i16]]
        error_code:i16"""


class OffsetCommitV7(Request):
    """Stores offsets with a member's generation and instance id."""

    API_KEY, API_VERSION, FLEXIBLE = 8, 7, False
    REQUEST = """group_id:str generation_id:i32 member_id:str group_instance_id:str
        topics[name:str partitions[partition:i32 offset:i64 leader_epoch:i32 metadata:text]]"""
    RESPONSE = """throttle_time_ms:i32 topics[name:str partitions[partition:i32 error_code:i16]]"""


class TxnOffsetCommitV3(Request):
    """Stores offsets in a transaction with a member's generation and instance id (KIP-447)."""

    API_KEY, API_VERSION = 28, 3
    REQUEST = """transactional_id:str group_id:str producer_id:i64 producer_epoch:i16
        generation_id:i32 member_id:str group_instance_id:str
        topics[name:str partitions[partition:i32 offset:i64 leader_epoch:i32 metadata:text]]"""
    RESPONSE = """throttle_time_ms:i32 topics[name:str partitions[partition:i32 error_code:i16]]"""


class TxnOffsetCommitV5(TxnOffsetCommitV3):
    """The same, and adds the group to the transaction if needed (KIP-890)."""

    API_VERSION = 5
