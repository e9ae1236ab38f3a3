"""Connections to brokers. The client library opens them and logs in, over a way of our own to ask:
it cuts answers out of what arrives, where the library goes through a stream and a task.

With what the library leaves out of logins: why a broker refuses a token, and that a login ends.
And why there is no connection, in words.
"""

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

from txbroker.kafka.client.oauth import NoToken
from txbroker.kafka.protocol.packed import PackedRequest

LOGIN_SHARE = 0.8
"""When so much of a login's life is over, an idle connection gives way to a new one. Brokers cut
off whoever asks something later than they allow (`connections.max.reauth.ms`)."""

_SIZE = struct.Struct(">i")

_UNSUPPORTED_MECHANISM, _ILLEGAL_STATE, _REFUSED = 33, 34, 58
_LOGIN_CODES = frozenset({_UNSUPPORTED_MECHANISM, _ILLEGAL_STATE, _REFUSED})
_OTHERS_CERTIFICATE = frozenset({62, 64})
_EXPIRED, _NOT_YET = 10, 9
_UNKNOWN_ISSUER = frozenset({2, 18, 19, 20, 21})


class _Authenticator(LibraryAuthenticator):
    """Hears a broker that refuses a token; the library takes its answer for a yes."""

    async def step(self, payload: bytes | None) -> tuple[bytes, bool] | None:
        """Return what to send next, None at the end."""
        if payload:
            raise SaslAuthenticationFailed(_token_refused(payload))
        step: tuple[bytes, bool] | None = await super().step(payload)  # type: ignore[no-untyped-call]
        return step


class _Frames(asyncio.Protocol):
    """Cuts answers out of what arrives."""

    def __init__(self, connection: LoggedInConnection, closed: asyncio.Future[None]) -> None:
        self._connection = connection
        self._closed = closed
        self._rest = bytearray()

    def data_received(self, data: bytes | bytearray) -> None:
        """Take what has arrived."""
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
            # Whatever it is: no answer behind one that does not read can be trusted.
            self._connection.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)
            return
        if at or data is not self._rest:
            self._rest = bytearray(data[at:])

    def eof_received(self) -> None:
        """The broker has closed it."""
        error = EOFError("the broker has closed it")
        self._connection.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)

    def connection_lost(self, error: Exception | None) -> None:
        """It is closed, by whomever."""
        if not self._closed.done():
            self._closed.set_result(None)
        self._connection.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)


class LoggedInConnection(AIOKafkaConnection):
    """A connection that gives way before its login ends."""

    _ends_at = float("inf")

    def authenticator_oauth(self) -> _Authenticator:
        """Return the authenticator for OAUTHBEARER."""
        provider = self._sasl_oauth_token_provider
        return _Authenticator(sasl_oauth_token_provider=provider)  # type: ignore[no-untyped-call]

    def connected(self) -> bool:
        """Whether it takes requests. An idle one whose login is about to end closes itself."""
        if self._loop.time() >= self._ends_at and not self._requests:
            self.close(reason=CloseReason.IDLE_DROP)
        return bool(super().connected())  # type: ignore[no-untyped-call]

    async def _do_version_lookup(self) -> None:
        """Take over as soon as there is a connection: nothing was asked yet."""
        self.take_over()
        await super()._do_version_lookup()  # type: ignore[no-untyped-call]

    def take_over(self) -> None:
        """Have what arrives come to us, not to the client library's task."""
        assert self._read_task is not None
        assert self._writer is not None
        assert self._closed_fut is not None
        self._read_task.cancel()
        self._writer.transport.set_protocol(_Frames(self, self._closed_fut))

    def send(self, request: Request[Any] | PackedRequest, answer: Any = None) -> Awaitable[Any]:
        """Send a request; the awaitable brings its answer, or a TimeoutError; so does `answer`,
        which takes either as a future does, where it is given.

        Raises:
            KafkaConnectionError: the connection is broken; nothing was sent.
            IncompatibleBrokerVersion, NotImplementedError: the broker does not know the request,
                or not in a version that we do.
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
            # A RuntimeError is uvloop's word for a connection that has just broken, of which
            # nobody was told yet.
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
        """Give an answer to whoever waits for it. Brokers answer in order.

        Raises:
            Exception: it does not read, or nothing was asked.
        """
        number, (asked, timer), answer = self._requests[0]
        (found,) = _SIZE.unpack_from(frame)
        if found != number:
            raise CorrelationIdError(f"asked {number}, the answer is to {found}")
        if not answer.done():
            if isinstance(asked, PackedRequest):
                answer.set_result(asked.read(frame))
            else:
                buffer = BytesIO(frame)
                asked.parse_response_header(buffer)
                answer.set_result(asked.RESPONSE_TYPE.decode(buffer))
        timer.cancel()
        self._last_action = time.monotonic()
        # Only now: if it does not read, closing fails whoever waits for it.
        self._requests.popleft()

    def close(
        self, reason: CloseReason | None = None, exc: BaseException | None = None
    ) -> asyncio.Future[None]:
        """Close it; what still waits for an answer gets a KafkaConnectionError."""
        unanswered = self._requests
        for _, (_, timer), _ in unanswered:
            timer.cancel()
        closed: asyncio.Future[None] = super().close(reason, exc)  # type: ignore[no-untyped-call]
        for _, _, answer in unanswered:
            _look_at(answer)
        return closed

    def _expire(self, answer: asyncio.Future[Any]) -> None:
        """No answer came in time. Whoever asked closes the connection; nobody does where they gave
        up, and what is behind it would neither be answered nor let the connection be idle."""
        if answer.cancelled():
            self.close(reason=CloseReason.CONNECTION_BROKEN, exc=TimeoutError())
        elif not answer.done():
            answer.set_exception(TimeoutError())
            _look_at(answer)

    def _send_sasl_token(self, payload: bytes, expect_response: bool = True) -> Awaitable[Any]:
        """Refuse the way to log in from before Kafka 1.0, whose answers are no frames of ours."""
        raise IncompatibleBrokerVersion("it takes logins only as brokers before Kafka 1.0 did")

    async def _logged_in(self, answer: Awaitable[Any]) -> Any:
        told = await answer
        life_ms = getattr(told, "session_lifetime_ms", 0)
        if life_ms > 0:
            self._ends_at = self._loop.time() + life_ms / 1000 * LOGIN_SHARE
        return told


def _look_at(answer: asyncio.Future[Any]) -> None:
    """Look at an error, as nobody does where a cancellation comes between."""
    if answer.done() and not answer.cancelled():
        answer.exception()


async def open_connection(host: str, port: int, **arguments: Any) -> LoggedInConnection:
    """Open a connection of the client library and log in.

    Raises:
        OSError, KafkaError, TimeoutError: there is none.
    """
    connection = LoggedInConnection(host, port, **arguments)  # type: ignore[no-untyped-call]
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
    except ssl.SSLError:
        raise  # which may be a ValueError, too
    except (ValueError, KeyError, AssertionError):
        # What SCRAM finds in a broker's answer that is not as it should be.
        raise SaslAuthenticationFailed("the broker's part of the login does not hold") from None
    return connection


def _token_refused(payload: bytes) -> str:
    try:
        status = str(json.loads(payload).get("status", ""))
    except (ValueError, AttributeError):
        status = ""
    said = f" ({status[:60]})" if status.isprintable() and status else ""
    return f"the broker does not take the token{said}"


# --- in words --------------------------------------------------------------------------------


def why_not(error: BaseException, host: str, arguments: dict[str, Any]) -> str:
    """Return why there is no connection, as the end of a sentence. It never holds a secret.

    Args:
        host: of the broker.
        arguments: what the connection was told about TLS and login.
    """
    for cause in _causes(error):
        found = _about(cause, host, arguments)
        if found:
            return f": {found}"
    return f" ({_plainly(error)}): is it running, and is this its address?"


def is_refusal(error: BaseException) -> bool:
    """Say whether the broker was reached and does not let us in, so that waiting does not help.

    A connection that breaks is none: a broker that starts or stops breaks them, too.
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
            "it closes the connection: does it speak kafka_security_protocol "
            f"{protocol} at this port?"
        )
    if isinstance(error, KafkaError):
        return _about_login(error, arguments)
    return ""


