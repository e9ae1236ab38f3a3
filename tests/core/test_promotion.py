"""Plans of promotion transactions: content, order, exactly once after any failure."""

from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.core.core_fuzz import fuzz
from tests.kit.logs import START_MS, Logs, half_of, id_of, marker_of, message, new_ledger, replayed
from txbroker.core.encoding import (
    bytes_in_batch,
    headers_bytes,
    installation_headers,
    promoted_headers,
)
from txbroker.core.ledger import Ledger
from txbroker.core.promotion import PromotionLimits, PromotionPlan, plan_promotion
from txbroker.core.records import Cause, Checkpoint, Half, Message, ParkedCopy, Place, State
from txbroker.core.transaction import Transaction

ROOMY = PromotionLimits()
PASSING = Cause("no_leader", "wait", "t", 0, passing=True)
LASTING = Cause("too_large", "raise it", "t", 0)


def well(_: Place) -> Cause | None:
    return None


def sick(**topics: Cause) -> Callable[[Place], Cause | None]:
    """Return what examines places when these topics are ill."""
    return lambda place: topics.get(place.topic)


def committed(*halves: Half) -> Ledger:
    """Return a ledger in which these were committed in this order."""
    logs = Logs()
    for half in halves:
        logs.prepare(half, START_MS)
    for half in halves:
        logs.mark(marker_of("commit", half.id), START_MS)
    return replayed(logs)


def numbers(transactions: list[Transaction]) -> list[int]:
    return [int(transaction.half.messages[0].value or b"0") for transaction in transactions]


def simple(number: int, *topics: str, order_key: str | None = "k") -> Half:
    messages = [message(str(number), topic) for topic in topics or ("t",)]
    return half_of(id_of(number), *messages, order_key=order_key)


def plan_of(
    ledger: Ledger, examine: Callable[[Place], Cause | None] = well, limits: PromotionLimits = ROOMY
) -> PromotionPlan:
    return plan_promotion(ledger.index.ready.values(), ledger.op_whole, examine, limits)


# --- single turns ----------------------------------------------------------------------------


def test_a_turn_takes_what_is_ready_in_the_order_of_the_decisions() -> None:
    logs = Logs()
    for number in (1, 2, 3):
        logs.prepare(simple(number), START_MS)
    for number in (3, 1, 2):
        logs.mark(marker_of("commit", id_of(number)), START_MS)
    plan = plan_of(replayed(logs))
    assert numbers(plan.promote) == [3, 1, 2]
    assert (plan.op, plan.deferred, plan.refuse, plan.full) == (3, {}, [], False)


@pytest.mark.rule(17)
def test_a_deferred_one_holds_back_its_order_key_transitively() -> None:
    ledger = committed(
        simple(1, "ill"),
        simple(2, "ill", "b"),  # behind 1 in `ill`
        simple(3, "b", "c"),  # behind 2 in `b`
        simple(4, "c"),  # behind 3 in `c`
        simple(5, "d"),  # shares nothing
        simple(6, "c", order_key="other"),
        simple(7, "ill", order_key="other"),
    )
    plan = plan_of(ledger, sick(ill=PASSING))
    assert numbers(plan.promote) == [5, 6]
    assert list(plan.deferred) == [id_of(n) for n in (1, 2, 3, 4, 7)]
    assert plan.op == 7


def test_a_refused_one_holds_back_nothing() -> None:
    ledger = committed(simple(1, "ill", "b"), simple(2, "b"))
    plan = plan_of(ledger, sick(ill=LASTING))
    assert numbers([each for each, _ in plan.refuse]) == [1]
    assert numbers(plan.promote) == [2]
    assert plan.deferred == {}


def test_a_lasting_cause_weighs_more_than_a_passing_one() -> None:
    ledger = committed(simple(1, "slow", "ill"))
    plan = plan_of(ledger, sick(slow=PASSING, ill=LASTING))
    assert [cause for _, cause in plan.refuse] == [LASTING]


def test_without_any_key_nothing_waits_for_another() -> None:
    keyless = [
        half_of(id_of(n), Message(topic, None, str(n).encode(), partition=0))
        for n, topic in ((1, "ill"), (2, "t"))
    ]
    plan = plan_of(committed(*keyless), sick(ill=PASSING))
    assert numbers(plan.promote) == [2]


