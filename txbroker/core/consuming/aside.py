"""The set-aside keys of one partition, from the records of the aside topic.

The aside topic holds copies of messages, in order, releases (written by an operator: the owner of
the partition is to handle the key's copies), clearances (written by the owner: copies of the key up
to a message are done) and marks of first stages. So its records are the whole truth, and a new
owner reads them.
"""

from __future__ import annotations

from msgspec import Struct, field

from txbroker.core.consuming.copies import (
    CLEARED_HEADER,
    RELEASE_HEADER,
    STAGED_HEADER,
    MessageSource,
    parse_source,
    read_copy,
)
from txbroker.core.records import Partition, Record

KEYS_MAX = 1000
"""Set-aside keys of a partition; at this number it waits."""


class AsideKey(Struct):
    """A set-aside key.

    Attributes:
        first: offset in the aside topic from which its copies are.
        count: number of copies that are left.
        cleared: offset in the partition up to which, inclusively, copies are done.
        released: whether an operator has released it.
        staged: offsets in the partition of copies that are not done, but their first stage.
        failures: how often a release ended because a copy failed again.
    """

    first: int
    count: int = 0
    cleared: int = -1
    released: bool = False
    staged: set[int] = field(default_factory=set)
    failures: int = 0


class AsideKeys:
    """The set-aside keys of one partition.

    A message without a key is set aside alone, under the offset that it had.

    Attributes:
        keys: those that are known.
        pending: those whose first copy is not visible yet.
        stored: how many the stored position had; None: there was no position.
        known: whether `keys` are all; otherwise another consumer of the group may have set some
            aside, as many as were stored.
    """

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.keys: dict[bytes | int, AsideKey] = {}
        self.pending: set[bytes | int] = set()
        self.stored: int | None = 0
        self.known = False

    def __bool__(self) -> bool:
        return bool(self.keys or self.pending)

    def __contains__(self, key: bytes | int | None) -> bool:
        return key is not None and (key in self.keys or key in self.pending)

    @property
    def count(self) -> int:
        """The number of set-aside keys."""
        if not self.known:
            return self.stored or 0
        return len(self.keys) + sum(key not in self.keys for key in self.pending)

    def add(self, key: bytes | int) -> None:
        """A key is set aside, or has one more copy, which no topic shows."""
        self.keys.setdefault(key, AsideKey(0)).count += 1
        self.pending.discard(key)

    def note(self, record: Record) -> bytes | int | None:
        """Take the next record of the aside topic; return the key that it concerns, None if it is
        about another partition or foreign."""
        key = self._note(record)
        if key is not None:
            self.pending.discard(key)
        return key

    def _note(self, record: Record) -> bytes | int | None:
        for name, value in record.headers[:1]:
            text = (value or b"").decode(errors="replace")
            if name in (RELEASE_HEADER, CLEARED_HEADER, STAGED_HEADER):
                source = parse_source(text)
                if source is None or source[:2] != self._partition:
                    return None
                return self._note_about(name, source, record)
        found = read_copy(record)
        if found is None or found[1].source[:2] != self._partition:
            return None
        offset = found[1].source.offset
        key = offset if record.key is None else record.key
        entry = self.keys.setdefault(key, AsideKey(record.offset))
        entry.count += 1
        return key

    def _note_about(self, name: str, source: MessageSource, record: Record) -> bytes | int | None:
        """Take a record about copies of a key; return the key, None if it has none."""
        key = source.offset if record.key is None else record.key
        entry = self.keys.get(key)
        if entry is None:
            return None
        if name == RELEASE_HEADER:
            entry.released = True
        elif name == STAGED_HEADER:
            if source.offset > entry.cleared:
                entry.staged.add(source.offset)
        elif not (record.value or b"").isdigit():
            return None
        else:
            self._clear(key, entry, source.offset, int(record.value or b""))
        return key

    def _clear(self, key: bytes | int, entry: AsideKey, offset: int, count: int) -> None:
        if not count:
            entry.released = False
            entry.failures += 1
        elif offset > entry.cleared:  # a record without an answer may have been repeated
            entry.cleared = offset
            entry.count -= count
            entry.staged = {each for each in entry.staged if each > offset}
        if entry.count <= 0:
            del self.keys[key]


def release_record(source: MessageSource, key: bytes | None, reason: str) -> Record:
    """Return the record that releases a key of the partition of `source`; without a key, the
    message at its offset."""
    return Record(key, reason.encode(), ((RELEASE_HEADER, str(source).encode()),))


def clearance_record(source: MessageSource, key: bytes | None, count: int) -> Record:
    """Return the record that marks the next `count` copies of a key, up to the message at `source`,
    as done."""
    return Record(key, b"%d" % count, ((CLEARED_HEADER, str(source).encode()),))


def staged_record(source: MessageSource, key: bytes | None) -> Record:
    """Return the record that marks the first stage of a copy of a key as done."""
    return Record(key, None, ((STAGED_HEADER, str(source).encode()),))


def failed_again_record(source: MessageSource, key: bytes | None) -> Record:
    """Return the record that ends a release: a copy of the key failed again."""
    return clearance_record(source, key, 0)
