"""The results of audits as metrics of every proxy, so that an alert needs only a scrape."""

from txbroker.contract.audit import BATCH_KEY, STREAM_KEY, AuditNews, decode_news
from txbroker.core.decoding import Malformed, NewerVersion
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.observe.metrics import Gauges, Metrics

log = get_logger(__name__)


class AuditMetrics:
    """Holds the newest results of a batch audit and of a stream.

    Args:
        metrics: shows them.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._news: dict[str, AuditNews] = {}
        metrics.watch(self._gauges)

    def changed(self, key: str, value: bytes | None) -> None:
        """Take a record of the audit topic; ignore it if it cannot be decoded."""
        if key not in (BATCH_KEY, STREAM_KEY):
            return
        if value is None:
            self._news.pop(key, None)
            return
        try:
            self._news[key] = decode_news(value)
        except NewerVersion as error:
            log.warning("audit is newer", key=key, why=str(error))
        except Malformed as error:
            log.warning("audit record not read", key=key, why=str(error))

    def _gauges(self) -> Gauges:
        drift: dict[str, int] = {}
        for news in self._news.values():
            for kind, count in news.drift.items():
                drift[kind] = max(drift.get(kind, 0), count)
        # One for each mode: a running stream must not hide that batches no longer run.
        ended = {mode: news.ended_ms / 1000 for mode, news in self._news.items()}
        set_aside = {mode: news.quarantined for mode, news in self._news.items()}
        return Gauges(
            audit_drift=drift,
            audit_last_success_timestamp_seconds=ended,
            audit_set_aside_records=set_aside,
        )
