"""Class 2: a team with its own credential reaches nothing of another team's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from tests.console.console_world import Reader, reader_of
from tests.kit.memory import MemoryHarness
from tests.kit.until import until
from tests.security.installation import PEER_SECRET, TABLES, TOKENS, Installation
from txbroker.config.settings import load_settings
from txbroker.contract import frames as wire
from txbroker.core.records import Decision, Message
from txbroker.errors import ConfigurationError
from txbroker.proxy.process import Proxy, run_proxy

CLASS = 2
MSGPACK = "application/msgpack"


async def pending(site: Installation, id: str) -> bool:
    """Return True if a transaction is unchanged since its prepare, without a check."""
    view = await site.view(id)
    return view["state"] == "pending" and not view.get("by") and not view.get("attempts")


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("GET", "", None, "403 not_permitted"),
        ("GET", "?bodies=true", None, "403 not_permitted"),
        ("POST", "/commit", {}, "403 not_permitted"),
        ("POST", "/commit", {"group": "bank"}, "403 not_permitted"),
        ("POST", "/commit", {"group": "shop"}, "403 wrong_group"),
        ("POST", "/rollback", {}, "403 not_permitted"),
        ("POST", "/rollback", {"group": "shop"}, "403 wrong_group"),
        ("POST", "/check", {}, "403 not_permitted"),
        ("POST", "/revive", {}, "403 not_permitted"),
    ],
    ids=lambda value: str(value) if value is not None else "no body",
)
async def test_a_call_by_id(
    site: Installation, method: str, path: str, body: Any, expected: str, record_property: Any
) -> None:
    for _ in range(4):
        id = await site.prepared("bank")
        for url in site.urls:
            answer = await site.call(
                method, f"/v1/transactions/{id}{path}", body, by="shop", at=url
            )
            assert answer.outcome == expected
            assert "payments" not in str(answer.body)
            assert ("bank" in str(answer.body)) is (body == {"group": "bank"})
        assert await pending(site, id)
    record_property("result", expected)


async def test_listing(site: Installation) -> None:
    """A producer's list only has transactions of its own groups, for every query."""
    theirs = await site.prepared("bank")
    own = await site.prepared("shop")
    for url in site.urls:
        for query in ("", "?group=bank", "?topic=bank.payments", "?state=pending"):
            page = await site.get(f"/v1/transactions{query}", by="shop", at=url)
            assert page.status == 200
            groups = {view["group"] for view in page.body["transactions"]}
            assert groups <= {"shop"}
            ids = {view["id"] for view in page.body["transactions"]}
            assert theirs not in ids
            assert (own in ids) is (query in ("", "?state=pending"))


async def test_cursors_of_lists(site: Installation) -> None:
    """No cursor of a list names another group's transaction, through any proxy."""
    theirs = {await site.prepared("bank") for _ in range(6)}
    own = {await site.prepared("shop") for _ in range(6)}
    for url in site.urls:
        for query in ("", "&group=bank", "&topic=bank.payments"):
            cursor: str | None = ""
            seen = set()
            while cursor is not None:
                path = f"/v1/transactions?limit=1{query}{cursor and f'&cursor={cursor}'}"
                page = (await site.get(path, by="shop", at=url)).body
                seen |= {view["id"] for view in page["transactions"]}
                cursor = page.get("next_cursor")
                assert not any(id in (cursor or "") for id in theirs)
            assert not seen if query else seen >= own


async def test_decisions_by_role(site: Installation) -> None:
    """An operator's decision is an operator's, also where its body names the group."""
    for url in site.urls:
        id = await site.prepared("shop")
        path = f"/v1/transactions/{id}/rollback"
        await site.post(path, {"group": "shop"}, by="operator", at=url)
        assert (await site.view(id))["source"] == "operator"


