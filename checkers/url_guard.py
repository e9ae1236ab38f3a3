"""Which addresses a check URL may lead to.

A client that may register a group makes the proxy call any URL from inside the network. So the
guard tests the address that is connected to, not the text of the URL: every spelling of an address,
and every name for it, gives the same result.
"""

import ipaddress
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from msgspec import Struct

from txbroker.checkers.connections import HostResolver
from txbroker.config.addresses import Address, HostRules, IpAddress, IpNetwork, plain_host

ADDRESSES_KNOWN_MAX = 4096
"""Addresses whose kind is cached: a kept connection's is tested before each check."""

_Kinds = tuple[tuple[str, tuple[IpNetwork, ...]], ...]


def _networks(*texts: str) -> tuple[IpNetwork, ...]:
    return tuple(ipaddress.ip_network(text) for text in texts)


_LIST_IT = "the proxy's setting check_url_allow can allow it"
_NAME_IT = "only a whole host name in the proxy's setting check_url_allow can allow it"
_NOT_BY_SUFFIX = "only an address or a whole host name in check_url_allow can allow it"
_METADATA = "the address of a cloud metadata service"
_LOOPBACK = "a loopback address"
_LINK_LOCAL = "a link-local address"
_UNSPECIFIED = "an unspecified address"
_MACHINE = (_METADATA, _LINK_LOCAL)
"""These give credentials of the machine: refused to a client that controls a name below an allowed
suffix."""
_REFUSED: _Kinds = (
    (
        _METADATA,
        _networks(
            "169.254.169.254/32",  # AWS, Azure, Google, Oracle, OpenStack and others
            "169.254.170.2/32",  # AWS ECS
            "169.254.170.23/32",  # AWS EKS
            "100.100.100.200/32",  # Alibaba
            "168.63.129.16/32",  # Azure
            "192.0.0.192/32",  # Oracle
            "fd00:ec2::/32",  # AWS
            "fd20:ce::254/128",  # Google
        ),
    ),
    (_LOOPBACK, _networks("127.0.0.0/8", "::1/128")),
    (_UNSPECIFIED, _networks("0.0.0.0/8", "::/128")),
    (_LINK_LOCAL, _networks("169.254.0.0/16", "fe80::/10")),
    ("a multicast address", _networks("224.0.0.0/4", "ff00::/8")),
    ("a reserved address", _networks("240.0.0.0/4")),
)
_METADATA_NAMES = frozenset(
    {
        "metadata",  # Google
        "metadata.goog",
        "metadata.google.internal",
        "instance-data",  # AWS
        "instance-data.ec2.internal",
        "metadata.tencentyun.com",
    }
)
_TAIL_32 = _networks("::/96", "::ffff:0:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48")
"""IPv4-compatible, SIIT and NAT64: the IPv4 address is in the last 32 bits."""
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)


class UrlGuard(Struct, frozen=True):
    """The rules of one proxy.

    Attributes:
        allow: exceptions to the addresses that are refused by default. An entry `*.suffix` allows
            less than a whole host name: no metadata or link-local address, no own endpoint.
        deny: must not be called; takes precedence over `allow`.
        loopback: True allows loopback addresses, for a proxy that itself listens only there.
    """

    allow: HostRules = HostRules()
    deny: HostRules = HostRules()
    loopback: bool = False

    def refuse_name(self, host: str) -> str | None:
        """Return why a host is refused by its name alone, or None."""
        return f"{host} is in check_url_deny" if self.deny.names(host) else None

    def refuse(self, host: str, address: str, *, own: bool = False) -> str | None:
        """Return why `host` must not be called at `address`, or None.

        Args:
            host: as the URL names it.
            address: an IP address that the name stands for.
            own: True if the installation itself listens at this address and the URL's port.
        """
        denied = self.refuse_name(host)
        if denied is not None:
            return denied
        if any(map(self.deny.contains, forms(address))):
            return f"{address} is in check_url_deny"
        if self.allow.lists(host):
            return None
        if own:
            return f"{address} is an address of txbroker or its Kafka; {_NAME_IT}"
        by_suffix = self.allow.names(host)
        for form in forms(address):
            kind = self._kind(form)
            if kind is None or self.allow.contains(form):
                continue
            if not by_suffix:
                return f"{address} is {kind}; {_LIST_IT}"
            if kind in _MACHINE:
                return f"{address} is {kind}; {_NOT_BY_SUFFIX}"
        return None

    def _kind(self, address: IpAddress) -> str | None:
        kind = _refused_kind(address)
        return None if kind is _LOOPBACK and self.loopback else kind


