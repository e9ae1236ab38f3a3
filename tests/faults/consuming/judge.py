"""The judge of consumers: what a run did to every message, from its history and the topics.

It imports nothing of txbroker, and reads copies and positions by their documented formats.
"""

from __future__ import annotations

import base64
import json
import zlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

Place = tuple[str, int]
"""Topic and partition."""
Lane = tuple[Place, str]
"""A partition, and what of it is in order."""
Source = tuple[str, int, int]
"""Topic, partition and offset: a message."""

ATTEMPTS_MAX = 2
"""`local_attempts_max` of the runs."""
RESUMED_S = 1.0
"""After a process was stopped its next steps may belong to earlier ones."""
COMMITTED_S, LEADER_S = 1.0, 10.0
"""When done messages are committed if nothing is wrong; and the time after which a leader of a
group that does not answer is replaced, at most."""
FAIR_S, FETCHED_S = 3.0, 2.0
"""A message that begins within this time is not late; when it has arrived at its consumer."""
ROUND, ROUNDS = 80, 4
"""Calls of others that a message may wait for: once, and with each message before it."""
STARVED_MESSAGES, STARVED_S = 1000, 60.0
"""As many messages, and for as long, may others of the partition go first."""


@dataclass(frozen=True)
class Rec:
    """A committed record."""

    topic: str
    partition: int
    offset: int
    key: str | None
    headers: tuple[tuple[str, str], ...] = ()
    value: str = ""


@dataclass(frozen=True)
class Stored:
    """Committed offsets of the group, with their metadata, as read until `at` (monotonic)."""

    at: float
    offsets: Mapping[Place, tuple[int, str]]


@dataclass
class Topics:
    """The records read after the run."""

    source: Sequence[Rec] = ()
    retry: Sequence[Rec] = ()
    dead: Sequence[Rec] = ()
    aside: Sequence[Rec] = ()
    stored: Sequence[Stored] = ()
    """In the order of time; the last one after everything else."""
    output: Sequence[Rec] = ()
    """What handlers sent, where they do."""


@dataclass(frozen=True)
class Rules:
    """What the mode promises.

    Attributes:
        order: none, partition or key.
        aside: a message that has failed for the last time is set aside, with later ones of its key.
        at_most_once: no message begins twice, and messages may be lost at a fault.
        lost_max: at most once: messages that may be lost in all.
        settled: everything must be done, waiting or set aside at the end.
        commit_s: the time in which done messages are committed.
    """

    order: str
    aside: bool = False
    at_most_once: bool = False
    lost_max: int = 0
    settled: bool = True
    commit_s: float = 3.0


@dataclass
class Try:
    """One call of a handler.

    Attributes:
        place: the partition that it was read from, whose token it has.
        result: ok, error, later, reject, or "" without an end.
    """

    source: Source
    place: Place
    token: int
    key: str | None
    instance: str
    begin: float
    end: float = float("inf")
    result: str = ""
    attempt: int = 1

    @property
    def effect(self) -> bool:
        return self.result == "ok"


@dataclass(frozen=True)
class Fault:
    """Something that was broken, from `begin` to `end`; `instance` is "" for the brokers."""

    what: str
    instance: str
    begin: float
    end: float


@dataclass
class History:
    """The effects of the consumers, and the faults."""

    tries: list[Try] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    overflow: int = 0
    """Done offsets that did not fit into the metadata, in all commits."""


def read_history(lines: Sequence[Mapping[str, Any]]) -> History:
    """Return a history from its lines: `begin` and `end` of each call by its number, `fault`, and
    `overflow`."""
    history = History()
    calls: dict[tuple[str, int], Try] = {}
    for line in lines:
        event = line["event"]
        if event == "begin":
            source = (line["topic"], line["partition"], line["offset"])
            at = Try(
                source,
                (line["place"][0], line["place"][1]),
                line["token"],
                line["key"],
                line["instance"],
                line["at"],
                attempt=line.get("attempt", 1),
            )
            calls[line["instance"], line["call"]] = at
            history.tries.append(at)
        elif event == "end":
            found = calls[line["instance"], line["call"]]
            found.end, found.result = line["at"], line["result"]
        elif event == "fault":
            history.faults.append(Fault(line["what"], line["instance"], line["at"], line["until"]))
        elif event == "overflow":
            history.overflow += line["count"]
    history.tries.sort(key=lambda each: each.begin)
    return history


