"""Carries out due checks: whom, when and how many at a time, never at another group's cost.

Each group has a queue, a limit of parallel calls and a back-off of its own. The steps of one
check are in `CheckRunner._check`; their order is what keeps the number of attempts true.
"""

import asyncio
import heapq
import itertools
import logging
import random
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Protocol, TypeAlias

import structlog
from msgspec import structs

from txbroker import tracing
from txbroker.checkers.base import (
    Answered,
    Channel,
    CheckCall,
    CheckResult,
    Finder,
    Unclear,
    Unreached,
    shortened,
)
from txbroker.core.records import CheckReason
from txbroker.core.shares import ShareOf, own_share, part_of
from txbroker.core.telling import telling, where_raised
from txbroker.errors import TxbrokerError
from txbroker.failpoints import hit

log = structlog.wrap_logger(logging.getLogger(__name__))

QUEUE_MAX = 100_000
"""Checks waiting in one group's queue; the owners' schedules keep the others. An entry is small
beside the half message that the owner holds, but offering it again and again costs time."""
PARALLEL_DEFAULT = 8
"""Calls to one group at a time, where the group does not say."""
PARALLEL_TOTAL_MAX = 256
"""Calls at a time of all groups; beyond it every group still gets its first one."""
FIRST_CALLS_MAX = 1024
"""Calls at a time, first ones included: the sockets that checks may take of a process."""
BACK_OFF_FIRST_S = 1.0
BACK_OFF_MAX_S = 30.0
"""How long an unreachable group rests: the first time, doubled each time, and at most; once to
twice as long at random, so that groups which went together do not come back together."""


class CheckOwner(Protocol):
    """The owner of the half partition that a transaction lives in. Compared by identity."""

    async def attempt(self, id: str, reason: CheckReason, endpoint: str) -> CheckCall | None:
        """Write the numbered marker of an attempt; several are awaited at once, for one batch.

        Return the question once the marker is durable and the ledger has accepted it, or None
        where there is nothing to ask (any more): decided, too early, not ours.
        """
        ...

    def still_pending(self, id: str) -> bool:
        """Say whether the transaction is undecided, by all markers that the ledger knows."""
        ...

    async def answered(self, call: CheckCall, endpoint: str, result: CheckResult) -> None:
        """Take what came of an attempt: a decision, "not yet", nobody reached, or nothing."""
        ...


class CheckMetrics(Protocol):
    """Told of what the runner does."""

    def check_ended(self, group: str, outcome: str, duration_s: float) -> None:
        """One try to check is over.

        `outcome`: `commit`, `rollback`, `unknown`, `later`, `unclear`, `returned` (an attempt
        that reached nobody) or `unreachable` (there was nobody, so no attempt was made).
        """
        ...


class Timer(Protocol):
    """What ends a group's rest, as `asyncio.TimerHandle` does."""

    def cancel(self) -> None:
        """Let it not happen."""
        ...


Later: TypeAlias = Callable[[float, Callable[[], None]], Timer]
"""Call something so many seconds later, from the event loop."""


class _Item:
    """A check that is due."""

    __slots__ = ("due_s", "forgotten", "group", "id", "order", "owner", "prefer", "reason")

    def __init__(
        self,
        owner: CheckOwner,
        id: str,
        group: str,
        prefer: str,
        reason: CheckReason,
        due_s: float,
        order: int,
    ) -> None:
        self.owner = owner
        self.id = id
        self.group = group
        self.prefer = prefer
        self.reason = reason
        self.due_s = due_s
        self.order = order
        self.forgotten = False

    def __lt__(self, other: "_Item") -> bool:
        return (self.due_s, self.order) < (other.due_s, other.order)

    @property
    def wanted(self) -> bool:
        return not self.forgotten and self.owner.still_pending(self.id)