def test_a_turn_ends_before_a_transaction_that_does_not_fit() -> None:
    ledger = committed(*[simple(n) for n in range(1, 6)])
    plan = plan_of(ledger, limits=PromotionLimits(transactions_max=2))
    assert (numbers(plan.promote), plan.op) == ([1, 2], 2)
    size = bytes_in_batch((message("1"),))
    plan = plan_of(ledger, limits=PromotionLimits(bytes_max=3 * size))
    assert (numbers(plan.promote), plan.op) == ([1, 2, 3], 3)
    plan = plan_of(ledger, limits=PromotionLimits(bytes_max=1))
    assert (numbers(plan.promote), plan.op) == ([1], 1)


def test_a_full_list_of_deferred_ones_stops_promotion() -> None:
    ledger = committed(simple(1, "ill"), simple(2, "ill"), simple(3, "ill"), simple(4, "t"))
    plan = plan_of(ledger, sick(ill=PASSING), PromotionLimits(deferred_max=2))
    assert (list(plan.deferred), plan.op, plan.full) == ([id_of(1), id_of(2)], 2, True)
    assert plan.empty


@pytest.mark.rule(10, 17)
def test_progress_does_not_go_back_when_deferred_ones_come_in_pieces() -> None:
    ledger = committed(simple(1, "ill"), simple(2, "ill"), simple(3, "ill"), simple(4, "t"))
    first = plan_of(ledger, sick(ill=PASSING))
    assert (numbers(first.promote), first.op) == ([4], 4)
    ledger.promote_run(first.promote)
    second = plan_promotion(
        ledger.index.ready.values(), ledger.op_whole, well, PromotionLimits(1), progressed=first.op
    )
    assert numbers(second.promote) == [1]
    assert (second.op, list(second.deferred)) == (4, [id_of(2), id_of(3)])


def test_retried_ones_keep_the_limits() -> None:
    ledger = committed(*[simple(n) for n in range(1, 5)])
    retried = list(ledger.index.ready.values())
    size = bytes_in_batch((message("1"),))
    plan = plan_promotion([], 4, well, PromotionLimits(bytes_max=2 * size), retried=retried)
    assert numbers(plan.promote) == [1, 2]
    plan = plan_promotion([], 4, sick(t=PASSING), ROOMY, retried=retried)
    assert plan.empty


def test_a_turn_is_planned_without_messages() -> None:
    ledger = committed(simple(1, "ill", "b"), simple(2, "b"), simple(3, "c"))
    for transaction in ledger.index.ready.values():
        ledger.index.evict(transaction)
    sizes = []

    def examine(place: Place) -> Cause | None:
        sizes.append(place.size)
        return PASSING if place.topic == "ill" else None

    plan = plan_of(ledger, examine)
    assert [transaction.id for transaction in plan.promote] == [id_of(3)]
    assert list(plan.deferred) == [id_of(1), id_of(2)]
    assert set(sizes) == {bytes_in_batch((message("1"),))}


def test_a_target_is_asked_about_again_only_for_larger_messages() -> None:
    sizes = (50, 10, 50, 200, 100, 300, 150)
    halves = [
        half_of(id_of(number), message("v" * size, "t"), order_key=str(number))
        for number, size in enumerate(sizes)
    ]
    ledger = committed(*halves)
    beside = bytes_in_batch((message("v" * 50),)) - 50
    asked: list[int] = []

    def examine(place: Place) -> Cause | None:
        asked.append(place.size - beside)
        return LASTING if place.size > beside + 150 else None

    plan = plan_of(ledger, examine)
    assert asked == [50, 200, 100, 300, 150]
    assert [each.id for each in plan.promote] == [id_of(number) for number in (0, 1, 2, 4, 6)]
    assert [each.id for each, _ in plan.refuse] == [id_of(3), id_of(5)]


def test_a_run_settles_each_with_its_own_offsets() -> None:
    count = 1200  # settled ones are packed within the run
    halves = [simple(number, *("t", "u", "v")[: 1 + number % 3]) for number in range(count)]
    ledger, one_by_one = committed(*halves), committed(*halves)
    run = list(ledger.index.ready.values())
    offsets = list(range(7, 7 + sum(len(half.messages) for half in halves)))
    ledger.promote_run(run, offsets, START_MS + 9)
    found = [offset for transaction in run for offset in transaction.offsets]
    assert found == offsets
    assert [len(each.offsets) for each in run] == [len(half.messages) for half in halves]
    assert {each.promoted_at_ms for each in run} == {START_MS + 9}
    for transaction in list(one_by_one.index.ready.values()):
        one_by_one.promote_run([transaction])
    for left in (ledger.index, one_by_one.index):
        assert (len(left.transactions), len(left.ready), left.unsettled.total) == (0, 0, 0)
        assert left.body_bytes == 0
    assert [each.id for each in ledger.index.settled] == [
        each.id for each in one_by_one.index.settled
    ]
    assert {each.state for each in ledger.index.settled} == {State.PROMOTED}


