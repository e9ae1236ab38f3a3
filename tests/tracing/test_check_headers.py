"""What names a trace goes on to check URLs, and nothing else that a message's headers hold."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.kit.http_answers import COMMIT, LOOPBACK, answer_to, ask, read_request, response
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
        headers, body = await read_request(reader)
        self.seen.append(headers)
        writer.write(answer_to(body, response(COMMIT)))
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


SPAN = TraceContext(f"00-{TRACE}-1111111111111111-01")
OWN: Header = ("traceparent", PARENT.encode())


@pytest.mark.parametrize(
    ("headers", "trace", "sent"),
    [
        pytest.param(
            (OWN, ("tracestate", b"vendor=1"), ("evil", b"1")),
            None,
            {f"traceparent: {PARENT}", "tracestate: vendor=1"},
            id="context of the message",
        ),
        pytest.param((OWN,), SPAN, {f"traceparent: {SPAN.parent}"}, id="span of the check"),
        pytest.param(
            (OWN, ("tracestate", b"a=1\r\nx-evil: 1")),
            None,
            {f"traceparent: {PARENT}"},
            id="header in a state",
        ),
        pytest.param((), None, set(), id="none"),
        pytest.param(
            (("traceparent", f"{PARENT}\r\nx-evil: 1".encode()),), None, set(), id="two lines"
        ),
        pytest.param(
            (("traceparent", b"00-evil\r\n\r\nPOST /evil HTTP/1.1"),), None, set(), id="request"
        ),
        pytest.param((("traceparent", b"\xff" * 55),), None, set(), id="no ASCII"),
        pytest.param((("traceparent", None),), None, set(), id="no value"),
        pytest.param((("tracestate", b"evil=1"),), None, set(), id="state alone"),
    ],
)
async def test_check_sends_trace_context_only(
    server: Server, headers: tuple[Header, ...], trace: TraceContext | None, sent: set[str]
) -> None:
    assert await asked(server, *headers, trace=trace) == sent


async def test_an_answer_is_read_as_before(server: Server) -> None:
    call = CheckCall(ID, "orders", 1, 15, CheckReason.DUE, 0, (Message("payments"),))
    checks = HttpChecks(guard=LOOPBACK)
    result = await ask(checks, server.url, call)
    await checks.close()
    assert result == Answered(Decision.COMMIT, detail="commit")
