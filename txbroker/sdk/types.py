"""The SDK's types, besides `Message`, `Decision` and `State`, and the checks of arguments.

They are checked before they are sent: a message of a wrong type would end the whole session.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

from txbroker.core.records import Decision, Message, State
from txbroker.errors import BadRequest, ConfigurationError, OwnerUnavailable, TxbrokerError
from txbroker.net.timers import grown_pause_s

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1

Wait: TypeAlias = Literal["decided", "promoted"]
"""When a commit returns: once it is durable, or once consumers can see the messages."""


class ProducerClosed(TxbrokerError):
    """The producer is closed, draining or not started yet: nothing was sent."""


class Repeated(TxbrokerError):
    """A transaction with this `dedup_key` exists already: nothing was stored, and the local
    transaction does not run.

    Attributes:
        outcome: the status of that transaction: `decision` is UNKNOWN while it is undecided,
            because its local transaction still runs, or a check has yet to decide it.
    """

    def __init__(self, outcome: "Outcome") -> None:
        super().__init__(
            f"transaction {outcome.id} has the same dedup_key; it is {outcome.state}: "
            "answer as for the first request"
        )
        self.outcome = outcome


class Untrusted(OwnerUnavailable):
    """The TLS handshake failed: one side does not trust the other's certificate, or it has expired
    or is for another host name. Nothing was sent. The operator must fix the certificate; calls of a
    running producer are retried until they time out."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a producer holds and how long it waits; all times in seconds.

    Attributes:
        retry_s: how long a call is retried until it fails as `owner_unavailable`.
        connect_timeout_s: for one attempt to open a session.
        answer_timeout_s: how long a call waits for an answer until it is sent again.
        heartbeat_s: a session whose proxy answers no ping for this long is closed.
        session_idle_s: an unused session with a proxy that owns nothing is closed after this long;
            one session is always kept.
        backoff_first_s, backoff_max_s: pauses between attempts, growing, with jitter.
        in_flight_max: prepares in flight, and as many decisions; further ones wait.
        in_flight_bytes_max: the total size of their messages, likewise; limits the memory.
        checks_max: checks answered at one time; for further ones, other instances of the group are
            asked, then its check URL.
        check_threads_max: threads for plain check functions.
        running_again_s: while a block runs here, its check is postponed by this.

    Raises:
        TypeError: a limit is not a number.
        ConfigurationError: a limit is not above 0.
    """

    retry_s: float = 60.0
    connect_timeout_s: float = 5.0
    answer_timeout_s: float = 10.0
    heartbeat_s: float = 10.0
    session_idle_s: float = 60.0
    backoff_first_s: float = 0.05
    backoff_max_s: float = 5.0
    in_flight_max: int = 1000
    in_flight_bytes_max: int = 64 * 1024 * 1024
    checks_max: int = 64
    check_threads_max: int = 8
    running_again_s: float = 10.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} is a number, not {type(value).__name__}")
            if not value > 0:
                raise ConfigurationError(f"{name} must be above 0, not {value!r}")


def backoff_s(limits: Limits, failures: int) -> float:
    """Return the pause after a number of failures in a row, 0 after none. It doubles each time;
    jitter of up to half of it spreads the clients."""
    if failures <= 0:
        return 0.0
    pause_s = grown_pause_s(failures, limits.backoff_first_s, limits.backoff_max_s)
    return pause_s * random.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The status of a transaction.

    Attributes:
        id: the transaction.
        decision: UNKNOWN while it is undecided.
        state: `committed` is not visible yet, `promoted` is.
    """

    id: str
    decision: Decision
    state: State


class TransactionOptions(TypedDict, total=False):
    """Options of one transaction; None is as if it were not given.

    Attributes:
        order_key: commits of one order key become visible in the order in which they were
            acknowledged; by default topic and key of the first message.
        check_after_s: time until the first check, instead of the group's setting.
        check_interval_s: time between two checks, likewise.
        check_attempts_max: checks until an undecided transaction parks, 1 to 15, likewise.
        check_timeout_s: how long the answer to a check may take, 0.1 to 60 seconds, likewise.
        dedup_key: names a business request, at most 1000 characters: a second transaction of the
            group with the same key raises `Repeated` instead, for the proxies' `dedup_window_s`.
    """

    order_key: str | None
    check_after_s: float | None
    check_interval_s: float | None
    check_attempts_max: int | None
    check_timeout_s: float | None
    dedup_key: str | None


