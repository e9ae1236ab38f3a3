"""What names a trace goes on to check URLs, and nothing else that a message's headers hold."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.kit.http_answers import COMMIT, LOOPBACK, ask, read_request, response
from txbroker.checkers.base import Answered, CheckCall
from txbroker.checkers.http import HttpChecks
from txbroker.core.records import CheckReason, Decision, Header, Message
from txbroker.core.routing import make_id
from txbroker.tracing import TraceContext

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
ID = make_id(0, 1_000_000, 7)


class Server:
    """A check URL that keeps the headers of its questions."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers, _ = await read_request(reader)
        self.seen.append(headers)
        writer.write(response(COMMIT))
        await writer.drain()
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/check"
    async with listening:
        yield made


async def asked(server: Server, *headers: Header, trace: TraceContext | None = None) -> set[str]:
    """Ask about a message with these headers; return what the question has of traces or evil."""
    message = Message("payments", value=b"1", headers=headers)
    call = CheckCall(ID, "orders", 1, 15, CheckReason.DUE, 0, (message,), trace=trace)
    checks = HttpChecks(guard=LOOPBACK)
    try:
        assert isinstance(await ask(checks, server.url, call), Answered)
    finally:
        await checks.close()
    (found,) = server.seen
    return {
        f"{name}: {value}"
        for name, value in found.items()
        if name.startswith("trace") or "evil" in name
    }


async def test_a_messages_own_context_goes_on(server: Server) -> None:
    found = await asked(
        server, ("traceparent", PARENT.encode()), ("tracestate", b"vendor=1"), ("evil", b"1")
    )
    assert found == {f"traceparent: {PARENT}", "tracestate: vendor=1"}


async def test_the_span_of_the_check_goes_before_it(server: Server) -> None:
    span = TraceContext(f"00-{TRACE}-1111111111111111-01")
    assert await asked(server, ("traceparent", PARENT.encode()), trace=span) == {
        f"traceparent: {span.parent}"
    }


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("traceparent", f"{PARENT}\r\nx-evil: 1".encode()),),
        (("traceparent", b"00-evil\r\n\r\nPOST /evil HTTP/1.1"),),
        (("traceparent", b"\xff" * 55),),
        (("traceparent", None),),
        (("tracestate", b"evil=1"),),
    ],
)
async def test_what_is_no_context_does_not(server: Server, headers: tuple[Header, ...]) -> None:
    assert await asked(server, *headers) == set()


async def test_a_state_cannot_add_headers(server: Server) -> None:
    found = await asked(
        server, ("traceparent", PARENT.encode()), ("tracestate", b"a=1\r\nx-evil: 1")
    )
    assert found == {f"traceparent: {PARENT}"}


async def test_an_answer_is_read_as_before(server: Server) -> None:
    call = CheckCall(ID, "orders", 1, 15, CheckReason.DUE, 0, (Message("payments"),))
    checks = HttpChecks(guard=LOOPBACK)
    result = await ask(checks, server.url, call)
    await checks.close()
    assert result == Answered(Decision.COMMIT, detail="commit")
