"""Rules 1 to 5: who writes, what is applied when, and what answers follow from."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from tests.rules.rules_world import (
    GROUP,
    WINDOW_MS,
    Gate,
    World,
    behind,
    commit,
    known,
    lost_unanswered,
    message,
    prepare,
    roll_back,
    settled,
    stored_unanswered,
    until,
    without_offset,
    without_time,
)
from txbroker.core import ledger as ledger_module
from txbroker.core.ledger import Effect
from txbroker.core.records import MarkerKind, State
from txbroker.errors import (
    AlreadyDecided,
    IdConflict,
    NotFound,
    OwnerUnavailable,
    WrongGroup,
)
from txbroker.proxy.partition import owner as owner_module

# --- 1 -----------------------------------------------------------------------------------------


@pytest.mark.rule(1)
@pytest.mark.parametrize("fate", [stored_unanswered, lost_unanswered])
async def test_unanswered_prepare_is_not_acked_and_repeatable(world: World, fate: object) -> None:
    owner = await world.owner()
    half = world.half(message("once"))
    world.partition.half.script.append(fate)  # type: ignore[arg-type]
    with pytest.raises(OwnerUnavailable):
        await prepare(owner, half)
    assert (await prepare(owner, half)).id == half.id
    await commit(owner, half.id)
    await until(lambda: world.visible() == ["once"])
    assert [transaction.id for transaction in owner.ledger.index] == [half.id]


@pytest.mark.rule(1)
@pytest.mark.parametrize("fate", [stored_unanswered, lost_unanswered])
async def test_unanswered_decision_is_not_acked_and_repeatable(world: World, fate: object) -> None:
    owner = await world.owner()
    id = await world.prepared(owner)
    world.partition.op.script.append(fate)  # type: ignore[arg-type]
    with pytest.raises(OwnerUnavailable):
        await commit(owner, id)
    assert (await commit(owner, id)).decision == "commit"
    await until(lambda: world.visible() == [id])


# --- 2 -----------------------------------------------------------------------------------------


@pytest.mark.rule(2, 3)
async def test_gap_is_applied_before_own_marker(world: World) -> None:
    owner = await world.owner()
    id = await world.prepared(owner)
    world.partition.op.script.append(
        behind(lambda: world.zombie_mark(MarkerKind.ROLLBACK, id, group=GROUP))
    )
    with pytest.raises(AlreadyDecided) as raised:
        await commit(owner, id)
    assert raised.value.details["decision"] == "rollback"
    assert owner.ledger.op_position == 2
    assert (known(owner, id).state, known(owner, id).verdict.op_offset) == (State.ROLLED_BACK, 0)


@pytest.mark.rule(2)
async def test_gap_in_half_is_applied_first(world: World) -> None:
    owner = await world.owner()
    half = world.half(message("mine"), dedup_key="d")
    theirs = world.half(message("theirs"))
    world.partition.half.script.append(behind(lambda: world.zombie_half(theirs)))
    assert (await prepare(owner, half)).created
    assert known(owner, theirs.id).offset == 0
    assert known(owner, half.id).offset == 1


@pytest.mark.rule(2)
async def test_missing_offset_reads_log_back(world: World) -> None:
    owner = await world.owner()
    id = await world.prepared(owner)
    world.partition.op.script.append(without_offset)
    assert (await commit(owner, id)).decision == "commit"
    assert known(owner, id).verdict.op_offset == 0
    half = world.half()
    world.partition.half.script.append(without_offset)
    assert (await prepare(owner, half)).created
    assert known(owner, half.id).offset == 1


@pytest.mark.rule(2)
async def test_missing_offset_skips_equal_older_record(world: World) -> None:
    owner = await world.owner()
    half = world.half(message("mine"), dedup_key="d")
    theirs = world.half(message("theirs"))

    async def hidden_behind_another(log: object, records: object) -> object:
        world.zombie_half(theirs)
        return await without_offset(log, records)  # type: ignore[arg-type]

    world.partition.half.script.append(hidden_behind_another)  # type: ignore[arg-type]
    assert (await prepare(owner, half)).id == half.id
    assert [known(owner, each.id).offset for each in (theirs, half)] == [0, 1]


@pytest.mark.rule(2)
async def test_missing_append_time_reads_log_back(world: World) -> None:
    owner = await world.owner()
    world.partition.half.script.append(without_time)
    id = await world.prepared(owner)
    world.partition.op.script.append(without_time)
    await commit(owner, id)
    transaction = known(owner, id)
    assert transaction.prepared_at_ms == world.kafka.visible("txbroker.half")[0].timestamp_ms
    assert transaction.verdict.at_ms == world.kafka.visible("txbroker.op")[0].timestamp_ms


@pytest.mark.rule(2)
async def test_contiguous_append_is_not_read_back(world: World) -> None:
    owner = await world.owner()
    calls = world.partition.calls
    before = calls.count("half.read") + calls.count("op.read")
    for _ in range(3):
        await world.committed(owner)
    assert calls.count("half.read") + calls.count("op.read") == before


@pytest.mark.rule(2)
async def test_idle_owner_applies_records_of_others(world: World) -> None:
    await world.owner()
    half = world.half(message("theirs"))
    world.zombie_half(half)
    world.zombie_mark(MarkerKind.COMMIT, half.id, group=GROUP)
    await until(lambda: world.told.promotions == [half.id])
    assert world.visible() == ["theirs"]


@pytest.mark.rule(2)
def test_idle_owner_reads_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    assert owner_module.IDLE_S <= 1.0


# --- 3 -----------------------------------------------------------------------------------------


@pytest.mark.rule(3)
async def test_decision_is_answered_after_marker_is_applied(world: World) -> None:
    owner = await world.owner()
    id = await world.prepared(owner)
    gate = Gate()
    world.partition.op.script.append(gate.append_unheard)
    deciding = asyncio.create_task(commit(owner, id))
    await gate.reached.wait()
    await settled()
    assert not deciding.done()
    assert known(owner, id).verdict.decision is None
    gate.open()
    assert (await deciding).decision == "commit"
    assert known(owner, id).verdict.op_offset == 0


@pytest.mark.rule(3)
async def test_decision_is_not_answered_before_gap_is_read(world: World) -> None:
    owner = await world.owner(half_retention_ms=1 << 60)
    id = await world.prepared(owner)
    log = world.partition.op
    log.script.append(behind(lambda: world.zombie_mark(MarkerKind.CHECK, id)))
    log.bounds_gate.clear()
    deciding = asyncio.create_task(commit(owner, id))
    await until(lambda: log.script == type(log.script)())
    await settled()
    assert not deciding.done()
    log.bounds_gate.set()
    assert (await deciding).decision == "commit"


@pytest.mark.rule(3)
async def test_repeated_decision_writes_nothing(world: World) -> None:
    owner = await world.owner()
    id = await world.prepared(owner)
    await commit(owner, id)
    await until(lambda: world.told.promotions == [id])
    assert (await commit(owner, id)).state is State.PROMOTED
    with pytest.raises(AlreadyDecided):
        await roll_back(owner, id)
    with pytest.raises(WrongGroup):
        await commit(owner, id, group="another")
    assert world.kinds() == ["commit"]


@pytest.mark.rule(3)
async def test_not_found_after_reading_half_to_current_end(world: World) -> None:
    owner = await world.owner()
    await owner.close()
    theirs = world.half()
    world.zombie_half(theirs)
    assert (await owner.api.get(theirs.id)).offset == 0
    calls = world.partition.calls
    before = calls.count("half.bounds")
    with pytest.raises(NotFound):
        await owner.api.get(world.half().id)
    assert calls.count("half.bounds") == before + 1


@pytest.mark.rule(3)
async def test_not_found_waits_for_end_of_half(world: World) -> None:
    owner = await world.owner()
    log = world.partition.half
    log.bounds_gate.clear()
    half = world.half()
    deciding = asyncio.create_task(commit(owner, half.id))
    await settled()
    assert not deciding.done()
    world.zombie_half(half)
    log.bounds_gate.set()
    assert (await deciding).decision == "commit"


@pytest.mark.rule(3)
async def test_silent_kafka_never_means_not_found(world: World) -> None:
    owner = await world.owner()
    world.kafka.go_down()
    with pytest.raises(OwnerUnavailable):
        await commit(owner, world.half().id)
    world.kafka.come_up()


# --- 4 -----------------------------------------------------------------------------------------


@pytest.mark.rule(4)
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("commit", {"group": "another"}),
        ("check", {"round": 2, "number": 1, "reason": "asked"}),
        ("check", {"round": 1, "number": 2, "reason": "asked"}),
        ("returned", {"round": 1, "number": 1}),
        ("later", {"round": 1, "number": 1, "later_s": 9.0}),
        ("park", {"round": 1}),
        ("revive", {"round": 1}),
    ],
)
async def test_illegal_marker_is_counted_without_effect(
    world: World, kind: str, fields: dict[str, object]
) -> None:
    owner = await world.owner()
    id = await world.prepared(owner)
    before = structs.asdict(known(owner, id))
    world.zombie_mark(kind, id, **fields)
    await until(lambda: world.told.effects() == [Effect.ILLEGAL])
    assert structs.asdict(known(owner, id)) == before


@pytest.mark.rule(4)
async def test_second_marker_loses_and_is_counted(world: World) -> None:
    owner = await world.owner()
    id = await world.committed(owner)
    world.zombie_mark(MarkerKind.ROLLBACK, id, group=GROUP)
    await until(lambda: world.told.effects() == [Effect.CONFLICT])
    await until(lambda: world.visible() == [id])
    assert known(owner, id).verdict.decision == "commit"


@pytest.mark.rule(4)
async def test_first_of_contrary_markers_wins(world: World) -> None:
    owner = await world.owner()
    id = await world.prepared(owner)
    first, second = await asyncio.gather(
        roll_back(owner, id), commit(owner, id), return_exceptions=True
    )
    assert not isinstance(first, BaseException)
    assert isinstance(second, AlreadyDecided)
    assert world.kinds() == ["rollback", "commit"]


@pytest.mark.rule(4)
async def test_owner_checks_state_before_append(world: World) -> None:
    owner = await world.owner()
    id = await world.prepared(owner)
    with pytest.raises(WrongGroup):
        await commit(owner, id, group="another")
    with pytest.raises(NotFound):
        await commit(owner, world.half().id)
    assert world.kinds() == []


# --- 5 -----------------------------------------------------------------------------------------


@pytest.mark.rule(5)
async def test_marker_before_half_waits(world: World) -> None:
    owner = await world.owner()
    half = world.half(message("late"))
    world.zombie_mark(MarkerKind.COMMIT, half.id, group=GROUP)
    await until(lambda: owner.ledger.op_position == 1)
    assert world.told.effects() == [Effect.WAITING]
    assert (await prepare(owner, half)).state is State.COMMITTED
    await until(lambda: world.visible() == ["late"])


@pytest.mark.rule(5)
async def test_later_commit_waits_for_unread_half(world: World) -> None:
    owner = await world.owner()
    later = await world.prepared(owner, message("later"), order_key="k")
    earlier = world.half(message("earlier"), order_key="k")
    world.partition.half.bounds_gate.clear()
    # An owner that does not know yet that it was fenced stores both, and acknowledges the commit.
    world.zombie_half(earlier)
    world.zombie_mark(MarkerKind.COMMIT, earlier.id, group=GROUP)
    await commit(owner, later)
    await settled()
    assert world.told.effects() == [Effect.WAITING]
    assert world.visible() == []
    world.partition.half.bounds_gate.set()
    await until(lambda: len(world.visible()) == 2)
    assert world.visible() == ["earlier", "later"]


@pytest.mark.rule(5)
async def test_commit_without_half_delays_nothing(world: World) -> None:
    owner = await world.owner()
    world.zombie_mark(MarkerKind.COMMIT, world.half().id, group=GROUP)
    for number in range(3):
        await world.committed(owner, message(str(number)))
    await until(lambda: world.visible() == ["0", "1", "2"])
    assert world.told.effects() == [Effect.WAITING]


@pytest.mark.rule(5)
async def test_waiting_marker_expires_by_half_log_clock(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "WAITING_SWEEP_MIN", 0)
    owner = await world.owner()
    late = world.half(message("late"))
    world.zombie_mark(MarkerKind.COMMIT, late.id, group=GROUP)
    # Op's log clock runs far ahead of half's, and then another half message comes.
    world.clock.advance(10 * WINDOW_MS / 1000)
    world.zombie_mark(MarkerKind.PARK, world.half().id, round=1)
    world.clock.advance(-10 * WINDOW_MS / 1000)
    await until(lambda: owner.ledger.op_position == 2)
    world.zombie_half(world.half())
    world.zombie_half(late)
    await until(lambda: world.visible() == ["late"])


@pytest.mark.rule(5, 12)
async def test_takeover_reads_end_of_op_before_half(world: World) -> None:
    await (await world.owner()).close()
    await world.owner()
    asked = [call for call in world.partition.calls if call.endswith("bounds")]
    assert asked[:2] == ["op.bounds", "half.bounds"]


@pytest.mark.rule(7)
async def test_other_content_in_gap_is_a_conflict(world: World) -> None:
    owner = await world.owner()
    mine, theirs = world.half(message("mine")), message("theirs")
    world.partition.half.script.append(
        behind(lambda: world.zombie_half(structs.replace(mine, messages=(theirs,))))
    )
    with pytest.raises(IdConflict):
        await prepare(owner, mine)
    await commit(owner, mine.id)
    await until(lambda: world.visible() == ["theirs"])
