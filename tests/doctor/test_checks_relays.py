"""Checks of an outbox and its relays, on SQLite and on a made-up Kafka."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.kit.doctor import World
from txbroker.cli.doctor import checks_relays
from txbroker.cli.doctor import outbox as facts
from txbroker.cli.doctor.findings import CheckLevel, DoctorResult
from txbroker.cli.doctor.outbox import RelayTargets
from txbroker.cli.doctor.report import examine, scope_of
from txbroker.databases.database import Database
from txbroker.databases.outbox.table import OUTBOX, RELAY
from txbroker.databases.steps import Query
from txbroker.databases.urls import from_url
from txbroker.door.consuming import TopicSpec
from txbroker.relay import Outbox

OK, WARNING, FAILS = CheckLevel.OK, CheckLevel.WARNING, CheckLevel.FAILS
POSITIONS = "txbroker.relay"
OF_OUTBOX = scope_of("sqlite:///any.db", None, proxies=False).checks
OLD_MS = "created_at = created_at - 3600000"


class Relays:
    """An outbox whose relay runs, and the doctor that looks at it."""

    def __init__(self, database: Database, world: World) -> None:
        self.database, self.world = database, world
        Outbox(database, name="shop").create()
        self.execute(f"UPDATE {RELAY} SET owner = 'a', lease_until = {2**60}")
        world.kafka.topics[POSITIONS] = TopicSpec(POSITIONS, 1, 3, {"cleanup.policy": "compact"})

    def execute(self, *statements: str) -> None:
        with closing(self.database.open()) as session:
            for sql in statements:
                session.execute(Query(sql))

    def row(self, **columns: Any) -> None:
        """Insert a row."""
        columns = {"topic": "orders"} | columns
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        with closing(self.database.open()) as session:
            sql = f"INSERT INTO {OUTBOX} ({names}) VALUES ({marks})"
            session.execute(Query(sql, tuple(columns.values())))

    async def results(self) -> dict[str, DoctorResult]:
        subject = self.world.subject(RelayTargets(self.database))
        report = await examine(subject, OF_OUTBOX)
        await subject.close()
        assert not [one for one in report.outcomes if "broken" in one.found], report
        return {one.name: one for one in report.outcomes}


@pytest.fixture
def relays(world: World, tmp_path: Path) -> Relays:
    return Relays(from_url(f"sqlite:///{tmp_path}/shop.db", create_tables=True), world)


async def test_outbox_with_relay_is_well(relays: Relays) -> None:
    relays.row(state="GLOBAL_COMMIT")
    relays.row()
    results = await relays.results()
    assert {one.level for one in results.values()} == {OK}, results
    assert results["relays-tables"].found == f"outbox shop in {relays.database.name}"


FAULTS: dict[str, tuple[Callable[[Relays], None], str, CheckLevel, str]] = {
    "old row": (
        lambda it: (it.row(), it.execute(f"UPDATE {OUTBOX} SET {OLD_MS}"))[0],
        "relays-waiting", FAILS, "1 rows wait, the oldest for 3600 s",
    ),
    "refused row": (
        lambda it: it.row(next_at=2**50, retries=1, cause="it is too large"),
        "relays-waiting", WARNING, "topic orders: it is too large",
    ),
    "old undecided row": (
        lambda it: (it.row(state="UNKNOWN"), it.execute(f"UPDATE {OUTBOX} SET {OLD_MS}"))[0],
        "relays-undecided", WARNING, "1 rows are undecided, the oldest for 3600 s",
    ),
    "given up": (
        lambda it: it.row(state="MESSAGE_ERROR"), "relays-errors", WARNING, "1 rows are in the",
    ),
    "no relay": (
        lambda it: it.execute(f"UPDATE {RELAY} SET lease_until = 1"),
        "relays-running", WARNING, "shard 0: 0 rows wait",
    ),
    "no relay for rows": (
        lambda it: (it.row(shard=7), it.execute(f"UPDATE {RELAY} SET lease_until = 1"))[0],
        "relays-running", FAILS, "shard 0: 1 rows wait",
    ),
    "older tables of consumers": (
        lambda it: (it.database.create(), it.execute("UPDATE txbroker_schema SET version = 0"))[0],
        "relays-versions", FAILS, "of version 0; this txbroker uses version 1: restore the rows of",
    ),
    "newer tables of consumers": (
        lambda it: (it.database.create(), it.execute("UPDATE txbroker_schema SET version = 7"))[0],
        "relays-versions", FAILS, "txbroker_inbox of version 7; this txbroker uses version 1: use",
    ),
    "missing shard": (
        lambda it: it.execute(f"UPDATE {RELAY} SET shards = 2"),
        "relays-running", FAILS, "shard 1 has no row",
    ),
    "impossible state": (
        lambda it: it.execute(
            "PRAGMA ignore_check_constraints = 1",
            f"INSERT INTO {OUTBOX} (topic, state) VALUES ('orders', 'SENT')",
        ),
        "relays-states", FAILS, "state 'SENT' is none of",
    ),
    "deleted positions": (
        lambda it: it.world.kafka.topics.update(
            {POSITIONS: TopicSpec(POSITIONS, 2, 3, {"cleanup.policy": "compact,delete"})}
        ),
        "relays-topic", FAILS, "cleanup.policy is compact,delete",
    ),
    "no topic of positions": (
        lambda it: it.world.kafka.topics.pop(POSITIONS) and None,
        "relays-topic", WARNING, "a relay creates it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
async def test_fault_is_found_by_its_check_alone(relays: Relays, fault: str) -> None:
    cause, name, level, text = FAULTS[fault]
    cause(relays)
    results = await relays.results()
    assert {one.name for one in results.values() if one.level is not OK} == {name}, results
    found = results[name]
    assert found.level is level
    assert text in "\n".join((found.found, *found.details))
    assert found.hint


async def test_missing_tables_leave_the_rest_unknown(world: World, tmp_path: Path) -> None:
    subject = world.subject(RelayTargets(from_url(f"sqlite:///{tmp_path}/empty.db")))
    report = await examine(subject, OF_OUTBOX)
    await subject.close()
    levels = {one.name: one.level for one in report.outcomes}
    assert levels["relays-tables"] is FAILS
    assert levels["relays-running"] is CheckLevel.UNKNOWN


async def test_outbox_of_another_version_leaves_the_rest_unknown(relays: Relays) -> None:
    relays.execute(f"UPDATE {RELAY} SET version = 7")
    results = await relays.results()
    found, other = results["relays-tables"], results.pop("relays-versions")
    assert (found.level, other.level, other.details) == (FAILS, FAILS, (found.found,))
    assert "txbroker_outbox, txbroker_relay of version 7" in found.found
    unread = {name for name, one in results.items() if one.level is CheckLevel.UNKNOWN}
    assert unread == {check.name for check in checks_relays.book.checks} - {
        "relays-tables",
        "relays-versions",
    }


async def test_small_packets_are_found(relays: Relays, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = await facts.outbox_facts(relays.database)

    async def small(_database: Database) -> facts.OutboxFacts:
        return structs.replace(whole, packet_bytes=1 << 20)

    monkeypatch.setattr("txbroker.cli.doctor.subject.outbox_facts", small)
    assert (await relays.results())["relays-packet"].level is WARNING


async def test_steps_of_a_capture_are_its_findings(world: World, tmp_path: Path) -> None:
    database = tmp_path / "shop.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
    file = tmp_path / "shop.toml"
    file.write_text(
        f'name = "shop"\ndatabase = "sqlite:///{database}"\n'
        '[[tables]]\ntable = "orders"\ntopic = "orders"\n'
    )
    levels = []
    for _ in range(2):
        scope = scope_of(None, file, proxies=False)
        subject = world.subject(scope.relays)
        report = await examine(subject, scope.checks)
        await subject.close()
        levels += [one.level for one in report.outcomes if one.name == "relays-capture"]
        assert scope.relays.capture is not None
        await scope.relays.capture.apply()
    assert levels == [FAILS, OK]


@pytest.mark.full
@pytest.mark.parametrize("server", ["postgres_server", "mariadb_server"])
async def test_facts_of_servers(request: pytest.FixtureRequest, world: World, server: str) -> None:
    url = request.getfixturevalue(server).create_database()
    relays = Relays(from_url(url, create_tables=True), world)
    relays.row(shard=3)
    results = await relays.results()
    assert {one.level for one in results.values()} == {OK}, results
