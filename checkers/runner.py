"""Carries out due checks: whom to ask, when, and how many at a time, isolated by group.

Each group has a queue, a limit of parallel calls and a back-off. Checks go in *runs*: checks of one
owner that get a channel in one iteration of the event loop are attempted together, and the answers
of one iteration are reported together. `CheckRunner._attempt` and `_report` carry a run out; the
order of their steps keeps the number of attempts true.
"""

import asyncio
import heapq
import itertools
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Protocol, TypeAlias

import structlog
from msgspec import Struct, structs

from txbroker import tracing
from txbroker.checkers.attempts import AskedInVain, combined, in_vain
from txbroker.checkers.base import (
    Answered,
    AttemptRequest,
    AttemptResult,
    Channel,
    CheckCall,
    CheckOwner,
    CheckResult,
    Finder,
    Unclear,
    Unreached,
    already,
    shortened,
)
from txbroker.checkers.outcomes import CheckOutcomes
from txbroker.checkers.queues import BackoffTimer, CallBudget, GroupQueue, QueuedCheck
from txbroker.core.records import CheckReason
from txbroker.core.settled import ShareOf, own_share, share_max
from txbroker.error_text import raised_at, safe_repr
from txbroker.errors import TxbrokerError
from txbroker.failpoints import failpoint
from txbroker.net.timers import grown_pause_s

log = structlog.wrap_logger(logging.getLogger(__name__))

PARALLEL_DEFAULT = 8
"""Calls in flight to one group, unless its policy sets a limit."""
BACK_OFF_FIRST_S = 1.0
BACK_OFF_MAX_S = 30.0
"""The back-off of an unreachable group: the first one and the maximum, doubled each time. Jitter
adds up to the same again, so that groups which failed together do not return together."""


QUEUE_MAX = 100_000
"""Checks queued per group; the owners' schedules keep the others. A queued check is small compared
to the half message that its owner holds, and offering a check again and again costs time."""
PARALLEL_TOTAL_MAX = 256
"""Calls in flight of all groups; above it a group still gets its first."""
FIRST_CALLS_MAX = 1024
"""Calls in flight, first ones included: the sockets that checks may use."""


class RunnerLimits(Struct, frozen=True):
    """Limits of a check runner; see the constants for their meaning."""

    queue_max: int = QUEUE_MAX
    parallel_total_max: int = PARALLEL_TOTAL_MAX
    first_calls_max: int = FIRST_CALLS_MAX


DEFAULT_LIMITS = RunnerLimits()


class CheckMetrics(Protocol):
    """Counts checks."""

    def checks_ended(self, group: str, outcome: str, durations_s: Sequence[float]) -> None:
        """Count ended checks by their durations.

        `outcome`: `commit`, `rollback`, `unknown`, `later`, `unclear`, `returned` (an attempt
        that reached no instance) or `unreachable` (no channel, so no attempt was made).
        """


Later: TypeAlias = Callable[[float, Callable[[], None]], BackoffTimer]
"""Calls a function from the event loop after a delay in seconds."""


