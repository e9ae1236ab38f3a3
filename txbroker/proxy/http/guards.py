"""Admission: known host names, no cross-site calls, and the principal of each credential.

A web page can make a browser call this API on its user's machine or network. The Origin header
reveals such a page; the Host header reveals a page that points its own name at our address (DNS
rebinding).
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
from txbroker.error_text import safe_repr
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
from txbroker.proxy.http.reading import AnyRequest
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

T = TypeVar("T")

PRINCIPAL: web.RequestKey[Principal] = web.RequestKey("principal", Principal)
"""The caller of an admitted request."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_PAGES = (
    "/transactions",
    "/groups",
    "/group",
    "/audit",
    "/actions",
    "/static",
    "/login",
    "/logout",
)
_WILDCARDS = frozenset({"0.0.0.0", "::"})
_NO_CREDENTIAL = "this call needs a valid credential: send a token as `authorization: Bearer TOKEN`"
"""The same for a missing, wrong, expired and revoked one, so it does not reveal which exist."""


def is_page(path: str) -> bool:
    """Return True for the path of a console page."""
    if path.startswith("/v1/"):
        return False
    return path == "/" or any(path == page or path.startswith(page + "/") for page in _PAGES)


RETRY_S = 1.0
"""Time before an unusable file is read again, seconds: not for each call."""
_GONE = "gone"
_NAMELESS = "nameless certificate"
_KINDS = ("DNS", "URI", "IP Address")
"""Kinds of names that certificate authorities verify, unlike e-mail addresses."""
_NAME_CHARS_MAX = 200


class ReloadedFile(Generic[T]):
    """Calling it returns the content of a file, reloaded when the file changes.

    If the file cannot be read, because it is being replaced or has become unsafe, the last content
    stays in force.

    Args:
        name: the setting that names the file.
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
        self._retry_s = 0.0
        self._content = read(path)
        self()

    @property
    def unusable(self) -> bool:
        """True if the current file cannot be used, so its last good content is in force."""
        self()
        return self._failed is not None

    def __call__(self) -> T:
        stamp: tuple[int, ...] | None = None
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode)
            if stamp == self._stamp:
                self._failed = None  # the last good file was restored
                return self._content
            if stamp == self._failed and time.monotonic() < self._retry_s:
                return self._content
            self._content = self._read(self._path)
        except (OSError, ConfigurationError) as error:
            if self._failed != (stamp or _GONE):
                log.warning(
                    "file not read", setting=self.name, path=str(self._path), why=safe_repr(error)
                )
            self._failed = stamp or _GONE
            self._retry_s = time.monotonic() + RETRY_S
            return self._content
        if self._stamp is not None:
            log.info("file read again", setting=self.name, path=str(self._path))
        self._stamp, self._failed = stamp, None
        return self._content


def load_secret(name: str, path: Path) -> ReloadedFile[str]:
    """Return the secret of a file, reloaded when the file changes."""
    return ReloadedFile(name, path, lambda path: read_token(name, path))


def load_principals(settings: Settings) -> Callable[[], Directory]:
    """Return a function that returns the current principals, none without a file."""
    if settings.principals_file is None:
        return no_principals

    def read(path: Path) -> Directory:
        settings.check_secrets()
        return read_principals(path)

    return ReloadedFile("principals_file", settings.principals_file, read)


class Credential(NamedTuple):
    """The credential of a caller.

    Attributes:
        digest: SHA-256 of its token in hex, None without a token.
        certificates: the names in its certificate, most specific first.
    """

    digest: str | None
    certificates: tuple[str, ...]


class Guard:
    """Identifies callers by their credentials; admits or refuses their calls.

    Args:
        admin: True for the guard of the admin address.
        principals: returns the current principals; None: created here.
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
        # A wildcard listener is called by any of the machine's addresses. No page can make a bare
        # address its own name, so this opens nothing to DNS rebinding.
        self._any_address = any(
            listener is not None and listener.host in _WILDCARDS
            for listener in (address, settings.peer_address)
        )
        self._needs_certificate = settings.tls_client_ca_file is not None
        # Without an admin address, every admitted caller is an operator.
        self._role = Role.PRODUCER if settings.admin_listen and not admin else Role.OPERATOR
        self._anybody = ANYBODY._replace(role=self._role)
        self._token = _token_of(settings, self._role, admin=admin)
        self._principals = principals or load_principals(settings)
        self.asks = self._token is not None or settings.principals_file is not None
        """True if callers need a token or a named certificate."""
        self._form_key = _form_key(settings)

    @property
    def files(self) -> tuple[ReloadedFile[Any], ...]:
        """The credential files in use."""
        return tuple(
            file for file in (self._token, self._principals) if isinstance(file, ReloadedFile)
        )

    def admit(self, request: AnyRequest) -> Principal:
        """Return the caller; refuse a cross-site call, an unknown host name or no credential."""
        self.admit_page(request)
        return self.known(credential_of(request))

    def admit_page(self, request: AnyRequest) -> None:
        """Refuse a cross-site call, an unknown host name or a missing client certificate. A token
        is not required here: the console has a login."""
        if self._needs_certificate and not certificate_names(request):
            raise CertificateRequired
        host = request.headers.get("Host", "")
        name = _host_name(host)
        if name not in self._hosts and not (self._any_address and _is_address(name)):
            raise Forbidden(
                f"the host name {host[:100]!r} is unknown to this proxy: add it to allowed_hosts"
            )
        origin = request.headers.get("Origin")
        if origin is not None and _netloc(origin) != host.lower():
            raise Forbidden(
                f"cross-site calls from {origin[:100]!r} are refused: call from this proxy's pages"
            )

    def known(self, credential: Credential) -> Principal:
        """Return the principal of a credential; raise `Unauthorized` without one."""
        principal = self._find(credential)
        if principal is None:
            raise Unauthorized(_NO_CREDENTIAL)
        return principal

    def _find(self, credential: Credential) -> Principal | None:
        if credential.digest is not None and self.asks:
            token = None if self._token is None else self._token()
            # By digest: the time of a look-up reveals nothing about the tokens.
            if token is not None and hmac.compare_digest(token.digests[0], credential.digest):
                return token
            return self._principals().by_digest(credential.digest)
        if self.asks:
            return self._principals().by_certificate(credential.certificates)
        if credential.certificates:
            name = credential.certificates[0]
            return Principal(name, self._role, shared=name == _NAMELESS)
        return self._anybody

    def credentials(self) -> tuple[object, ...]:
        """Return the current credentials, to detect changed files by comparison."""
        return (self._token and self._token(), self._principals())

    def named(self, name: str) -> Principal | None:
        """Return the principal with this name, for a login cookie."""
        token = None if self._token is None else self._token()
        if token is not None and token.name == name:
            return token
        return self._principals().by_name(name)

    def form_key(self, principal: Principal) -> bytes:
        """Return the key that signs a principal's logins; it changes with its tokens."""
        # The digest of a shared token is in no file, unlike that of a principal's token.
        key = b"" if principal.shared else self._form_key()
        digests = "\0".join(principal.digests)
        return hashlib.sha256(b"txbroker console\0" + key + digests.encode()).digest()


