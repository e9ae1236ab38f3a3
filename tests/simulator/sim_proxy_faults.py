"""What goes wrong in a run of proxies, beside what goes wrong in every room."""

from __future__ import annotations

import random
from typing import Any

from msgspec import structs

from tests.simulator.sim_faults import Faults, Shape, some_of
from tests.simulator.sim_shop import Shop


class ProxyShape(Shape, frozen=True, kw_only=True):
    """How large a run of proxies is."""

    proxies: int
    partitions: int
    lanes: int
    transactions: int
    hurry: float
    """The share of transactions that a client does not wait for before it begins the next."""
    snapshot_records_min: int
    dedup_window_s: float
    settled_bytes_max: int
    half_retention_s: float
    restart: bool
    """Whether all proxies restart at the end, to compare their recovered ledgers."""


_DRAWN = (
    "kill",
    "kill at a step",
    "pause",
    "pause at a step",
    "cut",
    "broker away",
    "leader moves",
    "leaderless",
    "coordinator moves",
    "weather",
    "late",
    "lost requests",
    "wall clock",
    "services away",
    "slow markers",
    "stop all",
    "rolling restart",
    "target refuses",
    "stranger hangs",
    "aborts lost",
)
COMMITS_LOST = "commits lost"
DELETED = "records deleted"
_APART = {COMMITS_LOST: 0.15, DELETED: 0.1}
"""Drawn separately, so that most seeds keep their events."""
CHECKPOINT = "txbroker.checkpoint"
HALF = "txbroker.half"
SUCCESSION_S = 10.0
"""Maximum time until the partitions of killed proxies are claimed, seconds."""
KINDS = (*_DRAWN, *_APART)


def shape_of(seed: int, without: frozenset[str] = frozenset()) -> ProxyShape:
    """Draw a run's shape."""
    draw = random.Random(f"shape {seed}")
    kinds = list(some_of(_DRAWN, draw, without))
    apart = [kind for kind in _APART if random.Random(f"{kind} {seed}").random() < _APART[kind]]
    shape = ProxyShape(
        proxies=draw.choice([1, 2, 2, 2, 3]),
        partitions=draw.choice([1, 1, 2]),
        lanes=draw.choice([2, 3]),
        transactions=draw.randint(2, 5),
        hurry=draw.choice([0.0, 0.4, 0.9]),
        kinds=(*kinds, *(kind for kind in apart if kind not in without)),
        faults=draw.randint(2, 7),
        snapshot_records_min=draw.choice([4, 15, 10_000]),
        dedup_window_s=(window_s := draw.choice([12.0, 120.0])),
        settled_bytes_max=4000 if window_s == 12.0 else 1 << 24,
        half_retention_s=draw.choice([25.0, 3600.0]) if window_s == 12.0 else 3600.0,
        restart=draw.random() < 0.4,
    )
    if {"aborts lost", COMMITS_LOST}.isdisjoint(shape.kinds):
        return shape
    # An own partition without end marker stays closed until an operator ends its transaction:
    # half messages have to be kept for longer.
    return structs.replace(shape, half_retention_s=3600.0)


class ProxyFaults(Faults):
    """The faults of proxies."""

    never_hung = ("txbroker.half", "txbroker.op")

    def __init__(self, shop: Shop, *args: Any) -> None:
        super().__init__(*args)
        self.deleted: set[int] = set()
        """Half partitions with deleted records."""
        self._shop = shop

    def _services_away(self, until_s: float) -> str:
        self._shop.reachable = False
        self._later(until_s, setattr, self._shop, "reachable", True)
        return "services"

    def _records_deleted(self, until_s: float) -> str:
        names = [
            name
            for name, log in self._cluster.logs.items()
            if name[0] == HALF and log.begin < log.end
        ]
        if not names:
            return ""
        name = self._random.choice(names)
        log = self._cluster.logs[name]
        log.delete(below=self._random.choice([log.end, self._random.randint(log.begin, log.end)]))
        self.deleted.add(name[1])
        # Before or after an owner has noticed, copied its bodies and written a snapshot.
        kill = self._random.choice([self._stop_all, self._kill_at_a_step, self._kill_in_a_turn])
        self._later(self._random.choice([0.0, 0.5, 2.0, 12.0]), kill, until_s)
        return f"{name} begins at {log.begin}"

    def _aborts_lost(self, until_s: float) -> str:
        # Until it is ended, transactions for such a partition wait: the others must continue.
        self._loop.call_later(0.0, self._kill_in_a_turn, until_s)
        return self._ends_lost(2 * until_s + SUCCESSION_S, 0.5, commit=False)

    def _kill_in_a_turn(self, until_s: float) -> None:
        """Kill all proxies during a promotion, which the next claim aborts: rare otherwise."""
        if self.healed:
            return
        if any(log.open for (name, _), log in self._cluster.logs.items() if name == CHECKPOINT):
            self._operator.context.copy().run(self._stop_all, until_s)
        else:
            self._loop.call_later(0.001, self._kill_in_a_turn, until_s)

    def _commits_lost(self, until_s: float) -> str:
        what = self._ends_lost(until_s, self._random.choice([0.1, 0.4]), commit=True)
        # Only a later abort takes a commit back, so one is made likely.
        abort = self._random.choice([self._target_refuses, self._kill_at_a_step])
        return f"{what}, {abort(until_s)}"

    def _ends_lost(self, until_s: float, share: float, *, commit: bool) -> str:
        self._cluster.lost[commit] = share
        self._later(until_s, self._cluster.lost.update, {commit: 0.0})
        return f"{share:g} of them"

    def heal(self) -> None:
        self._shop.reachable = True
        self._shop.trouble = False
        self._cluster.lost = {False: 0.0, True: 0.0}
        for log, producer, commit in self._cluster.left_open:
            if producer in log.open:
                # As an operator does, with the epoch that the broker names.
                epoch = log.producers[producer].epoch
                log.mark(producer, epoch, self._cluster.now_ms(0), commit=commit)
        super().heal()
