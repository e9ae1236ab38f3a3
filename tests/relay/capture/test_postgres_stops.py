"""A capture of PostgreSQL that would lose changes stops, with a sentence that has the next step."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any

import msgspec
import psycopg
import pytest
from psycopg.rows import dict_row

from tests.kit.database_servers import PostgresServer
from tests.kit.until import until
from tests.relay.capture.deliveries import read, read_until
from tests.relay.capture.pg_world import PgWorld, Recorder, changes, take
from txbroker.databases.database import DatabaseUnavailable
from txbroker.databases.postgres import Postgres
from txbroker.errors import ConfigurationError
from txbroker.relay.capture import postgres
from txbroker.relay.capture.changes import Change, Emitted, TransactionInfo
from txbroker.relay.capture.pg.pgoutput import lsn_text, parse_lsn
from txbroker.relay.capture.pg.stream import PgStream
from txbroker.relay.capture.postgres import PostgresSource


def recreate_slot(pg: PgWorld, plugin: str = "pgoutput") -> None:
    """Drop the slot, and create it with a plugin."""
    pg.execute(
        f"SELECT pg_drop_replication_slot('{pg.slot}')",
        "INSERT INTO orders VALUES (100, 'lost')",
        f"SELECT pg_create_logical_replication_slot('{pg.slot}', '{plugin}')",
    )


def lose_slot(pg: PgWorld) -> None:
    """Have the server remove the WAL that the slot holds."""
    pg.admin("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'", "SELECT pg_reload_conf()")
    try:
        for _ in range(3):
            pg.admin("SELECT pg_logical_emit_message(false, 'x', 'x'), pg_switch_wal()")
        pg.admin("CHECKPOINT")
    finally:
        pg.admin("ALTER SYSTEM RESET max_slot_wal_keep_size", "SELECT pg_reload_conf()")


def with_position(**changed: Any) -> Callable[[PgWorld, bytes], bytes]:
    """Return a function that changes a position."""

    def change(_: PgWorld, position: bytes) -> bytes:
        return msgspec.json.encode(msgspec.json.decode(position) | changed)

    return change


def act(action: Callable[[PgWorld], Any]) -> Callable[[PgWorld, bytes], bytes]:
    """Return a function that does something and leaves the position as it is."""

    def done(pg: PgWorld, position: bytes) -> bytes:
        action(pg)
        return position

    return done


AT_START: dict[str, tuple[Callable[[PgWorld, bytes], bytes], str]] = {
    "slot missing": (
        act(lambda pg: pg.execute(f"SELECT pg_drop_replication_slot('{pg.slot}')")),
        "slot .* is missing.*capture apply",
    ),
    "slot created again": (act(recreate_slot), "created again.*--on-gap skip"),
    "slot advanced": (
        act(
            lambda pg: pg.execute(
                "INSERT INTO orders VALUES (9, 'x')",
                f"SELECT pg_replication_slot_advance('{pg.slot}', pg_current_wal_lsn())",
            )
        ),
        "created again or advanced.*--on-gap skip",
    ),
    "slot of another plugin": (
        act(lambda pg: recreate_slot(pg, "test_decoding")),
        "slot of test_decoding.*another name",
    ),
    "slot lost": (act(lose_slot), "removed changes.*max_slot_wal_keep_size"),
    "publication missing": (
        act(lambda pg: pg.execute(f"DROP PUBLICATION {pg.slot}")),
        "publication .* is missing.*capture apply",
    ),
    "publication created again": (
        act(
            lambda pg: pg.execute(
                f"DROP PUBLICATION {pg.slot}",
                "INSERT INTO orders VALUES (9, 'lost')",
                f"CREATE PUBLICATION {pg.slot} FOR TABLE orders",
            )
        ),
        "publication .* was created again.*--on-gap skip",
    ),
    "table not published": (
        act(lambda pg: pg.execute(f"ALTER PUBLICATION {pg.slot} DROP TABLE orders")),
        "lacks table public.orders.*capture apply",
    ),
    "operation not published": (
        act(lambda pg: pg.execute(f"ALTER PUBLICATION {pg.slot} SET (publish = 'insert')")),
        "does not send delete, truncate, update",
    ),
    "rights missing": (
        act(lambda pg: pg.admin("ALTER ROLE txbroker NOREPLICATION")),
        "may not replicate.*ALTER ROLE",
    ),
    "another server": (with_position(system="1"), "another server.*--on-gap skip"),
    "another slot": (with_position(slot="else"), "is of slot else"),
    "older history": (with_position(lsn="FF/0"), "history does not contain.*restored"),
    "unknown timeline": (with_position(timeline=7), "history does not contain.*restored"),
    "another relay's position": (lambda *_: b'{"rows": []}', "another relay has this name"),
}


async def left(pg: PgWorld) -> tuple[PostgresSource, bytes]:
    """Return a source that has ended after a delivery, and its position."""
    source = await pg.started()
    pg.execute("INSERT INTO orders VALUES (1, 'a')")
    position = (await read(source)).position
    await source.close()
    await until(lambda: not pg.execute("SELECT 1 FROM pg_stat_replication"))
    return source, position


@pytest.mark.parametrize("case", AT_START)
async def test_it_does_not_start(pg: PgWorld, case: str) -> None:
    break_it, sentence = AT_START[case]
    source, position = await left(pg)
    position = break_it(pg, position)
    with pytest.raises(ConfigurationError, match=f"(?s){sentence}"):
        await source.resume(position)


async def test_a_gap_can_be_skipped(pg: PgWorld) -> None:
    _source, position = await left(pg)
    recreate_slot(pg)
    again = await pg.source(position, on_gap="skip")
    place = await read(again, empty=True)
    assert place.values == []
    pg.execute("INSERT INTO orders VALUES (2, 'b')")
    await again.close()
    strict = await pg.source(place.position)
    assert changes(await take(strict)) == [("insert", 2, "b")]


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("ALTER PUBLICATION {} DROP TABLE orders", "lacks table public.orders"),
        ("DROP TABLE orders", "lacks table public.orders"),
        ("DROP PUBLICATION {}", "publication .* is missing"),
        (
            "DROP PUBLICATION {0}; CREATE PUBLICATION {0} FOR TABLE orders",
            "publication .* was created again.*--on-gap skip",
        ),
    ],
)
async def test_it_stops_while_it_runs(pg: PgWorld, statement: str, sentence: str) -> None:
    source = await pg.started(beat_s=0.05)
    pg.execute(statement.format(pg.slot))
    with pytest.raises(ConfigurationError, match=sentence):
        await until(lambda: take(source))


async def test_changes_without_a_publication_stop_it(pg: PgWorld) -> None:
    """PostgreSQL 18 leaves such changes out silently, older servers end the stream."""
    source = await pg.started(beat_s=0.5)
    pg.execute(
        f"DROP PUBLICATION {pg.slot}",
        "INSERT INTO orders VALUES (1, 'a')",
        f"CREATE PUBLICATION {pg.slot} FOR TABLE orders",
    )
    sentence = r"publication.* (was dropped|was created again).*--on-gap skip|is missing"
    with pytest.raises(ConfigurationError, match=sentence):
        await until(lambda: take(source))


async def test_two_captures_with_one_name(pg: PgWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_RELEASED_S", 0.0)
    first = await pg.started()
    pg.execute("INSERT INTO orders VALUES (1, 'a')")
    position = (await read(first)).position
    second = PostgresSource(pg.mapping, pg.database)
    pg.sources.append(second)
    with pytest.raises(DatabaseUnavailable, match="has not ended"):
        await second.resume(position)
    impatient = PostgresSource(pg.mapping, pg.database, held_max_s=0.0)
    with pytest.raises(ConfigurationError, match="two captures have the name"):
        await until(lambda: tried(impatient, position))
    await first.close()
    assert await until(lambda: tried(second, position))


async def test_a_slot_that_another_connection_takes_first(pg: PgWorld) -> None:
    await pg.apply()
    database = Postgres(pg.url, row_factory=dict_row)
    first, second = PgStream(database, pg.slot), PgStream(database, pg.slot)
    try:
        for stream in (first, second):
            await stream.open()
        await first.start(0, pg.slot, messages=False)
        with pytest.raises(DatabaseUnavailable, match="is active for PID"):
            await second.start(0, pg.slot, messages=False)
    finally:
        await first.close()
        await second.close()


async def tried(source: PostgresSource, position: bytes) -> bool:
    """Return whether a source can resume."""
    try:
        await source.resume(position)
    except DatabaseUnavailable:
        return False
    return True


class Strict(Recorder):
    """A mapping that refuses emitted messages."""

    def messages(self, transaction: TransactionInfo, number: int, change: Change | Emitted) -> Any:
        """Return the message of a row."""
        if isinstance(change, Emitted):
            raise ConfigurationError("it is no JSON: correct the program")
        return super().messages(transaction, number, change)


@pytest.mark.parametrize(
    ("transactional", "sentence"),
    [("true", "it is no JSON: correct"), ("false", "visible even after a rollback: pass true")],
)
async def test_a_change_that_does_not_fit_stops_it_until_it_is_left_out(
    pg: PgWorld, transactional: str, sentence: str
) -> None:
    pg.mapping = Strict(pg.mapping.name, pg.tables)
    source = await pg.started()
    pg.execute("INSERT INTO orders VALUES (1, 'a')")
    position = (await read(source)).position
    pg.execute(
        f"SELECT pg_logical_emit_message({transactional}, 'txbroker', '-')",
        "INSERT INTO orders VALUES (2, 'b')",
    )
    with pytest.raises(ConfigurationError, match=f"change .*{sentence}.*--skip ") as error:
        await take(source)
    change_id = str(error.value).rpartition("--skip ")[2]
    await source.close()
    skipping = await pg.source(position, skip=[change_id])
    assert changes(await take(skipping)) == [("insert", 2, "b")]


@pytest.mark.parametrize("changed", [{"xid": 1}, {"time_ms": 1}, {"end": "0/1"}])
async def test_the_last_transaction_proves_the_history(pg: PgWorld, changed: Any) -> None:
    """Where the slot is before Kafka's position, as after a crash of the server."""
    source = await pg.started()
    pg.execute("INSERT INTO orders VALUES (1, 'a')")
    position = msgspec.json.decode((await read(source, deliver=False)).position)
    await source.close()
    if "end" in changed:  # no commit ends there
        changed = {"end": lsn_text(parse_lsn(position["last"]["end"]) - 1)}
    position["last"] |= changed
    other = msgspec.json.encode(position)
    pg.execute("INSERT INTO orders VALUES (2, 'b')")
    again = await pg.source(other)
    with pytest.raises(ConfigurationError, match=r"history does not contain.*--on-gap skip"):
        await read(again)
    await again.close()
    skipping = await pg.source(other, on_gap="skip")
    with pytest.raises(DatabaseUnavailable, match=r"history does not contain.*begins again"):
        await read(skipping)
    await skipping.resume(other)
    assert changes((await read_until(skipping, 2)).values) == [
        ("insert", 1, "a"),
        ("insert", 2, "b"),
    ]


