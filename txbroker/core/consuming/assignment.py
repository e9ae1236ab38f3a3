"""The assignment of partitions to the consumers of a group: sticky, even, in two phases.

The first phase revokes: a partition that moves from one live member to another is withheld, so that
no member gets it. Its owner finishes with it and joins again without it; the second phase assigns
it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct

from txbroker.core.records import Partition
from txbroker.core.routing import OwnedPartitions, distribute, resolve_conflicts


class Subscription(Struct, frozen=True):
    """What a member joins with.

    Attributes:
        topics: the topics that it subscribes to.
        owned: the partitions in use, also of topics that it does not subscribe to any more.
        generation: the generation in which it was last assigned partitions; -1 for none.
    """

    topics: frozenset[str]
    owned: frozenset[Partition] = frozenset()
    generation: int = -1


def assign(
    members: Mapping[str, Subscription], partitions: Mapping[str, int]
) -> dict[str, frozenset[Partition]]:
    """Assign partitions to members, moving as few as possible.

    Assignments of members with equal subscriptions differ by at most one, before partitions are
    withheld. Of two owners of a partition the one of the newest generation counts.

    Args:
        partitions: number of partitions of each topic.
    """
    owned = resolve_conflicts(
        {name: OwnedPartitions(member.owned, member.generation) for name, member in members.items()}
    )
    in_use = {one: name for name, own in owned.items() for one in own}
    shares = _shares(members, owned, partitions)
    return {
        name: frozenset(one for one in share if in_use.get(one, name) == name)
        for name, share in shares.items()
    }


def _shares(
    members: Mapping[str, Subscription],
    owned: Mapping[str, frozenset[Partition]],
    partitions: Mapping[str, int],
) -> dict[str, frozenset[Partition]]:
    """Return the assignment that the phases lead to."""
    topics: dict[frozenset[str], list[str]] = {}
    for topic in sorted(partitions):
        names = frozenset(name for name, member in members.items() if topic in member.topics)
        topics.setdefault(names, []).append(topic)
    shares: dict[str, frozenset[Partition]] = dict.fromkeys(members, frozenset())
    # Topics with few subscribers first: the others then even out the totals.
    for names in sorted(topics, key=lambda names: (len(names), sorted(names))):
        found = distribute(
            _in_order(topics[names], partitions),
            {name: owned[name] for name in names},
            {name: len(shares[name]) for name in names},
        )
        for name, share in found.items():
            shares[name] |= share
    return shares


def _in_order(topics: Collection[str], partitions: Mapping[str, int]) -> list[Partition]:
    """Return the topics' partitions, interleaved: a block of them holds a part of every topic."""
    every = [(topic, number) for topic in topics for number in range(partitions[topic])]
    return sorted(every, key=lambda one: ((2 * one[1] + 1) / partitions[one[0]], one))
