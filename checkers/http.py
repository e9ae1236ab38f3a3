"""Check-backs over HTTP/1.1.

A client of its own round h11, because it must be known for certain whether anything of a
question was sent: the connection is in hand before the attempt's marker is written, the request
is handed to the socket in the very call that asks, and nothing is ever sent twice.
"""

import asyncio
import secrets
import ssl
import time
from collections.abc import Callable, Iterable, Sequence

import h11

import txbroker
from txbroker.checkers.answers import (
    by_status,
    question,
    read_answer,
    trial_question,
    webhook_id,
)
from txbroker.checkers.base import CheckCall, CheckResult, Unclear, Unreached, already, shortened
from txbroker.checkers.connections import (
    CannotConnect,
    Connection,
    HostResolver,
    LookUp,
    connect,
    literal,
    look_up,
)
from txbroker.checkers.group_secrets import GroupSecrets, SecretRefused, SecretUnavailable
from txbroker.checkers.own_endpoints import OwnEndpoints
from txbroker.checkers.url_guard import UrlGuard
from txbroker.config.addresses import Address
from txbroker.contract import signing
from txbroker.contract.policy import (
    PARALLEL_MAX,
    GroupPolicy,
    PolicyError,
    host_and_port,
    split_check_url,
    without_query,
)
from txbroker.core.trace_context import context_of

ANSWER_BYTES_DEFAULT = 64 * 1024
"""A decision needs no more; groups whose checks replace messages register a larger bound."""
HEADER_BYTES_MAX = 16 * 1024
"""An answer's status line and headers."""
PIECE_BYTES = 256
"""What an answer's pieces (chunks) hold on average at least, beyond the first `PIECES_MIN`: each
costs the event loop time, so an answer in chunks of one byte would hold up every other group."""
PIECES_MIN = 1024
CONNECT_TIMEOUT_S = 3.0
IDLE_S = 1.5
"""How long a connection lies idle before it is closed: less than common servers' 2 to 5 s, so
that hardly ever a question meets a connection that the other side is just closing."""
NOT_HTTP = "the answer is not HTTP, is cut off or has too large headers"
IDLE_PER_GROUP_MAX = PARALLEL_MAX
"""As many as it has calls at a time: those of a run are given back together."""
IDLE_MAX = 256


