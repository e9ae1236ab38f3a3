"""TLS on both sides: certificates and keys from PEM files, read again when they change.

Whoever renews certificates replaces the files; here they are looked at before every handshake, so
the next connection has the new ones and none that is open notices. What does not fit together yet,
because a file is still being replaced, is passed over: the last good ones hold until then.

Nobody's certificate is ever left unchecked, and no private key is ever in a variable of Python's.
"""

import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from txbroker.config.addresses import check_private
from txbroker.errors import ConfigurationError

_log = logging.getLogger("txbroker.net.tls")

Told = Callable[[str, str], None]
"""Is told which files have changed and, where they do not fit together, why the last ones stay."""

_Stamp = tuple[tuple[int, int, int, int], ...]


class TlsFiles(NamedTuple):
    """PEM files, with the names by which a user knows them.

    Attributes:
        ca_file: certificates of the authorities that may have signed the other side's.
        cert_file: our certificate, with those between it and the authority's behind it.
        key_file: its private key, without a passphrase; None where it is in `cert_file`.
        names: what the three are called in sentences.
        guarded: True where a key that other users of the machine can read is refused.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    names: tuple[str, str, str] = ("ca_file", "client_cert_file", "client_key_file")
    guarded: bool = False

    @property
    def paths(self) -> tuple[Path, ...]:
        """Those that are given."""
        return tuple(path for path in self[:3] if path is not None)


NO_FILES = TlsFiles()


def _tell(files: str, why: str) -> None:
    if why:
        _log.warning("%s changed, but the last ones stay: %s", files, why)
    else:
        _log.info("%s read again", files)


class ServerTls:
    """What a listening server shows and asks for.

    Args:
        files: `cert_file` is needed. With `ca_file`, clients may show a certificate, which then
            has to be signed by one of these; whether they must is for the server to say, which
            `client_certificate` helps with.
        told: is told when files were read again.

    Raises:
        ConfigurationError: a file cannot be read, or they do not fit together.
    """

    def __init__(self, files: TlsFiles, told: Told = _tell) -> None:
        self._reread = _Reread(files, _server_context, told)
        self.context = self._reread.current()
        # A listening socket keeps its context for good, so each connection takes the current one.
        self.context.sni_callback = self._choose

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _: ssl.SSLContext
    ) -> None:
        connection.context = self._reread.current()


class _SaysWhy(ssl.SSLObject):
    """A server's side of a connection that tells a client why its certificate is refused.

    Event loops end a connection whose handshake fails before the alert has left, so the client
    would see a connection that breaks for no reason. They do send what is there when the handshake
    waits for the other side: so it waits for the client, who ends the connection, having read.
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
    """Whom a client trusts, and what it shows.

    Args:
        files: without `ca_file` the system's authorities are trusted, with it those in it alone.
        told: is told when files were read again.

    Raises:
        ConfigurationError: a file cannot be read, or they do not fit together.
    """

    def __init__(self, files: TlsFiles = NO_FILES, told: Told = _tell) -> None:
        self._files = files
        self._told = told
        # The system's authorities take a while to read, and without files none may be needed.
        self._reread = _Reread(files, _client_context, told) if files.paths else None

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        if self._reread is None:
            self._reread = _Reread(self._files, _client_context, self._told)
        return self._reread.current()


class _Reread:
    """A context that is made anew when one of its files has changed."""

    def __init__(
        self, files: TlsFiles, make: Callable[[TlsFiles], ssl.SSLContext], told: Told
    ) -> None:
        self._files = files
        self._make = make
        self._told = told
        # Looked at before it is read: what changes in between is seen as a change next time.
        self._stamp = _stamp(files.paths)
        self._context = make(files)

    def current(self) -> ssl.SSLContext:
        """Return the context of the newest files that fit together."""
        stamp = _stamp(self._files.paths)
        if stamp is None or stamp == self._stamp:
            return self._context
        self._stamp = stamp
        why = ""
        try:
            self._context = self._make(self._files)
        except ConfigurationError as error:
            why = str(error)
        self._told(", ".join(map(str, self._files.paths)), why)
        return self._context


def _stamp(paths: Sequence[Path]) -> _Stamp | None:
    """Return what tells one version of the files from another, None where one is missing."""
    try:
        found = [path.stat() for path in paths]
    except OSError:
        return None
    return tuple(
        (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode) for status in found
    )


# --- making them -----------------------------------------------------------------------------


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_own(context, files)
    if files.ca_file is not None:
        _load_authorities(context, files.ca_file, files.names[0])
        context.verify_mode = ssl.CERT_OPTIONAL
        # A resumed session is not checked again, so it would outlive its authority.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.sslobject_class = _SaysWhy
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
        raise ConfigurationError(f"{key_name} needs {cert_name}")
    _read(cert, cert_name)
    if key is not None:
        _read(key, key_name)
    shown = f"{cert_name} {cert}" if key is None else f"{key_name} {key}"

    def passphrase() -> str:
        raise ConfigurationError(f"{shown} holds a key with a passphrase: give one without")

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
    """Refuse a file that cannot be read; OpenSSL does not say which one that was."""
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigurationError(f"{name} {path}: {error.strerror}") from None


# --- what went wrong, in words ---------------------------------------------------------------

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
    """Return in words why TLS did not come about, None where that is not what went wrong.

    Args:
        ca_name: what the file of the trusted authorities is called.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # aiohttp keeps what it was under names of its own, in errors that pass for ssl's.
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
    code, said = error.verify_code, error.verify_message
    if code in _BY_VERIFY_CODE:
        return _BY_VERIFY_CODE[code]
    if code in _NAMES_DIFFER:
        wanted = said.partition("not valid for ")[2].rstrip(".")
        return f"its certificate is for another host name{f' than {wanted}' if wanted else ''}"
    return f"its certificate is not trusted ({said}): name its authority's with {ca_name}"


def _refusal(error: ssl.SSLError) -> str:
    reason = (error.reason or "").upper()
    for part, words in _BY_REASON:
        if part in reason:
            return words
    return f"TLS failed: {reason.replace('_', ' ').lower() or error}"