@dataclass(frozen=True)
class Violation:
    """A broken rule: its number, the message or partition, and how."""

    rule: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.rule} {self.what}: {self.why}"


class Judge:
    """Judges one run."""

    def __init__(self, history: History, topics: Topics, rules: Rules) -> None:
        self.history = history
        self.topics = topics
        self.rules = rules
        self.records = {(r.topic, r.partition, r.offset): r for r in topics.source}
        self.copies: dict[Source, list[Rec]] = defaultdict(list)
        self.cleared: dict[tuple[Place, str], int] = {}
        for record in (*topics.retry, *topics.dead, *topics.aside):
            source = source_of(record, "txb-source")
            if source is not None:
                self.copies[source].append(record)
        for record in topics.aside:
            source = cleared_by(record)
            if source is not None:
                at = (source[:2], record.key or "")
                self.cleared[at] = max(self.cleared.get(at, -1), source[2])
        self.retry_topics = {record.topic for record in topics.retry}
        self.aside_topics = {record.topic for record in topics.aside}
        self.dead_topics = {record.topic for record in topics.dead}
        last = topics.stored[-1].offsets if topics.stored else {}
        self.positions = {place: position(*stored) for place, stored in last.items()}
        self.of: dict[Source, list[Try]] = defaultdict(list)
        self.by_place: dict[Place, list[Try]] = defaultdict(list)
        for each in history.tries:
            self.of[each.source].append(each)
            self.by_place[each.place].append(each)
        self.reached: dict[tuple[Place, int], int] = defaultdict(int)
        """The last offset that an owner, by its token, has begun."""
        for each in history.tries:
            if each.place == each.source[:2]:
                at = each.place, each.token
                self.reached[at] = max(self.reached[at], each.source[2])
        self.exhausted = self._find_exhausted()
        self._excused: set[Fault] = set()
        self.late: list[Try] = []
        """Effects of an owner that was replaced while it was stopped: the external system refuses
        their token."""

    def _find_exhausted(self) -> Mapping[tuple[Place, str | None], Mapping[int, int]]:
        """Return for a key which owners, by their tokens, have failed a message of it for the last
        time, and its offset."""
        failed: Counter[tuple[Source, int]] = Counter()
        found: dict[tuple[Place, str | None], dict[int, int]] = defaultdict(dict)
        for each in self.history.tries if self.rules.aside else ():
            if each.place == each.source[:2] and each.result == "error":
                failed[each.source, each.token] += 1
                if failed[each.source, each.token] >= ATTEMPTS_MAX:
                    found[each.place, each.key].setdefault(each.token, each.source[2])
        return found

    def judge(self) -> list[Violation]:
        """Return the broken rules."""
        found: dict[Violation, None] = {}
        for rule in (
            self._tokens,
            self._handover,
            self._all_accounted,
            self._order,
            self._overlaps,
            self._starvation,
            partial(late_begins, self.topics.source, self.history),
            self._repeats,
            self._copies_once,
            self._low_water,
        ):
            found.update(dict.fromkeys(rule()))
        return list(found)

    # --- I21: owners -------------------------------------------------------------------------

    def _tokens(self) -> Iterator[Violation]:
        """Tokens never decrease, but for an owner that was stopped within its handler."""
        for tries in self.by_place.values():
            newest: dict[int, float] = {}
            for each in tries:
                newest.setdefault(each.token, each.begin)
            higher = first_of_higher(newest)
            for each in tries:
                replaced = higher[each.token]
                if each.effect and each.end > replaced:
                    self.late.append(each)
                if each.begin > replaced:
                    if not self._resumed(each.instance, each.begin):
                        yield self._outdated(each, "begun", each.begin - replaced)
                elif (
                    each.effect
                    and each.end > replaced
                    and not self._stopped_within(each.instance, each.begin, each.end)
                ):
                    yield self._outdated(each, "done", each.end - replaced)
        yield from self._stored_tokens()

    def _outdated(self, each: Try, what: str, late_s: float) -> Violation:
        why = f"{what} with token {each.token} of {each.place} {late_s:.3f} s after a higher one"
        return Violation("I21", text(each.source), f"{why}: {each.instance}")

    def _stored_tokens(self) -> Iterator[Violation]:
        before: dict[Place, tuple[int, int]] = {}
        for stored in self.topics.stored:
            for place, (offset, metadata) in stored.offsets.items():
                now = (token_of(metadata), offset)
                for name, was, is_now in zip(
                    ("token", "offset"), before.get(place, now), now, strict=True
                ):
                    # At most once, messages that were not handed out are given back.
                    if is_now < was and not (name == "offset" and self.rules.at_most_once):
                        yield Violation(
                            "I21", f"{place[0]}-{place[1]}", f"stored {name} {is_now} after {was}"
                        )
                before[place] = now

    def _handover(self) -> Iterator[Violation]:
        """No owner begins before the one before has ended, unless that one was stopped."""
        for place, tries in self.by_place.items():
            first: dict[int, float] = {}
            for each in tries:
                first.setdefault(each.token, each.begin)
            higher = first_of_higher(first)
            for each in tries:
                if each.result in ("", "ok"):
                    continue  # without an end its process was killed; effects: see `_tokens`
                at = higher[each.token]
                if each.begin < at < each.end and not self._stopped_within(
                    each.instance, each.begin, each.end
                ):
                    yield Violation(
                        "I21", text(each.source), f"{each.instance} ended it with token "
                        f"{each.token} of {place} {each.end - at:.3f} s after a higher one"
                    )  # fmt: skip

    def _resumed(self, instance: str, at: float) -> bool:
        """Whether a process was stopped between its look at the lease and this call: one call only,
        as it has one thread."""
        for fault in self.history.faults:
            if (
                fault.instance == instance
                and fault.what == "stopped"
                and fault.end <= at <= fault.end + RESUMED_S
                and fault not in self._excused
            ):
                self._excused.add(fault)
                return True
        return False

    def _stopped_within(self, instance: str, begin: float, end: float) -> bool:
        return any(
            fault.instance == instance
            and fault.what == "stopped"
            and fault.begin <= end
            and fault.end + RESUMED_S >= begin
            for fault in self.history.faults
        )

    # --- I20: nothing is lost ----------------------------------------------------------------

    def _accepted(self, source: Source) -> list[Try]:
        late = self.late
        return [
            each
            for each in self.of.get(source, ())
            if each.effect and not any(each is other for other in late)
        ]

    def _all_accounted(self) -> Iterator[Violation]:
        lost = [source for source in self.records if not self._accounted(source)]
        if self.rules.at_most_once:
            if len(lost) > self.rules.lost_max:
                yield Violation(
                    "I20", "all", f"{len(lost)} messages lost, more than {self.rules.lost_max}"
                )
            return
        for source in lost:
            yield Violation("I20", text(source), f"neither done nor kept; {self._story(source)}")
        for source in self.of:
            if source not in self.records:
                yield Violation("I20", text(source), "handled, but not in its topic")

    def _accounted(self, source: Source) -> bool:
        if self.rules.at_most_once:
            return bool(self.of.get(source))
        if self._accepted(source):
            return True
        return any(self._keeps(source, copy) for copy in self.copies.get(source, ()))

    def _keeps(self, source: Source, copy: Rec) -> bool:
        """Whether a copy is dead, set aside or waiting."""
        if copy.topic in self.dead_topics:
            return True
        if copy.topic in self.aside_topics:
            key = "" if copy.key is None else copy.key
            return self.cleared.get((source[:2], key), -1) < source[2]
        return not self._is_done((copy.topic, copy.partition), copy.offset)

    def _is_done(self, place: Place, offset: int) -> bool:
        if place not in self.positions:
            return False
        return covers(self.positions[place], offset)

    def _story(self, source: Source) -> str:
        tries = [
            f"{t.instance}/{t.token} {t.begin:.3f} {t.result}" for t in self.of.get(source, ())
        ]
        copies = [f"{c.topic}-{c.partition}@{c.offset}" for c in self.copies.get(source, ())]
        return f"calls {tries[-6:]}, copies {copies}"

    # --- I19: order --------------------------------------------------------------------------

    def _lanes(self, source: Source) -> list[Lane]:
        """Return what keeps a message in order: its key, with order `partition` also its partition,
        unless the key was set aside: then others of the partition go first."""
        record = self.records.get(source)
        if self.rules.order == "none" or record is None:
            return []
        lanes: list[Lane] = [] if record.key is None else [(source[:2], f"key {record.key}")]
        if self.rules.order == "partition" and not self._is_aside(source, record.key):
            lanes.append((source[:2], "the partition"))
        return lanes

    def _is_aside(self, source: Source, key: str | None) -> bool:
        """Whether an owner has set a message aside, also if it ended before a copy was stored: it
        came to later ones of the partition, and a later owner handles the message."""
        if any(copy.topic in self.aside_topics for copy in self.copies.get(source, ())):
            return True
        done_by = min((each.token for each in self.of.get(source, ()) if each.effect), default=0)
        return any(
            offset <= source[2] < self.reached[source[:2], token] and token < done_by
            for token, offset in self.exhausted.get((source[:2], key), {}).items()
        )

    def _order(self) -> Iterator[Violation]:
        """The first effects of a lane are in offset order; so are all of one owner."""
        first: dict[Lane, list[tuple[float, Source]]] = defaultdict(list)
        of_owner: dict[tuple[Any, ...], list[Try]] = defaultdict(list)
        for source in self.records:
            effects = self._accepted(source)
            for lane in self._lanes(source) if effects else ():
                first[lane].append((min(each.end for each in effects), source))
                for each in effects:
                    of_owner[lane, each.place, each.token].append(each)
        for lane, ends in first.items():
            highest, last = -1, 0.0
            for at, source in sorted(ends):
                if source[2] < highest:
                    yield Violation(
                        "I19", text(source), f"done {at - last:.3f} s after {highest} of {lane[1]}"
                    )
                if source[2] > highest:
                    highest, last = source[2], at
        for (lane, _place, token), tries in of_owner.items():
            tries.sort(key=lambda each: each.end)
            for before, each in pairwise(tries):
                if each.source[2] <= before.source[2]:
                    yield Violation(
                        "I19", text(each.source), f"done by token {token} after "
                        f"{before.source[2]} of {lane[1]}"
                    )  # fmt: skip

    def _overlaps(self) -> Iterator[Violation]:
        """One owner handles one message of a lane at a time."""
        running: dict[tuple[Any, ...], Try] = {}
        for each in self.history.tries:
            for lane in self._lanes(each.source):
                at = (lane, each.place, each.token)
                before = running.get(at)
                if (
                    before is not None
                    and before.end > each.begin
                    and before.instance == each.instance
                    and before.result
                ):
                    yield Violation(
                        "I19", text(each.source), f"begun while {before.source[2]} was handled"
                    )
                running[at] = each

    def _starvation(self) -> Iterator[Violation]:
        """Others of the partition do not go first for ever."""
        if self.rules.at_most_once:
            return
        begins: dict[Place, list[float]] = defaultdict(list)
        for each in self.history.tries:
            begins[each.source[:2]].append(each.begin)
        progress: dict[Lane, float] = {}
        for source in sorted(self.records):
            tries = self.of.get(source)
            if not tries or self.copies.get(source):
                continue
            begin = tries[0].begin
            ready = begins[source[:2]][0]
            lanes = self._lanes(source)
            ready = max([ready, *(progress.get(lane, 0.0) for lane in lanes)])
            for lane in lanes:
                progress[lane] = max(ready, self._settled_at(source))
            # Only later messages count: earlier ones are due before it.
            others = [
                each
                for each in self._between(source[:2], ready, begin)
                if each.source[2] > source[2]
            ]
            if len(others) > STARVED_MESSAGES or (
                others and others[-1].begin - others[0].begin > STARVED_S
            ):
                yield Violation(
                    "I19", text(source), f"waited for {len(others)} later messages of its partition"
                )

    def _between(self, place: Place, begin: float, end: float) -> list[Try]:
        tries = self.by_place.get(place, [])
        low = bisect_left(tries, begin, key=lambda each: each.begin)
        high = bisect_left(tries, end, key=lambda each: each.begin)
        return tries[low:high]

    def _settled_at(self, source: Source) -> float:
        return max((each.end for each in self.of[source] if each.result), default=0.0)

    # --- I22: repeats ------------------------------------------------------------------------

    def _repeats(self) -> Iterator[Violation]:
        """At most once: no second call. At least once: an effect is repeated only if a fault
        came before its commit, or it did not fit into the metadata."""
        unexplained = []
        for source, tries in self.of.items():
            if self.rules.at_most_once:
                if len(tries) > 1:
                    yield Violation(
                        "I22", text(source), f"{len(tries)} calls; {self._story(source)}"
                    )
                continue
            for effect in self._accepted(source):
                later = [
                    each
                    for each in tries
                    if each.begin >= effect.end
                    and not (each.place == effect.place and each.token < effect.token)
                ]
                if later and not self._disturbed(effect):
                    unexplained.append((source, effect, later[0]))
        for source, effect, repeat in unexplained[self.history.overflow :]:
            yield Violation(
                "I22", text(source), f"done by {effect.instance} with token {effect.token}, and "
                f"called again {repeat.begin - effect.end:.3f} s later by {repeat.instance} with "
                f"token {repeat.token}"
            )  # fmt: skip

    def _disturbed(self, effect: Try) -> bool:
        """Whether a fault could keep the effect from being committed: one of the brokers, of its
        instance, or of another one that leads the group. No member commits while a generation
        waits for the assignments of its leader."""
        until = effect.end + self.rules.commit_s
        stalled = self._no_member_commits(effect.end + COMMITTED_S, until)
        return any(
            fault.begin <= until and fault.end + LEADER_S * others >= effect.end - RESUMED_S
            for fault in self.history.faults
            for others in [fault.instance not in ("", effect.instance)]
            if not others or stalled
        )

    def _no_member_commits(self, begin: float, end: float) -> bool:
        seen = [each.offsets for each in self.topics.stored if begin <= each.at <= end]
        return len(seen) > 1 and all(offsets == seen[0] for offsets in seen)

    # --- I23: copies -------------------------------------------------------------------------

    def _copies_once(self) -> Iterator[Violation]:
        for source, copies in self.copies.items():
            if source not in self.records:
                yield Violation("I23", text(source), "copied, but not in its topic")
                continue
            counts = Counter((copy.topic, header(copy, "txb-attempt")) for copy in copies)
            for (topic, attempt), count in counts.items():
                if count > 1:
                    yield Violation(
                        "I23", text(source), f"{count} copies in {topic} after attempt {attempt}"
                    )
            dead = sum(copy.topic in self.dead_topics for copy in copies)
            aside = sum(copy.topic in self.aside_topics for copy in copies)
            for name, count in (("dead-letter", dead), ("aside", aside)):
                if count > 1:
                    yield Violation("I23", text(source), f"{count} copies in the {name} topic")
            for copy in copies:
                if copy.key != self.records[source].key or copy.value != self.records[source].value:
                    yield Violation("I23", text(source), "its copy has another key or value")
        yield from self._aside_order()

    def _aside_order(self) -> Iterator[Violation]:
        last: dict[tuple[Place, str | None], int] = {}
        for record in sorted(self.topics.aside, key=lambda each: (each.partition, each.offset)):
            source = source_of(record, "txb-source")
            if source is None or record.key is None:
                continue
            at = (source[:2], record.key)
            if source[2] < last.get(at, -1):
                yield Violation("I23", text(source), f"set aside after {last[at]} of its key")
            last[at] = source[2]

    # --- I20: the low-water mark -------------------------------------------------------------

    def _low_water(self) -> Iterator[Violation]:
        """A stored position covers no message that is not done or copied."""
        if self.rules.at_most_once:
            return
        known: set[tuple[Place, int]] = set()
        places: dict[Place, list[tuple[int, Source]]] = defaultdict(list)
        for source in self.records:
            places[source[:2]].append((source[2], source))
        for record in self.topics.retry:
            origin = source_of(record, "txb-source")
            if origin is not None:
                places[record.topic, record.partition].append((record.offset, origin))
        for stored in self.topics.stored:
            for place, found in stored.offsets.items():
                covered = position(*found)
                for offset, source in places.get(place, ()):
                    if (place, offset) in known or not covers(covered, offset):
                        continue
                    known.add((place, offset))
                    if not self._finished_before(stored.at, source, place, offset):
                        yield Violation(
                            "I20", text(source), f"the stored position of {place[0]}-{place[1]} "
                            f"covers {offset} at {stored.at:.3f}; {self._story(source)}"
                        )  # fmt: skip

    def _finished_before(self, at: float, source: Source, place: Place, offset: int) -> bool:
        if any(each.effect and each.end <= at for each in self.of.get(source, ())):
            return True
        return any(
            (copy.topic, copy.partition, copy.offset) != (*place, offset)
            for copy in self.copies.get(source, ())
        )


