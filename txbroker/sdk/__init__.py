"""The SDK: transactional messages from Python services, async and blocking.

`txbroker.sdk` needs neither a Kafka client nor Spark: it talks to a txbroker proxy.
"""

from txbroker.contract.checks import Answer, CheckFunction, CheckRequest, Commit, NotYet, Rollback
from txbroker.core.records import CheckReason, Decision, Message, State
from txbroker.databases import (
    AlreadyRecorded,
    Barrier,
    MariaDBBarrier,
    PostgresBarrier,
    SqliteBarrier,
    TooLate,
)
from txbroker.sdk.blocking import (
    BlockingTransaction,
    BlockingTransactionalProducer,
    ForkedTransaction,
)
from txbroker.sdk.producer import LocalFunction, TransactionalProducer
from txbroker.sdk.transaction import Transaction
from txbroker.sdk.types import (
    Limits,
    Outcome,
    ProducerClosed,
    Repeated,
    TransactionOptions,
    Untrusted,
)
from txbroker.sdk.webhook import (
    BadSignature,
    check_answer,
    is_test_call,
    parse_check,
    verify_webhook,
)

__all__ = [
    "AlreadyRecorded",
    "Answer",
    "BadSignature",
    "Barrier",
    "BlockingTransaction",
    "BlockingTransactionalProducer",
    "CheckFunction",
    "CheckReason",
    "CheckRequest",
    "Commit",
    "Decision",
    "ForkedTransaction",
    "Limits",
    "LocalFunction",
    "MariaDBBarrier",
    "Message",
    "NotYet",
    "Outcome",
    "PostgresBarrier",
    "ProducerClosed",
    "Repeated",
    "Rollback",
    "SqliteBarrier",
    "State",
    "TooLate",
    "Transaction",
    "TransactionOptions",
    "TransactionalProducer",
    "Untrusted",
    "check_answer",
    "is_test_call",
    "parse_check",
    "verify_webhook",
]