class _Group:
    """The queue of one group and how it fares."""

    def __init__(self, name: str, share: "_Line") -> None:
        self.name = name
        self.share = share
        self.queue: list[_Item] = []
        self.running = 0
        self.failures = 0
        self.away_s = 0.0
        """When the first of these failures was met, by the loop's clock."""
        self.detail = ""
        self.era = 0
        """Grows with each back-off and each end of one, so that calls which began before it
        neither lengthen it nor count twice."""
        self.timer: Timer | None = None

    @property
    def resting(self) -> bool:
        return self.timer is not None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class _Line:
    """Groups whose calls are bounded together: all groups, or those of one share.

    Args:
        name: of the share, "" for all groups.
        first_max, more_max: calls at a time up to which a group gets its first one, or a further
            one.
    """

    def __init__(self, name: str, first_max: int, more_max: int) -> None:
        self.name = name
        self.groups = 0
        """How many of a share are known now."""
        self.running = 0
        self.charged = 0
        """What counts against further calls: of a share its calls up to its own bound, of all
        groups what their shares are charged. So first calls of a share take no other's part."""
        self.first_max = first_max
        self.more_max = more_max
        # Groups that the bound holds up, longest waiting first: those without any call under way,
        # and those that wait for a further one.
        self._first: dict[str, _Group] = {}
        self._more: dict[str, _Group] = {}

    def _open(self, further: bool) -> bool:
        return self.charged < self.more_max if further else self.running < self.first_max

    def room(self, group: _Group) -> bool:
        """Say whether the bound allows a group another call; if not, line it up."""
        further = group.running > 0
        if self._open(further):
            return True
        (self._more if further else self._first)[group.name] = group
        return False

    def forget(self, group: _Group) -> None:
        """It waits for nothing any more."""
        self._first.pop(group.name, None)
        self._more.pop(group.name, None)

    def next(self) -> Iterator[_Group]:
        """Yield the groups whose turn it is, while there is room."""
        for waiting, further in ((self._first, False), (self._more, True)):
            while waiting and self._open(further):
                yield waiting.pop(next(iter(waiting)))


