"""What `capture plan`, `apply` and `remove` do on PostgreSQL."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg
import pytest
from msgspec import structs

from tests.relay.capture.pg_world import PgWorld, captured
from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.postgres import Postgres
from txbroker.errors import ConfigurationError
from txbroker.relay.capture import postgres_setup
from txbroker.relay.capture.changes import CapturedTable
from txbroker.relay.capture.pg import facts as pgfacts
from txbroker.relay.capture.setup import StepState, refusals


async def to_do(pg: PgWorld) -> list[str]:
    """Return the SQL of the steps that are to do."""
    steps = await postgres_setup.plan(pg.mapping, pg.database)
    assert refusals(steps) == []
    return [step.sql for step in steps if step.state is StepState.TO_DO]


async def test_apply_does_what_plan_shows_and_remove_undoes_it(pg: PgWorld) -> None:
    planned = await to_do(pg)
    assert [sql.split()[:2] for sql in planned] == [
        ["CREATE", "PUBLICATION"],
        ["SELECT", f"pg_create_logical_replication_slot('{pg.slot}',"],
    ]
    assert await to_do(pg) == planned, "a plan changes nothing"
    await pg.apply()
    assert await to_do(pg) == []
    removed = await postgres_setup.remove(pg.mapping, pg.database)
    assert {step.state for step in removed} == {StepState.DONE}
    assert await to_do(pg) == planned
    removed = await postgres_setup.remove(pg.mapping, pg.database)
    assert {step.state for step in removed} == {StepState.DONE}


async def test_the_publication_follows_the_mapping(pg: PgWorld) -> None:
    pg.execute('CREATE TABLE "Odd ""name" (id int PRIMARY KEY)')
    await pg.apply()
    pg.mapping.tables = (captured('Odd "name', operations=("insert",)), captured("orders"))
    (sql,) = await to_do(pg)
    assert sql.startswith("ALTER PUBLICATION")
    await pg.apply()
    assert await to_do(pg) == []
    pg.mapping.tables = (captured('Odd "name', operations=("insert",)),)
    await pg.apply()
    published = f"SELECT tablename FROM pg_publication_tables WHERE pubname = '{pg.slot}'"
    assert pg.execute(published) == [('Odd "name',)]
    sent = f"SELECT pubinsert, pubupdate FROM pg_publication WHERE pubname = '{pg.slot}'"
    assert pg.execute(sent) == [(True, False)]
    pg.mapping.tables = ()  # only emitted messages
    await pg.apply()
    assert await to_do(pg) == []
    assert pg.execute(published) == []


async def test_keys_are_in_the_order_of_the_primary_key(pg: PgWorld) -> None:
    pg.execute(
        "CREATE TABLE two (a int, b int, c int, PRIMARY KEY (c, a))",
        "CREATE TABLE none (a int)",
    )
    pg.mapping.tables = [captured(name) for name in ("two", "none", "missing", "orders")]
    assert await postgres_setup.keys(pg.mapping, pg.database) == {
        ("public", "two"): ("c", "a"),
        ("public", "none"): (),
        ("public", "orders"): ("id",),
    }


REFUSED: list[tuple[str, CapturedTable, str]] = [
    ("", captured("missing"), "does not exist: create it"),
    ("CREATE VIEW v AS SELECT 1 AS id", captured("v"), "is a view"),
    ("CREATE UNLOGGED TABLE u (id int PRIMARY KEY)", captured("u"), "SET LOGGED"),
    ("CREATE TABLE k (id int)", captured("k"), "no primary key .* REPLICA IDENTITY FULL"),
    ("CREATE TABLE b (id int PRIMARY KEY)", captured("b", before=True), "REPLICA IDENTITY FULL"),
    ("CREATE TABLE c (a int PRIMARY KEY)", captured("c"), "has no column id for the key"),
    (
        "CREATE TABLE d (a int PRIMARY KEY, id int)",
        captured("d"),
        r"key id is not part of its replica identity \(a\)",
    ),
    (
        "CREATE TABLE g (a int PRIMARY KEY, id int GENERATED ALWAYS AS (a) STORED)",
        captured("g"),
        "key column id is generated",
    ),
]


@pytest.mark.parametrize(
    ("statement", "table", "sentence"), REFUSED, ids=[each.table for _, each, _ in REFUSED]
)
async def test_tables_that_cannot_be_captured_are_refused(
    pg: PgWorld, statement: str, table: CapturedTable, sentence: str
) -> None:
    if statement:
        pg.execute(statement)
    pg.mapping.tables = (captured("orders"), table)
    with pytest.raises(AssertionError, match=sentence):
        await pg.apply()
    assert not pg.execute(f"SELECT 1 FROM pg_publication WHERE pubname = '{pg.slot}'")


async def test_virtual_columns_do_not_go_with_full_identity(pg: PgWorld) -> None:
    """PostgreSQL 18, the first that has them, would refuse updates to the service."""
    facts = await pg.database.apart_async(pgfacts.read(pg.mapping))
    (place,) = facts.tables
    (table,) = facts.tables.values()

    def problems(full: bool) -> list[str]:
        members = tuple(structs.replace(each, full=full) for each in table.members)
        virtual = structs.replace(table, members=members, virtual=("v",))
        with_it = structs.replace(facts, tables={place: virtual})
        return list(pgfacts.table_problems(pg.mapping.tables[0], with_it, pg.mapping))

    assert not problems(full=False)
    assert "virtual generated columns (v): make them STORED" in problems(full=True)[0]


async def test_a_publication_without_generated_columns_is_altered(pg: PgWorld) -> None:
    """As one that was created before an upgrade to PostgreSQL 18."""
    await pg.apply()
    facts = await pg.database.apart_async(pgfacts.read(pg.mapping))
    assert facts.publication is not None
    assert facts.publication.generated
    server = structs.replace(facts.server, version=pgfacts.SENDS_GENERATED)
    publication = structs.replace(facts.publication, generated=False)
    older = structs.replace(facts, server=server, publication=publication)
    step = postgres_setup._publication(pg.mapping, older)
    assert step.state is StepState.TO_DO
    assert "publish_generated_columns = stored" in step.sql


async def test_inserts_need_no_key(pg: PgWorld) -> None:
    pg.execute("CREATE TABLE log (id int)")
    pg.mapping.tables = (captured("log", operations=("insert",)),)
    await pg.apply()
    assert await to_do(pg) == []


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("ALTER TABLE orders OWNER TO postgres", "does not own public.orders.*administrator run"),
        ("ALTER ROLE txbroker NOREPLICATION", "may not replicate.*ALTER ROLE"),
        ("ALTER DATABASE {} OWNER TO postgres", "may not create or alter it"),
    ],
)
async def test_missing_rights_are_named(pg: PgWorld, statement: str, sentence: str) -> None:
    ((name,),) = pg.execute("SELECT current_database()")
    pg.admin(statement.format(name))
    with pytest.raises(AssertionError, match=f"(?s){sentence}"):
        await pg.apply()


async def test_a_slot_in_use_is_not_removed(pg: PgWorld) -> None:
    source = await pg.started()
    (slot, publication) = await postgres_setup.remove(pg.mapping, pg.database)
    assert slot.state is StepState.REFUSED
    assert "stop the capture first" in slot.text
    assert publication.state is StepState.TO_DO
    await source.close()


async def test_an_open_transaction_keeps_the_slot_waiting(
    pg: PgWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Postgres.open_async

    async def impatient(database: Postgres, *_: Any) -> Any:
        return await opened(database, 0.1)

    monkeypatch.setattr(Postgres, "open_async", impatient)
    with closing(psycopg.connect(pg.url)) as connection:
        connection.execute("INSERT INTO orders VALUES (1, 'open')")
        sentence = rf"such as process {connection.info.backend_pid} of user txbroker \(\): end them"
        with pytest.raises(DatabaseUnavailable, match=sentence):
            await postgres_setup.apply(pg.mapping, pg.database)
    assert len(await to_do(pg)) == 1, "the publication was created"


async def test_names_that_are_no_slots_are_refused(pg: PgWorld) -> None:
    name, pg.mapping.name = pg.mapping.name, "Shop's"
    with pytest.raises(ConfigurationError, match="lower-case letters"):
        await postgres_setup.plan(pg.mapping, pg.database)
    pg.mapping.name = name
