"""Tables: created once by several processes, checked before their first use, on real databases."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from tests.databases.places import Place, connect, django_alias, run, sqlite_place
from tests.kit.database_servers import DatabaseServer
from tests.kit.until import free_ports, unique
from txbroker.cli.main import cli
from txbroker.core.records import Decision
from txbroker.databases import (
    Barrier,
    Database,
    DatabaseUnavailable,
    Inbox,
    MariaDB,
    Postgres,
    SQLite,
    from_django,
    from_url,
)
from txbroker.databases.dialect import DIALECTS
from txbroker.databases.tables import NAMES
from txbroker.errors import ConfigurationError, TxbrokerError

KINDS = [
    "sqlite",
    pytest.param("postgres_server", marks=pytest.mark.full),
    pytest.param("mariadb_server", marks=pytest.mark.full),
]


@pytest.fixture(params=KINDS)
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A database without tables."""
    if request.param == "sqlite":
        return sqlite_place(tmp_path)
    server: DatabaseServer = request.getfixturevalue(request.param)
    return Place(server.create_database())


def tables(place: Place) -> set[str]:
    schema = "DATABASE()" if place.dialect.name == "mariadb" else "'public'"
    sql = (
        "SELECT name FROM sqlite_master WHERE type = 'table'"
        if place.dialect.name == "sqlite"
        else f"SELECT table_name FROM information_schema.tables WHERE table_schema = {schema}"
    )
    return {row[0] for row in place.select(sql) if str(row[0]).startswith("txbroker_")}


def versions(place: Place) -> list[Any]:
    return [row[0] for row in place.select("SELECT version FROM txbroker_schema")]


def test_several_processes_create_the_tables(empty: Place) -> None:
    with ThreadPoolExecutor(4) as threads:
        databases = [from_url(empty.url, create_tables=True) for _ in range(4)]
        assert list(threads.map(Database.prepare, databases)) == [None] * 4
    assert (tables(empty), versions(empty)) == (set(NAMES), [1])


async def test_first_use_creates_the_tables(empty: Place) -> None:
    assert await Barrier(empty.database).check_async("a") is Decision.ROLLBACK
    assert tables(empty) == set(NAMES)


async def test_missing_tables_are_reported(empty: Place) -> None:
    database = from_url(empty.url)
    barrier = Barrier(database)
    uses = [lambda: barrier.check("a"), lambda: barrier.forget(10**6), database.prepare]
    with closing(empty.connect()) as connection:
        uses += [lambda: barrier.record(connection, "a")]
        uses += [lambda: Inbox(database).accept(connection, "a")]
        for use in uses:
            with pytest.raises(ConfigurationError, match="txbroker databases create"):
                use()
    with pytest.raises(ConfigurationError, match="create_tables=True"):
        await barrier.check_async("a")
    await database.create_async()
    await database.prepare_async()
    assert versions(empty) == [1]


def test_tables_of_another_version_are_refused(empty: Place) -> None:
    empty.database.create()
    empty.execute("UPDATE txbroker_schema SET version = 7")
    with pytest.raises(ConfigurationError, match=r"version 7; .* version 1: use the newer"):
        Barrier(from_url(empty.url)).check("a")


@pytest.mark.parametrize("name", ["postgres_server", "mariadb_server"])
@pytest.mark.full
def test_missing_rights_are_reported(request: pytest.FixtureRequest, name: str) -> None:
    server: DatabaseServer = request.getfixturevalue(name)
    place, user = Place(server.create_database()), unique("user").replace("-", "_")
    database = place.url.rpartition("/")[2]
    place.database.create()
    with closing(connect(f"{server.admin_url.rpartition('/')[0]}/{database}")) as admin:
        if name == "postgres_server":
            run(admin, f"CREATE ROLE {user} LOGIN")
            run(admin, f"GRANT SELECT ON txbroker_schema, txbroker_barrier TO {user}")
        else:
            run(admin, f"CREATE USER {user}@'127.0.0.1'")
            for table in ("txbroker_schema", "txbroker_barrier"):
                run(admin, f"GRANT SELECT ON {database}.{table} TO {user}@'127.0.0.1'")
        admin.commit()
    url = f"{place.url.partition('://')[0]}://{user}@{place.url.rpartition('@')[2]}"
    limited = Place(url)
    for use in (
        lambda connection: Barrier(limited.database).record(connection, "a"),
        lambda connection: Inbox(limited.database).accept(connection, "a"),
        lambda connection: Barrier(limited.database).check("a"),
    ):
        with (
            closing(limited.connect()) as connection,
            pytest.raises(ConfigurationError, match="grant this user SELECT, INSERT"),
        ):
            use(connection)