# --- checks of arguments ---------------------------------------------------------------------


def checked(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages of one transaction as they can be sent.

    Raises:
        TypeError: one is no message.
        BadRequest: there is none, or one has a field out of range.
    """
    result = []
    for message in messages:
        if not isinstance(message, Message):
            raise TypeError(f"a message is a txbroker.sdk.Message, not {type(message).__name__}")
        topic, partition, timestamp_ms = message.topic, message.partition, message.timestamp_ms
        if not topic or not topic.isascii():
            checked_text("topic", topic)
        for name, _ in message.headers:
            if not name.isascii():
                checked_text("a header's name", name)
        if partition is not None:
            _in_range("partition", partition, _INT32_MAX)
        if timestamp_ms is not None:
            _in_range("timestamp_ms", timestamp_ms, _INT64_MAX)
        if type(message) is not Message:  # a subclass may have further fields
            message = Message(
                topic, message.key, message.value, message.headers, partition, timestamp_ms
            )
        result.append(message)
    if not result:
        raise BadRequest("a transaction needs at least one message")
    return tuple(result)


def checked_replacement(
    prepared: Sequence[Message], messages: Iterable[Message]
) -> tuple[Message, ...]:
    """Return final messages, which must have the number and topics of the prepared ones."""
    result = checked(messages)
    if [message.topic for message in result] != [message.topic for message in prepared]:
        raise BadRequest("final messages must be as many as the prepared ones, for the same topics")
    return result


def checked_options(options: TransactionOptions) -> TransactionOptions:
    """Return the options that are given.

    Raises:
        TypeError: there is no such option, or a value has a wrong type.
        BadRequest: a value is out of range.
    """
    given: TransactionOptions = {}
    for name, value in options.items():
        if name not in _OPTIONS:
            raise TypeError(f"there is no option {name!r}; there are {', '.join(_OPTIONS)}")
        if value is not None:
            given[name] = _OPTIONS[name](name, value)  # type: ignore[literal-required]
    return given


def checked_text(name: str, value: object) -> str:
    """Return text that is not empty and can be written as UTF-8; raise TypeError or BadRequest."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is a str, not {type(value).__name__}")
    if not value:
        raise BadRequest(f"{name} must not be empty")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadRequest(f"{name} {value!r} cannot be written as UTF-8") from None
    return value


def checked_token(token: object) -> str | None:
    """Return a token as it can be sent in a header; raise TypeError or ConfigurationError."""
    if token is not None and not isinstance(token, str):
        raise TypeError(f"token is a str or None, not {type(token).__name__}")
    if token and not (token.isascii() and token.isprintable()):
        raise ConfigurationError(
            "the token has characters that no header can hold: read it without its line end"
        )
    return token


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number of seconds, not {type(value).__name__}")
    if not (math.isfinite(value) and value > 0):
        raise BadRequest(f"{name} is a number of seconds above 0, not {value!r}")
    return float(value)


def _attempts(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, not {type(value).__name__}")
    if value < 1:
        raise BadRequest(f"{name} is a whole number above 0, not {value!r}")
    return value


_OPTIONS: dict[str, Callable[[str, object], str | float]] = {
    "order_key": checked_text,
    "check_after_s": _seconds,
    "check_interval_s": _seconds,
    "check_attempts_max": _attempts,
    "check_timeout_s": _seconds,
    "dedup_key": checked_text,
}


def size_of(messages: Iterable[Message]) -> int:
    """Return the approximate size of messages in memory and on the wire, bytes."""
    total = 0
    for message in messages:
        total += 64 + len(message.topic) + len(message.key or b"") + len(message.value or b"")
        for name, value in message.headers:
            total += len(name) + len(value or b"") + 8
    return total


def _in_range(name: str, value: int, largest: int) -> None:
    if not 0 <= value <= largest:
        raise BadRequest(f"{name} is a whole number from 0 to {largest}, not {value!r}")
