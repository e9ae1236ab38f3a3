"""SDK sessions as they should go: answers, checks, clocks and owners down one socket."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest

from tests.kit.fake_service import NOW_MS
from tests.kit.http_api import Api, running_api
from tests.kit.until import until
from tests.kit.ws_client import (
    MESSAGES,
    UPGRADE,
    Producer,
    ask,
    connected,
    masked,
    session,
    socket_to,
)
from txbroker.checkers.base import Answered, CheckCall, Unclear, Unreached
from txbroker.contract import frames as wire
from txbroker.contract.service import DecideRequest, PrepareRequest
from txbroker.core.records import CheckReason, Decision, Message, Source, State
from txbroker.core.routing import make_id
from txbroker.errors import KafkaUnavailable

ID = make_id(0, NOW_MS, 1)
CALL = CheckCall(ID, "orders", 1, 15, CheckReason.DUE, NOW_MS, MESSAGES)


async def test_hello_is_welcomed(api: Api) -> None:
    async with connected(api) as producer:
        await producer.send(wire.Hello(wire.SESSION_VERSION, "orders", "worker-1"))
        assert await producer.next() == wire.Welcome(
            version=wire.SESSION_VERSION,
            now_ms=NOW_MS,
            partitions=1,
            owners=("http://127.0.0.1:8470",),
            url=api.url,
            dedup_window_s=120.0,
            transaction_bytes_max=api.settings.transaction_bytes_max,
            dedup_keys=True,
        )


async def test_operations_go_to_the_service_and_answers_come_back(api: Api) -> None:
    async with session(api) as producer:
        await producer.send(wire.Prepare(7, ID, MESSAGES, "order", 1.0, 2.0, retry=True))
        assert await producer.next() == wire.Status(7, ID, State.PENDING)
        await producer.send(wire.AskEarly(8, ID, "in doubt"))
        assert await producer.next() == wire.Status(8, ID, State.PENDING)
        await producer.send(wire.Decide(9, ID, Decision.COMMIT, MESSAGES, "why", wait=True))
        assert await producer.next() == wire.Status(9, ID, State.PROMOTED, Decision.COMMIT)

    assert api.service.requests == [
        PrepareRequest(
            "orders", MESSAGES, ID, None, "order", 1.0, 2.0, instance="worker-1"
        ),
        ("check", ID, "worker-1", "in doubt"),
        DecideRequest(
            ID, Decision.COMMIT, "orders", MESSAGES, "why", Source.PRODUCER, "worker-1", True
        ),
    ]  # fmt: skip


async def test_failures_carry_code_and_details(api: Api) -> None:
    async with session(api) as producer:
        await producer.send(wire.Decide(1, ID, Decision.COMMIT))
        failure = await producer.failure()
        assert (failure.call, failure.code, failure.details) == (1, "not_found", {"id": ID})


@pytest.mark.parametrize(
    ("failure", "code"),
    [(KafkaUnavailable("gone"), "kafka_unavailable"), (RuntimeError("secret"), "failed")],
)
async def test_internal_error_fails_the_call_not_the_session(
    api: Api, failure: Exception, code: str
) -> None:
    async with session(api) as producer:
        api.service.failure = failure
        await producer.send(wire.Prepare(1, ID, MESSAGES))
        answer = await producer.failure()
        assert answer.code == code
        assert "secret" not in answer.message
        api.service.failure = None
        await producer.send(wire.Prepare(2, ID, MESSAGES))
        assert await producer.next() == wire.Status(2, ID, State.PENDING)


@pytest.mark.parametrize(
    ("operation", "code"),
    [
        (wire.Prepare(1, ID, MESSAGES, check_after_s=float("nan")), "bad_request"),
        (wire.Prepare(1, ID, MESSAGES, check_timeout_s=float("nan")), "bad_request"),
        (wire.Prepare(1, ID.lower(), MESSAGES), "bad_id"),
        (wire.Decide(1, ID.lower(), Decision.COMMIT), "bad_id"),
        (wire.AskEarly(1, ID.lower()), "bad_id"),
        (wire.AskEarly(1, ID, "x" * 1001), "bad_request"),
    ],
)
async def test_what_only_a_session_can_send_is_refused(
    api: Api, operation: wire.FromProducer, code: str
) -> None:
    async with session(api) as producer:
        await producer.send(operation)
        failure = await producer.failure()
        assert (failure.call, failure.code) == (1, code)
    assert api.service.requests == []


async def test_answers_of_one_iteration_share_frames(api: Api) -> None:
    api.service.gate = asyncio.Event()
    full, count = wire.FRAME_OPERATIONS_MAX, wire.FRAME_OPERATIONS_MAX + 40
    async with session(api) as producer:
        prepares = [wire.Prepare(n, make_id(0, NOW_MS, n), MESSAGES) for n in range(count)]
        await producer.send(*prepares)
        while len(api.service.requests) < count:
            await asyncio.sleep(0)
        api.service.gate.set()
        frames = [await producer.next_frame() for _ in range(2)]
        calls = [
            [answer.call for answer in frame if isinstance(answer, wire.Status)] for frame in frames
        ]
        assert calls == [[*range(full)], [*range(full, count)]]


async def test_last_answer_is_sent_without_the_writer(api: Api) -> None:
    api.service.gate = gate = asyncio.Event()
    async with session(api) as producer:
        [entry] = api.sessions._groups["orders"]
        entry.session._wake = asyncio.Event()  # type: ignore[attr-defined]  # wakes no task
        await producer.send(wire.Prepare(1, ID, MESSAGES))
        await until(lambda: api.service.requests)
        api.service.gate = None
        await producer.send(wire.Prepare(2, make_id(0, NOW_MS, 2), MESSAGES))
        while len(api.service.requests) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        gate.set()
        calls = [each.call for each in await producer.next_frame()]  # type: ignore[union-attr]
        assert calls == [2, 1]


async def test_slow_operation_delays_no_other(api: Api) -> None:
    api.service.gate = gate = asyncio.Event()
    async with session(api) as producer:
        await producer.send(wire.Prepare(1, ID, MESSAGES))
        await until(lambda: api.service.requests)
        api.service.gate = None
        await producer.send(wire.Prepare(2, make_id(0, NOW_MS, 2), MESSAGES))
        second = await producer.next()
        gate.set()
        first = await producer.next()
        assert [second.call, first.call] == [2, 1]  # type: ignore[union-attr]


async def test_check_and_answer_travel_over_the_session(api: Api) -> None:
    async with session(api) as producer:
        asking = ask(api, CALL, "worker-1")
        check = await producer.question()
        assert (check.id, check.attempt, check.messages) == (ID, 1, MESSAGES)
        await producer.send(wire.CheckAnswer(check.call, Decision.COMMIT, detail="row found"))
        assert await asking == Answered(Decision.COMMIT, None, None, "row found")


async def test_session_reports_its_check_function(api: Api) -> None:
    async with session(api, checks=False):
        assert api.sessions.acquire("orders", "") is None
        assert api.sessions.acquire("orders", "worker-1") is not None


async def test_hello_of_older_version_has_a_check_function(api: Api) -> None:
    async with connected(api) as producer:
        hello = ["hello", wire.SESSION_VERSION, "orders", "worker-1"]
        await producer.socket.send_bytes(msgspec.msgpack.encode([hello]))
        await producer.next()
        assert api.sessions.askable("orders") == 1


async def test_large_checks_are_split_over_frames() -> None:
    large = (Message("t", value=b"x" * 900_000),)
    async with (
        running_api(
            frame_bytes_max=2_000_000,
            request_bytes_max=2_000_000,
            transaction_bytes_max=1_000_000,
            message_bytes_max=1_000_000,
            session_in_flight_bytes_max=4_000_000,
        ) as api,
        session(api) as producer,
    ):
        channels = [api.sessions.acquire("orders", "") for _ in range(5)]
        calls = [CheckCall(ID, "orders", n, 15, CheckReason.DUE, NOW_MS, large) for n in range(5)]
        asked = [
            channel.ask(call, 10.0)
            for channel, call in zip(channels, calls, strict=True)
            if channel is not None
        ]
        checks = [await producer.next() for _ in range(4)]
        assert [check.attempt for check in checks] == [0, 1, 2, 3]  # type: ignore[union-attr]
        assert all(len(frame) == 1 for frame in producer.frames[1:])
        # The fifth did not fit what one session may have waiting: it was certainly not sent.
        assert isinstance(await asked[4], Unreached)
        for task in asked:
            task.cancel()


async def test_draining_session_is_not_asked(api: Api) -> None:
    async with session(api) as producer:
        await producer.send(wire.Drain(), wire.AskEarly(1, ID))
        await producer.next()
        assert api.sessions.acquire("orders", "worker-1") is None


async def test_ended_session_leaves_its_check_unclear(api: Api) -> None:
    async with session(api) as producer:
        asking = ask(api, CALL)
        await producer.next()
    assert isinstance(await asking, Unclear)
    assert api.sessions.counts() == {}


async def test_changed_owners_are_sent(api: Api) -> None:
    async with session(api) as producer:
        api.service.owner_urls = ("http://other:8470",)
        assert await producer.next() == wire.Owners(("http://other:8470",))


async def test_clock_is_sent(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txbroker.proxy.http.sessions.CLOCK_S", 0.0)
    async with running_api() as quick, session(quick) as producer:
        assert await producer.next() == wire.ClockUpdate(NOW_MS)


async def test_sessions_are_counted(api: Api) -> None:
    async with session(api), session(api, instance="worker-2"):
        assert b'txbroker_sessions{group="orders"} 2.0' in api.metrics.text()


async def test_stopping_proxy_answers_then_closes() -> None:
    async with running_api() as api:
        api.service.gate = asyncio.Event()
        async with session(api) as producer:
            await producer.send(wire.Prepare(1, ID, MESSAGES))
            await until(lambda: api.service.requests)
            stopping = asyncio.create_task(api.app.shutdown())
            await asyncio.sleep(0)
            api.service.gate.set()
            assert await producer.next() == wire.Status(1, ID, State.PENDING)
            assert await producer.closed() == 1001
            await stopping


# --- clients that are broken, hostile, slow or gone --------------------------------------------


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
