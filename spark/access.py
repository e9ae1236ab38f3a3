"""Access to Kafka for the audit: topic ends, read without Spark, and Spark's connection options.

Spark's Kafka client takes no files for secrets, so its options hold them. Spark and the client mask
them in their logs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from txbroker.config.settings import Settings
from txbroker.contract.audit import (
    BATCH_KEY,
    BATCH_TICK_KEY,
    STREAM_KEY,
    TAKEN_TOPICS_MAX,
    AuditNews,
    CheckNews,
    UnreadRecord,
    encode_news,
)
from txbroker.core.records import Record
from txbroker.errors import ConfigurationError, KafkaUnavailable, TxbrokerError
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.tools.audit_access import AuditAccess, TopicBounds, some_records
from txbroker.kafka.tools.audit_results import KafkaAuditWriter
from txbroker.spark.judge.kinds import BUSINESS_KINDS, KINDS, PERSISTENT, TOPIC_KINDS
from txbroker.spark.judge.rows import can_be_topic
from txbroker.spark.schema import RunSummary, TopicNames

_Result = TypeVar("_Result")


class TopicEnds(Struct, frozen=True):
    """The readable range of a topic by partition: first kept offset and last stable offset; the
    other fields as in `TopicBounds`."""

    topic: str
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    compacted: bool = False
    open: tuple[int, ...] = ()
    append_time: bool = True
    kept_ms: int = 0
    id: str = ""
    unread: str = ""
    passing: bool = False


class AuditKafka:
    """One Kafka cluster, as this process and as Spark reach it.

    All methods may be called from any thread, also from one that runs an event loop. They raise an
    `AuditError` where a topic is missing or Kafka does not answer, and a `ConfigurationError` where
    a setting, a right or a topic's configuration is wrong.

    Attributes:
        settings: the connection of this process.
        options: the options of Spark's Kafka source, with their prefix, as
            `kafka.bootstrap.servers`.
    """

    def __init__(self, settings: KafkaSettings, options: Mapping[str, str] | None = None) -> None:
        self.settings = settings
        reached = {
            "kafka.bootstrap.servers": ",".join(settings.bootstrap_servers),
            # How long the broker delays an answer without records, as at the end of a transaction;
            # the default is 500 ms. Records that are there are sent at once.
            "kafka.fetch.max.wait.ms": "20",
        }
        self.options = reached | dict(options or {})

    def ends(self, topics: Iterable[str], *, patient: bool = True) -> dict[str, TopicEnds]:
        """Return the readable ranges of topics; topics that do not exist are left out.

        `patient`: whether to wait for a topic without a leader.
        """
        # Half messages may name topics that no Kafka request can hold.
        names = tuple(filter(can_be_topic, topics))
        try:
            bounds = _run(self._bounds(names, patient))
        except KafkaUnavailable as error:
            raise AuditError(f"the ends of topics cannot be read from Kafka: {error}") from None
        return {
            name: TopicEnds(name, **msgspec.structs.asdict(topic)) for name, topic in bounds.items()
        }

    def own_ends(self, topic: str) -> TopicEnds:
        """Return the readable range of one of txbroker's own topics."""
        ends = self.ends((topic,)).get(topic)
        if ends is None:
            raise AuditError(f"topic {topic} does not exist: check --kafka and --topic-prefix")
        if ends.unread:
            failure = AuditError if ends.passing else ConfigurationError
            raise failure(f"topic {topic} cannot be read: {ends.unread}")
        if not ends.append_time:
            raise _clockless(topic)
        return ends

    def now_ms(self, names: TopicNames) -> int:
        """Return the time by the brokers' clocks, ms since 1970: that of a record written now to an
        installation's audit topic."""
        self.own_ends(names.op)
        try:
            at_ms = _run(self._tick(names.audit))
        except KafkaUnavailable as error:
            raise AuditError(f"the brokers' time cannot be read from Kafka: {error}") from None
        if at_ms < 0:
            raise _clockless(names.audit)
        return at_ms

    def offsets_at(self, topics: Mapping[str, int], time_ms: int) -> dict[str, tuple[int, ...]]:
        """Return the first offset with this timestamp or a later one, else the end, of each
        partition. `topics`: their numbers of partitions."""
        try:
            return _run(self._offsets_at(topics, time_ms))
        except KafkaUnavailable as error:
            raise AuditError(f"offsets cannot be read from Kafka: {error}") from None

    def some(self, topic: str, partition: int, position: int, end: int) -> tuple[list[Record], int]:
        """Return committed records from an offset on, some tens of MiB, and the next offset."""
        try:
            return _run(some_records(self.settings, topic, partition, position, end))
        except KafkaUnavailable as error:
            raise AuditError(
                f"topic {topic} cannot be read: {error}. Run the audit again"
            ) from None

    async def _offsets_at(
        self, topics: Mapping[str, int], time_ms: int
    ) -> dict[str, tuple[int, ...]]:
        async with AuditAccess(self.settings) as access:
            return await access.offsets_at(topics, time_ms)

    async def _tick(self, audit_topic: str) -> int:
        async with KafkaAuditWriter(self.settings) as writer:
            return await writer.put(audit_topic, BATCH_TICK_KEY, b"0")

    async def _bounds(self, topics: Sequence[str], patient: bool) -> dict[str, TopicBounds]:
        async with AuditAccess(self.settings) as access:
            return await access.bounds(topics, patient=patient)


