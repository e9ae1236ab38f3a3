"""The tables of an outbox: created, checked, and written by programs in other languages."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from tests.databases.places import Place, connect, run, sqlite_place
from tests.kit.database_servers import DatabaseServer, PostgresServer
from tests.kit.until import unique
from tests.relay.shops import message, rows
from txbroker.cli.main import cli
from txbroker.databases import Database, from_django, from_url
from txbroker.databases.outbox.operations import to_message
from txbroker.databases.outbox.table import ASLEEP, COLUMNS
from txbroker.errors import ConfigurationError
from txbroker.relay.outbox import Outbox


@pytest.fixture(params=["sqlite", "postgres_server", "mariadb_server"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A database without tables."""
    if request.param == "sqlite":
        return sqlite_place(tmp_path)
    server: DatabaseServer = request.getfixturevalue(request.param)
    return Place(server.create_database())


def names(place: Place) -> list[tuple[Any, ...]]:
    return place.select("SELECT shard, relay, shards FROM txbroker_relay")


def test_several_processes_create_the_tables(empty: Place) -> None:
    with ThreadPoolExecutor(4) as threads:
        outboxes = [Outbox(from_url(empty.url, create_tables=True)) for _ in range(4)]

        def use(outbox: Outbox) -> None:
            outbox.prepare(message("a"))

        assert list(threads.map(use, outboxes)) == [None] * 4
    (row,) = names(empty)
    assert (row[0], row[1][:7], len(row[1]), row[2]) == (0, "outbox-", 15, 1)
    assert len(rows(empty)) == 4
    # The tables of consumers are another set.
    with pytest.raises(ConfigurationError, match="txbroker databases create"):
        from_url(empty.url).prepare()


def test_command_creates_the_tables(empty: Place) -> None:
    create = ["outbox", "create", empty.url, "--name", "shop.1"]
    dry = CliRunner().invoke(cli, [*create, "--dry-run"])
    with pytest.raises(ConfigurationError, match="txbroker outbox create URL"):
        Outbox(from_url(empty.url)).prepare(message("a"))
    for _ in range(2):
        for sql in dry.stdout.split(";\n")[:-1]:
            empty.execute(sql)
        done = CliRunner().invoke(cli, create)
        assert (done.exit_code, done.stdout) == (0, ""), done.output
    assert names(empty) == [(0, "shop.1", 1)]
    other = CliRunner().invoke(cli, ["outbox", "create", empty.url, "--name", "b"])
    assert "has the name 'shop.1', not 'b': leave the name out" in str(other.exception)
    with pytest.raises(ConfigurationError, match="not 'b'"):
        Outbox(from_url(empty.url), name="b").prepare(message("a"))


def test_sqlite_tables_exist_before_the_first_transaction(tmp_path: Path) -> None:
    """It has the only write lock, so another connection could not create them."""
    outbox = Outbox(from_url(f"sqlite:///{tmp_path}/shop.db", create_tables=True))
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE orders (id)")
        with connection:
            connection.execute("INSERT INTO orders VALUES (42)")
            outbox.add(connection, message("42"))
        connection.execute("BEGIN IMMEDIATE")
        late = Outbox(from_url(f"sqlite:///{tmp_path}/shop.db", create_tables=True))
        late.add(connection, message("43"))
        connection.commit()
        (count,) = connection.execute("SELECT count(*) FROM txbroker_outbox").fetchone()
    assert count == 2


CHANGES = (
    (
        "UPDATE txbroker_relay SET version = 7",
        "version 7; this txbroker uses version 1: use the newer txbroker that migrated them",
    ),
    ("UPDATE txbroker_relay SET version = 1", ""),
    ("ALTER TABLE txbroker_relay DROP COLUMN wanted_by", "txbroker_relay has no column wanted_by"),
    (
        "ALTER TABLE txbroker_relay ADD COLUMN wanted_by {blob}",
        "table txbroker_relay has column wanted_by of type (blob|bytea|longblob) instead of",
    ),
    (
        "ALTER TABLE txbroker_outbox DROP COLUMN cause",
        "table txbroker_outbox has no column cause: correct it as `txbroker outbox create URL",
    ),
    ("DELETE FROM txbroker_relay", "version none; .* restore the rows of txbroker_relay"),
    ("DROP TABLE txbroker_relay", "txbroker outbox create URL"),
)
"""Each after the ones before."""


