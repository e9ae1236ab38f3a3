"""Tokens for OAUTHBEARER: from a file, or fetched by client credentials."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import aiohttp
from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import KafkaError
from msgspec import Struct

from txbroker.config.addresses import read_secret
from txbroker.errors import ConfigurationError

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
                url, data=form, headers=headers, ssl=_trust(credentials), allow_redirects=False
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


def _trust(credentials: Credentials) -> ssl.SSLContext | bool:
    path = credentials.ca_file
    if path is None:
        return True
    try:
        return ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        raise ConfigurationError(
            f"kafka_oauth_ca_file {path} contains no certificate in PEM"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"kafka_oauth_ca_file {path}: {error.strerror}") from None
