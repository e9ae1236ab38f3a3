"""TLS for servers and clients: certificates and keys from PEM files, reloaded when they change.

The files are checked before every handshake, so the next connection uses renewed certificates and
open ones are not affected. While files do not match because one is still being replaced, the last
valid ones are used.

Certificate verification is never off, and private keys are never in Python variables.
"""

import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from txbroker.config.addresses import check_private
from txbroker.errors import ConfigurationError

_log = logging.getLogger("txbroker.net.tls")

OnReload = Callable[[str, str], None]
"""Called with the changed files and, if they cannot be used, why; else with ""."""

_Stamp = tuple[tuple[int, int, int, int], ...]


class TlsFiles(NamedTuple):
    """PEM files, with their names for the user.

    Attributes:
        ca_file: authorities that may sign the other side's certificate.
        cert_file: our certificate, followed by the intermediate ones.
        key_file: its private key, without a passphrase; None if it is in `cert_file`.
        names: of the three in error messages.
        guarded: refuse a key that other users of the machine can read.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    names: tuple[str, str, str] = ("ca_file", "client_cert_file", "client_key_file")
    guarded: bool = False

    @property
    def paths(self) -> tuple[Path, ...]:
        """The given files."""
        return tuple(path for path in self[:3] if path is not None)


NO_FILES = TlsFiles()


def _log_reload(files: str, why: str) -> None:
    if why:
        _log.warning("%s changed, but the last ones stay: %s", files, why)
    else:
        _log.info("%s read again", files)


class ServerTls:
    """The TLS context of a listening server.

    Args:
        files: `cert_file` is required. With `ca_file`, clients may present a certificate, which
            must then be signed by one of these authorities; the server decides whether they must
            present one.
        on_reload: called when files have changed.

    Raises:
        ConfigurationError: a file cannot be read, or they do not match.
    """

    def __init__(self, files: TlsFiles, on_reload: OnReload = _log_reload) -> None:
        self._contexts = _ReloadingContext(files, _server_context, on_reload)
        self.context = self._contexts.current()
        # A listening socket never changes its context, so each connection takes the current one.
        self.context.sni_callback = self._choose

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _: ssl.SSLContext
    ) -> None:
        connection.context = self._contexts.current()


class _AlertingSSLObject(ssl.SSLObject):
    """A server connection that sends the alert when it refuses a client's certificate.

    Event loops close a connection whose handshake fails before the alert is sent, so the client
    would see an unexplained break. They flush output while the handshake waits for the peer: so it
    waits for the client, which reads the alert and closes.
    """

    _refused: ssl.SSLCertVerificationError | None = None

    def do_handshake(self) -> None:
        if self._refused is not None:
            raise self._refused
        try:
            super().do_handshake()
        except ssl.SSLCertVerificationError as error:
            self._refused = error
            raise ssl.SSLWantReadError from None


class ClientTls:
    """The TLS context of a client.

    Args:
        files: without `ca_file` the system's authorities are trusted, with it only those in it.
        on_reload: called when files have changed.

    Raises:
        ConfigurationError: a file cannot be read, or they do not match.
    """

    def __init__(self, files: TlsFiles = NO_FILES, on_reload: OnReload = _log_reload) -> None:
        self._files = files
        self._on_reload = on_reload
        # Loading the system's authorities is slow, and without files they may never be needed.
        self._contexts = (
            _ReloadingContext(files, _client_context, on_reload) if files.paths else None
        )

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        if self._contexts is None:
            self._contexts = _ReloadingContext(self._files, _client_context, self._on_reload)
        return self._contexts.current()


class _ReloadingContext:
    """A context that is rebuilt when one of its files has changed."""

    def __init__(
        self, files: TlsFiles, make: Callable[[TlsFiles], ssl.SSLContext], on_reload: OnReload
    ) -> None:
        self._files = files
        self._make = make
        self._on_reload = on_reload
        # Before reading: a change in between is noticed next time.
        self._stamp = _stamp(files.paths)
        self._context = make(files)

    def current(self) -> ssl.SSLContext:
        """Return the context of the newest valid files."""
        stamp = _stamp(self._files.paths)
        if stamp is None or stamp == self._stamp:
            return self._context
        self._stamp = stamp
        why = ""
        try:
            self._context = self._make(self._files)
        except ConfigurationError as error:
            why = str(error)
        self._on_reload(", ".join(map(str, self._files.paths)), why)
        return self._context


def _stamp(paths: Sequence[Path]) -> _Stamp | None:
    """Return a stamp of this version of the files; None if one is missing."""
    try:
        stats = [path.stat() for path in paths]
    except OSError:
        return None
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_mode) for stat in stats)


# --- contexts --------------------------------------------------------------------------------


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_own(context, files)
    if files.ca_file is not None:
        _load_authorities(context, files.ca_file, files.names[0])
        context.verify_mode = ssl.CERT_OPTIONAL
        # A resumed session is not verified again, so it would outlive its authority.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.sslobject_class = _AlertingSSLObject
    return context


def _client_context(files: TlsFiles) -> ssl.SSLContext:
    if files.ca_file is None:
        context = ssl.create_default_context()
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_authorities(context, files.ca_file, files.names[0])
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.cert_file is not None or files.key_file is not None:
        _load_own(context, files)
    return context


def _load_authorities(context: ssl.SSLContext, path: Path, name: str) -> None:
    _read(path, name)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise ConfigurationError(f"{name} {path} holds no certificate in PEM") from None


def _load_own(context: ssl.SSLContext, files: TlsFiles) -> None:
    _, cert_name, key_name = files.names
    cert, key = files.cert_file, files.key_file
    if cert is None:
        raise ConfigurationError(f"{key_name} needs {cert_name}: set both")
    _read(cert, cert_name)
    if key is not None:
        _read(key, key_name)
    shown = f"{cert_name} {cert}" if key is None else f"{key_name} {key}"

    def passphrase() -> str:
        raise ConfigurationError(f"{shown} holds a key with a passphrase: use one without")

    try:
        context.load_cert_chain(cert, key, passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigurationError(f"{shown} is not the key of {cert_name} {cert}") from None
        both = f"{cert_name} {cert}" if key is None else f"{cert_name} {cert} and {shown}"
        what = (error.reason or "not PEM").replace("_", " ").lower()
        raise ConfigurationError(
            f"{both} do not hold a certificate and its private key in PEM: {what}"
        ) from None
    if files.guarded and key is not None:
        check_private(key_name, key)


def _read(path: Path, name: str) -> None:
    """Refuse an unreadable file by name; OpenSSL does not report which one it was."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigurationError(f"{name} {path}: {error.strerror}") from None


