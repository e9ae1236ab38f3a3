"""A proxy that is started while Kafka is away."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cli.proxy_process import address_of, proxy_process
from tests.kit.cli import Dev
from tests.tls.tls_files import Authority

WAITING, THERE = "waiting for kafka", "kafka answers"


@asynccontextmanager
async def relayed(bound: socket.socket, to: str) -> AsyncIterator[None]:
    """Forward connections of a port to another address."""
    host, _, port = to.rpartition(":")

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    server = await asyncio.start_server(relay, sock=bound)
    try:
        yield
    finally:
        server.close()


async def test_proxy_waits_for_kafka_that_starts_later(
    dev: Dev, tmp_path: Path, closed_port: socket.socket
) -> None:
    words = ("--topic-prefix", "later", "--partitions", "1")
    async with proxy_process(tmp_path, address_of(closed_port), *words) as proxy:
        event = await proxy.until(WAITING)
        assert (event["level"], event["kafka"]) == ("warning", address_of(closed_port))
        assert event["seconds"] == 60.0
        assert f"no connection to Kafka at {address_of(closed_port)}" in event["why"]
        async with relayed(closed_port, dev.kafka):
            await proxy.until(THERE)
            await proxy.ready()
            assert len(proxy.events(WAITING)) == 1
            proxy.process.terminate()
            assert await proxy.ended() == 0


async def test_proxy_gives_up_on_kafka_that_never_starts(
    tmp_path: Path, closed_port: socket.socket
) -> None:
    began = time.monotonic()
    kafka = address_of(closed_port)
    async with proxy_process(tmp_path, kafka, "--wait-for-kafka-s", "1.5") as proxy:
        assert await proxy.ended() == 1
        assert time.monotonic() - began >= 1.5
        assert proxy.error.startswith(f"Error: no connection to Kafka at {kafka}")
        assert f"Waited 1.5 s (wait_for_kafka_s) for Kafka at {kafka}" in proxy.error
        assert len(proxy.events(WAITING)) == 1
        assert proxy.events(THERE) == []


async def test_proxy_does_not_wait_by_default(tmp_path: Path, closed_port: socket.socket) -> None:
    kafka = address_of(closed_port)
    async with proxy_process(tmp_path, kafka, "--wait-for-kafka-s", "0") as proxy:
        assert await proxy.ended() == 1
        assert proxy.error.startswith(f"Error: no connection to Kafka at {kafka}")
        assert "Waited" not in proxy.error
        assert proxy.events(WAITING) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_the_wait_for_kafka(
    tmp_path: Path, closed_port: socket.socket, number: signal.Signals
) -> None:
    async with proxy_process(tmp_path, address_of(closed_port)) as proxy:
        await proxy.until(WAITING)
        proxy.process.send_signal(number)
        sent = time.monotonic()
        assert await proxy.ended() == 0
        assert time.monotonic() - sent < 10
        assert [line["event"] for line in proxy.lines][-1] == "stopped"
        assert proxy.error == ""


async def test_proxy_waits_for_server_that_does_not_answer(
    tmp_path: Path, closed_port: socket.socket
) -> None:
    async def close(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close, sock=closed_port)
    async with proxy_process(tmp_path, address_of(closed_port)) as proxy:
        await proxy.until(WAITING)
    server.close()


async def test_untrusted_certificate_fails_without_waiting(
    tmp_path: Path, closed_port: socket.socket
) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*others.sign("kafka"))
    server = await asyncio.start_server(lambda _r, _w: None, sock=closed_port, ssl=context)
    words = ("--kafka-security-protocol", "SSL", "--kafka-ssl-ca-file", ours.cert)
    async with proxy_process(tmp_path, address_of(closed_port), *words) as proxy:
        assert await proxy.ended() == 1
        assert "signed by an unknown authority" in proxy.error
        assert proxy.events(WAITING) == []
    server.close()
