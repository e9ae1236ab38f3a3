"""SDK sessions: WebSockets that carry many operations a frame.

A session has two tasks: one reads frames and starts operations, one writes answers. All answers of
one event loop iteration leave in one frame, because the writer wakes in the next; the last answer
in flight leaves at once. Every queue of a session is bounded; a client that does not read its
answers is disconnected. An error in the protocol ends its session.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
from aiohttp import ClientConnectionError, ClientConnectionResetError, WSCloseCode, WSMsgType, web

from txbroker import tracing
from txbroker.contract import frames as wire
from txbroker.contract import service as contract
from txbroker.contract.policy import PolicyError, check_group_name
from txbroker.core.records import Decision, Source
from txbroker.core.settled import ShareUse, share_max
from txbroker.error_text import raised_at, safe_repr
from txbroker.errors import BadRequest, Overloaded, RequestError
from txbroker.principals import ANYBODY, WRITERS, Principal
from txbroker.proxy.admission import (
    IN_FLIGHT_FULL,
    OPERATION_BYTES,
    ByteBudget,
    check_id,
    check_reason,
    message_bytes,
)
from txbroker.proxy.cluster.forwarding import CALLER
from txbroker.proxy.http.context import ApiContext
from txbroker.proxy.http.endpoints import INTERNAL_ERROR, known_error
from txbroker.proxy.http.guards import PRINCIPAL, Guard, credential_of
from txbroker.proxy.observe.logging import get_logger, printable

CLIENT_CHARS_MAX = 100
"""Of the name and version of a client that an operator sees."""
log = get_logger(__name__)

CLOCK_S = 60.0
"""Interval at which sessions get the proxy's clock, seconds."""
OWNERS_POLL_S = 0.25
"""Interval at which owners are polled, for services that do not notify, seconds."""
SHUTDOWN_S = 3.0
"""Maximum time for operations in flight when the proxy stops, seconds."""
ANSWER_BYTES = 256
"""Memory of an unread answer, about."""


class _FrameCalls(NamedTuple):
    """The operations of one kind in a frame that are within bounds: number, request and bytes."""

    name: str
    entries: list[tuple[int, Any, int]]


