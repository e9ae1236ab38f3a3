"""What the stream remembers and when it speaks up, without Spark: one moment after the other."""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txbroker.core.routing import make_id
from txbroker.errors import ConfigurationError
from txbroker.spark.access import AuditKafka, TopicEnds
from txbroker.spark.judge.judge import judge
from txbroker.spark.judge.rows import (
    ALWAYS,
    HalfFact,
    Horizon,
    JudgedTransaction,
    JudgeTerms,
    MarkerFact,
    ParkedFact,
    VisibleFact,
    facts_of,
)
from txbroker.spark.schema import TopicNames
from txbroker.spark.stream.query import Texts
from txbroker.spark.stream.state import Bucket, BucketChanges, Fact, StreamTerms, Tick
from txbroker.spark.stream.stored import (
    FindingSink,
    StreamManifest,
    StreamProgress,
    TakenPartition,
    decode_home,
)
from txbroker.spark.stream.stream import NO_BATCH, AuditStream, StreamSettings, WrittenTick
from txbroker.spark.stream.targets import changed_targets, renewed_home, starts_of

T0 = 1_700_000_000_000
TARGET = "orders"
TERMS = StreamTerms(keep_ms=200_000, targets=frozenset({TARGET}))
STEP_MS = 100
RISES = 3
"""Steps after which the moment is later than the tick that was the newest."""
AHEAD_MS = 250


class Shelf:
    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def read(self, name: str) -> str | None:
        return self.texts.get(name)

    def write(self, name: str, text: str | None) -> None:
        if text is None:
            self.texts.pop(name, None)
        else:
            self.texts[name] = text


class Stream:
    """A bucket over time: looked into when something comes or is due, as Spark does."""

    def __init__(self, terms: StreamTerms = TERMS) -> None:
        self.shelf, self.terms = Shelf(), terms
        self.moment_ms = T0
        self.reported: list[tuple[str, str]] = []
        self.healed: list[tuple[str, str]] = []
        self.drift: dict[str, int] = {}
        self.states: dict[str, int] = {}
        self.held: dict[str, int] = {}
        self.strangers = 0
        self.due_ms: int | None = None

    def read(self, *facts: Fact, tick_ms: int = 0) -> BucketChanges:
        tick = Tick(tick_ms or self.moment_ms + AHEAD_MS, self.moment_ms)
        heard = Bucket(self.shelf, self.terms).look(facts, [tick])
        self.due_ms = heard.due_ms
        for each in heard.findings:
            reported = {"opened": self.reported, "healed": self.healed}[each.state]
            reported.append((each.id, each.kind))
        for (what, name), number in heard.counts.items():
            if what == "stranger":
                self.strangers += number
            else:
                counts = {"drift": self.drift, "state": self.states, "held": self.held}[what]
                counts[name] = counts.get(name, 0) + number
        return heard

    def go(self, ms: int, step_ms: int = 1000) -> None:
        """Let the moment move on by steps; look when something is due, and only then."""
        until_ms = self.moment_ms + ms
        while self.moment_ms < until_ms:
            self.moment_ms = min(self.moment_ms + step_ms, until_ms)
            if self.due_ms is not None and self.due_ms <= self.moment_ms:
                self.read()

    def rise(self, times: int) -> None:
        self.go(times * STEP_MS, STEP_MS)


