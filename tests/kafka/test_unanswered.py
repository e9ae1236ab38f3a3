"""Requests whose answer never comes: nothing is guessed, and no late request does harm."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, cast

import pytest

from tests.kafka.relay import (
    ADD_PARTITIONS,
    END_TXN,
    FETCH,
    INIT_PRODUCER_ID,
    PRODUCE,
    Fate,
    Relay,
    fates,
)
from tests.kafka.small_turns import FENCED_CODES, Relayed, claim, progress, write
from tests.kit.kafka import KafkaHarness
from tests.kit.until import until
from txbroker.core.records import Record
from txbroker.door.protocols import AppendUnknown
from txbroker.door.writing import Fenced, Unknown

MakeRelay = Callable[..., Relay]
# Zero, or "concurrent transactions": a commit is visible a moment before its coordinator has
# written it down as complete, and until then it asks every caller to retry.
TAKEN_CODES = (0, 51)
FIRST = {"transactions": 1}
"""The first version of the transaction protocol, also where brokers take the second."""
LOST_BEGINS = pytest.mark.parametrize("fate", [Fate.HOLD_AND_RESET, Fate.LOSE_ANSWER])


async def test_claim_record_is_written_while_the_claim_has_time(relayed: Relayed) -> None:
    relayed.decide(PRODUCE, Fate.HOLD)
    await relayed.first(request_timeout_s=0.4)
    assert len(relayed.relay.held) == 1


@pytest.mark.rule(15)
@pytest.mark.parametrize(
    ("fate", "changes"),
    [(Fate.HOLD_AND_RESET, FIRST), (Fate.HOLD, {"request_timeout_s": 0.4, **FIRST})],
    ids=["reset", "timeout"],
)
async def test_v1_late_commit_ends_no_later_transaction(
    world: KafkaHarness,
    make_relay: MakeRelay,
    relayed: Relayed,
    fate: Fate,
    changes: dict[str, Any],
) -> None:
    await relayed.first(**changes)
    relayed.decide(END_TXN, fate)
    handle = await relayed.write(1)
    ghost = await relayed.relay.caught()
    with pytest.raises(Unknown):
        await handle.committed()
    with pytest.raises(Unknown):
        await relayed.write(2)
    # The next turn on the ghost's own transactional id is written, and not yet ended.
    second = make_relay()
    later = (await world.door("two", second.open, **FIRST)).partition(0)
    assert (await later.claim(claim("second"))).progress is None
    second.decide = fates(END_TXN, Fate.HOLD)
    handle = await write(later, "second", 1, relayed.topic)
    mine = await second.caught()
    assert await ghost.release() in FENCED_CODES
    assert await relayed.keys() == []
    await mine.release()
    await handle.visible()
    assert await relayed.keys() == [b"second-1"]


@pytest.mark.rule(15)
async def test_claim_finds_commit_with_lost_answer(relayed: Relayed) -> None:
    await relayed.first(**FIRST)
    relayed.decide(END_TXN, Fate.LOSE_ANSWER)
    handle = await relayed.write(1)
    with pytest.raises(Unknown):
        await handle.committed()
    assert await relayed.taken_over() == progress("first", 1)
    assert await relayed.keys() == [b"first-1"]


@pytest.mark.rule(14)
async def test_transaction_after_unknown_outcome_is_aborted(relayed: Relayed) -> None:
    await relayed.first(**FIRST)
    relayed.decide(END_TXN, Fate.HOLD)
    first = await relayed.write(1)
    ghost = await relayed.relay.caught()
    second = await relayed.write(2)
    ghost.reset()
    for handle in (first, second):
        with pytest.raises(Unknown):
            await handle.committed()
    assert await relayed.taken_over() is None
    assert await ghost.release() in FENCED_CODES
    assert await relayed.keys() == []


@pytest.mark.rule(14)
async def test_transaction_after_fenced_one_is_not_committed(
    world: KafkaHarness, relayed: Relayed
) -> None:
    await relayed.first()
    relayed.decide(END_TXN, Fate.HOLD)
    first = await relayed.write(1)
    ghost = await relayed.relay.caught()
    second = await relayed.write(2)
    other = (await world.door("two")).partition(0)
    assert (await other.claim(claim("other"))).progress is None
    await ghost.release()
    for handle in (first, second):
        with pytest.raises((Fenced, Unknown)):
            await handle.committed()
    await (await write(other, "other", 1, relayed.topic)).visible()
    assert await relayed.keys() == [b"other-1"]


@pytest.mark.rule(15)
@LOST_BEGINS
async def test_v1_unanswered_begin_is_lost(relayed: Relayed, fate: Fate) -> None:
    await relayed.first(**FIRST)
    relayed.decide(ADD_PARTITIONS, fate)
    with pytest.raises(Unknown):
        await relayed.write(1)
    assert await relayed.taken_over() is None
    await (await relayed.write(1, "second")).visible()
    assert await relayed.keys() == [b"second-1"]


@LOST_BEGINS
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


async def test_read_waits_for_no_other_read(world: KafkaHarness, make_relay: MakeRelay) -> None:
    relay = make_relay()
    log = (await world.door("one", relay.open)).partition(0).half
    await log.append([Record(b"a", b""), Record(b"b", b"")])

    async def keys(start: int, end: int) -> list[bytes | None]:
        return [record.key async for records in log.read(start, end) for record in records]

    relay.decide = fates(FETCH, Fate.HOLD)
    scan = asyncio.create_task(keys(0, 1))
    held = await relay.caught()
    async with asyncio.timeout(5):
        assert await log.bounds() == (0, 2)
        assert await keys(1, 2) == [b"b"]
    assert not scan.done()
    await held.deliver()
    assert await scan == [b"a"]


@pytest.mark.parametrize(
    ("reads", "end"),
    [
        *itertools.product(
            ["log", "target"], ["complete", "abandoned", "cancelled", "never connected"]
        ),
        ("log ahead", "abandoned"),
    ],
)
async def test_ended_read_leaves_no_channel(
    world: KafkaHarness, make_relay: MakeRelay, reads: str, end: str
) -> None:
    relay = make_relay()
    connecting, connects = asyncio.Event(), asyncio.Event()
    connects.set()

    async def opener(*address: Any, **settings: Any) -> Any:
        connecting.set()
        await connects.wait()
        return await relay.open(*address, **settings)

    door = await world.door("one", opener)
    log = door.partition(0).half
    await log.append([Record(b"a", b"")])

    def read(end: int = 1) -> AsyncGenerator[Sequence[Record]]:
        target = reads == "target"
        found = door.targets.records(log._at[0], 0, start=0) if target else log.read(0, end)
        return cast(AsyncGenerator[Sequence[Record]], found)

    async def complete() -> list[bytes | None]:
        return [record.key async for records in read() for record in records]

    def channels() -> set[tuple[int, str]]:
        return door._client._connections.keys() | door._client._attempts.keys()

    assert await complete() == [b"a"]
    others = {key for key in channels() if "/read" not in key[1] and "records/" not in key[1]}
    if end == "abandoned":
        relay.decide = fates(FETCH, Fate.PASS, Fate.HOLD_AND_RESET)
        async with aclosing(read(end=2)) as pieces:
            await anext(pieces)
            if reads == "log ahead":
                connecting.clear()
                connects.clear()
                await connecting.wait()
            assert channels() > others
    elif end != "complete":
        relay.decide = fates(FETCH, Fate.HOLD)
        connecting.clear()
        if end == "never connected":
            connects.clear()
        cancelled = asyncio.create_task(complete())
        await (relay.caught() if end == "cancelled" else connecting.wait())
        assert channels() > others
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    await until(lambda: channels() == others, 5.0)


async def test_cancelled_write_breaks_the_writer(relayed: Relayed) -> None:
    await relayed.first(**FIRST)
    relayed.decide(ADD_PARTITIONS, Fate.HOLD)
    writing = asyncio.create_task(relayed.write(1))
    await relayed.relay.caught()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    with pytest.raises(Unknown):
        await relayed.write(2)
    assert await relayed.taken_over() is None
    await (await relayed.write(1, "second")).visible()
    assert await relayed.keys() == [b"second-1"]


@pytest.mark.rule(8)
@pytest.mark.parametrize("held", [1, 2])
async def test_overtaken_claim_fails_and_leaves_one_owner(
    world: KafkaHarness, relayed: Relayed, held: int
) -> None:
    topic = relayed.topic = await world.create_topic("target")
    # The slow one's request for its first or second producer is late, and takes it from the fast.
    relayed.decide(INIT_PRODUCER_ID, *[Fate.PASS] * (held - 1), Fate.HOLD)
    slow = (await world.door("slow", relayed.relay.open)).partition(0)
    fast = (await world.door("fast")).partition(0)
    claiming = asyncio.create_task(slow.claim(claim("slow")))
    late = await relayed.relay.caught()
    await fast.claim(claim("fast"))
    await (await write(fast, "fast", 1, topic)).visible()
    assert await late.release() in TAKEN_CODES
    if held == 1:
        # It began after the fast one had finished: a claim like any other.
        assert (await claiming).progress == progress("fast", 1)
        await (await write(slow, "slow", 2, topic)).visible()
        for _ in range(2):
            with pytest.raises(Fenced):
                await (await write(fast, "fast", 2, topic)).committed()
        assert await relayed.keys() == [b"fast-1", b"slow-2"]
        return
    with pytest.raises(Fenced):
        await claiming
    with pytest.raises(Unknown):
        await write(slow, "slow", 2, topic)
    with pytest.raises(Fenced):
        await (await write(fast, "fast", 2, topic)).committed()
    assert (await fast.claim(claim("again"))).progress == progress("fast", 1)
    await (await write(fast, "again", 2, topic)).visible()
    assert await relayed.keys() == [b"fast-1", b"again-2"]
