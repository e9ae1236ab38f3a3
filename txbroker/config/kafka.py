"""Settings of the connection to Kafka: addresses, TLS and login.

Secrets are in files that settings name, or in the environment; never in the config file, which ends
up in repositories and ConfigMaps, nor in options, which every user of a machine can see.
"""

import contextlib
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from txbroker.config.addresses import Address, is_open, parse_address, read_secret
from txbroker.errors import ConfigurationError

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]

_OAUTH = "OAUTHBEARER"


class KafkaAccess(BaseSettings):
    """The settings of the connection to Kafka."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kafka: str = "127.0.0.1:9092"
    """Kafka's bootstrap servers: `host:port`, several separated by commas."""
    kafka_security_protocol: SecurityProtocol = "PLAINTEXT"
    """The security protocol of the connection to Kafka."""
    kafka_sasl_mechanism: SaslMechanism = "PLAIN"
    """The SASL mechanism of the login to Kafka, with a SASL protocol."""
    kafka_sasl_username: str = ""
    """The user name for Kafka."""
    kafka_sasl_password_file: Path | None = None
    """A file that holds the password for Kafka. Read for every connection."""
    kafka_sasl_password: SecretStr | None = None
    """The password for Kafka. Only as an environment variable, in place of
    `kafka_sasl_password_file`."""
    kafka_oauth_token_file: Path | None = None
    """With OAUTHBEARER: a file that holds the token, renewed by another process. Read for every
    connection."""
    kafka_oauth_token_url: str = ""
    """With OAUTHBEARER: the token endpoint of an identity provider (https), at which tokens are
    fetched by client credentials and renewed before they expire."""
    kafka_oauth_client_id: str = ""
    """The client's id at `kafka_oauth_token_url`."""
    kafka_oauth_client_secret_file: Path | None = None
    """A file that holds the client's secret for `kafka_oauth_token_url`."""
    kafka_oauth_client_secret: SecretStr | None = None
    """The client's secret for `kafka_oauth_token_url`. Only as an environment variable, in place of
    `kafka_oauth_client_secret_file`."""
    kafka_oauth_scope: str = ""
    """The scope to ask for at `kafka_oauth_token_url`; several by spaces."""
    kafka_oauth_ca_file: Path | None = None
    """Certificates of the authorities that may sign that of `kafka_oauth_token_url` (PEM). Not
    given: those that the system trusts."""
    kafka_ssl_ca_file: Path | None = None
    """Certificates of the authorities that may sign Kafka's (PEM). Not given: those that the system
    trusts. Reloaded when it changes."""
    kafka_ssl_cert_file: Path | None = None
    """The certificate that the proxy presents to Kafka (PEM). Reloaded when it changes."""
    kafka_ssl_key_file: Path | None = None
    """The private key of `kafka_ssl_cert_file` (PEM), in a file that other users cannot read."""
    kafka_ssl_key_password_file: Path | None = None
    """A file that holds the password of `kafka_ssl_key_file`, if it has one."""
    kafka_ssl_key_password: SecretStr | None = None
    """The password of `kafka_ssl_key_file`. Only as an environment variable, in place of
    `kafka_ssl_key_password_file`."""

    def kafka_secret(self, name: str) -> str:
        """Return a secret such as `kafka_sasl_password`, from its file or the environment; "" where
        there is none."""
        path: Path | None = getattr(self, f"{name}_file")
        if path is not None:
            return read_secret(f"{name}_file", path)
        given: SecretStr | None = getattr(self, name)
        return "" if given is None else given.get_secret_value()

    def open_kafka_secrets(self) -> list[str]:
        """Return the settings whose secret file other users of this machine can read or change.

        They are used all the same: Kubernetes mounts Secrets so by default.
        """
        found = []
        names = [f"{name}_file" for name in secret_settings(type(self))]
        for name in (*names, "kafka_oauth_token_file"):
            path: Path | None = getattr(self, name)
            with contextlib.suppress(OSError):  # reading it reports the error
                if path is not None and is_open(path):
                    found.append(name)
        return found

    def check_kafka(self) -> None:
        """Refuse contradictory or impossible settings."""
        _check_servers(self.kafka)
        for name in secret_settings(type(self)):
            if getattr(self, name) is not None and getattr(self, f"{name}_file") is not None:
                raise ConfigurationError(
                    f"{name} and {name}_file exclude each other: set one of them"
                )
        _check_tls(self)
        _check_login(self)
        for name in secret_settings(type(self)):
            self.kafka_secret(name)


def secret_settings(kind: type[BaseSettings]) -> list[str]:
    """Return the settings that are secrets themselves: only the environment may hold them."""
    return [name for name, field in kind.model_fields.items() if is_secret(field)]


