"""One connection to one proxy: sends and receives frames, matches answers to calls.

Operations queued in one iteration of the event loop leave in one frame. A session never reconnects;
when it is lost, every waiting call fails with an error that states whether it had been sent.
"""

import asyncio
import contextlib
import errno
import logging
import math
import socket
from collections import deque
from collections.abc import Mapping
from typing import Protocol, TypeAlias

import msgspec
from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI

from txbroker.contract.frames import (
    CODE_HEADER,
    FRAME_BYTES_MAX,
    FRAME_OPERATIONS_MAX,
    AskEarly,
    CheckAnswer,
    CheckQuestion,
    ClockUpdate,
    Decide,
    Failure,
    FromProducer,
    FromProxy,
    Hello,
    Owners,
    Prepare,
    Status,
    Welcome,
    decode_from_proxy,
    encode_frame,
)
from txbroker.errors import (
    CertificateRequired,
    Forbidden,
    NotPermitted,
    RequestError,
    TooLarge,
    Unauthorized,
    request_errors,
)
from txbroker.net.tls import ClientTls, tls_trouble
from txbroker.sdk.connection import CLOSE_TIMEOUT_S, WebSocket, connect
from txbroker.sdk.types import Limits

_log = logging.getLogger("txbroker.sdk")

FRAME_OVERHEAD_BYTES = 6
"""An array's header, and one byte because proxies refuse frames of exactly the limit."""
OPERATION_BYTES_MAX = FRAME_BYTES_MAX - FRAME_OVERHEAD_BYTES

_error_kinds = request_errors()

AnsweredOperation: TypeAlias = Prepare | Decide | AskEarly
"""Operations that a `Status` or a `Failure` answers."""


class CannotConnect(Exception):
    """No session could be opened at this address now; a retry may succeed."""


class CannotTrust(CannotConnect):
    """There is no session, because the TLS handshake failed."""


class SessionLost(Exception):
    """The session ended before the answer arrived. `sent`: the proxy may have received the call;
    `moved`: its partition has another owner now, which is known."""

    def __init__(self, why: str, *, sent: bool, moved: bool = False) -> None:
        super().__init__(why)
        self.sent = sent
        self.moved = moved


class SessionListener(Protocol):
    """Receives the events of a session other than answers."""

    def owners_changed(self, session: "Session", before: tuple[str, ...]) -> None:
        """`session.owners` has changed; it was `before`."""

    def check_arrived(self, session: "Session", check: CheckQuestion) -> None:
        """A check has arrived; answer it by `session.post(CheckAnswer(…))`."""

    def session_lost(self, session: "Session", why: str) -> None:
        """The session was ended by either side; called once."""


class _Queued(msgspec.Struct, eq=False):
    """A queued operation: its bytes, b"" once it was sent or dropped."""

    encoded: bytes


class _Call(_Queued, eq=False):
    """A queued operation that gets an answer."""

    answer: "asyncio.Future[Status]"
    partition: int
    due_s: float
    """The deadline of the answer, on the event loop's clock."""
    sent: bool = False

    def fail(self, error: Exception) -> None:
        """Raise `error` at the caller, and drop the operation if it was not sent."""
        self.encoded = b""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # retrieved, also if the caller is cancelled first


def error_of(failure: Failure) -> RequestError:
    """Return the typed error of a proxy's failure."""
    kind = _error_kinds.get(failure.code)
    if kind is None:
        return RequestError(f"{failure.code}: {failure.message}", **failure.details)
    return kind(failure.message, **failure.details)


