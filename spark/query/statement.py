"""One SQL statement that only reads: checked, run, and returned as plain values."""

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession

from txbroker.errors import TxbrokerError

_PLANS = "org.apache.spark.sql.catalyst.plans.logical."
_CHANGING = tuple(
    f"{_PLANS}{name}"
    for name in (
        "Command",
        "ParsedStatement",
        "Call",
        "ScriptTransformation",
        "CompoundPlanStatement",
    )
)
"""What changes tables or settings, starts programs, or is a script."""
_HIDING = frozenset(
    {"ExecuteImmediateQuery", "UnresolvedExecuteImmediate", "PlanWithUnresolvedIdentifier"}
)
"""Nodes that the parser fills later: with any statement, or one about what IDENTIFIER() names."""
_READING = frozenset(
    {
        "DescribeRelation",
        "DescribeColumn",
        "DescribeFunction",
        "DescribeNamespace",
        "DescribeQueryCommand",
        "ExplainCommand",
        "ShowColumns",
        "ShowCreateTable",
        "ShowFunctions",
        "ShowNamespaces",
        "ShowPartitions",
        "ShowTableProperties",
        "ShowTables",
        "ShowViews",
    }
)
"""Commands that only show something."""
_TEXT_MAX = 400


class QueryFailed(TxbrokerError):
    """A statement is refused or failed; the message is one sentence."""


class Answer(NamedTuple):
    """The rows of a statement.

    Attributes:
        columns: unique names.
        rows: values of JSON, by column; times in ISO 8601, UTC.
        more: whether there are more rows than asked for.
    """

    columns: tuple[str, ...]
    rows: list[dict[str, Any]]
    more: bool


def ask(spark: SparkSession, statement: str, limit: int) -> Answer:
    """Run a statement.

    Raises:
        QueryFailed: it does not only read, or Spark cannot run it.
    """
    try:
        _check_reads(spark, statement)
        answer = spark.sql(statement)
        columns = tuple(_unique(answer.columns))
        rows = answer.limit(limit + 1).collect()
    except (PySparkException, Py4JJavaError) as error:
        raise QueryFailed(f"the statement failed: {_reason(error)}") from None
    values = [dict(zip(columns, map(plain, row), strict=True)) for row in rows[:limit]]
    return Answer(columns, values, len(rows) > limit)


def _check_reads(spark: SparkSession, statement: str) -> None:
    session: Any = spark._jsparkSession
    for node in _nodes(session.sessionState().sqlParser().parsePlan(statement)):
        name = node.getClass().getSimpleName()
        if name in _HIDING or (name not in _READING and _changes(spark, node)):
            raise QueryFailed(
                f"audit sql only reads, and this statement ({name}) may change something: "
                "use SELECT, SHOW, DESCRIBE or EXPLAIN; Spark's own spark-sql changes tables"
            )


def _changes(spark: SparkSession, node: Any) -> bool:
    jvm: Any = spark.sparkContext._jvm
    loader = node.getClass().getClassLoader()
    kinds = (jvm.java.lang.Class.forName(name, False, loader) for name in _CHANGING)
    return any(kind.isInstance(node) for kind in kinds)


def _nodes(plan: Any) -> Iterator[Any]:
    """Yield a plan's nodes, also those of its common tables and subqueries."""
    yield plan
    for inner in (plan.children(), plan.innerChildren(), plan.subqueries()):
        for number in range(inner.size()):
            yield from _nodes(inner.apply(number))


def _unique(names: list[str]) -> Iterator[str]:
    """Yield column names; a repeated one gets its number."""
    seen: set[str] = set()
    for number, name in enumerate(names, 1):
        unique = f"{name}_{number}" if name in seen else name
        seen.add(unique)
        yield unique


def plain(value: Any) -> Any:
    """Return a value of a row as JSON has it."""
    if isinstance(value, Row):
        return {name: plain(each) for name, each in value.asDict().items()}
    if isinstance(value, dict):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.isoformat() if isinstance(value, date) else str(value)


def _reason(error: Exception) -> str:
    raised = getattr(error, "java_exception", None)
    text = str(raised.getMessage() if raised is not None else error)
    text = re.split(r"\n\n|\n?== SQL|SQLSTATE:", text.strip(), maxsplit=1)[0]
    text = re.sub(r"^(?:[\w.$]+(?:Exception|Error): )*(?:\[[A-Z_.0-9]+\] ?)?", "", text)
    return " ".join(text.split())[:_TEXT_MAX].rstrip(" .;:")
