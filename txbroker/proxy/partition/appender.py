"""Group commit: records that arrive while a batch is in flight form the next one.

An appender is the only writer of one log, and the only reader that feeds the ledger. It takes
runs: the rows of several operations. A row is never split. Records that the appender wrote itself
are applied without reading them back as long as their offsets follow on; a gap shows that another
owner (one that does not know yet that it was fenced) wrote in between, so its records are read and
applied first.

Each log has its own queue, so prepares never delay decisions and checks. In the operation topic,
decisions and scheduled markers get equal shares of each batch, so neither can starve the other.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from msgspec import Struct, structs

from txbroker.core.encoding import BATCH_OVERHEAD_BYTES, MarkerRow, Row
from txbroker.core.ledger import ApplyResult, Effect
from txbroker.core.records import Anchor, MarkerKind, Record, Source
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import Appended, AppendRefused, AppendUnknown, Log, LogTruncated
from txbroker.errors import (
    KafkaUnavailable,
    Overloaded,
    OwnerUnavailable,
    RequestError,
    TooLarge,
)
from txbroker.proxy.partition.context import PartitionContext

QUEUE_BYTES_MAX = 64 * 1024 * 1024
"""Bytes that may wait at one priority; more is refused as overload."""
BATCH_RECORDS_MAX = 1000
"""Records in one batch: applying them blocks the event loop for about ten milliseconds."""

Applied: TypeAlias = ApplyResult | RequestError
"""The result of a row: the outcome of applying it, or why it was not applied."""
OnResults: TypeAlias = Callable[[int], None]
"""Called with the number of further rows of a run that have a result."""


class Priority(Enum):
    """Classes of rows. Those that wait get equal shares of the next batch."""

    CALLS = "calls"
    """A client waits: prepares in the half topic, decisions in the operation topic."""
    SCHEDULE = "schedule"
    """Markers of checks and of their results."""


# An attribute of an enumeration costs as much as the rest of a test.
_OPERATOR, _CHECK = Source.OPERATOR, MarkerKind.CHECK


class LogReplica:
    """Applies one log to the ledger, in offset order, and notifies the partition's followers."""

    def __init__(self, context: PartitionContext, topic: str) -> None:
        self.topic = topic
        self._context = context
        self._actions = context.proxy.actions
        self._ledger = ledger = context.ledger
        self._apply: Callable[[Record], ApplyResult]
        self._apply_rows: Callable[[Sequence[Any], int, int], list[ApplyResult]]
        self.skip: Callable[[range], None]
        """Pass offsets that hold no record."""
        if topic == "half":
            self._apply, self._apply_rows = ledger.apply_half, ledger.apply_halves
            self.skip = ledger.skip_half
        else:
            self._apply, self._apply_rows = ledger.apply_op, ledger.apply_markers
            self.skip = ledger.skip_op

    @property
    def position(self) -> int:
        return self._ledger.half_position if self.topic == "half" else self._ledger.op_position

    @property
    def anchor(self) -> Anchor | None:
        """The last applied record, by which a recreated log is recognised."""
        return self._ledger.half_anchor if self.topic == "half" else self._ledger.op_anchor

    def apply(self, record: Record) -> ApplyResult:
        outcome = self._apply(record)
        if outcome.effect is Effect.APPLIED and outcome.transaction is not None:
            if self.topic == "op":
                self._actions.applied(record, outcome.transaction)
            self._context.changed((outcome.transaction,))
        else:
            self._context.unchanged(self.topic, outcome, record)
        return outcome

    def apply_run(self, rows: Sequence[Row], offset: int, timestamp_ms: int) -> list[ApplyResult]:
        """Apply rows that were just appended as one batch; return the outcome of each."""
        outcomes = self._apply_rows(rows, offset, timestamp_ms)
        changed: list[Transaction] = []
        for row, outcome in zip(rows, outcomes, strict=True):
            offset += len(row.records)
            if outcome.effect is Effect.APPLIED and outcome.transaction is not None:
                changed.append(outcome.transaction)
                if isinstance(row, MarkerRow):
                    # Without a call for each marker: few are an operator's.
                    marker = row.marker
                    if marker.source is _OPERATOR or (marker.kind is _CHECK and marker.by):
                        self._actions.note(marker, outcome.transaction.half.group, timestamp_ms)
            else:
                last = structs.replace(row.records[-1], offset=offset - 1)
                self._context.unchanged(self.topic, outcome, last)
        if changed:
            self._context.changed(changed)
        return outcomes


