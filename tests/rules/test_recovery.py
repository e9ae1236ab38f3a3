"""Recovery equals a replay from the start, at any crash point."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import Any, NamedTuple

import pytest

from tests.rules.fakes import FakeProxy, FakeTime, raising
from tests.rules.harness import (
    Harness,
    commit,
    forget_bodies,
    message,
    positions,
    remembered,
    roll_back,
    settled,
    snapshot,
    unsettled,
    until,
)
from txbroker.core import settled as core_settled
from txbroker.core import snapshot as core_snapshot
from txbroker.core.ledger import Ledger
from txbroker.core.records import (
    RECORD_VERSION,
    CheckPolicy,
    Claim,
    Decision,
    MarkerKind,
    Record,
    Source,
    State,
)
from txbroker.core.snapshot import is_snapshot
from txbroker.core.transaction import Transaction
from txbroker.door.writing import Unknown
from txbroker.errors import RequestError
from txbroker.proxy.partition import snapshots
from txbroker.proxy.partition.owner import PartitionOwner
from txbroker.proxy.partition.recovery import Recovered, check_checkpoint, recover
from txbroker.testing.topics import KafkaTransaction, LostReply, MemoryPartition

STEPS = 80
LONG = bool(os.environ.get("TXBROKER_TEST_LONG"))
SEEDS = 60 if LONG else 4
BIG = "big" * 100
SMALL_BYTES, LARGE_BYTES = 150, 100_000
POLICY = CheckPolicy(after_s=0.0, interval_s=0.0, attempts_max=2, timeout_s=0.0)


class Written(NamedTuple):
    """A record was appended."""

    topic: str
    number: int
    record: Record
    transaction: KafkaTransaction | None


class Ended(NamedTuple):
    """A Kafka transaction was ended."""

    transaction: KafkaTransaction
    committed: bool


class Journal:
    """What happens on the Kafka of a harness, from now on.

    Args:
        harness: started, and nothing has happened there.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.lines: list[Written | Ended] = []
        for name, topic in harness.kafka.topics.items():
            for number, partition in enumerate(topic.partitions):
                self._watch(name, number, partition)
        end = harness.kafka.end

        def ended(transaction: KafkaTransaction, *, committed: bool) -> None:
            if transaction.open:
                self.lines.append(Ended(transaction, committed))
            end(transaction, committed=committed)

        harness.kafka.end = ended  # type: ignore[method-assign]

    def _watch(self, name: str, number: int, partition: MemoryPartition) -> None:
        def note(record: Record) -> None:
            _, transaction = partition._entries[-1]
            self.lines.append(Written(name, number, record, transaction))

        partition.follow(note)

    def moments(self) -> list[int]:
        """Return after how many lines one of txbroker's own logs has changed."""
        return [
            count
            for count, line in enumerate(self.lines, 1)
            if isinstance(line, Ended) or line.topic.startswith("txbroker.")
        ]

    def checkpoint_cuts(self) -> list[int]:
        """Return after how many lines the checkpoint topic has one more record."""
        return [
            count
            for count, line in enumerate(self.lines, 1)
            if isinstance(line, Written) and line.topic == "txbroker.checkpoint"
        ]

    async def world_at(
        self, time_: FakeTime, count: int, *, logs_to: int | None = None, snapshots: bool
    ) -> Harness:
        """Return a separate harness in which only the first `count` lines have happened.

        Args:
            time_: the owners' clock.
            count: lines; the next claim aborts open transactions.
            logs_to: lines of half and operation topic, where more of those have happened.
            snapshots: whether snapshots are there.
        """
        made = Harness(time_, self.harness.monkeypatch)
        made.clock = made.kafka.clock = self.harness.clock
        await made.start()
        for topic in made.kafka.topics.values():
            for partition in topic.partitions:
                partition._entries.clear()
        done = {line.transaction for line in self.lines[:count] if _committed(line)}
        for at, line in enumerate(self.lines[: logs_to or count]):
            if isinstance(line, Ended):
                continue
            if at >= count and line.topic not in ("txbroker.half", "txbroker.op"):
                continue
            if not snapshots and is_snapshot(line.record.key):
                continue
            made.kafka.topics[line.topic].partitions[line.number]._entries.append(
                (line.record, _ended(line.transaction, done))
            )
        return made


