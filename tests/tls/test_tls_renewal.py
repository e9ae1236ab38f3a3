"""Certificates that are replaced while the proxy runs, and those with which it does not start."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.tls.tls_files import Pair
from tests.tls.tls_world import Files, TlsHarness
from txbroker.errors import ConfigurationError
from txbroker.net.tls import ClientTls, ServerTls, TlsFiles
from txbroker.sdk import Message

pytestmark = [pytest.mark.needs_tool("openssl"), pytest.mark.needs_tool("curl")]


def served(url: str) -> bytes:
    host, _, port = url.removeprefix("https://").partition(":")
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port))))


def der(path: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(path.read_text())


async def test_renewed_certificate_keeps_sessions_open(world: TlsHarness) -> None:
    pair, renewed = world.ours.sign("first"), world.ours.sign("second")
    async with (
        world.proxy(tls_cert_file=pair.cert, tls_key_file=pair.key) as proxy,
        world.producer(proxy.url) as producer,
    ):
        (session,) = producer._router.sessions
        assert await asyncio.to_thread(served, proxy.url) == der(pair.cert)
        renewed.copy_to(pair)
        assert await asyncio.to_thread(served, proxy.url) == der(renewed.cert)
        # The one that was open is still the same, and still works.
        await producer.prepare(Message("test.payments", b"k", b"1"))
        assert producer._router.sessions == (session,)


async def test_mismatched_files_keep_the_last_certificate(world: TlsHarness) -> None:
    pair, renewed = world.ours.sign("third"), world.ours.sign("fourth")
    async with world.proxy(tls_cert_file=pair.cert, tls_key_file=pair.key) as proxy:
        url = f"{proxy.url}/healthz"
        pair.cert.write_bytes(renewed.cert.read_bytes())
        assert (await world.curl(url)).status == 200
        pair.key.unlink()
        assert (await world.curl(url)).status == 200
        pair.key.touch(0o600)
        pair.key.write_bytes(renewed.key.read_bytes())
        assert (await world.curl(url)).status == 200


async def test_key_readable_by_others_is_not_loaded(world: TlsHarness) -> None:
    pair, renewed = world.ours.sign("closed"), world.ours.sign("open")
    renewed.key.chmod(0o644)
    async with world.proxy(tls_cert_file=pair.cert, tls_key_file=pair.key) as proxy:
        first = der(pair.cert)
        with capture_logs() as logs:
            renewed.copy_to(pair)
            assert await asyncio.to_thread(served, proxy.url) == first
        (entry,) = [line for line in logs if line["event"] == "tls files not taken"]
        assert "is open to other users of this machine (mode 0644)" in entry["why"]
        pair.key.chmod(0o600)
        assert await asyncio.to_thread(served, proxy.url) == der(renewed.cert)


async def test_removed_authority_admits_no_client(world: TlsHarness, tmp_path: Path) -> None:
    trusted = tmp_path / "ca.crt"
    trusted.write_bytes(world.ours.cert.read_bytes() + world.others.cert.read_bytes())
    async with world.mutual(tls_client_ca_file=trusted) as proxy:
        url = f"{proxy.url}/v1/transactions"
        assert (await world.curl(url, shown=world.stranger)).status == 200
        trusted.write_bytes(world.ours.cert.read_bytes())
        assert (await world.curl(url, shown=world.stranger)).status == 0
        assert (await world.curl(url, shown=world.client)).status == 200


def test_client_uses_its_renewed_certificate(files: Files, tmp_path: Path) -> None:
    pair = Pair(tmp_path / "tls.crt", tmp_path / "tls.key")
    events: list[tuple[str, str]] = []
    files.client.copy_to(pair)
    tls = ClientTls(
        TlsFiles(files.ours.cert, *pair), lambda files, why: events.append((files, why))
    )
    first = tls.context()
    assert tls.context() is first
    files.proxy.copy_to(pair)
    assert tls.context() is not first
    assert (len(events), events[0][1]) == (1, "")
    pair.key.write_text("half a k")
    newest = tls.context()
    assert (len(events), tls.context()) == (2, newest)
    assert "private key in PEM" in events[1][1]


# --- at the start ----------------------------------------------------------------------------


def broken(files: Files, folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Return changes to sound settings, and what the proxy expected to them."""
    text = folder / "text.pem"
    text.write_text("no PEM")
    key = files.proxy.key
    return {
        "no certificate": (
            {"tls_cert_file": text},
            f"tls_cert_file {text} and tls_key_file {key} ",
        ),
        "no key": ({"tls_key_file": text}, "do not hold a certificate and its private key in PEM"),
        "missing": (
            {"tls_cert_file": folder / "none"},
            f"tls_cert_file {folder / 'none'}: No such file or directory",
        ),
        "no authority": (
            {"tls_client_ca_file": text},
            f"tls_client_ca_file {text} holds no certificate in PEM",
        ),
        "no authority of peers": (
            {"peers_ca_file": text},
            f"peers_ca_file {text} holds no certificate in PEM",
        ),
    }


async def test_invalid_tls_files_are_refused_at_start(world: TlsHarness, tmp_path: Path) -> None:
    for name, (changes, expected) in broken(world.files, tmp_path).items():
        with pytest.raises(ConfigurationError) as caught:
            async with world.proxy(**changes):
                pass
        assert expected in str(caught.value), name
        assert "PRIVATE" not in str(caught.value)


def test_tls_verification_cannot_be_disabled(files: Files) -> None:
    for tls in (ClientTls(), ClientTls(TlsFiles(files.ours.cert, *files.client))):
        context = tls.context()
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    server = ServerTls(TlsFiles(None, *files.proxy)).context
    assert server.minimum_version >= ssl.TLSVersion.TLSv1_2
