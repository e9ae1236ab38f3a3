"""Positions that a database holds already: a round need not store them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from txbroker.core.consuming.position import (
    Metadata,
    Position,
    StoredOffset,
    decode_metadata,
    encode_metadata,
)
from txbroker.core.records import Partition

METADATA_MAX = 1 << 24
"""Characters of the metadata of a position in a database."""


class StoredPositions:
    """The positions and done rows that results have stored, and no round yet."""

    def __init__(self) -> None:
        self._rows: dict[Partition, list[int]] = {}
        """Offsets of done rows that the next position replaces."""
        self.claimed: set[Partition] = set()
        """Partitions whose first position is not stored: it may be lower than the last one."""
        self._stored: dict[Partition, tuple[int, Metadata]] = {}

    def claim(self, rows: Mapping[Partition, Iterable[int]]) -> None:
        """Take note of the done rows of partitions that were taken over."""
        self._rows.update((place, list(each)) for place, each in rows.items())
        self.claimed.update(rows)
        for place in rows:
            self._stored.pop(place, None)

    def replaced(self, place: Partition, stored: StoredOffset) -> list[int]:
        """Take the done rows of a partition that a position includes; the others stay. The first
        position after a claim replaces all: `on_assign` may have moved it."""
        rows = self._rows.pop(place, [])
        if place not in self.claimed:
            metadata = decode_metadata(*stored)
            assert metadata is not None
            left = Position(stored.offset, metadata.ranges).undone(rows)
            self._rows[place] = left
            rows = sorted(set(rows).difference(left))
        return rows

    def put_back(self, rows: Mapping[Partition, Sequence[int]]) -> None:
        """Rows that `replaced` took are not replaced."""
        for place, offsets in rows.items():
            self._rows[place] = [*offsets, *self._rows.get(place, ())]

    def confirm(self, places: Collection[Partition]) -> None:
        """The first positions after a claim are stored."""
        self.claimed.difference_update(places)

    def add_rows(self, place: Partition, offsets: Sequence[int]) -> None:
        """Take note of done rows that were stored with results."""
        self._rows.setdefault(place, []).extend(offsets)

    def advanced(self, place: Partition, position: tuple[int, Metadata]) -> None:
        """Take note of a position that was stored with results."""
        self._stored[place] = position

    def doubt(self) -> None:
        """Let the next round try the database, also if it has nothing to store."""
        self._stored.clear()

    def has(self, place: Partition, offset: StoredOffset) -> bool:
        """Return whether results have stored exactly this position."""
        if place not in self._stored:
            return False
        low, metadata = self._stored[place]
        return offset == (low, encode_metadata(low, metadata, METADATA_MAX)[0])
