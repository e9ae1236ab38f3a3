"""The ledger against a model of forty lines, with any events in any order."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.core.core_fuzz import fuzz
from tests.kit.logs import (
    PARTITION,
    START_MS,
    WINDOW_MS,
    Logs,
    apply_all,
    half_of,
    id_of,
    marker_of,
    message,
    new_ledger,
    replayed,
)
from txbroker.core.lifecycle import SETTLED
from txbroker.core.records import Cause, Checkpoint, CheckPolicy, Message, ParkedCopy, State

POLICY = CheckPolicy(after_s=6.0, interval_s=30.0, attempts_max=3, timeout_s=5.0)
KINDS = st.sampled_from(
    ["check", "check", "check", "returned", "later", "park", "revive", "rollback", "commit"]
)
CAUSE = Cause("too_large", "raise it", "t", 0)


@dataclass
class Model:
    """What is to be true of one transaction; times in ms."""

    group: str
    value: str
    state: str = "pending"
    decision: str | None = None
    round: int = 1
    number: int = 0
    counted: list[int] = field(default_factory=list)
    last: int = 0
    open: bool = False  # the last attempt can still be given back
    next: int = 0
    first: int = 0

    def mark(self, kind: str, at: int, turn: int, number: int, group: str, asked: bool) -> None:
        left = 3 - len(self.counted)
        if kind in ("commit", "rollback"):
            if self.decision is None and group in ("", self.group):
                self.decision = kind
                self.state = "committed" if kind == "commit" else "rolled_back"
        elif kind == "revive":
            if self.state == "parked" and turn == self.round:
                self.state, self.round, self.number, self.last = "pending", turn + 1, 0, 0
                self.counted, self.open = [], False
                self.first = self.next = at + 6000
        elif self.state != "pending" or turn != self.round:
            return
        elif kind == "check":
            in_time = at >= self.last + 1000 if asked else at >= self.next
            if number == self.number + 1 and in_time and left > (1 if asked else 0):
                self.number, self.last, self.open = number, at, True
                self.counted.append(at)
                self.next = at + 30_000
        elif kind == "park":
            if left == 0 and at >= self.counted[-1] + 5000:
                self.state = "parked"
        elif self.open and number == self.number:
            self.open = False
            self.counted.pop()
            before = self.counted[-1] + 30_000 if self.counted else self.first
            self.next = at + 10_000 if kind == "later" else before


class LedgerMachine(RuleBasedStateMachine):
    """Appends records, lets the ledger read them, writes turns, crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.logs, self.ledger = Logs(), new_ledger()
        self.now = START_MS
        self.half_clock = self.op_clock = 0
        self.model: dict[str, Model] = {}
        self.prepared: dict[str, int] = {}
        self.keys: dict[str, str] = {}
        self.progress: Checkpoint | None = None
        self.copies: dict[str, ParkedCopy] = {}

    @initialize()
    def one_transaction(self) -> None:
        self.prepare(9, "v", "g", None, PARTITION, 0)

    @rule(pause=st.sampled_from([1, 999, 1000, 5000, 6000, 30_000, 120_001]))
    def time_passes(self, pause: int) -> None:
        self.now += pause

    @rule(
        number=st.integers(0, 5),
        value=st.sampled_from("vvw"),
        group=st.sampled_from("gh"),
        key=st.sampled_from([None, None, "d"]),
        partition=st.sampled_from([PARTITION, PARTITION, PARTITION + 1]),
        skew=st.sampled_from([0, 0, 0, WINDOW_MS, WINDOW_MS + 1, -WINDOW_MS - 1]),
    )
    def prepare(
        self, number: int, value: str, group: str, key: str | None, partition: int, skew: int
    ) -> None:
        known = sorted(self.model)
        id = known[number] if number < len(known) else id_of(number, self.now - skew, partition)
        id_ms = self.now if number < len(known) else self.now - skew
        half = half_of(id, message(value), group=group, dedup_key=key, policy=POLICY)
        self.logs.prepare(half, self.now)
        self.read()
        self.half_clock = self.now
        holder = self.keys.get(f"{group} {key}")
        held = key and holder and self.now - self.prepared[holder] <= WINDOW_MS
        if id in self.model or held or partition != PARTITION:
            return
        if abs(self.now - id_ms) <= WINDOW_MS:
            self.model[id] = Model(group, value, next=self.now + 6000, first=self.now + 6000)
            self.prepared[id] = self.now
            if key:
                self.keys[f"{group} {key}"] = id

    @rule(
        number=st.integers(0, 5),
        kind=KINDS,
        off=st.sampled_from([0, 0, 0, 0, 0, 1, -1]),
        round_off=st.sampled_from([0, 0, 0, 0, 0, 1, -1]),
        group=st.sampled_from(["", "g", "h"]),
        asked=st.booleans(),
        wait=st.booleans(),
    )
    def mark(
        self, number: int, kind: str, off: int, round_off: int, group: str, asked: bool, wait: bool
    ) -> None:
        known = sorted(self.model)
        if number >= len(known):
            return
        model = self.model[known[number]]
        if wait and kind == "check" and model.state == "pending":
            self.now = max(self.now, model.next)
        if wait and kind == "park" and model.counted:
            self.now = max(self.now, model.counted[-1] + 5000)
        attempt = model.number + (1 if kind == "check" else 0) + off
        marker = marker_of(
            kind,
            known[number],
            round=model.round + round_off,
            number=attempt,
            group=group,
            reason="asked" if asked else "due",
            later_s=10.0,
        )
        self.logs.mark(marker, self.now)
        self.read()
        model.mark(kind, self.now, marker.round, attempt, group, asked)

    @rule(
        number=st.integers(0, 1),
        checks=st.integers(1, 3),
        then=st.lists(st.sampled_from(["park", "revive", "returned", "later"]), max_size=2),
        wait=st.booleans(),
        asked=st.booleans(),
    )
    def life_goes_on(
        self, number: int, checks: int, then: list[str], wait: bool, asked: bool
    ) -> None:
        """Nearly all of it legal, so that rounds, parking and revival are reached."""
        for _ in range(checks):
            self.mark(number, "check", 0, 0, "", asked=asked, wait=True)
        for kind in then:
            self.mark(number, kind, 0, 0, "", asked=False, wait=wait)

    @rule(number=st.integers(0, 5), value=st.sampled_from("vw"), topic=st.sampled_from("ttx"))
    def commit_with_contents(self, number: int, value: str, topic: str) -> None:
        known = sorted(self.model)
        if number >= len(known):
            return
        model = self.model[known[number]]
        half = half_of(known[number], message(model.value), group=model.group, policy=POLICY)
        self.logs.commit_with(half, [message(value, topic)], self.now)
        self.read()
        if model.decision is None and topic == "t":
            model.value = value
            model.mark("commit", self.now, 0, 0, model.group, asked=False)

    @rule(count=st.integers(0, 3), refuse=st.booleans())
    def turn(self, count: int, refuse: bool) -> None:
        ready = sorted(self.ledger.index.ready.values(), key=lambda t: t.verdict.op_offset)
        ready += list(self.ledger.index.refused.values())
        for transaction in ready[:count]:
            self.model[transaction.id].state = "refused" if refuse else "promoted"
            if refuse:
                self.copies[transaction.id] = transaction.copy(State.REFUSED, CAUSE)
                self.ledger.refuse(transaction.id, CAUSE)
            else:
                self.copies.pop(transaction.id, None)
                self.ledger.promote_run([transaction])
        for transaction in list(self.ledger.index.to_keep.values()):
            self.copies[transaction.id] = transaction.copy(transaction.state, None)
            transaction.kept = True
        for id in [*self.ledger.index.to_keep, *self.ledger.index.to_release]:
            if id in self.ledger.index.to_release:
                self.copies.pop(id, None)
        self.ledger.index.to_keep.clear()
        self.ledger.index.to_release.clear()
        left = tuple(self.ledger.index.ready)
        self.progress = Checkpoint(
            1, "c", self.ledger.op_whole, self.ledger.half_whole, deferred=left
        )

    @rule()
    def crash(self) -> None:
        self.ledger = replayed(self.logs)
        self.ledger.reconcile(self.progress, self.copies.values())

    def read(self) -> None:
        apply_all(self.ledger, self.logs, len(self.logs.half.records), len(self.logs.op.records))

    @invariant()
    def ledger_and_model_agree(self) -> None:
        assert {t.id for t in self.ledger.index} == set(self.model)
        for id, model in self.model.items():
            transaction = self.ledger.index.get(id)
            assert transaction is not None
            assert (transaction.state, transaction.verdict.decision) == (
                model.state,
                model.decision,
            )
            assert (transaction.checks.round, transaction.checks.number) == (
                model.round,
                model.number,
            )
            assert list(transaction.checks.counted_ms) == model.counted
            if model.state == "pending":
                assert transaction.next_check_ms() == model.next

    @invariant()
    def bodies_are_there_while_they_are_needed(self) -> None:
        for transaction in self.ledger.index:
            settled = transaction.state in (State.PROMOTED, State.ROLLED_BACK)
            values = [m.value for m in transaction.messages]
            model = self.model[transaction.id]
            assert values == [None if settled else model.value.encode()]
            assert isinstance(transaction.messages[0], Message)

    @invariant()
    def what_is_counted_is_there(self) -> None:
        ledger = self.ledger
        open_ones = [t for t in ledger.index if t.state not in SETTLED]
        assert set(ledger.index.transactions) == {t.id for t in open_ones}
        assert ledger.index.by_offset.after(-1, 100) == sorted(open_ones, key=lambda t: t.offset)
        assert ledger.index.body_bytes == sum(t.body_bytes for t in open_ones)
        assert ledger.index.unsettled.total == len(open_ones)
        by_state = {
            state: {t.id for t in open_ones if t.state is state} for state in set(State) - SETTLED
        }
        assert set(ledger.index.ready) == by_state[State.COMMITTED]
        assert set(ledger.index.refused) == by_state[State.REFUSED]
        assert set(ledger.index.parked) == by_state[State.PARKED]
        assert ledger.index.refused_by_topic == Counter("t" for _ in ledger.index.refused)
        for state, counted in (
            (State.PENDING, ledger.index.pending_by_group),
            (State.PARKED, ledger.index.parked_by_group),
        ):
            assert counted == Counter(t.half.group for t in open_ones if t.state is state)
        for group in "gh":
            held = [t for t in open_ones if t.half.group == group]
            assert ledger.index.unsettled.of(group) == len(held)
            times = [
                t.prepared_at_ms
                for t in open_ones
                if t.state is State.PENDING and t.half.group == group
            ]
            assert ledger.index.oldest_pending_ms(group) == min(times, default=None)

    @invariant()
    def copies_are_where_they_should_be(self) -> None:
        for transaction in self.ledger.index:
            waits = (
                transaction.id in self.ledger.index.to_keep
                or transaction.id in self.ledger.index.to_release
            )
            copied = transaction.id in self.copies
            if transaction.state in (State.PARKED, State.REFUSED):
                assert copied or waits
            if transaction.state in (State.PROMOTED, State.ROLLED_BACK):
                assert waits or not copied


TestLedger = LedgerMachine.TestCase
# A step costs little, and rounds of attempts take many.
TestLedger.settings = settings(fuzz, max_examples=5 * fuzz.max_examples)
