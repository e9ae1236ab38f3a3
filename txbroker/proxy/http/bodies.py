"""What goes over HTTP as JSON: requests, queries and answers.

These declarations decode the requests, encode the answers and make the OpenAPI document, so the
three cannot differ. Only the messages themselves are read by `txbroker.contract.json`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from txbroker.contract.json import PARTITION_MAX, TIMESTAMP_MS_MAX
from txbroker.contract.policy import GROUP_NAME_CHARS_MAX, GroupPolicy
from txbroker.contract.service import (
    LIST_LIMIT_MAX,
    Event,
    GroupOverview,
    PartitionOverview,
    ProxyOverview,
)
from txbroker.core.records import Attempt, Cause, Decision, Source, State

TEXT_MAX = 1000
BY_MAX = 200
SECONDS_MAX = 366 * 86400
# `(?!\n)` because in Python a `$` also matches before a line's end; elsewhere it says nothing.
_PLAIN = r"^[^\x00-\x1f\x7f-\x9f]*$(?!\n)"

_NULL: dict[str, Any] = {"type": "null"}
_BASE64_PATTERN = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_BASE64: dict[str, Any] = {
    "type": ["string", "null"],
    "contentEncoding": "base64",
    "pattern": _BASE64_PATTERN,
}
_HEADER_REF: dict[str, Any] = {"$ref": "#/components/schemas/HeaderValue"}
_HEADER_PAIR: dict[str, Any] = {
    "type": "array",
    "prefixItems": [{"type": "string"}, _HEADER_REF],
    "minItems": 2,
    "maxItems": 2,
}
# The value is one of three, the others are absent or null.
_VALUE_VARIANTS: list[dict[str, Any]] = [
    {"required": ["value"], "properties": {"value_base64": _NULL, "value_json": _NULL}},
    {
        "required": ["value_base64"],
        "properties": {"value": _NULL, "value_json": _NULL, "value_base64": {"type": "string"}},
    },
    {
        "required": ["value_json"],
        "properties": {"value": _NULL, "value_base64": _NULL, "value_json": {"not": _NULL}},
    },
]
MESSAGE_SCHEMA: dict[str, Any] = {
    "title": "Message",
    "description": "One message for one target topic. At most one of `key` and `key_base64`; "
    'exactly one of `value`, `value_base64` and `value_json`, or `"value": null` for a '
    "tombstone.",
    "type": "object",
    "required": ["topic"],
    "additionalProperties": False,
    "properties": {
        "topic": {"type": "string", "minLength": 1},
        "key": {"type": ["string", "null"]},
        "key_base64": _BASE64,
        "value": {"type": ["string", "null"]},
        "value_base64": _BASE64,
        "value_json": {"description": "Any JSON; stored as it is written here."},
        "headers": {
            "description": "An object, or pairs where order and repeats matter.",
            "anyOf": [
                {"type": "object", "additionalProperties": _HEADER_REF},
                {"type": "array", "items": _HEADER_PAIR},
                _NULL,
            ],
        },
        "partition": {"type": ["integer", "null"], "minimum": 0, "maximum": PARTITION_MAX},
        "timestamp_ms": {"type": ["integer", "null"], "minimum": 0, "maximum": TIMESTAMP_MS_MAX},
    },
    "allOf": [
        {"anyOf": [{"properties": {"key": _NULL}}, {"properties": {"key_base64": _NULL}}]},
        {"anyOf": _VALUE_VARIANTS},
    ],
}
HEADER_VALUE_SCHEMA: dict[str, Any] = {
    "title": "HeaderValue",
    "description": "Text, bytes as base64, or null.",
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "required": ["base64"],
            "additionalProperties": False,
            "properties": {
                "base64": {
                    "type": "string",
                    "contentEncoding": "base64",
                    "pattern": _BASE64_PATTERN,
                }
            },
        },
        {"type": "null"},
    ],
}

_MESSAGES: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {"$ref": "#/components/schemas/Message"},
}


def _no_messages() -> msgspec.Raw:
    return msgspec.Raw(b"null")


Messages = Annotated[
    msgspec.Raw,
    Meta(description="The messages, in order.", extra_json_schema=_MESSAGES),
]
MaybeMessages = Annotated[
    msgspec.Raw,
    Meta(
        description="Final content for the prepared messages, topics and count unchanged.",
        extra_json_schema={"anyOf": [_MESSAGES, {"type": "null"}]},
    ),
]
Group = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=GROUP_NAME_CHARS_MAX,
        pattern=_PLAIN,
        description="The name of a producer group.",
    ),
]
Key = Annotated[str, Meta(min_length=1, max_length=TEXT_MAX)]
Reason = Annotated[
    str, Meta(max_length=TEXT_MAX, pattern=_PLAIN, description="Why, for the record.")
]
By = Annotated[
    str,
    Meta(
        max_length=BY_MAX,
        pattern=_PLAIN,
        description="Who acts, in the caller's own words; recorded before the caller's address.",
    ),
]
Seconds = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]
TransactionId = Annotated[
    str,
    Meta(
        min_length=26,
        max_length=26,
        description="A transaction id; case does not matter.",
        extra_json_schema={"pattern": "^[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}$"},
    ),
]


class RequestBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body or a query; a field that is not known is refused, not ignored."""


