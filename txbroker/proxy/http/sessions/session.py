"""One SDK session: operations in, answers out, many of either in a frame.

Whatever is answered during one turn of the event loop goes back in one frame, because the writer
wakes up only in the next; an answer behind which nothing else is carried out leaves at once. Every
queue of a session is bounded; a client that does not read its
answers is cut off.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from aiohttp import ClientConnectionError, WSMsgType, web

from txbroker import tracing
from txbroker.contract import frames as wire
from txbroker.contract import service as contract
from txbroker.core.records import Decision, Source
from txbroker.core.telling import safe_repr, where_raised
from txbroker.errors import (
    BadRequest,
    KafkaDown,
    KafkaUnavailable,
    Overloaded,
    RequestError,
)
from txbroker.principals import ANYBODY, Principal
from txbroker.proxy.cluster.forwarding import CALLER
from txbroker.proxy.http.context import (
    OPERATION_BYTES,
    ApiContext,
    ByteBudget,
    check_id,
    check_reason,
    message_bytes,
)
from txbroker.proxy.http.guards import PRINCIPAL, credential_of
from txbroker.proxy.observe.logging import get_logger
from txbroker.proxy.observe.tracing import traced_alone

log = get_logger(__name__)

ANSWER_BYTES = 256
"""What an answer that waits to be read takes in memory, about."""


class ProtocolError(Exception):
    """The producer sent what the protocol does not know: the session ends."""


class _Part:
    """The operations of one kind in a frame, as far as they are in bounds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[int] = []
        self.requests: list[Any] = []
        self.sizes: list[int] = []

    def add(self, call: int, request: Any, size: int) -> None:
        """Put one behind the others."""
        self.calls.append(call)
        self.requests.append(request)
        self.sizes.append(size)


