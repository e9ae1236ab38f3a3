"""Figures of a relay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from txbroker.metrics import Collector, Described, Samples
from txbroker.relay.pump import PumpEvents

_PREFIX = "txbroker_relay_"
METRICS = tuple(
    Described(f"{_PREFIX}{name}", kind, ("relay", *labels), text)
    for name, kind, labels, text in (
        (
            "accepted_gaps",
            "gauge",
            (),
            "Of a capture: gaps of its tables to which the mapping consents by `accept`.",
        ),
        ("delivered_total", "counter", (), "Messages that are visible in their topics."),
        (
            "failures_total",
            "counter",
            (),
            "Times that Kafka or the database did not answer, or refused: the relay tries again.",
        ),
        (
            "lag_bytes",
            "gauge",
            (),
            "Of a capture: the write-ahead log that its slot holds, or the binlog that follows its "
            "position.",
        ),
        (
            "left_out_total",
            "counter",
            ("reason",),
            "Of a capture: changes without messages, by `skip` or by a kind in the mapping's "
            "`accept`.",
        ),
        ("oldest_seconds", "gauge", ("state",), "Age of the oldest unfinished row by state."),
        ("refused_total", "counter", (), "Messages that Kafka refused, for each attempt."),
        (
            "rows",
            "gauge",
            ("state",),
            "Unfinished rows of the outbox by state: `UNKNOWN`, `LOCAL_COMMIT` (they wait) and "
            "`MESSAGE_ERROR`.",
        ),
        ("shards", "gauge", (), "Shards that this process works on."),
    )
)
STATES = ("UNKNOWN", "LOCAL_COMMIT", "MESSAGE_ERROR")


class RelayFigures(PumpEvents):
    """What a relay has done and what waits, by the name of its metric and the labels.

    Args:
        shards: returns the number of shards that this process works on.
    """

    def __init__(self, shards: Callable[[], int]) -> None:
        self.counts: Counter[str] = Counter()
        self.rows: Mapping[str, tuple[int, float]] = {}
        self._shards = shards
        self.lag_bytes: int | None = None

    def delivered(self, messages: int) -> None:
        self.counts["delivered_total"] += messages

    def refused(self, messages: int) -> None:
        self.counts["refused_total"] += messages

    def failed(self, error: Exception) -> None:
        self.counts["failures_total"] += 1

    def collector(self, relay: str) -> Collector:
        """Return the metrics of a relay with this name."""
        return Collector(relay, _PREFIX, METRICS, self.samples)

    def samples(self) -> Samples:
        """Return the values of the metrics."""
        found: dict[str, dict[tuple[str, ...], float]] = {
            name: {(): self.counts[name]}
            for name in ("delivered_total", "failures_total", "refused_total")
        }
        found["shards"] = {(): self._shards()}
        if self.lag_bytes is None:
            found["rows"], found["oldest_seconds"] = {}, {}
            for state in STATES:
                count, age_s = self.rows.get(state, (0, 0.0))
                found["rows"][state,], found["oldest_seconds"][state,] = count, age_s
        else:
            found["lag_bytes"] = {(): self.lag_bytes}
        return found
