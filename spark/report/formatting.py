"""Numbers, times and durations as people read them."""

from datetime import UTC, datetime

_UNITS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"), (1, "ms"))
_FIRST_MS, _LAST_MS = -62_135_596_800_000, 253_402_300_799_000


def count(value: int) -> str:
    """Return a number with separated thousands."""
    return f"{value:,}"


def plural(value: int, one: str, many: str = "") -> str:
    """Return a number and its noun, in the plural (`one` + s by default) unless it is 1."""
    return f"{count(value)} {one if value == 1 else many or one + 's'}"


def duration(ms: float) -> str:
    """Return a time span in its largest unit, with two digits where they are significant."""
    for size, unit in _UNITS:
        if ms >= size * 0.9995:  # what would round up to a whole one is one
            number = ms / size
            digits = 1 if number < 9.95 and round(number, 1) != round(number) else 0
            return f"{number:.{digits}f} {unit}"
    return "0" if ms <= 0 else f"{ms:.2g} ms"


def moment(ms: int) -> str:
    """Return a UTC time to the second."""
    return f"{_utc(ms):%Y-%m-%d %H:%M:%S} UTC"


def date(ms: int) -> str:
    """Return a UTC day."""
    return f"{_utc(ms):%Y-%m-%d}"


def day(ms: int) -> str:
    """Return a UTC day and time to the minute."""
    return f"{_utc(ms):%d %b %H:%M}"


def _utc(ms: int) -> datetime:
    """Return a time; one that no calendar has is the nearest that it has."""
    return datetime.fromtimestamp(min(max(ms, _FIRST_MS), _LAST_MS) / 1000, UTC)
