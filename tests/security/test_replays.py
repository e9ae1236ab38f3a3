"""Class 4: calls that are sent again, with the same and with another body, by others too."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.security.installation import PEER_SECRET, Installation
from txbroker.contract import frames as wire
from txbroker.core.records import Decision, Message
from txbroker.core.routing import make_id

CLASS = 4


def with_id(installation: Installation, group: str, partition: int, random: int) -> dict[str, Any]:
    """Return a prepare with a current id, in a chosen half partition."""
    now_ms = installation.proxies[0].broker.now_ms()
    body = installation.prepare_body(group)
    del body["messages"][0]["key"]
    return body | {"id": make_id(partition, now_ms, random)}


async def test_a_prepare(installation: Installation, record_property: Any) -> None:
    before = await listed(installation)
    ids = []
    for partition in range(4):
        body = with_id(installation, "shop", partition, 1000 + partition)
        ids.append(body["id"])
        first = await installation.call("POST", "/v1/transactions", body, by="shop")
        assert first.status == 201
        for url in installation.urls:
            again = await installation.call("POST", "/v1/transactions", body, by="shop", at=url)
            assert (again.status, again.body["id"]) == (200, body["id"])
            changed = body | {"messages": [{"topic": "shop.orders", "value": "another"}]}
            answer = await installation.call("POST", "/v1/transactions", changed, by="shop", at=url)
            assert answer.outcome == "409 id_conflict"
    assert await listed(installation) == sorted([*before, *ids])
    record_property("result", "200 for the same body, 409 id_conflict for another; listed once")


async def listed(installation: Installation) -> list[str]:
    """Return the ids of all transactions of the team, in order."""
    answer = await installation.call("GET", "/v1/transactions?group=shop&limit=200", by="shop")
    assert answer.body.get("next_cursor") is None
    return sorted(each["id"] for each in answer.body["transactions"])


async def test_a_prepare_by_another_team(installation: Installation, record_property: Any) -> None:
    for partition in range(4):
        body = with_id(installation, "shop", partition, 2000 + partition)
        assert (await installation.call("POST", "/v1/transactions", body, by="shop")).status == 201
        for url in installation.urls:
            stolen = await installation.call("POST", "/v1/transactions", body, by="bank", at=url)
            assert stolen.outcome == "403 not_permitted"
            own = body | {"group": "bank", "messages": [{"topic": "bank.payments", "value": "x"}]}
            answer = await installation.call("POST", "/v1/transactions", own, by="bank", at=url)
            assert answer.outcome == "409 id_conflict"
            assert "shop" not in str(answer.body)
    record_property("result", "403 not_permitted; under its own group 409 id_conflict")


async def test_a_dedup_key_of_another_team(installation: Installation) -> None:
    """Each group has its own keys: both are stored."""
    for url in installation.urls:
        key = f"the same key at {url}"
        for team in ("shop", "bank"):
            body = installation.prepare_body(team, dedup_key=key)
            answer = await installation.call("POST", "/v1/transactions", body, by=team, at=url)
            assert answer.status == 201


async def test_a_decision(installation: Installation, record_property: Any) -> None:
    for _ in range(4):
        id = await installation.prepared("shop")
        commit, rollback = (f"/v1/transactions/{id}/{what}" for what in ("commit", "rollback"))
        for url in installation.urls:
            for _ in range(3):
                again = await installation.call("POST", commit, {}, by="shop", at=url)
                assert (again.status, again.body["decision"]) == (200, "commit")
            contrary = await installation.call("POST", rollback, {}, by="shop", at=url)
            assert contrary.outcome == "409 already_decided"
            other = {"messages": [{"topic": "shop.orders", "value": "other"}]}
            changed = await installation.call("POST", commit, other, by="shop", at=url)
            assert changed.outcome == "409 already_decided"
    record_property("result", "200 for the same, else 409 already_decided")


async def test_frames_of_a_session(installation: Installation, record_property: Any) -> None:
    url = installation.urls[0]
    partition = next(
        number
        for number, owner in enumerate(installation.proxies[0].broker.partitions.assigned())
        if owner == url
    )
    id = make_id(partition, installation.proxies[0].broker.now_ms(), 3000)
    prepare = wire.Prepare(1, id, (Message("shop.orders", None, b"one"),))
    for number in range(3):
        async with installation.socket("shop", url) as socket:
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


async def test_a_call_between_proxies(installation: Installation, record_property: Any) -> None:
    id = await installation.prepared("shop")
    owner = installation.proxies[0].broker.partitions.assigned()[
        (await installation.view(id))["partition"]
    ]
    headers = {"txb-proxy": installation.urls[-1], "content-type": "application/msgpack"}

    async def decide(what: str, secret: str = PEER_SECRET) -> int:
        body = msgspec.msgpack.encode({"id": id, "decision": what, "by": "shop"})
        async with installation._http.post(
            f"{owner}/internal/v1/decide", data=body, headers={**headers, "txb-peer-secret": secret}
        ) as answer:
            return answer.status

    assert await decide("rollback", "another-secret-of-proxies") == 403
    assert (await installation.view(id))["state"] == "pending"
    assert [await decide("commit") for _ in range(3)] == [200] * 3
    assert await decide("rollback") == 409
    record_property("result", "200 for the same, 409 for the contrary; from a proven proxy only")
