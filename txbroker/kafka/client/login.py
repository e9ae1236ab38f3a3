"""TLS and login arguments of new connections; tokens from a file or by client credentials.

Passwords, tokens and certificates are read for each new connection, so that changed files take
effect without a restart. Open connections stay open."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote_plus

import aiohttp
import structlog
from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import KafkaError
from msgspec import Struct

from txbroker.config.access import KafkaAccess
from txbroker.config.addresses import check_private, read_secret
from txbroker.errors import ConfigurationError

Stamp = tuple[tuple[int, int, int, int], ...]
"""Inode, size, modification time and mode of files, to detect changes."""

log = structlog.wrap_logger(logging.getLogger(__name__))

TLS_FILES = ("kafka_ssl_ca_file", "kafka_ssl_cert_file", "kafka_ssl_key_file")


class Login(Protocol):
    """The identity of one client."""

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments of `open_connection`.

        Raises:
            ConfigurationError: a file cannot be read, or has the wrong content.
        """
        ...


class NoLogin:
    """Neither TLS nor a login."""

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments of `open_connection`."""
        return {"security_protocol": "PLAINTEXT"}


LoginMaker = Callable[[], Login]
"""Returns the login of one client, inside its event loop."""


class SettingsLogin:
    """The login of a configuration."""

    def __init__(self, settings: KafkaAccess) -> None:
        self._settings = settings
        self._context: tuple[Stamp, ssl.SSLContext] | None = None
        self._rejected: Stamp | None = None
        self._tokens: AbstractTokenProvider | None = None

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments of `open_connection`.

        Raises:
            ConfigurationError: a file cannot be read, or has the wrong content.
        """
        protocol = self._settings.kafka_security_protocol
        arguments: dict[str, Any] = {"security_protocol": protocol}
        if protocol.endswith("SSL"):
            arguments["ssl_context"] = self._tls()
        if protocol.startswith("SASL"):
            arguments |= self._sasl()
        return arguments

    def _sasl(self) -> dict[str, Any]:
        settings = self._settings
        if settings.kafka_sasl_mechanism == "OAUTHBEARER":
            self._tokens = self._tokens or token_provider(settings)
            return {
                "sasl_mechanism": settings.kafka_sasl_mechanism,
                "sasl_oauth_token_provider": self._tokens,
            }
        return {
            "sasl_mechanism": settings.kafka_sasl_mechanism,
            "sasl_plain_username": settings.kafka_sasl_username,
            "sasl_plain_password": settings.kafka_secret("kafka_sasl_password"),
        }

    def _tls(self) -> ssl.SSLContext:
        """Return the TLS context, recreated if its files have changed.

        Between the changes of certificate and key they do not match: then the previous context is
        used again.
        """
        stamp = _stamp(getattr(self._settings, name) for name in TLS_FILES)
        if self._context is not None and self._context[0] == stamp:
            return self._context[1]
        try:
            context = tls_context(self._settings)
        except ConfigurationError as error:
            if self._context is None:
                raise
            if stamp != self._rejected:  # log once, not for each connection
                self._rejected = stamp
                log.warning("tls files not taken", files=", ".join(TLS_FILES), why=str(error))
            return self._context[1]
        self._context = (stamp, context)
        return context


def token_provider(settings: KafkaAccess) -> AbstractTokenProvider:
    """Return the provider of tokens for OAUTHBEARER."""
    if settings.kafka_oauth_token_file is not None:
        return TokenInFile(settings.kafka_oauth_token_file)
    return FetchedToken(
        Credentials(
            url=settings.kafka_oauth_token_url,
            client_id=settings.kafka_oauth_client_id,
            secret=lambda: settings.kafka_secret("kafka_oauth_client_secret"),
            scope=settings.kafka_oauth_scope,
            ca_file=settings.kafka_oauth_ca_file,
        )
    )


