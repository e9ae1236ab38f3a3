"""One question and what came of it: in a span where that is traced, told where it failed."""

import asyncio
import logging
from contextlib import ExitStack
from functools import partial

import structlog
from msgspec import structs

from txbroker import tracing
from txbroker.checkers.base import (
    Answered,
    Channel,
    CheckCall,
    CheckResult,
    Unclear,
    Unreached,
    already,
    shortened,
)
from txbroker.checkers.queues import QueuedCheck
from txbroker.core.telling import safe_repr, where_raised
from txbroker.errors import TxbrokerError

log = structlog.wrap_logger(logging.getLogger(__name__))


def ask(channel: Channel, call: CheckCall) -> asyncio.Future[CheckResult]:
    """Ask in a span that continues the one that prepared, where that is recorded. A fault of ours
    is the answer: it takes no other question of a run along."""
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
        answer.add_done_callback(partial(_over, step, span.pop_all()))
        return answer


def _over(step: tracing.ActiveSpan, span: ExitStack, answer: asyncio.Future[CheckResult]) -> None:
    """Note in a question's span what came of it, and end the span."""
    with span:
        if answer.cancelled():
            outcome = "cancelled"
        else:
            outcome = "unclear" if answer.exception() else outcome_of(answer.result())
        step.note({tracing.OUTCOME: outcome})
        if outcome in _NO_ANSWERS:
            step.failed(outcome)


def result_of(call: CheckCall, answer: asyncio.Future[CheckResult]) -> CheckResult:
    """Return what came of a question that is over."""
    error = asyncio.CancelledError() if answer.cancelled() else answer.exception()
    return answer.result() if error is None else fault(call, error)


def fault(call: CheckCall, error: BaseException) -> Unclear:
    """Log a fault of the proxy's own code in a question; return the unclear result."""
    tell_fault(call.id, call.group, error)
    return Unclear(shortened(f"the proxy failed while it asked: {type(error).__name__}"))


def tell_failed(item: QueuedCheck, error: Exception) -> None:
    """Tell why a check goes no further now."""
    if isinstance(error, TxbrokerError):
        # The owner could not write: its schedule offers the check again.
        log.warning("check not made", id=item.id, group=item.group.name, why=str(error))
    else:
        tell_fault(item.id, item.group.name, error)


def tell_fault(id: str, group: str, error: BaseException) -> None:
    """Tell of a fault of ours."""
    log.error(
        "check failed in the proxy",
        id=id,
        group=group,
        error=safe_repr(error),
        where=where_raised(error),
    )


_NO_ANSWERS = frozenset({"returned", "unclear", "cancelled"})


def outcome_of(result: CheckResult) -> str:
    if isinstance(result, Answered):
        return str(result.decision) if result.ask_again_s is None else "later"
    return "returned" if isinstance(result, Unreached) else "unclear"