def _clockless(topic: str) -> ConfigurationError:
    return ConfigurationError(
        f"topic {topic} must have message.timestamp.type=LogAppendTime: the audit judges by append "
        "times. Run `txbroker topics apply`"
    )


def access_from(settings: Settings) -> AuditKafka:
    """Return the access to the Kafka cluster of a configuration."""
    return AuditKafka(KafkaSettings.from_configuration(settings), login_options(settings))


# --- from where to where ---------------------------------------------------------------------


def _run(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in a dedicated event loop, beside any loop of this thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


class AuditError(TxbrokerError):
    """The audit cannot be made."""


_MODULES = "org.apache.kafka.common.security"
_PREFIX = "kafka."


def login_options(settings: Settings) -> dict[str, str]:
    """Return the TLS and login options of Spark's Kafka source, by their names there."""
    protocol = settings.kafka_security_protocol
    options = {"security.protocol": str(protocol)}
    if protocol.endswith("SSL"):
        options |= _tls(settings)
    if protocol.startswith("SASL"):
        mechanism = settings.kafka_sasl_mechanism
        options["sasl.mechanism"] = mechanism
        options |= _by_token(settings) if mechanism == "OAUTHBEARER" else _by_password(settings)
    return {f"{_PREFIX}{name}": text for name, text in options.items()}


def _tls(settings: Settings) -> dict[str, str]:
    options: dict[str, str] = {}
    if settings.kafka_ssl_ca_file is not None:
        options["ssl.truststore.type"] = "PEM"
        options["ssl.truststore.certificates"] = _text(settings.kafka_ssl_ca_file)
    if settings.kafka_ssl_cert_file is not None and settings.kafka_ssl_key_file is not None:
        options["ssl.keystore.type"] = "PEM"
        options["ssl.keystore.certificate.chain"] = _text(settings.kafka_ssl_cert_file)
        options["ssl.keystore.key"] = _text(settings.kafka_ssl_key_file)
        if password := settings.kafka_secret("kafka_ssl_key_password"):
            options["ssl.key.password"] = password
    return options


def _by_password(settings: Settings) -> dict[str, str]:
    kind = "plain.Plain" if settings.kafka_sasl_mechanism == "PLAIN" else "scram.Scram"
    password = settings.kafka_secret("kafka_sasl_password")
    return _jaas(f"{kind}LoginModule", username=settings.kafka_sasl_username, password=password)


def _by_token(settings: Settings) -> dict[str, str]:
    handler = f"{_MODULES}.oauthbearer.OAuthBearerLoginCallbackHandler"
    options = {"sasl.login.callback.handler.class": handler}
    name = "oauthbearer.OAuthBearerLoginModule"
    if settings.kafka_oauth_token_file is not None:
        # Read once: where Spark outlives the token, configure a token URL instead.
        url = settings.kafka_oauth_token_file.absolute().as_uri()
        return {**options, "sasl.oauthbearer.token.endpoint.url": url, **_jaas(name)}
    given = {
        "clientId": settings.kafka_oauth_client_id,
        "clientSecret": settings.kafka_secret("kafka_oauth_client_secret"),
    }
    if settings.kafka_oauth_scope:
        given["scope"] = settings.kafka_oauth_scope
    if settings.kafka_oauth_ca_file is not None:
        given["ssl.truststore.type"] = "PEM"
        given["ssl.truststore.certificates"] = _text(settings.kafka_oauth_ca_file)
    return {
        **options,
        "sasl.oauthbearer.token.endpoint.url": settings.kafka_oauth_token_url,
        # As RFC 6749 requires, and as the proxies do.
        "sasl.oauthbearer.header.urlencode": "true",
        **_jaas(name, **given),
    }


def _jaas(module: str, **given: str) -> dict[str, str]:
    written = "".join(f' {name}="{_quoted(text)}"' for name, text in given.items())
    return {"sasl.jaas.config": f"{_MODULES}.{module} required{written};"}


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from None


# --- news for the proxies ------------------------------------------------------------------------


def news_of(summary: RunSummary, unpublished: Sequence[RunSummary] = ()) -> AuditNews:
    """Return the news for the proxies: no examples and no histograms, so its size is bounded.

    Args:
        unpublished: earlier runs that were not published. A later run does not examine ended
            transactions again, so their findings are added; of each kind the greatest number,
            because some may be found again.
    """
    kinds = dict.fromkeys((kind.name for kind in (*KINDS, *TOPIC_KINDS)), 0)
    if summary.business:
        kinds |= dict.fromkeys((kind.name for kind in BUSINESS_KINDS), 0)
    drift = {**kinds, **summary.open_drift}
    for run in unpublished:
        for kind in run.open_drift.keys() - PERSISTENT:
            drift[kind] = max(drift.get(kind, 0), run.open_drift[kind])
    most = sorted(summary.taken.items(), key=lambda item: (-item[1], item[0]))
    return AuditNews(
        run=summary.run,
        mode=summary.mode,
        started_ms=summary.started_ms,
        ended_ms=summary.started_ms + round(summary.took_s * 1000),
        transactions=summary.transactions,
        states=dict(summary.states),
        drift=drift,
        carried=summary.carried,
        quarantined=summary.quarantined,
        taken=sum(summary.taken.values()),
        taken_topics=dict(most[:TAKEN_TOPICS_MAX]),
        business=dict(summary.business),
        strangers=summary.strangers,
        set_aside=[
            UnreadRecord(record.topic, record.partition, record.offset, record.why)
            for record in summary.set_aside
        ],
        missing_targets=dict(summary.missing_targets),
        stream=summary.stream,
        acknowledged=summary.acknowledged,
        checks=[CheckNews(one.name, one.severity, one.ok is not False) for one in summary.checks],
    )


def key_of(summary: RunSummary) -> str:
    """Return the record key of a run: that of a stream, or of a batch."""
    return STREAM_KEY if summary.mode == "stream" else BATCH_KEY


async def publish(
    settings: KafkaSettings, summary: RunSummary, unpublished: Sequence[RunSummary] = ()
) -> None:
    """Publish a run to all proxies, with earlier runs that were not published.

    Without an answer of Kafka it may be published; a repetition is harmless.
    """
    async with KafkaAuditWriter(settings) as writer:
        news = encode_news(news_of(summary, unpublished))
        await writer.put(settings.audit_topic, key_of(summary), news)
