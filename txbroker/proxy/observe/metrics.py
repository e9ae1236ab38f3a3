"""The Prometheus metrics of one proxy.

Children of counters are cached: counting costs half a microsecond, a lookup three times that.
Gauges are not stored but read at each scrape. No label is an id, and groups or topics beyond a
limit count together as `other`.
"""

import platform
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from txbroker import __version__
from txbroker.core.ledger import ApplyResult, Effect
from txbroker.core.settled import ShareOf, ShareUse, own_share, share_max
from txbroker.core.transaction import Transaction
from txbroker.metrics import Described

OTHER = "other"
LABELS_KNOWN_MAX = 100_000
"""Values of one label whose share is cached; further ones are `other`."""
_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_CHECK_S = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SNAPSHOT_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_RECOVERY_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True)
class Gauges:
    """The values of one source of gauges at a scrape.

    A source sets the fields that it knows. Values of several sources are added, except ages and
    headroom, of which the worst counts.
    """

    pending: Mapping[str, int] = field(default_factory=dict)
    pending_oldest_age_seconds: Mapping[str, float] = field(default_factory=dict)
    parked: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    sessions: Mapping[str, int] = field(default_factory=dict)
    unreachable_groups: int = 0
    promotion_lag_markers: int = 0
    promotion_oldest_age_seconds: float | None = None
    owned_partitions: int = 0
    partitions: Mapping[str, int] = field(default_factory=dict)
    topic_problems: int = 0
    files_not_read: Mapping[str, bool] = field(default_factory=dict)
    half_retention_seconds: float | None = None
    half_retention_headroom_seconds: float | None = None
    ready: bool | None = None
    audit_drift: Mapping[str, int] = field(default_factory=dict)
    audit_last_success_timestamp_seconds: Mapping[str, float] = field(default_factory=dict)
    audit_set_aside_records: Mapping[str, int] = field(default_factory=dict)
    audit_stream_unread_records: int | None = None
    audit_stream_transactions: Mapping[str, int] = field(default_factory=dict)
    audit_stream_state_bytes: int | None = None
    audit_stream_batch_seconds: float | None = None
    audit_acknowledged: Mapping[str, int] = field(default_factory=dict)
    audit_check_failed: Mapping[tuple[str, ...], bool] = field(default_factory=dict)


@dataclass(frozen=True)
class _Family:
    name: str
    text: str
    label: str | None
    worst: Callable[[float, float], float] | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple((self.label or "").split())


# For each gauge its field in `Gauges`, help and labels, and how values of sources combine.
_FAMILIES = (
    _Family("pending", "Undecided transactions.", "group"),
    _Family("pending_oldest_age_seconds", "Age of the oldest undecided transaction.", "group", max),
    _Family("parked", "Transactions undecided after their last check attempt.", "group"),
    _Family("refused", "Committed transactions that a target rejects.", "topic"),
    _Family("sessions", "Open SDK sessions.", "group"),
    _Family("unreachable_groups", "Groups without a reachable instance for checks.", None),
    _Family("promotion_lag_markers", "Commit markers that are not promoted yet.", None),
    _Family(
        "promotion_oldest_age_seconds",
        "Age of the oldest commit marker that is not promoted yet.",
        None,
        max,
    ),
    _Family("owned_partitions", "Half partitions that this proxy owns.", None),
    _Family("partitions", "Half partitions by their state in this proxy.", "state"),
    _Family("topic_problems", "Problems of txbroker's own topics.", None, max),
    _Family(
        "files_not_read",
        "1 if the current content of this setting's file (a token, the peer secret, the "
        "principals) cannot be used, so that its last content stays in force, else 0.",
        "setting",
        max,
    ),
    _Family("half_retention_seconds", "Retention of half messages.", None, min),
    _Family(
        "half_retention_headroom_seconds",
        "Time until retention reaches the oldest unsettled half message without a copy.",
        None,
        min,
    ),
    _Family("ready", "1 if the proxy takes calls, else 0.", None, min),
    _Family(
        "audit_drift",
        "Transactions that did not end as decided, in the newest batch audit or in a stream since "
        "its start, whichever is worse. Absent until an audit has run.",
        "kind",
        max,
    ),
    _Family(
        "audit_last_success_timestamp_seconds",
        "End of the newest `batch` audit, and time up to which a `stream` has judged, seconds "
        "since 1970. Absent until one has run.",
        "mode",
        max,
    ),
    _Family(
        "audit_set_aside_records",
        "Undecodable records that the newest `batch` audit, or a `stream` since its start, has set "
        "aside. Absent until one has run.",
        "mode",
        max,
    ),
    _Family(
        "audit_stream_unread_records",
        "Records that the topics hold and the streaming audit has not read. This and the following "
        "are absent until one has run.",
        None,
        max,
    ),
    _Family(
        "audit_stream_transactions",
        "Transactions in the state of the streaming audit: `open` ones, and ended ones that it "
        "remembers (`ended`).",
        "state",
        max,
    ),
    _Family("audit_stream_state_bytes", "Size of that state's files.", None, max),
    _Family("audit_stream_batch_seconds", "Duration of its newest batch.", None, max),
    _Family(
        "audit_acknowledged",
        "Findings of the newest batch audit that an operator has acknowledged until a date, and "
        "`txbroker_audit_drift` does not count.",
        "kind",
        max,
    ),
    _Family(
        "audit_check_failed",
        "1 if a check of the newest batch audit failed, else 0. Absent without a file of checks.",
        "check severity",
        max,
    ),
)


