"""Connections to brokers.

The client library connects and logs in. Requests and answers bypass its stream and reader task: a
protocol splits incoming data into answers. This also adds what the library's logins lack: the
reason why a broker refuses a token, the end of a login's lifetime, and errors in words."""

from __future__ import annotations

import asyncio
import json
import ssl
import struct
import time
from collections.abc import Awaitable, Iterator
from io import BytesIO
from typing import Any

from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.conn import OAuthAuthenticator as LibraryAuthenticator
from aiokafka.errors import (
    CorrelationIdError,
    IncompatibleBrokerVersion,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
)
from aiokafka.protocol.admin import SaslAuthenticateRequest
from aiokafka.protocol.api import Request

from txbroker.kafka.client.login import NoToken
from txbroker.kafka.protocol.packed import PackedRequest

LOGIN_SHARE = 0.8
"""After this share of a login's lifetime an idle connection is replaced. Brokers close connections
that are used after it (`connections.max.reauth.ms`)."""

_SIZE = struct.Struct(">i")

_UNSUPPORTED_MECHANISM, _ILLEGAL_STATE, _REFUSED = 33, 34, 58
_LOGIN_CODES = frozenset({_UNSUPPORTED_MECHANISM, _ILLEGAL_STATE, _REFUSED})
_OTHERS_CERTIFICATE = frozenset({62, 64})
_EXPIRED, _NOT_YET = 10, 9
_UNKNOWN_ISSUER = frozenset({2, 18, 19, 20, 21})


class _Authenticator(LibraryAuthenticator):
    """Detects that a broker refuses a token, which the library takes for success."""

    async def step(self, payload: bytes | None) -> tuple[bytes, bool] | None:
        """Return the next message, None at the end."""
        if payload:
            raise SaslAuthenticationFailed(_token_refused(payload))
        step: tuple[bytes, bool] | None = await super().step(payload)  # type: ignore[no-untyped-call]
        return step


class _Frames(asyncio.Protocol):
    """Splits incoming data into answers."""

    def __init__(self, connection: Connection, closed: asyncio.Future[None]) -> None:
        self._connection = connection
        self._closed = closed
        self._rest = bytearray()

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
                self._connection.take(bytes(memoryview(data)[begin:end]))
                at = end
        except Exception as error:
            # After an answer that does not decode no other can be trusted.
            self._connection.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)
            return
        if at or data is not self._rest:
            self._rest = bytearray(data[at:])

    def eof_received(self) -> None:
        """Close: the broker has closed the connection."""
        error = EOFError("the broker has closed the connection")
        self._connection.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)

    def connection_lost(self, error: Exception | None) -> None:
        """Complete the close, by either side."""
        if not self._closed.done():
            self._closed.set_result(None)
        self._connection.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)


