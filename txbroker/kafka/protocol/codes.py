"""The error codes of Kafka's protocol that txbroker handles.

By number, because the client library lacks some, and treats unknown retriable ones as final (74,
75, 78)."""

from enum import IntEnum


class Code(IntEnum):
    """An error code as brokers send it."""

    UNKNOWN = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER = 6
    REQUEST_TIMED_OUT = 7
    BROKER_NOT_AVAILABLE = 8
    REPLICA_NOT_AVAILABLE = 9
    MESSAGE_TOO_LARGE = 10
    OFFSET_METADATA_TOO_LARGE = 12
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOADING = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    INVALID_TOPIC = 17
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    ILLEGAL_GENERATION = 22
    INCONSISTENT_GROUP_PROTOCOL = 23
    INVALID_GROUP_ID = 24
    UNKNOWN_MEMBER = 25
    INVALID_SESSION_TIMEOUT = 26
    REBALANCE_IN_PROGRESS = 27
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    INVALID_TIMESTAMP = 32
    UNSUPPORTED_SASL_MECHANISM = 33
    ILLEGAL_SASL_STATE = 34
    UNSUPPORTED_VERSION = 35
    TOPIC_EXISTS = 36
    NOT_CONTROLLER = 41
    OUT_OF_ORDER_SEQUENCE = 45
    DUPLICATE_SEQUENCE = 46
    INVALID_PRODUCER_EPOCH = 47
    INVALID_TXN_STATE = 48
    INVALID_PRODUCER_ID_MAPPING = 49
    INVALID_TRANSACTION_TIMEOUT = 50
    CONCURRENT_TRANSACTIONS = 51
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43
    POLICY_VIOLATION = 44
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
    OPERATION_NOT_ATTEMPTED = 55
    STORAGE_ERROR = 56
    SASL_AUTHENTICATION_FAILED = 58
    UNKNOWN_PRODUCER_ID = 59
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    OFFSET_NOT_AVAILABLE = 78
    MEMBER_ID_REQUIRED = 79
    PREFERRED_LEADER_NOT_AVAILABLE = 80
    GROUP_MAX_SIZE_REACHED = 81
    FENCED_INSTANCE_ID = 82
    INVALID_RECORD = 87
    UNSTABLE_OFFSET_COMMIT = 88
    THROTTLING_QUOTA_EXCEEDED = 89
    PRODUCER_FENCED = 90
    TRANSACTIONAL_ID_NOT_FOUND = 105
    TRANSACTION_ABORTABLE = 120


LEADER_MOVED = frozenset(
    {
        Code.UNKNOWN_TOPIC_OR_PARTITION,
        Code.LEADER_NOT_AVAILABLE,
        Code.NOT_LEADER,
        Code.REPLICA_NOT_AVAILABLE,
        Code.BROKER_NOT_AVAILABLE,
        Code.STORAGE_ERROR,
        Code.FENCED_LEADER_EPOCH,
        Code.UNKNOWN_LEADER_EPOCH,
        Code.PREFERRED_LEADER_NOT_AVAILABLE,
    }
)
"""The broker does not lead the partition (any more): look up its leader again."""

RETRIABLE = LEADER_MOVED | {
    Code.CORRUPT_MESSAGE,
    Code.REQUEST_TIMED_OUT,
    Code.NETWORK_EXCEPTION,
    Code.NOT_ENOUGH_REPLICAS,
    Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    Code.OFFSET_NOT_AVAILABLE,
    Code.CONCURRENT_TRANSACTIONS,
    Code.COORDINATOR_LOADING,
    Code.COORDINATOR_NOT_AVAILABLE,
    Code.NOT_COORDINATOR,
    Code.NOT_CONTROLLER,
    Code.THROTTLING_QUOTA_EXCEEDED,
}
"""The same request may succeed on a retry."""

COORDINATOR_MOVED = frozenset({Code.COORDINATOR_NOT_AVAILABLE, Code.NOT_COORDINATOR})
"""Another broker is the coordinator: look it up again."""

FENCED = frozenset({Code.INVALID_PRODUCER_EPOCH, Code.PRODUCER_FENCED})
"""A newer producer has taken the transactional id."""

MEMBER_FENCED = frozenset({Code.ILLEGAL_GENERATION, Code.UNKNOWN_MEMBER, Code.FENCED_INSTANCE_ID})
"""The group has gone on without this member, or another process uses its instance id."""