def _closed(error: BaseException) -> bool:
    """Say whether the broker has closed the connection, without a word of TLS."""
    if not isinstance(error, KafkaConnectionError) or "closed" not in str(error):
        return False
    return not any(isinstance(cause, ssl.SSLError) for cause in _causes(error))


def _about_certificate(error: ssl.SSLCertVerificationError, host: str) -> str:
    code = error.verify_code
    if code in _OTHERS_CERTIFICATE:
        return (
            f"its certificate is not for {host}: use a name that stands in it, in `kafka` and in "
            "the brokers' advertised.listeners"
        )
    if code == _EXPIRED:
        return "its certificate has expired"
    if code == _NOT_YET:
        return "its certificate is not valid yet: are the clocks right?"
    if code in _UNKNOWN_ISSUER:
        return (
            "its certificate is signed by nobody who is trusted here: name the authority's "
            "certificate by kafka_ssl_ca_file"
        )
    return f"its certificate does not hold: {error.verify_message}"


def _about_tls(error: ssl.SSLError) -> str:
    reason = (error.reason or "").upper()
    if "HANDSHAKE_FAILURE" in reason or "UNKNOWN_CA" in reason or "CERTIFICATE" in reason:
        # Which of these it is, brokers tell only in their own log.
        return (
            "it wants its clients to show a certificate that is signed by whom it trusts and has "
            "not expired: see kafka_ssl_cert_file and kafka_ssl_key_file"
        )
    if "WRONG_VERSION" in reason or "RECORD_LAYER" in reason or "UNEXPECTED_EOF" in reason:
        return "it does not speak TLS at this port: see kafka_security_protocol"
    return f"TLS with it fails ({reason.lower().replace('_', ' ') or 'no reason given'})"


def _about_login(error: KafkaError, arguments: dict[str, Any]) -> str:
    mechanism = arguments.get("sasl_mechanism", "")
    code = getattr(error, "errno", None)
    if code == _UNSUPPORTED_MECHANISM:
        return f"it has no logins by {mechanism}: see kafka_sasl_mechanism"
    if code == _ILLEGAL_STATE:
        return "it takes no login at this port: see kafka_security_protocol"
    if code == _REFUSED:
        if mechanism == "OAUTHBEARER":
            said = error.args[0] if error.args else "the broker does not take the token"
            return f"{said}: has it expired, and is it meant for Kafka?"
        user = arguments.get("sasl_plain_username", "")
        return (
            f"it refuses the login of {user} by {mechanism}: see kafka_sasl_username and "
            "kafka_sasl_password_file"
        )
    return ""


def _plainly(error: BaseException) -> str:
    """As the system says it, else at least the kind of error."""
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "no answer in time"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
