"""What a run found, told to every proxy through the compacted audit topic."""

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
from txbroker.kafka.door.audit import KafkaAuditWriter
from txbroker.spark.schema import BUSINESS_KINDS, KINDS, TOPIC_KINDS, RunSummary

_FOUND_AGAIN = frozenset(
    {
        *("late", "lost", "not_kept", "refused_visible", "overdue"),
        *("target_missing", "target_unreadable"),
    }
)
"""Whoever is so still is so in the next run, too, unless it was mended."""


def news_of(summary: RunSummary, untold: Sequence[RunSummary] = ()) -> AuditNews:
    """Return what proxies are told: no examples and no histograms, so its size is bounded.

    Args:
        untold: earlier runs that nobody was told of. A later run does not look again at what ended
            wrongly, so their findings count with this one's; of each kind the greatest number,
            because some may be found again.
    """
    kinds = dict.fromkeys((kind.name for kind in (*KINDS, *TOPIC_KINDS)), 0)
    if summary.business:
        kinds |= dict.fromkeys((kind.name for kind in BUSINESS_KINDS), 0)
    drift = {**kinds, **summary.drift}
    for run in untold:
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
            UnreadRecord(each.topic, each.partition, each.offset, each.why)
            for each in summary.set_aside
        ],
        missing_targets=dict(summary.missing_targets),
    )


def key_of(summary: RunSummary) -> str:
    """Return the key under which a run is told: that of a stream, or of a batch."""
    return STREAM_KEY if summary.mode == "stream" else BATCH_KEY


async def publish(
    settings: KafkaSettings, summary: RunSummary, untold: Sequence[RunSummary] = ()
) -> None:
    """Tell all proxies what a run found, and earlier ones that nobody was told of.

    Raises:
        ConfigurationError: the audit topic does not exist, or may not be written.
        KafkaUnavailable: it may or may not be told. The same again does no harm.
    """
    async with KafkaAuditWriter(settings) as writer:
        news = encode_news(news_of(summary, untold))
        await writer.put(settings.audit_topic, key_of(summary), news)
