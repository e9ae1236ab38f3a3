"""Consumers: any Kafka topic, in any mode.

`Consumer` for asyncio, `BlockingConsumer` for other code. Handlers raise `Later` or `Reject`.
"""

from txbroker.core.consuming.failure import Later, Reject
from txbroker.core.consuming.position import StoredOffset
from txbroker.errors import needs

with needs("consumer"):
    from txbroker.consumer.blocking import BlockingConsumer
    from txbroker.consumer.consumer import Consumer
    from txbroker.consumer.engine.workers import HandlerTimeout
    from txbroker.consumer.message import Message, MessageLease, ReceivedMessage
    from txbroker.consumer.positions import RecordsDeleted
    from txbroker.consumer.rounds import CommitPolicy
    from txbroker.consumer.settings import ConsumerOptions
    from txbroker.consumer.statistics import ConsumerCollector, Statistics
    from txbroker.consumer.stores.database import InDatabase
    from txbroker.consumer.stores.files import InFile
    from txbroker.consumer.stores.kafka import InKafka, Outputs
    from txbroker.consumer.stores.own import PositionStore

__all__ = [
    "BlockingConsumer",
    "CommitPolicy",
    "Consumer",
    "ConsumerCollector",
    "ConsumerOptions",
    "HandlerTimeout",
    "InDatabase",
    "InFile",
    "InKafka",
    "Later",
    "Message",
    "MessageLease",
    "Outputs",
    "PositionStore",
    "ReceivedMessage",
    "RecordsDeleted",
    "Reject",
    "Statistics",
    "StoredOffset",
]
