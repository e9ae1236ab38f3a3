"""A MariaDB that crashed while it wrote its log: a part of a transaction stays, rolled back."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.database_servers import MariaServer
from tests.kit.until import DEADLINE_S
from tests.relay.capture.deliveries import read
from tests.relay.capture.maria_world import BINLOG, MariaWorld
from txbroker.databases.database import DatabaseUnavailable
from txbroker.relay.capture.maria.binlog import BinlogPlace, ChangesLost, Interrupted
from txbroker.relay.capture.mariadb import MariadbSource

HEADER_BYTES, SIZE_AT = 19, 9


@pytest.fixture(scope="module")
def server() -> Iterator[MariaServer]:
    """A server whose log is cut."""
    with MariaServer(**BINLOG) as running:
        yield running


@pytest.fixture
def world(server: MariaServer, tmp_path: Path) -> MariaWorld:
    return MariaWorld(server, tmp_path)


async def crashed(world: MariaWorld, rows: int, cut: int) -> bytes:
    """Return the position before a transaction whose end is missing in the log; others follow.

    Args:
        cut: bytes of an event that the log has of the first one that it lacks.
    """
    source = await world.started()
    world.execute("INSERT INTO orders VALUES (1, 'before')")
    position = (await read(source)).position
    file = Path(world.server.folder, "data", world.admin("SHOW MASTER STATUS")[0][0])
    world.execute("INSERT INTO orders VALUES (2, 'read later')", "INSERT INTO other VALUES (1)")
    begin = file.stat().st_size
    world.execute(f"INSERT INTO orders SELECT seq + 100, repeat('x', 500) FROM seq_1_to_{rows}")
    await source.close()
    world.server.kill()
    data, at, ends = file.read_bytes(), 4, []
    while at + HEADER_BYTES <= len(data):
        at += struct.unpack_from("<I", data, at + SIZE_AT)[0]
        ends.append(at)
    whole = [end for end in ends if end > begin][-3]  # rows of the last statement are missing
    os.truncate(file, whole + cut)
    world.server.start()
    world.execute(
        "INSERT INTO orders VALUES (3, 'after')", "UPDATE orders SET item = 'b' WHERE id < 3"
    )
    return position


async def pumped(source: MariadbSource, position: bytes, count: int) -> tuple[list[Any], bytes]:
    """Return a number of changes and the position after them, read as by a pump, which begins
    again where the database was unavailable."""
    changes: list[Any] = []
    async with asyncio.timeout(DEADLINE_S):
        while len(changes) < count:
            try:
                taken = await read(source, empty=True)
            except DatabaseUnavailable:
                await source.resume(position)
            else:
                changes, position = changes + taken.changes, taken.position
    return changes, position


@pytest.mark.parametrize("cut", [0, 30], ids=["between events", "within an event"])
@pytest.mark.parametrize("rows", [100, 20_000], ids=["small", "pieces"])
async def test_a_transaction_without_an_end_is_passed_over(
    world: MariaWorld, rows: int, cut: int
) -> None:
    """Its GTID is given again."""
    position = await crashed(world, rows, cut)
    changes, after = await pumped(await world.source(position), position, 4)
    assert changes == [
        ("insert", 2, "read later"),
        ("insert", 3, "after"),
        ("update", 1, "b"),
        ("update", 2, "b"),
    ]
    world.execute("INSERT INTO orders VALUES (4, 'more')")
    assert (await read(await world.source(after))).changes == [("insert", 4, "more")]


@pytest.mark.parametrize("compared", [True, False])
async def test_the_comparison_is_left_out_only_after_it_has_passed(
    world: MariaWorld, compared: bool
) -> None:
    source = await world.started()

    def failed(*, crashed: bool) -> Exception:
        flags = {"crashed": crashed, "compared": compared, "moved": False}
        return source._explain(
            Interrupted("MariaDB", "a cause", BinlogPlace("binlog.000001", 4), **flags)
        )

    for _ in range(3):  # at one place
        assert isinstance(failed(crashed=False), Interrupted)
    assert source._uncompared == compared
    error = failed(crashed=True)
    assert source._uncompared == compared
    assert isinstance(error, Interrupted if compared else ChangesLost)
    assert ("PURGE BINARY LOGS TO the file after it" in str(error)) != compared
