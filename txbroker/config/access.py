"""Settings of the listeners and of the connection to Kafka: addresses, TLS, access and login.

Secrets are in files that settings name, those of Kafka also in the environment; never in the config
file, which ends up in repositories and ConfigMaps, nor in options, which every user of a machine
can see.
"""

import contextlib
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import SecretStr, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from txbroker.config.addresses import (
    Address,
    check_url,
    is_open,
    parse_address,
    parse_host_rules,
    parse_secret_variable,
    parse_servers,
    read_secret,
    read_token,
)
from txbroker.errors import ConfigurationError
from txbroker.principals import digest_of, read_principals


class ListenerAccess(BaseSettings):
    """The settings of the listeners."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    listen: str = "127.0.0.1:8470"
    """Where the HTTP API listens: `host:port`. Port 0 takes a free one. Outside loopback it needs
    `token_file`, `principals_file`, `tls_client_ca_file` or `insecure`."""
    advertise: str = ""
    """The URL at which SDKs and other proxies reach this one, for instance `http://proxy-1:8470`,
    with `tls_cert_file` `https://`. Empty: made from `listen`, unless that is every address of the
    machine (`0.0.0.0`, `[::]`): then it must be given."""
    admin_listen: str = ""
    """Where the proxy listens for operators: `host:port`. The console, `/metrics`, `/v1/overview`,
    listing, check, revive, groups' list, removal and test are then served there and not at
    `listen`, so that producers cannot reach them. Empty: all is at `listen`. Outside loopback it
    needs what `listen` needs, or `admin_token_file`."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names by which the HTTP API may be called, beside loopback and those of `listen`
    and `advertise`. Calls for other names are refused, which stops DNS rebinding."""
    token_file: Path | None = None
    """A file that holds the token which every call must carry as `authorization: Bearer TOKEN`, at
    least 16 characters, unreadable for other users. Reloaded when it changes."""
    admin_token_file: Path | None = None
    """A file that holds the token for `admin_listen`. The token of `token_file` is not valid there
    then, nor this one at `listen`. Reloaded when it changes. Not given: `token_file`."""
    principals_file: Path | None = None
    """A TOML file of principals: who may call, in which role, for which producer groups and topics.
    Written by hand or by `txbroker principals add`. Reloaded when it changes; sessions of a removed
    principal are closed at once."""
    peer_secret_file: Path | None = None
    """A file that holds the secret by which the proxies of one installation recognize each other.
    With `token_file`, `principals_file` or `tls_client_ca_file`, several proxies need it, or
    `peer_names`. Reloaded when it changes."""
    peer_names: tuple[str, ...] = ()
    """Names in client certificates that identify a proxy of this installation, as patterns
    (`proxy-*.example`). Needs `tls_client_ca_file`."""
    peer_listen: str = ""
    """Where the proxy listens for other proxies: `host:port`. Their calls are then served there and
    not at `listen`. Outside loopback it needs `peer_secret_file`, `peer_names` or `insecure`.
    Empty: they are at `listen`."""
    peer_advertise: str = ""
    """The URL at which other proxies reach `peer_listen`. Empty: made from `peer_listen`, unless
    that is every address of the machine; then it must be given."""
    insecure: bool = False
    """Allow a `listen` or `admin_listen` address outside loopback without principals, a token or
    client certificates, and a `peer_listen` address there without `peer_secret_file` or
    `peer_names`."""
    tls_cert_file: Path | None = None
    """The proxy's certificate, followed by the intermediate ones (PEM). With it all is served over
    TLS (`https://`, `wss://`, 1.2 and later), and the proxy presents it to other proxies. Reloaded
    when it changes."""
    tls_key_file: Path | None = None
    """The private key of `tls_cert_file`, without a passphrase (PEM), in a file that other users
    cannot read. Reloaded when it changes."""
    tls_client_ca_file: Path | None = None
    """Certificates of the authorities that may sign clients' (PEM). With it every call needs a
    client certificate, except `/healthz` and `/readyz`. Reloaded when it changes."""
    peers_ca_file: Path | None = None
    """Certificates of the authorities that may sign those of the other proxies (PEM). Not given:
    `tls_client_ca_file`, else the system's. Reloaded when it changes."""

    check_url_allow: tuple[str, ...] = ()
    """Addresses, networks (`10.1.0.0/16`) and hosts (`orders.example`, `*.example`) that check URLs
    may lead to although they are refused by default: loopback, link-local, multicast and reserved
    addresses, those of cloud metadata services, and, for whole host names, the installation's own.
    `*.example` allows neither link-local and metadata addresses nor the installation's own: the
    owner of the domain chooses where its names lead. A proxy that listens on loopback only allows
    loopback."""
    check_url_deny: tuple[str, ...] = ()
    """Addresses, networks and hosts that check URLs must not lead to; wins over `check_url_allow`.
    `private` stands for all private networks (RFC 1918, carrier-grade NAT, IPv6 unique local),
    which are allowed by default. A host name denies this name alone: list the addresses, too, so
    that neither they nor other names for them get there."""
    secrets_dir: Path | None = None
    """The folder of groups' secrets. A group's `secret_ref` (`file:/path`) may name the file in it
    that has the group's name, or a file in the folder of that name. The name is written as in URL
    paths, with a leading dot as `%2E`. Not given: no files."""
    secret_env_allow: tuple[str, ...] = ()
    """The environment variables that groups' `secret_ref` may name (`env:NAME`): `GROUP:NAME` for
    one group, `NAME` for every group. The proxy's own (`TXBROKER_…`) can never be among them."""

    @field_validator("advertise", "peer_advertise")
    @classmethod
    def _without_slash(cls, url: str) -> str:
        # Owners are compared by their URL, so one proxy must not have two spellings.
        return url.removesuffix("/")

    @property
    def listen_address(self) -> Address:
        """`listen`, parsed."""
        return parse_address(self.listen)

    @property
    def admin_address(self) -> Address | None:
        """`admin_listen`, parsed; None if not set."""
        return parse_address(self.admin_listen) if self.admin_listen else None

    @property
    def peer_address(self) -> Address | None:
        """`peer_listen`, parsed; None if not set."""
        return parse_address(self.peer_listen) if self.peer_listen else None

    @property
    def guarded(self) -> bool:
        """Whether callers need a credential."""
        files = (self.token_file, self.principals_file, self.tls_client_ca_file)
        return any(path is not None for path in files)

    @property
    def peer_identity(self) -> bool:
        """Whether proxies can authenticate to each other."""
        return self.peer_secret_file is not None or bool(self.peer_names)

    @property
    def secure(self) -> bool:
        """Whether the proxy listens with TLS."""
        return self.tls_cert_file is not None

    @property
    def advertise_url(self) -> str:
        """`advertise`, or the URL of `listen` (with port 0 only known once it listens)."""
        return self.advertise or self.listen_address.url_of(secure=self.secure)

    @property
    def loopback_only(self) -> bool:
        """Whether only this machine can connect to the proxy."""
        addresses = (self.listen_address, self.admin_address, self.peer_address)
        return not any(address is not None and address.public for address in addresses)

    def check_secrets(self) -> None:
        """Refuse equal secrets for two roles: a producer could act as an operator or as a proxy."""
        holders: dict[str, str] = {}
        for name in ("token_file", "admin_token_file", "peer_secret_file"):
            path: Path | None = getattr(self, name)
            if path is not None:
                _hold(holders, digest_of(read_token(name, path)), name)
        if self.principals_file is not None:
            for principal in read_principals(self.principals_file):
                for digest in principal.digests:
                    _hold(holders, digest, f"principal {principal.name}")

    def check_access(self) -> None:
        """Refuse contradictory or impossible settings."""
        _check_addresses(self)
        _check_files(self)
        _check_groups(self)


