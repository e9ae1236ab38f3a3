"""Group commit: what arrives while a batch is on its way forms the next one.

An appender is the only writer of one log, and the only one that reads it for the ledger. It takes
runs: the rows of several operations, each of which stays whole. Records that it wrote itself need
not be read back as long as their offsets follow one another; whatever somebody else wrote in
between (an owner that does not know yet that it was fenced) shows as a gap and is read and applied
first.

Each log has a queue of its own, so prepares never stand in the way of decisions and checks; and in
the operation topic decisions and what the schedule writes share each batch, so a storm of checks
does not hold decisions back, nor the other way round.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from txbroker.core.encoding import BATCH_OVERHEAD_BYTES, Row
from txbroker.core.ledger import ApplyResult, Effect
from txbroker.core.records import Anchor, Record
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
"""What may wait at one priority for the next batches before callers are told to come again."""
BATCH_RECORDS_MAX = 1000
"""Records in one batch: applying them takes about ten milliseconds, in which nobody else runs."""

Applied: TypeAlias = ApplyResult | RequestError
"""What became of a row: what applying it did, or why it was not applied."""
Known: TypeAlias = Callable[[int], None]
"""Told of how many more rows of a run it is known what became: long runs take several batches."""


class Priority(Enum):
    """Who waits for a place in the next batch. Lanes that wait get equal shares of it."""

    CALLS = "calls"
    """Somebody waits for an answer: prepares in the half topic, decisions in the other one."""
    SCHEDULE = "schedule"
    """Markers of checks, and of what becomes of them."""


class Replica(Protocol):
    """One log as far as the ledger has applied it."""

    @property
    def position(self) -> int:
        """The next offset that is to be applied."""
        ...

    @property
    def anchor(self) -> Anchor | None:
        """The last record that was applied, by which the log is recognised where others wrote."""
        ...

    def apply(self, record: Record) -> ApplyResult:
        """Apply the next record, as it was read."""
        ...

    def apply_run(self, rows: Sequence[Row], offset: int, timestamp_ms: int) -> list[ApplyResult]:
        """Apply rows that were just appended as one batch; return an outcome of each."""
        ...

    def skip(self, offsets: range) -> None:
        """Go past offsets that hold no record."""
        ...


class _Entry(Struct, eq=False):
    """A run that waits, and what became of its rows so far."""

    rows: Sequence[Row]
    found: list[Applied | None]
    over: asyncio.Future[None]
    known: Known
    taken: int = 0
    """How many of its rows are on their way or done."""
    left: int = 0
    """How many rows it is not known what became of."""


class _Part(NamedTuple):
    """Rows of one run that go into a batch: those from `start` up to, not including, `stop`."""

    entry: _Entry
    start: int
    stop: int


class _Queue:
    """What waits at one priority, in order."""

    def __init__(self) -> None:
        self.size = 0
        # In order, and whoever gives up is taken out at once wherever it stands.
        self._entries: OrderedDict[_Entry, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: _Entry, size: int) -> None:
        """Put a run at the end."""
        self._entries[entry] = None
        self.size += size

    def remove(self, entry: _Entry) -> None:
        """Take out what is not on its way yet of a run whose caller has given up."""
        if entry.taken < len(entry.rows):
            del self._entries[entry]
            self._took(entry, len(entry.rows))

    def clear(self) -> list[_Part]:
        """Take everything out."""
        parts = []
        for entry in self._entries:
            parts.append(_Part(entry, entry.taken, len(entry.rows)))
            self._took(entry, len(entry.rows))
        self._entries.clear()
        return parts

    def take(self, bytes_max: int, records_max: int, *, one: bool) -> tuple[list[_Part], int, int]:
        """Take as many rows as fit, in order; with `one` the first row whatever its size.

        Returns:
            The rows, how many bytes they take, and how many records they are.
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

    def _took(self, entry: _Entry, stop: int) -> None:
        for row in entry.rows[entry.taken : stop]:
            self.size -= row.size
        entry.taken = stop


