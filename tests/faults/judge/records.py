"""The records and the history that a run leaves, decoded without code of txbroker."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Header = tuple[str, bytes | None]
Fault = tuple[str, str, str]
"""Invariant, transaction id, reason."""


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
        for header, value in self.headers:
            if header == name:
                return None if value is None else value.decode()
        return None

    @property
    def tx_id(self) -> str:
        """The transaction of a record of a target; "" without one."""
        return self.header("txb-id") or ""


@dataclass(frozen=True, slots=True)
class Seen:
    """A record of a target with the time (seconds) at which the concurrent reader received it."""

    record: Rec
    at: float


@dataclass(frozen=True, slots=True)
class End:
    """Ends of a partition after the run: its high watermark and its last stable offset."""

    topic: str
    partition: int
    high: int
    stable: int


@dataclass
class Topics:
    """All records: half and op with read_uncommitted, the others with read_committed.

    `targets` was read after the run. `along` was read by a concurrent reader from the first record
    on; None without one. Checkpoint and ends are optional.
    """

    half: list[Rec] = field(default_factory=list)
    op: list[Rec] = field(default_factory=list)
    parked: list[Rec] = field(default_factory=list)
    targets: list[Rec] = field(default_factory=list)
    checkpoint: list[Rec] = field(default_factory=list)
    along: list[Seen] | None = None
    ends: list[End] = field(default_factory=list)


def by_partition(records: Sequence[Rec]) -> Iterator[tuple[int, list[Rec]]]:
    """Yield each partition with its records in offset order."""
    parts: dict[int, list[Rec]] = defaultdict(list)
    for record in records:
        parts[record.partition].append(record)
    for partition in sorted(parts):
        yield partition, sorted(parts[partition], key=lambda record: record.offset)


@dataclass
class Copies:
    """The copies of one transaction in the parked topic.

    Attributes:
        parts: the newest record of each message, without tombstones.
        was_refused: whether any copy, including removed ones, had the state refused.
    """

    parts: dict[int, Rec] = field(default_factory=dict)
    was_refused: bool = False

    def facts(self, count: int) -> dict[str, object]:
        """Return the facts of a complete copy of `count` messages; {} if it is incomplete."""
        if sorted(self.parts) != list(range(count)):
            return {}
        return dict(json.loads(self.parts[0].header("txb-kept") or "{}"))


def read_copies(parked: Sequence[Rec]) -> dict[str, Copies]:
    """Return the copies by transaction id."""
    by_id: dict[str, Copies] = defaultdict(Copies)
    for _, records in by_partition(parked):
        for record in records:
            id, _, sequence = (record.key or b"").decode().partition("/")
            copies = by_id[id]
            copies.parts.pop(int(sequence), None)
            if record.value is not None:
                copies.parts[int(sequence)] = record
                facts = json.loads(record.header("txb-kept") or "{}")
                copies.was_refused |= facts.get("state") == "refused"
    return dict(by_id)


# --- the history: calls with their answers, check-backs, faults --------------------------------


@dataclass(frozen=True, slots=True)
class Body:
    """A message as a client sent it."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    timestamp_ms: int | None = None


@dataclass(slots=True)
class Call:
    """One call of a client.

    Attributes:
        what: prepare, commit, rollback, show, check or revive.
        token: the client's name for its transaction.
        began, ended: seconds since 1970, by the client's clock; `ended` is 0 without an answer.
        result: invoke (no answer), ok, fail (certainly not done) or unknown.
        code: of the answered error.
        messages: the messages of the call; None without any.
    """

    what: str
    token: str
    began: float
    id: str = ""
    ended: float = 0.0
    result: str = "invoke"
    code: str = ""
    decision: str = ""
    state: str = ""
    messages: tuple[Body, ...] | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A check-back that a client received, and its answer. `attempt` is 0 if not recorded."""

    id: str
    at: float
    answer: str
    attempt: int = 0
    messages: tuple[Body, ...] | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """Another event: a fault; `healed`: the last fault has ended; `quiet`: all is settled."""

    at: float
    what: str
    who: str = ""


@dataclass
class History:
    """The history of all clients.

    A token identifies what one client intended; the header `token` of its messages carries it.
    `business` has the tokens whose local transaction writes a row with the id.
    """

    sent: dict[str, tuple[Body, ...]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    business: set[str] = field(default_factory=set)
    notes: list[Note] = field(default_factory=list)
