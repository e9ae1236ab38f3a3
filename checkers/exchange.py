"""One HTTP/1.1 call on a connection in hand, for talk between proxies.

As with `txbroker.checkers.http`, the request is handed to the socket at once, and nothing
is ever sent twice: so it is known for certain whether anything was sent.
"""

from collections.abc import Sequence

import h11
from msgspec import Struct

from txbroker.checkers.connections import Connection

HEADER_BYTES_MAX = 16 * 1024
_PIECES_MAX = 4096

Headers = Sequence[tuple[str, str]]


class NoAnswer(Exception):
    """The request was sent, and no whole answer came; the message says why."""


class NotSent(Exception):
    """The connection had ended before anything was sent."""


class HttpResponse(Struct, frozen=True):
    """What came back. `keep`: the connection is good for another call."""

    status: int
    body: bytes
    keep: bool


async def post(
    connection: Connection, target: str, headers: Headers, body: bytes, answer_bytes_max: int
) -> HttpResponse:
    """Send one POST and return its answer; the caller bounds the time.

    Raises:
        NotSent: certainly nothing was sent.
        NoAnswer: it may have arrived.
    """
    return await receive(connection, send(connection, target, headers, body), answer_bytes_max)


def send(connection: Connection, target: str, headers: Headers, body: bytes) -> h11.Connection:
    """Send one POST at once; return what `receive` needs.

    Raises:
        NotSent: certainly nothing was sent.
    """
    if not connection.fresh:
        raise NotSent("the connection closed before the question was sent")
    state = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADER_BYTES_MAX)
    request = h11.Request(
        method="POST",
        target=target,
        headers=[*headers, ("content-length", str(len(body))), ("accept-encoding", "identity")],
    )
    events = (request, h11.Data(data=body), h11.EndOfMessage())
    connection.send(b"".join(state.send(event) or b"" for event in events))
    return state


async def receive(
    connection: Connection, state: h11.Connection, answer_bytes_max: int
) -> HttpResponse:
    """Return the answer to what was sent; the caller bounds the time.

    Raises:
        NoAnswer: there is none, or not a whole one.
    """
    try:
        return await _answer(connection, state, answer_bytes_max)
    except h11.RemoteProtocolError:
        raise NoAnswer("the answer is not HTTP or is cut off") from None


async def _answer(connection: Connection, state: h11.Connection, bytes_max: int) -> HttpResponse:
    status, body = 0, bytearray()
    for _ in range(_PIECES_MAX + bytes_max // 256):
        event = state.next_event()
        if event is h11.NEED_DATA:
            data = await connection.receive(HEADER_BYTES_MAX)
            if not data and not status:
                raise NoAnswer("the connection ended before an answer")
            state.receive_data(data)
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > bytes_max:
                raise NoAnswer(f"the answer is larger than {bytes_max} bytes")
        elif isinstance(event, h11.EndOfMessage):
            keep = state.their_state is h11.DONE and not state.trailing_data[0]
            return HttpResponse(status, bytes(body), keep)
        elif not isinstance(event, h11.InformationalResponse):
            raise NoAnswer("the answer is not HTTP or is cut off")
    raise NoAnswer("the answer comes in too many pieces")
