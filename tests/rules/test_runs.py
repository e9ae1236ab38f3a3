"""Runs of many operations: each has its own answer, and all are stored as one by one would be."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence

import pytest

from tests.rules.fakes import (
    Append,
    Gate,
    as_it_is,
    lost_unanswered,
    stored_unanswered,
    without_offset,
    without_time,
)
from tests.rules.harness import START_MS, Harness, message, settled
from txbroker.contract.service import Answer, DecideRequest, TransactionStatus
from txbroker.core.records import Decision, Half, Record, State
from txbroker.core.routing import make_id
from txbroker.core.transaction import places
from txbroker.door.protocols import Appended, AppendRefused, Log
from txbroker.errors import RequestError, TooLarge
from txbroker.proxy.partition import appender
from txbroker.proxy.partition.owner import PartitionOwner

FRAME = 256
LONG = 2 * appender.BATCH_RECORDS_MAX + 300
ROOM = {"pending_max": 3 * LONG, "pending_group_max": 3 * LONG}


def id_of(record: Record) -> str:
    """Return whose a record of our logs is."""
    return (dict(record.headers).get("txb-id") or record.key or b"").decode()


def refusing(bad: Collection[str]) -> Append:
    """Return an append that takes no batch with a record of these transactions in it."""

    async def append(log: Log, records: Sequence[Record]) -> Appended:
        if any(id_of(record) in bad for record in records):
            raise AppendRefused("one of them is poison")
        return await log.append(records)

    return append


def halves(harness: Harness, count: int) -> list[Half]:
    """Return `count` half messages of now."""
    return [harness.half() for _ in range(count)]


async def prepare(owner: PartitionOwner, run: Sequence[Half]) -> list[Answer]:
    """Prepare as one run."""
    return await owner.api.prepare([(half, places(half.messages)) for half in run])


async def one_by_one(owner: PartitionOwner, run: Sequence[Half]) -> list[Answer]:
    """Prepare as runs of one, all at once."""
    found = await asyncio.gather(*[prepare(owner, [half]) for half in run])
    return [answer for [answer] in found]


async def decide(owner: PartitionOwner, ids: Sequence[str], decision: Decision) -> list[Answer]:
    """Decide as one run."""
    return await owner.api.decide([DecideRequest(id, decision) for id in ids])


def stored(harness: Harness, topic: str = "half") -> list[str]:
    """Return the ids of what lies in one of our logs, in order."""
    return [id_of(record) for record in harness.kafka.visible(f"txbroker.{topic}")]


def kinds(answers: Sequence[Answer]) -> list[str]:
    return [each.code if isinstance(each, RequestError) else each.state for each in answers]


# --- what a broker does not take ----------------------------------------------------------------


@pytest.mark.rule(29)
@pytest.mark.parametrize("bad", [{0}, {255}, {100}, {3, 4, 200}, {*range(0, 256, 5)}])
async def test_refused_run_is_split_down_to_bad_row(harness: Harness, bad: set[int]) -> None:
    owner, run = await harness.owner(), halves(harness, FRAME)
    ids = [half.id for half in run]
    taken = [id for number, id in enumerate(ids) if number not in bad]
    poison = refusing([ids[number] for number in bad])
    harness.partition.half.script.extend([poison] * 10_000)
    answers = await prepare(owner, run)
    assert {n for n, each in enumerate(answers) if isinstance(each, TooLarge)} == bad
    assert [each for each in answers if isinstance(each, TransactionStatus)] == [
        TransactionStatus(id, State.PENDING, None, True) for id in taken
    ]
    assert stored(harness) == taken
    assert list(owner.ledger.index.transactions) == taken

    # Of markers the same: their ids' half messages are there now.
    harness.partition.op.script.extend([refusing(taken[1:3])] * 10_000)
    answers = await decide(owner, taken, Decision.ROLLBACK)
    assert kinds(answers) == [
        "rolled_back",
        "too_large",
        "too_large",
        *["rolled_back"] * (len(taken) - 3),
    ]
    assert stored(harness, "op") == [taken[0], *taken[3:]]


@pytest.mark.rule(29)
async def test_oversized_row_spoils_no_other_of_run(harness: Harness) -> None:
    owner, run = await harness.owner(), halves(harness, FRAME)
    large = "x" * owner._half._log.batch_bytes_max
    for number in (0, 100, 101, 255):
        run[number] = harness.half(message(large))
    answers = await prepare(owner, run)
    assert [n for n, kind in enumerate(kinds(answers)) if kind == "too_large"] == [0, 100, 101, 255]
    assert kinds(answers).count("pending") == FRAME - 4
    # The broker was not troubled with them.
    assert all("fit a batch" in str(each) for each in answers if isinstance(each, TooLarge))
    assert stored(harness) == [
        half.id for half, kind in zip(run, kinds(answers), strict=True) if kind == "pending"
    ]


# --- back-pressure ------------------------------------------------------------------------------


@pytest.mark.rule(29)
@pytest.mark.parametrize(
    ("settings", "queue_bytes_max", "accepted"),
    [
        ({"pending_max": 100}, None, 100),
        ({"pending_group_max": 100}, None, 100),
        ({"pending_max": 120, "pending_group_max": 100}, None, 100),
        ({}, 30_000, None),
    ],
)
async def test_run_refuses_as_many_as_single_calls(
    harness: Harness, settings: dict[str, int], queue_bytes_max: int | None, accepted: int | None
) -> None:
    if queue_bytes_max is not None:
        harness.monkeypatch.setattr(appender, "QUEUE_BYTES_MAX", queue_bytes_max)
    results = []
    for ask in (prepare, one_by_one):
        # Some are larger: one that does not fit keeps out no smaller one after it.
        bodies = ["x" * (5000 if number % 50 == 49 else 10) for number in range(FRAME)]
        owner = await harness.owner(**settings)
        run = [harness.half(message(body)) for body in bodies]
        results.append(kinds(await ask(owner, run)))
        for half in list(owner.ledger.index.transactions):
            await decide(owner, [half], Decision.ROLLBACK)
        await owner.close()
    assert results[0] == results[1]
    assert set(results[0]) == {"pending", "overloaded"}
    if accepted is not None:
        assert results[0].count("pending") == accepted


@pytest.mark.rule(29)
async def test_stored_part_of_long_run_counts_once(harness: Harness) -> None:
    owner = await harness.owner(pending_max=1500, pending_group_max=1500)
    gate = Gate()
    harness.partition.half.script.extend([as_it_is, gate.append])
    going = asyncio.create_task(prepare(owner, halves(harness, 1200)))
    await gate.reached.wait()
    # A thousand are stored, two hundred on their way.
    beside = asyncio.create_task(prepare(owner, halves(harness, 400)))
    await settled()
    gate.open()
    assert kinds(await going) == ["pending"] * 1200
    assert kinds(await beside) == ["pending"] * 300 + ["overloaded"] * 100
    assert owner.api._preparing.total == 0


# --- several batches, and records in between ----------------------------------------------------


@pytest.mark.rule(29)
@pytest.mark.parametrize("middle", [as_it_is, without_offset, without_time])
async def test_run_of_several_batches_is_stored_in_order(harness: Harness, middle: Append) -> None:
    owner = await harness.owner(**ROOM)
    run = [harness.half(*[message(str(n))] * (1 + n % 2)) for n in range(LONG)]
    ids = [half.id for half in run]
    # A fenced owner writes two of them before the second batch.
    zombies = [ids[1501], ids[2200]]

    async def between(log: Log, records: Sequence[Record]) -> Appended:
        harness.zombie_half(run[1501])
        harness.zombie_half(run[2200])
        return await middle(log, records)

    harness.partition.half.script.extend([as_it_is, between, middle, as_it_is])
    answers = await prepare(owner, run)
    assert [(each.id, each.state) for each in answers if isinstance(each, TransactionStatus)] == [
        (id, State.PENDING) for id in ids
    ]
    found = stored(harness)
    assert Counter(found) == Counter(
        {half.id: len(half.messages) * (1 + (half.id in zombies)) for half in run}
    )
    assert list(owner.ledger.index.transactions) == list(dict.fromkeys(found))
    ours = [id for id in dict.fromkeys(found) if id not in zombies]
    assert ours == [id for id in ids if id not in zombies]
    harness.partition.op.script.extend([as_it_is, middle, middle])
    answers = await decide(owner, ids, Decision.ROLLBACK)
    assert kinds(answers) == ["rolled_back"] * LONG
    assert stored(harness, "op") == ids


@pytest.mark.rule(29)
@pytest.mark.parametrize("middle", [stored_unanswered, lost_unanswered])
async def test_unanswered_part_of_run_can_be_repeated(harness: Harness, middle: Append) -> None:
    owner = await harness.owner(**ROOM)
    run = halves(harness, LONG)
    ids = [half.id for half in run]
    second = slice(appender.BATCH_RECORDS_MAX, 2 * appender.BATCH_RECORDS_MAX)
    harness.partition.half.script.extend([as_it_is, middle])
    answers = await prepare(owner, run)
    expected = ["pending"] * LONG
    expected[second] = ["owner_unavailable"] * appender.BATCH_RECORDS_MAX
    assert kinds(answers) == expected
    assert kinds(await prepare(owner, run)) == ["pending"] * LONG
    assert set(owner.ledger.index.transactions) == set(ids)

    harness.partition.op.script.extend([as_it_is, middle])
    answers = await decide(owner, ids, Decision.COMMIT)
    assert kinds(answers)[second] == ["owner_unavailable"] * appender.BATCH_RECORDS_MAX
    again = await decide(owner, ids, Decision.COMMIT)
    assert {each.decision for each in again if isinstance(each, TransactionStatus)} == {
        Decision.COMMIT
    }
    assert len([each for each in again if isinstance(each, TransactionStatus)]) == LONG
    contrary = await decide(owner, ids, Decision.ROLLBACK)
    assert set(kinds(contrary)) == {"already_decided"}


@pytest.mark.rule(29)
async def test_cancelled_run_drops_unsent_rows(harness: Harness) -> None:
    owner = await harness.owner(**ROOM)
    gate, run = Gate(), halves(harness, LONG)
    harness.partition.half.script.append(gate.append)
    going = asyncio.create_task(prepare(owner, run))
    await gate.reached.wait()
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)
    gate.open()
    assert kinds(await prepare(owner, run[-1:])) == ["pending"]
    first = appender.BATCH_RECORDS_MAX
    assert stored(harness) == [half.id for half in (*run[:first], run[-1])]
    assert owner.api._preparing.total == 0
    assert [queue.size for queue in owner._half._queues.values()] == [0, 0]


@pytest.mark.rule(29)
async def test_suspended_owner_cuts_run(harness: Harness) -> None:
    owner = await harness.owner(**ROOM)
    gate, run = Gate(), halves(harness, LONG)
    harness.partition.half.script.append(gate.append)
    going = asyncio.create_task(prepare(owner, run))
    await gate.reached.wait()
    owner.suspend()
    gate.open()
    first = appender.BATCH_RECORDS_MAX
    expected = ["pending"] * first + ["owner_unavailable"] * (LONG - first)
    assert kinds(await going) == expected
    assert kinds(await prepare(owner, run[:2])) == ["owner_unavailable"] * 2
    owner.resume()
    answers = await prepare(owner, run)
    assert kinds(answers) == ["pending"] * LONG
    assert [each.created for each in answers if isinstance(each, TransactionStatus)] == [
        *[False] * first,
        *[True] * (LONG - first),
    ]
    assert stored(harness)[:first] == [half.id for half in run[:first]]


# --- runs that share a batch --------------------------------------------------------------------


@pytest.mark.rule(29)
@pytest.mark.parametrize("append", [as_it_is, without_offset, without_time, refusing(["none"])])
async def test_each_operation_of_batch_gets_its_answer(harness: Harness, append: Append) -> None:
    owner, gate = await harness.owner(), Gate()
    harness.partition.half.script.extend([gate.append, append])
    ahead = asyncio.create_task(prepare(owner, halves(harness, 1)))
    await gate.reached.wait()
    a, b, c, d = halves(harness, 4)
    other = harness.half(message("other"), id=a.id)
    runs = [[a, b], [other, c], [d, b], [harness.half(id=make_id(1, START_MS, 1)), a]]
    tasks = [asyncio.create_task(prepare(owner, run)) for run in runs]
    await settled()
    gate.open()
    answers = [await task for task in (*tasks, ahead)]
    # The same one twice in a batch is stored once.
    assert [[getattr(each, "created", None) for each in answer] for answer in answers] == [
        [True, True],
        [None, True],
        [True, False],
        [None, False],
        [True],
    ]
    assert [kinds(answer) for answer in answers] == [
        ["pending", "pending"],
        ["id_conflict", "pending"],
        ["pending", "pending"],
        ["bad_request", "pending"],
        ["pending"],
    ]

    gate = Gate()
    harness.partition.op.script.extend([gate.append, append])
    ahead = asyncio.create_task(decide(owner, [c.id], Decision.ROLLBACK))
    await gate.reached.wait()
    calls = [
        decide(owner, [a.id, b.id], Decision.ROLLBACK),
        decide(owner, [b.id, d.id], Decision.COMMIT),
        decide(owner, [d.id, a.id], Decision.ROLLBACK),
    ]
    tasks = [asyncio.create_task(each) for each in calls]
    await settled()
    gate.open()
    found = [kinds(await task) for task in (*tasks, ahead)]
    assert found[0] == found[3] * 2 == ["rolled_back"] * 2
    assert found[1][0] == found[2][0] == "already_decided"
    assert found[1][1] in ("committed", "promoted")
    assert found[2][1] == "rolled_back"
    assert len(stored(harness, "op")) == 7
