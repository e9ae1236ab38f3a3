"""One SDK session: operations in, answers out, many of either per frame.

All answers of one event loop iteration leave in one frame, because the writer wakes in the next;
the last answer in flight leaves at once. Every queue of a session is bounded; a client that does
not read its answers is disconnected.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from aiohttp import ClientConnectionError, WSMsgType, web

from txbroker import tracing
from txbroker.contract import frames as wire
from txbroker.contract import service as contract
from txbroker.core.records import Decision, Source
from txbroker.error_text import raised_at, safe_repr
from txbroker.errors import BadRequest, Overloaded, RequestError
from txbroker.principals import ANYBODY, Principal
from txbroker.proxy.cluster.forwarding import CALLER
from txbroker.proxy.http.context import ApiContext
from txbroker.proxy.http.endpoints import INTERNAL_ERROR, known_error
from txbroker.proxy.http.guards import PRINCIPAL, credential_of
from txbroker.proxy.http.limits import (
    OPERATION_BYTES,
    ByteBudget,
    check_id,
    check_reason,
    message_bytes,
)
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.observe.tracing import traced_alone

log = get_logger(__name__)

ANSWER_BYTES = 256
"""Memory of an unread answer, about."""


class ProtocolError(Exception):
    """The client violated the protocol: the session ends."""


class _FrameCalls:
    """The operations of one kind in a frame that are within bounds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[int] = []
        self.requests: list[Any] = []
        self.sizes: list[int] = []

    def add(self, call: int, request: Any, size: int) -> None:
        """Append an operation."""
        self.calls.append(call)
        self.requests.append(request)
        self.sizes.append(size)


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
        self._service = context.service
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
        self._every_topic = principal.topics.everything

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
        prepares, decides, checks = map(_FrameCalls, ("prepare", "decide", "check"))
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
                raise ProtocolError("a second hello: send one hello per session")
        for frame_calls in (prepares, decides, checks):
            if frame_calls.requests:
                self._start(frame_calls)

    def _in_bounds(self, answer: wire.CheckAnswer) -> wire.CheckAnswer:
        """Return a check's answer; unknown if its messages would be refused in a decision."""
        try:
            self._limits.check_messages(answer.messages or ())
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
            frame_calls.add(operation.call, request, OPERATION_BYTES + size)

    def _start(self, frame_calls: _FrameCalls) -> None:
        """Start the operations of one kind of a frame that fit into the byte budgets."""
        reserved = self._reserved(frame_calls)
        for run in self._runs(reserved):
            self._begun = number = self._begun + 1
            self._tasks[number] = self._loop.create_task(self._carry_out(number, reserved, run))

    def _runs(self, frame_calls: _FrameCalls) -> Sequence[contract.Run]:
        requests = frame_calls.requests
        if frame_calls.name == "check":
            return [contract.Run((n,), self._ask_early(asked)) for n, asked in enumerate(requests)]
        if tracing.active:
            return [
                contract.Run((n,), traced_alone(self._service, request))
                for n, request in enumerate(requests)
            ]
        return self._service.runs(requests)

    def _reserved(self, frame_calls: _FrameCalls) -> _FrameCalls:
        """Reserve the bytes of operations; return those that fit, and answer the others.

        An operation that does not fit blocks no later one that does.
        """
        prepare = frame_calls.name == "prepare"
        if self._reserve_bytes(sum(frame_calls.sizes), prepare=prepare) is None:
            return frame_calls
        taken = _FrameCalls(frame_calls.name)
        entries = zip(frame_calls.calls, frame_calls.requests, frame_calls.sizes, strict=True)
        for call, request, size in entries:
            why = self._reserve_bytes(size, prepare=prepare)
            if why is None:
                taken.add(call, request, size)
            else:
                self._fail((call,), Overloaded(f"{why}: retry later"), frame_calls.name)
        return taken

    def _reserve_bytes(self, size: int, *, prepare: bool) -> str | None:
        """Reserve bytes; return the reason if they do not fit."""
        if not self._in_flight.reserve(size, prepare=prepare):
            return "too many bytes of this session are in flight"
        if not self._limits.in_flight.reserve(size, prepare=prepare, who=self._who):
            self._in_flight.release(size, prepare=prepare)
            return "too many bytes are in flight, of this principal or of all callers"
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
        started, calls = time.monotonic(), frame_calls.calls
        try:
            answers = await run.answers
            done: list[wire.FromProxy] = []
            failed: list[tuple[int, RequestError]] = []
            for place, answer in zip(run.numbers, answers, strict=True):
                if isinstance(answer, RequestError):
                    failed.append((calls[place], answer))
                else:
                    done.append(wire.Status(calls[place], answer.id, answer.state, answer.decision))
            if frame_calls.name == "decide" and done:
                self._context.metrics.decisions_took(time.monotonic() - started, len(done))
            self._queue(done, ANSWER_BYTES * len(done))
            for call, error in failed:
                self._fail((call,), error, frame_calls.name)
        except Exception as error:
            self._fail([calls[place] for place in run.numbers], error, frame_calls.name)
        finally:
            del self._tasks[number]
            size = sum([frame_calls.sizes[place] for place in run.numbers])
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
            order_key=operation.order_key,
            check_after_s=operation.check_after_s,
            check_interval_s=operation.check_interval_s,
            instance=self.instance,
        )
        size = self._limits.check_prepare(request)
        if not self._every_topic:
            self.principal.check_topics(message.topic for message in request.messages)
        return request, size

    def _decide(self, operation: wire.Decide) -> tuple[contract.DecideRequest, int]:
        if operation.decision is Decision.UNKNOWN:
            raise BadRequest("unknown is no decision: request an early check instead")
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
        return request, self._limits.check_decide(request)

    async def _ask_early(self, operation: wire.AskEarly) -> Sequence[contract.Answer]:
        return (
            await self._service.check(
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
        raise ProtocolError("a text frame: send binary frames (msgpack)")
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
        raise ProtocolError(f"cannot decode the frame: {str(error)[:200]}") from None
