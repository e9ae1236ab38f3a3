"""What clients did: every call as it was sent and answered, every check-back, every disturbance."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .records import Header

RESULTS = ("ok", "fail", "unknown")
Json = dict[str, Any]


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
        token: what the client calls its transaction.
        began, ended: seconds since 1970, by the client's clock; `ended` 0: never answered.
        result: invoke (never answered), ok, fail (certainly not done) or unknown.
        code: of the error that was answered.
        decision: the standing decision that was answered.
        state: the state that was answered.
        messages: what the call sent, where it sent messages.
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
    """A check-back that a client got, and its answer.

    `attempt` is what the question said of itself; 0: not written down.
    """

    id: str
    at: float
    answer: str
    attempt: int = 0
    messages: tuple[Body, ...] | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """What else happened: a fault; `healed`: the last fault is over; `quiet`: all is settled."""

    at: float
    what: str
    who: str = ""


@dataclass
class History:
    """What clients did. A token names what one client meant; the header `token` of its messages
    carries it. `business`: tokens whose local transaction writes a row with the id."""

    sent: dict[str, tuple[Body, ...]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    business: set[str] = field(default_factory=set)
    notes: list[Note] = field(default_factory=list)


# --- as lines of JSON ------------------------------------------------------------------------


def bytes_out(data: bytes | None) -> Any:
    """Return bytes as text where they are UTF-8, else in base64, marked as such."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def bytes_in(found: Any) -> bytes | None:
    """Return what `bytes_out` was given."""
    if found is None:
        return None
    return base64.b64decode(found["base64"]) if isinstance(found, dict) else str(found).encode()


def headers_out(headers: Sequence[Header]) -> list[list[Any]]:
    """Return headers as JSON has them."""
    return [[name, bytes_out(value)] for name, value in headers]


def headers_in(found: Sequence[Sequence[Any]]) -> tuple[Header, ...]:
    """Return what `headers_out` was given."""
    return tuple((str(name), bytes_in(value)) for name, value in found)


def _bodies_out(bodies: Sequence[Body]) -> list[Json]:
    return [
        {
            "topic": body.topic,
            "key": bytes_out(body.key),
            "value": bytes_out(body.value),
            "headers": headers_out(body.headers),
            "timestamp_ms": body.timestamp_ms,
        }
        for body in bodies
    ]


def _bodies_in(found: Sequence[Json]) -> tuple[Body, ...]:
    return tuple(
        Body(
            each["topic"],
            bytes_in(each.get("key")),
            bytes_in(each.get("value")),
            headers_in(each.get("headers", [])),
            each.get("timestamp_ms"),
        )
        for each in found
    )


def lines_of(history: History) -> list[str]:
    """Return a history as lines of JSON, in the order of time; what clients meant comes first."""
    meant = [
        {
            "event": "means",
            "token": token,
            "business": token in history.business,
            "messages": _bodies_out(bodies),
        }
        for token, bodies in history.sent.items()
    ]
    events: list[Json] = []
    for number, call in enumerate(history.calls):
        events += _call_out(number, call)
    for asked in history.asked:
        event: Json = {
            "event": "asked",
            "at": asked.at,
            "id": asked.id,
            "answer": asked.answer,
            "attempt": asked.attempt,
        }
        if asked.messages is not None:
            event["messages"] = _bodies_out(asked.messages)
        events.append(event)
    events += [
        {"event": "note", "at": note.at, "what": note.what, "who": note.who}
        for note in history.notes
    ]
    events.sort(key=lambda event: event["at"])
    return [json.dumps(event) for event in [*meant, *events]]


def _call_out(number: int, call: Call) -> Iterator[Json]:
    first: Json = {
        "event": "invoke",
        "at": call.began,
        "call": number,
        "what": call.what,
        "token": call.token,
        "id": call.id if call.what != "prepare" else "",
    }
    if call.messages is not None:
        first["messages"] = _bodies_out(call.messages)
    yield first
    if call.result in RESULTS:
        answer = {name: getattr(call, name) for name in ("id", "code", "decision", "state")}
        said = {name: value for name, value in answer.items() if value}
        yield {"event": call.result, "at": call.ended, "call": number, **said}


def read_lines(lines: Iterable[str]) -> History:
    """Return the history that lines of JSON tell.

    Raises:
        ValueError: a line is none of the format.
    """
    history = History()
    calls: dict[int, Call] = {}
    for number, line in enumerate(lines, 1):
        try:
            _take(json.loads(line), history, calls)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number} is no line of a history: {error!r}") from error
    history.calls = [calls[number] for number in sorted(calls)]
    return history


def _take(event: Json, history: History, calls: dict[int, Call]) -> None:
    kind = event["event"]
    messages = None if event.get("messages") is None else _bodies_in(event["messages"])
    if kind == "means":
        history.sent[event["token"]] = messages or ()
        if event.get("business"):
            history.business.add(event["token"])
    elif kind == "invoke":
        calls[event["call"]] = Call(
            event["what"],
            event["token"],
            event["at"],
            event.get("id", ""),
            messages=messages,
        )
    elif kind in RESULTS:
        call = calls[event["call"]]
        call.ended, call.result = event["at"], kind
        call.id = event.get("id", call.id)
        for name in ("code", "decision", "state"):
            setattr(call, name, event.get(name, ""))
    elif kind == "asked":
        history.asked.append(
            Asked(event["id"], event["at"], event["answer"], event.get("attempt", 0), messages)
        )
    elif kind == "note":
        history.notes.append(Note(event["at"], event["what"], event.get("who", "")))
    else:
        raise ValueError(f"unknown event {kind!r}")
