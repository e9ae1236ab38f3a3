"""Rules 21 to 23: what goes before a question, and what its answer costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

import pytest
from msgspec import structs

from tests.rules.fakes import Gate, after, lost_unanswered
from tests.rules.harness import (
    GROUP,
    QUICK,
    Harness,
    answered,
    asked,
    attempt,
    commit,
    known,
    prepare,
    roll_back,
    settled,
    until,
)
from txbroker.checkers.base import (
    Answered,
    Channel,
    CheckCall,
    CheckResult,
    Unclear,
    Unreached,
    already,
)
from txbroker.checkers.runner import CheckRunner
from txbroker.core.decoding import decode_kept
from txbroker.core.encoding import MarkerRow
from txbroker.core.ledger import ApplyResult, Effect
from txbroker.core.lifecycle import ASK_SPACING_MS
from txbroker.core.records import (
    LATER_S_MAX,
    CheckPolicy,
    CheckReason,
    Decision,
    MarkerKind,
    Source,
    State,
)
from txbroker.door.protocols import PromotionTxn, PromotionTxnHandle
from txbroker.errors import NotPending, OwnerUnavailable
from txbroker.proxy.partition.owner import PartitionOwner
from txbroker.testing.door import MemoryPartitionDoor

DUE, ASKED = CheckReason.DUE, CheckReason.ASKED
NOW = CheckPolicy(after_s=0.0)
THREE = CheckPolicy(after_s=0.0, attempts_max=3)
ONE = CheckPolicy(after_s=0.0, attempts_max=1, timeout_s=0.0)


class Group:
    """A group that is always reachable: it answers as scripted and records each call."""

    endpoint = "http://group"
    instance = ""

    def __init__(self, harness: Harness, answer: Callable[[CheckCall], CheckResult]) -> None:
        self.asked: list[CheckCall] = []
        self.markers_at_call: list[list[tuple[str, int]]] = []
        self.numbers_at_call: list[int] = []
        self._world = harness
        self._answer = answer
        self.owner: PartitionOwner | None = None

    async def acquire(self, group: str, prefer: str, avoid: Collection[str] = ()) -> Channel:
        """Return itself as the channel."""
        return self

    def at_hand(self, group: str, prefer: str) -> Channel:
        """Return itself as the channel."""
        return self

    def ask(self, call: CheckCall, timeout_s: float) -> asyncio.Future[CheckResult]:
        self.asked.append(call)
        self.markers_at_call.append([(str(m.kind), m.number) for m in self._world.markers()])
        assert self.owner is not None
        self.numbers_at_call.append(known(self.owner, call.id).checks.number)
        return already(self._answer(call))

    def release(self) -> None:
        """Nothing to give back."""

    def checks_ended(self, group: str, outcome: str, durations_s: Sequence[float]) -> None:
        """Nothing is counted here."""


async def asking(
    harness: Harness, answer: Callable[[CheckCall], CheckResult]
) -> tuple[PartitionOwner, Group, CheckRunner]:
    """Return an owner whose checks go out to a group that answers so."""
    group = Group(harness, answer)
    runner = CheckRunner(group, group, jitter=lambda: 0.0)
    harness.runner = runner  # type: ignore[assignment]
    group.owner = await harness.owner()
    return group.owner, group, runner


def silent(_: CheckCall) -> CheckResult:
    return Unclear("timeout")


@pytest.mark.rule(21)
async def test_question_is_sent_after_its_marker(harness: Harness) -> None:
    owner, group, runner = await asking(harness, lambda _: Answered(Decision.COMMIT))
    gate = Gate()
    harness.partition.op.script.append(gate.append_unheard)
    id = await harness.prepared(owner, policy=QUICK)
    await gate.reached.wait()
    await settled()
    assert group.asked == []
    gate.open()
    await until(lambda: harness.visible() == [id])
    assert group.markers_at_call == [[("check", 1)]]
    assert group.numbers_at_call == [1]
    check, decided = harness.markers()
    assert (check.round, check.number, check.reason) == (1, 1, "due")
    assert (check.endpoint, check.half) == ("http://group", 0)
    assert (decided.kind, decided.source, decided.by) == ("commit", "check", "http://group")
    await runner.close()


@pytest.mark.rule(21)
async def test_attempt_of_another_owner_is_not_asked(harness: Harness) -> None:
    owner, id = await harness.new_pending(policy=NOW)
    first = after(lambda: harness.zombie_mark("check", id, round=1, number=1, reason="due"))
    harness.partition.op.script.append(first)
    assert await attempt(owner.checks, id, DUE) is None
    assert harness.kinds() == ["check", "check"]
    assert len(known(owner, id).checks.counted_ms) == 1


@pytest.mark.rule(21)
@pytest.mark.parametrize("kind", ["commit", "rollback"])
async def test_attempt_after_decision_is_not_asked(harness: Harness, kind: str) -> None:
    owner, id = await harness.new_pending(policy=NOW)
    harness.partition.op.script.append(after(lambda: harness.zombie_mark(kind, id, group=GROUP)))
    assert await attempt(owner.checks, id, DUE) is None
    assert known(owner, id).checks.attempts == ()


@pytest.mark.rule(21)
async def test_attempt_decided_in_its_batch_is_not_asked(harness: Harness) -> None:
    owner = await harness.owner()
    third, other = await harness.prepared(owner), await harness.prepared(owner)
    id = await harness.prepared(owner, policy=NOW)
    gate = Gate()
    harness.partition.op.script.append(gate.append)
    first = asyncio.create_task(commit(owner, third))
    await gate.reached.wait()
    # Decisions and checks take turns: so the check comes between these two decisions.
    second = asyncio.create_task(commit(owner, other))
    attempting = asyncio.create_task(attempt(owner.checks, id, DUE))
    await settled()
    deciding = asyncio.create_task(roll_back(owner, id))
    await settled()
    gate.open()
    assert await attempting is None
    await asyncio.gather(first, second, deciding)
    assert harness.kinds() in (
        ["commit", "commit", "check", "rollback"],
        ["commit", "check", "commit", "rollback"],
    )
    assert harness.partition.calls.count("op.append") == 2


@pytest.mark.rule(21)
async def test_early_attempt_is_neither_written_nor_asked(harness: Harness) -> None:
    owner, id = await harness.new_pending()
    assert await attempt(owner.checks, id, DUE) is None
    await commit(owner, id)
    assert await attempt(owner.checks, id, ASKED) is None
    assert harness.kinds() == ["commit"]


@pytest.mark.rule(21)
async def test_attempt_with_unanswered_marker_is_not_asked(harness: Harness) -> None:
    owner, id = await harness.new_pending(policy=NOW)
    harness.partition.op.script.append(lost_unanswered)
    with pytest.raises(OwnerUnavailable):
        await attempt(owner.checks, id, DUE)
    call = await asked(owner.checks, id, DUE)
    assert call.number == 1


@pytest.mark.rule(21)
async def test_marker_holds_outcome_of_previous_attempt(harness: Harness) -> None:
    owner, group, runner = await asking(harness, lambda call: Unclear(f"no answer {call.number}"))
    await harness.prepared(owner, policy=QUICK)
    await until(lambda: len(group.asked) == 3)
    checks = [each for each in harness.markers() if each.kind == "check"]
    assert [each.previous for each in checks] == ["", "no answer 1", "no answer 2"]
    await runner.close()


@pytest.mark.rule(21, 22)
async def test_unreached_attempt_is_returned_and_number_not_reused(harness: Harness) -> None:
    owner, id = await harness.new_pending(policy=NOW)
    for number in (1, 2, 3):
        call = await asked(owner.checks, id, DUE)
        assert (call.number, call.attempt) == (number, 1)
        await answered(owner.checks, call, Unreached("refused"))
        assert known(owner, id).checks.counted_ms == ()
    marks = [(each.kind, each.number) for each in harness.markers()]
    assert marks == [(kind, n) for n in (1, 2, 3) for kind in ("check", "returned")]


@pytest.mark.rule(22)
async def test_unclear_attempt_counts(harness: Harness) -> None:
    owner, id = await harness.new_pending(policy=NOW)
    call = await asked(owner.checks, id, DUE)
    await answered(owner.checks, call, Unclear("timeout"))
    assert harness.kinds() == ["check"]
    assert len(known(owner, id).checks.counted_ms) == 1
    await answered(owner.checks, call, Answered(Decision.UNKNOWN))
    assert harness.kinds() == ["check"]


@pytest.mark.rule(22)
async def test_transaction_is_parked_after_last_timeout(harness: Harness) -> None:
    owner, group, runner = await asking(harness, silent)
    id = await harness.prepared(owner, policy=QUICK)
    await until(lambda: known(owner, id).state is State.PARKED)
    assert harness.kinds() == ["check", "check", "check", "park"]
    at_ms = [record.timestamp_ms for record in harness.kafka.visible("txbroker.op")]
    assert at_ms[1] - at_ms[0] >= 20
    assert at_ms[2] - at_ms[1] >= 20
    assert at_ms[3] - at_ms[2] >= 20
    assert [call.attempt for call in group.asked] == [1, 2, 3]
    assert harness.markers()[-1].round == 1
    await until(lambda: harness.parked() == [(f"{id}/0".encode(), True)])
    await until(lambda: runner.queued == 0)
    await runner.close()


async def test_unexpected_error_in_parking_stops_partition(harness: Harness) -> None:
    owner, _, runner = await asking(harness, silent)
    write = owner._op.append_one

    async def surprised(row: MarkerRow) -> ApplyResult:
        if row.marker.kind is MarkerKind.PARK:
            raise ValueError("a surprise")
        return await write(row)

    harness.monkeypatch.setattr(owner._op, "append_one", surprised)
    await harness.prepared(owner, policy=QUICK)
    await until(lambda: bool(harness.stops))
    assert str(harness.stops[0]) == "a surprise"
    await runner.close()


async def test_transaction_parked_during_copy_is_copied_again(harness: Harness) -> None:
    async def slowly(door: MemoryPartitionDoor, turn: PromotionTxn) -> PromotionTxnHandle:
        handle = await door.write(turn)
        await written.wait()
        return handle

    owner, written = await harness.owner(), Gate()
    id = await harness.prepared(owner, policy=CheckPolicy(0.0, 0.0, 1, 0.0))
    harness.partition.writes.append(slowly)
    owner.ledger.index.to_keep[id] = known(owner, id)
    owner._promoter.wake()
    await written.reached.wait()
    harness.zombie_mark(MarkerKind.CHECK, id, round=1, number=1, reason="due")
    await until(lambda: known(owner, id).state is State.PARKED)
    written.open()
    await until(lambda: len(harness.parked()) == 2)
    copies = [decode_kept(record).facts for record in harness.kafka.visible("txbroker.parked")]
    assert [facts and facts.state for facts in copies] == ["pending", "parked"]


@pytest.mark.rule(22)
async def test_no_attempt_is_accepted_after_the_last(harness: Harness) -> None:
    owner, id = await harness.new_pending(policy=CheckPolicy(0.0, 0.0, 2, 60.0))
    for number in (1, 2, 3):
        harness.zombie_mark(MarkerKind.CHECK, id, round=1, number=number, reason="due")
    await until(lambda: harness.events.effects() == [Effect.ILLEGAL])
    assert (known(owner, id).state, known(owner, id).checks.number) == (State.PENDING, 2)
    assert len(known(owner, id).checks.counted_ms) == 2


@pytest.mark.rule(22)
async def test_parked_transaction_ignores_answers_in_flight(harness: Harness) -> None:
    owner, id = await harness.new_pending(policy=ONE)
    call = await asked(owner.checks, id, DUE)
    owner.checks.touch(known(owner, id))
    await until(lambda: known(owner, id).state is State.PARKED)
    await answered(owner.checks, call, Answered(Decision.COMMIT))
    assert known(owner, id).state is State.PARKED
    await commit(owner, id, by="ops")
    await until(lambda: harness.visible() == [id])


@pytest.mark.rule(22)
async def test_revived_transaction_ignores_old_round(harness: Harness) -> None:
    owner, id = await harness.new_pending(policy=ONE)
    old = await asked(owner.checks, id, DUE)
    owner.checks.touch(known(owner, id))
    await until(lambda: known(owner, id).state is State.PARKED)
    with pytest.raises(NotPending):
        owner.checks.ask(known(owner, id))
    assert (await owner.api.revive(id, "ops", "fixed")).state is State.PENDING
    assert (harness.markers()[-1].kind, harness.markers()[-1].round) == ("revive", 1)
    for result in (Answered(Decision.COMMIT), Unreached("x"), Answered(Decision.UNKNOWN, 9.0)):
        await answered(owner.checks, old, result)
    assert known(owner, id).state is State.PENDING
    new = await asked(owner.checks, id, DUE)
    assert (new.round, new.number, new.attempt) == (2, 1, 1)


@pytest.mark.rule(22)
async def test_answer_after_decision_is_ignored(harness: Harness) -> None:
    owner, id = await harness.new_pending(policy=NOW)
    call = await asked(owner.checks, id, DUE)
    await roll_back(owner, id)
    for result in (Answered(Decision.COMMIT), Unreached("x"), Answered(Decision.UNKNOWN, 9.0)):
        await answered(owner.checks, call, result)
    assert harness.kinds() == ["check", "rollback"]
    assert known(owner, id).verdict.decision is Decision.ROLLBACK


@pytest.mark.rule(23)
async def test_requested_check_is_immediate_counted_and_spaced(harness: Harness) -> None:
    owner, id = await harness.new_pending(policy=THREE)
    handed = harness.runner.due_now
    await until(lambda: handed == [(id, DUE)])
    call = await asked(owner.checks, id, DUE)
    await answered(owner.checks, call, Unclear("timeout"))
    owner.checks.ask(known(owner, id))
    await settled()
    assert handed == [(id, DUE)]
    assert await attempt(owner.checks, id, ASKED) is None
    harness.advance(ASK_SPACING_MS / 1000)
    owner.checks.ask(known(owner, id))
    await until(lambda: handed == [(id, DUE), (id, ASKED)])
    second = await asked(owner.checks, id, ASKED)
    assert (second.attempt, second.reason) == (2, ASKED)
    assert len(known(owner, id).checks.counted_ms) == 2


@pytest.mark.parametrize("source", [Source.PRODUCER, Source.OPERATOR])
async def test_marker_of_check_names_requester(harness: Harness, source: Source) -> None:
    owner, id = await harness.new_pending(policy=THREE)
    await until(lambda: harness.runner.due_now == [(id, DUE)])
    call = await asked(owner.checks, id, DUE)
    await answered(owner.checks, call, Unclear("timeout"))
    harness.advance(ASK_SPACING_MS / 1000)
    owner.checks.ask(known(owner, id), "ann@laptop via http 10.0.0.1", "the shop is back", source)
    await until(lambda: (id, ASKED) in harness.runner.due_now)
    assert await attempt(owner.checks, id, ASKED) is not None
    assert [(marker.reason, marker.by, marker.source) for marker in harness.markers()] == [
        (DUE, "", Source.SCHEDULE),
        (ASKED, "ann@laptop via http 10.0.0.1: the shop is back", source),
    ]


@pytest.mark.rule(23)
async def test_last_attempt_is_never_pulled_forward(harness: Harness) -> None:
    owner, id = await harness.new_pending(policy=structs.replace(NOW, attempts_max=2))
    await asked(owner.checks, id, DUE)
    harness.advance(2.0)
    with pytest.raises(NotPending):
        owner.checks.ask(known(owner, id))
    assert await attempt(owner.checks, id, ASKED) is None
    assert len(known(owner, id).checks.counted_ms) == 1


@pytest.mark.rule(23)
async def test_not_yet_uses_no_attempt_and_is_obeyed(harness: Harness) -> None:
    owner, id = await harness.new_pending(policy=NOW)
    call = await asked(owner.checks, id, DUE)
    await answered(owner.checks, call, Answered(Decision.UNKNOWN, 60.0))
    transaction, marker = known(owner, id), harness.markers()[-1]
    assert (marker.kind, marker.round, marker.number, marker.later_s) == ("later", 1, 1, 60.0)
    assert transaction.checks.counted_ms == ()
    at_ms = harness.kafka.visible("txbroker.op")[-1].timestamp_ms
    assert transaction.next_check_ms() == at_ms + 60_000
    assert await attempt(owner.checks, id, DUE) is None
    harness.advance(60.1)
    again = await asked(owner.checks, id, DUE)
    assert (again.number, again.attempt) == (2, 1)
    await answered(owner.checks, again, Answered(Decision.UNKNOWN, 1e9))
    assert transaction.next_check_ms() - harness.clock.now_ms() <= LATER_S_MAX * 1000


async def test_preparing_instance_is_preferred(harness: Harness) -> None:
    owner = await harness.owner()
    half = harness.half()
    await prepare(owner, half, "instance-7")
    harness.advance(6.1)
    owner.checks.look_again()
    await until(lambda: harness.runner.due_now == [(half.id, DUE)])
    assert harness.runner.prefers == ["instance-7"]
