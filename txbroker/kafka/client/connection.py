"""Connections to brokers.

A connection is a protocol of the event loop: it splits incoming data into answers and passes each
to its request, without a stream or a task. The client library has the mechanisms of logins. What
it lacks is added here: the reason why a broker refuses a token, the end of a login's lifetime, and
errors in words."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import struct
from collections import deque
from collections.abc import Awaitable, Iterator
from typing import Any, cast

import structlog
from aiokafka.conn import OAuthAuthenticator as LibraryAuthenticator
from aiokafka.conn import SaslPlainAuthenticator, ScramAuthenticator
from aiokafka.errors import (
    IncompatibleBrokerVersion,
    KafkaConnectionError,
    KafkaError,
    KafkaProtocolError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
    for_code,
)

from txbroker.kafka.client.login import NoToken
from txbroker.kafka.protocol.codes import Code
from txbroker.kafka.protocol.encoder import Request, Versions
from txbroker.kafka.protocol.schemas import ApiVersionsV0, SaslAuthenticateV1, SaslHandshakeV1

LOGIN_SHARE = 0.8
"""After this share of a login's lifetime an idle connection is replaced. Brokers close connections
that are used after it (`connections.max.reauth.ms`)."""

log = structlog.wrap_logger(logging.getLogger(__name__))

_IDLE_S = 9 * 60.0  # a minute less than the brokers' default: we close first
_SIZE = struct.Struct(">i")
_NUMBERS = 1 << 31
_FIRST_REQUEST: Versions = {ApiVersionsV0.API_KEY: (0, 0)}

_LOGIN_CODES = frozenset(
    {Code.UNSUPPORTED_SASL_MECHANISM, Code.ILLEGAL_SASL_STATE, Code.SASL_AUTHENTICATION_FAILED}
)
_OTHERS_CERTIFICATE = frozenset({62, 64})
_EXPIRED, _NOT_YET = 10, 9
_UNKNOWN_ISSUER = frozenset({2, 18, 19, 20, 21})


class BrokerConnection(asyncio.Protocol):
    """A connection to a broker, which answers requests in their order. It closes before its login
    expires.

    Args:
        host, port: of the broker.
        client_id: the client in the broker's logs and quotas.
        request_timeout_s: after this time a request counts as unanswered, seconds.
        idle_s: without a request for this time it closes, seconds.
    """

    def __init__(
        self, host: str, port: int, client_id: str, request_timeout_s: float, idle_s: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._address = f"{host}:{port}"
        self._client_id = client_id.encode()
        self._request_timeout_s = request_timeout_s
        self._idle_s = idle_s
        self._transport: asyncio.Transport | None = None
        """None before it is open and after it is closed."""
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._versions = _FIRST_REQUEST
        self._number = 0
        self._requests: deque[tuple[int, Request, asyncio.TimerHandle, Any]] = deque()
        """Correlation id, request, its time limit, and what receives the answer."""
        self._rest = bytearray()
        """The beginning of an answer."""
        self._answered_s = 0.0
        self._idle: asyncio.TimerHandle | None = None
        self._expires_s = float("inf")

    # --- requests ----------------------------------------------------------------------------

    def connected(self) -> bool:
        """Return whether it takes requests; close it if it is idle and its login expires soon."""
        if self._loop.time() >= self._expires_s and not self._requests:
            self.close()
        return self._transport is not None

    def send(self, request: Request, answer: Any = None) -> Awaitable[Any]:
        """Send a request; return an awaitable of its answer, which may raise TimeoutError.

        Args:
            answer: receives the answer instead of a new future.

        Raises:
            KafkaConnectionError: the connection is broken; nothing was sent.
            IncompatibleBrokerVersion, NotImplementedError: the broker does not support the request,
                or no version of it that we do.
        """
        if self._transport is None:
            raise KafkaConnectionError(f"No connection to broker at {self._address}")
        self._number = number = (self._number + 1) % _NUMBERS
        frame = request.frame(self._versions, number, self._client_id)
        try:
            self._transport.write(frame)
        except (OSError, RuntimeError) as error:
            # uvloop raises RuntimeError for a connection that broke but was not reported yet.
            self.close()
            raise KafkaConnectionError(f"connection broken: {error}") from error
        answer = answer or self._loop.create_future()
        timer = self._loop.call_later(self._request_timeout_s, self._expire, answer)
        self._requests.append((number, request, timer, answer))
        awaitable: Awaitable[Any] = answer
        return awaitable

    def _expire(self, answer: asyncio.Future[Any]) -> None:
        """Time out a request. Its caller then closes the connection, unless it was cancelled.

        Requests after it would neither be answered nor let the connection become idle.
        """
        if answer.cancelled():
            self.close(TimeoutError())
        elif not answer.done():
            answer.set_exception(TimeoutError())
            _mark_retrieved(answer)

    def close(self, error: BaseException | None = None) -> asyncio.Future[None]:
        """Close it; requests in flight fail with KafkaConnectionError.

        Args:
            error: why.
        """
        if self._transport is not None:
            self._transport.close()
            self._transport = None
            if self._idle is not None:
                self._idle.cancel()
            unanswered, self._requests = self._requests, deque()
            for _, _, timer, answer in unanswered:
                timer.cancel()
                if not answer.done():
                    failure = KafkaConnectionError(f"Connection at {self._address} closed")
                    failure.__cause__ = error
                    answer.set_exception(failure)
                _mark_retrieved(answer)
        return self._closed

    async def negotiate(self) -> None:
        """Ask for the versions of requests that the broker supports: the first request."""
        answer = await self.send(ApiVersionsV0())
        self._versions = {key: (first, last) for key, first, last in answer.api_versions}

    def expire_after(self, lifetime_s: float) -> None:
        """Limit the use of the connection to a share of its login's lifetime, seconds."""
        self._expires_s = self._loop.time() + lifetime_s * LOGIN_SHARE

    # --- calls of the event loop -------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin: TCP and TLS are open."""
        self._transport = cast(asyncio.Transport, transport)
        self._answered_s = self._loop.time()
        self._close_if_idle()

    def data_received(self, data: bytes | bytearray) -> None:
        """Split off complete answers."""
        if self._rest:
            self._rest += data
            data = self._rest
        at = 0
        try:
            while len(data) >= (begin := at + _SIZE.size):
                (size,) = _SIZE.unpack_from(data, at)
                if len(data) < (end := begin + size):
                    break
                self._take(bytes(memoryview(data)[begin:end]))
                at = end
        except Exception as error:
            # After an answer that does not decode no other can be trusted.
            self.close(KafkaProtocolError(f"the broker's answer cannot be read ({error!r})"))
            return
        if at or data is not self._rest:
            self._rest = bytearray(data[at:])

    def _take(self, frame: bytes) -> None:
        """Pass an answer to the oldest request."""
        number, request, timer, answer = self._requests[0]
        (answered,) = _SIZE.unpack_from(frame)
        if answered != number:
            raise ValueError(f"request {number} is next, the answer is to {answered}")
        if not answer.done():
            answer.set_result(request.read(frame))
        timer.cancel()
        self._answered_s = self._loop.time()
        # Only now: if it does not decode, closing the connection fails the request.
        self._requests.popleft()

    def eof_received(self) -> None:
        """Close: the broker has closed the connection."""
        self.close(EOFError("the broker has closed the connection"))

    def connection_lost(self, error: Exception | None) -> None:
        """Complete the close, by either side."""
        if not self._closed.done():
            self._closed.set_result(None)
        self.close(error)

    def _close_if_idle(self) -> None:
        left_s = self._answered_s + self._idle_s - self._loop.time()
        if left_s <= 0 and not self._requests:
            self.close()
        else:
            wait_s = self._idle_s if self._requests else left_s
            self._idle = self._loop.call_later(wait_s, self._close_if_idle)


