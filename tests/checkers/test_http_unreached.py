"""Checks over HTTP that reach no instance: no connection, no TLS, no server."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.checkers.check_server import until
from tests.kit.http_answers import COMMIT, LOOPBACK, Serve, answering, ask, reset, response
from txbroker.checkers.base import Answered, CheckCall, Unreached
from txbroker.checkers.http import HttpChannel, HttpChecks, HttpLimits

# --- certainly unreached -----------------------------------------------------------------------


async def test_connection_lost_before_request_is_unreached(
    serve: Serve, checks: HttpChecks, call: CheckCall
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reset(writer)

    server = await serve(handler)
    channel = await checks.acquire("orders", server.url)
    assert isinstance(channel, HttpChannel)
    await until(lambda: not channel._connection.fresh)
    result = await channel.ask(call, 5.0)
    channel.release()
    assert result == Unreached("the connection closed before the question was sent")


@pytest.mark.parametrize("host", ["orders..svc", "o" * 64])
async def test_invalid_host_name_is_unknown(checks: HttpChecks, host: str) -> None:
    url = f"http://{host}:8080/check"
    assert await checks.acquire("orders", url) == Unreached(f"{host}:8080: the name is unknown")


async def test_closed_port_is_unreached(checks: HttpChecks) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        port = taken.getsockname()[1]
        result = await checks.acquire("orders", f"http://127.0.0.1:{port}/")
    assert result == Unreached(f"127.0.0.1:{port}: connection refused")


async def test_unknown_host_is_unreached() -> None:
    def unknown(host: str) -> Sequence[str]:
        raise socket.gaierror(-2, "Name or service not known")

    checks = HttpChecks(guard=LOOPBACK, look_up=unknown)
    result = await checks.acquire("orders", "http://nowhere.example/")
    await checks.close()
    assert result == Unreached("nowhere.example:80: the name is unknown")


async def test_hanging_lookup_delays_only_its_name(serve: Serve, call: CheckCall) -> None:
    hang = threading.Event()
    asked: list[str] = []

    def look_up(host: str) -> Sequence[str]:
        asked.append(host)
        if host == "slow.example":
            hang.wait(10)
        return ["127.0.0.1"]

    server = await serve(answering(response(COMMIT)))
    checks = HttpChecks(guard=LOOPBACK, limits=HttpLimits(connect_timeout_s=0.05), look_up=look_up)
    slow = await asyncio.gather(
        *(checks.acquire(f"g{n}", "http://slow.example/") for n in range(50))
    )
    assert {type(result) for result in slow} == {Unreached}
    assert "no look-up of the name within 0.05 s" in str(slow[0])
    assert asked.count("slow.example") == 1  # one thread for fifty groups
    assert isinstance(await ask(checks, server.url, call), Answered)
    await checks.close()
    hang.set()


async def test_next_address_is_tried(serve: Serve, call: CheckCall) -> None:
    server = await serve(answering(response(COMMIT)))
    checks = HttpChecks(guard=LOOPBACK, look_up=lambda host: ["127.0.0.2", "127.0.0.1"])
    assert isinstance(await ask(checks, server.url, call), Answered)
    await checks.close()


@pytest.mark.parametrize(
    "url", ["ftp://x/", "http://", "http://u:p@x/", "http://x/#f", "http://x:99999/", "http://x y/"]
)
async def test_invalid_urls_are_unreached(checks: HttpChecks, url: str) -> None:
    result = await checks.acquire("orders", url)
    assert isinstance(result, Unreached)
    assert "check_url" in result.detail


# --- TLS -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a self-signed certificate for `localhost`, in one file."""
    openssl = shutil.which("openssl")
    assert openssl, "openssl makes the certificate of the TLS tests; install it"
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", "/CN=localhost", "-addext"]
    command += ["subjectAltName=DNS:localhost", "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


def server_tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def test_https_with_a_trusted_certificate(
    serve: Serve, call: CheckCall, certificate: Path
) -> None:
    server = await serve(answering(response(COMMIT)), server_tls(certificate))
    checks = HttpChecks(guard=LOOPBACK, tls=ssl.create_default_context(cafile=str(certificate)))
    assert isinstance(await ask(checks, server.url, call), Answered)
    assert isinstance(await ask(checks, server.url, call), Answered)
    assert server.connections == 1
    await checks.close()


async def test_https_with_untrusted_certificate_is_unreached(
    serve: Serve, checks: HttpChecks, certificate: Path
) -> None:
    server = await serve(answering(response(COMMIT)), server_tls(certificate))
    result = await checks.acquire("orders", server.url)
    assert isinstance(result, Unreached)
    assert "TLS: self-signed certificate" in result.detail


async def test_https_for_another_name(serve: Serve, certificate: Path) -> None:
    server = await serve(answering(response(COMMIT)), server_tls(certificate))
    checks = HttpChecks(guard=LOOPBACK, tls=ssl.create_default_context(cafile=str(certificate)))
    result = await checks.acquire("orders", server.url.replace("localhost", "127.0.0.1"))
    assert isinstance(result, Unreached)
    assert "TLS: " in result.detail
    await checks.close()


async def test_https_to_a_port_without_tls(serve: Serve, checks: HttpChecks) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    server = await serve(handler)
    result = await checks.acquire("orders", server.url.replace("http:", "https:"))
    assert isinstance(result, Unreached)
    assert "TLS" in result.detail or "reset" in result.detail


async def test_https_to_silent_port_is_unreached(serve: Serve) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    server = await serve(handler)
    checks = HttpChecks(guard=LOOPBACK, limits=HttpLimits(connect_timeout_s=0.05))
    result = await checks.acquire("orders", server.url.replace("http:", "https:"))
    assert isinstance(result, Unreached)
    assert "no TLS handshake" in result.detail or "timed out" in result.detail.lower()
    await checks.close()