async def test_a_data_folder_that_was_put_back(pg: PgWorld) -> None:
    """Its WAL has grown beyond Kafka's position, on the same timeline."""
    source = await pg.started()
    data, kept = pg.server.folder / "data", pg.server.folder / "kept"
    await asyncio.to_thread(pg.server.stop)
    subprocess.run(["cp", "-a", str(data), str(kept)], check=True)
    await asyncio.to_thread(pg.server.start)
    await source.resume(None)
    pg.execute("INSERT INTO orders VALUES (1, 'lost with the disk')")
    position = (await read(source)).position
    await source.close()
    await asyncio.to_thread(pg.server.stop)
    shutil.rmtree(data)
    kept.rename(data)
    await asyncio.to_thread(pg.server.start)
    pg.execute("INSERT INTO orders SELECT n, 'new' FROM generate_series(1, 3000) n")
    assert parse_lsn(end_of_wal(pg)) > parse_lsn(msgspec.json.decode(position)["lsn"])
    await source.resume(position)
    with pytest.raises(ConfigurationError, match=r"history does not contain.*restored"):
        await read(source)


@pytest.fixture
async def plain() -> AsyncIterator[PgWorld]:
    """A database of a server whose WAL cannot be captured."""
    with PostgresServer(wal_level="replica") as server:
        yield PgWorld(server, server.create_database())


