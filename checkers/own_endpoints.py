"""Where the installation itself listens: no check URL may lead there."""

import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence

from txbroker.checkers.connections import HostResolver
from txbroker.checkers.url_guard import forms
from txbroker.config.addresses import Address, IpAddress, plain_host


class OwnEndpoints:
    """Finds out whether an address and port belong to the installation.

    Args:
        listed: returns the endpoints by host and port; a host may be a name or a wildcard.
        names: looks their hosts up. Apart from those of check URLs, which must not hold it up.
    """

    def __init__(self, listed: Callable[[], Iterable[Address]], names: HostResolver) -> None:
        self._listed = listed
        self._names = names
        self._known: dict[str, Sequence[str]] = {}

    async def among(self, host: str, port: int, addresses: Sequence[str]) -> frozenset[str]:
        """Return those of `addresses` at which the installation listens on `port`.

        Raises:
            OSError: an endpoint with this port cannot be looked up and never could.
        """
        own: set[str] = set()
        for endpoint in self._listed():
            if endpoint.port == port:
                own.update(await self._shared(endpoint, host, addresses))
        return frozenset(own)

    async def close(self) -> None:
        """Stop waiting for look-ups."""
        await self._names.close()

    async def _shared(
        self, endpoint: Address, host: str, addresses: Sequence[str]
    ) -> Sequence[str]:
        if plain_host(endpoint.host) == plain_host(host):
            return addresses
        if endpoint.wildcard:
            return [address for address in addresses if any(map(is_local, forms(address)))]
        taken = [form for found in await self._look_up(endpoint.host) for form in forms(found)]
        return [
            address
            for address in addresses
            if any(_same(form, other) for form in forms(address) for other in taken)
        ]

    async def _look_up(self, host: str) -> Sequence[str]:
        """Return the addresses of an endpoint, those known last where nobody answers."""
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
    """Return whether an address is one of this machine's; sends nothing."""
    if _this_machine(address):
        return True
    family = socket.AF_INET if isinstance(address, ipaddress.IPv4Address) else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Only chooses the source address, which is the same for an address of this machine.
            probe.connect((str(address), 9))
            return ipaddress.ip_address(probe.getsockname()[0].partition("%")[0]) == address
    except OSError:
        return False  # no way leads there