async def test_operators_calls(site: Installation, record_property: Any) -> None:
    for url in site.urls:
        for method, path in (
            ("GET", "/v1/overview"),
            ("GET", "/metrics"),
            ("GET", "/v1/groups"),
            ("DELETE", "/v1/groups/shop"),
            ("POST", "/v1/groups/shop/test"),
        ):
            body = {} if method == "POST" else None
            headers = {"content-type": "application/json"}
            answer = await site.call(method, path, body, by="shop", at=url, headers=headers)
            assert answer.outcome == "403 not_permitted", (method, path)
        page = await site.get("/", by="shop", at=url)
        assert page.status == 403
    record_property("result", "403 not_permitted; the console too")


async def test_registering(site: Installation, record_property: Any) -> None:
    body = {"check_after_s": 1}
    for url in site.urls:
        for group in ("bank", "bank-2", "other"):
            put = await site.put(f"/v1/groups/{group}", body, by="shop", at=url)
            assert put.outcome == "403 not_permitted"
            got = await site.get(f"/v1/groups/{group}", by="shop", at=url)
            assert got.outcome == "403 not_permitted"
        denied = await site.put("/v1/groups/bank-closed", body, by="bank", at=url)
        assert denied.outcome == "403 not_permitted"
        allowed = await site.put("/v1/groups/bank-2", body, by="bank", at=url)
        assert allowed.status == 200
    record_property("result", "403 not_permitted; an explicit deny wins")


async def test_preparing(site: Installation, record_property: Any) -> None:
    for url in site.urls:
        for group, topic in (
            ("bank", "shop.orders"),
            ("shop", "bank.payments"),
            ("shop", "closed"),
            ("bank-closed", "bank.payments"),
        ):
            body = site.prepare_body(group, topic)
            answer = await site.post("/v1/transactions", body, by="shop", at=url)
            assert answer.outcome == "403 not_permitted", (group, topic)
        denied = site.prepare_body("bank", "closed")
        answer = await site.post("/v1/transactions", denied, by="bank", at=url)
        assert answer.outcome == "403 not_permitted"
        mixed = site.prepare_body("shop")
        mixed["messages"].append({"topic": "bank.payments", "value": "x"})
        answer = await site.post("/v1/transactions", mixed, by="shop", at=url)
        assert answer.outcome == "403 not_permitted"
    record_property("result", "403 not_permitted for a foreign group or topic; a deny wins")


async def test_a_session(site: Installation, record_property: Any) -> None:
    ids = [await site.prepared("bank") for _ in range(8)]
    for url in site.urls:
        async with site.socket("shop", url) as socket:
            refused = await socket.hello("bank")
            assert isinstance(refused, wire.Failure)
            assert refused.code == "not_permitted"
        async with site.socket("shop", url) as socket:
            assert isinstance(await socket.hello("shop"), wire.Welcome)
            owned = [id for id in ids if await owned_at(site, id, url)]
            assert owned
            for operation in (
                wire.Decide(1, owned[0], Decision.COMMIT),
                wire.Decide(2, owned[0], Decision.ROLLBACK),
                wire.AskEarly(3, owned[0]),
            ):
                failure = await socket.ask(operation)
                assert isinstance(failure, wire.Failure)
                assert failure.code == "wrong_group"
            topic = wire.Prepare(4, owned[0], (Message("bank.payments", b"k", b"v"),))
            failure = await socket.ask(topic)
            assert isinstance(failure, wire.Failure)
            assert failure.code == "not_permitted"
    for id in ids:
        assert await pending(site, id)
    record_property("result", "not_permitted at the hello and for topics, wrong_group by id")


async def owned_at(site: Installation, id: str, url: str) -> bool:
    """Return True if the proxy at `url` owns a transaction."""
    owners = site.proxies[0].broker.partitions.assigned()
    return owners[(await site.view(id))["partition"]] == url


