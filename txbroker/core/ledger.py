"""The ledger: half minus operation, as a pure function of the two logs' prefixes.

The ledger applies every record of a half partition and of its operation partition, each without
gaps and in the order of offsets. What comes out does not depend on how the two interleave: a
marker whose half message has not been read yet waits for it. So any replay, by another owner, a
test or an audit, comes to the same answer.
"""

from collections.abc import Container, Sequence

from msgspec import Struct

from txbroker.core.decoding import (
    HalfPart,
    Malformed,
    NewerVersion,
    decode_half,
    decode_marker,
    follows,
    is_content,
    join_parts,
)
from txbroker.core.encoding import HalfRow, MarkerRow
from txbroker.core.holdings import BEYOND_MAX, TransactionIndex, from_copy
from txbroker.core.lifecycle import IllegalStep, Step
from txbroker.core.outcome import ApplyResult, Effect, MarkerEntry
from txbroker.core.records import (
    Anchor,
    Decision,
    Half,
    Marker,
    MarkerKind,
    ParkedCopy,
    Place,
    Record,
    State,
    anchor_of,
)
from txbroker.core.routing import order_mark, parse_id
from txbroker.core.transaction import Transaction, Verdict, fingerprint, fits, places, same_contents

ACCOUNTED_LOOK = 1000
"""Transactions that one turn's progress looks at."""


class Gap(Exception):
    """A record is not the next one of its log, and not all offsets before it are known to hold
    none."""


class _Batch(Struct):
    """A commit marker and the replaced messages that follow it, while they are being read."""

    marker: Marker
    offset: int
    parts: list[HalfPart]


