"""The door to a real Kafka; the only room that talks to one."""

from txbroker.kafka.door import KafkaDoor
from txbroker.kafka.settings import KafkaSettings

__all__ = ["KafkaDoor", "KafkaSettings"]