async def test_answers_to_another_groups_checks(site: Installation) -> None:
    """An answer for a check that another group was asked counts for nothing."""
    for url in site.urls:
        async with site.socket("shop", url) as shop, site.socket("bank", url) as bank:
            assert isinstance(await shop.hello("shop"), wire.Welcome)
            assert isinstance(await bank.hello("bank"), wire.Welcome)
            id = await site.prepared("bank", check_after_s=0.1)
            check = await bank.next()
            assert isinstance(check, wire.CheckQuestion)
            assert check.id == id
            await shop.send(
                *(wire.CheckAnswer(call, Decision.COMMIT) for call in range(1, check.call + 50))
            )
            # The frame was read when a later operation of the same session is answered.
            assert isinstance(await shop.ask(wire.AskEarly(1, id)), wire.Failure)
            assert (await site.view(id))["state"] == "pending"
            await bank.send(wire.CheckAnswer(check.call, Decision.ROLLBACK))
            await site.reaches(id, "rolled_back")
            # Who was asked, and who answered: the instance, and whose credential it came with.
            view = await site.view(id)
            assert {event["text"] for event in view["timeline"] if "session" in event["text"]}
            assert all(
                "of bank" in event["text"]
                for event in view["timeline"]
                if "session" in event["text"]
            )


@pytest.mark.parametrize("proof", ["none", "producer's token", "operator's token", "wrong secret"])
async def test_calls_of_proxies(site: Installation, proof: str, record_property: Any) -> None:
    id = await site.prepared("bank")
    headers = {
        "none": {},
        "producer's token": {"authorization": f"Bearer {TOKENS['shop']}"},
        "operator's token": {"authorization": f"Bearer {TOKENS['operator']}"},
        "wrong secret": {"txb-peer-secret": "wrong"},
    }[proof]
    calls = {
        "list": {"partitions": [0, 1]},
        "find": {"id": id, "bodies": True},
        "decide": {"id": id, "decision": "commit", "source": "operator", "by": "anybody"},
        "check": {"id": id},
        "revive": {"id": id},
        "prepare": {"group": "bank", "messages": [{"topic": "bank.payments"}]},
        "leases": {"group": "bank", "prefer": ""},
    }
    for url in site.urls:
        for name, body in calls.items():
            sent = {**headers, "txb-proxy": url, "content-type": MSGPACK}
            async with site._http.post(
                f"{url}/internal/v1/{name}", data=msgspec.msgpack.encode(body), headers=sent
            ) as answer:
                assert answer.status == 403
                assert (await answer.json())["error"]["code"] == "not_a_peer"
        for name in ("sessions", "overview"):
            sent = {**headers, "txb-proxy": url}
            answer_ = await site.get(f"/internal/v1/{name}", at=url, headers=sent)
            assert answer_.outcome == "403 not_a_peer"
    assert await pending(site, id)
    record_property("result", "403 not_a_peer")


async def test_decision_records_the_principal(site: Installation) -> None:
    """The marker names the principal, not the body's author; through any proxy."""
    for _ in range(4):
        for url in site.urls:
            id = await site.prepared("shop")
            body = {"group": "shop", "by": "operator, by anybody"}
            done = await site.post(f"/v1/transactions/{id}/commit", body, by="shop", at=url)
            assert done.status == 200
            view = await site.view(id)
            assert (view["by"], view["source"]) == ("shop", "producer")
            id = await site.prepared("shop")
            body = {"by": "operator, by anybody"}
            path = f"/v1/transactions/{id}/rollback"
            await site.post(path, body, by="shop", at=url)
            view = await site.view(id)
            assert (view["by"], view["source"]) == ("shop", "producer")
            id = await site.prepared("bank")
            path = f"/v1/transactions/{id}/rollback"
            await site.post(path, body, by="operator", at=url)
            view = await site.view(id)
            assert (view["by"], view["source"]) == ("operator", "operator")


async def test_session_decides_as_its_principal(site: Installation) -> None:
    """The marker names the principal of the session."""
    url = site.urls[0]
    async with site.socket("shop", url) as socket:
        assert isinstance(await socket.hello("shop", "an instance of mine"), wire.Welcome)
        ids = [await site.prepared("shop") for _ in range(8)]
        id = [id for id in ids if await owned_at(site, id, url)][0]  # noqa: RUF015
        standing = await socket.ask(wire.Decide(1, id, Decision.COMMIT))
        assert isinstance(standing, wire.Status)
        assert (await site.view(id))["by"] == "shop"


