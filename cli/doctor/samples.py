"""A proxy's metrics, parsed from Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from txbroker.cli.doctor.proxies import Unavailable

_PREFIX = "txbroker_"


class Samples:
    """The samples of one proxy, by metric."""

    def __init__(self, samples: Mapping[str, list[tuple[Mapping[str, str], float]]]) -> None:
        self._samples = samples

    def values(self, name: str) -> list[float]:
        """Return the values of a metric with any labels; `name` has no prefix."""
        return [value for _labels, value in self._samples.get(_PREFIX + name, ())]

    def labels(self, name: str, label: str) -> set[str]:
        """Return the values of a label of a metric."""
        samples = self._samples.get(_PREFIX + name, ())
        return {labels[label] for labels, _value in samples if label in labels}


def read_samples(text: str) -> Samples:
    """Parse a page of metrics.

    Raises:
        Unavailable: the page is malformed.
    """
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, IndexError, KeyError) as error:
        raise Unavailable(f"malformed metrics: {error}") from None
    return Samples(samples)
