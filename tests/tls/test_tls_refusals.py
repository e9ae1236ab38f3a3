"""Who is refused over TLS, on which side, and in which words."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from tests.kit.memory import MemoryHarness
from tests.tls.tls_files import Pair
from tests.tls.tls_world import BODY, TOKEN, Files, curl, mutual, running, secured, trusting
from txbroker.errors import CertificateRequired, Unauthorized
from txbroker.sdk import Limits, Message, TransactionalProducer, Untrusted

pytestmark = [pytest.mark.needs_tool("openssl"), pytest.mark.needs_tool("curl")]

NEVER_S = 100.0
"""Longer than a test may take: a test that waits this long for a session fails."""


def producer(files: Files, url: str, **options: Any) -> TransactionalProducer:
    """Return a producer that trusts our authority by default."""
    return TransactionalProducer(url, group="orders", **{"ca_file": files.ours.cert, **options})


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
    world: MemoryHarness, files: Files, certificate: Callable[[Files], Pair], expected: str
) -> None:
    pair = certificate(files)
    settings = secured(files, tls_cert_file=pair.cert, tls_key_file=pair.key)
    async with running(world, **settings) as proxy:
        error = await refused(producer(files, proxy.url))
        assert isinstance(error, Untrusted)
        assert expected in str(error)
        assert (await curl(f"{proxy.url}/healthz", *trusting(files))).code == 60


async def test_system_authorities_apply_without_ca_file(world: MemoryHarness, files: Files) -> None:
    async with running(world, **secured(files)) as proxy:
        error = await refused(producer(files, proxy.url, ca_file=None))
        assert "name its authority's with ca_file" in str(error)


async def test_running_producer_retries_and_reports_the_reason(
    world: MemoryHarness, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "txbroker.sdk")
    pair = files.ours.sign("replaced")
    settings = secured(files, tls_cert_file=pair.cert, tls_key_file=pair.key)
    limits = Limits(retry_s=1.0, backoff_max_s=0.05)
    async with running(world, **settings) as first:
        made = producer(files, first.url, limits=limits)
        await made.start()
        await made.prepare(Message("test.payments", b"k", b"1"))
    bad = files.others.sign("bad")
    settings["listen"] = first.url.removeprefix("https://")
    bad.copy_to(pair)
    async with running(world, **settings):
        with pytest.raises(Untrusted, match="is not trusted"):
            await made.prepare(Message("test.payments", b"k", b"2"))
        assert sum("is not trusted" in line for line in caplog.messages) == 1
        files.proxy.copy_to(pair)
        # The certificate is fixed, and the producer recovers.
        await made.prepare(Message("test.payments", b"k", b"3"))
    await made.aclose()


async def test_plain_http_proxy_is_reported(world: MemoryHarness, files: Files) -> None:
    async with running(world, listen="127.0.0.1:0") as proxy:
        url = proxy.url.replace("http:", "https:")
        assert "it does not speak TLS" in str(await refused(producer(files, url)))


# --- plain HTTP to a port with TLS -----------------------------------------------------------


async def test_plain_http_connection_is_closed(
    world: MemoryHarness, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(world, **secured(files)) as proxy:
        host, _, port = proxy.url.removeprefix("https://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = await reader.read()
        assert b"HTTP" not in answer
        writer.close()
        assert not [line for line in caplog.records if line.levelno >= logging.ERROR]
        assert (await curl(f"{proxy.url}/healthz", *trusting(files))).status == 200


async def test_versions_before_1_2_are_refused(world: MemoryHarness, files: Files) -> None:
    async with running(world, **secured(files)) as proxy:
        old = await curl(f"{proxy.url}/healthz", *trusting(files), "--tls-max", "1.1")
        assert (old.code, old.status) == (35, 0)
        two = await curl(f"{proxy.url}/healthz", *trusting(files), "--tls-max", "1.2")
        assert two.status == 200


# --- the client's certificate ----------------------------------------------------------------


async def test_calls_without_a_certificate_are_refused_and_probes_are_not(
    world: MemoryHarness, files: Files
) -> None:
    async with running(world, **mutual(files)) as proxy:
        for path in ("/v1/transactions", "/v1/overview", "/metrics", "/", "/transactions"):
            answer = await curl(proxy.url + path, *trusting(files))
            assert answer.status == 403, (path, answer)
        body = await curl(f"{proxy.url}/v1/transactions", *trusting(files), body=BODY)
        assert (body.status, body.error) == (403, "certificate_required")
        for path in ("/healthz", "/readyz"):
            assert (await curl(proxy.url + path, *trusting(files))).status == 200
        known = trusting(files, shown=files.client)
        assert (await curl(f"{proxy.url}/v1/transactions", *known)).status == 200
        assert (await curl(f"{proxy.url}/", *known)).status == 200


async def test_sdk_reports_a_required_certificate(world: MemoryHarness, files: Files) -> None:
    async with running(world, **mutual(files)) as proxy:
        error = await refused(producer(files, proxy.url))
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
    world: MemoryHarness, files: Files, certificate: Callable[[Files], Pair], expected: str
) -> None:
    pair = certificate(files)
    async with running(world, **mutual(files)) as proxy:
        made = producer(files, proxy.url, client_cert_file=pair.cert, client_key_file=pair.key)
        error = await refused(made)
        assert isinstance(error, Untrusted)
        assert expected in str(error)
        # Not even open calls: the certificate is false.
        assert (await curl(f"{proxy.url}/healthz", *trusting(files, shown=pair))).status == 0


async def test_certificate_does_not_replace_the_token(world: MemoryHarness, files: Files) -> None:
    async with running(world, **mutual(files, token_file=files.token)) as proxy:
        url = f"{proxy.url}/v1/transactions"
        known = trusting(files, shown=files.client)
        assert (await curl(url, *known)).error == "unauthorized"
        wrong = trusting(files, shown=files.client, token="guessed")
        assert (await curl(url, *wrong)).error == "unauthorized"
        assert (await curl(url, *trusting(files, token=TOKEN))).error == "certificate_required"
        both = trusting(files, shown=files.client, token=TOKEN)
        assert (await curl(url, *both)).status == 200


@pytest.mark.parametrize("token", [None, "guessed"])
async def test_sdk_with_wrong_token_is_refused(
    world: MemoryHarness, files: Files, token: str | None
) -> None:
    async with running(world, **secured(files, token_file=files.token)) as proxy:
        error = await refused(producer(files, proxy.url, token=token))
        assert isinstance(error, Unauthorized)
