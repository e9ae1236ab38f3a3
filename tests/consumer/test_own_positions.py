"""`PositionStore`: positions where the user keeps them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from tests.kit.consumer_world import Handler, World
from tests.kit.until import until
from txbroker.consumer import Reject
from txbroker.errors import ConfigurationError

Positions = dict[tuple[str, int], tuple[int, str]]


class Plain:
    """Positions in a dictionary.

    Attributes:
        failing: errors of the next calls of `save`.
    """

    def __init__(self) -> None:
        self.positions: Positions = {}
        self.failing: list[Exception] = []
        self.loads: list[list[tuple[str, int]]] = []

    def load(self, partitions: Collection[tuple[str, int]]) -> Any:
        self.loads.append(sorted(partitions))
        return {place: self.positions[place] for place in partitions if place in self.positions}

    def save(self, positions: Mapping[tuple[str, int], tuple[int, str]]) -> Any:
        if self.failing:
            raise self.failing.pop()
        self.positions.update({at: (offset, text) for at, (offset, text) in positions.items()})

    def low(self, partition: int = 0) -> int:
        return self.positions.get(("orders", partition), (-1, ""))[0]


class Coroutines(Plain):
    async def load(self, partitions: Collection[tuple[str, int]]) -> Any:
        await asyncio.sleep(0)
        return super().load(partitions)

    async def save(self, positions: Mapping[tuple[str, int], tuple[int, str]]) -> Any:
        await asyncio.sleep(0)
        super().save(positions)


@pytest.mark.parametrize("mode", ["at-least-once", "at-most-once"])
@pytest.mark.parametrize("store", [Plain(), Coroutines()], ids=["plain", "coroutines"])
async def test_restart_continues(world: World, mode: str, store: Plain) -> None:
    store.positions.clear()
    handler = Handler()
    for total in (2, 4):
        world.produce(f"a={total}")
        world.produce(f"b={total + 1}", partition=1)
        store.failing = [OSError("full"), OSError("full")]
        async with world.running(handler, mode=mode, order="key", store=store):
            await until(lambda total=total: len(handler.done) == total)
            await until(lambda total=total: store.low(0) == store.low(1) == total // 2)
        assert not store.failing
    assert sorted(handler.seen) == ["2", "3", "4", "5"]
    assert set(store.loads[0]) >= {("orders", 0), ("orders", 1)}
    assert world.committed()[0] == 2, "tools see the position"


async def test_start_decides_without_a_position(world: World) -> None:
    handler, store = Handler(), Plain()
    world.produce("old")
    async with world.running(handler, store=store, start="latest"):
        world.produce("new")
        await handler.does("new")


async def test_done_ranges_survive(world: World) -> None:
    handler, store = Handler(**{"1": ValueError("bug")}), Plain()
    world.produce("a=1", "b=2", "c=3")
    async with world.running(handler, order="key", store=store):
        await handler.does("2", "3")
        await until(lambda: store.low() == 0 and store.positions["orders", 0][1][-1] != ":")
    handler.failing.clear()
    async with world.running(handler, order="key", store=store):
        await until(lambda: store.low() == 3)
    assert handler.done == ["2", "3", "1"]


async def test_dead_letter_before_its_position(world: World) -> None:
    """At least once: `save` fails after the copy is written."""
    handler, store = Handler(**{"1": Reject("bad")}), Plain()
    async with world.running(handler, store=store, on_failure="skip"):
        await until(lambda: store.low() == 0)
        store.failing = [OSError("full")]
        world.produce("a=1")
        await until(lambda: store.low() == 1)
    assert set(world.values("dead")) == {"1"}


@pytest.mark.parametrize(
    ("found", "match"),
    [
        ({("orders", 0): (3, "another program's")}, "another program wrote them"),
        ({("returns", 0): (3, "")}, "which was not asked for"),
        ({("orders", 0): 3}, r"a position is \(offset, text\)"),
        ([3], "it returns a dict of positions"),
    ],
)
async def test_foreign_positions_are_refused(world: World, found: Any, match: str) -> None:
    store = Plain()
    store.load = lambda _partitions: found  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match=match):
        async with world.consumer(store=store) as consumer:
            await asyncio.wait_for(consumer.run(Handler()), 10)


def test_object_without_the_methods(world: World) -> None:
    with pytest.raises(ConfigurationError, match="methods load and save"):
        world.consumer(store=object())
