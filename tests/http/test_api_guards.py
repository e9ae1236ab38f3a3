"""Who may call: host names, origins, tokens, media types."""

from __future__ import annotations

import os
from pathlib import Path

import aiohttp
import pytest
from structlog.testing import capture_logs

from tests.kit.http_api import Api, running_api, transaction
from tests.kit.secret_files import secret_file
from tests.kit.ws_client import connected


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:8470", "proxy-1:8470", "my.name.example"],
)
async def test_known_hosts_may_be_called(host: str) -> None:
    options = {"advertise": "http://proxy-1:8470", "allowed_hosts": ("my.name.example",)}
    async with running_api(**options) as api:
        assert (await api.call("GET", "/v1/groups", Host=host))[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.1", ""])
@pytest.mark.parametrize("path", ["/v1/groups", "/v1/transactions", "/metrics", "/nowhere"])
async def test_unknown_hosts_are_refused(api: Api, host: str, path: str) -> None:
    status, answer = await api.call("GET", path, Host=host)
    assert (status, answer["error"]["code"]) == (403, "forbidden")


async def test_wildcard_listener_accepts_bare_addresses() -> None:
    async with running_api(token_file=None, insecure=True) as loopback:
        assert (await loopback.call("GET", "/v1/groups", Host="10.0.0.1"))[0] == 403
    async with running_api(public=True, insecure=True) as everywhere:
        assert (await everywhere.call("GET", "/v1/groups", Host="10.0.0.1:80"))[0] == 200
        assert (await everywhere.call("GET", "/v1/groups", Host="evil.example"))[0] == 403


async def test_health_needs_no_credential(api: Api) -> None:
    assert (await api.call("GET", "/healthz", Host="10.0.0.1"))[0] == 200
    assert (await api.call("GET", "/readyz", Host="10.0.0.1"))[0] == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "x", "http://[", ""]
)
async def test_cross_site_calls_are_refused(api: Api, origin: str) -> None:
    status, answer = await api.call("POST", "/v1/transactions", transaction(), Origin=origin)
    assert (status, answer["error"]["code"]) == (403, "forbidden")
    assert api.service.requests == []


async def test_same_site_calls_are_admitted(api: Api) -> None:
    status, _ = await api.call("POST", "/v1/transactions", transaction(), Origin=api.url)
    assert status == 201


async def test_cross_site_sessions_are_refused(api: Api) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
        async with connected(api, origin="http://evil.example"):
            pass
    assert refusal.value.status == 403


@pytest.mark.parametrize(
    "media", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp", "json",
              "application/json; charset=latin1"]
)  # fmt: skip
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/transactions"),
        ("POST", "/v1/transactions/00000000000000000000000000/commit"),
        ("POST", "/v1/transactions/00000000000000000000000000/check"),
        ("PUT", "/v1/groups/orders"),
        ("DELETE", "/v1/groups/orders"),
    ],
)
async def test_state_changing_call_must_be_json(
    api: Api, method: str, path: str, media: str
) -> None:
    status, answer = await api.call(method, path, raw=b"{}", content_type=media)
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
    assert api.service.requests == []


@pytest.mark.parametrize(
    "media", ["application/json", "Application/JSON", "application/json; charset=UTF-8"]
)
async def test_json_media_type_is_parsed(api: Api, media: str) -> None:
    assert (await api.call("PUT", "/v1/groups/orders", {}, content_type=media))[0] == 200


async def status_with(api: Api, given: str = "", path: str = "/v1/groups") -> int:
    headers = {"Authorization": given} if given else {}
    return (await api.call("GET", path, **headers))[0]


async def test_all_calls_but_health_need_the_token(tmp_path: Path) -> None:
    token = secret_file(tmp_path / "token", "s3cret-16-or-more\n")
    async with running_api(token_file=token) as api:
        for path in ("/v1/groups", "/v1/transactions", "/metrics", "/v1/session", "/nowhere"):
            async with api.client.get(api.url + path) as answer:
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert (await answer.json())["error"]["code"] == "unauthorized"
                assert "s3cret" not in await answer.text()
        for path in ("/healthz", "/readyz"):
            assert await status_with(api, path=path) == 200
        for given in (
            "Bearer",
            "Bearer wrong",
            "Basic s3cret-16-or-more",
            "s3cret-16-or-more",
            "Bearer s3cret-16-or-more2",
            "B\xe4r s",
        ):
            assert await status_with(api, given) == 401
        for given in ("Bearer s3cret-16-or-more", "bearer  s3cret-16-or-more "):
            assert await status_with(api, given) == 200
        async with connected(api, headers={"Authorization": "Bearer s3cret-16-or-more"}) as one:
            assert not one.socket.closed


async def test_changed_token_file_is_reloaded(tmp_path: Path) -> None:
    token = secret_file(tmp_path / "token", "old-16-characters")
    async with running_api(token_file=token) as api:
        os.replace(secret_file(tmp_path / "new", "new-16-characters"), token)
        assert await status_with(api, "Bearer old-16-characters") == 401
        assert await status_with(api, "Bearer new-16-characters") == 200
        # Gone or empty, it is being replaced: calls without a token are refused.
        token.unlink()
        assert await status_with(api) == 401
        assert await status_with(api, "Bearer new-16-characters") == 200


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("another-16-characters", 0o644, "is open to other users of this machine (mode 0644)"),
        ("another-16-characters", 0o660, "is open to other users of this machine (mode 0660)"),
        ("short", 0o600, "holds a token of 5 characters"),
        ("old-16-characters", 0o644, "is open to other users of this machine"),
    ],
    ids=["readable by all", "writable by the group", "short", "same token, readable by all"],
)
async def test_unsafe_token_file_keeps_the_last_token(
    tmp_path: Path, text: str, mode: int, why: str
) -> None:
    file = secret_file(tmp_path / "token", "old-16-characters")
    async with running_api(token_file=file) as api:
        old = "Bearer old-16-characters"
        assert await status_with(api, old) == 200
        with capture_logs() as logs:
            secret_file(file, text, mode)
            for _ in range(2):
                assert await status_with(api, old) == 200
        (entry,) = [line for line in logs if line["event"] == "file not read"]
        assert entry["setting"] == "token_file"
        assert why in entry["why"]
        assert text not in entry["why"]
        secret_file(file, "newest-16-characters", 0o440)
        assert await status_with(api, old) == 401
