"""Counts and notes that owners make as they work, in bounded memory: transactions for rates, and
operators' actions.

An owner notes the actions that it applies, in its replay too. Those before the snapshot from which
it began are read from the operation topic when an operator wants to see them.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, MutableSequence
from typing import NamedTuple

from msgspec import Struct

from txbroker.contract.service import OperatorAction, Rates
from txbroker.core.decoding import decode_marker
from txbroker.core.records import Marker, MarkerKind, Record, Source
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import Log, LogTruncated
from txbroker.errors import KafkaUnavailable

WINDOW_S = 10.0
"""Rates are averages over about this time, seconds."""
TAKEN_MAX = 100_000
"""Transactions whose group waits to be counted: those of a second."""
ACTIONS_MAX = 1000
SAME_MS = 60_000
"""Actions on several transactions within this time are one, if all but the transaction is equal."""
LOOKED_AT = 8
"""The newest actions that another one is compared with."""
TEXT_MAX = 300
READ_S = 1.0
"""How long one view reads older records, seconds; the next one continues."""
CHUNK = 10_000
"""Records that are read at a time, backwards."""


class _Sample(NamedTuple):
    at_s: float
    prepared: int
    decided: int
    promoted: int


class RateCounter:
    """Counts the transactions of one half partition.

    Attributes:
        prepared, decided, promoted: transactions so far; the caller adds to them.
        prepared_by, decided_by, promoted_by: their groups since the last `take`; the caller
            extends them.
        lost: transactions that lost their half messages since the last `take`.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.prepared = self.decided = self.promoted = self.lost = 0
        self.prepared_by: deque[str] = deque(maxlen=TAKEN_MAX)
        self.decided_by: deque[str] = deque(maxlen=TAKEN_MAX)
        self.promoted_by: deque[str] = deque(maxlen=TAKEN_MAX)
        self._clock_s = clock_s
        self._samples: deque[_Sample] = deque([self._now()])

    def sample(self) -> None:
        now = self._now()
        self._samples.append(now)
        # The first sample kept is the last one before the window.
        while len(self._samples) > 1 and self._samples[1].at_s <= now.at_s - WINDOW_S:
            self._samples.popleft()

    def per_second(self) -> Rates:
        now = self._now()
        # Samples are late while Kafka does not answer; the newest one before the window is the
        # most accurate start.
        before = self._samples[0]
        for sample in self._samples:
            if sample.at_s > now.at_s - WINDOW_S:
                break
            before = sample
        passed_s = now.at_s - before.at_s
        if passed_s <= 0:
            return Rates()
        return Rates(
            (now.prepared - before.prepared) / passed_s,
            (now.decided - before.decided) / passed_s,
            (now.promoted - before.promoted) / passed_s,
        )

    def take(self) -> tuple[list[Counter[str]], int]:
        """Return transactions prepared, decided and promoted since the last call by group, and
        those lost."""
        queues = (self.prepared_by, self.decided_by, self.promoted_by)
        counts = [Counter(queue) for queue in queues]
        for queue in queues:
            queue.clear()
        lost, self.lost = self.lost, 0
        return counts, lost

    def _now(self) -> _Sample:
        return _Sample(self._clock_s(), self.prepared, self.decided, self.promoted)


# --- operators' actions ----------------------------------------------------------------------


class _Seen(Struct):
    """How far back the markers of a half partition were seen: from this offset, and time, ms."""

    offset: int
    at_ms: int


