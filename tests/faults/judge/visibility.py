"""The concurrent reader against the reader after the run (I2, I11)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .records import Fault, Rec

if TYPE_CHECKING:
    from .verdict import Judge

Place = tuple[str, int, int]


def visibility_faults(judge: Judge) -> Iterator[Fault]:
    """Yield the differences between the two readers."""
    if judge.topics.along is None:
        return
    after_run = {_place(record): record for record in judge.topics.targets}
    read_to: dict[tuple[str, int], int] = defaultdict(lambda: -1)
    along: set[Place] = set()
    for seen in judge.topics.along:
        record = seen.record
        along.add(_place(record))
        part = (record.topic, record.partition)
        id = record.header("txb-id") or ""
        if record.offset <= read_to[part]:
            yield "I11", id, f"read concurrently after offset {read_to[part]}: {record}"
        read_to[part] = max(read_to[part], record.offset)
        if after_run.get(_place(record)) != record:
            yield "I11", id, f"was visible, but is not after the run: {record}"
        yield from _too_early(judge, id, seen.at)
    for place, record in after_run.items():
        if place not in along and record.offset < read_to[place[:2]]:
            id = record.header("txb-id") or ""
            yield "I11", id, f"became visible below the offset of a reader: {record}"


def _too_early(judge: Judge, id: str, at: float) -> Iterator[Fault]:
    """No message is visible before its commit."""
    tx = judge.log.get(id)
    if tx is None or tx.decision != "commit":
        return
    if at * 1000 + judge.clock_apart_ms < tx.decided_ms:
        yield "I2", id, f"visible at {at:.3f}, decided at {tx.decided_ms / 1000:.3f}"


def _place(record: Rec) -> Place:
    return record.topic, record.partition, record.offset