# --- I19: fairness -----------------------------------------------------------------------------


def late_begins(records: Sequence[Rec], history: History) -> Iterator[Violation]:
    """A message that names the time `at` which it was produced waits for the earlier ones of its
    partition, and for one round of the others, unless a fault comes between."""
    first: dict[Source, float] = {}
    begins: dict[Place, list[float]] = defaultdict(list)
    for each in history.tries:
        first.setdefault(each.source, each.begin)
        begins[each.place].append(each.begin)
    earlier: dict[Place, list[float]] = defaultdict(list)
    for record in sorted(records, key=lambda each: each.offset):
        place, at = (record.topic, record.partition), instructions(record).get("at")
        begin = first.get((*place, record.offset))
        if begin is None:
            continue
        if at is not None and begin > at + FAIR_S:
            arrived, calls = at + FETCHED_S, begins[place]
            count = bisect_left(calls, begin) - bisect_left(calls, arrived)
            due = sum(arrived <= each <= begin for each in earlier[place])
            broken = any(fault.begin <= begin and fault.end >= at for fault in history.faults)
            if count > ROUNDS * due + ROUND and not broken:
                why = f"begun after {count} calls of its partition in {begin - at:.1f} s, {due} due"
                yield Violation("I19", text((*place, record.offset)), why)
        earlier[place].append(begin)


