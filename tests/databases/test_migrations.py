"""Migrations of tables that an older txbroker created, on real databases: a second one, which the
tests give; concurrent ones, killed ones, and a login without rights."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from tests.databases.callers import ASYNC_DRIVERS, engine, engine_url
from tests.databases.places import Place, connect, django_alias, run, sqlite_place
from tests.kit.database_servers import DatabaseServer
from tests.kit.processing import Doors
from tests.kit.until import unique
from txbroker.cli.main import cli
from txbroker.consumer import Consumer, InDatabase
from txbroker.core.records import Message
from txbroker.databases import Barrier, Inbox, SqliteBarrier, from_django, from_sqlalchemy, from_url
from txbroker.databases.database import TABLE_SETS, DatabaseUnavailable
from txbroker.databases.dialect import SQLITE, Dialect
from txbroker.databases.outbox.leases import Leases
from txbroker.databases.outbox.table import outbox_tables
from txbroker.databases.tables import INBOX, TableSet
from txbroker.errors import ConfigurationError
from txbroker.relay import Outbox, Relay
from txbroker.testing.memory import MemoryKafka

KINDS = [
    "sqlite",
    pytest.param("postgres_server", marks=pytest.mark.full),
    pytest.param("mariadb_server", marks=pytest.mark.full),
]
SERVERS = [
    pytest.param(name, marks=pytest.mark.full) for name in ("postgres_server", "mariadb_server")
]
SETS = (*TABLE_SETS, outbox_tables(""))  # also those of outboxes without a name
OLDER = "of version 1; this txbroker uses version 2: run `txbroker databases migrate URL`"
NEWER = "of version 2; this txbroker uses version 1: use the newer txbroker"


def added(dialect: Dialect, table: str) -> str:
    """Return SQL that adds a column; it can be repeated where SQL has words for that."""
    words = "" if dialect is SQLITE else "IF NOT EXISTS "
    return f"ALTER TABLE {table} ADD COLUMN {words}note {dialect.key}"


def second(tables: TableSet) -> Callable[[Dialect], Iterator[str]]:
    """Return a second migration: a column, and a row that only its first run inserts."""

    def statements(dialect: Dialect) -> Iterator[str]:
        yield added(dialect, tables.names[-1])
        yield f"CREATE TABLE IF NOT EXISTS {tables.name}_runs (number {dialect.whole})"
        yield f"INSERT INTO {tables.name}_runs VALUES (2)"

    return statements


@pytest.fixture
def upgraded() -> Iterator[Callable[[], None]]:
    """Returns a function that upgrades txbroker: each set of tables gets a second migration."""

    def upgrade() -> None:
        for tables in SETS:
            structs.force_setattr(tables, "migrations", (*tables.migrations, second(tables)))

    yield upgrade
    for tables in SETS:
        structs.force_setattr(tables, "migrations", tables.migrations[:1])


@pytest.fixture(params=KINDS)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A database with all tables of this version."""
    if request.param == "sqlite":
        return with_all_tables(sqlite_place(tmp_path))
    server: DatabaseServer = request.getfixturevalue(request.param)
    return with_all_tables(Place(server.create_database()))


def with_all_tables(place: Place) -> Place:
    for tables in TABLE_SETS:
        place.database.create(tables)
    return place


def versions(place: Place) -> list[int]:
    return [place.select(f"SELECT version FROM {each.versioned}")[0][0] for each in TABLE_SETS]


def columns(place: Place, table: str) -> set[str]:
    names = place.dialect.columns.replace("?", f"'{table}'")
    return {row[0] for row in place.select(names)}


def runs(place: Place) -> list[list[tuple[Any, ...]]]:
    return [place.select(f"SELECT number FROM {each.name}_runs") for each in TABLE_SETS]


def test_command_migrates_all_tables(old: Place, upgraded: Callable[[], None]) -> None:
    nothing = CliRunner().invoke(cli, ["databases", "migrate", old.url])
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert "has no older txbroker tables" in nothing.stderr
    upgraded()
    dry = CliRunner().invoke(cli, ["databases", "migrate", old.url, "--dry-run"])
    printed = dry.stdout.split(";\n")[:-1]
    assert "UPDATE txbroker_schema SET version = 2" in printed
    assert (dry.exit_code, len(printed), versions(old)) == (0, 8, [1, 1])
    done = CliRunner().invoke(cli, ["databases", "migrate"], env={"TXBROKER_DATABASE_URL": old.url})
    assert (done.exit_code, done.stdout) == (0, ""), done.output
    assert "tables are migrated" in done.stderr
    assert (versions(old), runs(old)) == ([2, 2], [[(2,)], [(2,)]])
    assert old.database.migrate() == []
    for tables in TABLE_SETS:
        assert "note" in columns(old, tables.names[-1])
        old.database.prepare(tables)


