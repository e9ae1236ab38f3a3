"""What results in a database cost, as counts of statements and rows: the figures of
`benchmarks.exactly_once` hold only while these do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.kit.consumer_world import World
from txbroker.consumer import CommitPolicy, InDatabase, Later
from txbroker.core.records import Record
from txbroker.databases import SQLite
from txbroker.databases.dialect import DIALECTS
from txbroker.databases.kept import KeptTable
from txbroker.databases.positions import PositionTable
from txbroker.databases.steps import Query, Result, Steps, run
from txbroker.databases.tables import DONE

PARTITIONS, EACH = 4, 100


class Traced:
    """An SQLite database, and the statements that consumers execute in it, by their first words."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.database = SQLite(folder / "shop.db", create_tables=True)
        self.database.create()
        session = self.database.open()
        session.execute(Query("PRAGMA journal_mode = WAL"))  # faster
        session.execute(Query("CREATE TABLE results (value TEXT)"))
        session.close()
        self.counts: Counter[str] = Counter()
        opened = self.database.open

        def open_(*arguments: Any, **options: Any) -> Any:
            traced = opened(*arguments, **options)
            traced.connection.set_trace_callback(self._note)
            return traced

        monkeypatch.setattr(self.database, "open", open_)

    def _note(self, sql: str) -> None:
        self.counts[" ".join(sql.split()[:2])] += 1

    async def consume(self, world: World, count: int, batch: int = 0, **options: Any) -> None:
        """Handle `count` messages; count only statements between the first and the last result."""
        left = count

        def handle(argument: Any, connection: Any) -> None:
            nonlocal left
            if left == count:
                self.counts.clear()
                self.counts["BEGIN IMMEDIATE"] = 1  # its own
            messages = argument if batch else [argument]
            connection.executemany("INSERT INTO results VALUES (?)", [(m.value,) for m in messages])
            left -= len(messages)
            if not left:
                consumer.stop()

        given = {"mode": "exactly-once", "store": InDatabase(self.database), **options}
        given.setdefault("commit", CommitPolicy(max_batch=10_000, max_interval_s=60))
        async with world.consumer(**given) as consumer:
            await consumer.run(handle, batch=batch)
            self.found = self.counts.copy()


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traced:
    return Traced(tmp_path, monkeypatch)


@pytest.fixture
def world() -> World:
    world = World(PARTITIONS)
    for partition in range(PARTITIONS):
        records = [Record(b"%d" % (number % 25), b"x") for number in range(EACH)]
        world.kafka.write("orders", partition, records, None)
    return world


async def test_message_takes_one_statement_beside_its_transaction(
    world: World, traced: Traced
) -> None:
    count = PARTITIONS * EACH
    await traced.consume(world, count)
    assert traced.found.pop("SELECT topic,", 0) + traced.found.pop("SELECT DISTINCT", 0) <= 20
    assert traced.found["UPDATE txbroker_position"] == count
    assert traced.found["INSERT INTO"] == count, "the handler's"
    assert count <= traced.found["BEGIN IMMEDIATE"] <= count + 20, "those that look for retries"
    assert sum(traced.found.values()) <= 4 * count + 60


@pytest.mark.parametrize("in_flight_max", [1, 8])
async def test_batch_takes_one_statement_beside_its_transaction(
    world: World, traced: Traced, in_flight_max: int
) -> None:
    await traced.consume(world, PARTITIONS * EACH, batch=EACH, in_flight_max=in_flight_max)
    assert traced.found["UPDATE txbroker_position"] == PARTITIONS


async def test_round_stores_no_position_that_results_have_stored(
    world: World, traced: Traced
) -> None:
    rounds = CommitPolicy(max_batch=1, max_interval_s=0.001)
    await traced.consume(world, PARTITIONS * EACH, batch=EACH, in_flight_max=1, commit=rounds)
    stored = traced.found["UPDATE txbroker_position"]
    assert stored <= PARTITIONS + 2, "a round may begin between a result and its note"


async def test_done_rows_are_bounded_while_keys_are_stuck(tmp_path: Path, traced: Traced) -> None:
    """By the messages of a round, those in flight, and those that are done until it has ended."""
    keys, stuck, messages, round_ = 500, 10, 2_500, 100
    world = World(1)
    records = [Record(b"%d" % (number % keys), b"x") for number in range(messages)]
    world.kafka.write("orders", 0, records, None)
    most, left = 0, messages * (keys - stuck) // keys

    def handle(message: Any, connection: Any) -> None:
        nonlocal most, left
        most = max(most, connection.execute(f"SELECT count(*) FROM {DONE}").fetchone()[0])
        if int(message.key) < stuck:
            raise Later(3_600)
        left -= 1
        if not left:
            consumer.stop()

    given: dict[str, Any] = {"mode": "exactly-once", "order": "key"}
    given |= {"store": InDatabase(traced.database), "commit": CommitPolicy(max_batch=round_)}
    async with world.consumer(**given) as consumer:
        await consumer.run(handle)
    assert round_ / 2 < most <= 4 * round_


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_takeover_takes_as_many_statements_for_64_partitions_as_for_one(dialect: Any) -> None:
    table, kept = PositionTable(dialect, "stock"), KeptTable(dialect, "stock")

    def statements(partitions: int) -> int:
        places = [("orders", number) for number in range(partitions)]
        claim, keys = table.claim(places, 1), kept.keys("orders", range(partitions), "aside")
        return counted(claim) + counted(keys)

    assert statements(64) == statements(1) <= 5


def counted(steps: Steps[Any]) -> int:
    """Return how many statements steps are, on tables without rows."""
    count = 0

    def execute(query: Query) -> Result:
        nonlocal count
        count += 1
        return Result(0, ())

    run(steps, execute)
    return count
