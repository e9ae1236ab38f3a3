"""Principals: callers of a proxy, with their role, groups and topics.

The principals file is TOML with one table for each principal:

    [principals.shop]
    role = "producer"
    token_sha256 = "9f86d081…"
    groups = ["shop", "shop-*"]
    topics = ["orders", "payments.*"]
    deny_topics = ["payments.audit"]

It holds SHA-256 digests, not tokens. A token has 256 random bits, so a slow hash would only make
each call more expensive.
"""

import hashlib
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from txbroker.errors import ConfigurationError, NotPermitted

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
"""Names of principals: they appear in markers, logs and cookies."""
FILE_BYTES_MAX = 1024 * 1024
KNOWN_MAX = 1024
"""Names whose match is cached: a look-up takes a fifth of matching."""
SHARES_KNOWN_MAX = 100_000
"""Groups whose share is cached."""
_RESERVED = ("token_file", "admin_token_file")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_WRITABLE_BY_OTHERS = 0o022


class Role(StrEnum):
    """The role of a principal."""

    PRODUCER = "producer"
    """Prepare, decide, register and be asked, for its groups; see their transactions."""
    VIEWER = "viewer"
    """See the state of its groups; no actions and no message bodies."""
    OPERATOR = "operator"
    """Everything, for its groups."""


WRITERS = (Role.PRODUCER, Role.OPERATOR)
READERS = (Role.VIEWER, Role.OPERATOR)
ONLY_OPERATORS = (Role.OPERATOR,)


class Patterns:
    """Names that a pattern allows and none denies; `*` and `?` are wildcards.

    Attributes:
        everything: whether every name is allowed.
        allows: returns whether a name is allowed.
    """

    def __init__(self, allow: Iterable[str] = ("*",), deny: Iterable[str] = ()) -> None:
        self.allow, self.deny = allow, deny = _normal(allow), _normal(deny)
        self._text = ", ".join([*allow, *(f"not {pattern}" for pattern in deny)])
        self._allow = None if "*" in allow else _compiled(allow)
        self._deny = _compiled(deny) if deny else None
        # Attributes, not methods: no Python call where each operation of a frame is checked.
        self.everything = self._allow is None and self._deny is None
        self.allows: Callable[[str], bool] = lru_cache(maxsize=KNOWN_MAX)(self._match)

    def __str__(self) -> str:
        return self._text

    def __contains__(self, name: str) -> bool:
        return self.allows(name)

    def _match(self, name: str) -> bool:
        if self._deny is not None and self._deny.match(name):
            return False
        return self._allow is None or self._allow.match(name) is not None


