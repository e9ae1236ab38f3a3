"""Who calls, and who may: known host names, no foreign pages, and the principal of each credential.

A page on the web can make a browser call this API on its user's machine or network. The Origin
header gives such a page away; a page that has its own name pointed at our address (DNS rebinding)
is given away by the Host header.
"""

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from txbroker.checkers.leases import PEER_HEADER
from txbroker.config.addresses import read_token
from txbroker.config.settings import Settings
from txbroker.core.telling import safe_repr
from txbroker.errors import (
    CertificateRequired,
    ConfigurationError,
    Forbidden,
    NotAPeer,
    Unauthorized,
)
from txbroker.principals import (
    ANYBODY,
    Directory,
    Patterns,
    Principal,
    Role,
    digest_of,
    no_principals,
    read_principals,
)
from txbroker.proxy.http.posted import AnyRequest
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

T = TypeVar("T")

PRINCIPAL: web.RequestKey[Principal] = web.RequestKey("principal", Principal)
"""Under which a request has its caller."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_PAGES = ("/transactions", "/groups", "/actions", "/static", "/login", "/logout")
_WILDCARDS = frozenset({"0.0.0.0", "::"})
_NO_CREDENTIAL = "this call needs a valid credential: send a token as `authorization: Bearer TOKEN`"
"""One answer for none, a wrong, an expired and a revoked one: it says nothing about which exist."""


def is_page(path: str) -> bool:
    """Say whether a path is one of the pages for people, beside which the API lies."""
    if path.startswith("/v1/"):
        return False
    return path == "/" or any(path == page or path.startswith(page + "/") for page in _PAGES)


RETRY_S = 1.0
"""A file that cannot be used is read again after this, seconds: not for each call."""
_GONE = "gone"
_NAMELESS = "nameless certificate"
_KINDS = ("DNS", "URI", "IP Address")
"""Kinds of names that an authority tests; e-mail addresses and the like are not."""
_NAME_CHARS_MAX = 200


class ReloadedFile(Generic[T]):
    """A call returns what a file holds, read again when the file changes.

    A file that cannot be read, because it is being replaced or has become unsafe, leaves the last
    content in force.

    Args:
        name: of the setting.
        read: returns the content.

    Raises:
        ConfigurationError: the file cannot be read.
    """

    def __init__(self, name: str, path: Path, read: Callable[[Path], T]) -> None:
        self.name = name
        self._path = path
        self._read = read
        self._stamp: tuple[int, ...] | None = None
        self._failed: object = None
        self._again_s = 0.0
        self._content = read(path)
        self()

    @property
    def unread(self) -> bool:
        """True where the file as it is now cannot be used, so its last content is in force."""
        self()
        return self._failed is not None

    def __call__(self) -> T:
        stamp: tuple[int, ...] | None = None
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)
            if stamp == self._stamp:
                self._failed = None  # the last good file was put back
                return self._content
            if stamp == self._failed and time.monotonic() < self._again_s:
                return self._content
            self._content = self._read(self._path)
        except (OSError, ConfigurationError) as error:
            if self._failed != (stamp or _GONE):
                log.warning(
                    "file not read", setting=self.name, path=str(self._path), why=safe_repr(error)
                )
            self._failed = stamp or _GONE
            self._again_s = time.monotonic() + RETRY_S
            return self._content
        if self._stamp is not None:
            log.info("file read again", setting=self.name, path=str(self._path))
        self._stamp, self._failed = stamp, None
        return self._content


def load_secret(name: str, path: Path) -> ReloadedFile[str]:
    """Return the secret in a file, read again when the file changes.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    return ReloadedFile(name, path, lambda path: read_token(name, path))


def load_principals(settings: Settings) -> Callable[[], Directory]:
    """Return what returns the principals as they are now; without a file there are none.

    Raises:
        ConfigurationError: the file cannot be used.
    """
    if settings.principals_file is None:
        return no_principals

    def read(path: Path) -> Directory:
        settings.check_secrets()
        return read_principals(path)

    return ReloadedFile("principals_file", settings.principals_file, read)


