"""Rules 6 and 7: what time it is, and which half messages count."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from tests.rules.fakes import Gate
from tests.rules.harness import (
    GROUP,
    START_MS,
    WINDOW_MS,
    Harness,
    commit,
    known,
    message,
    prepare,
    roll_back,
    standing_of,
    until,
)
from txbroker.contract.service import (
    DecideRequest,
    PrepareRequest,
    execute,
)
from txbroker.core.ledger import Effect
from txbroker.core.records import Decision, Record, State
from txbroker.core.routing import make_id, parse_id
from txbroker.core.segment import ROW_BYTES
from txbroker.errors import IdConflict, IdExpired, Overloaded
from txbroker.proxy.partition import clock
from txbroker.proxy.partition.clock import LogTime

WALL_CLOCKS_S = (0.0, 4_102_444_800.0)
"""1970 and 2100."""


@pytest.mark.rule(6)
@pytest.mark.parametrize("wall_s", WALL_CLOCKS_S)
async def test_wall_clock_is_not_used(harness: Harness, wall_s: float) -> None:
    owner, id = await harness.new_pending()
    before_ms = owner.clock.now_ms()
    harness.monkeypatch.setattr(time, "time", lambda: wall_s)
    harness.monkeypatch.setattr(time, "time_ns", lambda: round(wall_s * 1e9))
    assert before_ms <= owner.clock.now_ms() < before_ms + 60_000
    await commit(owner, id)
    later = await harness.committed(owner)
    await until(lambda: harness.visible() == [id, later])
    assert abs(known(owner, later).prepared_at_ms - START_MS) < 60_000
    again = await harness.restarted(owner)
    assert abs(again.clock.now_ms() - harness.clock.now_ms()) < 1000


@pytest.mark.rule(6)
@pytest.mark.parametrize("wall_s", WALL_CLOCKS_S)
async def test_ids_use_brokers_clock(harness: Harness, wall_s: float) -> None:
    harness.monkeypatch.setattr(time, "time", lambda: wall_s)
    broker = await harness.new_broker()
    assert abs(broker.now_ms() - harness.clock.now_ms()) < 1000
    made = await execute(broker, PrepareRequest(GROUP, (message("v"),)))
    assert abs(parse_id(made.id).time_ms - harness.clock.now_ms()) < 1000
    await execute(broker, DecideRequest(made.id, Decision.COMMIT, wait=True))
    assert harness.visible() == ["v"]


@pytest.mark.rule(6)
async def test_clock_starts_at_claim_and_runs_monotonic(harness: Harness) -> None:
    owner = await harness.owner()
    stamp_ms = harness.kafka.visible("txbroker.checkpoint")[0].timestamp_ms
    assert 0 <= owner.clock.now_ms() - stamp_ms < 1000
    harness.advance(100.0)
    assert 100_000 <= owner.clock.now_ms() - stamp_ms < 101_000


@pytest.mark.rule(6)
async def test_clock_is_never_before_last_append(harness: Harness) -> None:
    owner = await harness.owner()
    harness.clock.advance(77.0)
    id = await harness.prepared(owner)
    assert owner.clock.now_ms() >= known(owner, id).prepared_at_ms


@pytest.mark.rule(6)
def test_clock_never_runs_ahead_of_brokers(monkeypatch: pytest.MonkeyPatch) -> None:
    monotonic_s = 0.0
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: monotonic_s))
    now = LogTime(1000)
    monotonic_s = 0.0009
    now.at_least(1005)
    monotonic_s = 0.0012
    assert now.now_ms() == 1005
    now.at_least(1003)
    monotonic_s = 0.0021
    assert now.now_ms() == 1006


@pytest.mark.rule(6)
async def test_restart_takes_time_from_claim(harness: Harness) -> None:
    owner = await harness.owner()
    await harness.prepared(owner)
    await owner.close()
    harness.advance(1000.0)
    again = await harness.owner()
    assert abs(again.clock.now_ms() - harness.clock.now_ms()) < 1000


@pytest.mark.rule(6)
async def test_ids_expire_by_log_clock_only(harness: Harness) -> None:
    harness.proxy.settled = 0 * ROW_BYTES
    owner, id = await harness.new_committed()
    await until(lambda: harness.events.promotions == [id])
    # The owner's clock is far ahead, half's log clock is not: nothing may be forgotten.
    harness.time.ahead_s += WINDOW_MS
    assert owner.clock.now_ms() > START_MS + WINDOW_MS
    harness.zombie_half(harness.half())
    await until(lambda: owner.ledger.half_position == 2)
    assert owner.ledger.index.get(id) is not None
    harness.clock.advance(WINDOW_MS / 1000 + 1)
    harness.zombie_half(harness.half())
    await until(lambda: owner.ledger.half_position == 3)
    assert owner.ledger.index.get(id) is None


@pytest.mark.rule(7)
async def test_id_outside_window_is_refused_before_write(harness: Harness) -> None:
    owner = await harness.owner()
    for away_ms in (-WINDOW_MS - 1000, WINDOW_MS + 1000):
        id = make_id(0, harness.clock.now_ms() + away_ms, 1)
        with pytest.raises(IdExpired):
            await prepare(owner, harness.half(id=id))
    assert harness.kafka.visible("txbroker.half") == []


@pytest.mark.rule(7)
async def test_late_half_message_is_void(harness: Harness) -> None:
    owner = await harness.owner()
    half, gate = harness.half(), Gate()
    harness.partition.half.script.append(gate.append)
    preparing = asyncio.create_task(prepare(owner, half))
    await gate.reached.wait()
    harness.advance(WINDOW_MS / 1000 + 1)
    gate.open()
    with pytest.raises(IdExpired):
        await preparing
    assert len(harness.kafka.visible("txbroker.half")) == 1
    assert owner.ledger.index.get(half.id) is None
    await owner.close()
    assert (await harness.owner()).ledger.index.get(half.id) is None


@pytest.mark.rule(7)
async def test_undecodable_records_are_set_aside(harness: Harness) -> None:
    owner = await harness.owner()
    for topic in ("txbroker.half", "txbroker.op"):
        partition = harness.kafka.topics[topic].partitions[0]
        partition.append([Record(b"\xff", b"{", (("txb-v", b"1"),))], harness.clock.now_ms())
        partition.append([Record(None, None)], harness.clock.now_ms())
    id = await harness.committed(owner)
    await until(lambda: harness.visible() == [id])
    assert harness.events.effects() == [Effect.VOID] * 4
    await owner.close()
    assert known(await harness.owner(), id).state is State.PROMOTED


@pytest.mark.rule(7)
@pytest.mark.parametrize(
    ("decide", "state"), [(commit, State.PROMOTED), (roll_back, State.ROLLED_BACK)]
)
async def test_repeated_prepare_returns_current_state(
    harness: Harness, decide: object, state: State
) -> None:
    owner = await harness.owner()
    half = harness.half()
    assert (await prepare(owner, half)).created
    assert not (await prepare(owner, half)).created
    await decide(owner, half.id)  # type: ignore[operator]
    await until(lambda: known(owner, half.id).state is state)
    again = await prepare(owner, half)
    assert (again.state, again.created) == (state, False)
    messages = half.messages
    standing = standing_of(owner, PrepareRequest(GROUP, messages, half.id, None))
    assert standing is not None
    assert standing.state is state
    assert harness.visible() == ([half.id] if state is State.PROMOTED else [])


async def test_repeated_prepare_does_not_examine_targets(harness: Harness) -> None:
    broker = await harness.new_broker()
    request = PrepareRequest(GROUP, (message("same"),), dedup_key="d")
    first = await execute(broker, request)
    looks: list[object] = []
    harness.monkeypatch.setattr(broker._targets, "known", looks.append)
    again = await execute(broker, request)
    assert (again.id, again.created, looks) == (first.id, False, [])


@pytest.mark.rule(7)
async def test_concurrent_prepares_with_one_key_store_one(harness: Harness) -> None:
    owner = await harness.owner()
    halves = [harness.half(message("same"), dedup_key="d") for _ in range(2)]
    standings = await asyncio.gather(*[prepare(owner, half) for half in halves])
    assert [standing.id for standing in standings] == [halves[0].id] * 2
    assert [standing.created for standing in standings] == [True, False]
    assert len(harness.kafka.visible("txbroker.half")) == 2
    await owner.close()
    assert list((await harness.owner()).ledger.index.transactions) == [halves[0].id]


@pytest.mark.rule(7)
async def test_key_holds_while_transaction_is_unsettled(harness: Harness) -> None:
    owner, id = await harness.new_pending(message("same"), dedup_key="d")
    harness.advance(10 * WINDOW_MS / 1000)
    standing = standing_of(owner, PrepareRequest(GROUP, (message("same"),), None, "d"))
    assert standing is not None
    assert standing.id == id
    await roll_back(owner, id)
    assert standing_of(owner, PrepareRequest(GROUP, (message("same"),), None, "d")) is None


@pytest.mark.rule(7)
async def test_known_id_or_key_with_other_body_conflicts(harness: Harness) -> None:
    owner, id = await harness.new_pending(message("one"), dedup_key="d")
    other = (message("two"),)
    for half_id, key in ((id, None), (None, "d")):
        with pytest.raises(IdConflict):
            standing_of(owner, PrepareRequest(GROUP, other, half_id, key))
    with pytest.raises(IdConflict):
        await prepare(owner, harness.half(*other, id=id))
    assert parse_id(id).partition == 0
    assert known(owner, id).messages == (message("one"),)


@pytest.mark.rule(7)
async def test_settled_id_within_window_is_remembered(harness: Harness) -> None:
    harness.proxy.settled = 5 * ROW_BYTES
    owner = await harness.owner()
    ids = [await harness.prepared(owner) for _ in range(20)]
    for id in ids:
        await commit(owner, id)
    await until(lambda: len(harness.events.promotions) == 20)
    assert [known(owner, id).state for id in ids] == [State.PROMOTED] * 20


@pytest.mark.rule(7)
async def test_prepares_are_refused_while_window_is_full(harness: Harness) -> None:
    harness.proxy.settled = 2 * ROW_BYTES
    owner = await harness.owner()
    for _ in range(2):
        await harness.committed(owner)
    await until(lambda: len(harness.events.promotions) == 2)
    with pytest.raises(Overloaded):
        await prepare(owner, harness.half())
    # Half's log clock stands still now; if it decided alone, this would never end.
    harness.advance(WINDOW_MS / 1000 + 1)
    await prepare(owner, harness.half())


async def test_committed_unpromoted_counts_as_held(harness: Harness) -> None:
    owner = await harness.owner(pending_max=2)
    harness.kafka.set_leaderless("t", 0)
    for _ in range(2):
        await harness.committed(owner, message("one"))
    with pytest.raises(Overloaded):
        await prepare(owner, harness.half())
