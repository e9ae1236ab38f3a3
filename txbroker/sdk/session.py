"""One connection to one proxy: frames out, frames in, answers matched to calls.

Operations queued during one turn of the event loop leave in one frame. A session never
reconnects; when it is lost, every call that still waits learns whether it had been sent.
"""

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

import aiohttp
import msgspec

from txbroker.deadlines import Deadlines
from txbroker.errors import (
    CertificateRequired,
    Forbidden,
    NotPermitted,
    RequestError,
    TooLarge,
    Unauthorized,
    request_errors,
)
from txbroker.sdk.limits import Limits
from txbroker.tls import ClientTls, tls_trouble
from txbroker.wire import (
    CODE_HEADER,
    FRAME_BYTES_MAX,
    FRAME_OPERATIONS_MAX,
    Check,
    CheckAnswer,
    Clock,
    Failure,
    FromProducer,
    FromProxy,
    Hello,
    Owners,
    Standing,
    Welcome,
    decode_from_proxy,
    encode_frame,
)

_log = logging.getLogger("txbroker.sdk")

SESSION_PATH = "/v1/session"
FRAME_OVERHEAD_BYTES = 6
"""An array's header, and one byte because aiohttp refuses frames as large as its limit."""
OPERATION_BYTES_MAX = FRAME_BYTES_MAX - FRAME_OVERHEAD_BYTES
CLOSE_TIMEOUT_S = 2.0
"""How long a proxy may take over the closing handshake before the socket is dropped."""

_error_kinds = request_errors()


class CannotConnect(Exception):
    """No session could be opened at this address now; another try may do better."""


class CannotTrust(CannotConnect):
    """There is no session, as TLS does not come about."""


class SessionLost(Exception):
    """The session ended before the answer came. `sent`: the proxy may have got the call; `moved`:
    its partition has another owner now, which is known."""

    def __init__(self, why: str, *, sent: bool, moved: bool = False) -> None:
        super().__init__(why)
        self.sent = sent
        self.moved = moved


class Listener(Protocol):
    """Who is told what a session brings besides answers."""

    def owners_changed(self, session: "Session", before: tuple[str, ...]) -> None:
        """`session.owners` is another list now than `before`."""

    def check_arrived(self, session: "Session", check: Check) -> None:
        """The proxy asks; answered by `session.post(CheckAnswer(…))`."""

    def session_lost(self, session: "Session", why: str) -> None:
        """The session ended, by whichever side; told once."""


class _Call:
    __slots__ = ("answer", "partition", "sent")

    def __init__(self, answer: "asyncio.Future[Standing]", partition: int) -> None:
        self.answer = answer
        self.partition = partition
        self.sent = False


def error_of(failure: Failure) -> RequestError:
    """Return the typed error that a proxy's failure stands for."""
    kind = _error_kinds.get(failure.code)
    if kind is None:
        return RequestError(f"{failure.code}: {failure.message}", **failure.details)
    return kind(failure.message, **failure.details)


