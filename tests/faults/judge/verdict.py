"""The invariants that a run broke."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .log import DECIDING, Attempt, Tx, read_log
from .records import (
    Asked,
    Body,
    Call,
    Copies,
    Fault,
    History,
    Rec,
    Seen,
    Topics,
    by_partition,
    read_copies,
)
from .story import Facts, timeline

_ANSWERS = {
    "committed": ("committed", "promoted", "refused"),
    "rolled_back": ("rolled_back",),
    "parked": ("parked",),
    "pending": ("pending",),
}


@dataclass(frozen=True)
class Violation:
    """A broken invariant, with the timeline of the transaction."""

    invariant: str
    id: str
    why: str
    story: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.id}: {self.why}\n{self.story}"


class Judge:
    """Judges one run.

    Args:
        rows: the ids with a business row.
        states: the proxy's states of transactions after the run, by id; compared if given.
        settled: whether everything must be settled, parked or refused.
        clock_apart_ms: maximum difference between clocks of clients and brokers.
        settle_max_s: maximum time from the note `healed` to the note `quiet`.
        without_leader: the target partitions, as `topic-0`, without a leader after the run.
        dedup_window_ms: the proxy's setting.
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
        settle_max_s: float = 120.0,
        without_leader: Sequence[str] = (),
        dedup_window_ms: int = 120_000,
    ) -> None:
        self.history = history
        self.topics = topics
        self.rows = Counter(rows)
        self.states = states or {}
        self.settled = settled
        self.clock_apart_ms = clock_apart_ms
        self.settle_max_s = settle_max_s
        self.without_leader = frozenset(without_leader)
        self.log = read_log(topics, dedup_window_ms)
        self.copies = read_copies(topics.parked)
        self.visible: dict[str, list[Rec]] = defaultdict(list)
        for record in topics.targets:
            self.visible[record.tx_id].append(record)
        self.seen: dict[str, list[Seen]] = defaultdict(list)
        for seen in topics.along or ():
            self.seen[seen.record.tx_id].append(seen)
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.asked: dict[str, list[Asked]] = defaultdict(list)
        self.of_token: dict[str, list[Tx]] = defaultdict(list)
        for tx in self.log.values():
            self.of_token[tx.token].append(tx)
        for call in history.calls:
            meant = self.of_token.get(call.token, ()) if call.token else ()
            self.calls[call.id or (meant[-1].id if meant else "")].append(call)
        for asked in history.asked:
            self.asked[asked.id].append(asked)

    def judge(self) -> list[Violation]:
        return [
            Violation(invariant, id, why, self.story(id))
            for invariant, id, why in dict.fromkeys(self._faults())
        ]

    def _faults(self) -> Iterator[Fault]:
        rules = (
            self._contents,
            self._whole,
            self._at_rest,
            self._final_state,
            self._business,
            self._not_guessed,
            self._attempts,
        )
        for id, records in self.visible.items():
            yield from self._was_committed(id, records)
            yield from self._once(id, records)
        for tx in self.log.values():
            for rule in rules:
                yield from rule(tx)
        for id, calls in self.calls.items():
            yield from self._answers(id, calls)
        for id in self.rows:
            if id not in self.log:
                yield "I6", id, "a business row, but no half message"
        yield from self._tokens()
        yield from self._order()
        yield from self._readers()
        yield from self._checkpoints()
        yield from self._rest()

    def story(self, id: str) -> str:
        tx = self.log.get(id)
        partition = None if tx is None else tx.partition
        ours = f"{id}/".encode()
        facts = Facts(
            tx,
            self.calls.get(id, ()),
            self.asked.get(id, ()),
            self.visible.get(id, ()),
            self.seen.get(id, ()),
            [r for r in self.topics.parked if (r.key or b"").startswith(ours)],
            [r for r in self.topics.checkpoint if r.partition == partition],
            self.history.notes,
            self.rows[id],
        )
        return timeline(facts)

    def kept_state(self, tx: Tx) -> str:
        """Return the state of a complete copy in the parked topic, "" without one."""
        facts = self.copies.get(tx.id, Copies()).facts(len(tx.messages))
        return str(facts.get("state", ""))

    def unsettled(self) -> dict[str, str]:
        """Return the state of each unsettled transaction by id."""
        left = {id: tx.state for id, tx in self.log.items() if tx.state in ("pending", "parked")}
        for id, tx in self.log.items():
            if tx.decision == "commit" and id not in self.visible:
                left[id] = "refused" if self.kept_state(tx) == "refused" else "committed"
        return left

    # --- I1, I2, I3, I4, I10, I12, I15 ---------------------------------------------------

    def _was_committed(self, id: str, records: list[Rec]) -> Iterator[Fault]:
        tx = self.log.get(id)
        if tx is None:
            yield "I2", id, f"visible, but never prepared: {records[0]}"
        elif tx.decision != "commit":
            yield "I2", id, f"visible, but its decision is {tx.decision or 'none'}"

    def _once(self, id: str, records: list[Rec]) -> Iterator[Fault]:
        places = Counter((r.topic, r.header("txb-seq") or "0/1") for r in records)
        for place, count in places.items():
            if count > 1:
                yield "I3", id, f"{count} copies of {place}"

    def _tokens(self) -> Iterator[Fault]:
        """A repeated prepare is one transaction: one token, at most one commit."""
        for token, transactions in self.of_token.items():
            committed = [tx for tx in transactions if tx.decision == "commit"]
            if token and len(committed) > 1:
                ids = ", ".join(tx.id for tx in committed)
                yield "I3", committed[-1].id, f"{token} was committed under {ids}"

    def _contents(self, tx: Tx) -> Iterator[Fault]:
        if tx.decision != "commit":
            return
        for record in self.visible.get(tx.id, ()):
            sequence = int((record.header("txb-seq") or "0/1").partition("/")[0])
            if sequence >= len(tx.messages):
                yield "I4", tx.id, f"message {sequence} was never sent"
                continue
            message = tx.messages[sequence]
            ours = 2 if len(tx.messages) > 1 else 1
            # An installation with another prefix has one more header first.
            ours += record.headers[0][0] == "txb-installation"
            stamp = tx.decided_ms if message.timestamp_ms is None else message.timestamp_ms
            expected = Rec(
                message.topic,
                message.partition,
                record.offset,
                stamp,
                message.key,
                message.value,
                (*record.headers[:ours], *message.headers),
            )
            if record != expected:
                yield "I4", tx.id, f"{record} should be {message}, timestamp {stamp}"
        sent = self.history.sent.get(tx.token)
        if sent is None:
            return
        stored = [Body(m.topic, m.key, m.value, m.headers, m.timestamp_ms) for m in tx.messages]
        commits = (call for call in self.calls.get(tx.id, ()) if call.what == "commit")
        replacing = (*commits, *self.asked.get(tx.id, ()))
        offers = [list(sent), *(list(other.messages) for other in replacing if other.messages)]
        if stored not in offers:
            yield "I4", tx.id, f"stored {stored}, sent {offers}"

    def _whole(self, tx: Tx) -> Iterator[Fault]:
        seen = {r.header("txb-seq") or "0/1" for r in self.visible.get(tx.id, ())}
        refused = tx.decision == "commit" and self.kept_state(tx) == "refused"
        if seen and len(seen) < len(tx.messages):
            yield "I10", tx.id, f"{len(seen)} of {len(tx.messages)} messages are visible"
        if seen and refused:
            yield "I10", tx.id, "visible, but refused"
        if refused and not self.copies[tx.id].facts(len(tx.messages)).get("cause"):
            yield "I1", tx.id, "refused without a cause"
        if tx.state == "parked" and self.kept_state(tx) != "parked":
            yield "I7", tx.id, "parked, but without a complete copy"

    def _at_rest(self, tx: Tx) -> Iterator[Fault]:
        if not self.settled:
            return
        places = {f"{message.topic}-{message.partition}" for message in tx.messages}
        settled = tx.id in self.visible or self.kept_state(tx) == "refused"
        if tx.decision == "commit" and not settled and not places & self.without_leader:
            yield "I1", tx.id, "committed, but neither visible nor refused"
        if tx.state == "pending":
            yield "I12", tx.id, "still undecided"

    def _rest(self) -> Iterator[Fault]:
        """No Kafka transaction stays open, and everything settled in bounded time."""
        if not self.settled:
            return
        for end in self.topics.ends:
            name = f"{end.topic}-{end.partition}"
            if end.stable < end.high and name not in self.without_leader:
                yield "I12", "", f"{name} is open at {end.stable}, its end is {end.high}"
        newest = {note.what: note.at for note in sorted(self.history.notes, key=lambda n: n.at)}
        if "healed" in newest and "quiet" in newest:
            took_s = newest["quiet"] - newest["healed"]
            if took_s > self.settle_max_s:
                yield "I12", "", f"settled {took_s:.1f} s after the end of the last fault"

    # --- I5, I6, I7, I15 -----------------------------------------------------------------

    def _final_state(self, tx: Tx) -> Iterator[Fault]:
        """The proxies' state after the run equals that of the log."""
        state = self.states.get(tx.id)
        fits = {"committed": ("promoted", "refused")}.get(tx.state, (tx.state,))
        if state is None or state in fits:
            return
        if state == "parked" and not tx.parked_ms:
            yield "I8", tx.id, f"parked after {len(tx.accepted)} attempts, not by the log"
        else:
            yield "I5", tx.id, f"state {state} at the proxy, {tx.state} in the log"

    def _answers(self, id: str, calls: list[Call]) -> Iterator[Fault]:
        tx = self.log.get(id)
        for call in calls:
            if tx is None:
                if call.result == "ok":
                    yield "I15", id, f"acked, but not in the log: {call}"
                continue
            if call.what in DECIDING and call.result == "ok":
                if not tx.decision:
                    yield "I15", id, f"{call.what} acked, but the log has no decision"
                elif tx.decision != call.what:
                    yield "I5", id, f"{call.what} acked, but the log has {tx.decision}"
            elif call.code == "already_decided":
                if call.decision not in ("", tx.decision) or call.what == tx.decision:
                    yield "I5", id, f"answered {call}, but the log has {tx.decision}"
            elif call.what == "prepare" and call.result == "ok" and call.token != tx.token:
                yield "I3", id, f"{call.token} and {tx.token} have one id"
            # An answered state is that of some prefix of the log.
            possible = {"", "pending", *_ANSWERS[tx.state], *(["parked"] if tx.parked_ms else [])}
            if call.state not in possible:
                yield "I5", id, f"answered {call.state}, but the log has {tx.state}"
            if call.code == "not_found" and any(
                other.what == "prepare" and other.result == "ok" and other.ended < call.began
                for other in calls
            ):
                yield "I5", id, f"denied after its prepare was acked: {call}"

    def _business(self, tx: Tx) -> Iterator[Fault]:
        if tx.token not in self.history.business or tx.state in ("pending", "parked"):
            return
        rows = self.rows[tx.id]
        if rows > 1:
            yield "I6", tx.id, f"{rows} business rows"
        if bool(rows) != (tx.decision == "commit"):
            yield "I6", tx.id, f"{rows} business rows, but decision {tx.decision}"

    def _not_guessed(self, tx: Tx) -> Iterator[Fault]:
        if not tx.decision or tx.source == "operator":
            return
        calls = self.calls.get(tx.id, ())
        sent = [call.began for call in calls if call.what == tx.decision]
        sent += [asked.at for asked in self.asked.get(tx.id, ()) if asked.answer == tx.decision]
        prepared = any(call.what == "prepare" and call.result == "ok" for call in calls)
        never_ran = tx.decision == "rollback" and not prepared
        if tx.source == "schedule" or (not sent and not never_ran):
            yield "I7", tx.id, f"no client sent {tx.decision} (source {tx.source})"
        elif sent and min(sent) * 1000 > tx.decided_ms + self.clock_apart_ms and not never_ran:
            yield "I7", tx.id, f"{tx.decision} before a client sent it"

    # --- I8, I9 --------------------------------------------------------------------------

    def _attempts(self, tx: Tx) -> Iterator[Fault]:
        free, in_vain = list(tx.accepted), list[Attempt]()
        asked: Counter[int] = Counter()
        for check in sorted(self.asked.get(tx.id, ()), key=lambda check: check.at):
            by_then = check.at * 1000 + self.clock_apart_ms
            mine = [a for a in free if a.at_ms <= by_then and check.attempt in (0, a.count)]
            again = [a for a in in_vain if check.attempt == a.count]
            if not mine and again:  # an attempt asks another instance after an "unknown"
                if check.answer != "unknown":
                    in_vain.remove(again[-1])
                continue
            if not mine:
                refused = any(at_ms <= by_then for at_ms in tx.early)
                why = f"asked without an accepted attempt: {check}"
                yield "I9" if refused else "I8", tx.id, why
                return
            # The newest: one that was given back freed its count for a later round.
            free.remove(mine[-1])
            if check.answer == "unknown":
                in_vain.append(mine[-1])
            asked[mine[-1].round] += check.answer != "not yet"
            if asked[mine[-1].round] > tx.attempts_max:
                yield "I8", tx.id, f"asked {tx.attempts_max + 1} times in one round"
                return

    # --- I17 -----------------------------------------------------------------------------

    def _order(self) -> Iterator[Fault]:
        groups: dict[tuple[object, ...], list[Tx]] = defaultdict(list)
        for tx in self.log.values():
            if tx.decision == "commit" and tx.order_name is not None:
                groups[tx.order_name].append(tx)
        for name, members in groups.items():
            if len({tx.partition for tx in members}) > 1:
                yield "I17", members[0].id, f"{name} is in several half partitions"
            yield from self._order_of_one_key(name, sorted(members, key=lambda tx: tx.op_offset))

    def _order_of_one_key(self, name: tuple[object, ...], members: list[Tx]) -> Iterator[Fault]:
        last: dict[tuple[str, int], tuple[int, str]] = {}
        newest_sent = 0.0
        for tx in members:
            sent, acked = self._commit_times(tx)
            if 0 < acked < newest_sent:
                yield "I17", tx.id, f"{name}: acked before an earlier decision was sent"
            newest_sent = max(newest_sent, sent)
            if self.copies.get(tx.id, Copies()).was_refused:
                continue
            for record in sorted(self.visible.get(tx.id, ()), key=lambda r: r.offset):
                place = (record.topic, record.partition)
                offset, id = last.get(place, (-1, tx.id))
                if id != tx.id and offset > record.offset:
                    yield "I17", tx.id, f"{name}: visible before {id} in {place}"
                last[place] = (record.offset, tx.id)

    def _commit_times(self, tx: Tx) -> tuple[float, float]:
        """Return when a producer first sent a commit and when one was first acked; 0: never."""
        commits = [call for call in self.calls.get(tx.id, ()) if call.what == "commit"]
        sent = min((call.began for call in commits), default=0.0)
        acked = min((call.ended for call in commits if call.result == "ok"), default=0.0)
        return (sent if tx.source == "producer" else 0.0), acked

    # --- I2, I11: the concurrent reader against the reader after the run ---------------------

    def _readers(self) -> Iterator[Fault]:
        if self.topics.along is None:
            return
        after_run = {_place(record): record for record in self.topics.targets}
        read_to: dict[tuple[str, int], int] = defaultdict(lambda: -1)
        for seen in self.topics.along:
            record, id = seen.record, seen.record.tx_id
            part = (record.topic, record.partition)
            if record.offset <= read_to[part]:
                yield "I11", id, f"read concurrently after offset {read_to[part]}: {record}"
            read_to[part] = max(read_to[part], record.offset)
            if after_run.get(_place(record)) != record:
                yield "I11", id, f"was visible, but is not after the run: {record}"
            tx = self.log.get(id)
            by_then = seen.at * 1000 + self.clock_apart_ms
            if tx is not None and tx.decision == "commit" and by_then < tx.decided_ms:
                yield "I2", id, f"visible at {seen.at:.3f}, decided at {tx.decided_ms / 1000:.3f}"
        along = {_place(seen.record) for seen in self.topics.along}
        for place, record in after_run.items():
            if place not in along and record.offset < read_to[place[:2]]:
                yield "I11", record.tx_id, f"became visible below the offset of a reader: {record}"

    # --- I11: checkpoints --------------------------------------------------------------------

    def _checkpoints(self) -> Iterator[Fault]:
        """Every promotion transaction writes its records and its checkpoint in one Kafka
        transaction. Visible transactions therefore lie below the newest checkpoint and are not in
        its list of deferred ones, and one that a claim aborted leaves no trace."""
        newest: dict[int, dict[str, Any]] = {}
        for partition, records in by_partition(self.topics.checkpoint):
            yield from _goes_forward(partition, records, newest)
        if not self.topics.checkpoint:
            return
        for id, visible in self.visible.items():
            tx = self.log.get(id)
            if tx is None or tx.decision != "commit":
                continue
            checkpoint = newest.get(tx.partition, {"op": 0, "half": 0})
            if tx.op_offset >= checkpoint["op"] or tx.offset >= checkpoint["half"]:
                why = f"visible, but no checkpoint has passed it: {checkpoint}, {visible[0]}"
                yield "I11", id, why
            elif id in checkpoint.get("deferred", ()):
                yield "I11", id, f"visible, but deferred in the newest checkpoint: {checkpoint}"


def _place(record: Rec) -> tuple[str, int, int]:
    return record.topic, record.partition, record.offset


def _goes_forward(
    partition: int, records: list[Rec], newest: dict[int, dict[str, Any]]
) -> Iterator[Fault]:
    """A checkpoint never goes back; only the owner of the newest claim writes one."""
    claim = ""
    for record in records:
        if record.key == b"claim":
            claim = json.loads(record.value or b"{}")["claim"]
        elif record.key == b"progress" and record.value is not None:
            value = dict(json.loads(record.value))
            before = newest.get(partition, value)
            if value["op"] < before["op"] or value["half"] < before["half"]:
                yield "I11", "", f"checkpoint of {partition} goes back: {before}, then {value}"
            if claim and value["claim"] != claim:
                yield "I11", "", f"checkpoint of {partition} after the claim {claim}: {value}"
            newest[partition] = value
