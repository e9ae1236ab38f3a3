"""What the owners' progress says against what is visible (I11).

Every turn writes its records and its progress in one Kafka transaction. So whatever is visible lies
below the newest progress and is not in its list of deferred ones, progress never goes back, and a
turn that another owner's claim cut short leaves neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .records import Rec, by_partition

if TYPE_CHECKING:
    from .verdict import Judge

Told = tuple[str, str, str]


def told_by_turns(judge: Judge) -> Iterator[Told]:
    """Yield what is wrong: invariant, transaction, why."""
    newest: dict[int, dict[str, Any]] = {}
    for partition, records in by_partition(judge.topics.checkpoint):
        yield from _forward(partition, records, newest)
    if not judge.topics.checkpoint:
        return
    for id, visible in judge.visible.items():
        tx = judge.log.get(id)
        if tx is None or tx.decision != "commit":
            continue
        progress = newest.get(tx.partition, {"op": 0, "half": 0})
        if tx.op_offset >= progress["op"] or tx.offset >= progress["half"]:
            yield "I11", id, f"visible, and no committed turn passed it: {progress}, {visible[0]}"
        elif id in progress.get("deferred", ()):
            yield "I11", id, f"visible, and the newest turn says that it is deferred: {progress}"


def _forward(
    partition: int, records: list[Rec], newest: dict[int, dict[str, Any]]
) -> Iterator[Told]:
    """Progress never goes back, and nobody but the newest claim's owner writes any."""
    claim = ""
    for record in records:
        if record.key == b"claim":
            claim = json.loads(record.value or b"{}")["claim"]
        elif record.key == b"progress" and record.value is not None:
            found = dict(json.loads(record.value))
            before = newest.get(partition, found)
            if found["op"] < before["op"] or found["half"] < before["half"]:
                yield "I11", "", f"progress of {partition} goes back: {before}, then {found}"
            if claim and found["claim"] != claim:
                yield "I11", "", f"progress of {partition} behind the claim {claim}: {found}"
            newest[partition] = found
