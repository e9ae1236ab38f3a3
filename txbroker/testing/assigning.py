"""Until core.consuming.assignment is there."""

from collections.abc import Mapping
from typing import NamedTuple


class Subscription(NamedTuple):
    topics: frozenset[str]
    owned: frozenset[tuple[str, int]]
    generation: int


def assign(
    members: Mapping[str, Subscription], partitions: Mapping[str, int]
) -> dict[str, frozenset[tuple[str, int]]]:
    owners: dict[tuple[str, int], str] = {}
    for name, member in sorted(members.items(), key=lambda item: item[1].generation):
        owners.update(dict.fromkeys(member.owned, name))
    shares: dict[str, set[tuple[str, int]]] = {name: set() for name in members}
    every = [(t, n) for t, count in sorted(partitions.items()) for n in range(count)]
    wanted: dict[str, set[tuple[str, int]]] = {name: set() for name in members}

    def able(p: tuple[str, int]) -> list[str]:
        return [name for name in sorted(members) if p[0] in members[name].topics]

    left = []
    for p in every:
        names = able(p)
        if not names:
            continue
        owner = owners.get(p)
        most = -(-sum(1 for q in every if able(q) == names) // len(names))
        if owner in names and len([q for q in wanted[owner] if able(q) == names]) < most:
            wanted[owner].add(p)
        else:
            left.append(p)
    for p in left:
        wanted[min(able(p), key=lambda name: (len(wanted[name]), name))].add(p)
    for name, share in wanted.items():
        shares[name] = {p for p in share if owners.get(p, name) == name}
    return {name: frozenset(share) for name, share in shares.items()}