def _committed(line: Written | Ended) -> bool:
    return isinstance(line, Ended) and line.committed


def _ended(
    transaction: KafkaTransaction | None, done: set[KafkaTransaction | None]
) -> KafkaTransaction | None:
    if transaction is None:
        return None
    ended = KafkaTransaction(transaction.producer)
    ended.open, ended.committed = False, transaction in done
    return ended


@pytest.fixture(autouse=True)
def _small_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_snapshot, "CHUNK_ENTRIES", 3)
    monkeypatch.setattr(core_settled, "SEGMENT_ENTRIES", 2)
    monkeypatch.setattr(snapshots, "REST_MIN_S", 0.0)
    monkeypatch.setattr(snapshots, "REST_MAX_S", 0.0)


class Work:
    """A random life of one partition, its owners, and everything that befalls them."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.harness = harness
        self.random = random.Random(seed)
        self.journal = Journal(harness)
        self.writing: set[asyncio.Task[bool]] = set()

    async def run(self) -> None:
        """Live, after everything that is to be seen was there once."""
        self.owner = await self.harness.owner()
        await self.first()
        steps = (
            [self.prepare] * 6
            + [self.decide] * 6
            + [self.check] * 6
            + [self.snapshot] * 3
            + [self.lose, self.shrink, self.grow, self.revive, self.let_go, self.take_over]
        )
        for _ in range(STEPS):
            step = self.random.choice(steps)
            try:
                await step()
            except RequestError:
                continue
            for _ in range(self.random.randrange(4)):
                await asyncio.sleep(0)
        await asyncio.gather(*self.writing, return_exceptions=True)
        await settled()
        await self.owner.close()

    async def first(self) -> None:
        """Refuse one, park one, leave one pending, and write a snapshot of them."""
        await self.shrink()
        refused = await self.harness.prepared(self.owner, message(BIG, topic="u"))
        parked = await self.harness.prepared(self.owner, message("parked"), policy=POLICY)
        await self.harness.prepared(self.owner, message("pending"))
        await commit(self.owner, refused)
        await until(lambda: self.harness.events.refusals == [refused])
        found = self.owner.ledger.index.transactions[parked]
        for number in (1, 2):
            fields = {"reason": "due", "number": number}
            row = self.owner._context.marker(
                found, MarkerKind.CHECK, source=Source.SCHEDULE, **fields
            )
            await self.owner._op.append_one(row)
        await until(lambda: found.state is State.PARKED)
        assert await snapshot(self.owner)

    def _any(self, *states: State) -> Transaction | None:
        found = [t for t in self.owner.ledger.index.transactions.values() if t.state in states]
        return self.random.choice(found) if found else None

    async def prepare(self) -> None:
        """Prepare one of one or two messages, for a target that may be too small for it."""
        messages = [message(BIG if self.random.random() < 0.3 else "v", topic="u")]
        if self.random.random() < 0.5:
            messages.append(message("second", at=self.random.randrange(2)))
        await self.harness.prepared(self.owner, *messages, policy=POLICY)

    async def decide(self) -> None:
        found = self._any(State.PENDING, State.PARKED)
        if found is not None:
            await (commit if self.random.random() < 0.75 else roll_back)(self.owner, found.id)

    async def check(self) -> None:
        found = self._any(State.PENDING)
        if found is None:
            return
        over = found.park_ms() is not None
        kind = MarkerKind.PARK if over else MarkerKind.CHECK
        fields = {} if over else {"reason": "due", "number": found.checks.number + 1}
        await self._mark(found, kind, **fields)

    async def _mark(self, transaction: Transaction, kind: MarkerKind, **fields: Any) -> None:
        """Write what the schedule does to a transaction."""
        context = self.owner._context
        row = context.marker(transaction, kind, source=Source.SCHEDULE, **fields)
        await self.owner._op.append_one(row)

    async def revive(self) -> None:
        found = self._any(State.PARKED, State.REFUSED)
        if found is not None:
            await self.owner.api.revive(found.id, "ops", "")

    async def snapshot(self) -> None:
        if self.random.random() < 0.5:
            forget_bodies(self.owner)
        if not any(not task.done() for task in self.writing):
            self.writing.add(asyncio.create_task(snapshot(self.owner)))

    async def lose(self) -> None:
        """Lose a turn, before or after it took effect."""
        if self.random.random() < 0.5:
            self.harness.partition.writes.append(raising(Unknown()))
        else:
            outcome = self.random.choice([LostReply.DONE, LostReply.NOT_DONE])
            self.harness.kafka.lose_answer_of_next_commit(outcome)

    async def shrink(self) -> None:
        """The target takes large messages no more."""
        self.harness.kafka.set_message_bytes_max("u", SMALL_BYTES)

    async def grow(self) -> None:
        self.harness.kafka.set_message_bytes_max("u", LARGE_BYTES)

    async def let_go(self) -> None:
        """Let everything that can go on go on, retries included."""
        await asyncio.sleep(0.012)

    async def take_over(self) -> None:
        """Another owner takes over, from one that closed or that does not know yet."""
        old = self.owner
        if self.random.random() < 0.5:
            await old.close()
        proxy, self.harness.proxy = self.harness.proxy, FakeProxy()
        self.owner = await self.harness.owner()
        proxy.ours = False


async def recovered(harness: Harness) -> tuple[Ledger, Recovered]:
    """Return the ledger of an owner that claims now and does nothing else."""
    context = harness.make()._context
    claim = Claim(RECORD_VERSION, f"claim-{random.random()}", "test", "")
    await check_checkpoint(context.door)
    return context.ledger, await recover(context, await context.door.claim(claim))


async def check_moment(journal: Journal, count: int, logs_to: int | None) -> Counter[str]:
    """Recover from the topics at a moment, with and without snapshots, and continue."""
    time_ = journal.harness.time
    plain = await journal.world_at(time_, count, logs_to=logs_to, snapshots=False)
    wanted, _ = await recovered(plain)
    harness = await journal.world_at(time_, count, logs_to=logs_to, snapshots=True)
    ledger, found = await recovered(harness)
    assert unsettled(ledger) == unsettled(wanted)
    assert positions(ledger) == positions(wanted)
    assert remembered(ledger) == remembered(wanted)
    harness.kafka.set_message_bytes_max("u", LARGE_BYTES)
    owner = await harness.owner()
    await _drained(owner)
    _check_promoted(harness, owner)
    await harness.close()
    seen = Counter({"snapshots": int(found.greatest is not None)})
    seen.update(str(each.state) for each in ledger.index.transactions.values())
    return seen


async def _drained(owner: PartitionOwner) -> None:
    ledger = owner.ledger
    await until(
        lambda: not ledger.index.ready and not ledger.index.refused and not ledger.index.to_keep
    )


def _check_promoted(harness: Harness, owner: PartitionOwner) -> None:
    """Each message of each committed transaction is visible once, and nothing else is."""
    visible = Counter(
        (dict(record.headers)["txb-id"] or b"").decode()
        for topic, partition in (("t", 0), ("t", 1), ("u", 0))
        for record in harness.kafka.visible(topic, partition)
    )
    first: dict[str, str] = {}
    for marker in harness.markers():
        if marker.kind in (MarkerKind.COMMIT, MarkerKind.ROLLBACK):
            first.setdefault(marker.id, marker.kind)
    for transaction in owner.ledger.index:
        committed = first.get(transaction.id) == MarkerKind.COMMIT
        assert (transaction.verdict.decision is Decision.COMMIT) is committed
        expected = len(transaction.places) if committed else 0
        assert visible.pop(transaction.id, 0) == expected, transaction
    assert not visible


@pytest.mark.rule(10, 11)
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_recovery_equals_replay_at_every_moment(harness: Harness, seed: int) -> None:
    work = Work(harness, seed)
    await work.run()
    seen: Counter[str] = Counter()
    for count in work.journal.moments():
        seen += await check_moment(work.journal, count, None)
    # Only states that occur are tested.
    for what in ("snapshots", "pending", "committed", "refused", "parked"):
        assert seen[what], (what, seen)


@pytest.mark.rule(11)
@pytest.mark.parametrize("seed", range(100, 100 + SEEDS))
async def test_recovery_equals_replay_at_every_checkpoint_end(harness: Harness, seed: int) -> None:
    work = Work(harness, seed)
    await work.run()
    seen: Counter[str] = Counter()
    for count in work.journal.checkpoint_cuts():
        seen += await check_moment(work.journal, count, len(work.journal.lines))
    assert seen["snapshots"]
