"""Settings of the Kafka client and the door: addresses, names, limits."""

from __future__ import annotations

from functools import partial

from msgspec import Struct

from txbroker.config.access import KafkaAccess
from txbroker.config.addresses import parse_servers
from txbroker.config.settings import Settings
from txbroker.errors import ConfigurationError
from txbroker.kafka.client.login import LoginMaker, NoLogin, SettingsLogin

MAX_MESSAGE_BYTES = 8 << 20
"""Maximum size of a half batch, which holds all messages of a transaction."""

_DAY_MS = 24 * 60 * 60 * 1000


class KafkaSettings(Struct, frozen=True, kw_only=True):
    """How to reach a Kafka cluster, and how txbroker uses it.

    Attributes:
        bootstrap_servers: `host:port` of brokers from which the others are discovered.
        instance_id: unique name of this proxy, stable over restarts, so that a restarted proxy
            keeps its partitions.
        client_id: name of the client in the brokers' logs and quotas.
        group_id: the consumer group that assigns half partitions to proxies.
        login: returns a login, which provides TLS and credentials for connections.
        partitions: number of half partitions to create; existing topics keep theirs.
        partitions_given: an operator chose that number.
        replication: replication factor; 0 means three, or the number of brokers if lower.
        create_topics: whether to create missing topics of txbroker at start.
        half_retention_ms: retention of half messages in milliseconds; -1 is infinite.
        check_window_s: longest time of the default checks until a transaction is parked.
        dedup_window_s: time in which a repeated prepare is recognised.
        request_timeout_s: timeout of a request; at most 5, so that after an unanswered request an
            abort is possible before the transaction timeout.
        write_timeout_s: retries of a write end after this time; its outcome is then unknown.
        claim_timeout_s: timeout of a claim.
        transactions: newest version of Kafka's transaction protocol to use, 1 or 2.
        transaction_timeout_s: Kafka aborts an open promotion transaction after this time.
        visible_timeout_s: a committed promotion transaction that is not visible raises an alarm
            after this time.
        watermark_timeout_s: a read waits this long for acknowledged records that are not visible,
            as after a change of leader, before it reports a truncated log.
        facts_ttl_s: lifetime of cached facts about target topics.
        session_timeout_s: an unresponsive proxy loses its partitions after this time.
    """

    bootstrap_servers: tuple[str, ...]
    instance_id: str
    client_id: str = "txbroker"
    group_id: str = "txbroker"
    half_topic: str = "txbroker.half"
    op_topic: str = "txbroker.op"
    checkpoint_topic: str = "txbroker.checkpoint"
    parked_topic: str = "txbroker.parked"
    groups_topic: str = "txbroker.groups"
    audit_topic: str = "txbroker.audit"
    drift_topic: str = "txbroker.audit.drift"
    login: LoginMaker = NoLogin
    partitions: int = 8
    partitions_given: bool = False
    replication: int = 0
    create_topics: bool = True
    half_retention_ms: int = 30 * _DAY_MS
    half_segment_ms: int = _DAY_MS
    message_bytes_max: int = MAX_MESSAGE_BYTES
    check_window_s: float = 6 + 15 * 30 + 5
    dedup_window_s: float = 120.0
    request_timeout_s: float = 5.0
    write_timeout_s: float = 10.0
    claim_timeout_s: float = 30.0
    transactions: int = 2
    transaction_timeout_s: float = 15.0
    visible_timeout_s: float = 60.0
    retry_backoff_s: float = 0.01
    watermark_timeout_s: float = 5.0
    facts_ttl_s: float = 5.0
    session_timeout_s: float = 10.0

    @classmethod
    def from_configuration(cls, settings: Settings) -> KafkaSettings:
        """Return the settings of a proxy's configuration.

        Raises:
            ConfigurationError: a file that it names cannot be read, or has the wrong content.
        """
        SettingsLogin(settings).arguments()  # fails early
        return cls(
            bootstrap_servers=tuple(map(str, parse_servers(settings.kafka))),
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
            partitions_given="partitions" in settings.model_fields_set,
            half_retention_ms=round(settings.half_retention_s * 1000),
            check_window_s=settings.check_window_s,
            dedup_window_s=settings.dedup_window_s,
            session_timeout_s=settings.session_timeout_s,
        )

    @classmethod
    def from_access(cls, access: KafkaAccess, client_id: str = "txbroker") -> KafkaSettings:
        """Return the settings of a client that is no proxy.

        Raises:
            ConfigurationError: a file that it names cannot be read, or has the wrong content.
        """
        SettingsLogin(access).arguments()  # fails early
        return cls(
            bootstrap_servers=tuple(map(str, parse_servers(access.kafka))),
            instance_id=client_id,
            client_id=client_id,
            login=partial(SettingsLogin, access),
        )

    def validate(self) -> None:
        """Check the settings against each other.

        Raises:
            ConfigurationError: names the settings that contradict each other.
        """
        if not self.bootstrap_servers:
            raise ConfigurationError("no bootstrap servers: set `kafka` to HOST:PORT of a broker")
        if not 1 <= self.partitions <= 0xFFFF:
            raise ConfigurationError("partitions must be between 1 and 65535")
        if self.request_timeout_s > 5 or self.request_timeout_s * 2 > self.transaction_timeout_s:
            raise ConfigurationError(
                "request_timeout_s must be at most 5 and half of transaction_timeout_s"
            )
        names = self.own_topics + self.audit_topics
        if len(set(names)) != len(names):
            raise ConfigurationError(f"txbroker's topics need seven names: {', '.join(names)}")

    @property
    def own_topics(self) -> tuple[str, ...]:
        """The topics that every proxy needs."""
        return (
            self.half_topic,
            self.op_topic,
            self.checkpoint_topic,
            self.parked_topic,
            self.groups_topic,
        )

    @property
    def audit_topics(self) -> tuple[str, ...]:
        """The topics of the audits' results."""
        return (self.audit_topic, self.drift_topic)
