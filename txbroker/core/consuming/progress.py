"""The done offsets of one partition, and the position in which a store keeps them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec import structs

from txbroker.core.consuming.position import (
    METADATA_LENGTH_MAX,
    LaterPosition,
    Metadata,
    Position,
    StoredOffset,
    encode_metadata,
)


class PartitionProgress:
    """The done offsets of one partition, those that are ahead, and what may be stored of them.

    An offset is *ahead* if its first stage is stored, while later stages are not done: the stored
    position includes it, the later position does not.

    Args:
        length_max: of the metadata of a stored position, characters.

    Attributes:
        finished: done offsets that are not in the position yet.
        ahead: offsets that are ahead.
        overflow: done offsets that did not fit into the metadata of the last position.
    """

    def __init__(self, length_max: int = METADATA_LENGTH_MAX) -> None:
        self._position = Position(0)
        self.finished: list[int] = []
        self.ahead: set[int] = set()
        self.overflow = 0
        self._length_max = length_max
        self._sent: set[StoredOffset] = set()
        """What may be stored: the newest position that certainly is, and later attempts."""
        self._token_steps = 0

    @property
    def position(self) -> Position:
        """The done offsets."""
        if self.finished:
            self._position.done_all(self.finished)
            self.finished.clear()
        return self._position

    def begin_at(self, position: Position, ahead: Iterable[int] = ()) -> None:
        """Continue at another position, with other offsets ahead."""
        self.finished.clear()
        self._position, self.ahead = position, set(ahead)

    def withdraw(self, offsets: Collection[int]) -> bool:
        """Mark offsets as not done; return whether there are any."""
        if offsets:
            self._position = self.position.without(sorted(offsets))
        return bool(offsets)

    def is_done(self, offset: int) -> bool:
        """Return whether an offset is done."""
        return not self.position.undone([offset])

    def lag(self, end: int) -> int:
        """Return how many offsets up to `end` are not done."""
        position = self.position
        done = sum(last - first for first, last in position.ranges())
        return max(0, end - position.low - done)

    def saved(
        self, head: Metadata, done_too: Sequence[int] = (), ahead_too: Sequence[int] = ()
    ) -> tuple[int, Metadata]:
        """Return the position to store, as the offset and its metadata.

        Args:
            head: the rest of the metadata.
            done_too: offsets that are done once it is stored.
            ahead_too: offsets whose first stage is.
        """
        position = self.position.with_done(done_too) if done_too else self.position
        later = None
        if self.ahead or ahead_too:
            self.ahead.intersection_update(self.position.undone(self.ahead))
            if ahead := position.undone(self.ahead.union(ahead_too)):
                later = LaterPosition(position.low, position.ranges())
                position = position.with_done(ahead)
        token = head.token + self._token_steps
        metadata = structs.replace(head, token=token, ranges=position.ranges(), later=later)
        return position.low, metadata

    def stored(
        self,
        head: Metadata,
        done_too: Sequence[int] = (),
        ahead_too: Sequence[int] = (),
        *,
        distinct: bool = False,
    ) -> StoredOffset:
        """Return what to commit, as `saved`.

        Args:
            distinct: it must differ from all that may be stored already, by a higher token if
                nothing else has changed, so that it shows whether this commit was stored.
        """
        while True:
            low, metadata = self.saved(head, done_too, ahead_too)
            text, self.overflow = encode_metadata(low, metadata, self._length_max)
            stored = StoredOffset(low, text)
            if not (distinct and stored in self._sent):
                self._sent.add(stored)
                return stored
            self._token_steps += 1

    def confirm(self, stored: StoredOffset) -> None:
        """Take note that a position is stored."""
        self._sent = {stored}
