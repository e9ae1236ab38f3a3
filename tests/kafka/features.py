"""Changes the level of a feature that all brokers agreed on, as `kafka-features.sh` does."""

from __future__ import annotations

from txbroker.kafka.client.client import Client
from txbroker.kafka.protocol.schemas import SchemaRequest, api_versions, finalized_features
from txbroker.net.timers import Backoff

FEATURE = "transaction.version"
_UPGRADE, _UNSAFE_DOWNGRADE = 1, 3


class _UpdateFeaturesV1(SchemaRequest):
    API_KEY, API_VERSION = 57, 1
    REQUEST = """timeout_ms:i32 updates[feature:str level:i16 upgrade_type:i8]
        validate_only:bool"""
    RESPONSE = """throttle_time_ms:i32 error_code:i16 error_message:str
        results[feature:str error_code:i16 error_message:str]"""


async def level(client: Client) -> int:
    """Return the level of the feature, as the only broker knows it now."""
    answer = await client.ask_any(api_versions(), "features")
    return finalized_features(answer).get(FEATURE, 0)


async def set_level(client: Client, wanted: int) -> None:
    """Change the level of the feature, and wait until the only broker has heard of it."""
    change = _UPGRADE if wanted > await level(client) else _UNSAFE_DOWNGRADE
    request = _UpdateFeaturesV1(10_000, [(FEATURE, wanted, change)], False)
    answer = await client.ask_any(request, "features")
    assert answer.error_code == 0, (answer.error_code, answer.error_message)
    backoff = Backoff(10, 0.02)
    while await level(client) != wanted:
        assert await backoff.pause(), "the broker does not hear of it"
