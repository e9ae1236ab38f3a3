"""Whole transactions over TLS: by curl, by the SDK in both forms, and through another proxy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from tests.console.console_world import Reader
from tests.kit.until import until
from tests.tls.tls_world import ADMIN_TOKEN, TOKEN, Files, TlsHarness
from txbroker.cli.doctor.bundle import known_secrets, settings_shown
from txbroker.config.settings import load_settings
from txbroker.core.records import Decision
from txbroker.net.tls import ClientTls, TlsFiles
from txbroker.proxy.console.visitors import SESSION_COOKIE, VISIT_COOKIE
from txbroker.proxy.http.guards import Guard, load_secret
from txbroker.proxy.observe.logging import configure_logging
from txbroker.sdk import BlockingTransactionalProducer, Message

pytestmark = [pytest.mark.needs_tool("openssl"), pytest.mark.needs_tool("curl")]


async def visible(world: TlsHarness, count: int) -> list[bytes | None]:
    """Return the visible records, once there are `count`."""

    await until(lambda: len(world.kafka.visible("test.payments", 0)) >= count)
    return [record.value for record in await world.visible("test.payments")]


async def test_curl_completes_a_transaction(world: TlsHarness) -> None:
    body = {"group": "orders", "messages": [{"topic": "test.payments", "value": "42"}]}
    async with world.proxy() as proxy:
        assert proxy.url.startswith("https://")
        prepared = await world.curl(f"{proxy.url}/v1/transactions", body=body)
        assert prepared.status == 201, prepared
        path = f"/v1/transactions/{prepared.json['id']}/commit"
        done = await world.curl(proxy.url + path, body={"wait": "promoted"})
        assert (done.status, done.json["state"]) == (200, "promoted")
        assert await visible(world, 1) == [b"42"]


async def test_sdk_sends_and_is_checked_over_tls(world: TlsHarness) -> None:
    asked: list[str] = []

    def check(request: object) -> Decision:
        asked.append(str(request))
        return Decision.COMMIT

    async with world.proxy(token_file=world.files.token, check_after_s=0.2) as proxy:
        producer = world.producer(proxy.url, check=check, token=TOKEN)
        async with producer:
            async with producer.transaction(Message("test.payments", b"k", b"one")):
                pass
            # The producer does not decide this one: the check uses the same session.
            await producer.prepare(Message("test.payments", b"k", b"two"))
            assert await visible(world, 2) == [b"one", b"two"]
        assert len(asked) == 1


async def test_blocking_sdk_sends_over_mutual_tls(world: TlsHarness) -> None:
    def send(url: str) -> None:
        producer = BlockingTransactionalProducer(
            [url],
            group="orders",
            ca_file=str(world.ours.cert),
            client_cert_file=str(world.client.cert),
            client_key_file=str(world.client.key),
        )
        with producer, producer.transaction(Message("test.payments", b"k", b"one")):
            pass

    async with world.mutual() as proxy:
        await asyncio.to_thread(send, proxy.url)
        assert await visible(world, 1) == [b"one"]


# --- the console ---------------------------------------------------------------------------------


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


# --- tokens and keys are not shown ---------------------------------------------------------------


async def test_log_and_answers_have_no_token_or_key(
    world: TlsHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("json", "debug")
    logging.getLogger("aiohttp").setLevel(logging.DEBUG)
    shown = []
    async with world.mutual(**world.apart) as proxy:

        async def show(url: str, token: str = ADMIN_TOKEN) -> None:
            shown.append((await world.curl(url, shown=world.client, token=token)).body)

        for path in ("/metrics", "/v1/overview", "/readyz", "/v1/openapi.json", "/", "/nowhere"):
            await show(proxy.admin_url + path)
        await show(f"{proxy.admin_url}/metrics", TOKEN)
        await show(f"{proxy.url}/v1/groups/orders")
        shown.append(repr(proxy))
        world.files.admin_token.write_text(f"{ADMIN_TOKEN}\n")
        await show(f"{proxy.admin_url}/metrics")
    output = capsys.readouterr()
    assert '"event": "ready"' in output.err  # the log was captured
    shown += [output.out, output.err]
    key_lines = world.files.proxy.key.read_text().splitlines()[1:-1]
    for secret in (TOKEN, ADMIN_TOKEN, *key_lines):
        assert not [text for text in shown if secret in text]


async def test_repr_of_settings_and_guards_has_no_token(world: TlsHarness) -> None:
    settings = load_settings({**world.secured, **world.apart}, environ={})
    token = load_secret("admin_token_file", world.files.admin_token)
    texts = [repr(settings), str(settings), settings.model_dump_json(), repr(token)]
    texts += [repr(vars(Guard(settings, admin=True)))]
    texts += [msgspec.json.encode(settings_shown(settings)).decode()]
    for secret in (TOKEN, ADMIN_TOKEN):
        assert not [text for text in texts if secret in text]
    # The doctor removes both from its bundle.
    assert {TOKEN, ADMIN_TOKEN} <= set(known_secrets(settings, ""))


def test_unreadable_token_is_reported_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"\xff\xfe planted")
    path.chmod(0o600)
    with pytest.raises(Exception, match=r"admin_token_file .* is not text") as caught:
        load_secret("admin_token_file", path)
    assert "planted" not in str(caught.value)