async def test_a_viewer(site: Installation, record_property: Any) -> None:
    id = await site.prepared("bank")
    for url in site.urls:
        seen = await site.get(f"/v1/transactions/{id}", by="viewer", at=url)
        assert seen.status == 200
        assert "value_base64" not in str(seen.body)
        for method, path, body in (
            ("GET", f"/v1/transactions/{id}?bodies=true", None),
            ("POST", f"/v1/transactions/{id}/commit", {}),
            ("POST", f"/v1/transactions/{id}/rollback", {}),
            ("POST", f"/v1/transactions/{id}/check", {}),
            ("POST", f"/v1/transactions/{id}/revive", {}),
            ("PUT", "/v1/groups/bank", {}),
            ("POST", "/v1/transactions", site.prepare_body("bank")),
        ):
            answer = await site.call(method, path, body, by="viewer", at=url)
            assert answer.outcome == "403 not_permitted", path
        page = await site.get(f"/transactions/{id}?bodies=1", by="viewer", at=url)
        assert page.status == 200
        assert "Viewers cannot see content" in page.body
        assert "/actions/" not in page.body
        act = await site.get(f"/actions/commit?id={id}", by="viewer", at=url)
        assert act.status == 403
    assert await pending(site, id)
    record_property("result", "sees states; 403 not_permitted for bodies and actions, console too")


async def test_a_viewer_of_the_console(site: Installation, record_property: Any) -> None:
    kafka = site.world.kafka
    policy = {"attempts_max": 1, "check_after_s": 0}
    put = await site.put("/v1/groups/bank-viewed", policy, by="operator")
    assert put.status == 200, put.body
    waiting = await site.prepared("bank", group="bank-viewed", check_after_s=3600)
    async with site.socket("bank") as bank:
        assert isinstance(await bank.hello("bank-viewed"), wire.Welcome)
        parked = await site.prepared("bank", group="bank-viewed")
        check = await bank.next()
        assert isinstance(check, wire.CheckQuestion)
        await bank.send(wire.CheckAnswer(check.call, Decision.UNKNOWN))
        await site.reaches(parked, "parked")
    refused = await site.prepared("bank", group="bank-viewed")
    kafka.set_authorized("bank.payments", authorized=False)
    try:
        path = f"/v1/transactions/{refused}/commit"
        assert (await site.post(path, {}, by="bank")).status == 200
        await site.reaches(refused, "refused")
        for url in site.urls:
            for by in ("viewer", "operator"):
                async with reader_of(url, Authorization=f"Bearer {TOKENS[by]}") as reader:
                    seen = await targets_of_pages(reader)
                assert {f"/transactions/{id}" for id in (parked, refused, waiting)} <= seen
                acts = {path for path in seen if path.startswith("/actions/")}
                assert (acts == set()) == (by == "viewer"), acts
    finally:
        kafka.set_authorized("bank.payments", authorized=True)
    record_property("result", "No page links to an action, with pending, parked and refused ones")


async def targets_of_pages(reader: Reader) -> set[str]:
    """Return the paths of all links and forms on pages that links lead to, actions not opened."""
    found, ahead = {"/"}, ["/"]
    targets: set[str] = set()
    while ahead:
        seen = await reader.open(ahead.pop())
        assert seen.status == 200, seen.url
        links = [a.attributes["href"] for a in seen.root.all("a")]
        forms = [form.attributes["action"] for form in seen.root.all("form")]
        targets |= {urlsplit(target).path for target in (*links, *forms)}
        new = {
            link.partition("#")[0]
            for link in links
            if link.startswith("/") and not link.startswith("/actions/")
        } - {"", *found}
        found |= new
        ahead += new
    return targets


# --- proxies among others ------------------------------------------------------------------------


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Installation]:
    """An installation without a proxy yet."""
    world = MemoryHarness()
    made = Installation(world, tmp_path)
    yield made
    await made.close()
    await world.close()


def credentials(folder: Path) -> dict[str, dict[str, Any]]:
    """Return settings by which callers need a credential, by their name."""
    token, principals = folder / "token", folder / "principals-2.toml"
    token.write_text("a token of all producers")
    token.chmod(0o600)
    principals.write_text(TABLES["operator"])
    return {"a token": {"token_file": token}, "principals": {"principals_file": principals}}


