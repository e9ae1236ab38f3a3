"""One question and its outcome: traced if its prepare was, logged if it failed."""

import asyncio
import logging
from contextlib import ExitStack
from functools import partial

import structlog
from msgspec import structs

from txbroker import tracing
from txbroker.checkers import base
from txbroker.checkers.base import Channel, CheckCall, CheckResult, Unclear, Unreached
from txbroker.checkers.queues import QueuedCheck
from txbroker.error_text import raised_at, safe_repr
from txbroker.errors import TxbrokerError

log = structlog.wrap_logger(logging.getLogger(__name__))


def ask(channel: Channel, call: CheckCall) -> asyncio.Future[CheckResult]:
    """Ask, in a span that continues the prepare's if that was recorded. A fault in the proxy's own
    code becomes the result, so that it affects no other question of a run."""
    try:
        return _ask(channel, call)
    except Exception as error:
        return base.already(fault(call, error))


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
    return Unclear(base.shortened(f"the proxy failed while it asked: {type(error).__name__}"))


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
    if isinstance(result, base.Answered):
        return str(result.decision) if result.ask_again_s is None else "later"
    return "returned" if isinstance(result, Unreached) else "unclear"