class SdkSession:
    """One SDK session: a `CheckableSession` of the registry."""

    def __init__(
        self,
        shell: ApiContext,
        socket: web.WebSocketResponse,
        request: web.Request,
        hello: wire.Hello,
    ) -> None:
        self.credential = credential_of(request)
        self._shell = shell
        self._service = shell.service
        self._settings = shell.settings
        self._socket = socket
        self._request = request
        self._outbox: list[wire.FromProxy] = []
        self._wake = asyncio.Event()
        self._sending = False
        self._unread = 0
        self._unread_bytes = 0
        # What the checks take that wait to be read, by their calls.
        self._check_bytes: dict[int, int] = {}
        self._in_flight = ByteBudget(shell.settings.session_in_flight_bytes_max)
        # By the number of the operation: a done callback would cost another turn of the loop.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # Fixed, so that bytes are released as they were reserved when the principals file changes.
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
        """Who may do what here, as of now."""
        return self._principal

    @principal.setter
    def principal(self, principal: Principal) -> None:
        self._principal = principal
        self._by = principal.by(self.instance)
        self._every_topic = principal.topics.everything

    @property
    def principal_name(self) -> str:
        """Whose credential it came with, "" where none was asked for."""
        return self.principal.name

    # --- out ---

    def send(self, *operations: wire.FromProxy) -> bool:
        """Hand operations to the writer; False where the session is closed."""
        size = ANSWER_BYTES * len(operations)
        for operation in operations:
            if type(operation) is wire.Failure:
                size += len(operation.message)
        return self._hand_over(operations, size)

    def send_check(self, check: wire.CheckQuestion) -> bool:
        """Hand a check to the writer; False where it cannot be sent."""
        size = OPERATION_BYTES + sum(map(message_bytes, check.messages))
        # Nobody's fault where a session has much to read: somebody else is asked.
        if self._unread_bytes + size > self._settings.session_in_flight_bytes_max:
            return False
        if self.closed or not self._shell.outgoing.reserve(size, prepare=False):
            return False
        self._check_bytes[check.call] = size
        return self._hand_over((check,), size)

    def _hand_over(self, operations: Sequence[wire.FromProxy], size: int) -> bool:
        taken = self._put(operations, size)
        self._wake.set()
        return taken

    def _put(self, operations: Sequence[wire.FromProxy], size: int) -> bool:
        """Put operations into the outbox; False where the session is closed."""
        if self.closed:
            return False
        if (
            self._unread + len(operations) > self._settings.session_answers_max
            or self._unread_bytes + size > self._settings.session_in_flight_bytes_max
        ):
            self.cut_off("it does not read its answers")
            return False
        self._unread += len(operations)
        self._unread_bytes += size
        self._outbox += operations
        return True

    async def write(self) -> None:
        """Send what is handed over until the session ends."""
        while not self.closed:
            await self._wake.wait()
            self._wake.clear()
            await self._flush()

    async def _flush(self) -> None:
        """Send what is in the outbox, unless somebody does."""
        if self._sending:
            return
        self._sending = True
        try:
            while self._outbox and not self.closed:
                operations, self._outbox = self._outbox, []
                for part in self._parts(operations):
                    async with asyncio.timeout(self._settings.request_timeout_s):
                        await self._socket.send_bytes(wire.encode_frame(part))
                    self._was_read(part)
        except TimeoutError:
            self.cut_off("it does not read its answers")
        except (ClientConnectionError, ConnectionError):
            self.closed = True
        finally:
            self._sending = False

    def _parts(self, operations: list[wire.FromProxy]) -> Iterator[list[wire.FromProxy]]:
        """Share operations out over frames: so many, and of checks, which are large, so few, that
        the client works on the first ones while others are on their way."""
        begun: list[wire.FromProxy] = []
        size = 0
        for operation in operations:
            if type(operation) is wire.CheckQuestion:
                check_bytes = self._check_bytes.get(operation.call, 0)
                if begun and size + check_bytes > self._settings.frame_bytes_max // 2:
                    yield begun
                    begun, size = [], 0
                size += check_bytes
            begun.append(operation)
            if len(begun) == wire.FRAME_OPERATIONS_MAX:
                yield begun
                begun, size = [], 0
        if begun:
            yield begun

    def _was_read(self, operations: list[wire.FromProxy]) -> None:
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
        self._shell.outgoing.release(checks, prepare=False)

    def let_go(self) -> None:
        """Free what waited to be read: nobody will."""
        self.closed = True
        self._outbox.clear()
        self._shell.outgoing.release(sum(self._check_bytes.values()), prepare=False)
        self._check_bytes.clear()

    def cut_off(self, why: str) -> None:
        """Drop the connection at once, with whatever was to be sent."""
        if self.closed:
            return
        self.let_go()
        log.warning("session cut off", group=self.group, instance=self.instance, why=why)
        transport = self._request.transport
        if transport is not None:
            transport.abort()

    # --- in ---

    async def read(self, first: Sequence[wire.Received]) -> None:
        """Take frames until the connection ends, and before them these operations.

        Raises:
            ProtocolError: a frame does not read, or one of its operations has no place here.
        """
        self.take(first)
        # One that was cut off may have frames left that were received before.
        while (frame := await receive(self._socket)) is not None and not self.closed:
            self.take(decoded(frame))
            # Frames that are here already are taken without a pause: what this one has begun gets
            # on its way to Kafka first.
            await asyncio.sleep(0)

    def take(self, operations: Sequence[wire.Received]) -> None:
        """Start the operations of a frame.

        Raises:
            ProtocolError: one of them has no place here.
        """
        prepares = _Part("prepare")
        decides = _Part("decide")
        for operation in operations:
            kind = type(operation)
            if kind is wire.Prepare:
                self._check(prepares, operation, self._prepare)
            elif kind is wire.Decide:
                self._check(decides, operation, self._decide)
            elif isinstance(operation, wire.CheckAnswer):
                answer = operation if operation.messages is None else self._in_bounds(operation)
                self._shell.sessions.answer(self.group, self, answer)
            elif isinstance(operation, wire.AskEarly):
                self._begin_one(operation)
            elif kind is wire.Drain:
                self.draining = True
            elif isinstance(operation, wire.UnreadableCall):
                self._fail((operation.call,), BadRequest(operation.why), "operation")
            else:
                raise ProtocolError("a session has only one hello")
        for part in (prepares, decides):
            if part.requests:
                self._begin(part)

    def _in_bounds(self, answer: wire.CheckAnswer) -> wire.CheckAnswer:
        """Return a check's answer; unknown where its messages would not be taken in a decision."""
        try:
            self._shell.check_messages(answer.messages or ())
        except RequestError as error:
            return wire.CheckAnswer(answer.call, Decision.UNKNOWN, detail=str(error))
        return answer

    def _check(self, part: "_Part", operation: Any, check: Any) -> None:
        """Add an operation to those of its frame, or answer it at once where it is refused."""
        try:
            request, size = check(operation)
        except RequestError as error:
            self._fail((operation.call,), error, part.name)
        else:
            part.add(operation.call, request, OPERATION_BYTES + size)

    def _begin(self, part: "_Part") -> None:
        """Begin the operations of one kind of a frame, as many as there is room for."""
        part = self._reserved(part)
        for run in self._runs(part.requests):
            self._begun = number = self._begun + 1
            self._tasks[number] = self._loop.create_task(self._carry_out(number, part, run))

    def _runs(self, requests: list[Any]) -> Sequence[contract.Run]:
        if not tracing.active:
            return self._service.runs(requests)
        return [
            contract.Run((number,), traced_alone(self._service, request))
            for number, request in enumerate(requests)
        ]

    def _reserved(self, part: "_Part") -> "_Part":
        """Take the bytes of operations; return those that there is room for, and answer the others.

        One that does not fit keeps out none behind it that does.
        """
        prepare = part.name == "prepare"
        if self._reserve_bytes(sum(part.sizes), prepare=prepare) is None:
            return part
        taken = _Part(part.name)
        for call, request, size in zip(part.calls, part.requests, part.sizes, strict=True):
            why = self._reserve_bytes(size, prepare=prepare)
            if why is None:
                taken.add(call, request, size)
            else:
                error = Overloaded(f"{why}: send the same again a little later")
                self._fail((call,), error, part.name)
        return taken

    def _reserve_bytes(self, size: int, *, prepare: bool) -> str | None:
        """Take bytes; say why not where they do not fit."""
        shell = self._shell
        if not self._in_flight.reserve(size, prepare=prepare):
            return "too many bytes of this session are in flight"
        if not shell.in_flight.reserve(size, prepare=prepare, who=self._who):
            self._in_flight.release(size, prepare=prepare)
            return "too many bytes are in flight, of this principal or of all callers"
        return None

    def _release(self, size: int, *, prepare: bool) -> None:
        self._in_flight.release(size, prepare=prepare)
        self._shell.in_flight.release(size, prepare=prepare, who=self._who)

    def _fail(self, calls: Iterable[int], error: Exception, name: str) -> None:
        """Answer calls that were not carried out."""
        known = self._known(error)
        if isinstance(known, Overloaded):
            for _ in calls:
                self._shell.metrics.overloaded(name)
        self.send(*[failure(call, known) for call in calls])

    def _known(self, error: Exception) -> RequestError:
        """Return an error as the client gets to see it."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, KafkaUnavailable):
            return KafkaDown(str(error))
        log.error(
            "operation failed", group=self.group, error=safe_repr(error), where=where_raised(error)
        )
        return RequestError("something went wrong inside the proxy; its log says what")

    async def _carry_out(self, number: int, part: "_Part", run: contract.Run) -> None:
        """Carry a run out, and answer its operations in one go."""
        started, calls = time.monotonic(), part.calls
        try:
            answers = await run.answers
            told: list[wire.FromProxy] = []
            failed: list[tuple[int, RequestError]] = []
            for place, answer in zip(run.numbers, answers, strict=True):
                if isinstance(answer, RequestError):
                    failed.append((calls[place], answer))
                else:
                    told.append(wire.Status(calls[place], answer.id, answer.state, answer.decision))
            if part.name == "decide" and told:
                self._shell.metrics.decisions_took(time.monotonic() - started, len(told))
            self._put(told, ANSWER_BYTES * len(told))
            for call, error in failed:
                self._fail((call,), error, part.name)
        except Exception as error:
            self._fail([calls[place] for place in run.numbers], error, part.name)
        finally:
            del self._tasks[number]
            size = sum([part.sizes[place] for place in run.numbers])
            self._release(size, prepare=part.name == "prepare")
        if self._tasks:
            self._wake.set()
        else:
            await self._flush()  # nothing else can be answered in this round of the loop

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
        size = self._shell.check_prepare(request)
        if not self._every_topic:
            self.principal.check_topics(message.topic for message in request.messages)
        return request, size

    def _decide(self, operation: wire.Decide) -> tuple[contract.DecideRequest, int]:
        if operation.decision is Decision.UNKNOWN:
            raise BadRequest("unknown is no decision: ask for an early check instead")
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
        return request, self._shell.check_decide(request)

    def _begin_one(self, operation: wire.AskEarly) -> None:
        why = self._reserve_bytes(OPERATION_BYTES, prepare=False)
        if why is not None:
            error = Overloaded(f"{why}: send the same again a little later")
            self._fail((operation.call,), error, "check")
            return
        self._begun = number = self._begun + 1
        self._tasks[number] = self._loop.create_task(self._ask_early(number, operation))

    async def _ask_early(self, number: int, operation: wire.AskEarly) -> None:
        call = operation.call
        try:
            check_id(operation.id)
            check_reason(operation.reason)
            standing = await self._service.check(
                operation.id, group=self.group, by=self._by, reason=operation.reason
            )
            self.send(wire.Status(call, standing.id, standing.state, standing.decision))
        except Exception as error:
            self._fail((call,), error, "check")
        finally:
            del self._tasks[number]
            self._release(OPERATION_BYTES, prepare=False)

    async def finish(self, timeout_s: float) -> None:
        """Let operations under way end; after `timeout_s` they are given up."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks.values(), timeout=timeout_s)
            for task in late:
                task.cancel()


def failure(call: int, error: RequestError) -> wire.Failure:
    """Return an error as it travels."""
    details = {name: str(value) for name, value in error.details.items()}
    return wire.Failure(call, error.code, str(error), details)


async def receive(socket: web.WebSocketResponse) -> bytes | None:
    """Return the next frame, None where the connection has ended.

    Raises:
        ProtocolError: it is text.
    """
    message = await socket.receive()
    if message.type is WSMsgType.BINARY:
        frame: bytes = message.data
        return frame
    if message.type is WSMsgType.TEXT:
        raise ProtocolError("frames are binary (msgpack), not text")
    return None


def decoded(frame: bytes) -> Sequence[wire.Received]:
    """Return the operations of a frame.

    Raises:
        ProtocolError: it does not read.
    """
    try:
        return wire.decode_from_producer(frame)
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    try:
        return wire.decode_each(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the frame does not read: {str(error)[:200]}") from None
