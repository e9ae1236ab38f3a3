"""What a capture does while everything goes on: bounds, what comes in between, what it leaves."""

from collections.abc import Iterator
from random import Random

import pytest
from msgspec import structs

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
from txbroker.core.snapshot import CHUNK_BYTES, Capture, find_whole, load

CAUSE = Cause("too_large", "raise it", "t", 0)
POLICY = CheckPolicy(after_s=0.0, interval_s=0.0, attempts_max=1000, timeout_s=5.0)


def loaded(records: list[Record]) -> Ledger:
    ledger = new_ledger()
    for _ in load(find_whole(records)[0], ledger):
        pass
    return ledger


def states(ledger: Ledger) -> dict[str, State]:
    return {transaction.id: transaction.state for transaction in ledger.index.transactions.values()}


def prepared(count: int, dedup: bool = False) -> tuple[Logs, Ledger]:
    logs = Logs()
    for number in range(count):
        key = f"d{number}" if dedup else None
        logs.prepare(half_of(id_of(number), dedup_key=key, policy=POLICY), START_MS + number)
    return logs, replayed(logs)


def begun(ledger: Ledger) -> Iterator[Record]:
    return Capture(ledger, "one", 0, RECORD_VERSION).records()


# --- bounds ----------------------------------------------------------------------------------


@pytest.mark.rule(11)
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
    records = list(begun(ledger))
    sizes = [len(record.value or b"") for record in records]
    assert len(records) > 5
    assert max(sizes) <= CHUNK_BYTES + 1024
    assert loaded(records).index.get(id_of(7)) == _evicted(ledger, id_of(7))


def _evicted(ledger: Ledger, id: str) -> object:
    transaction = ledger.index.get(id)
    assert transaction is not None
    ledger.index.evict(transaction)
    return transaction


def test_many_shapes_count_too() -> None:
    logs = Logs()
    for number in range(3000):
        half = half_of(id_of(number), message("v", f"{number:0200}"), group=f"{number:0100}")
        logs.prepare(half, START_MS)
    ledger = replayed(logs)
    records = list(begun(ledger))
    assert max(len(record.value or b"") for record in records) <= CHUNK_BYTES + 1024
    assert states(loaded(records)) == states(ledger)


def test_waiting_markers_may_be_larger_than_a_chunk() -> None:
    logs = Logs()
    large = [message("x" * 300_000 + str(number)) for number in range(3)]
    halves = [half_of(id_of(n), *[message(str(k)) for k in range(3)]) for n in range(2)]
    logs.commit_with(halves[0], large, START_MS)
    logs.mark(marker_of("rollback", id_of(1), group="g"), START_MS)
    ledger = replayed(logs)
    records = list(begun(ledger))
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


# --- what comes in between -------------------------------------------------------------------


@pytest.mark.rule(11)
def test_what_turns_do_in_between_is_not_in_it() -> None:
    logs, ledger = prepared(200)
    for number in range(150):
        logs.mark(marker_of("commit", id_of(number)), START_MS)
    apply_all(ledger, logs, 200, 150)
    expected, order = states(ledger), list(ledger.index.ready)
    taken = begun(ledger)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("txbroker.core.snapshot.CHUNK_ENTRIES", 10)
        records = [next(taken), next(taken)]
        ledger.promote_run(
            [ledger.index.transactions[id_of(number)] for number in range(0, 150, 2)]
        )
        for number in range(1, 50, 2):
            ledger.refuse(id_of(number), CAUSE)
        records += taken
    found = loaded(records)
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
    taken, records = begun(ledger), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("txbroker.core.snapshot.CHUNK_ENTRIES", 3)
        for record in taken:
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
    first = Capture(ledger, "one", 0, RECORD_VERSION)
    with pytest.raises(ValueError, match="one snapshot at a time"):
        Capture(ledger, "two", 1, RECORD_VERSION)
    first.abandon()
    assert list(Capture(ledger, "two", 1, RECORD_VERSION).records())


# --- what it leaves --------------------------------------------------------------------------


def test_a_repeat_of_what_was_settled_before_the_snapshot_counts_once() -> None:
    logs, _ = prepared(3, dedup=True)
    for number in range(3):
        logs.mark(marker_of("rollback", id_of(number), group="g"), START_MS)
    found = loaded(list(begun(replayed(logs))))
    logs.prepare(half_of(id_of(1), dedup_key="d1", policy=POLICY), START_MS + 50)
    logs.prepare(half_of(id_of(50), dedup_key="d2", policy=POLICY), START_MS + 50)
    apply_all(found, logs, 5, 3)
    assert not found.index.transactions
    assert all(transaction.state in SETTLED for transaction in found.index)


def test_the_newest_version_of_a_chunk_counts_as_well() -> None:
    _, ledger = prepared(1)
    records = list(begun(ledger))
    chunk, closing = records
    assert find_whole([chunk, closing])
    newer = Capture(prepared(1)[1], "one", 0, RECORD_VERSION + 1).records()
    forged = structs.replace(closing, value=_digest_of(next(newer).value, closing.value))
    assert find_whole([next(Capture(ledger, "one", 0, RECORD_VERSION + 1).records()), forged]) == []


def _digest_of(chunk: bytes | None, closing: bytes | None) -> bytes:
    """Return a closing record that vouches for a chunk."""
    import hashlib
    import json

    facts = json.loads(closing or b"")
    facts["digest"] = hashlib.blake2b(chunk or b"", digest_size=16).hexdigest()
    return json.dumps(facts).encode()


def test_loading_goes_in_steps() -> None:
    _, ledger = prepared(40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("txbroker.core.snapshot.CHUNK_ENTRIES", 4)
        records = list(begun(ledger))
    found = Ledger(PARTITION, WINDOW_MS)
    counts = [len(found.index.transactions) for _ in load(find_whole(records)[0], found)]
    assert counts == list(range(4, 41, 4))
