"""The calls on transactions."""

import asyncio
import time
from collections.abc import Awaitable
from functools import partial
from itertools import accumulate
from typing import cast

import msgspec

from txbroker import tracing
from txbroker.contract.json import message_to_json
from txbroker.contract.service import (
    LISTED_MESSAGES_MAX,
    DecideRequest,
    ListRequest,
    PlacedMessage,
    PrepareRequest,
    TransactionPage,
    TransactionStatus,
    TransactionView,
)
from txbroker.core.records import Decision, Message, Source
from txbroker.errors import (
    AlreadyDecided,
    BadId,
    BadSchedule,
    BadTarget,
    BodyLost,
    IdConflict,
    IdExpired,
    KafkaDown,
    NotFound,
    NotPending,
    NotPermitted,
    Overloaded,
    OwnerUnavailable,
    TooOld,
    UnknownTopic,
    WrongGroup,
)
from txbroker.principals import Role
from txbroker.proxy.http.bodies import (
    CommitBody,
    FindQuery,
    ListQuery,
    PageBody,
    PlacedBody,
    PrepareBody,
    ReasonBody,
    RollbackBody,
    StandingBody,
    TransactionBody,
)
from txbroker.proxy.http.context import check_group, plain_id, within_groups
from txbroker.proxy.http.operations import ONLY_OPERATORS, WHO_WRITES, ApiCall, ApiReply, Operation
from txbroker.proxy.http.reading import decode_content
from txbroker.proxy.observe.metrics import Metrics
from txbroker.proxy.observe.tracing import note_id, preparing, within

WAIT_MAX_S = 30.0
"""How long an answer waits at most until messages are visible, seconds. A client that repeats what
it gave up would else hold more and more of the proxy while a target has no leader."""

_OUT_OF_REACH = (OwnerUnavailable, KafkaDown)
_BY_ID = (BadId, NotFound, TooOld, *_OUT_OF_REACH)
_VIEW_FIELDS = tuple(
    field.name for field in msgspec.structs.fields(TransactionBody) if field.name != "messages"
)


def prepare(call: ApiCall) -> Awaitable[ApiReply]:
    """Store a half message."""
    body = cast(PrepareBody, call.body)
    request = PrepareRequest(
        group=body.group,
        messages=_messages(call, body.messages) or (),
        id=None if body.id is None else plain_id(body.id),
        dedup_key=body.dedup_key,
        order_key=body.order_key,
        check_after_s=body.check_after_s,
        check_interval_s=body.check_interval_s,
    )
    check_group(request.group)
    call.principal.check_group(request.group)
    call.principal.check_topics(message.topic for message in request.messages)
    if tracing.is_on():
        return _prepare_traced(call, request)
    return _prepare(call, request)


def _prepare(call: ApiCall, request: PrepareRequest) -> asyncio.Future[ApiReply]:
    call.shell.check_prepare(request)
    return call.shell.joint.carry_out(request, _prepared)


async def _prepare_traced(call: ApiCall, request: PrepareRequest) -> ApiReply:
    with preparing(request, call.trace) as step:
        traced = within(request, call.trace if step is None else step.context)
        reply = await _prepare(call, traced)
        note_id(step, cast(StandingBody, reply.content).id)
        return reply


def _prepared(standing: TransactionStatus) -> ApiReply:
    return ApiReply(201 if standing.created else 200, _standing(standing))


def commit(call: ApiCall) -> Awaitable[ApiReply]:
    """Commit a transaction, maybe with final content."""
    body = cast(CommitBody, call.body)
    content, wait = _messages(call, body.messages), body.wait is not None
    return _decide(call, Decision.COMMIT, body, content, wait=wait)


def rollback(call: ApiCall) -> Awaitable[ApiReply]:
    """Roll a transaction back."""
    return _decide(call, Decision.ROLLBACK, cast(RollbackBody, call.body))


