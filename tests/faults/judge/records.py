"""What was read from topics, as the judge takes it: no code of txbroker's is in between."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Header = tuple[str, bytes | None]


@dataclass(frozen=True, slots=True)
class Rec:
    """A record as a consumer reads it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]

    def header(self, name: str) -> str | None:
        """The first header of a name, as text."""
        for found, value in self.headers:
            if found == name:
                return None if value is None else value.decode()
        return None


@dataclass(frozen=True, slots=True)
class Seen:
    """A record of a target as the reader that reads along got it, and when (seconds)."""

    record: Rec
    at: float


@dataclass(frozen=True, slots=True)
class End:
    """Where a partition ended when everything had come to rest: behind its last record, and
    behind what read_committed consumers are given."""

    topic: str
    partition: int
    high: int
    stable: int


@dataclass
class Topics:
    """All records: half and op at read_uncommitted, the others at read_committed.

    `targets` is what was read in the end. `along`: what a second reader saw while it happened,
    from the first record on; None where nobody read along. Checkpoint and ends may be left out.
    """

    half: list[Rec] = field(default_factory=list)
    op: list[Rec] = field(default_factory=list)
    parked: list[Rec] = field(default_factory=list)
    targets: list[Rec] = field(default_factory=list)
    checkpoint: list[Rec] = field(default_factory=list)
    along: list[Seen] | None = None
    ends: list[End] = field(default_factory=list)


def by_partition(records: Sequence[Rec]) -> Iterator[tuple[int, list[Rec]]]:
    """Yield each partition with its records in the order of offsets."""
    parts: dict[int, list[Rec]] = defaultdict(list)
    for record in records:
        parts[record.partition].append(record)
    for partition in sorted(parts):
        yield partition, sorted(parts[partition], key=lambda record: record.offset)


@dataclass
class Copies:
    """The copies of one transaction in the parked topic.

    Attributes:
        parts: the newest record of each message, tombstones left out.
        was_refused: whether any copy, also one that is gone, said that it is refused.
    """

    parts: dict[int, Rec] = field(default_factory=dict)
    was_refused: bool = False

    def facts(self, count: int) -> dict[str, object]:
        """What a whole copy of `count` messages says of itself; {} where it is not whole."""
        if sorted(self.parts) != list(range(count)):
            return {}
        return dict(json.loads(self.parts[0].header("txb-kept") or "{}"))


def read_copies(parked: Sequence[Rec]) -> dict[str, Copies]:
    """Return the copies by transaction id."""
    found: dict[str, Copies] = defaultdict(Copies)
    for _, records in by_partition(parked):
        for record in records:
            id, _, sequence = (record.key or b"").decode().partition("/")
            copies = found[id]
            copies.parts.pop(int(sequence), None)
            if record.value is not None:
                copies.parts[int(sequence)] = record
                facts = json.loads(record.header("txb-kept") or "{}")
                copies.was_refused |= facts.get("state") == "refused"
    return dict(found)