def is_secret(field: FieldInfo) -> bool:
    """Return whether a setting is a secret itself, and not a file's name."""
    return field.annotation == SecretStr | None


def _check_servers(servers: str) -> None:
    for server in servers.split(","):
        try:
            port = parse_address(server.strip()).port
        except ConfigurationError as error:
            raise ConfigurationError(f"kafka: {error}") from None
        if port == 0:
            raise ConfigurationError(f"kafka: {server.strip()!r} has port 0")


def _check_tls(given: KafkaAccess) -> None:
    tls = given.kafka_security_protocol.endswith("SSL")
    for name in _names(given, "kafka_ssl_"):
        path = getattr(given, name)
        if not tls:
            raise ConfigurationError(f"{name} needs kafka_security_protocol SSL or SASL_SSL")
        if isinstance(path, Path) and not path.is_file():
            raise ConfigurationError(f"{name} {path}: no such file")
    if (given.kafka_ssl_cert_file is None) != (given.kafka_ssl_key_file is None):
        raise ConfigurationError("kafka_ssl_cert_file and kafka_ssl_key_file belong together")
    if given.kafka_ssl_key_file is None and (names := _names(given, "kafka_ssl_key_password")):
        raise ConfigurationError(f"{names[0]} needs kafka_ssl_key_file")


def _check_login(given: KafkaAccess) -> None:
    protocol = given.kafka_security_protocol
    passwords = _names(given, "kafka_sasl_password")
    by_password = (["kafka_sasl_username"] if given.kafka_sasl_username else []) + passwords
    by_token = _names(given, "kafka_oauth_")
    if not protocol.startswith("SASL"):
        if by_password:
            raise ConfigurationError(
                "kafka_sasl_username and kafka_sasl_password_file need kafka_security_protocol "
                "SASL_SSL or SASL_PLAINTEXT"
            )
        if by_token:
            raise ConfigurationError(
                f"{by_token[0]} needs kafka_security_protocol SASL_SSL or SASL_PLAINTEXT"
            )
    elif given.kafka_sasl_mechanism == _OAUTH:
        if by_password:
            raise ConfigurationError(
                f"{by_password[0]} is not for kafka_sasl_mechanism {_OAUTH}, which logs in by token"
            )
        _check_oauth(given)
    elif by_token:
        raise ConfigurationError(f"{by_token[0]} needs kafka_sasl_mechanism {_OAUTH}")
    elif not (given.kafka_sasl_username and passwords):
        raise ConfigurationError(
            f"kafka_security_protocol {protocol} needs kafka_sasl_username and "
            "kafka_sasl_password_file"
        )


def _check_oauth(given: KafkaAccess) -> None:
    by_credentials = [n for n in _names(given, "kafka_oauth_") if n != "kafka_oauth_token_file"]
    if given.kafka_oauth_token_file is not None:
        if by_credentials:
            raise ConfigurationError(
                f"kafka_oauth_token_file and {by_credentials[0]} exclude each other: the "
                "token is in the file, or is fetched"
            )
        read_secret("kafka_oauth_token_file", given.kafka_oauth_token_file)
        return
    url, secrets = given.kafka_oauth_token_url, _names(given, "kafka_oauth_client_secret")
    if not (url and given.kafka_oauth_client_id and secrets):
        raise ConfigurationError(
            f"kafka_sasl_mechanism {_OAUTH} needs kafka_oauth_token_file, or "
            "kafka_oauth_token_url, kafka_oauth_client_id and kafka_oauth_client_secret_file"
        )
    _check_token_url(url)
    if given.kafka_oauth_ca_file is not None and not given.kafka_oauth_ca_file.is_file():
        raise ConfigurationError(f"kafka_oauth_ca_file {given.kafka_oauth_ca_file}: no such file")


def _check_token_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        sound = bool(host) and parts.scheme in ("http", "https") and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise ConfigurationError(
            "kafka_oauth_token_url is not a URL like https://login.example.org/token"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigurationError(
            "kafka_oauth_token_url must not have a user, query or fragment: only host and path"
        )
    if parts.scheme == "http" and Address(host, 0).public:
        raise ConfigurationError(
            f"kafka_oauth_token_url {url} would send the client's secret unencrypted: use https"
        )


def _names(given: KafkaAccess, prefix: str) -> list[str]:
    """Return the settings of a prefix that are set."""
    unset: tuple[Any, ...] = (None, "")
    return [
        name
        for name in type(given).model_fields
        if name.startswith(prefix) and getattr(given, name) not in unset
    ]
