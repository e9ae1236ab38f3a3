"""What the calls of one proxy share, and the limits that every call is held to."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from txbroker.checkers.groups import Groups
from txbroker.checkers.http import HttpChecks
from txbroker.checkers.sessions import SessionRegistry
from txbroker.config.settings import PREPARES_SHARE, RECEIVING_SHARE, Settings
from txbroker.contract.json import PARTITION_MAX, TIMESTAMP_MS_MAX
from txbroker.contract.policy import PolicyError, check_group_name
from txbroker.contract.service import DecideRequest, ListRequest, PrepareRequest, Service
from txbroker.core.index import ShareUse, share_max
from txbroker.core.records import Message
from txbroker.core.routing import ALPHABET, LENGTH, parse_id
from txbroker.errors import BadId, BadRequest, TooLarge
from txbroker.principals import Directory, Principal
from txbroker.proxy.http.bodies import SECONDS_MAX, TEXT_MAX
from txbroker.proxy.http.guards import ReloadedFile
from txbroker.proxy.http.joint import CallBatcher
from txbroker.proxy.observe.metrics import Metrics

_ID = re.compile(f"[0-7][{ALPHABET}]{{{LENGTH - 1}}}")
# 26 characters of 5 bits are 130 bits, an id has 128: so the first one is at most 7.

RECORD_BYTES = 64
"""What a message costs beside its content, so that empty ones are not free."""


OPERATION_BYTES = 2048
"""What an operation costs beside its messages: its task and objects. So that a flood of the
smallest ones is bounded too."""


class ByteBudget:
    """Bytes of what is being carried out, bounded; a part is kept free of prepares.

    Decisions and checks end what prepares began, so prepares that are stuck must not keep them
    out: prepares take at most `PREPARES_SHARE`, everything else may take all. One principal takes
    no more than its part of either.
    """

    def __init__(self, bytes_max: int) -> None:
        self._all, self._prepares = ShareUse(), ShareUse()
        pools = (self._all, bytes_max), (self._prepares, int(bytes_max * PREPARES_SHARE))
        self._pools = tuple((use, most, share_max(most)) for use, most in pools)

    @property
    def bytes(self) -> int:
        """How many are taken now."""
        return self._all.total

    def reserve(self, size: int, *, prepare: bool, who: str = "") -> bool:
        """Take `size` bytes; False where they do not fit, then nothing is taken.

        Args:
            who: the principal that they are counted to, "" for none.
        """
        pools = self._pools[: 1 + prepare]
        for use, most, part in pools:
            if use.total + size > most or (who and use.of(who) + size > part):
                return False
        for use, _, _ in pools:
            use.add(who, size)
        return True

    def release(self, size: int, *, prepare: bool, who: str = "") -> None:
        """Give bytes back that were reserved."""
        for use, _, _ in self._pools[: 1 + prepare]:
            use.add(who, -size)


class FrameBudget:
    """Room for the frames that come in, all sessions together; who does not fit waits in turn."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[Callable[[int], None], int]] = deque()
        self.bytes = 0

    def take(self, admitted: Callable[[int], None], size: int) -> bool:
        """Take room for `size` bytes; False: not yet, `admitted` is called when it is taken."""
        if self._waiting or not self._fits(size):
            self._waiting.append((admitted, size))
            return False
        self.bytes += size
        return True

    def release(self, size: int) -> None:
        """Give room back."""
        self.bytes -= size
        self._admit()

    def forget(self, admitted: Callable[[int], None]) -> None:
        """Let a connection that ended wait no more."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] != admitted)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            admitted, size = self._waiting.popleft()
            self.bytes += size
            admitted(size)

    def _fits(self, size: int) -> bool:
        # One larger than everything is let in alone, so that nothing waits for ever.
        return self.bytes == 0 or self.bytes + size <= self._bytes_max


@dataclass
class ApiContext:
    """What the calls of one proxy share."""

    service: Service
    groups: Groups
    sessions: SessionRegistry
    settings: Settings
    metrics: Metrics
    checks: HttpChecks
    """Calls check URLs."""
    principals: Callable[[], Directory]
    """The principals as they are now."""
    in_flight: ByteBudget = field(init=False)
    """What all callers together have being carried out."""
    joint: CallBatcher = field(init=False)
    """Carries prepares and decisions out by `service`."""
    outgoing: ByteBudget = field(init=False)
    """Checks that wait to be read, all sessions together. Apart from `in_flight`, so that sessions
    that do not read keep nobody's calls out."""
    receiving: FrameBudget = field(init=False)
    """Frames of sessions on their way in."""
    registering: list[str] = field(default_factory=list)
    """Groups whose registration is under way, once for each call."""
    files: list[ReloadedFile[Any]] = field(default_factory=list)
    """Files of credentials, read again when they change."""
    url: str = ""
    """This proxy's own URL; with port 0 known once it listens."""

    def __post_init__(self) -> None:
        self.in_flight = ByteBudget(self.settings.in_flight_bytes_max)
        self.joint = CallBatcher(self.service)
        self.outgoing = ByteBudget(self.settings.in_flight_bytes_max)
        self.receiving = FrameBudget(int(self.settings.in_flight_bytes_max * RECEIVING_SHARE))
        self.url = self.settings.advertise_url

    def files_not_read(self) -> dict[str, bool]:
        """Return by setting whether its file, as it is now, cannot be used."""
        found: dict[str, bool] = {}
        for file in self.files:
            found[file.name] = found.get(file.name, False) or file.unread
        return found

    def check_prepare(self, request: PrepareRequest) -> int:
        """Refuse what is out of bounds before anybody works on it; return what its messages take
        in memory, bytes.

        Raises:
            BadRequest, BadId, TooLarge: names the field.
        """
        if request.id is not None and not _ID.fullmatch(request.id):
            check_id(request.id)
        if not request.messages:
            raise BadRequest("messages: a transaction has at least one message", path="messages")
        if request.check_after_s is not None:
            _check_seconds("check_after_s", request.check_after_s)
        if request.check_interval_s is not None:
            _check_seconds("check_interval_s", request.check_interval_s)
        if request.order_key is not None:
            _check_key("order_key", request.order_key)
        if request.dedup_key is not None:
            _check_key("dedup_key", request.dedup_key)
        return self.check_messages(request.messages)

    def check_decide(self, request: DecideRequest) -> int:
        """Refuse what is out of bounds before anybody works on it; return what its messages take
        in memory, bytes.

        Raises:
            BadRequest, BadId, TooLarge: names the field.
        """
        if not _ID.fullmatch(request.id):
            check_id(request.id)
        if request.reason:
            check_reason(request.reason)
        return 0 if request.messages is None else self.check_messages(request.messages)

    def check_messages(self, messages: Sequence[Message]) -> int:
        """Refuse messages that are malformed or too large or too many; return what they take in
        memory, bytes.

        Raises:
            BadRequest, TooLarge: names the field.
        """
        settings = self.settings
        if len(messages) > settings.messages_per_transaction_max:
            raise TooLarge(
                f"{len(messages)} messages in one transaction; at most "
                f"{settings.messages_per_transaction_max} are taken"
            )
        total = 0
        for number, message in enumerate(messages):
            size = message_bytes(message)
            if size > settings.message_bytes_max:
                raise TooLarge(
                    f"messages[{number}] has {size} bytes; at most "
                    f"{settings.message_bytes_max} are taken",
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
                f"the transaction has {total} bytes; at most "
                f"{settings.transaction_bytes_max} are taken"
            )
        return total


