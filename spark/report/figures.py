"""Numbers of the audit in words that people read, and percentiles of what was only counted."""

from bisect import bisect_left
from datetime import UTC, datetime
from itertools import accumulate
from typing import NamedTuple

from txbroker.spark.schema import Histogram

_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"), (1, "ms"))


def count(value: int) -> str:
    """Return a number with its thousands apart."""
    return f"{value:,}"


def plural(value: int, one: str, many: str) -> str:
    """Return a number with the right word behind it."""
    return f"{count(value)} {one if value == 1 else many}"


def duration(ms: float) -> str:
    """Return a time span in its largest unit, with two digits where these say more."""
    for size, unit in _UNITS:
        if ms >= size * 0.9995:  # what would round up to a whole one is one
            number = ms / size
            digits = 1 if number < 9.95 and round(number, 1) != round(number) else 0
            return f"{number:.{digits}f} {unit}"
    return "0" if ms <= 0 else f"{ms:.2g} ms"


def moment(ms: int) -> str:
    """Return a time as people write it, UTC."""
    return f"{_utc(ms):%Y-%m-%d %H:%M:%S} UTC"


def day(ms: int) -> str:
    """Return a time in short, UTC."""
    return f"{_utc(ms):%d %b %H:%M}"


def _utc(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


class Percentile(NamedTuple):
    """Where a share of all values lies.

    Attributes:
        place: how many buckets lie below it, with a fraction.
        ms: the value; None where it is beyond the last bound.
        over_ms: the last bound.
    """

    place: float
    ms: float | None
    over_ms: int

    def __str__(self) -> str:
        return f"> {duration(self.over_ms)}" if self.ms is None else duration(self.ms)


def percentile(histogram: Histogram, share: float) -> Percentile | None:
    """Return a percentile, taken evenly within its bucket; None without any values."""
    total = sum(histogram.counts)
    bounds = histogram.bounds
    if not total or not bounds:
        return None
    wanted = share * total
    sums = list(accumulate(histogram.counts))
    bucket = bisect_left(sums, wanted)
    number = histogram.counts[bucket]
    fraction = (wanted - (sums[bucket] - number)) / number if number else 0.0
    over = bucket >= len(bounds)
    low = bounds[bucket - 1] if bucket else 0
    ms = None if over else low + fraction * (bounds[bucket] - low)
    return Percentile(bucket + fraction, ms, bounds[-1])