def _check_addresses(given: ListenerAccess) -> None:
    address = _address("listen", given.listen)
    _check_open("listen", address, given)
    taken = {"listen": address}
    for name in ("admin_listen", "peer_listen"):
        if not getattr(given, name):
            continue
        other = _address(name, getattr(given, name))
        for earlier, at in taken.items():
            if other == at and at.port:
                raise ConfigurationError(
                    f"{name} {getattr(given, name)} is the address of {earlier}: choose another "
                    "port"
                )
        taken[name] = other
        _check_open(name, other, given)
    if given.admin_token_file is not None and not given.admin_listen:
        raise ConfigurationError(
            "admin_token_file needs admin_listen: at one address there is one token"
        )
    if given.peer_advertise and not given.peer_listen:
        raise ConfigurationError("peer_advertise needs peer_listen")
    _check_reachable("advertise", given.advertise, address, secure=given.secure)
    if given.peer_address is not None:
        _check_reachable(
            "peer_advertise", given.peer_advertise, given.peer_address, secure=given.secure
        )


def _address(name: str, text: str) -> Address:
    try:
        return parse_address(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from None


def _check_open(name: str, address: Address, given: ListenerAccess) -> None:
    guarded = given.guarded or (name == "admin_listen" and given.admin_token_file is not None)
    if name == "peer_listen":
        guarded = given.peer_identity
    if address.public and not guarded and not given.insecure:
        needs = (
            "peer_secret_file or peer_names"
            if name == "peer_listen"
            else "token_file, principals_file or tls_client_ca_file"
        )
        raise ConfigurationError(
            f"{name} {getattr(given, name)} can be reached from other machines, so any client "
            f"could decide transactions: set {needs}, or insecure if the network is closed"
        )


def _check_reachable(name: str, url: str, listen: Address, *, secure: bool) -> None:
    """Refuse an advertised address that other machines cannot call."""
    listen_name = "listen" if name == "advertise" else "peer_listen"
    if not url:
        if listen.wildcard:
            example = listen._replace(host="proxy-1").url_of(secure=secure)
            raise ConfigurationError(
                f"{listen_name} {listen} is every address of this machine, "
                f"which SDKs and other proxies cannot call: set {name} to the URL at which they "
                f"reach this proxy, like {example}"
            )
        return
    check_url(name, url)
    if secure and urlsplit(url).scheme != "https":
        raise ConfigurationError(
            f"{name} {url} is without TLS, but tls_cert_file is set: it must begin with https://"
        )
    if Address(urlsplit(url).hostname or "", 0).wildcard:
        raise ConfigurationError(
            f"{name} {url} is not an address that clients can call: name this machine"
        )


def _hold(holders: dict[str, str], digest: str, name: str) -> None:
    other = holders.setdefault(digest, name)
    if other != name:
        raise ConfigurationError(
            f"{other} and {name} hold the same secret: create another one for one of them"
        )


def _check_files(given: ListenerAccess) -> None:
    given.check_secrets()
    if (given.tls_cert_file is None) != (given.tls_key_file is None):
        raise ConfigurationError("tls_cert_file and tls_key_file belong together: set both")
    if given.tls_client_ca_file is not None and not given.secure:
        raise ConfigurationError("tls_client_ca_file needs tls_cert_file and tls_key_file")
    if given.peer_names and given.tls_client_ca_file is None:
        raise ConfigurationError(
            "peer_names needs tls_client_ca_file: without it no client certificate is asked for"
        )


_OWN_VARIABLES = "TXBROKER_"
_NOT_FOR_SECRETS = ("/proc", "/sys", "/dev")


def _check_groups(given: ListenerAccess) -> None:
    parse_host_rules("check_url_allow", given.check_url_allow)
    parse_host_rules("check_url_deny", given.check_url_deny, private=True)
    for entry in given.secret_env_allow:
        _, variable = parse_secret_variable(entry)
        if not entry.isprintable() or not variable or "=" in variable or entry.startswith(":"):
            raise ConfigurationError(
                f"secret_env_allow {entry!r} is no name of an environment variable, alone or as "
                "GROUP:NAME"
            )
        if variable.upper().startswith(_OWN_VARIABLES):
            raise ConfigurationError(
                f"secret_env_allow {variable} is a variable of the proxy itself: give the group a "
                "separate secret"
            )
    if given.secrets_dir is None:
        return
    if not given.secrets_dir.is_dir():
        raise ConfigurationError(f"secrets_dir {given.secrets_dir} is not a folder")
    real = given.secrets_dir.resolve()
    if real == Path("/") or any(real.is_relative_to(place) for place in _NOT_FOR_SECRETS):
        raise ConfigurationError(
            f"secrets_dir {given.secrets_dir} holds more than secrets of groups: create a folder "
            "for them"
        )


# --- the connection to Kafka ---------------------------------------------------------------------

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]

_OAUTH = "OAUTHBEARER"


class KafkaAccess(BaseSettings):
    """The settings of the connection to Kafka."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kafka: str = "127.0.0.1:9092"
    """Kafka's servers: `host:port` or `[::1]:port`, by commas."""
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

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use no other sources: `load_settings` and `load_kafka_access` merge them."""
        return (init_settings,)

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
    try:
        addresses = parse_servers(servers)
    except ConfigurationError as error:
        raise ConfigurationError(f"kafka: {error}") from None
    for address in addresses:
        if address.port == 0:
            raise ConfigurationError(f"kafka: {str(address)!r} has port 0")


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
