"""One SQL statement that only reads: checked, run, and returned as plain values."""

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import Row, SparkSession

from txbroker.errors import TxbrokerError

_SCRIPT = re.compile(r"\bUSING\b(?!\s*\()", re.IGNORECASE)
"""What starts a program: in a query, all else has brackets here."""
_ANY = re.compile(r"\bIMMEDIATE\b", re.IGNORECASE)
"""What runs any text, even when it is only explained."""
_EXPLAINED = re.compile(r"\s*EXPLAIN(?:\s+(?:EXTENDED|CODEGEN|COST|FORMATTED))?\b", re.IGNORECASE)
_SHOWS = re.compile(r"\s*(?:DESC|DESCRIBE|SHOW)\b", re.IGNORECASE)
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
        raise _failed(error) from None
    values = [dict(zip(columns, map(plain, row), strict=True)) for row in rows[:limit]]
    return Answer(columns, values, len(rows) > limit)


def _check_reads(spark: SparkSession, statement: str) -> None:
    """Check by Spark's parser alone, before anything runs: a common table is always a query, and
    all that can be explained is a statement."""
    text = _EXPLAINED.sub("", statement, count=1).strip().removesuffix(";")
    begin = next(iter(re.findall(r"\w+", text)), "").upper()
    try:
        spark.sql(f"EXPLAIN WITH it AS (\n{text}\n) SELECT 1")
        refused = "TRANSFORM" if _SCRIPT.search(text) else ""
    except ParseException:
        refused = "" if _SHOWS.match(text) else begin
        if refused and not _ANY.search(text):
            with suppress(AnalysisException):  # of a statement: it names what does not exist
                _explain(spark, text)
    if refused:
        raise QueryFailed(
            f"audit sql only reads, and this statement ({refused}) may change something: "
            "use SELECT, SHOW, DESCRIBE or EXPLAIN; Spark's own spark-sql changes tables"
        )


def _explain(spark: SparkSession, text: str) -> None:
    try:
        spark.sql(f"EXPLAIN {text}")
    except ParseException as error:
        raise _failed(error) from None


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


def _failed(error: Exception) -> QueryFailed:
    raised = getattr(error, "java_exception", None)
    text = str(raised.getMessage() if raised is not None else error)
    text = re.split(r"\n\n|\n?== SQL|SQLSTATE:", text.strip(), maxsplit=1)[0]
    text = re.sub(r"^(?:[\w.$]+(?:Exception|Error): )*(?:\[[A-Z_.0-9]+\] ?)?", "", text)
    reason = " ".join(text.split())[:_TEXT_MAX].rstrip(" .;:")
    return QueryFailed(f"the statement failed: {reason}")
