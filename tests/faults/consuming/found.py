"""What a run of consumers has left, in the terms of the judges: the calls, and the records."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tests.faults.consuming.exact_judge import Effect, Kept, Sample, StageRun, TablePosition
from tests.faults.consuming.judge import (
    Place,
    Rec,
    Source,
    Stored,
    Topics,
    cleared_by,
    later_position,
    position,
    source_of,
    token_of,
)

Line = Mapping[str, Any]
"""An event of a history."""


def uncleared(asides: Sequence[Rec]) -> dict[tuple[tuple[str, int, int], int], str]:
    """Return the keys that are set aside, by their first copy and its partition."""
    left: dict[tuple[tuple[str, int], str | None], list[tuple[tuple[str, int, int], int]]] = {}
    for record in sorted(asides, key=lambda each: (each.partition, each.offset)):
        source = source_of(record, "txb-source")
        if source is not None:
            left.setdefault((source[:2], record.key), []).append((source, record.partition))
        cleared = cleared_by(record)
        if cleared is not None:
            at = (cleared[:2], record.key)
            left[at] = [each for each in left.get(at, []) if each[0][2] > cleared[2]]
    return {copies[0]: key or "" for (_place, key), copies in left.items() if copies}


def sample_of(stored: Stored, sources: Collection[str]) -> Sample:
    """Return the committed offsets of topics as a sample without a table."""
    mirror = {place: position(*found) for place, found in stored.offsets.items()}
    table = {
        place: TablePosition(token_of(text), low, mirror[place][1], later_position(low, text))
        for place, (low, text) in stored.offsets.items()
        if place[0] in sources
    }
    return Sample(stored.at, mirror, table)


def effects_in(output: Sequence[Rec], order: str) -> list[Effect]:
    """Return the effects in a topic. Those of a key are in one partition."""
    effects = []
    counts: dict[str, int] = {}
    for record in sorted(output, key=lambda each: (each.partition, each.offset)):
        found = json.loads(record.value)
        place = (found["topic"], found["partition"])
        lane = f"{place[0]}/{place[1]}/{record.key}" if order == "key" else ""
        counts[lane] = counts.get(lane, 0) + bool(lane)
        effects.append(
            Effect(
                serial=record.offset,
                source=(*place, found["offset"]),
                key=record.key,
                value=found["value"],
                lane=lane,
                number=counts[lane],
                token=found["token"],
                owned=tuple(found["owned"]),
                instance=found["instance"],
                log=record.partition,
            )
        )
    return effects


def kept_in(topics: Topics) -> dict[Source, Kept]:
    """Return the messages that copies keep: dead ones, and set-aside ones without a clearance."""
    cleared: dict[tuple[Place, str | None], int] = {}
    for record in topics.aside:
        source = cleared_by(record)
        if source is not None:
            at = (source[:2], record.key)
            cleared[at] = max(cleared.get(at, -1), source[2])
    kept = {}
    for copies, state in ((topics.aside, "aside"), (topics.dead, "dead")):
        for record in copies:
            source = source_of(record, "txb-source")
            done = cleared.get((source[:2], record.key), -1) if source is not None else 0
            if source is not None and (state == "dead" or source[2] > done):
                kept[source] = Kept(state, _stage_of(record), record.key)
    return kept


def _stage_of(record: Rec) -> int:
    return next((int(value) for name, value in record.headers if name == "txb-stage"), 0)


def sessions_of(lines: Sequence[Line]) -> list[tuple[Source, str]]:
    """Return what calls saw of their sessions, by their first messages."""
    return [
        ((line["topic"], line["partition"], line["offset"]), line["seen"])
        for line in lines
        if line["event"] == "session"
    ]


def stage_runs(lines: Sequence[Line]) -> list[StageRun]:
    """Return the later stages that have ended."""
    return [
        StageRun(line["stage"], (line["topic"], line["partition"], line["offset"]), line["seen"])
        for line in lines
        if line["event"] == "stage"
    ]