def _mark_retrieved(answer: asyncio.Future[Any]) -> None:
    if answer.done() and not answer.cancelled():
        answer.exception()


async def open_connection(
    host: str,
    port: int,
    *,
    security_protocol: str = "PLAINTEXT",
    ssl_context: ssl.SSLContext | None = None,
    client_id: str = "txbroker",
    request_timeout_s: float = 40.0,
    idle_s: float = _IDLE_S,
    **login: Any,
) -> BrokerConnection:
    """Open a connection and log in.

    Args:
        login: see `Login.arguments`.

    Raises:
        OSError, TimeoutError: the broker cannot be reached.
        ssl.SSLError: the TLS handshake failed.
        KafkaError: the broker closes the connection, or refuses the login.
    """
    connection = BrokerConnection(host, port, client_id, request_timeout_s, idle_s)
    context = ssl_context if security_protocol.endswith("SSL") else None
    async with asyncio.timeout(request_timeout_s):
        await asyncio.get_running_loop().create_connection(
            lambda: connection, host, port, ssl=context
        )
    try:
        await connection.negotiate()
        if security_protocol.startswith("SASL"):
            if security_protocol == "SASL_PLAINTEXT" and login["sasl_mechanism"] == "PLAIN":
                log.warning("password in the clear", broker=f"{host}:{port}")
            await _log_in(connection, **login)
    except BaseException:
        connection.close()
        raise
    return connection