# --- formats -----------------------------------------------------------------------------------

Position = tuple[int, list[tuple[int, int]]]


def position(offset: int, metadata: str) -> Position:
    """Return the low-water mark and the done ranges above it.

    Raises:
        ValueError: the metadata are not those of consumers.
    """
    if not metadata:
        return offset, []
    name, _token, _topic, _aside, encoded, *_later = metadata.split(":")
    if name not in ("txb1", "txb2"):
        raise ValueError(metadata)
    data = base64.urlsafe_b64decode(encoded)
    if data and name == "txb2":
        data = zlib.decompress(data)
    return offset, _ranges(offset, _numbers(data))


def later_position(offset: int, metadata: str) -> Position | None:
    """Return the low-water mark and the done ranges of later stages; None if they are the same."""
    parts = metadata.split(":")
    if len(parts) < 6 or not parts[5]:  # what follows are starts without progress
        return None
    data = base64.urlsafe_b64decode(parts[5])
    length = next(at for at, byte in enumerate(data, 1) if byte < 128)
    (before,), rest = _numbers(data[:length]), data[length:]
    if rest and parts[0] == "txb2":
        rest = zlib.decompress(rest)
    return offset - before, _ranges(offset - before, _numbers(rest))


def _numbers(data: bytes) -> list[int]:
    numbers, number, shift = [], 0, 0
    for byte in data:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(number)
            number = shift = 0
    return numbers