class Connection(AIOKafkaConnection):
    """A connection that closes before its login expires."""

    _expires_at = float("inf")

    def authenticator_oauth(self) -> _Authenticator:
        """Return the authenticator for OAUTHBEARER."""
        provider = self._sasl_oauth_token_provider
        return _Authenticator(sasl_oauth_token_provider=provider)  # type: ignore[no-untyped-call]

    def connected(self) -> bool:
        """Return whether it takes requests; close it if it is idle and its login expires soon."""
        if self._loop.time() >= self._expires_at and not self._requests:
            self.close(reason=CloseReason.IDLE_DROP)
        return bool(super().connected())  # type: ignore[no-untyped-call]

    async def _do_version_lookup(self) -> None:
        """Replace the protocol before the first request."""
        self.take_over()
        await super()._do_version_lookup()  # type: ignore[no-untyped-call]

    def take_over(self) -> None:
        """Receive data here instead of in the library's reader task."""
        assert self._read_task is not None
        assert self._writer is not None
        assert self._closed_fut is not None
        self._read_task.cancel()
        self._writer.transport.set_protocol(_Frames(self, self._closed_fut))

    def send(self, request: Request[Any] | PackedRequest, answer: Any = None) -> Awaitable[Any]:
        """Send a request; return an awaitable of its answer, which may raise TimeoutError.

        Args:
            answer: receives the answer instead of a new future.

        Raises:
            KafkaConnectionError: the connection is broken; nothing was sent.
            IncompatibleBrokerVersion, NotImplementedError: the broker does not support the request,
                or no version of it that we do.
        """
        if self._writer is None:
            raise KafkaConnectionError(f"No connection to broker at {self._host}:{self._port}")
        number: int = self._next_correlation_id()  # type: ignore[no-untyped-call]
        asked: Any
        if isinstance(request, PackedRequest):
            asked = request
            frame = request.frame(self._versions, number, self._client_id.encode())
        else:
            asked = request.prepare(self._versions)
            header = asked.build_request_header(correlation_id=number, client_id=self._client_id)
            frame = header.encode() + asked.encode()
            frame = _SIZE.pack(len(frame)) + frame
        try:
            self._writer.write(frame)
        except (OSError, RuntimeError) as error:
            # uvloop raises RuntimeError for a connection that broke but was not reported yet.
            self.close(reason=CloseReason.CONNECTION_BROKEN)
            raise KafkaConnectionError(f"connection broken: {error}") from error
        answer = answer or self._loop.create_future()
        timer = self._loop.call_later(self._request_timeout, self._expire, answer)
        self._requests.append((number, (asked, timer), answer))
        if isinstance(request, SaslAuthenticateRequest):
            return self._logged_in(answer)
        awaitable: Awaitable[Any] = answer
        return awaitable

    def take(self, frame: bytes) -> None:
        """Pass an answer to the oldest request: brokers answer in order."""
        number, (asked, timer), answer = self._requests[0]
        (answered,) = _SIZE.unpack_from(frame)
        if answered != number:
            raise CorrelationIdError(f"request {number} is next, the answer is to {answered}")
        if not answer.done():
            if isinstance(asked, PackedRequest):
                answer.set_result(asked.read(frame))
            else:
                buffer = BytesIO(frame)
                asked.parse_response_header(buffer)
                answer.set_result(asked.RESPONSE_TYPE.decode(buffer))
        timer.cancel()
        self._last_action = time.monotonic()
        # Only now: if it does not decode, closing the connection fails the request.
        self._requests.popleft()

    def close(
        self, reason: CloseReason | None = None, exc: BaseException | None = None
    ) -> asyncio.Future[None]:
        """Close it; requests in flight fail with KafkaConnectionError."""
        unanswered = self._requests
        for _, (_, timer), _ in unanswered:
            timer.cancel()
        closed: asyncio.Future[None] = super().close(reason, exc)  # type: ignore[no-untyped-call]
        for _, _, answer in unanswered:
            _mark_retrieved(answer)
        return closed

    def _expire(self, answer: asyncio.Future[Any]) -> None:
        """Time out a request. Its caller then closes the connection, unless it was cancelled.

        Requests after it would neither be answered nor let the connection become idle.
        """
        if answer.cancelled():
            self.close(reason=CloseReason.CONNECTION_BROKEN, exc=TimeoutError())
        elif not answer.done():
            answer.set_exception(TimeoutError())
            _mark_retrieved(answer)

    def _send_sasl_token(self, payload: bytes, expect_response: bool = True) -> Awaitable[Any]:
        """Refuse logins of Kafka before 1.0, whose answers have another format."""
        raise IncompatibleBrokerVersion(
            "it only supports logins of Kafka before 1.0: upgrade the brokers"
        )

    async def _logged_in(self, answer: Awaitable[Any]) -> Any:
        result = await answer
        life_ms = getattr(result, "session_lifetime_ms", 0)
        if life_ms > 0:
            self._expires_at = self._loop.time() + life_ms / 1000 * LOGIN_SHARE
        return result


def _mark_retrieved(answer: asyncio.Future[Any]) -> None:
    if answer.done() and not answer.cancelled():
        answer.exception()


async def open_connection(host: str, port: int, **arguments: Any) -> Connection:
    """Open a connection and log in."""
    connection = Connection(host, port, **arguments)  # type: ignore[no-untyped-call]
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
    except ssl.SSLError:
        raise  # some are ValueErrors, too
    except (ValueError, KeyError, AssertionError):
        # Raised by SCRAM for an invalid answer.
        raise SaslAuthenticationFailed("the broker's part of the SCRAM login is invalid") from None
    return connection


def _token_refused(payload: bytes) -> str:
    try:
        status = str(json.loads(payload).get("status", ""))
    except (ValueError, AttributeError):
        status = ""
    reason = f" ({status[:60]})" if status.isprintable() and status else ""
    return f"the broker refuses the token{reason}"


# --- errors in words -------------------------------------------------------------------------


def why_not(error: BaseException, host: str, arguments: dict[str, Any]) -> str:
    """Return why a connection failed, as the end of a sentence. Never contains a secret."""
    for cause in _causes(error):
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
    if isinstance(error, ConnectionResetError) or _closed(error):
        return (
            "the broker closes the connection: check that this port speaks kafka_security_protocol "
            f"{protocol}"
        )
    if isinstance(error, KafkaError):
        return _about_login(error, arguments)
    return ""


def _closed(error: BaseException) -> bool:
    if not isinstance(error, KafkaConnectionError) or "closed" not in str(error):
        return False
    return not any(isinstance(cause, ssl.SSLError) for cause in _causes(error))


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
    if code == _UNSUPPORTED_MECHANISM:
        return f"the broker does not support {mechanism}: see kafka_sasl_mechanism"
    if code == _ILLEGAL_STATE:
        return "this port takes no login: see kafka_security_protocol"
    if code == _REFUSED:
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
