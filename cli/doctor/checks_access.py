"""Checks of access: callers, and data readable on the network or on this machine.

Each check yields a line for each unsafe setting; any line is a warning. Most read the doctor's
settings. If these listen on loopback only, no other machine can call, and nothing is judged: an
operator's machine seldom has a proxy's settings.
"""

from __future__ import annotations

import asyncio
import functools
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from txbroker.checkers.url_guard import leads_inside
from txbroker.cli.doctor.findings import (
    CheckLevel,
    CheckRegistry,
    Finding,
    Look,
    Section,
    fine,
    judged,
)
from txbroker.cli.doctor.subject import Subject
from txbroker.cli.output import duration
from txbroker.config.addresses import (
    OPEN_MODE,
    Address,
    parse_host_rules,
    parse_secret_variable,
    parse_servers,
)
from txbroker.config.settings import Settings
from txbroker.principals import Directory, Principal, Role, read_principals, share_name

EXPIRES_SOON_S = 14 * 86400.0
_PAGES = ("/v1/overview", "/metrics")
_PUBLIC = ("_ca_file", "_cert_file")
_UNPROTECTED = {
    "PLAINTEXT": "messages can be read and changed on the network, and any client of Kafka can "
    "write txbroker's own topics",
    "SASL_PLAINTEXT": "messages and login can be read on the network",
}
_MANUAL = "docs/how-to/secure-the-listener.md"
_NOT_JUDGED = "these settings listen on loopback only; give the doctor the proxy's settings"

settings_book = CheckRegistry(Section.ACCESS)
proxies_book = CheckRegistry(Section.ACCESS, needs=("proxies-ready",))

Remarks = Callable[[Subject], AsyncIterator[str]]


def _check(
    book: CheckRegistry, title: str, *, hint: str, doc: str = _MANUAL, public: bool = False
) -> Callable[[Remarks], Look]:
    """Make a check of a function that yields remarks; a `public` one judges only settings that
    listen on more than loopback."""

    def register(remarks: Remarks) -> Look:
        @functools.wraps(remarks)
        async def look(subject: Subject) -> Finding:
            # First, because a missing right makes the result unknown with any settings.
            lines = [line async for line in remarks(subject)]
            if public and not list(_public_listeners(subject.settings)):
                return fine(_NOT_JUDGED)
            if lines:
                return judged(CheckLevel.WARNING, f"{len(lines)} unsafe", lines)
            return fine("nothing unsafe")

        return book.check(title, hint=hint, doc=doc)(look)

    return register


@_check(
    settings_book,
    "callers from other machines need a credential",
    hint="Set `principals_file`, `token_file` or `tls_client_ca_file`, and remove `insecure`.",
    public=True,
)
async def access_credentials(subject: Subject) -> AsyncIterator[str]:
    settings = subject.settings
    for name, address in _public_listeners(settings):
        guarded = settings.peer_identity if name == "peer_listen" else settings.guarded
        guarded = guarded or (name == "admin_listen" and settings.admin_token_file is not None)
        if not guarded:
            yield f"{name} {address} takes calls without a credential"


@_check(
    settings_book,
    "callers have separate credentials, and producers are no operators",
    hint="Give each producer a principal (`txbroker principals add`), and operators a separate "
    "address (`admin_listen`, `admin_token_file`).",
    public=True,
)
async def access_shared_token(subject: Subject) -> AsyncIterator[str]:
    settings = subject.settings
    shared = settings.guarded and settings.principals_file is None
    if shared and settings.token_file is not None:
        yield (
            "token_file is one token for all callers: it cannot be revoked for one of them, and it "
            "allows every producer group and topic"
        )
    if settings.admin_listen:
        return
    if settings.token_file is not None:
        yield "token_file without admin_listen: every producer may do what operators may"
    elif shared:
        yield (
            "tls_client_ca_file without principals_file and admin_listen: every caller with a "
            "certificate may do what operators may"
        )


@_check(
    settings_book,
    "principals are valid, and allow no more than they need",
    hint="Create a new credential with `txbroker principals add` before the old one expires, and "
    "name the groups and topics of each producer, which no other has. Proxies reload the file "
    "automatically.",
)
async def access_principals(subject: Subject) -> AsyncIterator[str]:
    """Whether a principal has expired or soon will, may produce everything, or has groups that
    count towards another's share."""
    path = subject.settings.principals_file
    if path is not None:
        for line in await asyncio.to_thread(_on_principals, path, subject.now_s()):
            yield line


def _on_principals(path: Path, now_s: float) -> list[str]:
    found = read_principals(path)
    lines = [line for one in found for line in _on_principal(one, now_s)]
    return lines + [line for one in found for line in _counted_to_others(found, one)]


def _on_principal(one: Principal, now_s: float) -> Iterator[str]:
    if one.expires_s is not None:
        left_s = one.expires_s - now_s
        if left_s <= 0:
            yield f"{one.name} expired {duration(-left_s)} ago"
        elif left_s <= EXPIRES_SOON_S:
            yield f"{one.name} expires in {duration(left_s)}"
    if one.role is Role.PRODUCER and one.groups.everything and one.topics.everything:
        yield f"{one.name} is a producer of every group and topic"


def _counted_to_others(found: Directory, one: Principal) -> Iterator[str]:
    if one.role is not Role.PRODUCER:
        return
    for pattern in one.groups.allow:
        share = found.share_of(pattern)
        if share not in (pattern, share_name(one)):
            yield (
                f"{one.name}: groups {pattern} are counted to {share.strip()}, the first producer "
                "that may act for them"
            )


