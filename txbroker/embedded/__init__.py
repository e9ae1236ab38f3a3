"""A real Apache Kafka in a child process: for development, the demo and tests."""

from __future__ import annotations

from txbroker.embedded.errors import EmbeddedKafkaError
from txbroker.errors import needs

with needs("embedded"):
    from txbroker.embedded.jars import BarProgress, Progress
    from txbroker.embedded.server import DEFAULT_VERSION, EmbeddedKafka

__all__ = ["DEFAULT_VERSION", "BarProgress", "EmbeddedKafka", "EmbeddedKafkaError", "Progress"]
