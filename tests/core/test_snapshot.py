"""A snapshot and the records after it give the same ledger as a replay."""

import gc
import hashlib
import json
import tracemalloc
from collections.abc import Callable, Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.core.core_fuzz import fuzz
from tests.core.core_histories import histories
from tests.kit.logs import (
    PARTITION,
    START_MS,
    WINDOW_MS,
    Logs,
    apply_all,
    half_of,
    id_of,
    marker_of,
    message,
    new_ledger,
    replayed,
)
from txbroker.core import settled, snapshot
from txbroker.core.index import Schedule, due_ms
from txbroker.core.ledger import Ledger
from txbroker.core.lifecycle import SETTLED
from txbroker.core.records import (
    RECORD_VERSION,
    Cause,
    Checkpoint,
    CheckPolicy,
    ParkedCopy,
    Record,
    State,
)
from txbroker.core.routing import parse_id
from txbroker.core.segment import MARK_BYTES
from txbroker.core.settled import SHOWN_MAX
from txbroker.core.snapshot import (
    CHUNK_BYTES,
    CLOSING_KEYS,
    SnapshotCapture,
    chunks_in,
    find_whole,
    load,
    segment_key,
    segments_in,
)
from txbroker.core.transaction import Transaction

CAUSE = Cause("too_large", "too large", "t", 0)
PENDING_BYTES_MAX = 700
"""What one pending transaction may take in the ledger without its messages; its place in the
schedule and all strings and numbers of its own included."""
SETTLED_BYTES_MAX = 350
CHUNK_ENTRIES = snapshot.CHUNK_ENTRIES


def step(logs: Logs, ledger: Ledger, *, half: bool) -> None:
    """Apply the next record of one log, of the other where that one is at its end."""
    half_left = ledger.half_position < len(logs.half.records)
    op_left = ledger.op_position < len(logs.op.records)
    if half_left and (half or not op_left):
        ledger.apply_half(logs.half.records[ledger.half_position])
    elif op_left:
        ledger.apply_op(logs.op.records[ledger.op_position])


def essence(transaction: Transaction) -> dict[str, object]:
    """What a snapshot holds of a transaction that is not settled."""
    half, facts = transaction.half, structs.asdict(transaction)
    for name in ("half", "has_bodies", "contents", "kept", "kept_at", "instance", "cause", "keys"):
        del facts[name]
    facts["half"] = (half.id, half.group, half.attributes, half.policy)
    facts["cause"] = transaction.cause if transaction.state is State.REFUSED else None
    return facts


def end_of(transaction: Transaction) -> tuple[object, ...]:
    """What is remembered of a settled transaction."""
    half = transaction.half
    verdict = transaction.verdict
    return (
        *(transaction.state, verdict.decision, transaction.offset, verdict.op_offset),
        *(transaction.prepared_at_ms, verdict.at_ms, transaction.fingerprint[:MARK_BYTES]),
        *(verdict.contents_fingerprint, [(p.topic, p.partition) for p in transaction.places]),
        *(half.group, half.attributes.dedup_key),
    )


def capture(ledger: Ledger, id: str = "one", slot: int = 0) -> list[Record]:
    """Return the records of a snapshot that is taken at once."""
    return list(SnapshotCapture(ledger, id, slot, RECORD_VERSION).records())


def loaded(records: list[Record]) -> Ledger:
    """Return a new ledger at the greatest whole snapshot."""
    ledger = new_ledger()
    for _ in load(find_whole(records)[0], ledger):
        pass
    return ledger


def view(ledger: Ledger) -> dict[str, object]:
    """What a snapshot holds of a ledger, besides the settled transactions."""
    index, clock_ms = ledger.index, ledger.half_clock_ms
    return {
        "unsettled": {id: essence(t) for id, t in index.transactions.items()},
        "ready": list(index.ready),
        "refused": index.refused.keys(),
        "parked": index.parked.keys(),
        "undecided": (index.undecided_count, index.pending_by_group, index.parked_by_group),
        "order": [t.id for t in index.by_offset.after(-1, 1000)],
        "clocks": (clock_ms, ledger.op_clock_ms),
        "whole": (ledger.half_whole, ledger.op_whole),
        "anchors": (ledger.half_whole_anchor, ledger.op_whole_anchor),
        # Other markers can no longer find their half message.
        "waiting": {
            id: entries
            for id, entries in ledger.waiting.items()
            if clock_ms - parse_id(id).time_ms <= WINDOW_MS
        },
    }