class HttpChecks:
    """Makes channels to check URLs and keeps their connections for a short while.

    It calls nothing that the guard refuses. A host is looked up once for each connection, all its
    addresses are tested, and one of them is connected to, so a name whose answer changes leads
    nowhere else. A kept connection is tested again, as the address that it has, before each use.
    """

    def __init__(
        self,
        *,
        guard: UrlGuard | None = None,
        own: Callable[[], Iterable[Address]] = tuple,
        secrets: GroupSecrets | None = None,
        messages_max: int | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        idle_s: float = IDLE_S,
        tls: ssl.SSLContext | None = None,
        look_up: LookUp = look_up,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Args:
        guard: which addresses may be called; None: without any exception.
        own: where the installation itself listens, host and port.
        secrets: reads the secrets of groups; None: they have none.
        messages_max: how many messages an answer may bring; None: any number.
        tls: what https connections are verified with; None: the system's authorities.
        now_s: the wall clock that signatures carry, seconds since 1970.
        """
        self._guard = guard or UrlGuard()
        self._own = OwnEndpoints(own, HostResolver(look_up))
        self._secrets = secrets or GroupSecrets()
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self._messages_max = messages_max
        self._tls = tls
        self._now_s = now_s
        self._names = HostResolver(look_up)
        # Apart: a flood of registrations must not hold up checks.
        self._names_registered = HostResolver(look_up)
        self._idle: dict[_Key, list[_Idle]] = {}
        self._idle_count = 0
        self._closed = False

    # --- what may be registered --------------------------------------------------------------

    def unusable(self, group: str, policy: GroupPolicy) -> str | None:
        """Return why a group cannot use a policy as it stands, or None. Looks nothing up."""
        if policy.secret_ref is not None:
            refused = self._secrets.refuse(group, policy.secret_ref)
            if refused is not None:
                return refused
        if policy.check_url is None:
            return None
        host, _ = host_and_port(policy.check_url)
        address = literal(host)
        if address is None:
            return _in_a_sentence(host, self._guard.refuse_name(host))
        return _in_a_sentence(host, self._guard.refuse(host, address))

    async def refuse(self, group: str, policy: GroupPolicy) -> str | None:
        """Return why a group cannot be registered so, or None.

        What is not there yet, a file or a name, is not refused: it is tested at each call. Takes a
        few seconds at most.
        """
        refused = self.unusable(group, policy)
        if refused is not None:
            return refused
        if policy.secret_ref is not None:
            try:
                await self._secrets.read(group, policy.secret_ref)
            except SecretRefused as error:
                return str(error)
            except SecretUnavailable:
                pass
        if policy.check_url is None:
            return None
        host, port = host_and_port(policy.check_url)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                addresses = await self._names_registered.addresses(host, group)
                return _in_a_sentence(host, await self._refused(host, port, addresses))
        except OSError:  # TimeoutError is one, too
            return None

    async def _vet(self, host: str, port: int, addresses: Sequence[str]) -> None:
        refused = await self._refused(host, port, addresses)
        if refused is not None:
            raise CannotConnect(_in_a_sentence(host, refused) or "")

    async def _refused(self, host: str, port: int, addresses: Sequence[str]) -> str | None:
        """Return why a host must not be called: one refused address is enough."""
        own = await self._own.among(host, port, addresses)
        for address in addresses:
            refused = self._guard.refuse(host, address, own=address in own)
            if refused is not None:
                return refused
        return None

    # --- channels ----------------------------------------------------------------------------

    async def acquire_for(self, group: str, policy: GroupPolicy) -> "HttpChannel | Unreached":
        """Return a channel to the check URL of a policy, with its secret, or why there is none."""
        if policy.check_url is None:
            return Unreached("no check URL is registered")
        secret: bytes | None = None
        if policy.secret_ref is not None:
            try:
                secret = await self._secrets.read(group, policy.secret_ref)
            except SecretUnavailable as error:
                return Unreached(shortened(str(error)))
        return await self.acquire(
            group,
            policy.check_url,
            secret=secret,
            answer_bytes_max=policy.answer_bytes_max or ANSWER_BYTES_DEFAULT,
        )

    async def acquire(
        self,
        group: str,
        url: str,
        *,
        secret: bytes | None = None,
        answer_bytes_max: int = ANSWER_BYTES_DEFAULT,
    ) -> "HttpChannel | Unreached":
        """Return a channel whose connection stands, or why there is none. Sends nothing."""
        try:
            parts = split_check_url(url)
            host, port = host_and_port(url)
            key = (group, parts.scheme, host, port)
            connection = await self._connection(key)
        except (PolicyError, CannotConnect) as error:
            return Unreached(shortened(str(error)))
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        request = _Request(
            host=parts.netloc,
            target=target,
            # The query stays out of markers and timelines: tokens are put there.
            endpoint=without_query(url),
            answer_bytes_max=answer_bytes_max,
            messages_max=self._messages_max,
        )
        return HttpChannel(self, key, connection, request, secret, self._now_s)

    async def _connection(self, key: "_Key") -> Connection:
        group, scheme, host, port = key
        await asyncio.sleep(0)  # let the end of an idle connection be noticed first
        kept = self._take(key)
        if kept is not None and await self._may_keep(kept, host, port):
            return kept
        return await connect(
            self._names,
            host,
            port,
            self._context(scheme),
            self._connect_timeout_s,
            vet=self._vet,
            asker=group,
        )

    async def _may_keep(self, kept: Connection, host: str, port: int) -> bool:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._vet(host, port, (kept.address,))
        except (CannotConnect, OSError):
            kept.close(abort=True)
            return False
        return kept.fresh

    async def close(self) -> None:
        """Close all idle connections; those in hand are closed when they are released."""
        self._closed = True
        for key in list(self._idle):
            for idle in list(self._idle.get(key, ())):
                self._drop(key, idle)
        for looked_up in (self._names, self._names_registered, self._own, self._secrets):
            await looked_up.close()

    @property
    def idle_connections(self) -> int:
        """How many connections are kept and not in hand."""
        return self._idle_count

    def _context(self, scheme: str) -> ssl.SSLContext | None:
        if scheme != "https":
            return None
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _take(self, key: "_Key") -> Connection | None:
        while idle := self._idle.get(key):
            connection = self._remove(key, idle[-1])
            if connection.fresh:
                return connection
            connection.close(abort=True)
        return None

    def give_back(self, key: "_Key", connection: Connection) -> None:
        """Keep a connection that is good for another question, for a short while."""
        kept = self._idle.get(key, [])
        if self._closed or len(kept) >= IDLE_PER_GROUP_MAX or self._idle_count >= IDLE_MAX:
            connection.close()
            return
        idle = _Idle(connection)
        self._idle.setdefault(key, []).append(idle)
        self._idle_count += 1
        connection.on_stir = lambda: self._drop(key, idle)
        loop = asyncio.get_running_loop()
        idle.timer = loop.call_later(self._idle_s, self._drop, key, idle)

    def _drop(self, key: "_Key", idle: "_Idle") -> None:
        self._remove(key, idle).close(abort=True)

    def _remove(self, key: "_Key", idle: "_Idle") -> Connection:
        kept = self._idle[key]
        kept.remove(idle)
        if not kept:
            del self._idle[key]
        self._idle_count -= 1
        if idle.timer is not None:
            idle.timer.cancel()
        idle.connection.on_stir = None
        return idle.connection


def _in_a_sentence(host: str, refused: str | None) -> str | None:
    return None if refused is None else f"check_url leads to {host}, which is refused: {refused}"


_Key = tuple[str, str, str, int]


class _Idle:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.timer: asyncio.TimerHandle | None = None


class _Request:
    """What of a request does not depend on the question."""

    def __init__(
        self, host: str, target: str, endpoint: str, answer_bytes_max: int, messages_max: int | None
    ) -> None:
        self.host = host
        self.target = target
        self.endpoint = endpoint
        self.answer_bytes_max = answer_bytes_max
        self.messages_max = messages_max


class HttpChannel:
    """A connection to a check URL in hand, good for one question."""

    instance = ""

    def __init__(
        self,
        checks: HttpChecks,
        key: _Key,
        connection: Connection,
        request: _Request,
        secret: bytes | None,
        now_s: Callable[[], float],
    ) -> None:
        self._checks = checks
        self._key = key
        self._connection = connection
        self._request = request
        self._secret = secret
        self._now_s = now_s
        self._reusable = True
        self._released = False
        self.endpoint = request.endpoint

    def ask(self, call: CheckCall, timeout_s: float) -> "asyncio.Future[CheckResult]":
        """Ask, once; see `Channel.ask`."""
        if not self._connection.fresh:
            self._reusable = False
            return already(Unreached("the connection closed before the question was sent"))
        state = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADER_BYTES_MAX)
        data = self._encode(state, question(call), webhook_id(call), _trace_headers(call))
        self._reusable = False
        self._connection.send(data)
        return asyncio.get_running_loop().create_task(self._result(state, call.id, timeout_s))

    async def _result(self, state: h11.Connection, id: str, timeout_s: float) -> CheckResult:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answer(state, id)
        except TimeoutError:
            return Unclear(f"no answer within {timeout_s:g} s")
        except h11.RemoteProtocolError:
            return Unclear(NOT_HTTP)

    async def test(self, group: str, timeout_s: float) -> int | Unreached | Unclear:
        """Send a test call, which is no check; return its answer's status, or why there is none.

        It is signed as checks are, names no transaction and carries no message.
        """
        if not self._connection.fresh:
            self._reusable = False
            return Unreached("the connection closed before anything was sent")
        state = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADER_BYTES_MAX)
        self._reusable = False
        at_ms = round(self._now_s() * 1000)
        id = f"test.{secrets.token_hex(16)}"
        self._connection.send(
            self._encode(state, trial_question(group, at_ms), id, [(signing.TEST_HEADER, "1")])
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await self._status(state)
        except TimeoutError:
            return Unclear(f"no answer within {timeout_s:g} s")
        except h11.RemoteProtocolError:
            return Unclear(NOT_HTTP)

    def release(self) -> None:
        """Give the connection back: kept if it is good for another question, else closed."""
        if self._released:
            return
        self._released = True
        if self._reusable and self._connection.fresh:
            self._checks.give_back(self._key, self._connection)
        else:
            self._connection.close(abort=True)

    def _encode(
        self, state: h11.Connection, body: bytes, id: str, more: Sequence[tuple[str, str]] = ()
    ) -> bytes:
        headers = [
            ("host", self._request.host),
            ("user-agent", f"txbroker/{txbroker.__version__}"),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("accept", "application/json"),
            ("accept-encoding", "identity"),
            *more,
        ]
        if self._secret is not None:
            timestamp_s = int(self._now_s())
            headers += [
                (signing.ID_HEADER, id),
                (signing.TIMESTAMP_HEADER, str(timestamp_s)),
                (signing.SIGNATURE_HEADER, signing.sign(self._secret, id, timestamp_s, body)),
            ]
        request = h11.Request(method="POST", target=self._request.target, headers=headers)
        events = (request, h11.Data(data=body), h11.EndOfMessage())
        return b"".join(state.send(event) or b"" for event in events)

    async def _status(self, state: h11.Connection) -> int | Unclear:
        """Return the status of the answer; what comes behind its headers is not read."""
        pieces_left, received = PIECES_MIN, 0
        while pieces_left:
            event = state.next_event()
            if event is h11.NEED_DATA:
                data = await self._connection.receive(HEADER_BYTES_MAX)
                if not data and not received:
                    return Unclear("the connection ended before an answer")
                received += len(data)
                state.receive_data(data)
            elif isinstance(event, h11.Response):
                return event.status_code
            elif not isinstance(event, h11.InformationalResponse):
                return Unclear(NOT_HTTP)
            pieces_left -= 1
        return Unclear("the answer comes in too many pieces")

    async def _answer(self, state: h11.Connection, id: str) -> CheckResult:
        body = bytearray()
        bytes_max = self._request.answer_bytes_max
        too_large = Unclear(f"the answer is larger than {bytes_max} bytes")
        pieces_left = PIECES_MIN + bytes_max // PIECE_BYTES
        received = 0
        while True:
            event = state.next_event()
            if event is h11.NEED_DATA:
                data = await self._connection.receive(HEADER_BYTES_MAX)
                if not data and not received:
                    return Unclear("the connection ended before an answer")
                received += len(data)
                if received > 2 * bytes_max + 4 * HEADER_BYTES_MAX:
                    return too_large
                state.receive_data(data)
                continue
            pieces_left -= 1
            if pieces_left < 0:
                return Unclear("the answer comes in too many pieces")
            if isinstance(event, h11.Response):
                result = by_status(event.status_code) or _encoded(event)
                if result is not None:
                    return result
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > bytes_max:
                    return too_large
            elif isinstance(event, h11.EndOfMessage):
                break
            elif not isinstance(event, h11.InformationalResponse):
                return Unclear(NOT_HTTP)
        self._reusable = state.their_state is h11.DONE and not state.trailing_data[0]
        return read_answer(bytes(body), id, self._request.messages_max)


def _trace_headers(call: CheckCall) -> list[tuple[str, str]]:
    """Return what names the trace of a question: also a proxy without tracing hands it on."""
    trace = call.trace or context_of(call.messages)
    return [] if trace is None else trace.headers()


def _encoded(response: h11.Response) -> Unclear | None:
    for name, value in response.headers:
        if name == b"content-encoding" and value.strip().lower() != b"identity":
            return Unclear("the answer is compressed, though identity was asked for")
    return None