async def test_a_server_without_logical_wal(plain: PgWorld) -> None:
    with pytest.raises(AssertionError, match=r"wal_level is replica.*ALTER SYSTEM"):
        await plain.apply()
    with pytest.raises(ConfigurationError, match="wal_level is replica"):
        await plain.source()


async def test_a_server_that_took_over(pg: PgWorld) -> None:
    """A position is on the server's history up to where it left the timeline."""
    source = await pg.started()
    pg.execute("INSERT INTO orders VALUES (1, 'a')")
    position = (await read(source)).position
    await source.close()
    await asyncio.to_thread(promote, pg)
    after = await pg.source(position)
    place = await read(after, empty=True)
    assert msgspec.json.decode(place.position)["timeline"] == 2
    beyond = msgspec.json.decode(position) | {"lsn": end_of_wal(pg)}
    pg.execute("INSERT INTO orders VALUES (2, 'b')")
    await after.close()
    with pytest.raises(ConfigurationError, match="history does not contain"):
        await after.resume(msgspec.json.encode(beyond))


def promote(pg: PgWorld) -> None:
    """Restart the server as a standby, and promote it."""
    pg.server.stop()
    (pg.server.folder / "data/standby.signal").touch()
    pg.server.start()
    pg.admin("SELECT pg_promote()")


def end_of_wal(pg: PgWorld) -> str:
    """Return the newest LSN."""
    with closing(psycopg.connect(pg.url)) as connection:
        row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return str(row[0])
