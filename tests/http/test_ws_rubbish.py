"""Sessions with clients that are broken, hostile, slow or gone."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest

from tests.kit.fake_service import NOW_MS
from tests.kit.http_api import Api, running_api
from tests.kit.until import until
from tests.kit.ws_client import MESSAGES, UPGRADE, Producer, connected, masked, session, socket_to
from txbroker.contract import frames as wire
from txbroker.core.records import State
from txbroker.core.routing import make_id

ID = make_id(0, NOW_MS, 1)
HELLO = wire.encode_frame([wire.Hello(1, "orders", "worker-1")])


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


RUBBISH = {
    "empty": b"",
    "no frame": b"\xc1",
    "no array": msgspec.msgpack.encode({"op": "hello"}),
    "unknown operation": msgspec.msgpack.encode([["steal", 1]]),
    "wrong types": msgspec.msgpack.encode([["prepare", "one", 2, 3]]),
    "too few fields": msgspec.msgpack.encode([["prepare"]]),
    "not UTF-8": b"\x91\x94\xa5hello\x01\xa2\xff\xfe\xa1w",
    "cut short": HELLO[:-3],
    "nested": nested(200_000),
    "claims 4 GB": b"\xdd\xff\xff\xff\xff",
    "trailing bytes": HELLO + b"\x00",
    "calls that do not read, too many": msgspec.msgpack.encode(
        [["ask", n] for n in range(wire.FRAME_OPERATIONS_MAX + 1)]
    ),
    "a long array of nothing": b"\xdd" + (100_000).to_bytes(4, "big") + b"\xc0" * 100_000,
    "a check's answer that does not read": msgspec.msgpack.encode([["answer", 1, "perhaps"]]),
    "hello again": HELLO,
}


async def refused(producer: Producer) -> str:
    failure = await producer.failure()
    assert (failure.call, failure.code) == (0, "bad_request")
    assert "Traceback" not in failure.message
    assert await producer.closed() == 1002
    return failure.message


@pytest.mark.parametrize("name", RUBBISH)
async def test_malformed_frame_ends_the_session_with_a_reason(api: Api, name: str) -> None:
    async with session(api) as producer:
        await producer.socket.send_bytes(RUBBISH[name])
        await refused(producer)
    async with session(api) as producer:
        await producer.send(wire.Prepare(1, ID, MESSAGES))
        assert await producer.next() == wire.Status(1, ID, State.PENDING)


@pytest.mark.parametrize(
    "hello",
    [
        wire.Hello(0, "orders", "w"),
        wire.Hello(1, "", "w"),
        wire.Hello(1, "orders", ""),
        wire.Hello(1, "a\nb", "w"),
        wire.Hello(1, "x" * 300, "w"),
        wire.Decide(1, ID, "commit"),  # type: ignore[arg-type]
    ],
)
async def test_bad_hello_is_refused(api: Api, hello: wire.FromProducer) -> None:
    async with connected(api) as producer:
        await producer.send(hello)
        await refused(producer)
    assert api.sessions.counts() == {}


async def test_text_frames_are_refused(api: Api) -> None:
    async with session(api) as producer:
        await producer.socket.send_str("hello")
        assert "binary" in await refused(producer)


async def test_missing_hello_times_out() -> None:
    async with running_api(request_timeout_s=0.05) as api, connected(api) as producer:
        assert "no hello" in await refused(producer)


async def test_too_large_a_frame_ends_the_session() -> None:
    sizes = {
        "frame_bytes_max": 200_000, "transaction_bytes_max": 100_000, "message_bytes_max": 50_000,
    }  # fmt: skip
    async with running_api(**sizes) as api, session(api) as producer:
        await producer.socket.send_bytes(b"x" * 200_001)
        assert await producer.closed() == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


async def test_bytes_in_flight_of_a_session_are_bounded() -> None:
    async with running_api(session_in_flight_bytes_max=100_000) as api, session(api) as producer:
        api.service.gate = asyncio.Event()
        await producer.send(*[wire.Prepare(n, make_id(0, NOW_MS, n), MESSAGES) for n in range(100)])
        failure = await producer.failure()
        assert failure.code == "overloaded"
        assert b'overloaded_total{operation="prepare"}' in api.metrics.text()
        api.service.gate.set()
        answers = [await producer.next() for _ in range(99)]
        taken = [answer for answer in answers if isinstance(answer, wire.Status)]
        assert 0 < len(taken) < 100
        # Answered operations no longer count.
        await producer.send(wire.Prepare(1000, ID, MESSAGES))
        assert isinstance(await producer.next(), wire.Status)


async def test_silent_peer_is_disconnected() -> None:
    async with (
        running_api(session_heartbeat_s=0.05) as api,
        socket_to(api, UPGRADE + masked(HELLO)),
    ):
        await until(lambda: api.sessions.counts() == {"orders": 1})
        # It answers no ping from here on.
        await until(lambda: api.sessions.counts() == {})


async def test_session_may_drop_during_a_call(api: Api) -> None:
    api.service.gate = asyncio.Event()
    async with session(api) as producer:
        await producer.send(wire.Prepare(1, ID, MESSAGES))
        await until(lambda: api.service.requests)
        assert producer.socket._response.connection is not None
        producer.socket._response.connection.transport.abort()  # type: ignore[union-attr]
        await until(lambda: api.sessions.counts() == {})
    api.service.gate.set()
    await until(lambda: ID in api.service.views)


async def test_sessions_are_bounded() -> None:
    async with running_api(sessions_max=1) as api, session(api):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            async with connected(api):
                pass
        assert refusal.value.status == 429


async def test_plain_get_is_no_session(api: Api) -> None:
    status, answer = await api.call("GET", "/v1/session")
    assert (status, answer["error"]["code"]) == (400, "bad_request")