class Credential(NamedTuple):
    """What a caller showed.

    Attributes:
        digest: SHA-256 of its token in hex, None where it showed none.
        certificates: the names in its certificate, most specific first.
    """

    digest: str | None
    certificates: tuple[str, ...]


class Guard:
    """Knows callers by their credentials, and admits calls or refuses them.

    Args:
        admin: True for the guard of the admin address.
        principals: returns the principals as they are now; None: made here.

    Raises:
        ConfigurationError: a file of tokens or principals cannot be read.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        admin: bool = False,
        principals: Callable[[], Directory] | None = None,
    ) -> None:
        listening = settings.admin_address if admin else None
        address = listening or settings.listen_address
        named = [address.host, _host_of(settings.advertise_url), *settings.allowed_hosts]
        if settings.peer_address is not None:
            named += [settings.peer_address.host, _host_of(settings.peer_advertise)]
        self._hosts = _LOOPBACK | {name.lower() for name in named if name}
        # Who listens everywhere is called by any of the machine's addresses. No page can make
        # a bare address its own name, so this opens nothing to DNS rebinding.
        self._any_address = any(
            each is not None and each.host in _WILDCARDS
            for each in (address, settings.peer_address)
        )
        self._needs_certificate = settings.tls_client_ca_file is not None
        # Where operators have no address of their own, who may call may do all.
        self._role = Role.PRODUCER if settings.admin_listen and not admin else Role.OPERATOR
        self._anybody = ANYBODY._replace(role=self._role)
        self._token = _token_of(settings, self._role, admin=admin)
        self._principals = principals or load_principals(settings)
        self._asks = self._token is not None or settings.principals_file is not None
        self._form_key = _form_key(settings)

    @property
    def files(self) -> tuple[ReloadedFile[Any], ...]:
        """What it reads credentials from."""
        return tuple(
            file for file in (self._token, self._principals) if isinstance(file, ReloadedFile)
        )

    @property
    def asks(self) -> bool:
        """True where callers need a token or a named certificate."""
        return self._asks

    def admit(self, request: AnyRequest) -> Principal:
        """Return who calls; refuse a call by a foreign page, for an unknown host name, or without
        the credential that is asked for.

        Raises:
            Forbidden, CertificateRequired, Unauthorized: says what to do.
        """
        self.admit_page(request)
        return self.known(credential_of(request))

    def admit_page(self, request: AnyRequest) -> None:
        """Refuse a call by a foreign page, for an unknown host name, or without the client
        certificate that is asked for; of a token nothing is asked, as for the console, which has
        a login.

        Raises:
            Forbidden, CertificateRequired: says what to do.
        """
        if self._needs_certificate and not certificate_names(request):
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

    def known(self, credential: Credential) -> Principal:
        """Return whom a credential identifies.

        Raises:
            Unauthorized: nobody, or nobody any more.
        """
        found = self._find(credential)
        if found is None:
            raise Unauthorized(_NO_CREDENTIAL)
        return found

    def _find(self, credential: Credential) -> Principal | None:
        if credential.digest is not None and self._asks:
            token = None if self._token is None else self._token()
            # By digest: how long a look-up takes tells nothing about the tokens.
            if token is not None and hmac.compare_digest(token.digests[0], credential.digest):
                return token
            return self._principals().by_digest(credential.digest)
        if self._asks:
            return self._principals().by_certificate(credential.certificates)
        if credential.certificates:
            name = credential.certificates[0]
            return Principal(name, self._role, shared=name == _NAMELESS)
        return self._anybody

    def credentials(self) -> tuple[object, ...]:
        """Return what all credentials are now, to compare: another one when a file has changed."""
        return (self._token and self._token(), self._principals())

    def named(self, name: str) -> Principal | None:
        """Return the principal of a name, for a login that remembers it."""
        token = None if self._token is None else self._token()
        if token is not None and token.name == name:
            return token
        return self._principals().by_name(name)

    def form_key(self, principal: Principal) -> bytes:
        """Return the key that signs logins of a principal: another one when its tokens change."""
        # The digest of a token that all share is in no file; that of a principal's is.
        key = b"" if principal.shared else self._form_key()
        digests = "\0".join(principal.digests)
        return hashlib.sha256(b"txbroker console\0" + key + digests.encode()).digest()


class PeerGuard:
    """Knows the other proxies of the installation.

    Raises:
        ConfigurationError: the peer secret cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        path = settings.peer_secret_file
        self._secret = None if path is None else load_secret("peer_secret_file", path)
        self._names = Patterns(settings.peer_names) if settings.peer_names else None
        self._optional = not settings.guarded

    @property
    def files(self) -> tuple[ReloadedFile[Any], ...]:
        """What it reads the peer secret from."""
        return () if self._secret is None else (self._secret,)

    def secret(self) -> str | None:
        """Return the secret that calls to other proxies carry."""
        return None if self._secret is None else self._secret()

    def admit(self, request: web.BaseRequest) -> None:
        """Refuse a call that does not come from a proxy of this installation.

        Raises:
            NotAPeer: says what to do.
        """
        if self._secret is None and self._names is None:
            if self._optional:
                return
            raise NotAPeer(
                "this proxy has no peer identity, so it takes no calls of other proxies: set "
                "peer_secret_file or peer_names on every proxy of the installation"
            )
        if self._secret is not None:
            given = request.headers.get(PEER_HEADER, "").encode(errors="surrogateescape")
            if hmac.compare_digest(given, self._secret().encode()):
                return
        if self._names is not None and any(
            name in self._names for name in certificate_names(request)
        ):
            return
        raise NotAPeer(
            "the caller has not proved to be a proxy of this installation: it needs the same "
            "peer_secret_file, or a client certificate that peer_names names"
        )


