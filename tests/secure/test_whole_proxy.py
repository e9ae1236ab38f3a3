"""Whole proxies on a Kafka with logins and TLS: they work and leak no secret."""

from __future__ import annotations

import base64
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import aiohttp
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.secure.secret_proxy import RunningProxy, call, running_proxy, words_of
from tests.secure.secure_world import (
    ADMIN_TIMEOUT_S,
    CLIENT_ID,
    CLIENT_SECRET,
    KEY_PASSWORD,
    PASSWORD,
    USER,
    WAYS,
    WRONG,
    SecureKafka,
)
from tests.secure.token_endpoint import TokenEndpoint

BODY = b"the body of a message"
GROUP = "orders"


def spelled(secret: str) -> set[str]:
    escaped = {json.dumps(secret, ensure_ascii=plain)[1:-1] for plain in (True, False)}
    urls = {quote(secret, safe=""), quote_plus(secret)}
    bytes_ = {repr(text.encode())[2:-1] for text in (secret, *urls)}
    pair = f"{quote_plus(CLIENT_ID)}:{quote_plus(secret)}".encode()
    return {secret, repr(secret)[1:-1], base64.b64encode(pair).decode(), *urls, *bytes_, *escaped}


def leaks(texts: dict[str, str], *more: str) -> list[tuple[str, str]]:
    secrets = (PASSWORD, CLIENT_SECRET, KEY_PASSWORD, *more)
    return [
        (name, written)
        for name, text in texts.items()
        for secret in secrets
        for written in spelled(secret)
        if written in text
    ]


def create_topic(kafka: SecureKafka, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.inside, "log_level": 0})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(ADMIN_TIMEOUT_S)


def visible(kafka: SecureKafka, topic: str) -> bytes:
    """Return the first message that consumers see, once there is one."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.inside,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    try:
        message = consumer.poll(ADMIN_TIMEOUT_S)
        assert message is not None
        assert message.error() is None
        value = message.value()
        assert value is not None
        return value
    finally:
        consumer.close()


async def transaction(url: str, topic: str) -> None:
    message = {"topic": topic, "value": BODY.decode()}
    async with aiohttp.ClientSession(url) as http:
        given = {"group": GROUP, "messages": [message]}
        async with http.post("/v1/transactions", json=given) as answer:
            assert answer.status == 201, await answer.text()
            id = (await answer.json())["id"]
        async with http.post(f"/v1/transactions/{id}/commit", json={}) as answer:
            assert answer.status == 200, await answer.text()


async def pages(url: str) -> dict[str, str]:
    shown = {}
    async with aiohttp.ClientSession(url) as http:
        for path in ("/", "/metrics", "/readyz", "/v1/overview", "/v1/transactions", "/v1/groups"):
            async with http.get(path) as answer:
                assert answer.status == 200, path
                shown[path] = await answer.text()
    return shown


def bundle(
    options: dict[str, Any], secrets: dict[str, str], proxy: RunningProxy, folder: Path
) -> dict[str, str]:
    """Return the bundle and the output of `doctor --bundle`."""
    path = folder / "bundle.tar.gz"
    words = ["doctor", *words_of(options), "--url", proxy.url, "--bundle", str(path), "-o", "json"]
    ended = call(words, secrets)
    assert ended.code == 0, ended
    found = {"doctor out": ended.out, "doctor err": ended.err}
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            found[member.name] = file.read().decode()
    return found


def prefixed(kafka: SecureKafka, way: str, prefix: str) -> dict[str, Any]:
    """Return the settings of a way in, with separate topics."""
    return {**kafka.options(way), "topic_prefix": prefix, "partitions": 1}


def ways() -> Iterator[Any]:
    """Yield the ways in, those marked that only `make test-long` tries with a whole proxy."""
    for way in WAYS:
        marks = () if way in ("OAUTHBEARER-URL", "SCRAM-SHA-512") else (pytest.mark.long,)
        yield pytest.param(way, marks=marks)


@pytest.mark.parametrize("way", list(ways()))
async def test_transaction_succeeds_without_leaking_secrets(
    secure_kafka: SecureKafka, endpoint: TokenEndpoint, tmp_path: Path, way: str
) -> None:
    prefix = f"whole.{way.lower()}"
    options, secrets = in_environment(prefixed(secure_kafka, way, prefix))
    create_topic(secure_kafka, f"{prefix}.target")
    with running_proxy(tmp_path, options, secrets) as proxy:
        await transaction(proxy.url, f"{prefix}.target")
        assert visible(secure_kafka, f"{prefix}.target") == BODY
        shown = await pages(proxy.url)
        words = Path(f"/proc/{proxy.pid}/cmdline").read_text()
        packed = bundle(options, secrets, proxy, tmp_path)
    output = {**shown, **packed, "log": proxy.log.read_text(), "command line": words}
    assert "Traceback" not in output["log"]
    tokens = [Path(options["kafka_oauth_token_file"]).read_text()] if way == "OAUTHBEARER" else []
    assert leaks(output, *tokens) == []


def in_environment(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return settings, for SCRAM-SHA-512 with the password in the environment."""
    if options.get("kafka_sasl_mechanism") != "SCRAM-SHA-512":
        return options, {}
    left = {name: value for name, value in options.items() if name != "kafka_sasl_password_file"}
    return left, {"TXBROKER_KAFKA_SASL_PASSWORD": PASSWORD}


@pytest.mark.parametrize("command", [["proxy"], ["topics", "plan"], ["doctor"]])
def test_wrong_password_is_one_sentence(
    secure_kafka: SecureKafka, tmp_path: Path, command: list[str]
) -> None:
    file = tmp_path / "password"
    file.write_text(WRONG)
    options = {**secure_kafka.options("SCRAM-SHA-256"), "kafka_sasl_password_file": file}
    more = {"data_dir": tmp_path} if command == ["proxy"] else {}
    ended = call([*command, *words_of({**options, **more})])
    assert ended.code == 1
    output = ended.out + ended.err
    assert f"refuses the login of {USER} by SCRAM-SHA-256" in " ".join(output.split())
    assert "waiting for kafka" not in output  # waiting would not help
    assert "Traceback" not in output
    assert leaks({"all": output}, WRONG) == []
