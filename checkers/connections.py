"""Connections to check URLs and proxies, opened before anything of a question is sent, and one
HTTP/1.1 POST on such a connection.

It is sent with h11, so that the caller knows for certain whether anything was sent: the request is
handed to the socket at once, and nothing is ever sent twice.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, cast

import h11

from txbroker.checkers.daemon_threads import DaemonThreads
from txbroker.config.addresses import Address, plain_host

LOOKUPS_MAX = 24
"""Names resolved at a time, apart from those that hang. A look-up cannot be cancelled."""
LOOKUP_LATE_S = 1.0
"""A look-up that takes longer counts as hanging, seconds."""
LOOKUPS_ASKER_MAX = 2
"""Look-ups at a time for one group: its present name and the one before."""
UNREAD_BYTES_MAX = 256 * 1024
"""Received but unread bytes above which the connection stops reading from its socket."""
HEADER_BYTES_MAX = 16 * 1024
"""An answer's status line and headers."""
PIECE_BYTES = 256
"""The average size of an answer's pieces (chunks) must reach this after the first `PIECES_MIN`:
each costs the event loop time, so chunks of one byte would hold up every other group."""
PIECES_MIN = 1024
NOT_HTTP = "the answer is not HTTP, is cut off or has too large headers"

Headers: TypeAlias = Sequence[tuple[str, str]]
LookUp: TypeAlias = Callable[[str], Sequence[str]]
"""Returns the addresses of a host name; runs in a separate thread, may block."""
Vet: TypeAlias = Callable[[str, int, Sequence[str]], Awaitable[None]]
"""Raises `NoConnection` if a host must not be called at a port and one of these addresses."""


class NoConnection(Exception):
    """There is no connection, so nothing was sent; the message gives the reason."""


def look_up(host: str) -> Sequence[str]:
    """Return the distinct addresses of a host name, in the system's order of preference.

    Raises:
        OSError: the name is unknown, or no name server answers.
    """
    if f".{plain_host(host)}".endswith(".localhost"):
        host = "localhost"  # in every spelling, by RFC 6761; resolvers differ
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError:
        # Python refuses an invalid name, such as one with an empty label, before any look-up.
        raise socket.gaierror(socket.EAI_NONAME, "the name is invalid") from None
    return list(dict.fromkeys(str(info[4][0]) for info in infos))


def literal(host: str) -> str | None:
    """Return a host that is an IP address in its usual spelling; None for any other host."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))
    return None


class HostResolver:
    """Resolves host names, each once at a time; names that hang do not hold up others."""

    def __init__(self, look_up: LookUp = look_up) -> None:
        self._look_up = look_up
        self._threads = DaemonThreads[Sequence[str]](
            "look-up", LOOKUPS_MAX, LOOKUPS_ASKER_MAX, late_s=LOOKUP_LATE_S
        )

    async def addresses(self, host: str, asker: str = "") -> Sequence[str]:
        """Return the addresses of a name; an address is returned unchanged.

        Args:
            asker: the group that needs it; "" for the proxy itself.

        Raises:
            OSError: the name is unknown, or the group has too many look-ups in progress.
        """
        address = literal(host)
        if address is not None:
            return [address]
        return await self._threads.run(host, lambda: self._look_up(host), asker)

    async def close(self) -> None:
        await self._threads.close()


class CheckConnection(asyncio.Protocol):
    """One TCP or TLS connection. `fresh` is known without a read."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._paused = False
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self.on_stir: Callable[[], None] | None = None
        """Called when data arrives or the connection ends, while it is idle."""
        self.error: Exception | None = None
        self.address = ""
        """The IP address of the other side."""

    @property
    def fresh(self) -> bool:
        """True while nothing has arrived and neither side has ended the connection."""
        transport = self._transport
        return (
            transport is not None
            and not transport.is_closing()
            and not self._ended
            and not self._unread
        )

    def send(self, data: bytes) -> None:
        """Hand bytes to the socket, at once."""
        assert self._transport is not None  # made by `connect`, which waits for it
        self._transport.write(data)

    async def receive(self, bytes_max: int) -> bytes:
        """Return received bytes, at least one, or nothing once the connection ended.

        Suspends at least once, so that a fast sender cannot hold up the event loop.
        """
        await asyncio.sleep(0)
        while not self._unread and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        data = bytes(self._unread[:bytes_max])
        del self._unread[:bytes_max]
        if self._paused and not self._unread and self._transport is not None:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()
        return data

    def close(self, *, abort: bool = False) -> None:
        """End the connection; with `abort`, drop unsent data."""
        self.on_stir = None
        if self._transport is None:
            return
        if abort:
            self._transport.abort()
        else:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if len(self._unread) > UNREAD_BYTES_MAX and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self.error = self.error or exc
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.on_stir is not None:
            self.on_stir()