def _ranges(at: int, numbers: Sequence[int]) -> list[tuple[int, int]]:
    ranges = []
    for gap, length in zip(numbers[::2], numbers[1::2], strict=True):
        ranges.append((at + gap, at + gap + length))
        at += gap + length
    return ranges


def covers(found: Position, offset: int) -> bool:
    """Whether an offset is done by this position."""
    low, ranges = found
    return offset < low or any(first <= offset < end for first, end in ranges)


def first_of_higher(first: Mapping[int, float]) -> dict[int, float]:
    """Return for each token the first time of a higher one, from the first time of each."""
    found: dict[int, float] = {}
    earliest = float("inf")
    for token in sorted(first, reverse=True):
        found[token] = earliest
        earliest = min(earliest, first[token])
    return found


def token_of(metadata: str) -> int:
    """Return the token in the metadata of an offset, -1 without."""
    return int(metadata.split(":")[1]) if metadata else -1


def instructions(record: Rec) -> dict[str, Any]:
    """Return what a message asks of its handler, {} if it is none of a fleet."""
    found = json.loads(record.value) if record.value.startswith("{") else {}
    return dict(found)


def header(record: Rec, name: str) -> str | None:
    """Return the first header of this name."""
    return next((value for found, value in record.headers if found == name), None)


def source_of(record: Rec, name: str) -> Source | None:
    """Return the message that a header names; only the first header may."""
    if not record.headers or record.headers[0][0] != name:
        return None
    place, _, offset = record.headers[0][1].rpartition("@")
    topic, _, partition = place.rpartition("/")
    return topic, int(partition), int(offset)


def cleared_by(record: Rec) -> Source | None:
    """Return the last message of a key that a record of the aside topic clears; the number of
    copies is 0 where a released one failed again."""
    return source_of(record, "txb-cleared") if record.value != "0" else None


def text(source: Source) -> str:
    """Return the name of a message."""
    return f"{source[0]}-{source[1]}@{source[2]}"
