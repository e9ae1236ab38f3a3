"""Barrier and inbox on the connections of each library."""

from __future__ import annotations

from typing import Any

import pytest

from tests.databases.callers import ASYNC_CALLERS, CALLERS, AsyncCaller, Caller
from tests.databases.places import Place, sqlite_place, with_tables
from tests.kit.until import unique
from txbroker.core.records import Decision
from txbroker.databases import (
    AlreadyRecorded,
    Barrier,
    Inbox,
    TooLate,
)
from txbroker.errors import ConfigurationError


class Failed(Exception):
    """The local transaction has failed."""


def params(callers: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(each, id=name, marks=[] if each.kind == "sqlite" else [pytest.mark.full])
        for name, each in callers.items()
    ]


@pytest.fixture
def id() -> str:
    return unique("tx")


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """The database of the caller."""
    caller = request.node.callspec.params["caller"]
    if caller.kind == "sqlite":
        return with_tables(sqlite_place(request.getfixturevalue("tmp_path")))
    found: Place = request.getfixturevalue(
        "postgres_place" if caller.kind == "postgresql" else "mariadb_place"
    )
    return found


# --- connections of callers ------------------------------------------------------------------


def local_transaction(caller: Caller, place: Place, id: str, *, fail: bool = False) -> None:
    with caller.inside(place) as connection:
        assert Inbox(place.database).accept(connection, id)
        Barrier(place.database).record(connection, id)
        if fail:
            raise Failed


@pytest.mark.parametrize("caller", params(CALLERS))
def test_rows_are_part_of_the_transaction(caller: Caller, place: Place, id: str) -> None:
    barrier, late = Barrier(place.database), f"{id}-late"
    with pytest.raises(Failed):
        local_transaction(caller, place, id, fail=True)
    local_transaction(caller, place, id)
    assert barrier.check(id) is Decision.COMMIT
    with caller.inside(place) as connection:
        assert not Inbox(place.database).accept(connection, id)
        with pytest.raises(AlreadyRecorded):
            barrier.record(connection, id)
    assert barrier.check(late) is Decision.ROLLBACK
    with pytest.raises(TooLate):
        local_transaction(caller, place, late)


@pytest.mark.rule(24)
@pytest.mark.parametrize("caller", params(CALLERS))
def test_connection_outside_a_transaction_is_refused(caller: Caller, place: Place, id: str) -> None:
    with caller.outside(place) as connection:
        with pytest.raises(ConfigurationError, match="commits every statement"):
            Barrier(place.database).record(connection, id)
        with pytest.raises(ConfigurationError, match="commits every statement"):
            Inbox(place.database).accept(connection, id)
    assert_nothing_stored(place, id)


def assert_nothing_stored(place: Place, id: str) -> None:
    for table in ("txbroker_barrier", "txbroker_inbox"):
        assert place.select(f"SELECT * FROM {table} WHERE id = '{id}'") == []


async def local_transaction_async(
    caller: AsyncCaller, place: Place, id: str, *, fail: bool = False
) -> None:
    async with caller.inside(place) as connection:
        assert await Inbox(place.database).accept_async(connection, id)
        await Barrier(place.database).record_async(connection, id)
        if fail:
            raise Failed


@pytest.mark.parametrize("caller", params(ASYNC_CALLERS))
async def test_rows_are_part_of_the_transaction_async(
    caller: AsyncCaller, place: Place, id: str
) -> None:
    barrier, late = Barrier(place.database), f"{id}-late"
    with pytest.raises(Failed):
        await local_transaction_async(caller, place, id, fail=True)
    await local_transaction_async(caller, place, id)
    assert await barrier.check_async(id) is Decision.COMMIT
    async with caller.inside(place) as connection:
        assert not await Inbox(place.database).accept_async(connection, id)
        with pytest.raises(AlreadyRecorded):
            await barrier.record_async(connection, id)
    assert await barrier.check_async(late) is Decision.ROLLBACK
    with pytest.raises(TooLate):
        await local_transaction_async(caller, place, late)
    assert await barrier.forget_async(10**6) == 0


@pytest.mark.parametrize("caller", params(ASYNC_CALLERS))
async def test_connection_outside_a_transaction_is_refused_async(
    caller: AsyncCaller, place: Place, id: str
) -> None:
    async with caller.outside(place) as connection:
        with pytest.raises(ConfigurationError, match="commits every statement"):
            await Barrier(place.database).record_async(connection, id)
        with pytest.raises(ConfigurationError, match="commits every statement"):
            await Inbox(place.database).accept_async(connection, id)
        with pytest.raises(ConfigurationError, match="_async"):
            Inbox(place.database).accept(connection, id)
    assert_nothing_stored(place, id)
