"""The operations on producer groups."""

import secrets
import time
from http import HTTPStatus
from typing import cast

from msgspec import structs

from txbroker.checkers.base import Answered, CheckCall
from txbroker.checkers.http import try_group
from txbroker.checkers.sessions import SessionChannel
from txbroker.contract.groups import (
    GroupAnswer,
    GroupsBody,
    RemovedBody,
    TestedBody,
    TestSignature,
)
from txbroker.contract.policy import QUERY_MASK, GroupPolicy, PolicyError, without_query
from txbroker.core.records import CheckReason
from txbroker.core.routing import make_id
from txbroker.errors import BadRequest, KafkaDown, NotPermitted, UnknownGroup
from txbroker.principals import ONLY_OPERATORS, READERS, WRITERS, Role
from txbroker.proxy.admission import check_group
from txbroker.proxy.http.bodies import GroupBody
from txbroker.proxy.http.operations import ApiCall, ApiReply, Operation
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

GROUPS_OF_SHARE_MAX = 1000
"""Registered groups of one principal: every proxy keeps all groups in memory."""


async def put_group(call: ApiCall) -> ApiReply:
    """Register a producer group, or replace its policy."""
    group, context = call.path["group"], call.context
    check_group(group)
    call.principal.check_group(group)
    policy = GroupPolicy(**structs.asdict(cast(GroupBody, call.body)))
    try:
        policy.validate()
    except PolicyError as error:
        raise BadRequest(str(error)) from None
    _refuse(context.checks.unusable(group, policy))
    _check_room(call, group)
    context.registering.append(group)
    try:
        _refuse(await context.checks.refuse(group, policy))
        await context.groups.put(group, policy)
    finally:
        context.registering.remove(group)
    log.info("group registered", group=group, by=call.principal.by(f"http {call.remote}"))
    return ApiReply(200, _group_answer(call, group, policy))


async def get_group(call: ApiCall) -> ApiReply:
    """Return the policy of a registered group."""
    group, policy = _registered(call)
    return ApiReply(200, _group_answer(call, group, policy))


async def delete_group(call: ApiCall) -> ApiReply:
    """Remove the policy of a group."""
    group = call.path["group"]
    call.principal.check_group(group)
    if not await call.context.groups.remove(group):
        raise UnknownGroup
    log.info("group removed", group=group, by=call.principal.by(f"http {call.remote}"))
    return ApiReply(200, RemovedBody(group=group, removed=True))


async def test_group(call: ApiCall) -> ApiReply:
    """Ask a group as a check does, about no existing transaction.

    Its check URL gets a test call; without one, a connected instance gets a check of a transaction
    that does not exist. The answer decides nothing.
    """
    group, context = call.path["group"], call.context
    call.principal.check_group(group)
    policy = context.groups.policies.get(group) or GroupPolicy()
    timeout_s = context.settings.check_timeout_s
    began_s = time.monotonic()
    if policy.check_url is not None:
        result = await try_group(context.checks, group, policy, timeout_s)
        tested = TestedBody(group=group, answered=result.answered, **structs.asdict(result))
        signature = _signature(policy, result.status)
        tested = structs.replace(tested, signature=signature)
    else:
        channel = context.sessions.acquire(group, "")
        if channel is None and group not in context.groups.policies:
            raise UnknownGroup(
                context.groups.problem(group)
                or f"group {group!r} is not registered, and none of its instances is connected to "
                "this proxy with a check function"
            )
        tested = await _ask_instance(call, group, channel, policy.timeout_s or timeout_s)
    took_ms = round(1000 * (time.monotonic() - began_s), 1)
    return ApiReply(200, structs.replace(tested, took_ms=took_ms))


async def _ask_instance(
    call: ApiCall, group: str, channel: SessionChannel | None, timeout_s: float
) -> TestedBody:
    """Ask an instance about a new id, which no transaction has."""
    if channel is None:
        why = "no check URL is registered, and no instance that checks is connected to this proxy"
        return TestedBody(group=group, answered=False, why=why)
    now_ms = call.context.service.now_ms()
    id = make_id(0, now_ms, secrets.randbits(64))
    check = CheckCall(id, group, 1, 1, CheckReason.ASKED, now_ms, ())
    try:
        result = await channel.ask(check, timeout_s)
    finally:
        channel.release()
    if isinstance(result, Answered):
        return TestedBody(
            group=group, answered=True, endpoint=channel.endpoint, answer=result.decision
        )
    return TestedBody(group=group, answered=False, endpoint=channel.endpoint, why=result.detail)


def _signature(policy: GroupPolicy, status: int | None) -> TestSignature | None:
    if policy.secret_ref is None:
        return None
    if status is None:
        return "unknown"
    if 200 <= status < 300:
        return "accepted"
    return "refused" if status == HTTPStatus.UNAUTHORIZED else "unknown"


async def list_groups(call: ApiCall) -> ApiReply:
    """List registered groups by name."""
    answers = [
        _group_answer(call, group, policy)
        for group, policy in call.context.groups.list()
        if group in call.principal.groups
    ]
    return ApiReply(200, GroupsBody(groups=answers))


def _registered(call: ApiCall) -> tuple[str, GroupPolicy]:
    group = call.path["group"]
    call.principal.check_group(group)
    policy = call.context.groups.policies.get(group)
    if policy is None:
        raise UnknownGroup(call.context.groups.problem(group))
    return group, policy


def _refuse(why: str | None) -> None:
    if why is not None:
        raise BadRequest(why)


def _check_room(call: ApiCall, group: str) -> None:
    """Refuse a new group if its principal's groups, with registrations in flight, reach the limit.
    Operators have no limit."""
    groups, share_of = call.context.groups, call.context.principals().share_of
    share = share_of(group)
    if share == group or group in groups or call.principal.role is Role.OPERATOR:
        return
    registering = set(call.context.registering)
    in_flight = {name for name in registering if name != group and name not in groups}
    count = sum(share_of(name) == share for name in (*groups.names(), *in_flight))
    if count >= GROUPS_OF_SHARE_MAX:
        raise NotPermitted(
            f"the principal of group {group!r} has {GROUPS_OF_SHARE_MAX} registered groups, its "
            "limit: have an operator remove some or register it"
        )


def _group_answer(call: ApiCall, group: str, policy: GroupPolicy) -> GroupAnswer:
    sessions = call.context.sessions.askable(group)
    fields = structs.asdict(policy)
    if policy.check_url is not None:
        fields["check_url"] = without_query(policy.check_url, QUERY_MASK)
    problem = call.context.checks.unusable(group, policy)
    return GroupAnswer(group=group, sessions=sessions, problem=problem, **fields)


OPERATIONS = (
    Operation(
        put_group,
        "PUT /v1/groups/{group}",
        {200: GroupAnswer},
        body=GroupBody,
        roles=WRITERS,
        errors=(KafkaDown,),
    ),
    Operation(
        get_group,
        "GET /v1/groups/{group}",
        {200: GroupAnswer},
        errors=(UnknownGroup,),
    ),
    Operation(
        delete_group,
        "DELETE /v1/groups/{group}",
        {200: RemovedBody},
        errors=(UnknownGroup, KafkaDown),
        roles=ONLY_OPERATORS,
        admin=True,
    ),
    Operation(
        test_group,
        "POST /v1/groups/{group}/test",
        {200: TestedBody},
        errors=(UnknownGroup,),
        roles=ONLY_OPERATORS,
        admin=True,
    ),
    Operation(
        list_groups,
        "GET /v1/groups",
        {200: GroupsBody},
        roles=READERS,
        admin=True,
    ),
)
