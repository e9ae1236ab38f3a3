"""Long settled transactions are found in the logs by id, despite clock changes."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from msgspec import structs

from tests.kit.logs import WINDOW_MS
from tests.rules.harness import Harness, commit, roll_back
from txbroker.core.encoding import encode_contents, encode_half, encode_marker, promoted_headers
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
from txbroker.core.terms import SearchTerms
from txbroker.core.transaction import Transaction
from txbroker.door.protocols import Appended, LogTruncated
from txbroker.errors import KafkaUnavailable, NotFound, TooOld
from txbroker.principals import Patterns
from txbroker.proxy.partition import partition_api as answers
from txbroker.proxy.partition import scan
from txbroker.proxy.partition.history import (
    Account,
    account_of,
    read_markers,
    read_targets,
    search,
)
from txbroker.proxy.partition.scan import (
    Cursor,
    Layer,
    search_memory,
    search_topic,
)
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
        self.read_records += len(offsets)
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


class PastTargets:
    """The target topics of a past: a `Targets` that only reads."""

    def __init__(self) -> None:
        self.partitions: dict[tuple[str, int], MemoryPartition] = defaultdict(MemoryPartition)

    async def records(
        self, topic: str, partition: int, *, start: int | None = None, since_ms: int = 0
    ) -> AsyncIterator[Sequence[Record]]:
        if topic == "secret":
            raise KafkaUnavailable("not authorized for topic secret")
        log = self.partitions[topic, partition]
        for record in log.read(log.begin, log.end):
            if record.timestamp_ms >= since_ms:
                yield [record]


def remembered(found: Transaction) -> Account:
    """A transaction as far as a summary goes."""
    return account_of(to_transaction(summary_of(found)))


@pytest.mark.parametrize("gone", ["nothing", "half", "marker", "both", "of another"])
async def test_summary_is_read_back_or_names_its_gaps(gone: str) -> None:
    past = Past()
    past.run(300)
    id = past.prepare()
    for number in (1, 2):
        past.pass_ms(1000)
        past.mark("check", id, round=1, number=number, reason="due", endpoint="http://g")
    past.run(300)
    past.mark("rollback", id, source=Source.OPERATOR, by="ann", reason="by hand")
    past.run(300)
    account = remembered(await past.find(id))
    verdict = account.transaction.verdict
    if gone in ("half", "both"):
        past.half.partition.delete_before(past.offsets[id] + 1)
    if gone in ("marker", "both"):
        past.op.partition.delete_before(verdict.op_offset + 1)
    if gone == "of another":
        account.transaction.verdict = structs.replace(verdict, op_offset=1)
    await read_markers(account, past.half, past.op, WINDOW_MS)
    verdict, checks = account.transaction.verdict, account.transaction.checks
    decider = (verdict.source, verdict.by, verdict.reason)
    attempts = [(attempt.round, attempt.number) for attempt in checks.attempts]
    words = " ".join(account.gaps)
    if gone in ("nothing", "half"):
        assert decider == (Source.OPERATOR, "ann", "by hand")
        assert account.markers["rollback", 0, 0].offset == verdict.op_offset
    else:
        assert decider == (None, "", "")
        assert "the deciding marker" in words
    if gone == "nothing":
        assert (attempts, account.attempts_known, account.gaps) == ([(1, 1), (1, 2)], True, [])
        first, second = (account.markers["check", 1, number].offset for number in (1, 2))
        assert first < second < verdict.op_offset
    else:
        assert not account.attempts_known
    assert ("its half message" in words) is (gone in ("half", "both"))


@pytest.mark.parametrize("gone", ["nothing", "one", "topic", "bytes"])
async def test_target_offsets_are_read_back_or_named_as_gaps(gone: str) -> None:
    past, targets = Past(), PastTargets()
    name = "secret" if gone == "topic" else "t"
    early = Message(name, b"k", b"1", partition=1, timestamp_ms=START_MS - HOUR_MS)
    messages = (
        early,
        Message(name, b"k", b"2", partition=1),
        Message("u", None, b"3", partition=0),
    )
    id = past.prepare(*messages)
    past.mark("commit", id)
    transaction = await past.find(id)
    decided_ms = transaction.verdict.at_ms
    for sequence, message in enumerate(messages):
        at = targets.partitions[message.topic, message.partition or 0]
        at.append([Record(b"k", b"other", (("txb-id", make_id(0, 1, 1).encode()),))], decided_ms)
        if gone == "one" and sequence == 1:
            continue
        headers = promoted_headers(id, sequence, 3, message, (("txb-installation", b"x"),))
        stamp_ms = message.timestamp_ms or decided_ms
        at.append([Record(message.key, message.value, headers, stamp_ms)], decided_ms)
    account = account_of(transaction)
    assert not account.is_whole
    await read_markers(account, past.half, past.op, WINDOW_MS)
    await read_targets(account, targets, 3 if gone == "bytes" else 1000)  # type: ignore[arg-type]
    words = " ".join(account.gaps)
    expected = {
        "nothing": ((1, 3, 1), ""),
        "one": ((1, -1, 1), "retention or compaction"),
        "topic": ((-1, -1, 1), "not authorized for topic secret"),
        "bytes": ((-1, -1, -1), "`txbroker tx trace` reads further"),
    }[gone]
    assert account.transaction.offsets == expected[0]
    assert expected[1] in words
    assert account.is_whole is (gone == "nothing")


async def scanned(past: Past, terms: SearchTerms, layer: Layer = Layer.HALF) -> list[str]:
    """Return the ids of all pages of a scan of a topic."""
    found: list[str] = []
    cursor: Cursor | None = Cursor()
    while cursor is not None:
        page = await search_topic(past.half, past.op, layer, terms, cursor)
        assert page.next != cursor
        found += [match.id for match in page.matches]
        cursor = page.next
    return found


@pytest.mark.parametrize("trouble", ["none", "old end", "retention", "lost end"])
async def test_scan_reads_all_or_fails(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "BLOCK", 300)
    past = Past()
    past.run(1000)
    inner = past.half.bounds
    expected = set(past.ids)

    async def bounds(*, confirmed: bool = True) -> tuple[int, int]:
        start, end = await inner()
        if trouble == "retention" and not start and not confirmed:
            past.half.partition.delete_before(750)  # between this answer and the read
        if trouble == "lost end" and not confirmed:
            past.half.partition.delete_from(900)
        return start, 0 if trouble == "old end" and not confirmed else end

    monkeypatch.setattr(past.half, "bounds", bounds)
    if trouble == "lost end":
        with pytest.raises(LogTruncated):
            await scanned(past, SearchTerms(group="g"))
        return
    if trouble == "retention":
        expected = {id for id in expected if past.offsets[id] >= 750}
    assert set(await scanned(past, SearchTerms(group="g"))) == expected


async def test_scan_of_markers_begins_at_the_given_time() -> None:
    past = Past()
    past.run(3000)
    id, final = past.prepare(), Message("t", b"final", b"", partition=1)
    past.run(20)
    past.mark("commit", id, final)
    past.run(200)
    terms = SearchTerms(key=b"final", from_ms=past.half_ms - 60_000)
    past.op.read_records = 0
    assert await scanned(past, terms, Layer.OP) == [id]
    assert past.op.read_records < 1500
    assert await scanned(past, structs.replace(terms, key=b"k"), Layer.OP) == []
    past.op.read_records = 0
    for no_half in ({"from_ms": past.half_ms + 3_600_000}, {"from_ms": None, "to_ms": 1}):
        assert await scanned(past, structs.replace(terms, **no_half), Layer.OP) == []
    assert past.op.read_records == 0


async def test_final_messages_of_a_void_commit_are_not_found(harness: Harness) -> None:
    owner, id = await harness.new_pending()
    message = Message("t", b"final", b"v", partition=0)
    await commit(owner, id, messages=(message,))
    other = await harness.prepared(owner)
    await roll_back(owner, other)
    for each, place in ((other, 0), (other, (1 << 63) - 1), (make_id(0, 1, 1), 0)):
        harness.zombie_mark("commit", each, half=place, contents=1)
        for record in encode_contents(Half(each, "g", (message,)), (message,)):
            harness.zombie_op(record)
    # What another client writes, with a count that no transaction of ours has.
    (record,) = encode_half(Half(other, "g", (message,)))
    many = [(n, b"0/%d" % (1 << 50) if n == "txb-seq" else v) for n, v in record.headers]
    harness.zombie_op(structs.replace(record, headers=tuple(many)))
    for visible in (Patterns(), Patterns(["others"])):
        found = await owner.scanner.page(Layer.OP, SearchTerms(key=b"final"), Cursor(), visible)
        assert [each.id for each in found.transactions] == [id] * visible.everything
        assert (found.unread, found.next) == (0, None)


async def test_lost_messages_may_match(harness: Harness) -> None:
    owner, id = await harness.new_pending(Message("t", b"k", b"v", partition=0))
    transaction = owner.ledger.index.get(id)
    assert transaction is not None
    owner.ledger.index.evict(transaction)
    transaction.lost = True
    for terms, unread in (
        (SearchTerms(key=b"k"), 1),
        (SearchTerms(key=b"other"), 0),
        (SearchTerms(topic="t"), 0),
    ):
        found = await owner.scanner.page(Layer.MEMORY, terms, Cursor(), Patterns())
        assert (len(found.transactions), found.unread) == (terms.key is None, unread), terms
        found = await owner.scanner.page(Layer.MEMORY, terms, Cursor(), Patterns(["others"]))
        assert (found.transactions, found.unread) == ([], 0)


async def test_page_of_large_transactions_is_bounded(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "LISTED_MESSAGES_MAX", 3)
    messages = [Message("t", b"k", b"v", partition=0)] * 2
    owner, first = await harness.new_pending(*messages)
    ids = {first, *[await harness.prepared(owner, *messages) for _ in range(4)]}
    for layer in (Layer.MEMORY, Layer.HALF):
        found: list[list[str]] = []
        cursor: Cursor | None = Cursor()
        while cursor is not None:
            page = await owner.scanner.page(layer, SearchTerms(key=b"k"), cursor, Patterns())
            found.append([each.id for each in page.transactions])
            cursor = page.next
        assert [len(page) for page in found] == [1] * 5, layer
        assert {id for page in found for id in page} == ids


async def test_scan_of_memory_is_bounded_in_time(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "PAGE_S", 0.0)
    owner, first = await harness.new_pending()
    ids = [first, *[await harness.prepared(owner) for _ in range(3)]]
    index, pages = owner.ledger.index.by_offset, []
    cursor: Cursor | None = Cursor()
    while cursor is not None:
        page = await search_memory(index, owner.bodies, SearchTerms(), cursor.seen, 0)
        pages.append([match.id for match in page.matches])
        cursor = page.next
    assert pages == [*[[id] for id in ids], []]


async def test_silent_kafka_delays_no_answer(harness: Harness) -> None:
    owner, id = await harness.new_pending()
    await roll_back(owner, id)
    owner.ledger.index.settled.seal()
    owner.ledger.index.settled.shown.clear()
    found = await owner.api.find(id)
    assert (found.transaction.verdict.source, found.read_back) == (Source.PRODUCER, True)
    harness.monkeypatch.setattr(answers, "READ_BACK_S", 0.01)
    harness.monkeypatch.setattr(owner.api._logs[1], "pick", lambda _: asyncio.Event().wait())
    assert not (await owner.api.find(id, brief=True)).gaps
    found = await owner.api.find(id)
    assert (found.transaction.state, found.attempts_known) == (State.ROLLED_BACK, False)
    assert "not read within" in found.gaps[0]
