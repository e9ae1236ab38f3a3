"""The invariants that a run broke."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .checkpoints import checkpoint_faults
from .history import Asked, Call, History
from .log import DECIDING, Tx, read_log
from .records import Copies, Fault, Rec, Seen, Topics, read_copies
from .story import Facts, timeline
from .visibility import visibility_faults

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
            self.visible[record.header("txb-id") or ""].append(record)
        self.seen: dict[str, list[Seen]] = defaultdict(list)
        for each in topics.along or ():
            self.seen[each.record.header("txb-id") or ""].append(each)
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
        self._found: dict[tuple[str, str, str], Violation] = {}

    def judge(self) -> list[Violation]:
        """Return every violation."""
        for id, records in self.visible.items():
            self._was_committed(id, records)
            self._once(id, records)
        for tx in self.log.values():
            self._contents(tx)
            self._whole(tx)
            self._at_rest(tx)
            self._final_state(tx)
            self._business(tx)
            self._not_guessed(tx)
            self._attempts(tx)
        for id, calls in self.calls.items():
            self._answers(id, calls)
        for id in self.rows:
            if id not in self.log:
                self._violated("I6", id, "a business row, but no half message")
        self._tokens()
        self._order()
        for invariant, id, why in (
            *visibility_faults(self),
            *checkpoint_faults(self),
            *self._rest(),
        ):
            self._violated(invariant, id, why)
        return list(self._found.values())

    def _violated(self, invariant: str, id: str, why: str) -> None:
        key = (invariant, id, why)
        if key not in self._found:
            self._found[key] = Violation(invariant, id, why, self.story(id))

    def story(self, id: str) -> str:
        """Return the timeline of a transaction."""
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

    def _was_committed(self, id: str, records: list[Rec]) -> None:
        tx = self.log.get(id)
        if tx is None:
            self._violated("I2", id, f"visible, but never prepared: {records[0]}")
        elif tx.decision != "commit":
            self._violated("I2", id, f"visible, but its decision is {tx.decision or 'none'}")

    def _once(self, id: str, records: list[Rec]) -> None:
        places = Counter((r.topic, r.header("txb-seq") or "0/1") for r in records)
        for place, count in places.items():
            if count > 1:
                self._violated("I3", id, f"{count} copies of {place}")

    def _tokens(self) -> None:
        """A repeated prepare is one transaction: one token, at most one commit."""
        for token, transactions in self.of_token.items():
            committed = [tx for tx in transactions if tx.decision == "commit"]
            if token and len(committed) > 1:
                ids = ", ".join(tx.id for tx in committed)
                self._violated("I3", committed[-1].id, f"{token} was committed under {ids}")

    def _contents(self, tx: Tx) -> None:
        if tx.decision != "commit":
            return
        for record in self.visible.get(tx.id, ()):
            sequence = int((record.header("txb-seq") or "0/1").partition("/")[0])
            if sequence >= len(tx.messages):
                self._violated("I4", tx.id, f"message {sequence} was never sent")
                continue
            message = tx.messages[sequence]
            ours = 2 if len(tx.messages) > 1 else 1
            # An installation with another prefix has one more header first.
            ours += record.headers[0][0] == "txb-installation"
            stamp = tx.decided_ms if message.timestamp_ms is None else message.timestamp_ms
            seen = (record.topic, record.partition, record.key, record.value, record.headers[ours:])
            expected = (
                message.topic,
                message.partition,
                message.key,
                message.value,
                message.headers,
            )
            if seen != expected or record.timestamp_ms != stamp:
                self._violated("I4", tx.id, f"{record} should be {message}, timestamp {stamp}")
        sent = self.history.sent.get(tx.token)
        if sent is None:
            return
        offered = [sent, *(other.messages for other in self._replacing(tx) if other.messages)]
        stored = [(m.topic, m.key, m.value, m.headers, m.timestamp_ms) for m in tx.messages]
        offers = [
            [(m.topic, m.key, m.value, m.headers, m.timestamp_ms) for m in bodies]
            for bodies in offered
        ]
        if stored not in offers:
            self._violated("I4", tx.id, f"stored {stored}, sent {offers}")

    def _replacing(self, tx: Tx) -> Iterator[Call | Asked]:
        yield from (call for call in self.calls.get(tx.id, ()) if call.what == "commit")
        yield from self.asked.get(tx.id, ())

    def _whole(self, tx: Tx) -> None:
        seen = {r.header("txb-seq") or "0/1" for r in self.visible.get(tx.id, ())}
        refused = tx.decision == "commit" and self.kept_state(tx) == "refused"
        if seen and len(seen) < len(tx.messages):
            self._violated("I10", tx.id, f"{len(seen)} of {len(tx.messages)} messages are visible")
        if seen and refused:
            self._violated("I10", tx.id, "visible, but refused")
        if refused and not self.copies[tx.id].facts(len(tx.messages)).get("cause"):
            self._violated("I1", tx.id, "refused without a cause")
        if tx.state == "parked" and self.kept_state(tx) != "parked":
            self._violated("I7", tx.id, "parked, but without a complete copy")

    def _at_rest(self, tx: Tx) -> None:
        if not self.settled:
            return
        settled = tx.id in self.visible or self.kept_state(tx) == "refused"
        if tx.decision == "commit" and not settled and not self._waits_for_a_leader(tx):
            self._violated("I1", tx.id, "committed, but neither visible nor refused")
        if tx.state == "pending":
            self._violated("I12", tx.id, "still undecided")

    def _waits_for_a_leader(self, tx: Tx) -> bool:
        places = {f"{message.topic}-{message.partition}" for message in tx.messages}
        return bool(places & self.without_leader)

    def _rest(self) -> Iterator[Fault]:
        """No Kafka transaction stays open, and everything settled in bounded time."""
        if not self.settled:
            return
        for end in self.topics.ends:
            name = f"{end.topic}-{end.partition}"
            if end.stable < end.high and name not in self.without_leader:
                yield "I12", "", f"{name} is open at {end.stable}, its end is {end.high}"
        healed = max((n.at for n in self.history.notes if n.what == "healed"), default=None)
        quiet = max((n.at for n in self.history.notes if n.what == "quiet"), default=None)
        if healed is not None and quiet is not None and quiet - healed > self.settle_max_s:
            yield "I12", "", f"settled {quiet - healed:.1f} s after the end of the last fault"

    # --- I5, I6, I7, I15 -----------------------------------------------------------------

    def _final_state(self, tx: Tx) -> None:
        """The proxies' state after the run equals that of the log."""
        state = self.states.get(tx.id)
        fits = {"committed": ("promoted", "refused")}.get(tx.state, (tx.state,))
        if state is None or state in fits:
            return
        if state == "parked" and not tx.parked_ms:
            self._violated("I8", tx.id, f"parked after {len(tx.accepted)} attempts, not by the log")
        else:
            self._violated("I5", tx.id, f"state {state} at the proxy, {tx.state} in the log")

    def _answers(self, id: str, calls: list[Call]) -> None:
        tx = self.log.get(id)
        for call in calls:
            if call.result == "ok" and tx is None:
                self._violated("I15", id, f"acked, but not in the log: {call}")
            elif tx is None:
                continue
            elif call.what in DECIDING and call.result == "ok":
                if not tx.decision:
                    self._violated("I15", id, f"{call.what} acked, but the log has no decision")
                elif tx.decision != call.what:
                    self._violated("I5", id, f"{call.what} acked, but the log has {tx.decision}")
            elif call.code == "already_decided":
                if call.decision not in ("", tx.decision) or call.what == tx.decision:
                    self._violated("I5", id, f"answered {call}, but the log has {tx.decision}")
            elif call.what == "prepare" and call.result == "ok" and call.token != tx.token:
                self._violated("I3", id, f"{call.token} and {tx.token} have one id")
            self._answered_state(tx, call)
            self._denied(tx, call, calls)

    def _answered_state(self, tx: Tx | None, call: Call) -> None:
        """An answered state is that of some prefix of the log."""
        if tx is None or call.state in ("", "pending"):
            return
        possible = set(_ANSWERS[tx.state]) | ({"parked"} if tx.parked_ms else set())
        if call.state not in possible:
            self._violated("I5", tx.id, f"answered {call.state}, but the log has {tx.state}")

    def _denied(self, tx: Tx | None, call: Call, calls: list[Call]) -> None:
        """No answer denies a transaction after its prepare was acked."""
        if tx is None or call.code != "not_found":
            return
        if any(c.what == "prepare" and c.result == "ok" and c.ended < call.began for c in calls):
            self._violated("I5", tx.id, f"denied after its prepare was acked: {call}")

    def _business(self, tx: Tx) -> None:
        if tx.token not in self.history.business or tx.state in ("pending", "parked"):
            return
        rows = self.rows[tx.id]
        if rows > 1:
            self._violated("I6", tx.id, f"{rows} business rows")
        if bool(rows) != (tx.decision == "commit"):
            self._violated("I6", tx.id, f"{rows} business rows, but decision {tx.decision}")

    def _not_guessed(self, tx: Tx) -> None:
        if not tx.decision or tx.source == "operator":
            return
        calls = self.calls.get(tx.id, ())
        sent = [call.began for call in calls if call.what == tx.decision]
        sent += [asked.at for asked in self.asked.get(tx.id, ()) if asked.answer == tx.decision]
        prepared = any(call.what == "prepare" and call.result == "ok" for call in calls)
        never_ran = tx.decision == "rollback" and not prepared
        if tx.source == "schedule" or (not sent and not never_ran):
            self._violated("I7", tx.id, f"no client sent {tx.decision} (source {tx.source})")
        elif sent and min(sent) * 1000 > tx.decided_ms + self.clock_apart_ms and not never_ran:
            self._violated("I7", tx.id, f"{tx.decision} before a client sent it")

    # --- I8, I9 --------------------------------------------------------------------------

    def _attempts(self, tx: Tx) -> None:
        free = list(tx.accepted)
        asked: Counter[int] = Counter()
        for check in sorted(self.asked.get(tx.id, ()), key=lambda check: check.at):
            by_then = check.at * 1000 + self.clock_apart_ms
            mine = [a for a in free if a.at_ms <= by_then and check.attempt in (0, a.count)]
            if mine:
                # The newest: one that was given back freed its count for a later round.
                free.remove(mine[-1])
                asked[mine[-1].round] += check.answer != "not yet"
                if asked[mine[-1].round] > tx.attempts_max:
                    self._violated("I8", tx.id, f"asked {tx.attempts_max + 1} times in one round")
                    return
                continue
            refused = any(at_ms <= by_then for at_ms in tx.early)
            self._violated(
                "I9" if refused else "I8", tx.id, f"asked without an accepted attempt: {check}"
            )
            return

    # --- I17 -----------------------------------------------------------------------------

    def _order(self) -> None:
        groups: dict[tuple[object, ...], list[Tx]] = defaultdict(list)
        for tx in self.log.values():
            if tx.decision == "commit" and tx.order_name is not None:
                groups[tx.order_name].append(tx)
        for name, members in groups.items():
            if len({tx.partition for tx in members}) > 1:
                self._violated("I17", members[0].id, f"{name} is in several half partitions")
            self._order_of_one_key(name, sorted(members, key=lambda tx: tx.op_offset))

    def _order_of_one_key(self, name: tuple[object, ...], members: list[Tx]) -> None:
        last: dict[tuple[str, int], tuple[int, str]] = {}
        newest_sent = 0.0
        for tx in members:
            sent, acked = self._commit_times(tx)
            if 0 < acked < newest_sent:
                self._violated("I17", tx.id, f"{name}: acked before an earlier decision was sent")
            newest_sent = max(newest_sent, sent)
            if self.copies.get(tx.id, Copies()).was_refused:
                continue
            for record in sorted(self.visible.get(tx.id, ()), key=lambda r: r.offset):
                place = (record.topic, record.partition)
                before = last.get(place)
                if before is not None and before[1] != tx.id and before[0] > record.offset:
                    self._violated("I17", tx.id, f"{name}: visible before {before[1]} in {place}")
                last[place] = (record.offset, tx.id)

    def _commit_times(self, tx: Tx) -> tuple[float, float]:
        """Return when a producer first sent a commit and when one was first acked; 0: never."""
        commits = [call for call in self.calls.get(tx.id, ()) if call.what == "commit"]
        sent = min((call.began for call in commits), default=0.0)
        acked = min((call.ended for call in commits if call.result == "ok"), default=0.0)
        return (sent if tx.source == "producer" else 0.0), acked
