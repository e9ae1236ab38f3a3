"""Relays as processes that die, hang and lose answers, on real databases and a real Kafka."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.relays.fleet import MOMENTS, Case, Fleet, run_case
from tests.kit.database_servers import DatabaseServer
from txbroker.embedded import EmbeddedKafka

SEED = 7
_AT = [f"killed at {point}" for point in MOMENTS]
CHOSEN = {
    Case("sqlite"): _AT[::3],
    Case("postgresql"): [*_AT[1::3], "database killed", "stopped at relay.ending"],
    Case("mariadb"): [*_AT[2::3], "answers lost", "stopped at relay.written"],
    Case("postgresql", captured=True): ["killed at relay.committed", "forged positions"],
}
"""Each moment once; the soak tries all on all."""


@pytest.mark.timeout(240)
async def test_chosen_faults_break_no_rule(
    kafka: EmbeddedKafka,
    postgres_server: DatabaseServer,
    mariadb_server: DatabaseServer,
    tmp_path: Path,
) -> None:
    servers = {"postgresql": postgres_server, "mariadb": mariadb_server}

    async def one(case: Case, kinds: list[str]) -> tuple[int, list[str]]:
        server = servers.get(case.database)
        url = f"sqlite:///{tmp_path}/shop.db" if server is None else server.create_database()
        folder = tmp_path / case.name
        fleet = Fleet(kafka.bootstrap, case, url, folder, SEED, server=server, rate=25.0)
        return await run_case(fleet, kinds)

    results = await asyncio.gather(*(one(*each) for each in CHOSEN.items()))
    assert [wrong for _, wrong in results] == [[]] * len(CHOSEN)
    assert all(count for count, _ in results)
