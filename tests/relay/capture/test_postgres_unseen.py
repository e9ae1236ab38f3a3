"""What PostgreSQL's WAL does not show: it is refused, accepted, or stops the capture."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import closing

import msgspec
import psycopg
import pytest
from msgspec import structs

from tests.kit.until import until
from tests.relay.capture.deliveries import read, read_until
from tests.relay.capture.pg_world import PgWorld, captured, changes, take
from txbroker.databases.steps import run_async
from txbroker.errors import ConfigurationError
from txbroker.relay.capture import postgres_setup
from txbroker.relay.capture.changes import CapturedTable
from txbroker.relay.capture.pg import facts as pgfacts
from txbroker.relay.capture.pg import position as pgposition
from txbroker.relay.capture.postgres import PostgresSource
from txbroker.relay.capture.setup import Gap, StepState, refusals

DEFAULT = ("insert", "update", "delete")
PARTED = captured("parted", operations=DEFAULT, accept=["truncates"])
TABLES = (captured("orders"), PARTED)
SETUP = (
    "CREATE TABLE parted (id int PRIMARY KEY, item text) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (10) TO (20)",
    "CREATE TABLE parted_3 PARTITION OF parted FOR VALUES FROM (30) TO (50) "
    "PARTITION BY RANGE (id)",
    "CREATE TABLE parted_3_1 PARTITION OF parted_3 FOR VALUES FROM (30) TO (40)",
    "CREATE TABLE apart (id int NOT NULL, item text)",
    "INSERT INTO orders VALUES (1, 'a')",
    "INSERT INTO parted VALUES (1, 'a'), (11, 'b')",
)
ATTACH = "ALTER TABLE parted ATTACH PARTITION {} FOR VALUES FROM (20) TO (30)"
SHOWN: Sequence[str] = (
    "TRUNCATE orders",
    "CLUSTER orders USING orders_pkey",
    "CLUSTER parted_1 USING parted_1_pkey",
    "ALTER TABLE orders ADD colour text DEFAULT 'red'",
    "ALTER TABLE orders ALTER item SET NOT NULL",
    "ALTER TABLE orders RENAME item TO thing",
    "ALTER TABLE orders DROP item",
    "CREATE TABLE parted_4 PARTITION OF parted FOR VALUES FROM (20) TO (30)",
    "CREATE TABLE parted_4 PARTITION OF parted FOR VALUES FROM (20) TO (30); "
    "INSERT INTO parted VALUES (21, 'c')",
    ATTACH.format("apart"),
    "INSERT INTO parted VALUES (2, 'c'); CREATE INDEX ON parted (item); ANALYZE parted",
    "CREATE TABLE parted_4 PARTITION OF parted FOR VALUES FROM (20) TO (30); "
    "ALTER TABLE parted ALTER item SET NOT NULL; INSERT INTO parted VALUES (21, 'c')",
)
UNSEEN: Sequence[tuple[str, str]] = (
    ("DROP TABLE parted_1", "partitions: 1 of its partitions were dropped or detached"),
    ("ALTER TABLE parted DETACH PARTITION parted_1", "partitions: 1 of its partitions"),
    (
        "ALTER TABLE parted DETACH PARTITION parted_1; DELETE FROM parted_1; "
        "ALTER TABLE parted ATTACH PARTITION parted_1 FOR VALUES FROM (0) TO (10)",
        "partitions: parted_1 was detached and attached again",
    ),
    (
        "ALTER TABLE parted_3 DETACH PARTITION parted_3_1; "
        "INSERT INTO parted_3_1 VALUES (31, 'c'); "
        "ALTER TABLE parted_3 ATTACH PARTITION parted_3_1 FOR VALUES FROM (30) TO (40)",
        "partitions: parted_3_1 was detached and attached again",
    ),
    (
        "ALTER TABLE parted DETACH PARTITION parted_3; INSERT INTO parted_3 VALUES (31, 'c'); "
        "ALTER TABLE parted ATTACH PARTITION parted_3 FOR VALUES FROM (30) TO (50)",
        "partitions: parted_3 was detached and attached again",
    ),
    (
        f"INSERT INTO apart VALUES (21, 'c'); {ATTACH.format('apart')}",
        "partitions: apart was attached and has or had rows",
    ),
    (
        "CREATE TABLE later (LIKE parted INCLUDING ALL); INSERT INTO later VALUES (21, 'c'); "
        + ATTACH.format("later"),
        "partitions: later was attached and has or had rows",
    ),
    (
        "CREATE TABLE later (LIKE parted INCLUDING ALL); INSERT INTO later VALUES (21, 'c'); "
        + ATTACH.format("later")
        + "; ALTER TABLE parted ALTER item SET NOT NULL",
        "partitions: later was attached and has or had rows",
    ),
    (
        "DROP TABLE orders; CREATE TABLE orders (id int PRIMARY KEY); "
        "ALTER PUBLICATION {} ADD TABLE orders",
        "tables: it is another one than before",
    ),
    (
        "CREATE TABLE swap (id int PRIMARY KEY); ALTER TABLE orders RENAME TO old; "
        "ALTER TABLE swap RENAME TO orders; ALTER PUBLICATION {} SET TABLE orders, parted",
        "tables: it is another one than before",
    ),
    (
        "ALTER TABLE orders ALTER item TYPE text USING upper(item)",
        "rewrites: its columns were altered and its rows written again",
    ),
    ("ALTER TABLE parted ALTER item TYPE varchar USING left(item, 1)", "rewrites: its columns"),
    ("ALTER TABLE orders ADD dice float DEFAULT random()", "rewrites: its columns were altered"),
    (
        "ALTER PUBLICATION {0} DROP TABLE orders; ALTER PUBLICATION {0} ADD TABLE orders",
        "public.orders was taken out of the publication",
    ),
    (
        "ALTER PUBLICATION {0} SET TABLE orders WHERE (id > 3), parted; "
        "ALTER PUBLICATION {0} SET TABLE orders, parted",
        "public.orders was taken out of the publication, or had a row filter",
    ),
    (
        "ALTER PUBLICATION {0} SET (publish = 'insert'); "
        "ALTER PUBLICATION {0} SET (publish = 'insert, update, delete, truncate')",
        "publication {0} was altered",
    ),
)


async def test_the_catalogs_show_what_the_wal_lacks(pg: PgWorld) -> None:
    """Each case is a transaction that is rolled back."""
    pg.execute(*SETUP)
    pg.mapping.tables = TABLES
    await pg.apply()
    session = await pg.database.open_async()

    async def look() -> pgfacts.PgFacts:
        return await run_async(pgfacts.read(pg.mapping), session.execute)

    before = pgposition.catalog_of(await look(), pg.mapping)
    for statement, sentence in [*((each, "") for each in SHOWN), *UNSEEN]:
        await session.begin()
        await session.connection.execute(statement.format(pg.slot))
        facts = await look()
        await session.rollback()
        assert pgfacts.running_problem(facts, pg.mapping) == "", statement
        texts = [
            f"{each.kind}: {each.problem}" if isinstance(each, Gap) else each
            for each in pgposition.unseen(before, facts, pg.mapping)
        ]
        assert len(texts) == bool(sentence), (statement, texts)
        assert "".join(texts).startswith(sentence.format(pg.slot)), statement
        after = pgposition.catalog_of(facts, pg.mapping)
        assert not list(pgposition.unseen(after, facts, pg.mapping))
    await session.close()


async def test_columns_that_the_server_does_not_send_are_not_missed(pg: PgWorld) -> None:
    await pg.apply()
    before = await pg.database.ask(pgfacts.read(pg.mapping))
    pg.execute("ALTER TABLE orders ADD twice int GENERATED ALWAYS AS (id * 2) STORED")
    after = await pg.database.ask(pgfacts.read(pg.mapping))
    known = pgposition.catalog_of(before, pg.mapping)
    found = list(pgposition.unseen(known, after, pg.mapping))
    assert bool(found) == (after.server.version >= pgfacts.SENDS_GENERATED)


async def test_another_primary_key_is_noticed(pg: PgWorld) -> None:
    await pg.apply()
    facts = await pg.database.ask(pgfacts.read(pg.mapping))
    before = pgposition.catalog_of(facts, pg.mapping)
    pg.execute("ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (item)")
    pg.mapping.tables = (structs.replace(captured("orders"), key=("item",)),)
    after = await pg.database.ask(pgfacts.read(pg.mapping))
    assert pgfacts.running_problem(after, pg.mapping) == ""
    (sentence,) = pgposition.unseen(before, after, pg.mapping)
    assert "public.orders has another primary key (item instead of id)" in str(sentence)


async def test_positions_of_earlier_versions_are_compared(pg: PgWorld) -> None:
    """They have neither places of partitions nor keys."""
    await pg.apply()
    facts = await pg.database.ask(pgfacts.read(pg.mapping))
    now = pgposition.catalog_of(facts, pg.mapping)
    stored = msgspec.json.decode(pgposition.encode(now))
    stored["tables"] = {name: table[:4] for name, table in stored["tables"].items()}
    before = pgposition.decode_catalog(msgspec.json.encode(stored))
    assert list(pgposition.unseen(before, facts, pg.mapping)) == []
    stored["tables"]["public.orders"][0] = 1
    before = pgposition.decode_catalog(msgspec.json.encode(stored))
    assert len(list(pgposition.unseen(before, facts, pg.mapping))) == 1


async def test_a_truncate_stops_a_capture_of_deletes_unless_accepted(pg: PgWorld) -> None:
    pg.mapping.tables = (captured("orders", operations=DEFAULT),)
    source = await pg.started()
    pg.execute("TRUNCATE orders")
    with pytest.raises(ConfigurationError, match=r'orders: a TRUNCATE.*accept = \["truncates"\]'):
        await read(source)
    await source.close()
    pg.mapping.tables = (captured("orders", operations=DEFAULT, accept=["truncates"]),)
    source = await pg.source()
    pg.execute("INSERT INTO orders VALUES (2, 'b')")
    assert changes(await take(source)) == [("insert", 2, "b")]
    assert source.conversion.left_out == {"truncates": 1}


PARTIAL = "has a row filter or a list of columns for table public.orders"
REFUSED: Sequence[tuple[str, str, CapturedTable]] = (
    ("ALTER PUBLICATION {} SET TABLE orders WHERE (id > 3)", PARTIAL, captured("orders")),
    ("ALTER PUBLICATION {} SET TABLE orders (id)", PARTIAL, captured("orders")),
    (
        "ALTER PUBLICATION {} SET TABLE parted; ALTER TABLE parted_1 SET UNLOGGED",
        "parted_1 is unlogged",
        PARTED,
    ),
    (
        "ALTER PUBLICATION {} SET TABLE parted; ALTER TABLE parted REPLICA IDENTITY FULL",
        "public.parted has REPLICA IDENTITY FULL, and one of its partitions has not",
        PARTED,
    ),
    (
        "ALTER PUBLICATION {} SET TABLE parted; ALTER TABLE parted_1 REPLICA IDENTITY FULL",
        "lacks the row before a change.*for each partition",
        captured("parted", before=True, operations=["update"]),
    ),
    (
        "ALTER PUBLICATION {} SET TABLE parted",
        "TRUNCATE of a single partition: leave delete and truncate out",
        captured("parted", operations=DEFAULT),
    ),
    (
        "CREATE TABLE special () INHERITS (orders)",
        'its rows in public.special, which inherit from it.*accept = ."partitions"',
        captured("orders"),
    ),
    ("ALTER TABLE orders REPLICA IDENTITY NOTHING", "no primary key or other", captured("orders")),
)


async def test_a_start_and_each_check_refuse_what_the_plan_refuses(pg: PgWorld) -> None:
    pg.execute(*SETUP)
    await pg.apply()
    session = await pg.database.open_async()
    for statement, sentence, table in REFUSED:
        pg.mapping.tables = (table,)
        await session.begin()
        await session.connection.execute(statement.format(pg.slot))
        facts = await run_async(pgfacts.read(pg.mapping), session.execute)
        await session.rollback()
        assert re.search(sentence, pgfacts.running_problem(facts, pg.mapping)), statement
        steps = list(postgres_setup._steps(pg.mapping, facts))
        if sentence == PARTIAL:
            assert any(each.sql.endswith('SET TABLE ONLY "public"."orders"') for each in steps)
        else:
            assert re.search(sentence, "".join(refusals(steps))), statement
    pg.mapping.tables = (captured("parted"), captured("parted_1"))
    assert "is a partition of public.parted" in "".join(
        refusals(await postgres_setup.plan(pg.mapping, pg.database))
    )
    pg.mapping.tables = (captured("parted", accept=["truncates"]),)
    steps = await postgres_setup.plan(pg.mapping, pg.database)
    assert [each.state for each in steps].count(StepState.ACCEPTED) == 1
    await session.close()


@pytest.mark.parametrize("accepted", [False, True])
async def test_a_change_of_partitions_stops_a_start_unless_accepted(
    pg: PgWorld, accepted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pg.execute(*SETUP)
    pg.mapping.tables = (
        captured("parted", accept=["truncates", *(["partitions"] if accepted else [])]),
    )
    source = await pg.started()
    pg.execute("INSERT INTO parted VALUES (2, 'c')")
    position = (await read(source)).position
    await source.close()
    pg.execute("DROP TABLE parted_2", "INSERT INTO parted VALUES (3, 'd')")
    if not accepted:
        with pytest.raises(ConfigurationError, match=r"1 of its partitions.*accept = ."):
            await until(lambda: pg.source(position))
        source = await pg.source(position, on_gap="skip")
    else:
        source = await pg.source(position)
    assert changes(await take(source)) == [("insert", 3, "d")]
    assert "1 of its partitions" in caplog.text


async def test_an_altered_table_is_checked_at_once(pg: PgWorld) -> None:
    source = await pg.started()
    pg.execute(
        "INSERT INTO orders VALUES (1, 'a')",
        "ALTER TABLE orders ALTER item TYPE text USING upper(item)",
        "INSERT INTO orders VALUES (2, 'b')",
    )
    with pytest.raises(ConfigurationError, match="rows written again"):
        await read_until(source, 3)


ADD_PART = (
    "CREATE TABLE parted_4 PARTITION OF parted FOR VALUES FROM (20) TO (30)",
    "INSERT INTO parted VALUES (21, 'c')",
)
DROP_PART = ("DROP TABLE parted_4", "INSERT INTO parted VALUES (2, 'd')")


@pytest.mark.parametrize(
    ("when", "kind"),
    [
        ("after a check", "text"),
        ("before a check", "text"),
        ("before a check", "word"),  # described between the table and its partition
        ("before a start", "text"),
        ("before a second start", "text"),
    ],
)
async def test_a_partition_that_came_and_went_stops_it(pg: PgWorld, when: str, kind: str) -> None:
    """Its first row also is the first of its table in the stream, which shows it: a check may be
    too late."""
    pg.execute(*SETUP, "CREATE DOMAIN word AS text", f"ALTER TABLE parted ALTER item TYPE {kind}")
    pg.mapping.tables = (PARTED,)
    source = await pg.started()
    pg.execute("INSERT INTO orders VALUES (7, 'moves the position')")
    position = (await read(source, empty=True)).position
    if when == "after a check":
        pg.execute(*ADD_PART)
        await read_until(source, 1)
        await checked(source)
        pg.execute(*DROP_PART)
    elif when == "before a check":
        pg.execute(*ADD_PART, *DROP_PART)
    else:
        if when == "before a second start":
            pg.execute(*ADD_PART)
            position = (await read_until(source, 1)).position
        await source.close()
        pg.execute(*(ADD_PART if when == "before a start" else ()), *DROP_PART)
    with pytest.raises(ConfigurationError, match="1 of its partitions were dropped"):
        await read_on(pg, source, position if "start" in when else b"")


async def read_on(pg: PgWorld, source: PostgresSource, position: bytes) -> None:
    """Read, from another source if there is a position."""
    if position:
        source = await pg.source(position)
    async with asyncio.timeout(20):
        await read_until(source, 9)


async def checked(source: PostgresSource) -> None:
    """Wait until a check that begins now has compared the catalogs."""
    known = source._catalog

    def compared() -> bool:
        if not source._altered.done():
            source._altered.set_result(None)
        return source._catalog is not known

    await until(compared)


async def test_a_partition_that_is_not_visible_yet_does_not_stop_it(pg: PgWorld) -> None:
    """Its commit waits for a standby that never answers; the stream has it."""
    pg.execute(*SETUP)
    pg.mapping.tables = (PARTED,)
    source = await pg.started()
    waits, reload = "ALTER SYSTEM SET synchronous_standby_names = '{}'", "SELECT pg_reload_conf()"
    pg.admin(waits.format("absent"), reload)
    adding = asyncio.create_task(asyncio.to_thread(pg.execute, "; ".join(ADD_PART)))
    try:
        assert changes(await take(source)) == [("insert", 21, "c")]
        await checked(source)
        await read(source, empty=True)
        assert not adding.done()
    finally:
        pg.admin(waits.format(""), reload)
        await adding
    pg.execute(*DROP_PART)
    with pytest.raises(ConfigurationError, match="1 of its partitions were dropped"):
        await read_until(source, 9)


@pytest.mark.parametrize("running", [True, False])
async def test_a_new_partition_that_was_detached_meanwhile_stops_it(
    pg: PgWorld, running: bool
) -> None:
    """It is empty when a check first sees it, and its row was deleted unseen."""
    pg.execute(*SETUP)
    pg.mapping.tables = (PARTED,)
    source = await pg.started()
    pg.execute("INSERT INTO orders VALUES (7, 'moves the position')")
    position = (await read(source, empty=True)).position
    if not running:
        await source.close()
    pg.execute(
        *ADD_PART,
        "ALTER TABLE parted DETACH PARTITION parted_4",
        "DELETE FROM parted_4",
        "VACUUM parted_4",
        ATTACH.format("parted_4"),
        "INSERT INTO parted VALUES (2, 'd')",
    )
    with pytest.raises(ConfigurationError, match="parted_4 was attached and has or had rows"):
        await read_on(pg, source, b"" if running else position)


async def test_an_open_transaction_may_write_to_a_partition_that_was_attached_later(
    pg: PgWorld,
) -> None:
    """The order of their ids is not that of their commits."""
    pg.execute(*SETUP)
    pg.mapping.tables = (PARTED,)
    source = await pg.started()
    with closing(psycopg.connect(pg.url)) as connection:
        connection.execute("INSERT INTO orders VALUES (50, 'begins')")
        pg.execute("CREATE TABLE later (LIKE parted INCLUDING ALL)", ATTACH.format("later"))
        await checked(source)
        connection.execute("INSERT INTO parted VALUES (21, 'c')")
        connection.commit()
    assert changes(await take(source)) == [("insert", 21, "c")]
    await checked(source)
    pg.execute("INSERT INTO parted VALUES (22, 'd')")
    assert changes(await take(source)) == [("insert", 22, "d")]


async def test_a_transaction_that_began_earlier_may_attach_a_partition_again(pg: PgWorld) -> None:
    """While the capture does not run; its rows are gone."""
    pg.execute(*SETUP)
    pg.mapping.tables = (PARTED,)
    source = await pg.started()
    pg.execute("INSERT INTO orders VALUES (7, 'moves the position')")
    position = (await read(source, empty=True)).position
    await source.close()
    pg.execute(ADD_PART[0])
    with closing(psycopg.connect(pg.url)) as connection:
        connection.execute("INSERT INTO other VALUES (1)")
        pg.execute(ADD_PART[1])
        connection.execute("ALTER TABLE parted DETACH PARTITION parted_4")
        connection.execute("TRUNCATE parted_4")
        connection.execute(ATTACH.format("parted_4"))
        connection.commit()
    pg.execute("INSERT INTO parted VALUES (2, 'd')")
    with pytest.raises(ConfigurationError, match="parted_4 was attached and has or had rows"):
        await read_on(pg, source, position)


async def test_a_partition_that_was_empty_when_it_was_attached_may_have_rows(pg: PgWorld) -> None:
    pg.execute(*SETUP)
    pg.mapping.tables = (PARTED,)
    source = await pg.started()
    pg.execute("CREATE TABLE later (LIKE parted INCLUDING ALL)", ATTACH.format("later"))
    await checked(source)
    for number in (21, 22):
        pg.execute(f"INSERT INTO parted VALUES ({number}, 'c')")
        assert changes(await take(source)) == [("insert", number, "c")]
        await checked(source)
    pg.execute("DROP TABLE later", "INSERT INTO parted VALUES (2, 'd')")
    with pytest.raises(ConfigurationError, match="1 of its partitions were dropped"):
        await read_on(pg, source, b"")


@pytest.mark.parametrize("full", [True, False])
async def test_another_published_table_is_no_partition(pg: PgWorld, full: bool) -> None:
    pg.execute("CREATE TABLE extra (id int PRIMARY KEY)", *SETUP)
    if full:
        pg.execute("ALTER TABLE orders REPLICA IDENTITY FULL")
    tables = (captured("orders", before=full), PARTED)
    pg.mapping.tables = (*tables, captured("extra"))
    await pg.apply()
    pg.mapping.tables = tables
    source = await pg.source()
    pg.execute(
        "BEGIN; INSERT INTO orders VALUES (2, 'a'); INSERT INTO extra VALUES (1); "
        "INSERT INTO parted VALUES (2, 'b'); INSERT INTO extra VALUES (2); COMMIT"
    )
    assert changes((await read_until(source, 2)).values) == [
        ("insert", 2, "a"),
        ("insert", 2, "b"),
    ]
    await checked(source)
    pg.execute("INSERT INTO orders VALUES (3, 'c')")
    assert changes(await take(source)) == [("insert", 3, "c")]


async def test_rows_of_a_renamed_table_are_captured(pg: PgWorld) -> None:
    source = await pg.started()
    with closing(psycopg.connect(pg.url)) as connection, connection:
        connection.execute("INSERT INTO orders VALUES (1, 'a')")
        connection.execute("ALTER TABLE orders RENAME TO renamed")
        connection.execute("INSERT INTO renamed VALUES (2, 'b')")
        connection.execute("ALTER TABLE renamed RENAME TO orders")
    values = await take(source)
    assert changes(values) == [("insert", 1, "a"), ("insert", 2, "b")]
    assert {each["table"] for each in values} == {"orders"}


@pytest.mark.parametrize("kind", ["table", "partition"])
async def test_old_rows_that_are_missing_stop_it(pg: PgWorld, kind: str) -> None:
    pg.execute(*SETUP)
    full = "ALTER TABLE {} REPLICA IDENTITY FULL"
    names = ("orders", "parted", "parted_1", "parted_2", "parted_3_1")
    pg.execute(*(full.format(each) for each in names))
    tables = {"table": "orders", "partition": "parted"}
    pg.mapping.tables = (captured(tables[kind], before=True, operations=["update"]),)
    source = await pg.started()
    pg.execute(f"UPDATE {tables[kind]} SET item = 'b' WHERE id = 1")
    (value,) = await take(source)
    assert value["before"]["item"] == "a"
    of = {"table": "orders", "partition": "parted_1"}[kind]
    pg.execute(
        f"ALTER TABLE {of} REPLICA IDENTITY DEFAULT",
        f"UPDATE {tables[kind]} SET item = 'c' WHERE id = 1",
        full.format(of),
    )
    with pytest.raises(ConfigurationError, match="REPLICA IDENTITY FULL"):
        await take(source)
