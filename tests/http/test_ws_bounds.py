"""What clients can make a proxy hold, and that no flood keeps decisions and checks out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.fake_service import NOW_MS, FakeService
from tests.kit.http_api import Api, memory_bytes, running_api, transaction
from tests.kit.until import until
from tests.kit.ws_client import MESSAGES, UPGRADE, Producer, ask, masked, session, socket_to
from txbroker.checkers.base import Answered, CheckCall, Unreached
from txbroker.config.settings import PREPARES_SHARE
from txbroker.contract import frames as wire
from txbroker.contract.service import PrepareRequest, TransactionStatus
from txbroker.core.records import CheckReason, Decision, Message, State
from txbroker.core.routing import make_id
from txbroker.errors import Overloaded
from txbroker.proxy.admission import OPERATION_BYTES, ByteBudget, FrameBudget, message_bytes
from txbroker.proxy.http.api import CONTEXT
from txbroker.proxy.http.connection import SMALL_BYTES, FrameMeter

IDS = [make_id(0, NOW_MS, n) for n in range(10_000)]
CALL = CheckCall(IDS[0], "orders", 1, 15, CheckReason.DUE, NOW_MS, MESSAGES)
HELLO = wire.encode_frame([wire.Hello(1, "orders", "worker-1")])
MIB = 1024 * 1024
LARGE = (Message("payments", value=b"x" * 100_000),)
PATH = "/v1/transactions"


def stick(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> list[PrepareRequest]:
    """Let prepares wait for ever, as when Kafka does not answer; return those that wait."""
    stuck: list[PrepareRequest] = []

    async def prepare(request: PrepareRequest) -> TransactionStatus:
        stuck.append(request)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(service, "prepare", prepare)
    return stuck


async def refused_before_last(producer: Producer) -> int:
    """Return how many calls of a session were turned away up to now."""
    await producer.send(wire.AskEarly(-1, IDS[-1]))
    refused = 0
    while True:
        answer = await producer.failure()
        if answer.call == -1:
            return refused
        assert answer.code == "overloaded"
        refused += 1


# --- prepares never keep decisions and checks out -----------------------------------------------


async def test_stuck_prepares_do_not_block_decisions_and_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_api(in_flight_bytes_max=4 * MIB) as api:
        decided = [await api.prepare() for _ in range(3)]
        stuck = stick(api.service, monkeypatch)
        async with session(api) as flood, session(api, instance="worker-2") as other:
            for n in range(60):
                await flood.send(wire.Prepare(n, IDS[n], LARGE))
            assert await refused_before_last(flood) == 60 - len(stuck)
            assert 20 < len(stuck) < 40
            status, answer = await api.call(
                "POST", PATH, transaction(messages=[{"topic": "a", "value": "x" * 100_000}])
            )
            assert (status, answer["error"]["code"]) == (429, "overloaded")

            assert (await api.call("POST", f"{PATH}/{decided[0]}/check"))[0] == 200
            assert (await api.call("POST", f"{PATH}/{decided[0]}/commit"))[0] == 200
            # Down the very session that floods, too.
            for producer in (flood, other):
                await producer.send(wire.Decide(101, decided[1], Decision.COMMIT))
                answered = wire.Status(101, decided[1], State.COMMITTED, Decision.COMMIT)
                assert await producer.next() == answered
            await flood.send(wire.AskEarly(102, decided[2]))
            assert await flood.next() == wire.Status(102, decided[2], State.PENDING)
            asking = ask(api, CALL, "worker-1")
            check = await flood.question()
            await flood.send(wire.CheckAnswer(check.call, Decision.COMMIT))
            assert isinstance(await asking, Answered)
        text = api.metrics.text()
        assert b'overloaded_total{operation="prepare"}' in text
        assert b'overloaded_total{operation="decide"}' not in text


@pytest.mark.rule(29)
@pytest.mark.parametrize("bound", ["session_in_flight_bytes_max", "in_flight_bytes_max"])
@pytest.mark.parametrize("together", [256, 1])
async def test_operation_that_does_not_fit_blocks_no_later_one(
    monkeypatch: pytest.MonkeyPatch, bound: str, together: int
) -> None:
    large = (Message("payments", value=b"x" * 150_000),)
    prepares = [wire.Prepare(n, IDS[n], large if n % 16 == 3 else MESSAGES) for n in range(256)]
    expected, left = [], int(1_600_000 * PREPARES_SHARE)
    for n, operation in enumerate(prepares):
        size = OPERATION_BYTES + message_bytes(operation.messages[0])
        if size <= left:
            left -= size
            expected.append(n)
    async with running_api(**{bound: 1_600_000}) as api:
        stuck = stick(api.service, monkeypatch)
        async with session(api) as producer:
            for at in range(0, 256, together):
                await producer.send(*prepares[at : at + together])
            refused = await refused_before_last(producer)
            await until(lambda: len(stuck) + refused == 256)
    taken = {request.id for request in stuck}
    assert [n for n in range(256) if IDS[n] in taken] == expected
    # Small operations still fit beside the too large one.
    assert any(small - large > 1 for large, small in itertools.pairwise(expected))


async def test_prepares_cannot_take_all_bytes_of_a_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_api(session_in_flight_bytes_max=400_000) as api:
        id = await api.prepare()
        stuck = stick(api.service, monkeypatch)
        async with session(api) as flood, session(api, instance="worker-2") as other:
            await flood.send(*[wire.Prepare(n, IDS[n], MESSAGES) for n in range(1000)])
            assert await refused_before_last(flood) == 1000 - len(stuck) > 500
            await flood.send(wire.Decide(1, id, Decision.ROLLBACK))
            assert isinstance(await flood.next(), wire.Status)
            before = len(stuck)
            await other.send(wire.Prepare(1, IDS[0], MESSAGES))
            await until(lambda: len(stuck) == before + 1)


async def test_overloaded_of_the_service_is_counted_by_operation(api: Api) -> None:
    api.service.failure = Overloaded("full")
    async with session(api) as producer:
        await producer.send(
            wire.Prepare(1, IDS[0], MESSAGES),
            wire.Decide(2, IDS[0], Decision.COMMIT),
            wire.AskEarly(3, IDS[0]),
        )
        codes = [(await producer.next()).code for _ in range(3)]  # type: ignore[union-attr]
    assert codes == ["overloaded"] * 3
    for name in ("prepare", "decide", "check"):
        assert f'overloaded_total{{operation="{name}"}} 1.0'.encode() in api.metrics.text()


async def test_check_answer_with_too_large_messages_is_unknown(api: Api) -> None:
    async with session(api) as producer:
        asking = ask(api, CALL)
        check = await producer.question()
        huge = (Message("payments", value=b"x" * 5_000_000),)
        await producer.send(wire.CheckAnswer(check.call, Decision.COMMIT, messages=huge))
        result = await asking
        assert isinstance(result, Answered)
        assert (result.decision, result.messages) == (Decision.UNKNOWN, None)


# --- unread answers ------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [
        {"session_answers_max": 5000},
        {"session_answers_max": 10_000_000, "session_in_flight_bytes_max": 2 * MIB},
        {"session_answers_max": 10_000_000, "request_timeout_s": 0.3},
    ],
    ids=["by count", "by bytes", "by time"],
)
async def test_session_that_never_reads_is_disconnected(limits: dict[str, float]) -> None:
    async with running_api(session_heartbeat_s=600.0, **limits) as api:
        frame = masked(wire.encode_frame([wire.AskEarly(n, IDS[0]) for n in range(500)]))
        async with socket_to(api, UPGRADE + masked(HELLO)) as writer:
            await until(lambda: api.sessions.counts() == {"orders": 1})
            before = memory_bytes()
            with contextlib.suppress(ConnectionError):
                while api.sessions.counts():
                    writer.write(frame)
                    await writer.drain()
                    await asyncio.sleep(0)
            await until(lambda: api.sessions.counts() == {})
            assert memory_bytes() - before < 64 * MIB


def test_principal_is_limited_to_its_share_of_bytes() -> None:
    in_flight = ByteBudget(1000)
    assert in_flight.reserve(600, prepare=True, who="shop")
    assert not in_flight.reserve(1, prepare=True, who="shop")
    # Its decisions find room all the same.
    assert in_flight.reserve(200, prepare=False, who="shop")
    assert not in_flight.reserve(1, prepare=False, who="shop")
    assert in_flight.reserve(150, prepare=True, who="bank")
    assert not in_flight.reserve(1, prepare=True, who="bank")
    assert in_flight.reserve(50, prepare=False, who="bank")
    in_flight.release(600, prepare=True, who="shop")
    assert (in_flight.bytes, in_flight.reserve(600, prepare=True, who="shop")) == (400, True)


async def test_unread_checks_are_bounded_over_all_sessions() -> None:
    sizes = {
        "session_in_flight_bytes_max": 24 * MIB, "in_flight_bytes_max": 32 * MIB,
        "session_heartbeat_s": 600.0,
    }  # fmt: skip
    bodies = (Message("payments", value=b"x" * 4_000_000),)
    async with running_api(**sizes) as api, contextlib.AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(socket_to(api, UPGRADE + masked(HELLO)))
        await until(lambda: api.sessions.counts() == {"orders": 4})
        call = CheckCall(IDS[0], "orders", 1, 15, CheckReason.DUE, NOW_MS, bodies)
        before = memory_bytes()
        channels = [api.sessions.acquire("orders", "") for _ in range(60)]
        asked = [c.ask(call, 60.0) for c in channels if c is not None]
        await until(lambda: sum(task.done() for task in asked) >= 30)
        assert memory_bytes() - before < 160 * MIB
        # Those that found no room were certainly not sent, so their attempts are given back.
        assert all(isinstance(task.result(), Unreached) for task in asked if task.done())
        limits = api.app[CONTEXT].limits
        assert 0 < limits.outgoing.bytes <= 32 * MIB
        for task in asked:
            task.cancel()
        await stack.aclose()
        await until(lambda: api.sessions.counts() == {})
        assert limits.outgoing.bytes == 0


async def test_http_client_that_never_reads_is_dropped() -> None:
    async with running_api(request_timeout_s=0.3) as api:
        id = await api.prepare(messages=[{"topic": "payments", "value": "x" * 4_000_000}])
        get = f"GET {PATH}/{id}?bodies=1 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        before = memory_bytes()
        async with socket_to(api, get * 200) as writer:
            while not writer.transport.is_closing():
                writer.write(b"G")
                await asyncio.sleep(0.02)
        assert memory_bytes() - before < 64 * MIB


async def test_list_page_bounds_its_messages(api: Api) -> None:
    ids = [await api.prepare(messages=[{"topic": "t", "value": str(n)}] * 900) for n in range(30)]
    listed: list[str] = []
    cursor, pages = "", 0
    while cursor is not None:
        asked = f"{PATH}?limit=1000" + (f"&cursor={cursor}" if cursor else "")
        status, page = await api.call("GET", asked)
        assert status == 200
        assert sum(len(one["messages"]) for one in page["transactions"]) <= 10_000
        listed += [one["id"] for one in page["transactions"]]
        cursor, pages = page["next_cursor"], pages + 1
    assert listed == ids
    assert pages == 3


async def test_stuck_small_http_calls_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running_api(in_flight_bytes_max=MIB) as api:
        stuck = stick(api.service, monkeypatch)
        calls = [asyncio.create_task(api.call("POST", PATH, transaction())) for _ in range(80)]
        await until(lambda: len(stuck) + sum(call.done() for call in calls) == 80)
        assert 20 < len(stuck) < 60
        assert {call.result()[0] for call in calls if call.done()} == {429}
        for call in calls:
            call.cancel()


# --- one byte a minute --------------------------------------------------------------------------


async def test_incomplete_request_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txbroker.proxy.http.server.KEEPALIVE_S", 0.3)
    async with running_api(request_timeout_s=0.3) as api, socket_to(api, b"POST /v1/tr") as slow:
        while not slow.transport.is_closing():
            slow.write(b"a")
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("after_the_hello", [True, False])
async def test_incomplete_frame_ends_its_session(after_the_hello: bool) -> None:
    async with running_api(request_timeout_s=0.3) as api:
        begun = masked(b"x", length=1000)
        first = UPGRADE + masked(HELLO) + (begun if after_the_hello else b"")
        async with socket_to(api, first) as writer:
            await until(lambda: api.sessions.counts() == {"orders": 1})
            if not after_the_hello:
                writer.write(begun)
            while api.sessions.counts():
                writer.write(b"x")  # not whole for a long time yet, and each byte is a sign of life
                await asyncio.sleep(0.01)


# --- frames on their way in ---------------------------------------------------------------------


async def test_half_frames_stay_within_the_budget() -> None:
    limits = {"in_flight_bytes_max": 40 * MIB, "session_heartbeat_s": 600.0}
    async with running_api(**limits) as api, contextlib.AsyncExitStack() as stack:
        half = masked(b"x" * (14 * MIB), length=15 * MIB)
        before = memory_bytes()
        hello = UPGRADE + masked(HELLO)
        writers = [await stack.enter_async_context(socket_to(api, hello)) for _ in range(12)]
        await until(lambda: api.sessions.counts() == {"orders": 12})
        for writer in writers:
            writer.write(half)
        limits = api.app[CONTEXT].limits
        await until(lambda: limits.receiving.bytes == 15 * MIB)
        # The sent bytes are in this process too: 12 times 14 MiB, unread.
        assert memory_bytes() - before < (12 * 14 + 15 + 40) * MIB
        async with session(api, instance="worker-2") as producer:
            await producer.send(wire.Prepare(1, IDS[0], MESSAGES))
            assert isinstance(await producer.next(), wire.Status)
    await until(lambda: limits.receiving.bytes == 0)


async def test_frame_sent_with_the_upgrade_is_measured(api: Api) -> None:
    limits = api.app[CONTEXT].limits
    first = UPGRADE + masked(HELLO) + masked(b"x", length=MIB)
    async with socket_to(api, first) as writer:
        await until(lambda: limits.receiving.bytes == MIB)
        writer.write(bytes(MIB - 1))
        await until(lambda: limits.receiving.bytes == 0)


async def test_large_frames_queue_and_are_all_answered() -> None:
    limits = {
        "in_flight_bytes_max": 4 * MIB, "frame_bytes_max": 2 * MIB, "message_bytes_max": MIB,
        "transaction_bytes_max": MIB, "session_in_flight_bytes_max": 4 * MIB,
    }  # fmt: skip

    async def one(api: Api, n: int) -> wire.FromProxy:
        async with session(api, instance=f"worker-{n}") as producer:
            await producer.send(
                wire.Prepare(n, IDS[n], (Message("payments", value=b"x" * 900_000),))
            )
            return await producer.next()

    async with running_api(**limits) as api:
        answers = await asyncio.gather(*(one(api, n) for n in range(30)))
        assert {type(answer) for answer in answers} == {wire.Status}


class Wire(asyncio.Transport):
    """A connection that only remembers whether it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return False