async def connect(
    names: HostResolver,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    timeout_s: float,
    *,
    vet: Vet | None = None,
    asker: str = "",
) -> CheckConnection:
    """Return a connection to the first address of `host` that takes it.

    The name is resolved once, and only addresses that were vetted are connected to.

    Args:
        vet: tests all addresses of the host before the first connection; None: all are allowed.
        asker: the group that needs it; "" for the proxy itself.

    Raises:
        NoConnection: name, connection or TLS failed, was refused, or took over `timeout_s`.
    """
    stage = "look-up of the name"
    try:
        async with asyncio.timeout(timeout_s) as limit:
            addresses = await names.addresses(host, asker)
            if vet is not None:
                await vet(host, port, addresses)
            stage = "TLS handshake" if tls else "connection"
            deadline_s = limit.when() or 0.0
            return await _connect_any(addresses, host, port, tls, deadline_s)
    except TimeoutError:
        raise NoConnection(f"{Address(host, port)}: no {stage} within {timeout_s:g} s") from None
    except OSError as error:
        raise NoConnection(f"{Address(host, port)}: {_reason(error)}") from None


async def _connect_any(
    addresses: Sequence[str], host: str, port: int, tls: ssl.SSLContext | None, deadline_s: float
) -> CheckConnection:
    """Try the addresses in order; each gets an equal share of the time left."""
    loop = asyncio.get_running_loop()
    problem: OSError = OSError("the name has no address")
    for n, address in enumerate(addresses):
        share_s = max(0.0, deadline_s - loop.time()) / (len(addresses) - n)
        try:
            async with asyncio.timeout(share_s):
                _, connection = await loop.create_connection(
                    CheckConnection, address, port, ssl=tls, server_hostname=host if tls else None
                )
                connection.address = address
                return connection
        except OSError as error:  # TimeoutError and ssl.SSLError are OSErrors too
            problem = error
    raise problem


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or 'handshake failed'}"
    if isinstance(error, socket.gaierror):
        return "the name is unknown"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionResetError):
        return "connection reset"
    return error.strerror or str(error) or type(error).__name__


# --- one POST ------------------------------------------------------------------------------------


class NoAnswer(Exception):
    """The request was sent, and no complete answer arrived; the message gives the reason."""


class ConnectionEnded(Exception):
    """The connection had ended before anything was sent."""


class Exchange:
    """One request and its answer; the caller limits the time.

    Args:
        answer_bytes_max: the largest answer body.
    """

    def __init__(self, connection: CheckConnection, answer_bytes_max: int) -> None:
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
            raise ConnectionEnded("the connection closed before the question was sent")
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

    async def beginning(self, size: int, wait_s: float) -> bytes:
        """Return about `size` bytes of the answer's body, after `head`, or what came within
        `wait_s` seconds. The connection cannot be used again."""
        body = bytearray()
        try:
            async with asyncio.timeout(wait_s):
                while len(body) < size and isinstance(event := await self._event(), h11.Data):
                    body += event.data
        except (TimeoutError, NoAnswer):
            pass
        return bytes(body[:size])

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
