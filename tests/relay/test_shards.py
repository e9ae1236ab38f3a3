"""Shards that relays hand over to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from tests.databases.places import Place, run
from tests.relay.schedules import OutboxInMemory
from txbroker.databases.database import DatabaseUnavailable, steps_in_transaction
from txbroker.databases.dialect import SQLITE
from txbroker.databases.outbox.leases import Leases
from txbroker.databases.steps import Query, Result, Steps
from txbroker.relay.outbox import Outbox
from txbroker.relay.sessions import DatabaseThread
from txbroker.relay.shards import Shards


class Recorded:
    """A `DatabaseThread` on SQL in memory, which keeps all statements."""

    def __init__(self) -> None:
        self.database = OutboxInMemory()
        self.database.clear(4)
        self.statements: list[str] = []

    async def transaction(self, steps: Callable[[], Steps[Any]]) -> Any:
        """See `DatabaseThread.transaction`."""
        return steps_in_transaction(steps(), cast(Any, self))

    read = transaction

    def begin(self) -> None:
        """See `Session.begin`."""
        self.database.session.begin()

    def commit(self) -> None:
        """See `Session.commit`."""
        self.database.session.commit()

    def execute(self, query: Query) -> Result:
        """See `Session.execute`."""
        self.statements.append(query.sql)
        return self.database.session.execute(query)


@pytest.mark.parametrize("wanted", [0, 1])
async def test_a_relay_gives_shards_that_are_wanted_and_that_it_could_not_open(wanted: int) -> None:
    thread = Recorded()

    async def start(_shard: int) -> Any:
        raise DatabaseUnavailable("no connection")

    own, other = (Leases(SQLITE, owner, 10) for owner in ("own", "other"))
    shards = Shards(cast(DatabaseThread, thread), own, 10, start, pytest.fail)
    with pytest.raises(DatabaseUnavailable):
        await shards.round()
    await thread.transaction(lambda: own.release([3]))
    await thread.transaction(lambda: other.take(1))
    for shard in range(wanted):
        await thread.transaction(lambda shard=shard: other.want([shard]))  # type: ignore[misc]
    thread.statements.clear()
    with pytest.raises(DatabaseUnavailable):
        await shards.round()
    leases = await thread.read(own.all)
    assert [lease.shard for lease in leases if lease.owner == "own"] == [0, 1, 2][wanted:]
    assert not [sql for sql in thread.statements if "()" in sql], "only SQLite takes empty lists"


@pytest.mark.rule(51)
async def test_a_relay_takes_shards_that_a_dead_relay_wanted_of_a_dead_owner() -> None:
    thread = Recorded()
    opened: list[int] = []

    async def start(shard: int) -> Any:
        opened.append(shard)
        raise DatabaseUnavailable("no connection")

    dead, asking, own = (Leases(SQLITE, owner, 10) for owner in ("dead", "asking", "own"))
    await thread.transaction(lambda: dead.take(4))
    await thread.transaction(lambda: asking.want([2, 3]))
    thread.database.now_ms += 11_000
    shards = Shards(cast(DatabaseThread, thread), own, 10, start, pytest.fail)
    with pytest.raises(DatabaseUnavailable):
        await shards.round()
    leases = await thread.read(own.all)
    assert [lease.owner for lease in leases] == ["own"] * 4


@pytest.mark.rule(51)
@pytest.mark.parametrize("kind", ["postgresql", "mariadb"], indirect=True)
async def test_rows_that_another_transaction_has_locked_are_skipped(
    kind: Place, outbox: Outbox
) -> None:
    def free() -> Steps[list[int]]:
        select = "SELECT shard FROM txbroker_relay WHERE shard IN (0, 1, 2, 3)"
        found = yield Query(kind.database.dialect.lock_free.format(select=select))
        return sorted(int(row[0]) for row in found.rows)

    leases = Leases(kind.database.dialect, "own", 10)
    thread = DatabaseThread(kind.database, outbox.tables)
    assert await thread.transaction(lambda: leases.take(1)) == [0]
    assert await thread.transaction(lambda: leases.divide(4))
    with kind.transaction() as connection:
        run(connection, "SELECT shard FROM txbroker_relay WHERE shard = 1 FOR UPDATE")
        assert await thread.transaction(free) == [0, 2, 3]
    assert await thread.transaction(free) == [0, 1, 2, 3]
    await thread.close()