def compare(found: Ledger, expected: Ledger, clock_ms: int) -> None:
    """Compare a ledger that came out of a snapshot, taken at `clock_ms`, with a replayed one."""
    assert view(found) == view(expected)
    remembered = {t.id: end_of(t) for t in found.index.settled}
    for transaction in expected.index.settled:
        if transaction.id in remembered:
            assert remembered.pop(transaction.id) == end_of(transaction)
        else:
            last_ms = max(parse_id(transaction.id).time_ms, transaction.prepared_at_ms)
            assert last_ms < clock_ms - WINDOW_MS
    assert not remembered
    for group in ("g", "h"):
        for key in ("d", "e"):
            holder, other = (each.index.by_dedup_key(group, key) for each in (expected, found))
            if holder is None or found.index.get(holder.id) is not None:
                assert (holder and holder.id) == (other and other.id)


@pytest.mark.rule(11)
@fuzz
@given(histories(), st.integers(0, 2**32))
def test_a_snapshot_and_the_rest_are_a_replay(logs: Logs, seed: int) -> None:
    """The capture begins anywhere, and its records are taken while the ledger goes on."""
    chance = Random(seed)
    length = len(logs.half.records) + len(logs.op.records)
    begin = chance.randrange(length + 1)
    ledger = new_ledger()
    promoted: list[str] = []
    refused: list[str] = []
    taken: Iterator[Record] = iter(())
    records: list[Record] = []
    clock_ms = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "CHUNK_ENTRIES", 2)
        patch.setattr(settled, "SEGMENT_ENTRIES", chance.choice([1, 2, 5]))
        patch.setattr(settled, "SHOWN_MAX", chance.choice([2, 10]))
        for number in range(length + 1):
            if number == begin:
                clock_ms = ledger.half_clock_ms
                expected_promoted, expected_refused = list(promoted), list(refused)
                taken = SnapshotCapture(ledger, "one", 0, RECORD_VERSION).records()
            for id in list(ledger.index.ready):
                turn = chance.choice(["", "", "promote", "refuse"])
                if turn == "promote":
                    ledger.promote_run([ledger.index.transactions[id]])
                    promoted.append(id)
                elif turn == "refuse":
                    ledger.refuse(id, CAUSE)
                    refused.append(id)
            if number >= begin and chance.random() < 0.5:
                records.extend(record for record in [next(taken, None)] if record)
            step(logs, ledger, half=chance.random() < 0.5)
        records.extend(taken)
    assert ledger.watcher is None
    expected = replayed(logs)
    expected.promote_run([expected.index.transactions[id] for id in expected_promoted])
    for id in expected_refused:
        expected.refuse(id, CAUSE)
    found = loaded(records)
    while found.half_position < len(logs.half.records) or found.op_position < len(logs.op.records):
        step(logs, found, half=chance.random() < 0.5)
    compare(found, expected, clock_ms)


# --- which snapshot counts -------------------------------------------------------------------


def many(count: int = 5, logs: Logs | None = None) -> Ledger:
    """Return a ledger with some pending transactions, of several chunks."""
    return prepared(count, logs)[1]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two, so that a few transactions make several."""
    monkeypatch.setattr(snapshot, "CHUNK_ENTRIES", 2)


@pytest.fixture
def full_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that only their bytes limit."""
    monkeypatch.setattr(snapshot, "CHUNK_ENTRIES", CHUNK_ENTRIES)


def test_chunks_of_another_snapshot_do_not_count() -> None:
    logs = Logs()
    older, newer = capture(many(logs=logs), "older"), capture(many(logs=logs), "newer")
    for number in range(3):
        mixed = [*newer]
        mixed[number] = older[number]
        assert find_whole(mixed) == []