def meter(room: FrameBudget, line: Wire) -> FrameMeter:
    return FrameMeter(room, 100_000, 3600.0, line, lambda: None)


@settings(deadline=None)  # a busy machine
@given(seed=st.integers(), sizes=st.lists(st.integers(0, 70_000), min_size=1, max_size=6))
async def test_frames_cut_anywhere_return_their_bytes(seed: int, sizes: list[int]) -> None:
    chance = random.Random(seed)
    room, line = FrameBudget(1_000_000), Wire()
    measured = meter(room, line)
    stream = b""
    for size in sizes:
        cut = chance.randint(0, size)
        stream += chance.choice(
            (
                masked(bytes(size)),
                masked(bytes(cut), first=0x02) + masked(b"", first=0x89)
                + masked(bytes(size - cut), first=0x80),
                b"\x82\x85" + bytes(9),
            )
        )  # fmt: skip
    at = 0
    while at < len(stream):
        step = chance.randint(1, 30_000)
        measured.feed(stream[at : at + step])
        at += step
        assert room.bytes <= sum(sizes)
    assert (room.bytes, line.reading, measured._timer) == (0, True, None)


async def test_waiting_frame_is_admitted_when_bytes_return() -> None:
    room = FrameBudget(50_000)
    lines = [Wire(), Wire(), Wire()]
    first, second, third = (meter(room, line) for line in lines)
    for one in (first, second, third):
        one.feed(masked(b"x", length=40_000))
    assert [line.reading for line in lines] == [True, False, False]
    first.feed(bytes(39_999))
    assert [line.reading for line in lines] == [True, True, False]
    assert room.bytes == 40_000
    second.close()
    assert [line.reading for line in lines] == [True, True, True]
    third.close()
    assert room.bytes == 0


