"""Log lines on stderr: one per event that matters, none per message, never a secret.

docs/reference/logs.md lists every event, its fields and what to do about it. At most a number of
lines of each kind is written per window, then a count of the rest: during an incident an event can
occur once for each of a hundred thousand transactions. The first lines show its nature; metrics and
`txbroker tx list` show the transactions."""

import atexit
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol, TextIO

import structlog

LINES_MAX = 20
"""Lines of one kind within a window: enough to see what they have in common."""
WINDOW_S = 10.0
"""Length of a window, seconds: on average at most two lines a second of each kind."""


class LogTimer(Protocol):
    """Calls a function once, later."""

    def start(self) -> None:
        """Begin to wait."""


def _thread_timer(delay_s: float, then: Callable[[], None]) -> LogTimer:
    timer = threading.Timer(delay_s, then)
    timer.daemon = True
    return timer


class _Window:
    __slots__ = ("admitted", "left_out", "partitions", "since_s")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.admitted = 0
        self.left_out = 0
        self.partitions: set[int] = set()

    def takes(self, lines_max: int, partition: int | None) -> bool:
        takes = self.admitted < lines_max
        if partition is not None and partition not in self.partitions:
            self.partitions.add(partition)
            takes = True
        if takes:
            self.admitted += 1
        else:
            self.left_out += 1
        return takes


class LineBounds:
    """Decides which lines are written, and reports how many were suppressed.

    A kind is one of a small set of texts, such as the names of events, as all are kept in memory.

    Args:
        report: called with a kind and its number of suppressed lines, at the end of its window.
        lines_max, window_s: see the constants.
        now_s: a monotonic clock.
        later: returns a timer that calls a function once, after a delay in seconds.
    """

    def __init__(
        self,
        report: Callable[[str, int], None],
        *,
        lines_max: int = LINES_MAX,
        window_s: float = WINDOW_S,
        now_s: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], LogTimer] = _thread_timer,
    ) -> None:
        self._report = report
        self._lines_max = lines_max
        self._window_s = window_s
        self._now_s = now_s
        self._later = later
        # Lines come from threads as well.
        self._lock = threading.Lock()
        self._windows: dict[str, _Window] = {}
        self._waiting = False

    def admit(self, kind: str, partition: int | None = None) -> bool:
        """Return whether a line of this kind may be written.

        Args:
            partition: the half partition that it concerns. The first line of each partition is
                always written, as partitions fail independently.
        """
        now_s = self._now_s()
        begun: _Window | None = None
        with self._lock:
            window = self._windows.get(kind)
            if window is None or now_s - window.since_s >= self._window_s:
                begun, window = window, _Window(now_s)
                self._windows[kind] = window
            admitted = window.takes(self._lines_max, partition)
            waits = not admitted and not self._waiting
            self._waiting = self._waiting or waits
        if begun is not None and begun.left_out:
            self._report(kind, begun.left_out)
        if waits:
            self._later(self._window_s, self._look).start()
        return admitted

    def flush(self) -> None:
        """Report all suppressed lines at once, as at the end of the process."""
        self._report_all(lambda window: True)

    def _look(self) -> None:
        now_s = self._now_s()
        self._report_all(lambda window: now_s - window.since_s >= self._window_s)
        with self._lock:
            self._waiting = any(window.left_out for window in self._windows.values())
            waits = self._waiting
        if waits:
            self._later(self._window_s, self._look).start()

    def _report_all(self, over: Callable[[_Window], bool]) -> None:
        with self._lock:
            suppressed: Iterable[tuple[str, int]] = [
                (kind, window.left_out)
                for kind, window in self._windows.items()
                if window.left_out and over(window)
            ]
            for kind, _ in suppressed:
                del self._windows[kind]
        for kind, count in suppressed:
            self._report(kind, count)