class Tx:
    """The records of one transaction of one message."""

    def __init__(self, at_ms: int = T0, randomness: int = 1, **half: Any) -> None:
        self.id = make_id(0, at_ms, randomness)
        self.at_ms = at_ms
        self._half = half
        self.offset = randomness * 100

    def half(self, at_ms: int | None = None, **fields: Any) -> Fact:
        at_ms = self.at_ms if at_ms is None else at_ms
        given = {"partition": 0, "offset": self.offset, "at_ms": at_ms, "grp": "g", "seq": 0}
        given |= {"count": 1, "topic": TARGET, "target_partition": 0, "body": 1, "headers": 2}
        given |= {"after_ms": 6000, "interval_ms": 30000, "attempts_max": 15, "timeout_ms": 5000}
        return Fact("half", self.id, {**given, **self._half, **fields})

    def op(self, kind: str = "commit", at_ms: int | None = None, **fields: Any) -> Fact:
        self.offset += 1
        at_ms = self.at_ms if at_ms is None else at_ms
        given = {"partition": 0, "offset": self.offset, "at_ms": at_ms, "kind": kind, "grp": "g"}
        given |= {"source": "producer", "round": 0, "number": 0, "reason": "", "later_ms": 0}
        return Fact("op", self.id, {**given, "contents_count": 0, **fields})

    def visible(self, **fields: Any) -> Fact:
        self.offset += 1
        given = {"topic": TARGET, "partition": 0, "offset": self.offset, "at_ms": self.at_ms}
        given |= {"seq": 0, "count": 1, "body": 1, "headers": 2, "append_time": False}
        return Fact("visible", self.id, {**given, **fields})


@pytest.fixture
def stream() -> Stream:
    return Stream()


def test_manifest_horizon_covers_records_gone_at_start() -> None:
    kept_ms = T0 - 7 * 86_400_000
    home = StreamManifest(name="n", installation="half", started_ms=T0, buckets=1, slot_ms=1)
    found = [
        TakenPartition("half", 0, 5, T0, kept_ms), TakenPartition("old", 1, 9, T0, kept_ms),
        TakenPartition("large", 0, 9, T0), TakenPartition("deleted", 0, 5, T0, kept_ms),
        TakenPartition("deleted", -1, 0, ALWAYS),
    ]  # fmt: skip
    horizon = home.with_taken(found).horizon("half", "op")
    places = {("old", 1): T0, ("large", 0): T0, ("deleted", 0): T0}
    places["deleted", -1] = ALWAYS
    assert horizon == Horizon({0: 5}, {0: T0}, {}, places, kept_from_ms={"old": kept_ms})


def test_targets_that_changed_are_read_as_they_are_now() -> None:
    """One was created again and has more records than before, one was deleted."""
    home = StreamManifest(
        name="n", installation="half", started_ms=T0, buckets=1, slot_ms=1,
        read=frozenset({"same", "again", "deleted", "unread"}),
        ids=dict.fromkeys(("same", "again", "deleted", "unread"), "1"),
        taken=(TakenPartition("again", 0, 5, T0), TakenPartition("again", -1, 0, ALWAYS)),
    )  # fmt: skip
    ends = {
        "same": TopicEnds("same", (0,), (9,), id="1"),
        "again": TopicEnds("again", (2, 0), (99, 9), id="2"),
        "unread": TopicEnds("unread", (), (), unread="no leader"),
    }
    access = cast(AuditKafka, SimpleNamespace(ends=lambda topics: ends))
    changed = changed_targets(access, home)
    assert changed == {"again": ends["again"], "deleted": None}
    assert starts_of(changed) == {"again": {"0": 2, "1": 0}, "deleted": {}}
    renewed = renewed_home(home, changed, [TakenPartition("again", 0, 2, T0 + 9)], T0 + 9)
    assert renewed.read == {"same", "again", "unread"}
    assert renewed.ids == {"same": "1", "again": "2", "unread": "1"}
    assert (home.deleted, renewed.deleted) == ({"again"}, {"deleted"})
    # Messages of earlier decisions may have been in the former topic.
    assert renewed.horizon("half", "op").taken_ms == {
        ("again", 0): T0 + 9, ("again", -1): T0 + 9, ("deleted", -1): ALWAYS
    }  # fmt: skip