# --- error messages --------------------------------------------------------------------------

_BY_VERIFY_CODE = {
    9: "its certificate is not valid yet: compare the clocks",
    10: "its certificate has expired",
}
_NAMES_DIFFER = (62, 63, 64)  # host name, e-mail address, IP address
_BY_REASON = (
    ("CERTIFICATE_REQUIRED", "it wants a client certificate"),
    ("ALERT_CERTIFICATE_EXPIRED", "our client certificate has expired"),
    ("ALERT_UNKNOWN_CA", "it does not trust the authority of our client certificate"),
    ("ALERT_CERTIFICATE_UNKNOWN", "it does not accept our client certificate"),
    ("ALERT_BAD_CERTIFICATE", "it does not accept our client certificate"),
    ("ALERT_CERTIFICATE_REVOKED", "our client certificate was revoked"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS: should the URL begin with http://?"),
    ("ALERT_PROTOCOL_VERSION", "it speaks no version of TLS that we do (1.2 and later)"),
    ("UNSUPPORTED_PROTOCOL", "it speaks no version of TLS that we do (1.2 and later)"),
)


def tls_trouble(error: BaseException | None, ca_name: str = "ca_file") -> str | None:
    """Return why TLS failed, in words; None if the error has another cause. `ca_name` is the option
    or setting for trusted authorities."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # aiohttp wraps the original in its attributes, in errors that look like ssl's.
        inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None)
        if isinstance(inner, BaseException):
            error = inner
        elif isinstance(error, ssl.SSLCertVerificationError):
            return _distrust(error, ca_name)
        elif isinstance(error, ssl.SSLError):
            return _refusal(error)
        else:
            error = error.__cause__
    return None


def _distrust(error: ssl.SSLCertVerificationError, ca_name: str) -> str:
    code, message = error.verify_code, error.verify_message
    if code in _BY_VERIFY_CODE:
        return _BY_VERIFY_CODE[code]
    if code in _NAMES_DIFFER:
        host = message.partition("not valid for ")[2].rstrip(".")
        return f"its certificate is for another host name{f' than {host}' if host else ''}"
    return f"its certificate is not trusted ({message}): name its authority's with {ca_name}"


def _refusal(error: ssl.SSLError) -> str:
    reason = (error.reason or "").upper()
    for part, words in _BY_REASON:
        if part in reason:
            return words
    return f"TLS failed: {reason.replace('_', ' ').lower() or error}"
