"""The assignment of half partitions to proxies: even, with as few moves as possible."""

from collections.abc import Mapping
from typing import NamedTuple

UNKNOWN_OWNER = ""
"""The URL of an unknown owner or proxy."""


class OwnedPartitions(NamedTuple):
    """The partitions that a member owns, and the generation in which they were assigned."""

    partitions: frozenset[int] = frozenset()
    generation: int = -1


def resolve_conflicts(held: Mapping[str, OwnedPartitions]) -> dict[str, frozenset[int]]:
    """Return the owned partitions of each member, every partition with its newest owner only.

    The other members had lost contact when it was reassigned.
    """
    taken: set[int] = set()
    resolved: dict[str, frozenset[int]] = {}
    for name in sorted(held, key=lambda name: (-held[name].generation, name)):
        resolved[name] = held[name].partitions - taken
        taken |= resolved[name]
    return resolved


def assign(partitions: int, owned: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    """Assign partitions evenly to members, moving as few as possible.

    Assignments differ by at most one; the members that own most get the extra ones. With more
    members than partitions some get none.

    Args:
        partitions: how many there are.
        owned: the partitions that each member has now.
    """
    every = frozenset(range(partitions))
    had = {name: own & every for name, own in owned.items()}
    names = sorted(had, key=lambda name: (-len(had[name]), name))
    if not names:
        return {}
    base, more = divmod(partitions, len(names))
    free = set(every)
    shares: dict[str, set[int]] = {}
    quotas = {name: base + (number < more) for number, name in enumerate(names)}
    for name in names:
        kept = sorted(had[name] & free)[: quotas[name]]
        shares[name] = set(kept)
        free.difference_update(kept)
    rest = sorted(free)
    for name in names:
        count = quotas[name] - len(shares[name])
        shares[name].update(rest[:count])
        rest = rest[count:]
    return {name: frozenset(share) for name, share in shares.items()}


def owners(
    partitions: int, shares: Mapping[str, frozenset[int]], urls: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the URL of each partition's owner, `UNKNOWN_OWNER` if unknown."""
    result = [UNKNOWN_OWNER] * partitions
    for name, share in shares.items():
        for number in share:
            if number < partitions:
                result[number] = urls.get(name, UNKNOWN_OWNER)
    return tuple(result)
