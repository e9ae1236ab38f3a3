"""Connections of the client library, with what it leaves out of logins: why a broker refuses a
token, and that a login ends. And why there is no connection, in words."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Iterator
from typing import Any

from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.conn import OAuthAuthenticator as LibraryAuthenticator
from aiokafka.errors import KafkaConnectionError, KafkaError, SaslAuthenticationFailed
from aiokafka.protocol.admin import SaslAuthenticateRequest
from aiokafka.protocol.api import Request

from txbroker.kafka.oauth import NoToken

LOGIN_SHARE = 0.8
"""When so much of a login's life is over, an idle connection gives way to a new one. Brokers cut
off whoever asks something later than they allow (`connections.max.reauth.ms`)."""

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
            self.close(reason=CloseReason.IDLE_DROP)  # type: ignore[no-untyped-call]
        return bool(super().connected())  # type: ignore[no-untyped-call]

    def send(self, request: Request[Any], expect_response: bool = True) -> Awaitable[Any]:
        """Send a request; the awaitable brings its answer.

        Raises:
            KafkaConnectionError: the connection is broken; nothing was sent.
        """
        answer: Awaitable[Any]
        try:
            answer = super().send(request, expect_response)  # type: ignore[no-untyped-call]
        except NotImplementedError:
            raise
        except RuntimeError as error:
            # uvloop's word for a connection that has just broken, of which nobody was told yet.
            self.close(reason=CloseReason.CONNECTION_BROKEN)  # type: ignore[no-untyped-call]
            raise KafkaConnectionError(f"connection broken: {error}") from error
        if isinstance(request, SaslAuthenticateRequest):
            return self._logged_in(answer)
        return answer

    async def _logged_in(self, answer: Awaitable[Any]) -> Any:
        told = await answer
        life_ms = getattr(told, "session_lifetime_ms", 0)
        if life_ms > 0:
            self._ends_at = self._loop.time() + life_ms / 1000 * LOGIN_SHARE
        return told


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
