"""The calls on producer groups."""

from typing import cast

from msgspec import structs

from txbroker.checkers.http import try_group
from txbroker.contract.policy import QUERY_MASK, GroupPolicy, PolicyError, without_query
from txbroker.errors import BadRequest, KafkaDown, NotPermitted, UnknownGroup
from txbroker.principals import Role
from txbroker.proxy.http.bodies import GroupAnswer, GroupBody, GroupsBody, RemovedBody, TestedBody
from txbroker.proxy.http.context import check_group
from txbroker.proxy.http.operations import (
    ONLY_OPERATORS,
    WHO_LOOKS,
    WHO_WRITES,
    ApiCall,
    ApiReply,
    Operation,
)
from txbroker.proxy.observe.logging import get_logger

log = get_logger(__name__)

GROUPS_OF_SHARE_MAX = 1000
"""Registered groups of one principal: every proxy keeps all groups in memory."""


async def put_group(call: ApiCall) -> ApiReply:
    """Register a group, or replace what is registered."""
    group = call.path["group"]
    check_group(group)
    call.principal.check_group(group)
    policy = GroupPolicy(**structs.asdict(cast(GroupBody, call.body)))
    try:
        policy.validate()
    except PolicyError as error:
        raise BadRequest(str(error)) from None
    _refuse(call.shell.checks.unusable(group, policy))
    _check_registered(call, group)
    registering = call.shell.registering
    registering.append(group)
    try:
        _refuse(await call.shell.checks.refuse(group, policy))
        await call.shell.groups.put(group, policy)
    finally:
        registering.remove(group)
    log.info("group registered", group=group, by=call.principal.by(f"http {call.remote}"))
    return ApiReply(200, _shown(call, group, policy))


async def get_group(call: ApiCall) -> ApiReply:
    """Tell what is registered of a group."""
    group = call.path["group"]
    call.principal.check_group(group)
    policy = call.shell.groups.policies.get(group)
    if policy is None:
        raise UnknownGroup(call.shell.groups.problem(group))
    return ApiReply(200, _shown(call, group, policy))


async def delete_group(call: ApiCall) -> ApiReply:
    """Remove what is registered of a group."""
    group = call.path["group"]
    call.principal.check_group(group)
    if not await call.shell.groups.remove(group):
        raise UnknownGroup
    log.info("group removed", group=group, by=call.principal.by(f"http {call.remote}"))
    return ApiReply(200, RemovedBody(group=group, removed=True))


async def test_group(call: ApiCall) -> ApiReply:
    """Send a test call to a group's check URL, which is no check."""
    group = call.path["group"]
    call.principal.check_group(group)
    policy = call.shell.groups.policies.get(group)
    if policy is None:
        raise UnknownGroup(call.shell.groups.problem(group))
    shell = call.shell
    tried = await try_group(shell.checks, group, policy, shell.settings.check_timeout_s)
    body = TestedBody(
        group=group,
        answered=tried.answered,
        endpoint=tried.endpoint,
        status=tried.status,
        why=tried.why,
    )
    return ApiReply(200, body)


async def list_groups(call: ApiCall) -> ApiReply:
    """List registered groups by name."""
    shown = [
        _shown(call, group, policy)
        for group, policy in call.shell.groups.list()
        if group in call.principal.groups
    ]
    return ApiReply(200, GroupsBody(groups=shown))


def _refuse(why: str | None) -> None:
    if why is not None:
        raise BadRequest(why)


def _check_registered(call: ApiCall, group: str) -> None:
    """Refuse a new group where those of its share, with those whose registration is under way,
    fill what one share may register. Operators are not bound.

    Raises:
        NotPermitted: they do.
    """
    groups, share_of = call.shell.groups, call.shell.principals().share_of
    share = share_of(group)
    if share == group or group in groups or call.principal.role is Role.OPERATOR:
        return
    under_way = {name for name in call.shell.registering if name != group and name not in groups}
    counted = sum(share_of(name) == share for name in (*groups.names(), *under_way))
    if counted >= GROUPS_OF_SHARE_MAX:
        raise NotPermitted(
            f"{GROUPS_OF_SHARE_MAX} groups of the principal of group {group!r} are registered, its "
            "limit: have an operator remove some or register it"
        )


def _shown(call: ApiCall, group: str, policy: GroupPolicy) -> GroupAnswer:
    sessions = call.shell.sessions.askable(group)
    fields = structs.asdict(policy)
    if policy.check_url is not None:
        fields["check_url"] = without_query(policy.check_url, QUERY_MASK)
    problem = call.shell.checks.unusable(group, policy)
    return GroupAnswer(group=group, sessions=sessions, problem=problem, **fields)


OPERATIONS = (
    Operation(
        "put_group",
        "PUT",
        "/v1/groups/{group}",
        "Register a producer group, or replace what is registered",
        put_group,
        {200: GroupAnswer},
        body=GroupBody,
        roles=WHO_WRITES,
        errors=(KafkaDown,),
    ),
    Operation(
        "get_group",
        "GET",
        "/v1/groups/{group}",
        "Tell what is registered of a group",
        get_group,
        {200: GroupAnswer},
        errors=(UnknownGroup,),
    ),
    Operation(
        "delete_group",
        "DELETE",
        "/v1/groups/{group}",
        "Remove what is registered of a group",
        delete_group,
        {200: RemovedBody},
        errors=(UnknownGroup, KafkaDown),
        roles=ONLY_OPERATORS,
        admin=True,
    ),
    Operation(
        "test_group",
        "POST",
        "/v1/groups/{group}/test",
        "Call a group's check URL without asking for anything: can it be reached?",
        test_group,
        {200: TestedBody},
        errors=(UnknownGroup,),
        roles=ONLY_OPERATORS,
        admin=True,
    ),
    Operation(
        "list_groups",
        "GET",
        "/v1/groups",
        "List registered groups by name",
        list_groups,
        {200: GroupsBody},
        roles=WHO_LOOKS,
        admin=True,
    ),
)
