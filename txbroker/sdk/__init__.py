"""The SDK: transactional messages from Python services, async and blocking.

`txbroker.sdk` needs neither a Kafka client nor Spark: it talks to a txbroker proxy.
"""

from txbroker.core.records import CheckReason, Decision, Message, State
from txbroker.sdk.limits import Limits
from txbroker.sdk.producer import LocalFunction, TransactionalProducer
from txbroker.sdk.transaction import Transaction
from txbroker.sdk.types import (
    Answer,
    CheckFunction,
    CheckRequest,
    Commit,
    NotYet,
    Outcome,
    ProducerClosed,
    Rollback,
)

__all__ = [
    "Answer",
    "CheckFunction",
    "CheckReason",
    "CheckRequest",
    "Commit",
    "Decision",
    "Limits",
    "LocalFunction",
    "Message",
    "NotYet",
    "Outcome",
    "ProducerClosed",
    "Rollback",
    "State",
    "Transaction",
    "TransactionalProducer",
]
