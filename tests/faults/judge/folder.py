"""A run saved in a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .history import History, bytes_in, bytes_out, headers_in, headers_out, lines_of, read_lines
from .records import End, Rec, Seen, Topics

_TOPICS = ("half", "op", "parked", "checkpoint", "targets")
OPTIONS = (
    "settled",
    "clock_apart_ms",
    "settle_max_s",
    "without_leader",
    "dedup_window_ms",
)
"""Keys of `options.json`: arguments of `Judge`."""


@dataclass
class Case:
    """The input of the judge for one run."""

    history: History
    topics: Topics
    rows: Sequence[str] = ()
    states: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def save(case: Case, folder: Path) -> None:
    """Write a run into a new folder."""
    (folder / "topics").mkdir(parents=True, exist_ok=True)
    _write(folder / "history.jsonl", lines_of(case.history))
    _write(folder / "business.jsonl", (json.dumps({"id": id}) for id in case.rows))
    for name in _TOPICS:
        records: list[Rec] = getattr(case.topics, name)
        lines = (json.dumps(_record_out(record)) for record in records)
        _write(folder / "topics" / f"{name}.jsonl", lines)
    if case.topics.along is not None:
        seen = (json.dumps({**_record_out(s.record), "at": s.at}) for s in case.topics.along)
        _write(folder / "topics" / "along.jsonl", seen)
    _write(folder / "topics" / "ends.jsonl", (json.dumps(asdict(e)) for e in case.topics.ends))
    states = ({"id": id, "state": state} for id, state in case.states.items())
    _write(folder / "states.jsonl", (json.dumps(each) for each in states))
    (folder / "options.json").write_text(json.dumps(case.options) + "\n")


def load(folder: Path) -> Case:
    """Read a run from a folder.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: a line does not have the format.
    """
    topics = Topics()
    for name in _TOPICS:
        records = [_record_in(each) for each in _read(folder / "topics" / f"{name}.jsonl")]
        setattr(topics, name, records)
    along = folder / "topics/along.jsonl"
    if along.exists():
        topics.along = [Seen(_record_in(each), each["at"]) for each in _read(along)]
    topics.ends = [End(**each) for each in _read_if(folder / "topics/ends.jsonl")]
    options_file = folder / "options.json"
    options = json.loads(options_file.read_text()) if options_file.exists() else {}
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ValueError(f"options.json: unknown keys {', '.join(unknown)}")
    with (folder / "history.jsonl").open() as lines:
        history = read_lines(lines)
    return Case(
        history,
        topics,
        [each["id"] for each in _read(folder / "business.jsonl")],
        {each["id"]: each["state"] for each in _read_if(folder / "states.jsonl")},
        options,
    )


def _write(path: Path, lines: Iterable[str]) -> None:
    with path.open("w") as file:
        file.writelines(f"{line}\n" for line in lines)


def _read(path: Path) -> list[dict[str, Any]]:
    with path.open() as file:
        return [json.loads(line) for line in file]


def _read_if(path: Path) -> list[dict[str, Any]]:
    return _read(path) if path.exists() else []


def _record_out(record: Rec) -> dict[str, Any]:
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "key": bytes_out(record.key),
        "value": bytes_out(record.value),
        "headers": headers_out(record.headers),
    }


def _record_in(fields: dict[str, Any]) -> Rec:
    return Rec(
        fields["topic"],
        fields["partition"],
        fields["offset"],
        fields["timestamp_ms"],
        bytes_in(fields.get("key")),
        bytes_in(fields.get("value")),
        headers_in(fields.get("headers", [])),
    )
