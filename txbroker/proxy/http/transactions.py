"""The operations on transactions."""

import base64
from collections.abc import Awaitable, Callable
from itertools import accumulate
from typing import cast

import msgspec

from txbroker.contract.json import message_to_json
from txbroker.contract.service import (
    LISTED_MESSAGES_MAX,
    OPTIONS,
    DecideRequest,
    ListRequest,
    PlacedMessage,
    PrepareRequest,
    SearchPage,
    SearchRequest,
    Service,
    TransactionPage,
    TransactionStatus,
    TransactionView,
    option_values,
)
from txbroker.contract.transactions import (
    PageBody,
    PlacedBody,
    SearchBody,
    StandingBody,
    TransactionBody,
)
from txbroker.core.records import Decision, Message, Source
from txbroker.core.routing import ALPHABET
from txbroker.errors import (
    AlreadyDecided,
    BadId,
    BadRequest,
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
from txbroker.principals import ONLY_OPERATORS, WRITERS, Principal, Role
from txbroker.proxy.admission import plain_id
from txbroker.proxy.http.bodies import (
    CommitBody,
    FindQuery,
    ListQuery,
    PrepareBody,
    ReasonBody,
    RollbackBody,
    SearchQuery,
)
from txbroker.proxy.http.context import within_groups
from txbroker.proxy.http.operations import ApiCall, ApiReply, Operation
from txbroker.proxy.http.reading import decode_content

WAIT_MAX_S = 30.0
"""Maximum time an answer waits for messages to become visible, seconds. Otherwise clients that
give up and retry would hold ever more of the proxy while a target has no leader."""

_UNREACHABLE = (OwnerUnavailable, KafkaDown)
_BY_ID = (BadId, NotFound, TooOld, *_UNREACHABLE)
_ATTEMPTS = ("round", "attempts", "attempts_max")
_VIEW_FIELDS = tuple(
    field.name for field in msgspec.structs.fields(TransactionBody) if field.name != "messages"
)
_PLAIN_TERMS = (
    "group", "topic", "dedup_key", "order_key", "from_ms", "to_ms", "record", "cursor",
)  # fmt: skip


def prepare(call: ApiCall) -> Awaitable[ApiReply]:
    """Store messages, invisible until they are committed."""
    body = cast(PrepareBody, call.body)
    request = PrepareRequest(
        group=body.group,
        messages=_messages(call, body.messages) or (),
        id=None if body.id is None else plain_id(body.id),
        **dict(zip(OPTIONS, option_values(body), strict=True)),
    )
    return call.context.admission.submit(call.principal, request, _status_reply, call.trace)


def commit(call: ApiCall) -> Awaitable[ApiReply]:
    """Commit a transaction."""
    body = cast(CommitBody, call.body)
    messages, wait = _messages(call, body.messages), body.wait is not None
    return _decide(call, Decision.COMMIT, body, messages, wait=wait)


def rollback(call: ApiCall) -> Awaitable[ApiReply]:
    """Roll a transaction back."""
    return _decide(call, Decision.ROLLBACK, cast(RollbackBody, call.body))


def _decide(
    call: ApiCall,
    decision: Decision,
    body: RollbackBody,
    messages: tuple[Message, ...] | None = None,
    *,
    wait: bool = False,
) -> Awaitable[ApiReply]:
    principal = call.principal
    # The principal's role decides; without a known principal, a named group means a producer.
    producer = principal.role is Role.PRODUCER or (body.group and not principal.identified)
    request = DecideRequest(
        id=plain_id(call.path["id"]),
        decision=decision,
        group=body.group or "",
        messages=messages,
        reason=body.reason or "",
        source=Source.PRODUCER if producer else Source.OPERATOR,
        by=_author(body.by, call),
        wait=wait,
        wait_s=WAIT_MAX_S if wait else 0.0,
    )
    return call.context.admission.submit(principal, request, _status_reply)


async def check(call: ApiCall) -> ApiReply:
    """Make the next check due now."""
    return await _act(call, call.context.service.check)


async def revive(call: ApiCall) -> ApiReply:
    """Make a parked transaction pending again, or retry a refused one."""
    return await _act(call, call.context.service.revive)


async def _act(call: ApiCall, action: Callable[..., Awaitable[TransactionStatus]]) -> ApiReply:
    body = cast(ReasonBody, call.body)
    id = plain_id(call.path["id"])
    await call.context.admission.check_own(call.principal, id)
    return _status_reply(await action(id, by=_author(body.by, call), reason=body.reason or ""))


def _messages(call: ApiCall, raw: msgspec.Raw) -> tuple[Message, ...] | None:
    return decode_content(raw, call.context.settings.messages_per_transaction_max)


def _author(by: str | None, call: ApiCall) -> str:
    """Return the author of an action: the principal; without one, the given name and address."""
    claim = "" if call.principal.name else by or ""
    return call.principal.by(f"http {call.remote}", claim)


async def find(call: ApiCall) -> ApiReply:
    """Return one transaction."""
    query = cast(FindQuery, call.query)
    if query.bodies and not call.principal.sees_bodies:
        raise NotPermitted("a viewer sees no message bodies: call without bodies")
    id = plain_id(call.path["id"])
    if query.trace:
        # Before topics are read for it.
        await call.context.admission.check_own(call.principal, id)
    view = await call.context.service.find(id, bodies=query.bodies, trace=query.trace)
    call.principal.check_own(view.group)
    return ApiReply(200, _view_body(view, bodies=query.bodies))


async def search(call: ApiCall) -> ApiReply:
    """Search transactions by id, key, header, time or record, a page at a time."""
    page = await searched(call.context.service, cast(SearchQuery, call.query), call.principal)
    return ApiReply(
        200,
        SearchBody(
            transactions=[_view_body(view, bodies=False) for view in page.transactions],
            next_cursor=page.next_cursor,
            done=page.done,
            records=page.records,
            unread=page.unread,
        ),
    )


async def searched(service: Service, query: SearchQuery, principal: Principal) -> SearchPage:
    """Return a page of a search for a principal.

    Raises:
        BadRequest: it has no term, or one that nothing can match.
        NotPermitted: the principal may not see what it searches for.
    """
    content = (query.key, query.key_base64, query.header)
    if any(term is not None for term in content) and not principal.sees_bodies:
        raise NotPermitted("a viewer sees no message bodies: search without key and header")
    request = within_groups(_search_request(query), principal)
    return await service.search(request)


def _search_request(query: SearchQuery) -> SearchRequest:
    if query.key is not None and query.key_base64 is not None:
        raise BadRequest("key and key_base64: give one of them", path="key_base64")
    key = None if query.key is None else query.key.encode()
    if query.key_base64 is not None:
        key = base64.b64decode(query.key_base64)
    id = None
    if query.id is not None:
        id = query.id.upper() if query.id.isascii() else query.id
        if not set(id) <= set(ALPHABET):
            raise BadRequest("id has other characters than transaction ids have", path="id")
    name, sign, value = (query.header or "").partition("=")
    if query.header is not None and not (name and sign):
        raise BadRequest("header is no name and value: give it as name=value", path="header")
    if query.to_ms is not None and (query.from_ms or 0) >= query.to_ms:
        raise BadRequest(
            "the time range is empty: from_ms (--since) has to be before to_ms (--until)",
            path="to_ms",
        )
    request = SearchRequest(
        id=id,
        key=key,
        header=None if query.header is None else (name, value.encode()),
        **{field: getattr(query, field) for field in _PLAIN_TERMS},
    )
    if request == SearchRequest(cursor=request.cursor):
        raise BadRequest("there is no term: give an id, key, header, time, group, topic or record")
    return request


async def list_(call: ApiCall) -> ApiReply:
    """List transactions by time of preparation: those in `state`, else all unsettled."""
    query = cast(ListQuery, call.query)
    given = ListRequest(**{name: getattr(query, name) for name in query.__struct_fields__})
    request = within_groups(given, call.principal)
    page = await call.context.service.list(request)
    count = _fitting(page)
    if count < len(page.transactions):
        page = await call.context.service.list(msgspec.structs.replace(request, limit=count))
    return ApiReply(
        200,
        PageBody(
            # Owners of an older build include other groups.
            transactions=[
                _view_body(view, bodies=False)
                for view in page.transactions
                if view.group in call.principal.groups
            ],
            next_cursor=page.next_cursor,
        ),
    )


def _fitting(page: TransactionPage) -> int:
    """Return how many transactions of a page fit into one answer, at least one."""
    counts = accumulate(len(view.messages) for view in page.transactions)
    return max(1, sum(count <= LISTED_MESSAGES_MAX for count in counts))


def _status_reply(status: TransactionStatus) -> ApiReply:
    body = StandingBody(id=status.id, state=status.state, decision=status.decision)
    return ApiReply(201 if status.created else 200, body)


def _view_body(view: TransactionView, *, bodies: bool) -> TransactionBody:
    fields = {name: getattr(view, name) for name in _VIEW_FIELDS}
    if not view.attempts_known:
        fields |= dict.fromkeys(_ATTEMPTS)
    messages = [_message_body(placed, bodies=bodies) for placed in view.messages]
    return TransactionBody(messages=messages, **fields)


def _message_body(placed: PlacedMessage, *, bodies: bool) -> PlacedBody:
    fields = message_to_json(placed.message) if bodies and placed.message is not None else {}
    fields.update(topic=placed.topic, partition=placed.partition, offset=placed.offset)
    return PlacedBody(**fields)


OPERATIONS = (
    Operation(
        prepare,
        "POST /v1/transactions",
        {201: StandingBody, 200: StandingBody},
        body=PrepareBody,
        errors=(
            BadId, IdConflict, IdExpired, BodyLost, UnknownTopic, BadTarget, BadSchedule,
            *_UNREACHABLE,
        ),
        roles=WRITERS,
        prepares=True,
        direct=True,
    ),
    Operation(
        list_,
        "GET /v1/transactions",
        {200: PageBody},
        query=ListQuery,
        errors=_UNREACHABLE,
        admin=True,
    ),
    Operation(
        search,
        "GET /v1/search",
        {200: SearchBody},
        query=SearchQuery,
        errors=(NotFound, TooOld, *_UNREACHABLE),
        admin=True,
    ),
    Operation(
        find,
        "GET /v1/transactions/{id}",
        {200: TransactionBody},
        query=FindQuery,
        errors=_BY_ID,
    ),
    Operation(
        commit,
        "POST /v1/transactions/{id}/commit",
        {200: StandingBody},
        body=CommitBody,
        body_optional=True,
        roles=WRITERS,
        direct=True,
        errors=(WrongGroup, AlreadyDecided, BodyLost, UnknownTopic, BadTarget, *_BY_ID),
    ),
    Operation(
        rollback,
        "POST /v1/transactions/{id}/rollback",
        {200: StandingBody},
        body=RollbackBody,
        body_optional=True,
        roles=WRITERS,
        direct=True,
        errors=(WrongGroup, AlreadyDecided, *_BY_ID),
    ),
    Operation(
        check,
        "POST /v1/transactions/{id}/check",
        {200: StandingBody},
        body=ReasonBody,
        body_optional=True,
        roles=ONLY_OPERATORS,
        errors=(NotPending, Overloaded, *_BY_ID),
        admin=True,
    ),
    Operation(
        revive,
        "POST /v1/transactions/{id}/revive",
        {200: StandingBody},
        body=ReasonBody,
        body_optional=True,
        roles=ONLY_OPERATORS,
        errors=(NotPending, *_BY_ID),
        admin=True,
    ),
)  # fmt: skip