def test_checkpoint_of_another_version_is_refused() -> None:
    home = StreamManifest(name="n", installation="half", started_ms=T0, buckets=1, slot_ms=1)
    assert decode_home("c", msgspec.json.encode(home)) == home
    for version, words in ((1, "an earlier version .*--since"), (3, "a newer version")):
        content = msgspec.json.encode(msgspec.structs.replace(home, v=version, slot_ms=2))
        with pytest.raises(ConfigurationError, match=words):
            decode_home("c", content)
    with pytest.raises(ConfigurationError, match="does not parse"):
        decode_home("c", b'{"v": 2}')


def test_moment_waits_until_a_new_target_is_read_too() -> None:
    stream = AuditStream.__new__(AuditStream)
    stream._settings = StreamSettings("c", TopicNames.of("x"))
    stream._sink = cast(FindingSink, SimpleNamespace(progress=StreamProgress()))
    stream._pending = deque([(WrittenTick(1, T0, 7), {("x.half", 0): 5})])
    stream._unjudged = deque()
    stream._moment_ms, stream._judged_ms, stream._grown_with = 7, 0, 3
    source = {"endOffset": {"x.half": {"0": 5}}}
    progress = {"sources": [source], "stateOperators": [], "batchDuration": 1}
    assert (stream._move(progress), stream._moment_ms) == (False, 7)
    stream._grown_with = NO_BATCH
    assert (stream._move(progress), stream._moment_ms) == (True, T0)


def test_topics_read_in_any_order_raise_no_alarm(stream: Stream) -> None:
    first, second = Tx(randomness=1), Tx(randomness=2)
    stream.read(first.visible())
    stream.rise(RISES - 1)
    stream.read(first.op())
    stream.rise(RISES - 1)
    stream.read(first.half())
    stream.read(second.op("rollback"))
    stream.rise(RISES - 1)
    stream.read(second.half())
    stream.go(1_000_000)
    assert stream.reported == []
    assert stream.states == {"promoted": 1, "rolled_back": 1, "void": 0}


def test_one_sided_evidence_is_reported_once_at_third_moment(stream: Stream) -> None:
    tx = Tx()
    stream.read(tx.half(), tx.visible())
    stream.rise(RISES - 1)
    assert stream.reported == []
    stream.rise(1)
    assert stream.reported == [(tx.id, "visible_without_commit")]
    stream.rise(10)
    stream.read(tx.op())
    stream.go(1_000_000)
    assert stream.reported == stream.healed == [(tx.id, "visible_without_commit")]
    assert stream.drift == {"visible_without_commit": 0}


def test_the_same_moment_again_does_not_count(stream: Stream) -> None:
    tx = Tx()
    stream.read(tx.half(), tx.op("rollback"), tx.visible())
    for _ in range(10):
        stream.read()
    assert stream.reported == []
    stream.rise(RISES)
    assert stream.reported == [(tx.id, "rolled_back_visible")]


def test_a_commit_is_late_then_lost_by_the_moment_and_heals(stream: Stream) -> None:
    tx = Tx()
    stream.read(tx.half(), tx.op())
    stream.go(60_000)
    assert stream.reported == []
    stream.go(1)
    assert stream.reported == [(tx.id, "late")]
    stream.go(540_000)
    assert stream.reported == [(tx.id, "late"), (tx.id, "lost")]
    assert stream.drift == {"late": 0, "lost": 1}
    stream.read(tx.visible())
    assert stream.drift == {"late": 0, "lost": 0}
    stream.go(1_000_000)
    assert stream.healed == stream.reported
    assert stream.shelf.texts.keys() == {"agenda"}
    assert stream.held == {"open": 0, "ended": 0}


def test_a_marker_waits_for_its_half_as_long_as_that_may_come(stream: Stream) -> None:
    tx = Tx()
    stream.read(tx.op("check", round=1, number=1, reason="due"))
    stream.go(TERMS.dedup_window_ms)
    assert stream.reported == []
    stream.go(5000)
    assert stream.reported == [(tx.id, "marker_without_half")]


