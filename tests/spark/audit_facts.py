"""Facts of transactions made by hand or from a ledger's logs, for tests of the audit."""

from collections.abc import Sequence
from zlib import crc32

from tests.kit.logs import PARTITION, START_MS, WINDOW_MS, Logs, id_of, new_ledger
from txbroker.core.decoding import Malformed, decode_half, decode_marker, is_content
from txbroker.core.ledger import Effect
from txbroker.core.records import Marker, Message, Record
from txbroker.spark.judge.judge import judge
from txbroker.spark.judge.rows import (
    Content,
    HalfFact,
    Horizon,
    JudgedTransaction,
    JudgeTerms,
    MarkerFact,
    ParkedFact,
    TransactionFacts,
    VisibleFact,
)

NOW_MS = START_MS + 10_000_000
TERMS = JudgeTerms(NOW_MS, WINDOW_MS)
ID = id_of(1)

_HALF = HalfFact(PARTITION, 0, 0, 0, True, None, "g", 0, 1, "t", 0, 100, 200, None, *[None] * 6)
_CONTENT = slice(HalfFact._fields.index("topic"), HalfFact._fields.index("order_mark"))
"""The columns of a half message that a copy and a replacing message have too."""


def content_of(message: Message) -> tuple[str, int, int, int, int | None]:
    """Return the columns `_CONTENT` of a message, with stand-ins for the hashes."""
    parts = ((message.key, message.value), message.headers)
    body, headers = (crc32(repr(part).encode()) for part in parts)
    return message.topic, message.partition or 0, body, headers, message.timestamp_ms


def half_rows(
    topics: Sequence[str] = ("t",),
    *,
    offset: int = 0,
    at_ms: int = START_MS,
    partition: int = PARTITION,
    grp: str = "g",
    void: str | None = None,
    timestamp_ms: int | None = None,
    order_mark: int | None = 7,
) -> list[HalfFact]:
    """Return the rows of a half message with one message for partition 0 of each topic."""
    row = _HALF._replace(partition=partition, at_ms=at_ms, clock_ms=at_ms, void=void, grp=grp)
    rows = [
        row._replace(offset=offset + seq, seq=seq, topic=topic, body=100 + seq, headers=200 + seq)
        for seq, topic in enumerate(topics)
    ]
    rows = [row._replace(count=len(topics), timestamp_ms=timestamp_ms) for row in rows]
    policy = {"after_ms": 6000, "interval_ms": 30_000, "attempts_max": 3, "timeout_ms": 5000}
    return [rows[0]._replace(order_mark=order_mark, **policy), *rows[1:]]


def op_row(kind: str, offset: int = 0, at_ms: int = START_MS + 100, **fields: object) -> MarkerFact:
    """Return a marker, by default early and without a group."""
    row = MarkerFact(
        PARTITION, offset, at_ms, at_ms, True, kind, "producer", "", 1, 0, "", 0, None, 0
    )
    return row._replace(**fields)


def check_row(
    number: int, at_ms: int, offset: int, reason: str = "due", turn: int = 1
) -> MarkerFact:
    return op_row("check", offset, at_ms, round=turn, number=number, reason=reason)


def visible_rows(
    half: Sequence[HalfFact], decided_ms: int = START_MS + 100, offset: int = 50
) -> list[VisibleFact]:
    return [
        VisibleFact(
            row.topic,
            row.target_partition,
            offset + row.seq,
            decided_ms if row.timestamp_ms is None else row.timestamp_ms,
            row.seq,
            row.count,
            row.body,
            row.headers,
            False,
        )
        for row in half
    ]


def parked_row(state: str | None, offset: int = 0, at_ms: int = START_MS + 200) -> ParkedFact:
    """Return a record of the parked topic; without a state a tombstone."""
    return ParkedFact(PARTITION, offset, 0, at_ms, state, None, state is None)


