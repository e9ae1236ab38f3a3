"""Long settled transactions are found in the logs by id, despite clock changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from msgspec import structs

from tests.kit.logs import WINDOW_MS
from tests.rules.harness import Harness, roll_back
from txbroker.core.encoding import encode_contents, encode_half, encode_marker
from txbroker.core.records import (
    RECORD_VERSION,
    CheckPolicy,
    Half,
    Marker,
    MarkerKind,
    Message,
    Record,
    Source,
    State,
)
from txbroker.core.routing import make_id
from txbroker.core.settled import summary_of, to_transaction
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import Appended
from txbroker.errors import KafkaUnavailable, NotFound, TooOld
from txbroker.proxy.partition import partition_api as answers
from txbroker.proxy.partition.history import read_verdict, search
from txbroker.testing.topics import MemoryPartition

START_MS = 1_700_000_000_000
POLICY = CheckPolicy(after_s=0.0, interval_s=0.01, attempts_max=5, timeout_s=0.0)
HOUR_MS = 3_600_000


class CountingLog:
    """A `txbroker.door.protocols.Log` over records in memory that counts reads."""

    batch_bytes_max = 1 << 20

    def __init__(self) -> None:
        self.partition = MemoryPartition()
        self.read_records = 0

    async def append(self, records: Sequence[Record]) -> Appended:
        """No writes during a search."""
        raise AssertionError("a search wrote")

    async def bounds(self, *, confirmed: bool = True) -> tuple[int, int]:
        return self.partition.begin, self.partition.end

    async def read(
        self, start: int, end: int, skipped: Callable[[range], None] | None = None
    ) -> AsyncIterator[Sequence[Record]]:
        for first in range(start, end, 100):
            records = self.partition.read(first, min(first + 100, end))
            self.read_records += len(records)
            yield records

    async def pick(self, offsets: Sequence[int]) -> Sequence[Record]:
        return self.partition.pick(offsets)


class Past:
    """Two logs, written as an owner writes them: ids follow the half topic's log clock."""

    def __init__(self) -> None:
        self.half, self.op = CountingLog(), CountingLog()
        self.half_ms = self.op_ms = START_MS
        self.log_clock_ms = 0
        self.ids: list[str] = []
        self.offsets: dict[str, int] = {}

    def prepare(self, *messages: Message, id_ms: int | None = None) -> str:
        """Store a half message now, with an id of now if no other is given."""
        self.log_clock_ms = max(self.log_clock_ms, self.half_ms)
        at_ms = self.log_clock_ms if id_ms is None else id_ms
        id = make_id(0, at_ms, len(self.offsets) + 1)
        half = Half(id, "g", messages or (Message("t", b"k", b"v", partition=1),), policy=POLICY)
        self.offsets[id] = self.half.partition.append(encode_half(half), self.half_ms)
        if id_ms is None:
            self.ids.append(id)
        return id

    def mark(self, kind: str, id: str, *contents: Message, **fields: object) -> None:
        marker = Marker(
            RECORD_VERSION,
            MarkerKind(kind),
            id,
            half=self.offsets[id],
            contents=len(contents),
            **fields,  # type: ignore[arg-type]
        )
        records = [encode_marker(marker)]
        if contents:
            records.extend(encode_contents(Half(id, "g", contents), contents))
        self.op.partition.append(records, self.op_ms)

    def settle(self, id: str) -> None:
        self.mark("check", id, round=1, number=1, reason="due", endpoint="http://g")
        self.mark("commit", id)

    def pass_ms(self, ms: int) -> None:
        self.half_ms += ms
        self.op_ms += ms

    def run(self, count: int, step_ms: int = 100) -> None:
        """Prepare and settle transactions, each a few later than it was prepared."""
        left = [self.prepare()]
        for _ in range(count - 1):
            self.pass_ms(step_ms)
            left.append(self.prepare())
            if len(left) > 7:
                self.settle(left.pop(0))
        for id in left:
            self.settle(id)

    async def find(self, id: str) -> Transaction:
        return await search(self.half, self.op, id, WINDOW_MS)


async def all_found(past: Past, step: int) -> None:
    """Every so manyth transaction is found, with its check and its decision."""
    for id in past.ids[::step]:
        found = await past.find(id)
        assert (found.id, found.state, found.offset) == (id, State.PROMOTED, past.offsets[id])
        assert [attempt.endpoint for attempt in found.checks.attempts] == ["http://g"]


