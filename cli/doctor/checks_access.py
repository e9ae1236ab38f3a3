"""Checks of who may call, and of what others can read on the way or on this machine.

Most look at the settings that the doctor was given. Where these listen on loopback only, nobody
else can call, so there is nothing to judge: an operator's own machine seldom has a proxy's
settings.
"""

from __future__ import annotations

import asyncio
import ipaddress
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from txbroker.addresses import Address, parse_address
from txbroker.cli.doctor.findings import Book, Finding, Level, Section, fine, judged
from txbroker.cli.doctor.subject import Subject
from txbroker.cli.output import duration
from txbroker.config import Settings
from txbroker.principals import Principal, Role, read_principals

EXPIRES_SOON_S = 14 * 86400.0
_PAGES = ("/v1/overview", "/metrics")
_NO_SECRETS = ("_ca_file", "_cert_file", "principals_file")
_READ_BY_OTHERS = stat.S_IRWXO | stat.S_IWGRP
_WRITTEN_BY_OTHERS = stat.S_IWOTH | stat.S_IWGRP
_NEVER_A_CHECK = tuple(
    ipaddress.ip_network(text)
    for text in ("127.0.0.0/8", "::1/128", "169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128")
)
"""Loopback, link-local and where clouds tell machines their credentials."""
_MANUAL = "docs/how-to/secure-the-listener.md"
_NOT_JUDGED = (
    "these settings listen on loopback only; to judge a proxy's, give the doctor its settings"
)

settings_book = Book(Section.ACCESS)
proxies_book = Book(Section.ACCESS, needs=("proxies-ready",))


@settings_book.check(
    "callers from other machines need a credential",
    hint="Set `principals_file`, `token_file` or `tls_client_ca_file`, and remove `insecure`.",
    doc=_MANUAL,
)
async def access_credentials(subject: Subject) -> Finding:
    """Whether a listener that others reach asks for a credential."""
    given = subject.settings
    lines = []
    for name, address in _public_listeners(given):
        guarded = given.peer_identity if name == "peer_listen" else given.guarded
        guarded = guarded or (name == "admin_listen" and given.admin_token_file is not None)
        if not guarded:
            lines.append(f"{name} {address.host}:{address.port} takes calls without a credential")
    return _judged_public(given, lines, "everybody who reaches the proxies may call", "they do")


@settings_book.check(
    "callers have credentials of their own, and producers are no operators",
    hint="Give each producer a principal (`txbroker principals add`), and operators an address of "
    "their own (`admin_listen`, `admin_token_file`).",
    doc=_MANUAL,
)
async def access_shared_token(subject: Subject) -> Finding:
    """Whether one token stands for all callers, and whether it makes operators of them."""
    given = subject.settings
    lines = []
    if given.token_file is not None:
        if given.principals_file is None:
            lines.append(
                "token_file is one token for all callers: it cannot be taken from one of them, and "
                "it allows every producer group and topic"
            )
        if not given.admin_listen:
            lines.append(
                "token_file without admin_listen: every producer may do what operators may"
            )
    elif given.guarded and given.principals_file is None and not given.admin_listen:
        lines.append(
            "tls_client_ca_file without principals_file and admin_listen: every caller with a "
            "certificate may do what operators may"
        )
    return _judged_public(given, lines, "callers share rights", "they do")


@settings_book.check(
    "principals are valid, and allow no more than they need",
    hint="Make a new credential with `txbroker principals add` before the old one expires, and "
    "name the groups and topics of each producer. Proxies read the file again by themselves.",
    doc=_MANUAL,
)
async def access_principals(subject: Subject) -> Finding:
    """Whether a principal has expired or soon will, or is a producer of everything."""
    path = subject.settings.principals_file
    if path is None:
        return fine("no principals_file in these settings")
    principals = list(await asyncio.to_thread(read_principals, path))
    lines = [line for one in principals for line in _on_principal(one, subject.now_s())]
    if lines:
        return judged(Level.WARNING, f"{len(lines)} to look at", lines)
    return fine(f"{len(principals)} principal{'s' * (len(principals) != 1)}")


def _on_principal(one: Principal, now_s: float) -> Iterator[str]:
    if one.expires_s is not None:
        left_s = one.expires_s - now_s
        if left_s <= 0:
            yield f"{one.name} expired {duration(-left_s)} ago"
        elif left_s <= EXPIRES_SOON_S:
            yield f"{one.name} expires in {duration(left_s)}"
    if one.role is Role.PRODUCER and one.groups.everything and one.topics.everything:
        yield f"{one.name} is a producer of every group and topic"


@settings_book.check(
    "secrets are closed to other users of this machine",
    hint="Run `chmod 600` on files with secrets and `chmod 644` on the principals file; in "
    "Kubernetes mount Secrets with defaultMode 0440 and an fsGroup.",
    doc=_MANUAL,
)
async def access_files(subject: Subject) -> Finding:
    """Whether others can read a token, a key or a password, or change who the principals are."""
    lines, looked = await asyncio.to_thread(_open_files, subject.settings)
    if lines:
        return judged(Level.WARNING, f"{len(lines)} of {looked} files are open", lines)
    return fine(f"{looked} file{'s' * (looked != 1)}" if looked else "these settings name no file")


def _open_files(given: Settings) -> tuple[list[str], int]:
    lines: list[str] = []
    looked = 0
    for name in type(given).model_fields:
        path = getattr(given, name)
        principals = name == "principals_file"
        if not isinstance(path, Path) or not name.endswith("_file"):
            continue
        if name.endswith(_NO_SECRETS) and not principals:
            continue
        looked += 1
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            folder = path.absolute().parent.stat().st_mode
        except OSError as error:
            lines.append(f"{name} {path}: not seen: {error.strerror}")
            continue
        if mode & (_WRITTEN_BY_OTHERS if principals else _READ_BY_OTHERS):
            what = "change" if principals else "read or change"
            lines.append(f"{name} {path} has mode {mode:04o}: others can {what} it")
        elif folder & stat.S_IWOTH and not folder & stat.S_ISVTX:
            lines.append(f"{name} {path} is in a folder that every user may write: others can "
                         "replace it")  # fmt: skip
    return lines, looked


