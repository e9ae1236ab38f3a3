"""A replication slot as a source: transactions whole, in order and once; positions; idleness."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from tests.kit.until import until
from tests.relay.capture.deliveries import read, read_until
from tests.relay.capture.pg_world import PgWorld, captured, changes, take
from txbroker.databases.database import DatabaseUnavailable
from txbroker.door.placing import Refusal
from txbroker.relay.capture import postgres
from txbroker.relay.capture.pg import stream as pgstream
from txbroker.relay.capture.pg.facts import SENDS_GENERATED
from txbroker.relay.capture.pg.pgoutput import parse_lsn
from txbroker.relay.capture.postgres import PostgresSource
from txbroker.relay.source import Delivery, DeliveryRefused

LARGE = 200_000
MEMORY_BYTES = 64 << 20


def confirmed(pg: PgWorld) -> int:
    """Return what the slot may have forgotten, an LSN."""
    ((lsn,),) = pg.execute(
        f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{pg.slot}'"
    )
    return parse_lsn(lsn)


def received(pg: PgWorld) -> int:
    """Return what the server knows to be received, an LSN."""
    found = pg.admin("SELECT write_lsn FROM pg_stat_replication WHERE write_lsn IS NOT NULL")
    return parse_lsn(found[0][0]) if found else 0


def resident_bytes() -> int:
    """Return how much memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def lsn_of(position: bytes) -> int:
    """Return the LSN of a position."""
    return parse_lsn(msgspec.json.decode(position)["lsn"])


async def with_messages(source: PostgresSource) -> Delivery:
    """Return the next delivery that has messages, and deliver those without."""
    while (delivery := await source.next()).position:
        await source.delivered(delivery)
    return delivery


async def take_all(source: PostgresSource) -> None:
    """Take positions until the stream ends."""
    while True:
        assert not (await read(source, empty=True)).values


async def test_transactions_are_whole_and_in_the_order_of_commits(pg: PgWorld) -> None:
    source = await pg.started()
    with closing(psycopg.connect(pg.url)) as early, closing(psycopg.connect(pg.url)) as late:
        early.execute("INSERT INTO orders VALUES (1, 'early')")
        late.execute("INSERT INTO orders VALUES (2, 'late')")
        early.execute("INSERT INTO other VALUES (1)")
        early.execute("SAVEPOINT s")
        early.execute("INSERT INTO orders VALUES (3, 'savepoint')")
        early.execute("ROLLBACK TO s")
        late.commit()
        early.execute("UPDATE orders SET item = 'end' WHERE id = 1")
        early.commit()
        late.execute("INSERT INTO orders VALUES (4, 'never')")
        late.rollback()
    got = await read_until(source, 3)
    assert changes(got.values) == [
        ("insert", 2, "late"),
        ("insert", 1, "early"),
        ("update", 1, "end"),
    ]
    assert got.ids[1].rpartition("/")[0] == got.ids[2].rpartition("/")[0] > got.ids[0]
    assert [each.rpartition("/")[2] for each in got.ids] == ["0", "0", "1"]


@pytest.mark.rule(48)
async def test_the_slot_forgets_only_delivered_changes(pg: PgWorld) -> None:
    source = await pg.started(beat_s=0.05)
    pg.execute("INSERT INTO orders VALUES (1, 'a')")
    first = await read(source)
    pg.execute("INSERT INTO orders VALUES (2, 'b')")
    second = await read(source, deliver=False)
    # The server has heard of both, and also which one it may forget.
    await until(lambda: received(pg) >= lsn_of(second.position))
    assert lsn_of(first.position) <= confirmed(pg) < lsn_of(second.position)
    for position, expected in (
        (first.position, [("insert", 2, "b")]),
        (second.position, [("insert", 3, "c")]),
    ):
        await source.resume(position)
        pg.execute("INSERT INTO orders VALUES (3, 'c') ON CONFLICT DO NOTHING")
        again = await read(source, deliver=False)
        assert changes(again.values)[:1] == expected
    await source.resume(first.position)
    repeated = await read(source, deliver=False)
    assert repeated.ids[:1] == second.ids


async def test_changes_of_all_kinds(pg: PgWorld) -> None:
    pg.execute(
        "CREATE TABLE kept (id int PRIMARY KEY, large text, "
        "twice int GENERATED ALWAYS AS (id * 2) STORED)",
        "ALTER TABLE kept ALTER large SET STORAGE EXTERNAL, REPLICA IDENTITY FULL",
        "ALTER TABLE orders ALTER item SET STORAGE EXTERNAL",
    )
    pg.mapping.tables = (captured("orders"), captured("kept", before=True))
    source = await pg.started()
    large = "x" * 5000
    with closing(psycopg.connect(pg.url)) as connection:
        for statement in (
            f"INSERT INTO orders VALUES (1, '{large}')",
            "UPDATE orders SET id = 2",
            f"INSERT INTO kept VALUES (1, '{large}')",
            "UPDATE kept SET id = 2",
            "DELETE FROM kept",
            "ALTER TABLE orders ADD colour text DEFAULT 'red'",
            "INSERT INTO orders VALUES (3, NULL)",
            "SELECT pg_logical_emit_message(true, 'txbroker', 'from SQL')",
            "SELECT pg_logical_emit_message(true, 'another', 'not ours')",
            "TRUNCATE orders, kept, other",
        ):
            connection.execute(statement)
        connection.commit()
    values = await take(source)
    known: dict[str, Any] = {
        "schema": "public",
        "before": None,
        "after": None,
        "key": None,
        "unchanged": [],
        "fault": "",
    }
    orders, kept = {**known, "table": "orders"}, {**known, "table": "kept"}
    ((version,),) = pg.execute("SELECT current_setting('server_version_num')::int")
    first, second = ({"twice": each} if version >= SENDS_GENERATED else {} for each in (2, 4))
    whole = {"id": 2, "large": large, **second}
    assert values[:7] == [
        {**orders, "operation": "insert", "after": {"id": 1, "item": large}},
        {
            **orders,
            "operation": "update",
            "after": {"id": 2},
            "key": {"id": 1},
            "unchanged": ["item"],
        },
        {**kept, "operation": "insert", "after": {**whole, "id": 1, **first}},
        {**kept, "operation": "update", "before": {**whole, "id": 1, **first}, "after": whole},
        {**kept, "operation": "delete", "before": whole},
        {**orders, "operation": "insert", "after": {"id": 3, "item": None, "colour": "red"}},
        {"content": "ZnJvbSBTUUw="},
    ]
    assert [(each["operation"], each["table"]) for each in values[7:]] == [
        ("truncate", "orders"),
        ("truncate", "kept"),
    ]


