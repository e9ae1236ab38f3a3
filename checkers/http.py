"""Check-backs over HTTP/1.1.

A separate client on h11 (`txbroker.checkers.connections`), because it must be certain whether
anything of a question was sent: the connection stands before the attempt's marker is written, and
the request is handed to the socket in the call that asks.
"""

import asyncio
import secrets
import ssl
import time
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

import txbroker
from txbroker.checkers import answers
from txbroker.checkers.base import CheckCall, CheckResult, Unclear, Unreached, already, shortened
from txbroker.checkers.connections import (
    CheckConnection,
    ConnectionEnded,
    Exchange,
    Headers,
    HostResolver,
    LookUp,
    NoAnswer,
    NoConnection,
    connect,
    literal,
    look_up,
)
from txbroker.checkers.group_secrets import GroupSecrets, SecretRefused, SecretUnavailable
from txbroker.checkers.url_guard import OwnEndpoints, UrlGuard
from txbroker.config.addresses import Address
from txbroker.contract import policy as policies
from txbroker.contract import signing
from txbroker.contract.policy import GroupPolicy, PolicyError
from txbroker.tracing import context_of

ANSWER_BYTES_DEFAULT = 64 * 1024
"""A decision needs no more; groups whose checks replace messages register a larger limit."""
IDLE_PER_GROUP_MAX = policies.PARALLEL_MAX
"""As many as a group's calls in flight: those of a run are given back together."""
IDLE_MAX = 256


class HttpLimits(Struct, frozen=True):
    """Limits of calls to check URLs.

    Attributes:
        messages_max: messages that an answer may bring; None: any number.
        idle_s: how long a connection is kept idle: less than common servers' 2 to 5 s, so that a
            question rarely meets a connection that the server is just closing.
    """

    messages_max: int | None = None
    connect_timeout_s: float = 3.0
    idle_s: float = 1.5


DEFAULT_LIMITS = HttpLimits()
ERROR_BODY_S = 1.0
"""How long a check waits for the text of an error, seconds: operators see it, nothing else does."""


