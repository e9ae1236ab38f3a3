"""After a claim: copies, progress and what fell to retention in the meantime."""

import pytest
from msgspec import structs

from tests.kit.logs import START_MS, Logs, half_of, id_of, marker_of, message, new_ledger, replayed
from txbroker.core import ledger as ledger_module
from txbroker.core.ledger import Effect, Ledger
from txbroker.core.records import (
    Cause,
    Checkpoint,
    CheckPolicy,
    Checks,
    Message,
    ParkedCopy,
    State,
)
from txbroker.core.transaction import Transaction

CAUSE = Cause("too_large", "raise it", "t", 0)
POLICY = CheckPolicy(attempts_max=1)
ID = id_of(1)


def one_committed(contents: tuple[Message, ...] = ()) -> tuple[Logs, Ledger]:
    logs = Logs()
    half = half_of(ID, policy=POLICY)
    logs.prepare(half, START_MS)
    if contents:
        logs.commit_with(half, contents, START_MS + 7)
    else:
        logs.mark(marker_of("commit", ID), START_MS + 7)
    return logs, replayed(logs)


def only(ledger: Ledger) -> Transaction:
    (transaction,) = ledger.index
    return transaction


def test_a_refused_one_outlives_half_message_and_marker() -> None:
    _, before = one_committed((message("final"),))
    copy = only(before).copy(State.REFUSED, CAUSE)
    ledger = new_ledger()
    ledger.restore(copy)
    ledger.reconcile(Checkpoint(1, "c", 9, 9), [copy])
    found = only(ledger)
    assert (found.state, found.cause, found.verdict.at_ms) == (State.REFUSED, CAUSE, START_MS + 7)
    assert found.messages == (message("final"),)
    assert list(ledger.index.refused) == [ID]
    assert ledger.index.undecided_count == 0


@pytest.mark.rule(25)
def test_a_parked_one_outlives_half_message_and_markers() -> None:
    """The round of its attempts, too: it was revived once before."""
    checks = Checks(2, START_MS, number=1, counted_ms=(START_MS + 1,))
    copy = ParkedCopy(half_of(ID, policy=POLICY), 0, START_MS, State.PARKED, checks=checks)
    ledger = new_ledger()
    ledger.restore(copy)
    ledger.reconcile(None, [copy])
    assert only(ledger).state is State.PARKED
    assert ledger.index.to_keep == {}
    logs = Logs()
    logs.mark(marker_of("revive", ID, round=1), START_MS)
    ledger.apply_op(logs.op.records[0])
    assert (only(ledger).state, only(ledger).checks) == (State.PARKED, checks)
    logs.mark(marker_of("revive", ID, round=2), START_MS)
    ledger.apply_op(logs.op.records[1])
    assert (only(ledger).state, only(ledger).checks.round) == (State.PENDING, 3)


@pytest.mark.rule(25)
def test_a_copy_of_an_earlier_round_is_made_again() -> None:
    """The promotion transaction with the newer copy was lost."""
    newer = ParkedCopy(half_of(ID, policy=POLICY), 0, START_MS, State.PARKED, checks=Checks(2))
    older = structs.replace(newer, checks=Checks(1, number=1, counted_ms=(START_MS,)))
    ledger = new_ledger()
    ledger.restore(newer)
    for copy, made in ((older, [ID]), (newer, [])):
        ledger.reconcile(None, [copy])
        assert list(ledger.index.to_keep) == made


def test_markers_of_attempts_in_a_copy_count_once() -> None:
    logs = Logs()
    logs.prepare(half_of(ID, policy=CheckPolicy()), START_MS)
    for minute, kind in enumerate(("check", "returned", "check"), 1):
        number = 1 if minute < 3 else 2
        marker = marker_of(kind, ID, round=1, number=number, reason="due", previous="unknown")
        logs.mark(marker, START_MS + minute * 60_000)
    whole = only(replayed(logs))
    ledger = new_ledger()
    ledger.restore(whole.copy(State.PENDING, None))
    for record in logs.op.records:
        ledger.apply_op(record)
    assert (only(ledger).state, only(ledger).checks) == (State.PENDING, whole.checks)
    assert (whole.checks.number, len(whole.checks.counted_ms)) == (2, 1)
    logs.mark(marker_of("check", ID, round=1, number=3, reason="due"), START_MS + 240_000)
    ledger.apply_op(logs.op.records[-1])
    assert only(ledger).checks.number == 3


