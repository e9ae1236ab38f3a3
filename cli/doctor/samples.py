"""Metrics of a proxy, read back from Prometheus' text."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from txbroker.cli.doctor.proxies import Unavailable

_PREFIX = "txbroker_"


class Samples:
    """The newest samples of one proxy, by metric."""

    def __init__(self, samples: Mapping[str, list[tuple[Mapping[str, str], float]]]) -> None:
        self._samples = samples

    def values(self, name: str) -> list[float]:
        """Return the values of a metric, whatever its labels; `name` without prefix."""
        return [value for _labels, value in self._samples.get(_PREFIX + name, ())]

    def labels(self, name: str, label: str) -> set[str]:
        """Return the values of a label of a metric."""
        found = self._samples.get(_PREFIX + name, ())
        return {labels[label] for labels, _value in found if label in labels}


def read_samples(text: str) -> Samples:
    """Return what a page of metrics says.

    Raises:
        Unavailable: it is none.
    """
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, IndexError, KeyError) as error:
        raise Unavailable(f"what should be metrics does not read: {error}") from None
    return Samples(samples)