# --- logins ----------------------------------------------------------------------------------


class _Authenticator(LibraryAuthenticator):
    """Detects that a broker refuses a token, which the library takes for success."""

    async def step(self, payload: bytes | None) -> tuple[bytes, bool] | None:
        """Return the next message, None at the end."""
        if payload:
            raise SaslAuthenticationFailed(_token_refusal(payload))
        step: tuple[bytes, bool] | None = await super().step(payload)  # type: ignore[no-untyped-call]
        return step


async def _log_in(connection: BrokerConnection, sasl_mechanism: str, **arguments: Any) -> None:
    authenticator = _authenticator(sasl_mechanism, arguments)
    try:
        answer = await connection.send(SaslHandshakeV1(sasl_mechanism))
        if answer.error_code:
            raise for_code(answer.error_code)()
        if sasl_mechanism not in answer.enabled_mechanisms:
            raise UnsupportedSaslMechanismError(sasl_mechanism)
        step = await authenticator.step(None)
        while step is not None:
            answer = await connection.send(SaslAuthenticateV1(step[0]))
            if answer.error_code:
                raise for_code(answer.error_code)(*filter(None, [answer.error_message]))
            if answer.session_lifetime_ms > 0:
                connection.expire_after(answer.session_lifetime_ms / 1000)
            step = await authenticator.step(answer.auth_bytes or b"")
    except ssl.SSLError:
        raise  # some are ValueErrors, too
    except NotImplementedError as error:
        raise IncompatibleBrokerVersion(str(error)) from None
    except (ValueError, KeyError, AssertionError, OverflowError):
        # Raised by the library for an invalid answer.
        raise SaslAuthenticationFailed from KafkaProtocolError(
            f"the broker's part of the {sasl_mechanism} login is invalid"
        )


def _authenticator(mechanism: str, arguments: dict[str, Any]) -> Any:
    if mechanism == "OAUTHBEARER":
        return _Authenticator(**arguments)  # type: ignore[no-untyped-call]
    arguments["loop"] = asyncio.get_running_loop()
    if mechanism == "PLAIN":
        return SaslPlainAuthenticator(**arguments)  # type: ignore[no-untyped-call]
    return ScramAuthenticator(sasl_mechanism=mechanism, **arguments)  # type: ignore[no-untyped-call]


def _token_refusal(payload: bytes) -> str:
    try:
        status = str(json.loads(payload).get("status", ""))
    except (ValueError, AttributeError):
        status = ""
    reason = f" ({status[:60]})" if status.isprintable() and status else ""
    return f"the broker refuses the token{reason}"


# --- errors in words -------------------------------------------------------------------------


