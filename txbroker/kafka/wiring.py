"""The door that a proxy's configuration describes."""

from __future__ import annotations

import ssl
from typing import Any

from txbroker.config import Settings
from txbroker.errors import ConfigurationError
from txbroker.kafka.door import KafkaDoor
from txbroker.kafka.settings import KafkaSettings


def door_from(settings: Settings) -> KafkaDoor:
    """Return the door to the Kafka that `settings` name. Made inside a running event loop.

    Raises:
        ConfigurationError: a file that they name cannot be read, or they contradict each other.
    """
    return KafkaDoor(kafka_settings(settings))


def kafka_settings(settings: Settings) -> KafkaSettings:
    """Return what the door is told.

    Raises:
        ConfigurationError: a file that they name cannot be read.
    """
    return KafkaSettings(
        bootstrap_servers=tuple(part.strip() for part in settings.kafka.split(",")),
        instance_id=settings.instance,
        group_id=settings.topic_prefix,
        half_topic=settings.topic("half"),
        op_topic=settings.topic("op"),
        checkpoint_topic=settings.topic("checkpoint"),
        parked_topic=settings.topic("parked"),
        groups_topic=settings.topic("groups"),
        audit_topic=settings.topic("audit"),
        drift_topic=settings.topic("audit.drift"),
        security=_security(settings),
        partitions=settings.partitions,
        half_retention_ms=round(settings.half_retention_s * 1000),
        check_window_s=settings.check_window_s,
        dedup_window_s=settings.dedup_window_s,
        session_timeout_s=settings.session_timeout_s,
    )


def _security(settings: Settings) -> dict[str, Any]:
    """Return what a connection of the client library is told about TLS and SASL."""
    protocol = settings.kafka_security_protocol
    security: dict[str, Any] = {"security_protocol": protocol}
    if protocol.endswith("SSL"):
        security["ssl_context"] = _ssl_context(settings)
    if protocol.startswith("SASL"):
        security["sasl_mechanism"] = settings.kafka_sasl_mechanism
        security["sasl_plain_username"] = settings.kafka_sasl_username
        security["sasl_plain_password"] = settings.read_kafka_password()
    return security


def _ssl_context(settings: Settings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.kafka_ssl_ca_file)
        if settings.kafka_ssl_cert_file is not None:
            context.load_cert_chain(settings.kafka_ssl_cert_file, settings.kafka_ssl_key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"the certificates for Kafka cannot be used: {error}") from None
    return context
