"""The server of SDK sessions: opens them, and tells all of them what changes.

A session costs two tasks: one reads frames and starts operations, one writes what was answered.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Protocol, runtime_checkable

from aiohttp import ClientConnectionResetError, WSCloseCode, web

from txbroker import tracing
from txbroker.contract import frames as wire
from txbroker.contract.policy import PolicyError, check_group_name
from txbroker.core.index import ShareUse, share_max
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
from txbroker.proxy.http.operations import WHO_WRITES
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
"""How often sessions get the proxy's clock."""
OWNERS_POLL_S = 0.25
"""How often owners are looked at, in case that nobody tells of a change."""
SHUTDOWN_S = 3.0
"""How long operations under way may take to end when the proxy stops."""


@runtime_checkable
class OwnerNotifier(Protocol):
    """A service that tells when half partitions come or go."""

    def on_owners(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever `owners()` may say something else."""
        ...


class SessionServer:
    """Opens sessions and tells all of them what changes."""

    def __init__(self, shell: ApiContext, guard: Guard) -> None:
        self._shell = shell
        self._guard = guard
        self._settings = shell.settings
        self._open: set[SdkSession] = set()
        self._sockets: set[web.WebSocketResponse] = set()
        # Of those by the names of principals.
        self._use = ShareUse()
        self._moved = asyncio.Event()
        if isinstance(shell.service, OwnerNotifier):
            shell.service.on_owners(self._moved.set)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Carry one session from its upgrade to its end.

        Raises:
            NotPermitted: the caller's role has no sessions.
            BadRequest: it is no WebSocket upgrade.
            Overloaded: too many sessions are open.
        """
        principal = request.get(PRINCIPAL, ANYBODY)
        principal.check_role(WHO_WRITES)
        self._check_room(principal)
        socket = web.WebSocketResponse(
            heartbeat=self._settings.session_heartbeat_s,
            max_msg_size=self._settings.frame_bytes_max,
            compress=False,
        )
        if not socket.can_prepare(request):
            raise BadRequest("a session is a WebSocket: this call is no upgrade to one")
        await socket.prepare(request)
        self._sockets.add(socket)
        self._use.add(principal.counted_as)
        try:
            await self._converse(socket, request)
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
        """Refuse another session where there are too many, of all or of one principal.

        Raises:
            Overloaded: there are.
        """
        most = self._settings.sessions_max
        why = ""
        if len(self._sockets) >= most:
            why = "too many sessions are open"
        elif principal.counted_as and self._use.of(principal.counted_as) >= share_max(most):
            why = "too many sessions of this principal are open"
        if why:
            self._shell.metrics.overloaded("session")
            raise Overloaded(f"{why}: try another proxy or a little later")

    async def _converse(self, socket: web.WebSocketResponse, request: web.Request) -> None:
        operations = await self._first_frame(socket)
        if operations is None:
            return
        hello = _hello(operations)
        session = SdkSession(self._shell, socket, request, hello)
        # Since the upgrade the principal may have lost its rights; from here on it is watched.
        session.principal = self._guard.known(session.credential)
        session.principal.check_role(WHO_WRITES)
        session.principal.check_group(session.group)
        writer = asyncio.create_task(session.write())
        self._open.add(session)
        session.send(self._welcome())
        self._shell.sessions.add(session.group, session)
        try:
            # A separate task: a frame then resumes it alone, not the handlers of the upgrade.
            await asyncio.create_task(session.read(operations[1:]))
        finally:
            self._shell.sessions.remove(session.group, session)
            self._open.discard(session)
            session.let_go()
            writer.cancel()
            with suppress(asyncio.CancelledError):
                await writer

    async def _first_frame(self, socket: web.WebSocketResponse) -> Sequence[wire.Received] | None:
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                frame = await receive(socket)
        except TimeoutError:
            raise ProtocolError("no hello came in time") from None
        return None if frame is None else decoded(frame)

    def _welcome(self) -> wire.Welcome:
        owners = tuple(self._shell.service.owners())
        return wire.Welcome(
            version=wire.SESSION_VERSION,
            now_ms=self._shell.service.now_ms(),
            partitions=len(owners),
            owners=owners,
            url=self._shell.url,
            dedup_window_s=self._settings.dedup_window_s,
            transaction_bytes_max=self._settings.transaction_bytes_max,
        )

    async def _farewell(self, socket: web.WebSocketResponse, error: RequestError) -> None:
        """Say why the session ends, and end it; a client that does not listen is not waited for."""
        with suppress(TimeoutError, ConnectionError, ClientConnectionResetError):
            async with asyncio.timeout(self._settings.request_timeout_s):
                if not socket.closed:
                    await socket.send_bytes(wire.encode_frame([failure(0, error)]))
                await socket.close(code=WSCloseCode.PROTOCOL_ERROR)

    async def lifetime(self, _: web.Application) -> AsyncIterator[None]:
        """Tell sessions the clock and the owners for as long as the application runs."""
        task = asyncio.create_task(self._tell_changes())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _tell_changes(self) -> None:
        owners = tuple(self._shell.service.owners())
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
            found = tuple(self._shell.service.owners())
            if found != owners:
                owners = found
                self._tell(wire.Owners(owners))
            if self._now() >= clock_at:
                clock_at = self._now() + CLOCK_S
                self._tell(wire.ClockUpdate(self._shell.service.now_ms()))

    def _check_principals(self, *, changed: bool) -> None:
        """Cut off the sessions of principals that are gone or have expired, whose next try is told
        why, and give the others their present rights.

        Args:
            changed: False where only time has passed.
        """
        for session in tuple(self._open):
            if not (changed or session.principal.expires_s):
                continue
            try:
                principal = self._guard.known(session.credential)
                principal.check_role(WHO_WRITES)
                principal.check_group(session.group)
            except RequestError as error:
                session.cut_off(str(error))
            else:
                session.principal = principal

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _tell(self, operation: wire.FromProxy) -> None:
        for session in tuple(self._open):
            session.send(operation)

    async def close_all(self, _: web.Application) -> None:
        """End all sessions: the proxy goes away, clients turn to others."""
        await asyncio.gather(*(session.finish(SHUTDOWN_S) for session in tuple(self._open)))
        # The writers get a turn for the last answers before the sockets close.
        await asyncio.sleep(0)
        await asyncio.gather(*(self._go_away(socket) for socket in tuple(self._sockets)))

    async def _go_away(self, socket: web.WebSocketResponse) -> None:
        with suppress(TimeoutError, ConnectionError, ClientConnectionResetError):
            async with asyncio.timeout(SHUTDOWN_S):
                await socket.close(code=WSCloseCode.GOING_AWAY)


def _hello(operations: Sequence[wire.Received]) -> wire.Hello:
    if not operations or not isinstance(operations[0], wire.Hello):
        raise ProtocolError("a session begins with a hello")
    hello = operations[0]
    if hello.version < 1:
        raise ProtocolError(f"there is no session version {hello.version}")
    try:
        check_group_name(hello.group)
        check_group_name(hello.instance)
    except PolicyError as error:
        raise ProtocolError(f"hello: {error}".replace("group's name", "name")) from None
    return hello
