"""The console over TLS: its cookies are kept to it, and the operators' token opens it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.console.console_world import Reader
from tests.tls.tls_world import ADMIN_TOKEN, TOKEN, Files, TlsHarness
from txbroker.net.tls import ClientTls, TlsFiles
from txbroker.proxy.console.visitors import SESSION_COOKIE, VISIT_COOKIE

pytestmark = [pytest.mark.needs_tool("openssl")]


@asynccontextmanager
async def browsing(files: Files, url: str) -> AsyncIterator[Reader]:
    connector = aiohttp.TCPConnector(ssl=ClientTls(TlsFiles(files.ours.cert)).context())
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(url, cookie_jar=jar, connector=connector) as http:
        yield Reader(http)


async def test_login_with_the_operators_token(world: TlsHarness) -> None:
    async with (
        world.proxy(**world.apart) as proxy,
        browsing(world.files, proxy.admin_url) as reader,
    ):
        asked = await reader.open("/")
        assert asked.url.path == "/login"
        form = asked.form("/login")
        refused = await reader.send("/login", {**form, "name": "eve", "token": TOKEN})
        assert refused.status == 401
        done = await reader.send(
            "/login", {**form, "name": "ann", "token": ADMIN_TOKEN}, follow=False
        )
        assert done.status == 303
        cookies = {cookie.key: cookie for cookie in reader.http.cookie_jar}
        for name in (SESSION_COOKIE, VISIT_COOKIE):
            assert cookies[name]["secure"], name
            assert cookies[name]["httponly"], name
        assert (await reader.open("/")).status == 200


async def test_plain_http_cookies_are_not_secure(world: TlsHarness) -> None:
    async with (
        world.running(listen="127.0.0.1:0") as proxy,
        browsing(world.files, proxy.url) as reader,
    ):
        assert (await reader.open("/")).status == 200
        (cookie,) = reader.http.cookie_jar
        assert not cookie["secure"]