@settings_book.check(
    "the login at Kafka is protected by TLS",
    hint="Use `kafka_security_protocol` SASL_SSL.",
    doc="docs/how-to/connect-to-kafka.md",
)
async def access_kafka(subject: Subject) -> Finding:
    """Whether password or token can be read on the way to Kafka."""
    given = subject.settings
    protocol = given.kafka_security_protocol
    servers = (parse_address(server.strip()) for server in given.kafka.split(","))
    public = [f"{one.host}:{one.port}" for one in servers if one.public]
    if protocol == "SASL_PLAINTEXT" and public:
        how = f"{protocol} with {given.kafka_sasl_mechanism}"
        return judged(
            Level.WARNING,
            f"{how}: login and messages can be read on the way",
            [f"to {server}" for server in public],
        )
    return fine(protocol)


@settings_book.check(
    "check URLs cannot lead to loopback, link-local and metadata addresses",
    hint="Remove these from `check_url_allow`; where a check listens beside the proxy, give it an "
    "address of its own or allow that one only.",
    doc="docs/how-to/write-a-check.md",
)
async def access_check_urls(subject: Subject) -> Finding:
    """Whether who registers a group can have a proxy call its own machine."""
    given = subject.settings.check_url_allow
    lines = [f"check_url_allow has {entry}" for entry in given if _leads_inside(entry)]
    if lines:
        return judged(Level.WARNING, "proxies call them for whoever may register a group", lines)
    return fine("none is allowed")


def _leads_inside(entry: str) -> bool:
    try:
        network = ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        name = entry.lower().rstrip(".")
        return name in ("localhost", "*.localhost") or name.endswith(".localhost")
    return any(network.version == one.version and network.overlaps(one) for one in _NEVER_A_CHECK)


# --- with the proxies ------------------------------------------------------------------------


@proxies_book.check(
    "metrics and operators' calls are not open to everybody",
    hint="Set `principals_file`, `token_file` or `tls_client_ca_file` on these proxies, or close "
    "the network to all but those who operate them.",
    doc=_MANUAL,
)
async def access_open(subject: Subject) -> Finding:
    """Whether a proxy that other machines reach answers a call without any credential."""
    public = [url for url in await subject.urls() if _is_public(url)]
    asked = [(url, path) for url in public for path in _PAGES]
    answers = await asyncio.gather(*(subject.proxies.anonymous(*one) for one in asked))
    lines = [
        f"{url}{path} answers without a credential"
        for (url, path), status in zip(asked, answers, strict=True)
        if status == 200
    ]
    if lines:
        return judged(Level.WARNING, "everybody who reaches them may look and act", lines)
    return fine(f"tried at {len(public)}" if public else "the proxies listen on loopback")


@proxies_book.check(
    "nothing crosses the network in the clear",
    hint="Give the proxies certificates: `tls_cert_file`, `tls_key_file`, and https:// in "
    "`advertise`.",
    doc=_MANUAL,
)
async def access_tls(subject: Subject) -> Finding:
    """Whether messages, tokens and the peer secret can be read between machines."""
    overview = await subject.overview()
    urls = [*subject.proxies.named]
    urls += [url for one in overview.proxies for url in (one.url, one.admin_url) if url]
    lines = [
        f"{url} is called without TLS"
        for url in dict.fromkeys(urls)
        if _is_public(url) and urlsplit(url).scheme == "http"
    ]
    given = subject.settings
    if not given.secure:
        lines += [
            f"{name} {address.host}:{address.port} takes calls without TLS"
            for name, address in _public_listeners(given)
        ]
        if given.peer_secret_file is not None and list(_public_listeners(given)):
            lines.append("peer_secret_file without tls_cert_file: the secret is sent in the clear")
    if lines:
        return judged(Level.WARNING, "messages and tokens can be read on the way", lines)
    return fine("TLS wherever other machines call")


@proxies_book.check(
    "proxies prove to one another that they are proxies",
    hint="Set the same `peer_secret_file` on all proxies, or `peer_names`.",
    doc=_MANUAL,
)
async def access_peers(subject: Subject) -> Finding:
    """Whether callers can pass for a proxy, where there are several."""
    given = subject.settings
    count = len((await subject.overview()).proxies)
    if given.peer_identity:
        return fine("by peer_secret_file" if given.peer_secret_file else "by peer_names")
    lines = []
    if count > 1:
        lines.append(f"{count} proxies, and neither peer_secret_file nor peer_names")
    return _judged_public(given, lines, "nobody can tell them from other callers", "there is one")


def _public_listeners(given: Settings) -> Iterator[tuple[str, Address]]:
    """Yield name and address of each listener that other machines reach."""
    addresses = (
        ("listen", given.listen_address),
        ("admin_listen", given.admin_address),
        ("peer_listen", given.peer_address),
    )
    for name, address in addresses:
        if address is not None and address.public:
            yield name, address


def _judged_public(given: Settings, lines: list[str], found: str, well: str) -> Finding:
    """Judge settings, unless they are of a proxy that no other machine reaches."""
    if not list(_public_listeners(given)):
        return fine(_NOT_JUDGED)
    return judged(Level.WARNING, found, lines) if lines else fine(well)


def _is_public(url: str) -> bool:
    return Address(urlsplit(url).hostname or "", 0).public
