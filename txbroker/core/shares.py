"""Shares: to which one the use of a shared pool is counted, so that none uses it up alone.

A share is one group, or all groups of one principal. Whose a group is follows from its name, which
stands in every half message, so every owner comes to the same counts.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

ShareOf: TypeAlias = Callable[[str], str]
"""Returns the share that a group counts to."""


def own_share(group: str) -> str:
    """Return a group as its own share: the rule where there are no principals."""
    return group


def part_of(pool: int) -> int:
    """Return what one share may use of a pool: four fifths.

    A share whose work stands still for hours fills its part. A fifth is then left for all others,
    while one busy share alone still gets nearly everything.
    """
    return max(1, pool * 4 // 5)


class Use:
    """How much of a pool each share uses.

    Attributes:
        total: of all shares together.
    """

    __slots__ = ("_of", "total")

    def __init__(self, shares: Iterable[tuple[str, int]] = ()) -> None:
        self._of: dict[str, int] = {}
        self.total = 0
        for share, count in shares:
            self.add(share, count)

    def of(self, share: str) -> int:
        """Return how much one share uses."""
        return self._of.get(share, 0)

    def add(self, share: str, count: int = 1) -> None:
        """Count what a share takes, or, below 0, gives back."""
        self.total += count
        left = self._of.get(share, 0) + count
        if left:
            self._of[share] = left
        else:
            self._of.pop(share, None)