class HttpChecks:
    """Opens channels to check URLs and keeps their connections for a short while.

    It calls nothing that the guard refuses. It resolves a host once for each connection, tests all
    its addresses and connects to one of them, so that a name whose addresses change leads nowhere
    else. It tests a kept connection's address again before each use.

    Args:
        guard: which addresses may be called; None: the defaults.
        own: returns the endpoints at which the installation itself listens.
        secrets: reads the secrets of groups; None: they have none.
        tls: verifies https connections; None: by the system's authorities.
        now_s: the wall clock for signatures, seconds since 1970.
    """

    def __init__(
        self,
        *,
        guard: UrlGuard | None = None,
        own: Callable[[], Iterable[Address]] = tuple,
        secrets: GroupSecrets | None = None,
        limits: HttpLimits = DEFAULT_LIMITS,
        tls: ssl.SSLContext | None = None,
        look_up: LookUp = look_up,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._guard = guard or UrlGuard()
        self._own = OwnEndpoints(own, HostResolver(look_up))
        self._secrets = secrets or GroupSecrets()
        self._limits = limits
        self._tls = tls
        self._now_s = now_s
        self._names = HostResolver(look_up)
        # Separate: a flood of registrations must not hold up checks.
        self._names_registered = HostResolver(look_up)
        self._idle: dict[_Key, list[_Idle]] = {}
        self._idle_count = 0
        self._closed = False

    # --- registration ------------------------------------------------------------------------

    def unusable(self, group: str, policy: GroupPolicy) -> str | None:
        """Return why a group cannot use a policy, or None. Resolves no names."""
        if policy.secret_ref is not None:
            refusal = self._secrets.refuse(group, policy.secret_ref)
            if refusal is not None:
                return refusal
        if policy.check_url is None:
            return None
        host, _ = policies.host_and_port(policy.check_url)
        address = literal(host)
        if address is None:
            return _refusal(host, self._guard.refuse_name(host))
        return _refusal(host, self._guard.refuse(host, address))

    async def refuse(self, group: str, policy: GroupPolicy) -> str | None:
        """Return why a group cannot register a policy, or None.

        A file or a name that does not exist yet is not refused: each call tests it again. Takes a
        few seconds at most.
        """
        refusal = self.unusable(group, policy)
        if refusal is not None:
            return refusal
        if policy.secret_ref is not None:
            try:
                await self._secrets.read(group, policy.secret_ref)
            except SecretRefused as error:
                return str(error)
            except SecretUnavailable:
                pass
        if policy.check_url is None:
            return None
        host, port = policies.host_and_port(policy.check_url)
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                addresses = await self._names_registered.addresses(host, group)
                return _refusal(host, await self._refused(host, port, addresses))
        except OSError:  # TimeoutError is one, too
            return None

    async def _vet(self, host: str, port: int, addresses: Sequence[str]) -> None:
        refusal = _refusal(host, await self._refused(host, port, addresses))
        if refusal is not None:
            raise NoConnection(refusal)

    async def _refused(self, host: str, port: int, addresses: Sequence[str]) -> str | None:
        """Return why a host must not be called: one refused address is enough."""
        own = await self._own.among(host, port, addresses)
        for address in addresses:
            refusal = self._guard.refuse(host, address, own=address in own)
            if refusal is not None:
                return refusal
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
            signed_answers=bool(policy.signed_answers),
        )

    async def acquire(
        self,
        group: str,
        url: str,
        *,
        secret: bytes | None = None,
        answer_bytes_max: int = ANSWER_BYTES_DEFAULT,
        signed_answers: bool = False,
    ) -> "HttpChannel | Unreached":
        """Return a connected channel, or why there is none. Sends nothing of a question."""
        try:
            parts = policies.split_check_url(url)
            host, port = policies.host_and_port(url)
            key = (group, parts.scheme, host, port)
            connection = await self._connection(key)
        except (PolicyError, NoConnection) as error:
            return Unreached(shortened(str(error)))
        request = _Request(
            host=parts.netloc,
            target=(parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
            # The query stays out of markers and timelines: it may hold tokens.
            endpoint=policies.without_query(url),
            answer_bytes_max=answer_bytes_max,
            messages_max=self._limits.messages_max,
            signed_answers=signed_answers,
        )
        return HttpChannel(self, key, connection, request, secret, self._now_s)

    async def _connection(self, key: "_Key") -> CheckConnection:
        group, scheme, host, port = key
        await asyncio.sleep(0)  # so that the end of an idle connection is noticed first
        kept = self._take(key)
        if kept is not None and await self._may_keep(kept, host, port):
            return kept
        return await connect(
            self._names,
            host,
            port,
            self._context(scheme),
            self._limits.connect_timeout_s,
            vet=self._vet,
            asker=group,
        )

    async def _may_keep(self, kept: CheckConnection, host: str, port: int) -> bool:
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                await self._vet(host, port, (kept.address,))
        except (NoConnection, OSError):
            kept.close(abort=True)
            return False
        return kept.fresh

    async def close(self) -> None:
        """Close all idle connections; acquired ones are closed when they are released."""
        self._closed = True
        for key in list(self._idle):
            for idle in list(self._idle.get(key, ())):
                self._drop(key, idle)
        for closing in (self._names, self._names_registered, self._own, self._secrets):
            await closing.close()

    @property
    def idle_connections(self) -> int:
        return self._idle_count

    def _context(self, scheme: str) -> ssl.SSLContext | None:
        if scheme != "https":
            return None
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _take(self, key: "_Key") -> CheckConnection | None:
        while idle := self._idle.get(key):
            connection = self._remove(key, idle[-1])
            if connection.fresh:
                return connection
            connection.close(abort=True)
        return None

    def give_back(self, key: "_Key", connection: CheckConnection) -> None:
        """Keep a reusable connection for a short while."""
        kept = self._idle.get(key, [])
        if self._closed or len(kept) >= IDLE_PER_GROUP_MAX or self._idle_count >= IDLE_MAX:
            connection.close()
            return
        idle = _Idle(connection)
        self._idle.setdefault(key, []).append(idle)
        self._idle_count += 1
        connection.on_stir = lambda: self._drop(key, idle)
        loop = asyncio.get_running_loop()
        idle.timer = loop.call_later(self._limits.idle_s, self._drop, key, idle)

    def _drop(self, key: "_Key", idle: "_Idle") -> None:
        self._remove(key, idle).close(abort=True)

    def _remove(self, key: "_Key", idle: "_Idle") -> CheckConnection:
        kept = self._idle[key]
        kept.remove(idle)
        if not kept:
            del self._idle[key]
        self._idle_count -= 1
        if idle.timer is not None:
            idle.timer.cancel()
        idle.connection.on_stir = None
        return idle.connection


def _refusal(host: str, why: str | None) -> str | None:
    return None if why is None else f"check_url leads to {host}, which is refused: {why}"


_Key = tuple[str, str, str, int]
"""Group, scheme, host and port."""


class _Idle:
    def __init__(self, connection: CheckConnection) -> None:
        self.connection = connection
        self.timer: asyncio.TimerHandle | None = None


class _Request(Struct, frozen=True):
    """The parts of a request that do not depend on the question."""

    host: str
    target: str
    endpoint: str
    answer_bytes_max: int
    messages_max: int | None
    signed_answers: bool


class HttpChannel:
    """An acquired connection to a check URL, for one question."""

    instance = ""

    def __init__(
        self,
        checks: HttpChecks,
        key: _Key,
        connection: CheckConnection,
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
        # Also a proxy without tracing passes the trace on.
        trace = call.trace or context_of(call.messages)
        headers = [] if trace is None else trace.headers()
        try:
            exchange = self._send(answers.question(call), answers.webhook_id(call), headers)
        except ConnectionEnded as error:
            return already(Unreached(str(error)))
        return asyncio.get_running_loop().create_task(self._result(exchange, call, timeout_s))

    async def _result(self, exchange: Exchange, call: CheckCall, timeout_s: float) -> CheckResult:
        result: CheckResult | None = None
        try:
            async with asyncio.timeout(timeout_s):
                head = await exchange.head()
                result = answers.by_status(head.status_code)
                if any(
                    name == b"content-encoding" and value.strip().lower() != b"identity"
                    for name, value in head.headers
                ):
                    why = "the answer is compressed, though identity was asked for"
                    return result or Unclear(why)
                if isinstance(result, Unclear):
                    text = await exchange.beginning(answers.TEXT_BYTES_MAX, ERROR_BODY_S)
                    return Unclear(result.detail, answers.text_of(text))
                if result is not None:
                    return result
                body = await exchange.body()
        except TimeoutError:
            return result or Unclear(f"no answer within {timeout_s:g} s")
        except NoAnswer as error:
            return result or Unclear(str(error))
        self._reusable = exchange.reusable
        why = self._signature_flaw(call, head.headers, body)
        if why:
            return Unclear(f"the answer is not signed as the group requires: {why}")
        return answers.read_answer(body, call.id, self._request.messages_max)

    def _signature_flaw(
        self, call: CheckCall, given: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> str:
        """Return why an answer is not signed as the group requires, "" if it is."""
        if not self._request.signed_answers:
            return ""
        if self._secret is None:
            return "no secret is registered"
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in given}
        if headers.get(signing.ID_HEADER) not in (None, answers.webhook_id(call)):
            return f"{signing.ID_HEADER} is not that of the question"
        return signing.flaw(self._secret, headers, body, now_s=self._now_s())

    async def test(self, group: str, timeout_s: float) -> int | Unreached | Unclear:
        """Send a test call; return its answer's status, or why there is none.

        It is signed as checks are, names no transaction and carries no message.
        """
        body = answers.trial_question(group, round(self._now_s() * 1000))
        try:
            exchange = self._send(
                body, f"test.{secrets.token_hex(16)}", [(signing.TEST_HEADER, "1")]
            )
            async with asyncio.timeout(timeout_s):
                return (await exchange.head()).status_code
        except ConnectionEnded as error:
            return Unreached(str(error))
        except TimeoutError:
            return Unclear(f"no answer within {timeout_s:g} s")
        except NoAnswer as error:
            return Unclear(str(error))

    def release(self) -> None:
        """Give the connection back: it is kept if it is reusable, else closed."""
        if self._released:
            return
        self._released = True
        if self._reusable and self._connection.fresh:
            self._checks.give_back(self._key, self._connection)
        else:
            self._connection.close(abort=True)

    def _send(self, body: bytes, id: str, more: Headers) -> Exchange:
        self._reusable = False
        request = self._request
        headers = [
            ("host", request.host),
            ("user-agent", f"txbroker/{txbroker.__version__}"),
            ("content-type", "application/json"),
            ("accept", "application/json"),
            *more,
        ]
        if self._secret is not None:
            headers += signing.headers(self._secret, id, int(self._now_s()), body)
        exchange = Exchange(self._connection, request.answer_bytes_max)
        exchange.send(request.target, headers, body)
        return exchange


# --- test calls ------------------------------------------------------------------------------

_REMARKS = {
    401: "the endpoint refuses the signature: is the secret the same on both sides?",
    403: "the endpoint refuses the proxy",
    404: "nothing is at that path",
    405: "the endpoint refuses POST",
}


class TestCallResult(Struct, frozen=True):
    """The result of a test call.

    Attributes:
        endpoint: the check URL without its query; "" if no call was made.
        status: of the answer; None without an answer.
        why: the problem, "" after a status of 2xx. Never text from the answer.
    """

    __test__ = False  # pytest, this is no test

    endpoint: str = ""
    status: int | None = None
    why: str = ""

    @property
    def answered(self) -> bool:
        """True if the answer is as documented."""
        return not self.why


async def try_group(
    checks: HttpChecks, group: str, policy: GroupPolicy, timeout_s: float
) -> TestCallResult:
    """Send a test call to a group's check URL, once. Uses no attempt of any transaction.

    Args:
        timeout_s: for the answer, unless the policy sets one.
    """
    if policy.check_url is None:
        return TestCallResult(why="no check URL is registered")
    endpoint = policies.without_query(policy.check_url)
    channel = await checks.acquire_for(group, policy)
    if isinstance(channel, Unreached):
        return TestCallResult(endpoint, why=channel.detail)
    try:
        status = await channel.test(group, policy.timeout_s or timeout_s)
    finally:
        channel.release()
    if isinstance(status, Unreached | Unclear):
        return TestCallResult(endpoint, why=status.detail)
    if 200 <= status < 300:
        return TestCallResult(endpoint, status)
    remark = _REMARKS.get(status)
    if remark is None:
        why = f"answered {status}: reached, but it does not answer test calls"
    else:
        why = f"{status}: {remark}"
    return TestCallResult(endpoint, status, why)
