"""Carries out due checks: whom, when and how many at a time, never at another group's cost.

Each group has a queue, a limit of parallel calls and a back-off of its own. Checks go in *runs*:
those of one owner that have somebody to ask in one turn of the event loop are attempted together,
and what they are answered in one turn is told together. `CheckRunner._attempt` and `_tell` carry a
run out; the order of their steps is what keeps the number of attempts true.
"""

import asyncio
import heapq
import itertools
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import structlog
from msgspec import structs

from txbroker.checkers.asking import ask, fault, outcome_of, result_of, tell_failed, tell_fault
from txbroker.checkers.base import (
    Answered,
    AttemptRequest,
    AttemptResult,
    Channel,
    CheckCall,
    CheckOwner,
    CheckResult,
    Finder,
    Unreached,
    shortened,
)
from txbroker.checkers.queues import CallBudget, GroupQueue, QueuedCheck, Timer
from txbroker.core.index import ShareOf, own_share, share_max
from txbroker.core.records import CheckReason
from txbroker.errors import TxbrokerError
from txbroker.failpoints import failpoint

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


class CheckMetrics(Protocol):
    """Told of what the runner does."""

    def checks_ended(self, group: str, outcome: str, durations_s: Sequence[float]) -> None:
        """Tries to check are over, each after so many seconds.

        `outcome`: `commit`, `rollback`, `unknown`, `later`, `unclear`, `returned` (an attempt
        that reached nobody) or `unreachable` (there was nobody, so no attempt was made).
        """
        ...


