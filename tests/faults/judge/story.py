"""The timeline of one transaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from .log import Tx
from .records import Asked, Call, Note, Rec, Seen

_AROUND_MS = 2000.0
"""Faults and claims this long before and after a transaction are part of its timeline."""
Line = tuple[float, str]
"""Milliseconds since 1970, and text."""


@dataclass
class Facts:
    """Facts about one transaction by their source."""

    tx: Tx | None
    calls: Sequence[Call] = ()
    asked: Sequence[Asked] = ()
    visible: Sequence[Rec] = ()
    seen: Sequence[Seen] = ()
    kept: Sequence[Rec] = ()
    checkpoint: Sequence[Rec] = ()
    notes: Sequence[Note] = ()
    rows: int = 0


def timeline(facts: Facts) -> str:
    """Return calls, markers, checks, promotions, takeovers and faults, a line each, by time."""
    own = list(_own(facts))
    times = [at_ms for at_ms, _ in own]
    around = [
        line
        for line in _around(facts)
        if times and min(times) - _AROUND_MS <= line[0] <= max(times) + _AROUND_MS
    ]
    lines = sorted([*own, *around], key=lambda line: line[0])
    text = [f"    {_clock(at_ms)}  {text}" for at_ms, text in lines]
    text += [f"    after the run  visible in {_place(record)}" for record in facts.visible]
    return "\n".join([*text, f"    after the run  business rows: {facts.rows}"])


def _clock(at_ms: float) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]


def _place(record: Rec) -> str:
    return f"{record.topic}-{record.partition} at {record.offset}"


def _own(facts: Facts) -> Iterator[Line]:
    for call in facts.calls:
        yield call.began * 1000, f"{call.what} {call.token}: sent"
        if call.result != "invoke":
            answer = " ".join(filter(None, (call.result, call.code, call.decision, call.state)))
            yield call.ended * 1000, f"{call.what} {call.token}: {answer}"
    for asked in facts.asked:
        number = f" attempt {asked.attempt}" if asked.attempt else ""
        yield asked.at * 1000, f"check-back{number}: answered {asked.answer}"
    yield from facts.tx.log if facts.tx is not None else ()
    for seen in facts.seen:
        yield seen.at * 1000, f"seen in {_place(seen.record)}"
    for record in facts.kept:
        copy = "tombstone" if record.value is None else record.header("txb-kept") or "copy"
        yield record.timestamp_ms, f"parked {record.partition}:{record.offset} {copy}"


def _around(facts: Facts) -> Iterator[Line]:
    """Yield claims, checkpoints and faults."""
    for note in facts.notes:
        yield note.at * 1000, f"-- {note.what} {note.who}".rstrip()
    for record in facts.checkpoint:
        if record.key in (b"claim", b"progress"):
            value = (record.value or b"").decode(errors="replace")[:200]
            place = f"{record.key.decode()} {record.partition}:{record.offset}"
            yield record.timestamp_ms, f"-- {place} {value}"
