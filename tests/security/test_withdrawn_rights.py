"""Class 6: rights that are withdrawn between prepare and promotion."""

from __future__ import annotations

from typing import Any

from tests.security.installation import TABLES, Installation

CLASS = 6


async def test_write_of_the_proxies_on_a_topic(site: Installation) -> None:
    """The transaction is refused and kept whole, others flow; granted again it is promoted."""
    kafka = site.world.kafka
    for url in site.urls:
        refused = await site.prepared("shop")
        kafka.set_authorized("shop.orders", authorized=False)
        flowing = await site.prepared("bank")
        for id, by in ((refused, "shop"), (flowing, "bank")):
            path = f"/v1/transactions/{id}/commit"
            assert (await site.post(path, {}, by=by, at=url)).status == 200
        await site.reaches(refused, "refused")
        await site.reaches(flowing, "promoted")
        view = await site.view(refused, bodies=True)
        assert view["cause"]["code"] == "not_authorized"
        assert view["messages"][0]["topic"] == "shop.orders"
        kafka.set_authorized("shop.orders", authorized=True)
        revive = f"/v1/transactions/{refused}/revive"
        assert (await site.post(revive, {}, by="operator", at=url)).status == 200
        await site.reaches(refused, "promoted")


async def test_a_topic_of_a_principal(site: Installation, record_property: Any) -> None:
    narrower = TABLES["shop"].replace('"shop.*"', '"nothing"')
    for url in site.urls:
        id = await site.prepared("shop")
        site.principals.write_text("\n".join([narrower, TABLES["operator"]]))
        body = site.prepare_body("shop")
        new = await site.post("/v1/transactions", body, by="shop", at=url)
        assert new.outcome == "403 not_permitted"
        path = f"/v1/transactions/{id}/commit"
        assert (await site.post(path, {}, by="shop", at=url)).status == 200
        site.allow(*TABLES)
        await site.reaches(id, "promoted")
    record_property("result", "403 for new prepares; earlier ones are promoted")


async def test_the_principal_itself(site: Installation, record_property: Any) -> None:
    for url in site.urls:
        id = await site.prepared("shop")
        site.allow(*(name for name in TABLES if name != "shop"))
        path = f"/v1/transactions/{id}/commit"
        refused = await site.post(path, {}, by="shop", at=url)
        assert refused.outcome == "401 unauthorized"
        assert (await site.view(id))["state"] == "pending"
        decided = await site.post(path, {"reason": "by hand"}, by="operator", at=url)
        assert decided.status == 200
        site.allow(*TABLES)
    record_property("result", "401; the transaction stays pending, an operator decides it")
