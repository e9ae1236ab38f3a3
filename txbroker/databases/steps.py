"""SQL as steps: written once, executed on plain and on asynchronous connections.

A step function is a generator: it yields each `Query` and receives its `Result`, or the database's
error at the place where it yielded. Values stand for `?` in the SQL text, for every driver.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct

T = TypeVar("T")


class Query(NamedTuple):
    """An SQL statement and its values.

    Attributes:
        apart: to be executed on another connection than the caller's, outside its transaction.
    """

    sql: str
    values: Sequence[Any] = ()
    apart: bool = False


class Result(Struct, frozen=True):
    """The number of rows that a statement changed or found, and those that it returned."""

    count: int
    rows: Sequence[Sequence[Any]]


Steps: TypeAlias = Generator[Query, Result, T]


def run(steps: Steps[T], execute: Callable[[Query], Result]) -> T:
    """Execute steps on a plain connection, and return their result."""
    send: Callable[[Any], Query] = steps.send
    value: Any = None
    while True:
        try:
            query = send(value)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            send, value = steps.send, execute(query)
        except Exception as error:
            send, value = steps.throw, error


async def run_async(steps: Steps[T], execute: Callable[[Query], Awaitable[Result]]) -> T:
    """Execute steps on an asynchronous connection, and return their result."""
    send: Callable[[Any], Query] = steps.send
    value: Any = None
    while True:
        try:
            query = send(value)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            send, value = steps.send, await execute(query)
        except Exception as error:
            send, value = steps.throw, error


def one(query: Query) -> Steps[Result]:
    """Execute one statement."""
    return (yield query)


@lru_cache(maxsize=512)
def with_placeholders(sql: str, style: str) -> str:
    """Return SQL with the placeholders of a driver in place of `?`.

    Args:
        style: its `paramstyle`, as in PEP 249; or `numeric_dollar` for `$1`.

    Raises:
        ValueError: another style.
    """
    if style == "qmark":
        return sql
    if style in ("format", "pyformat"):
        return sql.replace("?", "%s")
    if style in ("numeric", "numeric_dollar"):
        parts, mark = sql.split("?"), ":" if style == "numeric" else "$"
        numbers = count(1)
        return parts[0] + "".join(f"{mark}{next(numbers)}{part}" for part in parts[1:])
    raise ValueError(f"placeholders of style {style!r} are not known")
