"""Connections to check URLs, made before anything of a question is sent."""

import asyncio
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias, cast

LOOKUPS_MAX = 32
"""Names looked up at a time. A look-up cannot be cut short, it only ends by itself."""
UNREAD_BYTES_MAX = 256 * 1024
"""Received but not yet read; above it the other side is made to wait."""

LookUp: TypeAlias = Callable[[str], Sequence[str]]
"""Return the addresses of a host name; called in a thread of its own, may block."""


class CannotConnect(Exception):
    """There is no connection, so nothing was sent; the message says in a few words why."""


def look_up(host: str) -> Sequence[str]:
    """Return the addresses of a host name, each once, in the order of the system's preference.

    Raises:
        OSError: the name is not known, or nobody answers.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError:
        # Python finds that no name can be so, with an empty label say, before anybody is asked.
        raise socket.gaierror(socket.EAI_NONAME, "no name can be so") from None
    return list(dict.fromkeys(str(address[4][0]) for address in found))


class Names:
    """Looks names up without ever waiting for another group's name.

    The event loop's own threads are few (uvloop has four), so a handful of names whose servers
    do not answer would stop every other group. Here each name has at most one thread.
    """

    def __init__(self, look_up: LookUp = look_up) -> None:
        self._look_up = look_up
        self._slots = asyncio.Semaphore(LOOKUPS_MAX)
        self._open: dict[str, asyncio.Task[Sequence[str]]] = {}

    async def addresses(self, host: str) -> Sequence[str]:
        """Return the addresses of a name or, as it is, an address.

        Raises:
            OSError: the name is not known.
        """
        with suppress(ValueError):
            return [str(ipaddress.ip_address(host))]
        task = self._open.get(host)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._shared(host))
            self._open[host] = task
            task.add_done_callback(lambda done: self._forget(host, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for no look-up any more."""
        for task in list(self._open.values()):
            task.cancel()
        await asyncio.gather(*self._open.values(), return_exceptions=True)

    async def _shared(self, host: str) -> Sequence[str]:
        async with self._slots:
            return await _in_thread(self._look_up, host)

    def _forget(self, host: str, done: "asyncio.Task[Sequence[str]]") -> None:
        self._open.pop(host, None)
        if not done.cancelled():
            done.exception()  # whoever waited has it; nobody may be left


async def _in_thread(look_up: LookUp, host: str) -> Sequence[str]:
    """Run a look-up in a daemon thread, which a hanging one does not keep the process alive."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Sequence[str]] = loop.create_future()

    def finish(addresses: Sequence[str], error: Exception | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(addresses)
        else:
            result.set_exception(error)

    def run() -> None:
        addresses: Sequence[str] = ()
        problem: Exception | None = None
        try:
            addresses = look_up(host)
        except Exception as error:
            problem = error
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(finish, addresses, problem)

    threading.Thread(target=run, name=f"look-up {host}", daemon=True).start()
    return await result


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
    names: Names, host: str, port: int, tls: ssl.SSLContext | None, timeout_s: float
) -> Connection:
    """Return a connection to the first address of `host` that takes it.

    Raises:
        CannotConnect: no name, nobody there, no TLS, or not within `timeout_s`.
    """
    stage = "look-up of the name"
    try:
        async with asyncio.timeout(timeout_s) as limit:
            addresses = await names.addresses(host)
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