TRANSACTION_BROKEN = FENCED | {
    Code.OUT_OF_ORDER_SEQUENCE,
    Code.INVALID_TXN_STATE,
    Code.INVALID_PRODUCER_ID_MAPPING,
    Code.UNKNOWN_PRODUCER_ID,
    Code.TRANSACTION_ABORTABLE,
}
"""The transaction cannot be committed, for example because it has timed out. The next one may."""

PRODUCER_LOST = TRANSACTION_BROKEN | {
    Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    Code.COORDINATOR_LOADING,
    Code.COORDINATOR_NOT_AVAILABLE,
    Code.NOT_COORDINATOR,
    Code.CONCURRENT_TRANSACTIONS,
    Code.UNSUPPORTED_VERSION,
}
"""The state of producer or coordinator is at fault, and no record."""

TOPIC_REFUSED = frozenset(
    {Code.UNKNOWN_TOPIC_OR_PARTITION, Code.INVALID_TOPIC, Code.TOPIC_AUTHORIZATION_FAILED}
)
"""Nothing can be written to the topic."""

RECORDS_REFUSED = frozenset(
    {
        Code.MESSAGE_TOO_LARGE,
        Code.RECORD_LIST_TOO_LARGE,
        Code.INVALID_TIMESTAMP,
        Code.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        Code.POLICY_VIOLATION,
        Code.INVALID_RECORD,
    }
)
"""Some records of a batch cannot be written, or the batch is too large."""

SEQUENCE_LOST = frozenset(
    {Code.OUT_OF_ORDER_SEQUENCE, Code.UNKNOWN_PRODUCER_ID, Code.INVALID_PRODUCER_EPOCH}
)
"""The broker lost the producer's sequence: use a new producer id."""


# Those that txbroker does not handle.
_OTHERS = (
    "4 invalid fetch size; 11 stale controller epoch; 21 invalid required acks; 28 invalid "
    "commit offset size; 33 unsupported SASL mechanism; 34 illegal SASL state; 37 invalid "
    "partitions; 38 invalid replication factor; 39 invalid replica assignment; 40 invalid "
    "config; 42 invalid request; 52 transaction coordinator fenced; 54 security disabled; 57 "
    "log dir not found; 58 SASL authentication failed; 60 reassignment in progress; 61 "
    "delegation token auth disabled; 62 delegation token not found; 63 delegation token owner "
    "mismatch; 64 delegation token request not allowed; 65 delegation token authorization "
    "failed; 66 delegation token expired; 67 invalid principal type; 68 non empty group; 69 "
    "group id not found; 70 fetch session id not found; 71 invalid fetch session epoch; 72 "
    "listener not found; 73 topic deletion disabled; 76 unsupported compression type; 77 stale "
    "broker epoch; 83 eligible leaders not available; 84 election not needed; 85 no "
    "reassignment in progress; 86 group subscribed to topic; 91 resource not found; 92 "
    "duplicate resource; 93 unacceptable credential; 94 inconsistent voter set; 95 invalid "
    "update version; 96 feature update failed; 97 principal deserialization failure; 98 "
    "snapshot not found; 99 position out of range; 100 unknown topic id; 101 duplicate broker "
    "registration; 102 broker id not registered; 103 inconsistent topic id; 104 inconsistent "
    "cluster id; 105 transactional id not found; 106 fetch session topic id error; 107 "
    "ineligible replica; 108 new leader elected; 109 offset moved to tiered storage; 110 fenced "
    "member epoch; 111 unreleased instance id; 112 unsupported assignor; 113 stale member "
    "epoch; 114 mismatched endpoint type; 115 unsupported endpoint type; 116 unknown controller "
    "id; 117 unknown subscription id; 118 telemetry too large; 119 invalid registration; 121 "
    "invalid record state; 122 share session not found; 123 invalid share session epoch; 124 "
    "fenced state epoch; 125 invalid voter key; 126 duplicate voter; 127 voter not found; 128 "
    "invalid regular expression; 129 rebootstrap required; 130 streams invalid topology; 131 "
    "streams invalid topology epoch; 132 streams topology fenced; 133 share session limit "
    "reached "
)
_NAMES = {
    int(number): name
    for number, _, name in (each.strip().partition(" ") for each in _OTHERS.split(";"))
}


def describe(code: int) -> str:
    """Return an error code in words."""
    try:
        return Code(code).name.lower().replace("_", " ")
    except ValueError:
        return _NAMES.get(code, f"error {code}")
