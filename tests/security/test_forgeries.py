"""Class 5: ids, cursors, logins and signatures that were forged, cut off or made elsewhere."""

from __future__ import annotations

import base64
import hashlib
import hmac
from http.cookies import SimpleCookie
from typing import Any

import pytest

from tests.security.installation import TOKENS, Installation
from txbroker.contract import frames as wire
from txbroker.contract.signing import sign
from txbroker.core.records import Decision
from txbroker.core.routing import make_id
from txbroker.proxy.http.guards import Guard
from txbroker.sdk import BadSignature, verify_webhook

CLASS = 5


def ids(site: Installation) -> dict[str, str]:
    now_ms = site.proxies[0].broker.now_ms()
    right = make_id(0, now_ms, 77)
    return {
        "empty": "%20",
        "cut off": right[:-1],
        "one character more": right + "0",
        "a letter that is no digit": right[:-1] + "U",
        "too large for 128 bits": "8" + right[1:],
        "not ASCII": right[:-1] + "%C4%B1",
        "a path": "..%2F..%2Fetc",
        "of a half partition that is not there": make_id(999, now_ms, 77),
        "of nobody": right,
        "of another time": make_id(0, now_ms - 10**9, 77),
        "of the future": make_id(0, now_ms + 10**9, 77),
    }


@pytest.mark.parametrize("name", [
    "empty", "cut off", "one character more", "a letter that is no digit", "too large for 128 bits",
    "not ASCII", "a path", "of a half partition that is not there", "of nobody", "of another time",
    "of the future",
])  # fmt: skip
async def test_an_id(site: Installation, name: str, record_property: Any) -> None:
    id = ids(site)[name]
    outcomes = set()
    for url in site.urls:
        for method, path in (("GET", ""), ("POST", "/commit"), ("POST", "/rollback")):
            answer = await site.call(
                method,
                f"/v1/transactions/{id}{path}",
                {} if method == "POST" else None,
                by="shop",
                at=url,
            )
            outcomes.add(answer.outcome)
    assert len(outcomes) == 1, outcomes
    assert outcomes <= {"400 bad_id", "404 not_found", "410 too_old"}
    record_property("result", outcomes.pop())


async def test_an_id_in_a_session(site: Installation, record_property: Any) -> None:
    codes = set()
    for url in site.urls:
        async with site.socket("shop", url) as socket:
            assert isinstance(await socket.hello("shop"), wire.Welcome)
            for number, id in enumerate(ids(site).values(), 1):
                failure = await socket.ask(wire.Decide(number, id, Decision.COMMIT))
                assert isinstance(failure, wire.Failure), id
                codes.add(failure.code)
    assert codes <= {"bad_id", "not_found", "too_old", "owner_unavailable"}
    record_property("result", "bad_id, not_found or too_old; owner_unavailable at another proxy")


@pytest.mark.parametrize(
    "cursor", ["x", "1.x", "-1.", "1" * 400, "NaN.0", "1.{id}'--", "0.00000000000000000000000000x"]
)
async def test_a_cursor(site: Installation, cursor: str, record_property: Any) -> None:
    for url in site.urls:
        path = f"/v1/transactions?cursor={cursor}"
        answer = await site.get(path, by="operator", at=url)
        assert answer.outcome == "400 bad_request"
    record_property("result", "400 bad_request")


async def login(site: Installation, by: str) -> str:
    """Log in at the console and return the cookie."""
    http = site._http
    url = site.urls[0]
    async with http.get(f"{url}/login") as page:
        cookies = SimpleCookie("; ".join(page.headers.getall("Set-Cookie")))
        text = await page.text()
    secret = text.partition('name="form_secret" value="')[2].partition('"')[0]
    headers = {"cookie": f"txbroker_visit={cookies['txbroker_visit'].value}"}
    form = {"form_secret": secret, "token": TOKENS[by], "next": "/", "name": "Mallory"}
    async with http.post(
        f"{url}/login", data=form, headers=headers, allow_redirects=False
    ) as answer:
        assert answer.status == 303
        return SimpleCookie(answer.headers["Set-Cookie"])["txbroker_session"].value


async def status_with(site: Installation, cookie: str) -> int:
    """Return the status of the console's first page with a login's cookie."""
    headers = {"cookie": f"txbroker_session={cookie}"}
    async with site._http.get(site.urls[0] + "/", headers=headers, allow_redirects=False) as answer:
        return answer.status


async def test_a_login(site: Installation, record_property: Any) -> None:
    cookie = await login(site, "viewer")
    assert await status_with(site, cookie) == 200
    until_s, secret, name, principal, signature = cookie.split(".")
    operator = base64.urlsafe_b64encode(b"operator").decode().rstrip("=")
    forged = {
        "another principal": [until_s, secret, name, operator, signature],
        "later end": [str(int(until_s) + 1), secret, name, principal, signature],
        "no signature": [until_s, secret, name, principal, ""],
        "cut off": [until_s, secret, name, principal, signature[:-1]],
    }
    for parts in forged.values():
        assert await status_with(site, ".".join(parts)) == 303
    record_property("result", "303 to the login, for another principal, end or signature")


async def test_a_login_made_from_the_principals_file(site: Installation) -> None:
    """Who has read the digests can sign nothing: 303 to the login."""
    guard = Guard(site.proxies[0].broker._settings)
    principal = guard.named("operator")
    assert principal is not None
    cookie = await login(site, "operator")
    content = cookie.rpartition(".")[0]
    for key in (b"", principal.digests[0].encode(), bytes.fromhex(principal.digests[0])):
        signature = hmac.digest(key, content.encode(), hashlib.sha256).hex()
        assert await status_with(site, f"{content}.{signature}") == 303


@pytest.mark.parametrize(
    "change", ["body", "id", "timestamp", "secret", "cut off", "empty", "other scheme"]
)
def test_a_signature_of_a_check(change: str) -> None:
    """The SDK's verify_webhook raises BadSignature."""
    secret, id, at_s, body = b"the secret of the group", "id.1.1", 1_000_000, b'{"id": "x"}'
    signature = sign(secret, id, at_s, body)
    headers = {"webhook-id": id, "webhook-timestamp": str(at_s), "webhook-signature": signature}
    verify_webhook(secret, headers, body, now=at_s)
    if change == "body":
        body += b" "
    elif change == "secret":
        secret = b"another"
    else:
        field, value = {
            "id": ("webhook-id", "id.1.2"),
            "timestamp": ("webhook-timestamp", str(at_s + 1)),
            "cut off": ("webhook-signature", signature[:-1]),
            "empty": ("webhook-signature", ""),
            "other scheme": ("webhook-signature", signature.replace("v1,", "v0,")),
        }[change]
        headers[field] = value
    with pytest.raises(BadSignature):
        verify_webhook(secret, headers, body, now=at_s)
