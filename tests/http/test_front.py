"""Connections that carry calls out themselves, in front of the router; batches of their calls."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from contextvars import copy_context

import pytest

from tests.kit.http_api import Api, running_api, transaction
from tests.kit.until import until
from txbroker.contract.service import (
    Answer,
    DecideRequest,
    PrepareRequest,
    Request,
    Run,
    TransactionStatus,
)
from txbroker.core.records import Decision, State
from txbroker.errors import NotFound, OwnerUnavailable, RequestError
from txbroker.proxy.admission import CallBatcher
from txbroker.proxy.cluster.forwarding import CALLER
from txbroker.proxy.http.front import HELD_BYTES_MAX, DirectConnection

UNKNOWN_ID = "00" * 13
HOST = b"Host: localhost\r\n"
TYPE = b"Content-Type: application/json\r\n"
PREPARE = json.dumps(transaction(dedup_key="k")).encode()
NO_TOPIC = json.dumps(transaction(messages=[{"topic": "missing", "value": "1"}])).encode()


def post(path: str, body: bytes, headers: bytes = HOST + TYPE) -> bytes:
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return b"POST " + path.encode() + b" HTTP/1.1\r\n" + headers + length + body


PREPARING = post("/v1/transactions", PREPARE)


class Line:
    """A client's end of a connection; it waits for each answer for a bounded time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.write = writer.write
        self.transport = writer.transport

    async def head(self) -> list[bytes]:
        async with asyncio.timeout(30):
            return (await self._reader.readuntil(b"\r\n\r\n")).split(b"\r\n")

    async def answer(self) -> tuple[list[bytes], bytes]:
        """Return the lines of an answer's head, and its body."""
        head = await self.head()
        (length,) = [line for line in head if line.startswith(b"Content-Length: ")]
        return head, await self._reader.readexactly(int(length.split()[1]))

    async def status(self) -> bytes:
        """Return the status line of the next answer, without the version."""
        return (await self.answer())[0][0].removeprefix(b"HTTP/1.1 ")

    async def rest(self) -> bytes:
        """Return all bytes until the proxy closes the connection."""
        async with asyncio.timeout(10):
            return await self._reader.read()


@asynccontextmanager
async def dialled(api: Api) -> AsyncIterator[Line]:
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    with closing(writer):
        yield Line(reader, writer)


async def test_requests_count_by_operation_and_status(api: Api) -> None:
    """Those that are carried out directly, and those that aiohttp routes after them."""
    unknown = post(f"/v1/transactions/{UNKNOWN_ID}/commit", b"{}")
    gets = [b"GET %s HTTP/1.1\r\n%s\r\n" % (path, HOST) for path in (b"/healthz", b"/nowhere")]
    async with dialled(api) as line:
        line.write(PREPARING + unknown + b"".join(gets) + post("/v1/transactions", b"{"))
        statuses = [await line.status() for _ in range(5)]
        line.write(b"GET /metrics HTTP/1.1\r\n" + HOST + b"\r\n")
        text = (await line.answer())[1].decode()
    assert [int(status.split()[0]) for status in statuses] == [201, 404, 200, 404, 400]
    shown = re.findall(
        r'^txbroker_http_requests_total{operation="(.*)",status="(.*)"} (.*)$', text, re.M
    )
    assert sorted(shown) == [
        ("commit", "4xx", "1.0"),
        ("health", "2xx", "1.0"),
        ("other", "4xx", "1.0"),
        ("prepare", "2xx", "1.0"),
        ("prepare", "4xx", "1.0"),
    ]


async def test_answers_keep_the_order_of_requests(api: Api) -> None:
    id = await api.prepare(dedup_key="k")
    async with dialled(api) as line:
        line.write(
            PREPARING
            + b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
            + post(f"/v1/transactions/{id}/commit", b"{}")
            + post("/v1/transactions?", PREPARE)
            + PREPARING
        )  # fmt: skip
        answers = [(await line.answer())[1] for _ in range(5)]
    found = [json.loads(answer).get("state") for answer in answers]
    assert found == ["pending", None, "committed", "committed", "committed"]