_ANSWERS = Described(
    "txbroker_http_requests_total",
    "counter",
    ("operation", "status"),
    "HTTP requests by operation and class of status; `other`: pages, sessions, unknown paths.",
)
_BUILD_INFO = Described(
    "txbroker_build_info", "gauge", ("version", "python"), "Always 1; labels name the build."
)


class _Labels:
    """A bounded set of label values; a value beyond the limit, or of a share that has used its
    part, becomes `other`.

    Labels are never freed, so the label of a value never changes and its share is read once.
    """

    def __init__(self, values_max: int, share_of: ShareOf = own_share) -> None:
        self._max = values_max
        self._share_of = share_of
        self._known: dict[str, str] = {}
        self._use = ShareUse()

    def __call__(self, value: str) -> str:
        label = self._known.get(value)
        if label is not None:
            return label
        if self._use.total >= self._max or len(self._known) >= LABELS_KNOWN_MAX:
            return OTHER
        label = self._known[value] = self._admit(value)
        return label

    def _admit(self, value: str) -> str:
        share = self._share_of(value)
        if self._use.of(share) >= share_max(self._max):
            return OTHER
        self._use.add(share)
        return value


class LatencyHistogram(Collector):
    """A histogram of every transaction, at a fifth of the cost of prometheus_client's.

    Attributes:
        counts: of each bucket, not summed, by label.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], label: str = "") -> None:
        self._name = name
        self._text = text
        self.bounds = bounds
        self._label = label
        self.counts: dict[str, list[int]] = {} if label else {"": self._zeros()}
        self._sums: defaultdict[str, float] = defaultdict(float)

    def _zeros(self) -> list[int]:
        return [0] * (len(self.bounds) + 1)

    def observe(self, durations_s: Iterable[float], value: str = "") -> None:
        counts, bounds = self.counts.get(value), self.bounds
        if counts is None:
            counts = self.counts[value] = self._zeros()
        for duration_s in durations_s:
            counts[bisect_left(bounds, duration_s)] += 1
            self._sums[value] += duration_s

    def add(self, duration_s: float, count: int = 1) -> None:
        """Record operations that were answered together, after `duration_s` seconds."""
        self.counts[""][bisect_left(self.bounds, duration_s)] += count
        self._sums[""] += duration_s * count

    def collect(self) -> Iterable[Metric]:
        names = [*map(str, self.bounds), "+Inf"]
        family = HistogramMetricFamily(
            self._name, self._text, labels=[self._label] if self._label else None
        )
        for value, counts in self.counts.items():
            buckets = list(zip(names, map(float, accumulate(counts)), strict=True))
            family.add_metric([value] if self._label else [], buckets, self._sums[value])
        yield family


class _Answers(Collector):
    """Counts HTTP answers in plain lists: on direct connections nothing is called to count."""

    def __init__(self) -> None:
        self.by_operation: defaultdict[str, list[int]] = defaultdict(lambda: [0] * 6)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(_ANSWERS.name, _ANSWERS.text, labels=_ANSWERS.labels)
        for operation, counts in self.by_operation.items():
            for first_digit, count in enumerate(counts):
                if count:
                    family.add_metric((operation, f"{first_digit}xx"), count)
        yield family


class _Registry(CollectorRegistry):
    """Leaves out the time at which each counter and histogram was made: it doubles the series of
    counters, and Prometheus finds resets without it."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [one for one in metric.samples if not one.name.endswith("_created")]
            yield metric


