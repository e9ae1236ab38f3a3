"""Checks: limits of measures, from a file, that each audit run is compared with.

A check that cannot be evaluated, because there is no earlier run or no traffic to compare with, has
no value; it does not fail.
"""

import difflib
import math
import re
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from txbroker.contract.drift import Severity
from txbroker.errors import ConfigurationError
from txbroker.spark.judge.kinds import ALL_KINDS
from txbroker.spark.schema import Check, CheckResult, RunSummary, Thresholds

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""The gravest first."""
CHECKS_MAX = 50
"""Checks in a file: each is a time series in the proxies' metrics."""
HOURS_MAX = 168
DAYS_BEFORE = 7
"""Days that a volume is compared with."""
NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")


class Measure(NamedTuple):
    """Something that a check limits.

    Attributes:
        meaning: for people.
        unit: `s`, or empty for a ratio.
        least: whether the limit is the least good value, not the greatest.
        limits: the smallest and the greatest limit that make sense.
        hours: by default, how many hours it looks back in the table `latency`; 0: it does not read
            the table, and has no group or topic.
    """

    meaning: str
    unit: str = ""
    least: bool = False
    limits: tuple[float, float] = (0, 1e9)
    hours: int = 0


MEASURES = {
    "parked_share": Measure(
        "share of parked transactions among those prepared in the last hours",
        limits=(0, 1),
        hours=24,
    ),
    "oldest_undecided_s": Measure("age of the oldest pending transaction", "s"),
    "decide_p99_s": Measure(
        "99th percentile from prepare to decision, of the last hours", "s", hours=24
    ),
    "visible_p99_s": Measure(
        "99th percentile from prepare to visible, of the last hours", "s", hours=24
    ),
    "volume_min": Measure(
        "transactions of the last complete hours, relative to the median of the same hours of the "
        f"last {DAYS_BEFORE} days; fails below the limit",
        least=True,
        limits=(0, 1),
        hours=1,
    ),
    "volume_max": Measure("the same; fails above the limit", limits=(1, 1e9), hours=1),
    "audit_age_s": Measure("time from the end of the last run to the begin of this one", "s"),
}
"""What a check may limit."""


class Reading(NamedTuple):
    """What the table `latency` has for a check, of one group or topic or of all.

    Attributes:
        of: the group or topic.
        p99_ms: of the sketches; None without values.
        parked: number of parked transactions.
        volumes: numbers of transactions in the check's hours, of today, yesterday, and so on.
    """

    of: str
    p99_ms: float | None
    parked: int
    volumes: Sequence[int]


def evaluate(
    checks: Sequence[Check],
    readings: Mapping[str, Sequence[Reading]],
    oldest_undecided_ms: int | None,
    audit_age_ms: int | None,
) -> tuple[CheckResult, ...]:
    """Compare a run with the limits.

    Args:
        readings: of each check, by its name; days before the table begins are left out of their
            volumes.
        oldest_undecided_ms: None where nothing is pending.
        audit_age_ms: None where this is the first run.
    """
    of_run = {
        "oldest_undecided_s": (oldest_undecided_ms or 0) / 1000,
        "audit_age_s": None if audit_age_ms is None else audit_age_ms / 1000,
    }
    return tuple(
        _compared(check, of_run[check.measure])
        if check.measure in of_run
        else _worst(check, readings.get(check.name, ()))
        for check in checks
    )


def _worst(check: Check, readings: Sequence[Reading]) -> CheckResult:
    values = [(value, one.of) for one in readings if (value := _value(check, one)) is not None]
    least = MEASURES[check.measure].least
    value, of = (min if least else max)(values, default=(None, ""))
    return _compared(check, value, of)


def _compared(check: Check, value: float | None, of: str = "") -> CheckResult:
    """Compare a value with the limit. `of`: the group or topic with that value."""
    ok = None
    if value is not None:
        least = MEASURES[check.measure].least
        ok = value >= check.limit if least else value <= check.limit
    return CheckResult(check.name, check.severity, check.measure, value, check.limit, ok, of)


def _value(check: Check, reading: Reading) -> float | None:
    if check.measure.endswith("_p99_s"):
        return None if reading.p99_ms is None else reading.p99_ms / 1000
    now, *before = reading.volumes
    if check.measure == "parked_share":
        return reading.parked / now if now else None
    usual = statistics.median(before) if before else 0
    return now / usual if usual else None


def is_grave(severity: Severity, least: Severity) -> bool:
    """Return whether a severity is at least another one."""
    return SEVERITIES.index(severity) <= SEVERITIES.index(least)


def fails(drift: Mapping[str, int], checks: Sequence[CheckResult], exit_from: Severity) -> bool:
    """Return whether findings or failed checks are grave enough for exit code 4."""
    severities = {kind.name: kind.severity for kind in ALL_KINDS}
    found = [severities.get(kind, "critical") for kind, count in drift.items() if count]
    found += [check.severity for check in checks if check.ok is False]
    return any(is_grave(severity, exit_from) for severity in found)


