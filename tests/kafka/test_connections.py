"""Connections that break or fail, and how answers are split."""

from __future__ import annotations

import asyncio
import functools
import gc
import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiokafka.errors import KafkaConnectionError, KafkaError

from tests.kit.kafka import KafkaHarness
from tests.kit.until import until
from txbroker.errors import KafkaUnavailable
from txbroker.kafka.client.admin import Admin
from txbroker.kafka.client.client import Client, NotSent, Unanswered
from txbroker.kafka.client.connection import BrokerConnection, open_connection, why_not
from txbroker.kafka.client.login import TokenInFile
from txbroker.kafka.protocol.encoder import Request
from txbroker.kafka.protocol.schemas import EndTxnV0, MetadataV5, metadata

Asked = tuple[int, int]
"""Kind and correlation id of a request."""
VERSIONS, METADATA, END, HANDSHAKE, AUTHENTICATE = 18, 3, 26, 17, 36
REQUEST = EndTxnV0("id", 7, 0, True)


class Broker:
    """Answers ApiVersions, and leaves all other answers to the test."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[Asked] = asyncio.Queue()
        self.writer: asyncio.StreamWriter

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read requests."""
        self.writer = writer
        while True:
            try:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                kind, _, number = struct.unpack_from(">hhi", await reader.readexactly(size))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            if kind == VERSIONS:
                writer.write(framed(number, versions((METADATA, 0, 5), (END, 0, 5))))
            else:
                self.asked.put_nowait((kind, number))

    async def number(self) -> int:
        """Return the correlation id of the next request."""
        return (await self.asked.get())[1]


def framed(number: int, body: bytes) -> bytes:
    return struct.pack(">ii", len(body) + 4, number) + body


def over(number: int, code: int = 0) -> bytes:
    """Return the answer to an EndTxn."""
    return framed(number, struct.pack(">ih", 0, code))


