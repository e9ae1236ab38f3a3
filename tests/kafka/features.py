"""Changes the level of a feature that all brokers agreed on, as `kafka-features.sh` does."""

from __future__ import annotations

from typing import Any, ClassVar

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int8,
    Int16,
    Int32,
    Schema,
    TaggedFields,
)

from txbroker.kafka.client.client import Client
from txbroker.kafka.protocol.schemas import api_versions, finalized_features
from txbroker.net.timers import Backoff

FEATURE = "transaction.version"
_TAGS = ("tags", TaggedFields)
_TEXT = CompactString("utf-8")
_UPGRADE, _UNSAFE_DOWNGRADE = 1, 3


class _UpdateResponse(Response):
    API_KEY = 57
    API_VERSION = 1
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("error_message", _TEXT),
        (
            "results",
            CompactArray(
                ("feature", _TEXT), ("error_code", Int16), ("error_message", _TEXT), _TAGS
            ),
        ),
        _TAGS,
    )


class _UpdateStruct(RequestStruct):
    API_KEY = 57
    API_VERSION = 1
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _UpdateResponse
    SCHEMA = Schema(
        ("timeout_ms", Int32),
        (
            "updates",
            CompactArray(("feature", _TEXT), ("level", Int16), ("upgrade_type", Int8), _TAGS),
        ),
        ("validate_only", Boolean),
        _TAGS,
    )


class _Update(Request[_UpdateStruct]):
    API_KEY: ClassVar[int] = 57

    def __init__(self, level: int, upgrade_type: int) -> None:
        self._update: Any = (FEATURE, level, upgrade_type, {})

    def build(self, request_struct_class: type[_UpdateStruct]) -> _UpdateStruct:
        return request_struct_class(10_000, [self._update], False, {})


async def level(client: Client) -> int:
    """Return the level of the feature, as the only broker knows it now."""
    answer = await client.ask_any(api_versions(), "features")
    return finalized_features(answer).get(FEATURE, 0)


async def set_level(client: Client, wanted: int) -> None:
    """Change the level of the feature, and wait until the only broker has heard of it."""
    change = _UPGRADE if wanted > await level(client) else _UNSAFE_DOWNGRADE
    answer = await client.ask_any(_Update(wanted, change), "features")
    assert answer.error_code == 0, (answer.error_code, answer.error_message)
    backoff = Backoff(10, 0.02)
    while await level(client) != wanted:
        assert await backoff.pause(), "the broker does not hear of it"
