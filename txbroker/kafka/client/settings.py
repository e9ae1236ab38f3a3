"""What the door to Kafka is told: addresses, names, limits. Frozen; checked once."""

from msgspec import Struct

from txbroker.errors import ConfigurationError
from txbroker.kafka.client.login import LoginMaker, NoLogin

MAX_MESSAGE_BYTES = 8 << 20
"""The largest half batch: several messages of one transaction are one batch."""

_DAY_MS = 24 * 60 * 60 * 1000


class KafkaSettings(Struct, frozen=True, kw_only=True):
    """How to reach a Kafka, and how txbroker uses it.

    Attributes:
        bootstrap_servers: `host:port` of some brokers; the others are found through them.
        instance_id: the name of this proxy, stable over restarts: with it a restarted proxy gets
            its partitions back at once.
        group_id: the consumer group by which proxies share the half partitions.
        login: makes what tells connections about TLS and the login.
        partitions: half partitions to create; topics that exist keep their own number.
        replication: copies of every record; 0 means three, or as many as there are brokers.
        create_topics: create txbroker's own topics at start where they are missing.
        half_retention_ms: how long a half message is kept, milliseconds; -1 for ever.
        check_window_s: the longest time, seconds, that the default checks need until they park a
            transaction.
        dedup_window_s: seconds in which a repeated prepare is recognised.
        request_timeout_s: seconds until a request counts as unanswered; at most 5, so that an
            unanswered request leaves time for an abort before the transaction timeout.
        write_timeout_s: seconds that a write is tried again before its outcome counts as unknown.
        claim_timeout_s: seconds until a claim that does not come through is given up.
        transactions: the newest version of Kafka's transaction protocol to speak, 1 or 2; 1 also
            where brokers do not take the second.
        transaction_timeout_s: seconds until Kafka itself aborts a turn that was left open.
        visible_timeout_s: seconds until a committed turn that does not show is an alarm.
        watermark_timeout_s: seconds that a read waits for records that were acknowledged but do
            not show, as behind a change of leader, until it calls the log truncated.
        facts_ttl_s: seconds for which facts of target topics are remembered.
        session_timeout_s: seconds until a silent proxy loses its partitions.
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

    def validate(self) -> None:
        """Refuse contradictions.

        Raises:
            ConfigurationError: with a sentence that says what contradicts what.
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
        """The names of txbroker's own topics, without which no proxy works."""
        return (
            self.half_topic,
            self.op_topic,
            self.checkpoint_topic,
            self.parked_topic,
            self.groups_topic,
        )

    @property
    def audit_topics(self) -> tuple[str, ...]:
        """The names of the topics in which audits tell what they found."""
        return (self.audit_topic, self.drift_topic)
