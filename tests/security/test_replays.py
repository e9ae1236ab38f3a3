"""Class 4: calls that are sent again, with the same and with another body, by others too."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.security.installation import PEER_SECRET, Installation
from txbroker.contract import frames as wire
from txbroker.core.records import Decision, Message
from txbroker.core.routing import make_id

CLASS = 4


def with_id(site: Installation, group: str, partition: int, random: int) -> dict[str, Any]:
    """Return a prepare with a current id, in a chosen half partition."""
    now_ms = site.proxies[0].broker.now_ms()
    body = site.prepare_body(group)
    del body["messages"][0]["key"]
    return body | {"id": make_id(partition, now_ms, random)}


async def test_a_prepare(site: Installation, record_property: Any) -> None:
    before = await listed(site)
    ids = []
    for partition in range(4):
        body = with_id(site, "shop", partition, 1000 + partition)
        ids.append(body["id"])
        first = await site.post("/v1/transactions", body, by="shop")
        assert first.status == 201
        for url in site.urls:
            again = await site.post("/v1/transactions", body, by="shop", at=url)
            assert (again.status, again.body["id"]) == (200, body["id"])
            changed = body | {"messages": [{"topic": "shop.orders", "value": "another"}]}
            answer = await site.post("/v1/transactions", changed, by="shop", at=url)
            assert answer.outcome == "409 id_conflict"
    assert await listed(site) == sorted([*before, *ids])
    record_property("result", "200 for the same body, 409 id_conflict for another; listed once")


async def listed(site: Installation) -> list[str]:
    """Return the ids of all transactions of the team, in order."""
    answer = await site.get("/v1/transactions?group=shop&limit=200", by="shop")
    assert answer.body.get("next_cursor") is None
    return sorted(each["id"] for each in answer.body["transactions"])


async def test_a_prepare_by_another_team(site: Installation, record_property: Any) -> None:
    for partition in range(4):
        body = with_id(site, "shop", partition, 2000 + partition)
        assert (await site.post("/v1/transactions", body, by="shop")).status == 201
        for url in site.urls:
            stolen = await site.post("/v1/transactions", body, by="bank", at=url)
            assert stolen.outcome == "403 not_permitted"
            own = body | {"group": "bank", "messages": [{"topic": "bank.payments", "value": "x"}]}
            answer = await site.post("/v1/transactions", own, by="bank", at=url)
            assert answer.outcome == "409 id_conflict"
            assert "shop" not in str(answer.body)
    record_property("result", "403 not_permitted; under its own group 409 id_conflict")


async def test_a_dedup_key_of_another_team(site: Installation) -> None:
    """Each group has its own keys: both are stored."""
    for url in site.urls:
        key = f"the same key at {url}"
        for team in ("shop", "bank"):
            body = site.prepare_body(team, dedup_key=key)
            answer = await site.post("/v1/transactions", body, by=team, at=url)
            assert answer.status == 201


async def test_a_decision(site: Installation, record_property: Any) -> None:
    for _ in range(4):
        id = await site.prepared("shop")
        commit, rollback = (f"/v1/transactions/{id}/{what}" for what in ("commit", "rollback"))
        for url in site.urls:
            for _ in range(3):
                again = await site.post(commit, {}, by="shop", at=url)
                assert (again.status, again.body["decision"]) == (200, "commit")
            contrary = await site.post(rollback, {}, by="shop", at=url)
            assert contrary.outcome == "409 already_decided"
            other = {"messages": [{"topic": "shop.orders", "value": "other"}]}
            changed = await site.post(commit, other, by="shop", at=url)
            assert changed.outcome == "409 already_decided"
    record_property("result", "200 for the same, else 409 already_decided")


async def test_frames_of_a_session(site: Installation, record_property: Any) -> None:
    url = site.urls[0]
    partition = next(
        number
        for number, owner in enumerate(site.proxies[0].broker.partitions.assigned())
        if owner == url
    )
    id = make_id(partition, site.proxies[0].broker.now_ms(), 3000)
    prepare = wire.Prepare(1, id, (Message("shop.orders", None, b"one"),))
    for number in range(3):
        async with site.socket("shop", url) as socket:
            assert isinstance(await socket.hello("shop"), wire.Welcome)
            standing = await socket.ask(prepare)
            assert isinstance(standing, wire.Status)
            changed = await socket.ask(wire.Prepare(2, id, (Message("shop.orders", None, b"x"),)))
            assert isinstance(changed, wire.Failure)
            assert changed.code == "id_conflict"
            decided = await socket.ask(wire.Decide(3, id, Decision.COMMIT))
            assert isinstance(decided, wire.Status), number
            contrary = await socket.ask(wire.Decide(4, id, Decision.ROLLBACK))
            assert isinstance(contrary, wire.Failure)
            assert contrary.code == "already_decided"
    record_property("result", "answered as the first time; id_conflict, already_decided")


async def test_a_call_between_proxies(site: Installation, record_property: Any) -> None:
    id = await site.prepared("shop")
    owner = site.proxies[0].broker.partitions.assigned()[(await site.view(id))["partition"]]
    headers = {"txb-proxy": site.urls[-1], "content-type": "application/msgpack"}

    async def decide(what: str, secret: str = PEER_SECRET) -> int:
        body = msgspec.msgpack.encode({"id": id, "decision": what, "by": "shop"})
        async with site._http.post(
            f"{owner}/internal/v1/decide", data=body, headers={**headers, "txb-peer-secret": secret}
        ) as answer:
            return answer.status

    assert await decide("rollback", "another-secret-of-proxies") == 403
    assert (await site.view(id))["state"] == "pending"
    assert [await decide("commit") for _ in range(3)] == [200] * 3
    assert await decide("rollback") == 409
    record_property("result", "200 for the same, 409 for the contrary; from a proven proxy only")
