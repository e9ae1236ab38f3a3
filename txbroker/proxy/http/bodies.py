"""JSON bodies and queries of the HTTP API.

These structs decode requests, encode answers and generate the OpenAPI document, so the three
cannot differ. Only messages are decoded by `txbroker.contract.json`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from txbroker.contract.groups import AnswerBody, ErrorFields
from txbroker.contract.json import TARGET_PARTITION_MAX, TIMESTAMP_MS_MAX
from txbroker.contract.policy import (
    ATTEMPTS_MAX,
    GROUP_NAME_CHARS_MAX,
    TIMEOUT_S_MAX,
    TIMEOUT_S_MIN,
    GroupPolicy,
)
from txbroker.contract.service import (
    HISTORY_S,
    HISTORY_STEPS_S,
    LIST_LIMIT_MAX,
    SECONDS_MAX,
    TEXT_MAX,
)
from txbroker.core.records import State

SEARCHED_BYTES_MAX = 4096
"""The longest key or header that can be searched for."""
BY_MAX = 200
# `(?!\n)`: in Python `$` also matches before a final newline; other engines need no such guard.
_PLAIN = r"^[^\x00-\x1f\x7f-\x9f]*$(?!\n)"

_NULL: dict[str, Any] = {"type": "null"}
_BASE64_PATTERN = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
PATTERNS = {
    _PLAIN: "without control characters",
    _BASE64_PATTERN: "in base64 (standard alphabet, with padding)",
}
"""What errors say about a text that does not match."""
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
# Exactly one of the three; the others are absent or null.
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
        "value_json": {"description": "Any JSON; stored byte for byte."},
        "headers": {
            "description": "An object, or pairs where order and repeats matter.",
            "anyOf": [
                {"type": "object", "additionalProperties": _HEADER_REF},
                {"type": "array", "items": _HEADER_PAIR},
                _NULL,
            ],
        },
        "partition": {"type": ["integer", "null"], "minimum": 0, "maximum": TARGET_PARTITION_MAX},
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
    str,
    Meta(max_length=TEXT_MAX, pattern=_PLAIN, description="The reason, kept with the decision."),
]
By = Annotated[
    str,
    Meta(
        max_length=BY_MAX,
        pattern=_PLAIN,
        description="The acting person or program; recorded before the caller's address.",
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
    """A body or a query; an unknown field is refused, not ignored."""


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
    check_attempts_max: Annotated[int, Meta(ge=1, le=ATTEMPTS_MAX)] | None = None
    check_timeout_s: Annotated[float, Meta(ge=TIMEOUT_S_MIN, le=TIMEOUT_S_MAX)] | None = None


class ReasonBody(RequestBody, frozen=True):
    """Reason and author of an action."""

    reason: Reason | None = None
    by: By | None = None


class RollbackBody(ReasonBody, frozen=True):
    """Roll a transaction back. Without a group an operator decides."""

    group: Group | None = None


class CommitBody(RollbackBody, frozen=True):
    """Commit a transaction. Without a group an operator decides."""

    messages: MaybeMessages = msgspec.field(default_factory=_no_messages)
    wait: (
        Annotated[
            Literal["promoted"],
            Meta(
                description="Answer when consumers can see the messages, a target refuses them, or "
                "after 30 s: see `state`."
            ),
        ]
        | None
    ) = None


class GroupBody(GroupPolicy, frozen=True):
    """The policy of a producer group; omitted fields follow the configuration."""


class ListQuery(RequestBody, frozen=True):
    """Which transactions to list; omitted fields match any."""

    state: State | None = None
    group: Group | None = None
    topic: Annotated[str, Meta(min_length=1, max_length=249)] | None = None
    older_than_s: Annotated[float, Meta(ge=0, le=SECONDS_MAX * 100)] | None = None
    newest: Annotated[bool, Meta(description="Newest first, else oldest first.")] = False
    limit: Annotated[int, Meta(ge=1, le=LIST_LIMIT_MAX)] = 100
    cursor: Annotated[str, Meta(min_length=1, max_length=500)] | None = None


class FindQuery(RequestBody, frozen=True):
    """How much to return of a transaction."""

    bodies: Annotated[bool, Meta(description="Include keys, values and headers.")] = False
    trace: Annotated[
        bool,
        Meta(description="Read the places of all its records, for up to 20 s."),
    ] = False


_TIME_MAX_MS = (1 << 48) - 1
TimeMs = Annotated[int, Meta(ge=0, le=_TIME_MAX_MS)]


class SearchQuery(RequestBody, frozen=True):
    """What transactions must have, all of it; omitted fields match any. At least one is needed."""

    id: (
        Annotated[
            str,
            Meta(min_length=1, max_length=26, description="The first characters of the id."),
        ]
        | None
    ) = None
    group: Group | None = None
    topic: Annotated[str, Meta(min_length=1, max_length=249)] | None = None
    key: (
        Annotated[
            str,
            Meta(
                max_length=SEARCHED_BYTES_MAX,
                description="Of a message, prepared or final, which also has the topic.",
            ),
        ]
        | None
    ) = None
    key_base64: (
        Annotated[str, Meta(max_length=SEARCHED_BYTES_MAX, pattern=_BASE64_PATTERN)] | None
    ) = None
    dedup_key: Key | None = None
    order_key: Key | None = None
    header: (
        Annotated[
            str,
            Meta(
                max_length=SEARCHED_BYTES_MAX,
                description="`name=value` of the same message.",
            ),
        ]
        | None
    ) = None
    from_ms: TimeMs | None = None
    to_ms: (
        Annotated[TimeMs, Meta(description="Prepared from `from_ms` on and before `to_ms`.")] | None
    ) = None
    record: (
        Annotated[
            str,
            Meta(
                max_length=300,
                description="`topic/partition@offset`: the transaction of this record, alone.",
            ),
        ]
        | None
    ) = None
    cursor: Annotated[str, Meta(min_length=1, max_length=500)] | None = None


class NoQuery(RequestBody, frozen=True):
    """No fields."""


# --- answers ---------------------------------------------------------------------------------


class HistoryQuery(RequestBody, frozen=True):
    """What of the last hour."""

    group: Group | None = None
    since_s: Annotated[float, Meta(ge=1, le=HISTORY_S, description="How far back, seconds.")] = (
        HISTORY_S
    )
    step_s: (
        Annotated[
            float,
            Meta(
                ge=1,
                le=HISTORY_STEPS_S[-1],
                description="The least step, seconds: 1 reaches back 5 minutes, 10 a quarter of an "
                "hour, 30 an hour. Without it the least that reaches `since_s`.",
            ),
        ]
        | None
    ) = None
    actions: Annotated[bool, Meta(description="With operators' actions.")] = False


class HealthBody(AnswerBody, frozen=True):
    """The process is alive."""

    status: str


class ReadyBody(AnswerBody, frozen=True):
    """Whether the proxy takes calls, the state of each half partition, and problems."""

    ready: bool
    partitions: dict[str, str]
    problems: list[str]


class ErrorBody(AnswerBody, frozen=True):
    """The answer to a failed call."""

    error: ErrorFields
