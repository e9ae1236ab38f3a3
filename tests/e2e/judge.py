"""An independent judge of txbroker: from what clients did, what the topics hold and what the
business database holds, it says which invariants are broken.

It shares no code with txbroker: formats and rules are told here a second time, from the
documentation, so that one mistake is not made twice.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Header = tuple[str, bytes | None]
_IDS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_DECIDING = ("commit", "rollback")


# --- what is judged --------------------------------------------------------------------------


@dataclass(frozen=True)
class Rec:
    """A record as a consumer reads it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]

    def header(self, name: str) -> str | None:
        """The first header of a name, as text."""
        for found, value in self.headers:
            if found == name:
                return None if value is None else value.decode()
        return None


@dataclass
class Topics:
    """All records: half and op at read_uncommitted, the others at read_committed."""

    half: list[Rec] = field(default_factory=list)
    op: list[Rec] = field(default_factory=list)
    parked: list[Rec] = field(default_factory=list)
    targets: list[Rec] = field(default_factory=list)


@dataclass(frozen=True)
class Body:
    """A message as a client sent it."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    timestamp_ms: int | None = None


@dataclass
class Call:
    """One call of a client: `result` is invoke (never answered), ok, fail or unknown."""

    what: str
    token: str
    began: float
    id: str = ""
    ended: float = 0.0
    result: str = "invoke"
    code: str = ""
    decision: str = ""
    state: str = ""


@dataclass(frozen=True)
class Asked:
    """A check-back that a client got, and its answer."""

    id: str
    at: float
    answer: str


@dataclass
class History:
    """What clients did. A token names what one client meant; the header `token` of its messages
    carries it. `business`: tokens whose local transaction writes a row with the id."""

    sent: dict[str, tuple[Body, ...]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    business: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Violation:
    """A broken invariant, with the story of the transaction."""

    invariant: str
    id: str
    why: str
    story: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.id}: {self.why}\n{self.story}"


# --- the log, read a second way --------------------------------------------------------------


@dataclass
class Placed:
    """A message with its target partition, as half or op hold it."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    timestamp_ms: int | None


@dataclass
class Tx:
    """A transaction as the log tells it."""

    id: str
    group: str
    partition: int
    offset: int
    prepared_ms: int
    messages: list[Placed]
    after_ms: float
    interval_ms: float
    attempts_max: int
    timeout_ms: float
    order: str | None
    state: str = "pending"
    decision: str = ""
    source: str = ""
    decided_ms: int = 0
    op_offset: int = -1
    round: int = 1
    round_ms: int = 0
    number: int = 0
    counted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    last_check_ms: int = 0
    last_counts: bool = False
    not_before_ms: float = 0
    early: int = 0
    log: list[str] = field(default_factory=list)

    @property
    def token(self) -> str:
        """What its client called it."""
        for name, value in self.messages[0].headers:
            if name == "token":
                return (value or b"").decode()
        return ""

    @property
    def order_name(self) -> tuple[Any, ...] | None:
        """What its order is kept by; None: there is no order to keep."""
        first = self.messages[0]
        if self.order is not None:
            return ("order", self.order)
        return None if first.key is None else ("key", first.topic, first.key)

    def due_ms(self) -> float:
        """From when on the next attempt may be made."""
        if self.not_before_ms:
            return self.not_before_ms
        if self.counted:
            return self.counted[-1] + self.interval_ms
        return self.round_ms + self.after_ms


def id_time_ms(id: str) -> int:
    """The milliseconds in a transaction id."""
    number = 0
    for letter in id:
        number = number << 5 | _IDS.index(letter)
    return number >> 64 & ((1 << 48) - 1)


def _half_part(record: Rec) -> tuple[dict[str, str], Placed]:
    """Take a half record apart: our headers, then the message."""
    ours = 6 + len((record.headers[0][1] or b"").decode().split(" ")) - 1
    facts = {name: (value or b"").decode() for name, value in record.headers[:ours]}
    stamp = facts.get("txb-ts")
    message = Placed(
        facts["txb-topic"],
        int(facts["txb-part"]),
        record.key,
        record.value,
        record.headers[ours:],
        None if stamp is None else int(stamp),
    )
    return facts, message


