"""What a run found, told to every proxy through the compacted audit topic."""

from txbroker.core.audit import (
    BATCH_KEY,
    STREAM_KEY,
    TAKEN_TOPICS_MAX,
    AuditNews,
    encode_news,
)
from txbroker.kafka.audit import KafkaAuditWriter
from txbroker.kafka.settings import KafkaSettings
from txbroker.spark.schema import BUSINESS_KINDS, KIND_NAMES, RunSummary


def news_of(summary: RunSummary) -> AuditNews:
    """Return what proxies are told: no examples and no histograms, so its size is bounded."""
    kinds = dict.fromkeys(KIND_NAMES, 0)
    if summary.business:
        kinds |= dict.fromkeys((kind.name for kind in BUSINESS_KINDS), 0)
    most = sorted(summary.taken.items(), key=lambda item: (-item[1], item[0]))
    return AuditNews(
        run=summary.run,
        mode=summary.mode,
        started_ms=summary.started_ms,
        ended_ms=summary.started_ms + round(summary.took_s * 1000),
        transactions=summary.transactions,
        states=dict(summary.states),
        drift={**kinds, **summary.drift},
        carried=summary.carried,
        quarantined=summary.quarantined,
        taken=sum(summary.taken.values()),
        taken_topics=dict(most[:TAKEN_TOPICS_MAX]),
        business=dict(summary.business),
        strangers=summary.strangers,
    )


def key_of(summary: RunSummary) -> str:
    """Return the key under which a run is told: that of a stream, or of a batch."""
    return STREAM_KEY if summary.mode == "stream" else BATCH_KEY


async def publish(settings: KafkaSettings, summary: RunSummary) -> None:
    """Tell all proxies what a run found.

    Raises:
        ConfigurationError: the audit topic does not exist, or may not be written.
        KafkaUnavailable: it may or may not be told. The same again does no harm.
    """
    async with KafkaAuditWriter(settings) as writer:
        await writer.put(settings.audit_topic, key_of(summary), encode_news(news_of(summary)))
