"""A WebSocket to a proxy, on the protocol of the library `websockets`, which does no I/O.

Frames are handed over where they are parsed: a task that waits for each of them, as in the
library's own client, would cost more than parsing.
"""

import asyncio
import logging
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from websockets.client import ClientProtocol
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import OPEN, Event
from websockets.uri import parse_uri

from txbroker import __version__
from txbroker.contract.frames import FRAME_BYTES_MAX
from txbroker.net.tls import ClientTls

SESSION_PATH = "/v1/session"
CLOSE_TIMEOUT_S = 2.0
"""Maximum time for the closing handshake before the socket is dropped."""
HAPPY_EYEBALLS_S = 0.25
"""How long the first address of a host may take until the next one is tried, too (RFC 8305)."""

_log = logging.getLogger("txbroker.sdk.websocket")
# At `debug` the library logs every frame, and the token. A level here keeps a root logger that is
# at `debug` from turning that on.
_log.setLevel(logging.CRITICAL)


class Receiver(Protocol):
    """Takes what happens to a connection."""

    def frame_arrived(self, frame: bytes) -> None:
        """A binary frame has arrived."""

    def connection_writable(self) -> None:
        """`WebSocket.writable` is True again."""

    def connection_ended(self, why: str) -> None:
        """Either side ended the connection; called once, after the last frame."""


