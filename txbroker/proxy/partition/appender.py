"""Group commit: what arrives while a batch is on its way forms the next one.

An appender is the only writer of one log, and the only one that reads it for the ledger. Records
that it wrote itself need not be read back as long as their offsets follow one another; whatever
somebody else wrote in between (an owner that does not know yet that it was fenced) shows as a gap
and is read and applied first.

Each log has a queue of its own, so prepares never stand in the way of decisions and checks; and in
the operation topic decisions and what the schedule writes take turns, so a storm of checks does not
hold decisions back, nor the other way round.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum

from msgspec import Struct, structs

from txbroker.core.outcome import Effect, Outcome
from txbroker.core.records import Anchor, Record
from txbroker.core.sizes import BATCH_OVERHEAD_BYTES, bytes_in_batch
from txbroker.door import Appended, AppendRefused, AppendUnknown, Log, LogTruncated
from txbroker.errors import KafkaUnavailable, Overloaded, OwnerUnavailable, TooLarge

QUEUE_BYTES_MAX = 64 * 1024 * 1024
"""What may wait in one lane for the next batches before callers are told to come again."""
BATCH_RECORDS_MAX = 1000
"""Records in one batch: applying them takes about ten milliseconds, in which nobody else runs."""


class Lane(Enum):
    """Who waits for a place in the next batch. Lanes that wait get equal shares of it."""

    CALLS = "calls"
    """Somebody waits for an answer: prepares in the half topic, decisions in the other one."""
    SCHEDULE = "schedule"
    """Markers of checks, and of what becomes of them."""


class _Entry(Struct, eq=False):
    records: Sequence[Record]
    size: int
    outcome: asyncio.Future[Outcome]


class _Queue:
    """What waits in one lane, in order."""

    def __init__(self) -> None:
        self.size = 0
        self._entries: OrderedDict[_Entry, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: _Entry) -> None:
        """Put an entry at the end."""
        self._entries[entry] = None
        self.size += entry.size

    def first(self) -> _Entry | None:
        """Return the entry whose turn it is."""
        return next(iter(self._entries), None)

    def remove(self, entry: _Entry) -> None:
        """Take an entry out, wherever it stands; nothing happens if it was taken before."""
        if entry in self._entries:
            del self._entries[entry]
            self.size -= entry.size


class Appender:
    """Appends records to one log and applies them, with everything between, to the ledger.

    Args:
        log: one partition of the half or operation topic.
        apply: applies one record to the ledger; gets every record of the log, in order.
        position: the next offset that `apply` expects.
        unanswered: told whenever Kafka did not answer an append.
        anchor: the last record that was applied, by which the log is recognised where others
            wrote to it.
        gate: nothing is taken from the queue while it is not set; always open without.
        skipped: told which offsets behind the last record hold none.
    """

    def __init__(
        self,
        log: Log,
        apply: Callable[[Record], Outcome],
        position: Callable[[], int],
        unanswered: Callable[[], None],
        anchor: Callable[[], Anchor | None] = lambda: None,
        gate: asyncio.Event | None = None,
        skipped: Callable[[range], None] | None = None,
    ) -> None:
        self._log = log
        self._apply = apply
        self._position = position
        self._unanswered = unanswered
        self._anchor = anchor
        self._gate = gate
        self._skipped = skipped
        self._queues = {lane: _Queue() for lane in Lane}
        self._next_lane = Lane.CALLS
        self._wake = asyncio.Event()
        self._ended = False
        # Held from sending a batch until it is applied, and while reading what others wrote.
        self._lock = asyncio.Lock()
        self._asked = 0
        self._answered = 0
        self._told_s = float("-inf")
        """When an append was sent that told where the log ends, on the event loop's clock."""

    async def append(self, records: Sequence[Record], lane: Lane = Lane.SCHEDULE) -> Outcome:
        """Append records that belong together, and return what applying the last one did.

        A caller that gives up takes its records along, if they are not on their way yet.

        Raises:
            TooLarge: they do not fit a batch of this topic.
            Overloaded: too much is waiting already.
            OwnerUnavailable: Kafka did not answer; the records may or may not be stored.
        """
        if self._ended:
            # Nobody would ever take it from the queue.
            raise OwnerUnavailable("the partition is moving to another owner")
        size = sum([bytes_in_batch(record) for record in records])
        if size + BATCH_OVERHEAD_BYTES > self._log.batch_bytes_max:
            raise TooLarge(
                f"the transaction takes {size} bytes; {self._log.batch_bytes_max} fit a batch"
            )
        queue = self._queues[lane]
        if queue.size + size > QUEUE_BYTES_MAX:
            raise Overloaded("Kafka takes records slower than they arrive")
        entry = _Entry(records, size, asyncio.get_running_loop().create_future())
        queue.add(entry)
        self._wake.set()
        try:
            return await entry.outcome
        finally:
            queue.remove(entry)
            # Its error holds this frame: without this each failed append is a cycle, with its body.
            del entry

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
                await self._catch_up(sure=False)

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
                    if self._gate is not None:
                        # Not under the lock: reading goes on.
                        await self._gate.wait()
                    async with self._lock:
                        entries = self._take()
                        if entries:
                            await self._send(entries)
        finally:
            self._ended = True
            for entry in self._waiting():
                _fail(entry, OwnerUnavailable("the partition is moving to another owner"))

    def turn_away(self) -> None:
        """Answer those that wait, and are not on their way yet: nobody knows when it would be."""
        for entry in self._waiting():
            _fail(entry, OwnerUnavailable("nobody knows now whose the partition is: try again"))

    def _waiting(self) -> list[_Entry]:
        entries = []
        for queue in self._queues.values():
            while (entry := queue.first()) is not None:
                queue.remove(entry)
                entries.append(entry)
        return entries

    def _take(self) -> list[_Entry]:
        """Take as many entries as fit one batch, from each lane in turn.

        None where those that waited have given up meanwhile.
        """
        entries: list[_Entry] = []
        size, count = BATCH_OVERHEAD_BYTES, 0
        while True:
            queue = self._whose_turn()
            entry = None if queue is None else queue.first()
            if queue is None or entry is None:
                return entries
            size += entry.size
            count += len(entry.records)
            too_much = size > self._log.batch_bytes_max or count > BATCH_RECORDS_MAX
            if entries and too_much:
                # It is first in the next batch, as its lane's turn has not passed.
                return entries
            self._next_lane = _other(self._next_lane)
            queue.remove(entry)
            entries.append(entry)

    def _whose_turn(self) -> _Queue | None:
        """Return the queue whose turn it is; None where nobody waits."""
        if not self._queues[self._next_lane]:
            self._next_lane = _other(self._next_lane)
        return self._queues[self._next_lane] or None

    async def _send(self, entries: list[_Entry]) -> None:
        records = [record for entry in entries for record in entry.records]
        sent_s = asyncio.get_running_loop().time()
        try:
            where = await self._log.append(records)
            await self._settle(entries, records, where, sent_s)
        except AppendRefused as error:
            if len(entries) == 1:
                _fail(entries[0], TooLarge(f"Kafka does not take this transaction: {error}"))
                return
            # One of them spoils the batch: alone, each shows what it is.
            await self._send_each(entries)
        except (AppendUnknown, KafkaUnavailable) as error:
            self._unanswered()
            for entry in entries:
                _fail(entry, OwnerUnavailable(f"Kafka did not answer: {error}"))
        except BaseException:
            for entry in entries:
                _fail(entry, OwnerUnavailable("the partition is moving to another owner"))
            raise

    async def _send_each(self, entries: list[_Entry]) -> None:
        try:
            for entry in entries:
                await self._send([entry])
        finally:
            # Given up half-way: nobody else knows of those that were not sent any more.
            for entry in entries:
                _fail(entry, OwnerUnavailable("the partition is moving to another owner"))

    async def _settle(
        self, entries: list[_Entry], records: list[Record], where: Appended, sent_s: float
    ) -> None:
        base_offset, timestamp_ms = where
        position = self._position()
        if 0 <= base_offset < position:
            raise LogTruncated(
                f"records were appended at offset {base_offset}, but {position} were read before: "
                "the topic was truncated or recreated"
            )
        if base_offset == position and timestamp_ms >= 0:
            self._told_s = sent_s
            outcomes = [
                self._apply(structs.replace(record, timestamp_ms=timestamp_ms, offset=offset))
                for offset, record in enumerate(records, position)
            ]
        else:
            outcomes = await self._read_back(records, base_offset)
        last = -1
        for entry in entries:
            last += len(entry.records)
            if not entry.outcome.done():
                entry.outcome.set_result(outcomes[last])

    async def _read_back(self, records: list[Record], base_offset: int) -> list[Outcome]:
        """Apply the log up to its end and find our records in it.

        Without an offset they are known by their content: ids and claims make it unique, and
        where it is not (the same prepare twice), the first one is the one that counts.
        """
        wanted: dict[tuple[object, ...], int] = {}
        places = [
            wanted.setdefault((record.key, record.value, record.headers), index)
            for index, record in enumerate(records)
        ]
        if base_offset >= 0:
            places = list(range(len(records)))
        found: dict[int, Outcome] = {}

        def note(record: Record, outcome: Outcome) -> None:
            if base_offset >= 0:
                found[record.offset - base_offset] = outcome
            else:
                index = wanted.get((record.key, record.value, record.headers), -1)
                found.setdefault(index, outcome)

        await self._catch_up(note)
        missing = Outcome(Effect.VOID, why="not found where the broker put it")
        return [found.get(place, missing) for place in places]

    async def _catch_up(
        self, note: Callable[[Record, Outcome], None] | None = None, *, sure: bool = True
    ) -> None:
        start, end = await self._log.bounds(sure=sure)
        position = self._position()
        if not (sure or start <= position <= end):
            start, end = await self._log.bounds()
        if position > end or position < start:
            raise LogTruncated(
                f"the log holds offsets {start} to {end}, but {position} was reached before: "
                "the topic was truncated or recreated"
            )
        if position == end:
            return
        anchor = self._anchor()
        # Others wrote: from the record on that was read last, to see that it is the same log.
        first = position if anchor is None else max(start, anchor.offset)
        async for records in self._log.read(first, end, self._skipped):
            for record in records:
                if record.offset < position:
                    _check_same(record, anchor)
                    continue
                outcome = self._apply(record)
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


def _other(lane: Lane) -> Lane:
    return Lane.SCHEDULE if lane is Lane.CALLS else Lane.CALLS


def _fail(entry: _Entry, error: Exception) -> None:
    if not entry.outcome.done():
        entry.outcome.set_exception(error)
