"""Runs `txbroker audit sql`: one statement, or a prompt."""

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import click
from msgspec import structs

from txbroker.cli.audit.run import session_of
from txbroker.cli.output import Row, TableColumn, json_text, show_rows
from txbroker.cli.run import CommandFailed
from txbroker.errors import TxbrokerError
from txbroker.spark.session import SparkSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PROMPT = "audit> "


def run_sql(
    spark: SparkSettings, out: str, statement: str | None, output: str, limit: int, catalog: str
) -> None:
    """Answer a statement, or those of stdin.

    Args:
        limit: maximum number of rows.
        catalog: register the tables in this database of the catalogue; empty: do not.
    """
    if spark.server:
        raise CommandFailed(
            "audit sql does not run over Spark Connect, where no plan shows whether a statement "
            "only reads: use --master, without SPARK_REMOTE, or read the tables with the server's "
            "own SQL"
        )
    conf = {"spark.sql.catalogImplementation": "hive"} if catalog else {}
    with session_of(structs.replace(spark, conf={**conf, **spark.conf})) as (session, _):
        from txbroker.spark.query.views import open_tables, register
        from txbroker.spark.tables.store import open_store

        store = open_store(session, out)
        if not store.exists:
            raise CommandFailed(f"there are no tables in {out}: run `txbroker audit run` first")
        if catalog:
            register(session, store, catalog)
            click.echo(f"Registered tables and views in the database {catalog}.", err=True)
        else:
            open_tables(session, store)
        if statement is not None:
            _answer(session, statement, output, limit)
        elif sys.stdin.isatty():
            _converse(session, output, limit)
        else:
            for each in statements(sys.stdin):
                _answer(session, each, output, limit)


def statements(lines: Iterable[str]) -> Iterator[str]:
    """Yield the statements in lines: each ends with a line that ends in `;`, or with the input."""
    held = ""
    for line in lines:
        held = f"{held}{line}\n" if held or line.strip() else ""
        if held.rstrip().endswith(";"):
            yield held
            held = ""
    if held:
        yield held


def _converse(session: "SparkSession", output: str, limit: int) -> None:
    """Answer typed statements until the end of input; an error or Ctrl-C ends a statement only."""
    import readline  # noqa: F401 - gives the prompt its line editing and history

    click.echo(
        "Statements end with `;`. SHOW TABLES lists tables and views; Ctrl-D ends.", err=True
    )
    for statement in statements(_typed()):
        try:
            _answer(session, statement, output, limit)
        except TxbrokerError as error:
            click.echo(str(error), err=True)
        except KeyboardInterrupt:
            click.echo("The statement was cancelled.", err=True)


def _typed() -> Iterator[str]:
    while True:
        try:
            yield input(_PROMPT)
        except EOFError:
            click.echo("")
            return


def _answer(session: "SparkSession", statement: str, output: str, limit: int) -> None:
    from txbroker.spark.query.statement import ask

    answer = ask(session, statement, limit)
    columns = [TableColumn(name.upper(), partial(_shown, name)) for name in answer.columns]
    show_rows(answer.rows, columns, output, "No rows.")
    if answer.more:
        click.echo(f"There are more than {limit:,} rows; --limit shows more.", err=True)


def _shown(name: str, row: Row) -> object:
    """Return a value as a table and CSV show it: nested ones as JSON."""
    value = row[name]
    return json_text(value) if isinstance(value, dict | list) else value