class Ledger(TransactionIndex):
    """The transactions of one half partition as far as its logs were read.

    Args:
        partition: the half partition.
        dedup_window_ms: how far a half message may be from its id's time, and how long an id or
            a `dedup_key` is remembered at least.
        beyond_max: settled transactions that are remembered beyond the window, for show.
    """

    def __init__(self, partition: int, dedup_window_ms: int, beyond_max: int = BEYOND_MAX) -> None:
        super().__init__(dedup_window_ms, beyond_max)
        self.partition = partition
        self.half_position = 0
        self.op_position = 0
        self.op_clock_ms = 0
        self.half_anchor: Anchor | None = None
        self.op_anchor: Anchor | None = None
        self._half_before: Anchor | None = None
        self._op_before: Anchor | None = None
        self._parts: list[HalfPart] = []
        self._parts_offset = 0
        self.commits_waited = 0
        """How many commit markers were read before their half message, since the beginning. Until
        half is read to an end asked for after that, nobody knows whose place in the order they
        have."""
        self._batch: _Batch | None = None

    def start_at(self, half: int, op: int) -> None:
        """Begin with logs whose first kept offsets are these."""
        self.half_position, self.op_position = half, op

    @property
    def half_whole(self) -> int:
        """How far the half topic is applied in whole batches: what progress may say.

        Progress that pointed into a batch would count its transaction as dealt with.
        """
        return self._parts_offset if self._parts else self.half_position

    @property
    def op_whole(self) -> int:
        """How far the operation topic is applied in whole batches: what progress may say."""
        return self.op_position if self._batch is None else self._batch.offset

    @property
    def half_whole_anchor(self) -> Anchor | None:
        """The last record below `half_whole`."""
        return self._half_before if self._parts else self.half_anchor

    @property
    def op_whole_anchor(self) -> Anchor | None:
        """The last record below `op_whole`."""
        return self.op_anchor if self._batch is None else self._op_before

    def accounted(self, besides: Container[str]) -> int:
        """Return the half offset below which no transaction needs its half message any more: each
        is settled, kept as a copy, or one of `besides`.

        Each call looks at `ACCOUNTED_LOOK` of them behind the kept ones that it knows already;
        where these are not enough, it returns a lower offset.
        """
        all_kept = True
        found = self.in_order(self._kept_to, ACCOUNTED_LOOK)
        for transaction in found:
            if not transaction.kept and transaction.id not in besides:
                return transaction.offset
            all_kept = all_kept and transaction.kept
            if all_kept:
                self._kept_to = transaction.offset
        return found[-1].offset if len(found) == ACCOUNTED_LOOK else self.half_whole

    # --- half ----------------------------------------------------------------------------

    def apply_half(self, record: Record) -> ApplyResult:
        """Apply the next record of the half topic.

        Raises:
            Gap: it is not the next one.
        """
        if record.offset != self.half_position:
            if not record.offset - record.skipped <= self.half_position < record.offset:
                raise Gap(
                    f"half {self.partition}: offset {record.offset}, not {self.half_position}"
                )
            self._parts = []  # what belongs together is one batch, without offsets in between
        self.half_position = record.offset + 1
        if record.timestamp_ms > self.half_clock_ms:
            self.half_clock_ms = record.timestamp_ms
        before, self.half_anchor = self.half_anchor, anchor_of(record)
        try:
            part = decode_half(record)
        except NewerVersion as error:
            self._parts = []
            return ApplyResult(Effect.NEWER, why=str(error))
        except Malformed as error:
            self._parts = []
            return ApplyResult(Effect.VOID, why=str(error))
        if part.sequence == 0:
            self._parts = []
            self._parts_offset = record.offset
            self._half_before = before
        elif not follows(self._parts, part):
            self._parts = []
            return ApplyResult(
                Effect.VOID, why=f"{part.id}: message {part.sequence} without the first"
            )
        self._parts.append(part)
        if part.sequence + 1 < part.count:
            return ApplyResult(Effect.PARTIAL)
        half, self._parts = join_parts(self._parts), []
        mark = fingerprint(half.messages, half.group)
        outcome = self._half(half, self._parts_offset, mark, places(half.messages))
        if outcome.effect is Effect.APPLIED:
            self._forget()
        return outcome

    def apply_halves(
        self, rows: Sequence[HalfRow], offset: int, timestamp_ms: int
    ) -> list[ApplyResult]:
        """Apply half messages that this proxy has just appended as one batch, from `offset` on.

        It comes to what `apply_half` of their records one by one comes to.
        """
        if offset != self.half_position:
            raise Gap(f"half {self.partition}: offset {offset}, not {self.half_position}")
        self._parts = []
        if timestamp_ms > self.half_clock_ms:
            self.half_clock_ms = timestamp_ms
        before, outcomes, at = self.half_anchor, [], offset
        forgotten = False
        for row in rows:
            self._parts_offset, self._half_before = at, before
            outcome = self._half(row.half, at, row.fingerprint, row.places)
            if not forgotten and outcome.effect is Effect.APPLIED:
                # The log clock is the same for all of the run: once is enough.
                forgotten = True
                self._forget()
            outcomes.append(outcome)
            at += len(row.records)
            before = Anchor(at - 1, timestamp_ms)
        self.half_position, self.half_anchor = at, before
        return outcomes

    def skip_half(self, offsets: range) -> None:
        """Go past offsets of the half topic that hold no record and have none behind them yet.

        Without this the ledger would stay behind the log's end, and once retention has taken
        these offsets nothing could tell that no record is missing.

        Raises:
            Gap: they are not the next ones.
        """
        if offsets.stop > self.half_position:
            if offsets.start > self.half_position:
                raise Gap(
                    f"half {self.partition}: offset {offsets.start}, not {self.half_position}"
                )
            self._parts = []  # a batch has no such offsets in between
            self.half_position = offsets.stop

    def _half(self, half: Half, offset: int, mark: bytes, where: tuple[Place, ...]) -> ApplyResult:
        id = half.id
        try:
            parts = parse_id(id)
        except ValueError as error:
            return ApplyResult(Effect.VOID, why=str(error))
        if parts.partition != self.partition:
            return ApplyResult(Effect.VOID, why=f"{id} belongs to partition {parts.partition}")
        standing = self.transactions.get(id) or self.settled.get(id)
        if standing is None and half.dedup_key is not None:
            earlier = self.by_dedup_key(half.group, half.dedup_key)
            if earlier and self.half_clock_ms - earlier.prepared_at_ms <= self.dedup_window_ms:
                standing = earlier
        if standing is not None:
            effect = Effect.REPEATED if mark.startswith(standing.fingerprint) else Effect.CONFLICT
            return ApplyResult(effect, standing)
        if abs(self.half_clock_ms - parts.time_ms) > self.dedup_window_ms:
            return ApplyResult(
                Effect.EXPIRED, why=f"{self.half_clock_ms - parts.time_ms} ms from its id's time"
            )
        first = half.messages[0]
        order = order_mark(half.order_key, first.topic, first.key)
        transaction = Transaction(half, offset, self.half_clock_ms, mark, where, order)
        self._enter(transaction)
        return ApplyResult(Effect.APPLIED, transaction)

    def _enter(self, transaction: Transaction) -> None:
        self.take_in(transaction)
        if self.waiting:
            for entry in self.waiting.pop(transaction.half.id, ()):
                self._marker(transaction, entry)

    def restore(self, kept: ParkedCopy) -> None:
        """Take a transaction from its copy: half's retention has taken the half message.

        To be called before the operation topic is applied, which may have lost the markers too:
        a parked one stays parked until a marker that is still there says otherwise, and what was
        committed stays so.
        """
        if self.get(kept.half.id) is None:
            transaction = from_copy(kept)
            if kept.state is State.PARKED:
                transaction.take(Step.PARK)
            elif kept.state is State.COMMITTED:
                transaction.take(Step.COMMIT)
                transaction.verdict = Verdict(Decision.COMMIT, at_ms=kept.decided_at_ms)
            self._enter(transaction)

    # --- operation -----------------------------------------------------------------------

    def apply_op(self, record: Record) -> ApplyResult:
        """Apply the next record of the operation topic.

        Raises:
            Gap: it is not the next one.
        """
        if record.offset != self.op_position:
            if not record.offset - record.skipped <= self.op_position < record.offset:
                raise Gap(f"op {self.partition}: offset {record.offset}, not {self.op_position}")
            self._batch = None  # what belongs together is one batch, without offsets in between
        self.op_position = record.offset + 1
        self.op_clock_ms = max(self.op_clock_ms, record.timestamp_ms)
        before, self.op_anchor = self.op_anchor, anchor_of(record)
        if is_content(record):
            return self._content(record)
        self._batch = None
        try:
            marker = decode_marker(record)
            if marker.id not in self.transactions:
                parse_id(marker.id)
        except NewerVersion as error:
            return ApplyResult(Effect.NEWER, why=str(error))
        except ValueError as error:
            return ApplyResult(Effect.VOID, why=str(error))
        if marker.contents:
            # Marker and replaced messages are one batch: they take effect together.
            self._batch = _Batch(marker, record.offset, [])
            self._op_before = before
            return ApplyResult(Effect.PARTIAL)
        return self._entry(
            MarkerEntry(marker, record.offset, self.op_clock_ms, record.timestamp_ms)
        )

    def apply_markers(
        self, rows: Sequence[MarkerRow], offset: int, timestamp_ms: int
    ) -> list[ApplyResult]:
        """Apply markers that this proxy has just appended; see `apply_halves`."""
        if offset != self.op_position:
            raise Gap(f"op {self.partition}: offset {offset}, not {self.op_position}")
        self._batch = None
        self.op_clock_ms = clock_ms = max(self.op_clock_ms, timestamp_ms)
        outcomes, at = [], offset
        for row in rows:
            marker = row.marker
            entry = MarkerEntry(marker, at, clock_ms, timestamp_ms, row.contents)
            try:
                outcomes.append(self._entry(entry))
            except ValueError as error:
                outcomes.append(ApplyResult(Effect.VOID, why=str(error)))
            at += len(row.records)
        self.op_position, self.op_anchor = at, Anchor(at - 1, timestamp_ms)
        return outcomes

    def skip_op(self, offsets: range) -> None:
        """Go past offsets of the operation topic, as `skip_half` does.

        Raises:
            Gap: they are not the next ones.
        """
        if offsets.stop > self.op_position:
            if offsets.start > self.op_position:
                raise Gap(f"op {self.partition}: offset {offsets.start}, not {self.op_position}")
            self._batch = None
            self.op_position = offsets.stop

    def _content(self, record: Record) -> ApplyResult:
        batch = self._batch
        if batch is None:
            return ApplyResult(Effect.VOID, why="replaced content without its marker")
        try:
            part = decode_half(record)
        except NewerVersion as error:
            self._batch = None
            return ApplyResult(Effect.NEWER, why=str(error))
        except Malformed as error:
            self._batch = None
            return ApplyResult(Effect.VOID, why=str(error))
        place = (part.id, part.sequence, part.count)
        if place != (batch.marker.id, len(batch.parts), batch.marker.contents):
            self._batch = None
            return ApplyResult(
                Effect.VOID, why=f"{part.id}: not the content that its marker announces"
            )
        batch.parts.append(part)
        if len(batch.parts) < batch.marker.contents:
            return ApplyResult(Effect.PARTIAL)
        self._batch = None
        contents = tuple([part.message for part in batch.parts])
        stamp_ms = record.timestamp_ms
        return self._entry(
            MarkerEntry(batch.marker, batch.offset, self.op_clock_ms, stamp_ms, contents)
        )

    def _entry(self, entry: MarkerEntry) -> ApplyResult:
        marker = entry.marker
        transaction = self.transactions.get(marker.id) or self.settled.get(marker.id)
        if transaction is not None:
            return self._marker(transaction, entry)
        id = parse_id(marker.id)
        if id.partition != self.partition:
            return ApplyResult(Effect.VOID, why=f"{marker.id} belongs to partition {id.partition}")
        if self.half_clock_ms - id.time_ms > self.dedup_window_ms:
            # A half message of this id would be void by now, so nothing is worth waiting for.
            return ApplyResult(Effect.ILLEGAL, why=f"{marker.kind} for an unknown transaction")
        self.waiting.setdefault(marker.id, []).append(entry)
        self.commits_waited += marker.kind is MarkerKind.COMMIT
        return ApplyResult(Effect.WAITING)

    def _marker(self, transaction: Transaction, entry: MarkerEntry) -> ApplyResult:
        marker, at_ms = entry.marker, entry.at_ms
        kind = marker.kind
        if self.watcher is not None:
            self.watcher.before(transaction)
        try:
            if kind is MarkerKind.COMMIT or kind is MarkerKind.ROLLBACK:
                return self._decide(transaction, entry)
            if kind is MarkerKind.CHECK:
                transaction.check(marker, at_ms)
            elif kind is MarkerKind.RETURNED or kind is MarkerKind.LATER:
                transaction.give_back(marker, at_ms, Step(kind))
            elif kind is MarkerKind.PARK:
                transaction.park(marker, at_ms)
                self.parked[transaction.id] = transaction
                self._group(transaction.half.group).parked(transaction)
                # Also where an older copy lies there: that one does not say that it is parked.
                self.to_keep[transaction.id] = transaction
            else:
                was = transaction.state
                transaction.revive(marker, at_ms)
                if was is State.PARKED:
                    del self.parked[transaction.id]
                    self._group(transaction.half.group).revived(transaction)
        except IllegalStep as error:
            return ApplyResult(Effect.ILLEGAL, transaction, str(error))
        return ApplyResult(Effect.APPLIED, transaction)

    def _decide(self, transaction: Transaction, entry: MarkerEntry) -> ApplyResult:
        marker, decision = entry.marker, _DECISIONS[entry.marker.kind]
        if marker.group and marker.group != transaction.half.group:
            return ApplyResult(
                Effect.ILLEGAL, transaction, f"group {marker.group!r} does not own it"
            )
        if transaction.verdict is not None:
            same = transaction.decision is decision and same_contents(transaction, entry.contents)
            if same and transaction.op_offset < 0:
                self._marker_at(transaction, entry.offset)
            return ApplyResult(Effect.REPEATED if same else Effect.CONFLICT, transaction)
        if entry.contents is not None and not fits(transaction.half, entry.contents):
            return ApplyResult(Effect.ILLEGAL, transaction, "replaced content for other topics")
        self._leave_undecided(transaction)
        transaction.decide(marker, entry.offset, entry.stamp_ms, decision)
        self.to_keep.pop(transaction.id, None)
        if decision is Decision.COMMIT:
            if entry.contents is not None:
                self.body_bytes -= transaction.body_bytes
                transaction.replace(entry.contents)
                self.body_bytes += transaction.body_bytes
            self._make_ready(transaction)
        else:
            if transaction.kept:
                self.to_release[transaction.id] = transaction
            self._settle(transaction)
        return ApplyResult(Effect.APPLIED, transaction)

    def _marker_at(self, transaction: Transaction, offset: int) -> None:
        """It came from a copy, which does not say where its marker is: without that, one whose
        turn was yet to come would count as promoted."""
        assert transaction.verdict is not None
        transaction.verdict.op_offset = offset
        self._ready_to, self._ready_in_order = max(self._ready_to, offset), False


_DECISIONS = {
    MarkerKind.COMMIT: Decision.COMMIT,
    MarkerKind.ROLLBACK: Decision.ROLLBACK,
}
