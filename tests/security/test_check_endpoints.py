"""Check endpoints that are not who they should be, and calls that cannot show who asks."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkers import check_server
from tests.kit.http_answers import COMMIT, Serve, answering, response
from tests.kit.http_api import running_api
from tests.kit.memory import MemoryHarness
from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import until
from tests.tls.tls_files import Authority, Pair
from txbroker.core.records import Message
from txbroker.sdk import BadSignature, verify_webhook

CLASS = 8
serve = check_server.serve

ENDPOINTS: dict[str, tuple[Callable[[Authority, Authority], Pair], str]] = {
    "another authority": (lambda ours, others: others.sign("good"), "TLS"),
    "another name": (lambda ours, others: ours.sign("name", "DNS:orders.example"), "TLS"),
    "an address instead of the name": (lambda ours, others: ours.sign("ip", "IP:127.0.0.1"), "TLS"),
    "a wildcard too wide": (lambda ours, others: ours.sign("wild", "DNS:*"), "TLS"),
    "an expired certificate": (lambda ours, others: ours.sign("old", days=-1), "TLS"),
}


@pytest.fixture(scope="session")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """The authority that the proxy trusts, and another one of the same name."""
    folder = tmp_path_factory.mktemp("endpoints")
    (folder / "others").mkdir()
    return Authority(folder, "ours"), Authority(folder / "others", "ours")


@pytest.fixture
def trusted(authorities: tuple[Authority, Authority], monkeypatch: pytest.MonkeyPatch) -> Authority:
    """Make ours the system's only authority."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authorities[0].cert))
    monkeypatch.setenv("SSL_CERT_DIR", "/nonexistent")
    return authorities[0]


def tls_of(pair: Pair) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    return context


def impostor(heard: list[bytes]) -> Any:
    """Answer commit to every call, and record it."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1))
        writer.write(response(COMMIT))

    return handler


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    """A proxy on a Kafka in memory, whose groups' secrets are in `tmp_path`."""
    world, desk = MemoryHarness(), FakeEndpoint()
    settings = {"secrets_dir": tmp_path, "check_after_s": 0.01}
    async with desk.serve(), Service(world, desk, **settings) as service:
        yield service
    await world.close()


async def pending(service: Service, policy: dict[str, Any]) -> str:
    """Register `orders` and prepare a transaction of it; return its id."""
    given = {"check_after_s": 0, "check_interval_s": 0.1, **policy}
    await service.call("PUT", "/v1/groups/orders", given)
    return await service.prepare(Message(await service.topic(), None, b"v"), group="orders")


@pytest.mark.parametrize("case", ENDPOINTS)
async def test_impostor_gets_no_call_and_decides_nothing(
    case: str,
    service: Service,
    serve: Serve,
    trusted: Authority,
    authorities: tuple[Authority, Authority],
) -> None:
    """Unreached: nothing is sent, nothing decided."""
    certificate, words = ENDPOINTS[case]
    heard: list[bytes] = []
    server = await serve(impostor(heard), tls_of(certificate(*authorities)))
    id = await pending(service, {"check_url": server.url})
    _, tried = await service.call("POST", "/v1/groups/orders/test", {})
    assert (tried["answered"], words in tried["why"]) == (False, True), tried["why"]

    async def reported() -> bool:
        return words in str((await service.show(id)).get("waiting"))

    await until(reported)
    shown = await service.show(id)
    assert (shown["state"], shown["attempts"]) == ("pending", 0)
    assert [byte for byte in heard if byte] == []


async def test_the_right_endpoint_decides(
    service: Service, serve: Serve, trusted: Authority
) -> None:
    """The control of the cases above: by name, signed by the authority, for the name."""
    server = await serve(answering(response(COMMIT)), tls_of(trusted.sign("right")))
    id = await pending(service, {"check_url": server.url})
    await service.reaches(id, "promoted")


async def test_endpoint_without_tls_is_no_https_endpoint(serve: Serve, trusted: Authority) -> None:
    """Unreached: nothing is sent."""
    server = await serve(answering(response(b"")))
    async with running_api() as api:
        url = server.url.replace("http:", "https:")
        assert (await api.call("PUT", "/v1/groups/orders", {"check_url": url}))[0] == 200
        _, tried = await api.call("POST", "/v1/groups/orders/test", {})
        assert (tried["answered"], "status" in tried) == (False, False)


# --- who asks --------------------------------------------------------------------------------

SIGNED = {
    "signed with the secret": ("s3cr3t", True),
    "signed with another secret": ("other", False),
    "signed with part of the secret": ("s3cr3", False),
    "not signed, as no secret is registered": (None, False),
}


@pytest.mark.parametrize("case", SIGNED)
async def test_endpoint_can_verify_the_caller(
    case: str, service: Service, serve: Serve, tmp_path: Path
) -> None:
    """It refuses what `verify_webhook` refuses: no answer of it goes to a stranger."""
    secret, taken = SIGNED[case]

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.split(": ", 1) for line in head.strip().split("\r\n")[1:])
        body = await reader.readexactly(int(headers["content-length"]))
        try:
            verify_webhook(b"s3cr3t", headers, body)
            writer.write(response(COMMIT))
        except BadSignature:
            writer.write(response(b"", "401 Unauthorized"))

    server = await serve(handler)
    policy: dict[str, Any] = {"check_url": server.url, "attempts_max": 2}
    if secret is not None:
        (tmp_path / "orders").write_text(secret)
        policy["secret_ref"] = f"file:{tmp_path}/orders"
    id = await pending(service, policy)
    await service.reaches(id, "promoted" if taken else "parked")


async def test_missing_secret_prevents_unsigned_checks(
    service: Service, serve: Serve, tmp_path: Path
) -> None:
    """A secret that cannot be read makes no unsigned call of a signed one."""
    heard: list[bytes] = []
    server = await serve(impostor(heard))
    id = await pending(
        service, {"check_url": server.url, "secret_ref": f"file:{tmp_path}/orders/gone"}
    )

    async def reported() -> bool:
        return "cannot be read" in str((await service.show(id)).get("waiting"))

    await until(reported)
    shown = await service.show(id)
    assert (shown["state"], shown["attempts"], heard) == ("pending", 0, [])