def message_bytes(message: Message) -> int:
    """Return what a message takes in memory and in the log, about."""
    size = RECORD_BYTES + len(message.key or b"") + len(message.value or b"")
    for name, value in message.headers:
        size += len(name) + len(value or b"")
    return size


def _check_message(message: Message, number: int) -> None:
    if not message.topic:
        raise BadRequest("a message needs a topic", path=f"messages[{number}].topic")
    if message.partition is not None and not 0 <= message.partition <= PARTITION_MAX:
        raise BadRequest(
            f"partition must be from 0 to {PARTITION_MAX}", path=f"messages[{number}].partition"
        )
    if message.timestamp_ms is not None and not 0 <= message.timestamp_ms <= TIMESTAMP_MS_MAX:
        raise BadRequest(
            f"timestamp_ms must be from 0 to {TIMESTAMP_MS_MAX}",
            path=f"messages[{number}].timestamp_ms",
        )


def _check_seconds(name: str, seconds: float) -> None:
    if not 0 <= seconds <= SECONDS_MAX:
        raise BadRequest(f"{name} must be from 0 to {SECONDS_MAX} seconds", path=name)


def _check_key(name: str, key: str) -> None:
    if not 1 <= len(key) <= TEXT_MAX:
        raise BadRequest(f"{name} must have 1 to {TEXT_MAX} characters", path=name)


def within_groups(request: ListRequest, principal: Principal) -> ListRequest:
    """Return a list's request for the groups of a principal alone."""
    if principal.groups.everything:
        return request
    return structs.replace(
        request, groups_allowed=principal.groups.allow, groups_denied=principal.groups.deny
    )


def check_id(id: str) -> None:
    """Refuse what is no transaction id, in upper case.

    Raises:
        BadId: says what is wrong.
    """
    # The pattern takes a tenth of the time of taking the id apart, which is left for saying what
    # is wrong.
    if _ID.fullmatch(id):
        return
    try:
        parse_id(id)
    except ValueError as error:
        raise BadId(str(error)) from None


def plain_id(text: str) -> str:
    """Return a transaction id as it is written, whatever the case it came in.

    Raises:
        BadId: it is none.
    """
    # Only ASCII: other letters can turn into several, or into others, in upper case.
    id = text.upper() if text.isascii() else text
    check_id(id)
    return id


def check_group(group: str) -> None:
    """Refuse what cannot be a group's name.

    Raises:
        BadRequest: says what is wrong.
    """
    try:
        check_group_name(group)
    except PolicyError as error:
        raise BadRequest(str(error), path="group") from None


def check_reason(reason: str) -> None:
    """Refuse a reason that would not fit a marker or a line of a listing.

    Raises:
        BadRequest: says what is wrong.
    """
    if len(reason) > TEXT_MAX:
        raise BadRequest(f"reason has at most {TEXT_MAX} characters", path="reason")
