"""Progress of downloads."""

from __future__ import annotations

from typing import Protocol

from rich import progress as bars
from rich.console import Console


class Progress(Protocol):
    """Receives the progress of a download, from the starting thread except for `advance`."""

    def begin(self, what: str, total_bytes: int) -> None:
        """A download of `total_bytes` begins; `what` describes it."""

    def advance(self, n_bytes: int) -> None:
        """`n_bytes` more have arrived (negative before a retry); from any thread."""

    def end(self) -> None:
        """The download has ended or failed."""


class SilentProgress:
    """Shows nothing."""

    def begin(self, what: str, total_bytes: int) -> None:
        """Ignore it."""

    def advance(self, n_bytes: int) -> None:
        """Ignore it."""

    def end(self) -> None:
        """Ignore it."""


class BarProgress:
    """A progress bar on stderr, drawn only while something is downloaded."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: bars.Progress | None = None
        self._task = bars.TaskID(0)

    def begin(self, what: str, total_bytes: int) -> None:
        """Draw the bar."""
        self._bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(),
            bars.TransferSpeedColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task(what, total=total_bytes)
        self._bar.start()

    def advance(self, n_bytes: int) -> None:
        """Move the bar."""
        if self._bar is not None:
            self._bar.advance(self._task, n_bytes)

    def end(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