def test_the_greatest_positions_count_not_the_last_written() -> None:
    logs = Logs()
    older, newer = capture(many(logs=logs), "older", 0), capture(many(logs=logs), "newer", 1)
    for records in (older + newer, newer + older):
        assert [whole.closing.snapshot for whole in find_whole(records)] == ["newer", "older"]


def test_a_newer_version_does_not_count() -> None:
    ledger = many()
    records = list(SnapshotCapture(ledger, "one", 0, RECORD_VERSION + 1).records())
    assert find_whole(records) == []
    assert find_whole(records + capture(ledger, "two", 1))[0].closing.snapshot == "two"


def test_what_the_slot_held_before_is_removed() -> None:
    logs = Logs()
    before = capture(many(20, logs))
    assert chunks_in(0, before) == 10
    taken = SnapshotCapture(many(), "two", 0, RECORD_VERSION, chunks_in(0, before))
    after = list(taken.records())
    assert len(taken.superfluous()) == 7
    newest = {record.key: record for record in before + after + taken.superfluous()}
    left = [record for record in newest.values() if record.value is not None]
    assert chunks_in(0, left) == 3
    assert find_whole(left)[0].closing.snapshot == "two"


@pytest.mark.rule(11)
def test_each_segment_of_settled_ones_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settled, "SEGMENT_ENTRIES", 4)
    logs = Logs()
    ledger = new_ledger()
    topic: dict[bytes | None, Record] = {}
    written: list[bytes | None] = []
    for round_number in range(6):
        for number in range(5 * round_number, 5 * round_number + 5):
            logs.prepare(half_of(id_of(number)), START_MS + number)
            logs.mark(marker_of("rollback", id_of(number), group="g"), START_MS + number)
        apply_all(ledger, logs, 5 * round_number + 5, 5 * round_number + 5)
        stored = segments_in(topic.values())
        taken = SnapshotCapture(
            ledger, f"{round_number}", round_number % 2, RECORD_VERSION, 0, stored
        )
        for record in taken.records():
            topic[record.key] = record
            written += [record.key] if b"settled" in (record.key or b"") else []
        found = loaded(list(topic.values()))
        assert [t.id for t in found.index.settled] == [t.id for t in ledger.index.settled]
        assert [end_of(t) for t in found.index.settled] == [end_of(t) for t in ledger.index.settled]
    assert len(written) == len(set(written)) == 12
    assert {segment_key(name) for name in segments_in(topic.values())} == set(written)


def settled_ledger(count: int) -> Ledger:
    """Return a ledger that remembers so many settled ones, in segments of four."""
    logs = Logs()
    for number in range(count):
        logs.prepare(half_of(id_of(number), dedup_key=f"d{number}"), START_MS + number)
        logs.mark(marker_of("rollback", id_of(number), group="g"), START_MS + number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settled, "SEGMENT_ENTRIES", 4)
        return replayed(logs)


@pytest.mark.rule(11)
@pytest.mark.parametrize(
    ("make", "number"),
    [
        *((many, number) for number in range(4)),
        *((lambda: settled_ledger(12), number) for number in range(3)),
    ],
)
def test_without_a_record_or_with_a_damaged_one_it_does_not_count(
    make: Callable[[], Ledger], number: int
) -> None:
    records = capture(make())
    (whole,) = find_whole(records)
    assert len(records) == 4
    assert find_whole(records[:number] + records[number + 1 :]) == []
    value = records[number].value or b""
    for at in range(0, len(value), 7):
        damaged = value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]
        broken = [*records]
        broken[number] = structs.replace(records[number], value=damaged)
        for found in find_whole(broken):
            # Its digest does not cover all of the closing record.
            assert records[number].key in CLOSING_KEYS
            assert (found.chunks, found.segments) == (whole.chunks, whole.segments)