def why_not(error: BaseException, host: str, arguments: dict[str, Any]) -> str:
    """Return why a connection failed, as the end of a sentence. Never contains a secret."""
    for cause in reversed([*_causes(error)]):
        if reason := _about(cause, host, arguments):
            return f": {reason}"
    return f" ({_plainly(error)}): check that it is running, and its address"


def is_refusal(error: BaseException) -> bool:
    """Return whether the broker was reached and refused the login, so that a retry does not help.

    A broken connection is no refusal: brokers that start or stop break them, too.
    """
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError):
            return True
        if isinstance(cause, KafkaError) and getattr(cause, "errno", None) in _LOGIN_CODES:
            return True
    return False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _about(error: BaseException, host: str, arguments: dict[str, Any]) -> str:
    protocol = arguments.get("security_protocol", "PLAINTEXT")
    if isinstance(error, NoToken):
        return str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return _about_certificate(error, host)
    if isinstance(error, ssl.SSLError):
        return _about_tls(error)
    if isinstance(error, KafkaProtocolError):
        return f"{error.args[0]}: check that only a Kafka broker answers at this address"
    if isinstance(error, IncompatibleBrokerVersion):
        return f"{error.args[0]}: upgrade the brokers"
    closed = isinstance(error, KafkaConnectionError) and "closed" in str(error)
    if closed or isinstance(error, ConnectionResetError):
        return (
            "the broker closes the connection: check that this port speaks kafka_security_protocol "
            f"{protocol}"
        )
    if isinstance(error, KafkaError):
        return _about_login(error, arguments)
    return ""


def _about_certificate(error: ssl.SSLCertVerificationError, host: str) -> str:
    code = error.verify_code
    if code in _OTHERS_CERTIFICATE:
        return (
            f"the broker's certificate is not valid for {host}: use a name in the certificate for "
            "`kafka` and for the brokers' advertised.listeners"
        )
    if code == _EXPIRED:
        return "the broker's certificate has expired: renew it"
    if code == _NOT_YET:
        return "the broker's certificate is not valid yet: check the clocks"
    if code in _UNKNOWN_ISSUER:
        return (
            "the broker's certificate is signed by an unknown authority: set kafka_ssl_ca_file to "
            "the authority's certificate"
        )
    return f"the broker's certificate is invalid: {error.verify_message}"


def _about_tls(error: ssl.SSLError) -> str:
    reason = (error.reason or "").upper()
    if "HANDSHAKE_FAILURE" in reason or "UNKNOWN_CA" in reason or "CERTIFICATE" in reason:
        # Brokers log the exact reason only on their side.
        return (
            "the broker requires a client certificate, not expired and signed by an authority that "
            "it trusts: see kafka_ssl_cert_file and kafka_ssl_key_file"
        )
    if "WRONG_VERSION" in reason or "RECORD_LAYER" in reason or "UNEXPECTED_EOF" in reason:
        return "this port does not speak TLS: see kafka_security_protocol"
    return f"the TLS handshake failed ({reason.lower().replace('_', ' ') or 'no reason given'})"


def _about_login(error: KafkaError, arguments: dict[str, Any]) -> str:
    mechanism = arguments.get("sasl_mechanism", "")
    code = getattr(error, "errno", None)
    if code == Code.UNSUPPORTED_SASL_MECHANISM:
        return f"the broker does not support {mechanism}: see kafka_sasl_mechanism"
    if code == Code.ILLEGAL_SASL_STATE:
        return "this port takes no login: see kafka_security_protocol"
    if code == Code.SASL_AUTHENTICATION_FAILED:
        if mechanism == "OAUTHBEARER":
            reason = error.args[0] if error.args else "the broker refuses the token"
            return f"{reason}: check its expiry and its audience"
        user = arguments.get("sasl_plain_username", "")
        return (
            f"the broker refuses the login of {user} by {mechanism}: see kafka_sasl_username and "
            "kafka_sasl_password_file"
        )
    return ""


def _plainly(error: BaseException) -> str:
    """Return the system's message, else at least the type of the error."""
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "no answer in time"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