def parked(tx: Tx, stream: Stream) -> list[Fact]:
    """Return a transaction after its only attempt, and the marker that parks it."""
    policy = {"after_ms": 0, "interval_ms": 0, "attempts_max": 1, "timeout_ms": 0}
    check = tx.op("check", stream.moment_ms, round=1, number=1, reason="due")
    return [tx.half(**policy), check, tx.op("park", stream.moment_ms, round=1)]


def test_parked_transaction_has_a_copy_before_lost_age(stream: Stream) -> None:
    kept, bare = Tx(randomness=1), Tx(randomness=2)
    stream.read(*parked(kept, stream), *parked(bare, stream))
    held = {"grp": "g", "count": 1, "topic": TARGET, "target_partition": 0, "body": 1, "headers": 2}
    place = {"partition": 0, "offset": 1, "at_ms": T0, "seq": 0, "state": "parked"}
    stream.read(Fact("parked", kept.id, {**place, "tombstone": False, **held}))
    stream.go(600_000)
    assert stream.reported == []
    assert stream.states == {"parked": 2}
    stream.go(4000)
    assert stream.reported == [(bare.id, "not_kept")]
    stream.go(1_000_000, 10_000)
    assert stream.reported == [(bare.id, "not_kept")]


def test_refused_messages_are_not_visible_for_long(stream: Stream) -> None:
    tx, settled = Tx(randomness=1), Tx(randomness=2)
    held = {"grp": "g", "count": 2, "topic": TARGET, "target_partition": 0, "body": 1, "headers": 2}
    place = {"partition": 0, "at_ms": T0, "state": "refused", "tombstone": False, **held}
    for each in (tx, settled):
        stream.read(each.half(count=2), each.half(count=2, seq=1, offset=each.offset + 1))
        stream.read(*(Fact("parked", each.id, {**place, "offset": n, "seq": n}) for n in (0, 1)))
        shown = each.visible(append_time=True, count=2, at_ms=stream.moment_ms)
        stream.read(each.op(at_ms=stream.moment_ms), shown)
    stream.go(30_000)
    stream.read(settled.visible(append_time=True, count=2, seq=1))
    stream.go(30_000)
    assert stream.reported == []
    stream.go(10_000)
    assert stream.reported == [(tx.id, "refused_visible")]
    assert +Counter(stream.states) == {"refused": 1, "promoted": 1}


def test_second_copy_is_found_until_transaction_is_forgotten(stream: Stream) -> None:
    tx, other = Tx(randomness=1), Tx(randomness=2)
    stream.read(tx.half(), tx.op(), tx.visible(), other.half(), other.op(), other.visible())
    stream.go(TERMS.keep_ms - 1000)
    stream.read(tx.visible())
    stream.rise(RISES)
    assert stream.reported == [(tx.id, "visible_twice")]
    stream.go(2 * TERMS.keep_ms)
    assert stream.shelf.texts.keys() == {"agenda"}
    stream.read(other.visible())
    stream.go(1_000_000)
    assert stream.strangers == 1
    assert len(stream.reported) == 1


def test_missing_first_check_is_overdue_until_it_is_made(stream: Stream) -> None:
    tx = Tx()
    stream.read(tx.half())
    overdue_ms = 6000 + TERMS.overdue_after_ms
    assert stream.due_ms == T0 + overdue_ms + 1
    stream.moment_ms = T0 + overdue_ms - 1000
    stream.go(1000)
    assert stream.reported == []
    stream.go(1)
    assert stream.reported == [(tx.id, "overdue")]
    assert stream.drift == {"overdue": 1}
    stream.read(tx.op("check", stream.moment_ms, round=1, number=1, reason="due"))
    assert stream.drift == {"overdue": 0}
    asked = Tx(randomness=2)
    stream.moment_ms = T0
    stream.read(asked.half(), asked.op("check", T0 + 6000, round=1, number=1, reason="due"))
    stream.go(overdue_ms + 1, 3_600_000)
    assert stream.reported == [(tx.id, "overdue")]