class _QueuedRun(Struct, eq=False):
    """A queued run and the results of its rows so far."""

    rows: Sequence[Row]
    results: list[Applied | None]
    done: asyncio.Future[None]
    on_results: OnResults
    taken: int = 0
    """How many of its rows are in flight or have a result."""
    left: int = 0
    """How many rows have no result yet."""


class _Part(NamedTuple):
    """Rows of one run that go into a batch: from `start` up to, not including, `stop`."""

    entry: _QueuedRun
    start: int
    stop: int


class _Queue:
    """The runs that wait at one priority, in order."""

    def __init__(self) -> None:
        self.size = 0
        # Ordered, with removal from the middle: a caller that gives up is removed at once.
        self._entries: OrderedDict[_QueuedRun, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: _QueuedRun, size: int) -> None:
        """Put a run of `size` bytes at the end."""
        self._entries[entry] = None
        self.size += size

    def remove(self, entry: _QueuedRun) -> None:
        """Remove the rows of a run that are not in flight: its caller has given up."""
        if entry.taken < len(entry.rows):
            del self._entries[entry]
            self._took(entry, len(entry.rows))

    def clear(self) -> list[_Part]:
        parts = []
        for entry in self._entries:
            parts.append(_Part(entry, entry.taken, len(entry.rows)))
            self._took(entry, len(entry.rows))
        self._entries.clear()
        return parts

    def take(self, bytes_max: int, records_max: int, *, one: bool) -> tuple[list[_Part], int, int]:
        """Take as many rows as fit, in order; with `one` the first row whatever its size.

        Returns:
            The rows, their size in bytes, and their number of records.
        """
        parts: list[_Part] = []
        size = count = 0
        while self._entries:
            entry = next(iter(self._entries))
            rows, stop = entry.rows, entry.taken
            while stop < len(rows):
                row = rows[stop]
                fits = size + row.size <= bytes_max and count + len(row.records) <= records_max
                if not fits and not one:
                    break
                size += row.size
                count += len(row.records)
                stop += 1
                one = False
            if stop == entry.taken:
                break
            parts.append(_Part(entry, entry.taken, stop))
            self._took(entry, stop)
            if stop < len(rows):
                break
            del self._entries[entry]
        return parts, size, count

    def _took(self, entry: _QueuedRun, stop: int) -> None:
        for row in entry.rows[entry.taken : stop]:
            self.size -= row.size
        entry.taken = stop


