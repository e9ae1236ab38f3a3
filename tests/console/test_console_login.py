"""With a token file, every page and action needs a login."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from http.cookies import SimpleCookie
from pathlib import Path

import pytest

from tests.console.console_world import TOKEN, Reader, Seen, reader_of
from tests.kit.service import Service
from txbroker.config.settings import Settings
from txbroker.contract.service import (
    PrepareRequest,
    execute,
)
from txbroker.core.records import Message
from txbroker.proxy.console.visitors import LOGIN_S, VisitorCookies
from txbroker.proxy.http.guards import Guard


@pytest.fixture
async def stranger(guarded: Service) -> AsyncIterator[Reader]:
    async with reader_of(guarded.proxy.url) as client:
        yield client


async def log_in(reader: Reader, token: str = TOKEN, path: str = "/", **fields: str) -> Seen:
    asked = await reader.open(path)
    assert asked.url.path == "/login"
    return await reader.send("/login", {**asked.form("/login"), "token": token, **fields})


async def prepared(service: Service) -> str:
    """Prepare a transaction past the API, which wants a token."""
    request = PrepareRequest("group", (Message(await service.topic(), b"k", b"v"),))
    return (await execute(service.proxy.cluster, request)).id


PATHS = ["/", "/transactions?state=parked", "/transactions/0", "/groups", "/actions/commit?id=1"]


@pytest.mark.parametrize("path", PATHS)
async def test_every_page_redirects_to_the_login(stranger: Reader, path: str) -> None:
    asked = await stranger.open(path, follow=False)
    assert asked.status == 303
    shown = await stranger.open(asked.headers["Location"])
    assert shown.form("/login")["next"] == path
    assert shown.root.all("nav") == []
    assert shown.headers["Content-Security-Policy"].startswith("default-src 'none'")


async def test_login_opens_the_requested_page_until_logout(stranger: Reader) -> None:
    seen = await log_in(stranger, path="/transactions?state=parked", name="Ada")
    assert str(seen.url.relative()) == "/transactions?state=parked"
    assert "Ada" in seen.root.one("header").text
    assert (await stranger.open("/login?next=/groups")).url.path == "/groups"
    out = await stranger.send("/logout", seen.form("/logout"))
    assert out.url.path == "/login"
    assert (await stranger.open("/groups")).url.path == "/login"


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", TOKEN[:-1], "ü", "\ud800"])
async def test_wrong_token_is_refused(stranger: Reader, token: str) -> None:
    seen = await log_in(stranger, token.encode(errors="replace").decode(), name="Ada")
    assert seen.status == 401
    assert "not valid at this proxy" in seen.main.one("p", role="alert").text
    assert seen.form("/login")["name"] == "Ada"
    assert (await stranger.open("/")).url.path == "/login"


async def test_cross_site_login_form_is_refused(stranger: Reader) -> None:
    asked = await stranger.open("/login")
    form = {**asked.form("/login"), "token": TOKEN}
    assert (await stranger.send("/login", {**form, "form_secret": ""})).status == 403
    assert (await stranger.send("/login", form, Origin="https://evil.example")).status == 403
    assert (await stranger.open("/")).url.path == "/login"


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_login_cookie_is_http_only_and_same_site(stranger: Reader, scheme: str) -> None:
    form = {**(await stranger.open("/login")).form("/login"), "token": TOKEN}
    done = await stranger.send("/login", form, follow=False, X_Forwarded_Proto=scheme)
    cookies = SimpleCookie()
    for line in done.headers.getall("Set-Cookie"):
        cookies.load(line)
    session = cookies["txbroker_session"]
    assert (session["httponly"], session["samesite"]) == (True, "Strict")
    assert int(session["max-age"]) == LOGIN_S
    assert bool(session["secure"]) is (scheme == "https")
    assert TOKEN not in session.value


@pytest.mark.parametrize(
    "there", ["//evil.example/", "https://evil.example", "/\\evil.example", "javascript:x", ""]
)
async def test_login_redirects_to_local_paths_only(stranger: Reader, there: str) -> None:
    asked = await stranger.open(f"/login?next={there}")
    assert asked.form("/login")["next"] == "/"
    form = {**asked.form("/login"), "token": TOKEN, "next": there}
    done = await stranger.send("/login", form, follow=False)
    assert (done.status, done.headers["Location"]) == (303, "/")


async def test_actions_record_the_name_of_the_login(guarded: Service, stranger: Reader) -> None:
    id = await prepared(guarded)
    await log_in(stranger, name="Ada L.")
    done = await stranger.act(f"/actions/rollback?id={id}", reason="a test")
    assert done.status == 200
    view = await guarded.proxy.cluster.find(id)
    assert (view.by, view.reason) == ("token_file (Ada L.) via console 127.0.0.1", "a test")


async def test_form_without_a_login_does_nothing(guarded: Service, stranger: Reader) -> None:
    id = await prepared(guarded)
    async with reader_of(guarded.proxy.url) as member:
        await log_in(member)
        form = {**(await member.open(f"/actions/commit?id={id}")).form("/actions/"), "reason": "x"}
    assert (await stranger.send("/actions/commit", form)).url.path == "/login"
    assert (await guarded.proxy.cluster.find(id)).state == "pending"


async def test_login_cookie_is_invalid_for_the_api(stranger: Reader) -> None:
    await log_in(stranger)
    async with stranger.http.get("/v1/transactions") as answer:
        assert answer.status == 401


async def test_bearer_token_opens_pages(guarded: Service) -> None:
    async with reader_of(guarded.proxy.url, Authorization=f"Bearer {TOKEN}") as program:
        seen = await program.open("/groups")
    assert (seen.status, seen.url.path) == (200, "/groups")


async def test_new_token_ends_every_login(stranger: Reader, token_file: Path) -> None:
    await log_in(stranger)
    assert (await stranger.open("/groups")).url.path == "/groups"
    token_file.write_text("another-token-that-is-longer")
    await stranger.until("/groups", "Your principal's token")


async def test_link_on_another_site_keeps_the_login(stranger: Reader) -> None:
    """The browser keeps the cookie back, so our own page has to lead there once more."""
    seen = await stranger.open("/groups?name=a", follow=False, Sec_Fetch_Site="cross-site")
    assert seen.status == 200
    (refresh,) = seen.root.all("meta", **{"http-equiv": "refresh"})
    assert refresh.attributes["content"] == "0;url=/groups?name=a"
    again = await stranger.open("/groups?name=a", follow=False, Sec_Fetch_Site="same-origin")
    assert again.status == 303


# --- the cookie itself -----------------------------------------------------------------------


class Request:
    """As much of a request as `VisitorCookies` looks at."""

    def __init__(self, cookies: dict[str, str]) -> None:
        self.cookies = cookies
        self.headers: dict[str, str] = {}
        self.transport = None


class Response:
    def __init__(self) -> None:
        self.cookies: dict[str, str] = {}

    def set_cookie(self, name: str, value: str, **_: object) -> None:
        self.cookies[name] = value


async def test_cookie_is_valid_unmodified_in_time_for_its_token(
    token_file: Path,
) -> None:
    now = [time.time()]
    settings = Settings(token_file=token_file)
    guard = Guard(settings)
    visits = VisitorCookies(guard, lambda: now[0])
    principal = guard.named("token_file")
    assert principal is not None
    response = Response()
    visits.log_in(response, principal, "Ada", secure=False)  # type: ignore[arg-type]
    cookie = response.cookies["txbroker_session"]

    def admits(value: str, by: VisitorCookies = visits) -> bool:
        request = Request({"txbroker_session": value})
        return by.visitor(request).admitted  # type: ignore[arg-type]

    assert admits(cookie)
    assert admits(cookie, VisitorCookies(Guard(settings), lambda: now[0]))  # another proxy
    until_s, _, rest = cookie.partition(".")
    assert not admits(f"{int(until_s) + 1}.{rest}")
    assert not admits(cookie[:-1] + ("0" if cookie[-1] != "0" else "1"))
    for rubbish in ("", ".", "...", "\udcff.\udcff", "1.2.3.4", rest, "0" * 5000):
        assert not admits(rubbish)
    now[0] += LOGIN_S
    assert not admits(cookie)
