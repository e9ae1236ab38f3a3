"""Spans through OpenTelemetry, if it is installed and a tracer provider is set; else nothing.

Spans belong to the provider that the process has set, see docs/how-to/tracing.md. Names and
attributes follow OpenTelemetry's semantic conventions for messaging where these apply.
"""

import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct, structs

import txbroker
from txbroker.core.records import PARENT_HEADER, STATE_HEADER, TRACE_HEADERS, Header, Message
from txbroker.errors import RequestError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

try:
    from opentelemetry import trace as _trace
    from opentelemetry.context import Context as _Context
    from opentelemetry.context import get_current as _current
except ImportError:  # the extra `tracing` is not installed
    _INSTALLED = False
else:
    _INSTALLED = True

LOOK_S = 1.0
"""The time between two searches for a provider while there is none: a search takes a microsecond,
and each transaction has several spans."""

Attributes: TypeAlias = Mapping[str, "str | int | bool"]

SYSTEM = "messaging.system"
OPERATION = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
PARTITION = "messaging.destination.partition.id"
COUNT = "messaging.batch.message_count"
OFFSET = "messaging.kafka.offset"
ERROR = "error.type"
ID = "txbroker.transaction.id"
GROUP = "txbroker.group"
DECISION = "txbroker.decision"
ATTEMPT = "txbroker.check.attempt"
OUTCOME = "txbroker.check.outcome"

_log = logging.getLogger("txbroker.tracing")
_OFF: AbstractContextManager[None] = nullcontext()
_found: "Tracer | None" = None
active = False
"""Whether the last search found a tracer provider. Proxies search at their start and a few times a
second; this spares them a call for each span."""
_looked_s = -LOOK_S


def _tracer() -> "Tracer | None":
    """Return the tracer of the process's provider, None while there is none."""
    if _found is None and _INSTALLED and time.monotonic() - _looked_s >= LOOK_S:
        look_again()
    return _found


def look() -> None:
    """Search for a tracer provider, unless one is known."""
    if _found is None and _INSTALLED:
        look_again()


def look_again() -> None:
    """Search for a tracer provider now; without this call it is found within a second."""
    global _found, _looked_s, active
    provider = _trace.get_tracer_provider()
    unset = isinstance(provider, _trace.ProxyTracerProvider | _trace.NoOpTracerProvider)
    _found = None if unset else provider.get_tracer("txbroker", txbroker.__version__)
    _looked_s = time.monotonic()
    active = _found is not None


def is_on() -> bool:
    """Return whether OpenTelemetry is installed and has a tracer provider."""
    return _tracer() is not None


# --- W3C trace context -----------------------------------------------------------------------
# https://www.w3.org/TR/trace-context/: two headers that stay with a message from prepare to
# promotion. Plain ASCII, so they can be headers of HTTP calls too.

STATE_CHARS_MAX = 512
"""The length that W3C requires every participant to propagate; a longer one is dropped."""

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_STATE = re.compile(rf"[\x20-\x7e]{{1,{STATE_CHARS_MAX}}}")
_SAMPLED = 1


class TraceContext(Struct, frozen=True):
    """A W3C trace context.

    Attributes:
        parent: a valid `traceparent` of version 00.
        state: its `tracestate`, "" for none.
    """

    parent: str
    state: str = ""

    @property
    def sampled(self) -> bool:
        """Whether the trace is recorded."""
        return bool(int(self.parent[-2:], 16) & _SAMPLED)

    @property
    def trace_id(self) -> int:
        """The trace id."""
        return int(self.parent[3:35], 16)

    @property
    def span_id(self) -> int:
        """The span id."""
        return int(self.parent[36:52], 16)

    def headers(self) -> list[tuple[str, str]]:
        """Return it as headers."""
        pairs = [(PARENT_HEADER, self.parent)]
        return [*pairs, (STATE_HEADER, self.state)] if self.state else pairs


def read_context(parent: str, state: str = "") -> TraceContext | None:
    """Return the context in two headers; None if invalid.

    A `traceparent` of a later version is parsed as far as version 00, as W3C requires.
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
    """Return the context of a transaction: the first one among its messages."""
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
    """Return messages with a context; those that have one keep it."""
    added = tuple((name, value.encode()) for name, value in context.headers())
    return tuple(
        message if _has_own(message) else structs.replace(message, headers=message.headers + added)
        for message in messages
    )


def carried_over(prepared: Sequence[Message], final: Sequence[Message]) -> tuple[Message, ...]:
    """Return final messages with the contexts of the prepared ones; those that have one keep it."""
    return tuple(
        new if _has_own(new) else structs.replace(new, headers=new.headers + _ours(old))
        for old, new in zip(prepared, final, strict=True)
    )


def _ours(message: Message) -> tuple[Header, ...]:
    if not _has_own(message):
        return ()
    return tuple(header for header in message.headers if header[0] in TRACE_HEADERS)


def _has_own(message: Message) -> bool:
    return any(name == PARENT_HEADER for name, _ in message.headers)


# --- contexts --------------------------------------------------------------------------------


def current_context() -> TraceContext | None:
    """Return the context of the current span; None without one or without tracing."""
    return None if _tracer() is None else _context_of_span(_trace.get_current_span())


def incoming(headers: Mapping[str, str]) -> TraceContext | None:
    """Return the context in an HTTP call's headers; None without one or without tracing."""
    parent = headers.get(PARENT_HEADER)
    if parent is None or _tracer() is None:
        return None
    return read_context(parent, headers.get(STATE_HEADER, ""))