Later: TypeAlias = Callable[[float, Callable[[], None]], Timer]
"""Call something so many seconds later, from the event loop."""


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
        self._groups: dict[str, GroupQueue] = {}
        self._items: dict[tuple[CheckOwner, str], QueuedCheck] = {}
        self._all = CallBudget("", first_calls_max, parallel_total_max)
        self._share_bounds = (share_max(first_calls_max), share_max(parallel_total_max))
        self._shares: dict[str, CallBudget] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._order = itertools.count()
        self._closed = False
        # What the next turn of the event loop takes up: groups whose queues have grown, checks
        # with somebody to ask in hand, and what has been answered.
        self._grown: dict[GroupQueue, None] = {}
        self._in_hand: list[QueuedCheck] = []
        self._heard: list[QueuedCheck] = []
        # Whose channels are in hand, and what they were asked.
        self._holding: dict[QueuedCheck, asyncio.Future[CheckResult] | None] = {}
        self._waking = False
        # Checks whose places are free again, though it is not written yet what came of them.
        self._telling = 0

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
        item = QueuedCheck(owner, id, state, prefer, reason, (since_s, next(self._order)))
        self._items[owner, id] = item
        heapq.heappush(state.queue, (item.place, item))
        self._grown[state] = None
        self._wake()
        return True

    def _enter(self, name: str) -> GroupQueue:
        share = self._share_of(name)
        line = self._shares.get(share)
        if line is None:
            line = self._shares[share] = CallBudget(share, *self._share_bounds)
        line.groups += 1
        group = self._groups[name] = GroupQueue(name, line)
        return group

    def forget(self, owner: CheckOwner) -> None:
        """Drop the checks of an owner that lost its partition; no call of its goes out any more.

        A call that is out already ends by itself, and its answer goes nowhere.
        """
        gone = [item for item in self._items.values() if item.owner is owner]
        for item in gone:
            item.forgotten = True
        for group in {item.group for item in gone}:
            group.queue = [entry for entry in group.queue if not entry[1].forgotten]
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
        """How many checks are being carried out now, to the writing of what came of them."""
        return self._all.running + self._telling

    async def close(self) -> None:
        """Stop everything; returns once no call is under way."""
        self._closed = True
        for group in self._groups.values():
            group.stop_timer()
            group.queue.clear()
        asked = [answer for answer in self._holding.values() if answer is not None]
        under_way: list[asyncio.Future[Any]] = [*self._tasks, *asked]
        for each in under_way:
            each.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        self._release(list(self._holding))
        self._items.clear()
        self._groups.clear()
        self._shares.clear()

    # --- whose turn it is --------------------------------------------------------------------

    def _wake(self) -> None:
        """Go on in the next turn of the event loop, with all that this one brings."""
        if not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._waking = False
        if self._closed:
            return
        grown, self._grown = self._grown, {}
        for group in grown:
            self._pump(group)
        in_hand, self._in_hand = self._in_hand, []
        runs: dict[tuple[CheckOwner, bool], list[QueuedCheck]] = {}
        for item in in_hand:
            runs.setdefault((item.owner, item.owner.in_memory(item.id)), []).append(item)
        for (owner, _), items in runs.items():
            self._start(self._attempt(owner, items))
        heard, self._heard = self._heard, []
        if heard:
            self._take_in(heard)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _pump(self, group: GroupQueue) -> None:
        """Begin as many of a group's checks as the limits allow; drop those decided meanwhile."""
        queue, limit = group.queue, self._limit(group)
        now_s = asyncio.get_running_loop().time()
        while queue and not self._closed:
            item = queue[0][1]
            if not item.wanted:
                heapq.heappop(queue)
                self._done(item)
                continue
            if group.resting or group.running >= limit:
                return
            if not (group.share.room(group) and self._all.room(group)):
                return
            heapq.heappop(queue)
            self._count(group, 1)
            item.era, item.began_s = group.era, now_s
            self._begin(item)
        if not queue and not group.running and not group.resting:
            self._drop(group)

    def _begin(self, item: QueuedCheck) -> None:
        """Take somebody in hand to ask, at once where nothing is to be waited for."""
        try:
            channel = self._finder.at_hand(item.group.name, item.prefer)
        except Exception:
            # It is told of where it is looked for once more.
            channel = None
        if channel is None:
            self._start(self._find(item))
        else:
            self._has(item, channel)

    def _has(self, item: QueuedCheck, channel: Channel) -> None:
        """Somebody is in hand: the check goes on with others that are so far."""
        item.channel, item.endpoint = channel, channel.endpoint
        self._holding[item] = None
        self._in_hand.append(item)
        self._wake()

    def _release(self, items: Iterable[QueuedCheck]) -> None:
        for item in items:
            del self._holding[item]
            _give_back(item, item.channel)

    def _count(self, group: GroupQueue, calls: int) -> None:
        """Count calls of a group that begin, or end if negative."""
        share = group.share
        for each in (group, share, self._all):
            each.running += calls
        before, share.charged = share.charged, min(share.running, share.more_max)
        self._all.charged += share.charged - before

    def _limit(self, group: GroupQueue) -> int:
        # One call finds out whether an unreachable group is there again.
        return 1 if group.failures else self._parallel(group.name) or PARALLEL_DEFAULT

    def _drop(self, group: GroupQueue) -> None:
        """Forget a group that nothing waits for; if it could not be reached, nobody asks now."""
        if self._groups.get(group.name) is not group:
            # Forgotten before, and perhaps known again since.
            return
        self._reached(group)
        for line in (group.share, self._all):
            line.forget(group)
        del self._groups[group.name]
        group.share.groups -= 1
        if not group.share.groups:
            del self._shares[group.share.name]

    def _done(self, item: QueuedCheck) -> None:
        if self._items.get((item.owner, item.id)) is item:
            del self._items[item.owner, item.id]

    def _ended(self, items: Sequence[QueuedCheck], *, again: Collection[QueuedCheck] = ()) -> None:
        """These are over, but for those that stay in the queue."""
        if self._closed:
            return
        for item in items:
            if item in again and not item.forgotten:
                heapq.heappush(item.group.queue, (item.place, item))
            else:
                self._done(item)
        self._free(items)

    def _free(self, items: Iterable[QueuedCheck]) -> None:
        """Give the places of these back: their groups, and those that wait for room, go on."""
        groups: Counter[GroupQueue] = Counter([item.group for item in items])
        for group, count in groups.items():
            self._count(group, -count)
        for group in groups:
            self._pump(group)
        for line in dict.fromkeys([*[group.share for group in groups], self._all]):
            for waiting in line.next():
                self._pump(waiting)

    # --- a run of checks ---------------------------------------------------------------------

    async def _find(self, item: QueuedCheck) -> None:
        """Find somebody to ask where nobody is at hand."""
        group = item.group
        channel = await self._acquire(item)
        if not isinstance(channel, Unreached):
            self._has(item, channel)
            return
        self._failed(group, item.era, channel.detail)
        self._ended([item], again=[item])
        self._metrics.checks_ended(group.name, "unreachable", [_since(item.began_s)])

    async def _attempt(self, owner: CheckOwner, items: list[QueuedCheck]) -> None:
        """Write the markers of a run of one owner, and ask."""
        try:
            failpoint("check.acquired")
            wanted = [item for item in items if not item.forgotten]
            calls = await owner.attempt(
                [AttemptRequest(item.id, item.reason, item.endpoint) for item in wanted]
            )
            failpoint("check.asking")
            for item, call in zip(wanted, calls, strict=True):
                if isinstance(call, TxbrokerError):
                    tell_failed(item, call)
                    continue
                # From this test until the question is handed to the socket nothing is awaited.
                if call is None or not item.wanted:
                    continue
                self._ask(item, call)
        except Exception as error:
            for item in items:
                tell_failed(item, error)
        finally:
            left = [item for item in items if self._holding[item] is None]
            self._release(left)
            self._ended(left)

    def _ask(self, item: QueuedCheck, call: CheckCall) -> None:
        item.call = call
        item.began_s = asyncio.get_running_loop().time()
        answer = self._holding[item] = ask(item.channel, call)
        answer.add_done_callback(partial(self._answered, item))

    def _answered(self, item: QueuedCheck, answer: asyncio.Future[CheckResult]) -> None:
        if not self._closed:
            item.result = result_of(item.call, answer)
            self._heard.append(item)
            self._wake()

    def _take_in(self, heard: list[QueuedCheck]) -> None:
        """Take what was answered in one turn of the event loop."""
        failpoint("check.answered")
        self._release(heard)
        told: list[QueuedCheck] = []
        for item in heard:
            result = item.result
            if isinstance(result, Unreached) and item.channel.instance:
                self._start(self._ask_others(item, result))
            else:
                told.append(item)
        self._pass_on(told)

    def _pass_on(self, heard: list[QueuedCheck]) -> None:
        """Count what came of checks, and tell their owners: those of one owner together, but for
        answers with messages, which are to be examined."""
        now_s = asyncio.get_running_loop().time()
        durations: defaultdict[tuple[GroupQueue, str], list[float]] = defaultdict(list)
        runs: defaultdict[tuple[CheckOwner, QueuedCheck | None], list[QueuedCheck]] = defaultdict(
            list
        )
        for item in heard:
            result, group = item.result, item.group
            durations[group, outcome_of(result)].append(now_s - item.began_s)
            if isinstance(result, Unreached):
                self._failed(group, item.era, result.detail)
            elif group.failures or group.timer is not None:
                self._reached(group)
            alone = isinstance(result, Answered) and result.messages is not None
            runs[item.owner, item if alone else None].append(item)
        free: list[QueuedCheck] = []
        for (owner, _), run in runs.items():
            early = self._may_free(run)
            if early:
                self._telling += len(run)
                free += run
            self._start(self._tell(owner, run, early))
        self._free(free)
        for (group, outcome), took_s in durations.items():
            self._metrics.checks_ended(group.name, outcome, took_s)

    def _may_free(self, heard: list[QueuedCheck]) -> bool:
        """Say whether places are given back before it is written what came of the calls: if no more
        wait for that than may be under way, and none of these goes back to the queue."""
        if self._closed or self._telling + len(heard) > self._all.more_max:
            return False
        return not any(isinstance(item.result, Unreached) for item in heard)

    async def _tell(self, owner: CheckOwner, heard: list[QueuedCheck], early: bool) -> None:
        """Tell an owner what came of checks."""
        again: set[QueuedCheck] = set()
        try:
            known = [item for item in heard if not item.forgotten]
            await owner.answered(
                [AttemptResult(each.call, each.endpoint, each.result) for each in known]
            )
            failpoint("check.taken")
            again = {each for each in known if isinstance(each.result, Unreached)}
        except Exception as error:
            for item in heard:
                tell_failed(item, error)
        finally:
            if early:
                self._telling -= len(heard)
                for item in heard:
                    self._done(item)
            else:
                self._ended(heard, again=again)

    async def _ask_others(self, item: QueuedCheck, result: CheckResult) -> None:
        """Ask the others of a group after an instance that did not take the question.

        It is the same attempt, as it has reached nobody yet, and it ends no later: somebody is
        found within half of its time, and has what is left of it to answer. At last it is passed
        on whom it went to, and what came of it.
        """
        loop, call, channel = asyncio.get_running_loop(), item.call, item.channel
        until_s = item.began_s + call.timeout_s
        find_until_s = until_s - call.timeout_s / 2
        refused: set[str] = set()
        try:
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
                    answer = ask(channel, structs.replace(call, timeout_s=until_s - loop.time()))
                    # Raises only where this task itself is cancelled.
                    await asyncio.gather(answer, return_exceptions=True)
                    result = result_of(call, answer)
                finally:
                    _give_back(item, channel)
                # The attempt's marker names another one.
                told = shortened(f"{channel.endpoint}: {result.detail}")
                result = structs.replace(result, detail=told)
        except Exception as error:
            result = fault(call, error)
        item.endpoint, item.result = channel.endpoint, result
        self._pass_on([item])

    async def _acquire(self, item: QueuedCheck, avoid: Collection[str] = ()) -> Channel | Unreached:
        try:
            return await self._finder.acquire(item.group.name, item.prefer, avoid)
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            tell_fault(item.id, item.group.name, error)
            return Unreached(shortened(f"the proxy failed to connect: {type(error).__name__}"))

    # --- reachable or not --------------------------------------------------------------------

    def _failed(self, group: GroupQueue, era: int, detail: str) -> None:
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

    def _rested(self, group: GroupQueue) -> None:
        group.timer = None
        self._pump(group)

    def _reached(self, group: GroupQueue) -> None:
        """Somebody is there, or may be: no rest any more."""
        group.stop_timer()
        if group.failures:
            log.info("group reachable again", group=group.name)
            group.failures = 0
            group.era += 1


def _give_back(item: QueuedCheck, channel: Channel) -> None:
    """Let a channel go; a fault of ours in it takes no other check along."""
    try:
        channel.release()
    except Exception as error:
        tell_failed(item, error)


def _by_the_loop(delay_s: float, then: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, then)


def _since(started_s: float) -> float:
    return asyncio.get_running_loop().time() - started_s