def test_a_deferred_one_outlives_half_message_and_marker() -> None:
    _, before = one_committed()
    copy = only(before).copy(State.COMMITTED, None)
    ledger = new_ledger()
    ledger.restore(copy)
    ledger.reconcile(Checkpoint(1, "c", 9, 9, deferred=(ID,)), [copy])
    assert (only(ledger).state, only(ledger).verdict.at_ms) == (State.COMMITTED, START_MS + 7)
    assert list(ledger.index.ready) == [ID]
    assert ledger.index.undecided_count == 0
    # Its marker, where it is still there, says nothing new; a later contrary one is too late.
    logs, _ = one_committed()
    logs.mark(marker_of("rollback", ID), START_MS + 8)
    effects = [ledger.apply_op(record).effect for record in logs.op.records]
    assert effects == [Effect.REPEATED, Effect.CONFLICT]


def test_a_copy_that_was_left_over_is_removed() -> None:
    logs = Logs()
    logs.prepare(half_of(ID), START_MS)
    logs.mark(marker_of("rollback", ID), START_MS)
    ledger = replayed(logs)
    known = ParkedCopy(half_of(ID), 0, START_MS, State.PARKED)
    forgotten = ParkedCopy(half_of(id_of(2)), 0, START_MS, State.PARKED)
    ledger.reconcile(None, [known, forgotten])
    assert set(ledger.index.to_release) == {ID, id_of(2)}
    assert len(ledger.index.to_release[id_of(2)].messages) == 1


def test_a_parked_one_without_its_copy_is_copied_again() -> None:
    logs = Logs()
    logs.prepare(half_of(ID, policy=POLICY), START_MS)
    logs.mark(marker_of("check", ID, round=1, number=1, reason="due"), START_MS + 6000)
    logs.mark(marker_of("park", ID, round=1), START_MS + 11_000)
    ledger = replayed(logs)
    ledger.reconcile(None, [])
    assert list(ledger.index.to_keep) == [ID]
    older = ParkedCopy(half_of(ID, policy=POLICY), 0, START_MS, State.PENDING)
    ledger.reconcile(None, [older])
    assert list(ledger.index.to_keep) == [ID]


def test_a_retry_that_was_committed_unseen_is_not_promoted_again() -> None:
    _, ledger = one_committed()
    ledger.refuse(ID, CAUSE)
    promoted = ledger.reconcile(Checkpoint(1, "c", 1, 1), [])
    assert [transaction.id for transaction in promoted] == [ID]
    assert ledger.index.refused == {}
    assert only(ledger).state is State.PROMOTED


def test_what_progress_defers_is_still_to_be_done() -> None:
    _, ledger = one_committed()
    assert ledger.reconcile(Checkpoint(1, "c", 1, 1, deferred=(ID,)), []) == []
    assert list(ledger.index.ready) == [ID]
    assert ledger.op_progress == 1


@pytest.mark.rule(28)
def test_progress_accounts_for_what_is_settled_kept_or_in_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_module, "ACCOUNTED_LOOK", 2)
    logs, ids = Logs(), [id_of(number) for number in range(6)]
    for id in ids:
        logs.prepare(half_of(id), START_MS)
    logs.mark(marker_of("rollback", ids[0]), START_MS)
    ledger = replayed(logs)
    assert ledger.accounted(()) == 1
    for id in ids[1:4]:
        ledger.index.transactions[id].kept = True
    # It looks at two more each time, and never claims too much.
    assert [ledger.accounted({ids[4]}) for _ in range(3)] == [2, 4, 5]
    assert ledger.accounted(()) == 4
    ledger.index.transactions[ids[4]].kept = ledger.index.transactions[ids[5]].kept = True
    assert [ledger.accounted(()) for _ in range(2)] == [5, 6]
    # A lost turn was to copy them.
    ledger.reconcile(None, [])
    assert ledger.accounted(()) == 1