@pytest.mark.full
def test_table_without_transactions_is_refused(mariadb_server: DatabaseServer) -> None:
    place = Place(mariadb_server.create_database())
    place.database.create()
    place.execute("ALTER TABLE txbroker_barrier ENGINE=MyISAM")
    with (
        closing(place.connect()) as connection,
        pytest.raises(ConfigurationError, match=r"MyISAM.*ENGINE=InnoDB"),
    ):
        Barrier(place.database).record(connection, "a")


def test_migration_creates_and_drops_the_tables(empty: Place) -> None:
    from django.core.management import call_command

    alias = django_alias(empty)
    with pytest.raises(ConfigurationError, match=r"manage.py migrate"):
        from_django(alias).prepare()
    call_command("migrate", database=alias, verbosity=0)
    assert (tables(empty), versions(empty)) == (set(NAMES), [1])
    from_django(alias).prepare()
    call_command("migrate", "txbroker", "zero", database=alias, verbosity=0)
    assert tables(empty) == set()


# --- connections that do not fit -------------------------------------------------------------


@pytest.mark.full
def test_connection_of_another_kind_is_refused(
    postgres_place: Place, mariadb_place: Place, tmp_path: Path
) -> None:
    file = sqlite_place(tmp_path)
    places = (postgres_place, mariadb_place, file)
    for barrier_place in places:
        for other in {place.url: place for place in places if place is not barrier_place}.values():
            with (
                closing(other.connect()) as connection,
                pytest.raises(ConfigurationError, match="does not belong to"),
            ):
                Barrier(barrier_place.database).record(connection, "a")
    for thing in (object(), "shop.db", None):
        with pytest.raises(ConfigurationError, match="is no connection"):
            Barrier(file.database).record(thing, "a")


