"""The limits of one proxy's API: bytes in flight, and the bounds of each request's fields."""

import re
from collections import deque
from collections.abc import Callable, Sequence

from txbroker.config.settings import PREPARES_SHARE, RECEIVING_SHARE, Settings
from txbroker.contract.json import TARGET_PARTITION_MAX, TIMESTAMP_MS_MAX
from txbroker.contract.policy import (
    ATTEMPTS_MAX,
    TIMEOUT_S_MAX,
    TIMEOUT_S_MIN,
    PolicyError,
    check_group_name,
)
from txbroker.contract.service import DecideRequest, PrepareRequest
from txbroker.core.records import Message
from txbroker.core.routing import ALPHABET, LENGTH, parse_id
from txbroker.core.settled import ShareUse, share_max
from txbroker.errors import BadId, BadRequest, TooLarge
from txbroker.proxy.http.bodies import SECONDS_MAX, TEXT_MAX

RECORD_BYTES = 64
"""Memory of a message besides its content, so that empty messages are not free."""
OPERATION_BYTES = 2048
"""Memory of an operation besides its messages (task and objects), so that a flood of tiny
operations is bounded too."""
# 26 characters of 5 bits are 130 bits, an id has 128: so the first one is at most 7.
_ID = re.compile(f"[0-7][{ALPHABET}]{{{LENGTH - 1}}}")


class ByteBudget:
    """Bounds the bytes of operations in flight; keeps a part free of prepares.

    Decisions and checks end what prepares began, so stuck prepares must not block them: prepares
    take at most `PREPARES_SHARE`, other operations may take all. One principal takes at most its
    part of either.
    """

    def __init__(self, bytes_max: int) -> None:
        self._all, self._prepares = ShareUse(), ShareUse()
        pools = (self._all, bytes_max), (self._prepares, int(bytes_max * PREPARES_SHARE))
        self._pools = tuple((use, most, share_max(most)) for use, most in pools)

    @property
    def bytes(self) -> int:
        """Bytes reserved now."""
        return self._all.total

    def reserve(self, size: int, *, prepare: bool, who: str = "") -> bool:
        """Reserve `size` bytes; return False, and reserve nothing, if they do not fit.

        Args:
            who: the principal to charge, "" for none.
        """
        pools = self._pools[: 1 + prepare]
        for use, most, part in pools:
            if use.total + size > most or (who and use.of(who) + size > part):
                return False
        for use, _, _ in pools:
            use.add(who, size)
        return True

    def release(self, size: int, *, prepare: bool, who: str = "") -> None:
        """Return reserved bytes."""
        for use, _, _ in self._pools[: 1 + prepare]:
            use.add(who, -size)


class FrameBudget:
    """Bounds the bytes of incoming frames over all sessions; frames that do not fit queue."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[Callable[[int], None], int]] = deque()
        self.bytes = 0

    def take(self, admitted: Callable[[int], None], size: int) -> bool:
        """Reserve `size` bytes; return False if they must wait: `admitted` is called later."""
        if self._waiting or not self._fits(size):
            self._waiting.append((admitted, size))
            return False
        self.bytes += size
        return True

    def release(self, size: int) -> None:
        """Return reserved bytes."""
        self.bytes -= size
        self._admit()

    def forget(self, admitted: Callable[[int], None]) -> None:
        """Drop a closed connection from the queue."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != admitted)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            admitted, size = self._waiting.popleft()
            self.bytes += size
            admitted(size)

    def _fits(self, size: int) -> bool:
        # A frame above the whole budget is admitted alone, so that none waits forever.
        return self.bytes == 0 or self.bytes + size <= self._bytes_max


