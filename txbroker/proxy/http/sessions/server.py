"""The server of SDK sessions: opens them, and notifies them of changes.

A session has two tasks: one reads frames and starts operations, one writes answers.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

from aiohttp import ClientConnectionResetError, WSCloseCode, web

from txbroker import tracing
from txbroker.contract import frames as wire
from txbroker.contract.policy import PolicyError, check_group_name
from txbroker.core.settled import ShareUse, share_max
from txbroker.errors import (
    BadRequest,
    Overloaded,
    RequestError,
)
from txbroker.principals import ANYBODY, Principal
from txbroker.proxy.http.context import (
    ApiContext,
)
from txbroker.proxy.http.guards import PRINCIPAL, Guard
from txbroker.proxy.http.operations import WRITERS
from txbroker.proxy.http.sessions.session import (
    ProtocolError,
    SdkSession,
    decoded,
    failure,
    receive,
)
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

CLOCK_S = 60.0
"""Interval at which sessions get the proxy's clock, seconds."""
OWNERS_POLL_S = 0.25
"""Interval at which owners are polled, for services that do not notify, seconds."""
SHUTDOWN_S = 3.0
"""Maximum time for operations in flight when the proxy stops, seconds."""


@runtime_checkable
class OwnerNotifier(Protocol):
    """A service that notifies of changed owners."""

    def on_owners(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever `owners()` may have changed."""
        ...


class SessionServer:
    """Opens sessions and notifies them of changes."""

    def __init__(self, context: ApiContext, guard: Guard) -> None:
        self._context = context
        self._guard = guard
        self._settings = context.settings
        self._open: set[SdkSession] = set()
        self._sockets: set[web.WebSocketResponse] = set()
        # Open sockets by principal.
        self._use = ShareUse()
        self._moved = asyncio.Event()
        if isinstance(context.service, OwnerNotifier):
            context.service.on_owners(self._moved.set)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve one session from its upgrade to its end.

        Raises:
            NotPermitted: the caller's role may open no session.
            BadRequest: the request is no WebSocket upgrade.
            Overloaded: too many sessions are open.
        """
        principal = request.get(PRINCIPAL, ANYBODY)
        principal.check_role(WRITERS)
        self._check_room(principal)
        socket = web.WebSocketResponse(
            heartbeat=self._settings.session_heartbeat_s,
            max_msg_size=self._settings.frame_bytes_max,
            compress=False,
        )
        if not socket.can_prepare(request):
            raise BadRequest("this path is a WebSocket: send an upgrade request")
        await socket.prepare(request)
        self._sockets.add(socket)
        self._use.add(principal.counted_as)
        try:
            await self._serve(socket, request)
        except ProtocolError as error:
            await self._farewell(socket, BadRequest(str(error)))
        except RequestError as error:
            await self._farewell(socket, error)
        except (ClientConnectionResetError, ConnectionError):
            pass
        finally:
            self._sockets.discard(socket)
            self._use.add(principal.counted_as, -1)
        return socket

    def _check_room(self, principal: Principal) -> None:
        """Refuse a session beyond the limits of all callers and of one principal."""
        most = self._settings.sessions_max
        why = ""
        if len(self._sockets) >= most:
            why = "too many sessions are open"
        elif principal.counted_as and self._use.of(principal.counted_as) >= share_max(most):
            why = "too many sessions of this principal are open"
        if why:
            self._context.metrics.overloaded("session")
            raise Overloaded(f"{why}: try another proxy, or retry later")

    async def _serve(self, socket: web.WebSocketResponse, request: web.Request) -> None:
        operations = await self._first_frame(socket)
        if operations is None:
            return
        hello = _hello(operations)
        session = SdkSession(self._context, socket, request, hello)
        # The principal may have lost rights since the upgrade; from here on it is watched.
        session.principal = self._guard.known(session.credential)
        session.principal.check_role(WRITERS)
        session.principal.check_group(session.group)
        writer = asyncio.create_task(session.write())
        self._open.add(session)
        session.send(self._welcome())
        self._context.sessions.add(session.group, session)
        try:
            # A separate task: a frame then resumes only it, not the stack of upgrade handlers.
            await asyncio.create_task(session.read(operations[1:]))
        finally:
            self._context.sessions.remove(session.group, session)
            self._open.discard(session)
            session.release()
            writer.cancel()
            with suppress(asyncio.CancelledError):
                await writer

    async def _first_frame(self, socket: web.WebSocketResponse) -> Sequence[wire.Received] | None:
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                frame = await receive(socket)
        except TimeoutError:
            raise ProtocolError("no hello in time: send a hello first") from None
        return None if frame is None else decoded(frame)

    def _welcome(self) -> wire.Welcome:
        owners = tuple(self._context.service.owners())
        return wire.Welcome(
            version=wire.SESSION_VERSION,
            now_ms=self._context.service.now_ms(),
            partitions=len(owners),
            owners=owners,
            url=self._context.url,
            dedup_window_s=self._settings.dedup_window_s,
            transaction_bytes_max=self._settings.transaction_bytes_max,
        )

    async def _farewell(self, socket: web.WebSocketResponse, error: RequestError) -> None:
        """Send the reason and close the session; do not wait for a client that does not read."""
        with suppress(TimeoutError, ConnectionError, ClientConnectionResetError):
            async with asyncio.timeout(self._settings.request_timeout_s):
                if not socket.closed:
                    await socket.send_bytes(wire.encode_frame([failure(0, error)]))
                await socket.close(code=WSCloseCode.PROTOCOL_ERROR)

    async def lifetime(self, _: web.Application) -> AsyncIterator[None]:
        """Send clock and owners to sessions while the application runs."""
        task = asyncio.create_task(self._send_changes())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _send_changes(self) -> None:
        owners = tuple(self._context.service.owners())
        clock_at = self._now() + CLOCK_S
        credentials = self._guard.credentials()
        while True:
            tracing.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(OWNERS_POLL_S):
                    await self._moved.wait()
            self._moved.clear()
            before, credentials = credentials, self._guard.credentials()
            self._check_principals(changed=credentials != before)
            current = tuple(self._context.service.owners())
            if current != owners:
                owners = current
                self._broadcast(wire.Owners(owners))
            if self._now() >= clock_at:
                clock_at = self._now() + CLOCK_S
                self._broadcast(wire.ClockUpdate(self._context.service.now_ms()))

    def _check_principals(self, *, changed: bool) -> None:
        """Disconnect sessions of removed or expired principals, whose next attempt gets the reason;
        update the rights of the others.

        Args:
            changed: False where only time has passed.
        """
        for session in tuple(self._open):
            if not (changed or session.principal.expires_s):
                continue
            try:
                principal = self._guard.known(session.credential)
                principal.check_role(WRITERS)
                principal.check_group(session.group)
            except RequestError as error:
                session.cut_off(str(error))
            else:
                session.principal = principal

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _broadcast(self, operation: wire.FromProxy) -> None:
        for session in tuple(self._open):
            session.send(operation)

    async def close_all(self, _: web.Application) -> None:
        """Close all sessions: the proxy stops, and clients reconnect to others."""
        await asyncio.gather(*(session.finish(SHUTDOWN_S) for session in tuple(self._open)))
        # Let the writers send the last answers before the sockets close.
        await asyncio.sleep(0)
        await asyncio.gather(*(self._go_away(socket) for socket in tuple(self._sockets)))

    async def _go_away(self, socket: web.WebSocketResponse) -> None:
        with suppress(TimeoutError, ConnectionError, ClientConnectionResetError):
            async with asyncio.timeout(SHUTDOWN_S):
                await socket.close(code=WSCloseCode.GOING_AWAY)


def _hello(operations: Sequence[wire.Received]) -> wire.Hello:
    if not operations or not isinstance(operations[0], wire.Hello):
        raise ProtocolError("the first operation is no hello: begin a session with a hello")
    hello = operations[0]
    if hello.version < 1:
        raise ProtocolError(f"there is no session version {hello.version}: use 1 or higher")
    try:
        check_group_name(hello.group)
        check_group_name(hello.instance)
    except PolicyError as error:
        raise ProtocolError(f"hello: {error}".replace("group's name", "name")) from None
    return hello
