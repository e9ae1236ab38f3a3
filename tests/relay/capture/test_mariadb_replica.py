"""A capture of MariaDB goes on at a replica that has taken over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.database_servers import PASSWORD, USER, MariaServer
from tests.kit.until import until
from tests.relay.capture.deliveries import read
from tests.relay.capture.maria_world import BINLOG, MariaWorld

REPLICA = {**BINLOG, "server_id": 2, "log_slave_updates": 1, "slave_skip_errors": "all"}
"""Both servers have the user of the tests."""


OTHER = "INSERT INTO other VALUES (2)"


@pytest.fixture(scope="module")
def server() -> Iterator[MariaServer]:
    """A server whose log is whole: others reset and purge theirs."""
    with MariaServer(**BINLOG) as running:
        yield running


@pytest.fixture(scope="module")
def replica(server: MariaServer) -> Iterator[MariaServer]:
    """A replica of the server, which applies domains side by side."""
    settings = {**REPLICA, "slave_parallel_threads": 4, "slave_domain_parallel_threads": 2}
    with MariaServer(**settings) as running:
        yield running


@pytest.fixture
async def world(server: MariaServer, replica: MariaServer, tmp_path: Path) -> MariaWorld:
    """A database that the replica has."""
    made = MariaWorld(server, tmp_path)
    made.admin(f"GRANT REPLICATION SLAVE ON *.* TO `{USER}`@`127.0.0.1`")
    replica._execute(
        "STOP SLAVE",
        "RESET MASTER",
        "SET GLOBAL gtid_slave_pos = ''",
        f"CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {server.port}, "
        f"MASTER_USER = '{USER}', MASTER_PASSWORD = '{PASSWORD}', "
        "MASTER_USE_GTID = slave_pos, MASTER_SSL_VERIFY_SERVER_CERT = 0",
        "START SLAVE",
    )
    return made


async def caught_up(replica: MariaServer, position: bytes) -> None:
    """Wait until a replica has logged a position."""
    wanted = set(json.loads(position)["gtids"].split(","))
    with replica._connect() as connection, connection.cursor() as cursor:

        def logged() -> bool:
            cursor.execute("SELECT @@gtid_binlog_pos")
            return wanted <= set(cursor.fetchone()[0].split(","))

        await until(logged)


@pytest.mark.parametrize("captured", [True, False])
async def test_a_replica_has_other_times(
    world: MariaWorld, replica: MariaServer, captured: bool
) -> None:
    """It logs the time of a transaction's last statement for that of its commit."""
    source = await world.started()
    with world.connect() as connection, connection.cursor() as cursor:
        world.execute("INSERT INTO orders VALUES (1, 'a')")
        first = await read(source)
        cursor.execute("SET timestamp = UNIX_TIMESTAMP() - 5")
        cursor.execute("BEGIN")
        cursor.execute("INSERT INTO orders VALUES (2, 'b')" if captured else OTHER)
        cursor.execute("SET timestamp = DEFAULT")
        cursor.execute("COMMIT")
    last = await read(source, empty=True)
    await caught_up(replica, last.position)
    await source.close()
    world.url = world.url.replace(str(world.server.port), str(replica.port))
    again = await read(await world.source(first.position), empty=not captured)
    if captured:
        assert again.ids == last.ids
    world.server = replica
    world.execute("INSERT INTO orders VALUES (3, 'after')")
    assert (await read(await world.source(last.position))).changes == [("insert", 3, "after")]


async def test_a_replica_has_another_order_of_domains(
    world: MariaWorld, replica: MariaServer
) -> None:
    """It applies a later transaction of another domain first."""
    source = await world.started()
    world.execute("INSERT INTO orders VALUES (1, 'a')")
    begin = await read(source)
    await caught_up(replica, begin.position)
    with replica._connect() as connection, connection.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT * FROM `{world.database}`.orders WHERE id = 1 FOR UPDATE")
        world.execute("UPDATE orders SET item = 'first' WHERE id = 1")
        first = await read(source)
        world.admin("SET gtid_domain_id = 7", "INSERT INTO orders VALUES (2, 'second')")
        second = await read(source)
        seventh = json.dumps({"gtids": json.loads(second.position)["gtids"].split(",")[-1]})
        await caught_up(replica, seventh.encode())
        cursor.execute("ROLLBACK")
    await caught_up(replica, second.position)
    await source.close()
    world.url = world.url.replace(str(world.server.port), str(replica.port))
    taken = await read(await world.source(first.position))
    assert taken.ids == second.ids
    world.server = replica
    world.execute("INSERT INTO orders VALUES (3, 'after')")
    for position in (taken.position, second.position):
        after = await read(await world.source(position))
        assert after.changes == [("insert", 3, "after")]