async def test_body_may_arrive_in_pieces_and_after_100_continue(api: Api) -> None:
    async with dialled(api) as line:
        raw = post("/v1/transactions", PREPARE, HOST + TYPE + b"Expect: 100-continue\r\n")
        line.write(raw[: -len(PREPARE)])
        assert await line.head() == [b"HTTP/1.1 100 Continue", b"", b""]
        line.write(PREPARE)
        assert await line.status() == b"201 Created"
        for piece in (PREPARING[:20], PREPARING[20:-5]):
            line.write(piece)
            await api.call("GET", "/healthz")  # the piece before it was read by now
        line.write(PREPARING[-5:])
        assert await line.status() == b"200 OK"


async def test_client_that_reads_no_answers_is_dropped() -> None:
    many = post("/v1/transactions/x/commit", b"{}") * 500

    async def flood(client: socket.socket) -> None:
        async with asyncio.timeout(20):
            while True:
                await asyncio.get_running_loop().sock_sendall(client, many)

    async with running_api(request_timeout_s=0.2) as api:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", api.port))
            with pytest.raises(ConnectionError):
                await flood(client)
        assert (await api.call("GET", "/healthz"))[0] == 200


@pytest.fixture
def fronts(monkeypatch: pytest.MonkeyPatch) -> list[DirectConnection]:
    """Return the connections that were made, in order."""
    made: list[DirectConnection] = []
    begin = DirectConnection.connection_made

    def connection_made(self: DirectConnection, transport: asyncio.BaseTransport) -> None:
        made.append(self)
        begin(self, transport)

    monkeypatch.setattr(DirectConnection, "connection_made", connection_made)
    return made