def test_forgetting_goes_by_segments_and_spares_what_is_held() -> None:
    ledger = settled_ledger(12)
    window = ledger.index.settled
    assert [segment.count for segment in window.segments] == [4, 4, 4]
    everything_ms = START_MS + 1000
    assert window.forget(START_MS + 7, 0, {}) != []
    assert [t.id for t in window] == [id_of(number) for number in range(4, 12)]
    assert window.forget(everything_ms, 5, {}) == []
    assert window.forget(everything_ms, 0, {id_of(6): None}) == []
    gone = window.forget(everything_ms, 4, {})
    assert [(each.id, each.dedup_key) for each in gone] == [
        (id_of(number), f"d{number}") for number in range(4, 8)
    ]
    assert window.get(id_of(5)) is None
    assert len(window) == 4


def test_an_abandoned_capture_is_in_nobodys_way() -> None:
    ledger = many()
    taken = SnapshotCapture(ledger, "one", 0, RECORD_VERSION)
    next(taken.records())
    taken.abandon()
    assert ledger.watcher is None


def test_an_empty_ledger_is_a_snapshot_too() -> None:
    ledger = loaded(capture(new_ledger()))
    assert not ledger.index.transactions


@pytest.mark.rule(11)
def test_a_snapshot_in_the_middle_of_a_batch_begins_before_it() -> None:
    logs = Logs()
    logs.prepare(half_of(id_of(1)), START_MS)
    logs.prepare(half_of(id_of(2), message("a"), message("b")), START_MS + 1)
    half = half_of(id_of(1))
    logs.commit_with(half, [message("other")], START_MS + 2)
    ledger = new_ledger()
    apply_all(ledger, logs, 2, 1)
    found = loaded(capture(ledger))
    assert (found.half_position, found.op_position) == (1, 0)
    apply_all(found, logs, 3, 2)
    compare(found, replayed(logs), START_MS)


# --- what it costs ---------------------------------------------------------------------------


