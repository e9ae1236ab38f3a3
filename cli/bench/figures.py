"""The figures of a measurement: losses, rates, latencies, CPU; as data and as text."""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct, to_builtins

from txbroker.cli.bench.load import Job, LoadLog, PlannedEnd

if TYPE_CHECKING:
    from txbroker.kafka.tools.consumers import Count

BOUNDS_MS = tuple(
    round(step * 10.0**power, 3) for power in range(-1, 5) for step in (1, 1.5, 2, 3, 5, 7)
)
_BAR_CHARS = 40
_STEPS = ("prepare", "decide", "both", "visible")


class TimeWindow(NamedTuple):
    """The measured time, in monotonic seconds."""

    begin: float
    end: float

    def __contains__(self, at: object) -> bool:
        return isinstance(at, float) and self.begin <= at <= self.end

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class BenchLatency(Struct, frozen=True):
    """Percentiles in milliseconds; None: no samples."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    p999: float | None = None
    max: float | None = None


class ResourceUsage(NamedTuple):
    """CPU seconds of each process within the window, and memory of proxy and broker at its begin
    and end; None for processes on other machines."""

    cpu_s: dict[str, float | None]
    memory_mib: dict[str, tuple[float | None, float | None]]


class Figures(Struct, frozen=True, kw_only=True):
    """The figures. Rates count transactions.

    Attributes:
        transactions: number decided within the measured time.
        acked_per_s: their rate.
        acked_per_s_by_tenth: the rate in each tenth of the time, which shows a slowdown.
        promoted_per_s: rate at which transactions became visible, by the partitions read during
            the measurement.
        failed: number whose calls failed, warm-up included; `errors` has the reasons.
        visible: messages that the reader received, warm-up included.
        lost: committed messages that are not visible.
        duplicated: copies beyond the first.
        wrong: visible messages of rolled-back transactions.
        latency_ms: of `prepare`, `decide` and `both` until the acknowledgement; of `visible` from
            the decision's call until the reader received the message.
        cpu_s_per_1000: CPU seconds per 1,000 transactions; None for processes on other machines.
        memory_mib: memory of proxy and broker at the begin and end of the measured time.
        histogram_ms: number of samples by upper bound, without empty buckets.
    """

    transactions: int
    acked_per_s: float
    acked_per_s_by_tenth: list[float]
    promoted_per_s: float
    failed: int
    errors: dict[str, int]
    visible: int
    lost: int
    duplicated: int
    wrong: int
    latency_ms: dict[str, BenchLatency]
    cpu_s_per_1000: dict[str, float | None]
    memory_mib: dict[str, tuple[float | None, float | None]]
    histogram_ms: dict[str, list[tuple[float, int]]]

    @property
    def whole(self) -> bool:
        """True if all messages are visible as decided."""
        return not (self.lost or self.duplicated or self.wrong)

    def data(self, job: Job) -> dict[str, Any]:
        """Return the figures as JSON data."""
        shown = ("in_flight", "size", "messages", "groups", "rollback_share", "unknown_share")
        parameters = {name: getattr(job, name) for name in shown}
        parameters |= {"warmup_s": job.warmup_s, "api": "http" if job.http else "sdk"}
        parameters["keyless"] = bool(job.name_header)
        result: dict[str, Any] = {**to_builtins(self), "asked": parameters}
        return result


class LoadResult(NamedTuple):
    """The log of a load, decoded."""

    job: Job
    prepared: Sequence[float]
    began: Sequence[float]
    decided: Sequence[float]
    errors: dict[str, int]

    @classmethod
    def of(cls, job: Job, book: LoadLog) -> "LoadResult":
        """Decode a log."""
        began, prepared, decided = array("d"), array("d"), array("d")
        for times, raw in ((began, book.began), (prepared, book.prepared), (decided, book.decided)):
            times.frombytes(raw)
        return cls(job, prepared, began, decided, book.errors)

    def owed(self) -> Iterator[int]:
        """Yield the numbers of the messages that must be visible."""
        for number, prepared in enumerate(self.prepared):
            if prepared and self.job.fate(number) is not PlannedEnd.ROLLBACK:
                yield from self.messages(number)

    def messages(self, number: int) -> range:
        return range(number * self.job.messages, (number + 1) * self.job.messages)

    def forbidden(self) -> Iterator[int]:
        """Yield the numbers of the messages that must not be visible."""
        for number, prepared in enumerate(self.prepared):
            if prepared and self.job.fate(number) is PlannedEnd.ROLLBACK:
                yield from self.messages(number)


def figures(load: LoadResult, count: "Count", window: TimeWindow, usage: ResourceUsage) -> Figures:
    """Return the figures of a load, from the messages that consumers see."""
    ended = [number for number, at in enumerate(load.decided) if at in window]
    times_s = _times(load, count, ended)
    length_s = max(window.seconds, 1e-9)
    along = [at for at in count.seen_at if at]
    share = count.total / len(along) if along else 0.0
    promoted = sum(at in window for at in along) * share / load.job.messages
    thousands = len(ended) / 1000
    return Figures(
        transactions=len(ended),
        acked_per_s=round(len(ended) / length_s, 1),
        acked_per_s_by_tenth=_by_tenth([load.decided[number] for number in ended], window),
        promoted_per_s=round(promoted / length_s, 1),
        failed=sum(load.errors.values()),
        errors=load.errors,
        visible=count.total,
        lost=sum(not count.of(number) for number in load.owed()),
        duplicated=sum(copies - 1 for copies in count.copies if copies > 1),
        wrong=sum(count.of(number) > 0 for number in load.forbidden()),
        latency_ms={name: latency(times) for name, times in times_s.items()},
        cpu_s_per_1000={
            name: None if seconds is None or not thousands else round(seconds / thousands, 4)
            for name, seconds in usage.cpu_s.items()
        },
        memory_mib=usage.memory_mib,
        histogram_ms={name: histogram(times) for name, times in times_s.items()},
    )


def _by_tenth(ended_at: Sequence[float], window: TimeWindow) -> list[float]:
    tenth_s = max(window.seconds, 1e-9) / 10
    counts = [0] * 10
    for at in ended_at:
        counts[min(9, int((at - window.begin) / tenth_s))] += 1
    return [round(number / tenth_s, 1) for number in counts]


def _times(load: LoadResult, count: "Count", ended: Sequence[int]) -> dict[str, Sequence[float]]:
    """Return the sorted durations of each step, as arrays, because there may be millions."""
    visible = (
        count.seen_at[message] - load.prepared[number]
        for number in ended
        if load.job.fate(number) is PlannedEnd.COMMIT
        for message in load.messages(number)
        if count.of(message) and count.seen_at[message]
    )
    steps: tuple[Iterator[float], ...] = (
        (load.prepared[number] - load.began[number] for number in ended),
        (load.decided[number] - load.prepared[number] for number in ended),
        (load.decided[number] - load.began[number] for number in ended),
        visible,
    )
    return {name: array("d", sorted(times)) for name, times in zip(_STEPS, steps, strict=True)}


def latency(times_s: Sequence[float]) -> BenchLatency:
    """Return the percentiles of sorted times."""
    if not times_s:
        return BenchLatency()
    last = len(times_s) - 1
    shares = (0.5, 0.9, 0.99, 0.999, 1.0)
    return BenchLatency(*(round(times_s[round(last * share)] * 1000, 3) for share in shares))


def histogram(times_s: Sequence[float]) -> list[tuple[float, int]]:
    """Return the number of sorted times in each bucket, by upper bound."""
    counts: dict[float, int] = {}
    for time_s in times_s:
        place = min(bisect_left(BOUNDS_MS, time_s * 1000), len(BOUNDS_MS) - 1)
        counts[BOUNDS_MS[place]] = counts.get(BOUNDS_MS[place], 0) + 1
    return sorted(counts.items())


# --- as text ---------------------------------------------------------------------------------


def text(result: Figures, job: Job) -> Iterator[str]:
    """Yield the figures as text."""
    api = "HTTP" if job.http else "SDK"
    yield (
        f"{result.transactions:,} transactions by {api}, {job.in_flight} in flight, "
        f"{job.messages} of {job.size:,} bytes each{', without keys' if job.name_header else ''}"
    )
    yield f"acked     {result.acked_per_s:12,.1f} /s"
    yield f"promoted  {result.promoted_per_s:12,.1f} /s"
    yield (
        f"visible   {result.visible:12,} messages, warm-up included; lost {result.lost:,}, "
        f"duplicated {result.duplicated:,}, visible after a rollback {result.wrong:,}"
    )
    yield ""
    yield f"{'ms':8}" + "".join(f"{name:>10}" for name in ("p50", "p90", "p99", "p99.9", "max"))
    for name in _STEPS:
        yield f"{name:8}" + "".join(_cell(value) for value in _row(result.latency_ms[name]))
    yield ""
    cpu = "   ".join(
        f"{name} {'unknown' if value is None else f'{value:.3f}'}"
        for name, value in result.cpu_s_per_1000.items()
    )
    yield f"CPU seconds per 1,000 transactions: {cpu}"
    memory = "   ".join(
        f"{name} {_mib(before)} to {_mib(after)}"
        for name, (before, after) in result.memory_mib.items()
    )
    yield f"MiB of memory: {memory}"
    tenths = " ".join(f"{rate:,.0f}" for rate in result.acked_per_s_by_tenth)
    yield f"acked /s by tenth of the time: {tenths}"
    for name in _STEPS:
        yield from _bars(name, result.histogram_ms[name])


def _mib(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}"


def _row(one: BenchLatency) -> tuple[float | None, ...]:
    return one.p50, one.p90, one.p99, one.p999, one.max


def _cell(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:10,.2f}"


def _bars(name: str, counts: Sequence[tuple[float, int]]) -> Iterator[str]:
    if not counts:
        return
    yield ""
    yield f"{name}, up to ms"
    highest = max(number for _, number in counts)
    held = dict(counts)
    first, last = BOUNDS_MS.index(counts[0][0]), BOUNDS_MS.index(counts[-1][0])
    for bound in BOUNDS_MS[first : last + 1]:
        number = held.get(bound, 0)
        bar = "█" * round(number / highest * _BAR_CHARS) or ("▏" if number else "")
        yield f"{bound:8g} {bar:{_BAR_CHARS}} {number:,}"