def _normal(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return patterns with one `*` for each run of them, so that `*` alone is every name."""
    return tuple(re.sub(r"\*+", "*", pattern) for pattern in patterns)


def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for whole names. Unlike in a shell, `[` is a plain character."""
    translated = (
        "".join({"*": ".*", "?": "."}.get(letter) or re.escape(letter) for letter in pattern)
        for pattern in patterns
    )
    return re.compile(rf"(?s:{'|'.join(translated)})\Z" if patterns else r"(?!)")


class Principal(NamedTuple):
    """A caller and its rights.

    Attributes:
        name: as in markers and logs; "" where the proxy asks for no credential.
        shared: whether several callers share the credential, as that of `token_file`.
        expires_s: when its credential expires, seconds since 1970; None for never.
        digests: SHA-256 of its tokens, in hex.
        certificates: names in client certificates that identify it.
    """

    name: str = ""
    role: Role = Role.OPERATOR
    groups: Patterns = Patterns()
    topics: Patterns = Patterns()
    shared: bool = False
    expires_s: float | None = None
    digests: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()

    @property
    def identified(self) -> bool:
        """Whether the credential identifies one caller."""
        return bool(self.name) and not self.shared

    @property
    def counted_as(self) -> str:
        """The name to which its use of a proxy is counted; "" if the credential is shared, so that
        no limit of one caller applies."""
        return "" if self.shared else self.name

    @property
    def sees_bodies(self) -> bool:
        """Whether it may read message bodies."""
        return self.role is not Role.VIEWER

    def by(self, way: str, claim: str = "") -> str:
        """Return the name of the actor, for markers and logs.

        Args:
            way: how the call arrived, such as the caller's address.
            claim: the name that the caller gives; used if the credential is shared.
        """
        if self.identified:
            return self.name
        who = f"{self.name} ({claim})" if self.name and claim else self.name or claim
        return f"{who} via {way}" if who else way

    def check_role(self, roles: Iterable[Role]) -> None:
        """Refuse a call that this role may not make."""
        if self.role not in roles:
            may = " or ".join(sorted(roles))
            raise NotPermitted(
                f"{self._who} is a {self.role}, and this call takes the role {may}: use the "
                "credential of such a principal"
            )

    def check_group(self, group: str) -> None:
        """Refuse a producer group that is not this principal's."""
        if group not in self.groups:
            raise NotPermitted(
                f"{self._who} may not act for group {group!r}: use a principal that may, or have "
                "the group added to this one in the principals file"
            )

    def check_own(self, group: str) -> None:
        """Refuse a transaction of a group that is not this principal's, without naming the
        group."""
        if group not in self.groups:
            raise NotPermitted(
                f"the transaction is of another producer group than {self._who} may act for"
            )

    def check_topics(self, topics: Iterable[str]) -> None:
        """Refuse target topics that this principal may not write."""
        if self.topics.everything:
            return
        for topic in topics:
            if topic not in self.topics:
                raise NotPermitted(
                    f"{self._who} may not write topic {topic!r}: use a principal that may, or "
                    "have the topic added to this one in the principals file"
                )

    @property
    def _who(self) -> str:
        return f"principal {self.name!r}"


ANYBODY = Principal()
"""The caller of a proxy without access control."""


# --- tokens ----------------------------------------------------------------------------------


def make_token() -> str:
    """Return a new token: 256 bits of randomness, URL-safe."""
    return secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    """Return a token's SHA-256 in hex, as the principals file holds it."""
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()


# --- the file --------------------------------------------------------------------------------


class _Table(Struct, forbid_unknown_fields=True, frozen=True):
    role: Role
    token_sha256: str | list[str] = []
    certificate: str | list[str] = []
    groups: list[str] | None = None
    deny_groups: list[str] = []
    topics: list[str] | None = None
    deny_topics: list[str] = []
    expires: datetime | None = None


class Directory:
    """The principals of a file, by credential and by name."""

    def __init__(self, principals: Iterable[Principal] = ()) -> None:
        self._by_name: dict[str, Principal] = {}
        self._by_digest: dict[str, Principal] = {}
        self._by_certificate: dict[str, Principal] = {}
        for principal in principals:
            self._by_name[principal.name] = principal
            _enter(self._by_digest, principal, principal.digests, "token_sha256")
            _enter(self._by_certificate, principal, principal.certificates, "certificate")
        producers = [each for each in self if each.role is Role.PRODUCER]
        # One for all groups comes last, or no other would have any.
        self._producers = sorted(producers, key=lambda each: "*" in each.groups.allow)
        self.share_of: Callable[[str], str] = lru_cache(SHARES_KNOWN_MAX)(self._share_of)
        """Returns to whose account a group's use of shared pools is counted: the first producer's
        of the file that may act for it, expired or not; those with `*` among their groups come
        last. A group of no producer is a separate share."""

    def __iter__(self) -> Iterator[Principal]:
        return iter(self._by_name.values())

    def _share_of(self, group: str) -> str:
        names = (share_name(each) for each in self._producers if group in each.groups)
        return next(names, group)

    def by_digest(self, digest: str) -> Principal | None:
        """Return the principal of a token's digest; None if unknown or expired."""
        return _valid(self._by_digest.get(digest))

    def by_certificate(self, names: Iterable[str]) -> Principal | None:
        """Return the principal that the first known of these certificate names identifies."""
        found = (_valid(self._by_certificate.get(name)) for name in names)
        return next((principal for principal in found if principal is not None), None)

    def by_name(self, name: str, *, expired: bool = False) -> Principal | None:
        """Return the principal of this name; None if unknown or, without `expired`, expired."""
        principal = self._by_name.get(name)
        return principal if expired else _valid(principal)


def share_name(principal: Principal) -> str:
    """Return the name of a principal's share, which no group can have."""
    return f"\n{principal.name}"


@cache
def no_principals() -> Directory:
    """Return the directory of a proxy without a principals file."""
    return Directory()


def _enter(
    into: dict[str, Principal], principal: Principal, keys: Iterable[str], field: str
) -> None:
    for key in keys:
        other = into.setdefault(key, principal)
        if other is not principal:
            raise ConfigurationError(
                f"principals {other.name} and {principal.name} have the same {field}: give each "
                "another one"
            )


def _valid(principal: Principal | None) -> Principal | None:
    if principal is None or principal.expires_s is None or time.time() < principal.expires_s:
        return principal
    return None


def read_principals(path: Path) -> Directory:
    """Return the principals of a file. A ConfigurationError names the file, the principal and the
    change."""
    where = f"principals_file {path}"
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigurationError(f"{where}: {error.strerror}") from None
    if mode & _WRITABLE_BY_OTHERS:
        raise ConfigurationError(
            f"{where} can be written by other users (mode {mode & 0o777:04o}): run `chmod go-w "
            f"{path}`"
        )
    if len(content) > FILE_BYTES_MAX:
        raise ConfigurationError(f"{where} is larger than {FILE_BYTES_MAX} bytes")
    try:
        found = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where} is not TOML: {error}") from None
    tables = found.pop("principals", {})
    if found or not isinstance(tables, dict):
        raise ConfigurationError(
            f"{where}: each principal is a table [principals.NAME], and nothing else is expected"
        )
    try:
        return Directory(_principal(name, table) for name, table in tables.items())
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None