class Appender:
    """Appends runs to one log and applies it to the ledger."""

    def __init__(self, context: PartitionContext, log: Log, replica: LogReplica) -> None:
        self._log = log
        self._replica = replica
        self._events = context.events
        self._gate = context.gate
        self._queues = {priority: _Queue() for priority in Priority}
        self._first = Priority.CALLS
        self._wake = asyncio.Event()
        self._ended = False
        # Held from sending a batch until it is applied, and while reading other owners' records.
        self._lock = asyncio.Lock()
        self._asked = 0
        self._answered = 0
        self._end_known_s = float("-inf")
        """When the last append that showed the end of the log was sent, by the loop's clock."""

    async def append(
        self,
        rows: Sequence[Row],
        priority: Priority = Priority.SCHEDULE,
        on_results: OnResults = lambda _: None,
    ) -> list[Applied]:
        """Append the rows of a run, and return the result of each.

        Cancelling removes the rows that are not in flight yet, and ends calls of `on_results`.

        Returns:
            For each row the outcome of applying it, or `TooLarge` if it exceeds a batch of this
            topic, `Overloaded` if the queue is full, `OwnerUnavailable` if Kafka did not answer
            and the row may or may not be stored.
        """
        results: list[Applied | None] = [None] * len(rows)
        queue = self._queues[priority]
        room = QUEUE_BYTES_MAX - queue.size
        bytes_max = self._log.batch_bytes_max - BATCH_OVERHEAD_BYTES
        size, too_large = 0, False
        for row in rows:
            size += row.size
            too_large = too_large or row.size > bytes_max
        if self._ended or too_large or size > room:
            return await self._append_some(rows, priority, on_results, results, room)
        done = asyncio.get_running_loop().create_future()
        entry = _QueuedRun(rows, results, done, on_results, left=len(rows))
        queue.add(entry, size)
        self._wake.set()
        try:
            await entry.done
        finally:
            queue.remove(entry)
            # Its errors hold this frame: without this each failed append is a cycle, with its body.
            del entry
        return [result for result in results if result is not None]

    async def append_one(self, row: Row) -> ApplyResult:
        [outcome] = await self.append((row,))
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    async def _append_some(
        self,
        rows: Sequence[Row],
        priority: Priority,
        on_results: OnResults,
        results: list[Applied | None],
        room: int,
    ) -> list[Applied]:
        """Append the rows that can be appended, and give the others their error."""
        bytes_max = self._log.batch_bytes_max - BATCH_OVERHEAD_BYTES
        kept: list[int] = []
        for number, row in enumerate(rows):
            if self._ended:
                # The writer has stopped: it would never take the row from the queue.
                results[number] = _moving()
            elif row.size > bytes_max:
                results[number] = TooLarge(
                    f"the transaction takes {row.size} bytes; {self._log.batch_bytes_max} fit a "
                    "batch: send fewer or smaller messages"
                )
            elif row.size > room:
                results[number] = Overloaded(
                    "Kafka stores records more slowly than they arrive: retry later"
                )
            else:
                room -= row.size
                kept.append(number)
        on_results(len(rows) - len(kept))
        if kept:
            appended = await self.append([rows[number] for number in kept], priority, on_results)
            for number, result in zip(kept, appended, strict=True):
                results[number] = result
        return [result for result in results if result is not None]

    async def catch_up(self) -> None:
        """Read and apply the log up to an end offset that is requested after this call."""
        self._asked += 1
        mine = self._asked
        async with self._lock:
            if self._answered >= mine:
                # Another caller has read an end since: a crowd that asks for unknown ids must not
                # delay appends.
                return
            asked = self._asked
            await self._catch_up()
            self._answered = asked

    async def look(self, seconds: float) -> None:
        """Catch up, unless an append of the last `seconds` showed the end of the log."""
        if asyncio.get_running_loop().time() - self._end_known_s >= seconds:
            async with self._lock:
                await self._catch_up(confirmed=False)

    async def run(self) -> None:
        """Write queued rows, batch after batch, until cancelled."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while any(self._queues.values()):
                    # Outside the lock: reading goes on while suspended.
                    await self._gate.wait()
                    async with self._lock:
                        parts = self._take() if self._gate.is_set() else []
                        if parts:
                            await self._send(parts)
        finally:
            self._ended = True
            _fail(self._waiting(), _moving)

    def turn_away(self) -> None:
        """Fail all rows that are not in flight: the owner is suspended."""
        _fail(self._waiting(), _suspension)

    def _waiting(self) -> list[_Part]:
        return [part for queue in self._queues.values() for part in queue.clear()]

    def _take(self) -> list[_Part]:
        """Take the rows of the next batch, half of them of each priority if both wait.

        Returns an empty list if all callers have given up.
        """
        size = self._log.batch_bytes_max - BATCH_OVERHEAD_BYTES
        count = BATCH_RECORDS_MAX
        first = self._queues[self._first]
        self._first = Priority.SCHEDULE if self._first is Priority.CALLS else Priority.CALLS
        second = self._queues[self._first]
        if not (first and second):
            return (first or second).take(size, count, one=True)[0]
        # Half for the first; the rest for the second, then for the first again.
        parts, took, records = first.take(size // 2, count // 2, one=True)
        for queue in (second, first):
            size, count = size - took, count - records
            more, took, records = queue.take(size, count, one=False)
            parts += more
        return parts

    async def _send(self, parts: list[_Part]) -> None:
        if not self._gate.is_set():
            # Suspended since the first half of a refused batch was sent.
            _fail(parts, _suspension)
            return
        rows = [row for entry, start, stop in parts for row in entry.rows[start:stop]]
        records = [record for row in rows for record in row.records]
        sent_s = asyncio.get_running_loop().time()
        try:
            where = await self._log.append(records)
            await self._settle(parts, rows, records, where, sent_s)
        except AppendRefused as error:
            if len(rows) == 1:
                why = f"Kafka rejects the records of this transaction: {error}"
                _fail(parts, lambda: TooLarge(why))
                return
            # One row spoils the batch: sent alone, it fails alone.
            await self._send_halves(parts, len(rows) // 2)
        except (AppendUnknown, KafkaUnavailable) as error:
            self._events.kafka_failed("append")
            why = f"Kafka did not answer: {error}"
            _fail(parts, lambda: OwnerUnavailable(why))
        except BaseException:
            _fail(parts, _moving)
            raise

    async def _send_halves(self, parts: list[_Part], count: int) -> None:
        first: list[_Part] = []
        rest: list[_Part] = []
        for part in parts:
            middle = min(part.stop, part.start + count)
            count -= middle - part.start
            if middle > part.start:
                first.append(part._replace(stop=middle))
            if middle < part.stop:
                rest.append(part._replace(start=middle))
        try:
            await self._send(first)
            await self._send(rest)
        finally:
            # If cancelled in between, the unsent rows are known here only.
            _fail(parts, _moving)

    async def _settle(
        self,
        parts: list[_Part],
        rows: list[Row],
        records: list[Record],
        where: Appended,
        sent_s: float,
    ) -> None:
        base_offset, timestamp_ms = where
        position = self._replica.position
        if 0 <= base_offset < position:
            raise LogTruncated(
                f"records were appended at offset {base_offset}, but {position} were read before: "
                "the topic was truncated or recreated"
            )
        if base_offset == position and timestamp_ms >= 0:
            self._end_known_s = sent_s
            outcomes = self._replica.apply_run(rows, base_offset, timestamp_ms)
        else:
            of_records = await self._read_back(records, base_offset)
            outcomes, last = [], -1
            for row in rows:
                last += len(row.records)
                outcomes.append(of_records[last])
        taken = 0
        for entry, start, stop in parts:
            entry.results[start:stop] = outcomes[taken : taken + stop - start]
            taken += stop - start
            _account(entry, stop - start)

    async def _read_back(self, records: list[Record], base_offset: int) -> list[ApplyResult]:
        """Apply the log up to its end and return the outcomes of our records.

        Without an offset they are recognised by content: ids and claims make it unique; equal
        records (the same prepare twice) are matched in the order in which they were sent.
        """
        numbers: dict[tuple[object, ...], deque[int]] = {}
        for number, record in enumerate(records):
            numbers.setdefault((record.key, record.value, record.headers), deque()).append(number)
        outcomes: dict[int, ApplyResult] = {}

        def note(record: Record, outcome: ApplyResult) -> None:
            if base_offset >= 0:
                outcomes[record.offset - base_offset] = outcome
            elif same := numbers.get((record.key, record.value, record.headers)):
                outcomes[same.popleft()] = outcome

        await self._catch_up(note)
        missing = ApplyResult(Effect.VOID, why="not found at the offset that the broker returned")
        return [outcomes.get(number, missing) for number in range(len(records))]

    async def _catch_up(
        self, note: Callable[[Record, ApplyResult], None] | None = None, *, confirmed: bool = True
    ) -> None:
        replica = self._replica
        start, end = await self._log.bounds(confirmed=confirmed)
        position = replica.position
        if not (confirmed or start <= position <= end):
            start, end = await self._log.bounds()
        if position > end or position < start:
            raise LogTruncated(
                f"the log holds offsets {start} to {end}, but {position} was reached before: "
                "the topic was truncated or recreated"
            )
        if position == end:
            return
        anchor = replica.anchor
        # Other owners wrote. Start at the last applied record, to verify that it is the same log.
        first = position if anchor is None else max(start, anchor.offset)
        async for records in self._log.read(first, end, replica.skip):
            for record in records:
                if record.offset < position:
                    _check_same(record, anchor)
                    continue
                outcome = replica.apply(record)
                if note is not None:
                    note(record, outcome)


def _check_same(record: Record, anchor: Anchor | None) -> None:
    """Raise `LogTruncated` if the last applied record was replaced by another one."""
    if anchor is not None and anchor.offset == record.offset and not anchor.matches(record):
        raise LogTruncated(
            f"offset {record.offset} holds another record than when it was read: the topic was "
            "truncated or recreated"
        )


def _suspension() -> RequestError:
    return OwnerUnavailable("the owner of the partition is unknown at the moment: retry")


def _moving() -> RequestError:
    return OwnerUnavailable("the partition is moving to another owner: retry")


def _fail(parts: Iterable[_Part], error: Callable[[], RequestError]) -> None:
    for entry, start, stop in parts:
        failed = 0
        for number in range(start, stop):
            if entry.results[number] is None:
                entry.results[number] = error()
                failed += 1
        _account(entry, failed)


def _account(entry: _QueuedRun, count: int) -> None:
    if entry.done.done():
        # The caller has given up, or all rows had a result before.
        return
    entry.left -= count
    entry.on_results(count)
    if not entry.left:
        entry.done.set_result(None)
