"""Tokens for OAUTHBEARER: in a file that changes, and from a token endpoint."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.secure.secure_world import CLIENT_ID, CLIENT_SECRET
from tests.secure.token_endpoint import TokenEndpoint
from tests.tls.tls_files import Authority
from txbroker.kafka.client import login as oauth
from txbroker.kafka.client.login import Credentials, FetchedToken, NoToken, TokenInFile


def credentials(endpoint: TokenEndpoint, authority: Authority, **changes: Any) -> Credentials:
    given = Credentials(
        endpoint.url, CLIENT_ID, lambda: CLIENT_SECRET, "kafka write", authority.cert
    )
    return structs.replace(given, **changes)


async def no_token(source: FetchedToken | TokenInFile) -> str:
    """Return why there is no token."""
    with pytest.raises(NoToken) as raised:
        await source.token()
    reason = str(raised.value)
    assert CLIENT_SECRET not in reason
    return reason


async def test_token_file_is_reread(tmp_path: Path) -> None:
    file = tmp_path / "token"
    source = TokenInFile(file)
    assert "kafka_oauth_token_file" in await no_token(source)
    file.write_text("first\n")
    assert await source.token() == "first"
    file.write_text("second")
    assert await source.token() == "second"


async def test_token_is_fetched_once(endpoint: TokenEndpoint, authority: Authority) -> None:
    source = FetchedToken(credentials(endpoint, authority))
    tokens = await asyncio.gather(*(source.token() for _ in range(20)))
    assert len(set(tokens)) == 1
    assert endpoint.asked == [{"grant_type": "client_credentials", "scope": "kafka write"}]


async def test_scope_is_sent_only_if_set(endpoint: TokenEndpoint, authority: Authority) -> None:
    await FetchedToken(credentials(endpoint, authority, scope="")).token()
    assert endpoint.asked == [{"grant_type": "client_credentials"}]


async def test_token_is_renewed_before_expiry(
    endpoint: TokenEndpoint, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FetchedToken(credentials(endpoint, authority))
    clock = asyncio.get_running_loop().time
    ahead_s = 0.0
    monkeypatch.setattr(oauth, "now_s", lambda: clock() + ahead_s)
    first = await source.token()
    ahead_s = 0.79 * 3600
    assert await source.token() == first
    ahead_s = 0.81 * 3600
    second = await source.token()
    assert second != first

    # A valid token is used while the endpoint is down, without repeated requests.
    endpoint.answer = (503, "")
    ahead_s += 0.9 * 3600
    asked = len(endpoint.asked)
    assert [await source.token() for _ in range(3)] == [second] * 3
    assert len(endpoint.asked) == asked + 1
    ahead_s += 0.2 * 3600
    assert "returns no token (503)" in await no_token(source)
    asked = len(endpoint.asked)
    assert "returns no token (503)" in await no_token(source)
    assert len(endpoint.asked) == asked
    endpoint.answer = None
    ahead_s += oauth.PAUSE_S
    assert await source.token() not in (first, second)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((400, json.dumps({"error": "invalid_scope"})), "(400 invalid_scope): see kafka_oauth"),
        ((401, json.dumps({"error": f"no\n{CLIENT_SECRET}"})), "returns no token (401)"),
        ((500, CLIENT_SECRET), "returns no token (500)"),
        ((302, ""), "returns no token (302)"),
        ((200, "<html>"), "answers without access_token: check"),
        ((200, json.dumps(["a"])), "answers without access_token"),
        ((200, json.dumps({"access_token": "a\x01auth=b"})), "answers without access_token"),
        ((200, json.dumps({"access_token": ""})), "answers without access_token"),
    ],
)
async def test_invalid_token_answers_are_refused(
    endpoint: TokenEndpoint, authority: Authority, answer: tuple[int, str], words: str
) -> None:
    endpoint.answer = answer
    assert words in await no_token(FetchedToken(credentials(endpoint, authority)))


@pytest.mark.parametrize("life", [None, "soon", "3600", 3600])
async def test_unknown_lifetime_is_short(
    endpoint: TokenEndpoint, authority: Authority, life: Any
) -> None:
    endpoint.answer = (200, json.dumps({"access_token": "t", "expires_in": life}))
    wanted = 3600 if life in ("3600", 3600) else oauth.DEFAULT_LIFETIME_S
    assert await oauth.fetch_token(credentials(endpoint, authority)) == ("t", wanted)


async def test_wrong_client_secret_is_explained(
    endpoint: TokenEndpoint, authority: Authority
) -> None:
    wrong = credentials(endpoint, authority, secret=lambda: "wrong")
    assert "(401 invalid_client): see kafka_oauth_client_id" in await no_token(FetchedToken(wrong))


async def test_endpoint_with_wrong_certificate_gets_no_secret(
    endpoint: TokenEndpoint, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    given = credentials(endpoint, authority, ca_file=stranger.cert)
    assert "is invalid: " in await no_token(FetchedToken(given))
    elsewhere = endpoint.url.replace("127.0.0.1", "localhost")
    given = credentials(endpoint, authority, url=elsewhere)
    assert "is invalid: " in await no_token(FetchedToken(given))
    assert endpoint.asked == []


async def test_unreachable_endpoint_is_explained(authority: Authority, tmp_path: Path) -> None:
    given = Credentials("https://127.0.0.1:9/token", "id", lambda: "s", ca_file=authority.cert)
    assert "cannot be reached (Connection refused)" in await no_token(FetchedToken(given))
    given = structs.replace(given, ca_file=tmp_path / "none")
    assert "kafka_oauth_ca_file" in await no_token(FetchedToken(given))
