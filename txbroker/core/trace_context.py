"""The W3C trace context of a message: two of its headers, kept with it from prepare to promotion.

https://www.w3.org/TR/trace-context/: `traceparent` names the trace and the step within it,
`tracestate` what vendors add. Both are plain ASCII, so they can be headers of HTTP calls too.
"""

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct, structs

from txbroker.core.records import Header, Message

PARENT_HEADER = "traceparent"
STATE_HEADER = "tracestate"
HEADERS = frozenset({PARENT_HEADER, STATE_HEADER})
STATE_CHARS_MAX = 512
"""What W3C asks everybody to carry; a longer one is left out."""

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_STATE = re.compile(rf"[\x20-\x7e]{{1,{STATE_CHARS_MAX}}}")
_SAMPLED = 1


class TraceContext(Struct, frozen=True):
    """Which trace something belongs to.

    Attributes:
        parent: a valid `traceparent` of version 00.
        state: the `tracestate` that goes with it, "" for none.
    """

    parent: str
    state: str = ""

    @property
    def sampled(self) -> bool:
        """Whether whoever began the trace records it."""
        return bool(int(self.parent[-2:], 16) & _SAMPLED)

    @property
    def trace_id(self) -> int:
        """The trace's number."""
        return int(self.parent[3:35], 16)

    @property
    def span_id(self) -> int:
        """The step's number."""
        return int(self.parent[36:52], 16)

    def headers(self) -> list[tuple[str, str]]:
        """Return the headers that hold it."""
        pairs = [(PARENT_HEADER, self.parent)]
        return [*pairs, (STATE_HEADER, self.state)] if self.state else pairs


def read_context(parent: str, state: str = "") -> TraceContext | None:
    """Return the context that two headers hold; None where they hold none.

    A `traceparent` of a later version is read as far as version 00 goes, as W3C has it.
    """
    parent = parent.strip(" \t")
    found = _PARENT.match(parent)
    if found is None:
        return None
    version, trace, step, flags = found.groups()
    rest = parent[found.end() :]
    if version == "ff" or (rest if version == "00" else rest and rest[0] != "-"):
        return None
    if not (int(trace, 16) and int(step, 16)):
        return None
    state = state.strip(" \t")
    return TraceContext(f"00-{trace}-{step}-{flags}", state if _STATE.fullmatch(state) else "")


def context_of(messages: Iterable[Message]) -> TraceContext | None:
    """Return the context of a transaction: that of its first message that has one."""
    for message in messages:
        if message.headers:
            found = _of_one(message.headers)
            if found is not None:
                return found
    return None


def _of_one(headers: Sequence[Header]) -> TraceContext | None:
    parent = state = None
    for name, value in headers:
        if name == PARENT_HEADER and parent is None:
            parent = value
        elif name == STATE_HEADER and state is None:
            state = value
    if parent is None:
        return None
    return read_context(parent.decode("latin-1"), (state or b"").decode("latin-1"))


def with_context(messages: Sequence[Message], context: TraceContext) -> tuple[Message, ...]:
    """Return messages that carry a context; those that carry one of their own stay as they are."""
    added = tuple((name, value.encode()) for name, value in context.headers())
    return tuple(
        message if _has_own(message) else structs.replace(message, headers=message.headers + added)
        for message in messages
    )


def carried_over(prepared: Sequence[Message], final: Sequence[Message]) -> tuple[Message, ...]:
    """Return final messages that carry the contexts of the prepared ones that they replace; those
    that carry one of their own stay as they are."""
    return tuple(
        new if _has_own(new) else structs.replace(new, headers=new.headers + _ours(old))
        for old, new in zip(prepared, final, strict=True)
    )


def _ours(message: Message) -> tuple[Header, ...]:
    if not _has_own(message):
        return ()
    return tuple(header for header in message.headers if header[0] in HEADERS)


def _has_own(message: Message) -> bool:
    return any(name == PARENT_HEADER for name, _ in message.headers)