def test_planning_looks_at_no_more_than_the_turn_holds() -> None:
    count, per_turn = 3000, 100
    ledger = committed(*[simple(number, order_key=str(number)) for number in range(count)])
    looked_at = 0

    def watched(ready: Iterable[Transaction]) -> Iterator[Transaction]:
        nonlocal looked_at
        for transaction in ready:
            looked_at += 1
            yield transaction

    for _ in range(count // per_turn):
        ready = ledger.index.ready
        plan = plan_promotion(
            watched(ready.values()), ledger.op_whole, well, PromotionLimits(per_turn)
        )
        assert len(plan.promote) == per_turn
        ledger.promote_run(plan.promote)
        # Not sorted again, which would hide a wrong order.
        assert ledger.index.ready is ready
    assert not ledger.index.ready
    assert looked_at <= count + count // per_turn


def test_one_that_comes_late_has_its_place() -> None:
    logs = Logs()
    for number in (1, 2, 3):
        logs.mark(marker_of("commit", id_of(number)), START_MS)
    for number in (2, 3, 1):
        logs.prepare(simple(number), START_MS)
    ledger = new_ledger()
    for record in logs.op.records:
        ledger.apply_op(record)
    for record in logs.half.records[:2]:
        ledger.apply_half(record)
    assert list(ledger.index.ready) == [id_of(2), id_of(3)]
    ledger.apply_half(logs.half.records[2])
    assert list(ledger.index.ready) == [id_of(1), id_of(2), id_of(3)]
    assert numbers(plan_of(ledger).promote) == [1, 2, 3]


def test_a_message_is_never_larger_than_its_bound() -> None:
    from aiokafka.record.default_records import DefaultRecordBatchBuilder

    id = id_of(1)
    for headers in ((), (("näme", b"x" * 300), ("🙂" * 50, None))):
        each = Message("t", b"k" * 200, b"v" * 70_000, headers)
        for installation in ((), installation_headers("p" * 200)):
            builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1 << 30)
            promoted = promoted_headers(id, 999, 1000, each, installation)
            builder.append(0, 2**40, each.key, each.value, list(promoted))
            size = bytes_in_batch((each,)) + headers_bytes(installation)
            assert len(builder.build()) - 61 <= size


# --- exactly once after any failure ----------------------------------------------------------