def _decide(
    call: ApiCall,
    decision: Decision,
    body: CommitBody | RollbackBody,
    content: tuple[Message, ...] | None = None,
    *,
    wait: bool = False,
) -> Awaitable[ApiReply]:
    id, principal = plain_id(call.path["id"]), call.principal
    if body.group is not None:
        check_group(body.group)
        principal.check_group(body.group)
    # A principal's role says it; a group that is named, where nobody knows who calls.
    producer = principal.role is Role.PRODUCER or (body.group and not principal.identified)
    request = DecideRequest(
        id=id,
        decision=decision,
        group=body.group or "",
        messages=content,
        reason=body.reason or "",
        source=Source.PRODUCER if producer else Source.OPERATOR,
        by=_who(body.by, call),
        wait=wait,
        wait_s=WAIT_MAX_S if wait else 0.0,
    )
    if body.group is None and not principal.groups.everything:
        return _decide_own(call, request)
    return _decide_at_once(call, request)


async def _decide_own(call: ApiCall, request: DecideRequest) -> ApiReply:
    await _check_own(call, request.id)
    return await _decide_at_once(call, request)


def _decide_at_once(call: ApiCall, request: DecideRequest) -> asyncio.Future[ApiReply]:
    call.shell.check_decide(request)
    decided = partial(_decided, call.shell.metrics, time.monotonic())
    return call.shell.joint.carry_out(request, decided)


def _decided(metrics: Metrics, began_s: float, standing: TransactionStatus) -> ApiReply:
    metrics.decisions_took(time.monotonic() - began_s)
    return ApiReply(200, _standing(standing))


async def check(call: ApiCall) -> ApiReply:
    """Pull the next check forward."""
    body = cast(ReasonBody, call.body)
    id = plain_id(call.path["id"])
    await _check_own(call, id)
    standing = await call.shell.service.check(id, by=_who(body.by, call), reason=body.reason or "")
    return ApiReply(200, _standing(standing))


async def revive(call: ApiCall) -> ApiReply:
    """Begin a new round of checks, or try a refused one again."""
    body = cast(ReasonBody, call.body)
    id = plain_id(call.path["id"])
    await _check_own(call, id)
    standing = await call.shell.service.revive(id, by=_who(body.by, call), reason=body.reason or "")
    return ApiReply(200, _standing(standing))


def _messages(call: ApiCall, raw: msgspec.Raw) -> tuple[Message, ...] | None:
    return decode_content(raw, call.shell.settings.messages_per_transaction_max)


def _who(by: str | None, call: ApiCall) -> str:
    """Return who acts: the principal; where none is asked for, what the caller says and its
    address."""
    claim = "" if call.principal.name else by or ""
    return call.principal.by(f"http {call.remote}", claim)


async def _check_own(call: ApiCall, id: str) -> None:
    """Refuse a transaction of a group that is not the caller's. A transaction never changes its
    group, so what is found here holds for the call that follows.

    Raises:
        NotPermitted: names the group.
        NotFound, TooOld, OwnerUnavailable: the transaction cannot be looked at.
    """
    if not call.principal.groups.everything:
        view = await call.shell.service.find(id)
        call.principal.check_own(view.group)


async def find(call: ApiCall) -> ApiReply:
    """Tell all that is known of a transaction."""
    bodies = cast(FindQuery, call.query).bodies
    if bodies and not call.principal.sees_bodies:
        raise NotPermitted("a viewer sees no message bodies: ask without bodies")
    view = await call.shell.service.find(plain_id(call.path["id"]), bodies=bodies)
    call.principal.check_own(view.group)
    return ApiReply(200, _view(view, bodies=bodies))


