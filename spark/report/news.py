"""Publish the result of a run to every proxy through the compacted audit topic."""

from collections.abc import Sequence

from txbroker.contract.audit import (
    BATCH_KEY,
    STREAM_KEY,
    TAKEN_TOPICS_MAX,
    AuditNews,
    UnreadRecord,
    encode_news,
)
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.tools.audit_results import KafkaAuditWriter
from txbroker.spark.schema import BUSINESS_KINDS, KINDS, TOPIC_KINDS, RunSummary

_FOUND_AGAIN = frozenset(
    {
        *("late", "lost", "not_kept", "refused_visible", "overdue"),
        *("target_missing", "target_unreadable"),
    }
)
"""Findings that later runs repeat while they persist."""


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
    drift = {**kinds, **summary.drift}
    for run in unpublished:
        for kind in run.drift.keys() - _FOUND_AGAIN:
            drift[kind] = max(drift.get(kind, 0), run.drift[kind])
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
    )


def key_of(summary: RunSummary) -> str:
    """Return the record key of a run: that of a stream, or of a batch."""
    return STREAM_KEY if summary.mode == "stream" else BATCH_KEY


async def publish(
    settings: KafkaSettings, summary: RunSummary, unpublished: Sequence[RunSummary] = ()
) -> None:
    """Publish a run to all proxies, with earlier runs that were not published.

    Raises:
        ConfigurationError: the audit topic does not exist, or is not writable.
        KafkaUnavailable: it may or may not be published; a repetition is harmless.
    """
    async with KafkaAuditWriter(settings) as writer:
        news = encode_news(news_of(summary, unpublished))
        await writer.put(settings.audit_topic, key_of(summary), news)
