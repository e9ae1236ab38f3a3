"""The settings of relays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from msgspec import Struct

from txbroker.errors import ConfigurationError, TxbrokerError

if TYPE_CHECKING:
    from txbroker.contract.checks import CheckFunction

_HOUR_S = 3600.0
_LEASE_MAX_S = 300


class StillWaiting(TxbrokerError, TimeoutError):
    """Rows still wait after the time that was given."""


class RelayOptions(TypedDict, total=False):
    """The keyword arguments of `Relay`."""

    check: CheckFunction | None
    """Decides rows that stay undecided (scheme 3): called with a `CheckRequest`."""
    check_url: str | None
    """Instead of `check`: a URL that is asked as those of producer groups are."""
    check_secret: str | bytes | None
    """Signs the calls to `check_url`."""
    check_after_s: float
    """How long rows may be undecided before they are checked, seconds; 60 by default."""
    check_interval_s: float
    """Between checks of a row, seconds; 30 by default. After 15 checks it is a MESSAGE_ERROR."""
    retries_max: int
    """How often Kafka may refuse a message before its row is a MESSAGE_ERROR. 10 by default: about
    four minutes. A row whose topic is missing or may not be written waits without a limit."""
    keep_s: float
    """How long finished rows are kept, seconds; a day by default. They are deleted in small
    batches. 0: a delivered row is deleted at once, at less cost than its new state."""
    shards: int | None
    """1, 2, 4, 8 or 16: how many relays can work at the same time. The number is stored in the
    database; None takes that."""
    lease_s: float
    """A relay without a sign of life for this time is replaced; 10 by default, at most 300."""
    topic_prefix: str
    """Of the topic of positions, `PREFIX.relay`; `txbroker` by default."""
    take_position: bool
    """Where no record in the topic of positions proves to be this relay's, go on from the newest
    one of any client, instead of an error; after a topic was restored or mirrored."""
    security: Mapping[str, Any] | None
    """Settings of the connection to Kafka, named as the proxy's; see `ConsumerOptions`."""


class RelaySettings(Struct, frozen=True, kw_only=True):
    """The options with their defaults; see `RelayOptions`."""

    check: Any = None
    check_url: str | None = None
    check_secret: str | bytes | None = None
    check_after_s: float = 60.0
    check_interval_s: float = 30.0
    retries_max: int = 10
    keep_s: float = 24 * _HOUR_S
    shards: int | None = None
    lease_s: float = 10.0
    topic_prefix: str = "txbroker"
    take_position: bool = False
    security: Mapping[str, Any] | None = None

    @property
    def positions(self) -> str:
        """The topic of positions."""
        return f"{self.topic_prefix}.relay"

    def validate(self) -> None:
        """Check the options.

        Raises:
            ConfigurationError
        """
        if self.check is not None and self.check_url is not None:
            raise ConfigurationError("Relay: give check or check_url, not both")
        if self.check is not None and not callable(self.check):
            raise ConfigurationError(f"Relay: check is a function, not {self.check!r}")
        if self.check_secret is not None and self.check_url is None:
            raise ConfigurationError("Relay: check_secret is for check_url: give that, too")
        if type(self.take_position) is not bool:
            raise ConfigurationError(
                f"Relay: take_position is True or False, not {self.take_position!r}"
            )
        if self.shards not in (None, 1, 2, 4, 8, 16):
            raise ConfigurationError(f"Relay: shards is 1, 2, 4, 8 or 16, not {self.shards!r}")
        least = {"check_after_s": 0, "check_interval_s": 0.01, "keep_s": 0, "lease_s": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if type(value) not in (int, float) or not minimum <= value < math.inf:
                raise ConfigurationError(f"Relay: {name} is at least {minimum}, not {value!r}")
        if self.lease_s > _LEASE_MAX_S:
            raise ConfigurationError(
                f"Relay: lease_s is at most {_LEASE_MAX_S}, not {self.lease_s!r}"
            )
        if type(self.retries_max) is not int or self.retries_max < 1:
            raise ConfigurationError(
                f"Relay: retries_max is a whole number above 0, not {self.retries_max!r}"
            )
