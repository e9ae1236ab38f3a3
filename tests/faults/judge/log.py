"""A second implementation of the half and operation logs.

Formats and rules are written from the documentation, not from txbroker's code, so that an error of
one implementation does not hide in the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .records import Header, Rec, Topics, by_partition

DECIDING = ("commit", "rollback")
_ID = re.compile("[0-7][0-9A-HJKMNP-TV-Z]{25}")
_AS_BASE_32 = str.maketrans("0123456789ABCDEFGHJKMNPQRSTVWXYZ", "0123456789abcdefghijklmnopqrstuv")
_FIXED = ("txb-v", "txb-id", "txb-group", "txb-topic", "txb-part", "txb-seq")
_ASK_SPACING_MS = 1000


@dataclass(slots=True)
class Placed:
    """A message with its target partition, as stored in half or op."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    timestamp_ms: int | None


@dataclass(frozen=True, slots=True)
class Attempt:
    """An accepted check: its append time, its count in the round, and the round."""

    at_ms: int
    count: int
    round: int


@dataclass(slots=True)
class Tx:
    """A transaction according to the logs.

    Attributes:
        prepared_ms: the half topic's log clock at its last record.
        prepared: its prepared messages.
        messages: its messages to promote.
        decided_ms: the append time of its deciding marker.
        counted: the append times of the attempts that count in this round.
        accepted: all attempts of all rounds.
        early: append times of attempts before their time or after a decision.
        parked_ms: the times at which it was parked.
        log: its records: append time and text.
    """

    id: str
    group: str
    partition: int
    offset: int
    prepared_ms: int
    prepared: list[Placed]
    after_ms: float
    interval_ms: float
    attempts_max: int
    timeout_ms: float
    order: str | None
    dedup: str | None = None
    messages: list[Placed] = field(default_factory=list)
    state: str = "pending"
    decision: str = ""
    source: str = ""
    decided_ms: int = 0
    op_offset: int = -1
    round: int = 1
    round_ms: int = 0
    number: int = 0
    counted: list[int] = field(default_factory=list)
    accepted: list[Attempt] = field(default_factory=list)
    last_check_ms: int = 0
    last_counts: bool = False
    not_before_ms: float = 0
    early: list[int] = field(default_factory=list)
    parked_ms: list[int] = field(default_factory=list)
    log: list[tuple[int, str]] = field(default_factory=list)

    @property
    def token(self) -> str:
        tokens = (value or b"" for name, value in self.prepared[0].headers if name == "token")
        return next(tokens, b"").decode()

    @property
    def order_name(self) -> tuple[Any, ...] | None:
        """The key of its order; None without one."""
        first = self.prepared[0]
        if self.order is not None:
            return ("order", self.order)
        return None if first.key is None else ("key", first.topic, first.key)

    def due_ms(self) -> float:
        """Return the earliest time of the next attempt."""
        if self.not_before_ms:
            return self.not_before_ms
        if self.counted:
            return self.counted[-1] + self.interval_ms
        return self.round_ms + self.after_ms


def _id_number(id: str) -> int:
    """Return the bits of a transaction id; raises ValueError for another text."""
    if not _ID.fullmatch(id):
        raise ValueError(f"{id!r} is not a transaction id")
    return int(id.translate(_AS_BASE_32), 32)


def id_time_ms(id: str) -> int:
    return _id_number(id) >> 64 & ((1 << 48) - 1)


def id_partition(id: str) -> int:
    return _id_number(id) >> 112


# --- half ------------------------------------------------------------------------------------


def _half_part(record: Rec) -> tuple[dict[str, str], Placed]:
    """Return our headers and the message of a half record; raises ValueError for another one."""
    if not record.headers or record.headers[0][0] != "txb-v":
        raise ValueError("not a half record")
    version, *optional = (record.headers[0][1] or b"").decode().split(" ")
    if version not in ("1", "2"):
        raise ValueError(f"version {version}")
    names = [*_FIXED, *(f"txb-{name}" for name in optional)]
    ours = record.headers[: len(names)]
    if [name for name, _ in ours] != names:
        raise ValueError(f"headers {[name for name, _ in ours]}, not {names}")
    facts = {name: (value or b"").decode() for name, value in ours}
    stamp = facts.get("txb-ts")
    message = Placed(
        facts["txb-topic"],
        int(facts["txb-part"]),
        record.key,
        record.value,
        record.headers[len(names) :],
        None if stamp is None else int(stamp),
    )
    return facts, message


def read_log(topics: Topics, dedup_window_ms: int = 120_000) -> dict[str, Tx]:
    found: dict[str, Tx] = {}
    for partition, records in by_partition(topics.half):
        _read_half(partition, records, found, dedup_window_ms)
    for _, records in by_partition(topics.op):
        _read_op(records, found)
    return found


def _read_half(
    partition: int, records: Sequence[Rec], found: dict[str, Tx], window_ms: int
) -> None:
    clock = 0
    building: Tx | None = None
    by_dedup: dict[tuple[str, str], Tx] = {}
    for record in records:
        clock = max(clock, record.timestamp_ms)
        try:
            facts, message = _half_part(record)
            sequence, count = (int(part) for part in facts["txb-seq"].split("/"))
            if sequence == 0:
                building = _new_tx(partition, record.offset, facts)
        except ValueError:
            building = None
            continue
        follows = building is not None and (building.id, len(building.prepared)) == (
            facts["txb-id"],
            sequence,
        )
        if building is None or not follows:
            building = None
            continue
        building.prepared.append(message)
        if len(building.prepared) < count:
            continue
        tx, building = building, None
        tx.prepared_ms = tx.round_ms = clock
        tx.messages = tx.prepared
        line = f"half {partition}:{tx.offset}, {count} messages, group {tx.group}"
        if _counts(tx, found, by_dedup, window_ms):
            found[tx.id] = tx
            if tx.dedup is not None:
                by_dedup[tx.group, tx.dedup] = tx
            tx.log.append((record.timestamp_ms, line))
        elif tx.id in found:
            found[tx.id].log.append((record.timestamp_ms, f"{line}: void"))


