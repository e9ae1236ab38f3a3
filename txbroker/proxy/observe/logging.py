"""Log lines on stderr: one for an event that matters, none for a message, never a secret.

docs/reference/logs.md lists every event, its fields and what to do about it.
"""

import atexit
import logging
import sys
import traceback
from typing import Any, Literal, TextIO

import structlog

from txbroker.proxy.observe.line_bounds import WINDOW_S, LineBounds

_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
# Whatever a key with such a name holds, it is not for the log.
_SECRET_WORDS = ("password", "secret", "token", "authorization", "signature")
_MARGIN = "    | "
"""Before each line of a traceback for people: nothing in it can pass for a line of the log."""
_LEFT_OUT = "lines left out"
_bounds: LineBounds | None = None

EventDict = structlog.typing.EventDict


# --- what may be told ------------------------------------------------------------------------


def hide_secrets(_: Any, __: str, event: EventDict) -> EventDict:
    """Replace the values of keys that name a secret; files that hold one may be named."""
    for key in event:
        name = key.lower()
        if any(word in name for word in _SECRET_WORDS) and not name.endswith(("_file", "_ref")):
            event[key] = "***"
    return event


def printable(text: str) -> str:
    """Return text in which no character moves a terminal's cursor, turns the writing round or
    ends the line: such ones are escaped as Python does it."""
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else repr(c)[1:-1] for c in text])


def make_harmless(_: Any, __: str, event: EventDict) -> EventDict:
    """Make the texts of a line for people printable: names and reasons are other people's. What
    is no text is shown as Python's `repr` does it, which escapes by itself."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = printable(value)
    return event


def _plain_traceback(out: TextIO, error: structlog.typing.ExcInfo) -> None:
    """Write a traceback without the values of variables: bodies and secrets are among them."""
    for part in traceback.format_exception(*error):
        for line in part.splitlines():
            out.write(f"\n{_MARGIN}{printable(line)}")


def _naming(worker: int) -> structlog.typing.Processor:
    """Return what adds to each line of which worker it is."""

    def name(_: Any, __: str, event: EventDict) -> EventDict:
        return {**event, "worker": worker}

    return name


# --- how many lines --------------------------------------------------------------------------


def _leave_out(_: Any, __: str, event: EventDict) -> EventDict:
    """Drop our lines of a kind of which there were too many of late."""
    kind = str(event["event"])
    # Those that tell of the others are few.
    if kind != _LEFT_OUT and _bounds is not None:
        partition = event.get("partition")
        if not _bounds.admit(kind, partition if isinstance(partition, int) else None):
            raise structlog.DropEvent
    return event


def _few_of_a_library(record: logging.LogRecord) -> bool:
    """Drop lines of a library that has written too many of late; ours were looked at."""
    ours = isinstance(record.msg, dict)
    return ours or _bounds is None or _bounds.admit(f"logger {record.name}")


def _tell_left_out(kind: str, count: int) -> None:
    log.warning("lines left out", of=kind, count=count, seconds=round(WINDOW_S))


def _begin_bounds() -> None:
    global _bounds
    if _bounds is None:
        atexit.register(flush_lines)
    _bounds = LineBounds(_tell_left_out)


def flush_lines() -> None:
    """Tell at once of lines that were left out so far."""
    if _bounds is not None:
        _bounds.flush()


# --- putting it together ---------------------------------------------------------------------


def configure_logging(
    style: Literal["auto", "console", "json"] = "auto", level: str = "info", *, worker: int = 0
) -> None:
    """Send every log line of the process to stderr, structlog's and the libraries' alike.

    Args:
        style: `console` for people, `json` for machines; `auto` looks whether a person watches.
        level: the least important lines to show.
        worker: which of several proxies of one command this is, told in each line; 0: it is alone.
    """
    _begin_bounds()
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        *([_naming(worker)] if worker else []),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        hide_secrets,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            _leave_out,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_few_of_a_library)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *(_for_people() if console else _for_machines()),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    # Libraries tell every retry at info; what matters of it we say ourselves.
    for name in ("aiohttp", "aiokafka", "asyncio"):
        logging.getLogger(name).setLevel(max(_LEVELS[level], logging.WARNING))


def _for_people() -> list[structlog.typing.Processor]:
    render = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=_plain_traceback
    )
    return [make_harmless, render]


def _for_machines() -> list[structlog.typing.Processor]:
    # Without the values of variables, like above.
    frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        structlog.processors.ExceptionRenderer(frames),
        structlog.processors.JSONRenderer(),
    ]


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of a module; its lines carry the module's name.

    Where nobody has configured logging, as in a service's own tests with a broker in memory, lines
    go to Python's loggers: structlog itself would print them among the output of the program.
    """
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(logging.getLogger(name))
    return logger


log = get_logger(__name__)
