"""Class 13: a team with many groups uses up what all teams share, and another team goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.kit.memory import MemoryHarness
from tests.kit.until import until
from tests.security.installation import Installation
from txbroker.contract import frames as wire
from txbroker.core import settled
from txbroker.core.segment import ROW_BYTES, SEGMENT_BYTES
from txbroker.proxy.partition.partition_api import PartitionApi

CLASS = 13
POOL = 50
"""What a half partition holds; four fifths of it are one team's."""
PART = 40
MANY = 240
HALF_PARTITIONS = 4

Start = Callable[..., Awaitable[Installation]]


@pytest.fixture(params=[1, 2], ids=["one proxy", "two proxies"])
async def start(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts an installation with small pools."""
    async with AsyncExitStack() as stack:

        async def started(**settings: Any) -> Installation:
            world = MemoryHarness()
            stack.push_async_callback(world.close)
            made = Installation(world, tmp_path)
            stack.push_async_callback(made.close)
            if settled_share := settings.pop("settled_share", 0):
                settings["settled_bytes_max"] = settled_share * HALF_PARTITIONS // request.param
            await made.start(request.param, **settings)
            return made

        yield started


async def prepared_by(made: Installation, team: str, group: str) -> tuple[str, str]:
    """Prepare a transaction; return the outcome and its id."""
    body = made.prepare_body(group)
    answer = await made.post("/v1/transactions", body, by=team)
    return answer.outcome, str((answer.body or {}).get("id", ""))


async def others_go_on(made: Installation) -> None:
    """The other team prepares and decides, in one half partition or another."""
    for _ in range(8):
        id = await made.prepared("bank")
        path = f"/v1/transactions/{id}/commit"
        assert (await made.post(path, {"group": "bank"}, by="bank")).status == 200


async def test_undecided_transactions_of_many_groups(start: Start, record_property: Any) -> None:
    made = await start(pending_max=POOL)
    outcomes = [(await prepared_by(made, "shop", f"shop-{n}"))[0] for n in range(MANY)]
    assert outcomes.count("201") == 4 * PART
    assert set(outcomes) == {"201", "429 overloaded"}
    await others_go_on(made)

    # With a file without the team each of its groups is a separate share, and back.
    async def taken() -> bool:
        return (await prepared_by(made, "operator", "shop-one-more"))[0] == "201"

    async def counted_again() -> bool:
        owners = [owner for proxy in made.proxies for owner in proxy.broker.ledgers()]
        return all(owner.ledger.index.unsettled.of("\nshop") >= PART for owner in owners)

    made.allow("bank", "operator")
    await until(taken)
    made.allow("shop", "bank", "operator")
    await until(counted_again)
    assert (await prepared_by(made, "shop", "shop-two-more"))[0] == "429 overloaded"
    await others_go_on(made)
    record_property("result", "429 overloaded at four fifths; another team goes on")


async def test_settled_transactions_of_many_groups(
    start: Start, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(settled, "SEGMENT_ENTRIES", 1)
    made = await start(settled_share=POOL * (SEGMENT_BYTES + ROW_BYTES))
    outcomes = []
    for number in range(MANY):
        outcome, id = await prepared_by(made, "shop", f"shop-{number}")
        outcomes.append(outcome)
        if outcome == "201":
            path = f"/v1/transactions/{id}/rollback"
            await made.post(path, {"group": f"shop-{number}"}, by="shop")
    assert outcomes.count("201") == 4 * PART
    assert set(outcomes) == {"201", "429 overloaded"}
    await others_go_on(made)
    record_property("result", "429 overloaded at four fifths; another team goes on")


async def test_sessions_of_many_groups(start: Start, record_property: Any) -> None:
    made = await start(sessions_max=5)
    for url in made.urls:
        async with AsyncExitStack() as stack:
            for number in range(4):
                socket = await stack.enter_async_context(made.socket("shop", url))
                assert isinstance(await socket.hello(f"shop-{number}"), wire.Welcome)
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await stack.enter_async_context(made.socket("shop", url))
            assert refused.value.status == 429
            other = await stack.enter_async_context(made.socket("bank", url))
            assert isinstance(await other.hello("bank"), wire.Welcome)
    record_property(
        "result", "429 overloaded at four fifths of the sessions; another team gets one"
    )


async def test_bytes_of_stuck_prepares(
    start: Start, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """Prepares of one team that their owner holds up, at each proxy and handed on to the other."""
    sizes = ("message_bytes_max", "transaction_bytes_max", "frame_bytes_max", "request_bytes_max")
    bounds = dict(zip(sizes, (60_000, 60_000, 130_000, 150_000), strict=True))
    made = await start(session_in_flight_bytes_max=200_000, in_flight_bytes_max=500_000, **bounds)
    decided = await made.prepared("shop")
    gate, prepare = asyncio.Event(), PartitionApi.prepare

    async def held_up(api: PartitionApi, halves: Any, instance: str = "") -> Any:
        if halves[0][0].group.startswith("shop"):
            await gate.wait()
        return await prepare(api, halves, instance)

    monkeypatch.setattr(PartitionApi, "prepare", held_up)

    async def call(team: str, group: str, size: int, url: str) -> str:
        body = made.prepare_body(group)
        body["messages"][0]["value_base64"] = "eHh4" * (size // 3)
        return (await made.post("/v1/transactions", body, by=team, at=url)).outcome

    floods = [(f"shop-{number}", url) for number in range(100) for url in made.urls]
    tasks = [asyncio.create_task(call("shop", group, 6_000, url)) for group, url in floods]

    async def refused() -> bool:
        return sum(task.done() for task in tasks) >= 40 * len(made.urls)

    try:
        await until(refused)
        assert {task.result() for task in tasks if task.done()} == {"429 overloaded"}
        for url in made.urls * 4:
            assert await call("bank", "bank", 20_000, url) == "201"
            path = f"/v1/transactions/{decided}/commit"
            answer = await made.post(path, {"group": "shop"}, by="shop", at=url)
            assert answer.status == 200
    finally:
        gate.set()
        await asyncio.gather(*tasks)
    record_property("result", "429 overloaded at its part; its decisions and another team go on")


async def test_labels_of_metrics(start: Start) -> None:
    """No team takes all labels: others keep their series."""
    made = await start(group_labels_max=5)
    for number in range(40):
        assert (await prepared_by(made, "shop", f"shop-{number}"))[0] == "201"
    for url in made.urls:
        await made.get("/metrics", by="operator", at=url)
    for _ in range(8):
        await made.prepared("bank")
    for url in made.urls:
        shown = (await made.get("/metrics", by="operator", at=url)).body
        lines = [line for line in shown.splitlines() if line.startswith("txbroker_pending{")]
        assert sum("shop" in line for line in lines) == 4
        assert any('group="bank"' in line for line in lines)
        assert any('group="other"' in line for line in lines)


async def test_registering_many_groups(
    start: Start, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr("txbroker.proxy.http.groups.GROUPS_OF_SHARE_MAX", 3)
    made = await start()

    async def register(team: str, group: str, after_s: float = 1) -> str:
        path = f"/v1/groups/{group}"
        return (await made.put(path, {"check_after_s": after_s}, by=team)).outcome

    groups = [f"shop-{number}" for number in range(20)]
    outcomes = await asyncio.gather(*(register("shop", group) for group in groups * 2))
    taken = {group for group, outcome in zip(groups * 2, outcomes, strict=True) if outcome == "200"}
    assert len(taken) == 3
    assert set(outcomes) == {"200", "403 not_permitted"}
    assert await register("shop", "shop-more") == "403 not_permitted"
    assert await register("shop", "shop-more", -1) == "400 bad_request"
    assert await register("shop", taken.pop()) == "200"
    assert await register("bank", "bank") == "200"
    assert await register("operator", "shop-more") == "200"
    # Refused calls are not counted.
    assert await register("bank", "bank-1", -1) == "400 bad_request"
    assert await register("bank", "bank-1") == "200"
    assert await register("bank", "bank-2") == "200"
    record_property("result", "403 not_permitted at the limit; another team registers")
