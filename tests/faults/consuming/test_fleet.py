"""Consumers on a real Kafka while processes die, hang and lose answers; judged afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.consuming.exact_fleet import ExactFleet
from tests.faults.consuming.fleet import Case, Fleet
from tests.faults.consuming.nemesis import Nemesis
from tests.faults.consuming.soak import Result, run_case
from tests.kit.database_servers import PostgresServer
from txbroker.embedded import EmbeddedKafka

SEED = 7
CHOSEN = {
    Case("key", "aside"): ("consumer.committed", "consumer.key_handled"),
    Case("none", "retry"): ("consumer.committing", "answers lost", "cut off 4 s"),
    Case("key", None): ("stopped 9 s", "consumer.committed"),
}
"""Faults that every test run tries; `make test-faults` has all. None leaves a transaction open: one
hides what follows for a minute."""

CHOSEN_EXACT = {
    Case("key", "aside", store="sqlite"): ("consumer.result_committed", "cut off 4 s"),
    Case("key", "aside", store="postgresql", later=2, coroutine=True): (
        "commit answers lost",
        "stopped in the commit 9 s",
        "sessions changed",
    ),
}


@pytest.mark.timeout(180)
async def test_chosen_faults_break_no_rule(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    async def one(case: Case, kinds: tuple[str, ...]) -> Result:
        fleet = Fleet(kafka.bootstrap, case, tmp_path / case.name, SEED, size=2, rate=80.0)
        return await run_case(fleet, Nemesis(fleet), list(kinds), SEED)

    check(await asyncio.gather(*(one(case, kinds) for case, kinds in CHOSEN.items())))


@pytest.mark.timeout(180)
async def test_chosen_faults_break_no_result(
    kafka: EmbeddedKafka, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    async def one(case: Case, kinds: tuple[str, ...]) -> Result:
        server = postgres_server if case.store == "postgresql" else None
        folder = tmp_path / case.name
        fleet = ExactFleet(kafka.bootstrap, case, folder, SEED, server, size=2, rate=40.0)
        return await run_case(fleet, Nemesis(fleet), list(kinds), SEED)

    check(await asyncio.gather(*(one(case, kinds) for case, kinds in CHOSEN_EXACT.items())))


def check(results: Sequence[Result]) -> None:
    """Check that no rule is broken."""
    broken = [
        f"{result.case}: {why}" for result in results for why in (*result.violations, *result.wrong)
    ]
    assert not broken, "\n".join(broken[:10])
    assert all(result.messages for result in results)
