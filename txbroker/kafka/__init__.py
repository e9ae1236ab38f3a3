"""The door to a real Kafka; the only room that talks to one."""

from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.door import KafkaDoor

__all__ = ["KafkaDoor", "KafkaSettings"]