@asynccontextmanager
async def connected(timeout_s: float = 60.0) -> AsyncIterator[tuple[Broker, BrokerConnection]]:
    broker = Broker()
    server = await asyncio.start_server(broker.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = await open_connection("127.0.0.1", port, request_timeout_s=timeout_s, idle_s=60.0)
    try:
        async with asyncio.timeout(30.0):
            yield broker, connection
    finally:
        await connection.close()
        broker.writer.close()
        server.close()


def on_both_loops(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Run a test on asyncio's own event loop and on uvloop."""

    @functools.wraps(test)
    async def both(**arguments: Any) -> None:
        def run(loop_factory: Any) -> None:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(test(**arguments))  # type: ignore[arg-type]

        for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
            await asyncio.to_thread(run, factory)

    return both


@on_both_loops
async def test_request_after_break_is_not_sent_and_closes() -> None:
    async with connected() as (_, connection):
        assert connection._transport is not None
        # Before the break is reported: asyncio only warns first.
        connection._transport.abort()
        with pytest.raises(KafkaConnectionError):
            await connection.send(REQUEST)
        assert not connection.connected()
        with pytest.raises(KafkaConnectionError):
            connection.send(REQUEST)


async def test_unsupported_version_keeps_connection() -> None:
    async with connected() as (broker, connection):
        connection._versions = {METADATA: (99, 99), END: (99, 99)}
        for request in (MetadataV5(None, False), REQUEST):
            with pytest.raises(NotImplementedError):
                connection.send(request)
        connection._versions = {END: (0, 5)}
        answer = connection.send(REQUEST)
        broker.writer.write(over(await broker.number(), 3))
        assert (await answer).error_code == 3


@on_both_loops
async def test_answers_are_split_from_any_chunks() -> None:
    async with connected() as (broker, connection):
        answers = [connection.send(REQUEST) for _ in range(4)]
        numbers = [await broker.number() for _ in range(4)]
        data = b"".join(over(number, code) for code, number in enumerate(numbers))
        first, second, rest = data[:2], data[2 : len(data) // 4 + 9], data[len(data) // 4 + 9 :]
        broker.writer.write(first)
        await broker.writer.drain()
        await until(lambda: connection._rest)  # a piece of an answer has arrived
        assert not any(answer.done() for *_, answer in connection._requests)
        broker.writer.write(second)
        assert (await answers[0]).error_code == 0
        broker.writer.write(rest)
        codes = [each.error_code for each in await asyncio.gather(*answers[1:])]
        assert codes == [1, 2, 3]


async def test_large_answer_is_read_completely() -> None:
    async with connected() as (broker, connection):
        name = "t" * 30_000
        answer = connection.send(MetadataV5(None, False))
        number = await broker.number()
        brokers = b"".join(
            struct.pack(">ih", 7, len(name)) + name.encode() + bytes(6) for _ in range(99)
        )
        body = struct.pack(">ii", 0, 99) + brokers + struct.pack(">hii", -1, 1, 0)
        broker.writer.write(framed(number, body))
        assert [(each[0], each[1]) for each in (await answer).brokers] == [(7, name)] * 99


@pytest.mark.parametrize(
    "answer",
    [
        lambda number: over(number + 1),
        lambda number: framed(number, b"\0"),
        lambda _: struct.pack(">ii", -5, 1),
        lambda number: over(number) * 2,
    ],
    ids=["of another request", "too short", "of no size", "twice"],
)
async def test_undecodable_answer_fails_later_requests(
    answer: Callable[[int], bytes],
) -> None:
    async with connected() as (broker, connection):
        first, second = connection.send(REQUEST), connection.send(REQUEST)
        number, _ = await broker.number(), await broker.number()
        broker.writer.write(answer(number))
        with pytest.raises(KafkaError):
            await second
        assert not connection.connected()
        if answer(number).startswith(over(number)):
            assert (await first).error_code == 0
        else:
            with pytest.raises(KafkaConnectionError):
                await first


@pytest.mark.parametrize("abort", [False, True])
@on_both_loops
async def test_requests_in_flight_fail_when_broker_closes(abort: bool) -> None:
    async with connected() as (broker, connection):
        answers = [connection.send(REQUEST), connection.send(MetadataV5(None, False))]
        await broker.number()
        broker.writer.transport.abort() if abort else broker.writer.close()
        for answer in answers:
            with pytest.raises(KafkaConnectionError):
                await answer
        assert not connection.connected()


async def test_unanswered_request_times_out() -> None:
    async with connected(timeout_s=0.05) as (broker, connection):
        late = connection.send(REQUEST)
        number = await broker.number()
        with pytest.raises(TimeoutError):
            await late
        # The caller then closes the connection; an earlier answer is harmless.
        assert connection.connected()
        again = connection.send(REQUEST)
        broker.writer.write(over(number) + over(await broker.number(), 5))
        assert (await again).error_code == 5


async def test_cancelled_request_does_not_affect_others() -> None:
    async with connected() as (broker, connection):
        gone, here = (asyncio.ensure_future(connection.send(REQUEST)) for _ in range(2))
        gone.cancel()
        broker.writer.write(over(await broker.number()) + over(await broker.number(), 5))
        assert (await here).error_code == 5
        assert gone.cancelled()


async def test_unanswered_cancelled_request_closes_connection() -> None:
    """No caller closes it, and with a request in flight it is never idle."""
    async with connected(timeout_s=0.05) as (broker, connection):
        gone = asyncio.ensure_future(connection.send(REQUEST))
        await broker.number()
        gone.cancel()
        await until(lambda: not connection.connected())
        assert not connection._requests


@pytest.mark.parametrize("late", [False, True], ids=["closed", "not in time"])
async def test_failed_request_without_a_waiter_leaves_no_error(
    late: bool, loop_faults: list[str]
) -> None:
    async with connected() as (broker, connection):
        connection.send(REQUEST)
        await broker.number()
        ((*_, answer),) = connection._requests
        connection._expire(answer) if late else connection.close()
        del answer
    connection._requests.clear()
    gc.collect()
    assert loop_faults == []


async def test_cause_of_broken_connection_is_named() -> None:
    async with connected() as (broker, connection):

        async def opener(*_: Any, **__: Any) -> BrokerConnection:
            return connection

        client = client_of(opener, 1)
        ask = asyncio.create_task(client.ask(1, REQUEST, "test"))
        broker.writer.write(over(await broker.number() + 1))
        with pytest.raises(Unanswered, match="the answer is to"):
            await ask


def versions(*apis: tuple[int, int, int]) -> bytes:
    return struct.pack(">hi", 0, len(apis)) + b"".join(struct.pack(">hhh", *api) for api in apis)


def handshake(mechanism: str) -> list[bytes]:
    """Return the answers until the login's own messages."""
    mechanisms = struct.pack(">hih", 0, 1, len(mechanism)) + mechanism.encode()
    return [versions((HANDSHAKE, 0, 1), (AUTHENTICATE, 0, 2)), mechanisms]


def part(data: bytes | None, code: int = 0) -> bytes:
    """Return the broker's part of a login, without a message for people."""
    size = -1 if data is None else len(data)
    return struct.pack(">hhi", code, -1, size) + (data or b"") + bytes(8)


NONCE = b"N" * 32  # stands for the client's
ODD: dict[str, tuple[str, list[bytes], str]] = {
    "closes": ("PLAIN", [], "closes the connection: check that this port speaks"),
    "unreadable": ("PLAIN", [b"\0"], "answer cannot be read .*: check that only a Kafka broker"),
    "no login": ("PLAIN", [versions()], "not support SaslHandshakeV1: upgrade the brokers$"),
    "Kafka before 1.0": (  # its answers to logins have no correlation ids
        "PLAIN",
        [versions((HANDSHAKE, 0, 0))],
        "SaslHandshakeV1: the broker supports versions 0 to 0: upgrade the brokers$",
    ),
    "Kafka before 2.2": (
        "PLAIN",
        [versions((HANDSHAKE, 0, 1), (AUTHENTICATE, 0, 0)), handshake("PLAIN")[1]],
        "SaslAuthenticateV1: the broker supports versions 0 to 0: upgrade the brokers$",
    ),
    "PLAIN": ("PLAIN", [*handshake("PLAIN"), part(b"x")], "part of the PLAIN login is invalid: "),
    "SCRAM": (
        "SCRAM-SHA-256",
        [*handshake("SCRAM-SHA-256"), part(None)],
        "part of the SCRAM-SHA-256 login is invalid: check that only a Kafka broker",
    ),
    "SCRAM iterations": (
        "SCRAM-SHA-256",
        [*handshake("SCRAM-SHA-256"), part(b"r=%b,s=,i=%d" % (NONCE, 1 << 70))],
        "part of the SCRAM-SHA-256 login is invalid: ",
    ),
    "token": (
        "OAUTHBEARER",
        [*handshake("OAUTHBEARER"), part(None, 58)],
        "^: the broker refuses the token: check its expiry",
    ),
}
"""Mechanism, answers of the broker before it closes the connection, part of the explanation."""


@pytest.mark.parametrize("case", ODD)
async def test_odd_broker_is_explained(tmp_path: Path, case: str) -> None:
    mechanism, answers, words = ODD[case]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            asked = await reader.readexactly(size)
            (number,) = struct.unpack_from(">i", asked, 4)
            writer.write(framed(number, answer.replace(NONCE, asked[-len(NONCE) :])))
        await reader.read(1)
        writer.close()

    arguments: dict[str, Any] = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": mechanism}
    if mechanism == "OAUTHBEARER":
        (tmp_path / "token").write_text("secret")
        arguments["sasl_oauth_token_provider"] = TokenInFile(tmp_path / "token")
    else:
        arguments |= {"sasl_plain_username": "user", "sasl_plain_password": "secret"}
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.timeout(30.0):
        with pytest.raises(KafkaError) as raised:
            await open_connection(*server.sockets[0].getsockname(), **arguments)
    assert re.search(words, why_not(raised.value, "broker", arguments))


async def test_closed_connection_leaves_no_references() -> None:
    async with connected() as (broker, connection):
        answer = connection.send(REQUEST)
        await broker.number()
        timers = [timer for *_, timer, _ in connection._requests]
        await connection.close()
        with pytest.raises(KafkaConnectionError):
            await answer
        assert all(timer.cancelled() for timer in timers)
        assert not connection._requests
    gc.collect()


# --- who shares an attempt ----------------------------------------------------------------------


def client_of(opener: Callable[..., Any], *nodes: int) -> Client:
    """A client whose connections a test opens; a broker's port is its number."""
    client = Client(KafkaHarness("127.0.0.1:1").settings(), opener)
    client.brokers = {node: (f"broker-{node}", node) for node in nodes}
    return client


NO_TOPICS = MetadataV5([], False)


async def test_waiters_fail_with_failed_connection_attempt() -> None:
    """Else each heartbeat that waits would try for a whole timeout itself."""
    attempts = 0
    silent = asyncio.Event()

    async def opener(*_: Any, **__: Any) -> Any:
        nonlocal attempts
        attempts += 1
        await silent.wait()
        raise TimeoutError

    client = client_of(opener, 1)
    asks = [asyncio.create_task(client.ask(1, NO_TOPICS, "metadata")) for _ in range(50)]
    await until(lambda: attempts)
    silent.set()
    for ask in asks:
        with pytest.raises(NotSent, match="no answer in time"):
            await ask
    assert attempts == 1
    # A later caller tries again.
    with pytest.raises(NotSent):
        await client.ask(1, NO_TOPICS, "metadata")
    assert attempts == 2
    assert not client._attempts


async def test_waiters_share_next_attempt_after_cancelled_one() -> None:
    attempts = 0
    silent = asyncio.Event()

    async with connected() as (_, connection):

        async def opener(*_: Any, **__: Any) -> BrokerConnection:
            nonlocal attempts
            attempts += 1
            await silent.wait()
            return connection

        client = client_of(opener, 1)
        first, *others = [asyncio.create_task(client.connect(1, "test")) for _ in range(50)]
        await until(lambda: attempts)
        first.cancel()
        others.pop().cancel()
        await until(lambda: attempts == 2)
        silent.set()
        await asyncio.gather(*others)
        assert attempts == 2
        assert client.connected(1, "test")
        assert not client._attempts


async def test_unresponsive_brokers_are_asked_last() -> None:
    """Else one of three that hangs delays every third request by a whole timeout."""
    up: set[int] = set()
    asked: list[int] = []

    class Broker:
        def __init__(self, node: int) -> None:
            self.node = node

        def connected(self) -> bool:
            return False

        async def send(self, request: Request) -> Any:
            asked.append(self.node)
            if self.node not in up:
                raise TimeoutError
            return self.node

        def close(self) -> None:
            """Nothing is open."""

    async def opener(_host: str, port: int, **_: Any) -> Any:
        if port == 1:
            asked.append(1)
            raise OSError
        return Broker(port)

    client = client_of(opener, 1, 2, 3)
    with pytest.raises(KafkaUnavailable):
        await client.ask_any(NO_TOPICS, "test")
    assert set(asked) == {1, 2, 3}
    up.add(3)
    assert await client.ask_any(NO_TOPICS, "test") == 3
    for _ in range(20):
        asked.clear()
        assert await client.ask_any(NO_TOPICS, "test") == 3
        assert asked == [3]
    # One that answers again is as good as any.
    up.add(2)
    assert await client.ask(2, NO_TOPICS, "test") == 2
    assert {await client.ask_any(NO_TOPICS, "test") for _ in range(50)} == {2, 3}


@pytest.mark.rule(17)
async def test_metadata_requests_create_no_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers with automatic creation would create a mistyped target."""
    creates: list[bool] = []

    async def ask(_node: int, request: Request, *_: Any) -> Any:
        creates.append(request.allow_auto_topic_creation)
        raise Unanswered("unreachable")

    async def opener(*_: Any, **__: Any) -> Any:
        raise OSError

    client = client_of(opener, 1)
    monkeypatch.setattr(client, "ask", ask)
    for question in (
        client.refresh(["mistyped"]),
        Admin(client).topic_ids(["mistyped"]),
        client.ask_any(metadata(["mistyped"], rights=True), "test"),
    ):
        with pytest.raises(KafkaUnavailable):
            await question
    # Each question without known brokers refreshes the metadata again.
    assert len(creates) >= 3
    assert not any(creates)