def tls_context(settings: KafkaAccess) -> ssl.SSLContext:
    """Return the TLS context. Certificates and host names are always verified.

    Raises:
        ConfigurationError: a file has the wrong content; the message names its setting.
    """
    if settings.kafka_ssl_ca_file is None:
        context = ssl.create_default_context()
    else:
        # The configured authority replaces those of the system.
        context = _trust("kafka_ssl_ca_file", settings.kafka_ssl_ca_file)
    if settings.kafka_ssl_cert_file is not None and settings.kafka_ssl_key_file is not None:
        _load_certificate(context, settings)
    return context


def _trust(name: str, path: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        raise ConfigurationError(f"{name} {path} contains no certificate in PEM") from None
    except OSError as error:
        raise ConfigurationError(f"{name} {path}: {error.strerror}") from None


def _load_certificate(context: ssl.SSLContext, settings: KafkaAccess) -> None:
    cert, key = settings.kafka_ssl_cert_file, settings.kafka_ssl_key_file
    password = settings.kafka_secret("kafka_ssl_key_password")

    def get_password() -> str:
        # Without it, OpenSSL would prompt on the terminal, and wait.
        if not password:
            raise ConfigurationError(
                f"kafka_ssl_key_file {key} has a password: set kafka_ssl_key_password_file to a "
                "file that contains it"
            )
        return password

    try:
        context.load_cert_chain(str(cert), str(key), get_password)
    except ssl.SSLError as error:
        raise ConfigurationError(_about_pair(error, cert, key, bool(password))) from None
    except OSError as error:
        raise ConfigurationError(f"kafka_ssl_cert_file {cert}: {error.strerror}") from None
    if key is not None:
        check_private("kafka_ssl_key_file", key)


def _about_pair(
    error: ssl.SSLError, cert: Path | None, key: Path | None, has_password: bool
) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"kafka_ssl_key_file {key} is not the key of kafka_ssl_cert_file {cert}"
    if has_password and error.reason != "PEM_LIB":
        return f"the password does not open kafka_ssl_key_file {key}"
    return f"kafka_ssl_cert_file {cert} and kafka_ssl_key_file {key} do not contain both in PEM"


def _stamp(paths: Any) -> Stamp:
    stamps = []
    for path in paths:
        try:
            facts = os.stat(path) if path is not None else None
        except OSError:
            facts = None
        stamps.append(
            (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode)
            if facts
            else (0, 0, 0, 0)
        )
    return tuple(stamps)


# --- tokens for OAUTHBEARER ----------------------------------------------------------------------

FETCH_TIMEOUT_S = 10.0
RENEW_SHARE = 0.8
"""After this share of a token's lifetime the next connection gets a new one."""
DEFAULT_LIFETIME_S = 60.0
"""Lifetime of a token without `expires_in`."""
ANSWER_BYTES_MAX = 256 * 1024
"""Maximum answer of a token endpoint."""
PAUSE_S = 1.0
"""Minimum time between a failure and the next request, because many connections may need a
token."""


def now_s() -> float:
    """Return a monotonic time, seconds."""
    return asyncio.get_running_loop().time()


class NoToken(KafkaError):
    """No token for the login to Kafka; the message holds the reason."""

    def __str__(self) -> str:
        return str(self.args[0])


class TokenInFile(AbstractTokenProvider):
    """The token in a file that Kubernetes or a sidecar renews."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def token(self) -> str:
        """Return the file's current content.

        Raises:
            NoToken: the file cannot be read.
        """
        try:
            return read_secret("kafka_oauth_token_file", self._path)
        except ConfigurationError as error:
            raise NoToken(str(error)) from None


class Credentials(Struct, frozen=True):
    """Client credentials for a token endpoint.

    Attributes:
        url: of the endpoint.
        client_id: at the endpoint.
        secret: returns the client's secret, so that no repr shows it and a new one takes effect.
        scope: to request, or "".
        ca_file: authorities for the endpoint's certificate; None: those of the system.
    """

    url: str
    client_id: str
    secret: Callable[[], str]
    scope: str = ""
    ca_file: Path | None = None


class FetchedToken(AbstractTokenProvider):
    """A token from a token endpoint, by client credentials (RFC 6749 4.4).

    One token serves all connections until most of its lifetime is over. While it is valid, a
    failing endpoint has no effect."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._lock = asyncio.Lock()
        self._token = ""
        self._renew_at = self._ends_at = self._failed_at = float("-inf")
        self._why = ""

    async def token(self) -> str:
        """Return a valid token.

        Raises:
            NoToken: the message holds the reason, never a secret.
        """
        async with self._lock:
            now = now_s()
            if now >= self._renew_at:
                await self._renew(now)
            return self._token

    async def _renew(self, now: float) -> None:
        valid = now < self._ends_at
        if now < self._failed_at + PAUSE_S:
            if valid:
                return
            raise NoToken(self._why)
        try:
            self._token, life_s = await fetch_token(self._credentials)
        except NoToken as error:
            self._failed_at, self._why = now_s(), str(error)
            if not valid:
                raise
            return
        self._renew_at, self._ends_at = now + life_s * RENEW_SHARE, now + life_s


async def fetch_token(credentials: Credentials) -> tuple[str, float]:
    """Fetch a token; return it and its lifetime in seconds.

    Raises:
        NoToken: the message holds the reason, never a secret.
    """
    url = credentials.url
    form = {"grant_type": "client_credentials"}
    if credentials.scope:
        form["scope"] = credentials.scope
    try:
        headers = {"authorization": _basic(credentials), "accept": "application/json"}
        timeout = aiohttp.ClientTimeout(FETCH_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(
                url,
                data=form,
                headers=headers,
                ssl=_authority(credentials.ca_file),
                allow_redirects=False,
            ) as answer,
        ):
            body = await answer.content.read(ANSWER_BYTES_MAX)
            status = answer.status
    except ConfigurationError as error:
        raise NoToken(str(error)) from None
    except aiohttp.ClientConnectorCertificateError as error:
        why = getattr(error.certificate_error, "verify_message", "it is invalid")
        raise NoToken(
            f"the certificate of kafka_oauth_token_url {url} is invalid: {why}; set "
            "kafka_oauth_ca_file to its authority"
        ) from None
    except TimeoutError:
        raise NoToken(f"kafka_oauth_token_url {url} does not answer in time") from None
    except (aiohttp.ClientError, OSError) as error:
        number = getattr(error, "errno", None)
        why = os.strerror(number) if number and number > 0 else type(error).__name__
        raise NoToken(f"kafka_oauth_token_url {url} cannot be reached ({why})") from None
    return _token_of(url, status, body)


def _token_of(url: str, status: int, body: bytes) -> tuple[str, float]:
    try:
        decoded: Any = json.loads(body)
    except ValueError:
        decoded = None
    fields = decoded if isinstance(decoded, dict) else {}
    if status != 200:
        code = str(fields.get("error", ""))[:100]
        shown = f"{status} {code}".strip() if code.isprintable() else str(status)
        hint = ""
        if status in (400, 401, 403):
            hint = ": see kafka_oauth_client_id, its secret and kafka_oauth_scope"
        raise NoToken(f"kafka_oauth_token_url {url} returns no token ({shown}){hint}")
    token, life = fields.get("access_token"), fields.get("expires_in", DEFAULT_LIFETIME_S)
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token:
        raise NoToken(
            f"kafka_oauth_token_url {url} answers without access_token: check that it is a token "
            "endpoint"
        )
    try:
        life_s = float(life)
    except (TypeError, ValueError):
        life_s = DEFAULT_LIFETIME_S
    return token, max(life_s, 0.0)


def _basic(credentials: Credentials) -> str:
    # Encoded as in RFC 6749 2.3.1, so that a colon in an id does not end it.
    pair = f"{quote_plus(credentials.client_id)}:{quote_plus(credentials.secret())}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _authority(path: Path | None) -> ssl.SSLContext | bool:
    return True if path is None else _trust("kafka_oauth_ca_file", path)