def _context_of_span(span: "Span") -> TraceContext | None:
    found = span.get_span_context()
    if not found.is_valid:
        return None
    parent = f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"
    return TraceContext(parent, found.trace_state.to_header() if found.trace_state else "")


def _below(parent: TraceContext | None) -> "_Context":
    """Return a context in which a span continues `parent`, or else the current span."""
    if parent is None:
        return _current()
    state = _trace.TraceState.from_header([parent.state]) if parent.state else None
    found = _trace.SpanContext(
        parent.trace_id,
        parent.span_id,
        is_remote=True,
        trace_flags=_trace.TraceFlags(int(parent.parent[-2:], 16)),
        trace_state=state,
    )
    return _trace.set_span_in_context(_trace.NonRecordingSpan(found), _Context())


# --- spans -----------------------------------------------------------------------------------


class ActiveSpan:
    """A span in progress."""

    def __init__(self, span: "Span") -> None:
        self._span = span
        self.context = _context_of_span(span)

    def note(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(dict(attributes))

    def failed(self, kind: str) -> None:
        """Mark the span as failed, with an error code or an exception's type."""
        self._span.set_attribute(ERROR, kind)
        self._span.set_status(_trace.StatusCode.ERROR)


def step(
    operation: str,
    messages: Sequence[Message],
    attributes: Attributes,
    *,
    kind: str = "internal",
    parent: TraceContext | None = None,
    current: bool = False,
) -> "AbstractContextManager[ActiveSpan | None]":
    """Return a context manager with a span; its value is None without tracing.

    Args:
        operation: for example `prepare`.
        messages: of the operation; they give the topic and count.
        attributes: further attributes.
        kind: `producer`, `consumer`, `client`, `server` or `internal`.
        parent: the context that it continues; None: the current span.
        current: whether it is the current span inside the block.
    """
    span = _begun(operation, messages, attributes, kind, parent)
    return _OFF if span is None else _within(span, current=current)


def continued(
    operation: str,
    messages: Sequence[Message],
    attributes: Attributes,
    *,
    kind: str = "internal",
    parent: TraceContext | None,
) -> "AbstractContextManager[ActiveSpan | None]":
    """Return a span like `step`, if there is a sampled trace to continue: proxies begin none."""
    if parent is None or not parent.sampled:
        return _OFF
    return step(operation, messages, attributes, kind=kind, parent=parent)


@contextmanager
def _within(span: "Span", *, current: bool) -> Iterator[ActiveSpan]:
    begun = ActiveSpan(span)
    try:
        if current:
            with _trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield begun
        else:
            yield begun
    except BaseException as error:
        # Not its text, which can quote a message.
        begun.failed(error.code if isinstance(error, RequestError) else type(error).__name__)
        raise
    finally:
        _end(span)


def _begun(
    operation: str,
    messages: Sequence[Message],
    attributes: Attributes,
    kind: str,
    parent: TraceContext | None,
    since_ns: int | None = None,
) -> "Span | None":
    """Begin a span; None without a provider or if it fails, which must not fail the operation."""
    tracer = _tracer()
    if tracer is None:
        return None
    name, known = _named(operation, messages)
    try:
        return tracer.start_span(
            name,
            context=_below(parent),
            kind=_trace.SpanKind[kind.upper()],
            attributes={**known, **attributes},
            start_time=since_ns,
        )
    except Exception as error:
        _complain(type(error).__name__)
        return None


def _end(span: "Span") -> None:
    try:
        span.end()
    except Exception as error:
        _complain(type(error).__name__)


@cache
def _complain(what: str) -> None:
    """Log it once, not for each span."""
    _log.warning("spans are lost: the tracer provider fails with %s", what)


def record(
    operation: str,
    messages: Sequence[Message],
    attributes: Attributes,
    *,
    kind: str,
    parent: TraceContext,
    since_ns: int,
    failed: str = "",
) -> None:
    """Record a span that has ended; it began at `since_ns`, ns since 1970."""
    span = _begun(operation, messages, attributes, kind, parent, since_ns)
    if span is not None:
        if failed:
            ActiveSpan(span).failed(failed)
        _end(span)


def _named(operation: str, messages: Sequence[Message]) -> tuple[str, dict[str, str | int | bool]]:
    """Return a span's name and attributes. Several topics are left out: names must be few."""
    known: dict[str, str | int | bool] = {SYSTEM: "txbroker", OPERATION: operation}
    topics = {message.topic for message in messages}
    if len(messages) > 1:
        known[COUNT] = len(messages)
    if len(topics) != 1:
        return operation, known
    known[DESTINATION] = topic = next(iter(topics))
    return f"{operation} {topic}", known


def sampled_context(messages: Iterable[Message]) -> TraceContext | None:
    """Return the context of messages of a sampled trace; None without one or without tracing."""
    if _tracer() is None:
        return None
    found = context_of(messages)
    return found if found is not None and found.sampled else None