def _principal(name: str, table: Mapping[str, Any]) -> Principal:
    if not NAME.fullmatch(name) or name in _RESERVED:
        raise ConfigurationError(
            f"{name[:80]!r} is no principal's name: up to 64 letters, digits, '.', '_', '-' and "
            f"'@', and neither of {', '.join(_RESERVED)}"
        )
    try:
        given = msgspec.convert(table, _Table)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"principal {name}: {error}") from None
    digests = _several(given.token_sha256)
    if any(not _DIGEST.fullmatch(digest) for digest in digests):
        raise ConfigurationError(
            f"principal {name}: token_sha256 is the SHA-256 of a token, 64 lower-case hex digits, "
            "and never the token itself"
        )
    certificates = _several(given.certificate)
    if not digests and not certificates:
        raise ConfigurationError(
            f"principal {name} has no credential: give it token_sha256 or certificate"
        )
    for field in ("groups", "topics"):
        if given.role is Role.PRODUCER and getattr(given, field) is None:
            raise ConfigurationError(
                f'principal {name}: a producer needs {field}; ["*"] allows every one'
            )
    return Principal(
        name,
        given.role,
        Patterns(("*",) if given.groups is None else given.groups, given.deny_groups),
        Patterns(("*",) if given.topics is None else given.topics, given.deny_topics),
        expires_s=_seconds(given.expires),
        digests=digests,
        certificates=certificates,
    )


def _several(given: str | list[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _seconds(given: datetime | None) -> float | None:
    if given is None:
        return None
    return (given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp()


def format_principal(
    name: str,
    role: Role,
    *,
    digest: str | None,
    certificates: Iterable[str],
    patterns: Mapping[str, Iterable[str]],
    expires: datetime | None,
) -> str:
    """Return a principal's table as TOML; it has no digest where a certificate identifies it."""
    lines = [f"[principals.{_key(name)}]", f"role = {_text(role)}"]
    if digest is not None:
        lines.append(f"token_sha256 = {_text(digest)}")
    if certificates := list(certificates):
        lines.append(f"certificate = {_list(certificates)}")
    lines += [f"{field} = {_list(given)}" for field, given in patterns.items() if given]
    if expires is not None:
        lines.append(f"expires = {expires.isoformat()}")
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _list(given: Iterable[str]) -> str:
    return f"[{', '.join(map(_text, given))}]"


def _text(given: str) -> str:
    # JSON's strings are TOML's basic strings, but for DEL.
    return msgspec.json.encode(given).decode().replace("\x7f", "\\u007f")