class WebSocket(asyncio.Protocol):
    """A WebSocket; opened by `connect`.

    Attributes:
        writable: False while the socket takes no more bytes: wait for `connection_writable`.
        first_frame: the first frame; None if the connection ended before.
    """

    def __init__(self, address: str, protocol: ClientProtocol, heartbeat_s: float) -> None:
        self._address = address
        self._protocol = protocol
        self._heartbeat_s = heartbeat_s
        loop = self._loop = asyncio.get_running_loop()
        self.writable = True
        self.opened: asyncio.Future[None] = loop.create_future()
        self.first_frame: asyncio.Future[bytes | None] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._transport: asyncio.Transport
        self._receiver: Receiver | None = None
        self._early: list[bytes] = []
        """Frames after the first that arrived before there was a receiver."""
        self._fragments: bytearray | None = None
        self._why = ""
        """Why the connection ended."""
        self._heard_at = self._pinged_at = 0.0
        self._beat: asyncio.TimerHandle | None = None

    def attach(self, receiver: Receiver) -> None:
        """Hand over the frames after the first; those that have arrived at once."""
        self._receiver = receiver
        for frame in self._early:
            receiver.frame_arrived(frame)
        self._early.clear()
        if self._why:
            receiver.connection_ended(self._why)

    def send(self, frame: bytes) -> None:
        """Send a binary frame; dropped if the connection has ended."""
        if self._protocol.state is OPEN:
            self._protocol.send_binary(frame)
            self._flush()

    async def close(self) -> None:
        """Close it in order; drop it if the proxy takes longer than `CLOSE_TIMEOUT_S`."""
        try:
            if self._protocol.state is OPEN:
                self._protocol.send_close(CloseCode.NORMAL_CLOSURE)
                self._flush()
            await asyncio.wait((self._lost,), timeout=CLOSE_TIMEOUT_S)
        finally:  # also where the caller is cancelled
            self.abort()

    def abort(self) -> None:
        """Drop the socket."""
        self._transport.abort()

    # --- called by the event loop --------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def request(self, headers: dict[str, str]) -> None:
        """Send the opening handshake with these headers."""
        request = self._protocol.connect()
        request.headers.update(headers)
        self._protocol.send_request(request)
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        protocol = self._protocol
        protocol.receive_data(data)
        for event in protocol.events_received():
            self._take(event)
        self._flush()
        if protocol.handshake_exc is not None:
            self._fail_opening(protocol.handshake_exc)
        elif protocol.close_expected():
            self._end()

    def eof_received(self) -> None:
        self._protocol.receive_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.receive_eof()
        self._fail_opening(exc or self._protocol.handshake_exc)
        self._end(f"the connection to {self._address} broke: {exc}" if exc else "")
        if self._beat is not None:
            self._beat.cancel()
        self._lost.set_result(None)

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        if self._receiver is not None:
            self._receiver.connection_writable()

    # --- frames --------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        if not isinstance(event, Frame):
            if self._protocol.handshake_exc is None and not self.opened.done():
                self.opened.set_result(None)
                self._test_heartbeat()
        elif event.opcode is Opcode.BINARY and event.fin:
            self._hand_over(bytes(event.data))
        elif event.opcode is Opcode.TEXT:
            self._protocol.fail(CloseCode.UNSUPPORTED_DATA, "binary frames only")
            self._end(f"{self._address} sent a frame that is not binary")
        elif event.opcode is Opcode.BINARY:
            self._fragments = bytearray(event.data)
        elif event.opcode is Opcode.CONT and self._fragments is not None:
            self._fragments += event.data
            if event.fin:
                message, self._fragments = self._fragments, None
                self._hand_over(bytes(message))

    def _hand_over(self, frame: bytes) -> None:
        if self._why:
            return
        if self._receiver is not None:
            self._receiver.frame_arrived(frame)
        elif not self.first_frame.done():
            self.first_frame.set_result(frame)
        else:
            self._early.append(frame)

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:  # else the end, which the transport sends
                self._transport.write(data)

    # --- the end -------------------------------------------------------------------------

    def _test_heartbeat(self) -> None:
        """Ping a proxy that was silent for `heartbeat_s`; drop it after half of that again."""
        now_s = self._loop.time()
        next_s = self._heard_at + self._heartbeat_s
        if now_s >= next_s:
            if self._pinged_at > self._heard_at:
                self._end(f"the connection to {self._address} broke: no answer to a ping")
                self.abort()
                return
            if self._protocol.state is OPEN:
                self._protocol.send_ping(b"")
                self._flush()
            self._pinged_at, next_s = now_s, now_s + self._heartbeat_s / 2
        self._beat = self._loop.call_at(next_s, self._test_heartbeat)

    def _fail_opening(self, error: Exception | None) -> None:
        if not self.opened.done():
            self.opened.set_exception(error or ConnectionResetError("the connection was closed"))
            self.opened.exception()  # retrieved, also if `connect` was cancelled first

    def _end(self, why: str = "") -> None:
        if self._why:
            return
        sent = self._protocol.close_sent
        if not why and sent is not None and not self._protocol.close_rcvd_then_sent:
            why = f"the connection to {self._address} broke: {sent.reason or sent.code}"
        self._why = why or f"{self._address} ended the session"
        if not self.first_frame.done():
            self.first_frame.set_result(None)
        if self._receiver is not None:
            self._receiver.connection_ended(self._why)


async def connect(address: str, token: str | None, tls: ClientTls, heartbeat_s: float) -> WebSocket:
    """Open a WebSocket at a proxy's session path.

    Raises:
        InvalidHandshake, ValueError: the answer is no upgrade, or not HTTP.
        OSError: there is no connection, also because of TLS.
    """
    parts = urlsplit(address + SESSION_PATH)
    secure = parts.scheme == "https"
    uri = parse_uri(parts._replace(scheme="wss" if secure else "ws").geturl())
    protocol = ClientProtocol(uri, max_size=FRAME_BYTES_MAX, logger=_log)
    options: dict[str, Any] = {"ssl": tls.context(), "server_hostname": uri.host} if secure else {}
    loop = asyncio.get_running_loop()
    if isinstance(loop, asyncio.BaseEventLoop):  # uvloop's has no such option
        options["happy_eyeballs_delay"] = HAPPY_EYEBALLS_S
    _, connection = await loop.create_connection(
        lambda: WebSocket(address, protocol, heartbeat_s), uri.host, uri.port, **options
    )
    headers = {"User-Agent": f"txbroker/{__version__}"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request(headers)
        await connection.opened
    except BaseException:
        connection.abort()
        raise
    return connection
