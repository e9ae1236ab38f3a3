"""Who gets which half partition: evenly, and moving as few as possible. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

NOBODY = ""
"""The URL of a partition's owner, or of a proxy, that nobody knows."""


class OwnedPartitions(NamedTuple):
    """What a member says that it owns, and in which generation of the group it was given that."""

    partitions: frozenset[int] = frozenset()
    generation: int = -1


def resolve_conflicts(held: Mapping[str, OwnedPartitions]) -> dict[str, frozenset[int]]:
    """Give each partition that several members say they own to the one that was given it last.

    The others were out of touch when it was given away.
    """
    taken: set[int] = set()
    settled: dict[str, frozenset[int]] = {}
    for name in sorted(held, key=lambda name: (-held[name].generation, name)):
        settled[name] = held[name].partitions - taken
        taken |= settled[name]
    return settled


def assign(partitions: int, owned: Mapping[str, frozenset[int]]) -> dict[str, frozenset[int]]:
    """Share partitions out evenly among members, leaving with each what it has.

    `owned` says what each member had. Shares differ by one at most; where some get one more, it
    is those that had most. With more members than partitions some get none.
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
    """Return the URL of each partition's owner, `NOBODY` where none is known."""
    found = [NOBODY] * partitions
    for name, share in shares.items():
        for number in share:
            if number < partitions:
                found[number] = urls.get(name, NOBODY)
    return tuple(found)
