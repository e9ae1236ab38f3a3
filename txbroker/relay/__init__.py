"""Relays: what a database transaction wrote becomes visible in Kafka, exactly once."""

from txbroker.core.records import Decision, Message
from txbroker.databases.outbox.rows import Prepared
from txbroker.relay.outbox import Outbox
from txbroker.relay.relay import Relay
from txbroker.relay.settings import StillWaiting

__all__ = ["Decision", "Message", "Outbox", "Prepared", "Relay", "StillWaiting"]
