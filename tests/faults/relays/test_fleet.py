"""Relays as processes that die, hang and lose answers, on real databases and a real Kafka."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.relays.fleet import MOMENTS, Case, Fleet, run_case
from tests.kit.database_servers import DatabaseServer
from txbroker.embedded import EmbeddedKafka

SEED = 7
CASES = (Case("sqlite"), Case("postgresql"), Case("mariadb"))
OTHERS = {
    "sqlite": ["stopped at relay.written"],
    "postgresql": ["database killed", "stopped at relay.ending"],
    "mariadb": ["answers lost", "database restarted"],
}
"""Beside a third of the moments each; the soak tries all on all."""


@pytest.mark.timeout(240)
async def test_chosen_faults_break_no_rule(
    kafka: EmbeddedKafka,
    postgres_server: DatabaseServer,
    mariadb_server: DatabaseServer,
    tmp_path: Path,
) -> None:
    servers = {"postgresql": postgres_server, "mariadb": mariadb_server}

    async def one(number: int, case: Case) -> tuple[int, list[str]]:
        server = servers.get(case.database)
        url = f"sqlite:///{tmp_path}/shop.db" if server is None else server.create_database()
        folder = tmp_path / case.name
        fleet = Fleet(kafka.bootstrap, case, url, folder, SEED, server=server)
        moments = [f"killed at {point}" for point in MOMENTS[number :: len(CASES)]]
        return await run_case(fleet, [*moments, *OTHERS[case.database]])

    results = await asyncio.gather(*(one(number, case) for number, case in enumerate(CASES)))
    assert [wrong for _, wrong in results] == [[]] * len(CASES)
    assert all(count for count, _ in results)
