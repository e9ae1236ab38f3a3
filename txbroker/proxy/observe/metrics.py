"""The Prometheus metrics of one proxy.

Counters are children that were looked up once: counting costs half a microsecond, looking a
child up three times that. Gauges are not kept at all: they are asked for when somebody scrapes.
Never is an id a label, and groups or topics beyond a bound count together as `other`.
"""

import platform
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from txbroker import __version__
from txbroker.core.index import ShareOf, ShareUse, own_share, share_max
from txbroker.core.outcome import ApplyResult, Effect
from txbroker.core.transaction import Transaction

OTHER = "other"
LABELS_KNOWN_MAX = 100_000
"""Values of one label of which is remembered how they are called; further ones are `other`."""
_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_CHECK_S = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SNAPSHOT_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_RECOVERY_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True)
class Gauges:
    """What the parts of a proxy say of themselves when the metrics are scraped.

    A source fills in what it knows; the values of several sources are added up, except ages and
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


class Described(NamedTuple):
    """A metric as the reference shows it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class _Family:
    name: str
    text: str
    label: str | None
    worst: Callable[[float, float], float] | None = None


# One line for each gauge: its field in `Gauges`, its help, its label, how values come together.
_FAMILIES = (
    _Family("pending", "Undecided transactions.", "group"),
    _Family("pending_oldest_age_seconds", "Age of the oldest undecided one.", "group", max),
    _Family("parked", "Transactions that stayed undecided after the last attempt.", "group"),
    _Family("refused", "Committed transactions that a target does not take.", "topic"),
    _Family("sessions", "Open SDK sessions.", "group"),
    _Family("unreachable_groups", "Groups of which nobody can be reached for checks.", None),
    _Family("promotion_lag_markers", "Markers that were written but not promoted yet.", None),
    _Family(
        "promotion_oldest_age_seconds",
        "Age of the oldest commit marker that was not promoted yet.",
        None,
        max,
    ),
    _Family("owned_partitions", "Half partitions that this proxy owns.", None),
    _Family("partitions", "Half partitions by what this proxy does with them.", "state"),
    _Family("topic_problems", "What is wrong with txbroker's own topics.", None, max),
    _Family(
        "files_not_read",
        "1 if the file of this setting (a token, the peer secret, the principals), as it is now, "
        "cannot be used, so its last content stays in force, else 0.",
        "setting",
        max,
    ),
    _Family("half_retention_seconds", "How long half messages are kept.", None, min),
    _Family(
        "half_retention_headroom_seconds",
        "Time until retention would reach the oldest half message that is not settled and of "
        "which there is no copy.",
        None,
        min,
    ),
    _Family("ready", "1 if the proxy takes calls, else 0.", None, min),
    _Family(
        "audit_drift",
        "Transactions that did not end as they were decided: of what the newest batch has judged, "
        "or all that a stream has found since it began, the worse of the two. Nothing until an "
        "audit has run.",
        "kind",
        max,
    ),
    _Family(
        "audit_last_success_timestamp_seconds",
        "When the newest `batch` audit ended, and up to when a `stream` has judged, seconds since "
        "1970. Nothing until one has run.",
        "mode",
        max,
    ),
    _Family(
        "audit_set_aside_records",
        "Records that do not read, which the newest `batch` audit, or a `stream` since it began, "
        "has set aside. Nothing until one has run.",
        "mode",
        max,
    ),
)


_BUILD_INFO = Described(
    "txbroker_build_info", "gauge", ("version", "python"), "Always 1; which build runs."
)


class _Labels:
    """A bounded set of label values; what comes too late, or is of a share that has its part
    already, is called `other`.

    Labels are never freed, so what was decided of a value stands: its share is asked for once.
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
        label = self._known[value] = self._decided(value)
        return label

    def _decided(self, value: str) -> str:
        share = self._share_of(value)
        if self._use.of(share) >= share_max(self._max):
            return OTHER
        self._use.add(share)
        return value


class _Latency(Collector):
    """A histogram that is fed for every transaction: a fifth of the price of the client's.

    Args:
        bounds: of its buckets.
        label: by which it is kept apart, "" for none.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float], label: str = "") -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._label = label
        self._counts: dict[str, list[int]] = {} if label else {"": self._none()}
        self._sums: defaultdict[str, float] = defaultdict(float)

    def _none(self) -> list[int]:
        return [0] * (len(self._bounds) + 1)

    def observe(self, seconds: Iterable[float], value: str = "") -> None:
        """Take in what was measured, of a value of the label."""
        counts, bounds = self._counts.get(value), self._bounds
        if counts is None:
            counts = self._counts[value] = self._none()
        for each in seconds:
            counts[bisect_left(bounds, each)] += 1
            self._sums[value] += each

    def collect(self) -> Iterable[Metric]:
        names = [*map(str, self._bounds), "+Inf"]
        family = HistogramMetricFamily(
            self._name, self._text, labels=[self._label] if self._label else None
        )
        for value, counts in self._counts.items():
            buckets = list(zip(names, map(float, accumulate(counts)), strict=True))
            family.add_metric([value] if self._label else [], buckets, self._sums[value])
        yield family