class Metrics(Collector):
    """All metrics of one proxy, in a separate registry: a `PartitionEvents`.

    It is the collector of the gauges.

    Attributes:
        prepare_latency, decision_latency: for what answers these calls.
        loop_lag: for what measures the event loop.
        latencies: the histograms of latencies without a label, by name.
    """

    def __init__(
        self,
        group_labels_max: int = 200,
        topic_labels_max: int = 500,
        share_of: ShareOf = own_share,
    ) -> None:
        self.registry = _Registry()
        self._group = _Labels(group_labels_max, share_of)
        self._topic = _Labels(topic_labels_max)
        self._sources: list[Callable[[], Gauges]] = []
        self._counters: dict[tuple[str, ...], Counter] = {}
        self._described: list[Described] = [_ANSWERS]
        self._answers = _Answers()
        self.registry.register(self._answers)
        self.latencies: dict[str, LatencyHistogram] = {}
        self._make_counters()
        self._make_histograms()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def _make_counters(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            self._described.append(Described(f"txbroker_{name}", "counter", labels, text))
            return Counter(f"txbroker_{name}", text, labels, registry=self.registry)

        self._prepared = counter("prepared_total", "Half messages stored.", "topic")
        self._decisions = counter("decisions_total", "Decisions.", "group", "decision", "source")
        self._promoted = counter("promoted_total", "Messages promoted.", "topic")
        self._checks = counter("checks_total", "Checks by outcome.", "group", "outcome")
        self._conflicts = counter("conflicts_total", "Decisions that contradict an earlier one.")
        self._foreign = counter(
            "foreign_records_total",
            "Records of other clients in txbroker's own topics, set aside.",
            "topic",
        )
        self._fenced = counter("fenced_total", "Partitions lost to a claim of another proxy.")
        self._overloaded = counter("overloaded_total", "Calls rejected by a limit.", "operation")
        self._kafka_errors = counter("kafka_errors_total", "Errors of Kafka.", "operation")
        self._lost = counter(
            "lost_undecided_total",
            "Transactions whose half messages were deleted before they were settled.",
        )
        self._snapshot_failed = counter("snapshot_failed_total", "Snapshots that were not written.")

    def _make_histograms(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            self._described.append(Described(f"txbroker_{name}", "histogram", (), text))
            return Histogram(f"txbroker_{name}", text, registry=self.registry, buckets=buckets)

        def gauge(name: str, text: str) -> Gauge:
            self._described.append(Described(f"txbroker_{name}", "gauge", (), text))
            return Gauge(f"txbroker_{name}", text, registry=self.registry)

        def latency(
            name: str, text: str, bounds: Sequence[float], *labels: str
        ) -> LatencyHistogram:
            self._described.append(Described(f"txbroker_{name}", "histogram", labels, text))
            collector = LatencyHistogram(f"txbroker_{name}", text, bounds, *labels)
            self.registry.register(collector)
            if not labels:
                self.latencies[name] = collector
            return collector

        self._check_s = latency("check_duration_seconds", "Duration of a check.", _CHECK_S, "group")
        self.prepare_latency = latency(
            "prepare_latency_seconds", "Time from a prepare's call to its answer.", _LATENCY_S
        )
        self.decision_latency = latency(
            "decision_latency_seconds", "Time from a decision's call to its answer.", _LATENCY_S
        )
        self._promotion_s = latency(
            "promotion_latency_seconds",
            "Time from a commit marker until its messages are visible.",
            _LATENCY_S,
        )
        self.loop_lag = latency(
            "event_loop_lag_seconds",
            "Delay of a timer that runs once a second; nothing else is served meanwhile.",
            _LATENCY_S,
        )
        self._recovery_s = histogram(
            "recovery_seconds",
            "Time from the claim of a partition until it is caught up.",
            _RECOVERY_S,
        )
        self._snapshot_s = histogram(
            "snapshot_seconds", "Duration of writing a snapshot, in the background.", _SNAPSHOT_S
        )
        self._snapshot_entries = gauge("snapshot_entries", "Transactions in the newest snapshot.")

    def _count(self, counter: Counter, amount: float, *labels: str) -> None:
        key = (counter._name, *labels)
        child = self._counters.get(key)
        if child is None:
            child = self._counters[key] = counter.labels(*labels)
        child.inc(amount)

    # --- events ---

    def outcome(self, outcome: ApplyResult) -> None:
        """Count a decision that contradicts an earlier one; ignore other outcomes."""
        if outcome.effect is Effect.CONFLICT:
            self._conflicts.inc()

    def prepared(self, transactions: Sequence[Transaction]) -> None:
        self._count_messages(self._prepared, transactions)

    def decided(self, transactions: Sequence[Transaction]) -> None:
        counts: dict[tuple[str, str, str], int] = {}
        for transaction in transactions:
            verdict = transaction.verdict
            if verdict is not None:
                labels = transaction.half.group, str(verdict.decision), str(verdict.source)
                counts[labels] = counts.get(labels, 0) + 1
        for (group, decision, source), count in counts.items():
            self._count(self._decisions, count, self._group(group), decision, source)

    def promoted(self, transactions: Sequence[Transaction]) -> None:
        """Count visible messages, and record the promotion latency of each transaction."""
        self._count_messages(self._promoted, transactions)
        self._promotion_s.observe(
            [
                max(0, transaction.promoted_at_ms - transaction.verdict.at_ms) / 1000
                for transaction in transactions
                if transaction.promoted_at_ms and transaction.verdict.decision is not None
            ]
        )

    def _count_messages(self, counter: Counter, transactions: Sequence[Transaction]) -> None:
        topics: dict[str, int] = {}
        for transaction in transactions:
            for place in transaction.places:
                topics[place.topic] = topics.get(place.topic, 0) + 1
        for topic, count in topics.items():
            self._count(counter, count, self._topic(topic))

    def refused(self, transactions: Sequence[Transaction]) -> None:
        """Count nothing: the gauge shows refused transactions."""

    def checks_ended(self, group: str, outcome: str, durations_s: Sequence[float]) -> None:
        label = self._group(group)
        self._count(self._checks, len(durations_s), label, outcome)
        self._check_s.observe(durations_s, label)

    def foreign(self, topic: str, count: int) -> None:
        self._count(self._foreign, count, topic)

    def fenced(self) -> None:
        self._fenced.inc()

    def overloaded(self, operation: str) -> None:
        self._count(self._overloaded, 1, operation)

    def kafka_failed(self, operation: str) -> None:
        self._count(self._kafka_errors, 1, operation)

    def lost(self, count: int) -> None:
        self._lost.inc(count)

    def snapshot_written(self, seconds: float, entries: int) -> None:
        self._snapshot_s.observe(seconds)
        self._snapshot_entries.set(entries)

    def snapshot_failed(self) -> None:
        self._snapshot_failed.inc()

    def answers_of(self, operation: str) -> list[int]:
        """Return the counts of an operation's HTTP answers by the first digit of their status, for
        the caller to add to."""
        return self._answers.by_operation[operation]

    def recovered(self, seconds: float) -> None:
        self._recovery_s.observe(seconds)

    # --- gauges ---

    def watch(self, source: Callable[[], Gauges]) -> None:
        """Read the gauges of `source` at every scrape."""
        self._sources.append(source)

    def collect(self) -> Iterable[Metric]:
        sources = [source() for source in self._sources]
        for family in _FAMILIES:
            yield self._family(family, [getattr(gauges, family.name) for gauges in sources])
        build = GaugeMetricFamily(_BUILD_INFO.name, _BUILD_INFO.text, labels=_BUILD_INFO.labels)
        build.add_metric((__version__, platform.python_version()), 1)
        yield build

    def _family(self, family: _Family, values: list[Any]) -> Metric:
        metric = GaugeMetricFamily(
            f"txbroker_{family.name}", family.text, labels=family.labels or None
        )
        bound = {"topic": self._topic, "group": self._group}.get(family.label or "", str)
        merge = family.worst or float.__add__
        merged: dict[tuple[str, ...], float] = {}
        for value in values:
            by_label = value if isinstance(value, Mapping) else {(): value}
            for label, number in by_label.items():
                if number is None:
                    continue
                key = label if isinstance(label, tuple) else (bound(label),)
                gauge = float(number)
                merged[key] = merge(merged[key], gauge) if key in merged else gauge
        for key, total in merged.items():
            metric.add_metric(key, total)
        return metric

    def described(self) -> list[Described]:
        """Return all metrics by name, for the reference."""
        gauges = [
            Described(
                f"txbroker_{family.name}",
                "gauge",
                family.labels,
                family.text,
            )
            for family in _FAMILIES
        ]
        return sorted([*self._described, *gauges, _BUILD_INFO])

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
