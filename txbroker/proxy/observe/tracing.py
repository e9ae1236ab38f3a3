"""Spans of a proxy: prepare, decide, promote; checks are in `txbroker.checkers.runner`.

A proxy begins no traces. It continues those that are recorded and come with a message, or with the
HTTP call that prepares it, so what nobody traces costs a look at the headers.
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
from txbroker.core.trace_context import TraceContext, context_of, with_context
from txbroker.core.transaction import Transaction


def preparing(
    request: PrepareRequest, caller: TraceContext | None = None
) -> "AbstractContextManager[tracing.ActiveSpan | None]":
    """Return a span to prepare in, below the context of the messages, else the caller's."""
    attributes = {tracing.GROUP: request.group, tracing.OPERATION_TYPE: "create"}
    parent = tracing.sampled_context(request.messages) or caller
    return tracing.continued("prepare", request.messages, attributes, kind="server", parent=parent)


def within(request: PrepareRequest, context: TraceContext | None) -> PrepareRequest:
    """Return the request whose messages carry a context, so that it outlives this call."""
    if context is None:
        return request
    return structs.replace(request, messages=with_context(request.messages, context))


def note_id(step: tracing.ActiveSpan | None, id: str) -> None:
    """Name the transaction in the span that prepared it."""
    if step is not None:
        step.note({tracing.ID: id})


async def traced_alone(
    service: Service, request: PrepareRequest | DecideRequest
) -> Sequence[Answer]:
    """Carry one operation of an SDK out, as what becomes of a run of one; its messages carry their
    context already."""
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
    """Return a span to decide in, below the one that prepared, if its messages are in memory."""
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


class TracedTurn(Struct, frozen=True):
    """What of a turn is traced: each transaction with its context.

    Attributes:
        since_ns: when the turn was begun, ns since 1970.
    """

    since_ns: int
    found: tuple[tuple[Transaction, TraceContext], ...]


def traced_turn(transactions: Iterable[Transaction]) -> TracedTurn:
    """Look at what a turn writes, while its messages are in memory."""
    found = [(each, context_of(each.messages)) for each in transactions]
    recorded = [(each, context) for each, context in found if context and context.sampled]
    return TracedTurn(time.time_ns(), tuple(recorded))


def turn_ended(turn: TracedTurn, refused: Mapping[str, str]) -> None:
    """Make the spans of a turn that is visible.

    Args:
        refused: of those that a target did not take, the cause's code by id.
    """
    for transaction, context in turn.found:
        tracing.record(
            "promote",
            transaction.messages,
            _promotion(transaction),
            kind="producer",
            parent=context,
            since_ns=turn.since_ns,
            failed=refused.get(transaction.id, ""),
        )


def _promotion(transaction: Transaction) -> dict[str, str | int | bool]:
    known: dict[str, str | int | bool] = {
        tracing.SYSTEM: "kafka",
        tracing.OPERATION_TYPE: "send",
        tracing.ID: transaction.id,
        tracing.GROUP: transaction.half.group,
    }
    if len(transaction.messages) == 1:
        known[tracing.PARTITION] = str(transaction.messages[0].partition)
        if transaction.offsets:
            known[tracing.OFFSET] = transaction.offsets[0]
    return known
