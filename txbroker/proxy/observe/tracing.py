"""Spans of a proxy: prepare, decide, promote; checks are in `txbroker.checkers.runner`.

A proxy starts no traces. It continues sampled ones whose context comes with a message or with the
HTTP call that prepares it, so an untraced transaction costs a lookup in its headers.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

from msgspec import Struct, structs

from txbroker import tracing
from txbroker.contract.service import (
    Answer,
    DecideRequest,
    PrepareRequest,
    Request,
    Service,
    SubmitRequest,
    execute,
)
from txbroker.core.transaction import Transaction
from txbroker.errors import RequestError
from txbroker.tracing import TraceContext, context_of, with_context


async def traced_alone(
    service: Service, request: Request, caller: TraceContext | None = None
) -> Sequence[Answer]:
    """Run one operation; one with a prepare in a span, below the context of its messages, else the
    caller's.

    The span's context is stored in messages without one, so that it outlives this call.
    """
    try:
        if isinstance(request, DecideRequest):
            return (await execute(service, request),)
        prepare = request if isinstance(request, PrepareRequest) else request.prepare
        attributes = {tracing.GROUP: prepare.group, tracing.OPERATION_TYPE: "create"}
        messages = prepare.messages
        parent = tracing.sampled_context(messages) or caller
        step = tracing.continued("prepare", messages, attributes, kind="server", parent=parent)
        with step as span:
            context = caller if span is None else span.context
            if context is not None:
                prepare = structs.replace(prepare, messages=with_context(messages, context))
            if isinstance(request, SubmitRequest):
                request = structs.replace(request, prepare=prepare)
            else:
                request = prepare
            answer = await execute(service, request)
            if span is not None:
                span.note({tracing.ID: answer.id})
            return (answer,)
    except RequestError as error:
        return (error,)


def deciding(
    request: DecideRequest, transaction: Transaction | None
) -> "AbstractContextManager[tracing.ActiveSpan | None]":
    """Return the span of a decision; its parent is the prepare's, if the messages are in memory."""
    if transaction is None or not tracing.is_on():
        return tracing.continued("", (), {}, parent=None)
    messages = transaction.half.messages
    attributes = {
        tracing.ID: request.id,
        tracing.GROUP: transaction.half.group,
        tracing.DECISION: str(request.decision),
    }
    return tracing.continued(
        str(request.decision),
        messages,
        attributes,
        kind="server",
        parent=tracing.sampled_context(messages),
    )


class PromotionSpans(Struct, frozen=True):
    """The spans of the sampled transactions of one promotion transaction."""

    since_ns: int
    sampled: tuple[tuple[Transaction, TraceContext], ...]

    def record(self, refused: Mapping[str, str]) -> None:
        """Record the spans, once the promotion transaction is visible."""
        for transaction, context in self.sampled:
            tracing.record(
                "promote",
                transaction.messages,
                _promotion(transaction),
                kind="producer",
                parent=context,
                since_ns=self.since_ns,
                failed=refused.get(transaction.id, ""),
            )


def promotion_spans(transactions: Iterable[Transaction]) -> PromotionSpans | None:
    """Begin the spans of a promotion transaction, while its messages are in memory; None: tracing
    is off."""
    if not tracing.active:
        return None
    contexts = [(transaction, context_of(transaction.messages)) for transaction in transactions]
    sampled = [(one, context) for one, context in contexts if context and context.sampled]
    return PromotionSpans(time.time_ns(), tuple(sampled))


def _promotion(transaction: Transaction) -> dict[str, str | int | bool]:
    attributes: dict[str, str | int | bool] = {
        tracing.SYSTEM: "kafka",
        tracing.OPERATION_TYPE: "send",
        tracing.ID: transaction.id,
        tracing.GROUP: transaction.half.group,
    }
    if len(transaction.messages) == 1:
        attributes[tracing.PARTITION] = str(transaction.messages[0].partition)
        if transaction.offsets:
            attributes[tracing.OFFSET] = transaction.offsets[0]
    return attributes