class OperatorActions:
    """The newest actions of operators."""

    def __init__(self) -> None:
        self._actions: deque[OperatorAction] = deque(maxlen=ACTIONS_MAX)
        self._seen: dict[int, _Seen] = {}
        self._reading = asyncio.Lock()

    def begin(self, partition: int, offset: int, at_ms: int) -> None:
        """Markers of a half partition are seen from this record of its operation topic on."""
        self._seen[partition] = _Seen(offset, at_ms)

    def end(self, partition: int) -> None:
        """Another proxy applies the markers of a half partition from now on."""
        self._seen.pop(partition, None)

    def since_ms(self) -> dict[int, int]:
        """Return by half partition from when on all markers were seen; 0: all that there are."""
        return {partition: seen.at_ms for partition, seen in self._seen.items()}

    def newest(self) -> tuple[OperatorAction, ...]:
        """Return the actions, the newest first."""
        return tuple(sorted(self._actions, key=lambda action: action.at_ms, reverse=True))

    # --- as they are applied -----------------------------------------------------------------

    def applied(self, record: Record, transaction: Transaction) -> None:
        """Note a record of the operation topic that was read and applied."""
        marker = _operators(record)
        if marker is not None:
            self.note(marker, transaction.half.group, record.timestamp_ms)

    def note(self, marker: Marker, group: str, at_ms: int) -> None:
        """Note an operator's marker that was applied."""
        _note(self._actions, marker, group, at_ms)

    # --- older ones --------------------------------------------------------------------------

    async def read_back(
        self, log: Log, partition: int, until_s: float, group_of: Callable[[str], str]
    ) -> None:
        """Read older records of an operation topic.

        Args:
            until_s: when to stop, by the event loop's clock.
            group_of: returns the group of a transaction, "" if it is not known any more.
        """
        loop = asyncio.get_running_loop()
        async with self._reading:
            try:
                start, _ = await log.bounds(confirmed=False)
                while loop.time() < until_s and len(self._actions) < ACTIONS_MAX:
                    seen = self._seen.get(partition)
                    if seen is None:
                        return
                    if seen.offset <= start:
                        seen.at_ms = 0
                        return
                    await self._read_chunk(log, seen, start, group_of)
            except (KafkaUnavailable, LogTruncated):
                return  # the page states how far back it knows

    async def _read_chunk(
        self, log: Log, seen: _Seen, start: int, group_of: Callable[[str], str]
    ) -> None:
        first, at_ms = max(start, seen.offset - CHUNK), seen.at_ms
        older: list[OperatorAction] = []
        async for records in log.read(first, seen.offset):
            for record in records:
                at_ms = min(at_ms, record.timestamp_ms)
                marker = _operators(record)
                if marker is not None:
                    _note(older, marker, group_of(marker.id), record.timestamp_ms)
            await asyncio.sleep(0)
        seen.offset, seen.at_ms = first, at_ms
        room = ACTIONS_MAX - len(self._actions)
        self._actions.extendleft(reversed(older[-room:] if room else ()))


def _operators(record: Record) -> Marker | None:
    """Return an operator's marker; None if the record is none."""
    value = record.value or b""
    # Most markers are not: their bytes show it without decoding them.
    if b'"operator"' not in value and b'"asked"' not in value:
        return None
    try:
        marker = decode_marker(record)
    except ValueError:
        return None  # replaced messages
    # The marker of a requested check that an earlier version wrote has the schedule as its source.
    earlier = marker.kind is MarkerKind.CHECK and marker.source is Source.SCHEDULE
    asked = earlier and bool(marker.by)
    return marker if asked or marker.source is Source.OPERATOR else None


def _note(actions: MutableSequence[OperatorAction], marker: Marker, group: str, at_ms: int) -> None:
    kind, by = str(marker.kind), marker.by[:TEXT_MAX]
    reason = "" if marker.kind is MarkerKind.CHECK else marker.reason[:TEXT_MAX]
    same = (kind, by, reason, group)
    last = len(actions) - 1
    for number in range(last, max(-1, last - LOOKED_AT), -1):
        known = actions[number]
        if abs(at_ms - known.at_ms) >= SAME_MS:
            break
        if (known.action, known.by, known.reason, known.group) == same:
            actions[number] = OperatorAction(known.at_ms, *same, known.id, known.count + 1)
            return
    actions.append(OperatorAction(at_ms, *same, marker.id))
