"""Rules 13 and 14, 17 to 20, and 25: what a turn holds, and what becomes of the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.rules.rules_world import (
    DAY_MS,
    Held,
    World,
    commit,
    known,
    message,
    prepare,
    raising,
    roll_back,
    settled,
    until,
)
from tests.rules.twins import Twins
from txbroker.core.promotion import PromotionLimits
from txbroker.core.records import Cause, Message, Record, State
from txbroker.door.protocols import (
    Appended,
    AppendRefused,
    Fenced,
    Log,
    NotVisible,
    PromotionTxn,
    PromotionTxnHandle,
    PromotionTxnLost,
)
from txbroker.errors import BadTarget, KafkaUnavailable, Overloaded, TooLarge
from txbroker.kafka.client.client import Client
from txbroker.kafka.client.producer import ProducerFenced
from txbroker.kafka.client.settings import KafkaSettings
from txbroker.kafka.client.shared_writes import SharedWrites
from txbroker.kafka.door.partition import KafkaPartitionDoor
from txbroker.kafka.door.stable_offset import StableEnds
from txbroker.proxy.partition.targets import TIMESTAMP_AHEAD_MAX_MS, check_timestamps
from txbroker.testing.door import MemoryPartitionDoor

HOUR_MS = 3_600_000

# --- 13 ------------------------------------------------------------------------------------------


@pytest.mark.rule(13)
def test_transactional_ids_name_installation_and_time_out() -> None:
    settings = KafkaSettings(
        bootstrap_servers=("127.0.0.1:1",), instance_id="one", half_topic="shop.half"
    )
    client = Client(settings)
    shared = SharedWrites(client)
    door = KafkaPartitionDoor(client, 7, lambda _: 1000, lambda _: None, shared, StableEnds(client))
    assert [door._producer(side)._id for side in "ab"] == ["shop.half-7-a", "shop.half-7-b"]
    assert settings.transaction_timeout_s == 15.0
    assert settings.request_timeout_s <= 5.0


@pytest.mark.rule(13)
async def test_transaction_is_promoted_in_one_txn(world: World) -> None:
    owner = await world.owner(turns=PromotionLimits(transactions_max=1, bytes_max=1))
    ids = [
        await world.committed(owner, message("a"), message("b", at=1), message("c", topic="u"))
        for _ in range(3)
    ]
    await until(lambda: world.told.promotions == ids)
    turns = [turn for turn in world.partition.turns if turn.promoted]
    assert [[t.record.value for t in turn.promoted] for turn in turns] == [[b"a", b"b", b"c"]] * 3
    assert [turn.progress.op for turn in turns] == [1, 2, 3]


@pytest.mark.rule(13)
async def test_promotion_is_visible_whole_or_not(world: World) -> None:
    owner = await world.owner()
    world.partition.writes.append(raising(PromotionTxnLost()))
    id = await world.committed(owner, message("a"), message("b", topic="u"))
    await until(lambda: world.told.promotions == [id])
    assert (world.visible("t"), world.visible("u")) == (["a"], ["b"])
    assert world.told.failures == ["turn"]
    refused, kept = await _batch(world, owner)
    assert world.visible("u") == ["b", kept]
    assert known(owner, refused).state is State.REFUSED


async def _batch(world: World, owner: object) -> tuple[str, str]:
    """Commit one that is refused for one of its two topics, and one that is well."""
    bad = await world.prepared(owner, message("x", topic="u"), message("x" * 500))  # type: ignore[arg-type]
    good = world.half()
    await prepare(
        owner,  # type: ignore[attr-defined]
        world.half(message(good.id, topic="u"), id=good.id),
    )
    world.kafka.set_message_bytes_max("t", 300)
    await commit(owner, bad)  # type: ignore[arg-type]
    await commit(owner, good.id)  # type: ignore[arg-type]
    await until(lambda: good.id in world.told.promotions)
    await until(lambda: bad in world.told.refusals)
    return bad, good.id


# --- 14 ------------------------------------------------------------------------------------------


@pytest.mark.rule(14)
async def test_promotion_writes_after_previous_writes(world: World) -> None:
    twins = Twins()
    twins.a.produce_now.clear()
    first = asyncio.create_task(twins.write(1))
    await settled()
    with pytest.raises(AssertionError):
        await twins.write(2)
    assert twins.log == ["a begins", "a writes"]
    twins.a.produce_now.set()
    await (await first).committed()
    await twins.writer.close()


@pytest.mark.rule(14)
async def test_promotion_ends_after_previous_commit(world: World) -> None:
    twins = Twins()
    twins.a.end_now.clear()
    await twins.write(1)
    second = await twins.write(2)
    await settled()
    assert "b written" in twins.log
    assert "b commits" not in twins.log
    twins.a.end_now.set()
    await second.committed()
    assert twins.log.index("a commit acknowledged") < twins.log.index("b commits")
    await twins.writer.close()


@pytest.mark.rule(14)
@pytest.mark.parametrize(
    ("error", "raised"),
    [(ProducerFenced(), Fenced), (KafkaUnavailable("no answer"), PromotionTxnLost)],
)
async def test_promotion_after_failed_one_is_not_committed(
    world: World, error: Exception, raised: type[Exception]
) -> None:
    twins = Twins()
    twins.a.end_now.clear()
    first, second = await twins.write(1), await twins.write(2)
    twins.a.end_error = error
    twins.a.end_now.set()
    for handle in (first, second):
        with pytest.raises(raised):
            await handle.committed()
    with pytest.raises(raised):
        await twins.write(3)
    assert "b commits" not in twins.log
    await twins.writer.close()


@pytest.mark.rule(14)
async def test_promotion_after_aborted_one_is_not_committed(world: World) -> None:
    twins = Twins()
    twins.a.end_now.clear()
    await twins.write(1)
    twins.b.produce_error = KafkaUnavailable("no answer")
    with pytest.raises(PromotionTxnLost):
        await twins.write(2)
    twins.b.produce_error = None
    with pytest.raises(PromotionTxnLost):
        await twins.write(3)
    assert twins.log.count("a begins") == 1
    twins.a.end_now.set()
    await twins.writer.close()


@pytest.mark.rule(14)
@pytest.mark.parametrize("at", [("t", 0), ("txbroker.checkpoint", 0)])
async def test_promotion_waits_for_open_txn_of_its_producer(
    world: World, at: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbroker.kafka.door.pipelined_writer._ADD_TIMEOUT_S", 0.05)
    twins = Twins()
    twins.open["a"] = {at: Cause("hanging", f"{at[0]} was never told", *at, True)}
    first = await twins.write(1)
    await first.committed()
    # The other producer's records end with its own transactions.
    await twins.write(2)
    with pytest.raises(PromotionTxnLost, match="was never told") as lost:
        await twins.write(3)
    assert lost.value.cause == twins.open["a"][at]
    assert twins.log.count("a begins") == 1
    assert "a aborts" not in twins.log
    twins.open.clear()
    with pytest.raises(PromotionTxnLost):
        await twins.write(3)
    await twins.writer.close()


@pytest.mark.rule(14)
async def test_visible_offsets_are_not_verified_again(world: World) -> None:
    twins = Twins()
    twins.stable = 1
    for number in range(1, 5):
        turn = await twins.write(number)
        await turn.visible()
    assert twins.asked == []
    assert [each for each in twins.log if each.endswith("seen")] == ["a seen", "b seen"] * 2
    twins.stable = 0
    await (await twins.write(5)).committed()
    await twins.write(6)
    await twins.write(7)
    assert twins.asked == [("a", ("t", 0)), ("a", ("txbroker.checkpoint", 0))]
    await twins.writer.close()


# --- 17 ------------------------------------------------------------------------------------------


@pytest.mark.rule(17)
async def test_targets_are_examined_before_promotion(world: World) -> None:
    owner = await world.owner()
    gone = await world.prepared(owner, message("gone"), message("with it", topic="u"))
    large = await world.prepared(owner, message("x" * 1000, topic="u"))
    range_ = await world.prepared(owner, message("far", topic="u", at=5))
    world.kafka.delete_topic("t")
    world.kafka.set_message_bytes_max("u", 500)
    for id in (gone, large, range_):
        await commit(owner, id)
    well = await world.committed(owner, message("well", topic="u"))
    await until(lambda: world.told.promotions == [well])
    await until(lambda: sorted(world.told.refusals) == sorted([gone, large, range_]))
    assert world.visible("u") == ["well"]
    written = [target.record.value for turn in world.partition.turns for target in turn.promoted]
    assert written == [b"well"]
    causes = [known(owner, id).cause for id in (gone, large, range_)]
    assert [cause.code for cause in causes if cause] == [
        "unknown_topic",
        "too_large",
        "bad_partition",
    ]


@pytest.mark.rule(17)
async def test_leaderless_target_defers_order_key(
    world: World,
) -> None:
    owner = await world.owner()
    world.kafka.set_leaderless("t", 0)
    order = {"order_key": "k"}
    first = await world.committed(owner, message("1"), message("1", topic="u"), **order)
    second = await world.committed(owner, message("2", topic="u"), message("2", at=1), **order)
    third = await world.committed(owner, message("3", at=1), **order)
    free = await world.committed(owner, message("4", at=1), order_key="other")
    alone = await world.committed(owner, Message("t", None, b"5", partition=1))
    await until(lambda: world.told.promotions == [free, alone])
    assert world.visible("t", 1) == ["4", "5"]
    assert world.visible("u") == []
    await until(lambda: set(world.progress().deferred) == {first, second, third})
    assert world.progress().op == 5
    world.kafka.set_leaderless("t")
    await until(lambda: len(world.told.promotions) == 5)
    assert world.told.promotions[2:] == [first, second, third]
    assert (world.visible("t"), world.visible("u")) == (["1"], ["1", "2"])
    assert world.visible("t", 1) == ["4", "5", "2", "3"]


@pytest.mark.rule(17)
async def test_next_owner_promotes_deferred_once(
    world: World,
) -> None:
    owner = await world.owner()
    world.kafka.set_leaderless("t", 0)
    waits = await world.committed(owner)
    goes = await world.committed(owner, message("goes", at=1, key=b"other"))
    await until(lambda: world.told.promotions == [goes])
    assert (world.progress().op, world.progress().deferred) == (2, (waits,))
    await owner.close()
    world.kafka.set_leaderless("t")
    again = await world.owner()
    await until(lambda: world.told.promotions == [goes, waits])
    await again.close()
    last = await world.committed(await world.owner())
    await until(lambda: last in world.told.promotions)
    assert world.visible() == [waits, last]


@pytest.mark.rule(17)
async def test_full_deferred_list_stops_promotion_and_prepares(world: World) -> None:
    owner = await world.owner(turns=PromotionLimits(deferred_max=2))
    world.kafka.set_leaderless("t", 0)
    ids = [await world.prepared(owner) for _ in range(4)]
    beside = await world.prepared(owner, message("beside", at=1, key=b"other"))
    for id in ids:
        await commit(owner, id)
    await commit(owner, beside)
    await until(lambda: owner._promoter.full)
    with pytest.raises(Overloaded):
        await prepare(owner, world.half(group="another"))
    assert world.visible("t", 1) == []
    world.kafka.set_leaderless("t")
    await until(lambda: len(world.told.promotions) == 5)
    assert world.visible() == ids
    await until(lambda: not owner._promoter.full)
    await prepare(owner, world.half())


# --- 18 ------------------------------------------------------------------------------------------


@pytest.mark.rule(18)
@pytest.mark.parametrize("place", [0, 3, 7])
async def test_poison_message_is_isolated_and_refused(world: World, place: int) -> None:
    owner = await world.owner()
    ids = []
    for number in range(8):
        poison = world.clock.now_ms() + 2 * HOUR_MS if number == place else None
        each = Message("t", b"k", str(number).encode(), partition=0, timestamp_ms=poison)
        ids.append(await world.prepared(owner, each))
    held = Held(committed=False)
    world.partition.writes.append(held.write)
    before = await world.committed(owner, message("before"))
    await held.at_commit.reached.wait()
    await asyncio.gather(*[commit(owner, id) for id in ids])
    held.at_commit.open()
    await until(lambda: world.told.refusals == [ids[place]])
    rest = [str(number) for number in range(8) if number != place]
    await until(lambda: world.visible() == ["before", *rest])
    cause = known(owner, ids[place]).cause
    assert cause is not None
    assert cause.code == "bad_timestamp"
    assert world.partition.calls.count("claim") <= 7
    assert world.told.promotions[0] == before
    assert (f"{ids[place]}/0".encode(), True) in world.parked()


@pytest.mark.rule(18)
async def test_poison_among_refused_delays_no_other(world: World) -> None:
    owner = await world.owner()
    late = world.clock.now_ms() + 2 * HOUR_MS
    poison = await world.prepared(owner, Message("t", b"k", b"p", partition=0, timestamp_ms=late))
    good = await world.prepared(owner, message("good"))
    facts = world.kafka.topics["t"]
    world.kafka.delete_topic("t")
    await asyncio.gather(commit(owner, poison), commit(owner, good))
    await until(lambda: set(world.told.refusals) == {poison, good})
    for id in (poison, good):
        owner._promoter._retries.retry_now(id)
    world.kafka.topics["t"] = facts
    owner._promoter.wake()
    await until(lambda: world.visible() == ["good"])
    assert world.partition.calls.count("claim") <= 6
    await until(lambda: known(owner, good).state is State.PROMOTED)
    assert known(owner, poison).state is State.REFUSED


@pytest.mark.rule(18)
async def test_refused_batch_is_split_per_transaction(world: World) -> None:
    owner = await world.owner()
    gate = asyncio.Event()

    async def hold(log: Log, records: Sequence[Record]) -> Appended:
        await gate.wait()
        return await log.append(records)

    async def picky(log: Log, records: Sequence[Record]) -> Appended:
        world.partition.half.script.append(picky)
        if any(record.value == b"poison" for record in records):
            raise AppendRefused("not this one")
        return await log.append(records)

    world.partition.half.script.extend([hold, picky])
    first = asyncio.create_task(world.prepared(owner, message("first")))
    await settled()
    others = [
        asyncio.create_task(world.prepared(owner, message(value), message(value)))
        for value in ("a", "poison", "b")
    ]
    await settled()
    gate.set()
    results = await asyncio.gather(first, *others, return_exceptions=True)
    assert [type(result) for result in results] == [str, str, TooLarge, str]
    values = [record.value for record in world.kafka.visible("txbroker.half")]
    assert values == [b"first", b"a", b"a", b"b", b"b"]
    await world.prepared(owner)
    world.partition.half.script.clear()


@pytest.mark.rule(18)
async def test_oversized_transaction_is_refused_before_send(world: World) -> None:
    owner = await world.owner()
    log = world.partition.half
    with pytest.raises(TooLarge):
        await prepare(owner, world.half(message("x" * (log.batch_bytes_max + 1))))
    assert "half.append" not in world.partition.calls


# --- 19 ------------------------------------------------------------------------------------------


@pytest.mark.rule(19)
@pytest.mark.parametrize("step", ["committed", "visible"])
async def test_promoted_is_reported_when_visible(world: World, step: str) -> None:
    owner = await world.owner()
    held = Held(committed=step != "committed", visible=step != "visible")
    world.partition.writes.append(held.write)
    id = await world.prepared(owner)
    waiting = asyncio.create_task(commit(owner, id, wait=True))
    await (held.at_commit if step == "committed" else held.at_visible).reached.wait()
    await settled()
    assert known(owner, id).state is State.COMMITTED
    assert (waiting.done(), world.told.promotions) == (False, [])
    assert (await commit(owner, id)).state is State.COMMITTED
    held.at_commit.open()
    held.at_visible.open()
    assert (await waiting).state is State.PROMOTED
    assert world.told.promotions == [id]


@pytest.mark.rule(19)
async def test_committed_invisible_promotion_is_not_rewritten(
    world: World,
) -> None:
    owner = await world.owner()
    tries = 0

    class Unseen(Held):
        async def visible(self) -> None:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise NotVisible("committed, but not visible", [("u", 0), ("t", 0)])
            cause = known(owner, id).cause
            assert cause is not None
            assert (cause.code, cause.topic, cause.partition) == ("not_visible", "t", 0)

    world.partition.writes.append(Unseen().write)
    id = await world.committed(owner)
    await until(lambda: world.told.promotions == [id])
    assert tries == 3
    assert known(owner, id).cause is None
    assert world.visible() == [id]
    assert world.partition.calls.count("claim") == 1


# --- 20 ------------------------------------------------------------------------------------------


@pytest.mark.rule(20)
async def test_promoted_records_have_user_or_marker_timestamp(world: World) -> None:
    owner = await world.owner()
    mine = Message("t", b"k", b"mine", partition=0, timestamp_ms=123)
    first = await world.prepared(owner, mine, message("theirs"))
    world.advance(50.0)
    await commit(owner, first)
    await until(lambda: world.told.promotions == [first])
    stamps = [record.timestamp_ms for record in world.kafka.visible("t")]
    assert stamps == [123, world.kafka.visible("txbroker.op")[0].timestamp_ms]
    assert known(owner, first).prepared_at_ms < stamps[1]


@pytest.mark.rule(20)
async def test_decision_time_survives_half_and_marker(world: World) -> None:
    owner = await world.owner()
    id = await world.prepared(owner, message("x" * 500))
    world.kafka.set_message_bytes_max("t", 300)
    world.advance(50.0)
    await commit(owner, id)
    decided_at_ms = known(owner, id).verdict.at_ms
    await until(lambda: world.told.refusals == [id])
    await owner.close()
    world.kafka.truncate("txbroker.half", before=1)
    world.kafka.truncate("txbroker.op", before=1)
    world.advance(20 * DAY_MS / 1000)
    world.kafka.set_message_bytes_max("t", 3000)
    await world.owner()
    await until(lambda: id in world.told.promotions)
    assert [record.timestamp_ms for record in world.kafka.visible("t")] == [decided_at_ms]


@pytest.mark.rule(20)
def test_timestamp_over_one_hour_ahead_is_refused() -> None:
    now_ms = 10 * DAY_MS
    check_timestamps([Message("t", timestamp_ms=now_ms + TIMESTAMP_AHEAD_MAX_MS)], now_ms)
    with pytest.raises(BadTarget):
        check_timestamps([Message("t", timestamp_ms=now_ms + HOUR_MS + 1)], now_ms)


# --- 25 ------------------------------------------------------------------------------------------

RETENTION_MS = 100_000


@pytest.mark.rule(25)
async def test_pending_body_is_copied_at_half_retention(
    world: World,
) -> None:
    owner = await world.owner(half_retention_ms=RETENTION_MS)
    id = await world.prepared(owner, message("kept"), message("kept too", topic="u"))
    await settled()
    assert world.parked() == []
    world.advance(0.4 * RETENTION_MS / 1000)
    young = await world.prepared(owner)
    world.advance(0.2 * RETENTION_MS / 1000)
    await until(lambda: len(world.parked()) == 2)
    assert world.parked() == [(f"{id}/0".encode(), True), (f"{id}/1".encode(), True)]
    assert known(owner, id).state is State.PENDING
    assert [len(turn.parked) for turn in world.partition.turns] == [2]
    assert not known(owner, young).kept


@pytest.mark.rule(25)
async def test_pending_transaction_outlives_half_message(world: World) -> None:
    owner = await world.owner(half_retention_ms=RETENTION_MS)
    id = await world.prepared(owner, message("kept"), message("kept too", topic="u"))
    world.advance(0.6 * RETENTION_MS / 1000)
    await until(lambda: len(world.parked()) == 2)
    await owner.close()
    world.kafka.truncate("txbroker.half", before=2)
    again = await world.owner(half_retention_ms=RETENTION_MS)
    assert known(again, id).state is State.PENDING
    assert (await commit(again, id)).decision == "commit"
    await until(lambda: world.told.promotions == [id])
    assert (world.visible("t"), world.visible("u")) == (["kept"], ["kept too"])
    await until(lambda: [copy for _, copy in world.parked()] == [True, True, False, False])
    await again.close()
    world.advance(20 * DAY_MS / 1000)
    world.kafka.truncate("txbroker.op", before=1)
    await world.owner()
    await settled()
    assert (world.visible("t"), world.visible("u")) == (["kept"], ["kept too"])


@pytest.mark.rule(25)
async def test_deferred_transaction_outlives_half_message(world: World) -> None:
    owner = await world.owner(half_retention_ms=RETENTION_MS)
    world.kafka.set_leaderless("t", 0)
    id = await world.committed(owner, message("kept"))
    world.advance(0.6 * RETENTION_MS / 1000)
    await until(lambda: len(world.parked()) == 1)
    await owner.close()
    world.kafka.truncate("txbroker.half", before=1)
    world.kafka.set_leaderless("t")
    again = await world.owner(half_retention_ms=RETENTION_MS)
    await until(lambda: world.told.promotions == [id])
    assert known(again, id).state is State.PROMOTED
    assert world.visible() == ["kept"]


@pytest.mark.rule(25)
async def test_rollback_removes_copy(world: World) -> None:
    owner = await world.owner(half_retention_ms=RETENTION_MS)
    id = await world.prepared(owner)
    world.advance(0.6 * RETENTION_MS / 1000)
    await until(lambda: len(world.parked()) == 1)
    await roll_back(owner, id)
    await until(lambda: world.parked()[-1] == (f"{id}/0".encode(), False))
    assert world.visible() == []


@pytest.mark.rule(25)
async def test_copy_of_lost_promotion_is_written_again(world: World) -> None:
    owner = await world.owner(half_retention_ms=RETENTION_MS)
    id = await world.prepared(owner)
    world.partition.writes.append(raising(PromotionTxnLost()))
    world.advance(0.6 * RETENTION_MS / 1000)
    await until(lambda: world.parked() == [(f"{id}/0".encode(), True)])
    assert world.partition.calls.count("claim") == 2


@pytest.mark.rule(25)
async def test_copy_of_refused_promotion_is_written_again(world: World) -> None:
    owner = await world.owner()
    held = Held(committed=False)

    async def fails(door: MemoryPartitionDoor, turn: PromotionTxn) -> PromotionTxnHandle:
        handle = await held.write(door, turn)
        held.committed = _lost  # type: ignore[method-assign]
        return handle

    async def _lost() -> None:
        await held.at_commit.wait()
        raise PromotionTxnLost

    id = await world.prepared(owner, message("x" * 500))
    world.kafka.set_message_bytes_max("t", 300)
    world.partition.writes.append(fails)
    await commit(owner, id)
    await held.at_commit.reached.wait()
    assert known(owner, id).state is State.COMMITTED
    held.at_commit.open()
    await until(lambda: known(owner, id).state is State.REFUSED)
    assert world.parked()[0] == (f"{id}/0".encode(), True)