def test_printed_sql_migrates_the_tables(old: Place, upgraded: Callable[[], None]) -> None:
    upgraded()
    for sql in old.database.migrate(dry_run=True):
        old.execute(sql)
    assert (versions(old), old.database.migrate()) == ([2, 2], [])


def test_new_tables_have_all_migrations(
    old: Place, upgraded: Callable[[], None], tmp_path: Path
) -> None:
    """`create` restores a table that was dropped, and changes no older one."""
    upgraded()
    with pytest.raises(ConfigurationError, match=OLDER):
        old.database.create()
    assert versions(old) == [1, 1]
    old.database.migrate()
    old.execute(f"DROP TABLE {INBOX}")
    for _ in range(2):
        with_all_tables(old)
    assert "note" in columns(old, INBOX)
    (tmp_path / "new").mkdir()
    new = with_all_tables(sqlite_place(tmp_path / "new"))
    assert (versions(new), columns(new, INBOX)) == ([2, 2], columns(old, INBOX))


def test_tables_that_do_not_exist_are_not_created(
    tmp_path: Path, upgraded: Callable[[], None]
) -> None:
    place = sqlite_place(tmp_path)
    place.database.create()
    upgraded()
    place.database.migrate()
    assert place.select("SELECT version FROM txbroker_schema") == [(2,)]
    assert columns(place, "txbroker_relay") == set()


@pytest.mark.parametrize(
    ("change", "version"),
    [("DELETE FROM txbroker_schema", "none"), ("UPDATE txbroker_schema SET version = 0", "0")],
)
def test_tables_of_no_version_are_refused(old: Place, change: str, version: str) -> None:
    old.execute(change)
    for use in (from_url(old.url).prepare, old.database.migrate):
        with pytest.raises(ConfigurationError, match=f"of version {version};.* restore the rows"):
            use()


def test_file_of_another_format_is_explained(tmp_path: Path) -> None:
    (tmp_path / "shop.db").write_text("no database, but long enough to be read as one")
    with pytest.raises(DatabaseUnavailable, match=r"file is not a database: .*correct its address"):
        from_url(f"sqlite:///{tmp_path}/shop.db").migrate()


async def test_other_versions_are_refused_before_the_start(
    old: Place, upgraded: Callable[[], None]
) -> None:
    async def refused(sentence: str) -> None:
        database = from_url(old.url)
        with closing(old.connect()) as connection:
            for use in (
                lambda: Barrier(database).record(connection, "a"),
                lambda: Barrier(database).check("a"),
                lambda: Inbox(database).accept(connection, "a"),
                lambda: Outbox(database).add(connection, Message("payments")),
                lambda: (
                    SqliteBarrier(old.url[10:]) if old.dialect is SQLITE else database.prepare()
                ),
            ):
                with pytest.raises(ConfigurationError, match=sentence):
                    use()
        kafka = Doors.to(MemoryKafka())
        consumer = Consumer(
            kafka, group="g", topics=["orders"], mode="exactly-once", store=InDatabase(database)
        )
        with pytest.raises(ConfigurationError, match=sentence):
            await consumer.start()
        with pytest.raises(ConfigurationError, match=sentence):
            await Relay(Outbox(database), kafka).start()
        shown = CliRunner().invoke(cli, ["outbox", "list", old.url])
        assert sentence in str(shown.exception)

    upgraded()
    await refused(OLDER)
    await old.database.migrate_async()
    for tables in SETS:
        structs.force_setattr(tables, "migrations", tables.migrations[:1])
    await refused(NEWER)
    with pytest.raises(ConfigurationError, match=NEWER):
        old.database.migrate()


async def test_engines_migrate(old: Place, upgraded: Callable[[], None]) -> None:
    upgraded()
    assert len(from_sqlalchemy(engine(old)).migrate()) == 8
    for driver in (name for name, kind in ASYNC_DRIVERS.items() if kind == old.dialect.name):
        for each in TABLE_SETS:
            old.execute(f"UPDATE {each.versioned} SET version = 1")
        if old.dialect is SQLITE:
            for each in TABLE_SETS:
                old.execute(f"ALTER TABLE {each.names[-1]} DROP COLUMN note")
        database = from_sqlalchemy(create_async_engine(engine_url(old, driver), poolclass=NullPool))
        assert len(await database.migrate_async()) == 8
    assert versions(old) == [2, 2]


