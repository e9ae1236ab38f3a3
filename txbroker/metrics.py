"""Metrics as the reference lists them, and the export of those of consumers and relays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Samples: TypeAlias = Mapping[str, Mapping[tuple[str, ...], float]]
"""Values by the name of their metric, without the prefix, and by further labels."""


class Described(NamedTuple):
    """A metric in the reference."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


class Collector:
    """Metrics of a consumer or a relay: `prometheus_client.REGISTRY.register(….collector())`.

    Args:
        name: value of the first label.
        prefix: of the metrics' names.
        samples: returns the values; called in any thread.
    """

    def __init__(
        self, name: str, prefix: str, metrics: Sequence[Described], samples: Callable[[], Samples]
    ) -> None:
        self._name = name
        self._prefix = prefix
        self._metrics = metrics
        self._samples = samples

    def describe(self) -> Iterable[Metric]:
        """Return nothing: a registry refuses names that it has, and a process may have several
        consumers or relays, whose series differ by their name."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        samples = self._samples()
        for metric in self._metrics:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.text, labels=metric.labels)
            for labels, value in samples.get(metric.name.removeprefix(self._prefix), {}).items():
                family.add_metric([self._name, *labels], value)
            yield family
