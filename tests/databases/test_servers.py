"""The tests' database servers: unprivileged, durable, and gone with the process that ran them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest

from tests.kit import database_servers
from tests.kit.database_servers import DatabaseServer, MariaServer, PostgresServer, program
from tests.kit.database_supervisor import descendants
from tests.kit.until import free_ports, until

pytestmark = pytest.mark.full

OWNER = """
import sys, time
from tests.kit import database_servers

server = getattr(database_servers, sys.argv[1])()
server.start()
if sys.argv[2] == "paused":
    server.pause()
print(server.folder, flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["postgres_server", "mariadb_server"])
def server(request: pytest.FixtureRequest) -> DatabaseServer:
    return request.getfixturevalue(request.param)


def connect(url: str, timeout_s: int = 10) -> Any:
    if url.startswith("postgresql:"):
        return psycopg.connect(url, connect_timeout=timeout_s)
    parts = urlsplit(url)
    return pymysql.connect(
        host=parts.hostname,
        port=parts.port,
        user=parts.username,
        password=parts.password or "",
        database=parts.path[1:],
        connect_timeout=timeout_s,
        read_timeout=timeout_s,
    )


def run(url: str, *statements: str) -> list[Any]:
    """Commit statements; return the rows of the last one."""
    with closing(connect(url)) as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        rows = cursor.fetchall()
        connection.commit()
        return list(rows)


def test_server_does_not_run_as_root(server: DatabaseServer) -> None:
    pids = [server.pid, *descendants(server.pid)]
    assert [pid for pid in pids if os.stat(f"/proc/{pid}").st_uid == 0] == []


@pytest.mark.parametrize("end", [DatabaseServer.kill, DatabaseServer.stop])
def test_commit_survives_an_end(
    server: DatabaseServer, end: Callable[[DatabaseServer], None]
) -> None:
    url, before = server.create_database(), server.pid
    run(url, "CREATE TABLE kept (id INT)", "INSERT INTO kept VALUES (1)", "SELECT 1")
    with closing(connect(url)) as open_one:
        open_one.cursor().execute("INSERT INTO kept VALUES (2)")
        end(server)
        assert server.pid == 0
        assert not Path(f"/proc/{before}").exists()
    server.start()
    assert server.pid not in (0, before)
    assert run(url, "SELECT id FROM kept") == [(1,)]


def test_paused_server_answers_after_it_is_resumed(server: DatabaseServer) -> None:
    url = server.create_database()
    server.pause()
    try:
        with pytest.raises((psycopg.OperationalError, pymysql.OperationalError)):
            connect(url, timeout_s=2)
    finally:
        server.resume()
    assert run(url, "SELECT 1") == [(1,)]


def test_databases_are_separate(server: DatabaseServer) -> None:
    first, second = server.create_database(), server.create_database("named")
    assert second == server.url("named")
    run(first, "CREATE TABLE one (id INT)", "SELECT 1")
    assert run(first, "SELECT count(*) FROM one") == [(0,)]
    with pytest.raises((psycopg.ProgrammingError, pymysql.ProgrammingError)):
        run(second, "SELECT count(*) FROM one")


@pytest.mark.parametrize("kind", [PostgresServer, MariaServer])
def test_taken_port_is_replaced(
    kind: type[DatabaseServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = [[other.getsockname()[1]], free_ports(1)]
        wanted = ports[1][0]
        monkeypatch.setattr(database_servers, "free_ports", lambda _count: ports.pop(0))
        with kind() as server:
            assert (server.port, ports) == (wanted, [])


@pytest.mark.parametrize("state", ["running", "paused"])
@pytest.mark.parametrize("kind", [PostgresServer, MariaServer])
async def test_nothing_is_left_of_a_killed_owner(kind: type[DatabaseServer], state: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, kind.__name__, state],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        try:
            assert owner.stdout is not None
            folder = Path(owner.stdout.readline().strip())
            pids = [*descendants(owner.pid)]
            assert len(pids) >= 2, "a supervisor and a server"
        finally:
            owner.send_signal(signal.SIGKILL)
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert not folder.exists()


def test_server_dies_with_its_supervisor() -> None:
    # A PostgreSQL that is killed leaves System V memory until its next start.
    with MariaServer() as server:
        supervisor = server._supervisor
        assert supervisor is not None
        pids = [*descendants(supervisor.pid)]
        supervisor.kill()
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_missing_program_is_named() -> None:
    with pytest.raises(AssertionError, match=r"^no-such is missing: `make tools` installs it"):
        program("no-such")