class CheckRunner:
    """Takes due checks from owners and carries them out.

    Args:
        parallel: returns a group's limit of calls in flight; None: the default.
        share_of: returns the share that a group belongs to: no share gets all calls.
        jitter: returns a random number from 0 to 1 for each back-off.
        later: the timer of a back-off; None: the event loop's.

    Attributes:
        outcomes: what the checks of each group brought, for operators.
    """

    def __init__(
        self,
        finder: Finder,
        metrics: CheckMetrics,
        *,
        parallel: Callable[[str], int | None] = lambda group: None,
        share_of: ShareOf = own_share,
        limits: RunnerLimits = DEFAULT_LIMITS,
        jitter: Callable[[], float] = random.random,
        later: Later | None = None,
    ) -> None:
        self._finder = finder
        self._metrics = metrics
        self._parallel = parallel
        self._share_of = share_of
        self._limits = limits
        self._jitter = jitter
        self._later = later or _call_later
        self.outcomes = CheckOutcomes()
        self._groups: dict[str, GroupQueue] = {}
        self._checks: dict[tuple[CheckOwner, str], QueuedCheck] = {}
        self._in_vain = AskedInVain()
        self._all = CallBudget("", limits.first_calls_max, limits.parallel_total_max)
        self._shares: dict[str, CallBudget] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._order = itertools.count()
        self._closed = False
        # For the next iteration of the event loop: groups with new checks in their queues, checks
        # that got a channel, and checks that got an answer.
        self._grown: dict[GroupQueue, None] = {}
        self._ready: list[QueuedCheck] = []
        self._answers: list[QueuedCheck] = []
        self._waking = False
        # Checks that hold a channel, and the future of their answer once they were asked.
        self._asked: dict[QueuedCheck, asyncio.Future[CheckResult] | None] = {}
        self._reporting = 0
        """Checks whose slots are free again while their results are still being written."""

    # --- for owners --------------------------------------------------------------------------

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
        """Queue a due check.

        Args:
            prefer: the SDK instance to ask if it is connected, "" for any.
            due_s: when it became due, on the event loop's clock; None: now.

        Returns:
            True if it is queued now, or was; False if the group's queue is full: offer it again
            a little later.
        """
        if self._closed:
            return False
        if (owner, id) in self._checks:
            return True
        queue = self._groups.get(group)
        if queue is not None and len(queue.queue) >= self._limits.queue_max:
            return False
        queue = queue or self._add_group(group)
        since_s = asyncio.get_running_loop().time() if due_s is None else due_s
        check = QueuedCheck(owner, id, queue, prefer, reason, (since_s, next(self._order)))
        self._checks[owner, id] = check
        heapq.heappush(queue.queue, (check.place, check))
        self._grown[queue] = None
        self._wake()
        return True

    def _add_group(self, name: str) -> GroupQueue:
        share = self._share_of(name)
        budget = self._shares.get(share)
        if budget is None:
            limits = self._limits
            first, more = share_max(limits.first_calls_max), share_max(limits.parallel_total_max)
            budget = self._shares[share] = CallBudget(share, first, more)
        budget.groups += 1
        group = self._groups[name] = GroupQueue(name, budget)
        return group

    def forget(self, owner: CheckOwner) -> None:
        """Drop the checks of an owner that lost its partition; none of its questions goes out.

        A call in flight ends on its own, and its answer is dropped.
        """
        self._in_vain.forget(owner)
        dropped = [check for check in self._checks.values() if check.owner is owner]
        for check in dropped:
            check.forgotten = True
        for group in {check.group for check in dropped}:
            group.queue = [entry for entry in group.queue if not entry[1].forgotten]
            heapq.heapify(group.queue)
            self._start_checks(group)
        for check in dropped:
            # A check in flight ends under a key that a new owner object does not use.
            self._checks.pop((owner, check.id), None)

    # --- for sessions and policies -----------------------------------------------------------

    def wake(self, name: str) -> None:
        """Retry a group now: a session has appeared, or its policy has changed."""
        group = self._groups.get(name)
        if group is not None:
            self._reached(group)
            self._start_checks(group)

    def unreachable(self) -> dict[str, str]:
        """Return the groups that cannot be reached, each with the reason."""
        return {group.name: group.detail for group in self._groups.values() if group.failures}

    def unreachable_for_s(self) -> dict[str, float]:
        """Return the same groups, each with the seconds since its first failure."""
        now_s = asyncio.get_running_loop().time()
        unreachable = [group for group in self._groups.values() if group.failures]
        return {group.name: now_s - group.unreachable_since_s for group in unreachable}

    @property
    def queued(self) -> int:
        """How many checks wait or run."""
        return len(self._checks)

    @property
    def running(self) -> int:
        """How many checks run, until their results are written."""
        return self._all.running + self._reporting

    async def close(self) -> None:
        """Stop everything; returns once no call is in flight."""
        self._closed = True
        for group in self._groups.values():
            group.stop_timer()
            group.queue.clear()
        answers = [answer for answer in self._asked.values() if answer is not None]
        work: list[asyncio.Future[Any]] = [*self._tasks, *answers]
        for future in work:
            future.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        self._release(list(self._asked))
        self._checks.clear()
        self._groups.clear()
        self._shares.clear()

    # --- starting ----------------------------------------------------------------------------

    def _wake(self) -> None:
        """Continue in the next iteration of the event loop, with all that this one brings."""
        if not self._waking:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._continue)

    def _continue(self) -> None:
        self._waking = False
        if self._closed:
            return
        grown, self._grown = self._grown, {}
        for group in grown:
            self._start_checks(group)
        ready, self._ready = self._ready, []
        runs: dict[tuple[CheckOwner, bool], list[QueuedCheck]] = {}
        for check in ready:
            runs.setdefault((check.owner, check.owner.in_memory(check.id)), []).append(check)
        for (owner, _), checks in runs.items():
            self._spawn(self._attempt(owner, checks))
        answers, self._answers = self._answers, []
        if answers:
            self._take_answers(answers)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_checks(self, group: GroupQueue) -> None:
        """Start as many of a group's checks as the limits allow; drop those decided meanwhile."""
        queue = group.queue
        # One call finds out whether an unreachable group has returned.
        limit = 1 if group.failures else self._parallel(group.name) or PARALLEL_DEFAULT
        now_s = asyncio.get_running_loop().time()
        while queue and not self._closed:
            check = queue[0][1]
            if not check.wanted:
                heapq.heappop(queue)
                self._remove(check)
                continue
            if group.resting or group.running >= limit:
                return
            if not (group.share.room(group) and self._all.room(group)):
                return
            heapq.heappop(queue)
            self._count(group, 1)
            check.has_slot, check.era, check.began_s = True, group.era, now_s
            self._acquire_channel(check)
        if not queue and not group.running and not group.resting:
            self._drop(group)

    def _acquire_channel(self, check: QueuedCheck) -> None:
        """Get a channel for a check, at once if none must be waited for."""
        channel = None
        if not self._in_vain.of(check.owner, check.id):
            # If this fails, `_find` calls the finder again, and logs it.
            with suppress(Exception):
                channel = self._finder.at_hand(check.group.name, check.prefer)
        if channel is None:
            self._spawn(self._find(check))
        else:
            self._has_channel(check, channel)

    def _has_channel(self, check: QueuedCheck, channel: Channel) -> None:
        """The check goes on with others that get a channel in this iteration."""
        check.channel, check.endpoint = channel, channel.endpoint
        self._asked[check] = None
        self._ready.append(check)
        self._wake()

    def _release(self, checks: Iterable[QueuedCheck]) -> None:
        for check in checks:
            del self._asked[check]
            _release(check, check.channel)

    # --- ending ------------------------------------------------------------------------------

    def _count(self, group: GroupQueue, calls: int) -> None:
        """Count calls of a group that start, or end if negative."""
        share = group.share
        group.running += calls
        share.running += calls
        self._all.running += calls
        before, share.charged = share.charged, min(share.running, share.more_max)
        self._all.charged += share.charged - before

    def _drop(self, group: GroupQueue) -> None:
        """Forget a group without checks. It counts as reachable: nothing asks it now."""
        if self._groups.get(group.name) is not group:
            return  # it was dropped before, and its name may be in use again
        self._reached(group)
        for budget in (group.share, self._all):
            budget.forget(group)
        del self._groups[group.name]
        group.share.groups -= 1
        if not group.share.groups:
            del self._shares[group.share.name]

    def _remove(self, check: QueuedCheck) -> None:
        if self._checks.get((check.owner, check.id)) is check:
            del self._checks[check.owner, check.id]

    def _finish(
        self, checks: Sequence[QueuedCheck], *, again: Collection[QueuedCheck] = ()
    ) -> None:
        """End checks, or return those in `again` to their queues, and free their slots."""
        if self._closed:
            return
        for check in checks:
            if check in again and not check.forgotten:
                heapq.heappush(check.group.queue, (check.place, check))
            else:
                self._remove(check)
        self._free(checks)

    def _free(self, checks: Iterable[QueuedCheck]) -> None:
        """Free the slots of checks that hold one; their groups and waiting groups go on."""
        groups: Counter[GroupQueue] = Counter()
        for check in checks:
            if check.has_slot:
                check.has_slot = False
                groups[check.group] += 1
        for group, count in groups.items():
            self._count(group, -count)
        for group in groups:
            self._start_checks(group)
        for budget in dict.fromkeys([*[group.share for group in groups], self._all]):
            for waiting in budget.next():
                self._start_checks(waiting)

    # --- a run of checks ---------------------------------------------------------------------

    async def _find(self, check: QueuedCheck) -> None:
        """Get a channel that must be waited for."""
        group = check.group
        channel = await self._acquire(check)
        if not isinstance(channel, Unreached):
            self._has_channel(check, channel)
            return
        self._failed(group, check.era, channel.detail)
        self._finish([check], again=[check])
        now_s = asyncio.get_running_loop().time()
        self._metrics.checks_ended(group.name, "unreachable", [now_s - check.began_s])
        self.outcomes.count(group.name, "unreachable", 1, now_s)

    async def _attempt(self, owner: CheckOwner, checks: list[QueuedCheck]) -> None:
        """Write the markers of a run of one owner, and ask."""
        try:
            failpoint("check.acquired")
            wanted = [check for check in checks if not check.forgotten]
            calls = await owner.attempt(
                [AttemptRequest(check.id, check.reason, check.endpoint) for check in wanted]
            )
            failpoint("check.asking")
            for check, call in zip(wanted, calls, strict=True):
                if isinstance(call, TxbrokerError):
                    log_failed(check, call)
                    continue
                # Nothing is awaited from this test until the question is handed to the socket.
                if call is None or not check.wanted:
                    continue
                self._ask(check, call)
        except Exception as error:
            for check in checks:
                log_failed(check, error)
        finally:
            not_asked = [check for check in checks if self._asked[check] is None]
            self._release(not_asked)
            self._finish(not_asked)

    def _ask(self, check: QueuedCheck, call: CheckCall) -> None:
        check.call = call
        check.began_s = asyncio.get_running_loop().time()
        answer = self._asked[check] = ask(check.channel, call)
        answer.add_done_callback(partial(self._answered, check))

    def _answered(self, check: QueuedCheck, answer: asyncio.Future[CheckResult]) -> None:
        if not self._closed:
            check.result = result_of(check.call, answer)
            self._answers.append(check)
            self._wake()

    def _take_answers(self, answered: list[QueuedCheck]) -> None:
        """Take the answers of one iteration of the event loop."""
        failpoint("check.answered")
        self._release(answered)
        now_s, ended = asyncio.get_running_loop().time(), []
        for check in answered:
            instance, result = check.channel.instance, check.result
            check.in_vain = (instance,) if in_vain(result) else ()
            if check.in_vain and instance and now_s < _ask_until_s(check, result):
                self._spawn(self._ask_others(check))
            else:
                check.result = combined(check.call, [(check.endpoint, result)])
                ended.append(check)
        self._pass_on(ended)

    def _pass_on(self, checks: list[QueuedCheck]) -> None:
        """Count results and report them to their owners, in one run per owner. An answer with
        messages, which the owner must examine, is a run alone."""
        now_s = asyncio.get_running_loop().time()
        ended: defaultdict[tuple[GroupQueue, str], list[QueuedCheck]] = defaultdict(list)
        runs: defaultdict[tuple[CheckOwner, QueuedCheck | None], list[QueuedCheck]] = defaultdict(
            list
        )
        for check in checks:
            result, group = check.result, check.group
            self._in_vain.note(check.owner, check.id, check.in_vain)
            ended[group, outcome_of(result)].append(check)
            if isinstance(result, Unreached):
                self._failed(group, check.era, result.detail)
            elif group.failures or group.timer is not None:
                self._reached(group)
            alone = isinstance(result, Answered) and result.messages is not None
            runs[check.owner, check if alone else None].append(check)
        free: list[QueuedCheck] = []
        for (owner, _), run in runs.items():
            if self._may_free(run):
                self._reporting += len(run)
                free += run
            self._spawn(self._report(owner, run))
        self._free(free)
        for (group, outcome), same in ended.items():
            took_s = [now_s - check.began_s for check in same]
            self._metrics.checks_ended(group.name, outcome, took_s)
            self.outcomes.count(group.name, outcome, len(same), now_s)
            self.outcomes.remember(group.name, outcome, same, now_s)

    def _may_free(self, run: list[QueuedCheck]) -> bool:
        """Return True if slots may be freed before the results are written: if no check of the run
        returns to its queue, and no more wait for that than may be in flight."""
        if self._closed or self._reporting + len(run) > self._all.more_max:
            return False
        return not any(isinstance(check.result, Unreached) for check in run)

    async def _report(self, owner: CheckOwner, run: list[QueuedCheck]) -> None:
        """Report a run of results to its owner."""
        again: set[QueuedCheck] = set()
        freed = not run[0].has_slot
        try:
            current = [check for check in run if not check.forgotten]
            await owner.answered(
                [AttemptResult(check.call, check.endpoint, check.result) for check in current]
            )
            failpoint("check.taken")
            again = {check for check in current if isinstance(check.result, Unreached)}
        except Exception as error:
            for check in run:
                log_failed(check, error)
        finally:
            self._reporting -= len(run) if freed else 0
            self._finish(run, again=again)

    async def _ask_others(self, check: QueuedCheck) -> None:
        """Ask other instances of a group after one that brought no decision.

        It is the same attempt, and it ends no later. The result names the endpoint that was asked
        last.
        """
        loop, call, channel, result = (
            asyncio.get_running_loop(),
            check.call,
            check.channel,
            check.result,
        )
        ends_s = check.began_s + call.timeout_s
        asked = [(check.endpoint, result)]
        try:
            while in_vain(result) and channel.instance:
                until_s = max(_ask_until_s(check, each) for _, each in asked)
                try:
                    async with asyncio.timeout_at(until_s):
                        other = await self._acquire(check, check.in_vain)
                except TimeoutError:
                    break
                if isinstance(other, Unreached):
                    asked.append(("", other))
                    break
                channel = other
                try:
                    # Nothing is awaited from this test until the question is handed to the socket.
                    if not check.wanted or channel.instance in check.in_vain:
                        break
                    answer = ask(channel, structs.replace(call, timeout_s=ends_s - loop.time()))
                    # Raises only if this task itself is cancelled.
                    await asyncio.gather(answer, return_exceptions=True)
                    result = result_of(call, answer)
                finally:
                    _release(check, channel)
                asked.append((channel.endpoint, result))
                check.in_vain = (*check.in_vain, channel.instance) if in_vain(result) else ()
            check.result = combined(call, asked)
        except Exception as error:
            check.result = fault(call, error)
        check.endpoint = channel.endpoint
        self._pass_on([check])

    async def _acquire(
        self, check: QueuedCheck, avoid: Collection[str] = ()
    ) -> Channel | Unreached:
        """Get a channel to an instance that was not asked in this attempt: first to those that
        were not asked in earlier ones either, then in the order in which they were asked."""
        name = check.group.name
        earlier = [one for one in self._in_vain.of(check.owner, check.id) if one not in avoid]
        skip = {*avoid, *earlier}
        try:
            found = await self._finder.acquire(name, check.prefer, skip)
            other = found
            skip.add("")  # it was asked, or could not be reached just now
            for instance in earlier:
                if not isinstance(other, Unreached):
                    break
                other = await self._finder.acquire(name, instance, skip - {instance})
            return found if isinstance(other, Unreached) else other
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            log_fault(check.id, name, error)
            return Unreached(shortened(f"the proxy failed to connect: {type(error).__name__}"))

    # --- reachability ------------------------------------------------------------------------

    def _failed(self, group: GroupQueue, era: int, detail: str) -> None:
        """No instance was reached: start the group's back-off, each time twice as long."""
        group.detail = detail
        # A call that started before the back-off may end within it.
        if era != group.era or group.resting or self._closed:
            return
        group.era += 1
        group.failures += 1
        if group.failures == 1:
            group.unreachable_since_s = asyncio.get_running_loop().time()
            log.warning("group unreachable", group=group.name, why=detail)
        rest_s = grown_pause_s(group.failures, BACK_OFF_FIRST_S, BACK_OFF_MAX_S)
        rest_s *= 1 + self._jitter()
        group.timer = self._later(rest_s, partial(self._rested, group))

    def _rested(self, group: GroupQueue) -> None:
        group.timer = None
        self._start_checks(group)

    def _reached(self, group: GroupQueue) -> None:
        """An instance was reached, or may be reachable: end the back-off."""
        group.stop_timer()
        if group.failures:
            log.info("group reachable again", group=group.name)
            group.failures = 0
            group.era += 1