class Metrics:
    """All metrics of one proxy, in a separate registry.

    Args:
        share_of: returns whose a group is: no share has all labels.
    """

    def __init__(
        self,
        group_labels_max: int = 200,
        topic_labels_max: int = 500,
        share_of: ShareOf = own_share,
    ) -> None:
        self.registry = CollectorRegistry()
        self._group = _Labels(group_labels_max, share_of)
        self._topic = _Labels(topic_labels_max)
        self._sources: list[Callable[[], Gauges]] = []
        self._counters: dict[tuple[str, ...], Counter] = {}
        self._described: list[Described] = []
        self._make_counters()
        self._make_histograms()
        self.registry.register(_GaugeCollector(self))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def _make_counters(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            self._described.append(Described(f"txbroker_{name}", "counter", labels, text))
            return Counter(f"txbroker_{name}", text, labels, registry=self.registry)

        self._prepared = counter("prepared_total", "Half messages stored.", "topic")
        self._decisions = counter("decisions_total", "Decisions.", "decision", "source")
        self._promoted = counter("promoted_total", "Messages promoted.", "topic")
        self._checks = counter("checks_total", "Checks by how they ended.", "group", "outcome")
        self._conflicts = counter("conflicts_total", "Decisions contrary to the standing one.")
        self._foreign = counter(
            "foreign_records_total",
            "Records in txbroker's own topics that are none of ours and were set aside: other "
            "clients write there.",
            "topic",
        )
        self._fenced = counter("fenced_total", "Times that another owner took a partition.")
        self._overloaded = counter("overloaded_total", "Calls turned away.", "operation")
        self._kafka_errors = counter("kafka_errors_total", "Errors of Kafka.", "operation")
        self._lost = counter(
            "lost_undecided_total",
            "Transactions whose half messages vanished before they were settled.",
        )
        self._snapshot_failed = counter(
            "snapshot_failed_total", "Snapshots that could not be written; the next one is."
        )

    def _make_histograms(self) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            self._described.append(Described(f"txbroker_{name}", "histogram", (), text))
            return Histogram(f"txbroker_{name}", text, registry=self.registry, buckets=buckets)

        def gauge(name: str, text: str) -> Gauge:
            self._described.append(Described(f"txbroker_{name}", "gauge", (), text))
            return Gauge(f"txbroker_{name}", text, registry=self.registry)

        def latency(name: str, text: str, bounds: Sequence[float], *labels: str) -> _Latency:
            self._described.append(Described(f"txbroker_{name}", "histogram", labels, text))
            collector = _Latency(f"txbroker_{name}", text, bounds, *labels)
            self.registry.register(collector)
            return collector

        self._check_s = latency("check_duration_seconds", "Time of a check.", _CHECK_S, "group")
        self._decision_s = latency(
            "decision_latency_seconds", "From a decision's call to its answer.", _LATENCY_S
        )
        self._promotion_s = latency(
            "promotion_latency_seconds", "From a commit's marker until it is visible.", _LATENCY_S
        )
        self._recovery_s = histogram(
            "recovery_seconds", "From gaining a partition until it is caught up.", _RECOVERY_S
        )
        self._snapshot_s = histogram(
            "snapshot_seconds", "Time of writing a snapshot, beside the work.", _SNAPSHOT_S
        )
        self._snapshot_entries = gauge(
            "snapshot_entries", "Transactions in the snapshot that was written last."
        )

    def _count(self, counter: Counter, amount: float, *labels: str) -> None:
        key = (counter._name, *labels)
        child = self._counters.get(key)
        if child is None:
            child = self._counters[key] = counter.labels(*labels)
        child.inc(amount)

    # --- what happened ---

    def outcome(self, outcome: ApplyResult) -> None:
        """Count a decision contrary to the standing one; nothing else that changed nothing."""
        if outcome.effect is Effect.CONFLICT:
            self._conflicts.inc()

    def prepared(self, transactions: Sequence[Transaction]) -> None:
        """Count messages in half messages that were stored."""
        self._count_messages(self._prepared, transactions)

    def decided(self, transactions: Sequence[Transaction]) -> None:
        """Count decisions that stand."""
        counts: dict[tuple[str, str], int] = {}
        for transaction in transactions:
            verdict = transaction.verdict
            if verdict is not None:
                told = str(verdict.decision), str(verdict.source)
                counts[told] = counts.get(told, 0) + 1
        for (decision, source), count in counts.items():
            self._count(self._decisions, count, decision, source)

    def promoted(self, transactions: Sequence[Transaction]) -> None:
        """Count messages that are visible, and record of each transaction the time since its
        commit's marker."""
        self._count_messages(self._promoted, transactions)
        self._promotion_s.observe(
            [
                max(0, each.promoted_at_ms - each.verdict.at_ms) / 1000
                for each in transactions
                if each.promoted_at_ms and each.verdict is not None
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
        """These were set aside; the gauge shows them."""

    def checks_ended(self, group: str, outcome: str, durations_s: Sequence[float]) -> None:
        """Count checks and how long they took."""
        label = self._group(group)
        self._count(self._checks, len(durations_s), label, outcome)
        self._check_s.observe(durations_s, label)

    def foreign(self, topic: str, count: int) -> None:
        """Count records of others in one of our topics, `half` say."""
        self._count(self._foreign, count, topic)

    def fenced(self) -> None:
        """Count that another owner took a partition from us."""
        self._fenced.inc()

    def overloaded(self, operation: str) -> None:
        """Count a call that was turned away because a limit is reached."""
        self._count(self._overloaded, 1, operation)

    def kafka_failed(self, operation: str) -> None:
        """Count an error of Kafka."""
        self._count(self._kafka_errors, 1, operation)

    def lost(self, count: int) -> None:
        """Count transactions of which nothing is left, though they were not settled."""
        self._lost.inc(count)

    def snapshot_written(self, seconds: float, entries: int) -> None:
        """Record a snapshot: how long it took, and how many transactions it holds."""
        self._snapshot_s.observe(seconds)
        self._snapshot_entries.set(entries)

    def snapshot_failed(self) -> None:
        """Count a snapshot that could not be written."""
        self._snapshot_failed.inc()

    def decisions_took(self, seconds: float, count: int = 1) -> None:
        """Record the time from the calls of decisions to their answers, which came together."""
        self._decision_s.observe([seconds] * count)

    def recovered(self, seconds: float) -> None:
        """Record the time from gaining a partition until it is caught up."""
        self._recovery_s.observe(seconds)

    # --- what is the case ---

    def watch(self, source: Callable[[], Gauges]) -> None:
        """Ask `source` for its gauges at every scrape."""
        self._sources.append(source)

    def collect_gauges(self) -> Iterable[Metric]:
        """Yield the gauges of all sources, brought together."""
        found = [source() for source in self._sources]
        for family in _FAMILIES:
            yield self._family(family, [getattr(gauges, family.name) for gauges in found])
        build = GaugeMetricFamily(_BUILD_INFO.name, _BUILD_INFO.text, labels=_BUILD_INFO.labels)
        build.add_metric((__version__, platform.python_version()), 1)
        yield build

    def _family(self, family: _Family, values: list[Any]) -> Metric:
        metric = GaugeMetricFamily(
            f"txbroker_{family.name}", family.text, labels=(family.label,) if family.label else None
        )
        bound = {"topic": self._topic, "group": self._group}.get(family.label or "", str)
        merge = family.worst or float.__add__
        merged: dict[tuple[str, ...], float] = {}
        for value in values:
            by_label = value if isinstance(value, Mapping) else {None: value}
            for label, number in by_label.items():
                if number is None:
                    continue
                key: tuple[str, ...] = () if label is None else (bound(label),)
                found = float(number)
                merged[key] = merge(merged[key], found) if key in merged else found
        for key, total in merged.items():
            metric.add_metric(key, total)
        return metric

    def described(self) -> list[Described]:
        """Return what there is, by name, for the reference."""
        gauges = [
            Described(
                f"txbroker_{family.name}",
                "gauge",
                (family.label,) if family.label else (),
                family.text,
            )
            for family in _FAMILIES
        ]
        return sorted([*self._described, *gauges, _BUILD_INFO])

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _GaugeCollector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.collect_gauges()