async def test_plain_connection_is_refused_where_it_is_awaited(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    with (
        closing(place.connect()) as connection,
        pytest.raises(ConfigurationError, match="method without _async in a thread"),
    ):
        await Barrier(place.database).record_async(connection, "a")


def test_connection_to_another_file_is_refused(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    (tmp_path / "other").mkdir()
    other = sqlite_place(tmp_path / "other")
    for url in (other.url, "sqlite:///:memory:"):
        with closing(connect(url)) as connection:
            with pytest.raises(ConfigurationError, match="another database than"):
                Barrier(place.database).record(connection, "a")
            with pytest.raises(ConfigurationError, match="another database than"):
                Inbox(place.database).accept(connection, "a")


@pytest.mark.full
def test_pipeline_is_refused(postgres_place: Place) -> None:
    """Its INSERT has no result yet: it would count as a repeat."""
    with (
        psycopg.connect(postgres_place.url) as connection,
        connection.pipeline(),
        pytest.raises(ConfigurationError, match="pipeline"),
    ):
        Inbox(postgres_place.database).accept(connection, "a")


# --- URLs and the command --------------------------------------------------------------------


def test_url_names_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = {
        "sqlite:///shop.db": SQLite,
        f"sqlite:///{tmp_path}/a%20b.db": SQLite,
        "postgresql://u:secret@h:1/d": Postgres,
        "postgres:///d": Postgres,
        "mariadb://u:secret@h:1/d": MariaDB,
        "mysql://h/d": MariaDB,
    }
    databases = {url: from_url(url, create_tables=True) for url in kinds}
    assert {url: type(database) for url, database in databases.items()} == kinds
    assert all(database.create_tables for database in databases.values())
    assert not any("secret" in database.name for database in databases.values())
    for url in list(kinds)[:2]:
        databases[url].prepare()
    assert {path.name for path in tmp_path.iterdir()} == {"shop.db", "a b.db"}


BAD_URLS = {
    "": "one of the forms",
    "shop.db": "one of the forms",
    "oracle://u:secret@h/d": "one of the forms",
    "sqlite://shop.db": "one of the forms",
    "sqlite:///": "one of the forms",
    "sqlite:///:memory:": "needs a file",
    "postgresql://u:secret%zz@h/d": "malformed",
    "mariadb://u:secret@h:x/d": "malformed",
}


@pytest.mark.parametrize(("url", "problem"), BAD_URLS.items())
def test_bad_url_is_refused(url: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem) as refused:
        from_url(url)
    assert "secret" not in str(refused.value)
    done = CliRunner().invoke(cli, ["databases", "create", url])
    assert (done.exit_code, "secret" in done.output) == (2, False)
    assert problem in done.output


@pytest.mark.parametrize(("module", "extra"), [("psycopg", "postgres"), ("pymysql", "mariadb")])
def test_missing_driver_is_reported(
    module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'txbroker\[{extra}\]'"):
        from_url({"psycopg": "postgresql", "pymysql": "mariadb"}[module] + "://h/d")


@pytest.mark.parametrize("scheme", ["postgresql", "mariadb"])
def test_unreachable_server_is_reported(scheme: str) -> None:
    url = f"{scheme}://u:secret@127.0.0.1:{free_ports(1)[0]}/shop"
    for use in (from_url(url).prepare, lambda: Barrier(from_url(url)).check("a")):
        with pytest.raises(DatabaseUnavailable, match="shop: ") as failed:
            use()
        assert "secret" not in str(failed.value)
    done = CliRunner().invoke(cli, ["databases", "create", url])
    assert "start the database, or correct its address" in str(done.exception)


def test_command_creates_the_tables(empty: Place) -> None:
    dry = CliRunner().invoke(cli, ["databases", "create", empty.url, "--dry-run"])
    assert (dry.exit_code, tables(empty)) == (0, set())
    for _ in range(2):
        done = CliRunner().invoke(
            cli, ["databases", "create"], env={"TXBROKER_DATABASE_URL": empty.url}
        )
        assert (done.exit_code, done.stdout) == (0, ""), done.output
        assert "only-for-tests" not in done.output
    assert (tables(empty), versions(empty)) == (set(NAMES), [1])


def test_printed_sql_creates_the_tables(empty: Place) -> None:
    dry = CliRunner().invoke(cli, ["databases", "create", empty.url, "--dry-run"])
    for sql in dry.stdout.split(";\n")[:-1]:
        empty.execute(sql)
    from_url(empty.url).prepare()


def test_missing_database_is_reported(empty: Place) -> None:
    url = f"{empty.url}/nowhere/x.db" if empty.dialect.name == "sqlite" else f"{empty.url}nowhere"
    done = CliRunner().invoke(cli, ["databases", "create", url])
    assert isinstance(done.exception, DatabaseUnavailable | ConfigurationError)
    assert "nowhere" in str(done.exception)


def test_dialects_use_no_percent_signs() -> None:
    """Drivers with `%s` would read them."""
    for dialect in DIALECTS.values():
        texts = [value for value in dialect.__struct_fields__ if value != "fault_of"]
        assert not any("%" in str(getattr(dialect, name)) for name in texts)


def test_base_database_takes_any_driver(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    database = Database(lambda: connect_autocommit(place), "sqlite", style="qmark", name="mine")
    database.create()
    assert Barrier(database).check("a") is Decision.ROLLBACK
    with pytest.raises(TxbrokerError, match="mine takes plain functions"):
        database_open_async(database)
    with pytest.raises(ConfigurationError, match="no tables for 'oracle': use PostgreSQL"):
        Database(lambda: None, "oracle", style="named", name="mine")


def connect_autocommit(place: Place) -> Any:
    connection = connect(place.url)
    connection.isolation_level = None
    return connection


def database_open_async(database: Database) -> None:
    database.open_async().send(None)
