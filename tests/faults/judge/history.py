"""The history of a run: calls with their answers, check-backs, faults."""

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
        token: the client's name for its transaction.
        began, ended: seconds since 1970, by the client's clock; `ended` is 0 without an answer.
        result: invoke (no answer), ok, fail (certainly not done) or unknown.
        code: of the answered error.
        decision: the answered decision.
        state: the answered state.
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


# --- as lines of JSON ------------------------------------------------------------------------


def bytes_out(data: bytes | None) -> Any:
    """Return bytes as text if they are UTF-8, otherwise as `{"base64": …}`."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def bytes_in(encoded: Any) -> bytes | None:
    """Return the bytes that `bytes_out` encoded."""
    if encoded is None:
        return None
    if isinstance(encoded, dict):
        return base64.b64decode(encoded["base64"])
    return str(encoded).encode()


def headers_out(headers: Sequence[Header]) -> list[list[Any]]:
    """Return headers as JSON values."""
    return [[name, bytes_out(value)] for name, value in headers]


def headers_in(encoded: Sequence[Sequence[Any]]) -> tuple[Header, ...]:
    """Return the headers that `headers_out` encoded."""
    return tuple((str(name), bytes_in(value)) for name, value in encoded)


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


def _bodies_in(encoded: Sequence[Json]) -> tuple[Body, ...]:
    return tuple(
        Body(
            each["topic"],
            bytes_in(each.get("key")),
            bytes_in(each.get("value")),
            headers_in(each.get("headers", [])),
            each.get("timestamp_ms"),
        )
        for each in encoded
    )


def lines_of(history: History) -> list[str]:
    """Return a history as lines of JSON by time; the intentions of the clients come first."""
    intentions = [
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
    return [json.dumps(event) for event in [*intentions, *events]]


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
        given = {name: value for name, value in answer.items() if value}
        yield {"event": call.result, "at": call.ended, "call": number, **given}


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
