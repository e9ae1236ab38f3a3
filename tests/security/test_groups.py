"""Class 3: group names that are blank, missing, unknown or malformed."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from tests.security.installation import Installation
from txbroker.contract import frames as wire

CLASS = 3
MALFORMED = {
    "blank": "",
    "control character": "shop\n",
    "null character": "shop\x00",
    "bidirectional override": "shop\u202e",
    "line separator": "shop\u2028",
    "too long": "s" * 250,
}
UNKNOWN = {
    "a space behind": "shop ",
    "upper case": "SHOP",
    "look-alike letter": "sh\u043ep",
    "full-width letters": "\uff53\uff48\uff4f\uff50",
    "pattern": "*",
    "another one": "nobody",
}


@pytest.mark.parametrize("name", [*MALFORMED, *UNKNOWN])
async def test_malformed_or_foreign_group_name(
    site: Installation, name: str, record_property: Any
) -> None:
    by, code, group = "operator", "400 bad_request", MALFORMED.get(name)
    if group is None:
        by, code, group = "shop", "403 not_permitted", UNKNOWN[name]
    for url in site.urls:
        body = site.prepare_body(group, "shop.orders")
        answer = await site.post("/v1/transactions", body, by=by, at=url)
        assert answer.outcome == code
        # No path leads to a name that is empty.
        path = f"/v1/groups/{quote(group, safe='')}"
        answer = await site.put(path, {}, by=by, at=url)
        assert answer.outcome == (code if group else "404 not_found")
        id = await site.prepared("shop")
        commit = f"/v1/transactions/{id}/commit"
        answer = await site.post(commit, {"group": group}, by=by, at=url)
        assert answer.outcome == code
        async with site.socket(by, url) as socket:
            refused = await socket.hello(group)
            assert isinstance(refused, wire.Failure)
            assert refused.code == code.partition(" ")[2]
    record_property("result", f"{code}; a hello too")


async def test_no_name(site: Installation, record_property: Any) -> None:
    for url in site.urls:
        body = site.prepare_body("shop")
        del body["group"]
        answer = await site.post("/v1/transactions", body, by="shop", at=url)
        assert answer.outcome == "400 bad_request"
        for wrong in (None, 7, ["shop"], {"shop": 1}):
            body["group"] = wrong
            answer = await site.post("/v1/transactions", body, by="shop", at=url)
            assert answer.outcome == "400 bad_request"
    record_property("result", "400 bad_request")


async def test_an_unknown_group_of_an_operator(site: Installation, record_property: Any) -> None:
    for url in site.urls:
        for method in ("GET", "DELETE"):
            answer = await site.call(
                method,
                "/v1/groups/nobody",
                by="operator",
                at=url,
                headers={"content-type": "application/json"},
            )
            assert answer.outcome == "404 unknown_group"
    record_property("result", "404 unknown_group")
