"""Shares of pooled limits, so that one client cannot use a pool up alone.

A *share* is one group, or all groups of one principal. It follows from the group's name, which is
in every half message, so every owner counts the same.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

ShareOf: TypeAlias = Callable[[str], str]
"""Returns the share of a group."""


def own_share(group: str) -> str:
    """Return a group as its own share: the rule without principals."""
    return group


def share_max(pool: int) -> int:
    """Return how much of a pool one share may use: four fifths.

    A share whose work stands still for hours fills its part. A fifth is then left for the others,
    while a single busy share still gets nearly everything.
    """
    return max(1, pool * 4 // 5)


class ShareUse:
    """How much of a pool each share uses.

    Attributes:
        total: the use of all shares.
    """

    __slots__ = ("_of", "total")

    def __init__(self, shares: Iterable[tuple[str, int]] = ()) -> None:
        self._of: dict[str, int] = {}
        self.total = 0
        for share, count in shares:
            self.add(share, count)

    def of(self, share: str) -> int:
        """Return the use of one share."""
        return self._of.get(share, 0)

    def add(self, share: str, count: int = 1) -> None:
        """Add to the use of a share; a negative count releases."""
        self.total += count
        left = self._of.get(share, 0) + count
        if left:
            self._of[share] = left
        else:
            self._of.pop(share, None)