async def list_all(call: ApiCall) -> ApiReply:
    """List transactions, oldest first."""
    query = cast(ListQuery, call.query)
    asked = ListRequest(**{name: getattr(query, name) for name in query.__struct_fields__})
    request = within_groups(asked, call.principal)
    page = await call.shell.service.list(request)
    fitting = _fitting(page)
    if fitting < len(page.transactions):
        page = await call.shell.service.list(msgspec.structs.replace(request, limit=fitting))
    return ApiReply(
        200,
        PageBody(
            # Owners of an older build leave other groups' in.
            transactions=[
                _view(view, bodies=False)
                for view in page.transactions
                if view.group in call.principal.groups
            ],
            next_cursor=page.next_cursor,
        ),
    )


def _fitting(page: TransactionPage) -> int:
    """Return how many transactions of a page one answer may list; at least one."""
    counts = accumulate(len(view.messages) for view in page.transactions)
    return max(1, sum(count <= LISTED_MESSAGES_MAX for count in counts))


def _standing(standing: TransactionStatus) -> StandingBody:
    return StandingBody(id=standing.id, state=standing.state, decision=standing.decision)


def _view(view: TransactionView, *, bodies: bool) -> TransactionBody:
    return TransactionBody(
        messages=[_placed(placed, bodies=bodies) for placed in view.messages],
        **{name: getattr(view, name) for name in _VIEW_FIELDS},
    )


def _placed(placed: PlacedMessage, *, bodies: bool) -> PlacedBody:
    if not bodies or placed.message is None:
        return PlacedBody(topic=placed.topic, partition=placed.partition, offset=placed.offset)
    shown = message_to_json(placed.message)
    shown.update(topic=placed.topic, partition=placed.partition, offset=placed.offset)
    return PlacedBody(**shown)


OPERATIONS = (
    Operation(
        "prepare",
        "POST",
        "/v1/transactions",
        "Store messages, invisible until they are committed",
        prepare,
        {201: StandingBody, 200: StandingBody},
        body=PrepareBody,
        errors=(
            BadId, IdConflict, IdExpired, BodyLost, UnknownTopic, BadTarget, BadSchedule,
            *_OUT_OF_REACH,
        ),
        roles=WHO_WRITES,
        prepares=True,
        direct=True,
    ),
    Operation(
        "list",
        "GET",
        "/v1/transactions",
        "List transactions, oldest first: those in `state`, else all that are not settled",
        list_all,
        {200: PageBody},
        query=ListQuery,
        errors=_OUT_OF_REACH,
        admin=True,
    ),
    Operation(
        "find",
        "GET",
        "/v1/transactions/{id}",
        "Tell all that is known of a transaction",
        find,
        {200: TransactionBody},
        query=FindQuery,
        errors=_BY_ID,
    ),
    Operation(
        "commit",
        "POST",
        "/v1/transactions/{id}/commit",
        "Commit a transaction",
        commit,
        {200: StandingBody},
        body=CommitBody,
        body_optional=True,
        roles=WHO_WRITES,
        direct=True,
        errors=(WrongGroup, AlreadyDecided, BodyLost, UnknownTopic, BadTarget, *_BY_ID),
    ),
    Operation(
        "rollback",
        "POST",
        "/v1/transactions/{id}/rollback",
        "Roll a transaction back",
        rollback,
        {200: StandingBody},
        body=RollbackBody,
        body_optional=True,
        roles=WHO_WRITES,
        direct=True,
        errors=(WrongGroup, AlreadyDecided, *_BY_ID),
    ),
    Operation(
        "check",
        "POST",
        "/v1/transactions/{id}/check",
        "Pull the next check forward",
        check,
        {200: StandingBody},
        body=ReasonBody,
        body_optional=True,
        roles=ONLY_OPERATORS,
        errors=(NotPending, Overloaded, *_BY_ID),
        admin=True,
    ),
    Operation(
        "revive",
        "POST",
        "/v1/transactions/{id}/revive",
        "Make a parked transaction pending again, or try a refused one again",
        revive,
        {200: StandingBody},
        body=ReasonBody,
        body_optional=True,
        roles=ONLY_OPERATORS,
        errors=(NotPending, *_BY_ID),
        admin=True,
    ),
)  # fmt: skip