class World:
    """One partition under an owner that may die at any moment: logs, targets, parked copies.

    A turn takes effect whole, as Kafka's transactions do. `visible` is what consumers read.
    """

    def __init__(self) -> None:
        self.logs = Logs()
        self.visible: list[tuple[str, str, str]] = []  # id, order key, topic
        self.progress: Checkpoint | None = None
        self.copies: dict[str, ParkedCopy] = {}
        self.ledger = new_ledger()
        self.ill: dict[str, Cause] = {}
        self.waiting: list[tuple[PromotionPlan, Checkpoint]] = []
        self.order: list[Half] = []

    def prepare_and_commit(self, number: int, topics: list[str], key: str) -> None:
        """Both records are appended; the owner reads them when it reads them."""
        half = simple(number, *topics, order_key=key)
        self.logs.prepare(half, START_MS)
        self.logs.mark(marker_of("commit", half.id), START_MS)
        self.order.append(half)

    def read(self, half: int, op: int) -> None:
        """The owner reads so many records further."""
        ledger = self.ledger
        for record in self.logs.half.records[ledger.half_position :][:half]:
            ledger.apply_half(record)
        for record in self.logs.op.records[ledger.op_position :][:op]:
            ledger.apply_op(record)

    def write_turn(self, limits: PromotionLimits) -> None:
        """Write a turn behind those on their way; it takes effect when it is committed."""
        ledger = self.ledger
        in_flight = [
            transaction.id
            for plan, _ in self.waiting
            for transaction in [*plan.promote, *(each for each, _ in plan.refuse)]
        ]
        plan = plan_promotion(
            ledger.index.ready.values(),
            ledger.op_whole,
            lambda each: self.ill.get(each.topic),
            limits,
            in_flight=in_flight,
            retried=list(ledger.index.refused.values()),
            progressed=ledger.op_progress,
        )
        if plan.empty:
            return
        assert plan.op >= ledger.op_progress
        ledger.op_progress = plan.op
        progress = Checkpoint(1, "c", plan.op, ledger.half_whole, deferred=tuple(plan.deferred))
        self.waiting.append((plan, progress))

    def commit_turn(self, *, acked: bool) -> None:
        """Commit the oldest promotion transaction in flight; `acked` if its owner learns of it."""
        if not self.waiting:
            return
        plan, self.progress = self.waiting.pop(0)
        for transaction in plan.promote:
            for each in transaction.messages:
                self.visible.append(
                    (transaction.id, transaction.half.attributes.order_key or "", each.topic)
                )
            self.copies.pop(transaction.id, None)
        for transaction, cause in plan.refuse:
            self.copies[transaction.id] = transaction.copy(State.REFUSED, cause)
        if not acked:
            return
        self.ledger.promote_run(plan.promote)
        for transaction, cause in plan.refuse:
            self.ledger.refuse(transaction.id, cause)

    def claim(self, *, fresh: bool) -> None:
        """A new owner from nothing, or the same one with what it has in memory."""
        self.waiting.clear()
        if fresh:
            self.ledger = new_ledger()
            self.read(len(self.logs.half.records), len(self.logs.op.records))
        self.ledger.reconcile(self.progress, self.copies.values())

    def heal(self) -> None:
        """Everything is well again: promote until nothing is left."""
        self.ill.clear()
        self.claim(fresh=False)
        self.read(len(self.logs.half.records), len(self.logs.op.records))
        for _ in range(3 * len(self.order) + 1):
            self.write_turn(PromotionLimits(2))
            self.commit_turn(acked=True)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, set[str]]:
    """Return a healed world, and the ids that were ever refused."""
    world, refused = World(), set[str]()
    topics = st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True)
    for number in range(draw(st.integers(1, 40))):
        action = draw(st.sampled_from("PPPPPRRWWWCCCIIXYZ"))
        if action == "P":
            world.prepare_and_commit(number, draw(topics), draw(st.sampled_from("kl")))
        elif action == "R":
            world.read(draw(st.integers(0, 4)), draw(st.integers(0, 4)))
        elif action == "W" and len(world.waiting) < 2:
            world.write_turn(
                PromotionLimits(draw(st.integers(1, 3)), 4096, draw(st.sampled_from([2, 1000])))
            )
        elif action == "C":
            world.commit_turn(acked=True)
        elif action == "I":
            cause = draw(st.sampled_from([None, PASSING, PASSING, LASTING]))
            topic = draw(st.sampled_from("abc"))
            world.ill.pop(topic, None)
            if cause is not None:
                world.ill[topic] = cause
        elif action == "X":
            world.claim(fresh=True)
        elif action == "Y":
            world.claim(fresh=False)
        elif action == "Z":
            world.commit_turn(acked=False)
            world.claim(fresh=draw(st.booleans()))
        refused |= world.copies.keys()
    world.heal()
    return world, refused


@pytest.mark.rule(11)
@fuzz
@given(worlds())
def test_promotion_is_exactly_once_in_order_and_replayed_alike(
    drawn: tuple[World, set[str]],
) -> None:
    world, refused = drawn
    expected = sorted((half.id, m.topic) for half in world.order for m in half.messages)
    assert sorted((id, topic) for id, _, topic in world.visible) == expected
    assert world.copies == {}
    assert all(transaction.state is State.PROMOTED for transaction in world.ledger.index)
    for key in "kl":
        for topic in "abc":
            decided = [
                half.id
                for half in world.order
                if half.attributes.order_key == key
                and topic in [m.topic for m in half.messages]
                and half.id not in refused
            ]
            seen = [id for id, *place in world.visible if place == [key, topic]]
            assert [id for id in seen if id not in refused] == decided
    lived = {t.id: structs.replace(t, offsets=(), cause=None) for t in world.ledger.index}
    world.claim(fresh=True)
    assert {t.id: t for t in world.ledger.index} == lived
    assert world.ledger.index.ready == world.ledger.index.refused == {}
