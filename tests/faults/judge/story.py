"""The timeline of one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from .history import Asked, Call, Note
from .log import Tx
from .records import Rec, Seen

_AROUND_MS = 2000.0
"""Faults and claims this long before and after a transaction are part of its timeline."""


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
    own = [*_calls(facts), *_log(facts)]
    lines = [*own, *_around(facts, own)]
    lines.sort(key=lambda line: line[0])
    text = [f"    {_clock(at_ms)}  {text}" for at_ms, text in lines]
    text += [
        f"    after the run  visible in {record.topic}-{record.partition} at {record.offset}"
        for record in facts.visible
    ]
    return "\n".join([*text, f"    after the run  business rows: {facts.rows}"])


def _clock(at_ms: float) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]


def _calls(facts: Facts) -> list[tuple[float, str]]:
    lines: list[tuple[float, str]] = []
    for call in facts.calls:
        lines.append((call.began * 1000, f"{call.what} {call.token}: sent"))
        if call.result != "invoke":
            answer = " ".join(filter(None, (call.result, call.code, call.decision, call.state)))
            lines.append((call.ended * 1000, f"{call.what} {call.token}: {answer}"))
    for asked in facts.asked:
        number = f" attempt {asked.attempt}" if asked.attempt else ""
        lines.append((asked.at * 1000, f"check-back{number}: answered {asked.answer}"))
    return lines


def _log(facts: Facts) -> list[tuple[float, str]]:
    lines: list[tuple[float, str]] = []
    if facts.tx is not None:
        lines += [(float(at_ms), text) for at_ms, text in facts.tx.log]
    lines += [
        (
            seen.at * 1000,
            f"seen in {seen.record.topic}-{seen.record.partition} at {seen.record.offset}",
        )
        for seen in facts.seen
    ]
    for record in facts.kept:
        copy = "tombstone" if record.value is None else record.header("txb-kept") or "copy"
        lines.append((record.timestamp_ms, f"parked {record.partition}:{record.offset} {copy}"))
    return lines


def _around(facts: Facts, own: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return claims, checkpoints and faults during its time."""
    if not own:
        return []
    begin = min(at_ms for at_ms, _ in own) - _AROUND_MS
    end = max(at_ms for at_ms, _ in own) + _AROUND_MS
    lines = [(note.at * 1000, f"-- {note.what} {note.who}".rstrip()) for note in facts.notes]
    lines += [
        (record.timestamp_ms, _checkpoint(record))
        for record in facts.checkpoint
        if record.key in (b"claim", b"progress")
    ]
    return [line for line in lines if begin <= line[0] <= end]


def _checkpoint(record: Rec) -> str:
    key = (record.key or b"").decode()
    value = (record.value or b"").decode(errors="replace")
    return f"-- {key} {record.partition}:{record.offset} {value[:200]}"