class AnswerBody(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A body of an answer; fields that say nothing are left out."""


# --- requests --------------------------------------------------------------------------------


class PrepareBody(RequestBody, frozen=True):
    """Store these messages as a half message, invisible until they are committed."""

    group: Group
    messages: Messages
    id: TransactionId | None = None
    dedup_key: Key | None = None
    order_key: Key | None = None
    check_after_s: Seconds | None = None
    check_interval_s: Seconds | None = None


class CommitBody(RequestBody, frozen=True):
    """Commit a transaction. Without a group an operator decides."""

    group: Group | None = None
    reason: Reason | None = None
    by: By | None = None
    messages: MaybeMessages = msgspec.field(default_factory=_no_messages)
    wait: (
        Annotated[
            Literal["promoted"],
            Meta(
                description="Answer only when consumers can see the messages or a target refuses "
                "them, or after 30 s: `state` says which."
            ),
        ]
        | None
    ) = None


class RollbackBody(RequestBody, frozen=True):
    """Roll a transaction back. Without a group an operator decides."""

    group: Group | None = None
    reason: Reason | None = None
    by: By | None = None


class ReasonBody(RequestBody, frozen=True):
    """Why and who, for the record."""

    reason: Reason | None = None
    by: By | None = None


class GroupBody(GroupPolicy, frozen=True):
    """What is registered of a producer group; what is left out follows the configuration."""


class ListQuery(RequestBody, frozen=True):
    """Which transactions; what is left out means any."""

    state: State | None = None
    group: Group | None = None
    topic: Annotated[str, Meta(min_length=1, max_length=249)] | None = None
    older_than_s: Annotated[float, Meta(ge=0, le=SECONDS_MAX * 100)] | None = None
    limit: Annotated[int, Meta(ge=1, le=LIST_LIMIT_MAX)] = 100
    cursor: Annotated[str, Meta(min_length=1, max_length=500)] | None = None


class FindQuery(RequestBody, frozen=True):
    """What to tell of a transaction."""

    bodies: Annotated[bool, Meta(description="Show keys, values and headers too.")] = False


class NoQuery(RequestBody, frozen=True):
    """Nothing may be asked for."""


# --- answers ---------------------------------------------------------------------------------


class StandingBody(AnswerBody, frozen=True):
    """Where a transaction stands."""

    id: str
    state: State
    decision: Decision | None = None


class PlacedBody(AnswerBody, frozen=True):
    """A message of a transaction, and where it is once promoted. Content only on demand."""

    topic: str
    partition: int
    offset: int | None = None
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET
    value: str | UnsetType | None = UNSET
    value_base64: str | UnsetType = UNSET
    headers: list[tuple[str, str | dict[str, str] | None]] | UnsetType = UNSET
    timestamp_ms: int | UnsetType = UNSET


class TransactionBody(AnswerBody, frozen=True):
    """All that is known of one transaction. Times are milliseconds since 1970."""

    id: str
    group: str
    state: State
    partition: int
    half_offset: int
    prepared_at_ms: int
    messages: list[PlacedBody]
    round: int
    attempts: int
    attempts_max: int
    order_key: str | None = None
    dedup_key: str | None = None
    decision: Decision | None = None
    decided_at_ms: int | None = None
    source: Source | None = None
    by: str = ""
    reason: str = ""
    next_check_at_ms: int | None = None
    cause: Cause | None = None
    checks: tuple[Attempt, ...] = ()
    timeline: tuple[Event, ...] = ()
    waiting: Annotated[
        str, Meta(description="Why a check that is due is not made. Told of one transaction only.")
    ] = ""


class PageBody(AnswerBody, frozen=True):
    """A part of a list; `next_cursor` null where it ends."""

    transactions: list[TransactionBody]
    next_cursor: str | None


class OverviewBody(AnswerBody, frozen=True, omit_defaults=False):
    """How all stands now. Counts are null of a half partition whose proxy did not answer; then
    `complete` is false. Ages are seconds, times milliseconds since 1970."""

    at_ms: int
    complete: bool
    proxies: tuple[ProxyOverview, ...]
    partitions: tuple[PartitionOverview, ...]
    groups: tuple[GroupOverview, ...]
    groups_left_off: int
    refused_topics: dict[str, int]


class GroupAnswer(AnswerBody, frozen=True):
    """A registered group, and how many instances of it can be asked by session at this proxy.

    Of the check URL the query is hidden. `problem`: why this proxy cannot use what is registered.
    """

    group: str
    sessions: int
    check_url: str | None = None
    secret_ref: str | None = None
    check_after_s: float | None = None
    check_interval_s: float | None = None
    attempts_max: int | None = None
    timeout_s: float | None = None
    parallel: int | None = None
    answer_bytes_max: int | None = None
    problem: str | None = None


class GroupsBody(AnswerBody, frozen=True):
    """All registered groups by name."""

    groups: list[GroupAnswer]


class RemovedBody(AnswerBody, frozen=True):
    """The group is not registered any more."""

    group: str
    removed: bool


class TestedBody(AnswerBody, frozen=True):
    """What became of a test call to a group's check URL; `why` says what is wrong, if anything.

    `status` is that of the answer, null where there was none.
    """

    group: str
    answered: bool
    endpoint: str = ""
    status: int | None = None
    why: str = ""


class HealthBody(AnswerBody, frozen=True):
    """The process is alive."""

    status: str


class ReadyBody(AnswerBody, frozen=True):
    """Whether calls can be taken; per half partition what it is doing; what is wrong."""

    ready: bool
    partitions: dict[str, str]
    problems: list[str]


class ErrorFields(AnswerBody, frozen=True):
    """What went wrong: a code for programs, a sentence for people, and what it is about."""

    code: str
    message: str
    id: str | None = None
    path: str | None = None


class ErrorBody(AnswerBody, frozen=True):
    """The answer to a call that was not carried out."""

    error: ErrorFields