class PeerGuard:
    """Recognizes the other proxies of the installation."""

    def __init__(self, settings: Settings) -> None:
        path = settings.peer_secret_file
        self._secret = None if path is None else load_secret("peer_secret_file", path)
        self._names = Patterns(settings.peer_names) if settings.peer_names else None
        self._optional = not settings.guarded

    @property
    def files(self) -> tuple[ReloadedFile[Any], ...]:
        """The credential files in use."""
        return () if self._secret is None else (self._secret,)

    def secret(self) -> str | None:
        """Return the secret for calls to other proxies."""
        return None if self._secret is None else self._secret()

    def admit(self, request: web.BaseRequest) -> None:
        """Refuse a call that does not come from a proxy of this installation."""
        if self._secret is None and self._names is None:
            if self._optional:
                return
            raise NotAPeer(
                "this proxy has no peer identity, so it refuses calls of other proxies: set "
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
            "the caller did not authenticate as a proxy of this installation: give it the same "
            "peer_secret_file, or a client certificate with a name in peer_names"
        )


def credential_of(request: AnyRequest) -> Credential:
    """Return the credential of a request."""
    header, digest = request.headers.get("Authorization"), None
    if header:
        scheme, _, given = header.partition(" ")
        token = given.strip() if scheme.lower() == "bearer" else ""
        digest = digest_of(token) if given else None
    return Credential(digest, certificate_names(request))


def certificate_names(request: AnyRequest) -> tuple[str, ...]:
    """Return the names in the caller's certificate: DNS names, URIs, addresses, then the common
    name; () without a certificate. TLS has already refused untrusted certificates."""
    transport = request.transport
    certificate = None if transport is None else transport.get_extra_info("peercert")
    if not certificate:
        return ()
    named = [name for kind, name in certificate.get("subjectAltName", ()) if kind in _KINDS]
    subject = certificate.get("subject", ())
    named += [value for part in subject for key, value in part if key == "commonName"]
    names = [
        name
        for name in named
        if isinstance(name, str) and name.isprintable() and 0 < len(name) <= _NAME_CHARS_MAX
    ]
    return tuple(dict.fromkeys(names)) or (_NAMELESS,)


def _token_of(settings: Settings, role: Role, *, admin: bool) -> ReloadedFile[Principal] | None:
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
    """Return the source of login keys, the same on every proxy that shares a peer secret.

    The digests in a principals file are no secret, so a key from them alone could be forged by any
    reader of the file.
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
