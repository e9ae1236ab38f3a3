"""Starts of a partition's owners that ended without a release, as a killed process does.

One of the messages that such an owner had in hand may have ended its process. From the second start
in a row on, one message is handled at a time, and noted in the stored position before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import structs

from txbroker.core.consuming.position import NO_STARTS, Starts

_FREE = 1
"""Starts without a release and without progress, before messages are handled alone."""


class StartCount:
    """The starts of one partition, with that of its present owner.

    Args:
        stored: as the position holds them.

    Attributes:
        value: to be stored.
        is_suspect: a message may end the process: one is handled at a time, and noted before in the
            stored position, so that the next owner knows it.
        exits: a handler wants the process to end: that counts as a killed one.
    """

    def __init__(self, stored: Starts = NO_STARTS) -> None:
        self.value = self._before = stored
        self.is_suspect = False
        self.exits = False
        self._until = 0
        """The low-water mark at which they no longer count."""
        self._left = 0
        """The number of messages to handle alone."""
        self._ended: Any = None
        """A message whose handler ended the process of an owner before; it is not done."""

    def begin(self, low: int, end: int, messages_max: int, *, again: bool) -> None:
        """Count this start, until the partition is released or messages are done.

        Args:
            low: the low-water mark.
            end: of the partition.
            messages_max: that owners before may have had in hand.
            again: the stored count has it, though no message was handed out.
        """
        if low >= end:
            return
        self.value = structs.replace(self._before, count=self._before.count + (not again))
        self._left = messages_max
        self.is_suspect = self.value.count > _FREE
        self._until = min(end, low + messages_max) if self.is_suspect else low + 1

    def take_ended(self, message: Any) -> bool:
        """Return True once if the process ended while an owner before handled this message."""
        if self._ended is not None or self.value.offset != message.record.offset:
            return False
        self._ended = message
        message.failures = self.value.failures
        message.attempt += message.failures
        return True

    def begin_alone(self, message: Any) -> None:
        """Note the message that is handled alone."""
        self.value = Starts(self.value.count, message.record.offset, message.failures)

    def end_alone(self) -> None:
        """No message is handled alone now."""
        if self.exits:
            return
        self._left -= 1
        # It may end the process again before it is handled alone again.
        count, ended = self.value.count, self._ended
        self.value = Starts(count)
        if ended is not None:
            self.value = Starts(count, ended.record.offset, ended.failures - 1)

    def release(self) -> bool:
        """This owner releases the partition: its start does not count. Return whether that has to
        be stored."""
        if self.exits:
            return False
        count = self.value.count
        self.value = structs.replace(self.value, count=min(count, self._before.count))
        return count > self._before.count

    def forget(self, low: int, is_done: Callable[[int], bool]) -> None:
        """Count no starts before messages that are done.

        Args:
            low: the low-water mark.
            is_done: returns whether an offset is done.
        """
        if not self.value.count:
            return
        if self._ended is not None and is_done(self._ended.record.offset):
            self._ended, self.value = None, Starts(self.value.count)
        if (low >= self._until or self._left <= 0) and self._ended is None:
            self.value = self._before = NO_STARTS
            self.is_suspect = False