def copy_rows(
    half: Sequence[HalfFact], state: str, offset: int = 0, at_ms: int = START_MS + 200
) -> list[ParkedFact]:
    """Return the records of the parked topic that keep a half message."""
    return [
        ParkedFact(
            PARTITION,
            offset + row.seq,
            row.seq,
            at_ms,
            state if row.seq == 0 else None,
            None,
            False,
            row.grp,
            row.count,
            *row[_CONTENT],
            row.clock_ms + (row.after_ms or 0) if row.seq == 0 else None,
        )
        for row in half
    ]


COMMIT = op_row("commit", grp="g")
HALF = half_rows()


def judged(
    half: list[HalfFact] = HALF,
    op: list[MarkerFact] | None = None,
    visible: list[VisibleFact] | None = None,
    parked: list[ParkedFact] | None = None,
    *,
    now_ms: int = NOW_MS,
    horizon: Horizon | None = None,
) -> JudgedTransaction:
    """Judge a transaction; by default all of it is old."""
    facts = TransactionFacts(ID, half, op or [], visible or [], parked or [])
    return judge(facts, TERMS._replace(now_ms=now_ms), horizon or Horizon())


# --- from logs -------------------------------------------------------------------------------


def facts_from(logs: Logs) -> dict[str, TransactionFacts]:
    """Return the facts of each id in the logs of a partition.

    A ledger decides which half messages are void: the judge does not.
    """
    halves, markers = _halves(logs), _markers(logs)
    return {
        id: TransactionFacts(id, halves.get(id, []), markers.get(id, []))
        for id in halves.keys() | markers.keys()
    }


def _halves(logs: Logs) -> dict[str, list[HalfFact]]:
    ledger = new_ledger()
    found: dict[str, list[HalfFact]] = {}
    batch: list[tuple[str, HalfFact]] = []
    for record in logs.half.records:
        outcome = ledger.apply_half(record)
        try:
            part = decode_half(record)
        except Malformed:
            continue
        message, policy = part.message, part.policy
        row = HalfFact(
            PARTITION,
            record.offset,
            record.timestamp_ms,
            ledger.half_clock_ms,
            True,
            None,
            part.group,
            part.sequence,
            part.count,
            *content_of(message),
            None,
            part.attributes.dedup_key,
            round(policy.after_s * 1000),
            round(policy.interval_s * 1000),
            policy.attempts_max,
            round(policy.timeout_s * 1000),
        )
        batch.append((part.id, row))
        if outcome.effect is Effect.PARTIAL:
            continue
        other = outcome.transaction is not None and outcome.transaction.id != part.id
        void = outcome.effect in (Effect.EXPIRED, Effect.VOID) or other
        for id, each in batch:
            found.setdefault(id, []).append(each._replace(void="void" if void else None))
        batch = []
    return found


def _markers(logs: Logs) -> dict[str, list[MarkerFact]]:
    found: dict[str, list[MarkerFact]] = {}
    records, clock_ms, place = logs.op.records, 0, 0
    while place < len(records):
        record = records[place]
        place += 1
        clock_ms = max(clock_ms, record.timestamp_ms)
        try:
            marker = decode_marker(record) if not is_content(record) else None
        except Malformed:
            marker = None
        if marker is None:
            continue
        following = records[place : place + marker.contents]
        found.setdefault(marker.id, []).append(_op_row(marker, record, clock_ms, following))
    return found


def _op_row(marker: Marker, record: Record, clock_ms: int, following: list[Record]) -> MarkerFact:
    messages = [decode_half(each).message for each in following]
    return MarkerFact(
        PARTITION,
        record.offset,
        record.timestamp_ms,
        clock_ms,
        True,
        str(marker.kind),
        str(marker.source),
        marker.group,
        marker.round,
        marker.number,
        marker.reason,
        round(marker.later_s * 1000),
        [Content(seq, *content_of(message)) for seq, message in enumerate(messages)] or None,
        marker.contents,
    )
