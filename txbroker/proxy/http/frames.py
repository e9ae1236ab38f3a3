"""Frames on their way in, held to a bound before they are whole.

The library hands a frame out only when all of it is there, and keeps what came until then. Ten
thousand sessions with half a frame of 16 MiB each would be 80 GB, so frames are measured where
their bytes arrive: a large one is let in when all of it finds room, else its connection is not
read on until then; and one that is not whole in time ends its session.
"""

import asyncio
from collections import deque
from collections.abc import Callable

SMALL_BYTES = 16 * 1024
"""Frames up to this size need no room: so much a socket's own buffer holds as well."""

_FINAL, _OPCODE, _CONTROL = 0x80, 0x0F, 0x08
_LENGTH, _MASKED, _MASK_BYTES = 0x7F, 0x80, 4
_LENGTH_BYTES = {126: 2, 127: 8}


class Receiving:
    """Room for the frames that come in, all sessions together; who does not fit waits in turn."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[FrameMeter, int]] = deque()
        self.bytes = 0

    def take(self, meter: "FrameMeter", size: int) -> bool:
        """Take room for `size` bytes; False: not yet, `meter` is told when it has it."""
        if self._waiting or not self._fits(size):
            self._waiting.append((meter, size))
            return False
        self.bytes += size
        return True

    def release(self, size: int) -> None:
        """Give room back."""
        self.bytes -= size
        self._admit()

    def forget(self, meter: "FrameMeter") -> None:
        """Let a connection that ended wait no more."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not meter)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            meter, size = self._waiting.popleft()
            self.bytes += size
            meter.admitted(size)

    def _fits(self, size: int) -> bool:
        # One larger than everything is let in alone, so that nothing waits for ever.
        return self.bytes == 0 or self.bytes + size <= self._bytes_max


class FrameMeter:
    """Follows the frames of one connection through the bytes that arrive.

    Args:
        room: shared by all connections.
        frame_bytes_max: longer ones are refused by the library at their header.
        timeout_s: for a frame to become whole, from its first byte or from when it was let in.
        transport: of the connection, to read on or not.
        too_slow: called when the time is over.
    """

    def __init__(
        self,
        room: Receiving,
        frame_bytes_max: int,
        timeout_s: float,
        transport: asyncio.Transport,
        too_slow: Callable[[], None],
    ) -> None:
        self._room = room
        self._frame_bytes_max = frame_bytes_max
        self._timeout_s = timeout_s
        self._transport = transport
        self._too_slow = too_slow
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._header = bytearray()
        self._left = 0
        """Bytes of the frame's payload that did not come yet."""
        self._control = False
        self._final = False
        self._message = 0
        """Bytes of the message so far, with all of its last frame."""
        self._held = 0
        self._wanted = 0
        """Bytes for which this connection waits."""
        self._paused = False
        self._closed = False

    def feed(self, data: bytes) -> None:
        """Follow what arrived."""
        at, end = 0, len(data)
        while at < end:
            if self._left:
                step = min(self._left, end - at)
                self._left -= step
                at += step
                if not self._left:
                    self._frame_ended()
            else:
                self._header.append(data[at])
                at += 1
                if len(self._header) >= 2 and len(self._header) == _header_bytes(self._header[1]):
                    self._frame_begun()
        if self._wanted:
            self._paused = True
            self._transport.pause_reading()  # again: the library reads on when it likes
        elif self._left or self._header or self._message:
            self._start_timer()
        else:
            self._stop_timer()

    def admitted(self, size: int) -> None:
        """There is room: read on."""
        self._held += size
        self._wanted = 0
        self._start_timer()
        self._resume()

    def close(self) -> None:
        """The connection has ended."""
        self._closed = True
        self._stop_timer()
        if self._wanted:
            self._room.forget(self)
        held, self._held = self._held, 0
        self._room.release(held)

    def _frame_begun(self) -> None:
        header = self._header
        self._control = bool(header[0] & _CONTROL)
        self._final = bool(header[0] & _FINAL)
        width = _LENGTH_BYTES.get(header[1] & _LENGTH, 0)
        length = int.from_bytes(header[2 : 2 + width], "big") if width else header[1] & _LENGTH
        header.clear()
        self._left = length
        if not self._control:
            self._message += length
            if SMALL_BYTES < self._message <= self._frame_bytes_max:
                self._take(self._message - self._held)
        if not length:
            self._frame_ended()

    def _take(self, size: int) -> None:
        # A client that sends on while it waits has its connection read no further, but what the
        # socket had brought along is here: it is covered by what it waits for.
        if self._closed or self._wanted:
            return
        if self._room.take(self, size):
            self._held += size
        else:
            self._wanted = size
            self._stop_timer()

    def _frame_ended(self) -> None:
        if self._control or not self._final:
            return
        self._message = 0
        self._stop_timer()
        if self._wanted:
            self._wanted = 0
            self._room.forget(self)
            self._resume()
        if self._held:
            held, self._held = self._held, 0
            self._room.release(held)

    def _resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._transport.resume_reading()
        self._paused = False

    def _start_timer(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = self._loop.call_later(self._timeout_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _header_bytes(second: int) -> int:
    """Return how long a frame's header is, by its second byte."""
    mask = _MASK_BYTES if second & _MASKED else 0
    return 2 + _LENGTH_BYTES.get(second & _LENGTH, 0) + mask
