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
    Service,
    TransactionStatus,
    alone,
)
from txbroker.core.transaction import Transaction
from txbroker.tracing import TraceContext, context_of, with_context


def preparing(
    request: PrepareRequest, caller: TraceContext | None = None
) -> "AbstractContextManager[tracing.ActiveSpan | None]":
    """Return the span of a prepare, below the context of the messages, else the caller's."""
    attributes = {tracing.GROUP: request.group, tracing.OPERATION_TYPE: "create"}
    parent = tracing.sampled_context(request.messages) or caller
    return tracing.continued("prepare", request.messages, attributes, kind="server", parent=parent)


def within(request: PrepareRequest, context: TraceContext | None) -> PrepareRequest:
    """Return the request with a context stored in its messages, so that it outlives this call."""
    if context is None:
        return request
    return structs.replace(request, messages=with_context(request.messages, context))


def note_id(step: tracing.ActiveSpan | None, id: str) -> None:
    if step is not None:
        step.note({tracing.ID: id})


async def traced_alone(
    service: Service, request: PrepareRequest | DecideRequest
) -> Sequence[Answer]:
    """Run one operation of an SDK in a separate span; its messages already hold their context."""
    if isinstance(request, DecideRequest):
        return await alone(service, request)
    with preparing(request) as step:
        answers = await alone(service, request)
        if isinstance(answers[0], TransactionStatus):
            note_id(step, answers[0].id)
        return answers


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
