"""One HTTP/1.1 POST on an acquired connection, and its answer.

Sends with h11, so that the caller knows for certain whether anything was sent: the request is
handed to the socket at once, and nothing is ever sent twice.
"""

from collections.abc import Sequence
from typing import Any

import h11

from txbroker.checkers.connections import Connection

HEADER_BYTES_MAX = 16 * 1024
"""An answer's status line and headers."""
PIECE_BYTES = 256
"""The average size of an answer's pieces (chunks) must reach this after the first `PIECES_MIN`:
each costs the event loop time, so chunks of one byte would hold up every other group."""
PIECES_MIN = 1024
NOT_HTTP = "the answer is not HTTP, is cut off or has too large headers"

Headers = Sequence[tuple[str, str]]


class NoAnswer(Exception):
    """The request was sent, and no complete answer arrived; the message gives the reason."""


class NotSent(Exception):
    """The connection had ended before anything was sent."""


class Exchange:
    """One request and its answer; the caller limits the time.

    Args:
        answer_bytes_max: the largest answer body.
    """

    def __init__(self, connection: Connection, answer_bytes_max: int) -> None:
        self._connection = connection
        self._bytes_max = answer_bytes_max
        self._state = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADER_BYTES_MAX)
        self._pieces_left = PIECES_MIN + answer_bytes_max // PIECE_BYTES
        self._received = 0

    def send(self, target: str, headers: Headers, body: bytes) -> None:
        """Hand the request to the socket.

        Raises:
            NotSent: certainly nothing was sent.
        """
        if not self._connection.fresh:
            raise NotSent("the connection closed before the question was sent")
        request = h11.Request(
            method="POST",
            target=target,
            headers=[*headers, ("content-length", str(len(body))), ("accept-encoding", "identity")],
        )
        events = (request, h11.Data(data=body), h11.EndOfMessage())
        self._connection.send(b"".join(self._state.send(event) or b"" for event in events))

    async def head(self) -> h11.Response:
        """Return the answer's status and headers.

        Raises:
            NoAnswer: there is none.
        """
        event = await self._event()
        if isinstance(event, h11.Response):
            return event
        raise NoAnswer(NOT_HTTP)

    async def body(self) -> bytes:
        """Return the answer's body, after `head`.

        Raises:
            NoAnswer: it is incomplete or too large.
        """
        body = bytearray()
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
            if len(body) > self._bytes_max:
                raise self._too_large()
        if not isinstance(event, h11.EndOfMessage):
            raise NoAnswer(NOT_HTTP)
        return bytes(body)

    @property
    def reusable(self) -> bool:
        """True if the connection can carry another request, after `body`."""
        return self._state.their_state is h11.DONE and not self._state.trailing_data[0]

    async def _event(self) -> Any:
        """Return the next event of the answer, except interim responses."""
        try:
            while True:
                event = self._state.next_event()
                if event is h11.NEED_DATA:
                    data = await self._connection.receive(HEADER_BYTES_MAX)
                    if not data and not self._received:
                        raise NoAnswer("the connection ended before an answer")
                    self._received += len(data)
                    if self._received > 2 * self._bytes_max + 4 * HEADER_BYTES_MAX:
                        raise self._too_large()
                    self._state.receive_data(data)
                    continue
                self._pieces_left -= 1
                if self._pieces_left < 0:
                    raise NoAnswer("the answer comes in too many pieces")
                if not isinstance(event, h11.InformationalResponse):
                    return event
        except h11.RemoteProtocolError:
            raise NoAnswer(NOT_HTTP) from None

    def _too_large(self) -> NoAnswer:
        return NoAnswer(f"the answer is larger than {self._bytes_max} bytes")
