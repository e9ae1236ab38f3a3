"""The ledger: half minus operation, as a pure function of the two logs' prefixes.

The ledger applies every record of a half partition and of its operation partition, each log in
offset order and without gaps. The result does not depend on how the two interleave: a marker that
is read before its half message waits for it. So any replay, by another owner, a test or an audit,
gives the same result.
"""

from collections.abc import Collection, Container, Iterable, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct, structs

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
from txbroker.core.index import TransactionIndex
from txbroker.core.lifecycle import (
    DECISIONS,
    UNDECIDED,
    IllegalStep,
    MarkerEntry,
    PromotionStep,
    advance,
    wrong_group,
)
from txbroker.core.records import (
    Anchor,
    Cause,
    Checkpoint,
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
from txbroker.core.settled import BEYOND_MAX
from txbroker.core.transaction import (
    Transaction,
    Verdict,
    fingerprint,
    key_mark,
    places,
    same_contents,
)

ACCOUNTED_LOOK = 1000
"""Transactions that one call of `Ledger.accounted` looks at."""
WAITING_SWEEP_MIN = 1000
"""Ids with waiting markers below which they are not searched for ones to forget."""
_CAUSE_LOST = Cause("unknown", "the copy does not say why", "", -1)


class Effect(StrEnum):
    """What applying a record did. All but `applied` and `waiting` change nothing."""

    APPLIED = "applied"
    REPEATED = "repeated"
    """The same again."""
    CONFLICT = "conflict"
    """It contradicts an earlier decision or prepare."""
    ILLEGAL = "illegal"
    """A step that the state does not allow."""
    VOID = "void"
    """An invalid record."""
    EXPIRED = "expired"
    """A half message too far from its id's time."""
    WAITING = "waiting"
    """A marker before its half message: applied if that arrives."""
    PARTIAL = "partial"
    """More records of the same transaction follow in this batch."""
    NEWER = "newer"
    """Written by a newer version of txbroker, which alone can read it."""


class ApplyResult(Struct, frozen=True):
    """What applying one record did, and to which transaction."""

    effect: Effect
    transaction: Transaction | None = None
    why: str = ""


class LogGap(Exception):
    """A record is not the next one of its log: records between may be missing."""


class ChangeWatcher(Protocol):
    """A snapshot that is being captured: it sees each transaction before it changes."""

    def before(self, transaction: Transaction) -> None:
        """The transaction is about to change."""


class _CommitBatch(Struct):
    """A commit marker and the replacing messages read after it so far."""

    marker: Marker
    offset: int
    parts: list[HalfPart]


class Ledger:
    """The transactions of one half partition as far as its logs were read.

    Args:
        partition: the half partition.
        dedup_window_ms: how far a half message may be from its id's time, and the least time for
            which an id or a `dedup_key` is remembered.
        beyond_max: settled transactions that are remembered beyond the window, for display.

    Attributes:
        index: the transactions.
        half_position, op_position: the next offset to apply of either log.
        half_clock_ms, op_clock_ms: the newest append time of either log.
        half_anchor, op_anchor: the last record applied of either log.
        op_progress: the `op` of the newest checkpoint, written or in flight: it never goes back.
        op_committed: the `op` of the newest checkpoint known to be committed.
        wrote_refused: whether a promotion transaction, committed or in flight, refused one.
        commits_waited: commit markers read before their half message so far. Their place in the
            order is unknown until half has been read to an end requested after that.
        waiting: markers before their half message, by id.
    """

    def __init__(self, partition: int, dedup_window_ms: int, beyond_max: int = BEYOND_MAX) -> None:
        self.index = TransactionIndex(beyond_max)
        self.partition = partition
        self.dedup_window_ms = dedup_window_ms
        self.half_position = 0
        self.op_position = 0
        self.half_clock_ms = 0
        self.op_clock_ms = 0
        self.half_anchor: Anchor | None = None
        self.op_anchor: Anchor | None = None
        self.op_progress = 0
        self.op_committed = 0
        self.wrote_refused = False
        self.commits_waited = 0
        self.waiting: dict[str, list[MarkerEntry]] = {}
        self.watcher: ChangeWatcher | None = None
        self._waiting_max = WAITING_SWEEP_MIN
        self._half_before: Anchor | None = None
        self._op_before: Anchor | None = None
        self._parts: list[HalfPart] = []
        self._parts_offset = 0
        self._batch: _CommitBatch | None = None
        # Everything unsettled up to this offset has a parked copy.
        self._kept_to = -1

    def start_at(self, half: int, op: int) -> None:
        """Start with logs whose first kept offsets are these."""
        self.half_position, self.op_position = half, op

    @property
    def half_whole(self) -> int:
        """The half position in whole batches, for checkpoints.

        A checkpoint that pointed into a batch would count its transaction as promoted.
        """
        return self._parts_offset if self._parts else self.half_position

    @property
    def op_whole(self) -> int:
        """The op position in whole batches, for checkpoints."""
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
        """Return the half offset below which no half message is needed any more.

        Below it each transaction is settled, has a parked copy, or is one of `besides`. A call
        looks at `ACCOUNTED_LOOK` transactions after those known to be kept; if these are not
        enough, it returns a lower offset.
        """
        all_kept = True
        rows = self.index.by_offset.after(self._kept_to, ACCOUNTED_LOOK)
        for transaction in rows:
            if not transaction.kept and transaction.id not in besides:
                return transaction.offset
            all_kept = all_kept and transaction.kept
            if all_kept:
                self._kept_to = transaction.offset
        return rows[-1].offset if len(rows) == ACCOUNTED_LOOK else self.half_whole

    # --- half --------------------------------------------------------------------------------

    def apply_half(self, record: Record) -> ApplyResult:
        """Apply the next record of the half topic; raise LogGap if it is not the next one."""
        if record.offset != self.half_position:
            if not record.offset - record.skipped <= self.half_position < record.offset:
                raise self._gap("half", record.offset, self.half_position)
            self._parts = []  # one transaction is one batch, without offsets in between
        self.half_position = record.offset + 1
        if record.timestamp_ms > self.half_clock_ms:
            self.half_clock_ms = record.timestamp_ms
        before, self.half_anchor = self.half_anchor, anchor_of(record)
        try:
            part = decode_half(record)
        except (NewerVersion, Malformed) as error:
            self._parts = []
            return _unread(error)
        if part.sequence == 0:
            self._parts = []
            self._parts_offset = record.offset
            self._half_before = before
        elif not follows(self._parts, part):
            self._parts = []
            why = f"{part.id}: message {part.sequence} without the first"
            return ApplyResult(Effect.VOID, why=why)
        self._parts.append(part)
        if part.sequence + 1 < part.count:
            return ApplyResult(Effect.PARTIAL)
        half, self._parts = join_parts(self._parts), []
        mark = fingerprint(half.messages, half.group)
        result = self._apply_half(half, self._parts_offset, mark, places(half.messages))
        if result.effect is Effect.APPLIED:
            self._forget()
        return result

    def apply_halves(
        self, rows: Sequence[HalfRow], offset: int, timestamp_ms: int
    ) -> list[ApplyResult]:
        """Apply half messages that this proxy has just appended as one batch, from `offset` on, as
        `apply_half` applies each record."""
        if offset != self.half_position:
            raise self._gap("half", offset, self.half_position)
        self._parts = []
        if timestamp_ms > self.half_clock_ms:
            self.half_clock_ms = timestamp_ms
        before, results, at = self.half_anchor, [], offset
        forgotten = False
        for row in rows:
            self._parts_offset, self._half_before = at, before
            result = self._apply_half(row.half, at, row.fingerprint, row.places)
            if not forgotten and result.effect is Effect.APPLIED:
                # All rows have one append time: once is enough.
                forgotten = True
                self._forget()
            results.append(result)
            at += len(row.records)
            before = Anchor(at - 1, timestamp_ms)
        self.half_position, self.half_anchor = at, before
        return results

    def skip_half(self, offsets: range) -> None:
        """Skip offsets of the half topic that hold no record and are followed by none yet.

        Otherwise the ledger would stay below the log's end, and once retention has deleted these
        offsets nothing could show that no record is missing.

        Raises:
            Gap: they are not the next ones.
        """
        if offsets.stop > self.half_position:
            if offsets.start > self.half_position:
                raise self._gap("half", offsets.start, self.half_position)
            self._parts = []  # a batch has no such offsets in between
            self.half_position = offsets.stop

    def _gap(self, log: str, offset: int, position: int) -> LogGap:
        return LogGap(f"{log} {self.partition}: offset {offset}, not {position}")

    def _apply_half(
        self, half: Half, offset: int, mark: bytes, where: tuple[Place, ...]
    ) -> ApplyResult:
        id, index = half.id, self.index
        try:
            parts = parse_id(id)
        except ValueError as error:
            return ApplyResult(Effect.VOID, why=str(error))
        if parts.partition != self.partition:
            return ApplyResult(Effect.VOID, why=f"{id} belongs to partition {parts.partition}")
        known = index.transactions.get(id) or index.settled.get(id)
        attributes = half.attributes
        if known is None and attributes.dedup_key is not None:
            earlier = index.by_dedup_key(half.group, attributes.dedup_key)
            if earlier and self.half_clock_ms - earlier.prepared_at_ms <= self.dedup_window_ms:
                known = earlier
        if known is not None:
            effect = Effect.REPEATED if mark.startswith(known.fingerprint) else Effect.CONFLICT
            return ApplyResult(effect, known)
        if abs(self.half_clock_ms - parts.time_ms) > self.dedup_window_ms:
            why = f"{self.half_clock_ms - parts.time_ms} ms from its id's time"
            return ApplyResult(Effect.EXPIRED, why=why)
        first = half.messages[0]
        order = order_mark(attributes.order_key, first.topic, first.key)
        transaction = Transaction(half, offset, self.half_clock_ms, mark, where, order)
        for message in half.messages:
            transaction.keys |= key_mark(message.topic, message.key)
        index.add(transaction)
        if self.waiting:
            self._apply_waiting(transaction)
        return ApplyResult(Effect.APPLIED, transaction)

    def _apply_waiting(self, transaction: Transaction) -> None:
        for entry in self.waiting.pop(transaction.half.id, ()):
            self._apply_marker(transaction, entry)

    def restore(self, copy: ParkedCopy) -> None:
        """Take a transaction from its parked copy: retention has deleted the half message.

        To be called before the operation topic is applied, which may have lost markers too: a
        parked one stays parked until the next marker, and a committed one stays so.
        """
        if self.index.get(copy.half.id) is None:
            transaction = transaction_of(copy)
            if copy.state is State.PARKED:
                transaction.state = State.PARKED
            elif copy.state is State.COMMITTED:
                transaction.state = State.COMMITTED
                transaction.verdict = Verdict(Decision.COMMIT, at_ms=copy.decided_at_ms)
            self.index.add(transaction)
            self._apply_waiting(transaction)

    # --- operation ---------------------------------------------------------------------------

    def apply_op(self, record: Record) -> ApplyResult:
        """Apply the next record of the operation topic; raise LogGap if it is not the next one."""
        if record.offset != self.op_position:
            if not record.offset - record.skipped <= self.op_position < record.offset:
                raise self._gap("op", record.offset, self.op_position)
            self._batch = None  # marker and contents are one batch, without offsets in between
        self.op_position = record.offset + 1
        self.op_clock_ms = max(self.op_clock_ms, record.timestamp_ms)
        before, self.op_anchor = self.op_anchor, anchor_of(record)
        if is_content(record):
            return self._apply_content(record)
        self._batch = None
        try:
            marker = decode_marker(record)
            if marker.id not in self.index.transactions:
                parse_id(marker.id)
        except ValueError as error:
            return _unread(error)
        if marker.contents:
            # Marker and replacing messages are one batch: they take effect together.
            self._batch = _CommitBatch(marker, record.offset, [])
            self._op_before = before
            return ApplyResult(Effect.PARTIAL)
        return self._apply_entry(
            MarkerEntry(marker, record.offset, self.op_clock_ms, record.timestamp_ms)
        )

    def apply_markers(
        self, rows: Sequence[MarkerRow], offset: int, timestamp_ms: int
    ) -> list[ApplyResult]:
        """Apply markers that this proxy has just appended; see `apply_halves`."""
        if offset != self.op_position:
            raise self._gap("op", offset, self.op_position)
        self._batch = None
        self.op_clock_ms = clock_ms = max(self.op_clock_ms, timestamp_ms)
        results, at = [], offset
        for row in rows:
            entry = MarkerEntry(row.marker, at, clock_ms, timestamp_ms, row.contents)
            try:
                results.append(self._apply_entry(entry))
            except ValueError as error:
                results.append(ApplyResult(Effect.VOID, why=str(error)))
            at += len(row.records)
        self.op_position, self.op_anchor = at, Anchor(at - 1, timestamp_ms)
        return results

    def skip_op(self, offsets: range) -> None:
        """Skip offsets of the operation topic; see `skip_half`."""
        if offsets.stop > self.op_position:
            if offsets.start > self.op_position:
                raise self._gap("op", offsets.start, self.op_position)
            self._batch = None
            self.op_position = offsets.stop

    def _apply_content(self, record: Record) -> ApplyResult:
        """Collect a message that replaces a prepared one; with the last one apply the marker."""
        batch, self._batch = self._batch, None
        if batch is None:
            return ApplyResult(Effect.VOID, why="replaced content without its marker")
        try:
            part = decode_half(record)
        except (NewerVersion, Malformed) as error:
            return _unread(error)
        marker = batch.marker
        if (part.id, part.sequence, part.count) != (marker.id, len(batch.parts), marker.contents):
            why = f"{part.id}: not the content that its marker announces"
            return ApplyResult(Effect.VOID, why=why)
        batch.parts.append(part)
        if len(batch.parts) < marker.contents:
            self._batch = batch
            return ApplyResult(Effect.PARTIAL)
        contents = tuple([part.message for part in batch.parts])
        return self._apply_entry(
            MarkerEntry(marker, batch.offset, self.op_clock_ms, record.timestamp_ms, contents)
        )

    def _apply_entry(self, entry: MarkerEntry) -> ApplyResult:
        marker, index = entry.marker, self.index
        transaction = index.transactions.get(marker.id) or index.settled.get(marker.id)
        if transaction is not None:
            return self._apply_marker(transaction, entry)
        id = parse_id(marker.id)
        if id.partition != self.partition:
            return ApplyResult(Effect.VOID, why=f"{marker.id} belongs to partition {id.partition}")
        if self.half_clock_ms - id.time_ms > self.dedup_window_ms:
            # A half message of this id would be void by now.
            return ApplyResult(Effect.ILLEGAL, why=f"{marker.kind} for an unknown transaction")
        self.waiting.setdefault(marker.id, []).append(entry)
        self.commits_waited += marker.kind is MarkerKind.COMMIT
        return ApplyResult(Effect.WAITING)

    def _apply_marker(self, transaction: Transaction, entry: MarkerEntry) -> ApplyResult:
        kind, before, index = entry.marker.kind, transaction.state, self.index
        if self.watcher is not None:
            self.watcher.before(transaction)
        if transaction.verdict.decision is not None and kind in DECISIONS:
            return self._apply_repeat(transaction, entry)
        body_bytes = 0 if entry.contents is None else transaction.body_bytes
        try:
            advance(transaction, kind, entry)
        except IllegalStep as error:
            return ApplyResult(Effect.ILLEGAL, transaction, str(error))
        after = transaction.state
        if entry.contents is not None:
            index.body_bytes += transaction.body_bytes - body_bytes
        if after is State.COMMITTED:
            index.decide(transaction, before)
        elif after is State.ROLLED_BACK:
            index.decide(transaction, before)
            self._forget()
        elif after is State.PARKED:
            index.park(transaction)
        elif before is State.PARKED:
            index.revive(transaction)
        return ApplyResult(Effect.APPLIED, transaction)

    def _apply_repeat(self, transaction: Transaction, entry: MarkerEntry) -> ApplyResult:
        """Compare a marker with the decision there is: the first one wins."""
        why = wrong_group(transaction, entry)
        if why:
            return ApplyResult(Effect.ILLEGAL, transaction, why)
        verdict = transaction.verdict
        same = verdict.decision is DECISIONS[entry.marker.kind]
        if not same or not same_contents(transaction, entry.contents):
            return ApplyResult(Effect.CONFLICT, transaction)
        if verdict.op_offset < 0:
            # It came from a copy, which does not hold the marker's offset: without that, one that
            # is yet to be promoted would count as promoted.
            transaction.verdict = structs.replace(verdict, op_offset=entry.offset)
            self.index.reorder(transaction)
        return ApplyResult(Effect.REPEATED, transaction)

    # --- promotion transactions --------------------------------------------------------------

    def promote_run(
        self, transactions: Sequence[Transaction], offsets: Sequence[int] = (), now_ms: int = 0
    ) -> None:
        """A promotion transaction with these was committed: they are settled.

        Args:
            transactions: unsettled, in the order in which they were written.
            offsets: of their messages in their targets, one transaction's after the other's;
                empty if this owner does not know them.
            now_ms: when this owner saw them visible; 0 if it did not.

        Raises:
            IllegalStep: one is undecided, or was settled before.
        """
        taken = 0
        for transaction in transactions:
            if self.watcher is not None:
                self.watcher.before(transaction)
            advance(transaction, PromotionStep.PROMOTE)
            count = len(transaction.half.messages)
            transaction.offsets = tuple(offsets[taken : taken + count])
            transaction.promoted_at_ms = now_ms
            taken += count
        self.index.settle(transactions)
        self._forget()

    def refuse(self, id: str, cause: Cause) -> None:
        """A promotion transaction was committed that refused this one: it has a parked copy."""
        transaction = self.index.transactions[id]
        if self.watcher is not None:
            self.watcher.before(transaction)
        advance(transaction, PromotionStep.REFUSE)
        transaction.cause = cause
        self.index.refuse(transaction)

    def reconcile(
        self,
        checkpoint: Checkpoint | None,
        copies: Iterable[ParkedCopy],
        unseen: Collection[str] = (),
    ) -> list[Transaction]:
        """After a claim, apply what earlier promotion transactions have committed.

        Args:
            copies: all that the parked topic holds.
            unseen: those known to be committed whose visibility is still waited for.

        Returns:
            The others that turned out to be promoted.
        """
        self._take_copies({copy.half.id: copy for copy in copies})
        self.op_progress = self.op_committed = 0 if checkpoint is None else checkpoint.op
        self.wrote_refused = checkpoint is not None and checkpoint.refused
        done = [] if checkpoint is None else self._done(checkpoint)
        done = [transaction for transaction in done if transaction.id not in unseen]
        for transaction in done:
            if transaction.kept:
                self.index.to_release[transaction.id] = transaction
        self.promote_run(done)
        return done

    def _take_copies(self, copies: dict[str, ParkedCopy]) -> None:
        index = self.index
        index.to_keep.clear()
        index.to_release.clear()
        self._kept_to = -1
        for id, transaction in index.transactions.items():
            copy = copies.get(id)
            if copy is None and not transaction.kept and transaction.state is not State.PARKED:
                continue
            transaction.kept = copy is not None
            transaction.kept_at = () if copy is None else copy.at
            if transaction.state is State.PARKED and (
                copy is None
                or copy.state is not State.PARKED
                or copy.checks.round < transaction.checks.round
            ):
                index.to_keep[transaction.id] = transaction
            if copy is not None and copy.state is State.REFUSED:
                self._refuse_by_copy(transaction, copy)
        for id, copy in copies.items():
            if id not in index.transactions:
                # Settled, maybe forgotten since, and the copy was left.
                index.to_release[id] = index.settled.shown.get(id) or transaction_of(copy)

    def _refuse_by_copy(self, transaction: Transaction, copy: ParkedCopy) -> None:
        """Apply a refusal before the claim. Retention may have deleted the commit marker."""
        if transaction.state in UNDECIDED:
            if self.watcher is not None:
                self.watcher.before(transaction)
            before, transaction.state = transaction.state, State.COMMITTED
            decided_ms = copy.decided_at_ms or copy.prepared_at_ms
            transaction.verdict = Verdict(Decision.COMMIT, at_ms=decided_ms)
            self.index.decide(transaction, before)
        self.refuse(transaction.id, copy.cause or _CAUSE_LOST)

    def _done(self, checkpoint: Checkpoint) -> list[Transaction]:
        # A refused one without a copy: the promotion transaction that retried it was committed.
        retried = [t for t in self.index.refused.values() if not t.kept]
        deferred = frozenset(checkpoint.deferred)
        return retried + [
            transaction
            for transaction in self.index.ready.values()
            if transaction.verdict.op_offset < checkpoint.op
            and transaction.offset < checkpoint.half
            and transaction.id not in deferred
        ]

    # --- forgetting --------------------------------------------------------------------------

    def _forget(self) -> None:
        """Forget settled transactions and waiting markers, by the log clock."""
        self.index.forget(self.half_clock_ms - self.dedup_window_ms)
        if len(self.waiting) > self._waiting_max:
            self.waiting = {
                id: entries
                for id, entries in self.waiting.items()
                if self.half_clock_ms - parse_id(id).time_ms <= self.dedup_window_ms
            }
            # While op is read far ahead of half most of them stay: a sweep at each record would
            # be quadratic.
            self._waiting_max = max(WAITING_SWEEP_MIN, 2 * len(self.waiting))


def transaction_of(copy: ParkedCopy) -> Transaction:
    """Return the pending transaction of a parked copy."""
    half = copy.half
    first = half.messages[0]
    transaction = Transaction(
        half,
        copy.half_offset,
        copy.prepared_at_ms,
        fingerprint(half.messages, half.group),
        places(half.messages),
        order_mark(half.attributes.order_key, first.topic, first.key),
    )
    transaction.checks = copy.checks
    transaction.kept = True
    return transaction


def _unread(error: ValueError) -> ApplyResult:
    effect = Effect.NEWER if isinstance(error, NewerVersion) else Effect.VOID
    return ApplyResult(effect, why=str(error))
