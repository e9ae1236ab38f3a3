"""Overviews from any proxy: counts of every owner, and unknown ones marked."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.cluster import Proxies
from tests.kit.service import Json, Service
from tests.kit.until import unique, until
from txbroker.core.records import Decision, Message
from txbroker.core.routing import parse_id


async def overview(service: Service) -> Json:
    """Return what a proxy tells of all."""
    return (await service.call("GET", "/v1/overview"))[1]


def of_group(shown: Json, group: str) -> Json | None:
    """Return the overview of one group."""
    return next((one for one in shown["groups"] if one["group"] == group), None)


def of_partition(shown: Json, id: str) -> Json:
    """Return the overview of a transaction's half partition."""
    return dict(shown["partitions"][parse_id(id).partition])


async def shown_when(service: Service, true: Any) -> Json:
    """Wait until the overview satisfies a condition."""

    async def found() -> Json | None:
        shown = await overview(service)
        return shown if true(shown) else None

    return dict(await until(found))


async def test_pending_is_counted_by_group_and_partition(service: Service) -> None:
    topic = await service.world.create_topic(unique("topic"))
    group, key = unique("group"), unique("key").encode()
    before = await overview(service)
    ids = [await service.prepare(Message(topic, key, b"v"), group=group) for _ in range(3)]
    shown = await overview(service)
    found = of_group(shown, group)
    assert found is not None
    assert (found["pending"], found["parked"]) == (3, 0)
    assert 0 <= found["oldest_pending_age_s"] < 60
    here, then = of_partition(shown, ids[0]), of_partition(before, ids[0])
    assert here["pending"] == then["pending"] + 3
    assert here["oldest_pending_age_s"] >= found["oldest_pending_age_s"]
    for id in ids:
        await service.act(id, "rollback")
    assert of_group(await overview(service), group) is None


async def test_rates_follow_calls(service: Service) -> None:
    topic = await service.world.create_topic(unique("topic"))
    id = await service.prepare(Message(topic, b"k", b"v"))
    await service.commit(id)

    def seen(shown: Json) -> bool:
        rates = of_partition(shown, id)["rates"]
        return all(rates[f"{what}_per_s"] > 0 for what in ("prepared", "decided", "promoted"))

    await shown_when(service, seen)


async def test_parked_transaction_is_counted(service: Service) -> None:
    topic = await service.world.create_topic(unique("topic"))
    group = await service.group({"decision": "unknown"}, attempts_max=1, timeout_s=0.1)
    id = await service.prepare(Message(topic, b"k", b"v"), group=group)
    await service.reaches(id, "parked")
    shown = await overview(service)
    found = of_group(shown, group)
    assert found is not None
    assert (found["pending"], found["parked"], found["oldest_pending_age_s"]) == (0, 1, None)
    assert of_partition(shown, id)["parked"] >= 1
    assert (await service.act(id, "rollback"))["state"] == "rolled_back"
    assert await service.values(topic) == []


async def test_unreachable_group_has_time_and_reason(service: Service) -> None:
    topic = await service.world.create_topic(unique("topic"))
    group = await service.group(503)
    id = await service.prepare(Message(topic, b"k", b"v"), group=group)

    def away(shown: Json) -> bool:
        found = of_group(shown, group)
        return found is not None and found["unreachable_since_ms"] is not None

    shown = await shown_when(service, away)
    found = of_group(shown, group)
    assert found is not None
    assert "503" in found["unreachable_why"]
    assert 0 <= shown["at_ms"] - found["unreachable_since_ms"] < 60_000
    # What nobody can be asked about stands first.
    before = shown["groups"][: shown["groups"].index(found)]
    assert all(one["unreachable_since_ms"] for one in before)
    await service.act(id, "rollback")


async def test_connected_instances_are_listed_once(two: Proxies) -> None:
    group = unique("group")
    one, other = two.running["one"], two.running["two"]
    topic = await one.world.create_topic(unique("topic"))
    async with (
        one.producer(group, instance="web-1"),
        one.producer(group, instance="till-1", check=lambda _: Decision.COMMIT) as producer,
    ):
        # A session with each of the two owners.
        for partition in range(two.partitions):
            id = await producer.prepare(Message(topic, two.key(topic, partition), b"v"))
            await producer.rollback(id)

        def both(shown: Json) -> bool:
            return of_group(shown, group) is not None

        for service in (one, other):
            found = of_group(await shown_when(service, both), group)
            assert found is not None
            assert (found["sessions"], found["instances"]) == (1, ["till-1"])


async def test_any_proxy_returns_the_whole_overview(two: Proxies) -> None:
    one, other = two.running["one"], two.running["two"]
    topic, group = await one.world.create_topic(unique("topic")), unique("group")
    ids = [await two.prepare_in(p, topic, one, group=group) for p in range(two.partitions)]
    for service in (one, other):
        shown = await overview(service)
        assert shown["complete"] is True
        assert [p["partition"] for p in shown["partitions"]] == list(range(two.partitions))
        assert {p["state"] for p in shown["partitions"]} == {"owned"}
        assert tuple(p["owner"] for p in shown["partitions"]) == service.proxy.broker.owners()
        found = of_group(shown, group)
        assert found is not None
        assert found["pending"] == two.partitions
        proxies = {p["url"]: p for p in shown["proxies"]}
        assert proxies.keys() == {one.proxy.url, other.proxy.url}
        assert all(p["reached"] and p["ready"] and p["version"] for p in proxies.values())
        assert sorted(n for p in proxies.values() for n in p["partitions"]) == [0, 1, 2, 3]
    for id in ids:
        await one.act(id, "rollback")


async def test_silent_proxy_does_not_fail_overview(
    in_memory: Proxies, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = await in_memory.add("one", "two")
    away = other.proxy.url

    async def refuse() -> None:
        raise ConnectionResetError

    monkeypatch.setattr(other.proxy.broker, "overview", refuse)
    shown = await overview(one)
    assert shown["complete"] is False
    silent = next(p for p in shown["proxies"] if p["url"] == away)
    assert silent["reached"] is False
    assert away in silent["why"]
    theirs = [p for p in shown["partitions"] if p["owner"] == away]
    assert len(theirs) == 2
    assert {(p["state"], p["pending"]) for p in theirs} == {("unreachable", None)}
    ours = [p for p in shown["partitions"] if p["owner"] == one.proxy.url]
    assert {(p["state"], p["pending"]) for p in ours} == {("owned", 0)}