class SdkSession:
    """One SDK session: a `CheckableSession` of the registry."""

    def __init__(
        self,
        context: ApiContext,
        socket: web.WebSocketResponse,
        request: web.Request,
        hello: wire.Hello,
    ) -> None:
        self.credential = credential_of(request)
        self._context = context
        self._limits = context.limits
        self._admission = context.admission
        self._settings = context.settings
        self._socket = socket
        self._request = request
        self._outbox: list[wire.FromProxy] = []
        self._wake = asyncio.Event()
        self._sending = False
        self._unread = 0
        self._unread_bytes = 0
        # The bytes of each unread check, by its call number.
        self._check_bytes: dict[int, int] = {}
        self._in_flight = ByteBudget(context.settings.session_in_flight_bytes_max)
        # By task number: a done callback would cost another iteration of the loop.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # Fixed, so that bytes are released as reserved if the principals file changes meanwhile.
        self._who = CALLER.get()
        self._begun = 0
        self._loop = asyncio.get_running_loop()
        self.group = hello.group
        self.instance = hello.instance
        self.address = request.remote or ""
        self.client = printable(request.headers.get("User-Agent", "")[:CLIENT_CHARS_MAX])
        self.checks = hello.checks
        self.draining = False
        self.closed = False
        self.principal = request.get(PRINCIPAL, ANYBODY)

    @property
    def principal(self) -> Principal:
        """The client's principal with its current rights."""
        return self._principal

    @principal.setter
    def principal(self, principal: Principal) -> None:
        self._principal = principal
        self._by = principal.by(self.instance)

    @property
    def principal_name(self) -> str:
        """The principal's name, "" if no credential was required."""
        return self.principal.name

    # --- out ---

    def send(self, *operations: wire.FromProxy) -> bool:
        """Queue operations for the writer; return False if the session is closed."""
        size = ANSWER_BYTES * len(operations)
        for operation in operations:
            if type(operation) is wire.Failure:
                size += len(operation.message)
        return self._queue_and_wake(operations, size)

    def send_check(self, check: wire.CheckQuestion) -> bool:
        """Queue a check for the writer; return False if it cannot be sent."""
        size = OPERATION_BYTES + sum(map(message_bytes, check.messages))
        # A session with much to read is no error: the check goes to another session.
        if self._unread_bytes + size > self._settings.session_in_flight_bytes_max:
            return False
        if self.closed or not self._limits.outgoing.reserve(size, prepare=False):
            return False
        self._check_bytes[check.call] = size
        return self._queue_and_wake((check,), size)

    def _queue_and_wake(self, operations: Sequence[wire.FromProxy], size: int) -> bool:
        queued = self._queue(operations, size)
        self._wake.set()
        return queued

    def _queue(self, operations: Sequence[wire.FromProxy], size: int) -> bool:
        """Put operations into the outbox; return False if the session is closed."""
        if self.closed:
            return False
        if (
            self._unread + len(operations) > self._settings.session_answers_max
            or self._unread_bytes + size > self._settings.session_in_flight_bytes_max
        ):
            self.cut_off("the client does not read its answers")
            return False
        self._unread += len(operations)
        self._unread_bytes += size
        self._outbox += operations
        return True

    async def write(self) -> None:
        """Send queued operations until the session ends."""
        while not self.closed:
            await self._wake.wait()
            self._wake.clear()
            await self._flush()

    async def _flush(self) -> None:
        """Send the outbox, unless another task is sending it."""
        if self._sending:
            return
        self._sending = True
        try:
            while self._outbox and not self.closed:
                operations, self._outbox = self._outbox, []
                for frame in self._frames(operations):
                    async with asyncio.timeout(self._settings.request_timeout_s):
                        await self._socket.send_bytes(wire.encode_frame(frame))
                    self._count_read(frame)
        except TimeoutError:
            self.cut_off("the client does not read its answers")
        except (ClientConnectionError, ConnectionError):
            self.closed = True
        finally:
            self._sending = False

    def _frames(self, operations: list[wire.FromProxy]) -> Iterator[list[wire.FromProxy]]:
        """Split operations into frames, limited in number and in bytes of checks, so that the
        client works on the first while others are on their way."""
        frame: list[wire.FromProxy] = []
        size = 0
        for operation in operations:
            if type(operation) is wire.CheckQuestion:
                check_bytes = self._check_bytes.get(operation.call, 0)
                if frame and size + check_bytes > self._settings.frame_bytes_max // 2:
                    yield frame
                    frame, size = [], 0
                size += check_bytes
            frame.append(operation)
            if len(frame) == wire.FRAME_OPERATIONS_MAX:
                yield frame
                frame, size = [], 0
        if frame:
            yield frame

    def _count_read(self, operations: list[wire.FromProxy]) -> None:
        self._unread -= len(operations)
        checks = 0
        for operation in operations:
            size = ANSWER_BYTES
            if type(operation) is wire.Failure:
                size += len(operation.message)
            elif type(operation) is wire.CheckQuestion:
                size = self._check_bytes.pop(operation.call, 0)
                checks += size
            self._unread_bytes -= size
        self._limits.outgoing.release(checks, prepare=False)

    def release(self) -> None:
        """Close the session and free its unread operations."""
        self.closed = True
        self._outbox.clear()
        self._limits.outgoing.release(sum(self._check_bytes.values()), prepare=False)
        self._check_bytes.clear()

    def cut_off(self, why: str) -> None:
        """Abort the connection and discard unsent operations."""
        if self.closed:
            return
        self.release()
        log.warning("session cut off", group=self.group, instance=self.instance, why=why)
        transport = self._request.transport
        if transport is not None:
            transport.abort()

    # --- in ---

    async def read(self, first: Sequence[wire.Received]) -> None:
        """Take these operations, then frames until the connection ends."""
        self.take(first)
        # A session that was cut off may have frames left that had arrived before.
        while (frame := await receive(self._socket)) is not None and not self.closed:
            self.take(decoded(frame))
            # Frames that have arrived are read without a pause: first let the tasks of this one
            # send to Kafka.
            await asyncio.sleep(0)

    def take(self, operations: Sequence[wire.Received]) -> None:
        """Start the operations of a frame."""
        prepares, decides, checks = [
            _FrameCalls(name, []) for name in ("prepare", "decide", "check")
        ]
        for operation in operations:
            kind = type(operation)
            if kind is wire.Prepare:
                self._check(prepares, operation, self._prepare)
            elif kind is wire.Decide:
                self._check(decides, operation, self._decide)
            elif isinstance(operation, wire.CheckAnswer):
                answer = operation if operation.messages is None else self._in_bounds(operation)
                self._context.sessions.answer(self.group, self, answer)
            elif isinstance(operation, wire.AskEarly):
                self._check(checks, operation, _early_check)
            elif kind is wire.Drain:
                self.draining = True
            elif isinstance(operation, wire.UnreadableCall):
                self._fail((operation.call,), BadRequest(operation.why), "operation")
            else:
                raise BadRequest("a second hello: send one hello per session")
        for frame_calls in (checks, prepares, decides):
            if frame_calls.entries:
                self._start(frame_calls)

    def _in_bounds(self, answer: wire.CheckAnswer) -> wire.CheckAnswer:
        """Return a check's answer; unknown if its messages would be refused in a decision."""
        try:
            self._admission.check_messages(answer.messages or ())
        except RequestError as error:
            return wire.CheckAnswer(answer.call, Decision.UNKNOWN, detail=str(error))
        return answer

    def _check(
        self, frame_calls: _FrameCalls, operation: Any, check: Callable[[Any], tuple[Any, int]]
    ) -> None:
        """Add an operation to its frame's calls, or answer it at once if it is refused."""
        try:
            request, size = check(operation)
        except RequestError as error:
            self._fail((operation.call,), error, frame_calls.name)
        else:
            frame_calls.entries.append((operation.call, request, OPERATION_BYTES + size))

    def _start(self, frame_calls: _FrameCalls) -> None:
        """Start the operations of one kind of a frame that fit into the byte budgets."""
        reserved = self._reserved(frame_calls)
        for run in self._runs(reserved):
            self._begun = number = self._begun + 1
            self._tasks[number] = self._loop.create_task(self._carry_out(number, reserved, run))

    def _runs(self, frame_calls: _FrameCalls) -> Sequence[contract.Run]:
        requests = [request for _, request, _ in frame_calls.entries]
        if frame_calls.name == "check":
            return [contract.Run((n,), self._ask_early(asked)) for n, asked in enumerate(requests)]
        return self._admission.runs(requests, time.monotonic())

    def _reserved(self, frame_calls: _FrameCalls) -> _FrameCalls:
        """Reserve the bytes of operations; return those that fit, and answer the others.

        An operation that does not fit blocks no later one that does.
        """
        prepare = frame_calls.name == "prepare"
        total = sum([size for _, _, size in frame_calls.entries])
        if self._reserve_bytes(total, prepare=prepare) is None:
            return frame_calls
        taken = _FrameCalls(frame_calls.name, [])
        for call, request, size in frame_calls.entries:
            why = self._reserve_bytes(size, prepare=prepare)
            if why is None:
                taken.entries.append((call, request, size))
            else:
                self._fail((call,), Overloaded(why), frame_calls.name)
        return taken

    def _reserve_bytes(self, size: int, *, prepare: bool) -> str | None:
        """Reserve bytes; return the reason if they do not fit."""
        if not self._in_flight.reserve(size, prepare=prepare):
            return "too many bytes of this session are in flight: retry later"
        if not self._limits.in_flight.reserve(size, prepare=prepare, who=self._who):
            self._in_flight.release(size, prepare=prepare)
            return IN_FLIGHT_FULL
        return None

    def _release(self, size: int, *, prepare: bool) -> None:
        self._in_flight.release(size, prepare=prepare)
        self._limits.in_flight.release(size, prepare=prepare, who=self._who)

    def _fail(self, calls: Iterable[int], error: Exception, name: str) -> None:
        known = known_error(error)
        if known is None:
            log.error(
                "operation failed",
                group=self.group,
                error=safe_repr(error),
                where=raised_at(error),
            )
            known = RequestError(INTERNAL_ERROR)
        if isinstance(known, Overloaded):
            for _ in calls:
                self._context.metrics.overloaded(name)
        self.send(*[failure(call, known) for call in calls])

    async def _carry_out(self, number: int, frame_calls: _FrameCalls, run: contract.Run) -> None:
        entries = frame_calls.entries
        try:
            answers = await run.answers
            done: list[wire.FromProxy] = []
            failed: list[tuple[int, RequestError]] = []
            for place, answer in zip(run.numbers, answers, strict=True):
                if isinstance(answer, RequestError):
                    failed.append((entries[place][0], answer))
                else:
                    call = entries[place][0]
                    done.append(wire.Status(call, answer.id, answer.state, answer.decision))
            self._queue(done, ANSWER_BYTES * len(done))
            for call, error in failed:
                self._fail((call,), error, frame_calls.name)
        except Exception as error:
            self._fail([entries[place][0] for place in run.numbers], error, frame_calls.name)
        finally:
            del self._tasks[number]
            size = sum([entries[place][2] for place in run.numbers])
            self._release(size, prepare=frame_calls.name == "prepare")
        if self._tasks:
            self._wake.set()
        else:
            await self._flush()  # no other answer can come in this iteration of the loop

    def _prepare(self, operation: wire.Prepare) -> tuple[contract.PrepareRequest, int]:
        request = contract.PrepareRequest(
            group=self.group,
            messages=operation.messages,
            id=operation.id,
            instance=self.instance,
            **dict(zip(contract.OPTIONS, contract.option_values(operation), strict=True)),
        )
        return request, self._admission.admit(self._principal, request)

    def _decide(self, operation: wire.Decide) -> tuple[contract.DecideRequest, int]:
        request = contract.DecideRequest(
            id=operation.id,
            decision=operation.decision,
            group=self.group,
            messages=operation.messages,
            reason=operation.reason,
            source=Source.PRODUCER,
            by=self._by,
            wait=operation.wait,
        )
        return request, self._admission.admit(self._principal, request)

    async def _ask_early(self, operation: wire.AskEarly) -> Sequence[contract.Answer]:
        return (
            await self._context.service.check(
                operation.id, group=self.group, by=self._by, reason=operation.reason
            ),
        )

    async def finish(self, timeout_s: float) -> None:
        """Let operations in flight end; cancel them after `timeout_s`."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks.values(), timeout=timeout_s)
            for task in late:
                task.cancel()


def _early_check(operation: wire.AskEarly) -> tuple[wire.AskEarly, int]:
    check_id(operation.id)
    check_reason(operation.reason)
    return operation, 0


def failure(call: int, error: RequestError) -> wire.Failure:
    """Return an error as an operation."""
    details = {name: str(value) for name, value in error.details.items()}
    return wire.Failure(call, error.code, str(error), details)


async def receive(socket: web.WebSocketResponse) -> bytes | None:
    """Return the next frame, None if the connection has ended."""
    message = await socket.receive()
    if message.type is WSMsgType.BINARY:
        frame: bytes = message.data
        return frame
    if message.type is WSMsgType.TEXT:
        raise BadRequest("a text frame: send binary frames (msgpack)")
    return None


def decoded(frame: bytes) -> Sequence[wire.Received]:
    """Return the operations of a frame."""
    try:
        return wire.decode_from_producer(frame)
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    try:
        return wire.decode_each(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadRequest(f"cannot decode the frame: {str(error)[:200]}") from None


# --- the server ------------------------------------------------------------------------------


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
            raise BadRequest("no hello in time: send a hello first") from None
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
            dedup_keys=True,
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
        update the rights of the others. `changed` is False where only time has passed."""
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
            await asyncio.wait_for(socket.close(code=WSCloseCode.GOING_AWAY), SHUTDOWN_S)


def _hello(operations: Sequence[wire.Received]) -> wire.Hello:
    if not operations or not isinstance(operations[0], wire.Hello):
        raise BadRequest("the first operation is no hello: begin a session with a hello")
    hello = operations[0]
    if hello.version < 1:
        raise BadRequest(f"there is no session version {hello.version}: use 1 or higher")
    try:
        check_group_name(hello.group)
        check_group_name(hello.instance)
    except PolicyError as error:
        raise BadRequest(f"hello: {error}".replace("group's name", "name")) from None
    return hello