@_check(
    settings_book,
    "secrets are closed to other users of this machine",
    hint="Run `chmod 600` on files with secrets; in Kubernetes mount Secrets with defaultMode 0440 "
    "and an fsGroup.",
)
async def access_files(subject: Subject) -> AsyncIterator[str]:
    settings = subject.settings
    for name in type(settings).model_fields:
        path = getattr(settings, name)
        if not isinstance(path, Path) or not name.endswith("_file") or name.endswith(_PUBLIC):
            continue
        if why := await asyncio.to_thread(_open_why, name, path):
            yield f"{name} {path}{why}"


def _open_why(name: str, path: Path) -> str:
    """Return how other users can read, change or replace a file, "" if they cannot."""
    try:
        mode, folder = (one.stat().st_mode for one in (path, path.absolute().parent))
    except OSError as error:
        return f": not readable: {error.strerror}"
    # A principals file is no secret, and proxies refuse it if others can write it.
    if mode & OPEN_MODE and name != "principals_file":
        return f" has mode {stat.S_IMODE(mode):04o}: others can read or change it"
    if folder & stat.S_IWOTH and not folder & stat.S_ISVTX:
        return " is in a folder that every user may write: others can replace it"
    return ""


@_check(
    settings_book,
    "Kafka on other machines is reached by TLS",
    hint="Use `kafka_security_protocol` SASL_SSL, or SSL with a client certificate.",
    doc="docs/how-to/connect-to-kafka.md",
)
async def access_kafka(subject: Subject) -> AsyncIterator[str]:
    settings = subject.settings
    protocol: str = settings.kafka_security_protocol
    why = _UNPROTECTED.get(protocol)
    if why is None:
        return
    if protocol == "SASL_PLAINTEXT":
        protocol += f" with {settings.kafka_sasl_mechanism}"
    for address in parse_servers(settings.kafka):
        if address.public:
            yield f"{protocol} to {address}: {why}"


@_check(
    settings_book,
    "check_url_allow names no loopback, link-local or metadata address",
    hint="Remove these from `check_url_allow`; for a check on the proxy's machine, use a separate "
    "address or allow only that one.",
    doc="docs/how-to/write-a-check.md",
)
async def access_check_urls(subject: Subject) -> AsyncIterator[str]:
    for entry in subject.settings.check_url_allow:
        if leads_inside(parse_host_rules("check_url_allow", (entry,))):
            yield f"check_url_allow has {entry}"


@_check(
    settings_book,
    "environment variables with secrets are of one group each",
    hint="Write `GROUP:NAME` in `secret_env_allow`.",
    doc="docs/operate/security.md",
)
async def access_secret_variables(subject: Subject) -> AsyncIterator[str]:
    settings = subject.settings
    shared = [name for name in settings.secret_env_allow if not parse_secret_variable(name)[0]]
    if settings.principals_file is None or not shared:
        return
    principals = await asyncio.to_thread(read_principals, settings.principals_file)
    producers = sum(one.role is Role.PRODUCER for one in principals)
    if producers > 1:
        for name in shared:
            yield f"secret_env_allow has {name} for the groups of all {producers} producers"


# --- with the proxies ------------------------------------------------------------------------


@_check(
    proxies_book,
    "metrics and operators' calls need a credential",
    hint="Set `principals_file`, `token_file` or `tls_client_ca_file` on these proxies, or "
    "restrict the network to operators.",
)
async def access_open(subject: Subject) -> AsyncIterator[str]:
    asked = [(url, path) for url in await subject.urls() if _is_public(url) for path in _PAGES]
    answers = await asyncio.gather(*(subject.proxies.anonymous(*one) for one in asked))
    for (url, path), status in zip(asked, answers, strict=True):
        if status == 200:
            yield f"{url}{path} answers without a credential"


@_check(
    proxies_book,
    "nothing crosses the network unencrypted",
    hint="Give the proxies certificates: `tls_cert_file`, `tls_key_file`, and https:// in "
    "`advertise`.",
)
async def access_tls(subject: Subject) -> AsyncIterator[str]:
    proxies = (await subject.overview()).proxies
    urls = [url for one in proxies for url in (one.url, one.admin_url) if url]
    for url in dict.fromkeys([*subject.proxies.named, *urls]):
        if _is_public(url) and urlsplit(url).scheme == "http":
            yield f"{url} is called without TLS"
    settings = subject.settings
    public = [] if settings.secure else list(_public_listeners(settings))
    for name, address in public:
        yield f"{name} {address} takes calls without TLS"
    if public and settings.peer_secret_file is not None:
        yield "peer_secret_file without tls_cert_file: the secret is sent unencrypted"


@_check(
    proxies_book,
    "proxies prove to one another that they are proxies",
    hint="Set the same `peer_secret_file` on all proxies, or `peer_names`.",
    public=True,
)
async def access_peers(subject: Subject) -> AsyncIterator[str]:
    count = len((await subject.overview()).proxies)
    if count > 1 and not subject.settings.peer_identity:
        yield f"{count} proxies, and neither peer_secret_file nor peer_names"


def _public_listeners(settings: Settings) -> Iterator[tuple[str, Address]]:
    """Yield name and address of each listener reachable from other machines."""
    addresses = (
        ("listen", settings.listen_address),
        ("admin_listen", settings.admin_address),
        ("peer_listen", settings.peer_address),
    )
    for name, address in addresses:
        if address is not None and address.public:
            yield name, address


def _is_public(url: str) -> bool:
    return Address(urlsplit(url).hostname or "", 0).public
