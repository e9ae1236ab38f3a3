"""The log of failures: each kind with its traceback once, a few lines, and then counts."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

INTERVAL_S = 10.0
_LINES_MAX = 10
"""In an interval; what fails further is counted."""
_KINDS_MAX = 10
"""That are counted apart in an interval."""
_SEEN_MAX = 1000
_TEXT_MAX, _TRACEBACK_MAX = 300, 10_000
_OTHERS = "errors of further kinds"


Write: TypeAlias = Callable[..., Any]
"""A method of a logger of structlog, such as `log.warning`."""


class _Counted:
    """Failures of one kind in an interval that have no line."""

    def __init__(self, write: Write, event: str) -> None:
        self.write = write
        self.event = event
        self.count = 0
        self.last: dict[str, Any] = {}


class FailureLines:
    """Writes errors of user code to the log of the user's process, with their texts.

    Thousands of keys may fail at the same time: an interval has at most `_LINES_MAX` lines, and at
    its end one for each kind of the other errors. A kind is a type and the place that raised it;
    its first line has the traceback.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, None] = {}
        self._lines = 0
        self._counted: dict[Hashable, _Counted] = {}
        self._end: asyncio.TimerHandle | None = None

    def note(self, write: Write, event: str, *, error: BaseException, **fields: Any) -> None:
        """Log an error, or count it.

        Args:
            write: logs the line.
        """
        if self._end is None:
            self._lines = 0
            self._end = asyncio.get_running_loop().call_later(INTERVAL_S, self.flush)
        kind = (event, type(error), _place(error))
        fields = {**fields, "error": error_text(error)}
        if self._lines < _LINES_MAX:
            self._lines += 1
            if kind not in self._seen:
                if len(self._seen) >= _SEEN_MAX:
                    self._seen.clear()
                self._seen[kind] = None
                fields["exception"] = _traceback(error)
            write(event, **fields)
            return
        if kind not in self._counted and len(self._counted) >= _KINDS_MAX:
            kind, fields = (event, BaseException, ""), {**fields, "error": _OTHERS}
        counted = self._counted.setdefault(kind, _Counted(write, event))
        counted.count += 1
        counted.last = fields

    def flush(self) -> None:
        """Log the counts; an interval begins with the next error."""
        if self._end is not None:
            self._end.cancel()
            self._end = None
        counted, self._counted = self._counted, {}
        for each in counted.values():
            each.write(each.event, more=each.count, **each.last)


def error_text(error: BaseException) -> str:
    """Return the type and text of an error, on one line, also of one whose text cannot be made."""
    lines = traceback.TracebackException(type(error), error, None).format_exception_only()
    text = " ".join("".join(lines).split())
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]} …"


def _traceback(error: BaseException) -> str:
    text = "".join(traceback.TracebackException.from_exception(error).format()).rstrip()
    return text if len(text) <= _TRACEBACK_MAX else f"… {text[-_TRACEBACK_MAX:]}"


def _place(error: BaseException) -> Hashable:
    """Return where an error was raised."""
    found = error.__traceback__
    while found is not None and found.tb_next is not None:
        found = found.tb_next
    return (found.tb_frame.f_code.co_filename, found.tb_lineno) if found is not None else ""
