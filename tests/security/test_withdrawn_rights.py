"""Class 6: rights that are withdrawn between prepare and promotion."""

from __future__ import annotations

from typing import Any

from tests.security.installation import TABLES, Installation

CLASS = 6


async def test_write_of_the_proxies_on_a_topic(installation: Installation) -> None:
    """The transaction is refused and kept whole, others flow; granted again it is promoted."""
    kafka = installation.world.kafka
    for url in installation.urls:
        refused = await installation.prepared("shop")
        kafka.set_authorized("shop.orders", authorized=False)
        flowing = await installation.prepared("bank")
        for id, by in ((refused, "shop"), (flowing, "bank")):
            path = f"/v1/transactions/{id}/commit"
            assert (await installation.call("POST", path, {}, by=by, at=url)).status == 200
        await installation.reaches(refused, "refused")
        await installation.reaches(flowing, "promoted")
        view = await installation.view(refused, bodies=True)
        assert view["cause"]["code"] == "not_authorized"
        assert view["messages"][0]["topic"] == "shop.orders"
        kafka.set_authorized("shop.orders", authorized=True)
        revive = f"/v1/transactions/{refused}/revive"
        assert (await installation.call("POST", revive, {}, by="operator", at=url)).status == 200
        await installation.reaches(refused, "promoted")


async def test_a_topic_of_a_principal(installation: Installation, record_property: Any) -> None:
    narrower = TABLES["shop"].replace('"shop.*"', '"nothing"')
    for url in installation.urls:
        id = await installation.prepared("shop")
        installation.principals.write_text("\n".join([narrower, TABLES["operator"]]))
        body = installation.prepare_body("shop")
        new = await installation.call("POST", "/v1/transactions", body, by="shop", at=url)
        assert new.outcome == "403 not_permitted"
        path = f"/v1/transactions/{id}/commit"
        assert (await installation.call("POST", path, {}, by="shop", at=url)).status == 200
        installation.allow(*TABLES)
        await installation.reaches(id, "promoted")
    record_property("result", "403 for new prepares; earlier ones are promoted")


async def test_the_principal_itself(installation: Installation, record_property: Any) -> None:
    for url in installation.urls:
        id = await installation.prepared("shop")
        installation.allow(*(name for name in TABLES if name != "shop"))
        path = f"/v1/transactions/{id}/commit"
        refused = await installation.call("POST", path, {}, by="shop", at=url)
        assert refused.outcome == "401 unauthorized"
        assert (await installation.view(id))["state"] == "pending"
        decided = await installation.call(
            "POST", path, {"reason": "by hand"}, by="operator", at=url
        )
        assert decided.status == 200
        installation.allow(*TABLES)
    record_property("result", "401; the transaction stays pending, an operator decides it")
