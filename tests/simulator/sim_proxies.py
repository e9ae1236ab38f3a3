"""The room of proxies: a cluster, some proxies, clients, and the faults of the seed; then all is
healed, everything comes to rest, and the topics are judged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from tests.faults.judge import End, Judge, Note, Rec, Seen, Topics, Tx, Violation, read_log
from tests.simulator.sim_faults import TARGET_BYTES_MAX
from tests.simulator.sim_loop import Process
from tests.simulator.sim_proxy import FakeGroup, SimProxy
from tests.simulator.sim_proxy_faults import KINDS, ProxyFaults, ProxyShape, shape_of
from tests.simulator.sim_room import QUIET_S, Room
from tests.simulator.sim_shop import TOPICS, Asker, Lane, Shop
from txbroker.contract.service import HalfPartitionState
from txbroker.core.records import State
from txbroker.core.routing import parse_id
from txbroker.core.transaction import Transaction
from txbroker.errors import TooOld
from txbroker.proxy.partition.body_cache import BODY_LOST
from txbroker.proxy.partition.owner import PartitionOwner

REMEMBERED = (
    "state",
    "offset",
    "prepared_at_ms",
    "fingerprint",
    "verdict.contents_fingerprint",
    "places",
    "order",
    "verdict.decision",
    "verdict.op_offset",
    "verdict.at_ms",
    "checks.round",
    "checks.number",
    "checks.counted_ms",
    "checks.not_before_ms",
    "kept",
)
"""What of a transaction is a function of the log and of acknowledged turns."""
ALONG_S = 0.4
WORK_S = 40.0
"""How long clients run before all is healed, virtual seconds."""
OWN = ("half", "op", "checkpoint", "parked")
SETTINGS = {
    "check_after_s": 1.5,
    "check_interval_s": 2.0,
    "check_attempts_max": 3,
    "check_timeout_s": 1.0,
    "stuck_after_s": 25.0,
}


class Proxies(Room):
    """All that takes part in one run."""

    name = "proxies"
    kinds = KINDS
    shape: ProxyShape
    faults: ProxyFaults

    def __init__(self, seed: int, shape: ProxyShape, note: Callable[[str], None] | None) -> None:
        super().__init__(seed, shape, note)
        self.group = FakeGroup(self.network, shape.partitions)
        self.along: list[Seen] = []
        self.lost: set[str] = set()
        """Transactions with deleted messages."""
        self.proxies: list[SimProxy] = []
        self.shop = Shop(self.network, Process("shop", f"{seed}/shop"), self.proxies)
        frames = random.Random(f"frames {seed}")
        self.shop.frames = frames if frames.random() < 0.5 else None
        for number in range(shape.proxies):
            self.proxies.append(self._proxy(f"proxy-{number}", seed))
        self.faults = ProxyFaults(
            self.shop, shape, self.random, self.network, self.proxies, self.main, TOPICS, self._note
        )
        self._create_topics()

    @classmethod
    def of(cls, seed: int, without: frozenset[str], note: Callable[[str], None] | None) -> Proxies:
        """See `Room.of`."""
        return cls(seed, shape_of(seed, without), note)

    def _note(self, what: str, who: str) -> None:
        self.shop.history.notes.append(Note(self.now_s(), what, who))

    def _proxy(self, name: str, seed: int) -> SimProxy:
        shape = self.shape
        settings = {
            **SETTINGS,
            "snapshot_records_min": shape.snapshot_records_min,
            "dedup_window_s": shape.dedup_window_s,
            "settled_bytes_max": shape.settled_bytes_max,
            "half_retention_s": shape.half_retention_s,
        }
        return SimProxy(
            name,
            str(seed),
            self.network,
            self.group,
            self.shape.partitions,
            settings,
            lambda _: Asker(self.shop),
        )

    def _create_topics(self) -> None:
        for name in OWN:
            self.cluster.create(
                f"txbroker.{name}", self.shape.partitions, append_time=True, bytes_max=8 << 20
            )
        self.cluster.retain("txbroker.half", self.shape.half_retention_s)
        for name, partitions in zip(TOPICS, (2, 1), strict=True):
            self.cluster.create(name, partitions, append_time=False, bytes_max=TARGET_BYTES_MAX)

    # --- the run ---------------------------------------------------------------------------------

    async def run(self) -> list[str]:
        """See `Room.run`."""
        shape = self.shape
        for proxy in self.proxies:
            proxy.start()
        lanes = [
            self.loop.create_task(
                Lane(self.shop, f"lane-{number}", shape.partitions, shape.dedup_window_s).run(
                    shape.transactions, shape.hurry
                ),
                context=self.shop.process.context,
            )
            for number in range(self.shape.lanes)
        ]
        faults = asyncio.create_task(self.faults.make())
        along = asyncio.create_task(self._read_along())
        await asyncio.wait(lanes, timeout=WORK_S)
        faults.cancel()
        self.faults.heal()
        for task in [*lanes, *self.shop.repeats]:
            await task
        rest = await self.settle()
        if not rest:
            rest = await self._operate() or await self._restart()
        rest = rest or await self._unaccounted()
        await asyncio.sleep(ALONG_S)
        while not rest and any(self.open_transactions()):
            # What a target refused is tried again, also at this moment.
            await asyncio.sleep(0.01)
        along.cancel()
        return rest or self._judge()

    async def _unaccounted(self) -> list[str]:
        """Return which transactions whose prepare was acknowledged nobody knows any more, where
        half messages were deleted; note whose messages are lost."""
        left = []
        acked = {c.id for c in self.shop.history.calls if c.what == "prepare" and c.result == "ok"}
        for id in sorted(acked):
            partition = parse_id(id).partition
            if partition not in self.faults.deleted or partition in self._truncated():
                continue
            found = await self.loop.create_task(
                self.shop.show(partition, id), context=self.shop.process.context
            )
            if found == TooOld.code:
                # Settled before the window that is remembered; the judge sees that it is.
                continue
            if isinstance(found, str):
                left.append(f"I18 {id}: its prepare was acknowledged, and now it is {found}")
            elif found.cause is not None and found.cause.code == BODY_LOST:
                self.lost.add(id)
        # Others whose prepare was stored and not answered.
        self.lost |= {id for id, each in self._unsettled() if each.lost}
        return left

    def _unsettled(self) -> Iterator[tuple[str, Transaction]]:
        """Yield all that owners know and is not settled."""
        for proxy in self.proxies:
            if proxy.broker is not None:
                for owner in proxy.broker.partitions.open().values():
                    yield from owner.ledger.index.transactions.items()

    def _truncated(self) -> set[int]:
        """The half partitions that stopped because of deleted records."""
        return {
            number
            for proxy in self.proxies
            if proxy.broker is not None
            for number, state in proxy.broker.readiness().partitions.items()
            if state.startswith(HalfPartitionState.TRUNCATED)
        } & self.faults.deleted

    async def _operate(self) -> list[str]:
        """Let an operator decide or revive some parked transactions, according to the database."""
        parked = sorted(id for id, each in self._unsettled() if each.state is State.PARKED)
        chosen = [id for id in parked if self.random.random() < 0.5]
        if not chosen:
            return []
        for id in chosen:
            what = "revive" if self.random.random() < 0.5 else "decide"
            await self.loop.create_task(
                self.shop.operate(what, id), context=self.shop.process.context
            )
        return await self.settle()

    async def _restart(self) -> list[str]:
        """Kill and restart all proxies: recovery must restore their ledgers."""
        if not self.shape.restart:
            return []
        before = self._remembered()
        for proxy in self.proxies:
            proxy.kill()
            proxy.start(self.faults.wall_ahead_s())
        rest = await self.settle()
        if rest:
            return rest
        after = self._remembered()
        return [
            f"I14 {id}: remembered {sorted(was - now)}, read back {sorted(now - was)}"
            for id in sorted(before.keys() | after.keys())
            if (was := before.get(id, frozenset())) != (now := after.get(id, frozenset()))
            # What a target refused is tried again, and may have come through.
            and (now or "state=<State.REFUSED: 'refused'>" not in was)
        ]

    def _remembered(self) -> dict[str, frozenset[str]]:
        """Return what owners know of all that is not settled."""
        return {
            id: frozenset(f"{name}={attrgetter(name)(each)!r}" for name in REMEMBERED)
            for id, each in self._unsettled()
        }

    def unrest(self) -> list[str]:
        """See `Room.unrest`."""
        left = []
        truncated = self._truncated()
        owned: set[int] = set(truncated)
        for proxy in self.proxies:
            if proxy.broker is None:
                left.append(f"{proxy.name} has not joined")
                continue
            readiness = proxy.broker.readiness()
            stands = {HalfPartitionState.OWNED, HalfPartitionState.ELSEWHERE}
            waits = {
                number for number, state in readiness.partitions.items() if state not in stands
            }
            if not readiness.ready and not (waits and waits <= truncated):
                left.append(f"{proxy.name}: {readiness.problems}")
            owned |= proxy.broker.mine()
            for owner in proxy.broker.ledgers():
                left.extend(f"{proxy.name}: {each}" for each in self._unrest_of(owner))
        left.extend(
            f"{proxy.name} works on a call"
            for proxy, life in self.shop.served.values()
            if proxy.up and proxy.lives == life
        )
        left.extend(self.open_transactions())
        nobodys = set(range(self.shape.partitions)) - owned
        return left + [f"half partition {number} has no owner" for number in sorted(nobodys)]

    def _unrest_of(self, owner: PartitionOwner) -> Iterator[str]:
        """Yield what an owner has still to do, or to read."""
        ledger, logs = owner.ledger, self.cluster.logs
        for topic, position in (("half", ledger.half_position), ("op", ledger.op_position)):
            end = logs[f"txbroker.{topic}", owner.partition].end
            if position != end:
                yield f"{topic}-{owner.partition} is read to {position}, its end is {end}"
        for transaction in ledger.index:
            if transaction.state is State.COMMITTED or (
                transaction.state is State.PENDING and not transaction.lost
            ):
                yield f"{transaction.id} is {transaction.state}"
        to_write, to_remove = [*ledger.index.to_keep], [*ledger.index.to_release]
        if to_write or to_remove:
            yield f"copies to be written {to_write}, to be removed {to_remove}"

    def work(self) -> int:
        """See `Room.work`."""
        return len(read_log(self.topics()))

    # --- the judgement ---------------------------------------------------------------------------

    def topics(self) -> Topics:
        return Topics(
            half=self._records("txbroker.half", committed=False),
            op=self._records("txbroker.op", committed=False),
            parked=self._records("txbroker.parked", committed=True),
            targets=[r for topic in TOPICS for r in self._records(topic, committed=True)],
            checkpoint=self._records("txbroker.checkpoint", committed=True),
            along=self.along,
            ends=[End(*name, log.end, log.stable_end) for name, log in self.cluster.logs.items()],
        )

    def _records(self, topic: str, *, committed: bool) -> list[Rec]:
        found = self.records(topic, committed=committed)
        return [_rec(topic, number, record) for number, record in found]

    async def _read_along(self) -> None:
        """Read the targets while things happen, as a `read_committed` consumer."""
        positions = {name: 0 for name in self.cluster.logs if name[0] in TOPICS}
        while True:
            await asyncio.sleep(ALONG_S)
            at = self.now_s()
            for name, start in positions.items():
                log = self.cluster.logs[name]
                stop = log.stable_end
                if stop > start:
                    positions[name] = stop
                    found = log.records(start, committed=True)
                    self.along.extend(Seen(_rec(*name, record), at) for record in found)

    def _judge(self) -> list[str]:
        topics = self.topics()
        states = {
            transaction.id: str(transaction.state)
            for proxy in self.proxies
            if proxy.broker is not None
            for owner in proxy.broker.ledgers()
            for transaction in owner.ledger.index
        }
        rows = [id for id, what in self.shop.rows.items() if what == "row"]
        judge = Judge(
            self.shop.history,
            topics,
            rows,
            states,
            clock_apart_ms=float(_apart(self.skew_ms)),
            settle_max_s=QUIET_S,
            dedup_window_ms=round(self.shape.dedup_window_s * 1000),
        )
        found: list[Violation] = [each for each in judge.judge() if self._counts(each)]
        return [str(each) for each in found] + list(self._more(judge))

    def _counts(self, violation: Violation) -> bool:
        """Return whether a rule must hold although half messages were deleted: nothing
        is doubled, and no answer is wrong; but a loss, or a standstill, does not end."""
        id = violation.id
        excused = id in self.lost or (parse_id(id).partition in self._truncated() if id else False)
        return not (excused and violation.invariant in ("I1", "I6", "I7", "I12"))

    def _more(self, judge: Judge) -> Iterator[str]:
        """What the judge of real runs cannot see."""
        by_token: dict[str, list[Tx]] = {}
        for tx in judge.log.values():
            by_token.setdefault(tx.token, []).append(tx)
        for token, several in by_token.items():
            if len(several) > 1:
                ids = ", ".join(tx.id for tx in several)
                yield f"I3 {token}: prepared as {ids}\n{judge.story(several[0].id)}"
        yield from (f"the proxy itself: {each}" for each in self.loop.troubles)


def _rec(topic: str, number: int, record: Any) -> Rec:
    headers = tuple(record.headers)
    return Rec(topic, number, record.offset, record.timestamp, record.key, record.value, headers)


def _apart(skews_ms: list[int]) -> int:
    return max(skews_ms) - min(skews_ms) + max(map(abs, skews_ms)) + 50
