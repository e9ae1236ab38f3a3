"""The registered policy of a producer group: check URL, secret reference, check times."""

import re
from functools import lru_cache
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Meta, Struct, structs

from txbroker.core.records import CheckPolicy

POLICY_VERSION = 1
QUERY_MASK = "?…"
"""Shown in place of a check URL's query."""
_QUERY_MASKS = (QUERY_MASK, "?%E2%80%A6", "?%e2%80%a6")
"""The mask, and how clients may encode it when they send a shown URL back."""
GROUP_NAME_CHARS_MAX = 249
"""The maximum length of a topic name: groups are usually named after topics."""
URLS_CACHED_MAX = 1024
"""Parsed check URLs that are cached: each check needs its group's."""
REF_CHARS_MAX = 4096
PARALLEL_MAX = 64
"""Calls to one group at a time, so that no group takes all the calls of a proxy."""

ATTEMPTS_MAX = 15
"""The most check attempts that a transaction may ask for; more only a group may have."""
TIMEOUT_S_MIN, TIMEOUT_S_MAX = 0.1, 60.0
"""How long the answer to a check may take, seconds."""

_WEEK_S = 7 * 24 * 3600
_NETLOC = re.compile(r"(\[[0-9A-Fa-f:.]+(%25[A-Za-z0-9._-]+)?\]|[^\[\]:@\\/]+)(:\d*)?")

_CheckUrl = Annotated[str, Meta(max_length=2000, description="Where check-backs are posted.")]
_SecretRef = Annotated[
    str,
    Meta(
        description="Where the secret that signs them is: `env:NAME` or `file:/path`, as "
        "the proxy's `secret_env_allow` and `secrets_dir` allow this group. One that "
        "begins with `whsec_` is base64 of the key."
    ),
]

_SignedAnswers = Annotated[
    bool,
    Meta(
        description="Answers of the check URL count only if they are signed with the secret, as "
        "the questions are."
    ),
]


class PolicyError(ValueError):
    """A group's policy cannot work; the message names the change."""


