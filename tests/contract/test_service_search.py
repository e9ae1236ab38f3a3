"""Transactions are found by any known fact, and shown in full after any restart."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from tests.kit.service import FakeEndpoint, Json, Service
from tests.kit.until import unique, until
from txbroker.contract.json import message_to_json
from txbroker.contract.service import SearchRequest
from txbroker.core.records import Message
from txbroker.core.routing import make_id, parse_id
from txbroker.core.settled import SettledWindow
from txbroker.errors import BadRequest, NotFound
from txbroker.proxy.partition import scan
from txbroker.proxy.partition.clock import LogTime

UNKNOWN = {"decision": "unknown"}


def forget(service: Service) -> None:
    """Let the proxy remember of its settled transactions only what answers need."""
    for owner in service.proxy.broker.partitions.open().values():
        owner.ledger.index.settled.seal()
        owner.ledger.index.settled.shown.clear()


def forget_all(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the proxy remember no settled transaction, as after the dedup window."""
    for owner in service.proxy.broker.partitions.open().values():
        monkeypatch.setattr(owner.ledger.index, "settled", SettledWindow())
        monkeypatch.setattr(owner.api, "_id_clock", LogTime(owner.clock.now_ms() + 24 * 3_600_000))


def ids(found: tuple[list[Json], int]) -> set[str]:
    return {shown["id"] for shown in found[0]}


# --- everything is shown ---------------------------------------------------------------------