async def test_closed_connection_leaves_the_queue() -> None:
    room = FrameBudget(50_000)
    first, second = meter(room, Wire()), meter(room, Wire())
    first.feed(masked(b"x", length=40_000))
    second.feed(masked(b"x", length=40_000))
    second.close()
    first.close()
    assert room.bytes == 0


async def test_small_frames_need_no_budget_but_many_pieces_do() -> None:
    room = FrameBudget(100_000)
    measured = meter(room, Wire())
    measured.feed(masked(b"x", length=SMALL_BYTES))
    assert room.bytes == 0
    measured.feed(bytes(SMALL_BYTES - 1))
    measured.feed(masked(bytes(10_000), first=0x02) + masked(bytes(10_000), first=0x00))
    assert room.bytes == 20_000
    measured.close()
    assert room.bytes == 0


# --- owners -------------------------------------------------------------------------------------


async def test_owner_notification_reaches_sessions_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("txbroker.proxy.http.sessions.OWNERS_POLL_S", 3600.0)
    listeners: list[Callable[[], None]] = []
    monkeypatch.setattr(
        FakeService, "on_owners", lambda _, heard: listeners.append(heard), raising=False
    )
    async with running_api() as api, session(api) as producer:
        api.service.owner_urls = ("http://other:8470",)
        for notify in listeners:
            notify()
        assert await producer.next() == wire.Owners(("http://other:8470",))