def test_void_half_messages_name_no_targets(stream: Stream) -> None:
    far, astray = Tx(topic="a"), Tx(randomness=2, topic="b", void="id")
    assert stream.read(far.half(T0 + TERMS.dedup_window_ms + 1), astray.half()).targets == set()
    assert stream.read(Tx(randomness=3, topic="c").half()).targets == {"c"}


def test_unreadable_target_is_reported_then_lost_once_readable(stream: Stream) -> None:
    readable = stream.terms
    stream.terms = readable._replace(horizon=Horizon(unread=frozenset({TARGET})))
    tx = Tx()
    stream.read(tx.half(), tx.op())
    stream.go(TERMS.lost_after_ms + 1000)
    assert stream.reported == [(tx.id, "target_unreadable")]
    stream.terms = readable
    stream.go(TERMS.late_after_ms + 1000)
    assert stream.reported == [(tx.id, "target_unreadable"), (tx.id, "lost")]
    assert stream.drift == {"target_unreadable": 0, "lost": 1}


@pytest.mark.parametrize("taken", [False, True], ids=["half is there", "half is taken"])
def test_a_pending_one_that_was_copied_is_overdue(stream: Stream, taken: bool) -> None:
    tx = Tx()
    held = {"partition": 0, "offset": 9, "at_ms": T0, "seq": 0, "state": "pending"}
    copy = Fact("parked", tx.id, {**held, "tombstone": False, "due_ms": T0 + 6000})
    stream.read(*([] if taken else [tx.half()]), copy)
    stream.moment_ms = T0 + 6000 + TERMS.overdue_after_ms
    stream.go(1)
    assert stream.reported == [(tx.id, "overdue")]


@pytest.mark.parametrize("state", ["pending", "parked"])
def test_a_copy_of_the_far_future_asks_for_no_timer(stream: Stream, state: str) -> None:
    tx = Tx()
    far = {"partition": 0, "offset": 9, "at_ms": ALWAYS - 1, "due_ms": ALWAYS - 1, "seq": 0}
    for facts in ([Fact("parked", tx.id, {**far, "state": state, "tombstone": False})], [tx.op()]):
        stream.read(*facts)
        stream.rise(RISES)
        assert stream.due_ms is None
    assert stream.states == {state: 0, "committed": 1}


def test_pending_transactions_are_never_forgotten(stream: Stream) -> None:
    tx = Tx()
    stream.read(tx.half())
    stream.go(10 * TERMS.keep_ms, 50_000)
    stream.read(tx.op("rollback", at_ms=stream.moment_ms), tx.visible())
    stream.rise(RISES)
    assert stream.reported == [(tx.id, "rolled_back_visible")]


def test_another_half_with_its_key_is_void_within_the_window(stream: Stream) -> None:
    key = {"dedup": "order-1"}
    first, again, later = (Tx(T0 + ms, 7, **key) for ms in (0, 15_000, 130_000))
    stream.read(first.half(), first.op(), first.visible())
    stream.go(16_000)
    stream.read(again.half(offset=701), again.op())
    stream.go(115_000)
    stream.read(later.half(offset=702), later.op())
    stream.go(59_000)
    assert stream.reported == []
    stream.go(10_000)
    assert stream.reported == [(later.id, "late")]
    assert stream.states["void"] == 1


def test_similar_and_long_dedup_keys_stay_distinct(stream: Stream) -> None:
    keys = ["k", "k\n1", "1 k", "k" * 500_000, "\ud800"]
    transactions = [Tx(T0, randomness, dedup=key) for randomness, key in enumerate(keys, 1)]
    stream.read(*[tx.half() for tx in transactions])
    assert stream.states == {"pending": len(keys)}
    names = [name for name in stream.shelf.texts if name.startswith("dedup")]
    assert len(names) == len(keys)
    assert max(map(len, names)) < 100