async def test_partitions_are_captured_as_their_table(pg: PgWorld) -> None:
    pg.execute(
        "CREATE TABLE parted (id int PRIMARY KEY, item text) PARTITION BY RANGE (id)",
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (10) TO (20)",
    )
    pg.mapping.tables = (captured("parted", operations=["insert"]),)
    source = await pg.started()
    pg.execute("INSERT INTO parted VALUES (1, 'a'), (11, 'b')")
    values = await take(source)
    assert {each["table"] for each in values} == {"parted"}
    assert changes(values) == [("insert", 1, "a"), ("insert", 11, "b")]


async def test_an_idle_capture_holds_no_wal(pg: PgWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_IDLE_S", 0.05)
    source = await pg.started()
    pg.execute("INSERT INTO other SELECT generate_series(1, 100000)")
    ((end,),) = pg.execute("SELECT pg_current_wal_lsn()")
    assert await source.lag_bytes() > 5_000_000
    while lsn_of((got := await read(source, empty=True)).position) < parse_lsn(end):
        assert got.values == []
    await until(lambda: confirmed(pg) >= parse_lsn(end))


async def test_a_large_transaction_is_streamed_in_pieces(pg: PgWorld) -> None:
    source = await pg.started()
    with closing(psycopg.connect(pg.url, autocommit=True)) as connection:
        connection.execute(
            f"INSERT INTO orders SELECT n, repeat('x', 100) FROM generate_series(1, {LARGE}) n"
        )
    delivery = await with_messages(source)
    before = resident_bytes()
    count = largest = peak = 0
    async for piece in delivery.pieces():
        assert (piece[0].headers[0][1] or b"").endswith(b"/%d" % count)
        count += len(piece)
        largest = max(largest, sum(len(message.value or b"") for message in piece))
        peak = max(peak, resident_bytes() - before)
    assert count == LARGE
    assert largest < 2 << 20
    assert peak < MEMORY_BYTES
    await source.delivered(delivery)
    await source.resume(delivery.position)
    pg.execute("INSERT INTO orders VALUES (0, 'next')")
    assert changes(await take(source)) == [("insert", 0, "next")]


async def test_a_killed_server_loses_and_repeats_nothing(pg: PgWorld) -> None:
    source = await pg.started()
    pg.execute("INSERT INTO orders VALUES (1, 'delivered')")
    first = await read(source)
    pg.execute("INSERT INTO orders VALUES (2, 'in flight')")
    await read(source, deliver=False)
    await asyncio.to_thread(pg.server.kill)
    with pytest.raises(DatabaseUnavailable):
        await read(source)
    with pytest.raises(DatabaseUnavailable):
        await source.resume(first.position)
    await asyncio.to_thread(pg.server.start)
    pg.execute("INSERT INTO orders VALUES (3, 'later')")
    assert confirmed(pg) < lsn_of(first.position), "the slot's position is not on the disk"
    await source.resume(first.position)
    values = await take(source)
    if len(values) == 1:
        values += await take(source)
    assert changes(values) == [("insert", 2, "in flight"), ("insert", 3, "later")]


async def test_the_server_can_be_shut_down(pg: PgWorld) -> None:
    source = await pg.started()
    pg.execute("INSERT INTO other VALUES (1)")
    stopping = asyncio.create_task(asyncio.to_thread(pg.server.stop))
    with pytest.raises(DatabaseUnavailable):
        await take_all(source)
    await stopping
    assert not pg.server.pid


async def test_a_server_that_is_silent_is_left(
    pg: PgWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "_IDLE_S", 0.05)
    monkeypatch.setattr(pgstream, "SILENCE_S", 0.3)
    source = await pg.started(beat_s=0.05)
    pg.server.pause()
    try:
        with pytest.raises(DatabaseUnavailable, match="does not answer"):
            await read(source)
    finally:
        pg.server.resume()


async def test_a_refused_change_can_be_left_out(pg: PgWorld) -> None:
    source = await pg.started()
    pg.execute("INSERT INTO orders VALUES (1, 'a')")
    first = await read(source)
    pg.execute("INSERT INTO orders VALUES (2, 'b'), (3, 'c')")
    delivery = await with_messages(source)
    messages = [message async for piece in delivery.pieces() for message in piece]
    change_id = re.sub("@[0-9]+", "", (messages[0].headers[0][1] or b"").decode())
    with pytest.raises(DeliveryRefused, match=f"too large.*--skip {change_id}"):
        await source.refused(delivery, [Refusal(0, messages[0], "too large")])
    await source.close()
    skipping = await pg.source(first.position, skip=[change_id])
    assert changes(await take(skipping)) == [("insert", 3, "c")]