def test_tables_that_do_not_fit_are_refused(empty: Place) -> None:
    empty.database.prepare(Outbox(empty.database).tables)
    for sql, problem in CHANGES:
        empty.execute(sql.format(blob=empty.dialect.blob))
        outbox = Outbox(from_url(empty.url))
        if not problem:
            outbox.prepare(message("a"))
            continue
        with closing(empty.connect()) as connection:
            for use in (
                lambda: outbox.add(connection, message("a")),  # noqa: B023
                lambda: outbox.prepare(message("a")),  # noqa: B023
                lambda: outbox.transaction(connection, message("a")).__enter__(),  # noqa: B023
            ):
                with pytest.raises(ConfigurationError, match=problem):
                    use()


def test_table_missing_later_is_reported(kind: Place, outbox: Outbox) -> None:
    """Its columns were checked before."""
    outbox.prepare(message("a"))
    kind.execute("ALTER TABLE txbroker_outbox RENAME TO away")
    try:
        with (
            closing(kind.connect()) as connection,
            pytest.raises(ConfigurationError, match="txbroker outbox create URL"),
        ):
            outbox.add(connection, message("a"))
    finally:
        kind.execute("ALTER TABLE away RENAME TO txbroker_outbox")


def test_name_must_be_one_of_kafka(tmp_path: Path) -> None:
    for name in ("a b", "ü", "x" * 201, "a'b", 7):
        with pytest.raises(ConfigurationError, match="has at most 200 letters, digits"):
            Outbox(from_url(f"sqlite:///{tmp_path}/shop.db"), name=name)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="give a database"):
        Outbox("shop.db")  # type: ignore[arg-type]


def test_missing_rights_are_reported(postgres_server: PostgresServer) -> None:
    place, user = Place(postgres_server.create_database()), unique("user").replace("-", "_")
    Outbox(place.database).create()
    admin_url = f"{postgres_server.admin_url.rpartition('/')[0]}/{place.url.rpartition('/')[2]}"
    with closing(connect(admin_url)) as admin:
        run(admin, f"CREATE ROLE {user} LOGIN")
        run(admin, f"GRANT SELECT ON txbroker_relay, txbroker_outbox TO {user}")
        admin.commit()
    limited = Place(f"postgresql://{user}@{place.url.rpartition('@')[2]}")
    with (
        closing(limited.connect()) as connection,
        pytest.raises(ConfigurationError, match="grant this user SELECT, INSERT"),
    ):
        Outbox(from_url(limited.url)).add(connection, message("a"))


def test_django_databases_have_outboxes(empty: Place) -> None:
    from tests.databases.places import django_alias

    database = from_django(django_alias(empty))
    with pytest.raises(ConfigurationError, match="txbroker outbox create URL"):
        Outbox(database).prepare(message("a"))
    CliRunner().invoke(cli, ["outbox", "create", empty.url])
    Outbox(database).prepare(message("a"))
    assert len(rows(empty)) == 1
    database.open().close()


# --- other languages -------------------------------------------------------------------------