class Session:
    """An open session; made by `open_session`.

    Attributes:
        url: the proxy's own URL, as it stands in lists of owners.
        owners: each half partition's owner as this proxy sees it, "" where there is none.
        dedup_window_s: for how long a prepare may be repeated with its id.
        opened_at: when, on the event loop's clock.
    """

    def __init__(
        self,
        socket: aiohttp.ClientWebSocketResponse,
        welcome: Welcome,
        url: str,
        listener: Listener,
        answer_timeout_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.url = url.rstrip("/")
        self.owners = _without_slashes(welcome.owners)
        self.dedup_window_s = welcome.dedup_window_s
        self.opened_at = loop.time()
        self._loop = loop
        self._socket = socket
        self._listener = listener
        self._clock_ms = welcome.now_ms
        self._clock_at = loop.time()
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._deadlines = Deadlines(answer_timeout_s, self._unanswered)
        self._outbox: deque[tuple[bytes, _Call | None]] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._lost: str | None = None
        self._checks: set[int] = set()
        """Questions that came and are not answered yet."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, rest: list[FromProxy]) -> None:
        """Begin to read and write; `rest` came in one frame with the Welcome."""
        self._tasks = [
            self._loop.create_task(self._read(rest), name=f"txbroker session {self.url} reader"),
            self._loop.create_task(self._write(), name=f"txbroker session {self.url} writer"),
        ]

    def now_ms(self) -> int:
        """Return the proxy's clock, carried on by the time that passed here since."""
        return self._clock_ms + int((self._loop.time() - self._clock_at) * 1000)

    @property
    def quiet(self) -> bool:
        """True where nothing waits for an answer, on neither side."""
        return not self._calls and not self._checks and not self._outbox

    async def call(
        self, make: Callable[[int], FromProducer], partition: int, *, slow: bool = False
    ) -> Standing:
        """Send the operation that `make` returns for its call number; return the answer, for a
        `slow` one however long that takes.

        Raises:
            RequestError: the proxy refused, or the operation is larger than a frame.
            SessionLost: the session ended, or `partition` moved to another proxy, before that; or
                the proxy did not answer in time.
        """
        if self._lost is not None:
            raise SessionLost(self._lost, sent=False)
        number = next(self._numbers)
        encoded = _encode(make(number))
        call = _Call(self._loop.create_future(), partition)
        self._calls[number] = call
        if not slow:
            self._deadlines.begin(number)
        self._queue(encoded, call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            if not call.sent:
                self._unqueue(call)
            raise
        finally:
            del self._calls[number]
            self._deadlines.end(number)
            if call.answer.done() and not call.answer.cancelled():
                call.answer.exception()  # looked at, also where a cancellation came between

    def post(self, operation: FromProducer) -> None:
        """Send an operation that has no answer; dropped without a word if the session is lost.

        Raises:
            TooLarge: it is larger than a frame.
        """
        if self._lost is None:
            self._queue(_encode(operation), None)
            if isinstance(operation, CheckAnswer):
                self._checks.discard(operation.call)

    async def close(self, why: str = "closed by this side") -> None:
        """Send what is queued, say goodbye and end."""
        if self._lost is None:
            with contextlib.suppress(asyncio.TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._idle.wait()
        self._lose(why)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await _close_socket(self._socket)

    # --- out -----------------------------------------------------------------------------

    def _queue(self, encoded: bytes, call: _Call | None) -> None:
        self._outbox.append((encoded, call))
        self._idle.clear()
        self._wake.set()

    def _unqueue(self, call: _Call) -> None:
        self._outbox = deque(entry for entry in self._outbox if entry[1] is not call)

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._outbox:
                    await self._socket.send_bytes(self._next_frame())
                self._idle.set()
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            self._lose(f"cannot send to {self.url}: {error or type(error).__name__}")

    def _next_frame(self) -> bytes:
        """Take from the outbox what fits one frame."""
        parts: list[bytes] = []
        room = OPERATION_BYTES_MAX
        while (
            self._outbox and len(self._outbox[0][0]) <= room and len(parts) < FRAME_OPERATIONS_MAX
        ):
            encoded, call = self._outbox.popleft()
            room -= len(encoded)
            parts.append(encoded)
            if call is not None:
                call.sent = True
        return _array_header(len(parts)) + b"".join(parts)

    # --- in ------------------------------------------------------------------------------

    async def _read(self, rest: list[FromProxy]) -> None:
        why = f"{self.url} ended the session"
        try:
            for operation in rest:
                self._take(operation)
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.ERROR:
                    why = f"the connection to {self.url} broke: {message.data or 'no answer'}"
                    break
                if message.type is not aiohttp.WSMsgType.BINARY:
                    why = f"{self.url} sent a frame that is not binary"
                    break
                for operation in decode_from_proxy(message.data):
                    self._take(operation)
                # Frames that are here already are taken without a pause: whoever has an answer
                # now goes on first, and the proxy is not idle meanwhile.
                await asyncio.sleep(0)
        except (msgspec.MsgspecError, ValueError) as error:
            why = f"{self.url} sent a frame that cannot be read: {error}"
            _log.warning("%s", why)
        except (aiohttp.ClientError, OSError) as error:
            why = f"the connection to {self.url} broke: {error or type(error).__name__}"
        except Exception:
            why = f"a fault of ours in the session with {self.url}"
            _log.exception("%s; it is opened again", why)
        self._lose(why)

    def _take(self, operation: FromProxy) -> None:
        match operation:
            case Standing():
                if (call := self._calls.get(operation.call)) and not call.answer.done():
                    call.answer.set_result(operation)
            case Failure():
                if (call := self._calls.get(operation.call)) and not call.answer.done():
                    call.answer.set_exception(error_of(operation))
            case Owners():
                self._take_owners(_without_slashes(operation.owners))
            case Clock():
                self._clock_ms, self._clock_at = operation.now_ms, self._loop.time()
            case Check():
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
        """A half partition is another proxy's now: whoever waits here asks there instead."""
        for call in list(self._calls.values()):
            if call.partition == partition and not call.answer.done():
                why = f"partition {partition} moved away from {self.url}"
                call.answer.set_exception(SessionLost(why, sent=call.sent, moved=True))
                if not call.sent:
                    self._unqueue(call)

    def _unanswered(self, number: int) -> None:
        """A call has waited long enough; it is asked again, and may have come through."""
        call = self._calls[number]
        if not call.answer.done():
            call.answer.set_exception(SessionLost(f"{self.url} did not answer", sent=True))
            if not call.sent:
                self._unqueue(call)

    def _lose(self, why: str) -> None:
        if self._lost is not None:
            return
        self._lost = why
        self._deadlines.close()
        for call in list(self._calls.values()):
            if not call.answer.done():
                call.answer.set_exception(SessionLost(why, sent=call.sent))
        self._outbox.clear()
        self._idle.set()
        self._listener.session_lost(self, why)


async def open_session(
    http: aiohttp.ClientSession,
    address: str,
    hello: Hello,
    listener: Listener,
    limits: Limits,
    tls: ClientTls,
) -> Session:
    """Open a session at `address`; `http` brings the token along.

    Raises:
        CannotTrust: TLS does not come about.
        CannotConnect: nobody answers there, or not as a proxy does.
        RequestError: the proxy does not take us: token, certificate, version or group.
    """
    try:
        async with asyncio.timeout(limits.connect_timeout_s):
            socket = await http.ws_connect(
                address + SESSION_PATH,
                heartbeat=limits.heartbeat_s,
                max_msg_size=FRAME_BYTES_MAX + FRAME_OVERHEAD_BYTES,
                ssl=tls.context() if address.startswith("https:") else True,
            )
            try:
                welcome, *rest = await _greet(socket, hello)
            except BaseException:
                await _close_socket(socket)
                raise
    except aiohttp.WSServerHandshakeError as error:
        if error.status == Unauthorized.status:
            raise Unauthorized(f"{address} wants a token, or another one") from None
        code = error.headers.get(CODE_HEADER) if error.headers else None
        if code == NotPermitted.code:
            raise NotPermitted(f"{address} opens no sessions for this principal's role") from None
        if code == CertificateRequired.code:
            raise CertificateRequired(
                f"{address} wants a client certificate: name one with client_cert_file"
            ) from None
        if error.status == Forbidden.status:
            raise Forbidden(f"{address} refuses this host name or origin") from None
        raise CannotConnect(f"{address} answers HTTP status {error.status}") from None
    except TimeoutError:
        raise CannotConnect(f"{address} does not answer") from None
    except (aiohttp.ClientError, OSError, ValueError, msgspec.MsgspecError) as error:
        if (why := tls_trouble(error)) is not None:
            raise CannotTrust(f"{address}: {why}") from None
        raise CannotConnect(f"{address}: {error or type(error).__name__}") from None
    assert isinstance(welcome, Welcome)
    session = Session(socket, welcome, welcome.url or address, listener, limits.answer_timeout_s)
    session.start(rest)
    return session


async def _greet(socket: aiohttp.ClientWebSocketResponse, hello: Hello) -> list[FromProxy]:
    await socket.send_bytes(encode_frame([hello]))
    message = await socket.receive()
    if message.type is not aiohttp.WSMsgType.BINARY:
        raise CannotConnect("the proxy ended the session before it welcomed us")
    operations = decode_from_proxy(message.data)
    match operations:
        case [Welcome() as welcome, *_]:
            if not welcome.owners or len(welcome.owners) != welcome.partitions:
                raise CannotConnect("the proxy's welcome names no or too few owners")
            return operations
        case [Failure() as failure, *_]:
            error = error_of(failure)
            if error.retryable:
                raise CannotConnect(str(error))
            raise error
    raise CannotConnect("the proxy's first frame is no welcome")


async def _close_socket(socket: aiohttp.ClientWebSocketResponse) -> None:
    with contextlib.suppress(asyncio.TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await socket.close()


def _without_slashes(urls: tuple[str, ...]) -> tuple[str, ...]:
    """URLs are compared, and a slash at the end makes no other proxy of one."""
    return tuple(url.rstrip("/") for url in urls)


def _encode(operation: FromProducer) -> bytes:
    encoded = encode_frame(operation)
    if len(encoded) > OPERATION_BYTES_MAX:
        raise TooLarge(
            f"the call takes {len(encoded)} bytes, a session's frame holds {OPERATION_BYTES_MAX}"
        )
    return encoded


def _array_header(length: int) -> bytes:
    """Return the MessagePack header of an array, so that operations are encoded only once."""
    if length < 16:
        return bytes((0x90 | length,))
    if length < 1 << 16:
        return b"\xdc" + length.to_bytes(2, "big")
    return b"\xdd" + length.to_bytes(4, "big")