@pytest.mark.parametrize("credential", ["a token", "principals"])
async def test_proxy_without_peer_identity_among_others(
    alone: Installation, credential: str, record_property: Any
) -> None:
    await alone.start(1)
    first = alone.proxies[0]
    settings = load_settings(
        {"instance": "other", "listen": "127.0.0.1:0", **credentials(alone.folder)[credential]},
        environ={},
    )
    with pytest.raises(ConfigurationError, match=r"no peer identity.*peer_secret_file.*peer_names"):
        async with run_proxy(alone.world.closed_door("other", half_partitions=4), settings):
            pass
    await until(
        lambda: set(first.broker.owners()) == {first.url} and first.broker.readiness().ready
    )
    record_property("result", "does not start and names the setting; the others go on")


async def test_the_first_of_two_without_peer_identity(alone: Installation) -> None:
    """It goes on alone and serves no peer calls; the second does not start."""
    given = credentials(alone.folder)["principals"] | {"listen": "127.0.0.1:0"}
    doors = [alone.world.closed_door(name, half_partitions=4) for name in ("one", "two")]
    async with run_proxy(doors[0], load_settings({"instance": "one", **given}, environ={})) as one:

        def ready() -> bool:
            return one.broker.readiness().ready and set(one.broker.owners()) == {one.url}

        await until(ready)
        settings = load_settings({"instance": "two", **given}, environ={})
        with pytest.raises(ConfigurationError, match="no peer identity"):
            async with run_proxy(doors[1], settings):
                pass
        await until(ready)
        headers = {"txb-proxy": one.url, "txb-peer-secret": PEER_SECRET}
        answer = await alone.get(
            "/internal/v1/overview", at=one.url, by="operator", headers=headers
        )
        assert answer.outcome == "403 not_a_peer"
        assert "peer_secret_file or peer_names" in answer.body["error"]["message"]


async def test_without_any_credential(alone: Installation) -> None:
    """Proxies that require no credential need no peer identity."""
    proxies: list[Proxy] = []
    stop = asyncio.Event()

    async def run(name: str) -> None:
        settings = load_settings({"instance": name, "listen": "127.0.0.1:0"}, environ={})
        async with run_proxy(alone.world.closed_door(name, half_partitions=4), settings) as proxy:
            proxies.append(proxy)
            await stop.wait()

    tasks = [asyncio.create_task(run(name)) for name in ("one", "two")]

    async def shared() -> bool:
        views = {proxy.broker.owners() for proxy in proxies}
        return len(proxies) == 2 and len(views) == 1 and len(set(views.pop())) == 2

    await until(shared)
    overview = await alone.get("/v1/overview", at=proxies[0].url)
    assert overview.body["complete"] is True
    stop.set()
    await asyncio.gather(*tasks)


async def test_an_address_for_peers(alone: Installation) -> None:
    """Calls of proxies are taken at peer_listen alone, and go there; nothing else does."""
    await alone.start(2, peer_listen="127.0.0.1:0")
    headers = {"txb-peer-secret": PEER_SECRET, "txb-proxy": alone.urls[0]}
    ids = [await alone.prepared("shop") for _ in range(8)]
    for url in alone.urls:
        # Each proxy is asked for what the other one owns.
        for id in ids:
            found = await alone.get(f"/v1/transactions/{id}", by="shop", at=url)
            assert found.status == 200
        public = await alone.get("/internal/v1/overview", at=url, headers=headers)
        assert public.status == 401
        named = await alone.get("/internal/v1/overview", by="operator", at=url, headers=headers)
        assert named.status == 404
        peer_url = alone.proxies[0].broker.partitions.peer_url(url)
        if url != alone.urls[0]:
            assert peer_url != url
            right = await alone.get("/internal/v1/overview", at=peer_url, headers=headers)
            assert right.status == 200
            for path in ("/v1/overview", "/healthz", "/v1/transactions", "/"):
                other = await alone.get(path, by="operator", at=peer_url)
                assert other.status in (403, 404), path
