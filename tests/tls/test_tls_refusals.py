"""Who is refused over TLS, on which side, and in which words."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from tests.tls.tls_files import Pair
from tests.tls.tls_world import BODY, TOKEN, Files, TlsHarness
from txbroker.errors import CertificateRequired, Unauthorized
from txbroker.sdk import Limits, Message, TransactionalProducer, Untrusted

pytestmark = [pytest.mark.needs_tool("openssl"), pytest.mark.needs_tool("curl")]

NEVER_S = 100.0
"""Longer than a test may take: a test that waits this long for a session fails."""


async def refused(made: TransactionalProducer) -> Exception:
    """Return why a producer cannot start; it must not wait until its time is over."""
    with pytest.raises((Untrusted, CertificateRequired, Unauthorized)) as caught:
        await asyncio.wait_for(made.start(NEVER_S), NEVER_S / 2)
    return caught.value


# --- the proxy's certificate -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("certificate", "expected"),
    [
        (lambda files: files.others.sign("untrusted"), "is not trusted"),
        (lambda files: files.ours.sign("expired", days=-1), "its certificate has expired"),
        (
            lambda files: files.ours.sign("elsewhere", "DNS:elsewhere.example.org"),
            "its certificate is for another host name than '127.0.0.1'",
        ),
    ],
    ids=["authority", "expired", "name"],
)
async def test_sdk_refuses_an_untrusted_proxy(
    world: TlsHarness, certificate: Callable[[Files], Pair], expected: str
) -> None:
    pair = certificate(world.files)
    async with world.proxy(tls_cert_file=pair.cert, tls_key_file=pair.key) as proxy:
        error = await refused(world.producer(proxy.url))
        assert isinstance(error, Untrusted)
        assert expected in str(error)
        assert (await world.curl(f"{proxy.url}/healthz")).code == 60


async def test_system_authorities_apply_without_ca_file(world: TlsHarness) -> None:
    async with world.proxy() as proxy:
        error = await refused(world.producer(proxy.url, ca_file=None))
        assert "name its authority's with ca_file" in str(error)


async def test_running_producer_retries_and_reports_the_reason(
    world: TlsHarness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "txbroker.sdk")
    pair = world.ours.sign("replaced")
    settings = {"tls_cert_file": pair.cert, "tls_key_file": pair.key}
    limits = Limits(retry_s=1.0, backoff_max_s=0.05)
    async with world.proxy(**settings) as first:
        made = world.producer(first.url, limits=limits)
        await made.start()
        await made.prepare(Message("test.payments", b"k", b"1"))
    bad = world.others.sign("bad")
    bad.copy_to(pair)
    async with world.proxy(listen=first.url.removeprefix("https://"), **settings):
        with pytest.raises(Untrusted, match="is not trusted"):
            await made.prepare(Message("test.payments", b"k", b"2"))
        assert sum("is not trusted" in line for line in caplog.messages) == 1
        world.files.proxy.copy_to(pair)
        # The certificate is fixed, and the producer recovers.
        await made.prepare(Message("test.payments", b"k", b"3"))
    await made.aclose()


async def test_plain_http_proxy_is_reported(world: TlsHarness) -> None:
    async with world.running(listen="127.0.0.1:0") as proxy:
        url = proxy.url.replace("http:", "https:")
        assert "it does not speak TLS" in str(await refused(world.producer(url)))


# --- plain HTTP to a port with TLS -----------------------------------------------------------


async def test_plain_http_connection_is_closed(
    world: TlsHarness, caplog: pytest.LogCaptureFixture
) -> None:
    async with world.proxy() as proxy:
        host, _, port = proxy.url.removeprefix("https://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = await reader.read()
        assert b"HTTP" not in answer
        writer.close()
        assert not [line for line in caplog.records if line.levelno >= logging.ERROR]
        assert (await world.curl(f"{proxy.url}/healthz")).status == 200


async def test_versions_before_1_2_are_refused(world: TlsHarness) -> None:
    async with world.proxy() as proxy:
        old = await world.curl(f"{proxy.url}/healthz", "--tls-max", "1.1")
        assert (old.code, old.status) == (35, 0)
        two = await world.curl(f"{proxy.url}/healthz", "--tls-max", "1.2")
        assert two.status == 200


# --- the client's certificate ----------------------------------------------------------------


async def test_calls_without_a_certificate_are_refused_and_probes_are_not(
    world: TlsHarness,
) -> None:
    async with world.mutual() as proxy:
        for path in ("/v1/transactions", "/v1/overview", "/metrics", "/", "/transactions"):
            answer = await world.curl(proxy.url + path)
            assert answer.status == 403, (path, answer)
        body = await world.curl(f"{proxy.url}/v1/transactions", body=BODY)
        assert (body.status, body.error) == (403, "certificate_required")
        for path in ("/healthz", "/readyz"):
            assert (await world.curl(proxy.url + path)).status == 200
        assert (await world.curl(f"{proxy.url}/v1/transactions", shown=world.client)).status == 200
        assert (await world.curl(f"{proxy.url}/", shown=world.client)).status == 200


async def test_sdk_reports_a_required_certificate(world: TlsHarness) -> None:
    async with world.mutual() as proxy:
        error = await refused(world.producer(proxy.url))
        assert isinstance(error, CertificateRequired)
        assert "client_cert_file" in str(error)


@pytest.mark.parametrize(
    ("certificate", "expected"),
    [
        (lambda files: files.stranger, "does not trust the authority of our client certificate"),
        (lambda files: files.ours.sign("late", days=-1), "our client certificate has expired"),
    ],
    ids=["authority", "expired"],
)
async def test_untrusted_certificate_is_refused(
    world: TlsHarness, certificate: Callable[[Files], Pair], expected: str
) -> None:
    pair = certificate(world.files)
    async with world.mutual() as proxy:
        made = world.producer(proxy.url, shown=pair)
        error = await refused(made)
        assert isinstance(error, Untrusted)
        assert expected in str(error)
        # Not even open calls: the certificate is false.
        assert (await world.curl(f"{proxy.url}/healthz", shown=pair)).status == 0


async def test_certificate_does_not_replace_the_token(world: TlsHarness) -> None:
    async with world.mutual(token_file=world.files.token) as proxy:
        url = f"{proxy.url}/v1/transactions"
        assert (await world.curl(url, shown=world.client)).error == "unauthorized"
        assert (await world.curl(url, shown=world.client, token="guessed")).error == "unauthorized"
        assert (await world.curl(url, token=TOKEN)).error == "certificate_required"
        assert (await world.curl(url, shown=world.client, token=TOKEN)).status == 200


@pytest.mark.parametrize("token", [None, "guessed"])
async def test_sdk_with_wrong_token_is_refused(world: TlsHarness, token: str | None) -> None:
    async with world.proxy(token_file=world.files.token) as proxy:
        error = await refused(world.producer(proxy.url, token=token))
        assert isinstance(error, Unauthorized)