class CheckRunner:
    """Takes due checks from owners and carries them out."""

    def __init__(
        self,
        finder: Finder,
        metrics: CheckMetrics,
        *,
        parallel: Callable[[str], int | None] = lambda group: None,
        queue_max: int = QUEUE_MAX,
        parallel_total_max: int = PARALLEL_TOTAL_MAX,
        first_calls_max: int = FIRST_CALLS_MAX,
        share_of: ShareOf = own_share,
        jitter: Callable[[], float] = random.random,
        later: Later | None = None,
    ) -> None:
        """Args:
        parallel: how many calls a group takes at a time; None: the default.
        share_of: returns whose a group is: no share has all calls.
        jitter: a random number from 0 to 1 for each back-off.
        later: how a back-off waits; None: by the event loop.
        """
        self._finder = finder
        self._metrics = metrics
        self._parallel = parallel
        self._queue_max = queue_max
        self._share_of = share_of
        self._jitter = jitter
        self._later = later or _by_the_loop
        self._groups: dict[str, _Group] = {}
        self._items: dict[tuple[CheckOwner, str], _Item] = {}
        self._all = _Line("", first_calls_max, parallel_total_max)
        self._share_bounds = (part_of(first_calls_max), part_of(parallel_total_max))
        self._shares: dict[str, _Line] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._order = itertools.count()
        self._closed = False

    # --- from the owners ---------------------------------------------------------------------

    def due(
        self,
        owner: CheckOwner,
        id: str,
        group: str,
        prefer: str,
        reason: CheckReason,
        *,
        due_s: float | None = None,
    ) -> bool:
        """Take a check that is due; it runs as soon as its group's turn allows.

        Args:
            prefer: the SDK instance to ask if it is there, "" for any.
            due_s: since when it is due, by the event loop's clock; None: now.

        Returns:
            True where it is queued, or was already; False where the group's queue is full: offer
            it again a little later.
        """
        if self._closed:
            return False
        if (owner, id) in self._items:
            return True
        known = self._groups.get(group)
        if known is not None and len(known.queue) >= self._queue_max:
            return False
        state = known or self._enter(group)
        since_s = asyncio.get_running_loop().time() if due_s is None else due_s
        item = _Item(owner, id, group, prefer, reason, since_s, next(self._order))
        self._items[owner, id] = item
        heapq.heappush(state.queue, item)
        self._pump(state)
        return True

    def _enter(self, name: str) -> _Group:
        share = self._share_of(name)
        line = self._shares.get(share)
        if line is None:
            line = self._shares[share] = _Line(share, *self._share_bounds)
        line.groups += 1
        group = self._groups[name] = _Group(name, line)
        return group

    def forget(self, owner: CheckOwner) -> None:
        """Drop the checks of an owner that lost its partition; no call of its goes out any more.

        A call that is out already ends by itself, and its answer goes nowhere.
        """
        gone = [item for item in self._items.values() if item.owner is owner]
        for item in gone:
            item.forgotten = True
        for name in {item.group for item in gone}:
            group = self._groups[name]
            group.queue = [item for item in group.queue if not item.forgotten]
            heapq.heapify(group.queue)
            self._pump(group)
        for item in gone:
            # A running one ends under a name that a new owner object does not use.
            self._items.pop((owner, item.id), None)

    # --- from sessions and policies ----------------------------------------------------------

    def wake(self, name: str) -> None:
        """Try a group again at once: a session has appeared, or its policy has changed."""
        group = self._groups.get(name)
        if group is not None:
            self._reached(group)
            self._pump(group)

    def unreachable(self) -> dict[str, str]:
        """Return the groups that cannot be reached now, each with why."""
        return {group.name: group.detail for group in self._groups.values() if group.failures}

    def unreachable_for_s(self) -> dict[str, float]:
        """Return the same groups, each with how long it has not been reached, seconds."""
        now_s = asyncio.get_running_loop().time()
        return {g.name: now_s - g.away_s for g in self._groups.values() if g.failures}

    @property
    def queued(self) -> int:
        """How many checks wait or run."""
        return len(self._items)

    @property
    def running(self) -> int:
        """How many checks are being carried out now."""
        return len(self._tasks)

    async def close(self) -> None:
        """Stop everything; returns once no call is under way."""
        self._closed = True
        for group in self._groups.values():
            group.stop_timer()
            group.queue.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._items.clear()
        self._groups.clear()
        self._shares.clear()

    # --- whose turn it is --------------------------------------------------------------------

    def _pump(self, group: _Group) -> None:
        """Start as many of a group's checks as the limits allow; drop those decided meanwhile."""
        while group.queue and not self._closed:
            if not group.queue[0].wanted:
                self._done(heapq.heappop(group.queue))
                continue
            if group.resting or group.running >= self._limit(group):
                return
            if not (group.share.room(group) and self._all.room(group)):
                return
            item = heapq.heappop(group.queue)
            self._count(group, 1)
            task = asyncio.get_running_loop().create_task(self._carry_out(group, item))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not group.queue and not group.running and not group.resting:
            self._drop(group)

    def _count(self, group: _Group, calls: int) -> None:
        """Count calls of a group that begin, or end if negative."""
        share = group.share
        for each in (group, share, self._all):
            each.running += calls
        before, share.charged = share.charged, min(share.running, share.more_max)
        self._all.charged += share.charged - before

    def _limit(self, group: _Group) -> int:
        # One call finds out whether an unreachable group is there again.
        return 1 if group.failures else self._parallel(group.name) or PARALLEL_DEFAULT

    def _drop(self, group: _Group) -> None:
        """Forget a group that nothing waits for; if it could not be reached, nobody asks now."""
        self._reached(group)
        for line in (group.share, self._all):
            line.forget(group)
        if self._groups.pop(group.name, None) is not None:
            group.share.groups -= 1
            if not group.share.groups:
                del self._shares[group.share.name]

    def _done(self, item: _Item) -> None:
        if self._items.get((item.owner, item.id)) is item:
            del self._items[item.owner, item.id]

    def _ended(self, group: _Group) -> None:
        """A call of this group is over: it and the groups that wait for room go on."""
        self._count(group, -1)
        self._pump(group)
        for line in (group.share, self._all):
            for waiting in line.next():
                self._pump(waiting)

    # --- one check ---------------------------------------------------------------------------

    async def _carry_out(self, group: _Group, item: _Item) -> None:
        again = False
        try:
            again = await self._check(group, item)
        except TxbrokerError as error:
            # The owner could not write: its schedule offers the check again.
            log.warning("check not made", id=item.id, group=group.name, why=str(error))
        except Exception as error:
            _tell_fault(item.id, item.group, error)
        finally:
            task = asyncio.current_task()
            if task is not None:
                self._tasks.discard(task)
            if again and not item.forgotten and not self._closed:
                heapq.heappush(group.queue, item)
            else:
                self._done(item)
            if not self._closed:
                self._ended(group)

    async def _check(self, group: _Group, item: _Item) -> bool:
        """Take the steps of one check; say whether it stays in the queue."""
        era = group.era
        started_s = asyncio.get_running_loop().time()
        channel = await self._acquire(item)
        if isinstance(channel, Unreached):
            self._metrics.check_ended(group.name, "unreachable", _since(started_s))
            self._failed(group, era, channel.detail)
            return True
        hit("check.acquired")
        try:
            if not item.wanted:
                return False
            call = await item.owner.attempt(item.id, item.reason, channel.endpoint)
            # From this test until the question is handed to the socket nothing is awaited.
            if call is None or not item.wanted:
                return False
            hit("check.asking")
            asked_s = asyncio.get_running_loop().time()
            result = await self._ask_traced(channel, call)
        finally:
            channel.release()
        endpoint = channel.endpoint
        if isinstance(result, Unreached) and channel.instance:
            until_s = asked_s + call.timeout_s
            endpoint, result = await self._ask_others(item, call, channel, result, until_s)
        hit("check.answered")
        self._metrics.check_ended(group.name, _outcome(result), _since(asked_s))
        if isinstance(result, Unreached):
            self._failed(group, era, result.detail)
        else:
            self._reached(group)
        if not item.forgotten:
            await item.owner.answered(call, endpoint, result)
            hit("check.taken")
        return isinstance(result, Unreached)

    async def _ask_others(
        self, item: _Item, call: CheckCall, channel: Channel, result: CheckResult, until_s: float
    ) -> tuple[str, CheckResult]:
        """Ask the others of a group after an instance that did not take the question.

        It is the same attempt, as it has reached nobody yet, and it ends no later: somebody is
        found within half of its time, and has what is left of it to answer.

        Args:
            channel: whom it did not reach, and `result` why.
            until_s: when the attempt ends, by the loop's clock.

        Returns:
            Whom it went to last, and what came of it.
        """
        loop = asyncio.get_running_loop()
        find_until_s = until_s - call.timeout_s / 2
        refused: set[str] = set()
        while isinstance(result, Unreached) and channel.instance and loop.time() < find_until_s:
            refused.add(channel.instance)
            try:
                async with asyncio.timeout_at(find_until_s):
                    found = await self._acquire(item, refused)
            except TimeoutError:
                break
            if isinstance(found, Unreached):
                result = Unreached(shortened(f"{result.detail}; {found.detail}"))
                break
            channel = found
            try:
                # From this test until the question is handed to the socket nothing is awaited.
                if not item.wanted:
                    break
                again = structs.replace(call, timeout_s=until_s - loop.time())
                result = await self._ask_traced(channel, again)
            finally:
                channel.release()
            # The attempt's marker names another one.
            told = shortened(f"{channel.endpoint}: {result.detail}")
            result = structs.replace(result, detail=told)
        return channel.endpoint, result

    async def _acquire(self, item: _Item, avoid: Collection[str] = ()) -> Channel | Unreached:
        try:
            return await self._finder.acquire(item.group, item.prefer, avoid)
        except Exception as error:
            _tell_fault(item.id, item.group, error)
            return Unreached(shortened(f"the proxy failed to connect: {type(error).__name__}"))

    async def _ask_traced(self, channel: Channel, call: CheckCall) -> CheckResult:
        """Ask in a span that continues the one that prepared, where that is recorded."""
        parent = tracing.sampled_context(call.messages)
        if parent is None:
            return await self._ask(channel, call)
        attributes: tracing.Attributes = {
            tracing.ID: call.id,
            tracing.GROUP: call.group,
            tracing.ATTEMPT: call.attempt,
        }
        with tracing.continued(
            "check", call.messages, attributes, kind="client", parent=parent
        ) as step:
            if step is None:
                return await self._ask(channel, call)
            result = await self._ask(channel, structs.replace(call, trace=step.context))
            step.note({tracing.OUTCOME: _outcome(result)})
            if not isinstance(result, Answered):
                step.failed(_outcome(result))
            return result

    async def _ask(self, channel: Channel, call: CheckCall) -> CheckResult:
        try:
            return await channel.ask(call, call.timeout_s)
        except Exception as error:
            _tell_fault(call.id, call.group, error)
            return Unclear(shortened(f"the proxy failed while it asked: {type(error).__name__}"))

    # --- reachable or not --------------------------------------------------------------------

    def _failed(self, group: _Group, era: int, detail: str) -> None:
        """Nobody was reached: let the group rest, each time twice as long."""
        group.detail = detail
        # A call that was handed out before the rest began may start within it.
        if era != group.era or group.resting or self._closed:
            return
        group.era += 1
        group.failures += 1
        if group.failures == 1:
            group.away_s = asyncio.get_running_loop().time()
            log.warning("group unreachable", group=group.name, why=detail)
        rest_s = min(BACK_OFF_MAX_S, BACK_OFF_FIRST_S * 2.0 ** min(group.failures - 1, 16))
        rest_s *= 1 + self._jitter()
        group.timer = self._later(rest_s, partial(self._rested, group))

    def _rested(self, group: _Group) -> None:
        group.timer = None
        self._pump(group)

    def _reached(self, group: _Group) -> None:
        """Somebody is there, or may be: no rest any more."""
        group.stop_timer()
        if group.failures:
            log.info("group reachable again", group=group.name)
            group.failures = 0
            group.era += 1


def _by_the_loop(delay_s: float, then: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, then)


def _tell_fault(id: str, group: str, error: Exception) -> None:
    """Tell of a fault of ours."""
    log.error(
        "check failed in the proxy",
        id=id,
        group=group,
        error=telling(error),
        where=where_raised(error),
    )


def _since(started_s: float) -> float:
    return asyncio.get_running_loop().time() - started_s


def _outcome(result: CheckResult) -> str:
    if isinstance(result, Answered):
        return str(result.decision) if result.ask_again_s is None else "later"
    return "returned" if isinstance(result, Unreached) else "unclear"