def _counts(
    tx: Tx, found: dict[str, Tx], by_dedup: dict[tuple[str, str], Tx], window_ms: int
) -> bool:
    """Return whether a complete half message is a transaction, from the records alone."""
    if tx.id in found or id_partition(tx.id) != tx.partition:
        return False
    if tx.dedup is not None:
        earlier = by_dedup.get((tx.group, tx.dedup))
        if earlier is not None and tx.prepared_ms - earlier.prepared_ms <= window_ms:
            return False
    return abs(tx.prepared_ms - id_time_ms(tx.id)) <= window_ms


def _new_tx(partition: int, offset: int, facts: dict[str, str]) -> Tx:
    id_partition(facts["txb-id"])  # raises if it is not an id
    after, interval, attempts, timeout = facts.get("txb-check", "6/30/15/5").split("/")
    return Tx(
        id=facts["txb-id"],
        group=facts["txb-group"],
        partition=partition,
        offset=offset,
        prepared_ms=0,
        prepared=[],
        after_ms=float(after) * 1000,
        interval_ms=float(interval) * 1000,
        attempts_max=int(attempts),
        timeout_ms=float(timeout) * 1000,
        order=facts.get("txb-order"),
        dedup=facts.get("txb-dedup"),
    )


# --- op --------------------------------------------------------------------------------------


def _read_op(records: Sequence[Rec], found: dict[str, Tx]) -> None:
    clock = 0
    for place, record in enumerate(records):
        clock = max(clock, record.timestamp_ms)
        if record.headers and record.headers[0][0] == "txb-v":
            continue
        try:
            marker = dict(json.loads(record.value or b""))
            following = records[place + 1 : place + 1 + marker.get("contents", 0)]
            contents = [_half_part(each)[1] for each in following]
        except (ValueError, TypeError):
            continue
        tx = found.get(marker.get("id", ""))
        if tx is None or len(contents) < marker.get("contents", 0):
            continue
        applied = _apply(tx, marker, record, clock, contents)
        text = f"op {tx.partition}:{record.offset} {(record.value or b'').decode()}"
        tx.log.append((record.timestamp_ms, text if applied else f"{text}: no effect"))


def _apply(tx: Tx, marker: dict[str, Any], record: Rec, clock: int, contents: list[Placed]) -> bool:
    """Apply a marker; return whether it had an effect."""
    kind = marker["kind"]
    if kind in DECIDING:
        return _decide(tx, marker, record, contents)
    if kind == "check":
        return _check(tx, marker, clock)
    if kind in ("returned", "later"):
        named = (marker.get("round", 0), marker.get("number", 0))
        if tx.state != "pending" or named != (tx.round, tx.number) or not tx.last_counts:
            return False
        tx.counted.pop()
        tx.last_counts = False
        if kind == "later":
            seconds = max(1.0, min(marker.get("later_s", 0.0), 3600.0))
            tx.not_before_ms = clock + seconds * 1000
        return True
    if kind == "park":
        full = len(tx.counted) >= tx.attempts_max
        over = full and clock >= tx.counted[-1] + tx.timeout_ms
        if tx.state != "pending" or marker.get("round") != tx.round or not over:
            return False
        tx.state = "parked"
        tx.parked_ms.append(clock)
        return True
    if kind == "revive" and tx.state == "parked" and marker.get("round") == tx.round:
        tx.state, tx.round, tx.round_ms = "pending", tx.round + 1, clock
        tx.number, tx.counted, tx.last_check_ms, tx.not_before_ms = 0, [], 0, 0
        tx.last_counts = False
        return True
    return False


def _decide(tx: Tx, marker: dict[str, Any], record: Rec, contents: list[Placed]) -> bool:
    if marker.get("group", "") not in ("", tx.group) or tx.state not in ("pending", "parked"):
        return False
    places = [(message.topic, message.partition) for message in tx.prepared]
    if contents and [(message.topic, message.partition) for message in contents] != places:
        return False
    tx.decision, tx.op_offset, tx.decided_ms = marker["kind"], record.offset, record.timestamp_ms
    tx.source = marker.get("source", "producer")
    tx.state = "committed" if tx.decision == "commit" else "rolled_back"
    tx.messages = contents or tx.prepared
    return True


def _check(tx: Tx, marker: dict[str, Any], clock: int) -> bool:
    follows = (marker.get("round"), marker.get("number")) == (tx.round, tx.number + 1)
    if tx.state != "pending":
        tx.early.append(clock)
        return False
    if not follows or len(tx.counted) >= tx.attempts_max:
        return False
    if marker.get("reason") == "asked":
        last = len(tx.counted) + 1 >= tx.attempts_max
        in_time = not last and clock >= tx.last_check_ms + _ASK_SPACING_MS
    else:
        in_time = marker.get("reason") == "due" and clock >= tx.due_ms()
    if not in_time:
        tx.early.append(clock)
        return False
    tx.number += 1
    tx.counted.append(clock)
    tx.accepted.append(Attempt(clock, len(tx.counted), tx.round))
    tx.last_check_ms, tx.last_counts, tx.not_before_ms = clock, True, 0
    return True
