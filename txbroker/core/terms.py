"""The terms of a search: they match records of the half topic, and transactions in memory."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from txbroker.core.decoding import HalfPart, Malformed, NewerVersion, decode_half
from txbroker.core.records import Half, Header, Message, Record
from txbroker.core.routing import ALPHABET, LENGTH, TIME_MAX_MS, dedup_hash, order_hash
from txbroker.core.transaction import Transaction, key_mark


class SearchTerms(Struct, frozen=True):
    """What a transaction must have; None matches any.

    Attributes:
        id: the first characters of its id.
        topic, key, header: of one of its messages, prepared or final; all of the same one. The
            header is name and value.
        from_ms, to_ms: when it was prepared, `to_ms` excluded.
    """

    id: str | None = None
    group: str | None = None
    topic: str | None = None
    key: bytes | None = None
    dedup_key: str | None = None
    order_key: str | None = None
    header: tuple[str, bytes] | None = None
    from_ms: int | None = None
    to_ms: int | None = None

    @property
    def ids(self) -> tuple[int, int]:
        """The least and the greatest id that begins so, as numbers of 128 bits."""
        prefix = self.id or ""
        low, high = prefix.ljust(LENGTH, ALPHABET[0]), prefix.ljust(LENGTH, ALPHABET[-1])
        return _number(low), min(_number(high), (1 << 128) - 1)

    def partitions(self, count: int) -> list[int]:
        """Return the half partitions that can hold such a transaction, of so many."""
        low, high = self.ids
        chosen: Iterable[int] = range(low >> 112, min(high >> 112, count - 1) + 1)
        if self.order_key is not None:
            hashed = order_hash(self.order_key, "", None) or 0
            chosen = {hashed % count}.intersection(chosen)
        elif self.dedup_key is not None and self.group is not None:
            # An order key takes precedence, so the others may hold it too, and come later.
            first = dedup_hash(self.group, self.dedup_key) % count
            chosen = sorted(chosen, key=lambda partition: partition != first)
        return list(chosen)

    def times(self, near_ms: int) -> tuple[int, int]:
        """Return two times: below the first and from the second on, the ids around an offset of the
        half topic show that such transactions are elsewhere.

        Args:
            near_ms: within which half messages are stored from the times of their ids.
        """
        low, high = self.ids
        first, last = 0, TIME_MAX_MS
        if low >> 112 == high >> 112:
            first = (low >> 64 & TIME_MAX_MS) - 2 * near_ms
            last = min(TIME_MAX_MS, (high >> 64 & TIME_MAX_MS) + 2 * near_ms)
        if self.from_ms is not None:
            first = max(first, self.from_ms - near_ms)
        if self.to_ms is not None:
            last = min(last, self.to_ms + near_ms)
        return max(0, first), last

    # --- records -----------------------------------------------------------------------------

    def match_record(self, record: Record, needed: Sequence[Header]) -> HalfPart | None:
        """Return the content of a matching record of the half topic, or of a replacing one of the
        operation topic; None if it does not match.

        Args:
            needed: `needed_headers()`.

        Of several records of a transaction, its order and dedup key are on the first only: these
        terms are left out if one of a message is given: see `needs_first_record`.
        """
        if self.key is not None and record.key != self.key:
            return None
        if not self.match_time(record.timestamp_ms):
            return None
        # Decoding takes ten times as long.
        headers = tuple(record.headers)
        if any(header not in headers for header in needed):
            return None
        try:
            part = decode_half(record)
        except (Malformed, NewerVersion):
            return None
        return part if self._match_part(part) else None

    def needed_headers(self) -> tuple[Header, ...]:
        """Return headers that a matching record of the half topic has, ours and the user's."""
        texts = {"txb-group": self.group, "txb-topic": self.topic}
        if not self._of_message:
            texts |= {"txb-order": self.order_key, "txb-dedup": self.dedup_key}
        ours = [(name, text.encode()) for name, text in texts.items() if text is not None]
        return (*ours, *(() if self.header is None else (self.header,)))

    def _match_part(self, part: HalfPart) -> bool:
        if self.group is not None and part.group != self.group:
            return False
        if self.id is not None and not part.id.startswith(self.id):
            return False
        return self._match_message(part.message) if self._of_message else self.match_first(part)

    def match_first(self, part: HalfPart | Half) -> bool:
        """Return whether the first record of a half message has the order and dedup key."""
        order_key, dedup_key = part.attributes.order_key, part.attributes.dedup_key
        return (self.order_key is None or order_key == self.order_key) and (
            self.dedup_key is None or dedup_key == self.dedup_key
        )

    @property
    def needs_first_record(self) -> bool:
        """Whether `match_record` leaves terms out: `match_first` applies them."""
        keys = self.order_key is not None or self.dedup_key is not None
        return keys and self._of_message

    @property
    def needs_messages(self) -> bool:
        """Whether only the messages show a match: `match` knows their topics, which a commit does
        not change."""
        return self.key is not None or self.header is not None

    @property
    def _of_message(self) -> bool:
        return not (self.topic is None and self.key is None and self.header is None)

    def _match_message(self, message: Message) -> bool:
        return (
            (self.topic is None or message.topic == self.topic)
            and (self.key is None or message.key == self.key)
            and (self.header is None or self.header in tuple(message.headers))
        )

    # --- transactions ------------------------------------------------------------------------

    def match(self, transaction: Transaction, *, keys: bool = True) -> bool:
        """Return whether a transaction matches, as far as can be seen without its messages; with
        `keys` by the marks of their keys, which few others have."""
        half = transaction.half
        if self.key is not None and keys:
            # Those of before a restart have no mark: the half topic has their keys.
            for place in transaction.places:
                mark = key_mark(place.topic, self.key)
                if transaction.keys & mark == mark:
                    break
            else:
                return False
        return (
            (self.id is None or half.id.startswith(self.id))
            and (self.group is None or half.group == self.group)
            and (self.topic is None or any(p.topic == self.topic for p in transaction.places))
            and self.match_first(half)
            and self.match_time(transaction.prepared_at_ms)
        )

    def match_time(self, prepared_at_ms: int) -> bool:
        """Return whether a transaction that was prepared then matches."""
        return (self.from_ms is None or prepared_at_ms >= self.from_ms) and (
            self.to_ms is None or prepared_at_ms < self.to_ms
        )

    def match_messages(self, messages: Iterable[Message]) -> bool:
        """Return whether one of these messages matches the terms of messages."""
        return not self._of_message or any(map(self._match_message, messages))


def _number(text: str) -> int:
    number = 0
    for letter in text:
        number = number << 5 | ALPHABET.index(letter)
    return number


# --- places of records ------------------------------------------------------------------------


class RecordPlace(NamedTuple):
    """The place of a record, as text `topic/partition@offset`."""

    topic: str
    partition: int
    offset: int


_PLACE = re.compile(r"([A-Za-z0-9._-]{1,249})/(\d{1,9})@(\d{1,18})", re.ASCII)


def parse_place(text: str) -> RecordPlace | None:
    """Return the place of a record from its text; None if it is none."""
    match = _PLACE.fullmatch(text)
    return None if match is None else RecordPlace(match[1], int(match[2]), int(match[3]))
