"""Registered producer groups: their check URL, their secret's place and their check policy."""

import logging
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec
import structlog
from msgspec import Struct, structs

from txbroker.core.records import CheckPolicy
from txbroker.door.protocols import GroupStore

log = structlog.wrap_logger(logging.getLogger(__name__))

POLICY_VERSION = 1
QUERY_MASK = "?…"
"""Shown in place of a check URL's query."""
QUERY_MASKS = (QUERY_MASK, "?%E2%80%A6", "?%e2%80%a6")
"""What may become of the mask on its way back."""
GROUP_NAME_CHARS_MAX = 249
"""As long as a topic name may be, which is what groups are usually named after."""
URL_CHARS_MAX = 2000
URLS_KNOWN_MAX = 1024
"""Check URLs that are not taken apart again for each check."""
REF_CHARS_MAX = 4096
PARALLEL_MAX = 64
"""Calls to one group at a time, so that no group takes all the calls of a proxy."""
ANSWER_BYTES_MAX = 16 * 1024 * 1024
"""As large as a frame of an SDK session: an answer with replaced messages is no larger."""

_WEEK_S = 7 * 24 * 3600.0
# Each number's smallest and largest value. The longest check window that still makes sense is
# bounded further by the retention of half messages, which is tested at prepare.
_BOUNDS: dict[str, tuple[float, float]] = {
    "check_after_s": (0.0, _WEEK_S),
    "check_interval_s": (0.1, _WEEK_S),
    "attempts_max": (1, 100),
    "timeout_s": (0.1, 60.0),
    "parallel": (1, PARALLEL_MAX),
    "answer_bytes_max": (1024, ANSWER_BYTES_MAX),
}
_WHOLE = frozenset({"attempts_max", "parallel", "answer_bytes_max"})
_TEXTS = frozenset({"check_url", "secret_ref"})


_NETLOC = re.compile(r"(\[[0-9A-Fa-f:.]+(%25[A-Za-z0-9._-]+)?\]|[^\[\]:@\\/]+)(:\d*)?")


class PolicyError(ValueError):
    """A group's policy is not as it must be; the message says in a sentence what to change."""


class GroupPolicy(Struct, frozen=True, omit_defaults=True):
    """What is registered of a producer group. What is None follows the proxy's configuration.

    Attributes:
        check_url: where check-backs are sent when no instance of the group is connected.
        secret_ref: where the secret that signs them is: `env:NAME` or `file:/path`.
        check_after_s: seconds from prepare until the first check.
        check_interval_s: seconds from one check to the next.
        attempts_max: after how many attempts an undecided transaction parks.
        timeout_s: seconds that an answer may take.
        parallel: how many calls to this group may be under way at a time.
        answer_bytes_max: how large an answer may be, bytes; groups whose checks replace
            messages need more than the default.
    """

    check_url: str | None = None
    secret_ref: str | None = None
    check_after_s: float | None = None
    check_interval_s: float | None = None
    attempts_max: int | None = None
    timeout_s: float | None = None
    parallel: int | None = None
    answer_bytes_max: int | None = None

    def validate(self) -> None:
        """Refuse what cannot work.

        Raises:
            PolicyError: with what to change.
        """
        if self.check_url is not None:
            split_check_url(self.check_url)
        if self.secret_ref is not None:
            _check_secret_ref(self.secret_ref)
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise PolicyError(
                    f"{name} must be from {least:.12g} to {most:.12g}, not {value:.12g}"
                )

    def checks(self, default: CheckPolicy) -> CheckPolicy:
        """Return when this group's transactions are checked, `default` where it does not say."""
        return CheckPolicy(
            after_s=default.after_s if self.check_after_s is None else self.check_after_s,
            interval_s=(
                default.interval_s if self.check_interval_s is None else self.check_interval_s
            ),
            attempts_max=default.attempts_max if self.attempts_max is None else self.attempts_max,
            timeout_s=default.timeout_s if self.timeout_s is None else self.timeout_s,
        )


_FIELDS = tuple(field.name for field in structs.fields(GroupPolicy))


def check_group_name(group: str) -> None:
    """Refuse a group name that cannot be shown, stored or put into a URL.

    Raises:
        PolicyError: it is empty, too long or has control characters.
    """
    if not group:
        raise PolicyError("a group's name must not be empty")
    if len(group) > GROUP_NAME_CHARS_MAX:
        raise PolicyError(f"a group's name has at most {GROUP_NAME_CHARS_MAX} characters")
    if not group.isprintable():
        raise PolicyError("a group's name must not have control characters")
    if group in (".", ".."):
        # HTTP clients take them out of a path, percent-encoded or not.
        raise PolicyError(f"a group's name must not be {group!r}: no URL can name it")


@lru_cache(maxsize=URLS_KNOWN_MAX)
def split_check_url(url: str) -> SplitResult:
    """Return the parts of a check URL.

    Raises:
        PolicyError: it is not an http or https URL that can be called as it stands.
    """
    if len(url) > URL_CHARS_MAX:
        raise PolicyError(f"check_url has at most {URL_CHARS_MAX} characters")
    if url.endswith(QUERY_MASKS):
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
        raise PolicyError("check_url is not a URL: its host or port does not read") from None
    if parts.scheme not in ("http", "https"):
        raise PolicyError("check_url must begin with http:// or https://")
    if not parts.hostname or port == 0:
        raise PolicyError("check_url must name a host, and a port other than 0 if any")
    if not _NETLOC.fullmatch(parts.netloc) and "@" not in parts.netloc:
        raise PolicyError("check_url is not a URL: its host or port does not read")
    if "@" in parts.netloc:
        raise PolicyError(
            "check_url must not hold a user name or password; give the group a secret_ref instead"
        )
    if "#" in url:
        raise PolicyError("check_url must not have a fragment (#…): it is never sent")
    return parts


