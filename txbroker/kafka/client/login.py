"""What a connection is told about TLS and the login, by the settings as they are at that moment.

Passwords, tokens and certificates are read for each new connection, so what is changed on disk
counts without a restart. Connections that are open stay so.
"""

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
"""By what it is seen that files changed: of each its inode, size, time of change and mode."""

log = structlog.wrap_logger(logging.getLogger(__name__))

TLS_FILES = ("kafka_ssl_ca_file", "kafka_ssl_cert_file", "kafka_ssl_key_file")


class Login(Protocol):
    """Who one client is to Kafka."""

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments for a new connection of the client library.

        Raises:
            ConfigurationError: a file cannot be read, or does not hold what it should.
        """
        ...


class NoLogin:
    """Neither TLS nor a login."""

    def arguments(self) -> dict[str, Any]:
        """Return what says so."""
        return {"security_protocol": "PLAINTEXT"}


LoginMaker = Callable[[], Login]
"""Makes the login of one client, inside its event loop."""


class SettingsLogin:
    """The login that settings describe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._context: tuple[Stamp, ssl.SSLContext] | None = None
        self._not_taken: Stamp | None = None
        self._tokens: AbstractTokenProvider | None = None

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments for a new connection of the client library.

        Raises:
            ConfigurationError: a file cannot be read, or does not hold what it should.
        """
        protocol = self._settings.kafka_security_protocol
        given: dict[str, Any] = {"security_protocol": protocol}
        if protocol.endswith("SSL"):
            given["ssl_context"] = self._tls()
        if protocol.startswith("SASL"):
            given |= self._sasl()
        return given

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
        """Return the context, made anew where its files changed.

        Certificate and key are two files: between the changes of both they may not fit. Then the
        former ones are used for one more connection.
        """
        stamp = _stamp(getattr(self._settings, name) for name in TLS_FILES)
        if self._context is not None and self._context[0] == stamp:
            return self._context[1]
        try:
            made = tls_context(self._settings)
        except ConfigurationError as error:
            if self._context is None:
                raise
            if stamp != self._not_taken:  # said once: it is asked for each connection
                self._not_taken = stamp
                log.warning("tls files not taken", files=", ".join(TLS_FILES), why=str(error))
            return self._context[1]
        self._context = (stamp, made)
        return made


def token_provider(settings: Settings) -> AbstractTokenProvider:
    """Return where the tokens for OAUTHBEARER come from."""
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
    """Return how to speak TLS with Kafka. Certificates and host names are always looked at.

    Raises:
        ConfigurationError: a file does not hold what it should; the sentence names its setting.
    """
    if settings.kafka_ssl_ca_file is None:
        context = ssl.create_default_context()
    else:
        # Whoever names an authority wants that one, and not also all that the system trusts.
        context = _trusting("kafka_ssl_ca_file", settings.kafka_ssl_ca_file)
    if settings.kafka_ssl_cert_file is not None and settings.kafka_ssl_key_file is not None:
        _show_certificate(context, settings)
    return context


def _trusting(name: str, path: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=path)
    except ssl.SSLError:
        raise ConfigurationError(f"{name} {path} holds no certificate in PEM") from None
    except OSError as error:
        raise ConfigurationError(f"{name} {path}: {error.strerror}") from None


def _show_certificate(context: ssl.SSLContext, settings: Settings) -> None:
    cert, key = settings.kafka_ssl_cert_file, settings.kafka_ssl_key_file
    password = settings.kafka_secret("kafka_ssl_key_password")

    def asked() -> str:
        # Without this, OpenSSL would ask on the terminal, and wait.
        if not password:
            raise ConfigurationError(
                f"kafka_ssl_key_file {key} has a password: name a file that holds it by "
                "kafka_ssl_key_password_file"
            )
        return password

    try:
        context.load_cert_chain(str(cert), str(key), asked)
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
    return f"kafka_ssl_cert_file {cert} and kafka_ssl_key_file {key} do not hold both in PEM"


def _stamp(paths: Any) -> Stamp:
    found = []
    for path in paths:
        try:
            facts = os.stat(path) if path is not None else None
        except OSError:
            facts = None
        found.append(
            (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode)
            if facts
            else (0, 0, 0, 0)
        )
    return tuple(found)
