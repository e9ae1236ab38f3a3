"""The limits of all conditions."""

from msgspec import Struct


class DiagnosisLimits(Struct, frozen=True):
    """Limits beyond which a condition is one to report. Durations are seconds.

    Attributes:
        pending_age_s: age of an undecided transaction.
        pending: undecided transactions of a group; fewer are no concern, though they grow.
        growth_per_s: growth of them, by the second on average of 15 minutes.
        prepare_s: the 99th percentile of prepares.
        promotion_s: time from a commit until the messages are visible; normally milliseconds.
        headroom_share: share of half's retention left for messages without a copy.
        audit_s: age of the newest audit of a mode.
        stream_s: lag of a streaming audit.
        consumer_s: age of a message that a consumer has not done.
        relay_s: age of a committed row of an outbox; normally milliseconds.
        undecided_s: age of an undecided row of an outbox.
        lag_bytes: log of a database after the position of a capture, bytes.
        clocks_s: difference between clocks.
        transaction_s: duration of a Kafka transaction; longer than any promotion transaction.
    """

    pending_age_s: float = 900.0
    pending: int = 1000
    growth_per_s: float = 0.5
    prepare_s: float = 1.0
    promotion_s: float = 60.0
    headroom_share: float = 0.4
    audit_s: float = 2 * 86400.0
    stream_s: float = 300.0
    consumer_s: float = 900.0
    relay_s: float = 60.0
    undecided_s: float = 900.0
    lag_bytes: int = 1 << 30
    clocks_s: float = 1.0
    transaction_s: float = 60.0


LIMITS = DiagnosisLimits()

_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def span(seconds: float) -> str:
    """Return a duration in words, in its greatest unit that divides it: `15 minutes`."""
    size, unit = next(pair for pair in _UNITS if seconds % pair[0] == 0)
    return f"{seconds / size:g} {unit}{'s' * (seconds != size)}"


def percent(share: float) -> str:
    """Return a share in words: `40 %`."""
    return f"{100 * share:g} %"
