"""Connections to check URLs, made before anything of a question is sent."""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias, cast

from txbroker.checkers.daemon_threads import DaemonThreads
from txbroker.config.addresses import plain_host

LOOKUPS_MAX = 24
"""Names looked up at a time, apart from those that hang. A look-up cannot be cut short, it only
ends by itself."""
LOOKUP_LATE_S = 1.0
"""A look-up that lasts longer hangs, seconds."""
LOOKUPS_ASKER_MAX = 2
"""The same for one group: the name that it has, and the one that it had before."""
UNREAD_BYTES_MAX = 256 * 1024
"""Received but not yet read; above it the other side is made to wait."""

LookUp: TypeAlias = Callable[[str], Sequence[str]]
"""Return the addresses of a host name; called in a thread of its own, may block."""
Vet: TypeAlias = Callable[[str, int, Sequence[str]], Awaitable[None]]
"""Raise `CannotConnect` where a host must not be called at a port and one of these addresses."""


class CannotConnect(Exception):
    """There is no connection, so nothing was sent; the message says in a few words why."""


def look_up(host: str) -> Sequence[str]:
    """Return the addresses of a host name, each once, in the order of the system's preference.

    Raises:
        OSError: the name is not known, or nobody answers.
    """
    if f".{plain_host(host)}".endswith(".localhost"):
        host = "localhost"  # in every spelling, as RFC 6761 has it; resolvers differ
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError:
        # Python finds that no name can be so, with an empty label say, before anybody is asked.
        raise socket.gaierror(socket.EAI_NONAME, "no name can be so") from None
    return list(dict.fromkeys(str(address[4][0]) for address in found))


def literal(host: str) -> str | None:
    """Return the address that a host is, None where it is a name or spelled in another way."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(host))
    return None


class HostResolver:
    """Looks names up, each at most once at a time; names that hang do not hold up others."""

    def __init__(self, look_up: LookUp = look_up) -> None:
        self._look_up = look_up
        self._threads = DaemonThreads[Sequence[str]](
            "look-up", LOOKUPS_MAX, LOOKUPS_ASKER_MAX, late_s=LOOKUP_LATE_S
        )

    async def addresses(self, host: str, asker: str = "") -> Sequence[str]:
        """Return the addresses of a name or, as it is, an address.

        Args:
            asker: the group on whose behalf; "" for the proxy itself.

        Raises:
            OSError: the name is not known, or the group has too many look-ups under way.
        """
        address = literal(host)
        if address is not None:
            return [address]
        return await self._threads.run(host, lambda: self._look_up(host), asker)

    async def close(self) -> None:
        """Stop waiting for look-ups."""
        await self._threads.close()


class Connection(asyncio.Protocol):
    """One TCP or TLS connection. Whether it is still good is known without reading from it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._paused = False
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None
        self.on_stir: Callable[[], None] | None = None
        """Called when anything arrives or the connection ends, while it lies idle."""
        self.error: Exception | None = None
        self.address = ""
        """The IP address that it is connected to."""

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
        """Return what has arrived, at least one byte, or nothing once the connection ended.

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
        """End the connection; with `abort` without sending what is still in its buffer."""
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
) -> Connection:
    """Return a connection to the first address of `host` that takes it.

    The name is looked up once; what is connected to is one of the very addresses that were vetted.

    Args:
        vet: tests all addresses of the host before any is connected to; None: all are fine.
        asker: the group on whose behalf; "" for the proxy itself.

    Raises:
        CannotConnect: no name, nobody there, no TLS, refused, or not within `timeout_s`.
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
        raise CannotConnect(f"{host}:{port}: no {stage} within {timeout_s:g} s") from None
    except OSError as error:
        raise CannotConnect(f"{host}:{port}: {_words(error)}") from None


async def _connect_any(
    addresses: Sequence[str], host: str, port: int, tls: ssl.SSLContext | None, deadline_s: float
) -> Connection:
    """Try one address after the other; each gets an equal share of the time that is left."""
    loop = asyncio.get_running_loop()
    problem: OSError = OSError("the name has no address")
    for n, address in enumerate(addresses):
        share_s = max(0.0, deadline_s - loop.time()) / (len(addresses) - n)
        try:
            async with asyncio.timeout(share_s):
                _, connection = await loop.create_connection(
                    Connection, address, port, ssl=tls, server_hostname=host if tls else None
                )
                connection.address = address
                return connection
        except OSError as error:  # TimeoutError and ssl.SSLError are OSErrors too
            problem = error
    raise problem


def _words(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or 'handshake failed'}"
    if isinstance(error, socket.gaierror):
        return "the name is not known"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionResetError):
        return "connection reset"
    return error.strerror or str(error) or type(error).__name__
