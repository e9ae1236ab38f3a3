"""The pages of producer groups: all of them, and one; and that of operators' actions."""

from collections.abc import Iterator
from dataclasses import dataclass

from txbroker.contract.policy import GroupPolicy
from txbroker.contract.service import INSTANCES_SHOWN_MAX, GroupOverview, HistoryRequest, Overview
from txbroker.proxy.admission import check_group
from txbroker.proxy.console.actions import Action
from txbroker.proxy.console.facts import actions_of, hour_of, overview_of
from txbroker.proxy.console.site import HtmlPage, PageRequest, Redirect, Route
from txbroker.proxy.http.context import seen_by
from txbroker.proxy.observe.counting import ACTIONS_MAX

GROUPS_SHOWN_MAX = 250
CHECKS_SHOWN_MAX = 20


@dataclass(frozen=True)
class GroupRow:
    """A group on the page of groups."""

    overview: GroupOverview
    policy: GroupPolicy | None
    problem: str | None


async def groups(request: PageRequest) -> HtmlPage | Redirect:
    """Show the producer groups: reachability and undecided transactions."""
    stats = await overview_of(request)
    name = request.query.get("name", "").strip()
    rows = [row for row in _rows(request, stats) if name.lower() in row.overview.group.lower()]
    values = {
        "overview": stats,
        "rows": rows[:GROUPS_SHOWN_MAX],
        "more": max(0, len(rows) - GROUPS_SHOWN_MAX) + stats.groups_left_off,
        "name": name,
        "actions": actions_of(request),
    }
    return HtmlPage("groups.html", values)


def _rows(request: PageRequest, stats: Overview) -> Iterator[GroupRow]:
    """Yield every known group, those that need attention first."""
    registered = {n: p for n, p in request.context.groups.list() if n in request.principal.groups}
    for group in stats.groups:
        policy = registered.pop(group.group, None)
        yield GroupRow(group, policy, request.context.groups.problem(group.group))
    for name, policy in registered.items():
        group = GroupOverview(name, check_url=bool(policy.check_url))
        yield GroupRow(group, policy, request.context.groups.problem(name))


async def group(request: PageRequest) -> HtmlPage | Redirect:
    """Show one producer group: whether it can be asked, what its checks brought, its policy."""
    name = request.query.get("name", "").strip()
    check_group(name)
    request.principal.check_group(name)
    stats = await overview_of(request)
    row = next((row for row in _rows(request, stats) if row.overview.group == name), None)
    hour = await hour_of(request, name)
    values = {
        "name": name,
        "overview": stats,
        "hour": hour,
        "checks": hour.history.checks[:CHECKS_SHOWN_MAX],
        "instances": hour.history.instances[:INSTANCES_SHOWN_MAX],
        "row": row or GroupRow(GroupOverview(name), None, None),
        "known": row is not None,
        "actions": actions_of(request),
    }
    return HtmlPage("group.html", values)


async def audit(request: PageRequest) -> HtmlPage | Redirect:
    """Show what operators did: who, what, why and when."""
    found = await request.context.service.history(HistoryRequest(since_s=1, actions=True))
    since = sorted(found.actions_since_ms.items())
    values = {
        "history": seen_by(found, request.principal),
        "since_ms": max((at_ms for _, at_ms in since), default=None),
        "older": since if len({at_ms for _, at_ms in since}) > 1 else (),
        "most": ACTIONS_MAX,
        "words": {action.word: action.done for action in Action},
    }
    return HtmlPage("audit.html", values)


ROUTES = (
    Route("GET", "/groups", groups),
    Route("GET", "/group", group),
    Route("GET", "/audit", audit),
)
