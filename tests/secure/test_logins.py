"""Every way to log in to a real Kafka, and every way in which that fails, in a sentence."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.service import FakeEndpoint, Service
from tests.kit.until import until
from tests.secure.secure_world import REAUTH_MS, USER, WAYS, WRONG, AllowedWorld, SecureKafka
from tests.secure.token_endpoint import TokenEndpoint
from tests.tls.tls_files import Authority
from txbroker.config.settings import Settings
from txbroker.core.records import Message
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.acls import AclRole, rights_needed
from txbroker.kafka.client.client import BrokerConnection, Client
from txbroker.kafka.client.connection import open_connection
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.door.door import KafkaDoor
from txbroker.kafka.protocol.schemas import MetadataV5
from txbroker.kafka.tools.examination import KafkaExamination

PATIENCE_S = 30.0


async def opened(settings: Settings) -> None:
    """Ask Kafka something, as `txbroker topics plan` does."""
    door = KafkaDoor.from_configuration(settings)
    try:
        await door.plan()
    finally:
        await door.close()


async def why_not(settings: Settings) -> str:
    with pytest.raises(KafkaUnavailable) as raised:
        await opened(settings)
    return str(raised.value)


@pytest.mark.parametrize("way", WAYS)
async def test_every_login_works(
    secure_kafka: SecureKafka, endpoint: TokenEndpoint, way: str
) -> None:
    settings = secure_kafka.settings(way)
    await opened(settings)
    async with KafkaExamination(KafkaSettings.from_configuration(settings)) as kafka:
        assert [one.why for one in await kafka.brokers()] == [""]
    assert bool(endpoint.asked) == (way == "OAUTHBEARER-URL")


Wrong = Callable[[SecureKafka, Path], dict[str, Any]]
"""Returns wrong settings."""


def _wrong_password(_kafka: SecureKafka, folder: Path) -> dict[str, Any]:
    file = folder / "password"
    file.write_text(WRONG)
    return {"kafka_sasl_password_file": file}


def _unknown_authority(_kafka: SecureKafka, folder: Path) -> dict[str, Any]:
    return {"kafka_ssl_ca_file": Authority(folder, "stranger").cert}


def _expired_token(kafka: SecureKafka, folder: Path) -> dict[str, Any]:
    file = folder / "token"
    file.write_text(kafka.issuer.token(USER, -30))
    return {"kafka_oauth_token_file": file}


def _strangers_certificate(_kafka: SecureKafka, folder: Path) -> dict[str, Any]:
    cert, key = Authority(folder, "stranger").sign(USER)
    return {"kafka_ssl_cert_file": cert, "kafka_ssl_key_file": key}


def _expired_certificate(kafka: SecureKafka, _folder: Path) -> dict[str, Any]:
    cert, key = kafka.authority.sign("late", days=-1)
    return {"kafka_ssl_cert_file": cert, "kafka_ssl_key_file": key}


def _no_certificate(_kafka: SecureKafka, _folder: Path) -> dict[str, Any]:
    return {"kafka_ssl_cert_file": None, "kafka_ssl_key_file": None}


def _wrong_client_secret(_kafka: SecureKafka, folder: Path) -> dict[str, Any]:
    file = folder / "client-secret"
    file.write_text(WRONG)
    return {"kafka_oauth_client_secret_file": file}


def _as_it_is(_kafka: SecureKafka, _folder: Path) -> dict[str, Any]:
    return {}


def _at(listener: str) -> Wrong:
    return lambda kafka, _folder: {"kafka": kafka.server.address(listener)}


def _without_login(listener: str) -> Wrong:
    return lambda kafka, _folder: {
        "kafka": kafka.server.address(listener),
        "kafka_security_protocol": "PLAINTEXT",
        "kafka_sasl_mechanism": "PLAIN",
        "kafka_sasl_username": "",
        "kafka_sasl_password_file": None,
        "kafka_ssl_ca_file": None,
    }


REFUSED: dict[str, tuple[str, Wrong, str]] = {
    "plain password": ("PLAIN", _wrong_password, f"refuses the login of {USER} by PLAIN: see"),
    "password": ("SCRAM-SHA-256", _wrong_password, f"the login of {USER} by SCRAM-SHA-256: see"),
    "token": ("OAUTHBEARER", _expired_token, "refuses the token (invalid_token): check"),
    "client secret": ("OAUTHBEARER-URL", _wrong_client_secret, "returns no token (401 invalid_cl"),
    "authority": (
        "PLAIN",
        _unknown_authority,
        "signed by an unknown authority: set kafka_ssl_ca_file",
    ),
    "host name": ("ELSEWHERE", _as_it_is, "certificate is not valid for 127.0.0.1: use a name"),
    "late broker": ("EXPIRED", _as_it_is, "certificate has expired"),
    "no certificate": ("MUTUAL", _no_certificate, "requires a client certificate"),
    "certificate": ("MUTUAL", _strangers_certificate, "signed by an authority that it trusts"),
    "late client": ("MUTUAL", _expired_certificate, "not expired and signed"),
    "mechanism": ("SCRAM-SHA-512", _at("SHORT"), "does not support SCRAM-SHA-512: see"),
    "TLS to a clear port": ("PLAIN", _at("CLEAR"), "kafka_security_protocol"),
    "clear to a TLS port": ("PLAIN", _without_login("LOGIN"), "kafka_security_protocol PLAINTEXT"),
    "no login": ("CLEAR", _without_login("CLEAR"), "kafka_security_protocol PLAINTEXT"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_failed_login_is_explained(
    secure_kafka: SecureKafka, endpoint: TokenEndpoint, tmp_path: Path, case: str
) -> None:
    way, wrong, words = REFUSED[case]
    changes = wrong(secure_kafka, tmp_path)
    settings = secure_kafka.settings(way, **changes)
    began = time.monotonic()
    reason = await why_not(settings)
    assert words in reason
    assert settings.kafka in reason
    assert WRONG not in reason
    assert "Error" not in reason
    assert time.monotonic() - began < PATIENCE_S


async def test_new_password_applies_to_next_connection(
    secure_kafka: SecureKafka, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("first-password")
    secure_kafka.add_user("changing", "first-password")
    settings = secure_kafka.settings(
        "SCRAM-SHA-512", kafka_sasl_username="changing", kafka_sasl_password_file=file
    )
    client = Client(KafkaSettings.from_configuration(settings))
    try:
        await client.refresh(())
        secure_kafka.add_user("changing", "second-password")
        with pytest.raises(KafkaUnavailable, match="refuses the login of changing"):
            await client.ask_any(metadata(), "before")
        file.write_text("second-password")
        assert (await client.ask_any(metadata(), "after")).brokers
    finally:
        await client.close()


async def test_expired_login_interrupts_nothing(secure_kafka: SecureKafka) -> None:
    opened: list[float] = []
    clock = asyncio.get_running_loop().time

    async def opener(*address: Any, **arguments: Any) -> BrokerConnection:
        opened.append(clock())
        return await open_connection(*address, **arguments)

    settings = secure_kafka.settings("SHORT")
    client = Client(KafkaSettings.from_configuration(settings), opener)
    deadline = clock() + PATIENCE_S
    try:
        # Each question is answered, however long this goes on: the broker would cut off.
        while len(opened) < 3:
            assert (await client.ask_any(metadata(), "lane")).brokers
            assert clock() < deadline, opened
    finally:
        await client.close()
    lives = [after - before for before, after in itertools.pairwise(opened[1:])]
    assert all(REAUTH_MS / 2000 < life < REAUTH_MS / 1000 for life in lives), lives


def metadata() -> MetadataV5:
    return MetadataV5([], False)


# --- logins that end -----------------------------------------------------------------------------

LOGINS = 3


@pytest.mark.long
async def test_expired_logins_lose_no_transaction_or_partition(secure_kafka: SecureKafka) -> None:
    world = AllowedWorld(secure_kafka, "SHORT")
    await world.make_topics()
    target = await world.create_topic("target")
    needed = rights_needed(world.settings(), [target])
    await world.allow(right for right in needed if right.role is AclRole.PROXY)
    async with FakeEndpoint().serve() as desk:
        service = Service(world, desk, partitions=1)
        await service.start()
        clock = asyncio.get_running_loop().time
        over = clock() + LOGINS * REAUTH_MS / 1000
        count = 0
        try:
            while clock() < over:
                id = await service.prepare(Message(target, b"", b"%d" % count))
                assert (await service.commit(id))["state"] == "promoted"
                count += 1
            assert await service.metric("fenced_total") == 0
            assert await service.metric("kafka_errors_total") == 0

            async def owned() -> bool:
                return bool((await service.get("/readyz"))["ready"])

            await until(owned)
        finally:
            await service.stop()
    assert [record.value for record in await world.visible(target)] == [
        b"%d" % number for number in range(count)
    ]
    await world.close()
