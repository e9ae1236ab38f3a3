"""`txbroker audit sql`: what it answers, what it refuses, and the page that shows its views."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.cli import Call, Result
from tests.lint.test_docs import words_of
from tests.spark.audit_process import environment
from tests.spark.demo_tables import TRANSACTIONS_MADE, write_demo
from tests.spark.table_cases import FIRST, add, new_store, settled
from txbroker.cli.audit import sql
from txbroker.cli.audit.sql import statements
from txbroker.cli.main import cli
from txbroker.cli.run import run
from txbroker.spark.query.statement import QueryFailed, ask
from txbroker.spark.query.views import VIEWS
from txbroker.spark.tables.layout import TRANSACTIONS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = Path(__file__).parents[2] / "docs/how-to/query-the-audit.md"


@pytest.fixture(scope="module")
def demo(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = new_store(spark, tmp_path_factory.mktemp("demo"), "parquet")
    write_demo(spark, store)
    return Path(store.out)


@pytest.fixture
def call(
    demo: Path,
    spark: SparkSession,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Call:
    """Call `audit sql` on these tables, in this process and with its Spark."""

    @contextlib.contextmanager
    def running(settings: object) -> Iterator[tuple[SparkSession, None]]:
        yield spark, None

    monkeypatch.setattr(sql, "session_of", running)

    def calling(*arguments: object) -> Result:
        code = run(cli, ["audit", "sql", "--out", str(demo), *map(str, arguments)])
        return Result(code, *capsys.readouterr())

    return calling


def test_page_shows_what_the_views_answer(call: Call) -> None:
    """Every session of the page, whole; there is one for each view."""
    sessions = re.findall(
        r"^```\n\$ (txbroker audit sql [^\n]*)\n(.*?)^```$", PAGE.read_text(), re.M | re.S
    )
    for command, shown in sessions:
        result = call(*words_of(command)[2:])
        assert result.out + result.err == shown, command
    named = " ".join(command for command, _ in sessions)
    assert [view.name for view in VIEWS if view.name not in named] == []


def test_values_are_those_of_json(call: Call) -> None:
    query = (
        "SELECT timestamp_millis(1500) AS at, DATE'2026-01-01' AS day, array(1.5, 2) AS list, "
        "map('a', named_struct('b', true)) AS map, 1 AS at, CAST(NULL AS int) AS none"
    )
    (row,) = call("-e", query, "-o", "json").json
    assert row == {
        "at": "1970-01-01T00:00:01.500Z",
        "day": "2026-01-01",
        "list": [1.5, 2],
        "map": {"a": {"b": True}},
        "at_5": 1,
        "none": None,
    }
    assert call("-e", "SELECT map('a', 1) AS m, 'x' AS t", "-o", "csv").out == (
        'm,t\n"{""a"": 1}",x\n'
    )


def test_number_of_rows_is_limited(call: Call) -> None:
    result = call("-e", "SELECT id FROM transactions", "--limit", 3, "-o", "json")
    assert (len(result.json), result.err) == (
        3,
        "There are more than 3 rows; --limit shows more.\n",
    )
    result = call("-e", "SELECT id FROM transactions", "-o", "json")
    assert (len(result.json), result.err) == (TRANSACTIONS_MADE, "")


@pytest.mark.parametrize(
    "statement",
    [
        "DROP VIEW transactions",
        "INSERT INTO transactions SELECT * FROM transactions",
        "FROM transactions INSERT INTO runs SELECT * INSERT INTO drift SELECT *",
        "WITH x AS (SELECT 1) INSERT INTO runs SELECT * FROM x",
        "CREATE TABLE x AS SELECT 1",
        "MERGE INTO runs USING drift ON false WHEN MATCHED THEN DELETE",
        "DELETE FROM runs",
        "CALL system.expire_snapshots('runs')",
        "EXECUTE IMMEDIATE 'DROP VIEW runs'",
        "CREATE TEMPORARY VIEW IDENTIFIER('x') AS SELECT 1",
        "INSERT INTO IDENTIFIER('runs') SELECT * FROM runs",
        "BEGIN DROP VIEW runs; END",
        "SELECT TRANSFORM(id) USING 'rm -rf' AS (x) FROM runs",
        "WITH y AS (SELECT TRANSFORM(id) USING 'rm -rf' AS (x) FROM runs) SELECT * FROM y",
        "SELECT * FROM runs WHERE run IN (SELECT TRANSFORM(id) USING 'rm' AS (x) FROM runs)",
        "SET spark.sql.ansi.enabled=false",
        "ADD JAR x.jar",
    ],
)
def test_changes_are_refused(call: Call, statement: str) -> None:
    result = call("-e", statement)
    assert (result.code, result.out) == (1, "")
    # Spark 4.0 refuses scripts itself.
    assert re.search(r"audit sql only reads, and this statement \(|SQL Scripting is", result.err)


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("SELEC 1", "the statement failed: Syntax error at or near 'SELEC'"),
        ("SELECT nosuch FROM runs", "name `nosuch` cannot be resolved"),
        ("SELECT * FROM nosuch", "The table or view `nosuch` cannot be found"),
        ("SELECT CAST('x' AS int)", 'The value \'x\' of the type "STRING" cannot be cast to "INT"'),
        ("SELECT 1; SELECT 2", "Syntax error at or near 'SELECT': extra input 'SELECT'"),
    ],
)
def test_errors_are_one_sentence(call: Call, statement: str, reason: str) -> None:
    result = call("-e", statement)
    assert (result.code, result.out) == (1, "")
    assert reason in result.err
    assert len(result.err.splitlines()) == 1


def test_reading_commands_are_answered(call: Call) -> None:
    shown = {row["viewName"] for row in call("-e", "SHOW VIEWS;", "-o", "json").json}
    assert {"transactions", *(view.name for view in VIEWS)} <= shown
    assert "p99_ms" in call("-e", "DESCRIBE slowest_groups").out
    assert [*call("-e", "EXPLAIN SELECT 1", "-o", "json").json[0]] == ["plan"]


def test_statements_come_from_stdin(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["\n", "SELECT 1\n", "AS a;\n", "SELECT 2 AS b"]
    monkeypatch.setattr("sys.stdin", _Lines(lines))
    result = call("-o", "ndjson")
    assert [json.loads(line) for line in result.out.splitlines()] == [{"a": 1}, {"b": 2}]
    monkeypatch.setattr("sys.stdin", _Lines(["SELEC;\n", "SELECT 1;\n"]))
    assert (call().code, call().out) == (1, "")


def test_prompt_goes_on_after_an_error(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["SELEC;", "SELECT", "1 AS a;"])
    monkeypatch.setattr("sys.stdin", _Lines([], terminal=True))
    monkeypatch.setattr("builtins.input", lambda prompt: _next(typed))
    result = call("-o", "ndjson")
    assert (result.code, result.out) == (0, '{"a": 1}\n\n')
    assert "the statement failed: Syntax error" in result.err


class _Lines(list[str]):
    def __init__(self, lines: list[str], *, terminal: bool = False) -> None:
        super().__init__(lines)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def _next(typed: Iterator[str]) -> str:
    for line in typed:
        return line
    raise EOFError


def test_statements_end_with_a_semicolon() -> None:
    assert list(statements(["a", "b ; ", " ", "c;"])) == ["a\nb ; \n", "c;\n"]


def test_missing_tables_are_named(call: Call, tmp_path: Path) -> None:
    result = call("--out", tmp_path, "-e", "SELECT 1")
    assert (result.code, result.out) == (1, "")
    assert f"there are no tables in {tmp_path}: run `txbroker audit run` first" in result.err


def test_broken_file_is_one_sentence(spark: SparkSession, tmp_path: Path) -> None:
    store = new_store(spark, tmp_path, "parquet")
    add(store, spark, "1", settled("a", FIRST, "1"))
    next(Path(store.out).glob("transactions/*/*.parquet")).write_bytes(b"half")
    store.read(TRANSACTIONS).createOrReplaceTempView("broken")
    with pytest.raises(
        QueryFailed, match="the statement failed: Encountered error while reading file"
    ):
        ask(spark, "SELECT id FROM broken", 1)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_catalogue_shows_tables_and_views(tmp_path: Path) -> None:
    """In Hive's catalogue in Derby; days that came later show after the next registration."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.catalogue_main", str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False, env=environment(),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "1\n2\n"), done.stderr


def test_catalogue_needs_a_metastore(call: Call) -> None:
    result = call("--catalog", "shop")
    assert (result.code, result.out) == (1, "")
    assert "--catalog needs a Hive metastore: name it with --conf" in result.err