def test_plain_sql_writes_rows(kind: Place, outbox: Outbox) -> None:
    """What docs/how-to/outbox.md promises to programs in any language."""
    with kind.transaction() as connection:
        for value in ("10 EUR", "20 EUR"):
            sql = (
                f"INSERT INTO txbroker_outbox (topic, message_value) VALUES ('payments', '{value}')"
            )
            run(connection, sql)
    with kind.transaction() as connection:
        run(connection, "INSERT INTO txbroker_outbox (topic, state) VALUES ('payments', 'UNKNOWN')")
    first, second, undecided = rows(kind)
    assert (first.state, undecided.state) == ("LOCAL_COMMIT", "UNKNOWN")
    assert first.position < second.position < undecided.position
    assert len({row.id for row in (first, second, undecided)}) == 3
    if kind.dialect.name == "postgresql":  # their transaction is their unit
        assert first.unit == second.unit != undecided.unit
    elif kind.dialect.name == "mariadb":
        assert "" < first.unit < second.unit < undecided.unit
    else:
        assert {first.unit, second.unit, undecided.unit} == {""}
    names = ", ".join(COLUMNS)
    row = dict(
        zip(
            COLUMNS,
            kind.select(f"SELECT {names} FROM txbroker_outbox ORDER BY position")[0],
            strict=True,
        )
    )
    assert to_message(row).value == b"10 EUR"
    (now_ms,) = kind.select(f"SELECT {kind.dialect.now_ms}")[0]
    assert 0 <= now_ms - row["created_at"] < 30_000
    # The rows take part in all that operators and services do.
    with kind.transaction() as connection:
        from txbroker.relay.outbox import Decision

        outbox.decide(connection, undecided.id, Decision.COMMIT)
    assert rows(kind)[-1].state == "LOCAL_COMMIT"


BAD_ROWS = {
    "state": {"state": "'DONE'"},
    "shard": {"shard": "16"},
    "deliver_at": {"deliver_at": "1"},
    "topic": {"topic": "NULL"},
    **{
        f"{name} {number}": {name: str(number)}
        for name in ("retries", "check_attempts", "next_at", "created_at", "changed_at")
        for number in (-1, 2**63 - 1, "'now'")
    },
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_impossible_row_is_refused(kind: Place, outbox: Outbox, bad: str) -> None:
    row = {"topic": "'payments'", **BAD_ROWS[bad]}
    with pytest.raises(Exception, match=f"{bad}|counts_times_in_range|bigint|integer"):
        kind.execute(
            f"INSERT INTO txbroker_outbox ({', '.join(row)}) VALUES ({', '.join(row.values())})"
        )
    assert rows(kind) == []


# --- PostgreSQL ------------------------------------------------------------------------------


@pytest.fixture
def listener(postgres_place: Place) -> Iterator[Any]:
    with closing(psycopg.connect(postgres_place.url, autocommit=True)) as connection:
        connection.execute("LISTEN txbroker_outbox")
        yield connection


def test_writers_notify_only_while_a_relay_sleeps(postgres_place: Place, listener: Any) -> None:
    """Also writers with another search_path."""
    outbox = Outbox(postgres_place.database)
    outbox.create()

    def notified(asleep: bool) -> int:
        lock = "pg_try_advisory_lock" if asleep else "pg_advisory_unlock"
        listener.execute(f"SELECT {lock}({ASLEEP})")
        with postgres_place.transaction() as connection:
            outbox.add(connection, message("a"))
        with postgres_place.transaction() as connection:
            run(connection, "SET search_path TO pg_catalog")
            run(connection, "INSERT INTO public.txbroker_outbox (topic) VALUES ('payments')")
        postgres_place.execute("NOTIFY txbroker_outbox, 'end'")
        count = 0
        for notification in listener.notifies():
            if notification.payload == "end":
                break
            count += 1
        return count

    assert [notified(True), notified(False), notified(True)] == [2, 0, 2]


# --- imports ---------------------------------------------------------------------------------


def test_service_imports_no_kafka_client() -> None:
    heavy = "aiokafka aiohttp structlog click pydantic prometheus_client sqlite_utils psycopg"
    code = (
        "import sys; import txbroker.relay; from txbroker.databases import SQLite; "
        f"print([name for name in '{heavy}'.split() if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_database_has_both_sets_of_tables(tmp_path: Path) -> None:
    database: Database = from_url(f"sqlite:///{tmp_path}/shop.db", create_tables=True)
    Outbox(database).prepare(message("a"))
    database.prepare()
    assert database.prepared == {"consuming", "outbox"}