def _release(check: QueuedCheck, channel: Channel) -> None:
    """Release a channel; a fault in that is logged and affects no other check."""
    try:
        channel.release()
    except Exception as error:
        log_failed(check, error)


def _ask_until_s(check: QueuedCheck, result: CheckResult) -> float:
    """Return until when another instance may be asked after a result, on the loop's clock.

    After a refusal it has half of the attempt's time to answer: no answer would make the attempt
    count. An attempt that counts may use all of it.
    """
    left = 0.5 if isinstance(result, Unreached) else 0.02
    return check.began_s + check.call.timeout_s * (1 - left)


def _call_later(delay_s: float, then: Callable[[], None]) -> BackoffTimer:
    return asyncio.get_running_loop().call_later(delay_s, then)


# --- one question ----------------------------------------------------------------------------


def ask(channel: Channel, call: CheckCall) -> asyncio.Future[CheckResult]:
    """Ask, in a span that continues the prepare's if that was recorded. A fault in the proxy's own
    code becomes the result, so that it affects no other question of a run."""
    try:
        return _ask(channel, call)
    except Exception as error:
        return already(fault(call, error))


def _ask(channel: Channel, call: CheckCall) -> asyncio.Future[CheckResult]:
    parent = tracing.sampled_context(call.messages)
    if parent is None:
        return channel.ask(call, call.timeout_s)
    attributes: tracing.Attributes = {
        tracing.ID: call.id,
        tracing.GROUP: call.group,
        tracing.ATTEMPT: call.attempt,
    }
    with ExitStack() as span:
        step = span.enter_context(
            tracing.continued("check", call.messages, attributes, kind="client", parent=parent)
        )
        if step is None:
            return channel.ask(call, call.timeout_s)
        answer = channel.ask(structs.replace(call, trace=step.context), call.timeout_s)
        answer.add_done_callback(partial(_end_span, step, span.pop_all()))
        return answer


