"""Checks: the file with their limits, their evaluation, and what makes a run exit with 4."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.spark.audit_summaries import STARTED_MS
from txbroker.contract.drift import Severity
from txbroker.errors import ConfigurationError
from txbroker.spark.checks import (
    MEASURES,
    Reading,
    evaluate,
    fails,
    read_thresholds,
)
from txbroker.spark.judge.kinds import ALL_KINDS
from txbroker.spark.schema import Check, CheckResult, Thresholds
from txbroker.spark.tables.layout import LATENCY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
NOW_MS = STARTED_MS - STARTED_MS % DAY_MS + 10 * HOUR_MS + 5 * 60_000

# --- the file ----------------------------------------------------------------------------------


def read(tmp_path: Path, text: str) -> Thresholds:
    path = tmp_path / "checks.toml"
    path.write_text(text)
    return read_thresholds(path)


def test_a_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    text = """
        exit_from = "error"
        [checks.orders-latency]
        measure = "visible_p99_s"
        limit = 5
        severity = "warning"
        group = "orders-*"
        [checks.few]
        measure = "volume_min"
        limit = 0.5
        hours = 2
        [checks.old]
        measure = "oldest_undecided_s"
        limit = 3600.0
    """
    assert read(tmp_path, text) == Thresholds(
        (
            Check("orders-latency", "visible_p99_s", 5, "warning", "orders-*", None, 24),
            Check("few", "volume_min", 0.5, "error", None, None, 2),
            Check("old", "oldest_undecided_s", 3600.0, "error", None, None, 0),
        ),
        "error",
    )
    assert read(tmp_path, "") == Thresholds((), "warning")


ONE = '[checks.a]\nmeasure = "parked_share"\nlimit = 0.1\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = ", "is not TOML: Invalid value (at end of document)"),
        ("x = 1", "there is no key 'x': the keys are checks, exit_from"),
        ('exit_form = "error"', "did you mean 'exit_from'?"),
        ('exit_from = "fatal"', "exit_from is 'fatal', not one of critical, error, warning"),
        ("exit_from = [1]", "exit_from is [1], not one of"),
        ("checks = 5", "each check is a table [checks.NAME]"),
        ("checks.a = 5", "each check is a table [checks.NAME]"),
        ("[checks.a]", "[checks.a]: measure is missing; [checks.a]: limit is missing"),
        ("[checks.A]\n" + ONE.partition("\n")[2], "[checks.A]: a name has up to 63 lower-case"),
        (ONE + "limits = 1", "[checks.a]: there is no key 'limits', did you mean 'limit'?"),
        (ONE + 'severity = "info"', "severity is 'info', not one of critical, error, warning"),
        (ONE + "hours = 0", "hours is 0, not a whole number from 1 to 168"),
        (ONE + "hours = true", "hours is True, not a whole number"),
        (ONE + "hours = 1.5", "hours is 1.5, not a whole number"),
        (ONE + "group = 5", "group is 5, not a name or a pattern"),
        (ONE + 'topic = ""', "topic is '', not a name or a pattern"),
        (ONE + 'topic = "a"\ngroup = "b"', "it has group and topic: name one of them"),
        (ONE + ONE, "is not TOML"),
        (ONE.replace("0.1", "1.5"), "limit is 1.5, not a number from 0 to 1"),
        (ONE.replace("0.1", "nan"), "limit is nan, not a number"),
        (ONE.replace("0.1", "true"), "limit is True, not a number"),
        (ONE.replace("0.1", '"0.1"'), "limit is '0.1', not a number"),
        (ONE.replace("parked_share", "parked"), f"the measures are {', '.join(MEASURES)}"),
        (ONE.replace('"parked_share"', "7"), "there is no measure 7"),
        (
            ONE.replace("parked_share", "audit_age_s") + "hours = 3",
            "audit_age_s takes no hours: it is measured of the whole run",
        ),
        (ONE.replace("parked_share", "audit_age_s").replace("0.1", "-1"), "to 1e+09 seconds"),
        ("".join(ONE.replace("a]", f"a{n}]") for n in range(51)), "it has 51 checks, more than 50"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read(tmp_path, text)
    message = str(refused.value)
    assert message.startswith(str(tmp_path / "checks.toml"))
    assert reason in message
    assert "\n" not in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigurationError, match=f"{path} cannot be read: "):
            read_thresholds(path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="is not TOML"):
        read_thresholds(tmp_path / "bytes.toml")


DOCS = Path(__file__).parents[2] / "docs"


def test_the_file_in_the_guide_is_read(tmp_path: Path) -> None:
    guide = (DOCS / "how-to/audit.md").read_text()
    (text,) = re.findall(r"```toml\n(# checks.toml\n.*?)```", guide, re.S)
    found = read(tmp_path, text)
    assert [check.severity for check in found.checks] == ["critical", "warning", "error", "error"]


def test_every_measure_and_key_is_described() -> None:
    page = (DOCS / "reference/audit-checks.md").read_text()
    head, measures = page.split("## Measures")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", measures, re.M)
    assert rows == [(name, "yes" if one.hours else "no") for name, one in MEASURES.items()]
    keys = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", head, re.M)
    named = {name.strip("`") for key in keys for name in key.split(", ")}
    assert named == {"exit_from", *Check.__struct_fields__} - {"name"}


# --- the evaluation ----------------------------------------------------------------------------


def reading(of: str = "", p99_ms: float | None = None, parked: int = 0, *volumes: int) -> Reading:
    return Reading(of, p99_ms, parked, volumes)


@pytest.mark.parametrize(
    ("measure", "limit", "readings", "value", "ok"),
    [
        ("parked_share", 0.1, [reading("", None, 10, 100)], 0.1, True),
        ("parked_share", 0.0, [reading("", None, 1, 100)], 0.01, False),
        ("parked_share", 0.1, [reading("", None, 0, 0)], None, None),
        ("parked_share", 0.1, [], None, None),
        ("visible_p99_s", 5, [reading("", 5000.0)], 5.0, True),
        ("decide_p99_s", 5, [reading("", 5001.0)], 5.001, False),
        ("decide_p99_s", 5, [reading("", None)], None, None),
        ("volume_min", 0.5, [reading("", None, 0, 50, 90, 100, 9999)], 0.5, True),
        ("volume_min", 0.5, [reading("", None, 0, 0, 100)], 0.0, False),
        ("volume_min", 0.5, [reading("", None, 0, 50)], None, None),
        ("volume_min", 0.5, [reading("", None, 0, 50, 0, 0)], None, None),
        ("volume_max", 2, [reading("", None, 0, 201, 100, 100)], 2.01, False),
    ],
)
def test_a_value_is_compared_with_the_limit(
    measure: str, limit: float, readings: list[Reading], value: float | None, ok: bool | None
) -> None:
    check = Check("c", measure, limit)
    assert evaluate([check], {"c": readings}, None, None) == (
        CheckResult("c", "error", measure, value, limit, ok),
    )


@pytest.mark.parametrize(
    ("measure", "limit", "worst"), [("volume_min", 0.9, "b"), ("volume_max", 1.1, "c")]
)
def test_the_worst_group_counts(measure: str, limit: float, worst: str) -> None:
    volumes = {"a": (100, 100), "b": (10, 100), "c": (300, 100), "new": (5,)}
    readings = [reading(of, None, 0, *numbers) for of, numbers in volumes.items()]
    (result,) = evaluate([Check("c", measure, limit, group="*")], {"c": readings}, None, None)
    assert (result.of, result.ok) == (worst, False)


@pytest.mark.parametrize(
    ("oldest_ms", "age_ms", "expected"),
    [(None, None, [(0.0, True), (None, None)]), (60_001, 90_000, [(60.001, False), (90.0, True)])],
)
def test_ages_come_from_the_run(
    oldest_ms: int | None, age_ms: int | None, expected: list[tuple[float | None, bool | None]]
) -> None:
    checks = [Check("u", "oldest_undecided_s", 60), Check("f", "audit_age_s", 90)]
    results = evaluate(checks, {}, oldest_ms, age_ms)
    assert [(one.value, one.ok) for one in results] == expected


@pytest.mark.parametrize("exit_from", ["critical", "error", "warning"])
@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.name)
def test_findings_of_a_severity_exit(kind: Any, exit_from: Severity) -> None:
    order = ("critical", "error", "warning")
    expected = order.index(kind.severity) <= order.index(exit_from)
    assert fails({kind.name: 1}, (), exit_from) is expected
    assert not fails({kind.name: 0}, (), exit_from)
    failed = CheckResult("c", kind.severity, "parked_share", 1.0, 0.0, False)
    assert fails({}, (failed,), exit_from) is expected
    for ok in (True, None):
        passed = CheckResult("c", "critical", "parked_share", 1.0, 0.0, ok)
        assert not fails({}, (passed,), exit_from)


def test_an_unknown_kind_is_as_grave_as_any() -> None:
    assert fails({"of_a_newer_version": 1}, (), "critical")


# --- the table ---------------------------------------------------------------------------------


def sketch(counts: dict[int, int]) -> tuple[int, float, float, float, dict[int, int]]:
    return (sum(counts.values()), 0.0, 0.0, 0.0, counts)


def minute(
    ago_ms: int,
    grp: str,
    transactions: int,
    parked: int = 0,
    decide: dict[int, int] | None = None,
    topic: str = "payments",
) -> tuple[Any, ...]:
    at_ms = NOW_MS - ago_ms
    at = datetime.fromtimestamp(at_ms // 60_000 * 60, UTC)
    sketched = None if decide is None else sketch(decide)
    return (at.date(), "txbroker", at, grp, topic, transactions, 0, 0, parked, sketched, None)


def table(spark: SparkSession, rows: Sequence[tuple[Any, ...]]) -> DataFrame:
    return spark.createDataFrame(list(rows), LATENCY.ddl)


def test_the_table_is_read_in_one_query(spark: SparkSession) -> None:
    from txbroker.spark.tables.measures import readings_of, value_ms

    checks = [
        Check("parked", "parked_share", 0.1, hours=24),
        Check("slow", "decide_p99_s", 5, group="order*", hours=24),
        Check("exact", "decide_p99_s", 5, group="a_b", hours=24),
        Check("topic", "parked_share", 0.1, topic="*", hours=1),
        Check("few", "volume_min", 0.5, hours=1),
        Check("unused", "audit_age_s", 5),
    ]
    rows = [
        minute(10 * 60_000, "orders", 98, 2, {10: 97, 100: 1, 300: 2}),
        minute(70 * 60_000, "orders", 100, 0, {5: 100}),
        minute(20 * 60_000, "orders-eu", 10, 0, {0: 10}, topic="stock"),
        minute(20 * 60_000, "a_b", 1, 0, {50: 1}),
        minute(20 * 60_000, "axb", 1, 0, {60: 1}),
        minute(25 * HOUR_MS, "orders", 7, 7, {500: 7}),  # too old but for the volume
        minute(DAY_MS + 30 * 60_000, "orders", 40),
        minute(2 * DAY_MS + 30 * 60_000, "orders", 60),
        minute(2 * DAY_MS + 2 * HOUR_MS, "orders", 60),
        minute(9 * DAY_MS, "orders", 999),
    ]
    found = readings_of(table(spark, rows), checks, NOW_MS)
    (parked,) = found["parked"]
    assert (parked.parked, parked.volumes[0]) == (2, 212)
    slow = {one.of: one.p99_ms for one in found["slow"]}
    assert slow == {"orders": value_ms(100), "orders-eu": value_ms(0)}
    assert [(one.of, one.p99_ms) for one in found["exact"]] == [("a_b", value_ms(50))]
    shares = {one.of: (one.parked, one.volumes[0]) for one in found["topic"]}
    assert shares == {"payments": (2, 102), "stock": (0, 10)}
    # From 09:00 to 10:00, compared with the two days that the table covers.
    (few,) = found["few"]
    assert few.volumes == [112, 54, 60]
    assert found.keys() == {"parked", "slow", "exact", "topic", "few"}


def test_an_empty_table_has_no_readings(spark: SparkSession) -> None:
    from txbroker.spark.tables.measures import readings_of

    checks = [Check("parked", "parked_share", 0.1, hours=24), Check("age", "audit_age_s", 5)]
    assert readings_of(table(spark, []), checks, NOW_MS) == {"parked": []}
    assert readings_of(table(spark, []), checks[1:], NOW_MS) == {}