class Appender:
    """Appends runs to one log and applies them, with everything between, to the ledger.

    Args:
        context: what all parts of the partition share; nothing is taken from the queue while its
            gate is closed.
        log: one partition of the half or operation topic.
        replica: the ledger's side of it; gets every record of the log, in order.
    """

    def __init__(self, context: PartitionContext, log: Log, replica: Replica) -> None:
        self._log = log
        self._replica = replica
        self._events = context.events
        self._gate = context.gate
        self._queues = {priority: _Queue() for priority in Priority}
        self._first = Priority.CALLS
        self._wake = asyncio.Event()
        self._ended = False
        # Held from sending a batch until it is applied, and while reading what others wrote.
        self._lock = asyncio.Lock()
        self._asked = 0
        self._answered = 0
        self._told_s = float("-inf")
        """When an append was sent that told where the log ends, on the event loop's clock."""

    async def append(
        self,
        rows: Sequence[Row],
        priority: Priority = Priority.SCHEDULE,
        known: Known = lambda _: None,
    ) -> list[Applied]:
        """Append the rows of a run, each whole, and return what became of each.

        A caller that gives up takes its rows along, as far as they are not on their way yet, and
        `known` is told no more.

        Returns:
            Of each row what applying it did, or `TooLarge` where it does not fit a batch of this
            topic, `Overloaded` where too much is waiting already, `OwnerUnavailable` where Kafka
            did not answer and it may or may not be stored.
        """
        found: list[Applied | None] = [None] * len(rows)
        queue = self._queues[priority]
        room = QUEUE_BYTES_MAX - queue.size
        bytes_max = self._log.batch_bytes_max - BATCH_OVERHEAD_BYTES
        size, turned_away = 0, False
        for row in rows:
            size += row.size
            turned_away = turned_away or row.size > bytes_max
        if self._ended or turned_away or size > room:
            return await self._append_some(rows, priority, known, found, room)
        over = asyncio.get_running_loop().create_future()
        entry = _Entry(rows, found, over, known, left=len(rows))
        queue.add(entry, size)
        self._wake.set()
        try:
            await entry.over
        finally:
            queue.remove(entry)
            # Its errors hold this frame: without this each failed append is a cycle, with its body.
            del entry
        return [each for each in found if each is not None]

    async def append_one(self, row: Row) -> ApplyResult:
        """Append a run of one row; return what applying it did.

        Raises:
            RequestError: it was not applied, as `append` has it.
        """
        [outcome] = await self.append((row,))
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    async def _append_some(
        self,
        rows: Sequence[Row],
        priority: Priority,
        known: Known,
        found: list[Applied | None],
        room: int,
    ) -> list[Applied]:
        """Append those rows of a run that can be, and say of the others why they cannot."""
        bytes_max = self._log.batch_bytes_max - BATCH_OVERHEAD_BYTES
        kept: list[int] = []
        for number, row in enumerate(rows):
            if self._ended:
                # Nobody would ever take it from the queue.
                found[number] = _moving()
            elif row.size > bytes_max:
                found[number] = TooLarge(
                    f"the transaction takes {row.size} bytes; {self._log.batch_bytes_max} fit a "
                    "batch"
                )
            elif row.size > room:
                found[number] = Overloaded("Kafka takes records slower than they arrive")
            else:
                room -= row.size
                kept.append(number)
        known(len(rows) - len(kept))
        if kept:
            appended = await self.append([rows[number] for number in kept], priority, known)
            for number, each in zip(kept, appended, strict=True):
                found[number] = each
        return [each for each in found if each is not None]

    async def catch_up(self) -> None:
        """Read and apply the log up to an end offset that is asked for now: all that was
        acknowledged before.

        Raises:
            KafkaUnavailable, LogTruncated: as the log says.
        """
        self._asked += 1
        mine = self._asked
        async with self._lock:
            if self._answered >= mine:
                # Whoever looked last asked for the end after we came: appends would wait behind
                # a crowd that asks for unknown ids.
                return
            asked = self._asked
            await self._catch_up()
            self._answered = asked

    async def look(self, seconds: float) -> None:
        """Catch up, unless an append of the last `seconds` followed on what was read: then
        nobody else had written before it.

        Raises:
            KafkaUnavailable, LogTruncated: as the log says.
        """
        if asyncio.get_running_loop().time() - self._told_s >= seconds:
            async with self._lock:
                await self._catch_up(confirmed=False)

    async def run(self) -> None:
        """Write what is queued, batch after batch, until cancelled.

        Raises:
            LogTruncated, InvariantBroken: the partition cannot go on.
        """
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while any(self._queues.values()):
                    # Not under the lock: reading goes on.
                    await self._gate.wait()
                    async with self._lock:
                        parts = self._take() if self._gate.is_set() else []
                        if parts:
                            await self._send(parts)
        finally:
            self._ended = True
            _fail(self._waiting(), _moving)

    def turn_away(self) -> None:
        """Answer those that wait, and are not on their way yet: nobody knows when it would be."""
        _fail(self._waiting(), _suspended)

    def _waiting(self) -> list[_Part]:
        return [part for queue in self._queues.values() for part in queue.clear()]

    def _take(self) -> list[_Part]:
        """Take as many rows as fit one batch, as many from each priority where both wait.

        None where those that waited have given up meanwhile.
        """
        size = self._log.batch_bytes_max - BATCH_OVERHEAD_BYTES
        count = BATCH_RECORDS_MAX
        first = self._queues[self._first]
        self._first = Priority.SCHEDULE if self._first is Priority.CALLS else Priority.CALLS
        second = self._queues[self._first]
        if not (first and second):
            return (first or second).take(size, count, one=True)[0]
        # Half for the first, then all that is left: for the other, and for the first again.
        parts, took, records = first.take(size // 2, count // 2, one=True)
        for queue in (second, first):
            size, count = size - took, count - records
            more, took, records = queue.take(size, count, one=False)
            parts += more
        return parts

    async def _send(self, parts: list[_Part]) -> None:
        if not self._gate.is_set():
            # Since the first half of a batch that was refused was sent.
            _fail(parts, _suspended)
            return
        rows = [row for entry, start, stop in parts for row in entry.rows[start:stop]]
        records = [record for row in rows for record in row.records]
        sent_s = asyncio.get_running_loop().time()
        try:
            where = await self._log.append(records)
            await self._settle(parts, rows, records, where, sent_s)
        except AppendRefused as error:
            if len(rows) == 1:
                why = f"Kafka does not take this transaction: {error}"
                _fail(parts, lambda: TooLarge(why))
                return
            # One of them spoils the batch: alone it shows what it is.
            await self._send_halves(parts, len(rows) // 2)
        except (AppendUnknown, KafkaUnavailable) as error:
            self._events.kafka_failed("append")
            why = f"Kafka did not answer: {error}"
            _fail(parts, lambda: OwnerUnavailable(why))
        except BaseException:
            _fail(parts, _moving)
            raise

    async def _send_halves(self, parts: list[_Part], count: int) -> None:
        """Send so many rows, then the others."""
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
            # Given up half-way: nobody else knows of those that were not sent any more.
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
            self._told_s = sent_s
            outcomes = self._replica.apply_run(rows, base_offset, timestamp_ms)
        else:
            of_records = await self._read_back(records, base_offset)
            outcomes, last = [], -1
            for row in rows:
                last += len(row.records)
                outcomes.append(of_records[last])
        taken = 0
        for entry, start, stop in parts:
            entry.found[start:stop] = outcomes[taken : taken + stop - start]
            taken += stop - start
            _account(entry, stop - start)

    async def _read_back(self, records: list[Record], base_offset: int) -> list[ApplyResult]:
        """Apply the log up to its end and find our records in it.

        Without an offset they are known by their content: ids and claims make it unique, and
        where it is not (the same prepare twice), they are found in the order in which they went.
        """
        wanted: dict[tuple[object, ...], deque[int]] = {}
        for number, record in enumerate(records):
            wanted.setdefault((record.key, record.value, record.headers), deque()).append(number)
        found: dict[int, ApplyResult] = {}

        def note(record: Record, outcome: ApplyResult) -> None:
            if base_offset >= 0:
                found[record.offset - base_offset] = outcome
            elif same := wanted.get((record.key, record.value, record.headers)):
                found[same.popleft()] = outcome

        await self._catch_up(note)
        missing = ApplyResult(Effect.VOID, why="not found where the broker put it")
        return [found.get(number, missing) for number in range(len(records))]

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
        # Others wrote: from the record on that was read last, to see that it is the same log.
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
    """Raise if another record stands where the last one was read.

    Raises:
        LogTruncated: it does.
    """
    read = None if anchor is None or anchor.offset != record.offset else anchor.timestamp_ms
    if read is not None and read != record.timestamp_ms:
        raise LogTruncated(
            f"offset {record.offset} holds another record than when it was read: the topic was "
            "truncated or recreated"
        )


def _suspended() -> RequestError:
    return OwnerUnavailable("nobody knows now whose the partition is: try again")


def _moving() -> RequestError:
    return OwnerUnavailable("the partition is moving to another owner")


def _fail(parts: Iterable[_Part], error: Callable[[], RequestError]) -> None:
    """Say of each row that is not known otherwise why it was not applied."""
    for entry, start, stop in parts:
        failed = 0
        for number in range(start, stop):
            if entry.found[number] is None:
                entry.found[number] = error()
                failed += 1
        _account(entry, failed)


def _account(entry: _Entry, count: int) -> None:
    """It is known what became of so many more rows."""
    if entry.over.done():
        # Its caller has given up, or all of them were known before.
        return
    entry.left -= count
    entry.known(count)
    if not entry.left:
        entry.over.set_result(None)