def test_due_slots_are_examined_one_after_the_other() -> None:
    """At the first moment that is everything: no worker has memory for it."""

    class Reading(Shelf):
        """Sees that what was read is written back before the next slot is read."""

        held: str | None = None

        def read(self, name: str) -> str | None:
            if name.isdigit():
                assert self.held is None
                self.held = name
            return super().read(name)

        def write(self, name: str, text: str | None) -> None:
            self.held = None if name == self.held else self.held
            super().write(name, text)

    stream = Stream()
    stream.moment_ms = 0
    stream.read(*[Tx(T0 + n * TERMS.slot_ms, n + 1).half() for n in range(20)])
    reading = Reading()
    reading.texts = stream.shelf.texts
    agenda = dict.fromkeys((name for name in reading.texts if name.isdigit()), 1)
    reading.texts["agenda"] = json.dumps([0, 0, agenda])
    Bucket(reading, TERMS).look([], [Tick(T0, T0)])
    assert len(agenda) == 20


def test_an_id_of_the_far_future_is_not_remembered_for_ever(stream: Stream) -> None:
    tx = Tx(T0 + 10 * 365 * 86_400_000)
    stream.read(tx.visible())
    stream.go(10 * (TERMS.keep_ms + TERMS.dedup_window_ms), 10_000)
    assert set(stream.shelf.texts) <= {"agenda"}


def test_half_at_the_edge_of_the_window_is_no_finding(stream: Stream) -> None:
    tx, old = Tx(randomness=1), Tx(randomness=2)
    window_ms = TERMS.dedup_window_ms
    stream.read(tx.half(T0 + window_ms - 500), tx.op(at_ms=T0 + window_ms - 500))
    stream.read(old.half(T0 + window_ms + 5000), old.op(at_ms=T0 + window_ms + 5000))
    stream.go(1_000_000)
    assert stream.reported == []
    assert stream.states["void"] == 1


def test_names_of_unread_topics_are_reported(stream: Stream) -> None:
    tx = Tx(topic="bills")
    assert stream.read(tx.half()).targets == {"bills"}
    assert stream.read(Tx(randomness=2).half()).targets == set()


def test_contents_join_their_marker_despite_user_headers(stream: Stream) -> None:
    tx = Tx()
    marker = tx.op(contents_count=1)
    columns = {"seq": 0, "topic": TARGET, "target_partition": 0, "body": 5, "headers": 6}
    content = {"partition": 0, "offset": tx.offset + 1, "at_ms": T0, "content": columns}
    shown = tx.visible(body=5, seq=1, count=3, headers=4, headers_if_alone=6)
    stream.read(tx.half(), marker, shown)
    stream.read(Fact("op", tx.id, content))
    stream.go(1_000_000)
    assert stream.reported == []
    assert stream.states["promoted"] == 1


# --- any order -----------------------------------------------------------------------------------

SKEW_MS = 2_000
"""Time within which the logs of one batch are read, and by which the moment is later."""
LAST_MS = T0 + TERMS.dedup_window_ms - 10_000


class Stored(NamedTuple):
    """A record, and when it was stored."""

    at_ms: int
    fact: Fact


def history(fate: random.Random, tx: Tx) -> list[Stored]:
    """Return the records of one transaction, faultless or not, in the order in which they were
    stored: its markers come until the dedup window is over."""
    times = sorted(fate.randrange(T0, LAST_MS) for _ in range(8))
    facts = [tx.half(times[0])] if fate.random() < 0.85 else []
    for at_ms in times[1 : 1 + fate.randrange(4)]:
        kind = fate.choice(["commit", "commit", "rollback", "check", "park", "revive"])
        facts.append(tx.op(kind, at_ms, round=1, number=1, reason="due"))
    for at_ms in times[5 : 5 + fate.choice([0, 1, 1, 2])]:
        shown = tx.visible(body=fate.choice([1, 1, 1, 9]), at_ms=at_ms, append_time=True)
        facts.append(shown)
    if fate.random() < 0.3:
        state = fate.choice(["pending", "parked", "refused"])
        held = {"grp": "g", "count": 1, "topic": TARGET, "target_partition": 0, "body": 1}
        place = {"partition": 0, "offset": tx.offset, "at_ms": times[7], "seq": 0, "headers": 2}
        facts.append(Fact("parked", tx.id, {**held, **place, "state": state, "tombstone": False}))
    return sorted((Stored(fact.columns["at_ms"], fact) for fact in facts), key=lambda s: s.at_ms)