class RequestLimits:
    """Byte budgets of one proxy, and the checks of every request against its settings.

    Attributes:
        in_flight: operations of all callers.
        outgoing: check-backs that clients have not read yet, all sessions together. Separate from
            `in_flight`, so that sessions that do not read block no calls.
        receiving: incoming frames of sessions.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.in_flight = ByteBudget(settings.in_flight_bytes_max)
        self.outgoing = ByteBudget(settings.in_flight_bytes_max)
        self.receiving = FrameBudget(int(settings.in_flight_bytes_max * RECEIVING_SHARE))

    def check_prepare(self, request: PrepareRequest) -> int:
        """Refuse a prepare that is out of bounds; return the memory its messages take, bytes."""
        if request.id is not None and not _ID.fullmatch(request.id):
            check_id(request.id)
        if not request.messages:
            raise BadRequest(
                "messages is empty: send a transaction with at least one message", path="messages"
            )
        if request.check_after_s is not None:
            _check_seconds("check_after_s", request.check_after_s)
        if request.check_interval_s is not None:
            _check_seconds("check_interval_s", request.check_interval_s)
        if request.check_attempts_max is not None:
            _check_range("check_attempts_max", request.check_attempts_max, 1, ATTEMPTS_MAX)
        if request.check_timeout_s is not None:
            _check_range("check_timeout_s", request.check_timeout_s, TIMEOUT_S_MIN, TIMEOUT_S_MAX)
        if request.order_key is not None:
            _check_key("order_key", request.order_key)
        if request.dedup_key is not None:
            _check_key("dedup_key", request.dedup_key)
        return self.check_messages(request.messages)

    def check_decide(self, request: DecideRequest) -> int:
        """Refuse a decision that is out of bounds; return the memory its messages take, bytes."""
        if not _ID.fullmatch(request.id):
            check_id(request.id)
        if request.reason:
            check_reason(request.reason)
        return 0 if request.messages is None else self.check_messages(request.messages)

    def check_messages(self, messages: Sequence[Message]) -> int:
        """Refuse messages that are malformed, too large or too many; return their memory, bytes."""
        settings = self.settings
        if len(messages) > settings.messages_per_transaction_max:
            raise TooLarge(
                f"the transaction has {len(messages)} messages, more than "
                f"{settings.messages_per_transaction_max} (messages_per_transaction_max): "
                "split it"
            )
        total = 0
        for number, message in enumerate(messages):
            size = message_bytes(message)
            if size > settings.message_bytes_max:
                raise TooLarge(
                    f"messages[{number}] has {size} bytes, more than {settings.message_bytes_max} "
                    "(message_bytes_max): send a smaller message",
                    path=f"messages[{number}]",
                )
            total += size
            if (
                not message.topic
                or message.partition is not None
                or message.timestamp_ms is not None
            ):
                _check_message(message, number)
        if total > settings.transaction_bytes_max:
            raise TooLarge(
                f"the transaction has {total} bytes, more than {settings.transaction_bytes_max} "
                "(transaction_bytes_max): split it"
            )
        return total


def message_bytes(message: Message) -> int:
    """Return about how many bytes a message takes in memory and in the log."""
    size = RECORD_BYTES + len(message.key or b"") + len(message.value or b"")
    for name, value in message.headers:
        size += len(name) + len(value or b"")
    return size


def _check_message(message: Message, number: int) -> None:
    if not message.topic:
        raise BadRequest(
            "a message has no topic: name its target topic", path=f"messages[{number}].topic"
        )
    if message.partition is not None and not 0 <= message.partition <= TARGET_PARTITION_MAX:
        raise BadRequest(
            f"partition must be from 0 to {TARGET_PARTITION_MAX}",
            path=f"messages[{number}].partition",
        )
    if message.timestamp_ms is not None and not 0 <= message.timestamp_ms <= TIMESTAMP_MS_MAX:
        raise BadRequest(
            f"timestamp_ms must be from 0 to {TIMESTAMP_MS_MAX}",
            path=f"messages[{number}].timestamp_ms",
        )


def _check_seconds(name: str, seconds: float) -> None:
    if not 0 <= seconds <= SECONDS_MAX:
        raise BadRequest(f"{name} must be from 0 to {SECONDS_MAX} seconds", path=name)


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise BadRequest(f"{name} must be from {least:g} to {most:g}", path=name)


def _check_key(name: str, key: str) -> None:
    if not 1 <= len(key) <= TEXT_MAX:
        raise BadRequest(f"{name} must have 1 to {TEXT_MAX} characters", path=name)


def check_id(id: str) -> None:
    """Refuse a transaction id that is malformed or not in upper case."""
    # The pattern takes a tenth of the time of `parse_id`, which only words the error.
    if _ID.fullmatch(id):
        return
    try:
        parse_id(id)
    except ValueError as error:
        raise BadId(str(error)) from None


def plain_id(text: str) -> str:
    """Return a transaction id in upper case; refuse a text that is no id."""
    # Only ASCII: upper case turns some other letters into several, or into ASCII ones.
    id = text.upper() if text.isascii() else text
    check_id(id)
    return id


def check_group(group: str) -> None:
    """Refuse a malformed group name."""
    try:
        check_group_name(group)
    except PolicyError as error:
        raise BadRequest(str(error), path="group") from None


def check_reason(reason: str) -> None:
    """Refuse a reason too long for a marker or a line of a listing."""
    if len(reason) > TEXT_MAX:
        raise BadRequest(f"reason has at most {TEXT_MAX} characters: shorten it", path="reason")