@pytest.mark.parametrize(
    "raw",
    [
        PREPARING,
        post(f"/v1/transactions/{UNKNOWN_ID}/commit", b"{}"),
        post(f"/v1/transactions/{UNKNOWN_ID}/rollback", b""),
        post("/v1/transactions", b"{"),
        post("/v1/transactions", NO_TOPIC),
        post("/v1/transactions", PREPARE, b"Host: evil\r\n" + TYPE),
    ],
)
async def test_only_direct_calls_stay_in_front(
    api: Api, fronts: list[DirectConnection], raw: bytes
) -> None:
    async with dialled(api) as line:
        for piece in (raw, raw + raw, raw[:30], raw[30:]):
            line.write(piece)
            await asyncio.sleep(0.01)
        for _ in range(4):
            await line.answer()
        [front] = fronts
        assert front.transport is not None
        line.write(b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n" + raw)
        assert await line.status() == b"200 OK"
        await line.answer()
        assert front.transport is None


async def test_calls_of_many_connections_make_one_run(
    api: Api, fronts: list[DirectConnection]
) -> None:
    counts: list[int] = []
    runs = api.service.runs

    def counted(requests: Sequence[PrepareRequest | DecideRequest]) -> Sequence[Run]:
        counts.append(len(requests))
        return runs(requests)

    api.service.runs = counted  # type: ignore[method-assign]
    async with AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(dialled(api))
        await until(lambda: len(fronts) == 8)
        for front in fronts:  # as one turn of the loop reads them
            front.data_received(PREPARING)
        await until(lambda: bool(counts))
    assert counts == [8]


async def test_calls_in_flight_are_answered_at_shutdown() -> None:
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(running_api())
        gate = api.service.gate = asyncio.Event()
        async with dialled(api) as busy, dialled(api) as idle:
            busy.write(PREPARING * 2)
            await until(lambda: bool(api.service.requests))
            stopping = asyncio.create_task(stack.aclose())
            async with asyncio.timeout(4):
                assert await idle.rest() == b""
                assert not stopping.done()
                gate.set()
                assert await busy.status() == b"201 Created"
                assert await busy.rest() == b""  # no further one is begun
                await stopping
        assert len(api.service.requests) == 1


async def test_shutdown_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txbroker.proxy.http.server.SHUTDOWN_S", 0.1)
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(running_api())
        api.service.gate = asyncio.Event()
        async with dialled(api) as line:
            line.write(PREPARING)
            await until(lambda: bool(api.service.requests))
            async with asyncio.timeout(4):
                await stack.aclose()
                assert await line.rest() == b""
        api.service.gate.set()


async def test_gone_client_releases_its_bytes(api: Api, fronts: list[DirectConnection]) -> None:
    gate = api.service.gate = asyncio.Event()
    async with dialled(api) as line:
        line.write(PREPARING)
        await until(lambda: bool(api.service.requests))
        assert api.in_flight() > len(PREPARE)
        line.transport.abort()
        await until(lambda: fronts[0].transport is None)
    gate.set()
    await until(lambda: api.in_flight() == 0)
    assert len(api.service.views) == 1  # the call went on


async def test_cancelled_call_closes_its_connection(api: Api) -> None:
    api.service.failure = asyncio.CancelledError()
    async with dialled(api) as line:
        line.write(PREPARING)
        assert await line.rest() == b""
    assert api.in_flight() == 0


async def test_read_ahead_is_bounded(api: Api, fronts: list[DirectConnection]) -> None:
    gate = api.service.gate = asyncio.Event()
    count = 5_000
    async with dialled(api) as line:
        line.write(PREPARING * count)
        await until(lambda: len(fronts[0]._held) > HELD_BYTES_MAX)
        await asyncio.sleep(0.05)
        assert len(fronts[0]._held) <= HELD_BYTES_MAX + 256 * 1024  # what one read brings
        gate.set()
        assert await line.status() == b"201 Created"
        for _ in range(count - 1):
            assert await line.status() == b"200 OK"
    assert fronts[0]._held == b""


@pytest.mark.parametrize("answered", [False, True])
async def test_idle_connection_is_closed(answered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("txbroker.proxy.http.server.KEEPALIVE_S", 0.2)
    async with running_api() as api, dialled(api) as line:
        if answered:
            gate = api.service.gate = asyncio.Event()
            line.write(PREPARING)
            await asyncio.sleep(0.5)  # a call is no idle time
            gate.set()
            assert await line.status() == b"201 Created"
        assert await line.rest() == b""


async def test_incomplete_request_is_not_idle(
    fronts: list[DirectConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbroker.proxy.http.server.KEEPALIVE_S", 0.2)
    monkeypatch.setattr("txbroker.proxy.http.server.HELD_S", 10.0)
    async with running_api() as api, dialled(api) as line:
        line.write(PREPARING[:-5])
        await until(lambda: fronts[0]._is_unfinished)
        await asyncio.sleep(0.5)
        line.write(PREPARING[-5:])
        assert await line.status() == b"201 Created"


@pytest.mark.parametrize("path", ["/v1/transactions", "/v1/transactions?"])
async def test_unencodable_error_is_answered(
    api: Api, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(requests: Sequence[PrepareRequest | DecideRequest]) -> Sequence[Run]:
        raise OwnerUnavailable("the proxy answered \udcff")

    monkeypatch.setattr(api.service, "runs", runs)
    async with dialled(api) as line:
        line.write(post(path, PREPARE))
        head, body = await line.answer()
    assert head[0] == b"HTTP/1.1 500 Internal Server Error"
    assert json.loads(body)["error"]["code"] == "failed"


# --- batches of calls --------------------------------------------------------------------------


Outcome = Callable[[Sequence[Request]], Awaitable[Sequence[Answer]]]


class Together:
    """The runs of a `Service`: each batch is one run, answered by the test."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.handed_over: list[tuple[str, list[Request]]] = []

    def runs(self, requests: Sequence[Request], began_s: float) -> Sequence[Run]:
        self.handed_over.append((CALLER.get(), list(requests)))
        # In another order than handed over, as a service may.
        numbers = range(len(requests))[::-1]
        return [Run(numbers, self.outcome([requests[number] for number in numbers]))]


def joint(outcome: Outcome) -> tuple[CallBatcher, Together]:
    service = Together(outcome)
    return CallBatcher(service.runs), service


def prepare(id: str, group: str = "orders") -> PrepareRequest:
    return PrepareRequest(group, (), id)


def commit(id: str) -> DecideRequest:
    return DecideRequest(id, Decision.COMMIT, "orders")


def same(standing: TransactionStatus) -> TransactionStatus:
    return standing


async def stand(requests: Sequence[Request]) -> Sequence[Answer]:
    return [TransactionStatus(str(request.id), State.PENDING) for request in requests]


async def test_calls_of_one_iteration_form_one_batch() -> None:
    calls, service = joint(stand)
    answers = await asyncio.gather(*[calls.submit(prepare(id), same) for id in "abc"])
    assert [answer.id for answer in answers] == ["a", "b", "c"]
    assert service.handed_over == [("", [prepare("a"), prepare("b"), prepare("c")])]


async def test_calls_of_later_iterations_form_own_batches() -> None:
    calls, service = joint(stand)
    assert (await calls.submit(prepare("a"), same)).id == "a"
    assert (await calls.submit(prepare("b"), same)).id == "b"
    assert [len(requests) for _, requests in service.handed_over] == [1, 1]


async def test_kinds_groups_and_callers_form_separate_batches() -> None:
    calls, service = joint(stand)
    own, other = copy_context(), copy_context()
    own.run(CALLER.set, "alice")
    other.run(CALLER.set, "bob")
    answers = await asyncio.gather(
        own.run(calls.submit, prepare("a"), same),
        other.run(calls.submit, prepare("b"), same),
        own.run(calls.submit, prepare("c", "shipping"), same),
        own.run(calls.submit, commit("d"), same),
        own.run(calls.submit, prepare("e"), same),
    )
    assert [answer.id for answer in answers] == ["a", "b", "c", "d", "e"]
    assert service.handed_over == [
        ("alice", [prepare("a"), prepare("e")]),
        ("bob", [prepare("b")]),
        ("alice", [prepare("c", "shipping")]),
        ("alice", [commit("d")]),
    ]


async def test_each_call_gets_its_own_error() -> None:
    async def outcome(requests: Sequence[Request]) -> Sequence[Answer]:
        found = await stand(requests)
        return [NotFound(id="b") if answer.id == "b" else answer for answer in found]  # type: ignore[union-attr]

    calls, _ = joint(outcome)
    first, second = calls.submit(prepare("a"), same), calls.submit(prepare("b"), same)
    assert (await first).id == "a"
    with pytest.raises(NotFound) as caught:
        await second
    assert caught.value.details == {"id": "b"}


@pytest.mark.parametrize("error", [RequestError("closed"), ValueError("a bug")])
async def test_failed_run_fails_all_its_calls(error: Exception) -> None:
    async def outcome(requests: Sequence[Request]) -> Sequence[Answer]:
        raise error

    calls, _ = joint(outcome)
    asked = [calls.submit(prepare(id), same) for id in "ab"]
    assert await asyncio.gather(*asked, return_exceptions=True) == [error, error]


async def test_refused_batch_fails_its_calls() -> None:
    error = RuntimeError("no runs")

    def runs(requests: Sequence[Request], began_s: float) -> Sequence[Run]:
        raise error

    calls = CallBatcher(runs)
    asked = [calls.submit(prepare(id), same) for id in "ab"]
    assert await asyncio.gather(*asked, return_exceptions=True) == [error, error]


async def test_gone_caller_keeps_answers_of_others() -> None:
    gate = asyncio.Event()

    async def outcome(requests: Sequence[Request]) -> Sequence[Answer]:
        await gate.wait()
        return await stand(requests)

    calls, _ = joint(outcome)
    gone, staying = calls.submit(prepare("a"), same), calls.submit(prepare("b"), same)
    gone.cancel()
    gate.set()
    assert (await staying).id == "b"
    assert gone.cancelled()


async def test_cancelled_run_cancels_its_calls() -> None:
    begun = asyncio.Event()
    task: list[asyncio.Task[object] | None] = []

    async def outcome(requests: Sequence[Request]) -> Sequence[Answer]:
        task.append(asyncio.current_task())
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    calls, _ = joint(outcome)
    asked = calls.submit(prepare("a"), same)
    await begun.wait()
    [running] = task
    assert running is not None
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