def read_log(topics: Topics, dedup_window_ms: int = 120_000) -> dict[str, Tx]:
    """Every transaction of the half topic, and what the operation topic makes of it."""
    found: dict[str, Tx] = {}
    for partition, records in _by_partition(topics.half):
        clock = 0
        building: Tx | None = None
        for record in records:
            clock = max(clock, record.timestamp_ms)
            facts, message = _half_part(record)
            sequence, count = (int(part) for part in facts["txb-seq"].split("/"))
            if sequence == 0:
                building = _new_tx(partition, record.offset, clock, facts)
            if building is None or building.id != facts["txb-id"]:
                continue
            building.messages.append(message)
            late = abs(clock - id_time_ms(building.id)) > dedup_window_ms
            if len(building.messages) == count and building.id not in found and not late:
                found[building.id] = building
    for _, records in _by_partition(topics.op):
        _apply_markers(records, found)
    return found


def _new_tx(partition: int, offset: int, clock: int, facts: dict[str, str]) -> Tx:
    after, interval, attempts, timeout = facts["txb-check"].split("/")
    return Tx(
        id=facts["txb-id"],
        group=facts["txb-group"],
        partition=partition,
        offset=offset,
        prepared_ms=clock,
        messages=[],
        after_ms=float(after) * 1000,
        interval_ms=float(interval) * 1000,
        attempts_max=int(attempts),
        timeout_ms=float(timeout) * 1000,
        order=facts.get("txb-order"),
        round_ms=clock,
    )


def _apply_markers(records: Sequence[Rec], found: dict[str, Tx]) -> None:
    clock = 0
    place = 0
    while place < len(records):
        record = records[place]
        place += 1
        clock = max(clock, record.timestamp_ms)
        if record.headers and record.headers[0][0] == "txb-v":
            continue
        marker = json.loads(record.value or b"{}")
        contents = [_half_part(each)[1] for each in records[place:][: marker.get("contents", 0)]]
        tx = found.get(marker["id"])
        if tx is not None:
            tx.log.append(f"op {record.offset} at {record.timestamp_ms}: {record.value!r}")
            _apply_marker(tx, marker, record.offset, clock, contents)


def _apply_marker(
    tx: Tx, marker: dict[str, Any], offset: int, clock: int, contents: list[Placed]
) -> None:
    kind = marker["kind"]
    if kind in _DECIDING:
        mine = marker.get("group", "") in ("", tx.group)
        if mine and tx.state in ("pending", "parked"):
            tx.decision, tx.op_offset, tx.decided_ms = kind, offset, clock
            tx.source = marker.get("source", "producer")
            tx.state = "committed" if kind == "commit" else "rolled_back"
            tx.messages = contents or tx.messages
    elif kind == "check":
        _apply_check(tx, marker, clock)
    elif kind in ("returned", "later"):
        named = (marker.get("round", 0), marker.get("number", 0))
        if tx.state == "pending" and named == (tx.round, tx.number) and tx.last_counts:
            tx.counted.pop()
            tx.last_counts = False
            if kind == "later":
                tx.not_before_ms = clock + max(1.0, min(marker["later_s"], 3600.0)) * 1000
    elif kind == "park":
        full = len(tx.counted) >= tx.attempts_max
        over = full and clock >= tx.counted[-1] + tx.timeout_ms
        if tx.state == "pending" and marker.get("round") == tx.round and over:
            tx.state = "parked"
    elif kind == "revive" and tx.state == "parked" and marker.get("round") == tx.round:
        tx.state, tx.round, tx.round_ms = "pending", tx.round + 1, clock
        tx.number, tx.counted, tx.last_check_ms, tx.not_before_ms = 0, [], 0, 0