async def lose(service: Service, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave so much of settled transactions in memory."""
    if memory == "summary":
        forget(service)
    elif memory == "restarted":
        await service.restart()
    elif memory == "none":
        forget_all(service, monkeypatch)


@pytest.mark.parametrize("memory", ["whole", "summary", "restarted", "none"])
async def test_settled_transaction_is_shown_whole(
    service: Service, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, other = await service.topic(), await service.topic()
    group = await service.group(UNKNOWN, attempts_max=1, check_after_s=0.0, timeout_s=0.1)
    body = [Message(topic, b"k", b"1"), Message(other, b"k", b"2", timestamp_ms=1)]
    id = await service.prepare(*body, group=group, order_key="4711")
    for asked in (1, 2):
        await service.asked_times(group, asked)
        await until(lambda: service.listed(state="parked", group=group))
        if asked == 1:
            await service.act(id, "revive", by="bob", reason="fixed")
    await service.commit(id, by="ann", reason="paid")
    await lose(service, memory, monkeypatch)
    shown = await service.show(id, trace=True)
    assert shown.get("read_back", False) is (memory != "whole")
    assert (shown["state"], shown["source"], shown["reason"]) == ("promoted", "operator", "paid")
    assert shown["by"].startswith("ann")
    assert (shown["order_key"], shown["attempts"], shown["attempts_max"]) == ("4711", 1, 1)
    assert "gaps" not in shown
    places = [(each["topic"], each["partition"], each["offset"]) for each in shown["messages"]]
    assert places == [(topic, 0, 0), (other, 0, 0)]
    names = [event["event"] for event in shown["timeline"]]
    again = ["check", "park"]
    assert names == ["prepared", *again, "revive", *again, "commit", "promoted"]
    texts = {event["event"]: event["text"] for event in shown["timeline"]}
    assert texts["revive"].startswith("by operator, bob")
    assert texts["revive"].endswith(": fixed; round 2 of attempts begins")
    for event in shown["timeline"][:-1]:
        log = "half" if event["event"] == "prepared" else "op"
        assert f".{log}/{shown['partition']}@" in event["record"]
    assert [check["outcome"] for check in shown["checks"]] == ["unknown"] * 2
    assert "None" not in str(shown["timeline"])
    if memory == "none":
        return
    (listed,) = [row for row in await service.listed(state="promoted") if row["id"] == id]
    known = memory == "whole"
    assert (listed["attempts"], listed.get("attempts_known", True)) == (1 if known else None, known)


async def test_lost_facts_are_named(service: Service, topic: str) -> None:
    id = await service.prepare(Message(topic, b"k", b"v"))
    await service.commit(id)
    forget(service)
    await service.delete_topic(topic)
    shown = await service.show(id)
    assert (shown["state"], shown["source"]) == ("promoted", "operator")
    assert "does not exist" in str(shown["gaps"])


# --- searches --------------------------------------------------------------------------------


@pytest.fixture
async def shop(service: Service) -> Json:
    """One transaction in each state, and the terms that only they match."""
    topic, group = await service.topic(), unique("shop")
    made: Json = {"topic": topic, "group": group}
    for state in ("pending", "promoted", "rolled_back"):
        made[state] = await service.prepare(
            Message(topic, b"4711", state.encode(), (("kind", state.encode()),)),
            Message(topic, b"\xff" + state.encode(), b"", (("kind", b"second"),)),
            group=group,
            dedup_key=f"dedup-{state}-{topic}",
            order_key=f"order-{state}-{topic}",
        )
    await service.prepare(Message(topic, b"other", b""), group=group)
    await service.commit(made["promoted"])
    await service.act(made["rolled_back"], "rollback")
    return made


@pytest.mark.parametrize("memory", ["whole", "summary", "restarted"])
async def test_each_term_finds_its_transactions(
    service: Service, shop: Json, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "BLOCK", 3)
    monkeypatch.setattr(scan, "MATCHES_MAX", 2)
    await lose(service, memory, monkeypatch)
    topic, group = shop["topic"], shop["group"]
    states = ("pending", "promoted", "rolled_back")
    every = {shop[state] for state in states}
    assert ids(await service.search(topic=topic, key="4711")) == every
    assert ids(await service.search(topic=topic, key="4712")) == set()
    for state in states:
        id = shop[state]
        binary = b64encode(b"\xff" + state.encode()).decode()
        exact: tuple[Json, ...] = (
            {"id": id[:20].lower()},
            {"dedup_key": f"dedup-{state}-{topic}"},
            {"dedup_key": f"dedup-{state}-{topic}", "group": group},
            {"order_key": f"order-{state}-{topic}"},
            {"order_key": f"order-{state}-{topic}", "topic": topic, "key": "4711"},
            {"header": f"kind={state}", "topic": topic},
            {"topic": topic, "key_base64": binary},
        )
        for terms in exact:
            assert ids(await service.search(**terms)) == {id}, terms
    # All terms of a message are of the same one.
    assert ids(await service.search(topic=topic, key="4711", header="kind=second")) == set()
    mismatch = {"order_key": f"order-pending-{topic}", "topic": topic, "header": "kind=promoted"}
    assert ids(await service.search(**mismatch)) == set()


async def test_search_by_time_reads_that_part(service: Service, shop: Json) -> None:
    shown = await service.show(shop["promoted"])
    at_ms, terms = shown["prepared_at_ms"], {"group": shop["group"]}
    assert (
        len((await service.search(from_ms=at_ms - 60_000, to_ms=at_ms + 60_000, **terms))[0]) == 4
    )
    assert (await service.search(to_ms=at_ms - 60_000, **terms))[0] == []
    assert (await service.search(from_ms=at_ms + 60_000, **terms))[0] == []


async def test_forgotten_transaction_is_found_by_key(
    service: Service, shop: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_all(service, monkeypatch)
    found, _ = await service.search(topic=shop["topic"], key="4711")
    assert {shown["id"]: shown["state"] for shown in found} == {
        shop[state]: state for state in ("pending", "promoted", "rolled_back")
    }


@pytest.mark.parametrize("memory", ["whole", "summary", "restarted", "none"])
async def test_final_message_is_found_by_its_key(
    service: Service, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "BLOCK", 3)
    topic, key = await service.topic(), unique("key")
    drafts = [Message(topic, b"draft", b""), Message(topic, b"second", b"")]
    id = await service.prepare(*drafts, order_key=key)
    final = [Message(topic, key.encode(), b"v", (("kind", b"final"),)), drafts[1]]
    await service.commit(id, messages=[message_to_json(message) for message in final])
    await lose(service, memory, monkeypatch)
    at_ms = (await service.show(id))["prepared_at_ms"]
    exact: tuple[Json, ...] = (
        {"key": key},
        {"key": "draft", "topic": topic},
        {"header": "kind=final", "topic": topic},
        {"key": key, "order_key": key, "from_ms": at_ms, "to_ms": at_ms + 1},
    )
    for terms in exact:
        assert ids(await service.search(**terms)) == {id}, terms
    for mismatch in ({"header": "kind=draft"}, {"order_key": "other"}, {"to_ms": at_ms}):
        assert ids(await service.search(key=key, **mismatch)) == set(), mismatch


async def test_parked_copy_is_found_without_its_half_message(
    world: Any, desk: FakeEndpoint
) -> None:
    async with Service(world, desk, partitions=1) as service:
        topic = await service.topic()
        group = await service.group(UNKNOWN, attempts_max=1, timeout_s=0.1)
        headers = (("kind", b"order"),)
        id = await service.prepare(Message(topic, b"4711", b"v", headers), group=group)
        await service.reaches(id, "parked")
        await service.act(await service.prepare(Message(topic, b"k", b"")), "rollback")
        await service.stop()
        await world.truncate(world.name("half"), 0, 1)
        await service.start()
        for terms in ({"topic": topic, "key": "4711"}, {"header": "kind=order"}, {"topic": topic}):
            assert id in ids(await service.search(**terms)), terms
        assert ids(await service.search(topic=topic, key="4712")) == set()


async def test_record_leads_to_its_transaction(world: Any, desk: FakeEndpoint) -> None:
    prefix = getattr(world, "prefix", "test")
    async with Service(world, desk, topic_prefix=prefix) as service:
        topic = await service.topic()
        id = await service.prepare(Message(topic, b"k", b"1"), Message(topic, b"k", b"2"))
        await service.commit(id)
        shown = await service.show(id, trace=True)
        places = [f"{topic}/0@0", f"{topic}/0@1"]
        places += [event["record"] for event in shown["timeline"] if event["event"] != "promoted"]
        for place in places:
            assert ids(await service.search(record=place)) == {id}, place
        beyond = [f"{topic}/0@2", f"{topic}/0@99999", f"{topic}/7@0", f"{topic}x/0@0"]
        for place in beyond:
            with pytest.raises(NotFound, match=r"no record|does not exist"):
                await service.search(record=place)
        search = service.proxy.broker.search
        owns = SearchRequest(record=places[0], groups_allowed=(shown["group"],))
        assert [view.id for view in (await search(owns)).transactions] == [id]
        for place in [places[0], *beyond]:
            hidden = f"there is no record {place} of a transaction of your groups"
            with pytest.raises(NotFound, match=f"^{hidden}$"):
                await search(SearchRequest(record=place, groups_allowed=("others",)))


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"id": "ID'; DROP TABLE--"},
        {"id": "<script>"},
        {"id": ""},
        {"id": "0" * 27},
        {"key": "k", "key_base64": "aw=="},
        {"key_base64": "?"},
        {"key": "k" * 100_000},
        {"header": "no value"},
        {"from_ms": -1},
        {"from_ms": "yesterday"},
        {"record": "orders"},
        {"record": "orders/0@-1"},
        {"record": "a b/0@1"},
        {"group": "g", "cursor": "0:1.2.3"},
        {"group": "g", "cursor": "9999:"},
        {"group": "g", "cursor": "0:-1.-1.-1.-1.99999999999999999999"},
        {"nonsense": "1"},
    ],
    ids=str,
)
async def test_wrong_terms_are_refused(service: Service, terms: Json) -> None:
    with pytest.raises(BadRequest):
        await service.search(**terms)


async def test_ids_of_no_partition_find_nothing(service: Service) -> None:
    found, pages = await service.search(id=make_id(60_000, 1, 1)[:8])
    assert (found, pages) == ([], 1)
    assert parse_id(make_id(60_000, 1, 1)).partition == 60_000
