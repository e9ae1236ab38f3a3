"""TLS and login arguments of new connections.

Passwords, tokens and certificates are read for each new connection, so that changed files take
effect without a restart. Open connections stay open."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import structlog
from aiokafka.abc import AbstractTokenProvider

from txbroker.config.addresses import check_private
from txbroker.config.settings import Settings
from txbroker.errors import ConfigurationError
from txbroker.kafka.client.oauth import Credentials, FetchedToken, TokenInFile

Stamp = tuple[tuple[int, int, int, int], ...]
"""Inode, size, modification time and mode of files, to detect changes."""

log = structlog.wrap_logger(logging.getLogger(__name__))

TLS_FILES = ("kafka_ssl_ca_file", "kafka_ssl_cert_file", "kafka_ssl_key_file")


class Login(Protocol):
    """The identity of one client."""

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments for a new connection of the client library.

        Raises:
            ConfigurationError: a file cannot be read, or has the wrong content.
        """
        ...


class NoLogin:
    """Neither TLS nor a login."""

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments for a new connection."""
        return {"security_protocol": "PLAINTEXT"}


LoginMaker = Callable[[], Login]
"""Returns the login of one client, inside its event loop."""


class SettingsLogin:
    """The login of a configuration."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._context: tuple[Stamp, ssl.SSLContext] | None = None
        self._rejected: Stamp | None = None
        self._tokens: AbstractTokenProvider | None = None

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments for a new connection of the client library.

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


def token_provider(settings: Settings) -> AbstractTokenProvider:
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


def tls_context(settings: Settings) -> ssl.SSLContext:
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


def _load_certificate(context: ssl.SSLContext, settings: Settings) -> None:
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
