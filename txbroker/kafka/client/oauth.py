"""Tokens for OAUTHBEARER: in a file that somebody renews, or fetched by client credentials."""

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
"""When so much of a token's life is over, the next connection gets a new one."""
LIFE_UNTOLD_S = 60.0
"""For how long a token is used again whose life the endpoint does not tell."""
ANSWER_BYTES_MAX = 256 * 1024
"""The longest answer of a token endpoint that is read."""
PAUSE_S = 1.0
"""After a failure the endpoint is left in peace for so long: many connections may want a token."""


def now_s() -> float:
    """Return a time that only goes forward, seconds."""
    return asyncio.get_running_loop().time()


class NoToken(KafkaError):
    """There is no token to log in to Kafka with; says why."""

    def __str__(self) -> str:
        return str(self.args[0])


class TokenInFile(AbstractTokenProvider):
    """The token in a file, such as Kubernetes or a sidecar keeps renewing it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def token(self) -> str:
        """Return what the file holds now.

        Raises:
            NoToken: it cannot be read.
        """
        try:
            return read_secret("kafka_oauth_token_file", self._path)
        except ConfigurationError as error:
            raise NoToken(str(error)) from None


class Credentials(Struct, frozen=True):
    """By what tokens are fetched.

    Attributes:
        secret: reads the client's secret, so that no repr shows it and a new one counts.
        scope: what to ask for, "" for what the endpoint gives by itself.
        ca_file: who may sign the endpoint's certificate; None: whom the system trusts.
    """

    url: str
    client_id: str
    secret: Callable[[], str]
    scope: str = ""
    ca_file: Path | None = None


class FetchedToken(AbstractTokenProvider):
    """A token from a token endpoint, by client credentials (RFC 6749 4.4).

    One is used for all connections until most of its life is over. While it is valid, an endpoint
    that does not answer hinders nobody.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._lock = asyncio.Lock()
        self._token = ""
        self._renew_at = self._ends_at = self._failed_at = float("-inf")
        self._why = ""

    async def token(self) -> str:
        """Return a token that is valid for a while.

        Raises:
            NoToken: none can be had; the sentence says why and never holds a secret.
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
    """Fetch a token; return it and for how long it is valid, seconds.

    Raises:
        NoToken: says why, without a secret.
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
        why = getattr(error.certificate_error, "verify_message", "it does not hold")
        raise NoToken(
            f"the certificate of kafka_oauth_token_url {url} is refused: {why}; who may sign it is "
            "named by kafka_oauth_ca_file"
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
        found: Any = json.loads(body)
    except ValueError:
        found = None
    told = found if isinstance(found, dict) else {}
    if status != 200:
        code = str(told.get("error", ""))[:100]
        shown = f"{status} {code}".strip() if code.isprintable() else str(status)
        hint = ""
        if status in (400, 401, 403):
            hint = ": see kafka_oauth_client_id, its secret and kafka_oauth_scope"
        raise NoToken(f"kafka_oauth_token_url {url} gives no token ({shown}){hint}")
    token, life = told.get("access_token"), told.get("expires_in", LIFE_UNTOLD_S)
    if not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token:
        raise NoToken(
            f"kafka_oauth_token_url {url} answers without access_token: is it a token endpoint?"
        )
    try:
        life_s = float(life)
    except (TypeError, ValueError):
        life_s = LIFE_UNTOLD_S
    return token, max(life_s, 0.0)


def _basic(credentials: Credentials) -> str:
    # Encoded as RFC 6749 2.3.1 wants it, so that a colon in an id does not end it.
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
            f"kafka_oauth_ca_file {path} holds no certificate in PEM"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"kafka_oauth_ca_file {path}: {error.strerror}") from None
