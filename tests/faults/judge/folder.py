"""A run saved in a folder, and its history as lines of JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .records import Asked, Body, Call, End, Header, History, Note, Rec, Seen, Topics

_RESULTS = ("ok", "fail", "unknown")
_TOPICS = ("half", "op", "parked", "checkpoint", "targets")
OPTIONS = ("settled", "clock_apart_ms", "settle_max_s", "without_leader", "dedup_window_ms")
"""Keys of `options.json`: arguments of `Judge`."""
Json = dict[str, Any]


@dataclass
class Case:
    """The input of the judge for one run."""

    history: History
    topics: Topics
    rows: Sequence[str] = ()
    states: dict[str, str] = field(default_factory=dict)
    options: Json = field(default_factory=dict)


def save(case: Case, folder: Path) -> None:
    topics = folder / "topics"
    topics.mkdir(parents=True, exist_ok=True)
    (folder / "history.jsonl").write_text("".join(f"{line}\n" for line in lines_of(case.history)))
    _write(folder / "business.jsonl", ({"id": id} for id in case.rows))
    for name in _TOPICS:
        _write(topics / f"{name}.jsonl", map(asdict, getattr(case.topics, name)))
    if case.topics.along is not None:
        seen = ({**asdict(each.record), "at": each.at} for each in case.topics.along)
        _write(topics / "along.jsonl", seen)
    _write(topics / "ends.jsonl", map(asdict, case.topics.ends))
    states = ({"id": id, "state": state} for id, state in case.states.items())
    _write(folder / "states.jsonl", states)
    (folder / "options.json").write_text(json.dumps(case.options) + "\n")


def load(folder: Path) -> Case:
    """Read a run from a folder.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: a line does not have the format.
    """
    topics = Topics()
    for name in _TOPICS:
        setattr(topics, name, [_record(each) for each in _read(folder / f"topics/{name}.jsonl")])
    along = folder / "topics/along.jsonl"
    if along.exists():
        topics.along = [Seen(_record(each), each["at"]) for each in _read(along)]
    topics.ends = [End(**each) for each in _read_if(folder / "topics/ends.jsonl")]
    options_file = folder / "options.json"
    options = json.loads(options_file.read_text()) if options_file.exists() else {}
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ValueError(f"options.json: unknown keys {', '.join(unknown)}")
    with (folder / "history.jsonl").open() as lines:
        history = read_lines(lines)
    rows = [each["id"] for each in _read(folder / "business.jsonl")]
    states = {each["id"]: each["state"] for each in _read_if(folder / "states.jsonl")}
    return Case(history, topics, rows, states, options)


def _write(path: Path, rows: Iterable[Json]) -> None:
    with path.open("w") as file:
        file.writelines(f"{_dumps(row)}\n" for row in rows)


def _read(path: Path) -> list[Json]:
    with path.open() as file:
        return [json.loads(line) for line in file]


def _read_if(path: Path) -> list[Json]:
    return _read(path) if path.exists() else []


def _dumps(value: Json) -> str:
    return json.dumps(value, default=_bytes_out)


def _bytes_out(data: bytes) -> Any:
    """Return bytes as text if they are UTF-8, otherwise as `{"base64": …}`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _bytes_in(encoded: Any) -> bytes | None:
    if isinstance(encoded, dict):
        return base64.b64decode(encoded["base64"])
    return None if encoded is None else str(encoded).encode()


def _headers_in(encoded: Sequence[Sequence[Any]]) -> tuple[Header, ...]:
    return tuple((str(name), _bytes_in(value)) for name, value in encoded)


def _record(fields: Json) -> Rec:
    return Rec(
        fields["topic"],
        fields["partition"],
        fields["offset"],
        fields["timestamp_ms"],
        _bytes_in(fields.get("key")),
        _bytes_in(fields.get("value")),
        _headers_in(fields.get("headers", [])),
    )


def _body(fields: Json) -> Body:
    key, value = _bytes_in(fields.get("key")), _bytes_in(fields.get("value"))
    headers = _headers_in(fields.get("headers", []))
    return Body(fields["topic"], key, value, headers, fields.get("timestamp_ms"))


# --- the history -------------------------------------------------------------------------------


def lines_of(history: History) -> list[str]:
    """Return a history as lines of JSON by time; the intentions of the clients come first."""
    intentions: list[Json] = [
        {
            "event": "means",
            "token": token,
            "business": token in history.business,
            "messages": list(map(asdict, bodies)),
        }
        for token, bodies in history.sent.items()
    ]
    events = [event for n, call in enumerate(history.calls) for event in _call_events(n, call)]
    events += [{"event": "asked", **asdict(asked)} for asked in history.asked]
    events += [{"event": "note", **asdict(note)} for note in history.notes]
    events.sort(key=lambda event: event["at"])
    return [_dumps(event) for event in [*intentions, *events]]


def _call_events(number: int, call: Call) -> Iterator[Json]:
    fields = asdict(call)
    invoked = {name: fields[name] for name in ("what", "token", "id", "messages")}
    if call.what == "prepare":
        invoked["id"] = ""
    yield {"event": "invoke", "at": call.began, "call": number, **invoked}
    if call.result in _RESULTS:
        answer = {n: fields[n] for n in ("id", "code", "decision", "state") if fields[n]}
        yield {"event": call.result, "at": call.ended, "call": number, **answer}


def read_lines(lines: Iterable[str]) -> History:
    """Return the history in lines of JSON.

    Raises:
        ValueError: a line does not have the format.
    """
    history = History()
    calls: dict[int, Call] = {}
    for number, line in enumerate(lines, 1):
        try:
            _take(json.loads(line), history, calls)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} of the history cannot be read: {error!r}") from error
    history.calls = [calls[number] for number in sorted(calls)]
    return history


def _take(event: Json, history: History, calls: dict[int, Call]) -> None:
    kind = event.pop("event")
    if event.get("messages") is not None:
        event["messages"] = tuple(map(_body, event["messages"]))
    if kind == "means":
        history.sent[event["token"]] = event.get("messages") or ()
        if event.get("business"):
            history.business.add(event["token"])
    elif kind == "invoke":
        number, began = event.pop("call"), event.pop("at")
        calls[number] = Call(began=began, **event)
    elif kind in _RESULTS:
        call = calls[event["call"]]
        call.ended, call.result = event["at"], kind
        call.id = event.get("id", call.id)
        for name in ("code", "decision", "state"):
            setattr(call, name, event.get(name, ""))
    elif kind == "asked":
        history.asked.append(Asked(**event))
    elif kind == "note":
        history.notes.append(Note(**event))
    else:
        raise ValueError(f"unknown event {kind!r}")
