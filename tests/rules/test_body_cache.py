"""Messages that are not in memory: read again in time, verified, and missed loudly if gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.rules.harness import NOW, BodiesHarness, asked, attempt, settled, until
from txbroker.checkers.base import AttemptRequest, CheckCall
from txbroker.core.decoding import decode_kept
from txbroker.core.encoding import encode_half, encode_kept
from txbroker.core.promotion import PromotionLimits
from txbroker.core.records import Cause, CheckReason, Decision, Half, Message, State
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import LogTruncated
from txbroker.door.writing import Unknown
from txbroker.errors import NotPending, OwnerUnavailable
from txbroker.proxy.cluster.views import LogNames, summary, view_of
from txbroker.proxy.partition import body_cache as bodies_module
from txbroker.proxy.partition import promoter as promoter_module
from txbroker.proxy.partition.body_cache import BODY_LOST
from txbroker.proxy.partition.history import account_of

DUE, ASKED = CheckReason.DUE, CheckReason.ASKED
REFUSED_ONCE = Cause("bad_timestamp", "it is ahead", "t", 0)


def message(value: str, topic: str = "t", at: int = 0) -> Message:
    return Message(topic, b"k", value.encode(), (("h", b"1"), ("h", None)), at, 5)


def copies(small: BodiesHarness) -> list[tuple[str, str | None]]:
    """Return the values and states of the parked topic; None for a tombstone."""
    parts = [decode_kept(record) for record in small.kafka.visible("txbroker.parked")]
    return [
        ("", None)
        if part.part is None
        else (
            (part.part.message.value or b"-").decode(),
            None if part.facts is None else str(part.facts.state),
        )
        for part in parts
    ]


async def refused(small: BodiesHarness, transaction: Transaction) -> None:
    """Commit it while its target is gone; return once it is refused."""
    await small.commit(transaction)
    await until(lambda: transaction.state is State.REFUSED)


# --- promotion -----------------------------------------------------------------------------------


async def test_evicted_messages_are_promoted_unchanged(small: BodiesHarness) -> None:
    sent = (message("one"), Message("u", None, None, (("x", b"\xff"),), 0), message("two", at=1))
    transaction = await small.prepare(*sent)
    assert not transaction.has_bodies
    assert small.ledger.index.body_bytes == 0
    await small.promoted(transaction)
    assert small.visible() == ["one"]
    assert small.visible("t", 1) == ["two"]
    (tombstone,) = small.kafka.visible("u")
    assert (tombstone.key, tombstone.value) == (None, None)
    assert tombstone.headers[2:] == (("x", b"\xff"),)
    (first,) = small.kafka.visible("t", 0)
    assert (first.key, first.timestamp_ms) == (b"k", 5)
    assert first.headers[2:] == (("h", b"1"), ("h", None))
    assert small.ledger.index.body_bytes == 0


@pytest.mark.rule(17)
async def test_messages_are_read_before_promotion_begins(small: BodiesHarness) -> None:
    first, second = await small.prepare(), await small.prepare()
    small.door.half.gate = asyncio.Event()
    await small.commit(first)
    await until(lambda: small.door.half.picked)
    small.door.calls.clear()
    # Decisions in the meantime are neither in this promotion nor below its checkpoint.
    await small.commit(second)
    await settled()
    assert "write" not in small.door.calls
    small.door.half.gate.set()
    await until(lambda: second.state is State.PROMOTED)
    assert [len(turn.promoted) for turn in small.door.turns] == [1, 1]
    assert [turn.progress.op for turn in small.door.turns] == [1, 2]
    assert small.visible() == [first.id, second.id]


@pytest.mark.rule(10)
async def test_half_applied_during_load_is_above_checkpoint(small: BodiesHarness) -> None:
    first = await small.prepare()
    small.door.half.gate = asyncio.Event()
    await small.commit(first)
    await until(lambda: small.door.half.picked)
    await small.prepare()
    small.door.half.gate.set()
    await until(lambda: first.state is State.PROMOTED)
    assert small.door.turns[0].progress.half == 1
    assert small.ledger.half_whole == 2


async def test_promotion_of_thousand_takes_few_requests(small: BodiesHarness) -> None:
    made = await asyncio.gather(*[small.prepare() for _ in range(1000)])
    await asyncio.gather(*[small.commit(each) for each in made])
    await until(lambda: all(each.state is State.PROMOTED for each in made))
    assert small.visible() == [each.id for each in made]
    picked = small.door.half.picked
    assert len(picked) <= len(small.door.turns) + 1
    assert sum(len(each) for each in picked) == 1000
    assert small.ledger.index.body_bytes == 0


async def test_one_read_is_bounded(small: BodiesHarness) -> None:
    small.monkeypatch.setattr(bodies_module, "BATCH_BYTES_MAX", 10_000)
    made = [await small.prepare(message("x" * 3000)) for _ in range(10)]
    with small.bodies.hold(made):
        assert await small.bodies.load(made) == []
        assert all(each.has_bodies for each in made)
    assert [len(each) for each in small.door.half.picked] == [3, 3, 3, 1]


async def test_final_messages_are_read_from_operation_topic(small: BodiesHarness) -> None:
    transaction = await small.prepare(message("a"), message("b", at=1))
    small.kafka.topics["t"].leaderless = frozenset({0})
    await small.commit(transaction, message("A"), message("B", at=1))
    await until(lambda: transaction.cause is not None)
    small.bodies.trim()
    assert not transaction.has_bodies
    small.kafka.topics["t"].leaderless = frozenset()
    await until(lambda: transaction.state is State.PROMOTED)
    assert (small.visible(), small.visible("t", 1)) == (["A"], ["B"])
    assert small.door.op.picked == [[1, 2]]
    assert small.door.half.picked == []


async def test_messages_replaced_during_load_are_reloaded(small: BodiesHarness) -> None:
    transaction = await small.prepare(message("a"))
    small.door.half.gate = asyncio.Event()
    loading = asyncio.create_task(small.bodies.load([transaction]))
    await until(lambda: small.door.half.picked)
    with small.bodies.hold([transaction]):
        await small.commit(transaction, message("A"))
        small.door.half.gate.set()
        assert await loading == []
    await until(lambda: transaction.state is State.PROMOTED)
    assert small.visible() == ["A"]


async def test_rollback_during_load_skips_the_copy(small: BodiesHarness) -> None:
    transaction = await small.prepare()
    small.door.half.gate = asyncio.Event()
    small.keep(transaction)
    await until(lambda: small.door.half.picked)
    await small.mark("rollback", transaction)
    small.door.half.gate.set()
    await until(lambda: small.promoter.stuck_since is None)
    await settled()
    assert small.kafka.visible("txbroker.parked") == []
    assert transaction.state is State.ROLLED_BACK


async def test_silent_log_delays_promotion_without_loss(small: BodiesHarness) -> None:
    transaction = await small.prepare()
    small.door.half.silent = True
    await small.commit(transaction)
    await until(lambda: len(small.door.half.picked) >= 3)
    assert transaction.state is State.COMMITTED
    assert small.promoter.stuck_since is not None
    assert small.door.turns == []
    small.door.half.silent = False
    await until(lambda: transaction.state is State.PROMOTED)
    assert small.promoter.stuck_since is None
    assert small.visible() == [transaction.id]


@pytest.mark.rule(10)
async def test_changed_record_stops_partition(small: BodiesHarness) -> None:
    transaction = await small.prepare()
    other = Half(transaction.id, "g", (message("other"),))
    partition = small.kafka.partition("txbroker.half", 0)
    partition.delete_from(0)
    partition.append(encode_half(other), small.clock.now_ms())
    await small.commit(transaction)
    await until(lambda: small.stops)
    assert isinstance(small.stops[0], LogTruncated)
    assert small.visible() == []
    small.stops.clear()


@pytest.mark.rule(10)
async def test_foreign_record_at_offset_stops_partition(small: BodiesHarness) -> None:
    transaction = await small.prepare(message("same"))
    stranger = Half("0" * 26, "g", (message("same"),))
    partition = small.kafka.partition("txbroker.half", 0)
    partition.delete_from(0)
    partition.append(encode_half(stranger), small.clock.now_ms())
    with pytest.raises(OwnerUnavailable):
        await small.bodies.show(transaction)
    assert [type(each) for each in small.stops] == [LogTruncated]
    assert not transaction.lost
    small.stops.clear()


# --- copies --------------------------------------------------------------------------------------


@pytest.mark.rule(25)
async def test_copy_replaces_deleted_half_message(small: BodiesHarness) -> None:
    made = [await small.prepare(message(str(n)), message(f"{n}b", at=1)) for n in range(5)]
    small.keep(*made)
    await until(lambda: all(each.kept_at for each in made))
    assert [each.kept_at for each in made] == [(2 * n, 2 * n + 1) for n in range(5)]
    small.delete_half(10)
    await asyncio.gather(*[small.commit(each) for each in made])
    await until(lambda: all(each.state is State.PROMOTED for each in made))
    assert small.visible() == ["0", "1", "2", "3", "4"]
    assert "parked" not in small.door.calls
    assert small.lost == []
    await until(lambda: copies(small)[10:] == [("", None)] * 10)


async def test_copy_with_unknown_offset_is_found(small: BodiesHarness) -> None:
    small.door.hide_parked_offsets = True
    transaction = await small.prepare(message("a"))
    small.keep(transaction)
    await until(lambda: transaction.kept_at == (-1,))
    small.delete_half(1)
    await small.promoted(transaction)
    assert small.visible() == ["a"]
    assert small.lost == []


async def test_copy_of_prepared_is_not_used_for_final_messages(small: BodiesHarness) -> None:
    transaction = await small.prepare(message("a"))
    small.keep(transaction)
    await until(lambda: transaction.kept_at)
    small.kafka.topics["t"].leaderless = frozenset({0})
    await small.commit(transaction, message("A"))
    await until(lambda: transaction.cause is not None)
    small.bodies.trim()
    small.kafka.partition("txbroker.op", 0).delete_before(2)
    small.kafka.topics["t"].leaderless = frozenset()
    await until(lambda: transaction.state is State.REFUSED)
    assert transaction.cause is not None
    assert transaction.cause.code == BODY_LOST
    assert small.visible() == []


async def test_refused_transaction_is_copied_as_refused(small: BodiesHarness) -> None:
    transaction = await small.prepare(message("a", topic="gone"))
    small.ledger.index.to_keep[transaction.id] = transaction
    await small.commit(transaction)
    small.ledger.index.to_keep[transaction.id] = transaction
    await until(lambda: transaction.state is State.REFUSED and not small.ledger.index.to_keep)
    assert copies(small)[-1] == ("a", "refused")


async def test_copies_of_one_promotion_are_bounded_by_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = BodiesHarness(monkeypatch, PromotionLimits(bytes_max=5000))
    await small.start()
    made = [await small.prepare(message("x" * 2000)) for _ in range(9)]
    small.keep(*made)
    await until(lambda: all(each.kept_at for each in made))
    assert [len(turn.parked) for turn in small.door.turns] == [2, 2, 2, 2, 1]
    await small.close()


# --- refused and revived -------------------------------------------------------------------------


async def test_refused_transaction_is_loaded_when_target_exists(small: BodiesHarness) -> None:
    transaction = await small.prepare(message("late", topic="later"))
    await refused(small, transaction)
    assert not transaction.has_bodies
    assert transaction.kept_at == (0,)
    small.kafka.create_topic("later", 1)
    await until(lambda: transaction.state is State.PROMOTED)
    assert small.visible("later") == ["late"]


async def test_refused_transaction_without_half_loads_copy(small: BodiesHarness) -> None:
    transaction = await small.prepare(message("late", topic="later"))
    await refused(small, transaction)
    small.delete_half(1)
    small.kafka.create_topic("later", 1)
    small.promoter.retry_refused(transaction.id)
    await until(lambda: transaction.state is State.PROMOTED)
    assert small.visible("later") == ["late"]
    assert small.lost == []


# --- gone ----------------------------------------------------------------------------------------


@pytest.mark.rule(17)
@pytest.mark.parametrize("when", ["before", "after"])
async def test_lost_messages_spoil_no_promotion_and_are_reported(
    small: BodiesHarness, when: str
) -> None:
    made = [await small.prepare() for _ in range(4)]
    if when == "before":
        small.delete_half(2)
    else:
        small.kafka.topics["t"].leaderless = frozenset({0})
    for each in made:
        await small.commit(each)
    if when == "after":
        await until(lambda: made[3].cause is not None)
        small.delete_half(2)
        small.kafka.topics["t"].leaderless = frozenset()
    await until(lambda: made[3].state is State.PROMOTED)
    await until(lambda: made[1].state is State.REFUSED)
    assert [each.state for each in made] == ["refused", "refused", "promoted", "promoted"]
    assert small.visible() == [each.id for each in made[2:]]
    assert [each.cause.code for each in made[:2] if each.cause] == [BODY_LOST] * 2
    assert sum(small.lost) == 2
    assert small.events.log.count(f"refused {made[0].id}") == 1
    # It is on record, or the next owner would take it for promoted.
    assert copies(small) == [("-", "refused"), ("-", "refused")]


async def test_lost_transaction_is_retried_by_revive_only(small: BodiesHarness) -> None:
    transaction = await small.prepare()
    half = small.kafka.partition("txbroker.half", 0).read(0, 1)
    small.delete_half(1)
    await refused(small, transaction)
    before = len(small.door.half.picked)
    other = await small.prepare()
    await small.promoted(other)
    assert [each for each in small.door.half.picked[before:] if 0 in each] == []
    small.promoter.retry_refused(transaction.id)
    await until(lambda: sum(small.lost) == 2)
    await until(lambda: small.promoter.stuck_since is None)
    assert transaction.state is State.REFUSED
    assert small.visible() == [other.id]
    # Restored by hand, where it was.
    partition = small.kafka.partition("txbroker.half", 0)
    rest = partition.read(1, 2)
    partition.delete_from(1)
    partition.begin = 0
    for record in (*half, *rest):
        partition.append([record], record.timestamp_ms)
    small.promoter.retry_refused(transaction.id)
    await until(lambda: transaction.state is State.PROMOTED)
    assert small.visible() == [other.id, transaction.id]


async def test_lost_marker_record_is_never_promoted(small: BodiesHarness) -> None:
    transaction = await small.prepare()
    small.delete_half(1)
    await refused(small, transaction)
    # The next owner knows only the copy.
    kept = transaction.copy(State.REFUSED, transaction.cause)
    assert [record.value for record in encode_kept(kept)] == [b""]
    small.ledger.__init__(0, 120_000)  # type: ignore[misc]
    small.promoter._retries._index = small.ledger.index
    small.ledger.half_position, small.ledger.op_position = 1, 1
    small.ledger.restore(kept)
    small.ledger.reconcile(None, [kept])
    again = small.ledger.index.get(transaction.id)
    assert again is not None
    assert again.state is State.REFUSED
    shown = view_of(account_of(again), LogNames("half", "op"), bodies=True)
    assert shown.messages[0].message is None
    for _ in range(2):
        small.promoter.retry_refused(transaction.id)
        await until(lambda: sum(small.lost) >= 2)
    await until(lambda: small.promoter.stuck_since is None)
    await settled()
    assert small.visible() == []
    async with small.bodies.at_hand((again,)):
        assert not small.bodies.there(again)


@pytest.mark.rule(25)
async def test_impossible_copy_is_dropped_and_reported(small: BodiesHarness) -> None:
    lost, whole = await small.prepare(), await small.prepare()
    small.delete_half(1)
    small.keep(lost, whole)
    await until(lambda: not small.ledger.index.to_keep)
    await until(lambda: whole.kept_at)
    assert (lost.lost, lost.kept, lost.state) == (True, False, State.PENDING)
    assert small.lost == [1]
    assert copies(small) == [(whole.id, "pending")]
    # Alone it makes no promotion.
    turns = len(small.door.turns)
    small.keep(lost)
    await until(lambda: not small.ledger.index.to_keep)
    await settled()
    assert len(small.door.turns) == turns
    assert small.lost == [1]


# --- checks --------------------------------------------------------------------------------------


@pytest.mark.rule(21)
async def test_question_carries_its_messages(small: BodiesHarness) -> None:
    transaction = await small.prepare(message("a"), policy=NOW)
    assert not transaction.has_bodies
    call = await asked(small.checks, transaction.id, DUE)
    assert [each.value for each in call.messages] == [b"a"]
    assert small.door.calls[-2:] == ["half.pick", "op.append"]
    small.bodies.trim()
    assert not transaction.has_bodies
    assert [each.value for each in call.messages] == [b"a"]


async def test_concurrent_questions_share_a_read(small: BodiesHarness) -> None:
    made = [await small.prepare(policy=NOW) for _ in range(200)]
    half, rest = made[:100], made[100:]
    run = [AttemptRequest(each.id, DUE, "http://g") for each in half]
    alone = [small.checks.attempt([AttemptRequest(each.id, DUE, "http://g")]) for each in rest]
    runs = await asyncio.gather(small.checks.attempt(run), *alone)
    calls = [call for found in runs for call in found]
    values = [call.messages[0].value for call in calls if isinstance(call, CheckCall)]
    assert values == [each.id.encode() for each in made]
    assert len(small.door.half.picked) <= 3


async def test_transaction_decided_during_load_is_not_asked(small: BodiesHarness) -> None:
    transaction = await small.prepare(policy=NOW)
    small.door.half.gate = asyncio.Event()
    attempting = asyncio.create_task(attempt(small.checks, transaction.id, DUE))
    await until(lambda: small.door.half.picked)
    await small.mark("rollback", transaction)
    small.door.half.gate.set()
    assert await attempting is None
    assert transaction.checks.attempts == ()
    assert small.door.calls.count("op.append") == 1


async def test_unreadable_messages_use_no_attempt(small: BodiesHarness) -> None:
    transaction = await small.prepare(policy=NOW)
    small.door.half.silent = True
    with pytest.raises(OwnerUnavailable):
        await attempt(small.checks, transaction.id, DUE)
    assert transaction.checks.attempts == ()
    small.door.half.silent = False
    assert await attempt(small.checks, transaction.id, DUE) is not None


@pytest.mark.rule(21)
async def test_lost_messages_are_not_checked_but_decided_by_hand(small: BodiesHarness) -> None:
    lost, whole = await small.prepare(policy=NOW), await small.prepare(policy=NOW)
    small.delete_half(1)
    running = asyncio.create_task(small.checks.run())
    await until(lambda: len(small.runner.taken) == 2)
    assert await attempt(small.checks, lost.id, DUE) is None
    assert await attempt(small.checks, whole.id, DUE) is not None
    assert (lost.state, lost.checks.attempts, small.lost) == (State.PENDING, (), [1])
    # It is off the schedule: no check, no parking, no loop.
    small.runner.taken.clear()
    small.runner.offers.clear()
    small.clock.advance(100_000)
    small.checks.look_again()
    await until(lambda: whole.id in small.runner.taken)
    await settled()
    assert small.runner.offers == [whole.id]
    with pytest.raises(NotPending, match="deleted"):
        small.checks.ask(lost)
    assert "deleted" in str(summary(lost).cause)
    await small.mark("rollback", lost, reason="by hand")
    assert lost.verdict.decision is Decision.ROLLBACK
    running.cancel()


# --- memory --------------------------------------------------------------------------------------


async def test_eviction_starts_with_oldest_and_keeps_share(small: BodiesHarness) -> None:
    small.proxy.share = 50_000
    largest = 0
    made = []
    for _ in range(100):
        made += await asyncio.gather(*[small.prepare(message("x" * 900)) for _ in range(100)])
        largest = max(largest, small.ledger.index.body_bytes)
    assert len(made) == 10_000
    assert largest <= 50_000
    held = [each.has_bodies for each in made]
    assert held == sorted(held)
    assert small.ledger.index.body_bytes > 48_000
    small.proxy.share = 10_000
    small.bodies.trim()
    assert 8_000 < small.ledger.index.body_bytes <= 10_000
    assert small.door.half.picked == []


async def test_held_bodies_are_evicted_after_release(small: BodiesHarness) -> None:
    small.proxy.share = 1 << 20
    made = [await small.prepare() for _ in range(10)]
    with small.bodies.hold(made[:3]), small.bodies.hold(made[2:4]):
        small.proxy.share = 0
        small.bodies.trim()
        assert [each.has_bodies for each in made] == [True] * 4 + [False] * 6
        small.bodies.trim()
    small.bodies.trim()
    assert not any(each.has_bodies for each in made)


async def test_final_messages_of_evicted_are_evicted_too(small: BodiesHarness) -> None:
    small.kafka.topics["t"].leaderless = frozenset({0})
    made = [await small.prepare() for _ in range(10)]
    for each in made:
        await small.commit(each, message("new"))
    small.bodies.trim()
    assert small.ledger.index.body_bytes == 0
    small.kafka.topics["t"].leaderless = frozenset()
    await until(lambda: small.visible() == ["new"] * 10)


async def test_large_eviction_takes_several_steps(small: BodiesHarness) -> None:
    small.monkeypatch.setattr(bodies_module, "STEP_MAX", 200)
    small.proxy.share = 1 << 30
    made = [await small.prepare() for _ in range(1000)]
    small.proxy.share = 0
    small.bodies.trim()
    assert sum(not each.has_bodies for each in made) == 200
    for _ in range(4):
        small.bodies.trim()
    assert small.ledger.index.body_bytes == 0


# --- what goes out, and when it does not -------------------------------------------------------


async def test_records_have_version_that_all_proxies_read(small: BodiesHarness) -> None:
    small.proxy.record_version = 1
    transaction = await small.prepare(policy=NOW)
    assert await attempt(small.checks, transaction.id, DUE) is not None
    await small.promoted(transaction)
    assert small.door.turns[-1].progress.v == 1
    small.proxy.record_version = 7
    other = await small.prepare()
    await small.promoted(other)
    assert small.door.turns[-1].progress.v == 7
    refused_one = await small.prepare(message("x", topic="gone"))
    await refused(small, refused_one)
    versions = [record.headers[0] for record in small.kafka.visible("txbroker.parked")]
    assert [value.split()[0] for _, value in versions if value] == [b"7"]


@pytest.mark.rule(16)
async def test_stuck_since_shows_first_failed_promotion(small: BodiesHarness) -> None:
    now_s = [100.0]
    small.monkeypatch.setattr(promoter_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    assert small.promoter.stuck_since is None
    write, tried = small.door.inner.write, []

    async def failing(turn: object) -> object:
        tried.append(turn)
        now_s[0] += 10.0
        if len(tried) <= 3:
            raise Unknown("no answer")
        return await write(turn)  # type: ignore[arg-type]

    small.monkeypatch.setattr(small.door.inner, "write", failing)
    seen = []
    reclaim = small.reclaim

    async def watched(unseen: frozenset[str]) -> None:
        seen.append(small.promoter.stuck_since)
        await reclaim(unseen)

    small.monkeypatch.setattr(small, "reclaim", watched)
    transaction = await small.prepare()
    await small.promoted(transaction)
    # From when the first of them began; that a claim comes through ends nothing.
    assert seen == [100.0] * 3
    assert small.promoter.stuck_since is None