class Session:
    """An open session; made by `open_session`.

    Attributes:
        url: the proxy's own URL, as in lists of owners.
        owners: each half partition's owner in this proxy's view, "" if there is none.
        dedup_window_s: how long a prepare may be retried with its id.
        dedup_keys: the proxy knows `Prepare.dedup_key`.
        opened_at: on the event loop's clock.
    """

    def __init__(
        self,
        connection: WebSocket,
        welcome: Welcome,
        url: str,
        listener: SessionListener,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.url = url.rstrip("/")
        self.owners = _without_slashes(welcome.owners)
        self.dedup_window_s = welcome.dedup_window_s
        self.dedup_keys = welcome.dedup_keys
        self.opened_at = loop.time()
        self._loop = loop
        self._connection = connection
        self._listener = listener
        self._clock_ms = welcome.now_ms
        self._clock_at = loop.time()
        self._calls: dict[int, _Call] = {}
        self._timer: asyncio.TimerHandle | None = None
        """One for all calls: a timer for each would cost a tenth of the CPU time."""
        self._timer_due_s = math.inf
        self._outbox: deque[_Queued] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._lost: str | None = None
        self._checks: set[int] = set()
        """Open checks."""

    def start(self, rest: list[FromProxy]) -> None:
        """Start taking frames once the caller has this session; `rest` arrived in one frame with
        the Welcome."""
        self._loop.call_soon(self._begin, rest)

    def _begin(self, rest: list[FromProxy]) -> None:
        self._take_safely(rest)
        self._connection.attach(self)

    def now_ms(self) -> int:
        """Return the proxy's clock, extrapolated by this process's."""
        return self._clock_ms + int((self._loop.time() - self._clock_at) * 1000)

    @property
    def quiet(self) -> bool:
        """True if neither side waits for an answer."""
        return not self._calls and not self._checks and not self._outbox

    def send(
        self, operation: AnsweredOperation, partition: int, due_s: float
    ) -> "asyncio.Future[Status]":
        """Send an operation with a unique call number; return the future of its answer. A caller
        that stops waiting must `forget` it.

        Raises, here or in the future:
            RequestError: the proxy refused, or the operation is larger than a frame.
            SessionLost: the session ended, or `partition` moved to another proxy, before the
                answer; or there was no answer by `due_s`, on the event loop's clock.
        """
        if self._lost is not None:
            raise SessionLost(self._lost, sent=False)
        encoded = encode_frame(operation)
        if len(encoded) > OPERATION_BYTES_MAX:
            raise _too_large(encoded)
        answer: asyncio.Future[Status] = self._loop.create_future()
        call = self._calls[operation.call] = _Call(encoded, answer, partition, due_s)
        if due_s < self._timer_due_s:
            self._set_timer(due_s)
        if not self._outbox:
            self._send_soon()
        self._outbox.append(call)
        return answer

    def forget(self, number: int) -> None:
        """Drop a call: its answer is ignored, and an unsent call is never sent."""
        call = self._calls.pop(number, None)
        if call is not None:
            call.encoded = b""

    def post(self, operation: FromProducer) -> None:
        """Send an operation that has no answer; dropped silently if the session is lost."""
        if self._lost is None:
            encoded = encode_frame(operation)
            if len(encoded) > OPERATION_BYTES_MAX:
                raise _too_large(encoded)
            if not self._outbox:
                self._send_soon()
            self._outbox.append(_Queued(encoded))
            if isinstance(operation, CheckAnswer):
                self._checks.discard(operation.call)

    async def close(self, why: str = "closed by this side") -> None:
        """Send the queued operations, then end the session."""
        if self._lost is None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), CLOSE_TIMEOUT_S)
        self._lose(why)
        await self._connection.close()

    # --- out -----------------------------------------------------------------------------

    def _send_soon(self) -> None:
        """Send in the next iteration of the loop: the outbox was empty."""
        self._idle.clear()
        self._loop.call_soon(self.connection_writable)

    def connection_writable(self) -> None:
        """Send the outbox, as far as the socket takes it; see `Receiver`."""
        while self._outbox and self._connection.writable:
            if (frame := self._next_frame()) is not None:
                self._connection.send(frame)
        if not self._outbox:
            self._idle.set()

    def _next_frame(self) -> bytes | None:
        """Take a frame's operations from the outbox; None if all of them were dropped."""
        parts: list[bytes] = []
        outbox, room = self._outbox, OPERATION_BYTES_MAX
        while outbox and len(parts) < FRAME_OPERATIONS_MAX and len(outbox[0].encoded) <= room:
            queued = outbox.popleft()
            if not queued.encoded:
                continue
            room -= len(queued.encoded)
            parts.append(queued.encoded)
            queued.encoded = b""
            if isinstance(queued, _Call):
                queued.sent = True
        return _array_header(len(parts)) + b"".join(parts) if parts else None

    # --- in ------------------------------------------------------------------------------

    def frame_arrived(self, frame: bytes) -> None:
        """See `Receiver`."""
        self._take_safely(frame)

    def connection_ended(self, why: str) -> None:
        """See `Receiver`."""
        self._lose(why)

    def _take_safely(self, frame: bytes | list[FromProxy]) -> None:
        """Handle a frame; lose the session if it cannot be read."""
        if self._lost is not None:
            return
        try:
            self._take(decode_from_proxy(frame) if isinstance(frame, bytes) else frame)
        except (msgspec.MsgspecError, ValueError) as error:
            why = f"{self.url} sent a frame that cannot be read: {error}"
            _log.warning("%s", why)
            self._lose(why)
        except Exception:
            why = f"the SDK failed in the session with {self.url}"
            _log.exception("%s; it reconnects", why)
            self._lose(why)

    def _take(self, operations: list[FromProxy]) -> None:
        """Handle the operations of one frame."""
        calls = self._calls
        for operation in operations:
            if isinstance(operation, Status):
                call = calls.pop(operation.call, None)
                if call is not None and not call.answer.done():
                    call.answer.set_result(operation)
            else:
                self._take_other(operation)

    def _take_other(self, operation: FromProxy) -> None:
        match operation:
            case Failure():
                if (call := self._calls.pop(operation.call, None)) is not None:
                    call.fail(error_of(operation))
            case Owners():
                self._take_owners(_without_slashes(operation.owners))
            case ClockUpdate():
                self._clock_ms, self._clock_at = operation.now_ms, self._loop.time()
            case CheckQuestion():
                self._checks.add(operation.call)
                self._listener.check_arrived(self, operation)
            case Welcome():
                raise ValueError("a second welcome")

    def _take_owners(self, owners: tuple[str, ...]) -> None:
        if not owners:
            raise ValueError("a list of no owners")
        before, self.owners = self.owners, owners
        for partition in range(min(len(before), len(owners))):
            if before[partition] == self.url != owners[partition]:
                self.moved_away(partition)
        self._listener.owners_changed(self, before)

    def moved_away(self, partition: int) -> None:
        """Fail the calls of a half partition that moved to another proxy; they are retried."""
        for number, call in list(self._calls.items()):
            if call.partition == partition:
                del self._calls[number]
                why = f"partition {partition} moved away from {self.url}"
                call.fail(SessionLost(why, sent=call.sent, moved=True))

    def _set_timer(self, due_s: float) -> None:
        """Test deadlines at that time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due_s, self._test_deadlines)
        self._timer_due_s = due_s

    def _test_deadlines(self) -> None:
        """Fail calls without an answer in time; they are retried, and may have been carried out."""
        self._timer, self._timer_due_s = None, math.inf
        now_s, next_s = self._loop.time(), math.inf
        for number, call in list(self._calls.items()):
            if call.due_s > now_s:
                next_s = min(next_s, call.due_s)
            else:
                del self._calls[number]
                call.fail(SessionLost(f"{self.url} did not answer", sent=True))
        if self._calls:
            self._set_timer(next_s)

    def _lose(self, why: str) -> None:
        if self._lost is not None:
            return
        self._lost = why
        if self._timer is not None:
            self._timer.cancel()
        for call in self._calls.values():
            call.fail(SessionLost(why, sent=call.sent))
        self._calls.clear()
        self._outbox.clear()
        self._idle.set()
        self._listener.session_lost(self, why)


async def open_session(
    address: str,
    token: str | None,
    hello: Hello,
    listener: SessionListener,
    limits: Limits,
    tls: ClientTls,
) -> Session:
    """Open a session at `address`, and send the token.

    Raises:
        CannotTrust: the TLS handshake failed.
        CannotConnect: no answer, or not a proxy's.
        RequestError: the proxy refuses the producer: token, certificate, version or group.
    """
    try:
        async with asyncio.timeout(limits.connect_timeout_s):
            connection = await connect(address, token, tls, limits.heartbeat_s)
            try:
                welcome, *rest = await _greet(connection, hello)
            except BaseException:
                await connection.close()
                raise
    except InvalidStatus as error:
        raise _refusal(address, error.response.status_code, error.response.headers) from None
    except TimeoutError:
        raise CannotConnect(f"{address} does not answer; check the network") from None
    except (InvalidHandshake, InvalidURI, OSError, ValueError, msgspec.MsgspecError) as error:
        if (why := tls_trouble(error)) is not None:
            raise CannotTrust(f"{address}: {why}") from None
        raise CannotConnect(f"{address}: {_cause(error)}") from None
    assert isinstance(welcome, Welcome)
    session = Session(connection, welcome, welcome.url or address, listener)
    session.start(rest)
    return session


def _cause(error: Exception) -> str:
    """Return why there is no connection, with the next step."""
    if f"[Errno {errno.ECONNREFUSED}]" in str(error):  # also of several addresses
        return "connection refused; start a proxy there, or correct the URL"
    if isinstance(error, socket.gaierror):
        return f"its host is not known ({error.strerror}); correct the URL"
    if isinstance(error, InvalidHandshake):
        return f"no proxy of txbroker answers ({error}); correct the URL"
    return str(error) or type(error).__name__


def _refusal(address: str, status: int, headers: Mapping[str, str]) -> Exception:
    """Return the error for an upgrade that was answered with an HTTP status."""
    if status == Unauthorized.status:
        return Unauthorized(f"{address} requires a valid token: pass token=")
    code = headers.get(CODE_HEADER)
    if code == NotPermitted.code:
        return NotPermitted(f"{address} opens no sessions for this principal's role")
    if code == CertificateRequired.code:
        return CertificateRequired(
            f"{address} requires a client certificate: pass client_cert_file="
        )
    if status == Forbidden.status:
        return Forbidden(f"{address} refuses this host name or origin")
    elsewhere = headers.get("Location")
    hint = f"; if {elsewhere} is the proxy, use its URL" if elsewhere else ""
    return CannotConnect(f"{address} answers HTTP status {status}{hint}")


async def _greet(connection: WebSocket, hello: Hello) -> list[FromProxy]:
    connection.send(encode_frame([hello]))
    frame = await connection.first_frame
    if frame is None:
        raise CannotConnect("the proxy ended the session before its welcome")
    operations = decode_from_proxy(frame)
    match operations:
        case [Welcome() as welcome, *_]:
            if not welcome.owners or len(welcome.owners) != welcome.partitions:
                raise CannotConnect("the proxy's welcome names too few owners")
            return operations
        case [Failure() as failure, *_]:
            error = error_of(failure)
            if error.retryable:
                raise CannotConnect(str(error))
            raise error
    raise CannotConnect("the proxy's first frame is not a welcome")


def _without_slashes(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Return URLs without trailing slashes, so that they can be compared."""
    return tuple(url.rstrip("/") for url in urls)


def _too_large(encoded: bytes) -> TooLarge:
    return TooLarge(
        f"the call has {len(encoded)} bytes; a session's frame holds {OPERATION_BYTES_MAX}"
    )


def _array_header(length: int) -> bytes:
    """Return the MessagePack header of an array of already encoded operations."""
    if length < 16:
        return bytes((0x90 | length,))
    if length < 1 << 16:
        return b"\xdc" + length.to_bytes(2, "big")
    return b"\xdd" + length.to_bytes(4, "big")