def credential_of(request: AnyRequest) -> Credential:
    """Return what a caller showed."""
    shown, digest = request.headers.get("Authorization"), None
    if shown:
        scheme, _, given = shown.partition(" ")
        token = given.strip() if scheme.lower() == "bearer" else ""
        digest = digest_of(token) if given else None
    return Credential(digest, certificate_names(request))


def certificate_names(request: AnyRequest) -> tuple[str, ...]:
    """Return the names in the caller's certificate: DNS names, URIs, addresses, then the common
    name; () where it showed none. TLS has let no certificate pass that is not trusted."""
    transport = request.transport
    shown = None if transport is None else transport.get_extra_info("peercert")
    if not shown:
        return ()
    found = [name for kind, name in shown.get("subjectAltName", ()) if kind in _KINDS]
    found += [
        value for part in shown.get("subject", ()) for key, value in part if key == "commonName"
    ]
    names = [
        name
        for name in found
        if isinstance(name, str) and name.isprintable() and 0 < len(name) <= _NAME_CHARS_MAX
    ]
    return tuple(dict.fromkeys(names)) or (_NAMELESS,)


def _token_of(settings: Settings, role: Role, *, admin: bool) -> ReloadedFile[Principal] | None:
    """Return the principal of the one token that all callers of an address share, if any."""
    name, path = "token_file", settings.token_file
    if admin and settings.admin_token_file is not None:
        name, path = "admin_token_file", settings.admin_token_file
    if path is None:
        return None

    def read(path: Path) -> Principal:
        settings.check_secrets()
        return Principal(name, role, shared=True, digests=(digest_of(read_token(name, path)),))

    return ReloadedFile(name, path, read)


def _form_key(settings: Settings) -> Callable[[], bytes]:
    """Return what makes keys of logins: the same on every proxy where they share a secret.

    The digests of a principals file are no secret, so a key from them alone could be made by
    anyone who has read it.
    """
    if settings.peer_secret_file is None:
        own = secrets.token_bytes(32)
        return lambda: own
    secret = load_secret("peer_secret_file", settings.peer_secret_file)
    return lambda: secret().encode()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _host_of(url: str) -> str:
    return urlsplit(url).hostname or ""


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