@lru_cache(maxsize=ADDRESSES_KNOWN_MAX)
def _refused_kind(address: IpAddress) -> str | None:
    for kind, networks in _REFUSED:
        if any(address in network for network in networks):
            return kind
    return None


def leads_inside(rules: HostRules) -> bool:
    """Return True if allowed hosts include the machine itself or its sources of credentials.

    An unspecified address is one of the machine's own. An entry `*.suffix` never allows a metadata
    address.
    """
    names = rules.hosts | {suffix.removeprefix(".") for suffix in rules.suffixes}
    if rules.hosts & _METADATA_NAMES or any(_is_localhost(name) for name in names):
        return True
    kinds = (*_MACHINE, _LOOPBACK, _UNSPECIFIED)
    inside = [one for kind, networks in _REFUSED if kind in kinds for one in networks]
    return any(
        network.version == one.version and network.overlaps(one)
        for network in rules.networks
        for one in inside
    )


def _is_localhost(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


@lru_cache(maxsize=ADDRESSES_KNOWN_MAX)
def forms(address: str) -> tuple[IpAddress, ...]:
    """Return an address and the embedded IPv4 addresses that it may be translated to."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv4Address):
        return (parsed,)
    if parsed.ipv4_mapped is not None:
        return (parsed.ipv4_mapped,)  # the operating system treats it as this one
    return (parsed, *_embedded(parsed))


def _embedded(address: ipaddress.IPv6Address) -> Iterator[IpAddress]:
    number = int(address)
    tail = ipaddress.IPv4Address(number & 0xFFFF_FFFF)
    if any(address in network for network in _TAIL_32) and number > 1:
        yield tail
    if (number >> 32) & 0xFFFF_FFFF in _ISATAP:
        yield tail
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo


# --- the installation's own endpoints ------------------------------------------------------------


class OwnEndpoints:
    """Finds the addresses at which the installation itself listens: no check URL may lead there.

    Args:
        listed: returns the endpoints; a host may be a name or a wildcard.
        names: resolves their hosts; separate from the one for check URLs, which must not hold it
            up.
    """

    def __init__(self, listed: Callable[[], Iterable[Address]], names: HostResolver) -> None:
        self._listed = listed
        self._names = names
        self._known: dict[str, Sequence[str]] = {}

    async def among(self, host: str, port: int, addresses: Sequence[str]) -> frozenset[str]:
        """Return those of `addresses` at which the installation listens on `port`.

        Raises:
            OSError: an endpoint with this port cannot be resolved and never could.
        """
        own: set[str] = set()
        for endpoint in self._listed():
            if endpoint.port == port:
                own.update(await self._shared(endpoint, host, addresses))
        return frozenset(own)

    async def close(self) -> None:
        await self._names.close()

    async def _shared(
        self, endpoint: Address, host: str, addresses: Sequence[str]
    ) -> Sequence[str]:
        if plain_host(endpoint.host) == plain_host(host):
            return addresses
        if endpoint.wildcard:
            return [address for address in addresses if any(map(is_local, forms(address)))]
        own = [form for address in await self._look_up(endpoint.host) for form in forms(address)]
        return [
            address
            for address in addresses
            if any(_same(form, other) for form in forms(address) for other in own)
        ]

    async def _look_up(self, host: str) -> Sequence[str]:
        """Return the addresses of an endpoint; the last known ones if no name server answers."""
        try:
            self._known[host] = await self._names.addresses(host)
        except socket.gaierror as error:
            if error.errno == socket.EAI_NONAME:
                return self._known.get(host, ())
            if host not in self._known:
                raise
        return self._known[host]


def _same(one: IpAddress, other: IpAddress) -> bool:
    return one == other or (_this_machine(one) and _this_machine(other))


def _this_machine(address: IpAddress) -> bool:
    return address.is_loopback or address.is_unspecified


def is_local(address: IpAddress) -> bool:
    """Return True if an address is one of this machine's; sends nothing."""
    if _this_machine(address):
        return True
    family = socket.AF_INET if isinstance(address, ipaddress.IPv4Address) else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing: it only makes the system choose the source address, which is the same
            # as the destination for an address of this machine.
            probe.connect((str(address), 9))
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]) == address
    except OSError:
        return False  # no route