def test_concurrent_migrations_run_once(old: Place, upgraded: Callable[[], None]) -> None:
    upgraded()
    with ThreadPoolExecutor(4) as threads:
        databases = [from_url(old.url) for _ in range(4)]
        executed = list(threads.map(lambda database: len(database.migrate()), databases))
    assert sorted(executed) == [0, 0, 0, 8]
    assert (versions(old), runs(old)) == ([2, 2], [[(2,)], [(2,)]])


KILLED = """
import os, signal, sys
from msgspec import structs
from tests.databases.test_migrations import added
from txbroker.databases import from_url
from txbroker.databases.database import TABLE_SETS

def second(dialect):
    yield added(dialect, "txbroker_inbox")
    os.kill(os.getpid(), signal.SIGKILL)

structs.force_setattr(TABLE_SETS[0], "migrations", (*TABLE_SETS[0].migrations, second))
from_url(sys.argv[1]).migrate()
"""


def test_killed_migration_is_repeated(old: Place, upgraded: Callable[[], None]) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, old.url], check=False)
    assert killed.returncode == -signal.SIGKILL
    upgraded()
    # MariaDB commits each statement; the version says that the migration is not complete.
    assert ("note" in columns(old, INBOX)) is (old.dialect.name == "mariadb")
    assert versions(old) == [1, 1]
    with pytest.raises(ConfigurationError, match=OLDER):
        old.database.prepare()
    assert len(old.database.migrate()) == 8
    assert (versions(old), runs(old)) == ([2, 2], [[(2,)], [(2,)]])
    old.database.prepare()


@pytest.mark.parametrize("name", SERVERS)
def test_login_without_rights_changes_nothing(
    request: pytest.FixtureRequest, name: str, upgraded: Callable[[], None]
) -> None:
    server: DatabaseServer = request.getfixturevalue(name)
    place, user = with_all_tables(Place(server.create_database())), unique("user").replace("-", "_")
    database = place.url.rpartition("/")[2]
    with closing(connect(f"{server.admin_url.rpartition('/')[0]}/{database}")) as admin:
        if name == "postgres_server":
            run(admin, f"CREATE ROLE {user} LOGIN")
            run(admin, f"GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO {user}")
        else:
            run(admin, f"CREATE USER {user}@'127.0.0.1'")
            run(admin, f"GRANT SELECT, INSERT, UPDATE ON {database}.* TO {user}@'127.0.0.1'")
        admin.commit()
    upgraded()
    url = f"{place.url.partition('://')[0]}://{user}@{place.url.rpartition('@')[2]}"
    done = CliRunner().invoke(cli, ["databases", "migrate", url])
    assert "migrate them as their owner" in str(done.exception)
    assert (versions(place), "note" in columns(place, INBOX)) == ([1, 1], False)
    assert len(place.database.migrate()) == 8


def test_django_has_a_migration_for_each_version() -> None:
    folder = Path(import_module("txbroker.databases.django.migrations").__file__ or "").parent
    assert len(list(folder.glob("0*.py"))) >= max(tables.version for tables in TABLE_SETS)


def test_django_migrates_what_exists(old: Place, upgraded: Callable[[], None]) -> None:
    """A later migration of Django's calls the same function."""
    from django.core.management import call_command
    from django.db import connections
    from django.db.migrations.state import ProjectState

    alias = django_alias(old)
    call_command("migrate", database=alias, verbosity=0)
    assert versions(old) == [1, 1]
    upgraded()
    with pytest.raises(ConfigurationError, match=OLDER):
        from_django(alias).prepare()
    first = import_module("txbroker.databases.django.migrations.0001_tables")
    for _ in range(2):
        with connections[alias].schema_editor(atomic=True) as editor:
            first.Migration("0002_tables", "txbroker").apply(ProjectState(), editor)
    assert (versions(old), runs(old)) == ([2, 2], [[(2,)], [(2,)]])
    assert len(old.database.migrate()) == 0  # Django's connection holds no lock
    from_django(alias).prepare()
    connections[alias].close()


def test_new_shards_have_the_migrated_version(old: Place, upgraded: Callable[[], None]) -> None:
    upgraded()
    old.database.migrate()
    old.execute("UPDATE txbroker_relay SET owner = 'a'")
    assert old.database.apart(Leases(old.dialect, "a", 10.0).divide(4)) is True
    assert old.select("SELECT shard, version FROM txbroker_relay ORDER BY shard") == [
        (shard, 2) for shard in range(4)
    ]
    old.database.prepare(TABLE_SETS[1])