class GroupPolicy(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The registered policy of a producer group. A field that is None follows the configuration.

    Attributes:
        check_url: where check-backs are sent when no instance of the group is connected.
        secret_ref: where the secret that signs them is: `env:NAME` or `file:/path`.
        check_after_s: seconds from prepare until the first check; the check window is bounded
            further by the retention of half messages, which prepare tests.
        check_interval_s: seconds from one check to the next.
        attempts_max: after how many attempts an undecided transaction parks.
        timeout_s: seconds that an answer may take.
        parallel: calls to this group that may be in flight at a time.
        answer_bytes_max: the largest answer, bytes; the maximum is that of a session's frame.
            Groups whose checks replace messages need more than the default.
        signed_answers: an answer of the check URL decides only if it is signed with the secret.
    """

    check_url: _CheckUrl | None = None
    secret_ref: _SecretRef | None = None
    check_after_s: Annotated[float, Meta(ge=0, le=_WEEK_S)] | None = None
    check_interval_s: Annotated[float, Meta(ge=0.1, le=_WEEK_S)] | None = None
    attempts_max: Annotated[int, Meta(ge=1, le=100)] | None = None
    timeout_s: Annotated[float, Meta(ge=TIMEOUT_S_MIN, le=TIMEOUT_S_MAX)] | None = None
    parallel: Annotated[int, Meta(ge=1, le=PARALLEL_MAX)] | None = None
    answer_bytes_max: Annotated[int, Meta(ge=1024, le=16 * 1024 * 1024)] | None = None
    signed_answers: _SignedAnswers | None = None

    def validate(self) -> None:
        """Raise PolicyError if a field cannot work."""
        _converted(structs.asdict(self))
        if self.check_url is not None:
            split_check_url(self.check_url)
        if self.secret_ref is not None:
            _check_secret_ref(self.secret_ref)
        elif self.signed_answers:
            raise PolicyError("signed_answers needs a secret_ref: register one with it")

    def checks(self, default: CheckPolicy) -> CheckPolicy:
        """Return when this group's transactions are checked; `default` fills unset fields."""
        return CheckPolicy(
            after_s=default.after_s if self.check_after_s is None else self.check_after_s,
            interval_s=(
                default.interval_s if self.check_interval_s is None else self.check_interval_s
            ),
            attempts_max=default.attempts_max if self.attempts_max is None else self.attempts_max,
            timeout_s=default.timeout_s if self.timeout_s is None else self.timeout_s,
        )


def _converted(fields: object) -> GroupPolicy:
    try:
        return msgspec.convert(fields, GroupPolicy)
    except msgspec.ValidationError as error:
        why, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`") or "a group's policy"
        raise PolicyError(f"{name}: {why[0].lower()}{why[1:]}") from None


def encode_policy(policy: GroupPolicy) -> bytes:
    """Return a policy as it is stored: JSON whose first field is the version."""
    set_fields = {
        name: value for name, value in structs.asdict(policy).items() if value is not None
    }
    return msgspec.json.encode({"v": POLICY_VERSION, **set_fields})


def decode_policy(stored: bytes) -> GroupPolicy:
    """Return a stored policy; raise PolicyError if a newer version wrote it or it cannot be
    decoded."""
    try:
        fields = msgspec.json.decode(stored)
    except (ValueError, RecursionError):
        raise PolicyError("the stored policy is not JSON") from None
    version = fields.pop("v", None) if isinstance(fields, dict) else None
    if isinstance(version, int) and version > POLICY_VERSION:
        raise PolicyError(
            f"the stored policy is of version {version}; this build knows {POLICY_VERSION}"
        )
    if version != POLICY_VERSION:
        raise PolicyError("the stored policy has no version")
    policy = _converted(fields)
    policy.validate()
    return policy


def check_group_name(group: str) -> None:
    """Raise PolicyError for a group name that cannot be shown, stored or put into a URL."""
    if not group:
        raise PolicyError("a group's name must not be empty")
    if len(group) > GROUP_NAME_CHARS_MAX:
        raise PolicyError(f"a group's name has at most {GROUP_NAME_CHARS_MAX} characters")
    if not group.isprintable():
        raise PolicyError("a group's name must not have control characters")
    if group in (".", ".."):
        # HTTP clients take them out of a path, percent-encoded or not.
        raise PolicyError(f"a group's name must not be {group!r}: no URL can name it")


@lru_cache(maxsize=URLS_CACHED_MAX)
def split_check_url(url: str) -> SplitResult:
    """Return the parts of a check URL; raise PolicyError if it cannot be called."""
    if url.endswith(_QUERY_MASKS):
        raise PolicyError(
            "check_url ends with the mask that stands for its query where it is shown; give the "
            "whole URL"
        )
    if not all("!" <= c <= "~" for c in url):
        raise PolicyError("check_url must be plain ASCII without spaces; percent-encode the rest")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise PolicyError("check_url is not a URL: its host or port is malformed") from None
    if parts.scheme not in ("http", "https"):
        raise PolicyError("check_url must begin with http:// or https://")
    if not parts.hostname or port == 0:
        raise PolicyError("check_url must name a host, and a port other than 0 if any")
    if not _NETLOC.fullmatch(parts.netloc) and "@" not in parts.netloc:
        raise PolicyError("check_url is not a URL: its host or port is malformed")
    if "@" in parts.netloc:
        raise PolicyError(
            "check_url must not hold a user name or password; give the group a secret_ref instead"
        )
    if "#" in url:
        raise PolicyError("check_url must not have a fragment (#…): it is never sent")
    return parts


@lru_cache(maxsize=URLS_CACHED_MAX)
def host_and_port(url: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of a check URL."""
    parts = split_check_url(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def without_query(url: str, mask: str = "") -> str:
    """Return a check URL as it may be shown: `mask` replaces its query, which may hold tokens."""
    path, question_mark, _ = url.partition("?")
    return path + mask if question_mark else path


def _check_secret_ref(ref: str) -> None:
    if len(ref) > REF_CHARS_MAX:
        raise PolicyError(f"secret_ref has at most {REF_CHARS_MAX} characters")
    kind, _, place = ref.partition(":")
    if kind == "env" and place and place.isprintable() and "=" not in place:
        return
    if kind == "file" and place.startswith("/") and place.isprintable():
        return
    # The value is not repeated: it may be the secret itself.
    raise PolicyError("secret_ref must be env:NAME or file:/absolute/path, not the secret itself")
