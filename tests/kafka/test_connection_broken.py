"""A connection that breaks under a request is told of in the client library's own words, also on
uvloop, which raises a RuntimeError where asyncio only warns."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from txbroker.kafka.connection import LoggedInConnection


async def _send_on_a_broken_connection() -> LoggedInConnection:
    """Send behind the break, before the library has heard of it."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = LoggedInConnection("127.0.0.1", port)  # type: ignore[no-untyped-call]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reading = asyncio.create_task(asyncio.sleep(0))
    connection._reader, connection._writer, connection._read_task = reader, writer, reading
    connection._versions = {MetadataRequest.API_KEY: (0, 1)}
    writer.transport.abort()
    await writer.wait_closed()
    try:
        with pytest.raises(KafkaConnectionError):
            connection.send(MetadataRequest(None))
    finally:
        server.close()
    return connection


async def test_a_request_behind_the_break_was_not_sent_and_closes_the_connection() -> None:
    def on_uvloop() -> LoggedInConnection:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_send_on_a_broken_connection())

    connection = await asyncio.to_thread(on_uvloop)
    assert not connection.connected()


async def test_a_version_that_a_broker_does_not_speak_is_no_broken_connection() -> None:
    connection = LoggedInConnection("127.0.0.1", 1)  # type: ignore[no-untyped-call]
    connection._writer = object()
    connection._versions = {MetadataRequest.API_KEY: (99, 99)}
    with pytest.raises(NotImplementedError):
        connection.send(MetadataRequest(None))