@lru_cache(maxsize=URLS_KNOWN_MAX)
def host_and_port(url: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port that a check URL leads to.

    Raises:
        PolicyError: it is not a check URL.
    """
    parts = split_check_url(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def without_query(url: str, mask: str = "") -> str:
    """Return what may be shown of a check URL: tokens are put into the query.

    Args:
        mask: stands for the query where there is one.
    """
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
    # What was given is not repeated: somebody may have put the secret itself here.
    raise PolicyError("secret_ref must be env:NAME or file:/absolute/path, not the secret itself")


# --- JSON ------------------------------------------------------------------------------------


def policy_from_json(obj: object) -> GroupPolicy:
    """Return the policy in a decoded JSON object, as `PUT /v1/groups/{group}` brings it.

    Raises:
        PolicyError: a field is unknown, of a wrong type or out of bounds.
    """
    if not isinstance(obj, dict):
        raise PolicyError("a group's policy must be a JSON object")
    values: dict[str, Any] = {}
    for name, value in obj.items():
        if name not in _FIELDS:
            known = ", ".join(_FIELDS)
            raise PolicyError(f"unknown field {str(name)[:40]!r}; known are {known}")
        if value is not None:
            values[name] = _typed(name, value)
    policy = GroupPolicy(**values)
    policy.validate()
    return policy


def _typed(name: str, value: object) -> object:
    if name in _TEXTS:
        if isinstance(value, str):
            return value
        raise PolicyError(f"{name} must be text")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PolicyError(f"{name} must be a number")
    if name in _WHOLE:
        if isinstance(value, float):
            raise PolicyError(f"{name} must be a whole number")
        return value
    try:
        return float(value)
    except OverflowError:
        raise PolicyError(f"{name} is far too large") from None


def policy_to_json(policy: GroupPolicy) -> dict[str, Any]:
    """Return a policy as JSON shows it: only what is set, and the secret's place only."""
    return {name: value for name in _FIELDS if (value := getattr(policy, name)) is not None}


def encode_policy(policy: GroupPolicy) -> bytes:
    """Return a policy as it is stored: JSON whose first field is the version."""
    return msgspec.json.encode({"v": POLICY_VERSION, **policy_to_json(policy)})


def decode_policy(stored: bytes) -> GroupPolicy:
    """Return a stored policy.

    Raises:
        PolicyError: a newer version wrote it, or it does not read.
    """
    try:
        obj = msgspec.json.decode(stored)
    except (ValueError, RecursionError):
        raise PolicyError("the stored policy is not JSON") from None
    version = obj.pop("v", None) if isinstance(obj, dict) else None
    if isinstance(version, int) and version > POLICY_VERSION:
        raise PolicyError(
            f"the stored policy is of version {version}; this build knows {POLICY_VERSION}"
        )
    if version != POLICY_VERSION:
        raise PolicyError("the stored policy has no version")
    return policy_from_json(obj)


# --- registry --------------------------------------------------------------------------------


class Groups:
    """The registered groups, following the store's changes."""

    def __init__(
        self,
        store: GroupStore,
        unusable: Callable[[str, GroupPolicy], str | None] = lambda _, __: None,
    ) -> None:
        """Args:
        unusable: returns why this proxy cannot use a group's policy, for the log, or None.
        """
        self._store = store
        self._unusable = unusable
        self.policies: dict[str, GroupPolicy] = {}
        """What is registered, by group; for others to read."""
        self._problems: dict[str, str] = {}
        self._listeners: list[Callable[[str], None]] = []

    async def load(self) -> None:
        """Read all groups and go on following them.

        Raises:
            KafkaUnavailable: Kafka does not answer; call it once more.
        """
        await self._store.load(self._changed)

    def on_change(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the name of each group that is put or removed, by any proxy."""
        self._listeners.append(listener)

    def problem(self, group: str) -> str | None:
        """Say why a group's stored policy cannot be used, or None where it can or is not there."""
        return self._problems.get(group)

    def __contains__(self, group: str) -> bool:
        return group in self.policies or group in self._problems

    def names(self) -> Iterator[str]:
        """Yield the names of all registered groups, whether their policy can be used or not."""
        yield from self.policies
        yield from self._problems.keys() - self.policies.keys()

    def list(self) -> list[tuple[str, GroupPolicy]]:
        """Return all registered groups by name."""
        return sorted(self.policies.items())

    async def put(self, group: str, policy: GroupPolicy) -> None:
        """Register a group, or replace what is registered; returns once it is stored.

        Raises:
            PolicyError: name or policy cannot work.
            KafkaUnavailable: it may or may not be stored.
        """
        check_group_name(group)
        policy.validate()
        await self._store.put(group, encode_policy(policy))

    async def remove(self, group: str) -> bool:
        """Remove a group; say whether there was one.

        Raises:
            KafkaUnavailable: it may or may not be removed.
        """
        known = group in self
        if known:
            await self._store.put(group, None)
        return known

    def _changed(self, group: str, stored: bytes | None) -> None:
        self._problems.pop(group, None)
        self.policies.pop(group, None)
        if stored is not None:
            try:
                policy = self.policies[group] = decode_policy(stored)
                why = self._unusable(group, policy)
            except PolicyError as error:
                why = self._problems[group] = str(error)
            if why is not None:
                log.warning("group not usable", group=group, why=why)
        for listener in self._listeners:
            listener(group)
