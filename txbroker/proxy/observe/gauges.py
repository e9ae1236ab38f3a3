"""Sources of gauges, read at each scrape: a proxy's half partitions, and the results of audits."""

import asyncio
import time
from collections import Counter
from dataclasses import replace
from weakref import WeakKeyDictionary

from txbroker.contract.audit import BATCH_KEY, STREAM_KEY, AuditNews, decode_news
from txbroker.contract.service import AuditOverview
from txbroker.core.decoding import Malformed, NewerVersion
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.observe.metrics import Gauges, Metrics
from txbroker.proxy.observe.observed import Observed, ObservedPartition

LAG_EVERY_S = 1.0
LOOKED_AT_MAX = 2000
"""Transactions that one scrape reads to find the oldest one without a copy."""


class PartitionGauges:
    """Reads the gauges of a proxy's half partitions."""

    def __init__(self, observed: Observed, half_retention_s: float) -> None:
        self._observed = observed
        self._broker = observed.broker
        self._half_retention_s = half_retention_s
        self._copied_to: WeakKeyDictionary[ObservedPartition, int] = WeakKeyDictionary()

    def read(self) -> Gauges:
        pending: Counter[str] = Counter()
        parked: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        oldest_s: dict[str, float] = {}
        committed_s: list[float] = []
        owners = list(self._broker.ledgers())
        for owner in owners:
            ledger, now_ms = owner.ledger, owner.clock.now_ms()
            pending.update(ledger.index.pending_by_group)
            parked.update(ledger.index.parked_by_group)
            refused.update(ledger.index.refused_by_topic)
            for group in ledger.index.pending_by_group:
                since_ms = ledger.index.oldest_pending_ms(group)
                if since_ms is not None:
                    age_s = (now_ms - since_ms) / 1000
                    oldest_s[group] = max(oldest_s.get(group, 0.0), age_s)
            first = next(iter(ledger.index.ready.values()), None)
            if first is not None:
                committed_s.append(max(0.0, (now_ms - first.verdict.at_ms) / 1000))
        states = self._broker.readiness().partitions.values()
        return Gauges(
            pending=pending,
            pending_oldest_age_seconds=oldest_s,
            parked=parked,
            refused=refused,
            unreachable_groups=len(self._observed.unreachable()),
            promotion_lag_markers=sum(len(owner.ledger.index.ready) for owner in owners),
            promotion_oldest_age_seconds=max(committed_s, default=None),
            owned_partitions=len(owners),
            partitions=Counter(text.partition(":")[0] for text in states),
            topic_problems=len(self._broker.partitions.topic_problems),
            half_retention_seconds=self._half_retention_s,
            half_retention_headroom_seconds=self.retention()[1],
        )

    def retention(self) -> tuple[float, float | None]:
        """Return the retention of half messages, and the time until it reaches one without a copy
        (None without one), seconds."""
        headroom = map(self._headroom_s, self._broker.ledgers())
        left = min((left_s for left_s in headroom if left_s is not None), default=None)
        return self._half_retention_s, left

    def _headroom_s(self, owner: ObservedPartition) -> float | None:
        """Return the time until retention reaches a message without a copy; None if all have one.

        A lost transaction is not at risk any more; another metric counts it. A copy counts once
        its promotion transaction is committed, as a lost one takes `kept` back. From then on it
        stays until the transaction settles, so each scrape continues where the last one stopped.
        If thousands were copied in between, the answer is that of the last one read: less than
        the true headroom.
        """
        after = self._copied_to.get(owner, -1)
        unsettled = owner.ledger.index.by_offset.after(after, LOOKED_AT_MAX)
        for transaction in unsettled:
            if not transaction.kept_at:
                break
            after = transaction.offset
        self._copied_to[owner] = after
        if not unsettled:
            return None
        oldest = next((t for t in unsettled if not (t.kept_at or t.lost)), None)
        if oldest is None and len(unsettled) < LOOKED_AT_MAX:
            return None
        age_ms = owner.clock.now_ms() - (oldest or unsettled[-1]).prepared_at_ms
        return self._half_retention_s - age_ms / 1000


async def measure_loop(metrics: Metrics) -> None:
    """Record once a second how late the event loop runs a timer, until cancelled."""
    while True:
        due_s = time.monotonic() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        metrics.loop_lag.add(max(0.0, time.monotonic() - due_s))


log = get_logger(__name__)


class AuditMetrics:
    """Holds the newest results of a batch audit and of a stream."""

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

    def overviews(self) -> list[AuditOverview]:
        """Return the newest results for operators."""
        return [news.overview(mode) for mode, news in self._news.items()]

    def _gauges(self) -> Gauges:
        drift: dict[str, int] = {}
        for news in self._news.values():
            for kind, count in news.drift.items():
                drift[kind] = max(drift.get(kind, 0), count)
        # One for each mode: a running stream must not hide that batches no longer run.
        ended = {mode: news.ended_ms / 1000 for mode, news in self._news.items()}
        set_aside = {mode: news.quarantined for mode, news in self._news.items()}
        # A stream has neither.
        batch = [news for mode, news in self._news.items() if mode == BATCH_KEY]
        checks: dict[tuple[str, ...], bool] = {
            (one.name, one.severity): not one.ok for news in batch for one in news.checks
        }
        gauges = Gauges(
            audit_acknowledged=batch[0].acknowledged if batch else {},
            audit_check_failed=checks,
            audit_drift=drift,
            audit_last_success_timestamp_seconds=ended,
            audit_set_aside_records=set_aside,
        )
        stream = self._news[STREAM_KEY].stream if STREAM_KEY in self._news else None
        if stream is None:
            return gauges
        return replace(
            gauges,
            audit_stream_unread_records=stream.unread,
            audit_stream_transactions={"open": stream.open, "ended": stream.ended},
            audit_stream_state_bytes=stream.state_bytes,
            audit_stream_batch_seconds=stream.batch_ms / 1000,
        )
