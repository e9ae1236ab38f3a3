"""Who may call: known host names, no foreign pages, the bearer of the token where there is one, and
who shows a client certificate where one is asked for.

A page on the web can make a browser call this API on its user's machine or network. The Origin
header gives such a page away; a page that has its own name pointed at our address (DNS rebinding)
is given away by the Host header.
"""

import hmac
import ipaddress
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from txbroker.addresses import Address, read_secret
from txbroker.config import Settings
from txbroker.core.telling import telling
from txbroker.errors import CertificateRequired, ConfigurationError, Forbidden, Unauthorized
from txbroker.proxy.logging import get_logger

log = get_logger(__name__)

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_PAGES = ("/transactions", "/groups", "/actions", "/static", "/login", "/logout")
_WILDCARDS = frozenset({"0.0.0.0", "::"})


def is_page(path: str) -> bool:
    """Say whether a path is one of the pages for people, beside which the API lies."""
    if path.startswith("/v1/"):
        return False
    return path == "/" or any(path == page or path.startswith(page + "/") for page in _PAGES)


class Token:
    """The token that calls must carry, read again when its file changes."""

    def __init__(self, path: Path, name: str = "token_file") -> None:
        self.name = name
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._unread = False
        self._token = read_secret(name, path).encode()
        self._refresh()

    def matches(self, given: str) -> bool:
        """Compare in constant time, so that the time taken tells nothing of the token."""
        self._refresh()
        return hmac.compare_digest(given.encode(errors="surrogateescape"), self._token)

    def text(self) -> str:
        """Return the token, for calls to other proxies."""
        self._refresh()
        return self._token.decode()

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp == self._stamp:
                return
            self._token = read_secret(self.name, self._path).encode()
        except (OSError, ConfigurationError) as error:
            # The file is being replaced: the last token holds until there is a new one.
            if not self._unread:
                log.warning("token file not read", path=str(self._path), why=telling(error))
            self._unread = True
            return
        if self._stamp is not None:
            log.info("token file read again", path=str(self._path))
        self._stamp = stamp
        self._unread = False


class Guard:
    """Admits calls or refuses them.

    Args:
        admin: True for the guard of the admin address.

    Raises:
        ConfigurationError: the token file cannot be read.
    """

    def __init__(self, settings: Settings, *, admin: bool = False) -> None:
        listening = settings.admin_address if admin else None
        address = listening or settings.listen_address
        advertised = urlsplit(settings.advertise_url).hostname or ""
        named = (address.host, advertised, *settings.allowed_hosts)
        self._hosts = _LOOPBACK | {name.lower() for name in named if name}
        # Who listens everywhere is called by any of the machine's addresses. No page can make
        # a bare address its own name, so this opens nothing to DNS rebinding.
        self._any_address = _is_wildcard(address)
        self._needs_certificate = settings.tls_client_ca_file is not None
        self.token: Token | None = None
        if admin and settings.admin_token_file is not None:
            self.token = Token(settings.admin_token_file, "admin_token_file")
        elif settings.token_file is not None:
            self.token = Token(settings.token_file)

    def admit(self, request: web.BaseRequest) -> None:
        """Refuse a call by a foreign page, for an unknown host name, or without token or client
        certificate where there has to be one.

        Raises:
            Forbidden, CertificateRequired, Unauthorized: says what to do.
        """
        self.admit_page(request)
        if self.token is not None:
            self._check_token(self.token, request)

    def admit_page(self, request: web.BaseRequest) -> None:
        """Refuse a call by a foreign page, for an unknown host name, or without the client
        certificate that is asked for; of a token nothing is asked, as for the console, which has
        a login.

        Raises:
            Forbidden, CertificateRequired: says what to do.
        """
        if self._needs_certificate and not _has_certificate(request):
            raise CertificateRequired
        host = request.headers.get("Host", "")
        name = _host_name(host)
        if name not in self._hosts and not (self._any_address and _is_address(name)):
            raise Forbidden(
                f"this proxy is not known as {host[:100]!r}: add the name to allowed_hosts"
            )
        origin = request.headers.get("Origin")
        if origin is not None and _netloc(origin) != host.lower():
            raise Forbidden(f"calls from pages of {origin[:100]!r} are not taken")

    def _check_token(self, token: Token, request: web.BaseRequest) -> None:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if not given:
            raise Unauthorized
        if scheme.lower() != "bearer" or not token.matches(given.strip()):
            raise Unauthorized(f"the token is not the one in this proxy's {token.name}")


def _has_certificate(request: web.BaseRequest) -> bool:
    """Say whether the caller showed a certificate; TLS has let none pass that is not trusted."""
    transport = request.transport
    return transport is not None and bool(transport.get_extra_info("peercert"))


def _is_wildcard(address: Address) -> bool:
    return address.host in _WILDCARDS


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str:
    """Return the name in a Host header, without port and brackets, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].rstrip(".").lower()


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
