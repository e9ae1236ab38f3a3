"""Requests whose answer never comes: nothing is guessed, and no ghost does harm later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.kafka.relay import ADD_PARTITIONS, END_TXN, INIT_PRODUCER_ID, PRODUCE, Fate, Relay, fates
from tests.kafka.small_turns import FENCED_CODES, claim, keys, write
from tests.kit.kafka import KafkaHarness
from txbroker.core.records import LOG_VERSION, Checkpoint, Record
from txbroker.door.protocols import AppendUnknown, Fenced, PromotionTxnLost

MakeRelay = Callable[..., Relay]
# Zero, or "concurrent transactions": a commit is visible a moment before its coordinator has
# written it down as complete, and until then it asks every caller to retry.
TAKEN_CODES = (0, 51)
FIRST = {"transactions": 1}
"""The first version of the transaction protocol, also where brokers take the second."""


@pytest.mark.rule(15)
@pytest.mark.parametrize(
    ("fate", "changes"),
    [(Fate.HOLD_AND_RESET, FIRST), (Fate.HOLD, {"request_timeout_s": 0.4, **FIRST})],
    ids=["reset", "timeout"],
)
async def test_v1_late_commit_ends_no_later_transaction(
    world: KafkaHarness, make_relay: MakeRelay, fate: Fate, changes: dict[str, Any]
) -> None:
    topic = await world.create_topic("target")
    relay = make_relay(fates(-1))
    partition = (await world.door("one", relay.open, **changes)).partition(0)
    await partition.claim(claim("first"))
    relay.decide = fates(END_TXN, fate)
    handle = await write(partition, "first", 1, topic)
    ghost = await relay.caught()
    with pytest.raises(PromotionTxnLost):
        await handle.committed()
    with pytest.raises(PromotionTxnLost):
        await write(partition, "first", 2, topic)
    # The next turn on the ghost's own transactional id is written, and not yet ended.
    second = make_relay(fates(-1))
    later = (await world.door("two", second.open, **FIRST)).partition(0)
    assert (await later.claim(claim("second"))).progress is None
    second.decide = fates(END_TXN, Fate.HOLD)
    handle = await write(later, "second", 1, topic)
    mine = await second.caught()
    assert await ghost.release() in FENCED_CODES
    assert await keys(world, topic) == []
    await mine.release()
    await handle.visible()
    assert await keys(world, topic) == [b"second-1"]


@pytest.mark.rule(15)
async def test_claim_finds_commit_with_lost_answer(
    world: KafkaHarness, make_relay: MakeRelay
) -> None:
    topic = await world.create_topic("target")
    relay = make_relay(fates(-1))
    partition = (await world.door("one", relay.open, **FIRST)).partition(0)
    await partition.claim(claim("first"))
    relay.decide = fates(END_TXN, Fate.LOSE_ANSWER)
    handle = await write(partition, "first", 1, topic)
    with pytest.raises(PromotionTxnLost):
        await handle.committed()
    assert (await partition.claim(claim("second"))).progress == Checkpoint(
        LOG_VERSION, "first", 1, 1
    )
    assert await keys(world, topic) == [b"first-1"]


@pytest.mark.rule(14)
async def test_transaction_after_unknown_outcome_is_aborted(
    world: KafkaHarness, make_relay: MakeRelay
) -> None:
    topic = await world.create_topic("target")
    relay = make_relay(fates(-1))
    partition = (await world.door("one", relay.open, **FIRST)).partition(0)
    await partition.claim(claim("first"))
    relay.decide = fates(END_TXN, Fate.HOLD)
    first = await write(partition, "first", 1, topic)
    ghost = await relay.caught()
    second = await write(partition, "first", 2, topic)
    ghost.reset()
    for handle in (first, second):
        with pytest.raises(PromotionTxnLost):
            await handle.committed()
    assert (await partition.claim(claim("second"))).progress is None
    assert await ghost.release() in FENCED_CODES
    assert await keys(world, topic) == []


@pytest.mark.rule(14)
async def test_transaction_after_fenced_one_is_not_committed(
    world: KafkaHarness, make_relay: MakeRelay
) -> None:
    topic = await world.create_topic("target")
    relay = make_relay(fates(-1))
    partition = (await world.door("one", relay.open)).partition(0)
    await partition.claim(claim("first"))
    relay.decide = fates(END_TXN, Fate.HOLD)
    first = await write(partition, "first", 1, topic)
    ghost = await relay.caught()
    second = await write(partition, "first", 2, topic)
    other = (await world.door("two")).partition(0)
    assert (await other.claim(claim("other"))).progress is None
    await ghost.release()
    for handle in (first, second):
        with pytest.raises((Fenced, PromotionTxnLost)):
            await handle.committed()
    await (await write(other, "other", 1, topic)).visible()
    assert await keys(world, topic) == [b"other-1"]


@pytest.mark.rule(15)
@pytest.mark.parametrize("fate", [Fate.HOLD_AND_RESET, Fate.LOSE_ANSWER])
async def test_v1_unanswered_begin_is_lost(
    world: KafkaHarness, make_relay: MakeRelay, fate: Fate
) -> None:
    topic = await world.create_topic("target")
    relay = make_relay(fates(-1))
    partition = (await world.door("one", relay.open, **FIRST)).partition(0)
    await partition.claim(claim("first"))
    relay.decide = fates(ADD_PARTITIONS, fate)
    with pytest.raises(PromotionTxnLost):
        await write(partition, "first", 1, topic)
    assert (await partition.claim(claim("second"))).progress is None
    await (await write(partition, "second", 1, topic)).visible()
    assert await keys(world, topic) == [b"second-1"]


@pytest.mark.parametrize("fate", [Fate.HOLD_AND_RESET, Fate.LOSE_ANSWER])
async def test_append_is_retried_and_stored_once(
    world: KafkaHarness, make_relay: MakeRelay, fate: Fate
) -> None:
    relay = make_relay(fates(PRODUCE, fate))
    log = (await world.door("one", relay.open)).partition(0).half
    first = await log.append([Record(b"a", b""), Record(b"b", b"")])
    second = await log.append([Record(b"c", b"")])
    assert (first.base_offset, second.base_offset) == (0, 2)
    assert await log.bounds() == (0, 3)


async def test_never_answered_append_is_unknown_and_log_continues(
    world: KafkaHarness, make_relay: MakeRelay
) -> None:
    relay = make_relay(lambda key: Fate.HOLD if key == PRODUCE else Fate.PASS)
    door = await world.door("one", relay.open, request_timeout_s=0.2, write_timeout_s=0.5)
    log = door.partition(0).half
    with pytest.raises(AppendUnknown):
        await log.append([Record(b"a", b"")])
    relay.decide = fates(-1)
    assert (await log.append([Record(b"b", b"")])).base_offset == 0


async def test_cancelled_write_breaks_the_writer(
    world: KafkaHarness, make_relay: MakeRelay
) -> None:
    topic = await world.create_topic("target")
    relay = make_relay(fates(-1))
    partition = (await world.door("one", relay.open, **FIRST)).partition(0)
    await partition.claim(claim("first"))
    relay.decide = fates(ADD_PARTITIONS, Fate.HOLD)
    writing = asyncio.create_task(write(partition, "first", 1, topic))
    await relay.caught()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    with pytest.raises(PromotionTxnLost):
        await write(partition, "first", 2, topic)
    assert (await partition.claim(claim("second"))).progress is None
    await (await write(partition, "second", 1, topic)).visible()
    assert await keys(world, topic) == [b"second-1"]


@pytest.mark.rule(8)
@pytest.mark.parametrize("held", [1, 2])
async def test_overtaken_claim_fails_and_leaves_one_owner(
    world: KafkaHarness, make_relay: MakeRelay, held: int
) -> None:
    topic = await world.create_topic("target")
    # The slow one's request for its first or second producer is late, and takes it from the fast.
    relay = make_relay(fates(INIT_PRODUCER_ID, *[Fate.PASS] * (held - 1), Fate.HOLD))
    slow = (await world.door("slow", relay.open)).partition(0)
    fast = (await world.door("fast")).partition(0)
    claiming = asyncio.create_task(slow.claim(claim("slow")))
    late = await relay.caught()
    await fast.claim(claim("fast"))
    await (await write(fast, "fast", 1, topic)).visible()
    assert await late.release() in TAKEN_CODES
    if held == 1:
        # It began after the fast one had finished: a claim like any other.
        assert (await claiming).progress == Checkpoint(LOG_VERSION, "fast", 1, 1)
        await (await write(slow, "slow", 2, topic)).visible()
        for _ in range(2):
            with pytest.raises(Fenced):
                await (await write(fast, "fast", 2, topic)).committed()
        assert await keys(world, topic) == [b"fast-1", b"slow-2"]
        return
    with pytest.raises(Fenced):
        await claiming
    with pytest.raises(PromotionTxnLost):
        await write(slow, "slow", 2, topic)
    with pytest.raises(Fenced):
        await (await write(fast, "fast", 2, topic)).committed()
    assert (await fast.claim(claim("again"))).progress == Checkpoint(LOG_VERSION, "fast", 1, 1)
    await (await write(fast, "again", 2, topic)).visible()
    assert await keys(world, topic) == [b"fast-1", b"again-2"]