def judged(id: str, records: Iterable[Stored], now_ms: int) -> JudgedTransaction:
    """Return how the batch judges these records."""
    rows: dict[str, list[dict[str, Any]]] = {"half": [], "op": [], "visible": [], "parked": []}
    fields = {
        "half": HalfFact._fields,
        "op": MarkerFact._fields,
        "visible": VisibleFact._fields,
        "parked": ParkedFact._fields,
    }
    for _, (table, _, columns) in records:
        given = {"clock_ms": columns["at_ms"], "early": True, **columns}
        rows[table].append({name: given.get(name) for name in fields[table]})
    return judge(facts_of({"id": id, **rows}), JudgeTerms(now_ms))


@given(st.integers(0, 1 << 32))
@settings(max_examples=150, deadline=None)
def test_records_in_any_order_come_to_the_batches_verdict(seed: int) -> None:
    fate = random.Random(seed)
    stream, tx = Stream(), Tx(randomness=seed + 1)
    unread = history(fate, tx)
    everything, read = list(unread), list[Stored]()
    now_ms = T0
    while unread:
        now_ms += fate.choice([10, 500, 3_000, 20_000])
        some = [each for each in unread if each.at_ms <= now_ms and fate.random() < 0.5]
        unread = [each for each in unread if each not in some]
        read += some
        stream.moment_ms = min([now_ms, *(each.at_ms for each in unread)]) - SKEW_MS
        known = len(stream.reported)
        stream.read(*(each.fact for each in some), tick_ms=now_ms - fate.randrange(SKEW_MS))
        # Records stored before one that was read are evidence, read or not.
        newest_ms = max([stream.moment_ms, *(each.at_ms for each in read)])
        stored = [each for each in everything if each.at_ms <= newest_ms]
        true = judged(tx.id, stored, stream.moment_ms).findings
        assert {kind for _, kind in stream.reported[known:]} <= set(true)
    stream.moment_ms = max(now_ms, LAST_MS + 20_000)
    stream.rise(2 * RISES)
    found = Counter(stream.reported)
    found.subtract(stream.healed)
    right = judged(tx.id, everything, stream.moment_ms)
    assert {kind for (_, kind), number in found.items() if number} == set(right.findings)
    assert set(found.values()) <= {0, 1}
    assert +Counter(stream.states) == ({right.state: 1} if everything else {})


class Store(dict[tuple[str], tuple[bytes]]):
    """A map state as Spark's, that takes no long value."""

    getValue = dict.get
    containsKey = dict.__contains__
    removeKey = dict.__delitem__

    def updateValue(self, key: tuple[str], value: tuple[bytes]) -> None:
        assert len(value[0]) <= 8_192
        self[key] = value


def test_long_texts_are_kept_in_pieces_and_leave_nothing() -> None:
    store = Store()
    texts = Texts(store)
    assert texts.read("a") is None
    fate = random.Random(5)
    for length in (0, 5, 8_192, 100_000, 16_384, 1, 50_000):
        text = fate.randbytes(length).hex()
        texts.write("a", text)
        texts.write("ab", "other")
        assert texts.read("a") == text
    assert len(store) > 5
    texts.write("a", None)
    assert texts.read("a") is None
    assert store.keys() == {("ab",)}