_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}
# Values of keys with such a name are never logged.
_SECRET_WORDS = ("password", "secret", "token", "authorization", "signature")
_MARGIN = "    | "
"""Prefix of each line of a traceback for people, so that none can pass for a log line."""
_LEFT_OUT = "lines left out"
_bounds: LineBounds | None = None

EventDict = structlog.typing.EventDict


# --- content ---------------------------------------------------------------------------------


def hide_secrets(_: Any, __: str, event: EventDict) -> EventDict:
    """Mask the values of keys that name a secret; the path of a secret's file is not masked."""
    for key in event:
        name = key.lower()
        if any(word in name for word in _SECRET_WORDS) and not name.endswith(("_file", "_ref")):
            event[key] = "***"
    return event


def printable(text: str) -> str:
    """Return text with control characters, bidirectional marks and line ends escaped as in
    Python."""
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else repr(c)[1:-1] for c in text])


def make_harmless(_: Any, __: str, event: EventDict) -> EventDict:
    """Make the texts of a line for people printable: clients choose names and reasons. Other
    values are shown by `repr`, which escapes them."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = printable(value)
    return event


def _plain_traceback(out: TextIO, error: structlog.typing.ExcInfo) -> None:
    """Write a traceback without the values of variables, which may be bodies or secrets."""
    for part in traceback.format_exception(*error):
        for line in part.splitlines():
            out.write(f"\n{_MARGIN}{printable(line)}")


def _naming(worker: int) -> structlog.typing.Processor:
    def name(_: Any, __: str, event: EventDict) -> EventDict:
        return {**event, "worker": worker}

    return name


# --- rate limit ------------------------------------------------------------------------------


def _limit(_: Any, __: str, event: EventDict) -> EventDict:
    """Drop our lines of a kind above its rate limit."""
    kind = str(event["event"])
    # Lines that report suppressed ones are few.
    if kind != _LEFT_OUT and _bounds is not None:
        partition = event.get("partition")
        if not _bounds.admit(kind, partition if isinstance(partition, int) else None):
            raise structlog.DropEvent
    return event


def _limit_library(record: logging.LogRecord) -> bool:
    ours = isinstance(record.msg, dict)
    return ours or _bounds is None or _bounds.admit(f"logger {record.name}")


def _report_left_out(kind: str, count: int) -> None:
    log.warning("lines left out", of=kind, count=count, seconds=round(WINDOW_S))


def _begin_bounds() -> None:
    global _bounds
    if _bounds is None:
        atexit.register(flush_lines)
    _bounds = LineBounds(_report_left_out)


def flush_lines() -> None:
    if _bounds is not None:
        _bounds.flush()


# --- configuration ---------------------------------------------------------------------------


def configure_logging(
    style: Literal["auto", "console", "json"] = "auto", level: str = "info", *, worker: int = 0
) -> None:
    """Send every log line of the process to stderr, those of libraries too.

    Args:
        style: `console` for people, `json` for machines; `auto`: `console` if stderr is a terminal.
        level: the lowest level shown.
        worker: number of this proxy among those of one command, added to each line; 0 for one.
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
            _limit,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_limit_library)
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
    # Libraries log every retry at info; our own events cover those that matter.
    for name in ("aiohttp", "aiokafka", "asyncio"):
        logging.getLogger(name).setLevel(max(_LEVELS[level], logging.WARNING))


def _for_people() -> list[structlog.typing.Processor]:
    render = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=_plain_traceback
    )
    return [make_harmless, render]


def _for_machines() -> list[structlog.typing.Processor]:
    # Without the values of variables, as above.
    frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [
        structlog.processors.ExceptionRenderer(frames),
        structlog.processors.JSONRenderer(),
    ]


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of a module; its lines carry the module's name.

    Without `configure_logging`, as in a service's own tests with a broker in memory, lines go to
    Python's loggers: structlog itself would print them into the program's output.
    """
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(logging.getLogger(name))
    return logger


log = get_logger(__name__)
