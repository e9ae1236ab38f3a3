"""Admission: what makes a call of a transaction admissible, once for every front.

A front decodes calls and encodes answers. `Admission` checks the rights of the caller (its role is
checked when the call or the session begins) and the bounds of every field, and carries the call
out: `submit` one at a time, with others of the same event loop iteration, `admit` and `runs` those
of a frame.
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from txbroker import tracing
from txbroker.config.settings import PREPARES_SHARE, RECEIVING_SHARE, Settings
from txbroker.contract.json import TARGET_PARTITION_MAX, TIMESTAMP_MS_MAX
from txbroker.contract.policy import (
    ATTEMPTS_MAX,
    TIMEOUT_S_MAX,
    TIMEOUT_S_MIN,
    PolicyError,
    check_group_name,
)
from txbroker.contract.service import (
    SECONDS_MAX,
    TEXT_MAX,
    Answer,
    DecideRequest,
    PrepareRequest,
    Request,
    Run,
    Service,
    SubmitRequest,
    TransactionStatus,
)
from txbroker.core.records import ATTRIBUTES, Decision, Message, attribute_values
from txbroker.core.routing import ALPHABET, LENGTH, parse_id
from txbroker.core.settled import ShareUse, share_max
from txbroker.errors import BadId, BadRequest, RequestError, TooLarge
from txbroker.principals import Principal
from txbroker.proxy.cluster.forwarding import CALLER
from txbroker.proxy.observe.metrics import Metrics
from txbroker.proxy.observe.tracing import traced_alone
from txbroker.tracing import TraceContext

T = TypeVar("T")

NAMES_KNOWN_MAX = 1024
"""Names of groups whose check is cached."""
IN_FLIGHT_FULL = "too many bytes are in flight, of this principal or of all callers: retry later"
"""The refusal of a call that does not fit into `Budgets.in_flight`."""
RECORD_BYTES = 64
"""Memory of a message besides its content, so that empty messages are not free."""
OPERATION_BYTES = 2048
"""Memory of an operation besides its messages (task and objects), so that a flood of tiny
operations is bounded too."""
_CHECK_RANGES = (
    ("check_after_s", 0, SECONDS_MAX),
    ("check_interval_s", 0, SECONDS_MAX),
    ("check_attempts_max", 1, ATTEMPTS_MAX),
    ("check_timeout_s", TIMEOUT_S_MIN, TIMEOUT_S_MAX),
)
# 26 characters of 5 bits are 130 bits, an id has 128: so the first one is at most 7.
_ID = re.compile(f"[0-7][{ALPHABET}]{{{LENGTH - 1}}}")


class ByteBudget:
    """Bounds the bytes of operations in flight; keeps a part free of prepares.

    Decisions and checks end what prepares began, so stuck prepares must not block them: prepares
    take at most `PREPARES_SHARE`, other operations may take all. One principal takes at most its
    part of either.
    """

    def __init__(self, bytes_max: int) -> None:
        self._all, self._prepares = ShareUse(), ShareUse()
        pools = (self._all, bytes_max), (self._prepares, int(bytes_max * PREPARES_SHARE))
        self._pools = tuple((use, most, share_max(most)) for use, most in pools)

    @property
    def bytes(self) -> int:
        """Bytes reserved now."""
        return self._all.total

    def reserve(self, size: int, *, prepare: bool, who: str = "") -> bool:
        """Reserve `size` bytes; return False, and reserve nothing, if they do not fit.

        Args:
            who: the principal to charge, "" for none.
        """
        pools = self._pools[: 1 + prepare]
        for use, most, part in pools:
            if use.total + size > most or (who and use.of(who) + size > part):
                return False
        for use, _, _ in pools:
            use.add(who, size)
        return True

    def release(self, size: int, *, prepare: bool, who: str = "") -> None:
        """Return reserved bytes."""
        for use, _, _ in self._pools[: 1 + prepare]:
            use.add(who, -size)


class FrameBudget:
    """Bounds the bytes of incoming frames over all sessions; frames that do not fit queue."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[Callable[[int], None], int]] = deque()
        self.bytes = 0

    def take(self, admitted: Callable[[int], None], size: int) -> bool:
        """Reserve `size` bytes; return False if they must wait: `admitted` is called later."""
        if self._waiting or not self._fits(size):
            self._waiting.append((admitted, size))
            return False
        self.bytes += size
        return True

    def release(self, size: int) -> None:
        """Return reserved bytes."""
        self.bytes -= size
        self._admit()

    def forget(self, admitted: Callable[[int], None]) -> None:
        """Drop a closed connection from the queue."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != admitted)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            admitted, size = self._waiting.popleft()
            self.bytes += size
            admitted(size)

    def _fits(self, size: int) -> bool:
        # A frame above the whole budget is admitted alone, so that none waits forever.
        return self.bytes == 0 or self.bytes + size <= self._bytes_max


class Budgets:
    """The byte budgets of one proxy.

    Attributes:
        settings: those of the proxy.
        in_flight: operations of all callers.
        outgoing: check-backs that clients have not read yet, all sessions together. Separate from
            `in_flight`, so that sessions that do not read block no calls.
        receiving: incoming frames of sessions.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.in_flight = ByteBudget(settings.in_flight_bytes_max)
        self.outgoing = ByteBudget(settings.in_flight_bytes_max)
        self.receiving = FrameBudget(int(settings.in_flight_bytes_max * RECEIVING_SHARE))


