"""Validation of configuration values: addresses, URLs, files with secrets.

An invalid value raises ConfigurationError, which names the setting, the value and the next step.
"""

import ipaddress
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

from txbroker.errors import ConfigurationError

HOST_CHARS_MAX = 253
"""The longest DNS name. Resolvers refuse a longer one, or one with an empty or too long label."""
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NUMERIC_END = re.compile(r"(.*\.)?(\d+|0[xX][0-9a-fA-F]*)")
"""Resolvers read such a name as an IPv4 address: `127.1`, `0x7f000001`."""

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

PRIVATE = "private"
"""The entry for all private networks."""
PRIVATE_NETWORKS: tuple[IpNetwork, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7", "fec0::/10"
    )
)  # fmt: skip


PORT_MAX = 65535
KAFKA_PORT = 9092
TOKEN_CHARS_MIN = 16
"""A shorter token can be guessed with many attempts."""
OPEN_MODE = stat.S_IRWXO | stat.S_IWGRP
"""The file's group may read it: Kubernetes mounts Secrets so."""


class Address(NamedTuple):
    """A host and a port; the host without brackets. As text: `host:port`, `[::1]:port`."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def public(self) -> bool:
        """Whether other machines can connect."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True

    @property
    def wildcard(self) -> bool:
        """Whether it is every address of this machine, which clients cannot call."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    def url_of(self, *, secure: bool) -> str:
        """Return the address as an https URL, or an http one."""
        return f"{'https' if secure else 'http'}://{self}"


def with_later_port(text: str, later: int) -> str:
    """Return `host:port`, or a URL that ends so, with its port plus `later`; port 0 stays."""
    host, _, port = text.rpartition(":")
    return f"{host}:{int(port) + later}" if int(port) else text


def parse_address(text: str) -> Address:
    """Return the parsed `host:port`; an IPv6 address is in brackets, as `[::1]:port`."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    sound = colon and port.isdecimal() and port.isascii() and int(port) <= PORT_MAX
    if not sound or not _is_host(host) or (":" in host) != bracketed:
        literal = text.strip("[]")
        hint = f", such as [{literal}]:PORT" if ":" in literal and _is_host(literal) else ""
        raise ConfigurationError(f"{text!r} is not an address: expected host:port{hint}")
    return Address(host, int(port))


def parse_servers(text: str) -> list[Address]:
    """Return the parsed Kafka servers, separated by commas: `host:port`, or an IPv6 address, whose
    port is 9092 if it has none."""
    return [_parse_server(part.strip()) for part in text.split(",")]


def _parse_server(text: str) -> Address:
    literal = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" not in literal or "[" in literal or not _is_host(literal):
        return parse_address(text)
    host, _, port = text.rpartition(":")
    if text == literal and ":" in host and _is_host(host) and port.isdecimal():
        raise ConfigurationError(
            f"{text!r} is not an address: it could end with a port: write [{host}]:{port}, or "
            f"[{text}]:{KAFKA_PORT}"
        )
    return Address(literal, KAFKA_PORT)


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return len(text) <= HOST_CHARS_MAX and _NAME.fullmatch(text) is not None
    return True


class HostRules(NamedTuple):
    """Hosts and networks, as `check_url_allow` and `check_url_deny` list them."""

    hosts: frozenset[str] = frozenset()
    suffixes: tuple[str, ...] = ()
    networks: tuple[IpNetwork, ...] = ()

    def names(self, host: str) -> bool:
        """Return whether an entry matches this host, exactly or by `*.suffix`."""
        name = plain_host(host)
        return name in self.hosts or name.endswith(self.suffixes)

    def lists(self, host: str) -> bool:
        """Return whether an entry is exactly this host name."""
        return plain_host(host) in self.hosts

    def contains(self, address: IpAddress) -> bool:
        """Return whether an entry is this address or its network."""
        return any(address in network for network in self.networks)


def plain_host(host: str) -> str:
    """Return a normalized host name: lower case, without the root's dot."""
    return host.lower().rstrip(".")


def parse_host_rules(name: str, entries: Iterable[str], *, private: bool = False) -> HostRules:
    """Return the hosts and networks that the entries of a setting list; `private` allows that
    entry."""
    hosts: set[str] = set()
    suffixes: list[str] = []
    networks: list[IpNetwork] = []
    for entry in entries:
        text = plain_host(entry)
        network = _network(entry)
        if private and text == PRIVATE:
            networks.extend(PRIVATE_NETWORKS)
        elif network is not None:
            networks.append(network)
        elif _is_name(text.removeprefix("*.")):
            if text.startswith("*."):
                suffixes.append(text[1:])
            else:
                hosts.add(text)
        else:
            known = "an address, a network like 10.0.0.0/8, a host name or *.suffix"
            raise ConfigurationError(f"{name} {entry!r} is not {known}")
    return HostRules(frozenset(hosts), tuple(suffixes), tuple(networks))


def _network(text: str) -> IpNetwork | None:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        network = ipaddress.ip_network(bare)
    except ValueError:
        return None
    # An IPv4 address written as IPv6 is tested as IPv4, so such a network would never match.
    mapped = network.version == 6 and network.network_address.ipv4_mapped is not None
    return None if mapped else network


def _is_name(text: str) -> bool:
    sound = len(text) <= HOST_CHARS_MAX and _NAME.fullmatch(text) is not None
    return sound and _NUMERIC_END.fullmatch(text) is None


def check_url(name: str, url: str) -> None:
    """Refuse anything but the plain http(s) URL of a server."""
    if "@" in url:  # before any sentence that shows the URL
        raise ConfigurationError(f"{name} must not hold a user name or password")
    try:
        parts = urlsplit(url)
        port_sound = parts.port is None or parts.port > 0
    except ValueError as error:
        raise ConfigurationError(f"{name} {url!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not _is_host(parts.hostname or ""):
        raise ConfigurationError(f"{name} {url!r} is not a URL like http://proxy-1:8470")
    if parts.path not in ("", "/") or parts.query or parts.fragment or not port_sound:
        raise ConfigurationError(f"{name} {url!r} must end after host and port")


def parse_secret_variable(entry: str) -> tuple[str, str]:
    """Return the group, "" for every group, and the variable of an entry of `secret_env_allow`:
    `NAME` or `GROUP:NAME`."""
    group, _, variable = entry.rpartition(":")
    return group, variable


def read_secret(name: str, path: Path) -> str:
    """Return the secret in a file, without white space around it."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigurationError(f"{name} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{name} {path} is not text") from None
    if not secret:
        raise ConfigurationError(f"{name} {path} is empty")
    return secret


def is_open(path: Path) -> bool:
    """Return whether other users of the machine can read or change a file; raise OSError without
    it."""
    return bool(path.stat().st_mode & OPEN_MODE)


def check_private(name: str, path: Path) -> None:
    """Refuse a file that other users of the machine can read or change."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigurationError(f"{name} {path}: {error.strerror}") from None
    if mode & OPEN_MODE:
        raise ConfigurationError(
            f"{name} {path} is open to other users of this machine (mode {mode:04o}): run "
            f"`chmod 600 {path}`; in Kubernetes mount it with defaultMode 0440 and an fsGroup"
        )


def read_token(name: str, path: Path) -> str:
    """Return the token in a file that other users cannot read."""
    check_private(name, path)
    token = read_secret(name, path)
    if len(token) < TOKEN_CHARS_MIN:
        raise ConfigurationError(
            f"{name} {path} holds a token of {len(token)} characters, which can be guessed: at "
            f"least {TOKEN_CHARS_MIN} are needed. Make one with `openssl rand -hex 32`"
        )
    return token