async def test_transaction_is_found_with_checks_and_targets() -> None:
    past = Past()
    past.run(4000)
    id = past.prepare(Message("t", b"k", b"1", partition=1), Message("u", None, None, partition=0))
    for number, kind in enumerate(("check", "returned", "check", "later", "check"), 2):
        past.pass_ms(1000)
        past.mark(kind, id, round=1, number=number // 2, reason="due", previous=kind, later_s=1.0)
    past.run(2000)
    past.mark("rollback", id, reason="by hand")
    past.run(2000)
    found = await past.find(id)
    assert (found.state, found.verdict.reason) == (State.ROLLED_BACK, "by hand")
    assert [(each.number, each.counts, each.outcome) for each in found.checks.attempts] == [
        (1, False, "returned"),
        (2, False, "later"),
        (3, True, ""),
    ]
    assert [(each.topic, each.partition) for each in found.messages] == [("t", 1), ("u", 0)]
    await all_found(past, 97)


async def test_final_messages_are_found() -> None:
    past = Past()
    past.run(100)
    id = past.prepare()
    past.mark("commit", id, Message("t", b"k", b"other", partition=1))
    past.run(100)
    found = await past.find(id)
    assert (found.state, found.verdict.decision) == (State.PROMOTED, "commit")


async def test_search_reads_few_records() -> None:
    past = Past()
    past.run(8000, step_ms=1000)
    id = past.ids[4000]
    await past.find(id)
    # Half of a look each for halving, ten seconds beside the id, and a piece read too far.
    assert past.half.read_records < 15 * 14 + 300
    assert past.op.read_records < 15 * 14 + 300
    past.half.read_records = past.op.read_records = 0
    with pytest.raises(NotFound):
        await past.find(make_id(0, START_MS + 4_000_500, 1 << 40))
    assert past.half.read_records < 15 * 28 + 4 * WINDOW_MS / 1000 + 400
    assert past.op.read_records == 0


@pytest.mark.parametrize("back_ms", [600_000, 24 * HOUR_MS])
@pytest.mark.parametrize("whose", ["half", "op", "both"])
async def test_clock_set_back_hides_nothing(whose: str, back_ms: int) -> None:
    past = Past()
    past.run(1000)
    for _ in range(2):
        for name in ("half_ms", "op_ms"):
            if whose in (name.removesuffix("_ms"), "both"):
                setattr(past, name, getattr(past, name) - back_ms)
        past.run(1000)
    past.pass_ms(3 * back_ms)
    past.run(1000)
    await all_found(past, 41)


@pytest.mark.rule(3)
@pytest.mark.parametrize("step_ms", [WINDOW_MS // 4, 2 * WINDOW_MS, HOUR_MS])
async def test_sparse_log_does_not_mislead_search(step_ms: int) -> None:
    past = Past()
    past.run(200, step_ms=step_ms)
    await all_found(past, 1)


async def test_void_half_messages_do_not_mislead_search() -> None:
    past = Past()
    for number in range(400):
        past.run(7)
        past.prepare(id_ms=past.half_ms + (10 * HOUR_MS if number % 2 else -10 * HOUR_MS))
    voids = sorted(set(past.offsets) - set(past.ids))
    await all_found(past, 61)
    for id in voids[::40]:
        with pytest.raises(NotFound):
            await past.find(id)


async def test_transaction_before_log_start_is_too_old() -> None:
    past = Past()
    past.run(4000)
    past.half.partition.delete_before(2000)
    with pytest.raises(TooOld):
        await past.find(past.ids[100])
    found = await past.find(past.ids[2100])
    assert found.state is State.PROMOTED
    past.op.partition.delete_before(past.op.partition.end - 10)
    with pytest.raises(TooOld, match="deciding marker"):
        await past.find(past.ids[2100])


@pytest.mark.parametrize("op", ["there", "gone", "silent", "of another"])
async def test_summary_gets_verdict_from_marker(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    past = Past()
    id, other = past.prepare(), past.prepare()
    past.mark("rollback", id, source=Source.OPERATOR, by="ann", reason="by hand")
    past.mark("rollback", other, source=Source.CHECK)
    remembered = to_transaction(summary_of(await past.find(id)))
    if op == "gone":
        past.op.partition.delete_before(1)
    elif op == "of another":
        remembered.verdict = structs.replace(remembered.verdict, op_offset=1)
    elif op == "silent":
        monkeypatch.setattr(past.op, "pick", silent)
    await read_verdict(past.op, remembered)
    found = (remembered.verdict.source, remembered.verdict.by, remembered.verdict.reason)
    assert found == ((Source.OPERATOR, "ann", "by hand") if op == "there" else (None, "", ""))


async def silent(offsets: Sequence[int]) -> Sequence[Record]:
    """Pick from a Kafka that does not answer."""
    raise KafkaUnavailable("no answer")


async def test_silent_kafka_delays_no_answer(harness: Harness) -> None:
    owner, id = await harness.new_pending()
    await roll_back(owner, id)
    owner.ledger.index.settled.seal()
    owner.ledger.index.settled.shown.clear()
    assert (await owner.api.find(id)).verdict.source is Source.PRODUCER
    harness.monkeypatch.setattr(answers, "VERDICT_S", 0.01)
    harness.monkeypatch.setattr(owner.api._logs[1], "pick", lambda _: asyncio.Event().wait())
    found = await owner.api.find(id)
    assert (found.state, found.verdict.source) == (State.ROLLED_BACK, None)
