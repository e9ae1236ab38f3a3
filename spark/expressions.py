"""Columns as text: one call of Java for each whole expression, in place of one for each part of it.

It is imported as `F` in place of `pyspark.sql.functions`, whose functions it has with the same
arguments. Their results are columns that know their SQL, and that Java parses where a DataFrame
takes them. An expression without text, such as a window, is one of pyspark's own columns at once;
both kinds may be mixed.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache, partialmethod
from importlib import import_module
from typing import Any, cast

import msgspec
from pyspark.sql import Column, DataFrame, Observation, is_remote
from pyspark.sql import functions as spark
from pyspark.sql.types import DataType

broadcast, expr = spark.broadcast, spark.expr

_ATOM, _SUM, _COMPARISON, _NOT, _AND, _OR = range(6)
"""How loosely an expression holds together: looser ones need brackets inside tighter ones."""
_TEXT_MAX = 1000
"""Characters of a text that every use of a column repeats."""
_numbers = itertools.count()


@lru_cache
def _of_session(kind: type["_Text"], remote: bool) -> type["_Text"]:
    """Return a kind of text that is one of the columns of the session, which has Java or, over
    Spark Connect, has none."""
    base = import_module(f"pyspark.sql.{'connect' if remote else 'classic'}.column").Column
    return type(kind.__name__, (kind, base), {})


class _Text(Column):
    """A column of which the SQL is known.

    Attributes:
        sql: without a name.
        looseness: one of `_ATOM` to `_OR`.
        title: its name; None: as Spark names it.
    """

    def __new__(cls, *_given: Any) -> "_Text":
        return object.__new__(_of_session(cast(Any, cls), is_remote()))

    def __init__(self, sql: str, looseness: int = _ATOM, title: str | None = None) -> None:
        self.sql, self.looseness, self.title = sql, looseness, title
        self._parsed: Any = None

    @property
    def _column(self) -> Any:
        if self._parsed is None:
            self._parsed = spark.expr(self.named)
        return self._parsed

    @property
    def _jc(self) -> Any:
        return self._column._jc

    @property
    def _expr(self) -> Any:
        return self._column._expr

    @property
    def named(self) -> str:
        """The SQL, with the name."""
        return self.sql if self.title is None else f"{self.sql} AS {_quoted(self.title)}"

    def within(self, looseness: int) -> str:
        """Return the SQL for an operator that takes nothing looser."""
        return self.sql if self.looseness <= looseness else f"({self.sql})"

    def _operator(self, other: Any, *, sign: str, looseness: int, method: str) -> Column:
        right = _text(other)
        if right is None:
            return cast(Column, getattr(super(), method)(other))
        one, two = (right, self) if method.startswith("__r") else (self, right)
        # Only these may be chained, and only from the left.
        left = looseness if looseness in (_AND, _OR) else looseness - 1
        return _Text(f"{one.within(left)} {sign} {two.within(looseness - 1)}", looseness)

    def __invert__(self) -> Column:
        return _Text(f"NOT {self.within(_ATOM)}", _NOT)

    def __neg__(self) -> Column:
        return _Text(f"(-{self.within(_ATOM)})")

    def __getitem__(self, key: Any) -> Column:
        at = _text(key)
        if at is None:
            return super().__getitem__(key)
        return _Text(f"{self.within(_ATOM)}[{at.sql}]")

    def getField(self, name: Any) -> Column:
        return self[name]

    def isin(self, *values: Any) -> Column:
        if len(values) == 1 and isinstance(values[0], list | set):
            values = tuple(values[0])
        texts = [_text(value) for value in values]
        known = [text.sql for text in texts if text is not None]
        if not texts or len(known) < len(texts):
            return super().isin(*values)
        listed = ", ".join(known)
        return _Text(f"{self.within(_SUM)} IN ({listed})", _COMPARISON)

    def between(self, lowerBound: Any, upperBound: Any) -> Column:
        inside: Column = (self >= lowerBound) & (self <= upperBound)
        return inside

    def isNull(self) -> Column:
        return _Text(f"{self.within(_SUM)} IS NULL", _COMPARISON)

    def isNotNull(self) -> Column:
        return _Text(f"{self.within(_SUM)} IS NOT NULL", _COMPARISON)

    def cast(self, dataType: DataType | str) -> Column:
        return _Text(f"CAST({self.sql} AS {_ddl(dataType)})")

    def try_cast(self, dataType: DataType | str) -> Column:
        return _Text(f"TRY_CAST({self.sql} AS {_ddl(dataType)})")

    def alias(self, *names: str, **kwargs: Any) -> Column:
        if len(names) != 1 or kwargs:
            return super().alias(*names, **kwargs)
        return _Text(self.sql, self.looseness, names[0])


for _method, _sign, _looseness in (
    ("__and__", "AND", _AND), ("__or__", "OR", _OR),
    ("__eq__", "=", _COMPARISON), ("__ne__", "<>", _COMPARISON), ("eqNullSafe", "<=>", _COMPARISON),
    ("__lt__", "<", _COMPARISON), ("__le__", "<=", _COMPARISON),
    ("__gt__", ">", _COMPARISON), ("__ge__", ">=", _COMPARISON), ("rlike", "RLIKE", _COMPARISON),
    ("__add__", "+", _SUM), ("__sub__", "-", _SUM), ("__mul__", "*", _SUM),
    ("__truediv__", "/", _SUM), ("bitwiseAND", "&", _SUM),
    ("__radd__", "+", _SUM), ("__rsub__", "-", _SUM),
):  # fmt: skip
    _given = {"sign": _sign, "looseness": _looseness, "method": _method}
    setattr(_Text, _method, partialmethod(_Text._operator, **_given))


class _Case(_Text):
    """A `CASE` that may get more branches: pairs of conditions and values."""

    def __init__(self, *branches: tuple[_Text, _Text]) -> None:
        whens = (f" WHEN {condition.sql} THEN {value.sql}" for condition, value in branches)
        self._open = f"CASE{''.join(whens)}"
        super().__init__(f"{self._open} END")
        self._branches = branches

    def when(self, condition: Column, value: Any) -> Column:
        one, two = _text(condition), _text(value)
        if one is None or two is None:
            return self._of_spark().when(condition, value)
        return _Case(*self._branches, (one, two))

    def otherwise(self, value: Any) -> Column:
        other = _text(value)
        if other is None:
            return self._of_spark().otherwise(value)
        return _Text(f"{self._open} ELSE {other.sql} END")

    def _of_spark(self) -> Column:
        """Return it as Spark builds one, which takes branches without text."""
        (condition, value), *others = self._branches
        case = spark.when(condition, value)
        for condition, value in others:
            case = case.when(condition, value)
        return case


def _ddl(kind: DataType | str) -> str:
    return kind.simpleString() if isinstance(kind, DataType) else kind


# --- values ------------------------------------------------------------------------------------


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _text(value: Any) -> _Text | None:
    """Return a column or a Python value as text; None where it has none."""
    if isinstance(value, _Text):
        return value
    sql = None if isinstance(value, Column) else _literal(value)
    return None if sql is None else _Text(sql)


def _literal(value: Any) -> str | None:
    value = value.value if isinstance(value, Enum) else value
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and -(1 << 63) < value < 1 << 63:
        return f"({value})" if value < 0 else str(value)
    if isinstance(value, float):
        return f"CAST('{value!r}' AS DOUBLE)"
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if isinstance(value, Mapping):
        parts = [_literal(part) for item in value.items() for part in item]
        return None if None in parts else f"map({', '.join(map(str, parts))})"
    if isinstance(value, str) and len(value) <= _TEXT_MAX:
        escaped = (f"\\u{ord(c):04x}" if c < " " or c in "'\\$" else c for c in value)
        return f"'{''.join(escaped)}'"
    return None


def lit(value: Any) -> Column:
    """Return a constant."""
    text = _text(value)
    if text is None:
        return value if isinstance(value, Column) else spark.lit(value)
    return text


def col(name: str) -> Column:
    """Return a column by its name; dots lead into structs."""
    if name == "*":
        return _Text(name)
    if "*" in name or "`" in name:
        return spark.col(name)
    return _Text(".".join(map(_quoted, name.split("."))))


def when(condition: Column, value: Any) -> Column:
    """Begin a `CASE`."""
    one, two = _text(condition), _text(value)
    if one is None or two is None:
        return spark.when(condition, value)
    return _Case((one, two))


# --- functions -----------------------------------------------------------------------------------

_SQL_NAMES = {"create_map": "map", "log": "ln"}
"""Where they differ from those of pyspark."""
_TEXTS = {
    "array_append": (1,), "array_contains": (1,), "array_join": (1, 2), "array_position": (1,),
    "concat_ws": (0,), "date_trunc": (0,), "format_string": (0,), "from_json": (1,), "split": (1,),
    "substring_index": (1,), "translate": (1, 2), "try_variant_get": (1, 2),
}  # fmt: skip
"""The arguments that are texts, where others are columns or their names."""
_LAMBDAS = frozenset({"aggregate", "exists", "filter", "forall", "transform"})
_OTHERS = frozenset({"percentile_approx", "row_number"})
"""Functions whose arguments differ in SQL, or that need a window."""


def __getattr__(name: str) -> Callable[..., Column]:
    function = getattr(spark, name)
    if name in _OTHERS:
        return cast(Callable[..., Column], function)

    def called(*given: Any, **named: Any) -> Column:
        if len(given) == 1 and isinstance(given[0], list | tuple | set):
            given = tuple(given[0])
        texts = [_argument(name, number, value) for number, value in enumerate(given)]
        if named or not all(texts):
            return cast(Column, function(*given, **named))
        return _Text(f"{_SQL_NAMES.get(name, name)}({', '.join(cast(Iterable[str], texts))})")

    return called


def _argument(function: str, number: int, value: Any) -> str | None:
    if callable(value) and not isinstance(value, Column):
        return _lambda(value) if function in _LAMBDAS else None
    if isinstance(value, str) and number not in _TEXTS.get(function, ()):
        value = col(value)
    text = _text(value)
    if text is None:
        return None
    return text.named if function == "struct" else text.sql


def _lambda(function: Callable[..., Any]) -> str | None:
    names = [f"x{next(_numbers)}" for _ in inspect.signature(function).parameters]
    body = _text(function(*map(_Text, names)))
    if body is None:
        return None
    given = names[0] if len(names) == 1 else f"({', '.join(names)})"
    return f"{given} -> {body.sql}"


# --- rows --------------------------------------------------------------------------------------


class RowFigures:
    """Figures of rows, which Spark computes as it writes them.

    They are one text, because each of Spark's own observations is many calls of Java.

    Args:
        figures: aggregates, by name.
    """

    def __init__(self, figures: Mapping[str, Column]) -> None:
        self._figures, self._observation = figures, Observation()

    def of(self, rows: DataFrame) -> DataFrame:
        """Return the rows, observed."""
        named = __getattr__("struct")(*(column.alias(n) for n, column in self._figures.items()))
        return rows.observe(self._observation, __getattr__("to_json")(named).alias("seen"))

    def get(self) -> dict[str, Any]:
        """Return the figures, after the rows were written; null ones are None."""
        found = msgspec.json.decode(self._observation.get["seen"], type=dict[str, Any])
        return {name: found.get(name) for name in self._figures}


_BETWEEN = "\x1f"


def select(rows: DataFrame, *columns: Column | str) -> DataFrame:
    """Return columns of a table, as `DataFrame.select` does, in a few calls for all of them."""
    texts = [col(each) if isinstance(each, str) else each for each in columns]
    if not all(isinstance(text, _Text) for text in texts):
        return rows.select(*columns)
    named = [cast(_Text, text).named for text in texts]
    if is_remote():
        return rows.selectExpr(*named)
    spark_of, java = rows.sparkSession, cast(Any, rows)._jdf
    jvm = cast(Any, spark_of.sparkContext)._jvm
    return DataFrame(java.selectExpr(_separator(jvm).split(_BETWEEN.join(named))), spark_of)


@lru_cache(maxsize=1)
def _separator(jvm: Any) -> Any:
    return jvm.java.util.regex.Pattern.compile(_BETWEEN)


def with_columns(rows: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
    """Return a table with more columns; it has none of these names."""
    return select(rows, "*", *(column.alias(name) for name, column in columns.items()))