def failed_of(summary: RunSummary) -> list[CheckResult]:
    """Return a run's failed checks, the gravest first."""
    failed = [check for check in summary.checks if check.ok is False]
    return sorted(failed, key=lambda check: SEVERITIES.index(check.severity))


def value_in_words(check: CheckResult) -> str:
    """Return a check's value with its unit; empty without a value."""
    return "" if check.value is None else _with_unit(check.measure, check.value)


def limit_in_words(check: CheckResult) -> str:
    """Return a check's limit, with the side of it that is good."""
    least = check.measure in MEASURES and MEASURES[check.measure].least
    return f"{'at least' if least else 'at most'} {_with_unit(check.measure, check.limit)}"


def _with_unit(measure: str, value: float) -> str:
    unit = MEASURES[measure].unit if measure in MEASURES else ""
    text = f"{value:.4g}" if value < 10_000 else f"{value:,.0f}"
    return f"{text} {unit}".strip()


# --- the file ----------------------------------------------------------------------------------

_KEYS = ("checks", "exit_from")
_CHECK_KEYS = tuple(name for name in Check.__struct_fields__ if name != "name")


def read_thresholds(path: Path) -> Thresholds:
    """Read a file of checks.

    Raises:
        ConfigurationError: it cannot be read or is wrong; the message names all that is wrong.
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not TOML: {error}") from None
    tables = given.get("checks", {})
    faults = [*_unknown(given, _KEYS)]
    exit_from = given.get("exit_from", "warning")
    if exit_from not in SEVERITIES:
        faults.append(f"exit_from is {exit_from!r}, not one of {', '.join(SEVERITIES)}")
    if not isinstance(tables, dict) or not all(isinstance(one, dict) for one in tables.values()):
        faults.append("each check is a table [checks.NAME]")
    else:
        faults += (f"[checks.{name}]: {why}" for name in tables for why in _wrong(name, tables))
        if len(tables) > CHECKS_MAX:
            faults.append(f"it has {len(tables)} checks, more than {CHECKS_MAX}")
    if faults:
        raise ConfigurationError(f"{path}: {'; '.join(faults)}")
    return Thresholds(tuple(_check(name, table) for name, table in tables.items()), exit_from)


def _check(name: str, table: Mapping[str, Any]) -> Check:
    return Check(**{"hours": MEASURES[table["measure"]].hours, **table, "name": name})


def _unknown(given: Mapping[str, Any], known: Sequence[str]) -> Iterator[str]:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f", did you mean {near[0]!r}?" if near else ":"
            yield f"there is no key {name!r}{hint} the keys are {', '.join(known)}"


def _wrong(name: str, tables: Mapping[str, Any]) -> Iterator[str]:
    table = tables[name]
    if not NAME.fullmatch(name):
        yield "a name has up to 63 lower-case letters, digits, '_' and '-', a letter first"
    yield from _unknown(table, _CHECK_KEYS)
    for key in ("measure", "limit"):
        if key not in table:
            yield f"{key} is missing"
    severity = table.get("severity", "error")
    if severity not in SEVERITIES:
        yield f"severity is {severity!r}, not one of {', '.join(SEVERITIES)}"
    for key in ("group", "topic"):
        if not isinstance(table.get(key, "*"), str) or table.get(key) == "":
            yield f"{key} is {table[key]!r}, not a name or a pattern such as 'orders-*'"
    if "group" in table and "topic" in table:
        yield "it has group and topic: name one of them"
    measure = table.get("measure")
    if isinstance(measure, str) and measure in MEASURES:
        yield from _wrong_of(MEASURES[measure], measure, table)
    elif measure is not None:
        yield f"there is no measure {measure!r}: the measures are {', '.join(MEASURES)}"


def _wrong_of(kind: Measure, measure: str, table: Mapping[str, Any]) -> Iterator[str]:
    limit, (least, greatest) = table.get("limit", kind.limits[0]), kind.limits
    number = isinstance(limit, int | float) and not isinstance(limit, bool)
    if not number or not math.isfinite(limit) or not least <= limit <= greatest:
        unit = " seconds" if kind.unit else ""
        yield f"limit is {limit!r}, not a number from {least:g} to {greatest:g}{unit}"
    if not kind.hours:
        for key in ("group", "topic", "hours"):
            if key in table:
                yield f"{measure} takes no {key}: it is measured of the whole run"
    hours = table.get("hours", 1)
    if type(hours) is not int or not 1 <= hours <= HOURS_MAX:
        yield f"hours is {hours!r}, not a whole number from 1 to {HOURS_MAX}"