def _end_span(
    step: tracing.ActiveSpan, span: ExitStack, answer: asyncio.Future[CheckResult]
) -> None:
    with span:
        if answer.cancelled():
            outcome = "cancelled"
        else:
            outcome = "unclear" if answer.exception() else outcome_of(answer.result())
        step.note({tracing.OUTCOME: outcome})
        if outcome in ("returned", "unclear", "cancelled"):
            step.failed(outcome)


def result_of(call: CheckCall, answer: asyncio.Future[CheckResult]) -> CheckResult:
    """Return the result of a question whose future is done."""
    error = asyncio.CancelledError() if answer.cancelled() else answer.exception()
    return answer.result() if error is None else fault(call, error)


def fault(call: CheckCall, error: BaseException) -> Unclear:
    """Log a fault of the proxy's own code in a question; return the unclear result."""
    log_fault(call.id, call.group, error)
    return Unclear(shortened(f"the proxy failed while it asked: {type(error).__name__}"))


def log_failed(check: QueuedCheck, error: Exception) -> None:
    """Log why a check stops here; the owner's schedule offers it again."""
    if isinstance(error, TxbrokerError):
        log.warning("check not made", id=check.id, group=check.group.name, why=str(error))
    else:
        log_fault(check.id, check.group.name, error)


def log_fault(id: str, group: str, error: BaseException) -> None:
    """Log a fault of the proxy's own code."""
    log.error(
        "check failed in the proxy",
        id=id,
        group=group,
        error=safe_repr(error),
        where=raised_at(error),
    )


def outcome_of(result: CheckResult) -> str:
    """Return the name of a result in metrics and spans."""
    if isinstance(result, Answered):
        return str(result.decision) if result.ask_again_s is None else "later"
    return "returned" if isinstance(result, Unreached) else "unclear"
