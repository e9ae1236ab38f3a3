"""The door that a proxy's configuration describes."""

from __future__ import annotations

from functools import partial

from txbroker.config.settings import Settings
from txbroker.kafka.client.login import SettingsLogin
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.door import KafkaDoor


def door_from(settings: Settings) -> KafkaDoor:
    """Return the door to the Kafka that `settings` name. Made inside a running event loop.

    Raises:
        ConfigurationError: a file that they name cannot be read, or they contradict each other.
    """
    return KafkaDoor(kafka_settings(settings))


def kafka_settings(settings: Settings) -> KafkaSettings:
    """Return what the door is told.

    Raises:
        ConfigurationError: a file that they name cannot be read, or does not hold what it should.
    """
    SettingsLogin(settings).arguments()  # so that what cannot work is refused at once
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
        login=partial(SettingsLogin, settings),
        partitions=settings.partitions,
        half_retention_ms=round(settings.half_retention_s * 1000),
        check_window_s=settings.check_window_s,
        dedup_window_s=settings.dedup_window_s,
        session_timeout_s=settings.session_timeout_s,
    )