def bytes_of(count: int, logs: Logs, finish: bool) -> float:
    """Return what one transaction takes in a ledger, bytes."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    ledger = Ledger(PARTITION, WINDOW_MS, count)
    schedule = Schedule()
    for number, record in enumerate(logs.half.records):
        transaction = ledger.apply_half(record).transaction
        assert transaction is not None
        if finish:
            # One by one: what makes room for the others would count otherwise.
            ledger.apply_op(logs.op.records[number])
            ledger.promote_run([transaction])
        else:
            ledger.index.evict(transaction)
        schedule.set(transaction.id, due_ms(transaction))
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(schedule) == (0 if finish else count)
    return taken / count


@pytest.mark.parametrize("finish", [False, True])
def test_a_transaction_takes_no_more_memory_than_is_said(finish: bool) -> None:
    count = 20_000
    logs = Logs()
    for number in range(count):
        body = message("x" * 1000, key=b"%d" % number, at=number % 8)
        logs.prepare(half_of(id_of(number), body), START_MS + number // 4)
        if finish:
            logs.mark(marker_of("commit", id_of(number), group="g"), START_MS + number // 4)
    taken = bytes_of(count, logs, finish)
    print(f"{'settled' if finish else 'pending'}: {taken:.0f} bytes a transaction")
    assert taken < (SETTLED_BYTES_MAX if finish else PENDING_BYTES_MAX)
    assert count > 2 * SHOWN_MAX


POLICY = CheckPolicy(after_s=0.0, interval_s=0.0, attempts_max=1000, timeout_s=5.0)


def states(ledger: Ledger) -> dict[str, State]:
    return {transaction.id: transaction.state for transaction in ledger.index.transactions.values()}


def prepared(count: int, logs: Logs | None = None, *, dedup: bool = False) -> tuple[Logs, Ledger]:
    """Return logs with more pending transactions, and their ledger."""
    logs = logs or Logs()
    first = len(logs.half.records)
    for number in range(first, first + count):
        key = f"d{number}" if dedup else None
        logs.prepare(half_of(id_of(number), dedup_key=key, policy=POLICY), START_MS + number)
    return logs, replayed(logs)


def begun(ledger: Ledger) -> Iterator[Record]:
    return SnapshotCapture(ledger, "one", 0, RECORD_VERSION).records()


# --- bounds of a capture ---------------------------------------------------------------------


@pytest.mark.rule(11)
@pytest.mark.usefixtures("full_chunks")
def test_no_chunk_is_larger_than_it_may_be() -> None:
    logs, _ = prepared(300)
    # Long lives: sixteen attempts each, whose answers fill a page.
    for number in range(300):
        for attempt in range(1, 18):
            marker = marker_of(
                "check", id_of(number), round=1, number=attempt, reason="due",
                endpoint=f"https://producer-{number}/check", previous=f"{number} " + "x" * 300,
            )  # fmt: skip
            logs.mark(marker, START_MS + 1000)
    ledger = replayed(logs)
    records = capture(ledger)
    sizes = [len(record.value or b"") for record in records]
    assert len(records) > 5
    assert max(sizes) <= CHUNK_BYTES + 1024
    assert loaded(records).index.get(id_of(7)) == _evicted(ledger, id_of(7))


def _evicted(ledger: Ledger, id: str) -> object:
    transaction = ledger.index.get(id)
    assert transaction is not None
    ledger.index.evict(transaction)
    transaction.keys = 0  # not in snapshots
    return transaction


@pytest.mark.usefixtures("full_chunks")
def test_many_shapes_count_too() -> None:
    logs = Logs()
    for number in range(3000):
        half = half_of(id_of(number), message("v", f"{number:0200}"), group=f"{number:0100}")
        logs.prepare(half, START_MS)
    ledger = replayed(logs)
    records = capture(ledger)
    assert max(len(record.value or b"") for record in records) <= CHUNK_BYTES + 1024
    assert states(loaded(records)) == states(ledger)


@pytest.mark.usefixtures("full_chunks")
def test_waiting_markers_may_be_larger_than_a_chunk() -> None:
    logs = Logs()
    large = [message("x" * 300_000 + str(number)) for number in range(3)]
    halves = [half_of(id_of(n), *[message(str(k)) for k in range(3)]) for n in range(2)]
    logs.commit_with(halves[0], large, START_MS)
    logs.mark(marker_of("rollback", id_of(1), group="g"), START_MS)
    ledger = replayed(logs)
    records = capture(ledger)
    assert max(len(record.value or b"") for record in records) <= CHUNK_BYTES + 1024
    found = loaded(records)
    assert found.waiting == ledger.waiting
    for half in halves:
        logs.prepare(half, START_MS + 1)
    apply_all(found, logs, len(logs.half.records), len(logs.op.records))
    committed = found.index.get(id_of(0))
    assert committed is not None
    assert committed.messages == tuple(large)
    rolled_back = found.index.get(id_of(1))
    assert rolled_back is not None
    assert rolled_back.state is State.ROLLED_BACK


# --- changes in between ----------------------------------------------------------------------


@pytest.mark.rule(11)
def test_what_turns_do_in_between_is_not_in_it() -> None:
    logs, ledger = prepared(200)
    for number in range(150):
        logs.mark(marker_of("commit", id_of(number)), START_MS)
    apply_all(ledger, logs, 200, 150)
    expected, order = states(ledger), list(ledger.index.ready)
    taken = begun(ledger)
    records = [next(taken), next(taken)]
    ledger.promote_run([ledger.index.transactions[id_of(number)] for number in range(0, 150, 2)])
    for number in range(1, 50, 2):
        ledger.refuse(id_of(number), CAUSE)
    found = loaded([*records, *taken])
    assert states(found) == expected
    assert list(found.index.ready) == order


@pytest.mark.rule(11)
def test_what_a_claim_in_between_finds_is_not_in_it() -> None:
    logs, ledger = prepared(3)
    copies = [
        ParkedCopy(
            half_of(id_of(n), policy=POLICY), n, START_MS + n, State.REFUSED, CAUSE, START_MS
        )
        for n in range(2)
    ]
    logs.mark(marker_of("commit", id_of(1)), START_MS)
    apply_all(ledger, logs, 3, 1)
    expected = states(ledger)
    taken = begun(ledger)
    # Of the first one even the marker is gone.
    ledger.reconcile(Checkpoint(1, "c", 0, 0), copies)
    assert states(ledger) == {
        id_of(0): State.REFUSED, id_of(1): State.REFUSED, id_of(2): State.PENDING
    }  # fmt: skip
    found = loaded(list(taken))
    assert states(found) == expected
    pending = found.index.get(id_of(0))
    assert pending is not None
    assert pending.verdict.decision is None


def test_messages_may_come_and_go_meanwhile() -> None:
    _, ledger = prepared(50)
    for transaction in ledger.index.transactions.values():
        ledger.index.evict(transaction)
    chance = Random(7)
    records = []
    for record in begun(ledger):
        records.append(record)
        for number in chance.sample(range(50), 5):
            transaction = ledger.index.transactions[id_of(number)]
            if transaction.has_bodies:
                ledger.index.evict(transaction)
            else:
                ledger.index.fill(transaction, (message(),))
    assert ledger.index.body_bytes == sum(t.body_bytes for t in ledger.index.transactions.values())
    found = loaded(records)
    assert states(found) == states(ledger)
    assert found.index.body_bytes == 0


@pytest.mark.rule(11)
def test_what_is_forgotten_while_it_is_taken_is_in_it() -> None:
    logs, _ = prepared(20, dedup=True)
    for number in range(10):
        logs.mark(marker_of("rollback", id_of(number), group="g"), START_MS)
    ledger = new_ledger(beyond_max=0)
    apply_all(ledger, logs, 20, 10)
    taken = begun(ledger)
    late_ms = START_MS + 2 * WINDOW_MS
    logs.prepare(half_of(id_of(99, late_ms)), late_ms)
    logs.mark(marker_of("rollback", id_of(11), group="g"), late_ms)
    apply_all(ledger, logs, 21, 11)
    assert len(ledger.index.settled) == 0
    found = loaded(list(taken))
    assert len(found.index.settled) == 10
    for number in range(10):
        held = found.index.by_dedup_key("g", f"d{number}")
        assert held is not None
        assert held.state is State.ROLLED_BACK


def test_only_one_at_a_time() -> None:
    _, ledger = prepared(1)
    first = SnapshotCapture(ledger, "one", 0, RECORD_VERSION)
    with pytest.raises(ValueError, match="one snapshot at a time"):
        SnapshotCapture(ledger, "two", 1, RECORD_VERSION)
    first.abandon()
    assert list(SnapshotCapture(ledger, "two", 1, RECORD_VERSION).records())


# --- what it leaves --------------------------------------------------------------------------


def test_a_repeat_of_what_was_settled_before_the_snapshot_counts_once() -> None:
    logs, _ = prepared(3, dedup=True)
    for number in range(3):
        logs.mark(marker_of("rollback", id_of(number), group="g"), START_MS)
    found = loaded(capture(replayed(logs)))
    logs.prepare(half_of(id_of(1), dedup_key="d1", policy=POLICY), START_MS + 50)
    logs.prepare(half_of(id_of(50), dedup_key="d2", policy=POLICY), START_MS + 50)
    apply_all(found, logs, 5, 3)
    assert not found.index.transactions
    assert all(transaction.state in SETTLED for transaction in found.index)


def test_the_newest_version_of_a_chunk_counts_as_well() -> None:
    _, ledger = prepared(1)
    records = capture(ledger)
    chunk, closing = records
    assert find_whole([chunk, closing])
    newer = SnapshotCapture(prepared(1)[1], "one", 0, RECORD_VERSION + 1).records()
    forged = structs.replace(closing, value=_digest_of(next(newer).value, closing.value))
    assert (
        find_whole([next(SnapshotCapture(ledger, "one", 0, RECORD_VERSION + 1).records()), forged])
        == []
    )


def _digest_of(chunk: bytes | None, closing: bytes | None) -> bytes:
    """Return a closing record that vouches for a chunk."""
    facts = json.loads(closing or b"")
    facts["digest"] = hashlib.blake2b(chunk or b"", digest_size=16).hexdigest()
    return json.dumps(facts).encode()


def test_loading_goes_in_steps() -> None:
    _, ledger = prepared(40)
    found, (whole, *_) = new_ledger(), find_whole(capture(ledger))
    counts = [len(found.index.transactions) for _ in load(whole, found)]
    assert counts == list(range(2, 41, 2))