# --- batches of single calls -----------------------------------------------------------------


class _PendingCall(NamedTuple):
    """A call of a batch. `convert` makes its result from the transaction's status."""

    result: "asyncio.Future[Any]"
    convert: Callable[[TransactionStatus], Any]


class _CallBatch(NamedTuple):
    """Calls that are run together; `began_s`: when the first one arrived."""

    requests: list[Request]
    pending: list[_PendingCall]
    began_s: float


class CallBatcher:
    """Runs the operations that arrive in one iteration of the event loop together.

    One iteration reads from many connections. Its calls for one group become runs, as the
    operations of a session's frame do, so that one append holds as many of them as fit.

    Args:
        runs: starts requests, which began at a time of the monotonic clock, seconds.
    """

    def __init__(self, runs: Callable[[Sequence[Request], float], Sequence[Run]]) -> None:
        self._runs = runs
        # By the type of request, the group, and the principal to charge, also by another proxy to
        # which the batch may be forwarded.
        self._batches: dict[tuple[type[Request], str, str], _CallBatch] = {}
        # The loop itself holds tasks weakly.
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(
        self, request: Request, convert: Callable[[TransactionStatus], T]
    ) -> "asyncio.Future[T]":
        """Run a call in the next iteration; return the future of its converted status, or of the
        `RequestError` or other exception it failed with."""
        loop = asyncio.get_running_loop()
        key = (type(request), request.group, CALLER.get())
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = _CallBatch([], [], time.monotonic())
            loop.call_soon(self._start, key)  # keeps the context, so the caller
        result: asyncio.Future[T] = loop.create_future()
        batch.requests.append(request)
        batch.pending.append(_PendingCall(result, convert))
        return result

    def _start(self, key: tuple[type[Request], str, str]) -> None:
        requests, pending, began_s = self._batches.pop(key)
        try:
            runs = self._runs(requests, began_s)
        except Exception as error:
            _fail(pending, error)
            return
        loop = asyncio.get_running_loop()
        for run in runs:
            task = loop.create_task(_finish(run, [pending[number] for number in run.numbers]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _finish(run: Run, pending: Sequence[_PendingCall]) -> None:
    try:
        for (result, convert), answer in zip(pending, await run.answers, strict=True):
            if result.done():
                continue  # its client has gone
            if isinstance(answer, RequestError):
                result.set_exception(answer)
            else:
                result.set_result(convert(answer))
    except Exception as error:
        _fail(pending, error)
    finally:
        for result, _ in pending:
            result.cancel()  # only those without a result: this task was cancelled


def _fail(pending: Sequence[_PendingCall], error: Exception) -> None:
    for result, _ in pending:
        if not result.done():
            result.set_exception(error)


# --- admission -------------------------------------------------------------------------------


class Admission:
    """Admits the calls of transactions and carries them out at one service.

    Args:
        service: carries the calls out.
        metrics: get the latency of calls that succeed.
    """

    def __init__(self, service: Service, settings: Settings, metrics: Metrics) -> None:
        self._service = service
        self._settings = settings
        self._prepare_latency = metrics.prepare_latency
        self._decision_latency = metrics.decision_latency
        self._batcher = CallBatcher(self.runs)

    def submit(
        self,
        principal: Principal,
        request: Request,
        convert: Callable[[TransactionStatus], T],
        trace: TraceContext | None = None,
    ) -> Awaitable[T]:
        """Admit a call and carry it out; return its converted status, to be awaited: a future, or
        a coroutine if it waits more than once.

        Args:
            trace: the caller's context, for messages without one.

        Raises:
            RequestError: as `admit`. Other errors are raised where the result is awaited.
        """
        self.admit(principal, request)
        if isinstance(request, DecideRequest):
            if not (request.group or principal.groups.everything):
                return self._decide_own(principal, request, convert)
        elif tracing.is_on():
            return self._submit_in_span(request, convert, trace)
        return self._batcher.submit(request, convert)

    async def _decide_own(
        self,
        principal: Principal,
        request: DecideRequest,
        convert: Callable[[TransactionStatus], T],
    ) -> T:
        await self.check_own(principal, request.id)
        return await self._batcher.submit(request, convert)

    async def _submit_in_span(
        self,
        request: PrepareRequest | SubmitRequest,
        convert: Callable[[TransactionStatus], T],
        trace: TraceContext | None,
    ) -> T:
        answers = traced_alone(self._service, request, trace)
        [answer] = await self._time_run(answers, request, time.monotonic())
        if isinstance(answer, RequestError):
            raise answer
        return convert(answer)

    def runs(self, requests: Sequence[Request], began_s: float) -> Sequence[Run]:
        """Start admitted requests of one kind and group, which began at a time of the monotonic
        clock, seconds."""
        if tracing.active:
            runs: Sequence[Run] = [
                Run((n,), traced_alone(self._service, request))
                for n, request in enumerate(requests)
            ]
        else:
            runs = self._service.runs(requests)
        return [
            Run(numbers, self._time_run(answers, requests[0], began_s)) for numbers, answers in runs
        ]

    async def _time_run(
        self, answers: Awaitable[Sequence[Answer]], request: Request, began_s: float
    ) -> Sequence[Answer]:
        """Return the answers of a run of such requests, and count the time of those that
        succeed."""
        found = await answers
        done = sum([not isinstance(answer, RequestError) for answer in found])
        if done:
            prepares = isinstance(request, PrepareRequest)
            latency = self._prepare_latency if prepares else self._decision_latency
            latency.add(time.monotonic() - began_s, done)
        return found

    async def check_own(self, principal: Principal, id: str) -> None:
        """Refuse a transaction of another principal's group. A transaction never changes its group,
        so the result still holds for the call that follows."""
        if not principal.groups.everything:
            view = await self._service.find(id, brief=True)
            principal.check_own(view.group)

    def admit(self, principal: Principal, request: Request) -> int:
        """Return the memory that the messages of a request take, bytes.

        A decision without a group may be about any transaction: `submit` checks whose it is.

        Raises:
            NotPermitted: the caller may not act for its group, or write one of its topics.
            BadId, BadRequest, TooLarge: a field is out of bounds.
        """
        if isinstance(request, SubmitRequest):
            _check_decision(request)
            request = request.prepare
        id, group = request.id, request.group
        if id is not None and not _ID.fullmatch(id):
            check_id(id)
        if group or not isinstance(request, DecideRequest):
            check_group(group)
            if not principal.groups.allows(group):
                principal.check_group(group)
        if isinstance(request, DecideRequest):
            _check_decision(request)
            return 0 if request.messages is None else self.check_messages(request.messages)
        if not principal.topics.everything:
            principal.check_topics(message.topic for message in request.messages)
        if not request.messages:
            raise BadRequest(
                "messages is empty: send a transaction with at least one message", path="messages"
            )
        for name, least, most in _CHECK_RANGES:
            value = getattr(request, name)
            if value is not None:
                _check_range(name, value, least, most)
        for name, text in zip(ATTRIBUTES, attribute_values(request), strict=True):
            if text is not None and not 1 <= len(text) <= TEXT_MAX:
                raise BadRequest(f"{name} must have 1 to {TEXT_MAX} characters", path=name)
        return self.check_messages(request.messages)

    def check_messages(self, messages: Sequence[Message]) -> int:
        """Refuse messages that are malformed, too large or too many; return their memory, bytes."""
        settings = self._settings
        if len(messages) > settings.messages_per_transaction_max:
            raise TooLarge(
                f"the transaction has {len(messages)} messages, more than "
                f"{settings.messages_per_transaction_max} (messages_per_transaction_max): "
                "split it"
            )
        total = 0
        for number, message in enumerate(messages):
            size = message_bytes(message)
            if size > settings.message_bytes_max:
                raise TooLarge(
                    f"messages[{number}] has {size} bytes, more than {settings.message_bytes_max} "
                    "(message_bytes_max): send a smaller message",
                    path=f"messages[{number}]",
                )
            total += size
            if (
                not message.topic
                or message.partition is not None
                or message.timestamp_ms is not None
            ):
                _check_message(message, number)
        if total > settings.transaction_bytes_max:
            raise TooLarge(
                f"the transaction has {total} bytes, more than {settings.transaction_bytes_max} "
                "(transaction_bytes_max): split it"
            )
        return total


def message_bytes(message: Message) -> int:
    """Return about how many bytes a message takes in memory and in the log."""
    size = RECORD_BYTES + len(message.key or b"") + len(message.value or b"")
    for name, value in message.headers:
        size += len(name) + len(value or b"")
    return size


def _check_decision(request: DecideRequest | SubmitRequest) -> None:
    if request.decision is Decision.UNKNOWN:
        raise BadRequest("unknown is no decision: request an early check instead")
    if request.reason:
        check_reason(request.reason)


def _check_message(message: Message, number: int) -> None:
    place = f"messages[{number}]."
    if not message.topic:
        raise BadRequest("a message has no topic: name its target topic", path=f"{place}topic")
    if message.partition is not None:
        _check_range("partition", message.partition, 0, TARGET_PARTITION_MAX, place)
    if message.timestamp_ms is not None:
        _check_range("timestamp_ms", message.timestamp_ms, 0, TIMESTAMP_MS_MAX, place)


def _check_range(name: str, value: float, least: float, most: float, place: str = "") -> None:
    if not least <= value <= most:
        unit = " seconds" if name.endswith("_s") else ""
        raise BadRequest(
            f"{name} must be from {least:.16g} to {most:.16g}{unit}", path=place + name
        )


def check_id(id: str) -> None:
    """Refuse a transaction id that is malformed or not in upper case."""
    # The pattern takes a tenth of the time of `parse_id`, which only words the error.
    if _ID.fullmatch(id):
        return
    try:
        parse_id(id)
    except ValueError as error:
        raise BadId(str(error)) from None


def plain_id(text: str) -> str:
    """Return a transaction id in upper case; refuse a text that is no id."""
    # Only ASCII: upper case turns some other letters into several, or into ASCII ones.
    id = text.upper() if text.isascii() else text
    check_id(id)
    return id


@lru_cache(maxsize=NAMES_KNOWN_MAX)
def check_group(group: str) -> None:
    """Refuse a malformed group name."""
    try:
        check_group_name(group)
    except PolicyError as error:
        raise BadRequest(str(error), path="group") from None


def check_reason(reason: str) -> None:
    """Refuse a reason too long for a marker or a line of a listing."""
    if len(reason) > TEXT_MAX:
        raise BadRequest(f"reason has at most {TEXT_MAX} characters: shorten it", path="reason")
