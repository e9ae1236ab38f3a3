"""A reader of the targets that reads along while everything happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from tests.faults.judge import Seen
from tests.kit.topic_reader import assigned, record_of

_END_S = 30.0
_POLL_S = 0.1


class Along:
    """Reads as a consumer does that is there all the time: read_committed, and assigned."""

    def __init__(self, bootstrap: str, topics: Sequence[str]) -> None:
        self._consumer, _ = assigned(bootstrap, topics)
        self._seen: list[Seen] = []
        self._over = threading.Event()
        self._wrong: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._over.is_set():
            message = self._consumer.poll(_POLL_S)
            if message is None:
                continue
            error = message.error()
            if error is None:
                self._seen.append(Seen(record_of(message), time.time()))
            elif error.fatal():
                self._wrong.append(str(error))

    def read_to(self) -> dict[tuple[str, int], int]:
        """Return the offset after the last record read, for each partition."""
        found: dict[tuple[str, int], int] = {}
        for seen in tuple(self._seen):
            record = seen.record
            found[record.topic, record.partition] = record.offset + 1
        return found

    def end(self) -> list[Seen]:
        self._over.set()
        self._thread.join(_END_S)
        # The client library does not always return from this after broken connections.
        closing = threading.Thread(target=self._consumer.close, daemon=True)
        closing.start()
        closing.join(_END_S)
        assert not self._wrong, self._wrong
        return self._seen