def _apply_check(tx: Tx, marker: dict[str, Any], clock: int) -> None:
    follows = (marker.get("round"), marker.get("number")) == (tx.round, tx.number + 1)
    if tx.state != "pending" or not follows or len(tx.counted) >= tx.attempts_max:
        return
    if marker["reason"] == "asked":
        last = len(tx.counted) + 1 >= tx.attempts_max
        in_time = not last and clock >= tx.last_check_ms + 1000
    else:
        in_time = clock >= tx.due_ms()
    if not in_time:
        tx.early += 1
        return
    tx.number += 1
    tx.counted.append(clock)
    tx.accepted.append(clock)
    tx.last_check_ms, tx.last_counts, tx.not_before_ms = clock, True, 0


def _by_partition(records: Sequence[Rec]) -> Iterator[tuple[int, list[Rec]]]:
    parts: dict[int, list[Rec]] = defaultdict(list)
    for record in records:
        parts[record.partition].append(record)
    for partition in sorted(parts):
        yield partition, sorted(parts[partition], key=lambda record: record.offset)


# --- the judgement ---------------------------------------------------------------------------


class Judge:
    """Judges one run.

    Args:
        rows: the ids with a business row.
        states: what the proxy says of transactions in the end, by id; compared where given.
        settled: whether everything must be settled, parked or refused by now.
        clock_apart_ms: how far the clocks of clients and brokers may be apart.
    """

    def __init__(
        self,
        history: History,
        topics: Topics,
        rows: Sequence[str] = (),
        states: dict[str, str] | None = None,
        *,
        settled: bool = True,
        clock_apart_ms: float = 50.0,
    ) -> None:
        self.history = history
        self.topics = topics
        self.rows = Counter(rows)
        self.states = states or {}
        self.settled = settled
        self.clock_apart_ms = clock_apart_ms
        self.log = read_log(topics)
        self.visible: dict[str, list[Rec]] = defaultdict(list)
        self.kept = self._kept()
        self.found: list[Violation] = []
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.asked: dict[str, list[Asked]] = defaultdict(list)
        by_token = {tx.token: tx.id for tx in self.log.values()}
        for call in history.calls:
            self.calls[call.id or by_token.get(call.token, "")].append(call)
        for asked in history.asked:
            self.asked[asked.id].append(asked)

    def judge(self) -> list[Violation]:
        """Return every violation."""
        for record in self.topics.targets:
            self.visible[record.header("txb-id") or ""].append(record)
        for id, records in self.visible.items():
            self._was_committed(id, records)
            self._once(id, records)
        for tx in self.log.values():
            self._contents(tx)
            self._whole_and_settled(tx)
            self._business(tx)
            self._not_guessed(tx)
            self._attempts(tx)
        for id, calls in self.calls.items():
            self._answers(id, calls)
        for id in self.rows:
            if id not in self.log:
                self._violated("I6", id, "a business row, but no half message")
        self._order()
        return self.found

    def _violated(self, invariant: str, id: str, why: str) -> None:
        self.found.append(Violation(invariant, id, why, self.story(id)))

    def story(self, id: str) -> str:
        """All that is known of a transaction, line by line."""
        lines = [str(call) for call in self.calls.get(id, ())]
        lines += [str(asked) for asked in self.asked.get(id, ())]
        tx = self.log.get(id)
        if tx is not None:
            lines.append(f"half {tx.partition}:{tx.offset} at {tx.prepared_ms}, {tx.state}")
            lines += tx.log
        lines += [
            f"visible in {record.topic}-{record.partition} at {record.offset}"
            for record in self.visible.get(id, ())
        ]
        lines.append(f"business rows: {self.rows[id]}")
        return "\n".join(f"    {line}" for line in lines)

    def _kept(self) -> dict[str, dict[int, Rec]]:
        """The copies in the parked topic: the newest record of each key, tombstones left out."""
        kept: dict[str, dict[int, Rec]] = defaultdict(dict)
        for _, records in _by_partition(self.topics.parked):
            for record in records:
                id, _, sequence = (record.key or b"").decode().partition("/")
                kept[id].pop(int(sequence), None)
                if record.value is not None:
                    kept[id][int(sequence)] = record
        return {id: parts for id, parts in kept.items() if parts}

    def _kept_state(self, tx: Tx) -> str:
        """The state of a whole copy in the parked topic, "" where there is none."""
        parts = self.kept.get(tx.id, {})
        if sorted(parts) != list(range(len(tx.messages))):
            return ""
        return str(json.loads(parts[0].header("txb-kept") or "{}").get("state", ""))

    def unsettled(self) -> dict[str, str]:
        """What the topics hold that is not settled: the state of each such transaction by id."""
        visible = {record.header("txb-id") for record in self.topics.targets}
        left = {id: tx.state for id, tx in self.log.items() if tx.state in ("pending", "parked")}
        for id, tx in self.log.items():
            if tx.decision == "commit" and id not in visible:
                left[id] = "refused" if self._kept_state(tx) == "refused" else "committed"
        return left

    # --- I1, I2, I3, I4, I10, I12 --------------------------------------------------------

    def _was_committed(self, id: str, records: list[Rec]) -> None:
        tx = self.log.get(id)
        if tx is None:
            self._violated("I2", id, f"visible and never prepared: {records[0]}")
        elif tx.decision != "commit":
            self._violated("I2", id, f"visible, and its decision is {tx.decision or 'none'}")

    def _once(self, id: str, records: list[Rec]) -> None:
        places = Counter((r.topic, r.header("txb-seq") or "0/1") for r in records)
        for place, count in places.items():
            if count > 1:
                self._violated("I3", id, f"{count} copies of {place}")

    def _contents(self, tx: Tx) -> None:
        for record in self.visible.get(tx.id, ()):
            sequence = int((record.header("txb-seq") or "0/1").partition("/")[0])
            if sequence >= len(tx.messages):
                self._violated("I4", tx.id, f"message {sequence} was never sent")
                continue
            message = tx.messages[sequence]
            ours = 2 if len(tx.messages) > 1 else 1
            stamp = tx.decided_ms if message.timestamp_ms is None else message.timestamp_ms
            seen = (record.topic, record.partition, record.key, record.value, record.headers[ours:])
            meant = (message.topic, message.partition, message.key, message.value, message.headers)
            if seen != meant or record.timestamp_ms != stamp:
                self._violated("I4", tx.id, f"{record} is not {message}, timestamp {stamp}")
        sent = self.history.sent.get(tx.token)
        if sent is not None and tx.decision == "commit":
            stored = [(m.topic, m.key, m.value, m.headers, m.timestamp_ms) for m in tx.messages]
            meant_all = [(m.topic, m.key, m.value, m.headers, m.timestamp_ms) for m in sent]
            if stored != meant_all:
                self._violated("I4", tx.id, f"stored {stored}, sent {meant_all}")

    def _whole_and_settled(self, tx: Tx) -> None:
        seen = {r.header("txb-seq") or "0/1" for r in self.visible.get(tx.id, ())}
        refused = tx.decision == "commit" and self._kept_state(tx) == "refused"
        if seen and len(seen) != len(tx.messages):
            self._violated("I10", tx.id, f"{len(seen)} of {len(tx.messages)} messages are visible")
        if seen and refused:
            self._violated("I10", tx.id, "visible and refused")
        if tx.decision == "commit" and not seen and not refused and self.settled:
            self._violated("I1", tx.id, "committed, neither visible nor kept as refused")
        if tx.state == "pending" and self.settled:
            self._violated("I12", tx.id, "still undecided")
        if tx.state == "parked" and self._kept_state(tx) != "parked":
            self._violated("I7", tx.id, "parked, but not kept whole")
        said = self.states.get(tx.id)
        fits = {"committed": ("promoted", "refused")}.get(tx.state, (tx.state,))
        if said is not None and said not in fits:
            self._violated("I5", tx.id, f"the proxy says {said}, the log {tx.state}")

    # --- I5, I6, I7 ----------------------------------------------------------------------

    def _answers(self, id: str, calls: list[Call]) -> None:
        tx = self.log.get(id)
        for call in calls:
            if call.result == "ok" and tx is None:
                self._violated("I1", id, f"acked, but not in the log: {call}")
            elif tx is not None and call.result == "ok" and call.what in _DECIDING:
                if tx.decision != call.what:
                    self._violated("I5", id, f"{call.what} acked, the log says {tx.decision}")
            elif tx is not None and call.code == "already_decided":
                if call.decision not in ("", tx.decision) or call.what == tx.decision:
                    self._violated("I5", id, f"answered {call}, the log says {tx.decision}")
            elif call.what == "prepare" and call.result == "ok" and tx and call.token != tx.token:
                self._violated("I3", id, f"{call.token} and {tx.token} have one id")

    def _business(self, tx: Tx) -> None:
        if tx.token not in self.history.business or tx.state in ("pending", "parked"):
            return
        rows = self.rows[tx.id]
        if rows > 1:
            self._violated("I6", tx.id, f"{rows} business rows")
        if bool(rows) != (tx.decision == "commit"):
            self._violated("I6", tx.id, f"{rows} business rows, but {tx.decision}")

    def _not_guessed(self, tx: Tx) -> None:
        if not tx.decision or tx.source == "operator":
            return
        calls = self.calls.get(tx.id, ())
        meant = {call.what for call in calls} | {a.answer for a in self.asked.get(tx.id, ())}
        prepared = any(call.what == "prepare" and call.result == "ok" for call in calls)
        never_ran = tx.decision == "rollback" and not prepared
        if tx.source == "schedule" or (tx.decision not in meant and not never_ran):
            self._violated("I7", tx.id, f"nobody said {tx.decision} (source {tx.source})")

    # --- I8, I9 --------------------------------------------------------------------------

    def _attempts(self, tx: Tx) -> None:
        asked = sorted(self.asked.get(tx.id, ()), key=lambda each: each.at)
        for place, each in enumerate(asked):
            made = [at for at in tx.accepted if at <= each.at * 1000 + self.clock_apart_ms]
            if len(made) <= place:
                invariant = "I9" if tx.early else "I8"
                self._violated(invariant, tx.id, f"call {place + 1} without an accepted attempt")
                return

    # --- I17 -----------------------------------------------------------------------------

    def _order(self) -> None:
        groups: dict[tuple[Any, ...], list[Tx]] = defaultdict(list)
        for tx in self.log.values():
            if tx.decision == "commit" and tx.order_name is not None:
                groups[tx.order_name].append(tx)
        for name, members in groups.items():
            if len({tx.partition for tx in members}) > 1:
                self._violated("I17", members[0].id, f"{name} lives in several half partitions")
            self._order_of_one_key(name, sorted(members, key=lambda tx: tx.op_offset))

    def _order_of_one_key(self, name: tuple[Any, ...], members: list[Tx]) -> None:
        last: dict[tuple[str, int], tuple[int, str]] = {}
        newest_sent = 0.0
        for tx in members:
            sent, acked = self._commit_times(tx)
            if 0 < acked < newest_sent:
                self._violated("I17", tx.id, f"{name}: acked before an earlier decision was sent")
            newest_sent = max(newest_sent, sent)
            for record in sorted(self.visible.get(tx.id, ()), key=lambda r: r.offset):
                place = (record.topic, record.partition)
                before = last.get(place)
                if before is not None and before[1] != tx.id and before[0] > record.offset:
                    self._violated("I17", tx.id, f"{name}: visible before {before[1]} in {place}")
                last[place] = (record.offset, tx.id)

    def _commit_times(self, tx: Tx) -> tuple[float, float]:
        """When a producer first sent its commit, and when one was first acknowledged; 0: never."""
        commits = [call for call in self.calls.get(tx.id, ()) if call.what == "commit"]
        sent = min((call.began for call in commits), default=0.0)
        acked = min((call.ended for call in commits if call.result == "ok"), default=0.0)
        return (sent if tx.source == "producer" else 0.0), acked
