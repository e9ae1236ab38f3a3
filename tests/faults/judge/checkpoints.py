"""Checkpoints against visible records (I11).

Every promotion transaction writes its records and its checkpoint in one Kafka transaction. Visible
transactions therefore lie below the newest checkpoint and are not in its list of deferred ones, a
checkpoint never goes back, and a promotion transaction that a claim aborted leaves no trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .records import Fault, Rec, by_partition

if TYPE_CHECKING:
    from .verdict import Judge


def checkpoint_faults(judge: Judge) -> Iterator[Fault]:
    """Yield the faults of all checkpoints."""
    newest: dict[int, dict[str, Any]] = {}
    for partition, records in by_partition(judge.topics.checkpoint):
        yield from _goes_forward(partition, records, newest)
    if not judge.topics.checkpoint:
        return
    for id, visible in judge.visible.items():
        tx = judge.log.get(id)
        if tx is None or tx.decision != "commit":
            continue
        checkpoint = newest.get(tx.partition, {"op": 0, "half": 0})
        if tx.op_offset >= checkpoint["op"] or tx.offset >= checkpoint["half"]:
            yield "I11", id, f"visible, but no checkpoint has passed it: {checkpoint}, {visible[0]}"
        elif id in checkpoint.get("deferred", ()):
            yield "I11", id, f"visible, but deferred in the newest checkpoint: {checkpoint}"


def _goes_forward(
    partition: int, records: list[Rec], newest: dict[int, dict[str, Any]]
) -> Iterator[Fault]:
    """A checkpoint never goes back; only the owner of the newest claim writes one."""
    claim = ""
    for record in records:
        if record.key == b"claim":
            claim = json.loads(record.value or b"{}")["claim"]
        elif record.key == b"progress" and record.value is not None:
            value = dict(json.loads(record.value))
            before = newest.get(partition, value)
            if value["op"] < before["op"] or value["half"] < before["half"]:
                yield "I11", "", f"checkpoint of {partition} goes back: {before}, then {value}"
            if claim and value["claim"] != claim:
                yield "I11", "", f"checkpoint of {partition} after the claim {claim}: {value}"
            newest[partition] = value
